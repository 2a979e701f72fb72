// accel::Linear: x @ weight.T with weights in blocks of 4 or 8 bits, read as they lie in the file, each block maybe
// with an offset that all of its numbers have, and what stands around it in a layer: a norm of the input before; a gate,
// and a sum with another tensor, after.
//
// The input is rounded to 8 bits per block. Products are summed in whole numbers by groups, and groups in
// order: where `exact` is set, a row's result is the same bit for bit whatever the other rows and the way the
// work is cut.
#include <algorithm>
#include <cmath>
#include <vector>

#include "abi.h"
#include "codes.h"
#include "steps.h"
#include "strips.h"
#include "vector.h"

namespace {

constexpr int64_t kTile = 128;    // weight rows of a piece of work, at most
constexpr int64_t kPieces = 8;    // as many there are at least, so that threads find something to do
constexpr int64_t kTurned = 24;   // rows from which on 4-bit weights are turned, unless results are to be exact
constexpr int64_t kNear = 1 << 17; // bytes of turned weights that input rows go through together
constexpr int64_t kTogether = 16;  // those rows
constexpr int64_t kAhead = 4096;  // bytes that memory is asked for ahead of a single row's products

enum Gate { kNone, kSilu, kGelu, kGeluTanh };

struct Settings {
  int64_t bits, block, gate, exact, middle;
  float epsilon;
};

struct Call {
  Settings set;
  abi::Tensor x, q, scales, zeros, bias, norm, more, offsets, fine, fine_offsets;
  float* out;
  int64_t rows, K, N, wide, tile;         // wide: columns of the result; tile: of a piece of work
  int64_t blocks, groups, bytes, padded;  // of a row; padded: floats of a row by blocks
  steps::Numbers scale, least;            // of the weight's blocks; what its offsets have besides `middle` scales
  bool turned;                            // whether many rows share each weight, so that it pays to turn them
  std::vector<char> inputs;               // Group<bits> [rows, groups], aligned within
  std::vector<float> steps, totals;       // of the inputs' blocks: [rows, padded]; totals: what zero points add
  std::vector<float> sums;                // of the numbers of the inputs' blocks [rows, padded], for offsets

