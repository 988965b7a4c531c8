// AMX (Sapphire Rapids on): products of many rows.
//
// The weights of a chunk of features, and of up to `kMaxDepth` inputs, are packed, and stay in the
// second cache while all rows pass over them. A sum is made in the order of the inputs, whatever
// rows, tile and thread it has.
#include "amx.h"

namespace mmjax {
namespace {

constexpr int64_t kMaxDepth = 1024;       // inputs that are packed at a time
constexpr int64_t kMaxRows = 1024;        // rows whose sums are kept meanwhile

// Integers of 8 bits are bfloat16 numbers without rounding.
struct Int8Weights {
  const int8_t* weight;
  int64_t width;
  void write(int64_t feature, int64_t d, int64_t count, bf16* to) const {
    const Halves numbers =
        widen_int8(_mm256_maskz_loadu_epi8(first32(count), weight + feature * width + d));
    write_bf16(numbers.low, numbers.high, to);
  }
};

// Codes become numbers, rounded as XLA's form rounds them. 32 inputs are of one group.
template <typename Codes>
struct GroupWeights {
  const Groups& weight;
  void write(int64_t feature, int64_t d, int64_t count, bf16* to) const {
    const uint8_t* codes = weight.codes + feature * weight.row_bytes;
    const int64_t at = feature * weight.num_groups + d / weight.group_size;
    const auto zero = Codes::make_zero(weight.zero == nullptr ? Codes::kMiddle : weight.zero[at]);
    const __m512 scale = _mm512_set1_ps(scale_of(weight, at));
    const __m512 low = Codes::decode16(codes, d, zero, least(count, kTile));
    __m512 high = _mm512_setzero_ps();
    if (count > kTile) high = Codes::decode16(codes, d + kTile, zero, count - kTile);
    write_bf16(_mm512_mul_ps(low, scale), _mm512_mul_ps(high, scale), to);
  }
};

// Up to 32 rows' inputs [from, to): where they stand, or padded in `copy`. Lines that are a multiple
// of 2 KiB apart would share few places of the first cache.
template <typename X>
Inputs<X> find_inputs(const X* x, int64_t rows, int64_t width, int64_t from, int64_t to, X* copy) {
  const int64_t count = to - from, stride = round_up(count, kDepth<X>);
  const bool is_whole = rows % kTile == 0 && count == stride;
  if (is_whole && width * static_cast<int64_t>(sizeof(X)) % 2048 != 0) return {x + from, width};
  __builtin_memset(copy, 0, static_cast<size_t>(round_up(rows, kTile) * stride) * sizeof *copy);
  for (int64_t r = 0; r < rows; ++r) {
    __builtin_memcpy(copy + r * stride, x + r * width + from,
                     static_cast<size_t>(count) * sizeof *copy);
  }
  return {copy, stride};
}

inline void write_sums(const float* sums, int64_t count, bf16* out) {
  const __m256bh numbers = _mm512_cvtneps_pbh(_mm512_loadu_ps(sums));
  _mm256_mask_storeu_epi16(out, first16(count), reinterpret_cast<__m256i>(numbers));
}
template <typename Sum>
void write_sums(const Sum* sums, int64_t count, Sum* out) {
  _mm512_mask_storeu_epi32(out, first16(count), _mm512_loadu_si512(sums));
}

// Write rows of `count` features, whose sums are in blocks of 32 by 32.
template <typename Sum, typename Out>
void write_rows(const Sum* sums, int64_t rows, int64_t count, Out* out, int64_t features) {
  for (int64_t r = 0; r < rows; ++r) {
    const Sum* const row = sums + r / kTile * 2 * kTileSums + r % kTile * kTile;
    for (int64_t f = 0; f < count; f += kTile) {
      const Sum* const from = row + f / kBlock * kBlockSums + f % kBlock * kTile;
      write_sums(from, least(count - f, kTile), out + r * features + f);
    }
  }
}

// Parts of as many inputs each that rows and features have in common.
template <typename X>
int64_t find_depth(int64_t width) {
  return round_up(divide_up(width, divide_up(width, kMaxDepth)), kDepth<X>);
}

// out[r, f] of all rows, and features [begin, end).
template <typename X, typename Weights, typename Out>
void multiply_many(const X* x, const Weights& weights, Out* out, int64_t rows, int64_t width,
                   int64_t features, int64_t begin, int64_t end) {
  if (begin >= end) return;
  static thread_local Lines<X> packed_lines, copy_lines;
  static thread_local Lines<SumOf<X>> sum_lines;
  const int64_t depth = find_depth<X>(width), num_panels = divide_up(end - begin, kBlock);
  const bool is_once = depth >= width;
  const int64_t num_blocks = is_once ? 1 : divide_up(least(rows, kMaxRows), kBlock);
  X* const packed = packed_lines.reserve(num_panels * kBlock * depth);
  X* const copy = copy_lines.reserve(kBlock * depth);
  SumOf<X>* const all_sums = sum_lines.reserve(num_blocks * num_panels * kBlockSums);
  const int64_t num_fetched = divide_up(kBlock, num_panels);  // of the next rows, in each panel
  const Tiles tiles;
  for (int64_t top = 0; top < rows; top += kMaxRows) {
    const int64_t bottom = least(rows, top + kMaxRows);
    for (int64_t from = 0; from < width; from += depth) {
      const int64_t to = least(from + depth, width), steps = divide_up(to - from, kDepth<X>);
      if (!is_once || top == 0) pack(weights, begin, end, from, to, packed);
      SumOf<X>* sums = all_sums;
      for (int64_t row = top; row < bottom; row += kBlock) {
        const int64_t num_rows = least(kBlock, bottom - row);
        const auto inputs = find_inputs(x + row * width, num_rows, width, from, to, copy);
        const bool fetches = row + 2 * kBlock <= bottom && inputs.x != copy;
        for (int64_t panel = 0; panel < num_panels; ++panel) {
          const auto add = choose_products<X>(num_rows, end - begin - panel * kBlock);
          const X* const next = inputs.x + (kBlock + panel * num_fetched) * inputs.stride;
          const int64_t left = kBlock - panel * num_fetched;
          add(inputs, packed + panel * kBlock * steps * kDepth<X>, steps, sums + panel * kBlockSums,
              from == 0, next, fetches && left > 0 ? least(num_fetched, left) : 0);
        }
        if (to == width) {
          write_rows(sums, num_rows, end - begin, out + row * features + begin, features);
        }
        if (!is_once) sums += num_panels * kBlockSums;
      }
    }
  }
}

template <typename X, typename Weights, typename W, typename Out>
void multiply_plain(const X* x, const W* weight, Out* out, int64_t rows, int64_t width,
                    int64_t features, int64_t begin, int64_t end) {
  multiply_many(x, Weights{weight, width}, out, rows, width, features, begin, end);
}

template <typename Codes>
void multiply_groups_of(const bf16* x, const Groups& weight, float* out, int64_t rows,
                        int64_t features, int64_t begin, int64_t end) {
  multiply_many(x, GroupWeights<Codes>{weight}, out, rows, weight.width, features, begin, end);
}

}  // namespace

const ManyRows kAmx = {multiply_plain<bf16, PlainWeights<bf16>, bf16, float>,
                       multiply_plain<bf16, PlainWeights<bf16>, bf16, bf16>,
                       multiply_plain<int8_t, PlainWeights<int8_t>, int8_t, int32_t>,
                       multiply_plain<bf16, Int8Weights, int8_t, float>,
                       multiply_groups_of<Uint4Codes>,
                       multiply_groups_of<Uint8Codes>,
                       multiply_groups_of<Float8Codes>};

}  // namespace mmjax
