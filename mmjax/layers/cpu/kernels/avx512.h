// Lanes of AVX-512 (F, BW, VL) that both files of AVX-512 use.
#pragma once

#include <immintrin.h>

#include "tiles.h"

namespace mmjax {
namespace {

inline __mmask16 first16(int64_t count) { return static_cast<__mmask16>((1u << count) - 1u); }
inline __mmask32 first32(int64_t count) { return static_cast<__mmask32>((1ull << count) - 1u); }
inline __mmask64 first64(int64_t count) { return static_cast<__mmask64>((1ull << count) - 1u); }

// Lanes as floats or integers, whose sums are made below.
struct AddFloats {
  static __m512 add(__m512 a, __m512 b) { return _mm512_add_ps(a, b); }
};
struct AddIntegers {
  static __m512 add(__m512 a, __m512 b) {
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a), _mm512_castps_si512(b)));
  }
};

// Sums of lanes, of several vectors at a time. Each is made by the same tree (lanes 8 apart, then 4,
// 2 and 1): a sum's bits do not depend on the vectors beside it.
template <typename Adder>
inline __m512 add_halves(__m512 a, __m512 b) {  // 8 lanes of a, 8 of b
  return Adder::add(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
}
template <typename Adder>
inline __m512 add_quarters(__m512 a, __m512 b) {  // 4 lanes of each half of a, and of b
  return Adder::add(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}
template <typename Adder>
inline __m512 add_last(__m512 a, __m512 b, __m512 c, __m512 d) {  // by quarters: of a, b, c, d
  const __m512 ab = Adder::add(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));
  const __m512 cd = Adder::add(_mm512_shuffle_ps(c, d, 0x44), _mm512_shuffle_ps(c, d, 0xee));
  return Adder::add(_mm512_shuffle_ps(ab, cd, 0x88), _mm512_shuffle_ps(ab, cd, 0xdd));
}

template <typename Adder>
inline __m512 add_sixteen(const __m512* v) {
  __m512 sums[4];
  for (int i = 0; i < 4; ++i) {
    sums[i] = add_quarters<Adder>(add_halves<Adder>(v[i], v[i + 4]),
                                  add_halves<Adder>(v[i + 8], v[i + 12]));
  }
  return add_last<Adder>(sums[0], sums[1], sums[2], sums[3]);
}

template <typename Adder>
inline __m512 add_four(__m512 a, __m512 b, __m512 c, __m512 d) {  // in the first four lanes
  auto fold = [](__m512 v) {
    const __m512 half = add_halves<Adder>(v, v);
    return add_quarters<Adder>(half, half);
  };
  return add_last<Adder>(fold(a), fold(b), fold(c), fold(d));
}

template <typename Adder, int kCount>
inline void add_all_lanes(const __m512* v, float* out) {
  if constexpr (kCount == 16) {
    _mm512_storeu_ps(out, add_sixteen<Adder>(v));
  } else if constexpr (kCount % 4 == 0) {
    for (int i = 0; i < kCount; i += 4) {
      const __m512 sums = add_four<Adder>(v[i], v[i + 1], v[i + 2], v[i + 3]);
      _mm_storeu_ps(out + i, _mm512_castps512_ps128(sums));
    }
  } else {
    for (int i = 0; i < kCount; ++i) {
      out[i] = _mm512_cvtss_f32(add_four<Adder>(v[i], v[i], v[i], v[i]));
    }
  }
}

struct FloatSums {
  using Out = float;
  using Sum = __m512;
  static Sum zero() { return _mm512_setzero_ps(); }
  template <int kCount>
  static void add_lanes(const Sum* sums, Out* out) {
    add_all_lanes<AddFloats, kCount>(sums, out);
  }
};

struct IntegerSums {
  using Out = int32_t;
  using Sum = __m512i;
  static Sum zero() { return _mm512_setzero_si512(); }
  template <int kCount>
  static void add_lanes(const Sum* sums, Out* out) {
    __m512 bits[kCount];
    float totals[kCount];
    for (int i = 0; i < kCount; ++i) bits[i] = _mm512_castsi512_ps(sums[i]);
    add_all_lanes<AddIntegers, kCount>(bits, totals);
    __builtin_memcpy(out, totals, sizeof totals);
  }
};

struct Float32Lanes : Uncorrected, FloatSums {
  using X = float;
  using W = float;
  using Weights = __m512;
  static constexpr int kWidth = 16;
  static __m512 load_inputs(const X* x) { return _mm512_loadu_ps(x); }
  static __m512 load_inputs(const X* x, int64_t n) { return _mm512_maskz_loadu_ps(first16(n), x); }
  static Weights load_weights(const W* w) { return _mm512_loadu_ps(w); }
  static Weights load_weights(const W* w, int64_t n) { return _mm512_maskz_loadu_ps(first16(n), w); }
  static void add(Sum& sum, __m512 x, Weights w) { sum = _mm512_fmadd_ps(x, w, sum); }
};

struct Float32Int8Lanes : Float32Lanes {
  using W = int8_t;
  static Weights widen(__m128i bytes) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)); }
  static Weights load_weights(const W* w) {
    return widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(w)));
  }
  static Weights load_weights(const W* w, int64_t n) {
    return widen(_mm_maskz_loadu_epi8(first16(n), w));
  }
};

