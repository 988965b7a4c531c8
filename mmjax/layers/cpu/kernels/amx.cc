// AMX (Sapphire Rapids on): products of many rows, in tiles of 16 by 16 sums.
//
// A tile of inputs is 16 rows of 64 bytes, as they lie. A tile of weights has 16 features side by
// side, and the next four bytes of each below: weights are packed so, those of a chunk of features
// and of up to `kMaxDepth` inputs, which stay in the second cache while all rows pass over them.
// A sum is made in the order of the inputs, whatever rows, tile and thread it has.
//
// As in tiles.h, no header of the library is included that has functions.
#include <type_traits>

#include "avx512.h"

namespace mmjax {
namespace {

constexpr int64_t kTile = 16;             // rows, and columns, of a tile of sums
constexpr int64_t kTileSums = kTile * kTile;
constexpr int64_t kBlock = 2 * kTile;     // rows, and features, whose sums registers hold
constexpr int64_t kBlockSums = kBlock * kBlock;
constexpr int64_t kMaxDepth = 1024;       // inputs that are packed at a time
constexpr int64_t kMaxRows = 1024;        // rows whose sums are kept meanwhile

// Inputs of a tile.
template <typename X>
constexpr int64_t kDepth = 64 / sizeof(X);
template <typename X>
using SumOf = std::conditional_t<std::is_same_v<X, bf16>, float, int32_t>;

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t divide_up(int64_t number, int64_t by) { return (number + by - 1) / by; }
inline int64_t round_up(int64_t number, int64_t step) { return divide_up(number, step) * step; }

// This thread's tiles, all of them whole, while it lives.
class Tiles {
 public:
  Tiles() {
    alignas(64) struct {
      uint8_t palette = 1, reserved[15] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
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

// Kinds of weights. `write(feature, d, count, to)` writes `count` of a feature's numbers from input
// `d`, a multiple of a tile's, and maybe others behind them.
template <typename X>
struct PlainWeights {
  const X* weight;
  int64_t width;
  const X* find(int64_t feature, int64_t d) const { return weight + feature * width + d; }
  void write(int64_t feature, int64_t d, int64_t count, X* to) const {
    __builtin_memcpy(to, find(feature, d), static_cast<size_t>(count) * sizeof *to);
  }
};

inline void write_bf16(__m512 low, __m512 high, bf16* to) {
  const __m512bh numbers = _mm512_cvtne2ps_pbh(high, low);
  _mm512_storeu_si512(to, reinterpret_cast<__m512i>(numbers));
}

// Integers of 8 bits are bfloat16 numbers without rounding.
struct Int8Weights {
  const int8_t* weight;
  int64_t width;
  void write(int64_t feature, int64_t d, int64_t count, bf16* to) const {
    const Halves numbers =
        widen_int8(_mm256_maskz_loadu_epi8(first32(count), weight + feature * width + d));
    write_bf16(numbers.low, numbers.high, to);
  }
};

// Codes become numbers, rounded as XLA's form rounds them. 32 inputs are of one group.
template <typename Codes>
struct GroupWeights {
  const Groups& weight;
  void write(int64_t feature, int64_t d, int64_t count, bf16* to) const {
    const uint8_t* codes = weight.codes + feature * weight.row_bytes;
    const int64_t at = feature * weight.num_groups + d / weight.group_size;
    const auto zero = Codes::make_zero(weight.zero == nullptr ? Codes::kMiddle : weight.zero[at]);
    const __m512 scale = _mm512_set1_ps(scale_of(weight, at));
    const __m512 low = Codes::decode16(codes, d, zero, least(count, kTile));
    __m512 high = _mm512_setzero_ps();
    if (count > kTile) high = Codes::decode16(codes, d + kTile, zero, count - kTile);
    write_bf16(_mm512_mul_ps(low, scale), _mm512_mul_ps(high, scale), to);
  }
};

// Pack the inputs [from, to) of the features [begin, end): tiles [panels of 32 features, steps, 2].
template <typename X, typename Weights>
void pack(const Weights& weights, int64_t begin, int64_t end, int64_t from, int64_t to, X* packed) {
  constexpr int64_t depth = kDepth<X>;
  const int64_t steps = divide_up(to - from, depth);
  for (int64_t first = begin; first < end; first += kTile) {
    const int64_t tile = (first - begin) / kTile, features = least(kTile, end - first);
    X* into = packed + (tile / 2 * 2 * steps + tile % 2) * kTile * depth;
    for (int64_t d = from; d < to; d += depth, into += 2 * kTile * depth) {
      const int64_t count = least(depth, to - d);
      if constexpr (std::is_same_v<Weights, PlainWeights<X>>) {
        if (count == depth && features == kTile) {
          pack_tile([&](int64_t i) { return weights.find(first + i, d); }, into);
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

// Up to 32 rows' inputs [from, to): where they stand, or padded in `copy`. Lines that are a multiple
// of 2 KiB apart would share few places of the first cache.
template <typename X>
Inputs<X> find_inputs(const X* x, int64_t rows, int64_t width, int64_t from, int64_t to, X* copy) {
  const int64_t count = to - from, stride = round_up(count, kDepth<X>);
  const bool is_whole = rows % kTile == 0 && count == stride;
  if (is_whole && width * static_cast<int64_t>(sizeof(X)) % 2048 != 0) return {x + from, width};
  __builtin_memset(copy, 0, static_cast<size_t>(round_up(rows, kTile) * stride) * sizeof *copy);
  for (int64_t r = 0; r < rows; ++r) {
    __builtin_memcpy(copy + r * stride, x + r * width + from,
                     static_cast<size_t>(count) * sizeof *copy);
  }
  return {copy, stride};
}

inline void write_sums(const float* sums, int64_t count, bf16* out) {
  const __m256bh numbers = _mm512_cvtneps_pbh(_mm512_loadu_ps(sums));
  _mm256_mask_storeu_epi16(out, first16(count), reinterpret_cast<__m256i>(numbers));
}
template <typename Sum>
void write_sums(const Sum* sums, int64_t count, Sum* out) {
  _mm512_mask_storeu_epi32(out, first16(count), _mm512_loadu_si512(sums));
}

// Write rows of `count` features, whose sums are in blocks of 32 by 32.
template <typename Sum, typename Out>
void write_rows(const Sum* sums, int64_t rows, int64_t count, Out* out, int64_t features) {
  for (int64_t r = 0; r < rows; ++r) {
    const Sum* const row = sums + r / kTile * 2 * kTileSums + r % kTile * kTile;
    for (int64_t f = 0; f < count; f += kTile) {
      const Sum* const from = row + f / kBlock * kBlockSums + f % kBlock * kTile;
      write_sums(from, least(count - f, kTile), out + r * features + f);
    }
  }
}

// Parts of as many inputs each that rows and features have in common.
template <typename X>
int64_t find_depth(int64_t width) {
  return round_up(divide_up(width, divide_up(width, kMaxDepth)), kDepth<X>);
}

// out[r, f] of all rows, and features [begin, end).
template <typename X, typename Weights, typename Out>
void multiply_many(const X* x, const Weights& weights, Out* out, int64_t rows, int64_t width,
                   int64_t features, int64_t begin, int64_t end) {
  if (begin >= end) return;
  static thread_local Lines<X> packed_lines, copy_lines;
  static thread_local Lines<SumOf<X>> sum_lines;
  const int64_t depth = find_depth<X>(width), num_panels = divide_up(end - begin, kBlock);
  const bool is_once = depth >= width;
  const int64_t num_blocks = is_once ? 1 : divide_up(least(rows, kMaxRows), kBlock);
  X* const packed = packed_lines.reserve(num_panels * kBlock * depth);
  X* const copy = copy_lines.reserve(kBlock * depth);
  SumOf<X>* const all_sums = sum_lines.reserve(num_blocks * num_panels * kBlockSums);
  const int64_t num_fetched = divide_up(kBlock, num_panels);  // of the next rows, in each panel
  const Tiles tiles;
  for (int64_t top = 0; top < rows; top += kMaxRows) {
    const int64_t bottom = least(rows, top + kMaxRows);
    for (int64_t from = 0; from < width; from += depth) {
      const int64_t to = least(from + depth, width), steps = divide_up(to - from, kDepth<X>);
      if (!is_once || top == 0) pack(weights, begin, end, from, to, packed);
      SumOf<X>* sums = all_sums;
      for (int64_t row = top; row < bottom; row += kBlock) {
        const int64_t num_rows = least(kBlock, bottom - row);
        const auto inputs = find_inputs(x + row * width, num_rows, width, from, to, copy);
        const bool fetches = row + 2 * kBlock <= bottom && inputs.x != copy;
        for (int64_t panel = 0; panel < num_panels; ++panel) {
          const auto add = choose_products<X>(num_rows, end - begin - panel * kBlock);
          const X* const next = inputs.x + (kBlock + panel * num_fetched) * inputs.stride;
          const int64_t left = kBlock - panel * num_fetched;
          add(inputs, packed + panel * kBlock * steps * kDepth<X>, steps, sums + panel * kBlockSums,
              from == 0, next, fetches && left > 0 ? least(num_fetched, left) : 0);
        }
        if (to == width) {
          write_rows(sums, num_rows, end - begin, out + row * features + begin, features);
        }
        if (!is_once) sums += num_panels * kBlockSums;
      }
    }
  }
}

template <typename X, typename Weights, typename W, typename Out>
void multiply_plain(const X* x, const W* weight, Out* out, int64_t rows, int64_t width,
                    int64_t features, int64_t begin, int64_t end) {
  multiply_many(x, Weights{weight, width}, out, rows, width, features, begin, end);
}

template <typename Codes>
void multiply_groups_of(const bf16* x, const Groups& weight, float* out, int64_t rows,
                        int64_t features, int64_t begin, int64_t end) {
  multiply_many(x, GroupWeights<Codes>{weight}, out, rows, weight.width, features, begin, end);
}

}  // namespace

const ManyRows kAmx = {multiply_plain<bf16, PlainWeights<bf16>, bf16, float>,
                       multiply_plain<bf16, PlainWeights<bf16>, bf16, bf16>,
                       multiply_plain<int8_t, PlainWeights<int8_t>, int8_t, int32_t>,
                       multiply_plain<bf16, Int8Weights, int8_t, float>,
                       multiply_groups_of<Uint4Codes>,
                       multiply_groups_of<Uint8Codes>,
                       multiply_groups_of<Float8Codes>};

}  // namespace mmjax
