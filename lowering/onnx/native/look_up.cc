// accel::LookUp: bytes -> the numbers of a table that they stand for, times the scale of their row where rows have one.
// accel::Columns: of each row the numbers at some places of it, the same for all rows.
#include <array>
#include <vector>

#include "abi.h"
#include "coded.h"

namespace {

constexpr int64_t kSome = 64;  // rows that a thread takes at once

struct Settings {};

struct Call {
  abi::Tensor x, table, scale, places;
  std::vector<float> numbers;
  std::vector<int32_t> from;  // of each number of a result's row, in a row of x
  float* out;
  int64_t rows, width, wide;  // numbers of a row, and of a result's
};

void look_up(const Call& c, int64_t item) {
  int64_t first = item * kSome, count = std::min(kSome, c.rows - first);
  const float* scales = c.scale.rank ? c.scale.as<float>() + first : nullptr;
  coded::look_up(c.x.as<uint8_t>() + first * c.width, c.numbers.data(), scales, count, c.width, c.out + first * c.width);
}

void columns(const Call& c, int64_t item) {
  for (int64_t r = item * kSome; r < std::min(c.rows, (item + 1) * kSome); ++r) {
    const float* x = c.x.as<float>() + r * c.width;
    float* out = c.out + r * c.wide;
    for (int64_t w = 0; w < c.wide; ++w) out[w] = x[c.from[w]];
  }
}

// The table, or the places, as the work reads them; whether they fit.
bool prepare_table(Call& c) {
  bool scaled = !c.scale.rank || c.scale.count() == c.rows;
  return scaled && coded::table_of(c.table.as<float>(), c.table.rank, c.table.count(), c.numbers);
}

bool prepare_places(Call& c) {
  for (int64_t i = 0; i < c.places.count(); ++i) {
    int64_t at = c.places.as<int64_t>()[i];
    at += at < 0 ? c.width : 0;
    if (at < 0 || at >= c.width) return false;
    c.from.push_back(int32_t(at));
  }
  return c.places.rank == 1;
}

typedef abi::Kernel<Settings> Kernel;

template <bool kColumns>
abi::Status* run(const Kernel& self, abi::Context* context) {
  const abi::Api& api = self.api;
  Call c;
  abi::Tensor* inputs[] = {&c.x, kColumns ? &c.places : &c.table, &c.scale};
  for (size_t i = 0; i < (kColumns ? 2 : 3); ++i)
    if (abi::Status* s = abi::read(api, context, i, inputs[i])) return s;
  if (c.x.rank < 1) return api.fail("LookUp, Columns: a row has no axis");
  c.width = c.x.size[c.x.rank - 1], c.rows = c.width ? c.x.count() / c.width : 0;
  if (!(kColumns ? prepare_places(c) : prepare_table(c)))
    return api.fail(kColumns ? "Columns: a place lies outside a row" : "LookUp: the table or the scales do not fit");
  c.wide = kColumns ? c.places.count() : c.width;
  int64_t sizes[4];
  std::copy_n(c.x.size, 4, sizes);
  sizes[c.x.rank - 1] = c.wide;
  abi::Value* out = nullptr;
  if (abi::Status* s = api.output(context, 0, sizes, c.x.rank, &out)) return s;
  void* data = nullptr;
  if (abi::Status* s = api.data(out, &data)) return s;
  c.out = static_cast<float*>(data);
  return abi::parallel<kColumns ? columns : look_up>(api, context, (c.rows + kSome - 1) / kSome, c);
}

constexpr std::array<abi::Attribute<Settings>, 0> kNone = {};

template <bool kColumns>
abi::Op op() {
  abi::Op op = abi::op_of<Settings, kNone, run<kColumns>>();
  op.name = [](const abi::Op*) { return kColumns ? "Columns" : "LookUp"; };
  op.input_count = [](const abi::Op*) { return size_t(kColumns ? 2 : 3); };
  op.input_type = [](const abi::Op*, size_t i) {
    if (kColumns) return int(i ? abi::kInt64 : abi::kFloat);
    return int(i ? abi::kFloat : abi::kUint8);
  };
  op.input_presence = [](const abi::Op*, size_t i) { return int(i == 2 ? abi::kOptional : abi::kRequired); };
  return op;
}

}  // namespace

abi::Op look_up_op() { return op<false>(); }
abi::Op columns_op() { return op<true>(); }
