// What was kept, in blocks of rows: codes (grouped.h) or rows of few numbers, and what lies beside them. See
// accel.ir.ops.patched.
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <vector>

#include "grouped.h"

namespace stored {

constexpr int kBits = 8;  // of a mask's byte

// For each byte, which of the numbers from here on is in the place of each of its bits; below 0: none.
constexpr std::array<std::array<int8_t, kBits>, 256> kPlaces = [] {
  std::array<std::array<int8_t, kBits>, 256> found = {};
  for (int mask = 0; mask < 256; ++mask)
    for (int bit = 0, next = 0; bit < kBits; ++bit) found[mask][bit] = mask >> bit & 1 ? int8_t(next++) : int8_t(-1);
  return found;
}();

// Rows of which `stay` numbers are there, where a mask of `width` bits has ones, and others are 0.
struct Few {
  const uint8_t* mask;
  const uint16_t *numbers, *end;  // of all rows
  int64_t stay, width;

  int64_t bytes() const { return (width + kBits - 1) / kBits; }

  void read(int64_t row, int64_t count, float* out) const {
    for (int64_t i = row; i < row + count; ++i, out += width) one(mask + i * bytes(), numbers + i * stay, out);
  }

 private:
  // A row's bytes have its first channels in their lowest bits.
  void one(const uint8_t* bits, const uint16_t* from, float* out) const {
    const uint16_t* last = from + stay;
    int64_t n = bytes();
    int shift = 0;
    for (int64_t w = 0; w < width; shift += w % n == 0)
      if (int64_t at = w % n; at + kBits <= n && w + kBits <= width) {
        int some = gathered(bits + at, shift);
        store(out + w, spread(some, from));
        from = std::min(from + __builtin_popcount(some), last), w += kBits;
      } else {
        bool there = bits[at] >> shift & 1 && from < last;
        out[w++] = there ? grouped::number(*from++) : 0.0f;
      }
  }

  // One bit of each of eight bytes, the first lowest.
  static int gathered(const uint8_t* bytes, int shift) {
#if defined(__AVX2__)
    __m128i x = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes));
    return _mm_movemask_epi8(_mm_sll_epi16(x, _mm_cvtsi32_si128(7 - shift))) & 255;
#else
    int found = 0;
    for (int i = 0; i < kBits; ++i) found |= (bytes[i] >> shift & 1) << i;
    return found;
#endif
  }

  // The next numbers, each at a bit of the byte.
  v8 spread(int some, const uint16_t* from) const {
    uint16_t near[kBits] = {};
    if (from + kBits > end) std::memcpy(near, from, (end - from) * sizeof *near), from = near;
    v8 x = grouped::halves_at(from);
#if defined(__AVX2__)
    __m256i places = _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(kPlaces[some].data())));
    __m256 found = _mm256_permutevar8x32_ps((__m256)x, places);
    return (v8)_mm256_blendv_ps(found, _mm256_setzero_ps(), _mm256_castsi256_ps(places));
#else
    v8 out = {};
    for (int i = 0; i < kBits; ++i)
      if (kPlaces[some][i] >= 0) out[i] = x[kPlaces[some][i]];
    return out;
#endif
  }
};

// Of each block [rows, rank] times [rank, width], to be added: [blocks, rows * rank] and [blocks, width * rank].
struct Product {
  const uint16_t *left = nullptr, *right = nullptr;
  int64_t rank = 0;

  // To `count` rows of a block from row `r` on.
  void add(int64_t block, int64_t r, int64_t count, int64_t rows, int64_t width, float* out) const {
    thread_local std::vector<float> columns;  // [rank, width]
    columns.resize(rank * width);
    const uint16_t* from = right + block * width * rank;
    for (int64_t w = 0; w < width; ++w)
      for (int64_t j = 0; j < rank; ++j) columns[j * width + w] = grouped::number(from[w * rank + j]);
    const uint16_t* row = left + (block * rows + r) * rank;
    for (int64_t i = 0; i < count; ++i, out += width, row += rank)
      for (int64_t first = 0; first < rank; first += kTogether) {
        float by[kTogether];
        int some = int(std::min<int64_t>(kTogether, rank - first));
        for (int j = 0; j < some; ++j) by[j] = grouped::number(row[first + j]);
        const float* column = columns.data() + first * width;
        int64_t w = 0;
        for (; w + 8 <= width; w += 8) {
          v8 total = load(out + w);
          for (int j = 0; j < some; ++j) total = fused(all(by[j]), load(column + j * width + w), total);
          store(out + w, total);
        }
        for (; w < width; ++w)
          for (int j = 0; j < some; ++j) out[w] = std::fma(by[j], column[j * width + w], out[w]);
      }
  }

 private:
  static constexpr int kTogether = 4;  // columns
};

// Of each line of a block `each` numbers, which stand for what is at their places: [blocks, lines * each].
struct Numbers {
  const uint16_t* numbers = nullptr;
  const uint8_t* places = nullptr;
  int64_t each = 0;
  bool down = false;  // a line is a channel's rows; else a row's channels

  void put(int64_t block, int64_t r, int64_t count, int64_t rows, int64_t width, float* out) const {
    if (!down) {
      int64_t at = (block * rows + r) * each;
      for (int64_t i = 0; i < count; ++i, out += width, at += each)
        for (int64_t j = at; j < at + each; ++j)
          if (places[j] < width) out[places[j]] = grouped::number(numbers[j]);
      return;
    }
    int64_t first = block * width * each, many = width * each, i = 0;
    auto one = [&](int64_t i) {
      if (uint64_t row = uint64_t(int64_t(places[first + i]) - r); row < uint64_t(count))
        out[int64_t(row) * width + uint32_t(i) / uint32_t(each)] = grouped::number(numbers[first + i]);
    };
#if defined(__AVX2__)
    __m256i lowest = _mm256_set1_epi8(int8_t(r)), most = _mm256_set1_epi8(int8_t(count - 1));
    for (; i + 32 <= many && r + count <= 256; i += 32) {  // few of them lie in these rows
      __m256i x = _mm256_sub_epi8(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(places + first + i)), lowest);
      uint32_t here = _mm256_movemask_epi8(_mm256_cmpeq_epi8(_mm256_min_epu8(x, most), x));
      for (; here; here &= here - 1) one(i + __builtin_ctz(here));
    }
#endif
    for (; i < many; ++i) one(i);
  }
};

struct Blocks {
  grouped::Blocks codes;
  Few few;  // instead of codes, where `mask` is given
  Product product;
  Numbers numbers;

  // `count` rows from `row` on, counted through all blocks, as floats.
  void read(int64_t row, int64_t count, float* out) const {
    int64_t rows = codes.rows, width = codes.width;
    if (few.mask) return few.read(row, count, out);
    codes.read(row, count, out);
    if (!product.rank && !numbers.each) return;
    while (count > 0) {
      int64_t block = row / rows, r = row % rows, some = std::min(count, rows - r);
      if (product.rank) product.add(block, r, some, rows, width, out);
      if (numbers.each) numbers.put(block, r, some, rows, width, out);
      row += some, count -= some, out += some * width;
    }
  }
};

}  // namespace stored
