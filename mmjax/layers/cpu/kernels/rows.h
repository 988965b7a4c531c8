// What is computed of each row of hidden states by itself: norms and rotations. Everything here is
// in an unnamed namespace, as in tiles.h.
#pragma once

#include <cstddef>
#include <cstdint>

#include "products.h"
#include "vectors.h"

namespace mmjax {
namespace {

// Call `compute(at, count...)` for the vectors of `width` numbers; the last may be shorter, and then
// alone has a count.
template <typename Compute>
inline void for_vectors(int64_t width, Compute compute) {
  int64_t d = 0;
  for (; d + kLanes <= width; d += kLanes) compute(d);
  if (d < width) compute(d, width - d);
}

// The sum of `value(vector)` over a row's vectors, in one order: a row has the same bits beside any
// others. Lanes behind a row's end add 0.
template <typename T, typename Value>
inline float sum_over(const T* x, int64_t width, Value value) {
  Floats sums{};
  for_vectors(width, [&](int64_t d, auto... count) {
    Floats part = value(load(x + d, count...));
    if constexpr (sizeof...(count) > 0) {
      part = as_floats(as_ints(part) & within(d, d, width));
    }
    sums += part;
  });
  return sum_of_lanes(sums);
}

template <typename T>
void norm_rows(const NormRows<T>& call, const NormOptions& options) {
  const int64_t width = call.width;
  for (int64_t r = 0; r < call.rows; ++r) {
    const T* x = call.x + r * width;
    T* out = call.out + r * width;
    const float size = static_cast<float>(width);
    const float mean =
        options.centres ? sum_over(x, width, [](Floats part) { return part; }) / size : 0.0f;
    const float variance = sum_over(x, width, [&](Floats part) {
      return (part - mean) * (part - mean);
    });
    const float factor = 1.0f / __builtin_sqrtf(variance / size + options.epsilon);
    for_vectors(width, [&](int64_t d, auto... count) {
      const Floats scaled = (load(x + d, count...) - mean) * factor;
      const Floats normed = options.rounds_first ? rounded<T>(scaled) : scaled;
      Floats sum = normed * (load(call.weight + d, count...) + options.offset);
      if (call.bias != nullptr) sum += load(call.bias + d, count...);
      store(sum, out + d, count...);
    });
  }
}

// What is behind the pairs is copied. Cosines and sines are rounded to the dtype of x.
template <typename T>
void rotate_rows(const T* x, const float* cosines, const float* sines, T* out, int64_t rows,
                 int64_t heads, int64_t width, int64_t half) {
  for (int64_t r = 0; r < rows; ++r, cosines += half, sines += half) {
    for (int64_t n = 0; n < heads; ++n, x += width, out += width) {
      for_vectors(half, [&](int64_t d, auto... count) {
        const Floats first = load(x + d, count...), second = load(x + half + d, count...);
        const Floats cosine = rounded<T>(load(cosines + d, count...));
        const Floats sine = rounded<T>(load(sines + d, count...));
        store(first * cosine - second * sine, out + d, count...);
        store(second * cosine + first * sine, out + half + d, count...);
      });
      __builtin_memcpy(out + 2 * half, x + 2 * half,
                       static_cast<size_t>(width - 2 * half) * sizeof *x);
    }
  }
}

}  // namespace
}  // namespace mmjax
