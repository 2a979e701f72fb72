// Eight floats at a time, in the compiler's own vectors: AVX2, AVX-512 or NEON alike.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__FMA__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

typedef float v8 __attribute__((vector_size(32)));
typedef float v4 __attribute__((vector_size(16)));
typedef int32_t i8 __attribute__((vector_size(32)));

static inline v8 load(const float* p) {
  v8 x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
// The same, into a register: compilers may else read memory anew for each use.
static inline v8 held(const float* p) {
  v8 x = load(p);
#if defined(__AVX512VL__)
  asm("" : "+v"(x));  // any of 32
#elif defined(__AVX2__)
  asm("" : "+x"(x));
#endif
  return x;
}
// Eight bfloat16: the upper halves of floats.
static inline v8 widened(const uint16_t* p) {
  typedef uint16_t u8 __attribute__((vector_size(16)));
  u8 upper;
  std::memcpy(&upper, p, sizeof upper);
  i8 bits = __builtin_convertvector(upper, i8) << 16;
  v8 x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}
static inline float widened_one(const uint16_t* p) {
  uint32_t bits = uint32_t(*p) << 16;
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}
// Ask for memory before it is needed, into the second cache, for the first one is small. The empty asm is there because
// compilers take a function that does nothing else for one without effect, and drop its calls.
static inline void soon(const void* p) {
  asm volatile("" : : "r"(p));
  __builtin_prefetch(p, 0, 2);
}
static inline void store(float* p, v8 x) { std::memcpy(p, &x, sizeof x); }
static inline v8 all(float x) { return v8{x, x, x, x, x, x, x, x}; }
static inline i8 all(int32_t x) { return i8{x, x, x, x, x, x, x, x}; }

// x y + z with one rounding. Written out, and -ffp-contract=off elsewhere, because compilers differ from
// place to place in what they fuse, and then equal rows would get unequal bits.
static inline v8 fused(v8 x, v8 y, v8 z) {
#if defined(__FMA__)
  return (v8)_mm256_fmadd_ps((__m256)x, (__m256)y, (__m256)z);
#elif defined(__aarch64__)
  float32x4_t a[2], b[2], c[2];
  std::memcpy(a, &x, sizeof x), std::memcpy(b, &y, sizeof y), std::memcpy(c, &z, sizeof z);
  for (int i = 0; i < 2; ++i) c[i] = vfmaq_f32(c[i], a[i], b[i]);
  std::memcpy(&z, c, sizeof z);
  return z;
#else
  return x * y + z;
#endif
}

static inline v4 halves(v8 x) {
  return __builtin_shufflevector(x, x, 0, 1, 2, 3) + __builtin_shufflevector(x, x, 4, 5, 6, 7);
}

// The sums of four vectors' lanes.
static inline v4 sums(v8 a, v8 b, v8 c, v8 d) {
  v4 p = halves(a), q = halves(b), r = halves(c), s = halves(d);
  v4 x = __builtin_shufflevector(p, q, 0, 4, 1, 5) + __builtin_shufflevector(p, q, 2, 6, 3, 7);
  v4 y = __builtin_shufflevector(r, s, 0, 4, 1, 5) + __builtin_shufflevector(r, s, 2, 6, 3, 7);
  return __builtin_shufflevector(x, y, 0, 1, 4, 5) + __builtin_shufflevector(x, y, 2, 3, 6, 7);
}

static inline float sum(v8 x) {
  v4 h = halves(x);
  return (h[0] + h[2]) + (h[1] + h[3]);
}

static inline float largest(v8 x) {
  float most = x[0];
  for (int i = 1; i < 8; ++i) most = most < x[i] ? x[i] : most;
  return most;
}

// exp(x) for x <= 0, within 2 units in the last place; below -87 it is 0.
static inline v8 exponential(v8 x) {
  i8 gone = x < all(-87.0f);
  x = gone ? all(-87.0f) : x;
  v8 shifted = fused(x, all(1.44269504f), all(12582912.0f));  // 1.5 * 2^23 rounds to a whole number
  v8 n = shifted - all(12582912.0f);
  v8 r = fused(n, all(-0.693359375f), x);
  r = fused(n, all(2.12194440e-4f), r);
  v8 y = all(1.9875691500e-4f);
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    y = fused(y, r, all(c));
  y = fused(y * r, r, r) + all(1.0f);
  i8 power = (__builtin_convertvector(n, i8) + all(127)) << 23;
  v8 scale;
  std::memcpy(&scale, &power, sizeof scale);
  v8 zero = {};
  return gone ? zero : y * scale;
}

// log(x) of x that is no denormal number, within 2 units in the last place; 0 and less: about -87
static inline v8 logarithm(v8 x) {
  v8 least = all(1.17549435e-38f);
  x = x < least ? least : x;
  i8 bits;
  std::memcpy(&bits, &x, sizeof bits);
  v8 e = __builtin_convertvector((bits >> 23) - all(126), v8);
  bits = (bits & all(0x007fffff)) | all(0x3f000000);
  v8 m;
  std::memcpy(&m, &bits, sizeof m);  // 0.5 to 1
  i8 low = m < all(0.707106781f);
  e = low ? e - all(1.0f) : e;
  m = low ? m + m - all(1.0f) : m - all(1.0f);
  v8 z = m * m, y = all(7.0376836292e-2f);
  for (float c : {-1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f, 1.4249322787e-1f, -1.6668057665e-1f,
                  2.0000714765e-1f, -2.4999993993e-1f, 3.3333331174e-1f})
    y = fused(y, m, all(c));
  y = fused(e, all(-2.12194440e-4f), y * m * z);
  v8 r = m + fused(z, all(-0.5f), y);
  r = fused(e, all(0.693359375f), r);
  return x != x ? x : r;
}

// tanh
static inline v8 hyperbolic(v8 x) {
  v8 size = x < all(0.0f) ? -x : x;
  v8 e = exponential(size * all(-2.0f));
  v8 y = (all(1.0f) - e) / (all(1.0f) + e);
  return x < all(0.0f) ? -y : y;
}

static inline v8 silu(v8 x) {
  v8 e = exponential(x < all(0.0f) ? x : -x), one = all(1.0f);
  return x * (x < all(0.0f) ? e : one) / (one + e);
}

static inline v8 gelu(v8 x) {
  for (int i = 0; i < 8; ++i) x[i] = 0.5f * x[i] * (1 + std::erf(x[i] * 0.70710678f));
  return x;
}

static inline v8 gelu_tanh(v8 x) {
  v8 half = all(0.5f) * x, inner = fused(x * x * x, all(0.044715f), x) * all(0.7978845608f);
  return fused(half, hyperbolic(inner), half);
}

// Eight rows of eight, `stride` apart, become eight columns one after another.
static inline void transpose(const float* in, int64_t stride, float* out) {
  v8 r[8], s[8];
  for (int i = 0; i < 8; ++i) r[i] = load(in + i * stride);
  for (int i = 0; i < 8; i += 2) {
    s[i] = __builtin_shufflevector(r[i], r[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
    s[i + 1] = __builtin_shufflevector(r[i], r[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
  }
  for (int i = 0; i < 8; i += 4)
    for (int j = 0; j < 2; ++j) {
      r[i + 2 * j] = __builtin_shufflevector(s[i + j], s[i + j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
      r[i + 2 * j + 1] = __builtin_shufflevector(s[i + j], s[i + j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    }
  for (int i = 0; i < 4; ++i) {
    store(out + 8 * i, __builtin_shufflevector(r[i], r[i + 4], 0, 1, 2, 3, 8, 9, 10, 11));
    store(out + 8 * (i + 4), __builtin_shufflevector(r[i], r[i + 4], 4, 5, 6, 7, 12, 13, 14, 15));
  }
}
