// accel::BestPages: the pages of a cache that each token reads: its own, and of those before it that it sees, the ones
// worth most. Of equals the earlier one; what is no number is worth most, minus infinity nothing.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <vector>

#include "abi.h"
#include "slots.h"

namespace {

constexpr int64_t kBlock = 8;
constexpr size_t kMany = 256;           // from which on numbers are counted by their bits, not compared
constexpr int kDigits[] = {10, 11, 11};  // bits of a number, from the lowest on

struct Settings {
  int64_t count, page, mask, window;
};

struct Call {
  Settings set;
  abi::Tensor worth, q_pos, k_pos, slots;
  int64_t* out;
  int64_t B, G, T, N, K;         // K: pages of a list, the token's own among them
  std::vector<int64_t> newest;  // [B,N]: the position in a page's last slot
};

// Numbers in the order of worth, then of pages backwards: one comparison for both.
uint64_t ranked(float worth, int64_t page) {
  worth = std::isnan(worth) ? std::numeric_limits<float>::infinity() : worth + 0.0f;  // no -0
  uint32_t bits;
  std::memcpy(&bits, &worth, sizeof bits);
  bits ^= uint32_t(int32_t(bits) >> 31) | 0x80000000u;  // those below 0 the other way round, and first
  return uint64_t(bits) << 32 | (0xffffffffu - uint32_t(page));
}

// The `some` first of [found, end), in order; they stand in the order of pages. Digit by digit, from the highest, it is
// counted how many reach a number, until the least is known that is among them; then they are sorted digit by digit.
void select_many(uint64_t* found, uint64_t* end, size_t some, uint64_t* room) {
  constexpr int kMost = 1 << 11;
  uint32_t counts[2][kMost], least = 0;  // two, since neighbours often count alike, and one would wait for the other
  size_t equal = some;                   // how many of those that are the least number so far are taken
  for (int i = 2, shift = 32; i >= 0; --i) {
    int above = shift;
    shift -= kDigits[i];
    uint32_t mask = (1u << kDigits[i]) - 1;
    std::fill(counts[0], counts[2], 0);
    for (uint64_t* x = found; x < end; ++x) {
      uint32_t number = *x >> 32;
      counts[(x - found) % 2][number >> shift & mask] += above == 32 || number >> above == least >> above;
    }
    uint32_t digit = mask;
    for (size_t here; (here = counts[0][digit] + counts[1][digit]) < equal; --digit) equal -= here;
    least |= digit << shift;
    uint64_t* to = found;
    for (uint64_t* x = found; x < end; ++x) *to = *x, to += uint32_t(*x >> 32) >> shift >= least >> shift;
    end = to;
  }
  uint64_t* to = found;
  for (uint64_t* x = found; x < end; ++x) {
    uint32_t number = *x >> 32;
    bool taken = number > least || (number == least && equal);
    equal -= number == least && equal;
    *to = *x, to += taken;
  }
  uint64_t *from = found, *other = room;
  for (int i = 0, shift = 32; i < 3; shift += kDigits[i++]) {
    uint32_t mask = (1u << kDigits[i]) - 1, next[kMost] = {}, start = 0;
    for (size_t j = 0; j < some; ++j) ++next[from[j] >> shift & mask];
    for (uint32_t digit = mask + 1; digit-- > 0;) start += next[digit], next[digit] = start - next[digit];
    for (size_t j = 0; j < some; ++j) other[next[from[j] >> shift & mask]++] = from[j];
    std::swap(from, other);
  }
  if (from != found) std::copy(from, from + some, found);
}

// The `some` first of [found, end), in order. Of blocks, as many as are wanted hold one that reaches a bound: what does
// not reach it, which is most of many, is passed over.
void select(uint64_t* found, uint64_t* end, size_t some, uint64_t* most) {
  uint64_t* last = most;
  for (uint64_t* x = found; end - x >= kBlock; x += kBlock, ++last) {
    *last = *x;
    for (int64_t i = 1; i < kBlock; ++i) *last = std::max(*last, x[i]);
  }
  if (some && most + some < last) {
    std::nth_element(most, most + (some - 1), last, std::greater<>());
    uint64_t *to = found, bound = most[some - 1];
    for (uint64_t* x = found; x < end; to += *x++ >= bound) *to = *x;
    end = to;
  }
  if (found + some < end) std::nth_element(found, found + some, end, std::greater<>());
  std::sort(found, found + some, std::greater<>());
}

void work(const Call& c, int64_t item) {
  int64_t t = item % c.T, b = item / c.T / c.G;
  int64_t own = (c.slots.as<int64_t>()[b] + t) / c.set.page;
  slots::Range seen = slots::seen(c.set.mask, c.set.window, c.q_pos.as<int64_t>()[b * c.T + t]);
  const float* worth = c.worth.as<float>() + item * c.N;
  const int64_t* newest = c.newest.data() + b * c.N;
  thread_local std::vector<uint64_t> room;
  room.resize(c.N * 2 + 1);  // one more, since what is not taken is written too
  uint64_t *found = room.data(), *end = found;
  for (int64_t n = 0; n < std::min(c.N, own); ++n) {
    *end = ranked(worth[n], n);
    end += newest[n] >= seen.first && newest[n] <= seen.last && !(worth[n] == -std::numeric_limits<float>::infinity());
  }
  size_t some = std::min<size_t>(end - found, c.K - 1);
  some < kMany ? select(found, end, some, found + c.N + 1) : select_many(found, end, some, found + c.N + 1);
  int64_t* out = c.out + item * c.K;
  out[0] = own;
  for (size_t i = 0; i < some; ++i) out[1 + i] = 0xffffffffu - uint32_t(found[i]);
  std::fill(out + 1 + some, out + c.K, -1);
}

typedef abi::Kernel<Settings> Kernel;

bool fits(const Call& c) {
  const abi::Tensor &q = c.q_pos, &k = c.k_pos;
  return c.worth.rank == 4 && q.rank == 2 && k.rank == 2 && c.slots.rank == 1 && q.size[0] == c.B && k.size[0] == c.B &&
         c.slots.size[0] == c.B && q.size[1] == c.T && c.set.page > 0 && c.set.count > 0 && k.size[1] > 0 &&
         c.N == (k.size[1] + c.set.page - 1) / c.set.page;
}

abi::Status* run(const Kernel& self, abi::Context* context) {
  const abi::Api& api = self.api;
  Call c;
  c.set = self.set;
  abi::Tensor* inputs[] = {&c.worth, &c.q_pos, &c.k_pos, &c.slots};
  for (size_t i = 0; i < 4; ++i)
    if (abi::Status* s = abi::read(api, context, i, inputs[i])) return s;
  c.B = c.worth.size[0], c.G = c.worth.size[1], c.T = c.worth.size[2], c.N = c.worth.size[3];
  if (!fits(c)) return api.fail("BestPages: the sizes of the pages and the positions do not fit");
  c.K = std::min(c.set.count - 1, c.N) + 1;
  int64_t sizes[] = {c.B, c.G, c.T, c.K}, slots = c.k_pos.size[1];
  abi::Value* out = nullptr;
  if (abi::Status* s = api.output(context, 0, sizes, 4, &out)) return s;
  void* data = nullptr;
  if (abi::Status* s = api.data(out, &data)) return s;
  c.out = static_cast<int64_t*>(data);
  for (int64_t b = 0; b < c.B; ++b)
    for (int64_t n = 0; n < c.N; ++n)
      c.newest.push_back(c.k_pos.as<int64_t>()[b * slots + std::min(slots, (n + 1) * c.set.page) - 1]);
  return abi::parallel<work>(api, context, c.B * c.G * c.T, c);
}

constexpr abi::Attribute<Settings> kAttributes[] = {
    {"count", &Settings::count, nullptr},
    {"page", &Settings::page, nullptr},
    {"mask", &Settings::mask, nullptr},
    {"window", &Settings::window, nullptr},
};

}  // namespace

abi::Op best_pages_op() {
  abi::Op op = abi::op_of<Settings, kAttributes, run>();
  op.name = [](const abi::Op*) { return "BestPages"; };
  op.input_count = [](const abi::Op*) { return size_t(4); };
  op.input_type = [](const abi::Op*, size_t i) { return int(i ? abi::kInt64 : abi::kFloat); };
  op.input_presence = [](const abi::Op*, size_t) { return int(abi::kRequired); };
  op.output_type = [](const abi::Op*, size_t) { return int(abi::kInt64); };
  return op;
}
