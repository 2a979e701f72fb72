// accel::Encode, accel::Decode: rows of floats as int8 codes with a scale, and back.
#include <array>

#include "abi.h"
#include "coded.h"

namespace {

constexpr int64_t kSome = 64;  // rows that a thread takes at once

struct Settings {};

struct Call {
  abi::Tensor x, scale;
  void* out[2];
  int64_t rows, width;
};

void encode(const Call& c, int64_t item) {
  for (int64_t r = item * kSome; r < std::min(c.rows, (item + 1) * kSome); ++r)
    static_cast<float*>(c.out[1])[r] =
        coded::encode(c.x.as<float>() + r * c.width, c.width, static_cast<int8_t*>(c.out[0]) + r * c.width);
}

void decode(const Call& c, int64_t item) {
  int64_t first = item * kSome, count = std::min(kSome, c.rows - first);
  coded::decode(c.x.as<int8_t>() + first * c.width, c.scale.as<float>() + first, count, c.width,
               static_cast<float*>(c.out[0]) + first * c.width);
}

typedef abi::Kernel<Settings> Kernel;

template <bool kDecode>
abi::Status* run(const Kernel& self, abi::Context* context) {
  const abi::Api& api = self.api;
  Call c;
  if (abi::Status* s = abi::read(api, context, 0, &c.x)) return s;
  if (kDecode)
    if (abi::Status* s = abi::read(api, context, 1, &c.scale)) return s;
  if (c.x.rank < 1) return api.fail("Encode, Decode: a row has no axis");
  c.width = c.x.size[c.x.rank - 1];
  c.rows = c.width ? c.x.count() / c.width : 0;
  if (kDecode && c.scale.count() != c.rows) return api.fail("Decode: there must be one scale for each row of codes");
  for (size_t i = 0; i < (kDecode ? 1 : 2); ++i) {
    abi::Value* out = nullptr;
    if (abi::Status* s = api.output(context, i, c.x.size, c.x.rank - i, &out)) return s;
    if (abi::Status* s = api.data(out, &c.out[i])) return s;
  }
  return abi::parallel<kDecode ? decode : encode>(api, context, (c.rows + kSome - 1) / kSome, c);
}

constexpr std::array<abi::Attribute<Settings>, 0> kNone = {};

template <bool kDecode>
abi::Op op() {
  abi::Op op = abi::op_of<Settings, kNone, run<kDecode>>();
  op.name = [](const abi::Op*) { return kDecode ? "Decode" : "Encode"; };
  op.input_count = [](const abi::Op*) { return size_t(kDecode ? 2 : 1); };
  op.input_type = [](const abi::Op*, size_t i) { return int(kDecode && i == 0 ? abi::kInt8 : abi::kFloat); };
  op.input_presence = [](const abi::Op*, size_t) { return int(abi::kRequired); };
  op.output_count = [](const abi::Op*) { return size_t(kDecode ? 1 : 2); };
  op.output_type = [](const abi::Op*, size_t i) { return int(!kDecode && i == 0 ? abi::kInt8 : abi::kFloat); };
  return op;
}

}  // namespace

abi::Op encode_op() { return op<false>(); }
abi::Op decode_op() { return op<true>(); }
