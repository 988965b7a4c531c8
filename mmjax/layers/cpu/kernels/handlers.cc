// The kernels as targets of XLA's foreign function interface (jax.ffi).
#include <algorithm>
#include <cstdint>
#include <memory>
#include <type_traits>
#include <vector>

#include "products.h"
#include "rounding.h"
#include "share.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace mmjax {
namespace {

// Bytes of weights that a thread takes at a time: enough that preparing inputs for them costs
// little, few enough that no thread waits long for the last one.
constexpr int64_t kLeastChunkBytes = 1 << 16;
constexpr int64_t kMostChunkBytes = 1 << 19;
constexpr int64_t kChunkFeatures = 16;
constexpr int64_t kChunksOfThread = 16;

// Features that a thread takes at a time: as many chunks for each thread, where there are several.
int64_t chunk_features(ffi::ThreadPool pool, int64_t features, int64_t row_bytes) {
  const int64_t num_threads = std::max<int64_t>(1, pool.num_threads());
  const int64_t all_bytes = features * row_bytes;
  const int64_t bytes =
      std::clamp(all_bytes / (kChunksOfThread * num_threads), kLeastChunkBytes, kMostChunkBytes);
  int64_t num_chunks = std::max<int64_t>(1, (all_bytes + bytes - 1) / bytes);
  if (num_chunks > 1) num_chunks += num_threads - 1 - (num_chunks - 1) % num_threads;
  const int64_t step = (features + num_chunks - 1) / num_chunks;
  return (step + kChunkFeatures - 1) / kChunkFeatures * kChunkFeatures;
}

// Features, and rows, that a thread takes at a time of a product of many rows: packed weights fit into
// the second cache, there are as many chunks for each thread, and rows are divided where features are
// too few for that.
struct ManyChunks {
  int64_t features, rows;
};
constexpr int64_t kMostFeatures = 256;
constexpr int64_t kFeatureStep = 32;

ManyChunks many_chunks(ffi::ThreadPool pool, int64_t features, int64_t rows) {
  const auto divide_up = [](int64_t number, int64_t by) { return (number + by - 1) / by; };
  const int64_t num_threads = std::max<int64_t>(1, pool.num_threads());
  const int64_t least = divide_up(features, kMostFeatures);
  const int64_t wanted = divide_up(least, num_threads) * num_threads;
  const int64_t step = divide_up(divide_up(features, wanted), kFeatureStep) * kFeatureStep;
  const int64_t num_parts = std::max<int64_t>(1, num_threads / divide_up(features, step));
  return {step, std::max(divide_up(divide_up(rows, num_parts), kFeatureStep) * kFeatureStep,
                         4 * kFeatureStep)};
}

// A product of many rows. `product(first, rows, begin, end)`: of `rows` rows from `first` on.
template <typename Product>
void share_many(ffi::ThreadPool pool, int64_t rows, int64_t features, Product product) {
  const ManyChunks chunks = many_chunks(pool, features, rows);
  const int64_t num_parts = (rows + chunks.rows - 1) / chunks.rows;
  const int64_t num_steps = (features + chunks.features - 1) / chunks.features;
  share(pool, num_steps * num_parts, [=](int64_t chunk) {
    const int64_t first = chunk % num_parts * chunks.rows;
    const int64_t begin = chunk / num_parts * chunks.features;
    product(first, std::min(chunks.rows, rows - first), begin,
            std::min(begin + chunks.features, features));
  });
}

// Products as they are written: the sums themselves, or rounded to bfloat16.
template <typename Product, typename X, typename W, typename Out>
void write_product(Product product, const X* x, const W* weight, Out* out, int64_t rows,
                   int64_t width, int64_t features, int64_t begin, int64_t end) {
  if constexpr (std::is_same_v<Out, bf16>) {
    const int64_t count = end - begin;
    std::vector<float> sums(static_cast<size_t>(rows * count));
    product(x, weight + begin * width, sums.data(), rows, width, count, 0, count);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t f = 0; f < count; ++f) {
        out[r * features + begin + f] = to_bf16(sums[static_cast<size_t>(r * count + f)]);
      }
    }
  } else {
    product(x, weight, out, rows, width, features, begin, end);
  }
}

