// accel::PageBounds: the most that a query's product with a page's keys can be, by the ranges of their channels: the
// positive part of q times the largest, and the negative part times the smallest. Pages are many, queries few: the
// ranges are read once, as they lie.
#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "abi.h"
#include "vector.h"

namespace {

constexpr int64_t kSome = 128;  // pages that a thread takes at once
constexpr int64_t kNear = 16;   // those that all queries go through together

struct Settings {};

struct Call {
  abi::Tensor q, high, low;
  float* out;
  int64_t pairs, M, N, D, pieces;
};

// Bounds of R queries, each its positive part [D] and then its negative one, over four pages.
template <int R>
void fours(const float* const* q, const float* const* high, const float* const* low, int64_t D, float* const* out) {
  v8 acc[R][4] = {};
  int64_t d = 0;
  for (; d + 8 <= D; d += 8)
    for (int i = 0; i < 4; ++i) {
      v8 h = held(high[i] + d), l = held(low[i] + d);
      for (int r = 0; r < R; ++r) acc[r][i] = fused(load(q[r] + D + d), l, fused(load(q[r] + d), h, acc[r][i]));
    }
  for (int r = 0; r < R; ++r) {
    v4 total = sums(acc[r][0], acc[r][1], acc[r][2], acc[r][3]);
    for (int64_t e = d; e < D; ++e)
      for (int i = 0; i < 4; ++i)
        total[i] = std::fma(q[r][D + e], low[i][e], std::fma(q[r][e], high[i][e], total[i]));
    std::memcpy(out[r], &total, sizeof total);
  }
}

// Pages [from, to) against all queries, of one head.
void near(const Call& c, const float* q, const float* high, const float* low, int64_t from, int64_t to, float* out) {
  for (int64_t m = 0, rows; m < c.M; m += rows) {
    rows = std::min<int64_t>(c.M - m == 4 ? 2 : 3, c.M - m);
    for (int64_t n = from; n < to; n += 4) {
      float room[3][4];
      const float *left[3], *upper[4], *lower[4];
      float* at[3];
      for (int64_t r = 0; r < rows; ++r) left[r] = q + (m + r) * 2 * c.D, at[r] = room[r];
      for (int64_t i = 0; i < 4; ++i) {
        int64_t page = std::min(n + i, to - 1) * c.D;
        upper[i] = high + page, lower[i] = low + page;
      }
      static constexpr decltype(&fours<1>) run[] = {fours<1>, fours<2>, fours<3>};
      run[rows - 1](left, upper, lower, c.D, at);
      for (int64_t r = 0; r < rows; ++r)
        std::copy(room[r], room[r] + std::min<int64_t>(4, to - n), out + (m + r) * c.N + n);
    }
  }
}

void work(const Call& c, int64_t item) {
  int64_t pair = item / c.pieces, from = item % c.pieces * kSome, to = std::min(c.N, from + kSome);
  const float* q = c.q.as<float>() + pair * c.M * c.D;
  const float* high = c.high.as<float>() + pair * c.N * c.D;
  const float* low = c.low.as<float>() + pair * c.N * c.D;
  thread_local std::vector<float> parts;
  parts.resize(c.M * 2 * c.D);
  for (int64_t m = 0; m < c.M; ++m)
    for (int64_t d = 0; d < c.D; ++d) {
      float x = q[m * c.D + d];
      parts[m * 2 * c.D + d] = x < 0 ? 0 : x;
      parts[(m * 2 + 1) * c.D + d] = x > 0 ? 0 : x;
    }
  for (int64_t n = from; n < to; n += kNear)
    near(c, parts.data(), high, low, n, std::min(to, n + kNear), c.out + pair * c.M * c.N);
}

typedef abi::Kernel<Settings> Kernel;

abi::Status* run(const Kernel& self, abi::Context* context) {
  const abi::Api& api = self.api;
  Call c;
  abi::Tensor* inputs[] = {&c.q, &c.high, &c.low};
  for (size_t i = 0; i < 3; ++i)
    if (abi::Status* s = abi::read(api, context, i, inputs[i])) return s;
  c.pairs = c.q.size[0] * c.q.size[1], c.M = c.q.size[2], c.D = c.q.size[3], c.N = c.high.size[2];
  bool same = std::equal(c.high.size, c.high.size + 4, c.low.size) && c.high.rank == 4 && c.low.rank == 4;
  if (!same || c.q.rank != 4 || c.high.size[0] != c.q.size[0] || c.high.size[1] != c.q.size[1] || c.high.size[3] != c.D)
    return api.fail("PageBounds: the sizes of the queries and the ranges do not fit");
  int64_t sizes[] = {c.q.size[0], c.q.size[1], c.M, c.N};
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

abi::Op page_bounds_op() {
  abi::Op op = abi::op_of<Settings, kNone, run>();
  op.name = [](const abi::Op*) { return "PageBounds"; };
  op.input_count = [](const abi::Op*) { return size_t(3); };
  op.input_type = [](const abi::Op*, size_t) { return int(abi::kFloat); };
  op.input_presence = [](const abi::Op*, size_t) { return int(abi::kRequired); };
  return op;
}
