// Attention of one token a request over the paged cache, as targets of XLA's foreign function
// interface (jax.ffi).
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "products.h"
#include "share.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace mmjax {
namespace {

// Slots [begin, end) that the heads of one tile and key-value head see, within one chunk of blocks.
struct Part {
  int64_t tile, kv_head, first_block, begin, end;
};

void write(float x, float* to) { *to = x; }
// Rounds to the nearest even number, as XLA does. No sum here is a NaN with a payload to keep.
void write(float x, bf16* to) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  *to = static_cast<bf16>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// The parts of all tiles. Chunks begin at multiples of their size, whatever a tile sees: a key is
// always summed beside the same others.
std::vector<Part> find_parts(ffi::Span<const int32_t> lower, ffi::Span<const int32_t> upper,
                             int64_t num_kv_heads, int64_t block_size, int64_t table_width) {
  const int64_t chunk_blocks = kMaxChunkSlots / block_size;
  const int64_t chunk = chunk_blocks * block_size;
  std::vector<Part> parts;
  for (size_t tile = 0; tile < upper.size(); ++tile) {
    const int64_t first = std::max<int64_t>(lower[tile] + int64_t{1}, 0);
    const int64_t last = std::min<int64_t>(upper[tile], table_width * block_size);
    for (int64_t kv_head = 0; kv_head < num_kv_heads; ++kv_head) {
      for (int64_t start = first / chunk * chunk; start < last; start += chunk) {
        parts.push_back({static_cast<int64_t>(tile), kv_head, start / block_size,
                         std::max(first - start, int64_t{0}), std::min(last - start, chunk)});
      }
    }
  }
  return parts;
}

// Scale the parts' values by their largest scores, and add them in order: an online softmax.
class Fold {
 public:
  Fold(int64_t value_dim, bool has_sink, float sink)
      : peak_(has_sink ? sink : -1e30f), total_(has_sink ? 1.0f : 0.0f), sums_(value_dim) {}

  void add(float peak, float total, const float* sums) {
    const float highest = std::max(peak, peak_);
    const float decay = std::exp(peak_ - highest), scale = std::exp(peak - highest);
    total_ = total_ * decay + total * scale;
    for (size_t i = 0; i < sums_.size(); ++i) sums_[i] = sums_[i] * decay + sums[i] * scale;
    peak_ = highest;
  }

  template <typename T>
  void write_to(T* out) const {
    const float total = std::max(total_, 1e-30f);
    for (size_t i = 0; i < sums_.size(); ++i) write(sums_[i] / total, out + i);
  }

