// AVX-512 with VNNI and bfloat16 instructions (Zen 4, Cooper Lake and Sapphire Rapids on).
#include "attention.h"
#include "avx512.h"
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

// Integers of 8 bits are bfloat16 numbers without rounding.
struct Int8PairLanes : PairLanes {
  using W = int8_t;
  static Weights narrow(Halves wide) { return _mm512_cvtne2ps_pbh(wide.high, wide.low); }
  static Weights load_weights(const W* w) { return narrow(Bfloat16Int8Lanes::load_weights(w)); }
  static Weights load_weights(const W* w, int64_t n) {
    return narrow(Bfloat16Int8Lanes::load_weights(w, n));
  }
};

// The instruction multiplies unsigned with signed bytes: 128 is added to the inputs, and 128 times
// the sum of the weights is subtracted at last. Exact.
struct Int8DotLanes : IntegerSums {
  using X = int8_t;
  using W = int8_t;
  using Weights = __m512i;
  using Correction = __m512i;
  static constexpr int kWidth = 64;
  static Correction no_correction() { return _mm512_setzero_si512(); }
  static __m512i offset(__m512i x) { return _mm512_xor_si512(x, _mm512_set1_epi8(-128)); }
  static __m512i load_inputs(const X* x) { return offset(_mm512_loadu_si512(x)); }
  static __m512i load_inputs(const X* x, int64_t n) {
    return offset(_mm512_maskz_loadu_epi8(first64(n), x));
  }
  static Weights load_weights(const W* w) { return _mm512_loadu_si512(w); }
  static Weights load_weights(const W* w, int64_t n) {
    return _mm512_maskz_loadu_epi8(first64(n), w);
  }
  static void correct(Correction& sum, Weights w) {
    sum = _mm512_dpbusd_epi32(sum, _mm512_set1_epi8(-128), w);
  }
  static void add(Sum& sum, __m512i x, Weights w) { sum = _mm512_dpbusd_epi32(sum, x, w); }
  static Sum corrected(Sum sum, Correction correction) {
    return _mm512_sub_epi32(sum, correction);
  }
};

// 32 weights as bfloat16 numbers, all of them without rounding.
struct Uint4Pairs : Uint4Codes {
  using Zero = __m512i;  // of each code, its number, twice: a lookup reads 5 bits of an index
  static Zero make_zero(int zero) {
    const __m512 numbers = Uint4Codes::make_zero(zero);
    return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(numbers, numbers));
  }
  static __m512bh decode32(const uint8_t* codes, int64_t d, Zero numbers) {
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + byte_of(d)));
    const __m128i shift = _mm_cvtsi32_si128(code_shift(d));
    const __m512i indices = _mm512_srl_epi16(_mm512_cvtepu8_epi16(bytes), shift);
    return as_bf16(_mm512_permutexvar_epi16(indices, numbers));
  }
  static __m512bh decode32(const uint8_t* codes, int64_t d, Zero numbers, int64_t) {
    return decode32(codes, d, numbers);  // rows are padded
  }
};

struct Uint8Pairs : Uint8Codes {
  static __m512bh narrow(__m256i bytes, Zero zero) {
    return _mm512_cvtne2ps_pbh(widen(_mm256_extracti128_si256(bytes, 1), zero),
                               widen(_mm256_castsi256_si128(bytes), zero));
  }
  static __m512bh decode32(const uint8_t* codes, int64_t d, Zero zero) {
    return narrow(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + d)), zero);
  }
  static __m512bh decode32(const uint8_t* codes, int64_t d, Zero zero, int64_t count) {
    return narrow(_mm256_maskz_loadu_epi8(first32(count), codes + d), zero);
  }
};

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

template <typename Codes, typename Pairs>
constexpr GroupProducts kGroups = {multiply_groups<Float32GroupLanes<Codes>>,
                                   multiply_groups<PairGroupLanes<Pairs>>};

}  // namespace

const Products kAvx512Bf16 = {multiply<Float32Lanes>,
                              multiply<Bfloat16PairLanes>,
                              multiply<Int8DotLanes>,
                              multiply<Float32Int8Lanes>,
                              multiply<Int8PairLanes>,
                              attend_chunk<float>,
                              attend_chunk<bf16>,
                              norm_rows<float>,
                              norm_rows<bf16>,
                              rotate_rows<float>,
                              rotate_rows<bf16>,
                              kGroups<Uint4Codes, Uint4Pairs>,
                              kGroups<Uint8Codes, Uint8Pairs>,
                              kGroups<Float8Codes, Float8Pairs>,
                              "avx512_bf16"};

}  // namespace mmjax
