// accel::Dots: x y^T for a few rows x of each head, and many rows y, which are read once, as they lie.
#include <algorithm>
#include <array>
#include <cmath>

#include "abi.h"
#include "vector.h"

namespace {

constexpr int64_t kSome = 128;   // rows of y that a thread takes at once
constexpr int64_t kNear = 16;    // those that all rows of x go through together
constexpr int64_t kAhead = 32;   // rows of y that memory is asked for ahead

struct Settings {};

struct Call {
  abi::Tensor x, y;
  float* out;
  int64_t pairs, M, N, D, pieces;
};

// Products of R rows x with four rows y.
template <int R>
void fours(const float* const* x, const float* const* y, int64_t D, float* const* out) {
  v8 acc[R][4] = {};
  int64_t d = 0;
  for (; d + 8 <= D; d += 8) {
    v8 a[R];
    for (int r = 0; r < R; ++r) a[r] = held(x[r] + d);
    for (int i = 0; i < 4; ++i) {
      v8 b = held(y[i] + d);
      for (int r = 0; r < R; ++r) acc[r][i] = fused(a[r], b, acc[r][i]);
    }
  }
  for (int r = 0; r < R; ++r) {
    v4 total = sums(acc[r][0], acc[r][1], acc[r][2], acc[r][3]);
    for (int64_t e = d; e < D; ++e)
      for (int i = 0; i < 4; ++i) total[i] = std::fma(x[r][e], y[i][e], total[i]);
    std::memcpy(out[r], &total, sizeof total);
  }
}

// Rows [from, to) of y against all rows of x, of one head.
void near(const Call& c, const float* x, const float* y, int64_t from, int64_t to, float* out) {
  for (int64_t m = 0, rows; m < c.M; m += rows) {
    rows = std::min<int64_t>(c.M - m == 4 ? 2 : 3, c.M - m);
    for (int64_t n = from; n < to; n += 4) {
      float room[3][4];
      const float *left[3], *right[4];
      float* at[3];
      for (int64_t r = 0; r < rows; ++r) left[r] = x + (m + r) * c.D, at[r] = room[r];
      for (int64_t i = 0; i < 4; ++i) right[i] = y + std::min(n + i, to - 1) * c.D;
      static constexpr decltype(&fours<1>) run[] = {fours<1>, fours<2>, fours<3>};
      run[rows - 1](left, right, c.D, at);
      for (int64_t r = 0; r < rows; ++r)
        std::copy(room[r], room[r] + std::min<int64_t>(4, to - n), out + (m + r) * c.N + n);
    }
  }
}

void work(const Call& c, int64_t item) {
  int64_t pair = item / c.pieces, from = item % c.pieces * kSome, to = std::min(c.N, from + kSome);
  const float* x = c.x.as<float>() + pair * c.M * c.D;
  const float* y = c.y.as<float>() + pair * c.N * c.D;
  for (int64_t n = from; n < to; n += kNear) {
    int64_t ahead = (n + kAhead) * c.D;
    for (int64_t i = 0; i < kNear * c.D; i += 16) __builtin_prefetch(y + ahead + i);
    near(c, x, y, n, std::min(to, n + kNear), c.out + pair * c.M * c.N);
  }
}

typedef abi::Kernel<Settings> Kernel;

abi::Status* run(const Kernel& self, abi::Context* context) {
  const abi::Api& api = self.api;
  Call c;
  if (abi::Status* s = abi::read(api, context, 0, &c.x)) return s;
  if (abi::Status* s = abi::read(api, context, 1, &c.y)) return s;
  c.pairs = c.x.size[0] * c.x.size[1], c.M = c.x.size[2], c.D = c.x.size[3], c.N = c.y.size[2];
  if (c.x.rank != 4 || c.y.rank != 4 || c.y.size[0] * c.y.size[1] != c.pairs || c.y.size[3] != c.D)
    return api.fail("Dots: the sizes of the rows do not fit");
  int64_t sizes[] = {c.x.size[0], c.x.size[1], c.M, c.N};
  abi::Value* out = nullptr;
  if (abi::Status* s = api.output(context, 0, sizes, 4, &out)) return s;
  void* data = nullptr;
  if (abi::Status* s = api.data(out, &data)) return s;
  c.out = static_cast<float*>(data);
  c.pieces = (c.N + kSome - 1) / kSome;
  return abi::parallel<work>(api, context, c.M ? c.pairs * c.pieces : 0, c);
}

constexpr std::array<abi::Attribute<Settings>, 0> kNone = {};

}  // namespace

abi::Op dots_op() {
  abi::Op op = abi::op_of<Settings, kNone, run>();
  op.name = [](const abi::Op*) { return "Dots"; };
  op.input_count = [](const abi::Op*) { return size_t(2); };
  op.input_type = [](const abi::Op*, size_t) { return int(abi::kFloat); };
  op.input_presence = [](const abi::Op*, size_t) { return int(abi::kRequired); };
  return op;
}
