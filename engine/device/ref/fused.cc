// A chain of elementwise ops. Every step's result is rounded to its type, so that fusing changes no number here.
#include <array>

#include "base/philox.h"
#include "device/global_index.h"
#include "device/ref/scalar.h"
#include "device/ref/table.h"
#include "device/ref/walk.h"
#include "ops/fused.h"

namespace whale::ref {
namespace {

constexpr size_t kMaxInputs = 16;

struct Step {
  Unary one = nullptr;
  Binary two = nullptr;
  FusedStep what;
  DType from{};  // of its first operand
};

double dropped(const FusedStep& step, double x, const StepContext& context, int64_t index) {
  const RandomStream random(context.seed, step.key, static_cast<uint64_t>(context.iteration));
  const bool keep = random.word(static_cast<uint64_t>(index)) >= drop_threshold(step.value);
  return keep ? x / (1 - step.value) : 0;
}

Body bind_fused(const KernelSpec& spec) {
  const size_t inputs = spec.in.size();
  if (inputs > kMaxInputs)
    throw unimplemented("op '{}' fuses {} inputs, the ref device takes {}", spec.name, inputs, kMaxInputs);
  const FusedBody body = decode(*spec.attrs, static_cast<int>(inputs));
  std::vector<Step> steps;
  std::vector<DType> dtypes;
  for (const Operand& x : spec.in) dtypes.push_back(x.dtype);
  for (const FusedStep& step : body.steps) {
    steps.push_back({unary(step.code), binary(step.code), step,
                     step.operands.empty() ? DType{} : dtypes[static_cast<size_t>(step.operands[0])]});
    dtypes.push_back(step.dtype);
  }
  std::vector<In> ins;
  std::vector<Out> outs;
  std::array<Strides, kMaxInputs> strides;
  const Dims& dims = spec.out[0].dims;
  for (size_t i = 0; i < kMaxInputs; ++i)
    strides[i] = i < inputs ? broadcast_strides(spec.in[i].dims, dims) : Strides(dims.size(), 0);
  for (size_t i = 0; i < inputs; ++i) ins.push_back(in(spec, i));
  for (size_t i = 0; i < spec.out.size(); ++i) outs.push_back(out(spec, i));
  const Walk<kMaxInputs> walk(dims, strides);
  const GlobalIndex global(spec.box, dims);
  const StepContext* context = spec.context;
  Values value(inputs + steps.size());
  return [=]() mutable {
    walk.each([&](int64_t i, const auto& at) {
      for (size_t n = 0; n < inputs; ++n) value[n] = ins[n][at[n]];
      for (size_t s = 0; s < steps.size(); ++s) {
        const FusedStep& what = steps[s].what;
        const auto operand = [&](size_t n) { return value[static_cast<size_t>(what.operands[n])]; };
        double result = 0;
        if (what.code == OpCode::k_cast)
          result = cast(steps[s].from, what.dtype, operand(0));
        else if (steps[s].one)
          result = steps[s].one(operand(0));
        else if (steps[s].two)
          result = steps[s].two(operand(0), operand(1));
        else if (what.code == OpCode::k_where)
          result = where(operand(0), operand(1), operand(2));
        else if (what.code == OpCode::k_dropout)
          result = dropped(what, operand(0), *context, global(i, context->batch_begin));
        value[inputs + s] = rounded(what.dtype, result);
      }
      for (size_t n = 0; n < outs.size(); ++n) outs[n].set(i, value[static_cast<size_t>(body.results[n])]);
    });
  };
}

constexpr Row kRows[] = {{OpCode::k_fused, bind_fused}};

}  // namespace

Rows fused_rows() { return kRows; }

}  // namespace whale::ref
