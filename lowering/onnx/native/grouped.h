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
#elif defined(__aarch64__)
  float32x4_t parts[] = {vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))),
                         vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4)))};
  v8 x;
  std::memcpy(&x, parts, sizeof x);
  return x;
#else
  v8 x;
  for (int i = 0; i < 8; ++i) x[i] = number(p[i]);
  return x;
#endif
}

// The nearest half, of two the even one; of what is beyond 65504 that, of what is no finite number none.
inline uint16_t half(float x) {
  constexpr float most = 65504.0f;
  if (x - x != 0) return 0x7e00;
  x = x > most ? most : x < -most ? -most : x;
#if defined(__F16C__)
  return _cvtss_sh(x, 0);
#endif
  uint32_t bits, sign, rest;
  std::memcpy(&bits, &x, sizeof bits);
  sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
  if (rest < 0x38800000) {  // below 2^-14: whole steps of 2^-24, which an addition rounds to
    float size;
    std::memcpy(&size, &rest, sizeof size);
    size += 0.5f;
    std::memcpy(&rest, &size, sizeof rest);
    return sign | (rest - 0x3f000000);
  }
  return sign | ((rest - 0x38000000 + 0xfff + (rest >> 13 & 1)) >> 13);
}

inline void halve(const float* from, int64_t count, uint16_t* out) {
  int64_t i = 0;
#if defined(__F16C__)
  v8 most = all(65504.0f), least = all(-65504.0f);
  for (; i + 8 <= count; i += 8) {
    v8 x = load(from + i), y = x > most ? most : x < least ? least : x;
    __m128i found = _mm256_cvtps_ph((__m256)(y + x * all(0.0f)), 0);
    std::memcpy(out + i, &found, sizeof found);
  }
#endif
  for (; i < count; ++i) out[i] = half(from[i]);
}

inline void widen(const uint16_t* from, int64_t count, float* out) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) store(out + i, halves_at(from + i));
  for (; i < count; ++i) out[i] = number(from[i]);
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

// The numbers that the codes in some bits of each lane are; `FINE`: with those of `y` below them.
template <int BITS, bool FINE>
inline v8 numbers(i8 x, i8 y, int shift) {
  constexpr int most = (1 << BITS) - 1;
  if constexpr (BITS < 8) x = (x >> shift) & all(most);
  if constexpr (FINE) x = (x << BITS) | ((y >> shift) & all(most));
  return __builtin_convertvector(x, v8);
}

// What blocks lie in: [blocks, rows * bytes] codes, [blocks, groups] steps and smallest numbers.
struct Blocks {
  const uint8_t* codes;
  const uint16_t *scale, *least;
  int64_t bits, rows, group, width;
  bool along;  // rows of a channel share a group; else channels of a row
  const uint8_t* finer = nullptr;  // codes of what a number is off, in parts of a step, half of them below 0

  int64_t bytes() const { return (width * bits + 7) / 8; }
  int64_t each() const { return (width + group - 1) / group; }  // groups of a row, where not along
  int64_t groups() const { return along ? rows / group * width : rows * each(); }

  // `count` rows from `row` on, counted through all blocks, as floats.
  void read(int64_t row, int64_t count, float* out) const {
    return finer ? read_bits<true>(row, count, out) : read_bits<false>(row, count, out);
  }

 private:
  template <bool FINE>
  void read_bits(int64_t row, int64_t count, float* out) const {
    if (bits == 1) return read_all<1, FINE>(row, count, out);
    if (bits == 2) return read_all<2, FINE>(row, count, out);
    if (bits == 4) return read_all<4, FINE>(row, count, out);
    read_all<8, FINE>(row, count, out);
  }

  template <int BITS, bool FINE>
  void read_all(int64_t row, int64_t count, float* out) const {
    while (count > 0) {
      int64_t block = row / rows, r = row % rows, some = std::min(count, (along ? r / group * group + group : rows) - r);
      int64_t from = (block * rows + r) * bytes();
      const uint8_t *x = codes + from, *y = FINE ? finer + from : x;
      if (along) {
        int64_t at = block * groups() + r / group * width;
        down<BITS, FINE>(x, y, scale + at, least + at, some, out);
      } else {
        int64_t at = block * groups() + r * each();
        across<BITS, FINE>(x, y, scale + at, least + at, some, out);
      }
      row += some, count -= some, out += some * width;
    }
  }

