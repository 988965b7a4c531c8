// Products of bfloat16 inputs with weights of 8 bits, added as integers, for AVX-512 with VNNI. A row of
// inputs is three bytes of fixed point each, so sums are exact, in any order. Everything here is in an
// unnamed namespace, as in tiles.h.
#pragma once

#include "avx512_integers.h"

namespace mmjax {
namespace {

constexpr int kPlanes = 3;       // bytes of an input, the highest first
constexpr int kPlaneInputs = 64;

// What a row's integers are multiplied by: a power of two. All inputs are exact but those below a
// 16,384th of the row's largest, which are a four millionth of it off at most.
inline float find_fixed_scale(const bf16* x, int64_t width) {
  __m512i largest = _mm512_setzero_si512();
  for (int64_t d = 0; d < width; d += 32) {
    const auto mask = width - d >= 32 ? first32(32) : first32(width - d);
    const __m512i sizes = _mm512_and_si512(_mm512_maskz_loadu_epi16(mask, x + d),
                                           _mm512_set1_epi16(0x7fff));
    largest = _mm512_max_epu16(largest, sizes);
  }
  const int exponent = largest_exponent(largest);
  if (exponent == 128) return __builtin_nanf("");
  return power_of_two((exponent < -96 ? -96 : exponent) - 21);
}

// The planes of 64 inputs from `d` on, zeros behind the last. `write(plane, bytes)`.
template <typename Write>
inline void make_planes(const bf16* x, int64_t width, int64_t d, float scale, Write write) {
  const __m512 up = _mm512_set1_ps(scale == scale ? 1 / scale : 0);
  __m128i bytes[kPlanes][4];
  for (int i = 0; i < 4; ++i) {
    const int64_t left = width - d - 16 * i;
    const auto mask = left >= 16 ? first16(16) : left > 0 ? first16(left) : __mmask16{0};
    const __m256i bits = _mm256_maskz_loadu_epi16(mask, x + (left > 0 ? d + 16 * i : 0));
    __m512i rest = _mm512_cvtps_epi32(_mm512_mul_ps(widen_bf16(bits), up));
    for (int plane = kPlanes - 1; plane >= 0; --plane) {
      bytes[plane][i] = _mm512_cvtepi32_epi8(rest);
      rest = _mm512_srai_epi32(_mm512_add_epi32(rest, _mm512_set1_epi32(128)), 8);
    }
  }
  for (int plane = 0; plane < kPlanes; ++plane) {
    __m512i all = _mm512_castsi128_si512(bytes[plane][0]);
    all = _mm512_inserti32x4(all, bytes[plane][1], 1);
    all = _mm512_inserti32x4(all, bytes[plane][2], 2);
    write(plane, _mm512_inserti32x4(all, bytes[plane][3], 3));
  }
}

// Sixteen sums, given by planes.
inline __m512 join_planes(const __m512i (&sums)[kPlanes]) {
  __m256 halves[2];
  for (int i = 0; i < 2; ++i) {
    __m512i all = _mm512_setzero_si512();
    for (int plane = 0; plane < kPlanes; ++plane) {
      const __m256i some = i == 0 ? _mm512_castsi512_si256(sums[plane])
                                  : _mm512_extracti64x4_epi64(sums[plane], 1);
      all = _mm512_add_epi64(_mm512_slli_epi64(all, 8), _mm512_cvtepi32_epi64(some));
    }
    halves[i] = _mm512_cvtepi64_ps(all);
  }
  return _mm512_insertf32x8(_mm512_castps256_ps512(halves[0]), halves[1], 1);
}

// A row for vectors: `planes` [steps, kPlanes, 64].
struct FixedRow {
  int8_t* planes;
  float scale;
  int32_t offsets[kPlanes];  // 128 times the sum of a plane
};

inline void prepare_fixed(const bf16* x, int64_t width, FixedRow& row) {
  row.scale = find_fixed_scale(x, width);
  __m512i sums[kPlanes] = {};
  int8_t* to = row.planes;
  for (int64_t d = 0; d < width; d += kPlaneInputs, to += kPlanes * kPlaneInputs) {
    make_planes(x, width, d, row.scale, [&](int plane, __m512i bytes) {
      _mm512_store_si512(to + plane * kPlaneInputs, bytes);
      sums[plane] = _mm512_dpbusd_epi32(sums[plane], _mm512_set1_epi8(-128), bytes);
    });
  }
  for (int plane = 0; plane < kPlanes; ++plane) {
    row.offsets[plane] = _mm512_reduce_add_epi32(sums[plane]);
  }
}

// A feature with some rows. The instruction multiplies unsigned with signed bytes: 128 is added to the
// weights, and what it makes of the inputs is subtracted at last.
template <int kRows>
inline void multiply_fixed_rows(const FixedRow* rows, const int8_t* weight, int64_t width,
                                float* out, int64_t features) {
  __m512i sums[kRows][kPlanes] = {};
  for (int64_t d = 0; d < width; d += kPlaneInputs) {
    fetch(weight + d + kAheadBytes);
    const __m512i signs = _mm512_maskz_loadu_epi8(first_bytes(width - d), weight + d);
    const __m512i numbers = _mm512_xor_si512(signs, _mm512_set1_epi8(-128));
    for (int r = 0; r < kRows; ++r) {
      const int8_t* const planes = rows[r].planes + d * kPlanes;
      for (int plane = 0; plane < kPlanes; ++plane) {
        const __m512i bytes = _mm512_load_si512(planes + plane * kPlaneInputs);
        sums[r][plane] = _mm512_dpbusd_epi32(sums[r][plane], numbers, bytes);
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    int64_t all = 0;
    for (int plane = 0; plane < kPlanes; ++plane) {
      const auto sum = static_cast<uint32_t>(_mm512_reduce_add_epi32(sums[r][plane]));
      const auto offset = static_cast<uint32_t>(rows[r].offsets[plane]);
      all = all * 256 + static_cast<int32_t>(sum - offset);
    }
    out[r * features] = static_cast<float>(all) * rows[r].scale;
  }
}

inline void multiply_fixed(const bf16* x, const int8_t* weight, float* out, int64_t rows,
                           int64_t width, int64_t features, int64_t begin, int64_t end) {
  constexpr int64_t most_rows = 4;
  const int64_t size = (width + kPlaneInputs - 1) / kPlaneInputs * kPlaneInputs * kPlanes;
  const Prepared<int8_t> planes(most_rows * size);
  FixedRow prepared[most_rows];
  for (int64_t i = 0; i < most_rows; ++i) prepared[i].planes = planes.numbers + i * size;
  for (int64_t r = 0; r < rows;) {
    const int64_t count = rows - r >= most_rows ? most_rows : rows - r >= 2 ? 2 : 1;
    for (int64_t i = 0; i < count; ++i) prepare_fixed(x + (r + i) * width, width, prepared[i]);
    const auto multiply_rows = count == 4   ? multiply_fixed_rows<4>
                               : count == 2 ? multiply_fixed_rows<2>
                                            : multiply_fixed_rows<1>;
    for (int64_t f = begin; f < end; ++f) {
      multiply_rows(prepared, weight + f * width, width, out + r * features + f, features);
    }
    r += count;
  }
}

}  // namespace
}  // namespace mmjax
