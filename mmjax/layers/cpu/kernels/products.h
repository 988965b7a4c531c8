// Products with weights [out, in], attention over the paged cache, norms and rotations: what an
// instruction set offers, and which one runs.
#pragma once

#include <cstdint>

namespace mmjax {

// out[r, f] = sum over d of x[r, d] * weight[f, d], for all rows r and the features [begin, end).
// Rows are contiguous: x [rows, width], weight [features, width], out [rows, features].
template <typename X, typename W, typename Out>
using Product = void (*)(const X* x, const W* weight, Out* out, int64_t rows, int64_t width,
                         int64_t features, int64_t begin, int64_t end);

// A bfloat16 number by its bits.
using bf16 = uint16_t;

// Sizes that the attention kernel has room for.
constexpr int64_t kMaxHeadDim = 1024;
constexpr int64_t kMaxChunkSlots = 256;

// Where the keys and values of a request lie that share a head.
template <typename T>
struct PagedHead {
  const T* keys;           // [num_blocks, num_kv_heads, head_dim, block_size]
  const T* values;         // [num_blocks, num_kv_heads, block_size, value_dim]
  const int32_t* table;    // the request's blocks, in order
  int64_t head_dim, value_dim, num_blocks, num_kv_heads, kv_head, block_size;
  float soft_cap;          // 0: none
};

// A query, and what it sees of a chunk of blocks: slots [begin, end), at most kMaxChunkSlots.
template <typename T>
struct PagedQuery {
  const T* query;  // [head_dim]
  int64_t begin, end;
  float* out;      // [2 + value_dim]
};

// Attend with queries of one request to the blocks from `first_block` on, each to what it sees.
// Writes its largest score, its sum of weights, and its weighted values, which are to be scaled by
// the former and divided by the latter.
template <typename T>
using AttendChunk = void (*)(const PagedHead<T>& head, int64_t first_block,
                             const PagedQuery<T>* queries, int64_t num_queries);

// Weights in groups of inputs: a number is `(code - zero) * scale`, with a scale, and maybe a zero,
// for each feature and group. Groups are of a multiple of 32 inputs, or there is one alone.
struct Groups {
  // [features, row_bytes]. Codes of 8 bits lie as they are. Of 4 bits, each 32 bytes have 64: the low
  // halves are the first 32, the high halves those behind them, and the last block is padded.
  const uint8_t* codes;
  const void* scale;    // [features, num_groups] of float, or of bf16
  const uint8_t* zero;  // [features, num_groups]; null: 8 of 4 bits, 128 of 8
  bool has_bf16_scale;
  int64_t width, group_size, num_groups, row_bytes;
};

// As `Product`, with weights in groups.
template <typename X>
using GroupProduct = void (*)(const X* x, const Groups& weight, float* out, int64_t rows,
                              int64_t features, int64_t begin, int64_t end);

// The same where rows are prepared first, once for all threads: into `size` bytes, which begin with a
// line of the cache.
struct PreparedProduct {
  int64_t (*size)(const Groups& weight, int64_t rows);
  void (*prepare)(const bf16* x, const Groups& weight, int64_t rows, void* prepared);
  void (*multiply)(const void* prepared, const Groups& weight, float* out, int64_t rows,
                   int64_t features, int64_t begin, int64_t end);
};

// Of weights of one kind of code: for each dtype of inputs.
struct GroupProducts {
  GroupProduct<float> float32;
  GroupProduct<bf16> bfloat16;
  const PreparedProduct* prepared_bfloat16;  // null: none
};

// How a norm scales: `centres` takes off the mean first, `offset + weight` is what it multiplies by,
// and `rounds_first` rounds what it multiplies.
struct NormOptions {
  float epsilon, offset;
  bool centres, rounds_first;
};

// out[r] = x[r] / sqrt(mean of x[r]^2 + epsilon) * (offset + weight) + bias: x and out [rows, width].
template <typename T>
struct NormRows {
  const T* x;
  const T* weight;
  const T* bias;  // null: none
  T* out;
  int64_t rows, width;
};
template <typename T>
using Norm = void (*)(const NormRows<T>& call, const NormOptions& options);

// Heads turned by the angles of their row: x and out [rows, heads, width], angles [rows, half]; the
// pairs are (x[i], x[i + half]).
template <typename T>
using Rotation = void (*)(const T* x, const float* cosines, const float* sines, T* out,
                          int64_t rows, int64_t heads, int64_t width, int64_t half);

struct Products {
  Product<float, float, float> float32;
  Product<bf16, bf16, float> bfloat16;
  Product<int8_t, int8_t, int32_t> int8;
  Product<float, int8_t, float> float32_int8;
  Product<bf16, int8_t, float> bfloat16_int8;
  AttendChunk<float> attend_float32;
  AttendChunk<bf16> attend_bfloat16;
  Norm<float> norm_float32;
  Norm<bf16> norm_bfloat16;
  Rotation<float> rotate_float32;
  Rotation<bf16> rotate_bfloat16;
  GroupProducts uint4, uint8;
  GroupProducts float8;  // of 4 bits of exponent, 3 of mantissa, without infinities; no zero
  const char* name;
};

// How rows are packed for products of few rows: into `size` numbers, which begin with a line of the cache.
template <typename X>
struct PackRows {
  int64_t (*size)(int64_t rows, int64_t width);
  void (*pack)(const X* x, int64_t rows, int64_t width, X* packed);
};

// A product of up to `most_rows` packed rows, which takes about as long as reading weights does.
template <typename X, typename W, typename Out>
struct PackedProduct {
  PackRows<X> pack;
  Product<X, W, Out> multiply;  // of packed rows
  int64_t most_rows;
};

// A product by tiles. Up to `vector_rows`, `Products` have the same bits as the first of `packed` and
// are faster. `few` and `many` pack for themselves; `few` is null where no expert has such weights.
template <typename X, typename W, typename Out>
struct TileProduct {
  Product<X, W, Out> few, many;
  int64_t vector_rows;
  PackedProduct<X, W, Out> packed[2];  // those of fewer rows first
};

struct TileProducts {
  TileProduct<bf16, bf16, float> bfloat16;
  TileProduct<bf16, bf16, bf16> rounded_bfloat16;
  TileProduct<int8_t, int8_t, int32_t> int8;
  TileProduct<bf16, int8_t, float> bfloat16_int8;
  // With weights in groups: `few` has the bits of `Products`; for `many`, numbers are rounded to
  // bfloat16 first.
  struct Group {
    const PreparedProduct* few;  // null: none
    GroupProduct<bf16> many;
  };
  Group uint4, uint8, float8;
};

// A head of a whole sequence, whose rows are `stride` numbers apart: each query sees all keys.
struct WholeHead {
  const bf16* query;  // [num_queries, head_dim]
  const bf16* key;    // [num_keys, head_dim]
  const bf16* value;  // [num_keys, value_dim]
  bf16* out;          // [num_queries, value_dim]
  int64_t num_queries, num_keys, head_dim, value_dim;
  int64_t query_stride, key_stride, value_stride, out_stride;
  float scale, soft_cap;  // soft_cap 0: none
};
using AttendWhole = void (*)(const WholeHead& head);

// Each stands in a file of its own, compiled with the flags of its instruction set.
extern const Products kAvx2;
extern const Products kAvx512;
extern const Products kAvx512Vnni;
extern const Products kAvx512Bf16;
extern const TileProducts kAmx;
extern const PreparedProduct kAmxUint4, kAmxUint8;
extern const AttendWhole kAmxAttention;  // this and the next: where `find_tile_products` finds kAmx
extern const AttendChunk<bf16> kAmxPagedAttention;

// The best that this CPU has, and that the system lets this process use; null: none.
const Products* find_products();
const TileProducts* find_tile_products();

}  // namespace mmjax
