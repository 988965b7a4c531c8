// AMX: attention over the paged cache, a chunk of it at a time.
//
// Keys and values are packed for all queries of a request that share a head. What a query does not see
// has the weight 0, and its sums are made in one order, so it has the same bits beside any others. A
// few queries, as in decoding, are not worth the packing: their sums are made without tiles, in the
// order of TDPBF16PS (Intel's manual): of 32 numbers those at even and at odd places by themselves.
#include "amx_attention.h"
#include "attention.h"

namespace mmjax {
namespace {

constexpr int64_t kWeightStride = kMaxChunkSlots + kDepth<bf16>;  // as in amx_attention.cc
constexpr int64_t kTileNumbers = kTile * kDepth<bf16>;
static_assert(kMaxChunkSlots % kBlock == 0, "weights have room for whole steps");

// Slots [begin, end) of a chunk; tiles hold those from `first()` on.
struct Slots {
  int64_t begin, end;
  int64_t first() const { return begin / kBlock * kBlock; }
};

const bf16* find_value(const PagedHead<bf16>& head, int64_t first_block, int64_t slot) {
  return values_of(head, first_block + slot / head.block_size) +
         slot % head.block_size * head.value_dim;
}

Slots find_slots(const PagedQuery<bf16>* queries, int64_t count) {
  Slots seen = {queries[0].begin, queries[0].end};
  for (int64_t q = 1; q < count; ++q) {
    seen.begin = least(seen.begin, queries[q].begin);
    seen.end = queries[q].end > seen.end ? queries[q].end : seen.end;
  }
  return seen;
}

// Copy the keys of 16 slots, which are of several blocks, to rows of 16: [head_dim, 16].
void copy_keys(const PagedHead<bf16>& head, int64_t first_block, int64_t slot, int64_t end,
               bf16* rows) {
  __builtin_memset(rows, 0, static_cast<size_t>(head.head_dim * kTile) * sizeof *rows);
  for (int64_t i = 0; i < least(kTile, end - slot); ++i) {
    const int64_t block = (slot + i) / head.block_size, place = (slot + i) % head.block_size;
    const bf16* const keys = keys_of(head, first_block + block) + place;
    for (int64_t d = 0; d < head.head_dim; ++d) rows[d * kTile + i] = keys[d * head.block_size];
  }
}

// Pack keys as weights, whose inputs are a head's numbers: tiles [panels of 32 slots, steps of 32
// numbers, 2].
void pack_keys(const PagedHead<bf16>& head, int64_t first_block, Slots slots, bf16* packed) {
  const int64_t steps = divide_up(head.head_dim, kDepth<bf16>);
  const bool is_aligned = head.block_size % kTile == 0;
  alignas(64) bf16 copy[kMaxHeadDim * kTile];
  for (int64_t slot = slots.first(); slot < slots.end; slot += kTile) {
    const int64_t tile = (slot - slots.first()) / kTile;
    const bf16* keys = copy;
    if (is_aligned) {
      keys = keys_of(head, first_block + slot / head.block_size) + slot % head.block_size;
    } else {
      copy_keys(head, first_block, slot, slots.end, copy);
    }
    const int64_t stride = is_aligned ? head.block_size : kTile;
    const auto load = [&](int64_t d) {
      if (d >= head.head_dim) return _mm256_setzero_si256();
      return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(keys + d * stride));
    };
    for (int64_t step = 0; step < steps; ++step) {
      bf16* const into = packed + (tile / 2 * 2 * steps + 2 * step + tile % 2) * kTileNumbers;
      for (int64_t i = 0; i < kTile; ++i) {
        const int64_t d = step * kDepth<bf16> + 2 * i;
        _mm512_store_si512(into + i * kDepth<bf16>, pair_up(load(d), load(d + 1)));
      }
    }
  }
}

// Pack values as weights, whose inputs are slots: tiles [panels of 32 columns, steps of 32 slots, 2].
// Those that no query sees are zeros.
void pack_values(const PagedHead<bf16>& head, int64_t first_block, Slots slots, bf16* packed) {
  const int64_t steps = divide_up(slots.end - slots.first(), kDepth<bf16>);
  const auto find = [&](int64_t slot) -> const bf16* {
    const bool is_seen = slot >= slots.begin && slot < slots.end;
    return is_seen ? find_value(head, first_block, slot) : nullptr;
  };
  for (int64_t pair = 0; pair < steps * kTile; ++pair) {
    const bf16* const first = find(slots.first() + 2 * pair);
    const bf16* const second = find(slots.first() + 2 * pair + 1);
    bf16* const into = packed + pair / kTile * 2 * kTileNumbers + pair % kTile * kDepth<bf16>;
    for (int64_t column = 0; column < head.value_dim; column += kTile) {
      const __mmask16 is_there = first16(least(head.value_dim - column, kTile));
      const auto load = [&](const bf16* from) {
        if (from == nullptr) return _mm256_setzero_si256();
        return _mm256_maskz_loadu_epi16(is_there, from + column);
      };
      const int64_t tile = column / kBlock * steps * 2 + column / kTile % 2;
      _mm512_store_si512(into + tile * kTileNumbers, pair_up(load(first), load(second)));
    }
  }
}

inline __mmask16 first_of(int64_t count) {
  return first16(count < 0 ? 0 : least(count, kTile));
}

// Cap a row's scores, and put those of slots that are not seen below all others. Returns the largest.
float prepare_scores(float* scores, int64_t row, int64_t num_slots, Slots seen, float soft_cap) {
  const __m512 lowest = _mm512_set1_ps(kLowest);
  __m512 peaks = lowest;
  for (int64_t slot = 0; slot < num_slots; slot += kTile) {
    float* const at = find_row(scores, row, slot / kTile);
    const bool is_seen = slot >= seen.begin && slot + kTile <= seen.end;
    __m512 x = _mm512_load_ps(at);
    if (soft_cap > 0) x = tanh(x / soft_cap) * soft_cap;
    if (!is_seen) {
      const auto some = static_cast<__mmask16>(first_of(seen.end - slot) &
                                               ~first_of(seen.begin - slot));
      x = _mm512_mask_mov_ps(lowest, some, x);
    }
    if (!is_seen || soft_cap > 0) _mm512_store_ps(at, x);
    peaks = _mm512_max_ps(peaks, x);
  }
  return _mm512_reduce_max_ps(peaks);
}

inline __m512 widen_half(__m512i numbers, int half) {
  const __m256i bits = half == 0 ? _mm512_castsi512_si256(numbers)
                                 : _mm512_extracti64x4_epi64(numbers, 1);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

// Turn a row's scores into weights, of which those of slots `seen` are not zero. Writes the largest
// score and the weights' sum, rounded as they are.
void weigh_slots(float* scores, int64_t row, int64_t num_slots, Slots seen, float soft_cap,
                 bf16* weights, float* out) {
  const float peak = prepare_scores(scores, row, num_slots, seen, soft_cap);
  const __m512 log2_e = _mm512_set1_ps(1.44269504f), most = _mm512_set1_ps(peak);
  __m512 totals[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
  for (int64_t slot = 0; slot < num_slots; slot += kBlock) {
    const float* const at = find_row(scores, row, slot / kTile);
    const auto weigh = [&](const float* from) {
      return exp2_of(_mm512_mul_ps(_mm512_sub_ps(_mm512_load_ps(from), most), log2_e));
    };
    const auto rounded = reinterpret_cast<__m512i>(
        _mm512_cvtne2ps_pbh(weigh(at + kTileSums), weigh(at)));
    _mm512_store_si512(weights + slot, rounded);
    totals[0] = _mm512_add_ps(totals[0], widen_half(rounded, 0));
    totals[1] = _mm512_add_ps(totals[1], widen_half(rounded, 1));
  }
  out[0] = peak;
  out[1] = _mm512_reduce_add_ps(_mm512_add_ps(totals[0], totals[1]));
}

// What a thread keeps between calls.
struct Scratch {
  Lines<bf16> keys, values, queries, weights;
  Lines<float> scores, sums;
};

// Attend with up to 32 queries to what was packed of `slots`.
void attend_rows(const PagedHead<bf16>& head, Slots slots, const PagedQuery<bf16>* queries,
                 int64_t rows, const bf16* keys, const bf16* values, Scratch* scratch) {
  const int64_t depth = round_up(head.head_dim, kDepth<bf16>), steps = depth / kDepth<bf16>;
  const int64_t value_steps = divide_up(slots.end - slots.first(), kDepth<bf16>);
  bf16* const inputs = scratch->queries.reserve(kBlock * depth);
  bf16* const weights = scratch->weights.reserve(kBlock * kWeightStride);
  float* const scores = scratch->scores.reserve(kMaxChunkSlots / kBlock * kBlockSums);
  float* const sums = scratch->sums.reserve(divide_up(head.value_dim, kBlock) * kBlockSums);
  __builtin_memset(inputs, 0, static_cast<size_t>(kBlock * depth) * sizeof *inputs);
  for (int64_t r = 0; r < rows; ++r) {
    __builtin_memcpy(inputs + r * depth, queries[r].query,
                     static_cast<size_t>(head.head_dim) * sizeof *inputs);
  }
  const Slots seen = find_slots(queries, rows);
  const int64_t first = seen.first(), num_slots = round_up(seen.end - first, kBlock);
  for (int64_t slot = first; slot < seen.end; slot += kBlock) {
    const auto add = choose_products<bf16>(rows, seen.end - slot);
    add({inputs, depth}, keys + (slot - slots.first()) * depth, steps,
        scores + (slot - first) / kBlock * kBlockSums, true, nullptr, 0);
  }
  for (int64_t r = 0; r < rows; ++r) {
    weigh_slots(scores, r, num_slots, {queries[r].begin - first, queries[r].end - first},
                head.soft_cap, weights + r * kWeightStride, queries[r].out);
  }
  const int64_t first_step = (first - slots.first()) / kDepth<bf16>;
  for (int64_t column = 0; column < head.value_dim; column += kBlock) {
    const auto add = choose_products<bf16>(rows, head.value_dim - column);
    const bf16* const from =
        values + (column / kBlock * value_steps + first_step) * 2 * kTileNumbers;
    add({weights, kWeightStride}, from, num_slots / kDepth<bf16>,
        sums + column / kBlock * kBlockSums, true, nullptr, 0);
  }
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t v = 0; v * kTile < head.value_dim; ++v) {
      _mm512_mask_storeu_ps(queries[r].out + 2 + v * kTile, first_of(head.value_dim - v * kTile),
                            _mm512_load_ps(find_row(sums, r, v)));
    }
  }
}

// Sums of 32 numbers for each of kCount queries, as tiles make them: of a step of 32 inputs those at
// even places, and those at odd ones.
template <int kCount>
class PairSums {
 public:
  // `halves`: which of a vector's first and last 16 numbers are read; factors are `stride` apart.
  PairSums(const __mmask16* halves, const float* factors, int64_t stride)
      : low_(halves[0]), high_(halves[1]), factors_(factors), stride_(stride) {}

