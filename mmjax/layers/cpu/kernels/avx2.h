// Lanes of AVX2 with FMA, and the loops that suit its sixteen registers. Everything here is in an
// unnamed namespace, as in tiles.h.
#pragma once

#include <immintrin.h>
#include <stddef.h>

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

inline __m128i load16(const void* bytes) {
  return _mm_loadu_si128(static_cast<const __m128i*>(bytes));
}

// Sixteen bfloat16 numbers as floats: those at even places, and those at odd ones.
inline __m256 even_bf16(__m256i numbers) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(numbers, 16));
}
inline __m256 odd_bf16(__m256i numbers) {
  return _mm256_castsi256_ps(_mm256_and_si256(numbers, _mm256_set1_epi32(-0x10000)));
}

// Two vectors, so that a sum need not wait for the one before it.
struct FloatPair {
  __m256 halves[2];
};
struct IntegerPair {
  __m256i halves[2];
};

struct FloatSums : Uncorrected {
  using X = float;
  using Out = float;
  using Vector = __m256;
  using Sum = FloatPair;
  using Weights = FloatPair;
  static constexpr int kWidth = 16;
  static Sum zero() { return {}; }
  static Vector load(const float* x) { return _mm256_loadu_ps(x); }
  static FloatPair load_inputs(const float* x) { return {load(x), load(x + 8)}; }
  static void add(Vector& sum, Vector x, Vector w) { sum = _mm256_fmadd_ps(x, w, sum); }
  static void add(Sum& sum, FloatPair x, Weights w) {
    for (int i = 0; i < 2; ++i) add(sum.halves[i], x.halves[i], w.halves[i]);
  }
  template <int kCount>
  static void add_lanes(const Sum* sums, Out* out) {
    for (int i = 0; i < kCount; ++i) {
      out[i] = sum_lanes(_mm256_add_ps(sums[i].halves[0], sums[i].halves[1]));
    }
  }
};

// Inputs as they are given.
struct GivenFloats : FloatSums {
  using Given = float;
  static constexpr bool kPrepares = false;
  using FloatSums::load_inputs;
  static FloatPair load_inputs(const float* x, int64_t n) {
    return load_inputs(Padded<float, kWidth>(x, n).numbers);
  }
};

// bfloat16 inputs, made floats once for all features; behind them are zeros.
struct WidenedFloats : FloatSums {
  using Given = bf16;
  static constexpr bool kPrepares = true;
  using FloatSums::load_inputs;
  static FloatPair load_inputs(const float* x, int64_t) { return FloatSums::load_inputs(x); }
  static void prepare(const bf16* given, float* x) {
    for (int i = 0; i < kWidth; i += 8) {
      const __m256i bits = _mm256_slli_epi32(_mm256_cvtepu16_epi32(load16(given + i)), 16);
      _mm256_storeu_ps(x + i, _mm256_castsi256_ps(bits));
    }
  }
};

// `load_half<i>`: of kWidth weights those that stand in the i-th vector of a pair.
struct Float32Lanes : GivenFloats {
  using W = float;
  template <int kHalf>
  static Vector load_half(const W* w) {
    return load(w + 8 * kHalf);
  }
};

// bfloat16 numbers, multiplied and added as floats: those at even places, then those at odd ones,
// for each of which one instruction makes eight floats of sixteen numbers.
struct Bfloat16Lanes : WidenedFloats {
  using W = bf16;
  template <int kHalf>
  static Vector load_half(const W* w) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w));
    return kHalf == 0 ? even_bf16(bits) : odd_bf16(bits);
  }
  static void prepare(const bf16* given, float* x) {
    _mm256_storeu_ps(x, load_half<0>(given));
    _mm256_storeu_ps(x + 8, load_half<1>(given));
  }
};

// Weights of 8 bits, with the inputs of `Base`.
template <typename Base>
struct WithInt8Weights : Base {
  using W = int8_t;
  template <int kHalf>
  static __m256 load_half(const W* w) {
    const __m128i eight = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(w + 8 * kHalf));
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(eight));
  }
};