// Memory that begins with a line of the cache.
class LineMemory {
 public:
  explicit LineMemory(int64_t bytes)
      : lines_(new Line[(static_cast<size_t>(bytes) + sizeof(Line) - 1) / sizeof(Line)]) {}
  void* get() const { return lines_.get(); }

 private:
  struct alignas(64) Line {
    char bytes[64];
  };
  std::unique_ptr<Line[]> lines_;
};

// A product of few rows, which are packed once for all threads. `product(packed, begin, end)`.
template <typename X, typename Product>
void share_packed(ffi::ThreadPool pool, const PackRows<X>& pack_rows, const X* x, int64_t rows,
                  int64_t width, int64_t features, int64_t row_bytes, Product product) {
  const LineMemory memory(pack_rows.size(rows, width) * static_cast<int64_t>(sizeof(X)));
  X* const packed = static_cast<X*>(memory.get());
  pack_rows.pack(x, rows, width, packed);
  const int64_t step = chunk_features(pool, features, row_bytes);
  share(pool, (features + step - 1) / step, [=](int64_t chunk) {
    product(packed, chunk * step, std::min(chunk * step + step, features));
  }, true);
}

// `tiles`: null where `product` takes all rows.
template <typename Product, typename X, typename W, typename Out>
ffi::Error multiply(ffi::ThreadPool pool, Product product,
                    const TileProduct<X, W, Out>* tiles, const X* x, const W* weight, Out* out,
                    ffi::Span<const int64_t> x_shape, ffi::Span<const int64_t> weight_shape) {
  if (x_shape.size() != 2 || weight_shape.size() != 2 || x_shape[1] != weight_shape[1]) {
    return ffi::Error::InvalidArgument("x must be [rows, width], weight [features, width]");
  }
  const int64_t rows = x_shape[0], width = x_shape[1], features = weight_shape[0];
  const int64_t row_bytes = width * static_cast<int64_t>(sizeof(W));
  if (tiles != nullptr && rows > tiles->vector_rows) {
    for (const auto& packed : tiles->packed) {
      if (rows > packed.most_rows) continue;
      share_packed(pool, packed.pack, x, rows, width, features, row_bytes,
                   [=, multiply_some = packed.multiply](const X* all, int64_t begin, int64_t end) {
                     multiply_some(all, weight, out, rows, width, features, begin, end);
                   });
      return ffi::Error::Success();
    }
    const auto many = tiles->many;
    share_many(pool, rows, features, [=](int64_t first, int64_t count, int64_t begin, int64_t end) {
      many(x + first * width, weight, out + first * features, count, width, features, begin, end);
    });
    return ffi::Error::Success();
  }
  const int64_t step = chunk_features(pool, features, row_bytes);
  share(pool, (features + step - 1) / step, [=](int64_t chunk) {
    const int64_t begin = chunk * step;
    const int64_t end = std::min(begin + step, features);
    write_product(product, x, weight, out, rows, width, features, begin, end);
  }, true);
  return ffi::Error::Success();
}

// The rows of one expert.
struct ExpertRows {
  int64_t expert, first, rows;
};

// Rows that stand expert by expert, each multiplied with its expert's weight, `step` features at a
// time. The weights of experts without rows are not read.
// `product(rows, out, expert, num_rows, begin, end)`.
template <typename X, typename Product>
void multiply_by_expert(ffi::ThreadPool pool, const X* x, ffi::Span<const int32_t> sizes,
                        float* out, int64_t rows, int64_t width, int64_t features, int64_t step,
                        Product product) {
  std::vector<ExpertRows> groups;
  int64_t first = 0;
  for (int64_t expert = 0; expert < static_cast<int64_t>(sizes.size()); ++expert) {
    const auto at = static_cast<size_t>(expert);
    const int64_t size = std::clamp<int64_t>(sizes[at], 0, rows - first);
    if (size > 0) groups.push_back({expert, first, size});
    first += size;
  }
  std::fill(out + first * features, out + rows * features, 0.0f);
  const int64_t num_steps = (features + step - 1) / step;
  share(pool, static_cast<int64_t>(groups.size()) * num_steps, [=](int64_t chunk) {
    const ExpertRows group = groups[static_cast<size_t>(chunk / num_steps)];
    const int64_t begin = chunk % num_steps * step;
    product(x + group.first * width, out + group.first * features, group.expert, group.rows, begin,
            std::min(begin + step, features));
  }, true);
}

