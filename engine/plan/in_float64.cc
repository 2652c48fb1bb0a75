#include "plan/in_float64.h"

#include "base/error.h"
#include "ops/fused.h"
#include "plan/row_waits.h"

namespace whale {
namespace {

// Of any float in float64: offsets that are so many times larger keep all parts apart and aligned.
constexpr int64_t kGrowth = 4;

DType widened(DType dtype) { return is_float(dtype) ? DType::kF64 : dtype; }

void widen(Attrs& attrs) {
  for (const char* name : {"dtype", "out_dtype"}) {
    const auto it = attrs.find(name);
    if (it == attrs.end()) continue;
    std::string& given = std::get<std::string>(it->second);
    if (!given.empty()) given = name_of(widened(parse_dtype(given)));
  }
}

void widen(Buffer& buffer) {
  const DType dtype = widened(buffer.dtype);
  buffer.at = buffer.at / size_of(buffer.dtype) * size_of(dtype);
  buffer.dtype = dtype;
  buffer.bytes = element_count(buffer.dims) * size_of(dtype);
  if (buffer.offset > 0) buffer.offset *= kGrowth;
}

void widen(Instruction& instruction) {
  auto* kernel = instruction.as<work::Kernel>();
  if (kernel == nullptr) return;
  widen(kernel->attrs);
  if (kernel->op != OpCode::k_fused) return;
  const auto inputs = static_cast<int>(instruction.in.size());
  FusedBody body = decode(kernel->attrs, inputs);
  for (FusedStep& step : body.steps) step.dtype = widened(step.dtype);
  for (auto& [name, value] : encode(body, inputs)) kernel->attrs[name] = std::move(value);
}

void widen(Program& program) {
  for (Buffer& buffer : program.buffers) widen(buffer);
  for (Segment& segment : program.segments)
    for (Instruction& instruction : segment.instructions) widen(instruction);
  for (int64_t* bytes : {&program.arena_bytes, &program.host_bytes, &program.variable_bytes, &program.peak_live_bytes})
    *bytes *= kGrowth;
  add_row_waits(program);  // versions lie closer together than they did, of offsets that have grown
}

// Before the buffers of its program, which say of which type they are.
void widen_places(const Program& program, DeviceRow& row) {
  for (size_t k = 0; k < program.holes.size(); ++k) {
    if (program.holes[k].kind != HoleKind::kAt) continue;
    const DType dtype = program.buffers[program.holes[k].buffer].dtype;
    row.placed[k] = row.placed[k] / size_of(dtype) * size_of(widened(dtype));
  }
}

}  // namespace

Plan in_float64(const Plan& plan) {
  for (const PlanVariable& v : plan.variables)
    if (v.state_name == "low")
      throw unimplemented("parameter '{}' is kept in two halves of its bits, which float64 has none of", v.owner);
  Plan out = plan;
  for (DeviceSpec& device : out.devices)  // lag has ref's arithmetic
    if (device.kind == DeviceKind::kLagCpu)
      device.kind = DeviceKind::kLag;
    else if (device.kind != DeviceKind::kLag)
      device = {.kind = DeviceKind::kRef, .cores = {}, .index = 0, .node = device.node, .named = false};
  for (PlanVariable& v : out.variables) v.dtype = widened(v.dtype);
  for (Entry& entry : out.entries) {
    for (PlanInput& input : entry.inputs) input.dtype = widened(input.dtype);
    for (PlanOutput& output : entry.outputs) output.dtype = widened(output.dtype);
    for (DeviceRow& row : entry.rows) widen_places(entry.programs[row.program], row);
    for (Program& program : entry.programs) widen(program);
  }
  out.precision = out.source.training.precision = Precision::kFloat64;
  out.options.gradient_dtype.reset();
  out.options.accumulate_dtype.reset();
  const std::vector<uint8_t> bytes = serialize(out);
  return deserialize(bytes.data(), bytes.size());  // every instruction fits its operands, or an error
}

}  // namespace whale
