// Products of bfloat16 inputs with weights of 4 and 8 bits, added as integers, for AVX2: two
// instructions multiply and add what eight take of floats. Everything here is in an unnamed
// namespace, as in tiles.h.
#pragma once

#include <numeric>

#include "avx2_groups.h"

namespace mmjax {
namespace {

// Inputs that share a scale. Groups of weights are of a multiple of as many, or there is one.
constexpr int kBlock = 32;

// A row of inputs: those of block b are `numbers * scales[b]`. Scales are powers of two, so that
// all inputs are exact but those below a 128th of the largest of their block, which is a 65,536th of
// it off at most; bfloat16 rounds the largest to a 512th of itself.
struct IntegerRow {
  int16_t* numbers;  // [blocks, kBlock], as `Codes` orders them; zeros behind the last input
  float* scales;     // [blocks], over the units in which `Codes` decodes
  float* sums;       // [blocks], of the inputs that the numbers stand for
  float total;       // of the sums
};

// The exponent of the largest of 32 numbers; 128 where one is infinite or no number.
inline int largest_exponent(const __m256 (&x)[4]) {
  const __m256i size = _mm256_set1_epi32(0x7fffffff);
  __m256i largest = _mm256_setzero_si256();
  for (const __m256 eight : x) {
    largest = _mm256_max_epi32(largest, _mm256_and_si256(_mm256_castps_si256(eight), size));
  }
  __m128i half = _mm256_extracti128_si256(largest, 1);
  half = _mm_max_epi32(half, _mm256_castsi256_si128(largest));
  half = _mm_max_epi32(half, _mm_unpackhi_epi64(half, half));
  half = _mm_max_epi32(half, _mm_shuffle_epi32(half, 1));
  return (_mm_cvtsi128_si32(half) >> 23) - 127;
}

template <typename Codes>
inline void prepare_block(const bf16* given, const IntegerRow& row, int64_t block) {
  __m256 x[4];
  Codes::widen(given, x);
  const int largest = largest_exponent(x);
  const int exponent = largest < -112 ? -112 : largest;  // smaller scales are no normal numbers
  const __m256 up = _mm256_set1_ps(power_of_two(14 - (exponent == 128 ? 0 : exponent)));
  int16_t* const numbers = row.numbers + block * kBlock;
  __m256i sum = _mm256_setzero_si256();
  for (int i = 0; i < 2; ++i) {
    const __m256i first = _mm256_cvtps_epi32(_mm256_mul_ps(x[2 * i], up));
    const __m256i second = _mm256_cvtps_epi32(_mm256_mul_ps(x[2 * i + 1], up));
    sum = _mm256_add_epi32(sum, _mm256_add_epi32(first, second));
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packs_epi32(first, second), 0xd8);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(numbers + 16 * i), packed);
  }
  const float scale = exponent == 128 ? __builtin_nanf("") : power_of_two(exponent - 14);
  row.scales[block] = block % 2 ? scale / Codes::kSecondUnit : scale;
  row.sums[block] = scale * static_cast<float>(sum_lanes(sum));
}

// `decode` makes the codes of two blocks numbers of 16 bits, in the order of `widen`; those of the
// second are in `kSecondUnit`.
struct Uint4Integers {
  static constexpr float kMiddle = 8;
  static constexpr int kPairBytes = 32;
  static constexpr float kSecondUnit = 16;  // high halves of bytes stay where they are
  static void widen(const bf16* given, __m256 (&x)[4]) {
    for (int i = 0; i < 2; ++i) {
      const auto bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(given + 16 * i));
      x[i] = even_bf16(bits);
      x[2 + i] = odd_bf16(bits);
    }
  }
  static void decode(const uint8_t* codes, __m256i (&out)[4]) {
    const __m256i even = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes));
    const __m256i odd = _mm256_srli_epi16(even, 8);
    const __m256i low = _mm256_set1_epi16(0x0f), high = _mm256_set1_epi16(0xf0);
    out[0] = _mm256_and_si256(even, low);
    out[1] = _mm256_and_si256(odd, low);
    out[2] = _mm256_and_si256(even, high);
    out[3] = _mm256_and_si256(odd, high);
  }
};

struct ByteIntegers {
  static constexpr int kPairBytes = 64;
  static constexpr float kSecondUnit = 1;
  static void widen(const bf16* given, __m256 (&x)[4]) {
    for (int i = 0; i < 4; ++i) {
      const __m256i bits = _mm256_cvtepu16_epi32(load16(given + 8 * i));
      x[i] = _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
    }
  }
};

struct Uint8Integers : ByteIntegers {
  static constexpr float kMiddle = 128;
  static void decode(const uint8_t* codes, __m256i (&out)[4]) {
    for (int i = 0; i < 4; ++i) out[i] = _mm256_cvtepu8_epi16(load16(codes + 16 * i));
  }
};