// Features of an expert that a thread takes at a time.
int64_t expert_features(ffi::ThreadPool pool, int64_t features, int64_t row_bytes, bool has_many) {
  return has_many ? std::min(features, kMostFeatures) : chunk_features(pool, features, row_bytes);
}

// Weights of [experts, features, width]. `has_many`: `product` is of many rows.
template <typename T>
ffi::Error multiply_experts(ffi::ThreadPool pool, Product<T, T, float> product, bool has_many,
                            const T* x, const T* weight, ffi::Span<const int32_t> sizes, float* out,
                            ffi::Span<const int64_t> x_shape,
                            ffi::Span<const int64_t> weight_shape) {
  if (x_shape.size() != 2 || weight_shape.size() != 3 || x_shape[1] != weight_shape[2] ||
      static_cast<int64_t>(sizes.size()) != weight_shape[0]) {
    return ffi::Error::InvalidArgument(
        "x must be [rows, width], weight [experts, features, width], sizes [experts]");
  }
  const int64_t width = x_shape[1], features = weight_shape[1];
  const auto row_bytes = width * static_cast<int64_t>(sizeof(T));
  multiply_by_expert(pool, x, sizes, out, x_shape[0], width, features,
                     expert_features(pool, features, row_bytes, has_many),
                     [=](const T* rows, float* to, int64_t expert, int64_t num_rows, int64_t begin,
                         int64_t end) {
                       product(rows, weight + expert * features * width, to, num_rows, width,
                               features, begin, end);
                     });
  return ffi::Error::Success();
}

// The weights in groups of a call. `axes`: 2, or 3 where there is one of each expert.
ffi::ErrorOr<Groups> read_groups(int64_t width, size_t axes, int64_t group_size, int64_t code_bits,
                                 ffi::AnyBuffer codes, ffi::AnyBuffer scale,
                                 ffi::Buffer<ffi::U8> zero) {
  const auto shape = codes.dimensions(), scales = scale.dimensions();
  const int64_t row_bytes = code_bits == 4 ? (width + 63) / 64 * 32 : width;
  const bool is_bf16 = scale.element_type() == ffi::BF16;
  if (shape.size() != axes || scales.size() != axes || shape[axes - 1] != row_bytes ||
      shape[axes - 2] != scales[axes - 2] || shape[0] != scales[0] || group_size < 1 ||
      scales[axes - 1] != (width + group_size - 1) / group_size ||
      (scales[axes - 1] > 1 && group_size % 32 != 0) ||
      !(is_bf16 || scale.element_type() == ffi::F32) ||
      (zero.element_count() != 0 && zero.element_count() != scale.element_count())) {
    return ffi::Unexpected(ffi::Error::InvalidArgument(
        "codes must be [..., features, bytes], scale and zero [..., features, groups]; groups are "
        "of a multiple of 32 inputs"));
  }
  return Groups{static_cast<const uint8_t*>(codes.untyped_data()),
                scale.untyped_data(),
                zero.element_count() == 0 ? nullptr : zero.typed_data(),
                is_bf16,
                width,
                group_size,
                scales[axes - 1],
                row_bytes};
}

// The weights of one of several experts.
Groups groups_of(const Groups& all, int64_t expert, int64_t features) {
  Groups one = all;
  const int64_t num_scales = expert * features * all.num_groups;
  one.codes += expert * features * all.row_bytes;
  one.scale = static_cast<const char*>(all.scale) + num_scales * (all.has_bf16_scale ? 2 : 4);
  if (all.zero != nullptr) one.zero += num_scales;
  return one;
}

const Products& products() {
  static const Products* const found = find_products();
  return *found;
}

// What `kTiles` names that takes the place of `product`; null: this CPU has no tiles, or none is named.
template <auto kTiles, typename X, typename W, typename Out>
const TileProduct<X, W, Out>* find_tiles(Product<X, W, Out>) {
  if constexpr (std::is_null_pointer_v<decltype(kTiles)>) {
    return nullptr;
  } else {
    const TileProducts* const found = find_tile_products();
    return found == nullptr ? nullptr : &(found->*kTiles);
  }
}

