// The kernels as targets of XLA's foreign function interface (jax.ffi).
#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>

#include "products.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace mmjax {
namespace {

// Bytes of weights that a thread takes at a time: enough that taking them costs nothing, few enough
// that no thread waits long for the last one.
constexpr int64_t kChunkBytes = 1 << 16;
constexpr int64_t kChunkFeatures = 16;

// What threads share of one call. A task that starts after all chunks are taken touches nothing
// else, so the call need not wait for it.
struct Work {
  std::atomic<int64_t> next{0};
  int64_t num_chunks = 0;
  int64_t num_done = 0;
  std::mutex mutex;
  std::condition_variable all_done;
};

// Run `compute(chunk)` for chunks [0, num_chunks), in this thread and in those of XLA's pool.
//
// This thread takes chunks, too, and waits for those alone that others have begun: it may itself be
// one of the pool's.
template <typename Compute>
void share(ffi::ThreadPool pool, int64_t num_chunks, Compute compute) {
  const int64_t num_helpers = std::min(pool.num_threads(), num_chunks) - 1;
  if (num_helpers < 1) {
    for (int64_t chunk = 0; chunk < num_chunks; ++chunk) compute(chunk);
    return;
  }
  auto work = std::make_shared<Work>();
  work->num_chunks = num_chunks;
  auto take_all = [work, compute] {
    int64_t num_done = 0;
    for (int64_t chunk; (chunk = work->next.fetch_add(1)) < work->num_chunks; ++num_done) {
      compute(chunk);
    }
    if (num_done == 0) return;
    std::lock_guard<std::mutex> lock(work->mutex);
    work->num_done += num_done;
    if (work->num_done == work->num_chunks) work->all_done.notify_one();
  };
  for (int64_t helper = 0; helper < num_helpers; ++helper) {
    auto task = take_all;
    pool.Schedule(std::move(task));
  }
  take_all();
  std::unique_lock<std::mutex> lock(work->mutex);
  work->all_done.wait(lock, [&] { return work->num_done == work->num_chunks; });
}

template <typename X, typename W, typename Out>
ffi::Error multiply(ffi::ThreadPool pool, Product<X, W, Out> product, const X* x, const W* weight,
                    Out* out, ffi::Span<const int64_t> x_shape,
                    ffi::Span<const int64_t> weight_shape) {
  if (x_shape.size() != 2 || weight_shape.size() != 2 || x_shape[1] != weight_shape[1]) {
    return ffi::Error::InvalidArgument("x must be [rows, width], weight [features, width]");
  }
  const int64_t rows = x_shape[0], width = x_shape[1], features = weight_shape[0];
  const int64_t row_bytes = std::max<int64_t>(1, width * static_cast<int64_t>(sizeof(W)));
  int64_t step = std::max(kChunkFeatures, kChunkBytes / row_bytes);
  step -= step % 4;
  share(pool, (features + step - 1) / step, [=](int64_t chunk) {
    const int64_t begin = chunk * step;
    product(x, weight, out, rows, width, features, begin, std::min(begin + step, features));
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
