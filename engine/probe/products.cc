#include <algorithm>
#include <array>
#include <list>
#include <optional>

#include "base/error.h"
#include "base/thread_seconds.h"
#include "ops/op.h"
#include "probe/measure.h"
#include "probe/timing.h"

namespace whale {
namespace {

constexpr int64_t kLongArray = 4 << 20;  // numbers
constexpr int64_t kSizes[] = {128, 512, 1024};
constexpr double kSlow = 0.25;  // seconds: of a product; larger ones are left out

// An op on operands of its own, which hold small numbers.
class TimedOp {
 public:
  TimedOp(Device& device, OpCode op, const std::vector<Dims>& inputs, DType dtype)
      : device_(device), attrs_(complete_attrs(def(op), {})) {
    std::vector<TensorType> types;
    for (const Dims& dims : inputs) {
      types.push_back({dtype, dims});
      spec_.in.push_back(operand(dtype, dims));
    }
    // An optional operand (a bias) is left out.
    for (size_t i = inputs.size(); i < def(op).inputs.size(); ++i) {
      types.push_back({dtype, {}});
      spec_.in.emplace_back();
    }
    std::vector<bool> present(types.size());
    for (size_t i = 0; i < inputs.size(); ++i) present[i] = true;
    for (const TensorType& result : infer(op, attrs_, types, present))
      spec_.out.push_back(operand(result.dtype, result.dims));
    spec_.op = op, spec_.name = def(op).name, spec_.attrs = &attrs_, spec_.step = &step_, spec_.row = &row_;
    spec_.box.origin = Dims(spec_.out[0].dims.size(), 0), spec_.box.global = spec_.out[0].dims;
    kernel_ = device_.bind(spec_);
    kernel_->set_scratch(memory(kernel_->scratch_bytes()));
  }
  void run() { kernel_->run(); }

 private:
  void* memory(size_t bytes) { return owned_.emplace_back(device_, bytes).data(); }
  Operand operand(DType dtype, const Dims& dims) {
    return {memory(static_cast<size_t>(element_count(dims) * size_of(dtype))), dtype, dims, false, nullptr};
  }

  Device& device_;
  Attrs attrs_;
  StepParameters step_;
  RowContext row_;
  KernelSpec spec_;
  std::list<ProbedMemory> owned_;
  std::unique_ptr<Kernel> kernel_;  // ends first
};

// How often as long as its work something takes that goes on: a control group's quota lets a process run for a part of
// each period (of 0.1 seconds), and devices that share a core take turns. What is little is noise.
double stretch_of(TimedOp& work, double moment, double budget, const std::function<void()>& all_begin) {
  constexpr double kWindow = 2, kNoise = 1.2;  // a window: in `budget`s
  all_begin();
  std::array<double, 5> windows{};
  for (double& seconds : windows) seconds = sustained_seconds([&] { work.run(); }, kWindow * budget);
  std::ranges::sort(windows);
  const double stretch = windows[windows.size() / 2] / moment;
  return stretch < kNoise ? 1 : stretch;
}

}  // namespace

void measure_device(Device& device, bool on_this_thread, double budget, const std::function<void()>& all_begin,
                    ProbedDevice& out) {
  const auto seconds_of = [&](auto body) {
    all_begin();
    return median_seconds(
        body, [&](double once) { return calls_for(budget, once); }, [] {},
        on_this_thread ? thread_seconds : seconds_now);
  };
  for (const auto& [dtype, products] : {std::pair(DType::kF32, &out.f32), {DType::kBF16, &out.bf16}})
    for (const int64_t n : kSizes) {
      const double flops = 2.0 * static_cast<double>(n * n * n);
      const bool slow = !products->empty() && flops / products->back().flops_per_second > kSlow;
      std::optional<TimedOp> work;
      try {
        if (!slow) work.emplace(device, OpCode::k_matmul, std::vector<Dims>{{n, n}, {n, n}}, dtype);
      } catch (const Error& e) {  // no kernels of this type
        if (e.code() != Code::kUnimplemented) throw;
      }
      // Who measures nothing waits too, so that all go on together.
      const double seconds = seconds_of([&] {
        if (work) work->run();
      });
      if (work) products->push_back({n, flops / seconds});
    }
  TimedOp sum(device, OpCode::k_add, {{kLongArray}, {kLongArray}}, DType::kF32);
  out.bytes_per_second = 3.0 * 4 * kLongArray / seconds_of([&] { sum.run(); });
  constexpr size_t kBytes = 16 << 20;
  std::vector<char> host(kBytes, 1);
  const ProbedMemory there(device, kBytes);
  out.host.latency_seconds = seconds_of([&] { device.copy_out(host.data(), there.data(), 4); });
  const double large = seconds_of([&] { device.copy_out(host.data(), there.data(), kBytes); });
  out.host.bytes_per_second = kBytes / std::max(large - out.host.latency_seconds, 1e-9);

  const ProbedDevice::Product& first = out.f32.front();
  TimedOp product(device, OpCode::k_matmul, {{first.size, first.size}, {first.size, first.size}}, DType::kF32);
  const double flops = 2.0 * static_cast<double>(first.size * first.size * first.size);
  const double stretch = stretch_of(product, flops / first.flops_per_second, budget, all_begin);
  for (auto* products : {&out.f32, &out.bf16})
    for (ProbedDevice::Product& p : *products) p.flops_per_second /= stretch;
  out.bytes_per_second /= stretch, out.host.bytes_per_second /= stretch;
}

}  // namespace whale