// Products of pairs of 16 bits, added in 32: exact.
struct Int8Lanes : Uncorrected {
  using Given = int8_t;
  using X = int16_t;
  using W = int8_t;
  using Out = int32_t;
  using Vector = __m256i;
  using Sum = IntegerPair;
  using Weights = IntegerPair;
  static constexpr int kWidth = 32;
  static constexpr bool kPrepares = true;
  static Sum zero() { return {}; }
  static Vector load(const X* x) { return _mm256_loadu_si256(reinterpret_cast<const Vector*>(x)); }
  static IntegerPair load_inputs(const X* x) { return {load(x), load(x + 16)}; }
  static IntegerPair load_inputs(const X* x, int64_t) { return load_inputs(x); }
  template <int kHalf>
  static Vector load_half(const W* w) {
    return _mm256_cvtepi8_epi16(load16(w + 16 * kHalf));
  }
  static void prepare(const int8_t* given, X* x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(x), load_half<0>(given));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(x + 16), load_half<1>(given));
  }
  static void add(Vector& sum, Vector x, Vector w) {
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(x, w));
  }
  static void add(Sum& sum, IntegerPair x, Weights w) {
    for (int i = 0; i < 2; ++i) add(sum.halves[i], x.halves[i], w.halves[i]);
  }
  template <int kCount>
  static void add_lanes(const Sum* sums, Out* out) {
    for (int i = 0; i < kCount; ++i) {
      out[i] = sum_lanes(_mm256_add_epi32(sums[i].halves[0], sums[i].halves[1]));
    }
  }
};

// `Lanes` as the loops of tiles.h want them.
template <typename Lanes>
struct WholePairs : Lanes {
  using W = typename Lanes::W;
  static typename Lanes::Weights load_weights(const W* w) {
    return {Lanes::template load_half<0>(w), Lanes::template load_half<1>(w)};
  }
  static typename Lanes::Weights load_weights(const W* w, int64_t n) {
    return load_weights(Padded<W, Lanes::kWidth>(w, n).numbers);
  }
};

