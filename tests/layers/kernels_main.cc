// Calls every kernel that this CPU has on arrays of exactly the size that it may touch, and compares
// it with a plain loop. Compiled with sanitizers by test_kernels.py.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

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

// Inputs that kernels which make integers of them take exactly: no bfloat16 number is below a 128th
// of what the largest may be.
template <typename X>
std::unique_ptr<X[]> draw_inputs(std::mt19937& rng, int64_t count) {
  std::unique_ptr<X[]> out = draw_many<X>(rng, count);
  for (int64_t i = 0; sizeof(X) == 2 && i < count; ++i) {
    if (std::fabs(as_float(out[i])) < 0x1p-6) out[i] = X{0};
  }
  return out;
}

struct Sizes {
  std::vector<int64_t> rows, widths, features;
};
const Sizes kFew = {{1, 2, 3, 4, 5, 7, 8, 16},
                    {1, 7, 31, 32, 33, 63, 64, 65, 100, 131, 640},
                    {1, 3, 4, 5, 9}};
const Sizes kMany = {{17, 32, 63, 1057}, {1, 31, 33, 64, 1024, 2051}, {1, 32, 47, 97}};

template <typename X, typename W, typename Out, typename Product>
bool check(const char* name, Product product, const Sizes& sizes) {
  std::mt19937 rng(0);
  bool is_right = true;
  for (int64_t rows : sizes.rows) {
    for (int64_t width : sizes.widths) {
      for (int64_t features : sizes.features) {
        const auto x = draw_inputs<X>(rng, rows * width);
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

template <typename X, typename W, typename Out>
bool check(const char* name, mmjax::Product<X, W, Out> product, const Sizes& sizes = kFew) {
  return check<X, W, Out, mmjax::Product<X, W, Out>>(name, product, sizes);
}

// Memory that begins with a line of the cache and ends where it ends.
std::unique_ptr<void, decltype(&std::free)> allocate_lines(int64_t bytes) {
  return {std::aligned_alloc(64, (static_cast<size_t>(bytes) + 63) / 64 * 64), std::free};
}

// A product of rows that it packs first.
struct Packed {
  const mmjax::PackedProduct<bf16, int8_t, float>& product;
  void operator()(const bf16* x, const int8_t* weight, float* out, int64_t rows, int64_t width,
                  int64_t features, int64_t begin, int64_t end) const {
    const auto memory = allocate_lines(2 * product.pack.size(rows, width));
    auto* const packed = static_cast<bf16*>(memory.get());
    product.pack.pack(x, rows, width, packed);
    product.multiply(packed, weight, out, rows, width, features, begin, end);
  }
};

// What a byte of e4m3 stands for.
double float8(uint8_t bits) {
  const int exponent = bits >> 3 & 15, mantissa = bits & 7;
  const double size = exponent == 0 ? std::ldexp(mantissa, -9)
                                    : std::ldexp(8 + mantissa, exponent - 10);
  return bits & 0x80 ? -size : size;
}

enum class Code { kUint4, kUint8, kFloat8 };

// A prepared product, called as others are.
struct Prepared {
  const mmjax::PreparedProduct& product;
  void operator()(const bf16* x, const mmjax::Groups& weight, float* out, int64_t rows,
                  int64_t features, int64_t begin, int64_t end) const {
    const auto prepared = allocate_lines(product.size(weight, rows));
    product.prepare(x, weight, rows, prepared.get());
    product.multiply(prepared.get(), weight, out, rows, features, begin, end);
  }
};

// One product with weights in groups: `zeros`: of their own; `Scale`: float or bf16.
template <typename X, typename Scale, typename Product>
bool check_one_group(Product product, Code code, bool zeros, int64_t rows, int64_t width,
                     int64_t features, int64_t group_size) {
  std::mt19937 rng(7);
  const int64_t num_groups = (width + group_size - 1) / group_size;
  const int64_t row_bytes = code == Code::kUint4 ? (width + 63) / 64 * 32 : width;
  const auto x = draw_inputs<X>(rng, rows * width);
  const auto scale = draw_many<Scale>(rng, features * num_groups);
  const std::unique_ptr<uint8_t[]> codes(new uint8_t[features * row_bytes]);
  const std::unique_ptr<uint8_t[]> zero(new uint8_t[features * num_groups]);
  for (int64_t i = 0; i < features * row_bytes; ++i) {
    codes[i] = static_cast<uint8_t>(rng());
    if (code == Code::kFloat8 && (codes[i] & 0x7f) == 0x7f) codes[i] = 1;  // NaN
  }
  for (int64_t i = 0; i < features * num_groups; ++i) {
    zero[i] = static_cast<uint8_t>(rng() % (code == Code::kUint4 ? 17 : 256));
  }
  const mmjax::Groups weight{codes.get(),       scale.get(), zeros ? zero.get() : nullptr,
                             sizeof(Scale) == 2, width,       group_size,
                             num_groups,        row_bytes};
  const std::unique_ptr<float[]> out(new float[rows * features]);
  product(x.get(), weight, out.get(), rows, features, 0, features / 2);
  product(x.get(), weight, out.get(), rows, features, features / 2, features);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t f = 0; f < features; ++f) {
      double sum = 0, size = 0;
      for (int64_t d = 0; d < width; ++d) {
        const int64_t group = f * num_groups + d / group_size;
        double number, middle = 0;
        if (code == Code::kUint4) {
          const uint8_t both = codes[f * row_bytes + d / 64 * 32 + d % 32];
          middle = zeros ? zero[group] : 8;
          number = (d % 64 < 32 ? both & 15 : both >> 4) - middle;
        } else if (code == Code::kUint8) {
          middle = zeros ? zero[group] : 128;
          number = codes[f * row_bytes + d] - middle;
        } else {
          number = float8(codes[f * row_bytes + d]);
        }
        const double factor = static_cast<double>(as_float(x[r * width + d])) *
                              static_cast<double>(as_float(scale[group]));
        sum += factor * number;
        // Of integers, zeros are taken off at the end.
        size += std::fabs(factor) * (std::fabs(number) + (sizeof(X) == 2 ? middle : 0));
      }
      if (std::fabs(out[r * features + f] - sum) <= 1e-6 * size) continue;
      std::printf("groups: code=%d zeros=%d rows=%ld width=%ld features=%ld group=%ld: %g, not %g\n",
                  static_cast<int>(code), zeros, (long)rows, (long)width, (long)features,
                  (long)group_size, (double)out[r * features + f], sum);
      return false;
    }
  }
  return true;
}

template <typename X, typename Product>
bool check_groups(Product product, Code code, std::vector<int64_t> many_rows = {}) {
  bool is_right = true;
  std::vector<int64_t> all_rows = {1, 2, 3, 4, 7, 8};
  all_rows.insert(all_rows.end(), many_rows.begin(), many_rows.end());
  for (int64_t rows : all_rows) {
    for (int64_t width : {1, 31, 64, 65, 96, 100, 224, 544, 675}) {
      for (int64_t group_size : {int64_t{32}, int64_t{64}, width}) {
        for (int64_t features : {1, 4, 5}) {
          const bool zeros = code != Code::kFloat8;
          is_right &= check_one_group<X, float>(product, code, zeros, rows, width, features,
                                                group_size);
          is_right &= check_one_group<X, bf16>(product, code, false, rows, width, features,
                                               group_size);
        }
      }
    }
  }
  return is_right;
}

bool check_all_groups(const mmjax::GroupProducts& products, Code code) {
  const auto* const prepared = products.prepared_bfloat16;
  return check_groups<float>(products.float32, code) &
         check_groups<bf16>(products.bfloat16, code) &
         (prepared == nullptr || check_groups<bf16>(Prepared{*prepared}, code));
}

bool check_group_tiles(const mmjax::TileProducts::Group& tiles, Code code) {
  return check_groups<bf16>(Prepared{*tiles.few}, code, {9, 16, 23});
}

// Queries that share keys and see other parts of them each, over blocks in reverse order.
template <typename T>
bool check_attention(const char* name, mmjax::AttendChunk<T> attend, double unit = 1e-4) {
  std::mt19937 rng(0);
  bool is_right = true;
  for (int64_t count : {1, 3, 4, 9, 21}) {
    for (int64_t width : {1, 8, 40, 72, 128}) {
      for (int64_t slots : {4, 16, 20, 32, 48}) {
        const int64_t num_blocks = mmjax::kMaxChunkSlots / slots;
        const auto query = draw_many<T>(rng, count * width);
        const auto keys = draw_many<T>(rng, num_blocks * width * slots);
        const auto values = draw_many<T>(rng, num_blocks * slots * width);
        std::unique_ptr<int32_t[]> table(new int32_t[num_blocks]);
        for (int64_t i = 0; i < num_blocks; ++i) table[i] = static_cast<int32_t>(num_blocks - 1 - i);
        const std::unique_ptr<float[]> out(new float[count * (2 + width)]);
        const mmjax::PagedHead<T> head = {keys.get(), values.get(), table.get(), width, width,
                                          num_blocks, 1, 0, slots, 5.0f};
        std::vector<mmjax::PagedQuery<T>> queries;
        for (int64_t i = 0; i < count; ++i) {
          queries.push_back({query.get() + i * width, slots / 2 + 3 * i,
                             num_blocks * slots - 3 - 7 * ((count - i) % 9), out.get() + i * (2 + width)});
        }
        attend(head, 0, queries.data(), count);
        for (int64_t i = 0; i < count; ++i) {
          const float* found = queries[i].out;
          double sum = 0, first_value = 0, size = 0;
          for (int64_t slot = queries[i].begin; slot < queries[i].end; ++slot) {
            const int64_t block = table[slot / slots], offset = slot % slots;
            double score = 0;
            for (int64_t d = 0; d < width; ++d) {
              score += static_cast<double>(as_float(query[i * width + d])) *
                       as_float(keys[(block * width + d) * slots + offset]);
            }
            const double weight = std::exp(5 * std::tanh(score / 5) - found[0]);
            sum += weight;
            first_value += weight * as_float(values[(block * slots + offset) * width]);
            size += weight * std::fabs(as_float(values[(block * slots + offset) * width]));
          }
          if (std::fabs(found[1] - sum) <= unit * sum &&
              std::fabs(found[2] - first_value) <= unit * size) {
            continue;
          }
          std::printf("attention %s queries=%ld width=%ld slots=%ld: %g, not %g; %g, not %g\n",
                      name, (long)count, (long)width, (long)slots, (double)found[1], sum,
                      (double)found[2], first_value);
          is_right = false;
        }
      }
    }
  }
  return is_right;
}

bool is_close(const char* name, double found, double expected, double size, double unit) {
  if (std::fabs(found - expected) <= unit * size) return true;
  std::printf("%s: %g, not %g\n", name, found, expected);
  return false;
}

// Rows of widths around those of vectors; each ends where its memory ends.
template <typename T>
bool check_norm(const char* name, mmjax::Norm<T> norm) {
  const double unit = sizeof(T) == 2 ? 0x1p-6 : 4e-6;
  std::mt19937 rng(0);
  bool is_right = true;
  const int64_t rows = 3;
  for (int64_t width : {1, 7, 8, 16, 31, 33, 640}) {
    for (bool centres : {false, true}) {
      const auto x = draw_many<T>(rng, rows * width);
      const auto weight = draw_many<T>(rng, width), bias = draw_many<T>(rng, width);
      const std::unique_ptr<T[]> out(new T[rows * width]);
      const auto* added = centres ? bias.get() : nullptr;
      norm({x.get(), weight.get(), added, out.get(), rows, width}, {1e-2f, 1.0f, centres, !centres});
      for (int64_t r = 0; r < rows; ++r) {
        double mean = 0, sum = 0;
        auto at = [&](int64_t d) { return static_cast<double>(as_float(x[r * width + d])); };
        for (int64_t d = 0; d < width && centres; ++d) mean += at(d) / width;
        for (int64_t d = 0; d < width; ++d) sum += std::pow(at(d) - mean, 2);
        for (int64_t d = 0; d < width; ++d) {
          const double scaled = (at(d) - mean) / std::sqrt(sum / width + 1e-2);
          const double own = centres ? as_float(bias[d]) : 0.0;
          const double expected = scaled * (1.0 + as_float(weight[d])) + own;
          is_right &= is_close(name, as_float(out[r * width + d]), expected, 8.0, unit);
        }
      }
    }
  }
  return is_right;
}

// Heads of pairs, and of what is left as it is.
template <typename T>
bool check_rotation(const char* name, mmjax::Rotation<T> rotate) {
  const double unit = sizeof(T) == 2 ? 0x1p-6 : 1e-6;
  std::mt19937 rng(0);
  bool is_right = true;
  const int64_t rows = 3, heads = 2;
  for (int64_t half : {1, 4, 8, 20, 64}) {
    for (int64_t rest : {0, 3, 16}) {
      const int64_t width = 2 * half + rest;
      const auto x = draw_many<T>(rng, rows * heads * width);
      const auto cosines = draw_many<float>(rng, rows * half), sines = draw_many<float>(rng, rows * half);
      const std::unique_ptr<T[]> out(new T[rows * heads * width]);
      rotate(x.get(), cosines.get(), sines.get(), out.get(), rows, heads, width, half);
      for (int64_t i = 0; i < rows * heads * width; ++i) {
        const int64_t d = i % width, angle = i / width / heads * half + d % half;
        const double cosine = cosines[angle], sine = sines[angle], own = as_float(x[i]);
        double expected = own;
        if (d < half) expected = own * cosine - as_float(x[i + half]) * sine;
        if (d >= half && d < 2 * half) expected = own * cosine + as_float(x[i - half]) * sine;
        is_right &= is_close(name, as_float(out[i]), expected, 4.0, unit);
      }
    }
  }
  return is_right;
}

// A head alone, whose rows end where their memory ends.
bool check_whole_attention() {
  std::mt19937 rng(0);
  bool is_right = true;
  for (int64_t queries : {1, 17, 40}) {
    for (int64_t keys : {1, 33, 300}) {
      for (int64_t dim : {8, 40, 64}) {
        const int64_t value_dim = dim + 8;
        const auto query = draw_many<bf16>(rng, queries * dim), key = draw_many<bf16>(rng, keys * dim);
        const auto value = draw_many<bf16>(rng, keys * value_dim);
        const std::unique_ptr<bf16[]> out(new bf16[queries * value_dim]);
        mmjax::kAmxAttention({query.get(), key.get(), value.get(), out.get(), queries, keys, dim,
                              value_dim, dim, dim, value_dim, value_dim, 0.25f, 0.0f});
        for (int64_t r = 0; r < queries; ++r) {
          std::vector<double> weights;
          double total = 0;
          for (int64_t s = 0; s < keys; ++s) {
            double score = 0;
            for (int64_t d = 0; d < dim; ++d) {
              score += static_cast<double>(as_float(query[r * dim + d])) * as_float(key[s * dim + d]);
            }
            total += weights.emplace_back(std::exp(score * 0.25));
          }
          for (int64_t d = 0; d < value_dim; ++d) {
            double expected = 0;
            for (int64_t s = 0; s < keys; ++s) {
              expected += weights[s] / total * as_float(value[s * value_dim + d]);
            }
            is_right &= is_close("attention", as_float(out[r * value_dim + d]), expected, 4.0, 0x1p-7);
          }
        }
      }
    }
  }
  return is_right;
}

bool check_tiles(const mmjax::TileProducts& tiles) {
  std::printf("tiles\n");
  const auto check_both = [](const char* name, auto products) {
    return check(name, products.few) & check(name, products.few, kMany) &
           check(name, products.many, kMany);
  };
  const auto check_packed = [&](int i, const Sizes& sizes) {
    const Packed packed{tiles.bfloat16_int8.packed[i]};
    return check<bf16, int8_t, float>("bfloat16_int8", packed, sizes);
  };
  // Attention rounds weights to bfloat16.
  return check_attention("by tiles", mmjax::kAmxPagedAttention, 0x1p-8) & check_whole_attention() &
         check_both("bfloat16", tiles.bfloat16) & check_both("int8", tiles.int8) &
         check_packed(0, kFew) & check_packed(1, {{17, 32, 63}, kMany.widths, kMany.features}) &
         check("bfloat16_int8", tiles.bfloat16_int8.many, kMany) &
         check_group_tiles(tiles.uint4, Code::kUint4) & check_group_tiles(tiles.uint8, Code::kUint8);
}

bool check_all(const mmjax::Products& products) {
  std::printf("%s\n", products.name);
  return check("float32", products.float32) & check("bfloat16", products.bfloat16) &
         check("int8", products.int8) & check("float32_int8", products.float32_int8) &
         check("bfloat16_int8", products.bfloat16_int8) &
         check_all_groups(products.uint4, Code::kUint4) &
         check_all_groups(products.uint8, Code::kUint8) &
         check_all_groups(products.float8, Code::kFloat8) &
         check_attention("float32", products.attend_float32) &
         check_attention("bfloat16", products.attend_bfloat16) &
         check_norm("norm float32", products.norm_float32) &
         check_norm("norm bfloat16", products.norm_bfloat16) &
         check_rotation("rotation float32", products.rotate_float32) &
         check_rotation("rotation bfloat16", products.rotate_bfloat16);
}

}  // namespace

int main() {
  const mmjax::Products* best = mmjax::find_products();
  bool is_right = true, is_known = false;
  // From the oldest on: each that this CPU has, up to the best.
  for (const mmjax::Products* each : {&mmjax::kAvx2, &mmjax::kAvx512, &mmjax::kAvx512Vnni,
                                      &mmjax::kAvx512Bf16}) {
    if (best == nullptr || is_known) break;
    is_right &= check_all(*each);
    is_known = each == best;
  }
  const mmjax::TileProducts* const tiles = mmjax::find_tile_products();
  if (tiles != nullptr) is_right &= check_tiles(*tiles);
  return is_right ? 0 : 1;
}
