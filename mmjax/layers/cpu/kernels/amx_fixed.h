// Products of some rows with weights of 8 bits by tiles of AMX: as avx512_fixed.h makes them. Weights are
// tiles as they lie, 16 features of 64 bytes; inputs are packed, 16 rows side by side, in three planes.
// Everything here is in an unnamed namespace, as in tiles.h.
#pragma once

#include "amx.h"
#include "avx512_fixed.h"

namespace mmjax {
namespace {

// 64 inputs of 16 rows: of each plane a tile.
struct alignas(64) FixedTiles {
  int8_t planes[kPlanes][kTile][kTile][4];  // [plane, four inputs, row, 4]
};

// Packed: the scales of all rows, of 16 each, and behind them tiles [blocks of rows, steps].
struct FixedRows {
  float* scales;
  FixedTiles* tiles;
  int64_t steps;
  FixedRows(void* packed, int64_t rows, int64_t width)
      : scales(static_cast<float*>(packed)),
        tiles(reinterpret_cast<FixedTiles*>(scales + round_up(rows, kTile))),
        steps(divide_up(width, kPlaneInputs)) {}
};

inline int64_t find_fixed_size(int64_t rows, int64_t width) {
  const int64_t blocks = divide_up(rows, kTile), steps = divide_up(width, kPlaneInputs);
  const auto bytes = blocks * (kTile * static_cast<int64_t>(sizeof(float)) +
                               steps * static_cast<int64_t>(sizeof(FixedTiles)));
  return bytes / static_cast<int64_t>(sizeof(bf16));
}

inline void pack_fixed(const bf16* x, int64_t rows, int64_t width, bf16* packed) {
  __builtin_memset(packed, 0, static_cast<size_t>(find_fixed_size(rows, width)) * sizeof(bf16));
  const FixedRows to(packed, rows, width);
  for (int64_t r = 0; r < rows; ++r) {
    const bf16* const row = x + r * width;
    to.scales[r] = find_fixed_scale(row, width);
    for (int64_t step = 0; step < to.steps; ++step) {
      FixedTiles& tiles = to.tiles[r / kTile * to.steps + step];
      make_planes(row, width, step * kPlaneInputs, to.scales[r], [&](int plane, __m512i bytes) {
        alignas(64) int32_t fours[kTile];
        _mm512_store_si512(fours, bytes);
        for (int64_t i = 0; i < kTile; ++i) {
          __builtin_memcpy(tiles.planes[plane][i][r % kTile], fours + i, sizeof *fours);
        }
      });
    }
  }
}

// Add the products of 16 features, `stride` bytes apart, to tiles 0 to 2.
inline void add_planes(const int8_t* weight, int64_t stride, const FixedTiles& rows) {
  _tile_loadd(4, weight, stride);
  _tile_loadd(5, rows.planes[0], 64);
  _tile_dpbssd(0, 4, 5);
  _tile_loadd(6, rows.planes[1], 64);
  _tile_dpbssd(1, 4, 6);
  _tile_loadd(7, rows.planes[2], 64);
  _tile_dpbssd(2, 4, 7);
}

// The sums of `count` features, up to 16, with 16 rows: [features, rows].
inline void sum_fixed(const int8_t* weight, int64_t count, int64_t width, const FixedTiles* rows,
               const float* scales, float (&out)[kTile][kTile]) {
  alignas(64) int32_t sums[kPlanes][kTile][kTile];
  alignas(64) int8_t copy[kTile][kPlaneInputs];
  note_written(weight);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  for (int64_t d = 0; d < width; d += kPlaneInputs, ++rows) {
    if (count == kTile && d + kPlaneInputs <= width) {
      // Sixteen features on lie those that come next.
      const int8_t* const next = weight + kTile * width + d;
      for (int64_t i = 0; i < kTile; ++i) fetch(next + i * width);
      add_planes(weight + d, width, *rows);
      continue;
    }
    for (int64_t i = 0; i < kTile; ++i) {
      const auto mask = i < count ? first_bytes(width - d) : __mmask64{0};
      const int8_t* const from = i < count ? weight + i * width + d : weight;
      _mm512_store_si512(copy[i], _mm512_maskz_loadu_epi8(mask, from));
    }
    note_written(copy);
    add_planes(copy[0], kPlaneInputs, *rows);
  }
  _tile_stored(0, sums[0], 64);
  _tile_stored(1, sums[1], 64);
  _tile_stored(2, sums[2], 64);
  note_written(sums);
  const __m512 scale = _mm512_load_ps(scales);
  for (int64_t i = 0; i < count; ++i) {
    const __m512i planes[kPlanes] = {_mm512_load_si512(sums[0][i]), _mm512_load_si512(sums[1][i]),
                                     _mm512_load_si512(sums[2][i])};
    _mm512_store_ps(out[i], _mm512_mul_ps(join_planes(planes), scale));
  }
}

inline void multiply_packed_fixed(const bf16* packed, const int8_t* weight, float* out, int64_t rows,
                           int64_t width, int64_t features, int64_t begin, int64_t end) {
  const FixedRows from(const_cast<bf16*>(packed), rows, width);
  const Tiles tiles;
  for (int64_t f = begin; f < end; f += kTile) {
    const int64_t count = least(kTile, end - f);
    for (int64_t first = 0; first < rows; first += kTile) {
      alignas(64) float sums[kTile][kTile];
      sum_fixed(weight + f * width, count, width, from.tiles + first / kTile * from.steps,
                from.scales + first, sums);
      for (int64_t r = first; r < least(first + kTile, rows); ++r) {
        for (int64_t i = 0; i < count; ++i) out[r * features + f + i] = sums[i][r - first];
      }
    }
  }
}

}  // namespace
}  // namespace mmjax
