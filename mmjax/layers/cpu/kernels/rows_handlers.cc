// Norms and rotations of rows, as targets of XLA's foreign function interface (jax.ffi).
#include <algorithm>
#include <cstdint>

#include "products.h"
#include "share.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace mmjax {
namespace {

// Numbers that a thread takes at a time: far more than calling it costs.
constexpr int64_t kChunkNumbers = 1 << 14;

// Call `compute(first, count)` for all rows, in threads where there are many.
template <typename Compute>
void share_rows(ffi::ThreadPool pool, int64_t rows, int64_t width, Compute compute) {
  const int64_t step = std::max<int64_t>(1, kChunkNumbers / std::max<int64_t>(1, width));
  share(pool, (rows + step - 1) / step, [=](int64_t chunk) {
    compute(chunk * step, std::min(step, rows - chunk * step));
  });
}

template <typename T, ffi::DataType kType, auto kNorm>
ffi::Error handle_norm(ffi::ThreadPool pool, ffi::Buffer<kType> x, ffi::Buffer<kType> weight,
                       ffi::Buffer<kType> bias, ffi::ResultBuffer<kType> out, float epsilon,
                       float offset, bool centres, bool rounds_first) {
  const int64_t width = static_cast<int64_t>(weight.element_count());
  const auto shape = x.dimensions();
  if (shape.size() == 0 || shape[shape.size() - 1] != width ||
      (bias.element_count() != 0 && bias.element_count() != weight.element_count())) {
    return ffi::Error::InvalidArgument("x must be [..., width], weight [width], bias too, or [0]");
  }
  if (x.element_count() == 0) return ffi::Error::Success();
  const NormOptions options = {epsilon, offset, centres, rounds_first};
  const auto norm = find_products()->*kNorm;
  const auto of = [](const void* data) { return static_cast<const T*>(data); };
  NormRows<T> all = {of(x.untyped_data()), of(weight.untyped_data()),
                     bias.element_count() == 0 ? nullptr : of(bias.untyped_data()),
                     static_cast<T*>(out->untyped_data()), 0, width};
  const int64_t rows = static_cast<int64_t>(x.element_count()) / width;
  share_rows(pool, rows, width, [=](int64_t first, int64_t count) {
    NormRows<T> some = all;
    some.x += first * width;
    some.out += first * width;
    some.rows = count;
    norm(some, options);
  });
  return ffi::Error::Success();
}

template <typename T, ffi::DataType kType, auto kRotate>
ffi::Error handle_rotation(ffi::ThreadPool pool, ffi::Buffer<kType> x,
                           ffi::Buffer<ffi::F32> cosines, ffi::Buffer<ffi::F32> sines,
                           ffi::ResultBuffer<kType> out) {
  const auto shape = x.dimensions(), angles = cosines.dimensions();
  if (shape.size() != 3 || angles.size() != 2 ||
      sines.element_count() != cosines.element_count() || angles[0] != shape[0] || 2 * angles[1] > shape[2]) {
    return ffi::Error::InvalidArgument(
        "x must be [rows, heads, width], cosines and sines [rows, half of width at most]");
  }
  const int64_t heads = shape[1], width = shape[2], half = angles[1], stride = heads * width;
  const auto rotate = find_products()->*kRotate;
  const T* from = reinterpret_cast<const T*>(x.untyped_data());
  const float *cos = cosines.typed_data(), *sin = sines.typed_data();
  T* to = reinterpret_cast<T*>(out->untyped_data());
  share_rows(pool, shape[0], stride, [=](int64_t first, int64_t count) {
    rotate(from + first * stride, cos + first * half, sin + first * half, to + first * stride,
           count, heads, width, half);
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace mmjax

#define MMJAX_ROWS(NAME, T, TYPE)                                                             \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(                                                              \
      mmjax_norm_##NAME, (mmjax::handle_norm<T, ffi::TYPE, &mmjax::Products::norm_##NAME>),   \
      ffi::Ffi::Bind()                                                                        \
          .Ctx<ffi::ThreadPool>()                                                             \
          .Arg<ffi::Buffer<ffi::TYPE>>()                                                      \
          .Arg<ffi::Buffer<ffi::TYPE>>()                                                      \
          .Arg<ffi::Buffer<ffi::TYPE>>()                                                      \
          .Ret<ffi::Buffer<ffi::TYPE>>()                                                      \
          .Attr<float>("epsilon")                                                             \
          .Attr<float>("offset")                                                              \
          .Attr<bool>("centres")                                                              \
          .Attr<bool>("rounds_first"));                                                       \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(                                                              \
      mmjax_rotation_##NAME,                                                                  \
      (mmjax::handle_rotation<T, ffi::TYPE, &mmjax::Products::rotate_##NAME>),                \
      ffi::Ffi::Bind()                                                                        \
          .Ctx<ffi::ThreadPool>()                                                             \
          .Arg<ffi::Buffer<ffi::TYPE>>()                                                      \
          .Arg<ffi::Buffer<ffi::F32>>()                                                       \
          .Arg<ffi::Buffer<ffi::F32>>()                                                       \
          .Ret<ffi::Buffer<ffi::TYPE>>())

MMJAX_ROWS(float32, float, F32);
MMJAX_ROWS(bfloat16, mmjax::bf16, BF16);
