// What belongs to a weight's blocks [N, blocks], scales and offsets, as it lies: float, bfloat16 or float16, or in two
// levels: float16 of several blocks, times whole numbers of a byte.
#pragma once
#include <algorithm>
#include <type_traits>
#include <vector>

#include "abi.h"
#include "grouped.h"

namespace steps {

enum Kind { kNone, kFloat, kBFloat16, kFloat16, kUnsigned, kSigned };  // the last two: the fine numbers of two levels

// Eight whole numbers of a byte.
template <typename byte>
inline v8 of_bytes(const uint8_t* p) {
#if defined(__AVX2__)
  __m128i x = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  return (v8)_mm256_cvtepi32_ps(std::is_signed<byte>::value ? _mm256_cvtepi8_epi32(x) : _mm256_cvtepu8_epi32(x));
#else
  typedef byte b8 __attribute__((vector_size(8)));
  b8 x;
  std::memcpy(&x, p, sizeof x);
  return __builtin_convertvector(__builtin_convertvector(x, i8), v8);
#endif
}

inline v8 every_half(const uint16_t* p) {
#if defined(__AVX2__) && defined(__F16C__)
  return (v8)_mm256_cvtph_ps(_mm_set1_epi16(int16_t(*p)));
#else
  return all(grouped::number(*p));
#endif
}

// The numbers of a row, eight from any place that is a multiple of eight.
struct Row {
  Kind kind;
  const uint8_t *coarse, *fine;
  int64_t shift;

  v8 at(int64_t b) const {
    const uint16_t* half = reinterpret_cast<const uint16_t*>(coarse);
    switch (kind) {
      case kFloat: return load(reinterpret_cast<const float*>(coarse) + b);
      case kBFloat16: return widened(half + b);
      case kFloat16: return grouped::halves_at(half + b);
      case kUnsigned: return every_half(half + (b >> shift)) * of_bytes<uint8_t>(fine + b);
      case kSigned: return every_half(half + (b >> shift)) * of_bytes<int8_t>(fine + b);
      default: return v8{};
    }
  }
};

// Rows of numbers.
struct Numbers {
  Kind kind = kNone;
  const uint8_t *coarse = nullptr, *fine = nullptr;
  int64_t rows = 0, blocks = 0, few = 0, shift = 0;  // few: coarse numbers of a row, of 2^shift blocks

  // Whether the tensors are such numbers of so many rows.
  bool read(const abi::Tensor& of, const abi::Tensor& fine_of, int64_t count, int64_t of_row) {
    rows = count, blocks = of_row;
    if (!of.data) return !fine_of.data;
    kind = of.type == abi::kHalf ? kFloat16 : of.type == abi::kBFloat16 ? kBFloat16 : kFloat;
    if (of.rank != 2 || of.size[0] != rows || (kind == kFloat && of.type != abi::kFloat)) return false;
    coarse = of.as<uint8_t>(), few = of.size[1];
    if (!fine_of.data) return few == blocks;
    if (kind != kFloat16 || fine_of.rank != 2 || fine_of.size[0] != rows || fine_of.size[1] != blocks) return false;
    if (fine_of.type != abi::kUint8 && fine_of.type != abi::kInt8) return false;
    kind = fine_of.type == abi::kInt8 ? kSigned : kUnsigned;
    fine = fine_of.as<uint8_t>();
    while (few && few << shift < blocks) ++shift;
    return few << shift == blocks && shift >= 3;
  }

  // Row n; the last ones, which are read beyond their end, out of `room`, as long as they are read.
  Row row(int64_t n, std::vector<uint8_t>& room) const {
    if (kind == kNone) return {};
    const int64_t size = kind == kFloat ? 4 : 2, bytes = few * size;
    Row found = {kind, coarse + n * bytes, fine ? fine + n * blocks : nullptr, shift};
    if (fine || n * blocks + (blocks + 7) / 8 * 8 <= rows * blocks) return found;
    room.assign(bytes + 8 * size, 0);
    std::copy_n(found.coarse, bytes, room.begin());
    found.coarse = room.data();
    return found;
  }

  // Asks memory for row n from a block on.
  void ahead(int64_t n, int64_t from, int64_t count) const {
    const int64_t size = kind == kFloat ? 4 : 2;
    auto ask = [](const uint8_t* begin, int64_t bytes) {
      for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(begin + i, 0, 2);
    };
    if (!fine) return ask(coarse + (n * blocks + from) * size, count * size);
    ask(coarse + (n * few + (from >> shift)) * size, (count >> shift) * size + 1);
    ask(fine + n * blocks + from, count);
  }

  // Floats that `floats` needs room for.
  static constexpr int64_t room(int64_t blocks) { return 2 * (blocks + 32); }

  // The numbers of row n from block `from` on, a multiple of 8, up to `end`, and what is readable up to a multiple of
  // 16 of them: where they lie, or in `to`.
  const float* floats(int64_t n, int64_t from, int64_t end, float* to) const {
    const int64_t count = (end - from + 15) / 16 * 16, left = rows * blocks - n * blocks - from;
    const uint16_t* half = reinterpret_cast<const uint16_t*>(coarse);
    if (kind == kFloat) {
      const float* begin = reinterpret_cast<const float*>(coarse) + n * blocks + from;
      if (left >= count) return begin;
      std::copy_n(begin, left, to);
    } else if (kind == kBFloat16) {
      widen<widened>(half + n * blocks + from, std::min(count, left), to);
    } else if (kind == kFloat16) {
      widen<grouped::halves_at>(half + n * blocks + from, std::min(count, left), to);
    } else {
      end = std::min(end, blocks);
      float* of_several = to + count;
      const int64_t first = from >> shift, several = ((end - 1) >> shift) - first + 1;
      const uint16_t* begin = half + n * few + first;
      widen<grouped::halves_at>(begin, std::min<int64_t>((several + 7) / 8 * 8, (rows - n) * few - first), of_several);
      if (kind == kUnsigned)
        multiply<uint8_t>(of_several, fine + n * blocks, from, end, to);
      else
        multiply<int8_t>(of_several, fine + n * blocks, from, end, to);
    }
    return to;
  }

 private:
  template <v8 (*eight)(const uint16_t*)>
  static void widen(const uint16_t* from, int64_t count, float* to) {
    int64_t i = 0;
    for (; i + 8 <= count; i += 8) store(to + i, eight(from + i));
    if (i == count) return;
    uint16_t last[8] = {};
    std::copy(from + i, from + count, last);
    store(to + i, eight(last));
  }

  // All rows have a multiple of eight blocks.
  template <typename byte>
  void multiply(const float* of_several, const uint8_t* bytes, int64_t from, int64_t end, float* to) const {
    const int64_t first = from >> shift;
    for (int64_t b = from; b < end; b += 8)
      store(to + b - from, all(of_several[(b >> shift) - first]) * of_bytes<byte>(bytes + b));
  }
};

}  // namespace steps
