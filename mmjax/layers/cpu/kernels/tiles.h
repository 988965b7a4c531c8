// The loops that all instruction sets share. Included by files that are compiled with other flags
// each, so everything here is in an unnamed namespace, and no header of the library is included:
// the linker would keep one file's copy of an inline function for all.
#pragma once

#include "products.h"

namespace mmjax {
namespace {

// Ask for what will be read soon, into the second cache: the first has fewer places for what comes.
inline void fetch(const void* address) { __builtin_prefetch(address, 0, 2); }

// How far ahead to ask. The processor fetches ahead by itself, but not far enough for its memory.
constexpr int64_t kAheadBytes = 4096;

// The same for `kFeatures` side by side: in whole tiles of them.
template <int kFeatures>
inline int64_t find_ahead(int64_t row_bytes) {
  if (kFeatures == 1) return kAheadBytes;
  const int64_t tile_bytes = kFeatures * row_bytes;
  return (kAheadBytes + tile_bytes - 1) / tile_bytes * tile_bytes;
}

inline float power_of_two(int exponent) {
  const int32_t bits = (exponent + 127) << 23;
  float out;
  __builtin_memcpy(&out, &bits, sizeof out);
  return out;
}

// Room for inputs as the lanes want them, without a header of the library.
template <typename T>
struct Prepared {
  T* numbers;  // from the begin of a cache line on
  explicit Prepared(int64_t count) {
    bytes_ = static_cast<char*>(__builtin_malloc(static_cast<size_t>(count) * sizeof(T) + 64));
    if (bytes_ == nullptr) __builtin_abort();
    numbers = reinterpret_cast<T*>(bytes_ + (64 - reinterpret_cast<uintptr_t>(bytes_) % 64));
  }
  ~Prepared() { __builtin_free(bytes_); }
  Prepared(const Prepared&) = delete;
  Prepared& operator=(const Prepared&) = delete;

