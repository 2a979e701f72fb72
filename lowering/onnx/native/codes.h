// Numbers of 2 to 6 or of 8 bits, and the products of weights with rounded inputs in whole numbers.
//
// A group is 64 numbers of a weight row, or 32 of 8 bits. Those of 2 to 6 bits lie in planes, of which each has a power
// of two of their bits, the lowest first: 32 bytes of 4 bits, 16 of 2, 8 of 1; the first number of a byte in its lowest
// bits. Each of a group's eight sums belongs to one block of the weight, so that blocks of 16 numbers and more keep
// scales of their own.
#pragma once
#include <algorithm>

#include "vector.h"

namespace codes {

// Numbers of a group, and its bytes.
constexpr int64_t size_of(int64_t bits) { return bits == 8 ? 32 : 64; }
constexpr bool in_planes(int64_t bits) { return bits != 4 && bits < 8; }
template <int bits>
constexpr int64_t kBytes = size_of(bits) * bits / 8;

// One group of an input row, rounded: where weights have less than 8 bits the even numbers come before the odd, as they
// lie in a byte's halves.
template <int bits>
struct alignas(32) Group {
  static constexpr int64_t kSize = size_of(bits);
  int8_t code[kSize];
};

// Inputs of weights of 2 to 6 bits are alike.
template <int bits>
using Input = Group<bits == 8 ? 8 : 4>;

// The lowest bit of a number that its plane of 1 or 2 bits holds.
template <int bits, int plane>
constexpr int kPlace = bits & (plane == 2 ? 4 : 6);

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

// Bits of each byte, moved to another place; `from`, `to` are of the lowest of `count`.
inline __m256i moved(__m256i x, int from, int to, int count) {
  typedef uint16_t twos __attribute__((vector_size(32)));
  twos y = (twos)x;
  y = to > from ? y << (to - from) : y >> (from - to);
  return _mm256_and_si256((__m256i)y, _mm256_set1_epi8(char(((1 << count) - 1) << to)));
}

// The even numbers of a group, and the odd ones.
template <int bits>
inline void unpack(const uint8_t* at, __m256i& even, __m256i& odd) {
  even = odd = _mm256_setzero_si256();
  if (bits & 4) {
    __m256i both = bytes(at), low = _mm256_set1_epi8(15);
    even = _mm256_and_si256(both, low), odd = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
    at += 32;
  }
  if (bits & 2) {
#if defined(__AVX512VBMI__) && defined(__AVX512VL__)
    __m256i two = _mm256_cvtepu32_epi64(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
    // For each byte eight bits from one on (modulo 64), of which two are its own.
    auto pairs = [&](__m256i x, int bit) {
      const int64_t from = 0x1c1814100c080400 + 0x0101010101010101 * (64 + bit);
      __m256i each = _mm256_multishift_epi64_epi8(_mm256_set1_epi64x(from), two);
      return _mm256_ternarylogic_epi32(each, _mm256_set1_epi8(3 << kPlace<bits, 2>), x, 0xea);  // each & 3.. | x
    };
    even = pairs(even, -kPlace<bits, 2>), odd = pairs(odd, 2 - kPlace<bits, 2>);
#else
    __m256i two = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
    two = _mm256_or_si256(two, _mm256_slli_epi16(two, 4));  // the second pair of a byte is in one of its own
    even = _mm256_or_si256(even, moved(two, 0, kPlace<bits, 2>, 2));
    odd = _mm256_or_si256(odd, moved(two, 2, kPlace<bits, 2>, 2));
#endif
    at += 16;
  }
  if (bits & 1) {
    int64_t eight;
    std::memcpy(&eight, at, sizeof eight);
#if defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__BMI2__)
    const __m256i high = _mm256_set1_epi8(1 << kPlace<bits, 1>);
    even = _mm256_mask_add_epi8(even, uint32_t(_pext_u64(eight, 0x5555555555555555)), even, high);
    odd = _mm256_mask_add_epi8(odd, uint32_t(_pext_u64(eight, 0xaaaaaaaaaaaaaaaa)), odd, high);
#else
    const __m256i each = _mm256_setr_epi8(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3,  //
                                          4, 4, 4, 4, 5, 5, 5, 5, 6, 6, 6, 6, 7, 7, 7, 7);
    const __m256i own = _mm256_set1_epi32(0x40100401), high = _mm256_set1_epi8(1 << kPlace<bits, 1>);
    __m256i one = _mm256_shuffle_epi8(_mm256_set1_epi64x(eight), each);
    auto set = [&](__m256i bit) { return _mm256_and_si256(_mm256_cmpeq_epi8(_mm256_and_si256(one, bit), bit), high); };
    even = _mm256_or_si256(even, set(own));
    odd = _mm256_or_si256(odd, set(_mm256_slli_epi32(own, 1)));
#endif
  }
}

template <int bits>
inline i8 multiply(const uint8_t* weight, const Group<4>& x) {
  __m256i even, odd;
  unpack<bits>(weight, even, odd);
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
  return (i8)fours(fours(_mm256_setzero_si256(), even, bytes(x.code)), odd, bytes(x.code + 32));
#else  // two by two they stay below 2^15
  __m256i twos = _mm256_add_epi16(_mm256_maddubs_epi16(even, bytes(x.code)), _mm256_maddubs_epi16(odd, bytes(x.code + 32)));
  return (i8)_mm256_madd_epi16(twos, _mm256_set1_epi16(1));
#endif
}

template <int>
inline i8 multiply(const uint8_t* weight, const Group<8>& x) {  // 8-bit weights lie 128 higher than they are
  __m256i w = _mm256_xor_si256(bytes(weight), _mm256_set1_epi8(-128));
  return (i8)fours(_mm256_setzero_si256(), _mm256_abs_epi8(w), _mm256_sign_epi8(bytes(x.code), w));
}

#else

template <int bits>
inline i8 multiply(const uint8_t* weight, const Group<4>& x) {
  const uint8_t *two = weight + (bits & 4) * 8, *one = two + (bits & 2) * 8;
  int32_t total[8] = {};
  for (int i = 0; i < 64; ++i) {  // the even numbers, then the odd
    const int j = i % 32, odd = i / 32;
    int32_t code = bits & 4 ? weight[j] >> 4 * odd & 15 : 0;
    if (bits & 2) code |= (two[j / 2] >> (j % 2 * 4 + 2 * odd) & 3) << kPlace<bits, 2>;
    if (bits & 1) code |= (one[j / 4] >> (j % 4 * 2 + odd) & 1) << kPlace<bits, 1>;
    total[j / 4] += code * x.code[i];
  }
  i8 out;
  std::memcpy(&out, total, sizeof out);
  return out;
}

template <int>
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