// The same with weights in groups.
template <auto kTiles>
const TileProducts::Group* find_group_tiles() {
  const TileProducts* const found = find_tile_products();
  return found == nullptr ? nullptr : &(found->*kTiles);
}

template <ffi::DataType X, ffi::DataType W, ffi::DataType Out, auto kProduct, auto kTiles>
ffi::Error handle(ffi::ThreadPool pool, ffi::Buffer<X> x, ffi::Buffer<W> weight,
                  ffi::ResultBuffer<Out> out) {
  const auto product = products().*kProduct;
  return multiply(pool, product, find_tiles<kTiles>(product), x.typed_data(), weight.typed_data(),
                  out->typed_data(), x.dimensions(), weight.dimensions());
}

// Of bfloat16 numbers: sums in float32, or rounded.
ffi::Error handle_bfloat16(ffi::ThreadPool pool, ffi::Buffer<ffi::BF16> x,
                           ffi::Buffer<ffi::BF16> weight, ffi::Result<ffi::AnyBuffer> out) {
  const auto* from = reinterpret_cast<const bf16*>(x.untyped_data());
  const auto* weights = reinterpret_cast<const bf16*>(weight.untyped_data());
  const TileProducts* const tiles = find_tile_products();
  const auto into = [&](auto* to, const auto* by_tiles) {
    return multiply(pool, products().bfloat16, by_tiles, from, weights, to, x.dimensions(),
                    weight.dimensions());
  };
  if (out->element_type() == ffi::BF16) {
    return into(static_cast<bf16*>(out->untyped_data()),
                tiles == nullptr ? nullptr : &tiles->rounded_bfloat16);
  }
  if (out->element_type() == ffi::F32) {
    return into(static_cast<float*>(out->untyped_data()),
                tiles == nullptr ? nullptr : &tiles->bfloat16);
  }
  return ffi::Error::InvalidArgument("the product must be of float32 or bfloat16");
}

// `few_rows`: of an expert, on average.
template <ffi::DataType T, auto kProduct, auto kTiles>
ffi::Error handle_experts(ffi::ThreadPool pool, ffi::Buffer<T> x, ffi::Buffer<T> weight,
                          ffi::Buffer<ffi::S32> sizes, ffi::ResultBuffer<ffi::F32> out,
                          int64_t few_rows) {
  auto product = products().*kProduct;
  const auto* const tiles = find_tiles<kTiles>(product);
  const auto num_experts = static_cast<int64_t>(sizes.element_count());
  const bool has_many = tiles != nullptr && x.dimensions().size() == 2 &&
                        x.dimensions()[0] > few_rows * num_experts;
  if (tiles != nullptr) product = has_many ? tiles->many : tiles->few;
  return multiply_experts(pool, product, has_many, x.typed_data(), weight.typed_data(),
                          {sizes.typed_data(), sizes.element_count()}, out->typed_data(),
                          x.dimensions(), weight.dimensions());
}

// A product of few rows with weights in groups, prepared once for all threads.
ffi::Error multiply_prepared(ffi::ThreadPool pool, const PreparedProduct& product, const bf16* x,
                             const Groups& weight, float* out, int64_t rows, int64_t features) {
  const LineMemory memory(product.size(weight, rows));
  void* const prepared = memory.get();
  product.prepare(x, weight, rows, prepared);
  const int64_t step = chunk_features(pool, features, weight.row_bytes);
  share(pool, (features + step - 1) / step, [=](int64_t chunk) {
    const int64_t begin = chunk * step;
    product.multiply(prepared, weight, out, rows, features, begin, std::min(begin + step, features));
  }, true);
  return ffi::Error::Success();
}

// Of weights in groups: up to so many rows, vectors are as fast as tiles. Both have the same bits.
constexpr int64_t kVectorGroupRows = 3;

