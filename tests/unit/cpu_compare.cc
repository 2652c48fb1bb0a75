#include "cpu_compare.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <thread>

#include "base/philox.h"
#include "device/ref/access.h"

namespace whale::test {
namespace {

Backend& backend_of(DeviceKind kind) {
  // WHALE_LIBRARY_DIR: where the build has put libwhale_cpu.so.
  static Backends backends([] {
    const char* folder = std::getenv("WHALE_LIBRARY_DIR");
    return std::string(folder ? folder : "");
  }());
  return backends.get(kind);
}

class Bound {
 public:
  Bound(Device& device, OpCode op, const Attrs& given, const std::vector<Input>& inputs,
        const std::vector<DType>& result_types)
      : device_(device), attrs_(complete_attrs(def(op), given)) {
    std::vector<TensorType> types;
    std::vector<bool> present;
    for (size_t i = 0; i < inputs.size(); ++i) {
      present.push_back(inputs[i].dtype != DType{});
      types.push_back({present.back() ? inputs[i].dtype : DType::kF32, inputs[i].dims});
      spec_.in.push_back(present.back() ? operand(inputs[i].dtype, inputs[i].dims) : Operand());
      if (present.back()) fill(spec_.in.back(), inputs[i], inputs[i].seed ? inputs[i].seed : i + 1);
    }
    const auto results = infer(op, attrs_, types, present);
    for (size_t i = 0; i < results.size(); ++i)
      spec_.out.push_back(operand(i < result_types.size() ? result_types[i] : results[i].dtype, results[i].dims));
    spec_.op = op, spec_.name = def(op).name, spec_.attrs = &attrs_, spec_.step = &step_, spec_.row = &row_;
    if (!spec_.out.empty()) spec_.box.origin = Dims(spec_.out[0].dims.size(), 0), spec_.box.global = spec_.out[0].dims;
    kernel_ = device_.bind(spec_);
    scratch_ = memory(kernel_->scratch_bytes());
    if (kernel_->scratch_bytes() != 0) std::memset(scratch_, 0xCC, kernel_->scratch_bytes());
    kernel_->set_scratch(scratch_);
  }
  ~Bound() {
    for (const auto& [p, bytes] : owned_) device_.release(p, bytes);
  }
  void run() {
    for (const Operand& x : spec_.out)
      if (bytes_of(x) != 0) std::memset(x.data, 0xCC, bytes_of(x));
    kernel_->run();
  }
  std::string raw() const {
    std::string bytes;
    for (const Operand& x : spec_.out) bytes.append(static_cast<const char*>(x.data), bytes_of(x));
    return bytes;
  }
  std::vector<std::vector<double>> values() const {
    std::vector<std::vector<double>> all;
    for (const Operand& x : spec_.out) {
      all.emplace_back();
      for (int64_t i = 0; i < element_count(x.dims); ++i) all.back().push_back(ref::load(x.dtype, x.data, i));
    }
    return all;
  }

