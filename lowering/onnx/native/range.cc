// accel::PageRange: the largest and the smallest keys, channel by channel, of the pages of a cache that a call fills;
// what is said of the others stays where it lies. PageRangeInt8 reads codes and scales (coded.h).
#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "abi.h"
#include "coded.h"
#include "vector.h"

namespace {

constexpr int64_t kMany = 1 << 16;  // keys' numbers from which on threads share the work

struct Settings {
  int64_t page;
};

struct Call {
  Settings set;
  abi::Tensor high, low, keys, q_pos, slots, scale;
  float *high_out, *low_out;
  int64_t B, G, C, D, N, count;  // count: pages that a call fills at most
};

// Both of `count` rows [count, D], where what is no number stays none.
void range(const float* rows, int64_t count, int64_t D, float* high, float* low) {
  int64_t d = 0;
  for (; d + 8 <= D; d += 8) {
    v8 h = load(rows + d), l = h;
    i8 none = h != h;
    for (int64_t r = 1; r < count; ++r) {
      v8 x = load(rows + r * D + d);
      h = x > h ? x : h;
      l = x < l ? x : l;
      none |= x != x;
    }
    v8 nan = all(std::numeric_limits<float>::quiet_NaN());
    store(high + d, none ? nan : h), store(low + d, none ? nan : l);
  }
  for (; d < D; ++d) {
    high[d] = low[d] = rows[d];
    for (int64_t r = 1; r < count; ++r) {
      float x = rows[r * D + d];
      if (x > high[d] || x != x) high[d] = x;
      if (x < low[d] || x != x) low[d] = x;
    }
  }
}

void work(const Call& c, int64_t item) {
  int64_t pair = item / c.count, start = c.slots.as<int64_t>()[pair / c.G];
  int64_t page = start / c.set.page + item % c.count, slot = page * c.set.page, end = slot + c.set.page;
  if (end > std::min(start + c.q_pos.size[1], c.C)) return;  // it is not full
  coded::Rows keys = coded::rows_of(c.keys, c.scale);
  thread_local std::vector<float> room;
  room.resize(keys.floats ? 0 : c.set.page * c.D);
  const float* rows = keys.at(pair * c.C + slot).read(c.set.page, room.data());
  range(rows, c.set.page, c.D, c.high_out + (pair * c.N + page) * c.D, c.low_out + (pair * c.N + page) * c.D);
}

typedef abi::Kernel<Settings> Kernel;

const char* unfit(const Call& c) {
  bool pages = c.set.page > 0 && c.C > 0 && c.N == (c.C + c.set.page - 1) / c.set.page;
  for (const abi::Tensor* x : {&c.high, &c.low})
    pages = pages && x->rank == 4 && x->size[0] == c.B && x->size[1] == c.G && x->size[2] == c.N && x->size[3] == c.D;
  bool call = c.keys.rank == 4 && c.q_pos.rank == 2 && c.q_pos.size[0] == c.B && c.slots.rank == 1 && c.slots.size[0] == c.B;
  if (!c.scale.data && c.keys.type != abi::kFloat && c.keys.type != abi::kHalf) return "PageRange: keys are floats or halves";
  if (!pages || !call || (c.scale.data && c.scale.count() != c.B * c.G * c.C))
    return "PageRange: the sizes of the pages and the keys do not fit";
  for (int64_t b = 0; b < c.B; ++b)
    if (c.slots.as<int64_t>()[b] < 0) return "PageRange: slots start at 0";
  return nullptr;
}

template <bool kCoded>
abi::Status* run(const Kernel& self, abi::Context* context) {
  const abi::Api& api = self.api;
  Call c = {};
  c.set = self.set;
  abi::Tensor* inputs[] = {&c.high, &c.low, &c.keys, &c.q_pos, &c.slots, &c.scale};
  for (size_t i = 0; i < (kCoded ? 6 : 5); ++i)
    if (abi::Status* s = abi::read(api, context, i, inputs[i])) return s;
  c.B = c.keys.size[0], c.G = c.keys.size[1], c.C = c.keys.size[2], c.D = c.keys.size[3], c.N = c.high.size[2];
  if (const char* why = unfit(c)) return api.fail(why);
  c.count = (c.q_pos.size[1] + c.set.page - 1) / c.set.page;
  const abi::Tensor* before[] = {&c.high, &c.low};
  float** now[] = {&c.high_out, &c.low_out};
  for (size_t i = 0; i < 2; ++i) {
    abi::Value* out = nullptr;
    void* data = nullptr;
    if (abi::Status* s = api.output(context, i, before[i]->size, 4, &out)) return s;
    if (abi::Status* s = api.data(out, &data)) return s;
    if (data != before[i]->data) std::memcpy(data, before[i]->data, before[i]->count() * sizeof(float));
    *now[i] = static_cast<float*>(data);
  }
  int64_t items = c.B * c.G * c.count;
  if (items * c.set.page * c.D >= kMany) return abi::parallel<work>(api, context, items, c);
  for (int64_t i = 0; i < items; ++i) work(c, i);
  return nullptr;
}

constexpr abi::Attribute<Settings> kAttributes[] = {{"page", &Settings::page, nullptr}};

template <bool kCoded>
abi::Op op() {
  abi::Op op = abi::op_of<Settings, kAttributes, run<kCoded>>();
  op.name = [](const abi::Op*) { return kCoded ? "PageRangeInt8" : "PageRange"; };
  op.input_count = [](const abi::Op*) { return size_t(kCoded ? 6 : 5); };
  op.input_type = [](const abi::Op*, size_t i) {
    return int(i == 3 || i == 4 ? abi::kInt64 : i != 2 ? abi::kFloat : kCoded ? abi::kInt8 : abi::kAny);
  };
  op.input_presence = [](const abi::Op*, size_t) { return int(abi::kRequired); };
  op.output_count = [](const abi::Op*) { return size_t(2); };
  return op;
}

}  // namespace

abi::Op page_range_op(bool coded) { return coded ? op<true>() : op<false>(); }