// Two vectors of 16 floats, of 32 numbers of 16 or 8 bits.
struct Halves {
  __m512 low, high;
};

inline __m512 widen_bf16(__m256i bits) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

inline Halves widen_bf16(__m512i bits) {
  return {widen_bf16(_mm512_castsi512_si256(bits)), widen_bf16(_mm512_extracti64x4_epi64(bits, 1))};
}

inline Halves widen_int8(__m256i bytes) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(bytes))),
          _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(bytes, 1)))};
}

// bfloat16 numbers, multiplied and added as floats.
struct WidenedLanes : Uncorrected, FloatSums {
  using X = bf16;
  using Weights = Halves;
  static constexpr int kWidth = 32;
  static Halves load_inputs(const X* x) { return widen_bf16(_mm512_loadu_si512(x)); }
  static Halves load_inputs(const X* x, int64_t n) {
    return widen_bf16(_mm512_maskz_loadu_epi16(first32(n), x));
  }
  static void add(Sum& sum, Halves x, Weights w) {
    sum = _mm512_fmadd_ps(x.low, w.low, sum);
    sum = _mm512_fmadd_ps(x.high, w.high, sum);
  }
};

struct Bfloat16Lanes : WidenedLanes {
  using W = bf16;
  static Weights load_weights(const W* w) { return load_inputs(w); }
  static Weights load_weights(const W* w, int64_t n) { return load_inputs(w, n); }
};

struct Bfloat16Int8Lanes : WidenedLanes {
  using W = int8_t;
  static Weights load_weights(const W* w) {
    return widen_int8(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(w)));
  }
  static Weights load_weights(const W* w, int64_t n) {
    return widen_int8(_mm256_maskz_loadu_epi8(first32(n), w));
  }
};

// Codes of 16 weights as floats, the zero of their group taken off: what `first16(count)` leaves.
struct Uint4Codes {
  using Zero = __m512;  // of each code, its number
  static constexpr int kMiddle = 8;
  static int64_t byte_of(int64_t d) { return code_byte(d); }
  static Zero make_zero(int zero) {
    const __m512 codes = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return _mm512_sub_ps(codes, _mm512_set1_ps(static_cast<float>(zero)));
  }
  static __m512 decode16(const uint8_t* codes, int64_t d, Zero numbers) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + byte_of(d)));
    const __m128i shift = _mm_cvtsi32_si128(code_shift(d));
    // A lookup reads the lowest 4 bits of an index.
    return _mm512_permutexvar_ps(_mm512_srl_epi32(_mm512_cvtepu8_epi32(bytes), shift), numbers);
  }
  static __m512 decode16(const uint8_t* codes, int64_t d, Zero numbers, int64_t) {
    return decode16(codes, d, numbers);  // rows are padded
  }
};

