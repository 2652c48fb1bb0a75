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
  Scalar function;  // null: dropout
  FusedStep what;
  bool whole;  // its result is of integers
};

double dropped(const FusedStep& step, double x, const StepParameters& parameters, int64_t index) {
  const RandomStream random(parameters.seed, step.key, static_cast<uint64_t>(parameters.iteration));
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
    const DType from = dtypes[step.operands.at(0)];
    steps.push_back({scalar(step.code, from, step.dtype), step, is_integer(step.dtype)});
    if (!steps.back().function && step.code != OpCode::k_dropout)
      throw unimplemented("op '{}' fuses {} of {}, which the ref device does not know", spec.name, def(step.code).name,
                          name_of(from));
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
  const StepParameters* parameters = spec.step;
  const RowContext* row = spec.row;
  std::vector<Number> value(inputs + steps.size());
  return [=]() mutable {
    walk.each([&](int64_t i, const auto& at) {
      for (size_t n = 0; n < inputs; ++n) value[n] = ins[n].number(at[n]);
      for (size_t s = 0; s < steps.size(); ++s) {
        const auto& [function, what, whole] = steps[s];
        Number x[3];
        for (size_t n = 0; n < what.operands.size(); ++n) x[n] = value[what.operands[n]];
        Number& y = value[inputs + s];
        y = function ? function(x) : Number{dropped(what, x[0].real, *parameters, global(i, row->batch_begin))};
        if (whole)
          y.whole = rounded(what.dtype, y.whole);
        else
          y.real = rounded(what.dtype, y.real);
      }
      for (size_t n = 0; n < outs.size(); ++n) outs[n].set(i, value[body.results[n]]);
    });
  };
}

constexpr Row kRows[] = {{OpCode::k_fused, bind_fused}};

}  // namespace

Rows fused_rows() { return kRows; }

}  // namespace whale::ref
