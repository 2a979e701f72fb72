// What attention does with a tile of slots: products of a few rows of queries with its keys, and its values mixed by the
// rows' weights. Keys and values are floats, or halves that are widened as they are read, so each byte is read once for
// all rows that go together.
//
// A row's sums have one order, whichever rows go with it: over a key's numbers eight at a time, then over the eight sums
// (`sums8`); over slots one after another. So its bits are the same in every shape of these functions.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "grouped.h"
#include "vector.h"

namespace tiles {

constexpr int kKeys = 8;  // of a tile
#if defined(__AVX512VL__)
constexpr int kRegisters = 32;  // of eight floats
#else
constexpr int kRegisters = 16;
#endif
constexpr int kDotted = kRegisters > 16 ? 8 : 6;  // rows whose products with two keys stay in registers together
constexpr int kMixed = 4;         // rows whose mixed values do
constexpr int64_t kAhead = 8192;  // bytes from what is read to what is asked for

// How many of `rows` go first, so that all go in equal parts of `most` at most.
constexpr int first_of(int rows, int most) {
  int parts = (rows + most - 1) / most;
  return (rows + parts - 1) / parts;
}

// Asks for `count` numbers, so many bytes behind those.
template <typename E>
inline void ask(const E* numbers, int64_t count, int64_t ahead) {
  uintptr_t from = reinterpret_cast<uintptr_t>(numbers) + ahead;
  for (uintptr_t i = 0; i < count * sizeof(E); i += 64) soon(reinterpret_cast<const void*>(from + i));
}

inline v8 wide(const float* p) { return held(p); }
inline v8 wide(const uint16_t* p) { return grouped::halves_at(p); }
inline float one(const float* p) { return *p; }
inline float one(const uint16_t* p) { return grouped::number(*p); }

// The sums of eight vectors' lanes.
inline v8 sums8(const v8* x) {
  v8 a[4], b[2];
  for (int i = 0; i < 4; ++i)
    a[i] = __builtin_shufflevector(x[i], x[i + 4], 0, 1, 2, 3, 8, 9, 10, 11) +
           __builtin_shufflevector(x[i], x[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
  for (int i = 0; i < 2; ++i)
    b[i] = __builtin_shufflevector(a[2 * i], a[2 * i + 1], 0, 8, 1, 9, 4, 12, 5, 13) +
           __builtin_shufflevector(a[2 * i], a[2 * i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
  return __builtin_shufflevector(b[0], b[1], 0, 1, 8, 9, 4, 5, 12, 13) +
         __builtin_shufflevector(b[0], b[1], 2, 3, 10, 11, 6, 7, 14, 15);
}

// Products of N rows with the keys of one tile, of which `count` are there, -> out[n][at..]; the others are those of the
// last key. Keys are read two after two, as they lie, for a processor that sees many streams looks ahead in none; later
// ones are asked for on the way, `ahead` bytes behind those (0: nothing is).
template <int N, typename E>
inline void products(const float* const* q, const E* keys, int64_t D, int64_t count, int64_t ahead, float* const* out,
                     int64_t at) {
  constexpr int some = first_of(N, kDotted);
  v8 acc[some][kKeys];
  float left[some][kKeys] = {};
  int64_t whole = D / 8 * 8;
  for (int64_t i = 0; i < kKeys; i += 2) {
    const E *key = keys + std::min(i, count - 1) * D, *next = keys + std::min(i + 1, count - 1) * D;
    if (ahead) ask(key, D, ahead), ask(next, D, ahead);
    v8 first[some] = {}, second[some] = {};
    for (int64_t d = 0; d < whole; d += 8) {
      v8 y = wide(key + d), z = wide(next + d);
      for (int n = 0; n < some; ++n) {
        v8 x = held(q[n] + d);
        first[n] = fused(x, y, first[n]), second[n] = fused(x, z, second[n]);
      }
    }
    for (int n = 0; n < some; ++n) acc[n][i] = first[n], acc[n][i + 1] = second[n];
    for (int64_t e = whole; e < D; ++e)
      for (int n = 0; n < some; ++n) {
        left[n][i] = std::fma(q[n][e], one(key + e), left[n][i]);
        left[n][i + 1] = std::fma(q[n][e], one(next + e), left[n][i + 1]);
      }
  }
  for (int n = 0; n < some; ++n) {
    v8 total = sums8(acc[n]);
    store(out[n] + at, whole < D ? total + load(left[n]) : total);
  }
  if constexpr (N > some) products<N - some>(q + some, keys, D, count, 0, out + some, at);
}

// out[n][w] += sum_j p[n][j] v[j][w] over `count` slots, for V vectors of columns from w on.
template <int N, int V, typename E>
inline void columns(const float* const* p, const E* v, int64_t W, int64_t count, int64_t ahead, float* const* out,
                    int64_t w) {
  v8 acc[N][V];
  for (int n = 0; n < N; ++n)
    for (int i = 0; i < V; ++i) acc[n][i] = load(out[n] + w + 8 * i);
  for (int64_t j = 0; j < count; ++j, v += W) {
    if (ahead) ask(v, W, ahead);
    for (int i = 0; i < V; ++i) {
      v8 value = wide(v + w + 8 * i);
      for (int n = 0; n < N; ++n) acc[n][i] = fused(all(p[n][j]), value, acc[n][i]);
    }
  }
  for (int n = 0; n < N; ++n)
    for (int i = 0; i < V; ++i) store(out[n] + w + 8 * i, acc[n][i]);
}

// The same from column w on, V vectors at a time, then half as many; the first column that is left.
template <int N, int V, typename E>
inline int64_t runs(const float* const* p, const E* v, int64_t W, int64_t count, int64_t ahead, float* const* out,
                    int64_t w) {
  for (; w + 8 * V <= W; w += 8 * V) columns<N, V>(p, v, W, count, w ? 0 : ahead, out, w);
  if constexpr (V > 1) return runs<N, V / 2>(p, v, W, count, ahead, out, w);
  return w;
}

// Values [count, W] mixed by the weights p of N rows, added to out. Where they are gone over several times, all are asked
// for first, as they lie.
template <int N, typename E>
inline void mix(const float* const* p, const E* values, int64_t W, int64_t count, int64_t ahead, float* const* out) {
  constexpr int some = first_of(N, kMixed), V = some * 8 <= kRegisters - 8 ? 8 : some * 4 <= kRegisters - 4 ? 4 : 2;
  if (ahead && (N > some || W > 8 * V)) ask(values, count * W, 0);
  int64_t w = runs<some, V>(p, values, W, count, ahead, out, 0);
  for (; w < W; ++w)
    for (int n = 0; n < some; ++n)
      for (int64_t j = 0; j < count; ++j) out[n][w] = std::fma(p[n][j], one(values + j * W + w), out[n][w]);
  if constexpr (N > some) mix<N - some>(p + some, values, W, count, 0, out + some);
}

}  // namespace tiles
