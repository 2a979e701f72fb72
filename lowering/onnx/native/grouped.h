// Blocks of rows in 1, 2, 4 or 8 bits a number, groups of which share a step and a smallest number in float16: see
// accel.ir.ops.groups.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "vector.h"

namespace grouped {

inline float number(uint16_t half) {
#if defined(__F16C__)
  return _cvtsh_ss(half);
#endif
  uint32_t rest = half & 0x7fff, bits = rest << 13;
  float x;
  if (rest >= 0x7c00) bits |= 0x7f800000;  // no number
  std::memcpy(&x, &bits, sizeof x);
  if (rest < 0x7c00) x *= 0x1p112f;
  return half & 0x8000 ? -x : x;
}

inline v8 halves_at(const uint16_t* p) {
#if defined(__F16C__)
  __m128i x;
  std::memcpy(&x, p, sizeof x);
  return (v8)_mm256_cvtph_ps(x);
#else
  v8 x;
  for (int i = 0; i < 8; ++i) x[i] = number(p[i]);
  return x;
#endif
}

// Eight bytes, each in a lane.
inline i8 lanes(const uint8_t* codes) {
#if defined(__AVX2__)
  return (i8)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes)));
#else
  i8 x;
  for (int i = 0; i < 8; ++i) x[i] = codes[i];
  return x;
#endif
}

// The numbers that the codes in some bits of each lane are.
template <int BITS>
inline v8 numbers(i8 x, int shift) {
  if constexpr (BITS < 8) x = (x >> shift) & all((1 << BITS) - 1);
  return __builtin_convertvector(x, v8);
}

// What blocks lie in: [blocks, rows * bytes] codes, [blocks, groups] steps and smallest numbers.
struct Blocks {
  const uint8_t* codes;
  const uint16_t *scale, *least;
  int64_t bits, rows, group, width;
  bool along;  // rows of a channel share a group; else channels of a row

  int64_t bytes() const { return (width * bits + 7) / 8; }
  int64_t each() const { return (width + group - 1) / group; }  // groups of a row, where not along
  int64_t groups() const { return along ? rows / group * width : rows * each(); }

  // `count` rows from `row` on, counted through all blocks, as floats.
  void read(int64_t row, int64_t count, float* out) const {
    if (bits == 1) return read_all<1>(row, count, out);
    if (bits == 2) return read_all<2>(row, count, out);
    if (bits == 4) return read_all<4>(row, count, out);
    read_all<8>(row, count, out);
  }

 private:
  template <int BITS>
  void read_all(int64_t row, int64_t count, float* out) const {
    while (count > 0) {
      int64_t block = row / rows, r = row % rows, some = std::min(count, (along ? r / group * group + group : rows) - r);
      const uint8_t* from = codes + (block * rows + r) * bytes();
      if (along) {
        int64_t at = block * groups() + r / group * width;
        down<BITS>(from, scale + at, least + at, some, out);
      } else {
        int64_t at = block * groups() + r * each();
        across<BITS>(from, scale + at, least + at, some, out);
      }
      row += some, count -= some, out += some * width;
    }
  }

  // Code `w` of a row.
  float one(const uint8_t* from, int64_t w) const {
    int64_t n = bytes();
    return float(from[w % n] >> (w / n * bits) & ((1 << bits) - 1));
  }

  // Rows of one group each channel.
  template <int BITS>
  void down(const uint8_t* from, const uint16_t* step, const uint16_t* first, int64_t count, float* out) const {
    constexpr int PER = 8 / BITS;
    int64_t n = bytes(), whole = n * PER == width ? n / 8 * 8 : 0;
    for (int64_t w = 0; w < whole; w += 8) {
      v8 s[PER], m[PER];
      for (int j = 0; j < PER; ++j) s[j] = halves_at(step + j * n + w), m[j] = halves_at(first + j * n + w);
      for (int64_t i = 0; i < count; ++i) {
        i8 x = lanes(from + i * n + w);
        for (int j = 0; j < PER; ++j)
          store(out + i * width + j * n + w, fused(numbers<BITS>(x, BITS * j), s[j], m[j]));
      }
    }
    for (int64_t w = 0; w < width; ++w)
      for (int64_t i = 0; i < count && w % n >= whole; ++i)
        out[i * width + w] = std::fma(one(from + i * n, w), number(step[w]), number(first[w]));
  }

  // Rows, whose channels are in groups.
  template <int BITS>
  void across(const uint8_t* from, const uint16_t* step, const uint16_t* first, int64_t count, float* out) const {
    constexpr int PER = 8 / BITS;
    int64_t n = bytes(), size = std::min(group, width), run = std::min(size, n), of[PER];
    bool even = n * PER == width && run % 8 == 0 && (size % n == 0 || n % size == 0);
    for (int j = 0; j < PER; ++j) of[j] = j * n / size;
    for (int64_t i = 0; i < count; ++i, from += n, step += each(), first += each(), out += width) {
      for (int64_t w = 0; w < width && !even; ++w)
        out[w] = std::fma(one(from, w), number(step[w / group]), number(first[w / group]));
      for (int64_t start = 0, k = 0; start < n && even; start += run, ++k) {
        v8 s[PER], m[PER];
        for (int j = 0; j < PER; ++j) s[j] = all(number(step[of[j] + k])), m[j] = all(number(first[of[j] + k]));
        for (int64_t w = start; w < start + run; w += 8) {
          i8 x = lanes(from + w);
          for (int j = 0; j < PER; ++j) store(out + j * n + w, fused(numbers<BITS>(x, BITS * j), s[j], m[j]));
        }
      }
    }
  }
};

}  // namespace grouped
