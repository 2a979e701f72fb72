// Eight weight rows of 4 bits, turned so that a vector holds the same four numbers of each of them: what a
// number of the input meets is then added up without sums across a vector, and unpacked once for all rows.
#pragma once
#if defined(__AVX2__)
#include "codes.h"

namespace codes {

constexpr int64_t kWide = 8;  // weight rows of a strip

struct Strip {
  std::vector<char> room;
  std::vector<float> scales, zeros;  // [blocks, 8]; zeros: times the scales
  std::vector<float> offsets;        // [blocks, 8], where there are some
  __m256i* numbers;                  // [groups, 16]: the even ones of a group, then the odd

  void reserve(int64_t groups, int64_t blocks) {
    room.resize(groups * 16 * sizeof(__m256i) + 32);
    numbers = reinterpret_cast<__m256i*>((reinterpret_cast<uintptr_t>(room.data()) + 31) / 32 * 32);
    scales.resize((blocks + 8) * kWide);
    zeros.resize((blocks + 8) * kWide);
  }
};

// One group of each row -> sixteen vectors.
inline void turn(const uint8_t* const* rows, int64_t at, __m256i* out) {
  __m256i r[8], s[8];
  for (int i = 0; i < 8; ++i) r[i] = bytes(rows[i] + at);
  for (int i = 0; i < 8; i += 2) {
    s[i] = _mm256_unpacklo_epi32(r[i], r[i + 1]);
    s[i + 1] = _mm256_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 8; i += 4)
    for (int j = 0; j < 2; ++j) {
      r[i + 2 * j] = _mm256_unpacklo_epi64(s[i + j], s[i + j + 2]);
      r[i + 2 * j + 1] = _mm256_unpackhi_epi64(s[i + j], s[i + j + 2]);
    }
  auto part = [&](__m256i both, int i) {
    __m256i low = _mm256_set1_epi8(15);
    out[i] = _mm256_and_si256(both, low);
    out[8 + i] = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
  };
  for (int i = 0; i < 4; ++i) {  // the last argument is to be a constant, also where nothing is unrolled
    part(_mm256_permute2x128_si256(r[i], r[i + 4], 0x20), i);
    part(_mm256_permute2x128_si256(r[i], r[i + 4], 0x31), 4 + i);
  }
}

inline __m256i four(const int8_t* code) {
  int32_t x;
  std::memcpy(&x, code, sizeof x);
  return _mm256_set1_epi32(x);
}

// Adds up the products of vectors [first, first + count) with N rows' numbers; count is at most 8, so that
// sums of two products stay below 2^15.
template <int N>
inline void add(const __m256i* w, const int8_t* const* x, int first, int count, __m256i* sums) {
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
  for (int i = first; i < first + count; ++i)
    for (int n = 0; n < N; ++n) sums[n] = fours(sums[n], w[i], four(x[n] + 4 * i));
#else
  __m256i twos[N];
  for (int n = 0; n < N; ++n) twos[n] = _mm256_maddubs_epi16(w[first], four(x[n] + 4 * first));
  for (int i = first + 1; i < first + count; ++i)
    for (int n = 0; n < N; ++n)
      twos[n] = _mm256_add_epi16(twos[n], _mm256_maddubs_epi16(w[i], four(x[n] + 4 * i)));
  for (int n = 0; n < N; ++n)
    sums[n] = _mm256_add_epi32(sums[n], _mm256_madd_epi16(twos[n], _mm256_set1_epi16(1)));
#endif
}

// N input rows times a strip -> out[n]. EACH: blocks of a group; 0: a block of 2^shift groups.
template <int N, int EACH>
void multiply(const Strip& strip, const Group<4>* const* x, const float* const* steps, const float* const* totals,
              int64_t groups, int64_t blocks, int64_t shift, v8* out) {
  constexpr int E = EACH ? EACH : 1, part = 8 / E;
  v8 total[N] = {};
  for (int64_t g = 0; g < groups; ++g) {
    const __m256i* w = strip.numbers + 16 * g;
    const int8_t* code[N];
    for (int n = 0; n < N; ++n) code[n] = x[n][g].code;
    for (int e = 0; e < E && (E == 1 || g * E + e < blocks); ++e) {
      __m256i sums[N];
      for (int n = 0; n < N; ++n) sums[n] = _mm256_setzero_si256();
      add<N>(w, code, e * part, part, sums);
      add<N>(w, code, 8 + e * part, part, sums);
      int64_t b = EACH ? g * E + e : g >> shift;
      bool last = EACH || g + 1 == groups || (g + 1) >> shift != b;  // what is taken off is of the whole block
      v8 scale = load(strip.scales.data() + b * kWide), zero = load(strip.zeros.data() + b * kWide);
      for (int n = 0; n < N; ++n) {
        total[n] = fused((v8)_mm256_cvtepi32_ps(sums[n]), scale * all(steps[n][b]), total[n]);
        if (last) total[n] = fused(zero, all(-totals[n][b]), total[n]);
      }
    }
  }
  for (int n = 0; n < N; ++n) out[n] = total[n];
}

}  // namespace codes
#endif
