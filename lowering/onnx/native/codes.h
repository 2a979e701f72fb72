// Numbers of 4 or 8 bits, and the products of weights with rounded inputs in whole numbers.
//
// A group is 32 bytes of a weight row: 64 numbers of 4 bits, or 32 of 8. Each of its eight sums belongs to
// one block of the weight, so that blocks of 16 numbers and more keep scales of their own.
#pragma once
#include <algorithm>

#include "vector.h"

namespace codes {

constexpr int64_t kBytes = 32;

// One group of an input row, rounded: with 4 bits the even numbers come before the odd, as they lie in a
// byte's halves.
template <int bits>
struct alignas(32) Group {
  static constexpr int64_t kSize = kBytes * 8 / bits;
  int8_t code[kSize];
};

#if defined(__AVX2__)

inline __m256i bytes(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }

// sums + the products of unsigned and signed bytes, four by four.
inline __m256i fours(__m256i sums, __m256i x, __m256i y) {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
  return _mm256_dpbusd_epi32(sums, x, y);
#elif defined(__AVXVNNI__)
  return _mm256_dpbusd_avx_epi32(sums, x, y);
#else
  return _mm256_add_epi32(sums, _mm256_madd_epi16(_mm256_maddubs_epi16(x, y), _mm256_set1_epi16(1)));
#endif
}

inline i8 multiply(const uint8_t* weight, const Group<4>& x) {
  __m256i both = bytes(weight), low = _mm256_set1_epi8(15);
  __m256i even = _mm256_and_si256(both, low), odd = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
  return (i8)fours(fours(_mm256_setzero_si256(), even, bytes(x.code)), odd, bytes(x.code + 32));
#else  // two by two they stay below 2^15
  __m256i twos = _mm256_add_epi16(_mm256_maddubs_epi16(even, bytes(x.code)), _mm256_maddubs_epi16(odd, bytes(x.code + 32)));
  return (i8)_mm256_madd_epi16(twos, _mm256_set1_epi16(1));
#endif
}

inline i8 multiply(const uint8_t* weight, const Group<8>& x) {  // 8-bit weights lie 128 higher than they are
  __m256i w = _mm256_xor_si256(bytes(weight), _mm256_set1_epi8(-128));
  return (i8)fours(_mm256_setzero_si256(), _mm256_abs_epi8(w), _mm256_sign_epi8(bytes(x.code), w));
}

#else

inline i8 multiply(const uint8_t* weight, const Group<4>& x) {
  int32_t total[8] = {};
  for (int i = 0; i < 32; ++i) total[i / 4] += (weight[i] & 15) * x.code[i] + (weight[i] >> 4) * x.code[32 + i];
  i8 out;
  std::memcpy(&out, total, sizeof out);
  return out;
}

inline i8 multiply(const uint8_t* weight, const Group<8>& x) {
  int32_t total[8] = {};
  for (int i = 0; i < 32; ++i) total[i / 4] += (int32_t(weight[i]) - 128) * x.code[i];
  i8 out;
  std::memcpy(&out, total, sizeof out);
  return out;
}

#endif

// Of eight blocks' numbers those of the group at a place among theirs, for each of its eight sums. EACH: blocks of a
// group; 0 as 1.
template <int EACH>
inline v8 spread(v8 x, int place) {
  constexpr int each = EACH ? EACH : 1;
  i8 index;
  for (int lane = 0; lane < 8; ++lane) index[lane] = place * each + lane * each / 8;
#if defined(__AVX2__)
  return (v8)_mm256_permutevar8x32_ps((__m256)x, (__m256i)index);
#else
  v8 out;
  for (int lane = 0; lane < 8; ++lane) out[lane] = x[index[lane]];
  return out;
#endif
}

inline v8 whole(v8 x) { return x + all(12582912.0f) - all(12582912.0f); }  // 1.5 * 2^23 leaves no fraction

inline void put(v8 x, int8_t* to) {
  typedef int8_t b8 __attribute__((vector_size(8)));
  b8 code = __builtin_convertvector(__builtin_convertvector(x, i8), b8);
  std::memcpy(to, &code, sizeof code);
}

// x [blocks * block] -> whole numbers of 127 steps up to a block's largest; steps [blocks], and totals
// [blocks]: the sums of those whole numbers. What is written of a block or a group lies `apart` from the next.
template <int bits>
void round_row(const float* x, int64_t block, int64_t blocks, int64_t apart, float* steps, float* totals,
               Group<bits>* out) {
  constexpr int64_t size = Group<bits>::kSize;
  for (int64_t b = 0; b < blocks; ++b, x += block) {
    v8 high = {};
    for (int64_t i = 0; i < block; i += 8) {
      v8 v = load(x + i), size_of = v < all(0.0f) ? -v : v;
      high = size_of > high ? size_of : high;
    }
    const float step = largest(high) / 127;
    v8 by = all(step == 0 ? 1.0f : step), total = {};
    for (int64_t i = 0; i < block; i += 16) {
      int64_t at = b * block + i, place = at % size;
      v8 first = whole(load(x + i) / by), second = whole(load(x + i + 8) / by);
      total += first + second;
      int8_t* code = out[at / size * apart].code;
      if (bits == 8) {
        put(first, code + place);
        put(second, code + place + 8);
      } else {
        put(__builtin_shufflevector(first, second, 0, 2, 4, 6, 8, 10, 12, 14), code + place / 2);
        put(__builtin_shufflevector(first, second, 1, 3, 5, 7, 9, 11, 13, 15), code + 32 + place / 2);
      }
    }
    steps[b * apart] = step;
    totals[b * apart] = sum(total);
  }
}

}  // namespace codes
