// Weight rows turned, so that a vector holds the same four numbers of each of them: what a number of the input meets
// is then added up without sums across a vector, and unpacked once for all input rows.
//
// A strip is a part of as many weight rows as a vector has sums: 16 with AVX-512 VNNI, else 8. The vectors of a group
// follow each other: of 8 bits they are the numbers in their order, else the even ones of the group before the odd.
#pragma once
#if defined(__AVX2__)
#include "codes.h"

// Registers hold what is turned and summed only where everything that has a hand in it is in one place, unrolled.
#define ACCEL_UNROLL _Pragma("GCC unroll 16")
#define ACCEL_INLINE inline __attribute__((always_inline))

namespace codes {

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define ACCEL_WIDE_STRIPS 1
typedef __m512i Numbers;
typedef float Floats __attribute__((vector_size(64)));
constexpr int kRows = 8;  // input rows that are multiplied together, at most
#else
#define ACCEL_WIDE_STRIPS 0
typedef __m256i Numbers;
typedef v8 Floats;
constexpr int kRows = 4;
#endif
constexpr int64_t kWide = sizeof(Floats) / sizeof(float);  // weight rows of a strip

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
#define ACCEL_VNNI 1
#else
#define ACCEL_VNNI 0
#endif

// Numbers lie higher than they are, and what that adds is taken off the sums as a whole number. Where products of bytes
// are summed in 16 bits, those of 8 bits would not fit, and signed ones are kept.
constexpr int32_t above_of(int64_t bits) { return bits < 8 ? 1 << (bits - 1) : ACCEL_VNNI ? 128 : 0; }

template <int bits>
constexpr int kVectors = Input<bits>::kSize / 4;  // of a group

struct Strip {
  const uint8_t* rows[kWide];  // of the weight, as they lie in the file
  int64_t next;                // bytes from them to those of the next strip
  Numbers* numbers;            // the same, turned: [groups, kVectors]
  float *scales, *zeros;       // [blocks, kWide]; zeros: times the scales, negative; or null
  float* offsets;              // [blocks, kWide], or null
  std::vector<char> room;
  std::vector<uint8_t> last;
  std::vector<float> tables[3], apart;  // apart: numbers of blocks, row by row

  void reserve(int64_t vectors) {
    const size_t size = sizeof(Numbers), bytes = (vectors + 1) * size;
    if (room.size() < bytes) room.resize(bytes);
    numbers = reinterpret_cast<Numbers*>((reinterpret_cast<uintptr_t>(room.data()) + size - 1) / size * size);
  }