struct Int8Integers : ByteIntegers {
  static constexpr float kMiddle = 0;
  static void decode(const uint8_t* codes, __m256i (&out)[4]) {
    for (int i = 0; i < 4; ++i) out[i] = _mm256_cvtepi8_epi16(load16(codes + 16 * i));
  }
};

// Room for the numbers of a call's blocks.
struct Blocks {
  int64_t padded;    // in a row, up to a multiple of eight
  int64_t each;      // of a group
  bool takes_eight;  // groups at a time
  Prepared<int16_t> inputs;
  Prepared<float> floats;
  IntegerRow rows[kMostRows];
  float* products;  // [kMostRows, padded]: of the scales of inputs and weights

  explicit Blocks(const Groups& weight)
      : padded((weight.width + 8 * kBlock - 1) / (8 * kBlock) * 8),
        each(weight.num_groups == 1 ? padded : weight.group_size / kBlock),
        takes_eight(each == 1 && weight.has_bf16_scale && weight.zero == nullptr &&
                    weight.num_groups >= 8),
        inputs(kMostRows * padded * kBlock),
        floats(3 * kMostRows * padded) {
    float* next = floats.numbers;
    for (IntegerRow& row : rows) {
      row = {inputs.numbers + (next - floats.numbers) / 2 * kBlock, next, next + padded, 0};
      next += 2 * padded;
    }
    products = next;
    // A row may end between the two blocks of a pair.
    for (int64_t b = 0; b < kMostRows * padded; ++b) products[b] = 0;
  }
};

// Numbers of four blocks, or of one.
struct FourBlocks {
  static __m128 load(const float* from) { return _mm_loadu_ps(from); }
  static void store(float* to, __m128 numbers) { _mm_storeu_ps(to, numbers); }
};
struct OneBlock {
  static __m128 load(const float* from) { return _mm_load_ss(from); }
  static void store(float* to, __m128 numbers) { _mm_store_ss(to, numbers); }
};

// Of eight groups from `group` on, of one block each, whose scales are bfloat16 numbers and have no
// zeros: what their sums are multiplied by; adds to `offsets` what the middle makes of the inputs of
// those behind the first `num_known`.
template <int kRows>
inline void scale_eight(const Blocks& blocks, const bf16* scales, int64_t group, int64_t num_known,
                        __m256 middle, __m256 (&offsets)[kRows]) {
  static constexpr int32_t kUnknown[16] = {0, 0, 0, 0, 0, 0, 0, 0, -1, -1, -1, -1, -1, -1, -1, -1};
  const __m256i bits = _mm256_slli_epi32(_mm256_cvtepu16_epi32(load16(scales + group)), 16);
  const __m256 scale = _mm256_castsi256_ps(bits);
  const auto* unknown = reinterpret_cast<const float*>(kUnknown + 8 - num_known);
  const __m256 offset = _mm256_and_ps(_mm256_mul_ps(scale, middle), _mm256_loadu_ps(unknown));
  for (int r = 0; r < kRows; ++r) {
    const IntegerRow& row = blocks.rows[r];
    const __m256 product = _mm256_mul_ps(scale, _mm256_loadu_ps(row.scales + group));
    _mm256_storeu_ps(blocks.products + r * blocks.padded + group, product);
    offsets[r] = _mm256_fmadd_ps(offset, _mm256_loadu_ps(row.sums + group), offsets[r]);
  }
}

// What the sums of a feature's blocks are multiplied by, into `blocks.products`. Adds to `offsets`
// what its zeros make of the inputs.
template <int kRows>
inline void scale_blocks(const Blocks& blocks, const Groups& weight, int64_t feature, float middle,
                         __m256 (&offsets)[kRows]) {
  const int64_t first = feature * weight.num_groups;
  if (blocks.takes_eight) {
    const auto* scales = static_cast<const bf16*>(weight.scale) + first;
    const __m256 middles = _mm256_set1_ps(middle);
    const int64_t last = weight.num_groups - 8;
    int64_t group = 0;
    for (; group <= last; group += 8) scale_eight(blocks, scales, group, 0, middles, offsets);
    if (group < last + 8) scale_eight(blocks, scales, last, group - last, middles, offsets);
    return;
  }
  for (int64_t group = 0; group < weight.num_groups; ++group) {
    const float zero = weight.zero == nullptr ? middle : weight.zero[first + group];
    const float one = scale_of(weight, first + group);
    const __m128 scale = _mm_set1_ps(one), offset = _mm_set1_ps(one * zero);
    auto multiply_some = [&](int64_t b, auto some) {
      for (int r = 0; r < kRows; ++r) {
        const IntegerRow& row = blocks.rows[r];
        float* const products = blocks.products + r * blocks.padded + b;
        some.store(products, _mm_mul_ps(scale, some.load(row.scales + b)));
        const __m256 sum = _mm256_zextps128_ps256(_mm_mul_ps(offset, some.load(row.sums + b)));
        offsets[r] = _mm256_add_ps(offsets[r], sum);
      }
    };
    int64_t b = group * blocks.each;
    const int64_t last = b + blocks.each, end = last < blocks.padded ? last : blocks.padded;
    for (; b + 4 <= end; b += 4) multiply_some(b, FourBlocks{});
    for (; b < end; ++b) multiply_some(b, OneBlock{});
  }
}

