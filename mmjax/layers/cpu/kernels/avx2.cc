// AVX2 with FMA (Haswell, Zen and later).
#include <immintrin.h>

#include "attention.h"
#include "rows.h"
#include "tiles.h"

namespace mmjax {
namespace {

// Tails are copied: AVX2 has no loads of some bytes or pairs of bytes alone.
template <typename T, int kCount>
struct Padded {
  T numbers[kCount];
  Padded(const T* from, int64_t count) {
    for (int64_t i = 0; i < kCount; ++i) numbers[i] = i < count ? from[i] : T{0};
  }
};

inline float sum_lanes(__m256 x) {
  __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}

inline int32_t sum_lanes(__m256i x) {
  __m128i half = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  half = _mm_add_epi32(half, _mm_unpackhi_epi64(half, half));
  return _mm_cvtsi128_si32(_mm_add_epi32(half, _mm_shuffle_epi32(half, 1)));
}

struct Float32Lanes : Uncorrected {
  using X = float;
  using W = float;
  using Out = float;
  using Sum = __m256;
  using Weights = __m256;
  static constexpr int kWidth = 8;
  static Sum zero() { return _mm256_setzero_ps(); }
  static __m256 load_inputs(const X* x) { return _mm256_loadu_ps(x); }
  static __m256 load_inputs(const X* x, int64_t n) {
    return load_inputs(Padded<X, kWidth>(x, n).numbers);
  }
  static Weights load_weights(const W* w) { return _mm256_loadu_ps(w); }
  static Weights load_weights(const W* w, int64_t n) {
    return load_weights(Padded<W, kWidth>(w, n).numbers);
  }
  static void add(Sum& sum, __m256 x, Weights w) { sum = _mm256_fmadd_ps(x, w, sum); }
  template <int kCount>
  static void add_lanes(const Sum* sums, Out* out) {
    for (int i = 0; i < kCount; ++i) out[i] = sum_lanes(sums[i]);
  }
};

// bfloat16 numbers, multiplied and added as floats.
struct Bfloat16Lanes : Uncorrected {
  using X = bf16;
  using W = bf16;
  using Out = float;
  using Sum = __m256;
  using Weights = __m256;
  static constexpr int kWidth = 8;
  static Sum zero() { return _mm256_setzero_ps(); }
  static __m256 load_inputs(const X* x) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
  }
  static __m256 load_inputs(const X* x, int64_t n) {
    return load_inputs(Padded<X, kWidth>(x, n).numbers);
  }
  static Weights load_weights(const W* w) { return load_inputs(w); }
  static Weights load_weights(const W* w, int64_t n) { return load_inputs(w, n); }
  static void add(Sum& sum, __m256 x, Weights w) { sum = _mm256_fmadd_ps(x, w, sum); }
  template <int kCount>
  static void add_lanes(const Sum* sums, Out* out) {
    for (int i = 0; i < kCount; ++i) out[i] = sum_lanes(sums[i]);
  }
};

// Inputs of the lanes `Base`, with weights of 8 bits.
template <typename Base>
struct WithInt8Weights : Base {
  using W = int8_t;
  using Weights = __m256;
  static Weights load_weights(const W* w) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(w));
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
  }
  static Weights load_weights(const W* w, int64_t n) {
    return load_weights(Padded<W, Base::kWidth>(w, n).numbers);
  }
};

// Products of pairs of 16 bits, added in 32: exact.
struct Int8Lanes : Uncorrected {
  using X = int8_t;
  using W = int8_t;
  using Out = int32_t;
  using Sum = __m256i;
  using Weights = __m256i;
  static constexpr int kWidth = 16;
  static Sum zero() { return _mm256_setzero_si256(); }
  static __m256i load_inputs(const X* x) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
  }
  static __m256i load_inputs(const X* x, int64_t n) {
    return load_inputs(Padded<X, kWidth>(x, n).numbers);
  }
  static Weights load_weights(const W* w) { return load_inputs(w); }
  static Weights load_weights(const W* w, int64_t n) { return load_inputs(w, n); }
  static void add(Sum& sum, __m256i x, Weights w) {
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(x, w));
  }
  template <int kCount>
  static void add_lanes(const Sum* sums, Out* out) {
    for (int i = 0; i < kCount; ++i) out[i] = sum_lanes(sums[i]);
  }
};