 private:
  float peak_, total_;
  std::vector<float> sums_;
};

template <typename T, ffi::DataType kQuery, ffi::DataType kStored, auto kAttend>
ffi::Error handle_attention(ffi::ThreadPool pool, ffi::Buffer<kQuery> query,
                            ffi::Buffer<kStored> keys, ffi::Buffer<kStored> values,
                            ffi::Buffer<ffi::S32> tables, ffi::Buffer<ffi::S32> lower,
                            ffi::Buffer<ffi::S32> upper, ffi::Buffer<ffi::F32> sinks,
                            ffi::ResultBuffer<kQuery> out, float soft_cap) {
  const auto shape = query.dimensions(), stored = values.dimensions();
  if (shape.size() != 4 || stored.size() != 4 || keys.dimensions().size() != 4 ||
      tables.dimensions().size() != 2 || shape[1] != stored[1] || shape[3] > kMaxHeadDim ||
      keys.dimensions()[2] != shape[3] || stored[2] > kMaxChunkSlots || stored[2] % 16 != 0) {
    return ffi::Error::InvalidArgument(
        "query must be [tiles, kv_heads, heads, head_dim], keys [blocks, kv_heads, head_dim, slots],"
        " values [blocks, kv_heads, slots, value_dim], with 16, 32, ... 256 slots");
  }
  const int64_t num_kv_heads = shape[1], num_heads = shape[2], head_dim = shape[3];
  const int64_t block_size = stored[2], value_dim = stored[3];
  const int64_t table_width = tables.dimensions()[1];
  const bool has_sinks = sinks.element_count() > 0;
  const auto num_tiles = static_cast<size_t>(shape[0]);
  const ffi::Span<const int32_t> lowers(lower.typed_data(), num_tiles);
  const ffi::Span<const int32_t> uppers(upper.typed_data(), num_tiles);
  const auto parts = find_parts(lowers, uppers, num_kv_heads, block_size, table_width);

  const int64_t row = value_dim + 2;  // a largest score, a sum of weights, the values
  std::vector<float> scratch(parts.size() * static_cast<size_t>(num_heads * row));
  const Part* const all = parts.data();
  float* const results = scratch.data();
  const auto* const query_data = reinterpret_cast<const T*>(query.untyped_data());
  const auto* const key_data = reinterpret_cast<const T*>(keys.untyped_data());
  const auto* const value_data = reinterpret_cast<const T*>(values.untyped_data());
  const int32_t* const table_data = tables.typed_data();
  const int64_t num_blocks = stored[0];
  const AttendChunk<T> attend = find_products()->*kAttend;
  share(pool, static_cast<int64_t>(parts.size()), [=](int64_t number) {
    const Part part = all[number];
    const PagedTile<T> tile = {
        query_data + (part.tile * num_kv_heads + part.kv_head) * num_heads * head_dim,
        key_data, value_data, table_data + part.tile * table_width, num_heads, head_dim, value_dim,
        num_blocks, num_kv_heads, part.kv_head, block_size, soft_cap};
    float* const result = results + number * num_heads * row;
    attend(tile, part.first_block, part.begin, part.end, result, result + num_heads,
           result + 2 * num_heads);
  });

  auto* const outputs = reinterpret_cast<T*>(out->untyped_data());
  size_t next = 0;
  for (int64_t group = 0; group < shape[0] * num_kv_heads; ++group) {
    const size_t first = next;
    while (next < parts.size() && parts[next].tile * num_kv_heads + parts[next].kv_head == group) {
      ++next;
    }
    for (int64_t head = 0; head < num_heads; ++head) {
      const int64_t place = group * num_heads + head;
      Fold fold(value_dim, has_sinks, has_sinks ? sinks.typed_data()[place] : 0.0f);
      for (size_t number = first; number < next; ++number) {
        const float* result = results + static_cast<int64_t>(number) * num_heads * row;
        fold.add(result[head], result[num_heads + head],
                 result + 2 * num_heads + head * value_dim);
      }
      fold.write_to(outputs + place * value_dim);
    }
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace mmjax

#define MMJAX_ATTENTION(NAME, T, QUERY, STORED)                                               \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(                                                              \
      mmjax_attention_##NAME,                                                                 \
      (mmjax::handle_attention<T, ffi::QUERY, ffi::STORED, &mmjax::Products::attend_##NAME>), \
      ffi::Ffi::Bind()                                                                        \
          .Ctx<ffi::ThreadPool>()                                                             \
          .Arg<ffi::Buffer<ffi::QUERY>>()                                                     \
          .Arg<ffi::Buffer<ffi::STORED>>()                                                    \
          .Arg<ffi::Buffer<ffi::STORED>>()                                                    \
          .Arg<ffi::Buffer<ffi::S32>>()                                                       \
          .Arg<ffi::Buffer<ffi::S32>>()                                                       \
          .Arg<ffi::Buffer<ffi::S32>>()                                                       \
          .Arg<ffi::Buffer<ffi::F32>>()                                                       \
          .Ret<ffi::Buffer<ffi::QUERY>>()                                                     \
          .Attr<float>("soft_cap"))

MMJAX_ATTENTION(float32, float, F32, F32);
MMJAX_ATTENTION(bfloat16, mmjax::bf16, BF16, U16);
