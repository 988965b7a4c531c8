#include <cpuid.h>
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "products.h"

namespace mmjax {
namespace {

// Linux saves tiles for processes that ask for it (arch_prctl, ARCH_REQ_XCOMP_PERM, 18: their data).
bool may_use_tiles() {
#ifdef __linux__
  return syscall(SYS_arch_prctl, 0x1023, 18) == 0;
#else
  return false;
#endif
}

bool has_amx() {
  unsigned int eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return false;
  const unsigned int tile = 1u << 24, int8 = 1u << 25, bfloat16 = 1u << 22;
  const unsigned int all = tile | int8 | bfloat16;
  return (edx & all) == all;
}

}  // namespace

const Products* find_products() {
  __builtin_cpu_init();
  const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512vl");
  const bool has_vnni = has_avx512 && __builtin_cpu_supports("avx512vnni");
  if (has_vnni && __builtin_cpu_supports("avx512bf16")) return &kAvx512Bf16;
  if (has_vnni) return &kAvx512Vnni;
  if (has_avx512) return &kAvx512;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return &kAvx2;
  return nullptr;
}

const TileProducts* find_tile_products() {
  static const bool has_tiles = find_products() == &kAvx512Bf16 && has_amx() && may_use_tiles();
  return has_tiles ? &kAmx : nullptr;
}

}  // namespace mmjax