struct Uint8Codes {
  using Zero = __m512;
  static constexpr int kMiddle = 128;
  static int64_t byte_of(int64_t d) { return d; }
  static Zero make_zero(int zero) { return _mm512_set1_ps(static_cast<float>(zero)); }
  static __m512 widen(__m128i bytes, Zero zero) {
    return _mm512_sub_ps(_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes)), zero);
  }
  static __m512 decode16(const uint8_t* codes, int64_t d, Zero zero) {
    return widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + d)), zero);
  }
  static __m512 decode16(const uint8_t* codes, int64_t d, Zero zero, int64_t count) {
    return widen(_mm_maskz_loadu_epi8(first16(count), codes + d), zero);
  }
};

struct Float8Codes {
  struct Zero {};
  static constexpr int kMiddle = 0;
  static int64_t byte_of(int64_t d) { return d; }
  static Zero make_zero(int) { return {}; }
  // The exponent has another bias. Numbers below the least normal one get an exponent, whose power
  // of two is then subtracted: denormal floats might be flushed.
  static __m512 widen(__m128i bytes) {
    const __m512i bits = _mm512_cvtepu8_epi32(bytes);
    const __m512i size = _mm512_and_si512(bits, _mm512_set1_epi32(0x7f));
    const __mmask16 is_denormal = _mm512_cmplt_epi32_mask(size, _mm512_set1_epi32(8));
    __m512i wide = _mm512_add_epi32(_mm512_slli_epi32(size, 20), _mm512_set1_epi32(120 << 23));
    wide = _mm512_mask_add_epi32(wide, is_denormal, wide, _mm512_set1_epi32(1 << 23));
    const __m512 least = _mm512_set1_ps(0x1p-6f), out = _mm512_castsi512_ps(wide);
    const __m512i sizes = _mm512_castps_si512(_mm512_mask_sub_ps(out, is_denormal, out, least));
    const __m512i sign = _mm512_slli_epi32(_mm512_srli_epi32(bits, 7), 31);
    return _mm512_castsi512_ps(_mm512_or_si512(sizes, sign));
  }
  static __m512 decode16(const uint8_t* codes, int64_t d, Zero) {
    return widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + d)));
  }
  static __m512 decode16(const uint8_t* codes, int64_t d, Zero, int64_t count) {
    return widen(_mm_maskz_loadu_epi8(first16(count), codes + d));
  }
};

struct ScaledSums : FloatSums {
  static void add_scaled(Sum& sum, Sum part, float scale) {
    sum = _mm512_fmadd_ps(part, _mm512_set1_ps(scale), sum);
  }
};

template <typename Codes>
struct Float32GroupLanes : Codes, ScaledSums {
  using X = float;
  using Weights = __m512;
  static constexpr int kWidth = 16;
  static __m512 load_inputs(const X* x) { return _mm512_loadu_ps(x); }
  static __m512 load_inputs(const X* x, int64_t n) { return _mm512_maskz_loadu_ps(first16(n), x); }
  template <typename... Left>
  static Weights decode(const uint8_t* codes, int64_t d, typename Codes::Zero zero, Left... left) {
    return Codes::decode16(codes, d, zero, left...);
  }
  static void add(Sum& sum, __m512 x, Weights w) { sum = _mm512_fmadd_ps(x, w, sum); }
};

// bfloat16 numbers, multiplied and added as floats.
template <typename Codes>
struct Bfloat16GroupLanes : Float32GroupLanes<Codes> {
  using X = bf16;
  static __m512 load_inputs(const X* x) {
    return widen_bf16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
  }
  static __m512 load_inputs(const X* x, int64_t n) {
    return widen_bf16(_mm256_maskz_loadu_epi16(first16(n), x));
  }
};

}  // namespace
}  // namespace mmjax
