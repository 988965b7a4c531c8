// Products of few rows with weights [out, in]: what an instruction set offers, and which one runs.
#pragma once

#include <cstdint>

namespace mmjax {

// out[r, f] = sum over d of x[r, d] * weight[f, d], for all rows r and the features [begin, end).
// Rows are contiguous: x [rows, width], weight [features, width], out [rows, features].
template <typename X, typename W, typename Out>
using Product = void (*)(const X* x, const W* weight, Out* out, int64_t rows, int64_t width,
                         int64_t features, int64_t begin, int64_t end);

// A bfloat16 number by its bits.
using bf16 = uint16_t;

struct Products {
  Product<float, float, float> float32;
  Product<bf16, bf16, float> bfloat16;
  Product<int8_t, int8_t, int32_t> int8;
  Product<float, int8_t, float> float32_int8;
  Product<bf16, int8_t, float> bfloat16_int8;
  const char* name;
};

// Each stands in a file of its own, compiled with the flags of its instruction set.
extern const Products kAvx2;
extern const Products kAvx512;
extern const Products kAvx512Bf16;

// The best of them that this CPU has; null: none.
const Products* find_products();

}  // namespace mmjax
