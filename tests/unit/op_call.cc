#include "op_call.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "device/ref/access.h"
#include "ops/fused.h"

namespace whale::test {
namespace {

constexpr int kGarbage = 0xC3;
const StepParameters kStep{.seed = 3, .iteration = 5};

Backend& backend_of(DeviceKind kind) {
  // WHALE_LIBRARY_DIR: where the build has put libwhale_cpu.so.
  static Backends backends([] {
    const char* folder = std::getenv("WHALE_LIBRARY_DIR");
    return std::string(folder ? folder : "");
  }());
  return backends.get(kind);
}

size_t bytes_of(DType dtype, const Dims& dims) { return static_cast<size_t>(element_count(dims) * size_of(dtype)); }

}  // namespace

std::string to_string(const OpCall& call) {
  const OpDef& d = def(call.code);
  std::string out = fmt::format("{}(", d.name);
  for (size_t i = 0; i < call.in.size(); ++i)
    out += (i ? ", " : "") + (call.in[i].present() ? to_string(call.in[i].type()) : std::string("_"));
  for (const AttrSpec& spec : d.attrs) {
    const Attr& value = call.attrs.at(spec.name);
    if (spec.required || !(value == spec.fallback)) out += fmt::format("; {}={}", spec.name, to_string(value));
  }
  return out + ")";
}

OpCall in_f32(OpCall call) {
  const auto& ports = def(call.code).inputs;
  for (size_t i = 0; i < call.in.size(); ++i) {
    Value& v = call.in[i];
    const std::string_view port = ports[std::min(i, ports.size() - 1)].name;
    if (v.dtype != DType::kF64 || port == "stats" || port == "grad_stats") continue;  // statistics are always in f64
    v.dtype = DType::kF32;
    for (double& x : v.data) x = static_cast<float>(x);
  }
  for (auto& [name, value] : call.attrs)
    if (auto* dtype = std::get_if<std::string>(&value); dtype != nullptr && *dtype == "f64") *dtype = "f32";
  if (call.code == OpCode::k_fused) {
    FusedBody body = decode(call.attrs, static_cast<int>(call.in.size()));
    for (FusedStep& step : body.steps) step.dtype = DType::kF32;
    call.attrs = encode(body, static_cast<int>(call.in.size()));
  }
  return call;
}

OpView view_of(const OpCall& call) {
  OpView view{call.code, &call.attrs, {}, {}, {}};
  for (const Value& v : call.in) view.inputs.push_back(v.type()), view.present.push_back(v.present());
  view.outputs = infer(call.code, call.attrs, view.inputs, view.present);
  return view;
}

OpDevice::OpDevice(DeviceKind kind) : kind_(kind), backend_(&backend_of(kind)) {
  DeviceSpec spec;
  spec.kind = kind;
  if (kind != DeviceKind::kRef) spec.cores = {0};
  device_ = backend_->open(spec);
  device_->enter_thread(Queue::kCompute);
}
OpDevice::~OpDevice() = default;

const OpDevice& ref_device() {
  static const OpDevice device;
  return device;
}

double OpDevice::rounding(DType dtype) const {
  return dtype == DType::kF64 ? 1e-12 : is_float(dtype) ? (same_order() ? 1e-6 : 2e-5) : 0;
}

bool OpDevice::has(OpCode code) const { return backend_->supports(code, {DType::kF32}, {DType::kF32}); }

bool OpDevice::has(const OpCall& call) const {
  std::vector<DType> in, out;
  for (const Value& v : call.in) in.push_back(v.dtype);
  for (const TensorType& t : view_of(call).outputs) out.push_back(t.dtype);
  return backend_->supports(call.code, in, out);
}

std::vector<Value> OpDevice::run(const OpCall& call, const Place& place) const {
  return run(call, place, view_of(call).outputs);
}

std::vector<Value> OpDevice::run(const OpCall& call, const Place& place, const std::vector<TensorType>& results,
                                 const std::vector<Alias>& in_place) const {
  const RowContext row{.batch_begin = place.batch_begin};
  KernelSpec spec{.op = call.code,
                  .name = def(call.code).name,
                  .attrs = &call.attrs,
                  .in = {},
                  .out = {},
                  .box = place.box,
                  .key = call.key,
                  .step = &kStep,
                  .row = &row};
  const std::vector<Alias> aliases = aliases_of(view_of(call));
  std::vector<std::pair<void*, size_t>> owned;
  const auto operand = [&](const TensorType& type) {
    const size_t bytes = bytes_of(type.dtype, type.dims);
    owned.emplace_back(device_->allocate(bytes), bytes);
    if (bytes != 0) std::memset(owned.back().first, kGarbage, bytes);
    Operand x;
    x.data = owned.back().first, x.dtype = type.dtype, x.dims = type.dims;
    return x;
  };
  for (const Value& v : call.in) {
    spec.in.push_back(v.present() ? operand(v.type()) : Operand{});
    for (size_t k = 0; k < v.data.size(); ++k)
      ref::store(v.dtype, spec.in.back().data, static_cast<int64_t>(k), v.data[k]);
  }
  for (size_t o = 0; o < results.size(); ++o) {
    spec.out.push_back(operand(results[o]));
    const auto is_of = [&](const Alias& a) { return static_cast<size_t>(a.output) == o; };
    const auto over = std::find_if(in_place.begin(), in_place.end(), is_of);
    const auto must = std::find_if(aliases.begin(), aliases.end(), [&](const Alias& a) { return is_of(a) && a.must; });
    const size_t bytes = bytes_of(results[o].dtype, results[o].dims);
    if (over != in_place.end())
      spec.out.back().data = spec.in[over->input].data;
    else if (must != aliases.end() && bytes != 0)
      std::memcpy(spec.out.back().data, spec.in[must->input].data, bytes);
  }
  const auto kernel = device_->bind(spec);
  const size_t scratch = kernel->scratch_bytes();
  owned.emplace_back(device_->allocate(scratch), scratch);
  kernel->set_scratch(owned.back().first);
  kernel->run();
  std::vector<Value> out;
  for (size_t o = 0; o < results.size(); ++o) {
    Value v{results[o].dtype, results[o].dims,
            std::vector<double>(static_cast<size_t>(element_count(results[o].dims)))};
    for (size_t k = 0; k < v.data.size(); ++k)
      v.data[k] = ref::load(v.dtype, spec.out[o].data, static_cast<int64_t>(k));
    out.push_back(std::move(v));
  }
  for (const auto& [memory, bytes] : owned) device_->release(memory, bytes);
  return out;
}

}  // namespace whale::test
