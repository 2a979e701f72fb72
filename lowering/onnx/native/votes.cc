// accel::HeadVotes: what the heads of a layer together give to each slot that a token may choose, the logarithm of the
// sum of their softmax; of rounded scores, so that what differs by rounding alone is equal.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "abi.h"
#include "vector.h"

namespace {

constexpr int64_t kSome = 2048;  // slots that a thread takes at once
constexpr float kNone = -std::numeric_limits<float>::infinity();

struct Settings {
  float steps;
};

struct Call {
  Settings set;
  abi::Tensor scores, seen;
  float* out;
  int64_t B, H, T, C, pieces;
  std::vector<float> lse;  // [B,H,T], over what is seen
};

typedef int8_t b8 __attribute__((vector_size(8)));

// Eight scores from slot j on, rounded; those that are not seen are minus infinity. Past the end, too.
v8 at(const Call& c, const float* scores, const bool* seen, int64_t j) {
  v8 x = {};
  b8 there = {};
  if (j + 8 <= c.C) {
    x = load(scores + j);
    std::memcpy(&there, seen + j, sizeof there);
  } else {
    for (int64_t i = 0; j + i < c.C; ++i) x[i] = scores[j + i], there[i] = seen[j + i];
  }
  v8 wide = x * all(c.set.steps), size = wide < all(0.0f) ? -wide : wide;
  v8 near = size + all(8388608.0f) - all(8388608.0f);  // to the nearest, half to even
  near = size < all(8388608.0f) ? (wide < all(0.0f) ? -near : near) : wide;
  return __builtin_convertvector(there, i8) != all(0) ? near / all(c.set.steps) : all(kNone);
}

void sum_up(Call& c, int64_t item) {
  int64_t t = item % c.T, b = item / c.T / c.H;
  const float* scores = c.scores.as<float>() + item * c.C;
  const bool* seen = c.seen.as<bool>() + (b * c.T + t) * c.C;
  v8 high = all(kNone), total = {};
  for (int64_t j = 0; j < c.C; j += 8) {
    v8 x = at(c, scores, seen, j);
    high = x > high ? x : high;
  }
  float top = largest(high);
  top = top == kNone ? 0.0f : top;
  for (int64_t j = 0; j < c.C; j += 8) total += exponential(at(c, scores, seen, j) - all(top));
  c.lse[item] = top + std::log(sum(total));
}

void vote(Call& c, int64_t item) {
  int64_t piece = item % c.pieces, row = item / c.pieces, t = row % c.T, b = row / c.T;
  const bool* seen = c.seen.as<bool>() + row * c.C;
  float* out = c.out + row * c.C;
  thread_local std::vector<float> room;
  room.resize(c.H * 8);
  for (int64_t j = piece * kSome; j < std::min(c.C, (piece + 1) * kSome); j += 8) {
    v8 high = all(kNone), total = {};
    for (int64_t h = 0; h < c.H; ++h) {
      int64_t head = (b * c.H + h) * c.T + t;
      v8 share = at(c, c.scores.as<float>() + head * c.C, seen, j) - all(c.lse[head]);
      store(room.data() + h * 8, share);
      high = share > high ? share : high;
    }
    high = high < all(std::numeric_limits<float>::lowest()) ? all(0.0f) : high;
    for (int64_t h = 0; h < c.H; ++h) total += exponential(load(room.data() + h * 8) - high);
    v8 found = high + logarithm(total);
    for (int64_t i = 0; i < std::min<int64_t>(8, c.C - j); ++i) out[j + i] = seen[j + i] ? found[i] : kNone;
  }
}

typedef abi::Kernel<Settings> Kernel;

abi::Status* run(const Kernel& self, abi::Context* context) {
  const abi::Api& api = self.api;
  Call c = {};
  c.set = self.set;
  if (abi::Status* s = abi::read(api, context, 0, &c.scores)) return s;
  if (abi::Status* s = abi::read(api, context, 1, &c.seen)) return s;
  c.B = c.scores.size[0], c.H = c.scores.size[1], c.T = c.scores.size[2], c.C = c.scores.size[3];
  const int64_t* seen = c.seen.size;
  if (c.scores.rank != 4 || c.seen.rank != 4 || seen[0] != c.B || seen[1] != 1 || seen[2] != c.T || seen[3] != c.C)
    return api.fail("HeadVotes: the sizes of the scores and of what is seen do not fit");
  int64_t sizes[] = {c.B, 1, c.T, c.C};
  abi::Value* out = nullptr;
  if (abi::Status* s = api.output(context, 0, sizes, 4, &out)) return s;
  void* data = nullptr;
  if (abi::Status* s = api.data(out, &data)) return s;
  c.out = static_cast<float*>(data), c.pieces = (c.C + kSome - 1) / kSome;
  c.lse.resize(c.B * c.H * c.T);
  if (abi::Status* s = abi::parallel<sum_up>(api, context, c.lse.size(), c)) return s;
  return abi::parallel<vote>(api, context, c.B * c.T * c.pieces, c);
}

constexpr abi::Attribute<Settings> kAttributes[] = {{"steps", nullptr, &Settings::steps}};

}  // namespace

abi::Op head_votes_op() {
  abi::Op op = abi::op_of<Settings, kAttributes, run>();
  op.name = [](const abi::Op*) { return "HeadVotes"; };
  op.input_count = [](const abi::Op*) { return size_t(2); };
  op.input_type = [](const abi::Op*, size_t i) { return int(i ? abi::kBool : abi::kFloat); };
  op.input_presence = [](const abi::Op*, size_t) { return int(abi::kRequired); };
  return op;
}
