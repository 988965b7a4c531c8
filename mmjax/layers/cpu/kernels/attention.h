// Attention over the paged cache. Everything here is in an unnamed namespace, as in tiles.h.
#pragma once

#include <cstddef>
#include <cstdint>

#include "products.h"
#include "vectors.h"

namespace mmjax {
namespace {

#ifdef __AVX512F__
constexpr int kValueVectors = 4;  // of sums that stay in registers, for each of kQueries queries
#else
constexpr int kValueVectors = 2;
#endif
constexpr int kQueries = 4;

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

// Up to 0.625 a polynomial, that of Cephes' tanhf: the other form has no digits left near 0.
inline Floats tanh(Floats x) {
  const Floats most = Floats{} + 9.0f;  // from here on tanh is 1 in float
  const Floats z = x * x;
  Floats y = z * -5.70498872745e-3f + 2.06390887954e-2f;
  y = y * z - 5.37397155531e-2f;
  y = y * z + 1.33314422036e-1f;
  y = y * z - 3.33332819422e-1f;
  const Floats near = y * z * x + x;
  const Ints is_below = x < most;
  x = as_floats((as_ints(x) & is_below) | (as_ints(most) & ~is_below));
  const Floats far = 1.0f - 2.0f / (exp(2.0f * x) + 1.0f);
  const Ints is_near = z < Floats{} + 0.625f * 0.625f;
  return as_floats((as_ints(near) & is_near) | (as_ints(far) & ~is_near));
}

inline float max_of_lanes(Floats x) {
  float out = x[0];
  for (int i = 1; i < kLanes; ++i) out = x[i] > out ? x[i] : out;
  return out;
}
template <typename T>
inline int64_t block_of(const PagedHead<T>& head, int64_t index) {
  const int64_t id = head.table[index];
  return id < 0 ? 0 : id < head.num_blocks ? id : head.num_blocks - 1;
}

template <typename T>
inline const T* keys_of(const PagedHead<T>& head, int64_t index) {
  const int64_t place = block_of(head, index) * head.num_kv_heads + head.kv_head;
  return head.keys + place * head.head_dim * head.block_size;
}
template <typename T>
inline const T* values_of(const PagedHead<T>& head, int64_t index) {
  const int64_t place = block_of(head, index) * head.num_kv_heads + head.kv_head;
  return head.values + place * head.block_size * head.value_dim;
}

// Scores of one block's keys with kCount queries: scores[query][offset + slot].
template <typename T, int kCount>
inline void score_block(const PagedHead<T>& head, const T* keys, const T* next,
                        const float (*query)[kMaxHeadDim], float (*scores)[kMaxChunkSlots],
                        int64_t offset) {
  const int64_t slots = head.block_size;
  int64_t slot = 0;
  for (; slot + 2 * kLanes <= slots; slot += 2 * kLanes) {
    Floats sums[kCount][2] = {};
    for (int64_t d = 0; d < head.head_dim; ++d) {
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
    const int64_t count = slots - slot < kLanes ? slots - slot : kLanes;
    Floats sums[kCount] = {};
    for (int64_t d = 0; d < head.head_dim; ++d) {
      const T* from = keys + d * slots + slot;
      const Floats key = count == kLanes ? load(from) : load(from, count);
      for (int z = 0; z < kCount; ++z) sums[z] += key * query[z][d];
    }
    for (int z = 0; z < kCount; ++z) store(sums[z], scores[z] + offset + slot, count);
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

// Sums of kVectors vectors of the values, weighted for kCount queries; the last has `last` lanes.
template <typename T, int kCount, int kVectors>
inline void add_values(const PagedHead<T>& head, int64_t first_block, int64_t begin, int64_t end,
                       const float (*weights)[kMaxChunkSlots], int64_t column, int64_t last,
                       const PagedQuery<T>* queries) {
  Floats sums[kCount][kVectors] = {};
  const int64_t slots = head.block_size;
  for (int64_t slot = begin; slot < end;) {
    const int64_t index = slot / slots;
    const int64_t stop = end < (index + 1) * slots ? end : (index + 1) * slots;
    const T* values = values_of(head, first_block + index);
    for (; slot < stop; ++slot) {
      const T* value = values + (slot - index * slots) * head.value_dim + column;
      for (int v = 0; v < kVectors; ++v) {
        const Floats x = v + 1 < kVectors || last == kLanes ? load(value + v * kLanes)
                                                            : load(value + v * kLanes, last);
        for (int z = 0; z < kCount; ++z) sums[z][v] += x * weights[z][slot];
      }
    }
  }
  for (int z = 0; z < kCount; ++z) {
    for (int v = 0; v < kVectors; ++v) {
      store(sums[z][v], queries[z].out + 2 + column + v * kLanes, v + 1 < kVectors ? kLanes : last);
    }
  }
}

// Queries that stand beside each other see all that one of them sees; what a query does not see has
// the weight 0 there, and adds nothing: its sums are those that it has alone.
template <typename T, int kCount>
inline void attend_queries(const PagedHead<T>& head, int64_t first_block,
                           const PagedQuery<T>* queries) {
  float query[kCount][kMaxHeadDim];
  float scores[kCount][kMaxChunkSlots];
  const int64_t slots = head.block_size;
  int64_t begin = queries[0].begin, end = queries[0].end;
  for (int z = 0; z < kCount; ++z) {
    begin = queries[z].begin < begin ? queries[z].begin : begin;
    end = queries[z].end > end ? queries[z].end : end;
    for (int64_t d = 0; d < head.head_dim; ++d) query[z][d] = load(queries[z].query + d, 1)[0];
  }
  for (int64_t index = begin / slots; index * slots < end; ++index) {
    const bool is_last = (index + 1) * slots >= end;
    const T* keys = keys_of(head, first_block + index);
    const T* next = is_last ? keys : keys_of(head, first_block + index + 1);
    score_block<T, kCount>(head, keys, next, query, scores, index * slots);
  }
  const int64_t from = begin / kLanes * kLanes, to = (end + kLanes - 1) / kLanes * kLanes;
  for (int z = 0; z < kCount; ++z) {
    const int64_t first = queries[z].begin - from, last = queries[z].end - from;
    queries[z].out[0] = weigh(scores[z] + from, to - from, first, last, head.soft_cap,
                              queries[z].out + 1);
  }
  int64_t column = 0;
  for (; column + kValueVectors * kLanes <= head.value_dim; column += kValueVectors * kLanes) {
    add_values<T, kCount, kValueVectors>(head, first_block, begin, end, scores, column, kLanes,
                                         queries);
  }
  for (; column < head.value_dim; column += kLanes) {
    const int64_t left = head.value_dim - column;
    add_values<T, kCount, 1>(head, first_block, begin, end, scores, column,
                             left < kLanes ? left : kLanes, queries);
  }
}

template <typename T>
void attend_chunk(const PagedHead<T>& head, int64_t first_block, const PagedQuery<T>* queries,
                  int64_t num_queries) {
  int64_t q = 0;
  for (; q + kQueries <= num_queries; q += kQueries) {
    attend_queries<T, kQueries>(head, first_block, queries + q);
  }
  for (; q < num_queries; ++q) attend_queries<T, 1>(head, first_block, queries + q);
}

}  // namespace
}  // namespace mmjax
