// The part of onnxruntime's C interface that the kernels use. Its table of functions only ever grows
// at the end, so places in it are constants; 17 is the first version with ParallelFor.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <iterator>

namespace abi {

constexpr uint32_t kVersion = 17;

struct Status;
struct Options;
struct Domain;
struct Info;     // of a kernel: attributes
struct Context;  // of a call: inputs and outputs
struct Value;
struct Shape;

struct Base {
  const void* const* (*get_api)(uint32_t version);
  const char* (*get_version)();
};

enum Type { kAny = 0, kFloat = 1, kUint8 = 2, kInt8 = 3, kInt64 = 7, kBool = 9, kHalf = 10, kBFloat16 = 16 };
enum Presence { kRequired = 0, kOptional = 1 };

struct Api {
  const void* const* table;

  template <typename... A>
  Status* call(int place, A... a) const {
    return reinterpret_cast<Status* (*)(A...)>(const_cast<void*>(table[place]))(a...);
  }

  Status* fail(const char* why) const { return call<int, const char*>(0, 2, why); }
  Status* create_domain(const char* name, Domain** out) const { return call(26, name, out); }
  Status* add_op(Domain* d, const struct Op* op) const { return call(27, d, op); }
  Status* add_domain(Options* o, Domain* d) const { return call(28, o, d); }
  Status* attribute(const Info* i, const char* name, float* out) const { return call(85, i, name, out); }
  Status* attribute(const Info* i, const char* name, int64_t* out) const { return call(86, i, name, out); }
  Status* input_count(const Context* c, size_t* out) const { return call(88, c, out); }
  Status* input(const Context* c, size_t i, const Value** out) const { return call(90, c, i, out); }
  Status* output(Context* c, size_t i, const int64_t* sizes, size_t rank, Value** out) const {
    return call(91, c, i, sizes, rank, out);
  }
  Status* data(Value* v, void** out) const { return call(51, v, out); }
  Status* shape(const Value* v, Shape** out) const { return call(65, v, out); }
  Status* type(const Shape* s, int* out) const { return call(60, s, out); }
  Status* rank(const Shape* s, size_t* out) const { return call(61, s, out); }
  Status* sizes(const Shape* s, int64_t* out, size_t rank) const { return call(62, s, out, rank); }
  void release(Shape* s) const { call(99, s); }
  void release(Status* s) const { call(93, s); }
  Status* parallel(const Context* c, void (*run)(void*, size_t), size_t total, void* with) const {
    return call(274, c, run, total, total < 16 ? total : size_t(16), with);
  }
};

struct Op {
  uint32_t version;
  void* (*create)(const Op*, const void* const* table, const Info*);
  const char* (*name)(const Op*);
  const char* (*provider)(const Op*);
  int (*input_type)(const Op*, size_t);
  size_t (*input_count)(const Op*);
  int (*output_type)(const Op*, size_t);
  size_t (*output_count)(const Op*);
  void (*compute)(void* kernel, Context*);
  void (*destroy)(void* kernel);
  int (*input_presence)(const Op*, size_t);
  int (*output_presence)(const Op*, size_t);
  int (*memory)(const Op*, size_t);
  int (*variadic_in_least)(const Op*);
  int (*variadic_in_same)(const Op*);
  int (*variadic_out_least)(const Op*);
  int (*variadic_out_same)(const Op*);
  Status* (*create_v2)(const Op*, const void* const* table, const Info*, void** kernel);
  Status* (*compute_v2)(void* kernel, Context*);
  Status* (*infer_shape)(const Op*, void*);
  int (*first_version)(const Op*);
  int (*last_version)(const Op*);
};

// A tensor of a call: its type, its sizes (up to four) and its memory; data is null where it was not given.
struct Tensor {
  int type = 0;
  int64_t size[4] = {1, 1, 1, 1};
  size_t rank = 0;
  void* data = nullptr;

  int64_t count() const { return size[0] * size[1] * size[2] * size[3]; }

  template <typename T>
  T* as() const {
    return static_cast<T*>(data);
  }
};

inline Status* read(const Api& api, const Context* c, size_t i, Tensor* out) {
  size_t count = 0;
  if (Status* s = api.input_count(c, &count)) return s;
  const Value* value = nullptr;
  if (i < count)
    if (Status* s = api.input(c, i, &value)) return s;
  if (!value) return nullptr;
  Shape* shape = nullptr;
  if (Status* s = api.shape(value, &shape)) return s;
  Status* s = api.type(shape, &out->type);
  if (!s) s = api.rank(shape, &out->rank);
  if (!s && out->rank > 4) s = api.fail("a tensor of more than four axes");
  if (!s) s = api.sizes(shape, out->size, out->rank);
  api.release(shape);
  return s ? s : api.data(const_cast<Value*>(value), &out->data);
}

// run(call, i) for every i below `total`, in onnxruntime's threads; there nobody would catch what is thrown.
template <auto run, typename C>
Status* parallel(const Api& api, const Context* context, size_t total, C& call) {
  struct Work {
    C& call;
    std::atomic<bool> failed{false};
  } work{call};
  auto one = [](void* with, size_t i) {
    Work& work = *static_cast<Work*>(with);
    try {
      run(work.call, int64_t(i));
    } catch (...) {
      work.failed = true;
    }
  };
  if (total)
    if (Status* s = api.parallel(context, one, total, &work)) return s;
  return work.failed ? api.fail("no memory is left for a thread's own") : nullptr;
}

// An operator's settings as its node gives them.
template <typename S>
struct Attribute {
  const char* name;
  int64_t S::*whole;
  float S::*real;
  bool optional = false;  // 0 where a node does not have it, as those of earlier artifacts
};

template <typename S>
struct Kernel {
  Api api;
  S set;
};

template <typename S>
Status* created(const Attribute<S>* attributes, size_t count, const void* const* table, const Info* info, void** out) {
  Kernel<S> kernel{{table}, {}};
  for (const Attribute<S>* a = attributes; a < attributes + count; ++a) {
    Status* s = a->whole ? kernel.api.attribute(info, a->name, &(kernel.set.*a->whole))
                         : kernel.api.attribute(info, a->name, &(kernel.set.*a->real));
    if (s && !a->optional) return s;
    if (s) kernel.api.release(s);
  }
  *out = new Kernel<S>(kernel);
  return nullptr;
}

// An operator on the CPU with outputs of floats (unless it says otherwise), whose `run` may throw; its inputs are to be filled in.
template <typename S, const auto& attributes, Status* (*run)(const Kernel<S>&, Context*)>
Op op_of() {
  Op op = {};
  op.version = kVersion;
  op.provider = [](const Op*) { return static_cast<const char*>(nullptr); };
  op.output_count = [](const Op*) { return size_t(1); };
  op.output_type = [](const Op*, size_t) { return int(kFloat); };
  op.output_presence = [](const Op*, size_t) { return int(kRequired); };
  op.memory = [](const Op*, size_t) { return 0; };
  op.first_version = [](const Op*) { return 1; };
  op.last_version = [](const Op*) { return 1 << 30; };
  op.create_v2 = [](const Op*, const void* const* table, const Info* info, void** out) {
    return created<S>(std::data(attributes), std::size(attributes), table, info, out);
  };
  op.compute_v2 = [](void* kernel, Context* context) -> Status* {
    const Kernel<S>& self = *static_cast<Kernel<S>*>(kernel);
    try {
      return run(self, context);
    } catch (const std::exception& error) {
      return self.api.fail(error.what());
    }
  };
  op.destroy = [](void* kernel) { delete static_cast<Kernel<S>*>(kernel); };
  return op;
}

}  // namespace abi
