// accel::FetchPages: tells the system which pages of keys or values are read next, where they lie in a mapped file, so
// that it fetches them side by side instead of one whenever a read waits for it. The lists stay as they are.
// FetchPagesInt8: of codes.
#include <algorithm>
#include <cstring>

#ifdef __unix__
#include <sys/mman.h>
#include <unistd.h>
#endif

#include "abi.h"

namespace {

struct Settings {
  int64_t page;
};

struct Call {
  abi::Tensor pages, held;
  int64_t page, bytes;  // bytes: of a number
};

#ifdef __unix__
// One KV head's: what its queries list.
void work(const Call& c, int64_t pair) {
  static const uintptr_t unit = sysconf(_SC_PAGESIZE);
  int64_t count = c.pages.size[2] * c.pages.size[3];
  const int64_t* listed = c.pages.as<int64_t>() + pair * count;
  int64_t slots = c.held.size[2], most = slots / c.page;
  uintptr_t row = c.held.size[3] * c.bytes, base = reinterpret_cast<uintptr_t>(c.held.data) + pair * slots * row;
  for (int64_t i = 0, n = 0; i < count; i += n) {
    n = 1;
    if (listed[i] < 0 || listed[i] >= most) continue;
    while (i + n < count && listed[i + n] == listed[i] + n && listed[i + n] < most) ++n;
    uintptr_t from = base + listed[i] * c.page * row, to = from + n * c.page * row;
    from -= from % unit;
    madvise(reinterpret_cast<void*>(from), to - from, MADV_WILLNEED);  // where it fails, reads fetch
  }
}
#else
void work(const Call&, int64_t) {}
#endif

typedef abi::Kernel<Settings> Kernel;

template <bool kCoded>
abi::Status* run(const Kernel& self, abi::Context* context) {
  const abi::Api& api = self.api;
  Call c = {};
  c.page = self.set.page;
  if (abi::Status* s = abi::read(api, context, 0, &c.pages)) return s;
  if (abi::Status* s = abi::read(api, context, 1, &c.held)) return s;
  const abi::Tensor& x = c.held;
  c.bytes = kCoded ? 1 : x.type == abi::kHalf ? 2 : 4;
  if (!kCoded && x.type != abi::kFloat && x.type != abi::kHalf) return api.fail("FetchPages: the cache holds floats or halves");
  if (c.pages.rank != 4 || x.rank != 4 || c.page < 1 || x.size[0] != c.pages.size[0] || x.size[1] != c.pages.size[1])
    return api.fail("FetchPages: the lists of pages do not fit the cache");
  abi::Value* out = nullptr;
  void* data = nullptr;
  if (abi::Status* s = api.output(context, 0, c.pages.size, 4, &out)) return s;
  if (abi::Status* s = api.data(out, &data)) return s;
  if (size_t bytes = c.pages.count() * sizeof(int64_t)) std::memcpy(data, c.pages.data, bytes);
  return abi::parallel<work>(api, context, c.pages.size[0] * c.pages.size[1], c);
}

constexpr abi::Attribute<Settings> kAttributes[] = {{"page", &Settings::page, nullptr}};

template <bool kCoded>
abi::Op op() {
  abi::Op op = abi::op_of<Settings, kAttributes, run<kCoded>>();
  op.name = [](const abi::Op*) { return kCoded ? "FetchPagesInt8" : "FetchPages"; };
  op.input_count = [](const abi::Op*) { return size_t(2); };
  op.input_type = [](const abi::Op*, size_t i) { return int(!i ? abi::kInt64 : kCoded ? abi::kInt8 : abi::kAny); };
  op.input_presence = [](const abi::Op*, size_t) { return int(abi::kRequired); };
  op.output_type = [](const abi::Op*, size_t) { return int(abi::kInt64); };
  return op;
}

}  // namespace

abi::Op fetch_pages_op(bool coded) { return coded ? op<true>() : op<false>(); }
