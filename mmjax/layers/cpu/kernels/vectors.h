// Vectors of floats, in whatever instruction set this is compiled for. Everything here is in an
// unnamed namespace, as in tiles.h.
#pragma once

#include <cstddef>
#include <cstdint>

#include "products.h"

namespace mmjax {
namespace {

#ifdef __AVX512F__
constexpr int kLanes = 16;
#else
constexpr int kLanes = 8;
#endif

using Floats = float __attribute__((vector_size(kLanes * 4)));
using Ints = int32_t __attribute__((vector_size(kLanes * 4)));
using Halfwords = uint16_t __attribute__((vector_size(kLanes * 2)));

inline Floats as_floats(Ints bits) { return reinterpret_cast<Floats>(bits); }
inline Ints as_ints(Floats x) { return reinterpret_cast<Ints>(x); }

inline Floats load(const float* from, int64_t count = kLanes) {
  Floats out{};
  __builtin_memcpy(&out, from, static_cast<size_t>(count) * sizeof *from);
  return out;
}
inline Floats load(const bf16* from, int64_t count = kLanes) {
  Halfwords out{};
  __builtin_memcpy(&out, from, static_cast<size_t>(count) * sizeof *from);
  return as_floats(__builtin_convertvector(out, Ints) << 16);
}
inline void store(Floats x, float* to, int64_t count = kLanes) {
  __builtin_memcpy(to, &x, static_cast<size_t>(count) * sizeof *to);
}

// Rounds to the nearest even number, as XLA does. No NaN with a payload to keep is stored.
inline void store(Floats x, bf16* to, int64_t count = kLanes) {
  const Ints bits = as_ints(x);
  const Ints rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const Halfwords out = __builtin_convertvector(rounded, Halfwords);
  __builtin_memcpy(to, &out, static_cast<size_t>(count) * sizeof *to);
}

// As it is once it was stored.
template <typename T>
inline Floats rounded(Floats x) {
  T stored[kLanes];
  store(x, stored);
  return load(stored);
}

// Lanes whose slots are within [begin, end); `first` is the slot of lane 0.
inline Ints within(int64_t first, int64_t begin, int64_t end) {
  Ints slot;
  for (int i = 0; i < kLanes; ++i) slot[i] = i;
  return (slot >= static_cast<int32_t>(begin - first)) & (slot < static_cast<int32_t>(end - first));
}

inline float sum_of_lanes(Floats x) {
  float out = 0;
  for (int i = 0; i < kLanes; ++i) out += x[i];
  return out;
}

}  // namespace
}  // namespace mmjax
