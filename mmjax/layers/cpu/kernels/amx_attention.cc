// AMX: attention of whole sequences, without a mask, to `kKeys` keys at a time.
//
// Keys are the features of a product with queries, and values, whose keys are its inputs, those of a
// product with weights. An online softmax: a row's sums are made in the order of the keys, whatever
// rows are beside it.
#include "amx_attention.h"
#include "attention.h"

namespace mmjax {
namespace {

constexpr int64_t kKeys = 256;
constexpr int64_t kWeightStride = kKeys + kDepth<bf16>;  // rows begin in different places of the cache

// Pack the values of all keys as weights: tiles [panels of 32 columns, steps of 32 keys, 2].
void pack_values(const WholeHead& head, bf16* packed) {
  const int64_t steps = divide_up(head.num_keys, kDepth<bf16>);
  for (int64_t column = 0; column < head.value_dim; column += kTile) {
    const __mmask16 is_there = first16(least(head.value_dim - column, kTile));
    bf16* into = packed + (column / kBlock * steps * 2 + column / kTile % 2) * kTile * kDepth<bf16>;
    for (int64_t first = 0; first < head.num_keys; first += kDepth<bf16>) {
      const auto load = [&](int64_t key) {
        if (key >= head.num_keys) return _mm256_setzero_si256();
        return _mm256_maskz_loadu_epi16(is_there, head.value + key * head.value_stride + column);
      };
      for (int64_t i = 0; i < kTile; ++i) {
        const __m512i both = pair_up(load(first + 2 * i), load(first + 2 * i + 1));
        _mm512_store_si512(into + i * kDepth<bf16>, both);
      }
      into += 2 * kTile * kDepth<bf16>;
    }
  }
}

// What a row has seen so far, in powers of two.
struct RowState {
  float highest, total;
};

// Cap the scores of a row, and put those behind `count`, up to a vector's end, below all others.
void prepare_row(float* scores, int64_t row, int64_t count, const WholeHead& head) {
  for (int64_t v = 0; head.soft_cap > 0 && v * kTile < count; ++v) {
    float* const at = find_row(scores, row, v);
    store(tanh(load(at) * (head.scale / head.soft_cap)) * head.soft_cap, at);
  }
  if (count % kTile != 0) {
    float* const last = find_row(scores, row, count / kTile);
    const __m512 lowest = _mm512_set1_ps(kLowest);
    _mm512_store_ps(last, _mm512_mask_loadu_ps(lowest, first16(count % kTile), last));
  }
}

// Turn a row's `count` scores into weights, zeros behind them up to a multiple of 32. Returns what
// its sums so far are to be scaled by.
float weigh_row(float* scores, int64_t row, int64_t count, const WholeHead& head, bf16* weights,
                RowState* state) {
  constexpr float kLog2E = 1.44269504f;
  const float scale = (head.soft_cap > 0 ? 1.0f : head.scale) * kLog2E;
  if (head.soft_cap > 0 || count % kTile != 0) prepare_row(scores, row, count, head);
  const float* const first = find_row(scores, row, 0);
  const int64_t num_vectors = divide_up(count, kTile);
  __m512 peaks[2] = {_mm512_set1_ps(kLowest), _mm512_set1_ps(kLowest)};
  for (int64_t v = 0; v < num_vectors; ++v) {
    const float* const at = first + v / 2 * kBlockSums + v % 2 * kTileSums;
    peaks[v % 2] = _mm512_max_ps(peaks[v % 2], _mm512_load_ps(at));
  }
  const float peak = _mm512_reduce_max_ps(_mm512_max_ps(peaks[0], peaks[1])) * scale;
  const float highest = peak > state->highest ? peak : state->highest;
  const __m512 factors = _mm512_set1_ps(scale), most = _mm512_set1_ps(highest);
  __m512 totals[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
  for (int64_t v = 0; v < num_vectors; v += 2) {
    const float* const at = first + v / 2 * kBlockSums;
    const __m512 low = exp2_of(_mm512_fmsub_ps(_mm512_load_ps(at), factors, most));
    __m512 high = _mm512_setzero_ps();
    if (v + 1 < num_vectors) {
      high = exp2_of(_mm512_fmsub_ps(_mm512_load_ps(at + kTileSums), factors, most));
    }
    totals[0] = _mm512_add_ps(totals[0], low);
    totals[1] = _mm512_add_ps(totals[1], high);
    write_bf16(low, high, weights + v * kTile);
  }
  const float factor =
      _mm512_cvtss_f32(exp2_of(_mm512_set1_ps(state->highest - highest)));
  state->total =
      state->total * factor + _mm512_reduce_add_ps(_mm512_add_ps(totals[0], totals[1]));
  state->highest = highest;
  return factor;
}

// What a thread keeps between calls.
struct Scratch {
  Lines<bf16> keys, values, queries, weights;
  Lines<float> scores, sums;
};

// Attend with up to 32 queries from `first` on.
void attend_rows(const WholeHead& head, int64_t first, const bf16* keys, const bf16* values,
                 Scratch* scratch) {
  const int64_t depth = round_up(head.head_dim, kDepth<bf16>), steps = depth / kDepth<bf16>;
  const int64_t key_steps = divide_up(head.num_keys, kDepth<bf16>);
  const int64_t rows = least(kBlock, head.num_queries - first);
  bf16* const queries = scratch->queries.reserve(kBlock * depth);
  bf16* const weights = scratch->weights.reserve(kBlock * kWeightStride);
  float* const scores = scratch->scores.reserve(kKeys / kBlock * kBlockSums);
  float* const sums = scratch->sums.reserve(divide_up(head.value_dim, kBlock) * kBlockSums);
  RowState states[kBlock];
  __builtin_memset(queries, 0, static_cast<size_t>(kBlock * depth) * sizeof *queries);
  __builtin_memset(weights, 0, static_cast<size_t>(kBlock * kWeightStride) * sizeof *weights);
  for (int64_t r = 0; r < rows; ++r) {
    states[r] = {kLowest, 0.0f};
    __builtin_memcpy(queries + r * depth, head.query + (first + r) * head.query_stride,
                     static_cast<size_t>(head.head_dim) * sizeof *queries);
  }
  for (int64_t from = 0; from < head.num_keys; from += kKeys) {
    const int64_t count = least(kKeys, head.num_keys - from);
    for (int64_t key = 0; key < count; key += kBlock) {
      const auto add = choose_products<bf16>(rows, count - key);
      add({queries, depth}, keys + (from + key) * depth, steps, scores + key / kBlock * kBlockSums,
          true, nullptr, 0);
    }
    for (int64_t r = 0; r < rows; ++r) {
      const float factor =
          weigh_row(scores, r, count, head, weights + r * kWeightStride, states + r);
      for (int64_t v = 0; from > 0 && factor != 1.0f && v * kTile < head.value_dim; ++v) {
        float* const at = find_row(sums, r, v);
        _mm512_store_ps(at, _mm512_mul_ps(_mm512_load_ps(at), _mm512_set1_ps(factor)));
      }
    }
    for (int64_t column = 0; column < head.value_dim; column += kBlock) {
      const auto add = choose_products<bf16>(rows, head.value_dim - column);
      const int64_t step = column / kBlock * key_steps + from / kDepth<bf16>;
      add({weights, kWeightStride}, values + step * 2 * kTile * kDepth<bf16>,
          divide_up(count, kDepth<bf16>), sums + column / kBlock * kBlockSums, from == 0, nullptr, 0);
    }
  }
  for (int64_t r = 0; r < rows; ++r) {
    const __m512 scale = _mm512_set1_ps(1.0f / states[r].total);
    bf16* const out = head.out + (first + r) * head.out_stride;
    for (int64_t v = 0; v * kTile < head.value_dim; ++v) {
      const __m512 seen = _mm512_mul_ps(_mm512_load_ps(find_row(sums, r, v)), scale);
      const __mmask16 is_there = first16(least(head.value_dim - v * kTile, kTile));
      _mm256_mask_storeu_epi16(out + v * kTile, is_there,
                               reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(seen)));
    }
  }
}

void attend_whole(const WholeHead& head) {
  static thread_local Scratch scratch;
  const int64_t depth = round_up(head.head_dim, kDepth<bf16>);
  const int64_t num_keys = round_up(head.num_keys, kBlock);
  bf16* const keys = scratch.keys.reserve(num_keys * depth);
  bf16* const values = scratch.values.reserve(num_keys * round_up(head.value_dim, kBlock));
  pack(PlainWeights<bf16>{head.key, head.key_stride}, 0, head.num_keys, 0, head.head_dim, keys);
  pack_values(head, values);
  const Tiles tiles;
  for (int64_t first = 0; first < head.num_queries; first += kBlock) {
    attend_rows(head, first, keys, values, &scratch);
  }
}

}  // namespace

const AttendWhole kAmxAttention = attend_whole;

}  // namespace mmjax
