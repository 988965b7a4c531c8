// Products of some rows with weights in groups of 4 and 8 bits, added as integers by tiles of AMX: the
// sums that avx512_integers.h makes, in its order, so that a row has the same bits by either.
//
// A tile of codes is 16 features of 32 bytes, one of inputs 16 rows side by side. A block's sums are
// scaled and added to those of its lane.
#include "amx.h"
#include "avx512_integers.h"

namespace mmjax {
namespace {

constexpr int kTileDepth = kBlockInputs / 4;  // rows of a tile of inputs: four bytes of each

// Sixteen blocks of up to 16 rows: of each lane tiles of the inputs' bytes, scales, and sums.
struct alignas(64) RowsChunk {
  int8_t high[kChunkBlocks][kTileDepth][kTile][4], low[kChunkBlocks][kTileDepth][kTile][4];
  float scales[kChunkBlocks][kTile];
  int32_t sums[kChunkBlocks][kTile];
};

// Tiles 0 to 3 are sums [features, rows], 4 and 5 codes, 6 and 7 inputs.
class BlockTiles {
 public:
  BlockTiles() {
    alignas(64) struct {
      uint8_t palette = 1, reserved[15] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, kBlockInputs, kBlockInputs, 64, 64};
      uint8_t rows[16] = {kTile, kTile, kTile, kTile, kTile, kTile, kTileDepth, kTileDepth};
    } config;
    note_written(&config);
    _tile_loadconfig(&config);
  }
  ~BlockTiles() { _tile_release(); }
  BlockTiles(const BlockTiles&) = delete;
  BlockTiles& operator=(const BlockTiles&) = delete;
};

// Columns of a tile. Of up to eight rows, one tile has the high and the low bytes side by side, which
// takes half the time.
struct SixteenRows {
  static constexpr int kRows = kTile;
  using Integers = __m512i;
  using Floats = __m512;
  static Integers spread(int32_t number) { return _mm512_set1_epi32(number); }
  static Floats spread(float number) { return _mm512_set1_ps(number); }
  static Integers load(const int32_t* from) { return _mm512_load_si512(from); }
  static Floats load(const float* from) { return _mm512_load_ps(from); }
  static void store(float* to, Floats numbers) { _mm512_store_ps(to, numbers); }
  static Integers add_parts(Integers high, Integers low) {
    return _mm512_add_epi32(_mm512_slli_epi32(high, 8), low);
  }
  static Integers multiply(Integers a, Integers b) { return _mm512_mullo_epi32(a, b); }
  static Floats multiply(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
  static Floats subtract(Integers a, Integers b) {
    return _mm512_cvtepi32_ps(_mm512_sub_epi32(a, b));
  }
  static Floats add_product(Floats a, Floats b, Floats sum) { return _mm512_fmadd_ps(a, b, sum); }
  static Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
};
struct EightRows {
  static constexpr int kRows = kTile / 2;
  using Integers = __m256i;
  using Floats = __m256;
  static Integers spread(int32_t number) { return _mm256_set1_epi32(number); }
  static Floats spread(float number) { return _mm256_set1_ps(number); }
  static Integers load(const int32_t* from) {
    return _mm256_load_si256(reinterpret_cast<const __m256i*>(from));
  }
  static Floats load(const float* from) { return _mm256_load_ps(from); }
  static void store(float* to, Floats numbers) { _mm256_store_ps(to, numbers); }
  static Integers add_parts(Integers high, Integers low) {
    return _mm256_add_epi32(_mm256_slli_epi32(high, 8), low);
  }
  static Integers multiply(Integers a, Integers b) { return _mm256_mullo_epi32(a, b); }
  static Floats multiply(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
  static Floats subtract(Integers a, Integers b) {
    return _mm256_cvtepi32_ps(_mm256_sub_epi32(a, b));
  }
  static Floats add_product(Floats a, Floats b, Floats sum) { return _mm256_fmadd_ps(a, b, sum); }
  static Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
};

// Put a row's chunk into column `r`.
template <typename Codes, typename Columns>
void place_row(const IntegerChunk& from, int64_t r, RowsChunk& to) {
  for (int block = 0; block < kChunkBlocks; ++block) {
    const BlockPlace place = Codes::find_place(block);
    const int lane = place.lane(), begin = place.half * kBlockInputs;
    for (int four = 0; four < kTileDepth; ++four) {
      int8_t* const low = Columns::kRows == kTile ? to.low[lane][four][r]
                                                  : to.high[lane][four][Columns::kRows + r];
      __builtin_memcpy(to.high[lane][four][r], from.high[place.vector] + begin + 4 * four, 4);
      __builtin_memcpy(low, from.low[place.vector] + begin + 4 * four, 4);
    }
    to.scales[lane][r] = from.scales[lane];
    to.sums[lane][r] = from.sums[lane];
  }
}

// The codes of sixteen blocks of 16 features, and what they are scaled by.
struct alignas(64) FeaturesChunk {
  uint8_t codes[kVectors][kTile][64];
  float scales[kTile][kChunkBlocks];
  int32_t zeros[kTile][kChunkBlocks];
};

template <typename Codes>
void decode_features(const Groups& weight, int64_t feature, int64_t count,
                     const ChunkGroups& groups, int64_t begin, FeaturesChunk& to) {
  for (int64_t i = 0; i < count; ++i) {
    const uint8_t* const codes = weight.codes + (feature + i) * weight.row_bytes + begin;
    const int64_t left = weight.row_bytes - begin;
    for (int v = 0; v < kVectors; v += Codes::kVectorsOfLoad) {
      const int64_t byte = 64 * (v / Codes::kVectorsOfLoad);
      if (byte >= left) break;
      __m512i numbers[Codes::kVectorsOfLoad];
      fetch(codes + byte + kTile * weight.row_bytes);
      Codes::decode(_mm512_maskz_loadu_epi8(first_bytes(left - byte), codes + byte), numbers);
      for (int n = 0; n < Codes::kVectorsOfLoad; ++n) {
        _mm512_store_si512(to.codes[v + n][i], numbers[n]);
      }
    }
    _mm512_store_ps(to.scales[i], load_scales(weight, feature + i, groups));
    if (weight.zero == nullptr) continue;
    _mm512_store_si512(to.zeros[i], load_zeros(weight, feature + i, groups));
  }
}

// The products of the two blocks of a vector with the high and the low bytes: [features, rows].
struct alignas(64) Parts {
  int32_t high[2][kTile][kTile], low[2][kTile][kTile];
};

// Begin the products of the two blocks of vector `v`: of the lanes `lane` and `lane + 4`.
template <typename Columns>
void begin_products(const FeaturesChunk& features, const RowsChunk& rows, int v, int lane) {
  _tile_zero(0);
  _tile_zero(2);
  _tile_loadd(4, features.codes[v][0], 64);
  _tile_loadd(6, rows.high[lane], 64);
  _tile_dpbusd(0, 4, 6);
  if (Columns::kRows == kTile) {
    _tile_zero(1);
    _tile_loadd(7, rows.low[lane], 64);
    _tile_dpbusd(1, 4, 7);
  }
  _tile_loadd(5, features.codes[v][0] + kBlockInputs, 64);
  _tile_loadd(6, rows.high[lane + 4], 64);
  _tile_dpbusd(2, 5, 6);
  if (Columns::kRows == kTile) {
    _tile_zero(3);
    _tile_loadd(7, rows.low[lane + 4], 64);
    _tile_dpbusd(3, 5, 7);
  }
}

template <typename Columns>
void end_products(Parts& parts) {
  _tile_stored(0, parts.high[0], 64);
  _tile_stored(2, parts.high[1], 64);
  if (Columns::kRows == kTile) {
    _tile_stored(1, parts.low[0], 64);
    _tile_stored(3, parts.low[1], 64);
  }
  note_written(&parts);
}

using LaneSums = float[kTile][kTile];  // [features, rows]

// Add the products of a block to the sums of its lane.
template <typename Codes, typename Columns, bool kHasZeros>
inline void add_block(const Parts& parts, int half, const FeaturesChunk& features,
                      const RowsChunk& rows, int lane, LaneSums& sums) {
  const auto row_scales = Columns::load(rows.scales[lane]);
  const auto row_sums = Columns::load(rows.sums[lane]);
  auto offset = Columns::multiply(row_sums, Columns::spread(Codes::kMiddle));
  for (int64_t i = 0; i < kTile; ++i) {
    if (kHasZeros) {
      offset = Columns::multiply(row_sums, Columns::spread(features.zeros[i][lane]));
    }
    const int32_t* const high = parts.high[half][i];
    const int32_t* const low = Columns::kRows == kTile ? parts.low[half][i] : high + Columns::kRows;
    const auto all = Columns::add_parts(Columns::load(high), Columns::load(low));
    const auto scale = Columns::multiply(Columns::spread(features.scales[i][lane]), row_scales);
    Columns::store(sums[i], Columns::add_product(Columns::subtract(all, offset), scale,
                                                 Columns::load(sums[i])));
  }
}

// Add the products of sixteen blocks, of which `left` are left. While tiles multiply those of a vector,
// those of the vector before it are added.
template <typename Codes, typename Columns, bool kHasZeros>
void add_chunk_tiles(const FeaturesChunk& features, const RowsChunk& rows, int64_t left,
                     LaneSums* sums) {
  Parts parts[2];
  const auto add_vector = [&](int v) {
    const int lane = BlockPlace{v, 0}.lane();
    for (int half = 0; half < 2; ++half) {
      const int of_half = lane + 4 * half;
      add_block<Codes, Columns, kHasZeros>(parts[v % 2], half, features, rows, of_half,
                                           sums[of_half]);
    }
  };
  int v = 0;
  for (; v < kVectors && Codes::first_block(v) < left; ++v) {
    begin_products<Columns>(features, rows, v, BlockPlace{v, 0}.lane());
    if (v > 0) add_vector(v - 1);
    end_products<Columns>(parts[v % 2]);
  }
  add_vector(v - 1);
}

// The tree of `add_four`: lanes 8 apart, then 4, 2 and 1.
template <typename Columns>
void add_lanes_of(LaneSums* sums) {
  for (int step = kChunkBlocks / 2; step > 0; step /= 2) {
    for (int lane = 0; lane < step; ++lane) {
      for (int64_t i = 0; i < kTile; ++i) {
        float* const to = sums[lane][i];
        Columns::store(to, Columns::add(Columns::load(to), Columns::load(sums[lane + step][i])));
      }
    }
  }
}

// Up to 16 features with up to 16 rows.
template <typename Codes, typename Columns, bool kHasZeros>
void multiply_block(const RowsChunk* rows, int64_t num_chunks, const ChunkGroups* groups,
                    const Groups& weight, int64_t feature, int64_t count, float* out,
                    int64_t num_rows, int64_t features) {
  static thread_local FeaturesChunk chunk = {};
  alignas(64) LaneSums sums[kChunkBlocks] = {};
  constexpr int64_t chunk_inputs = kChunkBlocks * kBlockInputs;
  constexpr int64_t chunk_bytes = 64 * kVectors / Codes::kVectorsOfLoad;
  for (int64_t c = 0; c < num_chunks; ++c) {
    decode_features<Codes>(weight, feature, count, groups[c], c * chunk_bytes, chunk);
    note_written(&chunk);
    const int64_t left = divide_up(weight.width - c * chunk_inputs, kBlockInputs);
    add_chunk_tiles<Codes, Columns, kHasZeros>(chunk, rows[c], left, sums);
  }
  add_lanes_of<Columns>(sums);
  for (int64_t r = 0; r < num_rows; ++r) {
    float* const to = out + r * features + feature;
    for (int64_t i = 0; i < count; ++i) to[i] = sums[0][i][r];
  }
}

// Prepared: the groups of the chunks, and behind them the chunks of all 16 rows, of the next 16, ...
int64_t find_tiles_size(const Groups& weight, int64_t rows) {
  const auto size = static_cast<int64_t>(sizeof(ChunkGroups)) +
                    divide_up(rows, kTile) * static_cast<int64_t>(sizeof(RowsChunk));
  return count_chunks(weight) * size;
}

template <typename Codes>
void prepare_tiles(const bf16* x, const Groups& weight, int64_t rows, void* prepared) {
  const int64_t num_chunks = count_chunks(weight);
  auto* const groups = static_cast<ChunkGroups*>(prepared);
  find_groups<Codes>(weight, num_chunks, groups);
  auto* chunks = reinterpret_cast<RowsChunk*>(groups + num_chunks);
  const Prepared<IntegerChunk> row(num_chunks);
  __builtin_memset(chunks, 0, static_cast<size_t>(divide_up(rows, kTile) * num_chunks) *
                                  sizeof(RowsChunk));
  for (int64_t r = 0; r < rows; ++r) {
    prepare_integers<Codes>(x + r * weight.width, weight.width, row.numbers);
    RowsChunk* const to = chunks + r / kTile * num_chunks;
    const auto place = rows - r / kTile * kTile > kTile / 2 ? place_row<Codes, SixteenRows>
                                                            : place_row<Codes, EightRows>;
    for (int64_t c = 0; c < num_chunks; ++c) place(row.numbers[c], r % kTile, to[c]);
  }
}

template <typename Codes, typename Columns>
auto choose_block(const Groups& weight) {
  return weight.zero == nullptr ? multiply_block<Codes, Columns, false>
                                : multiply_block<Codes, Columns, true>;
}

template <typename Codes>
void multiply_tiles(const void* prepared, const Groups& weight, float* out, int64_t rows,
                    int64_t features, int64_t begin, int64_t end) {
  const int64_t num_chunks = count_chunks(weight);
  const auto* const groups = static_cast<const ChunkGroups*>(prepared);
  const auto* chunks = reinterpret_cast<const RowsChunk*>(groups + num_chunks);
  const BlockTiles tiles;
  note_written(prepared);
  for (int64_t r = 0; r < rows; r += kTile, chunks += num_chunks) {
    const int64_t num_rows = least(kTile, rows - r);
    const auto multiply_features =
        num_rows > kTile / 2 ? choose_block<Codes, SixteenRows>(weight)
                             : choose_block<Codes, EightRows>(weight);
    for (int64_t f = begin; f < end; f += kTile) {
      multiply_features(chunks, num_chunks, groups, weight, f, least(kTile, end - f),
                        out + r * features, num_rows, features);
    }
  }
}

}  // namespace

const PreparedProduct kAmxUint4 = {find_tiles_size, prepare_tiles<Uint4Bytes>,
                                   multiply_tiles<Uint4Bytes>};
const PreparedProduct kAmxUint8 = {find_tiles_size, prepare_tiles<Uint8Bytes>,
                                   multiply_tiles<Uint8Bytes>};

}  // namespace mmjax
