#include "products.h"

namespace mmjax {

const Products* find_products() {
  __builtin_cpu_init();
  const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512vl");
  if (has_avx512 && __builtin_cpu_supports("avx512vnni") &&
      __builtin_cpu_supports("avx512bf16")) {
    return &kAvx512Bf16;
  }
  if (has_avx512) return &kAvx512;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return &kAvx2;
  return nullptr;
}

}  // namespace mmjax