// A feature with some rows: sums of its blocks' integers, scaled, less what its zeros make of the
// inputs. Of one group all sums are scaled at the end.
template <typename Codes, int kRows>
inline void multiply_blocks(const Blocks& blocks, const Groups& weight, float* out, int64_t feature,
                            int64_t features) {
  // Those of the first and of the second block of each pair: one sum would wait for itself.
  __m256 sums[kRows][2] = {}, offsets[kRows] = {};
  const bool is_one_group = weight.num_groups == 1;
  if (!is_one_group) scale_blocks(blocks, weight, feature, Codes::kMiddle, offsets);
  const float* scales[kRows];
  for (int r = 0; r < kRows; ++r) {
    scales[r] = is_one_group ? blocks.rows[r].scales : blocks.products + r * blocks.padded;
  }
  auto add_pair = [&](const uint8_t* codes, int64_t b) {
    __m256i numbers[4];
    Codes::decode(codes, numbers);
    for (int r = 0; r < kRows; ++r) {
      const auto* x = reinterpret_cast<const __m256i*>(blocks.rows[r].numbers + b * kBlock);
      for (int i = 0; i < 2; ++i) {
        const __m256i first = _mm256_madd_epi16(numbers[2 * i], _mm256_loadu_si256(x + 2 * i));
        const __m256i second =
            _mm256_madd_epi16(numbers[2 * i + 1], _mm256_loadu_si256(x + 2 * i + 1));
        const __m256 part = _mm256_cvtepi32_ps(_mm256_add_epi32(first, second));
        const __m256 scale = _mm256_broadcast_ss(scales[r] + b + i);
        sums[r][i] = _mm256_fmadd_ps(part, scale, sums[r][i]);
      }
    }
  };
  const uint8_t* codes = weight.codes + feature * weight.row_bytes;
  int64_t b = 0, left = weight.row_bytes;
  for (; left >= Codes::kPairBytes; left -= Codes::kPairBytes, codes += Codes::kPairBytes, b += 2) {
    add_pair(codes, b);
  }
  if (left > 0) add_pair(Padded<uint8_t, Codes::kPairBytes>(codes, left).numbers, b);
  for (int r = 0; r < kRows; ++r) {
    const __m256 all = _mm256_add_ps(sums[r][0], sums[r][1]);
    float& sum = out[r * features + feature];
    sum = sum_lanes(_mm256_sub_ps(all, offsets[r]));
    if (!is_one_group) continue;
    const float zero = weight.zero == nullptr ? Codes::kMiddle : weight.zero[feature];
    const float scale = weight.scale == nullptr ? 1 : scale_of(weight, feature);
    sum = scale * (sum - zero * blocks.rows[r].total);
  }
}

template <typename Codes>
void multiply_integers(const bf16* given, const Groups& weight, float* out, int64_t rows,
                       int64_t features, int64_t begin, int64_t end) {
  Blocks blocks(weight);
  for (int64_t r = 0; r < rows; r += kMostRows) {
    const int64_t count = rows - r < kMostRows ? rows - r : kMostRows;
    for (int64_t i = 0; i < count; ++i) {
      const bf16* const x = given + (r + i) * weight.width;
      for (int64_t b = 0; b < blocks.padded; ++b) {
        const int64_t left = weight.width - b * kBlock;
        if (left >= kBlock) {
          prepare_block<Codes>(x + b * kBlock, blocks.rows[i], b);
          continue;
        }
        const Padded<bf16, kBlock> last(x + b * kBlock, left);
        prepare_block<Codes>(last.numbers, blocks.rows[i], b);
      }
      const float* const sums = blocks.rows[i].sums;
      blocks.rows[i].total = std::accumulate(sums, sums + blocks.padded, 0.0f);
    }
    with_rows(count, [&](auto some) {
      for (int64_t f = begin; f < end; ++f) {
        multiply_blocks<Codes, some.kRows>(blocks, weight, out + r * features, f, features);
      }
    });
  }
}

// Weights without scales.
inline void multiply_int8(const bf16* x, const int8_t* weight, float* out, int64_t rows,
                          int64_t width, int64_t features, int64_t begin, int64_t end) {
  const auto* codes = reinterpret_cast<const uint8_t*>(weight);
  const Groups groups = {codes, nullptr, nullptr, false, width, width, 1, width};
  multiply_integers<Int8Integers>(x, groups, out, rows, features, begin, end);
}

}  // namespace
}  // namespace mmjax
