// Products with weights in groups, for AVX2. Everything here is in an unnamed namespace, as in
// tiles.h.
#pragma once

#include "avx2.h"

namespace mmjax {
namespace {

// Weights are decoded 32 at a time, into four vectors; inputs stand in the same order.
constexpr int kDecoded = 32;

// Four vectors of 32 numbers: of 0 to 7 and 16 to 23 those at even places, then those at odd ones,
// and the same of the others. It is the order in which bytes become numbers of 16 bits.
struct InterleavedOrder {
  static void prepare(const float* given, float* x) {
    for (int half = 0; half < 2; ++half) {
      const float* from = given + 8 * half;
      const __m256 a = _mm256_loadu_ps(from), b = _mm256_loadu_ps(from + 16);
      const __m256 low = _mm256_permute2f128_ps(a, b, 0x20);
      const __m256 high = _mm256_permute2f128_ps(a, b, 0x31);
      _mm256_storeu_ps(x + 16 * half, _mm256_shuffle_ps(low, high, 0x88));
      _mm256_storeu_ps(x + 16 * half + 8, _mm256_shuffle_ps(low, high, 0xdd));
    }
  }
};

struct NaturalOrder {
  static void prepare(const float* given, float* x) {
    for (int i = 0; i < kDecoded; i += 8) _mm256_storeu_ps(x + i, _mm256_loadu_ps(given + i));
  }
};

inline void widen(const float* given, float* x) { NaturalOrder::prepare(given, x); }
inline void widen(const bf16* given, float* x) {
  WidenedFloats::prepare(given, x);
  WidenedFloats::prepare(given + 16, x + 16);
}

// What stands for the lanes in `prepare_row`.
template <typename Codes, typename T>
struct GroupInputs {
  using Given = T;
  using X = float;
  static constexpr int kWidth = kDecoded;
  static void prepare(const T* given, float* x) {
    float wide[kDecoded];
    widen(given, wide);
    Codes::prepare(wide, x);
  }
};

// The bytes of the bfloat16 numbers from -255 to 15, which are exact.
struct SmallNumbers {
  uint8_t low[271], high[271];
};
constexpr SmallNumbers make_small_numbers() {
  SmallNumbers out{};
  for (int i = 0; i < 271; ++i) {
    const int size = i < 255 ? 255 - i : i - 255;
    if (size == 0) continue;
    int exponent = 0;
    while (size >> (exponent + 1)) ++exponent;
    const int bits = (i < 255) << 15 | (127 + exponent) << 7 | ((size << (7 - exponent)) & 0x7f);
    out.low[i] = static_cast<uint8_t>(bits & 0xff);
    out.high[i] = static_cast<uint8_t>(bits >> 8);
  }
  return out;
}
constexpr SmallNumbers kSmallNumbers = make_small_numbers();

struct Uint4Codes : InterleavedOrder {
  static constexpr int kMiddle = 8;
  // What the sixteen codes stand for: the bytes of bfloat16 numbers.
  struct Zero {
    __m256i low, high;
  };
  static Zero make_zero(int zero) {
    return {_mm256_broadcastsi128_si256(load16(kSmallNumbers.low + 255 - zero)),
            _mm256_broadcastsi128_si256(load16(kSmallNumbers.high + 255 - zero))};
  }
  static int64_t byte_of(int64_t d) { return code_byte(d); }
  static void decode(const uint8_t* codes, int64_t d, int64_t, Zero zero, __m256 (&out)[4]) {
    codes += d / 64 * 32;
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes));
    const __m256i shifted = _mm256_srl_epi16(bytes, _mm_cvtsi32_si128(code_shift(d)));
    const __m256i halves = _mm256_and_si256(shifted, _mm256_set1_epi8(15));
    const __m256i low = _mm256_shuffle_epi8(zero.low, halves);
    const __m256i high = _mm256_shuffle_epi8(zero.high, halves);
    const __m256i numbers[2] = {_mm256_unpacklo_epi8(low, high), _mm256_unpackhi_epi8(low, high)};
    for (int i = 0; i < 2; ++i) {
      out[2 * i] = even_bf16(numbers[i]);
      out[2 * i + 1] = odd_bf16(numbers[i]);
    }
  }
};

// Codes of a byte, which `Codes::widen` makes floats.
template <typename Codes>
struct ByteCodes : NaturalOrder {
  using Zero = __m256;
  static Zero make_zero(int zero) { return _mm256_set1_ps(static_cast<float>(zero)); }
  static int64_t byte_of(int64_t d) { return d; }
  static void decode(const uint8_t* codes, int64_t d, int64_t count, Zero zero, __m256 (&out)[4]) {
    if (count < kDecoded) {
      const Padded<uint8_t, kDecoded> last(codes + d, count);
      return decode(last.numbers, 0, kDecoded, zero, out);
    }
    for (int i = 0; i < 4; ++i) {
      const auto* eight = reinterpret_cast<const __m128i*>(codes + d + 8 * i);
      out[i] = Codes::widen(_mm256_cvtepu8_epi32(_mm_loadl_epi64(eight)), zero);
    }
  }
};