  // Add the inputs [begin, end), whose numbers `find(input)` finds.
  template <typename Find>
  void add(int64_t begin, int64_t end, Find find) {
    for (int64_t from = begin / kStep * kStep; from < end; from += kStep) {
      const int64_t to = least(from + kStep, end);
      int64_t i = from < begin ? begin : from;
      if (i % 2 == 1 && i < to) add_one(odd_, find(i), i), ++i;
      for (; i + 2 <= to; i += 2) {
        add_one(even_, find(i), i);
        add_one(odd_, find(i + 1), i + 1);
      }
      if (i < to) add_one(even_, find(i), i);
      end_step();
    }
  }
  __m512 sum(int z, int v) const { return sums_[z][v]; }

 private:
  static constexpr int64_t kStep = kDepth<bf16>;
  using Parts = __m512[kCount][2];

  static __m512 load_floats(const bf16* from, __mmask16 some) {
    const __m512i bits = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(some, from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
  }
  void add_one(Parts& parts, const bf16* numbers, int64_t i) {
    const __m512 low = load_floats(numbers, low_), high = load_floats(numbers + kTile, high_);
    for (int z = 0; z < kCount; ++z) {
      const __m512 factor = _mm512_set1_ps(factors_[z * stride_ + i]);
      parts[z][0] = _mm512_fmadd_ps(low, factor, parts[z][0]);
      parts[z][1] = _mm512_fmadd_ps(high, factor, parts[z][1]);
    }
  }
  void end_step() {
    for (int z = 0; z < kCount; ++z) {
      for (int v = 0; v < 2; ++v) {
        sums_[z][v] = _mm512_add_ps(sums_[z][v], _mm512_add_ps(even_[z][v], odd_[z][v]));
        even_[z][v] = odd_[z][v] = _mm512_setzero_ps();
      }
    }
  }

  const __mmask16 low_, high_;
  const float* const factors_;
  const int64_t stride_;
  Parts sums_ = {}, even_ = {}, odd_ = {};
};

inline void widen(const bf16* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = load(from + i, 1)[0];
}

// Attend without tiles, to blocks of a multiple of 32 slots.
template <int kCount>
void attend_few(const PagedHead<bf16>& head, int64_t first_block, const PagedQuery<bf16>* queries) {
  alignas(64) float inputs[kCount][kMaxHeadDim], weights[kCount][kMaxChunkSlots];
  alignas(64) float scores[kMaxChunkSlots / kBlock * kBlockSums];
  alignas(64) bf16 rounded[kMaxChunkSlots];
  const Slots slots = find_slots(queries, kCount);
  const int64_t first = slots.first(), num_slots = round_up(slots.end - first, kBlock);
  const auto find_keys = [&](int64_t slot) {
    return keys_of(head, first_block + slot / head.block_size) + slot % head.block_size;
  };
  for (int z = 0; z < kCount; ++z) widen(queries[z].query, head.head_dim, inputs[z]);
  for (int64_t slot = first; slot < slots.end; slot += kBlock) {
    const bf16* const keys = find_keys(slot);
    const bf16* const next = slot + kBlock < slots.end ? find_keys(slot + kBlock) : keys;
    const __mmask16 all[2] = {first16(kTile), first16(kTile)};
    PairSums<kCount> sums(all, inputs[0], kMaxHeadDim);
    sums.add(0, head.head_dim, [&](int64_t d) {
      __builtin_prefetch(next + d * head.block_size);
      return keys + d * head.block_size;
    });
    for (int z = 0; z < 2 * kCount; ++z) {
      float* const at = find_row(scores, z / 2, (slot - first) / kTile + z % 2);
      _mm512_store_ps(at, sums.sum(z / 2, z % 2));
    }
  }
  for (int z = 0; z < kCount; ++z) {
    weigh_slots(scores, z, num_slots, {queries[z].begin - first, queries[z].end - first},
                head.soft_cap, rounded, queries[z].out);
    widen(rounded, num_slots, weights[z]);
  }
  const bf16* values[kMaxChunkSlots];
  for (int64_t slot = first; slot < slots.end; slot += kBlock) {
    const bf16* const rows = find_value(head, first_block, slot);
    for (int64_t i = 0; i < kBlock; ++i) values[slot - first + i] = rows + i * head.value_dim;
  }
  for (int64_t column = 0; column < head.value_dim; column += kBlock) {
    const __mmask16 halves[2] = {first_of(head.value_dim - column),
                                 first_of(head.value_dim - column - kTile)};
    PairSums<kCount> sums(halves, weights[0] - first, kMaxChunkSlots);
    sums.add(slots.begin, slots.end, [&](int64_t slot) { return values[slot - first] + column; });
    for (int z = 0; z < 2 * kCount; ++z) {
      float* const out = queries[z / 2].out + 2 + column + z % 2 * kTile;
      _mm512_mask_storeu_ps(out, halves[z % 2], sums.sum(z / 2, z % 2));
    }
  }
}

constexpr int64_t kFewQueries = 4;

void attend_chunk_by_tiles(const PagedHead<bf16>& head, int64_t first_block,
                           const PagedQuery<bf16>* queries, int64_t num_queries) {
  if (num_queries <= kFewQueries && head.block_size % kBlock == 0) {
    int64_t q = 0;
    for (; q + 4 <= num_queries; q += 4) attend_few<4>(head, first_block, queries + q);
    for (; q + 2 <= num_queries; q += 2) attend_few<2>(head, first_block, queries + q);
    for (; q < num_queries; ++q) attend_few<1>(head, first_block, queries + q);
    return;
  }
  if (num_queries < 1) return;
  static thread_local Scratch scratch;
  const Slots slots = find_slots(queries, num_queries);
  const int64_t num_slots = round_up(slots.end - slots.first(), kBlock);
  bf16* const keys = scratch.keys.reserve(num_slots * round_up(head.head_dim, kDepth<bf16>));
  bf16* const values = scratch.values.reserve(num_slots * round_up(head.value_dim, kBlock));
  pack_keys(head, first_block, slots, keys);
  pack_values(head, first_block, slots, values);
  const Tiles tiles;
  for (int64_t q = 0; q < num_queries; q += kBlock) {
    attend_rows(head, slots, queries + q, least(kBlock, num_queries - q), keys, values, &scratch);
  }
}

}  // namespace

const AttendChunk<bf16> kAmxPagedAttention = attend_chunk_by_tiles;

}  // namespace mmjax