 private:
  char* bytes_;
};

// `Lanes` multiplies `Lanes::kWidth` numbers at a time: a `Sum` holds the sums of one row with one
// feature, in lanes. Every output is summed in the same order whatever the tile, the rows beside it
// and the thread are, so that a row has the same bits in any batch. `ahead`: how many bytes behind
// this tile's weights are those to ask for meanwhile. `stride`: from one row of `x` to the next.
template <typename Lanes, int kRows, int kFeatures>
inline void multiply_tile(const typename Lanes::X* x, int64_t stride,
                          const typename Lanes::W* weight, int64_t ahead,
                          typename Lanes::Out* out, int64_t width, int64_t features) {
  typename Lanes::Sum sums[kRows][kFeatures];
  typename Lanes::Correction corrections[kFeatures];
  for (int f = 0; f < kFeatures; ++f) {
    corrections[f] = Lanes::no_correction();
    for (int r = 0; r < kRows; ++r) sums[r][f] = Lanes::zero();
  }
  int64_t d = 0;
  for (; d + Lanes::kWidth <= width; d += Lanes::kWidth) {
    typename Lanes::Weights weights[kFeatures];
    for (int f = 0; f < kFeatures; ++f) {
      fetch(reinterpret_cast<const char*>(weight + f * width + d) + ahead);
      weights[f] = Lanes::load_weights(weight + f * width + d);
      Lanes::correct(corrections[f], weights[f]);
    }
    for (int r = 0; r < kRows; ++r) {
      const auto inputs = Lanes::load_inputs(x + r * stride + d);
      for (int f = 0; f < kFeatures; ++f) Lanes::add(sums[r][f], inputs, weights[f]);
    }
  }
  if (d < width) {
    const int64_t left = width - d;
    typename Lanes::Weights weights[kFeatures];
    for (int f = 0; f < kFeatures; ++f) {
      weights[f] = Lanes::load_weights(weight + f * width + d, left);
      Lanes::correct(corrections[f], weights[f]);
    }
    for (int r = 0; r < kRows; ++r) {
      const auto inputs = Lanes::load_inputs(x + r * stride + d, left);
      for (int f = 0; f < kFeatures; ++f) Lanes::add(sums[r][f], inputs, weights[f]);
    }
  }
  typename Lanes::Out totals[kRows * kFeatures];
  for (int r = 0; r < kRows; ++r) {
    for (int f = 0; f < kFeatures; ++f) sums[r][f] = Lanes::corrected(sums[r][f], corrections[f]);
  }
  Lanes::template add_lanes<kRows * kFeatures>(&sums[0][0], totals);
  for (int r = 0; r < kRows; ++r) {
    for (int f = 0; f < kFeatures; ++f) out[r * features + f] = totals[r * kFeatures + f];
  }
}

template <typename Lanes, int kFeatures>
inline void multiply_rows(const typename Lanes::X* x, const typename Lanes::W* weight,
                          typename Lanes::Out* out, int64_t rows, int64_t width,
                          int64_t features) {
  const int64_t ahead = find_ahead<kFeatures>(width * static_cast<int64_t>(sizeof *weight));
  auto tile = [=](auto multiply_some, int64_t r) {
    multiply_some(x + r * width, width, weight, ahead, out + r * features, width, features);
  };
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4) tile(multiply_tile<Lanes, 4, kFeatures>, r);
  for (; r + 2 <= rows; r += 2) tile(multiply_tile<Lanes, 2, kFeatures>, r);
  if (r < rows) tile(multiply_tile<Lanes, 1, kFeatures>, r);
}

// Up to so many rows, a feature is read after the other. Four side by side took up to twice as long.
constexpr int64_t kRowsInOrder = 4;

// With more rows, four features stay in the first cache while all rows pass over them.
template <typename Lanes>
void multiply(const typename Lanes::X* x, const typename Lanes::W* weight,
              typename Lanes::Out* out, int64_t rows, int64_t width, int64_t features,
              int64_t begin, int64_t end) {
  int64_t f = begin;
  for (; rows > kRowsInOrder && f + 4 <= end; f += 4) {
    multiply_rows<Lanes, 4>(x, weight + f * width, out + f, rows, width, features);
  }
  for (; f < end; ++f) {
    multiply_rows<Lanes, 1>(x, weight + f * width, out + f, rows, width, features);
  }
}

// Where 4-bit codes of inputs d, d + 1, ... stand: each in a byte, `code_shift` bits up.
inline int64_t code_byte(int64_t d) { return d / 64 * 32 + d % 32; }
inline int code_shift(int64_t d) { return d & 32 ? 4 : 0; }

inline float scale_of(const Groups& weight, int64_t at) {
  if (!weight.has_bf16_scale) return static_cast<const float*>(weight.scale)[at];
  const uint32_t bits = static_cast<uint32_t>(static_cast<const bf16*>(weight.scale)[at]) << 16;
  float scale;
  __builtin_memcpy(&scale, &bits, sizeof scale);
  return scale;
}

// `Lanes` decodes `Lanes::kWidth` weights at a time. A group's products are added without its scale,
// and its sum is then added with it. The order of a row's sums is as in `multiply_tile`.
//
// Of groups that are decoded at once, whose sums need no place of their own: from `d` on, as far as
// they are whole. Returns where they end. The sums are those that the other loop would have.
template <typename Lanes, int kRows, int kFeatures>
inline int64_t multiply_short_groups(const typename Lanes::X* x, const Groups& weight,
                                     int64_t feature,
                                     typename Lanes::Sum (&sums)[kRows][kFeatures]) {
  const uint8_t* codes = weight.codes + feature * weight.row_bytes;
  typename Lanes::Zero zero = Lanes::make_zero(Lanes::kMiddle);
  const int64_t ahead = find_ahead<kFeatures>(weight.row_bytes);
  int64_t d = 0;
  for (int64_t group = 0; d + Lanes::kWidth <= weight.width; ++group, d += Lanes::kWidth) {
    for (int f = 0; f < kFeatures; ++f) {
      const int64_t at = (feature + f) * weight.num_groups + group;
      fetch(codes + f * weight.row_bytes + Lanes::byte_of(d) + ahead);
      if (weight.zero != nullptr) zero = Lanes::make_zero(weight.zero[at]);
      const auto numbers = Lanes::decode(codes + f * weight.row_bytes, d, zero);
      const float scale = scale_of(weight, at);
      for (int r = 0; r < kRows; ++r) {
        typename Lanes::Sum part = Lanes::zero();
        Lanes::add(part, Lanes::load_inputs(x + r * weight.width + d), numbers);
        Lanes::add_scaled(sums[r][f], part, scale);
      }
    }
  }
  return d;
}

template <typename Lanes, int kRows, int kFeatures>
inline void multiply_group_tile(const typename Lanes::X* x, const Groups& weight, float* out,
                                int64_t feature, int64_t features) {
  typename Lanes::Sum sums[kRows][kFeatures];
  typename Lanes::Zero zeros[kFeatures];
  for (int f = 0; f < kFeatures; ++f) {
    zeros[f] = Lanes::make_zero(Lanes::kMiddle);
    for (int r = 0; r < kRows; ++r) sums[r][f] = Lanes::zero();
  }
  const uint8_t* codes = weight.codes + feature * weight.row_bytes;
  const int64_t ahead = find_ahead<kFeatures>(weight.row_bytes);
  int64_t d = 0;
  if (weight.group_size == Lanes::kWidth) {
    d = multiply_short_groups<Lanes, kRows, kFeatures>(x, weight, feature, sums);
  }
  for (int64_t group = d / weight.group_size; group < weight.num_groups; ++group) {
    const int64_t last = (group + 1) * weight.group_size;
    const int64_t end = last < weight.width ? last : weight.width;
    typename Lanes::Sum parts[kRows][kFeatures];
    for (int f = 0; f < kFeatures; ++f) {
      if (weight.zero != nullptr) {
        zeros[f] = Lanes::make_zero(weight.zero[(feature + f) * weight.num_groups + group]);
      }
      for (int r = 0; r < kRows; ++r) parts[r][f] = Lanes::zero();
    }
    for (; d + Lanes::kWidth <= end; d += Lanes::kWidth) {
      typename Lanes::Weights weights[kFeatures];
      for (int f = 0; f < kFeatures; ++f) {
        fetch(codes + f * weight.row_bytes + Lanes::byte_of(d) + ahead);
        weights[f] = Lanes::decode(codes + f * weight.row_bytes, d, zeros[f]);
      }
      for (int r = 0; r < kRows; ++r) {
        const auto inputs = Lanes::load_inputs(x + r * weight.width + d);
        for (int f = 0; f < kFeatures; ++f) Lanes::add(parts[r][f], inputs, weights[f]);
      }
    }
    if (d < end) {
      for (int f = 0; f < kFeatures; ++f) {
        const auto left = Lanes::decode(codes + f * weight.row_bytes, d, zeros[f], end - d);
        for (int r = 0; r < kRows; ++r) {
          Lanes::add(parts[r][f], Lanes::load_inputs(x + r * weight.width + d, end - d), left);
        }
      }
      d = end;
    }
    for (int f = 0; f < kFeatures; ++f) {
      const float scale = scale_of(weight, (feature + f) * weight.num_groups + group);
      for (int r = 0; r < kRows; ++r) Lanes::add_scaled(sums[r][f], parts[r][f], scale);
    }
  }
  float totals[kRows * kFeatures];
  Lanes::template add_lanes<kRows * kFeatures>(&sums[0][0], totals);
  for (int r = 0; r < kRows; ++r) {
    for (int f = 0; f < kFeatures; ++f) out[r * features + feature + f] = totals[r * kFeatures + f];
  }
}

// Four rows share what is decoded of two features, whose sums are then as many as registers hold.
// Up to two rows read a feature after the other, as in `multiply`.
template <typename Lanes>
void multiply_groups(const typename Lanes::X* x, const Groups& weight, float* out, int64_t rows,
                     int64_t features, int64_t begin, int64_t end) {
  auto at = [=](int64_t r) { return x + r * weight.width; };
  int64_t f = begin;
  for (; rows > 2 && f + 4 <= end; f += 4) {
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4) {
      multiply_group_tile<Lanes, 4, 2>(at(r), weight, out + r * features, f, features);
      multiply_group_tile<Lanes, 4, 2>(at(r), weight, out + r * features, f + 2, features);
    }
    for (; r + 2 <= rows; r += 2) {
      multiply_group_tile<Lanes, 2, 4>(at(r), weight, out + r * features, f, features);
    }
    if (r < rows) {
      multiply_group_tile<Lanes, 1, 4>(at(r), weight, out + r * features, f, features);
    }
  }
  for (; f < end; ++f) {
    int64_t r = 0;
    for (; r + 2 <= rows; r += 2) {
      multiply_group_tile<Lanes, 2, 1>(at(r), weight, out + r * features, f, features);
    }
    if (r < rows) multiply_group_tile<Lanes, 1, 1>(at(r), weight, out + r * features, f, features);
  }
}

// What lanes have that need no correction of their sums.
struct Uncorrected {
  struct Correction {};
  static Correction no_correction() { return {}; }
  template <typename Weights>
  static void correct(Correction&, Weights) {}
  template <typename Sum>
  static Sum corrected(Sum sum, Correction) {
    return sum;
  }
};

}  // namespace
}  // namespace mmjax
