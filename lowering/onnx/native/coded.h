// Rows of codes of 8 bits, each with a scale of its own: whole numbers, or places in a table. See accel.ir.ops.codec.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "abi.h"
#include "stored.h"
#include "vector.h"

namespace coded {

typedef int8_t b8 __attribute__((vector_size(8)));

// A row's codes; returns its scale, which is NaN where the row holds what is no finite number.
inline float encode(const float* x, int64_t width, int8_t* out) {
  v8 most = {}, broken = {};
  float largest_left = 0, broken_left = 0;
  int64_t w = 0;
  for (; w + 8 <= width; w += 8) {
    v8 y = load(x + w), size = y < all(0.0f) ? -y : y;
    most = size > most ? size : most;
    broken += y * all(0.0f);
  }
  for (; w < width; ++w) largest_left = std::max(largest_left, std::fabs(x[w])), broken_left += x[w] * 0.0f;
  float scale = std::max({largest(most), largest_left, 1e-30f}) / 127.0f + (sum(broken) + broken_left);
  if (scale != scale) {
    std::fill(out, out + width, int8_t(0));
    return scale;
  }
  for (w = 0; w + 8 <= width; w += 8) {
    v8 steps = load(x + w) / all(scale) + all(12582912.0f) - all(12582912.0f);  // to the nearest, half to even
    b8 codes = __builtin_convertvector(__builtin_convertvector(steps, i8), b8);
    std::memcpy(out + w, &codes, sizeof codes);
  }
  for (; w < width; ++w) out[w] = int8_t(std::nearbyint(x[w] / scale));
  return scale;
}

inline v8 numbers(const int8_t* codes) {
#if defined(__AVX2__)
  return (v8)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes))));
#endif
  b8 x;
  std::memcpy(&x, codes, sizeof x);
  return __builtin_convertvector(__builtin_convertvector(x, i8), v8);
}

// Codes of `count` rows -> what they stand for.
inline void decode(const int8_t* codes, const float* scales, int64_t count, int64_t width, float* out) {
  for (int64_t r = 0; r < count; ++r, codes += width, out += width) {
    v8 scale = all(scales[r]);
    int64_t w = 0;
    for (; w + 8 <= width; w += 8) store(out + w, numbers(codes + w) * scale);
    for (; w < width; ++w) out[w] = float(codes[w]) * scales[r];
  }
}

constexpr int64_t kTable = 256;  // numbers that a byte may stand for

// A table of no more numbers, filled up with NaN; whether it is one.
inline bool table_of(const float* from, size_t rank, int64_t count, std::vector<float>& out) {
  if (rank != 1 || count > kTable) return false;
  out.assign(kTable, std::numeric_limits<float>::quiet_NaN());
  std::copy_n(from, count, out.begin());
  return true;
}

// Bytes of `count` rows -> the numbers of a table that they stand for, times the rows' scales where there are any.
inline void look_up(const uint8_t* codes, const float* table, const float* scales, int64_t count, int64_t width,
                    float* out) {
  for (int64_t r = 0; r < count; ++r, codes += width, out += width) {
    v8 scale = all(scales ? scales[r] : 1.0f);
    int64_t w = 0;
    for (; w + 8 <= width; w += 8) {
      uint64_t some;
      std::memcpy(&some, codes + w, sizeof some);
      v8 x;
      for (int i = 0; i < 8; ++i) x[i] = table[some >> 8 * i & 255];
      store(out + w, x * scale);
    }
    for (; w < width; ++w) out[w] = table[codes[w]] * scale[0];
  }
}

// Rows as they lie: floats, halves, or codes (with a table: its bytes), or blocks of codes from a row on.
struct Rows {
  const float* floats;
  const int8_t* codes;
  const float* scales;
  int64_t width;
  const stored::Blocks* blocks = nullptr;
  int64_t first = 0;
  const float* table = nullptr;
  const uint16_t* halves = nullptr;

  Rows at(int64_t row) const {
    if (halves) return {nullptr, nullptr, nullptr, width, nullptr, 0, nullptr, halves + row * width};
    if (blocks) return {nullptr, nullptr, nullptr, width, blocks, first + row};
    if (codes) return {nullptr, codes + row * width, scales ? scales + row : nullptr, width, nullptr, 0, table};
    return {floats + row * width, nullptr, nullptr, width};
  }
  // `count` rows from here as floats; coded ones are decoded into `room`.
  const float* read(int64_t count, float* room) const {
    if (floats) return floats;
    if (halves)
      grouped::widen(halves, count * width, room);
    else if (blocks)
      blocks->read(first, count, room);
    else if (table)
      look_up(reinterpret_cast<const uint8_t*>(codes), table, scales, count, width, room);
    else
      decode(codes, scales, count, width, room);
    return room;
  }
  // Ask for memory before it is needed.
  void ahead(int64_t row, int64_t count) const {
    if (blocks) return;  // it is little
    auto bytes = [](const auto* rows) { return reinterpret_cast<const int8_t*>(rows); };
    const int8_t* from = codes ? codes : halves ? bytes(halves) : bytes(floats);
    int64_t each = width * (codes ? sizeof *codes : halves ? sizeof *halves : sizeof *floats);
    for (int64_t i = row * each; i < (row + count) * each; i += 64) soon(from + i);
  }
};

// Rows of a tensor as its type says: floats, halves, or codes with scales.
inline Rows rows_of(const abi::Tensor& x, const abi::Tensor& scale) {
  int64_t width = x.size[3];
  if (x.type == abi::kHalf) return {nullptr, nullptr, nullptr, width, nullptr, 0, nullptr, x.as<uint16_t>()};
  if (scale.data) return {nullptr, x.as<int8_t>(), scale.as<float>(), width};
  return {x.as<float>(), nullptr, nullptr, width};
}

}  // namespace coded