  template <int bits>
  codes::Group<bits>* input(int64_t row) const {
    auto at = (reinterpret_cast<uintptr_t>(inputs.data()) + 31) / 32 * 32;
    return reinterpret_cast<codes::Group<bits>*>(at) + row * groups;
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
  int64_t at = row * c.padded;
  if (c.offsets.data) {
    for (int64_t b = 0; b < c.blocks; ++b) {
      v8 total = load(x + b * c.set.block);
      for (int64_t i = 8; i < c.set.block; i += 8) total += load(x + b * c.set.block + i);
      c.sums[at + b] = sum(total);
    }
  }
  float zero = c.zeros.data ? 1.0f : 8.0f;
  codes::round_row<bits>(x, c.set.block, c.blocks, zero, c.steps.data() + at, c.totals.data() + at, c.input<bits>(row));
}

// What a thread needs beside the call: by blocks, and a copy of one of the last weight rows, to read beyond
// the end of the weight.
struct Scratch {
  std::vector<float> scales, zeros;  // [4, padded], [padded]
  std::vector<uint8_t> last, last_scales, last_offsets;
};

struct Weight {
  const uint8_t* codes;
  steps::Row scale, least;
  const float* zeros;
};

Weight weight_of(const Call& c, Scratch& s, int64_t n) {
  Weight w = {c.q.as<uint8_t>() + n * c.bytes, c.scale.row(n, s.last_scales), c.least.row(n, s.last_offsets),
              s.zeros.data()};
  if (c.zeros.data) {
    const uint8_t* packed = c.zeros.as<uint8_t>() + n * ((c.blocks + 1) / 2);
    for (int64_t b = 0; b < c.blocks; ++b) s.zeros[b] = float(packed[b / 2] >> b % 2 * 4 & 15);
  }
  if (n * c.bytes + c.groups * codes::kBytes <= c.N * c.bytes) return w;
  s.last.assign(c.groups * codes::kBytes, 0);
  std::copy(w.codes, w.codes + c.bytes, s.last.begin());
  w.codes = s.last.data();
  return w;
}

// The sums of one weight row with N input rows. What the zero points add is taken off at the end, less what offsets add.
template <int N, int bits, codes::Spread spread>
inline void row_sums(const Call& c, Scratch& s, const codes::Lanes<bits, spread>& lanes, int64_t row, int64_t n,
                     v8* out) {
  Weight w = weight_of(c, s, n);
  const codes::Group<bits>* x[N];
  float* scales[N];
  v8 less[N], total[N][2];
  for (int i = 0; i < N; ++i) {
    x[i] = c.input<bits>(row + i);
    scales[i] = s.scales.data() + i * c.padded;
    less[i] = total[i][0] = total[i][1] = all(0.0f);
  }
  const float middle = float(c.set.middle);
  for (int64_t b = 0; b < c.blocks; b += 8) {
    v8 scale = w.scale.at(b), zero = c.zeros.data ? scale * load(w.zeros + b) : scale;
    v8 offset = c.offsets.data ? fused(all(-middle), scale, -w.least.at(b)) : all(0.0f);
    for (int i = 0; i < N; ++i) {
      int64_t at = (row + i) * c.padded + b;
      store(scales[i] + b, scale * load(c.steps.data() + at));
      if (bits == 4) less[i] = fused(zero, load(c.totals.data() + at), less[i]);
      if (c.offsets.data) less[i] = fused(offset, load(c.sums.data() + at), less[i]);
    }
  }
  auto add = [&](int64_t g, int turn) {
    const uint8_t* at = w.codes + g * codes::kBytes;
    for (int i = 0; i < N; ++i) {
      v8 products = __builtin_convertvector(codes::multiply(at, x[i][g]), v8);
      total[i][turn] = fused(products, lanes.at(scales[i], g), total[i][turn]);
    }
  };
  int64_t g = 0;
  for (; g + 2 <= c.groups; g += 2) {
    if (N == 1) __builtin_prefetch(w.codes + g * codes::kBytes + kAhead);
    add(g, 0), add(g + 1, 1);
  }
  if (g < c.groups) add(g, 0);
  for (int i = 0; i < N; ++i) out[i] = total[i][0] + total[i][1] - less[i];
}

// N input rows times `count` weight rows from `first` -> out[i * kTile + j].
template <int N, int bits, codes::Spread spread>
void products(const Call& c, Scratch& s, int64_t row, int64_t first, int64_t count, float* out) {
  constexpr int64_t M = 4 / N;  // weight rows whose sums are added up together
  const codes::Lanes<bits, spread> lanes(c.set.block);
  for (int64_t j = 0; j < count; j += M) {
    v8 total[4];
    for (int64_t m = 0; m < M; ++m)
      row_sums<N, bits, spread>(c, s, lanes, row, first + std::min(j + m, count - 1), total + m * N);
    v4 four = sums(total[0], total[1], total[2], total[3]);
    for (int64_t m = 0; m < M; ++m)
      for (int64_t i = 0; i < N; ++i) out[i * kTile + j + m] = four[m * N + i];
  }
}

// Of a strip; 0 where there are none.
v8 biases(const Call& c, int64_t first, int64_t count) {
  alignas(32) float out[8] = {};
  if (c.bias.data) std::copy_n(c.bias.as<float>() + first, count, out);
  return load(out);
}

typedef void (*Products)(const Call&, Scratch&, int64_t, int64_t, int64_t, float*);

template <int N, int bits>
Products products_of(const Call& c) {
  int64_t size = codes::Group<bits>::kSize;
  if (c.set.block == size) return products<N, bits, codes::kOne>;
  return c.set.block < size ? products<N, bits, codes::kSeveral> : products<N, bits, codes::kOver>;
}

#if defined(__AVX2__)

// Weight rows [first, first + 8), the last one again where there are fewer, turned.
void turn(const Call& c, Scratch& s, int64_t first, codes::Strip& strip) {
  strip.reserve(c.groups, c.blocks);
  if (c.offsets.data) strip.offsets.resize(c.blocks * codes::kWide);
  const uint8_t* rows[codes::kWide];
  s.last.resize(codes::kWide * c.groups * codes::kBytes);
  for (int64_t i = 0; i < codes::kWide; ++i) {
    int64_t n = std::min(first + i, c.N - 1);
    rows[i] = c.q.as<uint8_t>() + n * c.bytes;
    if (n * c.bytes + c.groups * codes::kBytes > c.N * c.bytes) {
      uint8_t* copy = s.last.data() + i * c.groups * codes::kBytes;
      std::copy(rows[i], rows[i] + c.bytes, copy);
      rows[i] = copy;
    }
    const steps::Row scale = c.scale.row(n, s.last_scales), least = c.least.row(n, s.last_offsets);
    const uint8_t* zeros = c.zeros.data ? c.zeros.as<uint8_t>() + n * ((c.blocks + 1) / 2) : nullptr;
    for (int64_t at = 0; at < c.blocks; at += 8) {
      v8 scales = scale.at(at), offsets = fused(all(float(c.set.middle)), scales, least.at(at));
      for (int64_t b = at; b < std::min(at + 8, c.blocks); ++b) {
        strip.scales[b * codes::kWide + i] = scales[b - at];
        strip.zeros[b * codes::kWide + i] = scales[b - at] * (zeros ? float(zeros[b / 2] >> b % 2 * 4 & 15) : 1.0f);
        if (c.offsets.data) strip.offsets[b * codes::kWide + i] = offsets[b - at];
      }
    }
  }
  for (int64_t g = 0; g < c.groups; ++g) codes::turn(rows, g * codes::kBytes, strip.numbers + 16 * g);
}

template <int N>
void multiply(const Call& c, const codes::Strip& strip, int64_t row, v8* out) {
  const codes::Group<4>* x[N];
  const float *steps[N], *totals[N];
  for (int i = 0; i < N; ++i) {
    x[i] = c.input<4>(row + i);
    steps[i] = c.steps.data() + (row + i) * c.padded;
    totals[i] = c.totals.data() + (row + i) * c.padded;
  }
  int64_t shift = 0;
  while ((64 << shift) < c.set.block) ++shift;
  auto run = c.set.block > 64    ? codes::multiply<N, 0>
             : c.set.block == 64 ? codes::multiply<N, 1>
             : c.set.block == 32 ? codes::multiply<N, 2>
                                 : codes::multiply<N, 4>;
  run(strip, x, steps, totals, c.groups, c.blocks, shift, out);
  for (int64_t b = 0; c.offsets.data && b < c.blocks; ++b)
    for (int i = 0; i < N; ++i)
      out[i] = fused(all(c.sums[(row + i) * c.padded + b]), load(strip.offsets.data() + b * codes::kWide), out[i]);
}

// Eight columns of a block of input rows.
void finish(const Call& c, const codes::Strip& strip, const codes::Strip* gated, int64_t row, int64_t end, int64_t j) {
  static constexpr void (*run[])(const Call&, const codes::Strip&, int64_t, v8*) = {multiply<1>, multiply<2>,
                                                                                    multiply<4>};
  int64_t count = std::min(codes::kWide, c.wide - j);
  v8 bias = biases(c, j, count), other = biases(c, c.wide + j, gated ? count : 0), own[4], up[4];
  for (int64_t n; row < end; row += n) {
    n = end - row >= 4 ? 4 : end - row >= 2 ? 2 : 1;
    run[n / 2](c, strip, row, own);
    if (gated) run[n / 2](c, *gated, row, up);
    for (int64_t i = 0; i < n; ++i) {
      alignas(32) float y[codes::kWide];
      store(y, gated ? activated(c.set.gate, own[i] + bias) * (up[i] + other) : own[i] + bias);
      int64_t at = (row + i) * c.wide + j;
      const float* more = c.more.data ? c.more.as<float>() + at : nullptr;
      for (int64_t k = 0; k < count; ++k) c.out[at + k] = more ? more[k] + y[k] : y[k];
    }
  }
}

// A tile of weight rows, eight by eight, times all input rows: as many strips at once as a near cache holds,
// and as many input rows.
void work_turned(const Call& c, int64_t item) {
  thread_local Scratch scratch;
  thread_local std::vector<codes::Strip> strips, gated;
  int64_t first = item * c.tile, end = std::min(first + c.tile, c.wide);
  size_t most = std::max<int64_t>(1, kNear / (c.groups * 64 * codes::kWide));
  if (strips.size() < most) strips.resize(most), gated.resize(most);
  for (int64_t j = first; j < end; j += most * codes::kWide) {
    size_t count = std::min<size_t>(most, (end - j + codes::kWide - 1) / codes::kWide);
    for (size_t i = 0; i < count; ++i) {
      turn(c, scratch, j + i * codes::kWide, strips[i]);
      if (c.set.gate) turn(c, scratch, c.wide + j + i * codes::kWide, gated[i]);
    }
    for (int64_t row = 0; row < c.rows; row += kTogether)
      for (size_t i = 0; i < count; ++i)
        finish(c, strips[i], c.set.gate ? &gated[i] : nullptr, row, std::min(row + kTogether, c.rows),
               j + i * codes::kWide);
  }
}

#endif

// A tile of weight rows (and of those that they gate) times all input rows.
void work(const Call& c, int64_t item) {
#if defined(__AVX2__)
  if (c.turned) return work_turned(c, item);
#endif
  thread_local Scratch scratch;
  scratch.scales.resize(4 * c.padded);
  scratch.zeros.resize(c.padded);
  Products four[] = {products_of<1, 4>(c), products_of<2, 4>(c), products_of<4, 4>(c)};
  Products eight[] = {products_of<1, 8>(c), products_of<2, 8>(c), products_of<4, 8>(c)};
  Products* run = c.set.bits == 4 ? four : eight;
  const float* bias = c.bias.as<float>();
  int64_t first = item * c.tile, count = std::min(c.tile, c.wide - first);
  alignas(32) float own[4 * kTile], other[4 * kTile];
  for (int64_t row = 0, n; row < c.rows; row += n) {
    n = c.rows - row >= 4 ? 4 : c.rows - row >= 2 ? 2 : 1;
    auto multiply = [&](int64_t from, float* out) {
      run[n / 2](c, scratch, row, from, count, out);
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
  bool whole = c.set.bits == 8 ? !c.zeros.data : c.set.bits == 4;
  bool power = c.set.block >= 16 && (c.set.block & (c.set.block - 1)) == 0;
  bool weight = c.q.rank == 3 && c.q.size[2] == c.set.block * c.set.bits / 8 &&
                (c.K + c.set.block - 1) / c.set.block == c.blocks;
  bool around = (!c.zeros.data || (c.zeros.size[0] == c.N && c.zeros.size[1] == (c.blocks + 1) / 2)) &&
                (!c.bias.data || c.bias.size[0] == c.N) && (!c.more.data || c.more.count() == c.rows * c.wide);
  return whole && power && weight && around && (!c.norm.data || c.norm.size[0] == c.K) && (!c.set.gate || c.N % 2 == 0);
}

abi::Status* prepare(const Kernel& kernel, abi::Context* context, Call& c) {
  const abi::Api& api = kernel.api;
  abi::Tensor* inputs[] = {&c.x, &c.q, &c.scales, &c.zeros, &c.bias, &c.norm, &c.more, &c.offsets, &c.fine, &c.fine_offsets};
  for (size_t i = 0; i < std::size(inputs); ++i)
    if (abi::Status* s = abi::read(api, context, i, inputs[i])) return s;
  c.set = kernel.set;
  if (c.x.rank < 1) return api.fail("Linear: the input is a single number");
  c.K = c.x.size[c.x.rank - 1], c.N = c.q.size[0], c.wide = c.set.gate ? c.N / 2 : c.N;
  c.blocks = c.q.size[1], c.bytes = c.q.size[1] * c.q.size[2];
  c.groups = (c.bytes + codes::kBytes - 1) / codes::kBytes, c.padded = (c.blocks + 15) / 8 * 8;
  c.tile = std::clamp<int64_t>(c.wide / kPieces / 32 * 32, 32, kTile);
  c.rows = 1;
  for (size_t i = 0; i + 1 < c.x.rank; ++i) c.rows *= c.x.size[i];
  c.turned = c.set.bits == 4 && !c.set.exact && c.rows >= kTurned;
  bool lies = c.scale.read(c.scales, c.fine, c.N, c.blocks) && c.least.read(c.offsets, c.fine_offsets, c.N, c.blocks);
  if (!lies || !fits(c)) return api.fail("Linear: the sizes of the input and the weight do not fit; build the artifact again");
  int64_t sizes[4];
  std::copy(c.x.size, c.x.size + 4, sizes);
  sizes[c.x.rank - 1] = c.wide;
  abi::Value* out = nullptr;
  if (abi::Status* s = api.output(context, 0, sizes, c.x.rank, &out)) return s;
  void* data = nullptr;
  if (abi::Status* s = api.data(out, &data)) return s;
  c.out = static_cast<float*>(data);
  size_t group = c.set.bits == 8 ? sizeof(codes::Group<8>) : sizeof(codes::Group<4>);
  c.inputs.resize(c.rows * c.groups * group + 32);
  c.steps.resize(c.rows * c.padded);
  c.totals.resize(c.rows * c.padded);
  if (c.offsets.data) c.sums.resize(c.rows * c.padded);
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
