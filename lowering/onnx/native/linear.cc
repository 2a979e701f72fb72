// accel::Linear: x @ weight.T with weights in blocks of 4 or 8 bits, read as they lie in the file, each block maybe
// with an offset that all of its numbers have, and what stands around it in a layer: a norm of the input before; a gate,
// and a sum with another tensor, after.
//
// The input is rounded to 8 bits per block. Products are summed in whole numbers by groups, and groups in
// order: where `exact` is set, a row's result is the same bit for bit whatever the other rows and the way the
// work is cut.
#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#include "abi.h"
#include "codes.h"
#include "steps.h"
#include "strips.h"
#include "vector.h"

namespace {

constexpr int64_t kTile = 128;           // weight rows of a piece of work, at most
constexpr int64_t kPieces = 8;           // as many there are at least, so that threads find something to do
#if defined(__AVX2__) && ACCEL_WIDE_STRIPS
constexpr int64_t kTurned = 2;           // rows from which on weights are turned; where results are to be exact, any
constexpr int64_t kFew = 1;              // rows that are multiplied together with weights as they lie, at most
#else
constexpr int64_t kTurned = 16;          // unless results are to be exact
constexpr int64_t kFew = 4;
#endif
constexpr int64_t kUnpacked = std::min<int64_t>(4, kTurned);  // the same of weights in planes, which cost more to unpack
#if defined(__AVX2__)
constexpr int64_t kKept = 2 * codes::kRows;  // rows beyond which turned strips are kept for all of them
constexpr int64_t kKeptPlanes = ACCEL_WIDE_STRIPS ? codes::kRows : 0;  // the same of planes, which need more registers
#endif
constexpr int64_t kLongest = 1 << 16;    // of a block whose products are summed in 32 bits
constexpr int64_t kNear = 1 << 17;       // bytes of turned weights that input rows go through together
constexpr int64_t kPart = 1 << 14;       // bytes of a turned strip of them, unless a block has more
constexpr int64_t kAhead = 4096;         // bytes that memory is asked for ahead of a single row's products

enum Gate { kNone, kSilu, kGelu, kGeluTanh };

struct Settings {
  int64_t bits, block, gate, exact;
  int64_t middle;  // scales that an offset has besides its own number
  float epsilon;
};

struct Call {
  Settings set;
  abi::Tensor x, q, scales, zeros, bias, norm, more, offsets, fine, fine_offsets;
  float* out;
  int64_t rows, K, N, wide, tile;         // wide: columns of the result; tile: of a piece of work
  int64_t blocks, groups, bytes, padded;  // of a row; padded: floats of a row by blocks
  steps::Numbers scale, offset;           // of the weight's blocks
  bool turned;                            // whether many rows share each weight, so that it pays to turn them
  int64_t together;                       // input rows that are multiplied with turned weights at once; else 1
  std::vector<char> inputs;               // Input<bits> [rows / together, groups, together], aligned within
  std::vector<float> steps, totals;       // of the inputs' blocks: [rows / together, padded, together]; totals: what
  std::vector<float> sums;                // zero points add; sums: of their numbers, for offsets
  std::vector<int32_t> starts;            // alike: what products with turned weights begin with
  int64_t shift;                          // turned: a block is of 2^shift groups, where it is not of a part of one

  // What zero lies at, where weights have no zero points.
  int32_t zero() const { return set.bits == 8 ? 0 : 1 << (set.bits - 1); }

  int64_t place(int64_t row, int64_t i, int64_t count) const {
    return (row / together * count + i) * together + row % together;
  }

  int64_t at(int64_t row, int64_t block) const { return place(row, block, padded); }

