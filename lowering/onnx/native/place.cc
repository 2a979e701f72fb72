// accel::Place: what lies between a layer's packed product and its attention. Queries, keys and values are
// taken apart, queries and keys normed (where the model does that) and turned by their positions, and keys
// and values written into their slots. PlaceInt8 writes codes and scales (coded.h), PlaceFloat16 halves.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "abi.h"
#include "coded.h"
#include "vector.h"

namespace {

enum Form { kFloats, kInt8, kHalves };  // of what is written
constexpr const char* kNames[] = {"Place", "PlaceInt8", "PlaceFloat16"};
constexpr abi::Type kTypes[] = {abi::kFloat, abi::kInt8, abi::kHalf};
constexpr size_t kSizes[] = {4, 1, 2};

struct Settings {
  int64_t heads, interleaved, turned;  // turned: the part of a head that rotates; 0: all of it
  float q_epsilon, k_epsilon;
};

struct Call {
  Settings set;
  abi::Tensor x, cos, sin, positions, slots, k, v, k_scale, v_scale, q_norm, k_norm;
  void *q_out, *k_out, *v_out, *k_scale_out, *v_scale_out;
  int64_t B, T, H, G, C, D, W, half;
  Form form;
};

// One head: normed where there is a weight, then turned -> out.
void turn(const Call& c, const float* x, const float* norm, float epsilon, const float* cos, const float* sin,
          float* out) {
  float by = 1;
  if (norm) {
    float squares = 0;
    for (int64_t d = 0; d < c.D; ++d) squares = std::fma(x[d], x[d], squares);
    by = 1 / std::sqrt(squares / float(c.D) + epsilon);
  }
  auto at = [&](int64_t d) { return norm ? x[d] * by * norm[d] : x[d]; };
  auto pair = [&](int64_t i, int64_t first, int64_t second) {
    float a = at(first), b = at(second);
    out[first] = a * cos[i] - b * sin[i];
    out[second] = a * sin[i] + b * cos[i];
  };
  for (int64_t i = 0; i < c.half && c.set.interleaved; ++i) pair(i, 2 * i, 2 * i + 1);
  for (int64_t i = 0; i < c.half && !c.set.interleaved; ++i) pair(i, i, i + c.half);
  for (int64_t d = 2 * c.half; d < c.D; ++d) out[d] = at(d);
}

void work(const Call& c, int64_t token) {
  int64_t b = token / c.T, t = token % c.T, width = (c.H + c.G) * c.D + c.G * c.W;
  const float* x = c.x.as<float>() + token * width;
  int64_t position = c.half ? std::clamp<int64_t>(c.positions.as<int64_t>()[token], 0, c.cos.size[0] - 1) : 0;
  const float* cos = c.cos.as<float>() + position * c.half;
  const float* sin = c.sin.as<float>() + position * c.half;
  for (int64_t h = 0; h < c.H; ++h, x += c.D)
    turn(c, x, c.q_norm.as<float>(), c.set.q_epsilon, cos, sin, static_cast<float*>(c.q_out) + (token * c.H + h) * c.D);
  int64_t slot = c.slots.as<int64_t>()[b] + t;
  auto row = [&](int64_t g) { return (b * c.G + g) * c.C + slot; };
  auto write = [&](const float* from, int64_t width, int64_t row, void* to, void* scales) {
    if (scales)
      static_cast<float*>(scales)[row] = coded::encode(from, width, static_cast<int8_t*>(to) + row * width);
    else if (c.form == kHalves)
      grouped::halve(from, width, static_cast<uint16_t*>(to) + row * width);
    else
      std::copy(from, from + width, static_cast<float*>(to) + row * width);
  };
  thread_local std::vector<float> key;
  key.resize(c.D);
  for (int64_t g = 0; g < c.G; ++g, x += c.D) {
    turn(c, x, c.k_norm.as<float>(), c.set.k_epsilon, cos, sin, key.data());
    write(key.data(), c.D, row(g), c.k_out, c.k_scale_out);
  }
  for (int64_t g = 0; g < c.G; ++g, x += c.W) write(x, c.W, row(g), c.v_out, c.v_scale_out);
}

typedef abi::Kernel<Settings> Kernel;

const char* unfit(const Call& c) {
  bool sizes = c.x.rank == 3 && c.k.rank == 4 && c.v.rank == 4 && c.k.size[0] == c.B && c.v.size[0] == c.B &&
               c.v.size[1] == c.G && c.v.size[2] == c.C && c.x.size[2] == (c.H + c.G) * c.D + c.G * c.W;
  bool tables = !c.half || (c.cos.rank == 2 && c.sin.rank == 2 && c.cos.size[1] == c.half &&
                            c.sin.size[1] == c.half && c.cos.size[0] == c.sin.size[0] && c.cos.size[0] > 0 &&
                            2 * c.half <= c.D && c.positions.size[0] == c.B && c.positions.size[1] == c.T);
  bool norms = (!c.q_norm.data || c.q_norm.size[0] == c.D) && (!c.k_norm.data || c.k_norm.size[0] == c.D);
  for (const abi::Tensor* scale : {&c.k_scale, &c.v_scale})
    sizes = sizes && (!scale->data || scale->count() == c.B * c.G * c.C);
  if (!sizes || !tables || !norms || c.slots.size[0] != c.B) return "Place: the sizes of the product and the cache do not fit";
  for (int64_t b = 0; b < c.B; ++b) {
    int64_t slot = c.slots.as<int64_t>()[b];
    if (slot < 0 || slot + c.T > c.C) return "Place: the tokens do not fit into the cache's slots";
  }
  return nullptr;
}

abi::Status* prepare(const Kernel& kernel, abi::Context* context, Form form, Call& c) {
  bool coded = form == kInt8;
  c.form = form;
  const abi::Api& api = kernel.api;
  abi::Tensor* plain[] = {&c.x, &c.slots, &c.k, &c.v, &c.cos, &c.sin, &c.positions, &c.q_norm, &c.k_norm};
  abi::Tensor* scales[] = {&c.k_scale, &c.v_scale};
  for (size_t i = 0; i < (coded ? 2 : 0); ++i)
    if (abi::Status* s = abi::read(api, context, i, scales[i])) return s;
  for (size_t i = 0; i < 9; ++i)
    if (abi::Status* s = abi::read(api, context, i + (coded ? 2 : 0), plain[i])) return s;
  c.set = kernel.set;
  c.B = c.x.size[0], c.T = c.x.size[1], c.H = c.set.heads;
  c.G = c.k.size[1], c.C = c.k.size[2], c.D = c.k.size[3], c.W = c.v.size[3];
  c.half = !c.cos.data ? 0 : (c.set.turned ? c.set.turned : c.D) / 2;
  if (const char* why = unfit(c)) return api.fail(why);
  int64_t q_sizes[] = {c.B, c.T, c.H, c.D};
  const int64_t* sizes[] = {q_sizes, c.k.size, c.v.size, c.k_scale.size, c.v_scale.size};
  void** data[] = {&c.q_out, &c.k_out, &c.v_out, &c.k_scale_out, &c.v_scale_out};
  for (size_t i = 0; i < (coded ? 5 : 3); ++i) {
    abi::Value* out = nullptr;
    if (abi::Status* s = api.output(context, i, sizes[i], i < 3 ? 4 : 3, &out)) return s;
    if (abi::Status* s = api.data(out, data[i])) return s;
  }
  return nullptr;
}

// What the cache held before, where the new one is other memory.
void keep(const abi::Tensor& before, size_t size, void* now) {
  if (before.data && now != before.data) std::memcpy(now, before.data, before.count() * size);
}

template <Form kForm>
abi::Status* run(const Kernel& self, abi::Context* context) {
  Call c = {};
  if (abi::Status* s = prepare(self, context, kForm, c)) return s;
  keep(c.k, kSizes[kForm], c.k_out), keep(c.v, kSizes[kForm], c.v_out);
  keep(c.k_scale, 4, c.k_scale_out), keep(c.v_scale, 4, c.v_scale_out);
  if (c.B * c.T >= 8) return abi::parallel<work>(self.api, context, c.B * c.T, c);
  for (int64_t i = 0; i < c.B * c.T; ++i) work(c, i);
  return nullptr;
}

constexpr abi::Attribute<Settings> kAttributes[] = {
    {"heads", &Settings::heads, nullptr},
    {"interleaved", &Settings::interleaved, nullptr},
    {"turned", &Settings::turned, nullptr},
    {"q_epsilon", nullptr, &Settings::q_epsilon},
    {"k_epsilon", nullptr, &Settings::k_epsilon},
};

template <Form kForm>
abi::Op op() {
  constexpr size_t more = kForm == kInt8 ? 2 : 0;  // scales, which come first
  abi::Op op = abi::op_of<Settings, kAttributes, run<kForm>>();
  op.name = [](const abi::Op*) { return kNames[kForm]; };
  op.input_count = [](const abi::Op*) { return 9 + more; };
  op.input_type = [](const abi::Op*, size_t i) {
    bool held = i == 2 + more || i == 3 + more;
    return int(held ? kTypes[kForm] : i == 1 + more || i == 6 + more ? abi::kInt64 : abi::kFloat);
  };
  op.input_presence = [](const abi::Op*, size_t i) { return int(i > 3 + more ? abi::kOptional : abi::kRequired); };
  op.output_count = [](const abi::Op*) { return 3 + more; };
  op.output_type = [](const abi::Op*, size_t i) { return int(i == 1 || i == 2 ? kTypes[kForm] : abi::kFloat); };
  return op;
}

}  // namespace

abi::Op place_op(bool coded) { return coded ? op<kInt8>() : op<kFloats>(); }
abi::Op place_halves_op() { return op<kHalves>(); }
