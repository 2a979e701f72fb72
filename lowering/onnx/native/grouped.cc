// accel::DecodeGroups: blocks of rows in few bits -> floats, [B,G,P,n] -> [B,G,P R,D].
#include "grouped.h"

#include "abi.h"

namespace {

constexpr int64_t kSome = 64;  // rows that a thread takes at once

struct Settings {
  int64_t bits, group, along, rows, width;
};

struct Call {
  grouped::Blocks blocks;
  float* out;
  int64_t count;
};

void work(const Call& c, int64_t item) {
  int64_t first = item * kSome;
  c.blocks.read(first, std::min(kSome, c.count - first), c.out + first * c.blocks.width);
}

typedef abi::Kernel<Settings> Kernel;

abi::Status* run(const Kernel& self, abi::Context* context) {
  const abi::Api& api = self.api;
  const Settings& set = self.set;
  abi::Tensor codes, scale, least, finer;
  abi::Tensor* inputs[] = {&codes, &scale, &least, &finer};
  for (size_t i = 0; i < 4; ++i)
    if (abi::Status* s = abi::read(api, context, i, inputs[i])) return s;
  Call c = {{codes.as<uint8_t>(), scale.as<uint16_t>(), least.as<uint16_t>(), set.bits, set.rows, set.group, set.width,
             bool(set.along), finer.as<uint8_t>()}};
  int64_t sizes[] = {codes.size[0], codes.size[1], codes.size[2] * set.rows, set.width};
  int64_t blocks = codes.size[0] * codes.size[1] * codes.size[2];
  bool fits = codes.rank == 4 && set.rows > 0 && set.group > 0 && codes.count() == blocks * set.rows * c.blocks.bytes() &&
              scale.count() == blocks * c.blocks.groups() && least.count() == scale.count() && (!finer.rank || finer.count() == codes.count());
  if (!fits) return api.fail("DecodeGroups: the sizes of codes and groups do not fit");
  c.count = blocks * set.rows;
  abi::Value* out = nullptr;
  if (abi::Status* s = api.output(context, 0, sizes, 4, &out)) return s;
  void* data = nullptr;
  if (abi::Status* s = api.data(out, &data)) return s;
  c.out = static_cast<float*>(data);
  return abi::parallel<work>(api, context, (c.count + kSome - 1) / kSome, c);
}

constexpr abi::Attribute<Settings> kAttributes[] = {
    {"bits", &Settings::bits, nullptr},   {"group", &Settings::group, nullptr}, {"along", &Settings::along, nullptr},
    {"rows", &Settings::rows, nullptr}, {"width", &Settings::width, nullptr},
};

}  // namespace

abi::Op decode_groups_op() {
  abi::Op op = abi::op_of<Settings, kAttributes, run>();
  op.name = [](const abi::Op*) { return "DecodeGroups"; };
  op.input_count = [](const abi::Op*) { return size_t(4); };
  op.input_type = [](const abi::Op*, size_t i) { return int(i == 1 || i == 2 ? abi::kHalf : abi::kUint8); };
  op.input_presence = [](const abi::Op*, size_t i) { return int(i == 3 ? abi::kOptional : abi::kRequired); };
  return op;
}
