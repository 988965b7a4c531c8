// AVX2 with FMA (Haswell, Zen and later).
#include <immintrin.h>

#include "attention.h"
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

}  // namespace

const Products kAvx2 = {multiply<Float32Lanes>,
                        multiply<Bfloat16Lanes>,
                        multiply<Int8Lanes>,
                        multiply<WithInt8Weights<Float32Lanes>>,
                        multiply<WithInt8Weights<Bfloat16Lanes>>,
                        attend_chunk<float>,
                        attend_chunk<bf16>,
                        "avx2"};

}  // namespace mmjax
