// Codes of weights as bfloat16 numbers, with AVX512-BF16.
#pragma once

#include "avx512.h"

namespace mmjax {
namespace {

inline __m512bh as_bf16(__m512i bits) { return reinterpret_cast<__m512bh>(bits); }

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
  // Two times 32, whose codes are in the same bytes: `d` is a multiple of 64.
  static void decode64(const uint8_t* codes, int64_t d, Zero first, Zero second,
                       __m512bh (&out)[2]) {
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + d / 2));
    const __m512i wide = _mm512_cvtepu8_epi16(bytes);
    out[0] = as_bf16(_mm512_permutexvar_epi16(wide, first));
    out[1] = as_bf16(_mm512_permutexvar_epi16(_mm512_srli_epi16(wide, 4), second));
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

}  // namespace
}  // namespace mmjax
