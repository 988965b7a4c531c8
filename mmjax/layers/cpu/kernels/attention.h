// Attention of one token a request over the paged cache, in the vectors of whatever instruction set
// this is compiled for. Everything here is in an unnamed namespace, as in tiles.h.
#pragma once

#include <cstddef>
#include <cstdint>

#include "products.h"

namespace mmjax {
namespace {

#ifdef __AVX512F__
constexpr int kLanes = 16;
constexpr int kValueVectors = 4;  // of sums that stay in registers, for each of kHeads heads
#else
constexpr int kLanes = 8;
constexpr int kValueVectors = 2;
#endif
constexpr int kHeads = 4;

using Floats = float __attribute__((vector_size(kLanes * 4)));
using Ints = int32_t __attribute__((vector_size(kLanes * 4)));
using Halfwords = uint16_t __attribute__((vector_size(kLanes * 2)));

inline Floats as_floats(Ints bits) { return reinterpret_cast<Floats>(bits); }
inline Ints as_ints(Floats x) { return reinterpret_cast<Ints>(x); }

inline Floats load(const float* from, int64_t count = kLanes) {
  Floats out{};
  __builtin_memcpy(&out, from, static_cast<size_t>(count) * sizeof *from);
  return out;
}
inline Floats load(const bf16* from, int64_t count = kLanes) {
  Halfwords out{};
  __builtin_memcpy(&out, from, static_cast<size_t>(count) * sizeof *from);
  return as_floats(__builtin_convertvector(out, Ints) << 16);
}
inline void store(Floats x, float* to, int64_t count = kLanes) {
  __builtin_memcpy(to, &x, static_cast<size_t>(count) * sizeof *to);
}

// e to the power of x, up to two units in the last place; of less than -87, e to the power of -87.
// The polynomial is that of Cephes' expf.
inline Floats exp(Floats x) {
  const Floats least = Floats{} - 87.0f;
  x = as_floats((as_ints(x) & (x > least)) | (as_ints(least) & ~(x > least)));
  const float magic = 12582912.0f;  // 1.5 * 2^23: what is added to it is rounded to an integer
  const Floats shifted = x * 1.44269504f + magic;
  const Floats n = shifted - magic;
  const Floats r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Floats y = r * 1.9875691500e-4f + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * (r * r) + r + 1.0f;
  return y * as_floats((__builtin_convertvector(n, Ints) + 127) << 23);
}

inline Floats tanh(Floats x) {
  const Floats most = Floats{} + 9.0f;  // from here on tanh is 1 in float
  const Ints is_below = x < most;
  x = as_floats((as_ints(x) & is_below) | (as_ints(most) & ~is_below));
  return 1.0f - 2.0f / (exp(2.0f * x) + 1.0f);
}

// Lanes whose slots are within [begin, end); `first` is the slot of lane 0.
inline Ints within(int64_t first, int64_t begin, int64_t end) {
  Ints slot;
  for (int i = 0; i < kLanes; ++i) slot[i] = i;
  return (slot >= static_cast<int32_t>(begin - first)) & (slot < static_cast<int32_t>(end - first));
}

inline float max_of_lanes(Floats x) {
  float out = x[0];
  for (int i = 1; i < kLanes; ++i) out = x[i] > out ? x[i] : out;
  return out;
}
inline float sum_of_lanes(Floats x) {
  float out = 0;
  for (int i = 0; i < kLanes; ++i) out += x[i];
  return out;
}

template <typename T>
inline int64_t block_of(const PagedTile<T>& tile, int64_t index) {
  const int64_t id = tile.table[index];
  return id < 0 ? 0 : id < tile.num_blocks ? id : tile.num_blocks - 1;
}

template <typename T>
inline const T* keys_of(const PagedTile<T>& tile, int64_t index) {
  const int64_t place = block_of(tile, index) * tile.num_kv_heads + tile.kv_head;
  return tile.keys + place * tile.head_dim * tile.block_size;
}
template <typename T>
inline const T* values_of(const PagedTile<T>& tile, int64_t index) {
  const int64_t place = block_of(tile, index) * tile.num_kv_heads + tile.kv_head;
  return tile.values + place * tile.block_size * tile.value_dim;
}

// Scores of one block's keys with kCount heads: scores[head][offset + slot].
template <typename T, int kCount>
inline void score_block(const PagedTile<T>& tile, const T* keys, const T* next,
                        const float (*query)[kMaxHeadDim], float (*scores)[kMaxChunkSlots],
                        int64_t offset) {
  const int64_t slots = tile.block_size;
  int64_t slot = 0;
  for (; slot + 2 * kLanes <= slots; slot += 2 * kLanes) {
    Floats sums[kCount][2] = {};
    for (int64_t d = 0; d < tile.head_dim; ++d) {
      const Floats first = load(keys + d * slots + slot);
      const Floats second = load(keys + d * slots + slot + kLanes);
      __builtin_prefetch(next + d * slots + slot);
      for (int z = 0; z < kCount; ++z) {
        sums[z][0] += first * query[z][d];
        sums[z][1] += second * query[z][d];
      }
    }
    for (int z = 0; z < kCount; ++z) {
      store(sums[z][0], scores[z] + offset + slot);
      store(sums[z][1], scores[z] + offset + slot + kLanes);
    }
  }
  for (; slot < slots; slot += kLanes) {
    Floats sums[kCount] = {};
    for (int64_t d = 0; d < tile.head_dim; ++d) {
      const Floats key = load(keys + d * slots + slot);
      for (int z = 0; z < kCount; ++z) sums[z] += key * query[z][d];
    }
    for (int z = 0; z < kCount; ++z) store(sums[z], scores[z] + offset + slot);
  }
}

// Turn the scores of slots [begin, end) into weights, others into zeros; return their maximum.
inline float weigh(float* scores, int64_t num_slots, int64_t begin, int64_t end, float soft_cap,
                   float* total) {
  const Floats lowest = Floats{} - 1e30f;
  Floats peaks = lowest;
  for (int64_t slot = 0; slot < num_slots; slot += kLanes) {
    Floats x = load(scores + slot);
    if (soft_cap > 0) x = tanh(x / soft_cap) * soft_cap;
    const Ints is_visible = within(slot, begin, end);
    x = as_floats((as_ints(x) & is_visible) | (as_ints(lowest) & ~is_visible));
    store(x, scores + slot);
    const Ints is_more = x > peaks;
    peaks = as_floats((as_ints(x) & is_more) | (as_ints(peaks) & ~is_more));
  }
  const float peak = max_of_lanes(peaks);
  Floats sums{};
  for (int64_t slot = 0; slot < num_slots; slot += kLanes) {
    const Floats weights = exp(load(scores + slot) - peak);
    const Floats visible = as_floats(as_ints(weights) & within(slot, begin, end));
    store(visible, scores + slot);
    sums += visible;
  }
  *total = sum_of_lanes(sums);
  return peak;
}

// Sums of kVectors vectors of the values, weighted for kCount heads; the last has `last` lanes.
template <typename T, int kCount, int kVectors>
inline void add_values(const PagedTile<T>& tile, int64_t first_block, int64_t begin, int64_t end,
                       const float (*weights)[kMaxChunkSlots], int64_t column, int64_t last,
                       float* out) {
  Floats sums[kCount][kVectors] = {};
  const int64_t slots = tile.block_size;
  for (int64_t slot = begin; slot < end;) {
    const int64_t index = slot / slots;
    const int64_t stop = end < (index + 1) * slots ? end : (index + 1) * slots;
    const T* values = values_of(tile, first_block + index);
    for (; slot < stop; ++slot) {
      const T* value = values + (slot - index * slots) * tile.value_dim + column;
      for (int v = 0; v < kVectors; ++v) {
        const Floats x = v + 1 < kVectors || last == kLanes ? load(value + v * kLanes)
                                                            : load(value + v * kLanes, last);
        for (int z = 0; z < kCount; ++z) sums[z][v] += x * weights[z][slot];
      }
    }
  }
  for (int z = 0; z < kCount; ++z) {
    for (int v = 0; v < kVectors; ++v) {
      store(sums[z][v], out + z * tile.value_dim + column + v * kLanes,
            v + 1 < kVectors ? kLanes : last);
    }
  }
}

template <typename T, int kCount>
inline void attend_heads(const PagedTile<T>& tile, int64_t head, int64_t first_block,
                         int64_t begin, int64_t end, float* peak, float* total, float* out) {
  float query[kCount][kMaxHeadDim];
  float scores[kCount][kMaxChunkSlots];
  const int64_t slots = tile.block_size;
  for (int z = 0; z < kCount; ++z) {
    const T* from = tile.query + (head + z) * tile.head_dim;
    for (int64_t d = 0; d < tile.head_dim; ++d) query[z][d] = load(from + d, 1)[0];
  }
  for (int64_t index = begin / slots; index * slots < end; ++index) {
    const bool is_last = (index + 1) * slots >= end;
    const T* keys = keys_of(tile, first_block + index);
    const T* next = is_last ? keys : keys_of(tile, first_block + index + 1);
    score_block<T, kCount>(tile, keys, next, query, scores, index * slots);
  }
  const int64_t from = begin / slots * slots, to = (end + slots - 1) / slots * slots;
  for (int z = 0; z < kCount; ++z) {
    peak[head + z] = weigh(scores[z] + from, to - from, begin - from, end - from, tile.soft_cap,
                           total + head + z);
  }
  float* rows = out + head * tile.value_dim;
  int64_t column = 0;
  for (; column + kValueVectors * kLanes <= tile.value_dim; column += kValueVectors * kLanes) {
    add_values<T, kCount, kValueVectors>(tile, first_block, begin, end, scores, column, kLanes,
                                         rows);
  }
  for (; column < tile.value_dim; column += kLanes) {
    const int64_t left = tile.value_dim - column;
    add_values<T, kCount, 1>(tile, first_block, begin, end, scores, column,
                             left < kLanes ? left : kLanes, rows);
  }
}

// A head's sums depend on nothing but its query and the keys that it sees: not on the heads beside
// it, for each has its own lanes, nor on what other requests there are.
template <typename T>
void attend_chunk(const PagedTile<T>& tile, int64_t first_block, int64_t begin, int64_t end,
                  float* peak, float* total, float* out) {
  int64_t head = 0;
  for (; head + kHeads <= tile.num_heads; head += kHeads) {
    attend_heads<T, kHeads>(tile, head, first_block, begin, end, peak, total, out);
  }
  for (; head < tile.num_heads; ++head) {
    attend_heads<T, 1>(tile, head, first_block, begin, end, peak, total, out);
  }
}

}  // namespace
}  // namespace mmjax
