// One number as bfloat16.
#pragma once

#include <cstdint>
#include <cstring>

#include "products.h"

namespace mmjax {
namespace {

// Rounds to the nearest even number, as XLA does. No sum here is a NaN with a payload to keep.
inline bf16 to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return static_cast<bf16>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

}  // namespace
}  // namespace mmjax