  float* table(int i, int64_t blocks) {
    if (int64_t(tables[i].size()) < blocks * kWide) tables[i].resize(blocks * kWide);
    return tables[i].data();
  }
};

inline Floats wide(const float* p) {
  Floats x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
inline void put(float* p, Floats x) { std::memcpy(p, &x, sizeof x); }

#if ACCEL_WIDE_STRIPS

inline Floats every(float x) { return (Floats)_mm512_set1_ps(x); }
inline Floats added(Floats x, Floats y, Floats z) { return (Floats)_mm512_fmadd_ps((__m512)x, (__m512)y, (__m512)z); }
inline Floats as_floats(Numbers x) { return (Floats)_mm512_cvtepi32_ps(x); }
inline Numbers every(int32_t x) { return _mm512_set1_epi32(x); }
inline Numbers products(Numbers sums, Numbers x, Numbers y) { return _mm512_dpbusd_epi32(sums, x, y); }
inline Numbers below(Numbers x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
inline Numbers above(Numbers x) { return below(_mm512_srli_epi16(x, 4)); }

inline Numbers and_of(Numbers x, Numbers y) { return _mm512_and_si512(x, y); }
inline Numbers ones_of(Numbers x) { return _mm512_min_epu8(x, _mm512_set1_epi8(1)); }  // where bytes are not 0
// Of each four bytes these.
inline Numbers picked(Numbers x, int a, int b, int c, int d) {
  const int32_t first = a | b << 8 | c << 16 | d << 24;
  return _mm512_shuffle_epi8(x, _mm512_broadcast_i32x4(_mm_setr_epi32(first, first + 0x04040404, first + 0x08080808,
                                                                      first + 0x0c0c0c0c)));
}
inline Numbers low_fours(Numbers x, Numbers y) { return _mm512_unpacklo_epi32(x, y); }
inline Numbers high_fours(Numbers x, Numbers y) { return _mm512_unpackhi_epi32(x, y); }
inline Numbers low_eights(Numbers x, Numbers y) { return _mm512_unpacklo_epi64(x, y); }
inline Numbers high_eights(Numbers x, Numbers y) { return _mm512_unpackhi_epi64(x, y); }

// Of rows i, i + 4, i + 8 and i + 12.
template <typename Sixteen>
ACCEL_INLINE Numbers side_by_side(Sixteen sixteen, int i) {
  Numbers x = _mm512_inserti32x4(_mm512_castsi128_si512(sixteen(i)), sixteen(4 + i), 1);
  return _mm512_inserti32x4(_mm512_inserti32x4(x, sixteen(8 + i), 2), sixteen(12 + i), 3);
}

#else

inline Floats every(float x) { return all(x); }
inline Floats added(Floats x, Floats y, Floats z) { return fused(x, y, z); }
inline Floats as_floats(Numbers x) { return (Floats)_mm256_cvtepi32_ps(x); }
inline Numbers every(int32_t x) { return _mm256_set1_epi32(x); }
inline Numbers products(Numbers sums, Numbers x, Numbers y) { return fours(sums, x, y); }
inline Numbers below(Numbers x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
inline Numbers above(Numbers x) { return below(_mm256_srli_epi16(x, 4)); }

inline Numbers and_of(Numbers x, Numbers y) { return _mm256_and_si256(x, y); }
inline Numbers ones_of(Numbers x) { return _mm256_min_epu8(x, _mm256_set1_epi8(1)); }  // where bytes are not 0
// Of each four bytes these.
inline Numbers picked(Numbers x, int a, int b, int c, int d) {
  const int32_t first = a | b << 8 | c << 16 | d << 24;
  return _mm256_shuffle_epi8(x, _mm256_broadcastsi128_si256(_mm_setr_epi32(first, first + 0x04040404,
                                                                           first + 0x08080808, first + 0x0c0c0c0c)));
}
inline Numbers low_fours(Numbers x, Numbers y) { return _mm256_unpacklo_epi32(x, y); }
inline Numbers high_fours(Numbers x, Numbers y) { return _mm256_unpackhi_epi32(x, y); }
inline Numbers low_eights(Numbers x, Numbers y) { return _mm256_unpacklo_epi64(x, y); }
inline Numbers high_eights(Numbers x, Numbers y) { return _mm256_unpackhi_epi64(x, y); }

// Of rows i and i + 4.
template <typename Sixteen>
ACCEL_INLINE Numbers side_by_side(Sixteen sixteen, int i) {
  return _mm256_inserti128_si256(_mm256_castsi128_si256(sixteen(i)), sixteen(4 + i), 1);
}

#endif

// 16 bytes of each row -> four vectors.
ACCEL_INLINE void turn_sixteen(const uint8_t* const* rows, int64_t at, Numbers* out) {
  auto sixteen = [&](int i) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[i] + at)); };
  Numbers r[4], s[4];
  ACCEL_UNROLL for (int i = 0; i < 4; ++i) r[i] = side_by_side(sixteen, i);
  ACCEL_UNROLL for (int i = 0; i < 4; i += 2) s[i] = low_fours(r[i], r[i + 1]), s[i + 1] = high_fours(r[i], r[i + 1]);
  ACCEL_UNROLL for (int i = 0; i < 2; ++i) out[2 * i] = low_eights(s[i], s[i + 2]), out[2 * i + 1] = high_eights(s[i], s[i + 2]);
}

// 32 bytes of each row -> eight vectors.
ACCEL_INLINE void turn_bytes(const uint8_t* const* rows, int64_t at, Numbers* out) {
  turn_sixteen(rows, at, out);
  turn_sixteen(rows, at + 16, out + 4);
}

// The bytes of a group, turned; of a group of 2 to 6 bits its planes: 8, 4 and 2 vectors.
template <int bits>
ACCEL_INLINE void turn_group(const uint8_t* const* rows, int64_t at, Numbers* out) {
  if (bits & 12) turn_bytes(rows, at, out);
  if (bits & 2) turn_sixteen(rows, at + (bits & 4) * 8, out + 8);
  if (bits & 1) {  // with the eight bytes before them: a row may end behind them
    Numbers four[4];
    turn_sixteen(rows, at + kBytes<bits> - 16, four);
    out[12] = four[2], out[13] = four[3];
  }
}

typedef uint16_t Twos __attribute__((vector_size(sizeof(Numbers))));

#if ACCEL_WIDE_STRIPS && defined(__AVX512VBMI__)

// In byte i of each four of a vector: `count` bits of the four from bit first + 2 * count * i on, moved to a place, and
// what `more` has beside them.
template <int count, int place>
ACCEL_INLINE Numbers with_plane(Numbers x, int first, Numbers more) {
  int64_t from = 0;
  ACCEL_UNROLL for (int i = 0; i < 8; ++i)
    from |= int64_t((i / 4 * 32 + first + i % 4 * 2 * count - place) & 63) << 8 * i;
  Numbers each = _mm512_multishift_epi64_epi8(_mm512_set1_epi64(from), x);
  return _mm512_ternarylogic_epi32(each, _mm512_set1_epi8(((1 << count) - 1) << place), more, 0xea);  // each & .. | more
}

#else

template <int count, int place>
ACCEL_INLINE Numbers with_plane(Numbers x, int first, Numbers more) {
  const int byte = first / 8, odd = first % 8 / count;
  Twos own;
  if (count == 2) {
    Twos each = (Twos)picked(x, byte, byte, byte + 1, byte + 1);
    own = (each >> (2 * odd) & 0x0003) | (each >> (2 * odd + 4) & 0x0300);
  } else {
    own = (Twos)ones_of(and_of(picked(x, byte, byte, byte, byte), every(odd ? int32_t(0x80200802) : 0x40100401)));
  }
  return (Numbers)((Twos)more | own << place);
}

#endif

// Vector i of a group of which `turn_group` made these.
template <int bits>
ACCEL_INLINE Numbers unpacked(const Numbers* turned, int i) {
  if (bits < 8) {
    const int j = i % 8, odd = i / 8;
    Numbers x = {};
    if (bits & 4) x = odd ? above(turned[j]) : below(turned[j]);
    if (bits & 2) x = with_plane<2, kPlace<bits, 2>>(turned[8 + j / 2], j % 2 * 16 + 2 * odd, x);
    if (bits & 1) x = with_plane<1, kPlace<bits, 1>>(turned[12 + j / 4], j % 4 * 8 + odd, x);
    return x;
  }
#if ACCEL_VNNI
  return turned[i];
#else
  return _mm256_xor_si256(turned[i], _mm256_set1_epi8(-128));
#endif
}

// Asks memory for group g of the next strip: more rows at once than the processor foresees.
template <int bits>
ACCEL_INLINE void ahead(const Strip& strip, int64_t g) {
  if (g * kBytes<bits> % 64 < kBytes<bits>)  // a line of a cache has several groups
    ACCEL_UNROLL for (int i = 0; i < kWide; ++i)
      __builtin_prefetch(strip.rows[i] + g * kBytes<bits> + strip.next, 0, 2);
}

// One group of each row -> its vectors.
template <int bits>
ACCEL_INLINE void turn(const Strip& strip, int64_t g) {
  Numbers turned[14], *out = strip.numbers + kVectors<bits> * g;
  ahead<bits>(strip, g);
  turn_group<bits>(strip.rows, g * kBytes<bits>, turned);
  ACCEL_UNROLL for (int i = 0; i < kVectors<bits>; ++i) out[i] = unpacked<bits>(turned, i);
}

// Eight floats of each row, from the k-th on -> as many vectors.
ACCEL_INLINE void turn_floats(const float* const* rows, int64_t k, float* out) {
  Numbers turned[8];
  turn_bytes(reinterpret_cast<const uint8_t* const*>(rows), k * sizeof(float), turned);
  ACCEL_UNROLL for (int i = 0; i < 8; ++i) put(out + i * kWide, (Floats)turned[i]);
}

inline int32_t four(const int8_t* code) {
  int32_t x;
  std::memcpy(&x, code, sizeof x);
  return x;
}

// Adds up the products of vectors [first, first + count) of a group with its numbers in N input rows; count is at most
// 8, so that sums of two products of 4 bits stay below 2^15. weight(i): a vector.
template <int bits, int N, typename W>
ACCEL_INLINE void add(W weight, const Input<bits>* x, int first, int count, Numbers* sums) {
  auto number = [&](int n, int i) __attribute__((always_inline)) { return every(four(x[n].code + 4 * i)); };
  if (ACCEL_VNNI || bits == 6) {
    ACCEL_UNROLL for (int i = first; i < first + count; ++i) {
      Numbers w = weight(i);
      ACCEL_UNROLL for (int n = 0; n < N; ++n) sums[n] = products(sums[n], w, number(n, i));
    }
    return;
  }
#if !ACCEL_VNNI
  if (bits == 8) {
    ACCEL_UNROLL for (int i = first; i < first + count; ++i) {
      Numbers w = weight(i), size = _mm256_abs_epi8(w);
      ACCEL_UNROLL for (int n = 0; n < N; ++n)
        sums[n] = products(sums[n], size, _mm256_sign_epi8(number(n, i), w));
    }
    return;
  }
  Numbers twos[N];
  ACCEL_UNROLL for (int i = first; i < first + count; ++i) {
    Numbers w = weight(i);
    ACCEL_UNROLL for (int n = 0; n < N; ++n) {
      Numbers two = _mm256_maddubs_epi16(w, number(n, i));
      twos[n] = i > first ? _mm256_add_epi16(twos[n], two) : two;
    }
  }
  ACCEL_UNROLL for (int n = 0; n < N; ++n)
    sums[n] = _mm256_add_epi32(sums[n], _mm256_madd_epi16(twos[n], _mm256_set1_epi16(1)));
#endif
}

// kRows input rows, from a strip's first group and block on.
template <int bits>
struct Rows {
  const Input<bits>* codes;            // [groups, kRows]
  const float *steps, *totals, *sums;  // [blocks, kRows]; totals, sums: what is times zero points, and offsets
  const int32_t* starts;               // [blocks, kRows]: what the sums of whole numbers begin with
};

// The first N of these rows times a strip of `blocks` blocks, added to out [N, kWide]. EACH: blocks of a group; 0: a
// block of 2^shift groups. kept: whether the strip's numbers lie turned, which pays where it meets several times N rows;
// else each group is turned in registers. Where it is kept, 4 bits stand for less too, and 6 for 5.
template <int bits, int N, int EACH, bool kept>
void multiply(const Strip& strip, const Rows<bits>& x, int64_t blocks, int64_t shift, float* out) {
  constexpr int E = EACH ? EACH : 1, part = 8 / E, V = kVectors<bits>;
  const int64_t each = EACH ? 1 : int64_t(1) << shift;
  Floats total[N];
  ACCEL_UNROLL for (int n = 0; n < N; ++n) total[n] = wide(out + n * kWide);
  for (int64_t b = 0; b < blocks; b += E) {
    Numbers sums[N], turned[14];
    ACCEL_UNROLL for (int e = 0; e < E; ++e) {
      if (e && b + e >= blocks) break;
      const int32_t* starts = x.starts + (b + e) * kRows;
      ACCEL_UNROLL for (int n = 0; n < N; ++n) sums[n] = every(starts[n]);
      for (int64_t g = EACH ? b / E : b << shift, end = g + each; g < end; ++g) {
        const Numbers* w = strip.numbers + V * g;
        if (!kept && !e) {
          ahead<bits>(strip, g);
          turn_group<bits>(strip.rows, g * kBytes<bits>, turned);
        }
        auto weight = [&](int i) __attribute__((always_inline)) { return kept ? w[i] : unpacked<bits>(turned, i); };
        const Input<bits>* codes = x.codes + g * kRows;
        add<bits, N>(weight, codes, e * part, part, sums);
        if (bits < 8) add<bits, N>(weight, codes, 8 + e * part, part, sums);
      }
      Floats scale = wide(strip.scales + (b + e) * kWide);
      const float* steps = x.steps + (b + e) * kRows;
      ACCEL_UNROLL for (int n = 0; n < N; ++n)
        total[n] = added(as_floats(sums[n]), scale * every(steps[n]), total[n]);
      if (strip.zeros) {
        Floats zero = wide(strip.zeros + (b + e) * kWide);
        const float* totals = x.totals + (b + e) * kRows;
        ACCEL_UNROLL for (int n = 0; n < N; ++n) total[n] = added(zero, every(totals[n]), total[n]);
      }
      if (strip.offsets) {
        Floats offset = wide(strip.offsets + (b + e) * kWide);
        const float* sums_of = x.sums + (b + e) * kRows;
        ACCEL_UNROLL for (int n = 0; n < N; ++n) total[n] = added(offset, every(sums_of[n]), total[n]);
      }
    }
  }
  ACCEL_UNROLL for (int n = 0; n < N; ++n) put(out + n * kWide, total[n]);
}

}  // namespace codes
#endif
