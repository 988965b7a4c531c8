// AVX-512 (F, BW, VL), with neither VNNI nor bfloat16 instructions.
#include "attention.h"
#include "avx512.h"
#include "rows.h"

namespace mmjax {
namespace {

// Products of pairs of 16 bits, added in 32: exact.
struct Int8Lanes : Uncorrected, IntegerSums {
  using X = int8_t;
  using W = int8_t;
  using Weights = __m512i;
  static constexpr int kWidth = 32;
  static __m512i load_inputs(const X* x) {
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
  }
  static __m512i load_inputs(const X* x, int64_t n) {
    return _mm512_cvtepi8_epi16(_mm256_maskz_loadu_epi8(first32(n), x));
  }
  static Weights load_weights(const W* w) { return load_inputs(w); }
  static Weights load_weights(const W* w, int64_t n) { return load_inputs(w, n); }
  static void add(Sum& sum, __m512i x, Weights w) {
    sum = _mm512_add_epi32(sum, _mm512_madd_epi16(x, w));
  }
};

template <typename Codes>
constexpr GroupProducts kGroups = {multiply_groups<Float32GroupLanes<Codes>>,
                                   multiply_groups<Bfloat16GroupLanes<Codes>>,
                                   nullptr};

}  // namespace

const Products kAvx512 = {multiply<Float32Lanes>,
                          multiply<Bfloat16Lanes>,
                          multiply<Int8Lanes>,
                          multiply<Float32Int8Lanes>,
                          multiply<Bfloat16Int8Lanes>,
                          attend_chunk<float>,
                          attend_chunk<bf16>,
                          norm_rows<float>,
                          norm_rows<bf16>,
                          rotate_rows<float>,
                          rotate_rows<bf16>,
                          kGroups<Uint4Codes>,
                          kGroups<Uint8Codes>,
                          kGroups<Float8Codes>,
                          "avx512"};

}  // namespace mmjax