 private:
  static size_t bytes_of(const Operand& x) { return static_cast<size_t>(element_count(x.dims) * size_of(x.dtype)); }
  void* memory(size_t bytes) {
    owned_.emplace_back(device_.allocate(bytes), bytes);
    return owned_.back().first;
  }
  Operand operand(DType dtype, const Dims& dims) {
    Operand x;
    x.dtype = dtype, x.dims = dims;
    x.data = memory(bytes_of(x));
    return x;
  }
  static void fill(const Operand& x, const Input& input, uint64_t seed) {
    const RandomStream random(17, seed, 0);
    for (int64_t i = 0; i < element_count(x.dims); ++i) {
      const double noise = random.word(static_cast<uint64_t>(i)) / 2147483648.0 - 1;
      ref::store(x.dtype, x.data, i, input.values.empty() ? noise : input.values.at(static_cast<size_t>(i)));
    }
  }
  Device& device_;
  Attrs attrs_;
  StepParameters step_;
  RowContext row_;
  KernelSpec spec_;
  std::unique_ptr<Kernel> kernel_;
  void* scratch_ = nullptr;
  std::vector<std::pair<void*, size_t>> owned_;
};

std::string describe(OpCode op, const std::vector<Input>& inputs) {
  std::string text = def(op).name;
  for (const Input& input : inputs)
    text += input.dtype == DType{} ? " _" : fmt::format(" {}{}", name_of(input.dtype), to_string(input.dims));
  return text;
}

}  // namespace

std::vector<std::vector<double>> run_op(DeviceKind kind, int cores, OpCode op, const Attrs& attrs,
                                        const std::vector<Input>& inputs, const std::vector<DType>& result_types,
                                        const OpenOptions& options) {
  DeviceSpec spec;
  spec.kind = kind;
  std::vector<std::vector<double>> values;
  std::exception_ptr error;
  // A thread of its own, as in the executor: enter_thread changes affinity and thread count. Two "cores" may be one
  // twice.
  std::thread([&] {
    try {
      for (int i = 0; i < cores; ++i)
        spec.cores.push_back(i % static_cast<int>(std::max(1u, std::thread::hardware_concurrency())));
      if (kind == DeviceKind::kRef) spec.cores.clear();
      const auto device = backend_of(kind).open(spec, options);
      device->enter_thread(Queue::kCompute);
      Bound bound(*device, op, attrs, inputs, result_types);
      bound.run();
      const std::string first = bound.raw();
      bound.run();
      CHECK_MESSAGE(first == bound.raw(), "two runs of ", describe(op, inputs), " differ");
      values = bound.values();
    } catch (...) {
      error = std::current_exception();
    }
  }).join();
  if (error) std::rethrow_exception(error);
  return values;
}

namespace {

// One NaN in each operand in turn: where the reference's results are NaN, those of cpu are (Winograd's are in more
// places).
void compare_nan(OpCode op, const Attrs& attrs, const std::vector<Input>& inputs) {
  for (size_t i = 0; i < inputs.size(); ++i) {
    const int64_t n = element_count(inputs[i].dims);
    if (inputs[i].dtype == DType{} || !is_float(inputs[i].dtype) || n == 0) continue;
    CAPTURE(i);
    std::vector<Input> with = inputs;
    std::vector<double>& values = with[i].values;
    const RandomStream random(17, inputs[i].seed ? inputs[i].seed : i + 1, 0);
    for (int64_t k = 0; values.size() < static_cast<size_t>(n); ++k)
      values.push_back(random.word(static_cast<uint64_t>(k)) / 2147483648.0 - 1);
    values[n * 5 / 7] = std::numeric_limits<double>::quiet_NaN();
    const auto expected = run_op(DeviceKind::kRef, 1, op, attrs, with),
               found = run_op(DeviceKind::kCpu, 1, op, attrs, with);
    for (size_t r = 0; r < expected.size(); ++r) {
      CAPTURE(r);
      int64_t hidden = 0;
      for (size_t k = 0; k < expected[r].size(); ++k) hidden += std::isnan(expected[r][k]) && !std::isnan(found[r][k]);
      CHECK(hidden == 0);
    }
  }
}

}  // namespace

void compare(OpCode op, const Attrs& attrs, const std::vector<Input>& inputs, double tolerance) {
  const std::string text = describe(op, inputs);
  CAPTURE(text);
  const auto expected = run_op(DeviceKind::kRef, 1, op, attrs, inputs);
  const bool narrow =
      std::any_of(inputs.begin(), inputs.end(), [](const Input& input) { return input.dtype == DType::kBF16; });
  for (const auto& [cores, instructions] : {std::pair{1, true}, {2, true}, {1, false}, {2, false}}) {
    if (!instructions && !narrow) continue;
    CAPTURE(cores);
    CAPTURE(instructions);
    const auto found = run_op(DeviceKind::kCpu, cores, op, attrs, inputs, {}, {.bf16 = instructions});
    REQUIRE(found.size() == expected.size());
    for (size_t r = 0; r < found.size(); ++r) {
      CAPTURE(r);
      REQUIRE(found[r].size() == expected[r].size());
      double largest = 1e-6, worst = 0;
      size_t at = 0;
      for (const double x : expected[r]) largest = std::max(largest, std::abs(x));
      for (size_t i = 0; i < found[r].size(); ++i) {
        const double difference = std::abs(found[r][i] - expected[r][i]);
        if (!(difference <= worst)) worst = difference, at = i;  // a NaN sticks
      }
      CAPTURE(at);
      if (!found[r].empty()) CAPTURE(found[r][at]);
      if (!found[r].empty()) CAPTURE(expected[r][at]);
      CHECK(worst <= tolerance * largest);
    }
  }
  int64_t elements = 0;
  for (const Input& x : inputs) elements += element_count(x.dims);
  if (elements <= 20000) compare_nan(op, attrs, inputs);
}

double usual_tolerance(const std::vector<Input>& inputs) {
  return std::any_of(inputs.begin(), inputs.end(), [](const Input& x) { return x.dtype == DType::kBF16; }) ? 1.6e-2
                                                                                                           : 2e-5;
}

}  // namespace whale::test
