// accel::BestTokens: the slots of the units worth most, unit after unit, until so many are listed. accel::UnitsSeen:
// which units have a slot that a token may choose. Labels are read as they lie, and never sorted.
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "abi.h"

namespace {

struct Settings {
  int64_t count;
};

struct Call {
  Settings set;
  abi::Tensor worth, label, seen;
  void* out;
  int64_t B, G, T, C, U;
};

int64_t unit(const Call& c, int64_t label) { return std::clamp<int64_t>(label, 0, c.U - 1); }

// What a token of a head may choose.
const bool* seen_by(const Call& c, int64_t item) {
  int64_t t = item % c.T, g = item / c.T % c.G, b = item / c.T / c.G;
  int64_t groups = c.seen.size[1];
  return c.seen.as<bool>() + ((b * groups + (groups > 1 ? g : 0)) * c.T + t) * c.C;
}

void list(const Call& c, int64_t item) {
  const float* given = c.worth.as<float>() + item * c.U;
  const int64_t* label = c.label.as<int64_t>() + item / c.T * c.C;
  const bool* seen = seen_by(c, item);
  thread_local std::vector<float> worth;
  thread_local std::vector<int64_t> order, next;
  worth.assign(given, given + c.U), order.resize(c.U), next.assign(c.U, 0);
  for (float& x : worth)
    if (std::isnan(x)) x = std::numeric_limits<float>::infinity();
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return worth[a] > worth[b]; });
  for (int64_t i = 0; i < c.C; ++i) next[unit(c, label[i])] += seen[i];
  int64_t start = 0;
  for (int64_t u : order) {  // where a unit's first slot is listed
    int64_t many = next[u];
    next[u] = start, start += many;
  }
  int64_t* out = static_cast<int64_t*>(c.out) + item * c.set.count;
  for (int64_t i = 0; i < c.C; ++i) {
    if (!seen[i]) continue;
    int64_t at = next[unit(c, label[i])]++;
    if (at < c.set.count) out[at] = i;
  }
  std::fill(out + std::min(start, c.set.count), out + c.set.count, -1);
}

void mark(const Call& c, int64_t item) {
  const int64_t* label = c.label.as<int64_t>() + item / c.T * c.C;
  const bool* seen = seen_by(c, item);
  bool* out = static_cast<bool*>(c.out) + item * c.U;
  std::fill(out, out + c.U, false);
  for (int64_t i = 0; i < c.C; ++i) out[unit(c, label[i])] |= seen[i];
}

typedef abi::Kernel<Settings> Kernel;

abi::Status* prepare(const abi::Api& api, abi::Context* context, int64_t last, bool fits, Call& c) {
  int64_t groups = c.seen.size[1];
  if (!fits || c.label.rank != 3 || c.seen.rank != 4 || c.seen.size[0] != c.B || (groups != 1 && groups != c.G) ||
      c.seen.size[3] != c.C || (c.U < 1 && c.B * c.G * c.T * c.C > 0))
    return api.fail("BestTokens: the sizes of the units, the labels and what is seen do not fit");
  int64_t sizes[] = {c.B, c.G, c.T, last};
  abi::Value* out = nullptr;
  if (abi::Status* s = api.output(context, 0, sizes, 4, &out)) return s;
  return api.data(out, &c.out);
}

abi::Status* best(const Kernel& self, abi::Context* context) {
  const abi::Api& api = self.api;
  Call c = {};
  c.set = self.set;
  abi::Tensor* inputs[] = {&c.worth, &c.label, &c.seen};
  for (size_t i = 0; i < 3; ++i)
    if (abi::Status* s = abi::read(api, context, i, inputs[i])) return s;
  const int64_t* sizes = c.worth.size;
  c.B = sizes[0], c.G = sizes[1], c.T = sizes[2], c.U = sizes[3], c.C = c.label.size[2];
  bool fits = c.worth.rank == 4 && c.label.size[0] == c.B && c.label.size[1] == c.G && c.seen.size[2] == c.T && c.set.count > 0;
  if (abi::Status* s = prepare(api, context, c.set.count, fits, c)) return s;
  return abi::parallel<list>(api, context, c.B * c.G * c.T, c);
}

abi::Status* some(const Kernel& self, abi::Context* context) {
  const abi::Api& api = self.api;
  Call c = {};
  abi::Tensor count;
  abi::Tensor* inputs[] = {&c.label, &c.seen, &count};
  for (size_t i = 0; i < 3; ++i)
    if (abi::Status* s = abi::read(api, context, i, inputs[i])) return s;
  c.B = c.label.size[0], c.G = c.label.size[1], c.C = c.label.size[2], c.T = c.seen.size[2];
  c.U = count.count() == 1 ? *count.as<int64_t>() : -1;
  if (abi::Status* s = prepare(api, context, c.U, c.U >= 0, c)) return s;
  return abi::parallel<mark>(api, context, c.B * c.G * c.T, c);
}

constexpr abi::Attribute<Settings> kAttributes[] = {{"count", &Settings::count, nullptr}};
constexpr std::array<abi::Attribute<Settings>, 0> kNone = {};

}  // namespace

abi::Op best_tokens_op() {
  abi::Op op = abi::op_of<Settings, kAttributes, best>();
  op.name = [](const abi::Op*) { return "BestTokens"; };
  op.input_count = [](const abi::Op*) { return size_t(3); };
  op.input_type = [](const abi::Op*, size_t i) { return int(i == 0 ? abi::kFloat : i == 1 ? abi::kInt64 : abi::kBool); };
  op.input_presence = [](const abi::Op*, size_t) { return int(abi::kRequired); };
  op.output_type = [](const abi::Op*, size_t) { return int(abi::kInt64); };
  return op;
}

abi::Op units_seen_op() {
  abi::Op op = abi::op_of<Settings, kNone, some>();
  op.name = [](const abi::Op*) { return "UnitsSeen"; };
  op.input_count = [](const abi::Op*) { return size_t(3); };
  op.input_type = [](const abi::Op*, size_t i) { return int(i == 1 ? abi::kBool : abi::kInt64); };
  op.input_presence = [](const abi::Op*, size_t) { return int(abi::kRequired); };
  op.output_type = [](const abi::Op*, size_t) { return int(abi::kBool); };
  return op;
}