template <ffi::DataType X, auto kCodes, auto kProduct, auto kTiles, int64_t kBits>
ffi::Error handle_groups(ffi::ThreadPool pool, ffi::Buffer<X> x, ffi::AnyBuffer codes,
                         ffi::AnyBuffer scale, ffi::Buffer<ffi::U8> zero,
                         ffi::ResultBuffer<ffi::F32> out, int64_t group_size, int64_t few_rows) {
  if (x.dimensions().size() != 2) return ffi::Error::InvalidArgument("x must be [rows, width]");
  const int64_t rows = x.dimensions()[0], width = x.dimensions()[1];
  auto read = read_groups(width, 2, group_size, kBits, codes, scale, zero);
  if (read.has_error()) return read.error();
  const Groups weight = *read;
  const int64_t features = codes.dimensions()[0];
  const auto product = products().*kCodes.*kProduct;
  const auto* from = x.typed_data();
  float* to = out->typed_data();
  if constexpr (X == ffi::BF16) {
    const auto* const tiles = find_group_tiles<kTiles>();
    if (rows > few_rows && tiles != nullptr) {
      const auto many = tiles->many;
      share_many(pool, rows, features,
                 [=](int64_t first, int64_t count, int64_t begin, int64_t end) {
        many(from + first * width, weight, to + first * features, count, features, begin, end);
      });
      return ffi::Error::Success();
    }
    const PreparedProduct* prepared = (products().*kCodes).prepared_bfloat16;
    if (rows > kVectorGroupRows && tiles != nullptr && tiles->few != nullptr) prepared = tiles->few;
    if (prepared != nullptr) {
      return multiply_prepared(pool, *prepared, from, weight, to, rows, features);
    }
  }
  const int64_t step = chunk_features(pool, features, weight.row_bytes);
  share(pool, (features + step - 1) / step, [=](int64_t chunk) {
    const int64_t begin = chunk * step;
    product(from, weight, to, rows, features, begin, std::min(begin + step, features));
  }, true);
  return ffi::Error::Success();
}

template <ffi::DataType X, auto kCodes, auto kProduct, auto kTiles, int64_t kBits>
ffi::Error handle_expert_groups(ffi::ThreadPool pool, ffi::Buffer<X> x, ffi::AnyBuffer codes,
                                ffi::AnyBuffer scale, ffi::Buffer<ffi::U8> zero,
                                ffi::Buffer<ffi::S32> sizes, ffi::ResultBuffer<ffi::F32> out,
                                int64_t group_size, int64_t few_rows) {
  if (x.dimensions().size() != 2) return ffi::Error::InvalidArgument("x must be [rows, width]");
  const int64_t rows = x.dimensions()[0], width = x.dimensions()[1];
  auto read = read_groups(width, 3, group_size, kBits, codes, scale, zero);
  if (read.has_error()) return read.error();
  const Groups weight = *read;
  const int64_t features = codes.dimensions()[1];
  const auto num_experts = static_cast<int64_t>(sizes.element_count());
  if (num_experts != codes.dimensions()[0]) {
    return ffi::Error::InvalidArgument("sizes must be [experts]");
  }
  auto product = products().*kCodes.*kProduct;
  bool has_many = false;
  if constexpr (X == ffi::BF16) {
    const auto* const tiles = find_group_tiles<kTiles>();
    has_many = tiles != nullptr && rows > few_rows * num_experts;
    if (has_many) product = tiles->many;
  }
  multiply_by_expert(pool, x.typed_data(), {sizes.typed_data(), sizes.element_count()},
                     out->typed_data(), rows, width, features,
                     expert_features(pool, features, weight.row_bytes, has_many),
                     [=](const auto* from, float* to, int64_t expert, int64_t num_rows,
                         int64_t begin, int64_t end) {
                       product(from, groups_of(weight, expert, features), to, num_rows, features,
                               begin, end);
                     });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace mmjax

// The name of the instruction set that runs here; null: this CPU has none that the kernels need.
extern "C" const char* mmjax_instruction_set() {
  const mmjax::Products* found = mmjax::find_products();
  if (found == nullptr) return nullptr;
  return mmjax::find_tile_products() == nullptr ? found->name : "amx";
}

// TILES: products by tiles, nullptr if there are none.
#define MMJAX_PRODUCT(NAME, X, W, OUT, TILES)                                         \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(                                                     \
      mmjax_product_##NAME,                                                          \
      (mmjax::handle<ffi::X, ffi::W, ffi::OUT, &mmjax::Products::NAME, TILES>),       \
      ffi::Ffi::Bind()                                                               \
          .Ctx<ffi::ThreadPool>()                                                    \
          .Arg<ffi::Buffer<ffi::X>>()                                                \
          .Arg<ffi::Buffer<ffi::W>>()                                                \
          .Ret<ffi::Buffer<ffi::OUT>>())

