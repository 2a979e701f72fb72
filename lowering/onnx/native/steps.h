// What belongs to a weight's blocks [N, blocks], scales and offsets, as it lies: float, bfloat16 or float16, or in two
// levels: float16 of several blocks, times whole numbers of a byte.
#pragma once
#include <algorithm>
#include <vector>

#include "abi.h"
#include "vector.h"

namespace steps {

enum Kind { kNone, kFloat, kBFloat16, kFloat16, kUnsigned, kSigned };  // the last two: the fine numbers of two levels

// Eight float16.
inline v8 of_float16(const uint16_t* p) {
#if defined(__F16C__)
  __m128i x;
  std::memcpy(&x, p, sizeof x);
  return (v8)_mm256_cvtph_ps(x);
#elif defined(__aarch64__)
  typedef __fp16 h8 __attribute__((vector_size(16)));
  h8 x;
  std::memcpy(&x, p, sizeof x);
  return __builtin_convertvector(x, v8);
#else
  v8 out;
  for (int i = 0; i < 8; ++i) {
    uint32_t sign = uint32_t(p[i] & 0x8000) << 16, low = p[i] & 0x7fff, bits;
    if (low >= 0x7c00) {
      bits = 0x7f800000 | (low & 0x3ff) << 13;
    } else if (low >= 0x400) {
      bits = (low << 13) + (112u << 23);
    } else {  // no exponent of its own: so many of the smallest step
      float small = float(low) * 5.9604644775390625e-8f;
      std::memcpy(&bits, &small, sizeof bits);
    }
    bits |= sign;
    std::memcpy(&out[i], &bits, sizeof bits);
  }
  return out;
#endif
}

template <typename byte>
inline v8 of_bytes(const void* p) {
  typedef byte b8 __attribute__((vector_size(8)));
  b8 x;
  std::memcpy(&x, p, sizeof x);
  return __builtin_convertvector(__builtin_convertvector(x, i8), v8);
}

// The numbers of one row, eight from any place that is a multiple of eight.
struct Row {
  Kind kind;
  const uint8_t *coarse, *fine;
  int64_t shift;  // 2^shift blocks have one coarse number

  v8 at(int64_t b) const {
    switch (kind) {
      case kFloat: return load(reinterpret_cast<const float*>(coarse) + b);
      case kBFloat16: return widened(reinterpret_cast<const uint16_t*>(coarse) + b);
      case kFloat16: return of_float16(reinterpret_cast<const uint16_t*>(coarse) + b);
      case kUnsigned: return all(of_one(b >> shift)) * of_bytes<uint8_t>(fine + b);
      case kSigned: return all(of_one(b >> shift)) * of_bytes<int8_t>(fine + b);
      default: return v8{};
    }
  }

  float of_one(int64_t i) const {
    const uint16_t* p = reinterpret_cast<const uint16_t*>(coarse) + i;
#if defined(__F16C__)
    return _cvtsh_ss(*p);
#else
    uint16_t eight[8] = {*p};
    return of_float16(eight)[0];
#endif
  }
};

// Rows of them. What is read beyond a row's end is another row's, and beyond the last one's zeros.
struct Numbers {
  Kind kind = kNone;
  const uint8_t *coarse = nullptr, *fine = nullptr;
  int64_t rows = 0, blocks = 0, few = 0, shift = 0;  // few: coarse numbers of a row

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
    while (few << shift < blocks) ++shift;
    return few << shift == blocks && shift >= 3;
  }

  // room: where the last rows are copied to, as long as the row is read.
  Row row(int64_t n, std::vector<uint8_t>& room) const {
    if (kind == kNone) return {};
    const int64_t size = kind == kFloat ? 4 : 2, from = few * size;
    Row found = {kind, coarse + n * from, fine ? fine + n * blocks : nullptr, shift};
    if (n * blocks + (blocks + 7) / 8 * 8 <= rows * blocks) return found;
    const int64_t wide = (few + 8) * size;
    room.assign(wide + (fine ? blocks + 8 : 0), 0);
    std::copy_n(found.coarse, from, room.begin());
    if (fine) std::copy_n(found.fine, blocks, room.begin() + wide);
    return {kind, room.data(), fine ? room.data() + wide : nullptr, shift};
  }
};

}  // namespace steps
