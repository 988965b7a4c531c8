// Attention over the paged cache, as targets of XLA's foreign function interface (jax.ffi).
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "products.h"
#include "rounding.h"
#include "share.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace mmjax {
namespace {

// From so many parts on, of very different lengths, threads are busy without dividing one.
constexpr int64_t kPartsPerThread = 4;

void write(float x, float* to) { *to = x; }
void write(float x, bf16* to) { *to = to_bf16(x); }

// One call: rows are those of the step, `[num_rows, num_heads, head_dim]`, and a tile has the places
// of up to `tile_size` of them, which are of one request; places out of range are padding.
template <typename T>
struct Call {
  const T* query;
  const T* keys;
  const T* values;
  const int32_t *tables, *upper, *lower, *tile_rows, *tile_request;
  const float* sinks;  // [num_heads]; null: none
  T* out;              // [num_rows, num_heads, value_dim]
  int64_t num_rows, num_heads, num_kv_heads, head_dim, value_dim, num_blocks, block_size;
  int64_t num_requests, table_width, num_tiles, tile_size;
  float soft_cap;
  AttendChunk<T> attend;

  // Chunks begin at multiples of their size, whatever a row sees: a key is always summed beside the
  // same others.
  int64_t chunk_size() const { return kMaxChunkSlots / block_size * block_size; }
  int64_t first_seen(int64_t row) const { return std::max<int64_t>(lower[row] + int64_t{1}, 0); }
  int64_t end_seen(int64_t row) const {
    return std::min<int64_t>(upper[row], table_width * block_size);
  }
  bool is_row(int64_t row) const { return row >= 0 && row < num_rows; }
};

// Some of a tile's rows with the heads that share a key-value head, over chunks [begin, end).
struct Part {
  int64_t tile, kv_head, begin, end;
};

// A row with one head, in `Call::query`.
struct Place {
  int64_t row, head;
};

template <typename T>
std::vector<Place> find_places(const Call<T>& call, const Part& part) {
  const int64_t group = call.num_heads / call.num_kv_heads;
  std::vector<Place> places;
  for (int64_t head = part.kv_head * group; head < (part.kv_head + 1) * group; ++head) {
    for (int64_t i = 0; i < call.tile_size; ++i) {
      const int64_t row = call.tile_rows[part.tile * call.tile_size + i];
      if (call.is_row(row) && call.first_seen(row) < call.end_seen(row)) {
        places.push_back({row, head});
      }
    }
  }
  return places;
}

// For each tile and key-value head, all the chunks that its rows see.
template <typename T>
std::vector<Part> find_parts(const Call<T>& call) {
  std::vector<Part> parts;
  for (int64_t tile = 0; tile < call.num_tiles; ++tile) {
    int64_t first = std::numeric_limits<int64_t>::max(), last = 0;
    for (int64_t i = 0; i < call.tile_size; ++i) {
      const int64_t row = call.tile_rows[tile * call.tile_size + i];
      if (!call.is_row(row) || call.first_seen(row) >= call.end_seen(row)) continue;
      first = std::min(first, call.first_seen(row));
      last = std::max(last, call.end_seen(row));
    }
    const int64_t size = call.chunk_size();
    for (int64_t kv_head = 0; first < last && kv_head < call.num_kv_heads; ++kv_head) {
      parts.push_back({tile, kv_head, first / size, (last + size - 1) / size});
    }
  }
  return parts;
}

// Of one query, the sums of the chunks so far: an online softmax. `state` is as
// `PagedQuery::out`.
void begin_sums(float* state, int64_t value_dim, const float* sink) {
  state[0] = sink == nullptr ? -1e30f : *sink;
  state[1] = sink == nullptr ? 0.0f : 1.0f;
  std::fill(state + 2, state + 2 + value_dim, 0.0f);
}

void add_sums(float* state, int64_t value_dim, const float* chunk) {
  const float highest = std::max(state[0], chunk[0]);
  const float decay = std::exp(state[0] - highest), scale = std::exp(chunk[0] - highest);
  state[0] = highest;
  for (int64_t i = 1; i < 2 + value_dim; ++i) state[i] = state[i] * decay + chunk[i] * scale;
}

// Attend to one chunk; `out` has a row for each place, which is left as it is where it sees nothing.
template <typename T>
void attend_to_chunk(const Call<T>& call, const Part& part, const std::vector<Place>& places,
                     int64_t chunk, float* out) {
  const int64_t request =
      std::clamp<int64_t>(call.tile_request[part.tile], 0, call.num_requests - 1);
  const PagedHead<T> head = {
      call.keys, call.values, call.tables + request * call.table_width, call.head_dim,
      call.value_dim, call.num_blocks, call.num_kv_heads, part.kv_head, call.block_size,
      call.soft_cap};
  const int64_t start = chunk * call.chunk_size();
  std::vector<PagedQuery<T>> queries;
  queries.reserve(places.size());
  for (size_t i = 0; i < places.size(); ++i) {
    const auto [row, of_head] = places[i];
    const int64_t begin = std::max<int64_t>(call.first_seen(row) - start, 0);
    const int64_t end = std::min(call.end_seen(row) - start, call.chunk_size());
    if (begin >= end) continue;
    const T* query = call.query + (row * call.num_heads + of_head) * call.head_dim;
    queries.push_back({query, begin, end, out + static_cast<int64_t>(i) * (2 + call.value_dim)});
  }
  call.attend(head, start / call.block_size, queries.data(), static_cast<int64_t>(queries.size()));
}

// Add the chunks of a part in their order, and write the outputs. `read(chunk)` gives what
// `attend_to_chunk` wrote.
template <typename T, typename Read>
void finish(const Call<T>& call, const Part& part, const std::vector<Place>& places, Read read) {
  const int64_t width = 2 + call.value_dim;
  std::vector<float> states(places.size() * static_cast<size_t>(width));
  for (size_t i = 0; i < places.size(); ++i) {
    const float* sink = call.sinks == nullptr ? nullptr : call.sinks + places[i].head;
    begin_sums(states.data() + static_cast<int64_t>(i) * width, call.value_dim, sink);
  }
  for (int64_t chunk = part.begin; chunk < part.end; ++chunk) {
    const float* sums = read(chunk);
    const int64_t start = chunk * call.chunk_size();
    for (size_t i = 0; i < places.size(); ++i) {
      const int64_t row = places[i].row;
      if (call.first_seen(row) >= start + call.chunk_size() || call.end_seen(row) <= start) continue;
      const int64_t at = static_cast<int64_t>(i) * width;
      add_sums(states.data() + at, call.value_dim, sums + at);
    }
  }
  for (size_t i = 0; i < places.size(); ++i) {
    const float* state = states.data() + static_cast<int64_t>(i) * width;
    const float total = std::max(state[1], 1e-30f);
    T* out = call.out + (places[i].row * call.num_heads + places[i].head) * call.value_dim;
    for (int64_t v = 0; v < call.value_dim; ++v) write(state[2 + v] / total, out + v);
  }
}

// A thread computes a whole part.
template <typename T>
void compute_part(const Call<T>& call, const Part& part) {
  const auto places = find_places(call, part);
  std::vector<float> sums(places.size() * static_cast<size_t>(2 + call.value_dim));
  finish(call, part, places, [&](int64_t chunk) {
    attend_to_chunk(call, part, places, chunk, sums.data());
    return sums.data();
  });
}

// Threads compute a chunk each; for fewer parts than keep all of them busy. The sums are the same.
template <typename T>
void compute_by_chunks(ffi::ThreadPool pool, const Call<T>& call, const std::vector<Part>& parts) {
  struct Chunk {
    size_t part;
    int64_t number;
    std::vector<float> sums;
  };
  std::vector<std::vector<Place>> places;
  std::vector<Chunk> chunks;
  std::vector<size_t> first;
  for (size_t number = 0; number < parts.size(); ++number) {
    places.push_back(find_places(call, parts[number]));
    first.push_back(chunks.size());
    const size_t size = places.back().size() * static_cast<size_t>(2 + call.value_dim);
    for (int64_t chunk = parts[number].begin; chunk < parts[number].end; ++chunk) {
      chunks.push_back({number, chunk, std::vector<float>(size)});
    }
  }
  share(pool, static_cast<int64_t>(chunks.size()), [&](int64_t number) {
    Chunk& chunk = chunks[static_cast<size_t>(number)];
    const Part& part = parts[chunk.part];
    attend_to_chunk(call, part, places[chunk.part], chunk.number, chunk.sums.data());
  });
  for (size_t number = 0; number < parts.size(); ++number) {
    finish(call, parts[number], places[number], [&](int64_t chunk) {
      return chunks[first[number] + static_cast<size_t>(chunk - parts[number].begin)].sums.data();
    });
  }
}

// Rows that no tile asks for, and those that see nothing, are zeros.
template <typename T>
void clear_others(const Call<T>& call) {
  std::vector<bool> is_written(static_cast<size_t>(call.num_rows));
  for (int64_t i = 0; i < call.num_tiles * call.tile_size; ++i) {
    const int64_t row = call.tile_rows[i];
    if (call.is_row(row) && call.first_seen(row) < call.end_seen(row)) {
      is_written[static_cast<size_t>(row)] = true;
    }
  }
  const int64_t width = call.num_heads * call.value_dim;
  for (int64_t row = 0; row < call.num_rows; ++row) {
    T* const out = call.out + row * width;
    if (!is_written[static_cast<size_t>(row)]) std::fill(out, out + width, T{});
  }
}

// By tiles where there are some, whatever the number of queries: a query has the same bits in any.
AttendChunk<float> find_attend(AttendChunk<float> attend) { return attend; }
AttendChunk<bf16> find_attend(AttendChunk<bf16> attend) {
  return find_tile_products() == nullptr ? attend : kAmxPagedAttention;
}

template <typename T, ffi::DataType kQuery, ffi::DataType kStored, auto kAttend>
ffi::Error handle_attention(ffi::ThreadPool pool, ffi::Buffer<kQuery> query,
                            ffi::Buffer<kStored> keys, ffi::Buffer<kStored> values,
                            ffi::Buffer<ffi::S32> tables, ffi::Buffer<ffi::S32> upper,
                            ffi::Buffer<ffi::S32> lower, ffi::Buffer<ffi::S32> tile_rows,
                            ffi::Buffer<ffi::S32> tile_request, ffi::Buffer<ffi::F32> sinks,
                            ffi::ResultBuffer<kQuery> out, float soft_cap) {
  const auto shape = query.dimensions(), stored = values.dimensions();
  const auto table = tables.dimensions(), tiles = tile_rows.dimensions();
  if (shape.size() != 3 || stored.size() != 4 || keys.dimensions().size() != 4 ||
      table.size() != 2 || tiles.size() != 2 || shape[1] % stored[1] != 0 ||
      shape[2] > kMaxHeadDim || keys.dimensions()[2] != shape[2] || stored[2] > kMaxChunkSlots) {
    return ffi::Error::InvalidArgument(
        "query must be [rows, heads, head_dim], keys [blocks, kv_heads, head_dim, slots], values"
        " [blocks, kv_heads, slots, value_dim], with at most 256 slots");
  }
  const Call<T> call = {reinterpret_cast<const T*>(query.untyped_data()),
                        reinterpret_cast<const T*>(keys.untyped_data()),
                        reinterpret_cast<const T*>(values.untyped_data()),
                        tables.typed_data(), upper.typed_data(), lower.typed_data(),
                        tile_rows.typed_data(), tile_request.typed_data(),
                        sinks.element_count() > 0 ? sinks.typed_data() : nullptr,
                        reinterpret_cast<T*>(out->untyped_data()),
                        shape[0], shape[1], stored[1], shape[2], stored[3], stored[0], stored[2],
                        table[0], table[1], tiles[0], tiles[1], soft_cap,
                        find_attend(find_products()->*kAttend)};
  clear_others(call);
  const auto parts = find_parts(call);
  const auto num_parts = static_cast<int64_t>(parts.size());
  if (num_parts < kPartsPerThread * pool.num_threads()) {
    compute_by_chunks(pool, call, parts);
  } else {
    share(pool, num_parts, [&](int64_t part) { compute_part(call, parts[static_cast<size_t>(part)]); });
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
          .Arg<ffi::Buffer<ffi::S32>>()                                                       \
          .Arg<ffi::Buffer<ffi::S32>>()                                                       \
          .Arg<ffi::Buffer<ffi::F32>>()                                                       \
          .Ret<ffi::Buffer<ffi::QUERY>>()                                                     \
          .Attr<float>("soft_cap"))

MMJAX_ATTENTION(float32, float, F32, F32);
MMJAX_ATTENTION(bfloat16, mmjax::bf16, BF16, U16);
