// What AVX-512 with VNNI adds as integers: products of 8 bits, and of bfloat16 inputs with weights in
// groups of 4 and 8 bits. An instruction multiplies 64 bytes, where one of bfloat16 multiplies 32
// weights, which have to be made numbers first. Everything here is in an unnamed namespace, as in
// tiles.h.
#pragma once

#include "avx512.h"

namespace mmjax {
namespace {

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

// Inputs that share a scale. Groups of weights are of a multiple of as many, or there is one.
constexpr int kBlockInputs = 32;
// Blocks are added sixteen at a time, each in a lane of its own.
constexpr int kChunkBlocks = 16;
constexpr int kVectors = kChunkBlocks * kBlockInputs / 64;

// Sixteen blocks of a row of inputs: those of lane l are `(256 * high + low) * scales[l]`. Scales are
// powers of two, so that all inputs are exact but those below a 64th of the largest of their block,
// which is a 32,768th of it off at most; bfloat16 rounds the largest to a 512th of itself.
struct alignas(64) IntegerChunk {
  int8_t high[kVectors][64], low[kVectors][64];  // as `Codes` has the weights; zeros behind the last
  float scales[kChunkBlocks];
  int32_t sums[kChunkBlocks];  // of `256 * high + low`
};

// The groups of sixteen blocks: of lane l, `first + index[l]`.
struct alignas(64) ChunkGroups {
  int32_t index[kChunkBlocks];
  int64_t first;
  __mmask16 mask;  // of those groups from `first` on that there are
};

// Where a block's numbers are: half a vector. `Codes` says which; its sum comes into lane `lane`.
struct BlockPlace {
  int vector, half;
  int lane() const { return 4 * (vector / 4 * 2 + half) + vector % 4; }
};

// Codes as bytes without a sign, from 64 bytes of a row.
struct Uint4Bytes {
  static constexpr int kMiddle = 8, kVectorsOfLoad = 2;
  static BlockPlace find_place(int block) { return {block / 4 * 2 + block % 2, block / 2 % 2}; }
  static int first_block(int vector) { return vector / 2 * 4 + vector % 2; }
  static void decode(__m512i bytes, __m512i* codes) {
    const __m512i low = _mm512_set1_epi8(0x0f);
    codes[0] = _mm512_and_si512(bytes, low);
    codes[1] = _mm512_and_si512(_mm512_srli_epi16(bytes, 4), low);
  }
};
struct Uint8Bytes {
  static constexpr int kMiddle = 128, kVectorsOfLoad = 1;
  static BlockPlace find_place(int block) { return {block / 2, block % 2}; }
  static int first_block(int vector) { return 2 * vector; }
  static void decode(__m512i bytes, __m512i* codes) { codes[0] = bytes; }
};

// The first `count` of 64 bytes, or all.
inline __mmask64 first_bytes(int64_t count) {
  return count >= 64 ? ~__mmask64{0} : count > 0 ? first64(count) : __mmask64{0};
}

// The exponent of the largest of 32 numbers; 128 where one is infinite or no number.
inline int largest_exponent(__m512i numbers) {
  const __m512i sizes = _mm512_and_si512(numbers, _mm512_set1_epi16(0x7fff));
  const __m256i most = _mm256_max_epu16(_mm512_castsi512_si256(sizes),
                                        _mm512_extracti64x4_epi64(sizes, 1));
  const __m128i half = _mm_max_epu16(_mm256_castsi256_si128(most),
                                     _mm256_extracti128_si256(most, 1));
  const __m128i least = _mm_minpos_epu16(_mm_xor_si128(half, _mm_set1_epi16(-1)));
  return ((_mm_extract_epi16(least, 0) ^ 0xffff) >> 7) - 127;
}

// A block of inputs, given as the bits of bfloat16 numbers.
inline void prepare_block(__m512i numbers, BlockPlace place, IntegerChunk& chunk) {
  const int largest = largest_exponent(numbers);
  // Smaller scales, multiplied by a group's, may be no normal numbers.
  const int exponent = largest < -96 ? -96 : largest;
  const __m512 up = _mm512_set1_ps(power_of_two(13 - (exponent == 128 ? 0 : exponent)));
  __m512i sum = _mm512_setzero_si512();
  for (int i = 0; i < 2; ++i) {
    const __m256i sixteen = i == 0 ? _mm512_castsi512_si256(numbers)
                                   : _mm512_extracti64x4_epi64(numbers, 1);
    const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(widen_bf16(sixteen), up));
    const __m512i high =
        _mm512_srai_epi32(_mm512_add_epi32(whole, _mm512_set1_epi32(128)), 8);
    const int at = place.half * kBlockInputs + 16 * i;
    _mm_storeu_si128(reinterpret_cast<__m128i*>(chunk.high[place.vector] + at),
                     _mm512_cvtepi32_epi8(high));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(chunk.low[place.vector] + at),
                     _mm512_cvtepi32_epi8(whole));
    sum = _mm512_add_epi32(sum, whole);
  }
  const float scale = exponent == 128 ? __builtin_nanf("") : power_of_two(exponent - 13);
  chunk.scales[place.lane()] = scale;
  chunk.sums[place.lane()] = _mm512_reduce_add_epi32(sum);
}

