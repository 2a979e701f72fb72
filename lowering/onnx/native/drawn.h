// How much attention each slot draws, as attention is computed: the weights of a block of rows are kept chunk by chunk,
// relative to the largest of the chunk, and added up once the row's sum is known.
//
// With a temperature a softmax of its own is added up instead, of scores with noise: a hash of layer, head and the two
// positions, as accel.ir.ops.noise has it.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "abi.h"
#include "slots.h"
#include "vector.h"

namespace drawn {

using slots::kChunk;

constexpr uint64_t kPrime = (uint64_t(1) << 31) - 1;
constexpr float kNone = -std::numeric_limits<float>::infinity();

typedef uint64_t u4 __attribute__((vector_size(32)));
typedef int32_t i4 __attribute__((vector_size(16)));

// The same number modulo the prime, of fewer bits.
template <typename T>
inline T fold(T x) {
  return (x & kPrime) + (x >> 31);
}

// Products of numbers of 32 bits.
inline u4 times(u4 x, u4 y) {
#if defined(__AVX2__)
  return (u4)_mm256_mul_epu32((__m256i)x, (__m256i)y);
#else
  return x * y;
#endif
}

// A hash and one more number of it.
inline uint64_t mixed(uint64_t found, int64_t number) {
  found = (found * 48271 + uint64_t(number + 1) % kPrime) % kPrime;
  return (found * found + 12345) % kPrime;
}

// The hash of so many numbers, with four more of them, one each; mixed for the last time.
inline u4 hashed(uint64_t before, i4 numbers) {
  u4 x = fold(__builtin_convertvector(numbers + 1, u4) + before * 48271);
  x = fold(fold(times(x, x) + 12345));
  for (int i = 0; i < 2; ++i) {
    x = fold(times(x, u4{69621, 69621, 69621, 69621}) + 1);
    x = fold(fold(times(x, x) + 6789));
  }
  x = fold(x);
  return x == kPrime ? u4{} : x;
}

// Gumbel noise of eight keys at these positions.
inline v8 gumbel(uint64_t before, const int32_t* positions) {
  i4 low, high;
  std::memcpy(&low, positions, sizeof low), std::memcpy(&high, positions + 4, sizeof high);
  i8 both = __builtin_shufflevector((i8)hashed(before, low), (i8)hashed(before, high), 0, 2, 4, 6, 8, 10, 12, 14);
  v8 x = (__builtin_convertvector(both, v8) + all(0.5f)) * all(1.0f / 2147483648.0f);
  v8 least = all(1e-9f), most = all(float(1 - 1e-7));
  x = x < least ? least : x > most ? most : x;
  return -logarithm(-logarithm(x));
}

struct Settings {
  float noise;
  int64_t seed;
};

// Of a row: where its weights of a chunk go, and their largest and their sum; null where nothing is asked.
struct Row {
  float *weights, *top, *total;
  uint64_t hash;
  float colder;  // 1/temperature; 0: the weights of attention
};

struct Draw {
  Settings set;
  abi::Tensor share, temperature, layer;
  float* out;                   // [B G, slots]; null: nothing is asked
  int64_t slots, chunks, lanes;  // lanes: how many add up a pair's rows, each by itself
  std::vector<float> sums;      // [B G, lanes, slots], where there are several
  std::vector<float> weights, tops, totals;  // of all rows, where keys are split: [rows, chunks, kChunk], [rows, chunks]

  bool asked() const { return out != nullptr; }

