// AVX-512 with VNNI and bfloat16 instructions (Zen 4, Cooper Lake and Sapphire Rapids on).
#include "attention.h"
#include "avx512.h"
#include "avx512_fixed.h"
#include "avx512_integers.h"
#include "rows.h"

namespace mmjax {
namespace {

inline __m512bh as_bf16(__m512i bits) { return reinterpret_cast<__m512bh>(bits); }

// The instruction adds the products of two neighbours in float, and flushes denormal numbers.
struct PairLanes : Uncorrected, FloatSums {
  using X = bf16;
  using Weights = __m512bh;
  static constexpr int kWidth = 32;
  static __m512bh load_inputs(const X* x) { return as_bf16(_mm512_loadu_si512(x)); }
  static __m512bh load_inputs(const X* x, int64_t n) {
    return as_bf16(_mm512_maskz_loadu_epi16(first32(n), x));
  }
  static void add(Sum& sum, __m512bh x, Weights w) { sum = _mm512_dpbf16_ps(sum, x, w); }
};

struct Bfloat16PairLanes : PairLanes {
  using W = bf16;
  static Weights load_weights(const W* w) { return load_inputs(w); }
  static Weights load_weights(const W* w, int64_t n) { return load_inputs(w, n); }
};

// 32 weights as bfloat16 numbers, without rounding.
struct Float8Pairs : Float8Codes {
  static __m512bh narrow(__m256i bytes) {
    const __m512i bits = _mm512_cvtepu8_epi16(bytes);
    const __m512i size = _mm512_and_si512(bits, _mm512_set1_epi16(0x7f));
    const __m512i normal =
        _mm512_add_epi16(_mm512_slli_epi16(size, 4), _mm512_set1_epi16(120 << 7));
    // Multiples of 2^-9 below the least normal number.
    const __m128i multiples = _mm_setr_epi16(0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60);
    const __mmask32 is_denormal = _mm512_cmplt_epi16_mask(size, _mm512_set1_epi16(8));
    const __m512i sizes = _mm512_mask_permutexvar_epi16(normal, is_denormal, size,
                                                        _mm512_castsi128_si512(multiples));
    const __m512i sign = _mm512_slli_epi16(_mm512_srli_epi16(bits, 7), 15);
    return as_bf16(_mm512_or_si512(sizes, sign));
  }
  static __m512bh decode32(const uint8_t* codes, int64_t d, Zero) {
    return narrow(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + d)));
  }
  static __m512bh decode32(const uint8_t* codes, int64_t d, Zero, int64_t count) {
    return narrow(_mm256_maskz_loadu_epi8(first32(count), codes + d));
  }
};

template <typename Pairs>
struct PairGroupLanes : Pairs, ScaledSums {
  using X = bf16;
  using Weights = __m512bh;
  static constexpr int kWidth = PairLanes::kWidth;
  static __m512bh load_inputs(const X* x) { return PairLanes::load_inputs(x); }
  static __m512bh load_inputs(const X* x, int64_t n) { return PairLanes::load_inputs(x, n); }
  template <typename... Left>
  static Weights decode(const uint8_t* codes, int64_t d, typename Pairs::Zero zero, Left... left) {
    return Pairs::decode32(codes, d, zero, left...);
  }
  static void add(Sum& sum, __m512bh x, Weights w) { PairLanes::add(sum, x, w); }
};

}  // namespace

const Products kAvx512Bf16 = {multiply<Float32Lanes>,
                              multiply<Bfloat16PairLanes>,
                              multiply<Int8DotLanes>,
                              multiply<Float32Int8Lanes>,
                              multiply_fixed,
                              attend_chunk<float>,
                              attend_chunk<bf16>,
                              norm_rows<float>,
                              norm_rows<bf16>,
                              rotate_rows<float>,
                              rotate_rows<bf16>,
                              kIntegerGroups<Uint4Codes, Uint4Bytes>,
                              kIntegerGroups<Uint8Codes, Uint8Bytes>,
                              {multiply_groups<Float32GroupLanes<Float8Codes>>,
                               multiply_groups<PairGroupLanes<Float8Pairs>>,
                               nullptr},
                              "avx512_bf16"};

}  // namespace mmjax
