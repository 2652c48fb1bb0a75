#include "ops/fused.h"

namespace whale {
namespace {

// Reads a list of integers; every value is checked against its range before it is used.
struct Reader {
  const Ints& data;
  size_t at = 0;
  int64_t next(const char* what) {
    if (at >= data.size()) throw invalid("attribute 'ops' ends at entry {} where {} is expected", at, what);
    return data[at++];
  }
  int64_t next(const char* what, int64_t low, int64_t high) {
    const int64_t value = next(what);
    if (value < low || value > high)
      throw invalid("attribute 'ops', entry {}: {} is {}, expected {} to {}", at - 1, what, value, low, high);
    return value;
  }
};

}  // namespace

std::optional<FusedStep> step_of(const Op& op, DType result) {
  if (!has_flag(op.code, kElementwise) || has_flag(op.code, kView) || op.code == OpCode::k_fused) return {};
  FusedStep step{.code = op.code, .dtype = result, .operands = {}};
  if (op.code == OpCode::k_dropout) {
    step.value = attr_float(op.attrs, "rate");
    step.key = op.key ? op.key : static_cast<uint64_t>(attr_int(op.attrs, "key"));
  } else if (op.code != OpCode::k_cast && !op.attrs.empty()) {
    return {};
  }
  return step;
}

Attrs encode(const FusedBody& body, int inputs) {
  Ints ops{static_cast<int64_t>(body.steps.size())};
  std::vector<double> values;
  for (const FusedStep& step : body.steps) {
    ops.insert(ops.end(), {static_cast<int64_t>(step.code), static_cast<int64_t>(step.dtype),
                           static_cast<int64_t>(step.key), static_cast<int64_t>(step.operands.size())});
    ops.insert(ops.end(), step.operands.begin(), step.operands.end());
    values.push_back(step.value);
  }
  ops.insert(ops.end(), body.results.begin(), body.results.end());
  Attrs attrs{{"ops", std::move(ops)}, {"values", std::move(values)}};
  decode(attrs, inputs);  // what cannot be read back must not be written
  return attrs;
}

int result_count(const Attrs& attrs) {
  const auto& ops = attr_ints(attrs, "ops");
  size_t at = 1;
  for (int64_t step = 0; step < ops[0]; ++step) at += 4 + static_cast<size_t>(ops[at + 3]);
  return static_cast<int>(ops.size() - at);
}

FusedBody decode(const Attrs& attrs, int inputs) {
  Reader in{attr_ints(attrs, "ops")};
  const auto it = attrs.find("values");
  const auto* values = it == attrs.end() ? nullptr : std::get_if<std::vector<double>>(&it->second);
  FusedBody body;
  const int64_t size = static_cast<int64_t>(in.data.size());
  const int64_t count = in.next("the number of steps", 1, size / 4);  // a step takes at least four entries
  if (values == nullptr || static_cast<int64_t>(values->size()) != count)
    throw invalid("attribute 'values' has {} entries, expected {}: one for each step", values ? values->size() : 0,
                  count);
  for (int64_t i = 0; i < count; ++i) {
    FusedStep step;
    const int64_t number = in.next("an op number", 0, UINT16_MAX);
    if (!is_valid_op(static_cast<int>(number))) throw invalid("attribute 'ops': no op has number {}", number);
    step.code = static_cast<OpCode>(number);
    const bool fusable = step.code == OpCode::k_dropout || has_flag(step.code, kElementwise);
    if (!fusable || step.code == OpCode::k_fused)
      throw invalid("attribute 'ops': {} is not elementwise", def(step.code).name);
    const int64_t dtype = in.next("a dtype", 0, UINT8_MAX);
    if (!is_valid_dtype(static_cast<int>(dtype))) throw invalid("attribute 'ops': dtype number {} is unknown", dtype);
    step.dtype = static_cast<DType>(dtype);
    step.key = static_cast<uint64_t>(in.next("a key"));
    const auto wanted = static_cast<int64_t>(def(step.code).inputs.size());
    const int64_t operands = in.next("an operand count", wanted, wanted);
    for (int64_t k = 0; k < operands; ++k)
      step.operands.push_back(static_cast<int>(in.next("an operand", 0, inputs + i - 1)));
    step.value = (*values)[i];
    body.steps.push_back(std::move(step));
  }
  while (in.at < in.data.size())
    body.results.push_back(static_cast<int>(in.next("a result", inputs, inputs + count - 1)));
  if (body.results.empty()) throw invalid("attribute 'ops' names no results");
  return body;
}

}  // namespace whale