// A row of inputs. `chunks`: as many as `width` needs.
template <typename Codes>
void prepare_integers(const bf16* x, int64_t width, IntegerChunk* chunks) {
  for (int64_t d = 0; d < width; ++chunks) {
    for (int block = 0; block < kChunkBlocks; ++block, d += kBlockInputs) {
      const int64_t left = width - d;
      const auto mask = left >= kBlockInputs ? first32(kBlockInputs) : left > 0 ? first32(left) : 0;
      prepare_block(_mm512_maskz_loadu_epi16(mask, x + (left > 0 ? d : 0)),
                    Codes::find_place(block), *chunks);
    }
  }
}

template <typename Codes>
void find_groups(const Groups& weight, int64_t num_chunks, ChunkGroups* chunks) {
  const int64_t last = weight.num_groups - 1;
  const auto find_group = [&](int64_t block) {
    const int64_t group = last == 0 ? 0 : block * kBlockInputs / weight.group_size;
    return group < last ? group : last;
  };
  for (int64_t c = 0; c < num_chunks; ++c) {
    const int64_t first = find_group(c * kChunkBlocks), left = last + 1 - first;
    chunks[c].first = first;
    chunks[c].mask = first16(left < kChunkBlocks ? left : kChunkBlocks);
    for (int block = 0; block < kChunkBlocks; ++block) {
      chunks[c].index[Codes::find_place(block).lane()] =
          static_cast<int32_t>(find_group(c * kChunkBlocks + block) - first);
    }
  }
}

// Of each lane's group: a feature's scales, and its zeros.
inline __m512 load_scales(const Groups& weight, int64_t feature, const ChunkGroups& chunk) {
  const int64_t at = feature * weight.num_groups + chunk.first;
  __m512 scales;
  if (weight.has_bf16_scale) {
    const auto* from = static_cast<const bf16*>(weight.scale) + at;
    scales = widen_bf16(_mm256_maskz_loadu_epi16(chunk.mask, from));
  } else {
    scales = _mm512_maskz_loadu_ps(chunk.mask, static_cast<const float*>(weight.scale) + at);
  }
  return _mm512_permutexvar_ps(_mm512_load_si512(chunk.index), scales);
}
inline __m512i load_zeros(const Groups& weight, int64_t feature, const ChunkGroups& chunk) {
  const int64_t at = feature * weight.num_groups + chunk.first;
  const __m128i zeros = _mm_maskz_loadu_epi8(chunk.mask, weight.zero + at);
  return _mm512_permutexvar_epi32(_mm512_load_si512(chunk.index), _mm512_cvtepu8_epi32(zeros));
}

inline __m512i add_pairs32(__m512i a, __m512i b) {  // of each 128 bits: a0+a2, b0+b2, a1+a3, b1+b3
  return _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
}
inline __m512i add_pairs64(__m512i a, __m512i b) {
  return _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
}

// The sums of the halves of up to eight vectors of integers, in the lanes of `BlockPlace`.
template <int kCount>
inline __m512i add_halves_of(const __m512i (&v)[kVectors]) {
  const __m512i none = _mm512_setzero_si512();
  const __m512i first = add_pairs64(add_pairs32(v[0], kCount > 1 ? v[1] : none),
                                    kCount > 2 ? add_pairs32(v[2], v[3]) : none);
  const __m512i second = kCount > 4 ? add_pairs64(add_pairs32(v[4], v[5]), add_pairs32(v[6], v[7]))
                                    : none;
  return _mm512_add_epi32(_mm512_shuffle_i32x4(first, second, 0x88),
                          _mm512_shuffle_i32x4(first, second, 0xdd));
}

// Add the products of sixteen blocks of a feature with those of some rows, of which `kCount` vectors
// have weights. `left`: bytes of the feature's row from `codes` on.
template <typename Codes, int kCount, int kRows>
inline void add_chunk(const IntegerChunk* const (&rows)[kRows], const Groups& weight,
                      int64_t feature, const ChunkGroups& groups, const uint8_t* codes,
                      int64_t left, __m512 (&sums)[kRows]) {
  __m512i numbers[kVectors] = {};
  for (int v = 0; v < kCount; v += Codes::kVectorsOfLoad) {
    const int64_t byte = 64 * (v / Codes::kVectorsOfLoad);
    fetch(codes + byte + kAheadBytes);
    Codes::decode(_mm512_maskz_loadu_epi8(first_bytes(left - byte), codes + byte), numbers + v);
  }
  const __m512 scales = load_scales(weight, feature, groups);
  const __m512i zeros = weight.zero == nullptr ? _mm512_set1_epi32(Codes::kMiddle)
                                               : load_zeros(weight, feature, groups);
  for (int r = 0; r < kRows; ++r) {
    const IntegerChunk& x = *rows[r];
    __m512i parts[kVectors];
    for (int v = 0; v < kCount; ++v) {
      const __m512i high = _mm512_dpbusd_epi32(_mm512_setzero_si512(), numbers[v],
                                               _mm512_load_si512(x.high[v]));
      parts[v] = _mm512_dpbusd_epi32(_mm512_slli_epi32(high, 8), numbers[v],
                                     _mm512_load_si512(x.low[v]));
    }
    const __m512i offset = _mm512_mullo_epi32(zeros, _mm512_load_si512(x.sums));
    const __m512i part = _mm512_sub_epi32(add_halves_of<kCount>(parts), offset);
    const __m512 scale = _mm512_mul_ps(scales, _mm512_load_ps(x.scales));
    sums[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(part), scale, sums[r]);
  }
}