MMJAX_PRODUCT(float32, F32, F32, F32, nullptr);
MMJAX_PRODUCT(int8, S8, S8, S32, &mmjax::TileProducts::int8);
MMJAX_PRODUCT(float32_int8, F32, S8, F32, nullptr);
MMJAX_PRODUCT(bfloat16_int8, BF16, S8, F32, &mmjax::TileProducts::bfloat16_int8);
XLA_FFI_DEFINE_HANDLER_SYMBOL(mmjax_product_bfloat16, mmjax::handle_bfloat16,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::BF16>>()
                                  .Arg<ffi::Buffer<ffi::BF16>>()
                                  .Ret<ffi::AnyBuffer>());

#define MMJAX_GROUPS(NAME, T, TILES)                                                      \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(mmjax_groups_##NAME,                                     \
                                (mmjax::handle_experts<ffi::T, &mmjax::Products::NAME, TILES>), \
                                ffi::Ffi::Bind()                                         \
                                    .Ctx<ffi::ThreadPool>()                              \
                                    .Arg<ffi::Buffer<ffi::T>>()                          \
                                    .Arg<ffi::Buffer<ffi::T>>()                          \
                                    .Arg<ffi::Buffer<ffi::S32>>()                        \
                                    .Ret<ffi::Buffer<ffi::F32>>()                        \
                                    .Attr<int64_t>("few_rows"))

MMJAX_GROUPS(float32, F32, nullptr);
MMJAX_GROUPS(bfloat16, BF16, &mmjax::TileProducts::bfloat16);

// Of inputs of one dtype with weights in groups of one kind of code; then the same by expert.
#define MMJAX_GROUP_PRODUCTS(NAME, X, CODES, TILES, BITS)                                        \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(                                                                \
      mmjax_product_##NAME##_##CODES,                                                           \
      (mmjax::handle_groups<ffi::X, &mmjax::Products::CODES, &mmjax::GroupProducts::NAME, TILES, \
                            BITS>),                                                             \
      ffi::Ffi::Bind()                                                                          \
          .Ctx<ffi::ThreadPool>()                                                               \
          .Arg<ffi::Buffer<ffi::X>>()                                                           \
          .Arg<ffi::AnyBuffer>()                                                                \
          .Arg<ffi::AnyBuffer>()                                                                \
          .Arg<ffi::Buffer<ffi::U8>>()                                                          \
          .Ret<ffi::Buffer<ffi::F32>>()                                                         \
          .Attr<int64_t>("group_size")                                                          \
          .Attr<int64_t>("few_rows"));                                                          \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(                                                                \
      mmjax_groups_##NAME##_##CODES,                                                            \
      (mmjax::handle_expert_groups<ffi::X, &mmjax::Products::CODES,                             \
                                   &mmjax::GroupProducts::NAME, TILES, BITS>),                   \
      ffi::Ffi::Bind()                                                                          \
          .Ctx<ffi::ThreadPool>()                                                               \
          .Arg<ffi::Buffer<ffi::X>>()                                                           \
          .Arg<ffi::AnyBuffer>()                                                                \
          .Arg<ffi::AnyBuffer>()                                                                \
          .Arg<ffi::Buffer<ffi::U8>>()                                                          \
          .Arg<ffi::Buffer<ffi::S32>>()                                                         \
          .Ret<ffi::Buffer<ffi::F32>>()                                                         \
          .Attr<int64_t>("group_size")                                                          \
          .Attr<int64_t>("few_rows"))

MMJAX_GROUP_PRODUCTS(float32, F32, uint4, nullptr, 4);
MMJAX_GROUP_PRODUCTS(bfloat16, BF16, uint4, &mmjax::TileProducts::uint4, 4);
MMJAX_GROUP_PRODUCTS(float32, F32, uint8, nullptr, 8);
MMJAX_GROUP_PRODUCTS(bfloat16, BF16, uint8, &mmjax::TileProducts::uint8, 8);
MMJAX_GROUP_PRODUCTS(float32, F32, float8, nullptr, 8);
MMJAX_GROUP_PRODUCTS(bfloat16, BF16, float8, &mmjax::TileProducts::float8, 8);
