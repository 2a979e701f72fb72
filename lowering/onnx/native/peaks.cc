// What a thread of this processor does at most: bytes read, and products in registers that wait for nothing. They are
// what `accel-compile bench` measures against.
#include <initializer_list>

#include "vector.h"
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr int kChains = 12;  // sums beside each other: as many as an instruction's latency times those begun at once

// The compiler must not know a value, nor compute ahead what is done with it.
template <typename T>
inline void unknown(T& x) {
#if defined(__x86_64__)
  asm volatile("" : "+x"(x));
#elif defined(__aarch64__)
  asm volatile("" : "+w"(x));
#endif
}

#if defined(__AVX512BW__)
typedef __m512i Bytes;
inline Bytes ones() { return _mm512_set1_epi8(1); }
inline Bytes multiplied(Bytes sum, Bytes a, Bytes b) {
#if defined(__AVX512VNNI__)
  return _mm512_dpbusd_epi32(sum, a, b);
#else
  return _mm512_add_epi32(sum, _mm512_madd_epi16(_mm512_maddubs_epi16(a, b), _mm512_set1_epi16(1)));
#endif
}
#elif defined(__AVX2__)
typedef __m256i Bytes;
inline Bytes ones() { return _mm256_set1_epi8(1); }
inline Bytes multiplied(Bytes sum, Bytes a, Bytes b) {
#if defined(__AVXVNNI__)
  return _mm256_dpbusd_avx_epi32(sum, a, b);
#else
  return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(a, b), _mm256_set1_epi16(1)));
#endif
}
#elif defined(__ARM_FEATURE_DOTPROD)
typedef int8x16_t Bytes;
inline Bytes ones() { return vdupq_n_s8(1); }
inline Bytes multiplied(Bytes sum, Bytes a, Bytes b) {
  return vreinterpretq_s8_s32(vdotq_s32(vreinterpretq_s32_s8(sum), a, b));
}
#else
#define NO_BYTES
#endif

#if defined(__AVX512F__)
typedef __m512 Floats;
inline Floats halves_of_one() { return _mm512_set1_ps(0.5f); }
inline Floats multiplied(Floats sum, Floats a, Floats b) { return _mm512_fmadd_ps(a, b, sum); }
#elif defined(__FMA__)
typedef v8 Floats;
inline Floats halves_of_one() { return all(0.5f); }
inline Floats multiplied(Floats sum, Floats a, Floats b) { return fused(a, b, sum); }
#else
typedef v4 Floats;
inline Floats halves_of_one() { return v4{0.5f, 0.5f, 0.5f, 0.5f}; }
inline Floats multiplied(Floats sum, Floats a, Floats b) {
#if defined(__aarch64__)
  return (v4)vfmaq_f32((float32x4_t)sum, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + sum;
#endif
}
#endif

template <typename T>
void multiply(T a, int64_t loops) {
  T b = a, sums[kChains];
  for (T& sum : sums) sum = a;
  for (int64_t i = 0; i < loops; ++i) {
    unknown(a);
#if defined(__clang__)
#pragma clang loop unroll(full)
#else
#pragma GCC unroll 12
#endif
    for (int c = 0; c < kChains; ++c) sums[c] = multiplied(sums[c], a, b);
  }
  for (T& sum : sums) unknown(sum);
}

}  // namespace

// Products of bytes, summed in 32 bits; how many, or 0 where the processor has no instruction for them.
EXPORT int64_t accel_multiply_int8([[maybe_unused]] int64_t loops) {
#if defined(NO_BYTES)
  return 0;
#else
  multiply(ones(), loops);
  return loops * kChains * int64_t(sizeof(Bytes));
#endif
}

// Products of floats, each added to a sum; how many.
EXPORT int64_t accel_multiply_float32(int64_t loops) {
  multiply(halves_of_one(), loops);
  return loops * kChains * int64_t(sizeof(Floats) / sizeof(float));
}

// Reads `count` bytes, up to a multiple of 256, and gives the sum of their words, so that they are needed. Both halves
// are read beside each other, which keeps more of memory busy.
EXPORT int64_t accel_read(const char* from, int64_t count) {
  typedef int64_t Words __attribute__((vector_size(64)));
  Words sums[4] = {};
  int64_t half = count / 256 * 128;
  for (int64_t at = 0; at < half; at += 128)
    for (int i = 0; i < 4; ++i) {
      Words words;
      std::memcpy(&words, from + at + (i / 2) * half + (i % 2) * 64, sizeof words);
      sums[i] += words;
    }
  Words all_of = sums[0] + sums[1] + sums[2] + sums[3];
  int64_t total = 0;
  for (int i = 0; i < 8; ++i) total += all_of[i];
  return total;
}
