// Tiles of AMX: 16 by 16 sums of the products of rows with features.
//
// A tile of inputs is 16 rows of 64 bytes, as they lie. A tile of weights has 16 features side by
// side, and the next four bytes of each below, so weights are packed. Everything here is in an
// unnamed namespace, as in tiles.h, and no header of the library is included that has functions.
#pragma once

#include <type_traits>

#include "avx512.h"

namespace mmjax {
namespace {

constexpr int64_t kTile = 16;             // rows, and columns, of a tile of sums
constexpr int64_t kTileSums = kTile * kTile;
constexpr int64_t kBlock = 2 * kTile;     // rows, and features, whose sums registers hold
constexpr int64_t kBlockSums = kBlock * kBlock;

// Inputs of a tile.
template <typename X>
constexpr int64_t kDepth = 64 / sizeof(X);
template <typename X>
using SumOf = std::conditional_t<std::is_same_v<X, bf16>, float, int32_t>;

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t divide_up(int64_t number, int64_t by) { return (number + by - 1) / by; }
inline int64_t round_up(int64_t number, int64_t step) { return divide_up(number, step) * step; }

// Tell the compiler that memory will be read: it does not know what tiles are loaded from.
inline void note_written(const void* memory) { __asm__ volatile("" : : "r"(memory) : "memory"); }

// This thread's tiles, all of them whole, while it lives.
class Tiles {
 public:
  Tiles() {
    alignas(64) struct {
      uint8_t palette = 1, reserved[15] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    note_written(&config);
    _tile_loadconfig(&config);
  }
  ~Tiles() { _tile_release(); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

// Memory that begins with a line of the cache: a tile's rows would be two lines each.
template <typename T>
class Lines {
 public:
  Lines() = default;
  ~Lines() { _mm_free(numbers_); }
  Lines(const Lines&) = delete;
  Lines& operator=(const Lines&) = delete;

  // Room for `count` numbers, which are what was there before, or nothing in particular.
  T* reserve(int64_t count) {
    if (count > count_) {
      _mm_free(numbers_);
      numbers_ = static_cast<T*>(_mm_malloc(static_cast<size_t>(count) * sizeof(T), 64));
      count_ = count;
    }
    return numbers_;
  }

 private:
  T* numbers_ = nullptr;
  int64_t count_ = 0;
};

// Up to 32 rows' inputs, `stride` numbers apart, of which whole tiles can be read.
template <typename X>
struct Inputs {
  const X* x;
  int64_t stride;
};

// The compiler wants tiles' numbers as they are written.
#define MMJAX_ADD_TILES(SUM, ROWS, FEATURES)    \
  if constexpr (std::is_same_v<X, bf16>) {      \
    _tile_dpbf16ps(SUM, ROWS, FEATURES);        \
  } else {                                      \
    _tile_dpbssd(SUM, ROWS, FEATURES);          \
  }

// Add the products of up to 32 rows with up to 32 features to `sums`, tiles [2 of rows, 2 of
// features]. `packed`: tiles [steps, 2], which pass by the first cache, that holds the rows.
// Meanwhile, `num_next` rows from `next` on are fetched.
template <typename X, bool kTwoRows, bool kTwoFeatures>
void add_products(Inputs<X> rows, const X* packed, int64_t steps, SumOf<X>* sums, bool is_first,
                  const X* next, int64_t num_next) {
  note_written(rows.x);
  if (is_first) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, sums, 64);
    if (kTwoFeatures) _tile_loadd(1, sums + kTileSums, 64);
    if (kTwoRows) _tile_loadd(2, sums + 2 * kTileSums, 64);
    if (kTwoRows && kTwoFeatures) _tile_loadd(3, sums + 3 * kTileSums, 64);
  }
  const auto row_bytes = static_cast<size_t>(rows.stride) * sizeof(X);
  for (int64_t step = 0; step < steps; ++step) {
    const int64_t d = step * kDepth<X>;
    for (int64_t r = 0; r < num_next; ++r) __builtin_prefetch(next + r * rows.stride + d);
    const X* const features = packed + 2 * kTile * d;
    _tile_loadd(4, rows.x + d, row_bytes);
    _tile_stream_loadd(6, features, 64);
    MMJAX_ADD_TILES(0, 4, 6);
    if (kTwoFeatures) {
      _tile_stream_loadd(7, features + kTile * kDepth<X>, 64);
      MMJAX_ADD_TILES(1, 4, 7);
    }
    if (kTwoRows) {
      _tile_loadd(5, rows.x + kTile * rows.stride + d, row_bytes);
      MMJAX_ADD_TILES(2, 5, 6);
    }
    if (kTwoRows && kTwoFeatures) MMJAX_ADD_TILES(3, 5, 7);
  }
  _tile_stored(0, sums, 64);
  if (kTwoFeatures) _tile_stored(1, sums + kTileSums, 64);
  if (kTwoRows) _tile_stored(2, sums + 2 * kTileSums, 64);
  if (kTwoRows && kTwoFeatures) _tile_stored(3, sums + 3 * kTileSums, 64);
}

template <typename X>
using AddProducts = void (*)(Inputs<X>, const X*, int64_t, SumOf<X>*, bool, const X*, int64_t);

template <typename X>
AddProducts<X> choose_products(int64_t rows, int64_t features) {
  if (rows > kTile) {
    return features > kTile ? add_products<X, true, true> : add_products<X, true, false>;
  }
  return features > kTile ? add_products<X, false, true> : add_products<X, false, false>;
}

// Pack a tile of weights: transpose 16 rows of 16 times four bytes, of which `row(i)` is one.
template <typename Row>
void pack_tile(Row row, void* packed) {
  for (int64_t quarter = 0; quarter < 4; ++quarter) {
    const auto load = [&](int64_t i) {
      const char* from = reinterpret_cast<const char*>(row(i)) + quarter * 16;
      return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    };
    const auto load_lanes = [&](int64_t i) {  // of every fourth row
      __m512i lanes = _mm512_castsi128_si512(load(i));
      lanes = _mm512_inserti32x4(lanes, load(i + 4), 1);
      lanes = _mm512_inserti32x4(lanes, load(i + 8), 2);
      return _mm512_inserti32x4(lanes, load(i + 12), 3);
    };
    const __m512i a = load_lanes(0), b = load_lanes(1), c = load_lanes(2), d = load_lanes(3);
    const __m512i low_ab = _mm512_unpacklo_epi32(a, b), high_ab = _mm512_unpackhi_epi32(a, b);
    const __m512i low_cd = _mm512_unpacklo_epi32(c, d), high_cd = _mm512_unpackhi_epi32(c, d);
    auto* const to = static_cast<__m512i*>(packed) + quarter * 4;
    _mm512_store_si512(to, _mm512_unpacklo_epi64(low_ab, low_cd));
    _mm512_store_si512(to + 1, _mm512_unpackhi_epi64(low_ab, low_cd));
    _mm512_store_si512(to + 2, _mm512_unpacklo_epi64(high_ab, high_cd));
    _mm512_store_si512(to + 3, _mm512_unpackhi_epi64(high_ab, high_cd));
  }
}

inline void write_bf16(__m512 low, __m512 high, bf16* to) {
  const __m512bh numbers = _mm512_cvtne2ps_pbh(high, low);
  _mm512_storeu_si512(to, reinterpret_cast<__m512i>(numbers));
}

// Kinds of weights. `write(feature, d, count, to)` writes `count` of a feature's numbers from input
// `d`, a multiple of a tile's, and maybe others behind them.
template <typename X>
struct PlainWeights {
  static constexpr int64_t kBits = 8 * sizeof(X);
  const X* weight;
  int64_t width;
  const X* find(int64_t feature, int64_t d) const { return weight + feature * width + d; }
  void write(int64_t feature, int64_t d, int64_t count, X* to) const {
    __builtin_memcpy(to, find(feature, d), static_cast<size_t>(count) * sizeof *to);
  }
};

alignas(64) constexpr uint8_t kZeros[64] = {};  // a row that is not there

// Pack the inputs [from, to) of the features [begin, end): tiles [panels, steps, tiles of a panel].
template <typename X, int64_t kPanel = 2, typename Weights>
void pack(const Weights& weights, int64_t begin, int64_t end, int64_t from, int64_t to, X* packed) {
  constexpr int64_t depth = kDepth<X>;
  const int64_t steps = divide_up(to - from, depth);
  for (int64_t first = begin; first < end; first += kTile) {
    const int64_t tile = (first - begin) / kTile, features = least(kTile, end - first);
    X* into = packed + (tile / kPanel * kPanel * steps + tile % kPanel) * kTile * depth;
    for (int64_t d = from; d < to; d += depth, into += kPanel * kTile * depth) {
      const int64_t count = least(depth, to - d);
      if constexpr (std::is_same_v<Weights, PlainWeights<X>>) {
        if (count == depth) {
          const auto row = [&](int64_t i) {
            return i < features ? weights.find(first + i, d) : reinterpret_cast<const X*>(kZeros);
          };
          pack_tile(row, into);
          continue;
        }
      }
      alignas(64) X numbers[kTile][depth] = {};
      for (int64_t i = 0; i < features; ++i) {
        weights.write(first + i, d, count, numbers[i]);
        for (int64_t rest = count; rest < depth; ++rest) numbers[i][rest] = 0;
      }
      pack_tile([&](int64_t i) { return numbers[i]; }, into);
    }
  }
}

}  // namespace
}  // namespace mmjax