// Codes of 8 weights as floats, the zero of their group taken off.
inline __m256i load_codes(const uint8_t* codes) {
  return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes)));
}

struct Uint4Codes {
  using Zero = __m256;
  static constexpr int kMiddle = 8;
  static int64_t byte_of(int64_t d) { return code_byte(d); }
  static Zero make_zero(int zero) { return _mm256_set1_ps(static_cast<float>(zero)); }
  static __m256 decode(const uint8_t* codes, int64_t d, Zero zero) {
    const __m128i shift = _mm_cvtsi32_si128(code_shift(d));
    const __m256i bits = _mm256_srl_epi32(load_codes(codes + byte_of(d)), shift);
    const __m256i halves = _mm256_and_si256(bits, _mm256_set1_epi32(15));
    return _mm256_sub_ps(_mm256_cvtepi32_ps(halves), zero);
  }
  static __m256 decode(const uint8_t* codes, int64_t d, Zero zero, int64_t) {
    return decode(codes, d, zero);  // rows are padded
  }
};

// Codes of a byte, which `Codes::widen` makes floats.
template <typename Codes>
struct ByteCodes {
  using Zero = __m256;
  static int64_t byte_of(int64_t d) { return d; }
  static Zero make_zero(int zero) { return _mm256_set1_ps(static_cast<float>(zero)); }
  static __m256 decode(const uint8_t* codes, int64_t d, Zero zero) {
    return Codes::widen(load_codes(codes + d), zero);
  }
  static __m256 decode(const uint8_t* codes, int64_t d, Zero zero, int64_t count) {
    return Codes::widen(load_codes(Padded<uint8_t, 8>(codes + d, count).numbers), zero);
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

// Inputs of the lanes `Base`, float or bfloat16.
template <typename Base, typename Codes>
struct GroupLanes : Codes {
  using X = typename Base::X;
  using Sum = __m256;
  using Weights = __m256;
  static constexpr int kWidth = Base::kWidth;
  static Sum zero() { return Base::zero(); }
  static __m256 load_inputs(const X* x) { return Base::load_inputs(x); }
  static __m256 load_inputs(const X* x, int64_t n) { return Base::load_inputs(x, n); }
  static void add(Sum& sum, __m256 x, Weights w) { Base::add(sum, x, w); }
  static void add_scaled(Sum& sum, Sum part, float scale) {
    sum = _mm256_fmadd_ps(part, _mm256_set1_ps(scale), sum);
  }
  template <int kCount>
  static void add_lanes(const Sum* sums, float* out) {
    Base::template add_lanes<kCount>(sums, out);
  }
};

template <typename Codes>
constexpr GroupProducts kGroups = {multiply_groups<GroupLanes<Float32Lanes, Codes>>,
                                   multiply_groups<GroupLanes<Bfloat16Lanes, Codes>>};

}  // namespace

const Products kAvx2 = {multiply<Float32Lanes>,
                        multiply<Bfloat16Lanes>,
                        multiply<Int8Lanes>,
                        multiply<WithInt8Weights<Float32Lanes>>,
                        multiply<WithInt8Weights<Bfloat16Lanes>>,
                        attend_chunk<float>,
                        attend_chunk<bf16>,
                        norm_rows<float>,
                        norm_rows<bf16>,
                        rotate_rows<float>,
                        rotate_rows<bf16>,
                        kGroups<Uint4Codes>,
                        kGroups<Uint8Codes>,
                        kGroups<Float8Codes>,
                        "avx2"};

}  // namespace mmjax
