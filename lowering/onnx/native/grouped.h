// Blocks of rows in 2, 4 or 8 bits a number, groups of which share a step and a smallest number in float16: see
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

// Eight codes of BITS, lowest first.
template <int BITS>
inline v8 eight(const uint8_t* codes) {
#if defined(__AVX2__)
  if constexpr (BITS == 8)
    return (v8)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes))));
  uint32_t word = 0;
  std::memcpy(&word, codes, BITS == 8 ? 4 : BITS);
  const __m256i shifts = _mm256_setr_epi32(0, BITS, 2 * BITS, 3 * BITS, 4 * BITS, 5 * BITS, 6 * BITS, 7 * BITS);
  __m256i each = _mm256_srlv_epi32(_mm256_set1_epi32(int(word)), shifts);
  return (v8)_mm256_cvtepi32_ps(_mm256_and_si256(each, _mm256_set1_epi32((1 << BITS) - 1)));
#else
  v8 x;
  for (int i = 0; i < 8; ++i) x[i] = float(codes[i * BITS / 8] >> (i * BITS % 8) & ((1 << BITS) - 1));
  return x;
#endif
}

inline float one(const uint8_t* codes, int64_t i, int64_t bits) {
  return float(codes[i * bits / 8] >> (i * bits % 8) & ((1 << bits) - 1));
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
        for (int64_t i = 0; i < some; ++i)
          across<BITS>(from + i * bytes(), scale + at + i * each(), least + at + i * each(), out + i * width);
      }
      row += some, count -= some, out += some * width;
    }
  }

  // Rows of one group each channel.
  template <int BITS>
  void down(const uint8_t* from, const uint16_t* step, const uint16_t* first, int64_t count, float* out) const {
    int64_t stride = bytes(), w = 0;
    for (; w + 8 <= width; w += 8) {
      v8 s = halves_at(step + w), m = halves_at(first + w);
      const uint8_t* codes = from + w * BITS / 8;
      for (int64_t i = 0; i < count; ++i) store(out + i * width + w, fused(eight<BITS>(codes + i * stride), s, m));
    }
    for (; w < width; ++w)
      for (int64_t i = 0; i < count; ++i)
        out[i * width + w] = std::fma(one(from + i * stride, w, BITS), number(step[w]), number(first[w]));
  }

  // A row, whose channels are in groups.
  template <int BITS>
  void across(const uint8_t* from, const uint16_t* step, const uint16_t* first, float* out) const {
    for (int64_t g = 0, w = 0; w < width; ++g) {
      int64_t end = std::min(width, w + group);
      float s = number(step[g]), m = number(first[g]);
      v8 scale = all(s), least = all(m);
      while (w < end)
        if (w % 8 == 0 && w + 8 <= end)
          store(out + w, fused(eight<BITS>(from + w * BITS / 8), scale, least)), w += 8;
        else
          out[w] = std::fma(one(from, w, BITS), s, m), ++w;
    }
  }
};

}  // namespace grouped