  // A step and a smallest number, where codes have as many bits again below them.
  template <bool FINE, typename V>
  static void refine(V& step, V& first, V half, V part) {
    if constexpr (FINE) first = first - step * half, step = step * part;
  }

  // Number `w` of a row.
  template <int BITS, bool FINE>
  float one(const uint8_t* x, const uint8_t* y, int64_t w, uint16_t step, uint16_t first) const {
    int64_t n = bytes(), shift = w / n * BITS;
    int code = x[w % n] >> shift & ((1 << BITS) - 1);
    if constexpr (FINE) code = code << BITS | (y[w % n] >> shift & ((1 << BITS) - 1));
    float s = number(step), m = number(first);
    refine<FINE>(s, m, 0.5f, 1.0f / (1 << BITS));
    return std::fma(float(code), s, m);
  }

  // Rows of one group each channel.
  template <int BITS, bool FINE>
  void down(const uint8_t* x, const uint8_t* y, const uint16_t* step, const uint16_t* first, int64_t count,
            float* out) const {
    constexpr int PER = 8 / BITS;
    int64_t n = bytes(), whole = n * PER == width ? n / 8 * 8 : 0;
    for (int64_t w = 0; w < whole; w += 8) {
      v8 s[PER], m[PER];
      for (int j = 0; j < PER; ++j) {
        s[j] = halves_at(step + j * n + w), m[j] = halves_at(first + j * n + w);
        refine<FINE>(s[j], m[j], all(0.5f), all(1.0f / (1 << BITS)));
      }
      for (int64_t i = 0; i < count; ++i) {
        i8 codes = lanes(x + i * n + w), more = FINE ? lanes(y + i * n + w) : codes;
        for (int j = 0; j < PER; ++j)
          store(out + i * width + j * n + w, fused(numbers<BITS, FINE>(codes, more, BITS * j), s[j], m[j]));
      }
    }
    for (int64_t w = 0; w < width; ++w)
      for (int64_t i = 0; i < count && w % n >= whole; ++i)
        out[i * width + w] = one<BITS, FINE>(x + i * n, y + i * n, w, step[w], first[w]);
  }

  // Rows, whose channels are in groups.
  template <int BITS, bool FINE>
  void across(const uint8_t* x, const uint8_t* y, const uint16_t* step, const uint16_t* first, int64_t count,
              float* out) const {
    constexpr int PER = 8 / BITS;
    int64_t n = bytes(), size = std::min(group, width), run = std::min(size, n), of[PER];
    bool even = n * PER == width && run % 8 == 0 && (size % n == 0 || n % size == 0);
    for (int j = 0; j < PER; ++j) of[j] = j * n / size;
    for (int64_t i = 0; i < count; ++i, x += n, y += n, step += each(), first += each(), out += width) {
      for (int64_t w = 0; w < width && !even; ++w)
        out[w] = one<BITS, FINE>(x, y, w, step[w / group], first[w / group]);
      for (int64_t start = 0, k = 0; start < n && even; start += run, ++k) {
        v8 s[PER], m[PER];
        for (int j = 0; j < PER; ++j) {
          s[j] = all(number(step[of[j] + k])), m[j] = all(number(first[of[j] + k]));
          refine<FINE>(s[j], m[j], all(0.5f), all(1.0f / (1 << BITS)));
        }
        for (int64_t w = start; w < start + run; w += 8) {
          i8 codes = lanes(x + w), more = FINE ? lanes(y + w) : codes;
          for (int j = 0; j < PER; ++j)
            store(out + j * n + w, fused(numbers<BITS, FINE>(codes, more, BITS * j), s[j], m[j]));
        }
      }
    }
  }
};

}  // namespace grouped