struct Uint8Codes : ByteCodes<Uint8Codes> {
  static constexpr int kMiddle = 128;
  static __m256 widen(__m256i bits, Zero zero) {
    return _mm256_sub_ps(_mm256_cvtepi32_ps(bits), zero);
  }
};

struct Float8Codes : ByteCodes<Float8Codes> {
  static constexpr int kMiddle = 0;
  // As `Float8Codes` of AVX-512.
  static __m256 widen(__m256i bits, Zero) {
    const __m256i size = _mm256_and_si256(bits, _mm256_set1_epi32(0x7f));
    const __m256i is_denormal = _mm256_cmpgt_epi32(_mm256_set1_epi32(8), size);
    const __m256i one = _mm256_and_si256(is_denormal, _mm256_set1_epi32(1 << 23));
    const __m256i bias = _mm256_add_epi32(_mm256_set1_epi32(120 << 23), one);
    const __m256 wide = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_slli_epi32(size, 20), bias));
    const __m256 least = _mm256_and_ps(_mm256_castsi256_ps(is_denormal), _mm256_set1_ps(0x1p-6f));
    const __m256i sign = _mm256_slli_epi32(_mm256_srli_epi32(bits, 7), 31);
    return _mm256_or_ps(_mm256_sub_ps(wide, least), _mm256_castsi256_ps(sign));
  }
};

// A feature with some rows. A group's products are added without its scale, and its sum is then
// added with it.
template <typename Codes, int kRows>
inline void multiply_group_rows(const float* x, int64_t stride, const Groups& weight, float* out,
                                int64_t feature, int64_t features) {
  const uint8_t* codes = weight.codes + feature * weight.row_bytes;
  typename Codes::Zero zero = Codes::make_zero(Codes::kMiddle);
  __m256 sums[kRows] = {};
  int64_t d = 0;
  for (int64_t group = 0; group < weight.num_groups; ++group) {
    const int64_t at = feature * weight.num_groups + group;
    const int64_t last = (group + 1) * weight.group_size;
    const int64_t end = last < weight.width ? last : weight.width;
    if (weight.zero != nullptr) zero = Codes::make_zero(weight.zero[at]);
    FloatSums::Sum parts[kRows] = {};
    for (; d < end; d += kDecoded) {
      __m256 weights[4];
      fetch(codes + Codes::byte_of(d) + kAheadBytes);
      Codes::decode(codes, d, end - d, zero, weights);
      for (int r = 0; r < kRows; ++r) {
        const float* inputs = x + r * stride + d;
        for (int i = 0; i < 4; i += 2) {
          const auto pair = FloatSums::load_inputs(inputs + 8 * i);
          FloatSums::add(parts[r], pair, {weights[i], weights[i + 1]});
        }
      }
    }
    d = end;
    const __m256 scale = _mm256_set1_ps(scale_of(weight, at));
    for (int r = 0; r < kRows; ++r) {
      const __m256 part = _mm256_add_ps(parts[r].halves[0], parts[r].halves[1]);
      sums[r] = _mm256_fmadd_ps(part, scale, sums[r]);
    }
  }
  for (int r = 0; r < kRows; ++r) out[r * features + feature] = sum_lanes(sums[r]);
}

// As `multiply_few`, a feature after the other: decoding takes most of the time.
template <typename Codes, typename T>
void multiply_few_groups(const T* given, const Groups& weight, float* out, int64_t rows,
                         int64_t features, int64_t begin, int64_t end) {
  const int64_t stride = (weight.width + kDecoded - 1) / kDecoded * kDecoded;
  const Prepared<float> prepared(kMostRows * stride);
  for (int64_t r = 0; r < rows; r += kMostRows) {
    const int64_t count = rows - r < kMostRows ? rows - r : kMostRows;
    for (int64_t i = 0; i < count; ++i) {
      const T* row = given + (r + i) * weight.width;
      prepare_row<GroupInputs<Codes, T>>(row, prepared.numbers + i * stride, weight.width);
    }
    with_rows(count, [&](auto some) {
      for (int64_t f = begin; f < end; ++f) {
        multiply_group_rows<Codes, some.kRows>(prepared.numbers, stride, weight,
                                               out + r * features, f, features);
      }
    });
  }
}

}  // namespace
}  // namespace mmjax
