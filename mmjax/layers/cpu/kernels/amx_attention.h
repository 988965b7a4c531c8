// What attention by tiles of AMX is made of. Everything here is in an unnamed namespace, as in tiles.h.
#pragma once

#include "amx.h"

namespace mmjax {
namespace {

constexpr float kLowest = -1e30f;

// 2 to the power of x, at most 0, up to 3e-6 of it: weights are rounded to 2^-9. Taylor's series.
inline __m512 exp2_of(__m512 x) {
  const __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 f = _mm512_sub_ps(x, n);
  __m512 y = _mm512_set1_ps(1.3333558e-3f);
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(9.6181291e-3f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(5.5504109e-2f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(2.4022651e-1f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(6.9314718e-1f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(y, n);
}

// A row of blocks of sums: 16 numbers from column `16 * vector` on.
inline float* find_row(float* blocks, int64_t row, int64_t vector) {
  return blocks + vector / 2 * kBlockSums + row / kTile * 2 * kTileSums + vector % 2 * kTileSums +
         row % kTile * kTile;
}

// Two vectors of 16 numbers as a row of a tile of weights: number by number, the first's below.
inline __m512i pair_up(__m256i first, __m256i second) {
  return _mm512_or_si512(_mm512_cvtepu16_epi32(first),
                         _mm512_slli_epi32(_mm512_cvtepu16_epi32(second), 16));
}

}  // namespace
}  // namespace mmjax