// A feature with some rows. `chunks`: rows of `num_chunks`.
template <typename Codes, int kRows>
inline void multiply_integer_rows(const IntegerChunk* chunks, int64_t num_chunks,
                                  const ChunkGroups* groups, const Groups& weight, float* out,
                                  int64_t feature, int64_t features) {
  __m512 sums[kRows] = {};
  const uint8_t* codes = weight.codes + feature * weight.row_bytes;
  constexpr int64_t chunk_bytes = 64 * kVectors / Codes::kVectorsOfLoad;
  int64_t left = weight.row_bytes;
  for (int64_t c = 0; c < num_chunks; ++c, codes += chunk_bytes, left -= chunk_bytes) {
    const IntegerChunk* rows[kRows];
    for (int r = 0; r < kRows; ++r) rows[r] = chunks + r * num_chunks + c;
    if (left * 2 > chunk_bytes) {
      add_chunk<Codes, 8>(rows, weight, feature, groups[c], codes, left, sums);
    } else if (left * 4 > chunk_bytes) {
      add_chunk<Codes, 4>(rows, weight, feature, groups[c], codes, left, sums);
    } else {
      add_chunk<Codes, 2>(rows, weight, feature, groups[c], codes, left, sums);
    }
  }
  float totals[kRows];
  FloatSums::add_lanes<kRows>(sums, totals);
  for (int r = 0; r < kRows; ++r) out[r * features + feature] = totals[r];
}

// The chunks of a row.
inline int64_t count_chunks(const Groups& weight) {
  constexpr int64_t chunk_inputs = kChunkBlocks * kBlockInputs;
  return (weight.width + chunk_inputs - 1) / chunk_inputs;
}

// Prepared: the groups of the chunks, and behind them the chunks of the rows.
inline int64_t find_integers_size(const Groups& weight, int64_t rows) {
  const auto size = static_cast<int64_t>(sizeof(ChunkGroups)) +
                    rows * static_cast<int64_t>(sizeof(IntegerChunk));
  return count_chunks(weight) * size;
}

template <typename Codes>
void prepare_all_integers(const bf16* x, const Groups& weight, int64_t rows, void* prepared) {
  const int64_t num_chunks = count_chunks(weight);
  auto* const groups = static_cast<ChunkGroups*>(prepared);
  find_groups<Codes>(weight, num_chunks, groups);
  auto* const chunks = reinterpret_cast<IntegerChunk*>(groups + num_chunks);
  for (int64_t r = 0; r < rows; ++r) {
    prepare_integers<Codes>(x + r * weight.width, weight.width, chunks + r * num_chunks);
  }
}

template <typename Codes>
void multiply_integers(const void* prepared, const Groups& weight, float* out, int64_t rows,
                       int64_t features, int64_t begin, int64_t end) {
  const int64_t num_chunks = count_chunks(weight);
  const auto* const groups = static_cast<const ChunkGroups*>(prepared);
  const auto* const chunks = reinterpret_cast<const IntegerChunk*>(groups + num_chunks);
  for (int64_t f = begin; f < end; ++f) {
    const auto multiply_some = [&](auto multiply_rows, int64_t r) {
      multiply_rows(chunks + r * num_chunks, num_chunks, groups, weight, out + r * features, f,
                    features);
    };
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4) multiply_some(multiply_integer_rows<Codes, 4>, r);
    for (; r + 2 <= rows; r += 2) multiply_some(multiply_integer_rows<Codes, 2>, r);
    if (r < rows) multiply_some(multiply_integer_rows<Codes, 1>, r);
  }
}

template <typename Codes>
constexpr PreparedProduct kIntegers = {find_integers_size, prepare_all_integers<Codes>,
                                       multiply_integers<Codes>};

// The same where one thread prepares rows for itself.
template <typename Codes>
void prepare_and_multiply(const bf16* x, const Groups& weight, float* out, int64_t rows,
                          int64_t features, int64_t begin, int64_t end) {
  const Prepared<char> prepared(find_integers_size(weight, rows));
  prepare_all_integers<Codes>(x, weight, rows, prepared.numbers);
  multiply_integers<Codes>(prepared.numbers, weight, out, rows, features, begin, end);
}

template <typename Codes, typename Bytes>
constexpr GroupProducts kIntegerGroups = {multiply_groups<Float32GroupLanes<Codes>>,
                                          prepare_and_multiply<Bytes>, &kIntegers<Bytes>};

}  // namespace
}  // namespace mmjax
