// Calls every kernel that this CPU has on arrays of exactly the size that it may touch, and compares
// it with a plain loop. Compiled with sanitizers by test_kernels.py.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>

#include "products.h"

namespace {

using mmjax::bf16;

float as_float(float x) { return x; }
float as_float(int8_t x) { return x; }
float as_float(bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float out;
  std::memcpy(&out, &bits, sizeof out);
  return out;
}

template <typename T>
T draw(std::mt19937& rng);
template <>
int8_t draw(std::mt19937& rng) {
  return static_cast<int8_t>(static_cast<int>(rng() % 256) - 128);
}
template <>
float draw(std::mt19937& rng) {
  return std::uniform_real_distribution<float>(-2, 2)(rng);
}
template <>
bf16 draw(std::mt19937& rng) {
  uint32_t bits;
  const float x = draw<float>(rng);
  std::memcpy(&bits, &x, sizeof bits);
  return static_cast<bf16>(bits >> 16);
}

template <typename T>
std::unique_ptr<T[]> draw_many(std::mt19937& rng, int64_t count) {
  std::unique_ptr<T[]> out(new T[count]);
  for (int64_t i = 0; i < count; ++i) out[i] = draw<T>(rng);
  return out;
}

template <typename X, typename W, typename Out>
bool check(const char* name, mmjax::Product<X, W, Out> product) {
  std::mt19937 rng(0);
  bool is_right = true;
  for (int64_t rows : {1, 2, 3, 4, 5, 7, 8, 16}) {
    for (int64_t width : {1, 7, 31, 32, 33, 63, 64, 65, 100, 131, 640}) {
      for (int64_t features : {1, 3, 4, 5, 9}) {
        const auto x = draw_many<X>(rng, rows * width);
        const auto weight = draw_many<W>(rng, features * width);
        const std::unique_ptr<Out[]> out(new Out[rows * features]);
        const int64_t half = features / 2;  // as two threads divide them
        product(x.get(), weight.get(), out.get(), rows, width, features, 0, half);
        product(x.get(), weight.get(), out.get(), rows, width, features, half, features);
        for (int64_t r = 0; r < rows; ++r) {
          for (int64_t f = 0; f < features; ++f) {
            double sum = 0, size = 0;
            for (int64_t d = 0; d < width; ++d) {
              const double part = static_cast<double>(as_float(x[r * width + d])) *
                                  as_float(weight[f * width + d]);
              sum += part;
              size += std::fabs(part);
            }
            if (std::fabs(out[r * features + f] - sum) <= 1e-6 * size) continue;
            std::printf("%s rows=%ld width=%ld features=%ld: %g, not %g\n", name, (long)rows,
                        (long)width, (long)features, (double)out[r * features + f], sum);
            is_right = false;
          }
        }
      }
    }
  }
  return is_right;
}

// One token with `heads` heads that share keys, over blocks in reverse order.
template <typename T>
bool check_attention(const char* name, mmjax::AttendChunk<T> attend) {
  std::mt19937 rng(0);
  bool is_right = true;
  for (int64_t heads : {1, 3, 4, 9}) {
    for (int64_t width : {1, 8, 40, 72, 128}) {
      for (int64_t slots : {16, 32, 48}) {
        const int64_t num_blocks = mmjax::kMaxChunkSlots / slots;
        const auto query = draw_many<T>(rng, heads * width);
        const auto keys = draw_many<T>(rng, num_blocks * width * slots);
        const auto values = draw_many<T>(rng, num_blocks * slots * width);
        std::unique_ptr<int32_t[]> table(new int32_t[num_blocks]);
        for (int64_t i = 0; i < num_blocks; ++i) table[i] = static_cast<int32_t>(num_blocks - 1 - i);
        const std::unique_ptr<float[]> peak(new float[heads]), total(new float[heads]),
            out(new float[heads * width]);
        const mmjax::PagedTile<T> tile = {query.get(), keys.get(), values.get(), table.get(), heads,
                                          width, width, num_blocks, 1, 0, slots, 5.0f};
        const int64_t begin = slots / 2, end = num_blocks * slots - 3;
        attend(tile, 0, begin, end, peak.get(), total.get(), out.get());
        for (int64_t head = 0; head < heads; ++head) {
          double sum = 0, first_value = 0;
          for (int64_t slot = begin; slot < end; ++slot) {
            const int64_t block = table[slot / slots], offset = slot % slots;
            double score = 0;
            for (int64_t d = 0; d < width; ++d) {
              score += static_cast<double>(as_float(query[head * width + d])) *
                       as_float(keys[(block * width + d) * slots + offset]);
            }
            const double weight = std::exp(5 * std::tanh(score / 5) - peak[head]);
            sum += weight;
            first_value += weight * as_float(values[(block * slots + offset) * width]);
          }
          if (std::fabs(total[head] - sum) <= 1e-4 * sum &&
              std::fabs(out[head * width] - first_value) <= 1e-4 * sum) {
            continue;
          }
          std::printf("attention %s heads=%ld width=%ld slots=%ld: %g, not %g; %g, not %g\n", name,
                      (long)heads, (long)width, (long)slots, (double)total[head], sum,
                      (double)out[head * width], first_value);
          is_right = false;
        }
      }
    }
  }
  return is_right;
}

bool check_all(const mmjax::Products& products) {
  std::printf("%s\n", products.name);
  return check("float32", products.float32) & check("bfloat16", products.bfloat16) &
         check("int8", products.int8) & check("float32_int8", products.float32_int8) &
         check("bfloat16_int8", products.bfloat16_int8) &
         check_attention("float32", products.attend_float32) &
         check_attention("bfloat16", products.attend_bfloat16);
}

}  // namespace

int main() {
  const mmjax::Products* best = mmjax::find_products();
  bool is_right = true, is_known = false;
  // From the oldest on: each that this CPU has, up to the best.
  for (const mmjax::Products* each : {&mmjax::kAvx2, &mmjax::kAvx512, &mmjax::kAvx512Bf16}) {
    if (best == nullptr || is_known) break;
    is_right &= check_all(*each);
    is_known = each == best;
  }
  return is_right ? 0 : 1;
}