// The sums of one half of all pairs.
template <typename Lanes, int kHalf, int kRows, int kFeatures>
inline void add_halves(const typename Lanes::X* x, int64_t stride, const typename Lanes::W* weight,
                       int64_t width, typename Lanes::Sum (&sums)[kRows][kFeatures]) {
  typename Lanes::Vector some[kRows][kFeatures] = {};
  const int64_t ahead = find_ahead<kFeatures>(width * static_cast<int64_t>(sizeof *weight));
  int64_t d = 0;
  for (; d + Lanes::kWidth <= width; d += Lanes::kWidth) {
    typename Lanes::Vector weights[kFeatures];
    for (int f = 0; f < kFeatures; ++f) {
      if (kHalf == 0) fetch(reinterpret_cast<const char*>(weight + f * width + d) + ahead);
      weights[f] = Lanes::template load_half<kHalf>(weight + f * width + d);
    }
    for (int r = 0; r < kRows; ++r) {
      const auto inputs = Lanes::load(x + r * stride + d + kHalf * Lanes::kWidth / 2);
      for (int f = 0; f < kFeatures; ++f) Lanes::add(some[r][f], inputs, weights[f]);
    }
  }
  if (d < width) {
    typename Lanes::Weights weights[kFeatures];
    for (int f = 0; f < kFeatures; ++f) {
      weights[f] = WholePairs<Lanes>::load_weights(weight + f * width + d, width - d);
    }
    for (int r = 0; r < kRows; ++r) {
      const auto inputs = Lanes::load_inputs(x + r * stride + d, width - d);
      for (int f = 0; f < kFeatures; ++f) {
        Lanes::add(some[r][f], inputs.halves[kHalf], weights[f].halves[kHalf]);
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int f = 0; f < kFeatures; ++f) sums[r][f].halves[kHalf] = some[r][f];
  }
}

// As `multiply_tile` for more sums, with the same bits: half of them fit into sixteen registers.
template <typename Lanes, int kRows, int kFeatures>
inline void multiply_by_halves(const typename Lanes::X* x, int64_t stride,
                               const typename Lanes::W* weight, typename Lanes::Out* out,
                               int64_t width, int64_t features) {
  typename Lanes::Sum sums[kRows][kFeatures];
  add_halves<Lanes, 0>(x, stride, weight, width, sums);
  add_halves<Lanes, 1>(x, stride, weight, width, sums);
  for (int r = 0; r < kRows; ++r) Lanes::template add_lanes<kFeatures>(sums[r], out + r * features);
}

// One row reads a feature after the other.
template <typename Lanes, int kRows>
void multiply_features(const typename Lanes::X* x, int64_t stride, const typename Lanes::W* weight,
                       typename Lanes::Out* out, int64_t width, int64_t features, int64_t begin,
                       int64_t end) {
  auto from = [&](int64_t f, auto multiply_some) {
    multiply_some(x, stride, weight + f * width, out + f, width, features);
  };
  int64_t f = begin;
  if constexpr (kRows > 2) {
    for (; f + 3 <= end; f += 3) from(f, multiply_by_halves<Lanes, kRows, 3>);
    for (; f < end; ++f) from(f, multiply_by_halves<Lanes, kRows, 1>);
  } else {
    using Whole = WholePairs<Lanes>;
    const int64_t ahead = find_ahead<kRows>(width * static_cast<int64_t>(sizeof *weight));
    const auto tile = [&](auto multiply_some) {
      multiply_some(x, stride, weight + f * width, ahead, out + f, width, features);
    };
    for (; kRows == 2 && f + 2 <= end; f += 2) tile(multiply_tile<Whole, kRows, 2>);
    for (; f < end; ++f) tile(multiply_tile<Whole, kRows, 1>);
  }
}

// A row as the lanes want it, with zeros behind it.
template <typename Lanes>
void prepare_row(const typename Lanes::Given* given, typename Lanes::X* x, int64_t width) {
  int64_t d = 0;
  for (; d + Lanes::kWidth <= width; d += Lanes::kWidth) Lanes::prepare(given + d, x + d);
  if (d == width) return;
  const Padded<typename Lanes::Given, Lanes::kWidth> last(given + d, width - d);
  Lanes::prepare(last.numbers, x + d);
}

// Rows that are multiplied at once, known when this is compiled.
constexpr int kMostRows = 4;
template <int kCount>
struct Rows {
  static constexpr int kRows = kCount;
};
template <typename Call>
void with_rows(int64_t count, Call call) {
  if (count == 1) call(Rows<1>{});
  if (count == 2) call(Rows<2>{});
  if (count == 3) call(Rows<3>{});
  if (count == 4) call(Rows<4>{});
}

// As `multiply` of tiles.h, for few registers: some rows stay in the first cache, or near it, while
// all features of a call pass over them.
template <typename Lanes>
void multiply_few(const typename Lanes::Given* given, const typename Lanes::W* weight,
                  typename Lanes::Out* out, int64_t rows, int64_t width, int64_t features,
                  int64_t begin, int64_t end) {
  const int64_t padded = (width + Lanes::kWidth - 1) / Lanes::kWidth * Lanes::kWidth;
  const int64_t stride = Lanes::kPrepares ? padded : width;
  const Prepared<typename Lanes::X> prepared(Lanes::kPrepares ? kMostRows * stride : 0);
  for (int64_t r = 0; r < rows; r += kMostRows) {
    const int64_t count = rows - r < kMostRows ? rows - r : kMostRows;
    const typename Lanes::X* x;
    if constexpr (Lanes::kPrepares) {
      for (int64_t i = 0; i < count; ++i) {
        prepare_row<Lanes>(given + (r + i) * width, prepared.numbers + i * stride, width);
      }
      x = prepared.numbers;
    } else {
      x = given + r * width;
    }
    with_rows(count, [&](auto some) {
      multiply_features<Lanes, some.kRows>(x, stride, weight, out + r * features, width, features,
                                           begin, end);
    });
  }
}

}  // namespace
}  // namespace mmjax
