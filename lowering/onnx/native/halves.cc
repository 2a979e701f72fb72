// accel::EncodeFloat16, accel::DecodeFloat16: floats in half precision, and back.
#include <algorithm>
#include <array>

#include "abi.h"
#include "grouped.h"

namespace {

constexpr int64_t kSome = 4096;  // numbers that a thread takes at once

struct Settings {};

struct Call {
  abi::Tensor x;
  void* out;
};

template <bool kDecode>
void work(const Call& c, int64_t item) {
  int64_t first = item * kSome, count = std::min(kSome, c.x.count() - first);
  if constexpr (kDecode)
    grouped::widen(c.x.as<uint16_t>() + first, count, static_cast<float*>(c.out) + first);
  else
    grouped::halve(c.x.as<float>() + first, count, static_cast<uint16_t*>(c.out) + first);
}

typedef abi::Kernel<Settings> Kernel;

template <bool kDecode>
abi::Status* run(const Kernel& self, abi::Context* context) {
  const abi::Api& api = self.api;
  Call c = {};
  if (abi::Status* s = abi::read(api, context, 0, &c.x)) return s;
  abi::Value* out = nullptr;
  if (abi::Status* s = api.output(context, 0, c.x.size, c.x.rank, &out)) return s;
  if (abi::Status* s = api.data(out, &c.out)) return s;
  return abi::parallel<work<kDecode>>(api, context, (c.x.count() + kSome - 1) / kSome, c);
}

constexpr std::array<abi::Attribute<Settings>, 0> kNone = {};

template <bool kDecode>
abi::Op op() {
  abi::Op op = abi::op_of<Settings, kNone, run<kDecode>>();
  op.name = [](const abi::Op*) { return kDecode ? "DecodeFloat16" : "EncodeFloat16"; };
  op.input_count = [](const abi::Op*) { return size_t(1); };
  op.input_type = [](const abi::Op*, size_t) { return int(kDecode ? abi::kHalf : abi::kFloat); };
  op.input_presence = [](const abi::Op*, size_t) { return int(abi::kRequired); };
  op.output_type = [](const abi::Op*, size_t) { return int(kDecode ? abi::kFloat : abi::kHalf); };
  return op;
}

}  // namespace

abi::Op encode_halves_op() { return op<false>(); }
abi::Op decode_halves_op() { return op<true>(); }
