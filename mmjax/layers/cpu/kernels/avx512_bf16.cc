// AVX-512 with VNNI and bfloat16 instructions (Zen 4, Cooper Lake and Sapphire Rapids on).
#include "attention.h"
#include "pairs.h"
#include "rows.h"

namespace mmjax {
namespace {

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