  // A row whose chunk i is gone through, number r of those of `weights`, `tops` and `totals`.
  Row row(float* weights, float* tops, float* totals, int64_t r, int64_t i) const {
    return {weights + (r * chunks + i) * kChunk, tops + r * chunks + i, totals + r * chunks + i, 0, 0};
  }
  // How a head's query at a position is heard.
  void tune(Row& row, int64_t b, int64_t head, int64_t position) const {
    if (!temperature.data) return;
    row.colder = 1 / temperature.as<float>()[b];
    if (set.noise == 0) return;
    row.hash = mixed(mixed(mixed(set.seed % kPrime, *layer.as<int64_t>()), head + 1), position);
  }
  float* lane(int64_t pair, int64_t which) {
    return lanes == 1 ? out + pair * slots : sums.data() + (pair * lanes + which) * slots;
  }
  void join(int64_t pairs) {
    for (int64_t pair = 0; pair < pairs && lanes > 1; ++pair) {
      std::copy_n(lane(pair, 0), slots, out + pair * slots);
      for (int64_t i = 1; i < lanes; ++i)
        for (int64_t j = 0; j < slots; ++j) out[pair * slots + j] += lane(pair, i)[j];
    }
  }
};

// Scores [count] of a row's chunk with noise, cooled -> their weights, kept. Minus infinity is hidden.
inline void keep_noisy(const Row& row, float noise, const float* s, const int32_t* positions, int64_t count) {
  v8 high = all(kNone), total = {};
  for (int64_t j = 0; j < count; j += 8) {
    v8 x = load(s + j), z = x;
    if (noise != 0) z = fused(all(noise), gumbel(row.hash, positions + j), z);
    z = x == all(kNone) ? x : z * all(row.colder);
    store(row.weights + j, z);
    high = z > high ? z : high;
  }
  *row.top = largest(high);
  for (int64_t j = 0; j < count; j += 8) {
    v8 p = exponential(load(row.weights + j) - all(*row.top == kNone ? 0.0f : *row.top));
    store(row.weights + j, p);
    total += p;
  }
  *row.total = sum(total);
}

// The same of weights that attention has.
inline void keep(const Row& row, const float* p, float top, float total, int64_t count) {
  std::copy(p, p + count, row.weights);
  *row.top = top, *row.total = total;
}

// What a row of which attention knows [largest score, sum] divides its weights by.
struct Whole {
  float top, total;
};

inline Whole whole_of(const Draw& d, const float* tops, const float* totals, Whole attention) {
  if (!d.temperature.data) return attention;
  Whole w = {kNone, 0};
  for (int64_t i = 0; i < d.chunks; ++i) w.top = std::max(w.top, tops[i]);
  for (int64_t i = 0; i < d.chunks; ++i)
    if (tops[i] != kNone || std::isnan(totals[i]))
      w.total += totals[i] * (tops[i] == kNone ? 1.0f : std::exp(tops[i] - w.top));
  return w;
}

// Adds up `count` rows' weights, a chunk of slots after another. where(i): the first slot of chunk i and how many it has.
template <typename F>
void add(const Draw& d, const float* weights, const float* tops, const float* totals, const float* shares,
         const Whole* attention, int64_t count, F where, float* out) {
  thread_local std::vector<Whole> whole;
  whole.clear();
  for (int64_t r = 0; r < count; ++r) {
    whole.push_back(whole_of(d, tops + r * d.chunks, totals + r * d.chunks, attention[r]));
    if (shares[r] != 0 && std::isnan(whole[r].total))
      for (int64_t j = 0; j < d.slots; ++j) out[j] = whole[r].total;
  }
  for (int64_t i = 0; i < d.chunks; ++i) {
    auto [first, some] = where(i);
    for (int64_t r = 0; r < count; ++r) {
      float top = tops[r * d.chunks + i];
      if (shares[r] == 0 || top == kNone || !(whole[r].total > 0)) continue;
      float each = shares[r] * std::exp(top - whole[r].top) / whole[r].total;
      const float* p = weights + (r * d.chunks + i) * kChunk;
      int64_t j = 0;
      for (; j + 8 <= some; j += 8) store(out + first + j, fused(load(p + j), all(each), load(out + first + j)));
      for (; j < some; ++j) out[first + j] = std::fma(p[j], each, out[first + j]);
    }
  }
}

}  // namespace drawn
