// Attention of whole sequences, and of segments of one, as targets of XLA's foreign function
// interface (jax.ffi).
#include <algorithm>
#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

#include "products.h"
#include "share.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace mmjax {
namespace {

// Heads are divided where they are too few for all threads, into parts of at least so many queries:
// each packs its keys.
constexpr int64_t kLeastQueries = 128;

void attend_to_all(ffi::ThreadPool pool, const std::vector<WholeHead>& heads) {
  const auto num_heads = std::max<int64_t>(1, static_cast<int64_t>(heads.size()));
  const int64_t num_threads = std::max<int64_t>(1, pool.num_threads());
  const int64_t wanted = (2 * num_threads + num_heads - 1) / num_heads;
  std::vector<WholeHead> parts;
  for (const WholeHead& head : heads) {
    const int64_t most = std::max<int64_t>(1, head.num_queries / kLeastQueries);
    const int64_t num_parts = std::min(wanted, most);
    const int64_t size = (head.num_queries + num_parts - 1) / num_parts;
    for (int64_t first = 0; first < head.num_queries; first += size) {
      WholeHead part = head;
      part.query += first * head.query_stride;
      part.out += first * head.out_stride;
      part.num_queries = std::min(size, head.num_queries - first);
      parts.push_back(part);
    }
  }
  const WholeHead* const begin = parts.data();
  share(pool, static_cast<int64_t>(parts.size()), [=](int64_t i) { kAmxAttention(begin[i]); });
}

// The heads of `num_queries` rows and `num_keys` rows that lie behind each other.
struct Sizes {
  int64_t num_queries, num_keys, heads, kv_heads, head_dim, value_dim;
  float scale, soft_cap;
};

void add_heads(const Sizes& sizes, const bf16* query, const bf16* key, const bf16* value, bf16* out,
               std::vector<WholeHead>* heads) {
  const int64_t group = sizes.heads / sizes.kv_heads;
  for (int64_t head = 0; head < sizes.heads; ++head) {
    const int64_t kv_head = head / group;
    heads->push_back({query + head * sizes.head_dim, key + kv_head * sizes.head_dim,
                      value + kv_head * sizes.value_dim, out + head * sizes.value_dim,
                      sizes.num_queries, sizes.num_keys, sizes.head_dim, sizes.value_dim,
                      sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim,
                      sizes.kv_heads * sizes.value_dim, sizes.heads * sizes.value_dim, sizes.scale,
                      sizes.soft_cap});
  }
}

const bf16* numbers_of(const ffi::Buffer<ffi::BF16>& buffer) {
  return reinterpret_cast<const bf16*>(buffer.untyped_data());
}

ffi::Error handle_whole_attention(ffi::ThreadPool pool, ffi::Buffer<ffi::BF16> query,
                                  ffi::Buffer<ffi::BF16> key, ffi::Buffer<ffi::BF16> value,
                                  ffi::ResultBuffer<ffi::BF16> out, float scale, float soft_cap) {
  const auto q = query.dimensions(), k = key.dimensions(), v = value.dimensions();
  if (q.size() != 4 || k.size() != 4 || v.size() != 4 || q[0] != k[0] || k[0] != v[0] ||
      k[1] != v[1] || k[2] != v[2] || k[2] < 1 || q[2] % k[2] != 0 || q[3] != k[3] || k[1] < 1) {
    return ffi::Error::InvalidArgument(
        "query must be [batch, queries, heads, head_dim], key and value [batch, keys, heads, dim]");
  }
  if (find_tile_products() == nullptr) return ffi::Error::Internal("this CPU has no AMX");
  const Sizes sizes = {q[1], k[1], q[2], k[2], q[3], v[3], scale, soft_cap};
  auto* const to = reinterpret_cast<bf16*>(out->untyped_data());
  std::vector<WholeHead> heads;
  for (int64_t item = 0; item < q[0]; ++item) {
    add_heads(sizes, numbers_of(query) + item * q[1] * q[2] * q[3],
              numbers_of(key) + item * k[1] * k[2] * k[3],
              numbers_of(value) + item * v[1] * v[2] * v[3], to + item * q[1] * q[2] * v[3], &heads);
  }
  attend_to_all(pool, heads);
  return ffi::Error::Success();
}

// A segment's rows; those that do not lie behind each other are copied, three arrays and their
// output.
struct Segment {
  std::vector<int64_t> rows;
  std::vector<bf16> copies;
  bool is_contiguous() const {
    return rows.back() - rows.front() + 1 == static_cast<int64_t>(rows.size());
  }
};

std::vector<Segment> find_segments(const int32_t* ids, int64_t num_rows) {
  std::vector<Segment> segments;
  std::unordered_map<int32_t, size_t> places;
  for (int64_t row = 0; row < num_rows; ++row) {
    if (ids[row] < 0) continue;
    const auto [place, is_new] = places.try_emplace(ids[row], segments.size());
    if (is_new) segments.emplace_back();
    segments[place->second].rows.push_back(row);
  }
  return segments;
}

ffi::Error handle_segment_attention(ffi::ThreadPool pool, ffi::Buffer<ffi::BF16> query,
                                    ffi::Buffer<ffi::BF16> key, ffi::Buffer<ffi::BF16> value,
                                    ffi::Buffer<ffi::S32> segment_ids,
                                    ffi::ResultBuffer<ffi::BF16> out, float scale) {
  const auto shape = query.dimensions();
  if (shape.size() != 3 || key.element_count() != query.element_count() ||
      value.element_count() != query.element_count() ||
      static_cast<int64_t>(segment_ids.element_count()) != shape[0]) {
    return ffi::Error::InvalidArgument(
        "query, key and value must be [rows, heads, head_dim], segment_ids [rows]");
  }
  if (find_tile_products() == nullptr) return ffi::Error::Internal("this CPU has no AMX");
  const int64_t width = shape[1] * shape[2];
  const bf16* const arrays[3] = {numbers_of(query), numbers_of(key), numbers_of(value)};
  auto* const to = reinterpret_cast<bf16*>(out->untyped_data());
  std::fill(to, to + shape[0] * width, bf16{0});
  std::vector<Segment> segments = find_segments(segment_ids.typed_data(), shape[0]);
  std::vector<WholeHead> heads;
  for (Segment& segment : segments) {
    const auto count = static_cast<int64_t>(segment.rows.size()), size = count * width;
    const Sizes sizes = {count, count, shape[1], shape[1], shape[2], shape[2], scale, 0.0f};
    if (segment.is_contiguous()) {
      const int64_t first = segment.rows.front() * width;
      add_heads(sizes, arrays[0] + first, arrays[1] + first, arrays[2] + first, to + first, &heads);
      continue;
    }
    segment.copies.resize(static_cast<size_t>(4 * size));
    bf16* const copies = segment.copies.data();
    for (int64_t i = 0; i < 3 * count; ++i) {
      const int64_t row = segment.rows[static_cast<size_t>(i % count)];
      std::copy_n(arrays[i / count] + row * width, width, copies + i * width);
    }
    add_heads(sizes, copies, copies + size, copies + 2 * size, copies + 3 * size, &heads);
  }
  attend_to_all(pool, heads);
  for (const Segment& segment : segments) {
    const bf16* from = segment.copies.data() + segment.copies.size() / 4 * 3;
    for (size_t i = 0; i < segment.rows.size() && !segment.copies.empty(); ++i, from += width) {
      std::copy_n(from, width, to + segment.rows[i] * width);
    }
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace mmjax

XLA_FFI_DEFINE_HANDLER_SYMBOL(mmjax_whole_attention_bfloat16, mmjax::handle_whole_attention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::BF16>>()
                                  .Arg<ffi::Buffer<ffi::BF16>>()
                                  .Arg<ffi::Buffer<ffi::BF16>>()
                                  .Ret<ffi::Buffer<ffi::BF16>>()
                                  .Attr<float>("scale")
                                  .Attr<float>("soft_cap"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(mmjax_segment_attention_bfloat16, mmjax::handle_segment_attention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::BF16>>()
                                  .Arg<ffi::Buffer<ffi::BF16>>()
                                  .Arg<ffi::Buffer<ffi::BF16>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::BF16>>()
                                  .Attr<float>("scale"));
