// AMX (Sapphire Rapids on): products of any number of rows.
//
// Of many, the weights of a chunk of features, and of up to `kMaxDepth` inputs, are packed, and stay in
// the second cache while all rows pass over them. Of few, the rows are packed, and weights are read as
// they lie. A sum is made in the order of the inputs, whatever rows, tile and thread it has.
#include "amx.h"
#include "amx_fixed.h"

namespace mmjax {
namespace {

constexpr int64_t kMaxDepth = 1024;       // inputs that are packed at a time
constexpr int64_t kMaxRows = 1024;        // rows whose sums are kept meanwhile

// Integers of 8 bits are bfloat16 numbers without rounding.
struct Int8Weights {
  static constexpr int64_t kBits = 8;
  const int8_t* weight;
  int64_t width;
  const int8_t* find(int64_t feature, int64_t d) const { return weight + feature * width + d; }
  void write(int64_t feature, int64_t d, int64_t count, bf16* to) const {
    const int8_t* const from = find(feature, d);
    const __m256i bytes = count == kDepth<bf16>
                              ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))
                              : _mm256_maskz_loadu_epi8(first32(count), from);
    const Halves numbers = widen_int8(bytes);
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

// Ask for the weights of 16 features that are behind input `d` of the features from `feature` on.
template <typename X>
void fetch_features(const PlainWeights<X>& weights, int64_t feature, int64_t d) {
  const int64_t ahead = d + kAheadBytes / kTile / static_cast<int64_t>(sizeof(X));
  const int64_t width = weights.width;
  const X* const from = ahead < width ? weights.find(feature, ahead)
                                      : weights.find(feature + kTile, least(ahead - width, d));
  for (int64_t i = 0; i < kTile; ++i) fetch(from + i * width);
}

// A row of tiles of weights: of 16 features, `row_bytes` apart.
struct FeatureTiles {
  const void* tiles;
  int64_t row_bytes, tile_bytes;
};

constexpr int64_t kWrittenTiles = 8;  // of weights that do not lie as tiles want them

// Write tiles of the inputs [from, to) of `count` features, zeros behind them. Meanwhile, fetch what the
// next call will read.
template <typename X, typename Weights>
FeatureTiles write_tiles(const Weights& weights, int64_t feature, int64_t count, int64_t from,
                         int64_t to, X (&numbers)[kWrittenTiles][kTile][kDepth<X>]) {
  constexpr int64_t depth = kDepth<X>, part_bytes = kWrittenTiles * depth * Weights::kBits / 8;
  const int64_t whole = (to - from) / depth, left = (to - from) % depth;
  for (int64_t i = 0; i < count; ++i) {
    const auto* const next = to < weights.width ? weights.find(feature + i, to)
                                                : weights.find(feature + kTile + i, 0);
    for (int64_t byte = 0; byte < part_bytes; byte += 64) {
      fetch(reinterpret_cast<const char*>(next) + byte);
    }
    for (int64_t tile = 0; tile < whole; ++tile) {
      weights.write(feature + i, from + tile * depth, depth, numbers[tile][i]);
    }
    if (left == 0) continue;
    weights.write(feature + i, to - left, left, numbers[whole][i]);
    for (int64_t rest = left; rest < depth; ++rest) numbers[whole][i][rest] = 0;
  }
  return {numbers, sizeof numbers[0][0], sizeof numbers[0]};
}

// Add the products of 16 features with up to 32 rows to tiles 0 and 1, whose rows are the features.
// `packed`: tiles [steps, 1 or 2 of rows].
template <typename X, bool kTwoRows, typename Fetch>
void add_features(FeatureTiles features, int64_t steps, const X* packed, Fetch fetch_ahead) {
  const auto* tile = static_cast<const char*>(features.tiles);
  note_written(tile);
  for (int64_t step = 0; step < steps; ++step, tile += features.tile_bytes) {
    fetch_ahead(step);
    _tile_loadd(4, tile, features.row_bytes);
    _tile_loadd(6, packed, 64);
    MMJAX_ADD_TILES(0, 4, 6);
    if (kTwoRows) {
      _tile_loadd(7, packed + kTile * kDepth<X>, 64);
      MMJAX_ADD_TILES(1, 4, 7);
    }
    packed += (kTwoRows ? kBlock : kTile) * kDepth<X>;
  }
}

// The sums of `count` features, up to 16, with up to 32 rows. `packed`: the rows, as `pack` has them.
template <typename X, bool kTwoRows, typename Weights>
void sum_features(const Weights& weights, int64_t feature, int64_t count, const X* packed,
                  SumOf<X>* sums) {
  constexpr int64_t depth = kDepth<X>, part = kWrittenTiles * depth;
  const int64_t width = weights.width;
  _tile_zero(0);
  _tile_zero(1);
  int64_t d = 0;
  if constexpr (std::is_same_v<Weights, PlainWeights<X>>) {
    if (count == kTile) {
      const int64_t row_bytes = width * static_cast<int64_t>(sizeof(X));
      const FeatureTiles whole{weights.find(feature, 0), row_bytes, sizeof(X) * depth};
      add_features<X, kTwoRows>(whole, width / depth, packed, [&](int64_t step) {
        fetch_features(weights, feature, step * depth);
      });
      d = width / depth * depth;
    }
  }
  alignas(64) X numbers[kWrittenTiles][kTile][depth];
  if (d < width && count < kTile) __builtin_memset(numbers, 0, sizeof numbers);
  for (; d < width; d += part) {
    const int64_t to = least(d + part, width);
    const auto tiles = write_tiles(weights, feature, count, d, to, numbers);
    add_features<X, kTwoRows>(tiles, divide_up(to - d, depth),
                              packed + d * (kTwoRows ? kBlock : kTile), [](int64_t) {});
  }
  _tile_stored(0, sums, 64);
  if (kTwoRows) _tile_stored(1, sums + kTileSums, 64);
}

// Write up to 16 features of up to 32 rows, whose sums are tiles with a row for each feature.
template <typename Sum, typename Out>
void write_columns(const Sum* sums, int64_t rows, int64_t count, Out* out, int64_t features) {
  for (int64_t r = 0; r < rows; ++r) {
    alignas(64) Sum row[kTile];
    const Sum* const column = sums + r / kTile * kTileSums + r % kTile;
    for (int64_t f = 0; f < kTile; ++f) row[f] = column[f * kTile];
    write_sums(row, count, out + r * features);
  }
}

// How many numbers a block of up to 32 rows has when it is packed.
template <typename X>
int64_t packed_block(int64_t width) {
  return divide_up(width, kDepth<X>) * kBlock * kDepth<X>;
}

template <typename X>
int64_t find_packed_size(int64_t rows, int64_t width) {
  return divide_up(rows, kBlock) * packed_block<X>(width);
}

// Pack rows for `multiply_packed`.
template <typename X>
void pack_rows(const X* x, int64_t rows, int64_t width, X* packed) {
  for (int64_t row = 0; row < rows; row += kBlock, packed += packed_block<X>(width)) {
    const int64_t end = least(row + kBlock, rows);
    const auto pack_block = end - row > kTile ? pack<X, 2, PlainWeights<X>>
                                              : pack<X, 1, PlainWeights<X>>;
    pack_block({x, width}, row, end, 0, width, packed);
  }
}

// The same where no other thread packs them: valid until this one's next call.
template <typename X>
const X* pack_for_thread(const X* x, int64_t rows, int64_t width) {
  static thread_local Lines<X> lines;
  X* const packed = lines.reserve(find_packed_size<X>(rows, width));
  pack_rows(x, rows, width, packed);
  return packed;
}

// As `multiply_many`, of packed rows, as fast as weights are read.
template <typename X, typename Weights, typename Out>
void multiply_packed(const X* packed, const Weights& weights, Out* out, int64_t rows, int64_t width,
                     int64_t features, int64_t begin, int64_t end) {
  const Tiles tiles;
  for (int64_t row = 0; row < rows; row += kBlock, packed += packed_block<X>(width)) {
    const int64_t num_rows = least(kBlock, rows - row);
    const auto sum = num_rows > kTile ? sum_features<X, true, Weights>
                                      : sum_features<X, false, Weights>;
    for (int64_t first = begin; first < end; first += kTile) {
      alignas(64) SumOf<X> sums[2 * kTileSums];
      const int64_t count = least(kTile, end - first);
      sum(weights, first, count, packed, sums);
      write_columns(sums, num_rows, count, out + row * features + first, features);
    }
  }
}

template <typename X, typename Weights, typename W, typename Out>
void multiply_packed_plain(const X* packed, const W* weight, Out* out, int64_t rows, int64_t width,
                           int64_t features, int64_t begin, int64_t end) {
  multiply_packed(packed, Weights{weight, width}, out, rows, width, features, begin, end);
}

template <typename X, typename Out>
void multiply_few_plain(const X* x, const X* weight, Out* out, int64_t rows, int64_t width,
                        int64_t features, int64_t begin, int64_t end) {
  const X* const packed = pack_for_thread(x, rows, width);
  multiply_packed(packed, PlainWeights<X>{weight, width}, out, rows, width, features, begin, end);
}

template <typename X, typename Weights, typename W, typename Out>
void multiply_many_plain(const X* x, const W* weight, Out* out, int64_t rows, int64_t width,
                         int64_t features, int64_t begin, int64_t end) {
  multiply_many(x, Weights{weight, width}, out, rows, width, features, begin, end);
}

template <typename Codes>
void multiply_many_groups(const bf16* x, const Groups& weight, float* out, int64_t rows,
                          int64_t features, int64_t begin, int64_t end) {
  multiply_many(x, GroupWeights<Codes>{weight}, out, rows, weight.width, features, begin, end);
}

// Up to 64 rows, packing them takes less time than packing weights, and sums are made in one order.
template <typename X, typename Weights, typename W, typename Out>
constexpr PackedProduct<X, W, Out> kPacked = {{find_packed_size<X>, pack_rows<X>},
                                              multiply_packed_plain<X, Weights, W, Out>,
                                              64};

template <typename X, typename Out>
constexpr TileProduct<X, X, Out> kPlain = {
    multiply_few_plain<X, Out>,
    multiply_many_plain<X, PlainWeights<X>, X, Out>,
    std::is_same_v<X, int8_t> ? 4 : 0,  // integers' sums are exact in any order
    {kPacked<X, PlainWeights<X>, X, Out>}};

// Rows of prompts, and only those, are multiplied as bfloat16 numbers.
constexpr TileProduct<bf16, int8_t, float> kFixed = {
    nullptr,
    multiply_many_plain<bf16, Int8Weights, int8_t, float>,
    2,
    {{{find_fixed_size, pack_fixed}, multiply_packed_fixed, kTile},
     kPacked<bf16, Int8Weights, int8_t, float>}};

}  // namespace

const TileProducts kAmx = {kPlain<bf16, float>,
                           kPlain<bf16, bf16>,
                           kPlain<int8_t, int32_t>,
                           kFixed,
                           {&kAmxUint4, multiply_many_groups<Uint4Codes>},
                           {&kAmxUint8, multiply_many_groups<Uint8Codes>},
                           {nullptr, multiply_many_groups<Float8Codes>}};

}  // namespace mmjax
