// accel::KeyProducts: products of a few queries with all keys of a cache, read once as they lie; where tables are given,
// each key is turned to a row of them before. KeyProductsInt8: the same of keys in codes (coded.h).
#include <algorithm>
#include <vector>

#include "abi.h"
#include "coded.h"
#include "vector.h"

namespace {

using coded::Rows;

constexpr int64_t kSome = 512;  // keys that a thread takes at once: of all heads one after another, by the same tables
constexpr int64_t kNear = 16;   // those that all queries go through together

struct Settings {
  int64_t interleaved;
};

struct Call {
  Settings set;
  abi::Tensor q, keys, at, cos, sin, scale;
  float* out;
  int64_t pairs, G, M, C, D, half;
};

// Products of R queries with four keys.
template <int R>
void fours(const float* const* q, const float* const* key, int64_t D, float (*out)[4]) {
  v8 acc[R][4] = {};
  int64_t d = 0;
  for (; d + 8 <= D; d += 8)
    for (int i = 0; i < 4; ++i) {
      v8 k = held(key[i] + d);
      for (int r = 0; r < R; ++r) acc[r][i] = fused(load(q[r] + d), k, acc[r][i]);
    }
  for (int r = 0; r < R; ++r) {
    v4 total = sums(acc[r][0], acc[r][1], acc[r][2], acc[r][3]);
    for (int64_t e = d; e < D; ++e)
      for (int i = 0; i < 4; ++i) total[i] = std::fma(q[r][e], key[i][e], total[i]);
    std::memcpy(out[r], &total, sizeof total);
  }
}

// A key, turned by a row of the tables.
void turn(const Call& c, const float* key, int64_t row, float* out) {
  const float *cos = c.cos.as<float>() + row * c.half, *sin = c.sin.as<float>() + row * c.half;
  if (c.set.interleaved) {
    for (int64_t d = 0; d < c.half; ++d) {
      float a = key[2 * d], b = key[2 * d + 1];
      out[2 * d] = a * cos[d] - b * sin[d], out[2 * d + 1] = b * cos[d] + a * sin[d];
    }
  } else {
    int64_t d = 0;
    for (; d + 8 <= c.half; d += 8) {
      v8 a = load(key + d), b = load(key + c.half + d), x = load(cos + d), y = load(sin + d);
      store(out + d, a * x - b * y), store(out + c.half + d, b * x + a * y);
    }
    for (; d < c.half; ++d) {
      float a = key[d], b = key[c.half + d];
      out[d] = a * cos[d] - b * sin[d], out[c.half + d] = b * cos[d] + a * sin[d];
    }
  }
  std::copy(key + 2 * c.half, key + c.D, out + 2 * c.half);
}

void work(const Call& c, int64_t item) {
  int64_t pair = item % c.pairs, from = item / c.pairs * kSome, to = std::min(c.C, from + kSome);
  Rows rows = coded::rows_of(c.keys, c.scale).at(pair * c.C);
  const int64_t* at = c.at.data ? c.at.as<int64_t>() + pair / c.G * c.C : nullptr;
  const float* q = c.q.as<float>() + pair * c.M * c.D;
  float* out = c.out + pair * c.M * c.C;
  thread_local std::vector<float> room, turned;
  room.resize(kNear * c.D), turned.resize(kNear * c.D);
  for (int64_t n = from; n < to; n += kNear) {
    int64_t some = std::min(kNear, to - n);
    const float* keys = rows.at(n).read(some, room.data());
    if (at) {
      for (int64_t i = 0; i < some; ++i)
        turn(c, keys + i * c.D, std::clamp<int64_t>(at[n + i], 0, c.cos.size[0] - 1), turned.data() + i * c.D);
      keys = turned.data();
    }
    for (int64_t m = 0, many; m < c.M; m += many) {
      many = std::min<int64_t>(c.M - m == 4 ? 2 : 3, c.M - m);
      const float* left[3];
      for (int64_t r = 0; r < many; ++r) left[r] = q + (m + r) * c.D;
      for (int64_t i = 0; i < some; i += 4) {
        const float* key[4];
        float found[3][4];
        for (int64_t k = 0; k < 4; ++k) key[k] = keys + std::min(i + k, some - 1) * c.D;
        static constexpr decltype(&fours<1>) run[] = {fours<1>, fours<2>, fours<3>};
        run[many - 1](left, key, c.D, found);
        for (int64_t r = 0; r < many; ++r)
          std::copy(found[r], found[r] + std::min<int64_t>(4, some - i), out + (m + r) * c.C + n + i);
      }
    }
  }
}

typedef abi::Kernel<Settings> Kernel;

bool fits(const Call& c, bool coded) {
  const abi::Tensor &q = c.q, &k = c.keys;
  bool turned = c.at.rank == 2 && c.at.size[0] == q.size[0] && c.at.size[1] == c.C && c.cos.rank == 2 &&
                c.sin.rank == 2 && c.cos.count() == c.sin.count() && c.cos.size[0] == c.sin.size[0] && c.cos.size[0] > 0 &&
                2 * c.half <= c.D;
  bool read = coded || k.type == abi::kFloat || k.type == abi::kHalf;
  return read && q.rank == 4 && k.rank == 4 && k.size[0] == q.size[0] && k.size[1] == q.size[1] && k.size[3] == c.D &&
         (turned || !c.at.rank) && (!coded || (c.scale.rank && c.scale.count() == c.pairs * c.C));
}

template <bool kCoded>
abi::Status* run(const Kernel& self, abi::Context* context) {
  const abi::Api& api = self.api;
  Call c = {};
  c.set = self.set;
  abi::Tensor* inputs[] = {&c.q, &c.keys, &c.at, &c.cos, &c.sin, &c.scale};
  for (size_t i = 0; i < (kCoded ? 6 : 5); ++i)
    if (abi::Status* s = abi::read(api, context, i, inputs[i])) return s;
  c.pairs = c.q.size[0] * c.q.size[1], c.G = c.q.size[1], c.M = c.q.size[2], c.D = c.q.size[3], c.C = c.keys.size[2];
  c.half = c.at.rank ? c.cos.size[1] : 0;
  if (!fits(c, kCoded)) return api.fail("KeyProducts: the sizes of the queries, the keys and the tables do not fit");
  int64_t sizes[] = {c.q.size[0], c.G, c.M, c.C};
  abi::Value* out = nullptr;
  if (abi::Status* s = api.output(context, 0, sizes, 4, &out)) return s;
  void* data = nullptr;
  if (abi::Status* s = api.data(out, &data)) return s;
  c.out = static_cast<float*>(data);
  return abi::parallel<work>(api, context, c.M ? c.pairs * ((c.C + kSome - 1) / kSome) : 0, c);
}

constexpr abi::Attribute<Settings> kAttributes[] = {{"interleaved", &Settings::interleaved, nullptr}};

template <bool kCoded>
abi::Op op() {
  abi::Op op = abi::op_of<Settings, kAttributes, run<kCoded>>();
  op.name = [](const abi::Op*) { return kCoded ? "KeyProductsInt8" : "KeyProducts"; };
  op.input_count = [](const abi::Op*) { return size_t(kCoded ? 6 : 5); };
  op.input_type = [](const abi::Op*, size_t i) {
    return int(i == 2 ? abi::kInt64 : i != 1 ? abi::kFloat : kCoded ? abi::kInt8 : abi::kAny);
  };
  op.input_presence = [](const abi::Op*, size_t i) { return int(i > 1 ? abi::kOptional : abi::kRequired); };
  return op;
}

}  // namespace

abi::Op key_products_op(bool coded) { return coded ? op<true>() : op<false>(); }