  template <int bits>
  codes::Input<bits>* input(int64_t row, int64_t group = 0) const {
    auto begin = (reinterpret_cast<uintptr_t>(inputs.data()) + 31) / 32 * 32;
    return reinterpret_cast<codes::Input<bits>*>(begin) + place(row, group, groups);
  }
};

v8 activated(int64_t gate, v8 x) {
  if (gate == kSilu) return silu(x);
  return gate == kGelu ? gelu(x) : gelu_tanh(x);
}

// x / sqrt(mean(x^2) + epsilon) * weight -> out
void normalise(const float* x, const float* weight, int64_t size, float epsilon, float* out) {
  v8 squares[4] = {};
  int64_t k = 0;
  for (; k + 32 <= size; k += 32)
    for (int i = 0; i < 4; ++i) squares[i] = fused(load(x + k + 8 * i), load(x + k + 8 * i), squares[i]);
  float total = sum((squares[0] + squares[1]) + (squares[2] + squares[3]));
  for (; k < size; ++k) total = std::fma(x[k], x[k], total);
  float by = 1 / std::sqrt(total / float(size) + epsilon);
  for (k = 0; k < size; ++k) out[k] = x[k] * by * weight[k];
}

template <int bits>
void round_row(Call& c, int64_t row) {
  thread_local std::vector<float> buffer;
  const float* x = c.x.as<float>() + row * c.K;
  if (c.norm.data || c.K % c.set.block) {
    buffer.assign(c.blocks * c.set.block, 0.0f);
    if (c.norm.data)
      normalise(x, c.norm.as<float>(), c.K, c.set.epsilon, buffer.data());
    else
      std::copy(x, x + c.K, buffer.data());
    x = buffer.data();
  }
  if (c.offsets.data) {
    for (int64_t b = 0; b < c.blocks; ++b) {
      v8 total = load(x + b * c.set.block);
      for (int64_t i = 8; i < c.set.block; i += 8) total += load(x + b * c.set.block + i);
      c.sums[c.at(row, b)] = sum(total);
    }
  }
  float* totals = c.totals.data() + c.at(row, 0);
  float* steps = c.steps.data() + c.at(row, 0);
  codes::round_row<bits>(x, c.set.block, c.blocks, c.together, steps, totals, c.input<bits>(row));
  const float zero = c.zeros.data ? 1.0f : float(c.zero());
  for (int64_t b = 0; b < c.blocks; ++b) {
    float& total = totals[b * c.together];
#if defined(__AVX2__)
    if (c.turned && !c.zeros.data) c.starts[c.at(row, b)] = -codes::above_of(c.set.bits) * int32_t(total);
#endif
    total *= steps[b * c.together] * zero;
    if (c.offsets.data) total -= float(c.set.middle) * c.sums[c.at(row, b)];
  }
}

// The block that group g begins; of the end of the last group: how many there are.
int64_t block_of(const Call& c, int64_t g) {
  const int64_t size = codes::size_of(c.set.bits);
  return c.set.block >= size ? g >> c.shift : std::min(g * (size / c.set.block), c.blocks);
}

// What a thread needs beside the call: by blocks, and a copy of one of the last weight rows, to read beyond
// the end of the weight.
struct Scratch {
  std::vector<float> zeros;  // [padded]
  std::vector<uint8_t> last, last_scales, last_offsets;
};

struct Weight {
  const uint8_t* codes;
  steps::Row scale, offset;
  const float* zeros;
};

inline Weight weight_of(const Call& c, Scratch& s, int64_t n) {
  Weight w = {c.q.as<uint8_t>() + n * c.bytes, c.scale.row(n, s.last_scales), c.offset.row(n, s.last_offsets),
              s.zeros.data()};
  if (c.zeros.data) {
    const uint8_t* packed = c.zeros.as<uint8_t>() + n * ((c.blocks + 1) / 2);
    for (int64_t b = 0; b < c.blocks; ++b) s.zeros[b] = float(packed[b / 2] >> b % 2 * 4 & 15);
  }
  const int64_t bytes = c.groups * codes::size_of(c.set.bits) * c.set.bits / 8;
  if (n * c.bytes + bytes <= c.N * c.bytes) return w;
  s.last.assign(bytes, 0);
  std::copy(w.codes, w.codes + c.bytes, s.last.begin());
  w.codes = s.last.data();
  return w;
}

// The sums of one weight row with N input rows, eight blocks after eight. What zero points add, less what offsets do, is
// taken off at the end. EACH: blocks of a group; 0: a block of several groups.
template <int N, int bits, int EACH>
inline void row_sums(const Call& c, Scratch& s, int64_t row, int64_t n, v8* out) {
  const Weight w = weight_of(c, s, n);
  const codes::Input<bits>* x[N];
  v8 less[N], total[N][2], scales[N];
  for (int i = 0; i < N; ++i) {
    x[i] = c.input<bits>(row + i);
    less[i] = total[i][0] = total[i][1] = all(0.0f);
  }
  auto add = [&](int64_t g, int place, int turn) __attribute__((always_inline)) {
    const uint8_t* at = w.codes + g * codes::kBytes<bits>;
    if (N == 1 && turn == 0) __builtin_prefetch(at + kAhead);
    for (int i = 0; i < N; ++i) {
      v8 products = __builtin_convertvector(codes::multiply<bits>(at, x[i][g]), v8);
      total[i][turn] = fused(products, codes::spread<EACH>(scales[i], place), total[i][turn]);
    }
  };
  for (int64_t b = 0; b < c.blocks; b += 8) {
    const v8 scale = w.scale.at(b);
    for (int i = 0; i < N; ++i) {
      const int64_t at = (row + i) * c.padded + b;
      scales[i] = scale * load(c.steps.data() + at);
      if (bits < 8 || c.offsets.data)
        less[i] = fused(c.zeros.data ? scale * load(w.zeros + b) : scale, load(c.totals.data() + at), less[i]);
    }
    if (c.offsets.data) {
      const v8 offset = -w.offset.at(b);
      for (int i = 0; i < N; ++i) less[i] = fused(offset, load(c.sums.data() + (row + i) * c.padded + b), less[i]);
    }
    if constexpr (EACH > 0) {
      constexpr int many = 8 / EACH;
      const int64_t first = b / EACH, left = c.groups - first;
      if (left >= many) {
#pragma GCC unroll 8
        for (int g = 0; g < many; ++g) add(first + g, g, g % 2);
      } else {
        for (int g = 0; g < left; ++g) add(first + g, g, g % 2);
      }
    } else {
      const int64_t first = b << c.shift, end = std::min(first + (int64_t(8) << c.shift), c.groups);
      for (int64_t g = first; g < end; ++g) add(g, int((g - first) >> c.shift), g % 2);
    }
  }
  for (int i = 0; i < N; ++i) out[i] = total[i][0] + total[i][1] - less[i];
}

// N input rows times `count` weight rows from `first` -> out[i * kTile + j].
template <int N, int bits, int EACH>
void products(const Call& c, Scratch& s, int64_t row, int64_t first, int64_t count, float* out) {
  constexpr int64_t M = 4 / N;  // weight rows whose sums are added up together
  for (int64_t j = 0; j < count; j += M) {
    v8 total[4];
    for (int64_t m = 0; m < M; ++m)
      row_sums<N, bits, EACH>(c, s, row, first + std::min(j + m, count - 1), total + m * N);
    v4 four = sums(total[0], total[1], total[2], total[3]);
    for (int64_t m = 0; m < M; ++m)
      for (int64_t i = 0; i < N; ++i) out[i * kTile + j + m] = four[m * N + i];
  }
}

// Of up to eight columns; 0 where there are none.
v8 biases(const Call& c, int64_t first, int64_t count) {
  if (!c.bias.data) return all(0.0f);
  if (count == 8) return load(c.bias.as<float>() + first);
  alignas(32) float out[8] = {};
  std::copy_n(c.bias.as<float>() + first, count, out);
  return load(out);
}

typedef void (*Products)(const Call&, Scratch&, int64_t, int64_t, int64_t, float*);

template <int N, int bits>
Products products_of(const Call& c) {
  const int64_t each = codes::size_of(bits) / c.set.block;
  if (each == 4) return products<N, bits, 4>;
  return each == 2 ? products<N, bits, 2> : each == 1 ? products<N, bits, 1> : products<N, bits, 0>;
}

#if defined(__AVX2__)

// Numbers of blocks [b, b + blocks) of the weight rows of a strip, turned: [blocks, kWide].
float* table_of(const Call& c, const steps::Numbers& numbers, int64_t first, int64_t b, int64_t blocks, int place,
                codes::Strip& strip) {
  using codes::kWide;
  const int64_t from = b / 8 * 8, padded = (blocks + 15) / 16 * 16, room = steps::Numbers::room(padded);
  float* table = strip.table(place, padded);
  const float* rows[kWide];
  strip.apart.resize(kWide * room);
  for (int64_t i = 0; i < kWide; ++i) {
    const int64_t n = std::min(first + i, c.N - 1);
    rows[i] = numbers.floats(n, from, b + padded, strip.apart.data() + i * room) + b - from;
    numbers.ahead(n + kWide, from, blocks);
  }
  for (int64_t k = 0; k < blocks; k += 8) codes::turn_floats(rows, k, table + k * kWide);
  return table;
}

// Groups [g, end) of weight rows from `first` on, the last one again where there are fewer; with what their blocks have.
template <int bits>
void take(const Call& c, int64_t first, int64_t g, int64_t end, bool kept, codes::Strip& strip) {
  using codes::kWide;
  constexpr int64_t each = codes::kBytes<bits>;
  const int64_t bytes = (end - g) * each, b = block_of(c, g), blocks = block_of(c, end) - b;
  strip.next = kWide * c.bytes;
  for (int64_t i = 0; i < kWide; ++i) {
    const int64_t n = std::min(first + i, c.N - 1), left = (c.N - n) * c.bytes - g * each;
    strip.rows[i] = c.q.as<uint8_t>() + n * c.bytes + g * each;
    if (left >= bytes) continue;  // else what is read goes beyond the end
    strip.last.resize(kWide * bytes);
    strip.rows[i] = std::copy_n(strip.rows[i], left, strip.last.data() + i * bytes) - left;
  }
  strip.scales = table_of(c, c.scale, first, b, blocks, 0, strip);
  strip.zeros = c.zeros.data ? strip.table(1, blocks) : nullptr;
  for (int64_t i = 0; c.zeros.data && i < kWide; ++i) {
    const uint8_t* packed = c.zeros.as<uint8_t>() + std::min(first + i, c.N - 1) * ((c.blocks + 1) / 2);
    for (int64_t k = 0; k < blocks; ++k)
      strip.zeros[k * kWide + i] = -strip.scales[k * kWide + i] * float(packed[(b + k) / 2] >> (b + k) % 2 * 4 & 15);
  }
  strip.offsets = nullptr;
  if (c.offsets.data) {
    strip.offsets = table_of(c, c.offset, first, b, blocks, 2, strip);
    const codes::Floats middle = codes::every(float(c.set.middle));
    for (int64_t k = 0; k < blocks * kWide; k += kWide)
      codes::put(strip.offsets + k, codes::added(middle, codes::wide(strip.scales + k), codes::wide(strip.offsets + k)));
  }
  if (!kept) return;
  strip.reserve((end - g) * codes::kVectors<bits>);
  for (int64_t k = 0; k < end - g; ++k) codes::turn<bits>(strip, k);
}

// N input rows from `row` on times groups [g, end) of weight rows, added to out [N, kWide].
template <int bits, int N, bool kept>
void multiply(const Call& c, const codes::Strip& strip, int64_t row, int64_t g, int64_t end, float* out) {
  const int64_t b = block_of(c, g), at = c.at(row, b), size = codes::size_of(bits);
  codes::Rows<bits> x = {c.input<bits>(row, g), c.steps.data() + at, c.totals.data() + at,
                         c.offsets.data ? c.sums.data() + at : nullptr, c.starts.data() + at};
  auto run = c.set.block >= size       ? codes::multiply<bits, N, 0, kept>
             : c.set.block * 2 == size ? codes::multiply<bits, N, 2, kept>
                                       : codes::multiply<bits, N, 4, kept>;
  run(strip, x, block_of(c, end) - b, c.shift, out);
}

using Multiply = void (*)(const Call&, const codes::Strip&, int64_t, int64_t, int64_t, float*);

// For `rows` rows and maybe more, up to kRows.
template <int bits, bool kept>
Multiply multiply_of(int64_t rows) {
  using codes::kRows;
  if (rows > kRows * 3 / 4) return multiply<bits, kRows, kept>;
  if (rows > kRows / 2) return multiply<bits, kept ? kRows : kRows * 3 / 4, kept>;
  if (rows == kRows / 2) return multiply<bits, kRows / 2, kept>;
  return rows == 1 ? multiply<bits, 1, kept> : rows == 2 ? multiply<bits, 2, kept> : multiply<bits, 3, kept>;
}

// Strips of a tile from column j on, and then those that they gate, whose products are [strip, rows, column], with what
// comes after them.
void finish(const Call& c, int64_t j, int64_t count, const float* products, int64_t rows) {
  using codes::kWide;
  const int64_t half = count * rows * kWide;
  const int64_t end = std::min(j + count * kWide, c.wide);
  for (int64_t row = 0; row < c.rows; ++row)
    for (int64_t at = j; at < end; at += 8) {
      const float* from = products + ((at - j) / kWide * rows + row) * kWide + (at - j) % kWide;
      const int64_t some = std::min<int64_t>(8, end - at);
      v8 y = load(from) + biases(c, at, some);
      if (c.set.gate) y = activated(c.set.gate, y) * (load(from + half) + biases(c, c.wide + at, some));
      const float* more = c.more.data ? c.more.as<float>() + row * c.wide + at : nullptr;
      float* out = c.out + row * c.wide + at;
      if (some == 8) {
        store(out, more ? load(more) + y : y);
      } else {
        for (int64_t i = 0; i < some; ++i) out[i] = more ? more[i] + y[i] : y[i];
      }
    }
}

// A tile of weight rows, strip by strip, times all input rows: as many strips at once as a near cache holds, so that
// they stay there while input rows come by, and these while the strips do. Few rows take strip after strip.
template <int bits>
void work_turned(const Call& c, int64_t item) {
  using codes::kWide;
  thread_local std::vector<codes::Strip> strips;
  thread_local std::vector<float> products;
  const int64_t first = item * c.tile, count = (std::min(c.tile, c.wide - first) + kWide - 1) / kWide;
  const int64_t all_of = c.set.gate ? 2 * count : count, block = std::max<int64_t>(1, c.set.block / codes::size_of(bits));
  const int64_t vectors = codes::kVectors<bits> * int64_t(sizeof(codes::Numbers));
  const int64_t part = std::max(block, kPart / vectors / block * block);
  constexpr bool planes = codes::in_planes(bits);
  constexpr int like = planes ? bits > 4 ? 6 : 4 : bits;  // what turned numbers are multiplied as
  const bool kept = c.rows > (planes ? kKeptPlanes : kKept);
  const int64_t most = !kept ? 1 : std::max<int64_t>(1, kNear / (vectors * std::min(part, c.groups)));
  if (int64_t(strips.size()) < most) strips.resize(most);
  const int64_t rows = (c.rows + codes::kRows - 1) / codes::kRows * codes::kRows;
  products.assign(all_of * rows * kWide, 0.0f);
  for (int64_t s = 0; s < all_of; s += most) {
    const int64_t end = std::min(s + most, all_of);
    for (int64_t g = 0; g < c.groups; g += part) {
      const int64_t last = std::min(g + part, c.groups);
      for (int64_t i = s; i < end; ++i)
        take<bits>(c, i < count ? first + i * kWide : c.wide + first + (i - count) * kWide, g, last, kept, strips[i - s]);
      for (int64_t row = 0; row < c.rows; row += codes::kRows) {
        const int64_t left = c.rows - row;
        Multiply run = multiply_of<like, true>(left);
        if constexpr (kTurned <= (planes ? kKeptPlanes : kKept))
          if (!kept) run = multiply_of<bits, false>(left);
        for (int64_t i = s; i < end; ++i)
          run(c, strips[i - s], row, g, last, products.data() + (i * rows + row) * kWide);
      }
    }
  }
  finish(c, first, count, products.data(), rows);
}

#endif

// Runs with the number of bits as a constant.
template <typename Run>
void by_bits(int64_t bits, Run run) {
  switch (bits) {
    case 2: return run(std::integral_constant<int, 2>());
    case 3: return run(std::integral_constant<int, 3>());
    case 4: return run(std::integral_constant<int, 4>());
    case 5: return run(std::integral_constant<int, 5>());
    case 6: return run(std::integral_constant<int, 6>());
    default: return run(std::integral_constant<int, 8>());
  }
}

// A tile of weight rows (and of those that they gate) times all input rows.
void work(const Call& c, int64_t item) {
#if defined(__AVX2__)
  if (c.turned) return by_bits(c.set.bits, [&](auto bits) { work_turned<bits.value>(c, item); });
#endif
  thread_local Scratch scratch;
  scratch.zeros.resize(c.padded);
  Products run = nullptr, two = nullptr, four = nullptr;
  by_bits(c.set.bits, [&](auto bits) {
    run = products_of<1, bits.value>(c);
    if constexpr (kFew > 1) two = products_of<2, bits.value>(c), four = products_of<4, bits.value>(c);
  });
  const float* bias = c.bias.as<float>();
  int64_t first = item * c.tile, count = std::min(c.tile, c.wide - first);
  alignas(32) float own[4 * kTile], other[4 * kTile];
  for (int64_t row = 0, n; row < c.rows; row += n) {
    n = std::min(kFew, c.rows - row >= 4 ? 4 : std::min<int64_t>(c.rows - row, 2));
    auto multiply = [&](int64_t from, float* out) {
      (n == 4 ? four : n == 2 ? two : run)(c, scratch, row, from, count, out);
      for (int64_t i = 0; i < n && bias; ++i)
        for (int64_t j = 0; j < count; ++j) out[i * kTile + j] += bias[from + j];
    };
    multiply(first, own);
    if (c.set.gate) {
      multiply(first + c.wide, other);
      for (int64_t j = 0; j < n * kTile; j += 8) store(own + j, activated(c.set.gate, load(own + j)) * load(other + j));
    }
    for (int64_t i = 0; i < n; ++i) {
      int64_t at = (row + i) * c.wide + first;
      const float* more = c.more.data ? c.more.as<float>() + at : nullptr;
      for (int64_t j = 0; j < count; ++j) c.out[at + j] = more ? more[j] + own[i * kTile + j] : own[i * kTile + j];
    }
  }
}

typedef abi::Kernel<Settings> Kernel;

bool fits(const Call& c) {
  bool whole = c.zeros.data ? c.set.bits <= 4 : c.set.bits != 7 && c.set.bits <= 8;
  const bool planes = codes::in_planes(c.set.bits);
  const int64_t size = codes::size_of(c.set.bits), each = planes ? size : c.set.block;
  bool power = c.set.block >= 16 && (c.set.block & (c.set.block - 1)) == 0;
  bool weight = c.q.rank == 3 && c.q.size[1] == (c.blocks * c.set.block + each - 1) / each &&
                c.q.size[2] == each * c.set.bits / 8 && !(c.zeros.data && c.set.middle);
  bool around = (!c.zeros.data || (c.zeros.size[0] == c.N && c.zeros.size[1] == (c.blocks + 1) / 2)) &&
                (!c.bias.data || c.bias.size[0] == c.N) && (!c.more.data || c.more.count() == c.rows * c.wide);
  return c.set.bits > 1 && whole && power && weight && around && (!c.norm.data || c.norm.size[0] == c.K) && (!c.set.gate || c.N % 2 == 0);
}

abi::Status* prepare(const Kernel& kernel, abi::Context* context, Call& c) {
  const abi::Api& api = kernel.api;
  abi::Tensor* inputs[] = {&c.x, &c.q, &c.scales, &c.zeros, &c.bias, &c.norm, &c.more, &c.offsets,
                           &c.fine, &c.fine_offsets};
  for (size_t i = 0; i < std::size(inputs); ++i)
    if (abi::Status* s = abi::read(api, context, i, inputs[i])) return s;
  c.set = kernel.set;
  if (c.x.rank < 1) return api.fail("Linear: the input is a single number");
  c.K = c.x.size[c.x.rank - 1], c.N = c.q.size[0], c.wide = c.set.gate ? c.N / 2 : c.N;
  if (c.set.block < 1 || c.q.rank != 3) return api.fail("Linear: the weight does not lie in blocks; build the artifact again");
  c.blocks = (c.K + c.set.block - 1) / c.set.block, c.bytes = c.q.size[1] * c.q.size[2];
  const int64_t size = codes::size_of(c.set.bits);
  c.groups = (c.blocks * c.set.block + size - 1) / size, c.padded = (c.blocks + 15) / 8 * 8;
  c.tile = std::clamp<int64_t>(c.wide / kPieces / 32 * 32, 32, kTile);
  c.rows = 1;
  for (size_t i = 0; i + 1 < c.x.rank; ++i) c.rows *= c.x.size[i];
  c.turned = c.set.block <= kLongest && (c.set.exact ? kFew == 1 : c.rows >= (codes::in_planes(c.set.bits) ? kUnpacked : kTurned));
  for (c.shift = 0; size << c.shift < c.set.block;) ++c.shift;
  const bool lies = c.scale.read(c.scales, c.fine, c.N, c.blocks) && c.offset.read(c.offsets, c.fine_offsets, c.N, c.blocks);
  if (!lies || !fits(c))
    return api.fail("Linear: the sizes of the input and the weight do not fit; build the artifact again");
  int64_t sizes[4];
  std::copy(c.x.size, c.x.size + 4, sizes);
  sizes[c.x.rank - 1] = c.wide;
  abi::Value* out = nullptr;
  if (abi::Status* s = api.output(context, 0, sizes, c.x.rank, &out)) return s;
  void* data = nullptr;
  if (abi::Status* s = api.data(out, &data)) return s;
  c.out = static_cast<float*>(data);
  c.together = 1;
#if defined(__AVX2__)
  if (c.turned) c.together = codes::kRows;
#endif
  const int64_t rows = (c.rows + c.together - 1) / c.together * c.together;
  c.inputs.resize(rows * c.groups * size + 32);
  c.steps.resize(rows * c.padded);
  c.totals.resize(rows * c.padded);
  if (c.offsets.data) c.sums.resize(rows * c.padded);
  if (c.turned) c.starts.resize(rows * c.padded);
  return nullptr;
}

void round_one(Call& c, int64_t row) { c.set.bits == 8 ? round_row<8>(c, row) : round_row<4>(c, row); }

abi::Status* run(const Kernel& self, abi::Context* context) {
  Call c;
  if (abi::Status* s = prepare(self, context, c)) return s;
  if (!c.rows) return nullptr;
  if (c.rows < 8)
    for (int64_t row = 0; row < c.rows; ++row) round_one(c, row);
  else if (abi::Status* s = abi::parallel<round_one>(self.api, context, c.rows, c))
    return s;
  return abi::parallel<work>(self.api, context, (c.wide + c.tile - 1) / c.tile, c);
}

constexpr abi::Attribute<Settings> kAttributes[] = {
    {"bits", &Settings::bits, nullptr},
    {"block", &Settings::block, nullptr},
    {"gate", &Settings::gate, nullptr},
    {"exact", &Settings::exact, nullptr},
    {"middle", &Settings::middle, nullptr, true},
    {"epsilon", nullptr, &Settings::epsilon},
};

}  // namespace

abi::Op linear_op() {
  abi::Op op = abi::op_of<Settings, kAttributes, run>();
  op.name = [](const abi::Op*) { return "Linear"; };
  op.input_count = [](const abi::Op*) { return size_t(10); };
  op.input_type = [](const abi::Op*, size_t i) {
    return int(i == 2 || i > 6 ? abi::kAny : i == 1 || i == 3 ? abi::kUint8 : abi::kFloat);
  };
  op.input_presence = [](const abi::Op*, size_t i) { return int(i > 2 ? abi::kOptional : abi::kRequired); };
  return op;
}
