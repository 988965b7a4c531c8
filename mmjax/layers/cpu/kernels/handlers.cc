// The kernels as targets of XLA's foreign function interface (jax.ffi).
#include <algorithm>
#include <cstdint>
#include <vector>

#include "products.h"
#include "share.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace mmjax {
namespace {

// Bytes of weights that a thread takes at a time: enough that taking them costs nothing, few enough
// that no thread waits long for the last one.
constexpr int64_t kChunkBytes = 1 << 16;
constexpr int64_t kChunkFeatures = 16;

// Features that a thread takes at a time.
int64_t chunk_features(int64_t row_bytes) {
  const int64_t step = std::max(kChunkFeatures, kChunkBytes / std::max<int64_t>(1, row_bytes));
  return step - step % 4;
}

template <typename X, typename W, typename Out>
ffi::Error multiply(ffi::ThreadPool pool, Product<X, W, Out> product, const X* x, const W* weight,
                    Out* out, ffi::Span<const int64_t> x_shape,
                    ffi::Span<const int64_t> weight_shape) {
  if (x_shape.size() != 2 || weight_shape.size() != 2 || x_shape[1] != weight_shape[1]) {
    return ffi::Error::InvalidArgument("x must be [rows, width], weight [features, width]");
  }
  const int64_t rows = x_shape[0], width = x_shape[1], features = weight_shape[0];
  const int64_t step = chunk_features(width * static_cast<int64_t>(sizeof(W)));
  share(pool, (features + step - 1) / step, [=](int64_t chunk) {
    const int64_t begin = chunk * step;
    product(x, weight, out, rows, width, features, begin, std::min(begin + step, features));
  });
  return ffi::Error::Success();
}

// The rows of one expert.
struct Group {
  int64_t expert, first, rows;
};

// Rows that stand expert by expert, each multiplied with its expert's weight of [experts, features,
// width]. The weights of experts without rows are not read.
template <typename T>
ffi::Error multiply_groups(ffi::ThreadPool pool, Product<T, T, float> product, const T* x,
                           const T* weight, ffi::Span<const int32_t> sizes, float* out,
                           ffi::Span<const int64_t> x_shape,
                           ffi::Span<const int64_t> weight_shape) {
  if (x_shape.size() != 2 || weight_shape.size() != 3 || x_shape[1] != weight_shape[2] ||
      static_cast<int64_t>(sizes.size()) != weight_shape[0]) {
    return ffi::Error::InvalidArgument(
        "x must be [rows, width], weight [experts, features, width], sizes [experts]");
  }
  const int64_t rows = x_shape[0], width = x_shape[1], features = weight_shape[1];
  std::vector<Group> groups;
  int64_t first = 0;
  for (int64_t expert = 0; expert < weight_shape[0]; ++expert) {
    const int64_t size = std::clamp<int64_t>(sizes[expert], 0, rows - first);
    if (size > 0) groups.push_back({expert, first, size});
    first += size;
  }
  std::fill(out + first * features, out + rows * features, 0.0f);
  const int64_t step = chunk_features(width * static_cast<int64_t>(sizeof(T)));
  const int64_t num_steps = (features + step - 1) / step;
  share(pool, static_cast<int64_t>(groups.size()) * num_steps, [=](int64_t chunk) {
    const Group group = groups[static_cast<size_t>(chunk / num_steps)];
    const int64_t begin = chunk % num_steps * step;
    product(x + group.first * width, weight + group.expert * features * width,
            out + group.first * features, group.rows, width, features, begin,
            std::min(begin + step, features));
  });
  return ffi::Error::Success();
}

const Products& products() {
  static const Products* const found = find_products();
  return *found;
}

template <ffi::DataType X, ffi::DataType W, ffi::DataType Out, auto kProduct>
ffi::Error handle(ffi::ThreadPool pool, ffi::Buffer<X> x, ffi::Buffer<W> weight,
                  ffi::ResultBuffer<Out> out) {
  return multiply(pool, products().*kProduct, x.typed_data(), weight.typed_data(),
                  out->typed_data(), x.dimensions(), weight.dimensions());
}

template <ffi::DataType T, auto kProduct>
ffi::Error handle_groups(ffi::ThreadPool pool, ffi::Buffer<T> x, ffi::Buffer<T> weight,
                         ffi::Buffer<ffi::S32> sizes, ffi::ResultBuffer<ffi::F32> out) {
  return multiply_groups(pool, products().*kProduct, x.typed_data(), weight.typed_data(),
                         {sizes.typed_data(), sizes.element_count()}, out->typed_data(),
                         x.dimensions(), weight.dimensions());
}

}  // namespace
}  // namespace mmjax

// The name of the instruction set that runs here; null: this CPU has none that the kernels need.
extern "C" const char* mmjax_instruction_set() {
  const mmjax::Products* found = mmjax::find_products();
  return found == nullptr ? nullptr : found->name;
}

#define MMJAX_PRODUCT(NAME, X, W, OUT)                                               \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(                                                     \
      mmjax_product_##NAME,                                                          \
      (mmjax::handle<ffi::X, ffi::W, ffi::OUT, &mmjax::Products::NAME>),             \
      ffi::Ffi::Bind()                                                               \
          .Ctx<ffi::ThreadPool>()                                                    \
          .Arg<ffi::Buffer<ffi::X>>()                                                \
          .Arg<ffi::Buffer<ffi::W>>()                                                \
          .Ret<ffi::Buffer<ffi::OUT>>())

MMJAX_PRODUCT(float32, F32, F32, F32);
MMJAX_PRODUCT(bfloat16, BF16, BF16, F32);
MMJAX_PRODUCT(int8, S8, S8, S32);
MMJAX_PRODUCT(float32_int8, F32, S8, F32);
MMJAX_PRODUCT(bfloat16_int8, BF16, S8, F32);

#define MMJAX_GROUPS(NAME, T)                                                            \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(mmjax_groups_##NAME,                                     \
                                (mmjax::handle_groups<ffi::T, &mmjax::Products::NAME>),  \
                                ffi::Ffi::Bind()                                         \
                                    .Ctx<ffi::ThreadPool>()                              \
                                    .Arg<ffi::Buffer<ffi::T>>()                          \
                                    .Arg<ffi::Buffer<ffi::T>>()                          \
                                    .Arg<ffi::Buffer<ffi::S32>>()                        \
                                    .Ret<ffi::Buffer<ffi::F32>>())

MMJAX_GROUPS(float32, F32);
MMJAX_GROUPS(bfloat16, BF16);
