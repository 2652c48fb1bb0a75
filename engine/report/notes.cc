#include "report/notes.h"

#include <algorithm>

#include "plan/figures.h"
#include "plan/groups.h"

namespace whale {
namespace {

// "3, 3, 2"; runs of many equal ones as "96 (x 1024)".
std::string sizes_text(const Ints& sizes) {
  constexpr size_t kMany = 16;
  std::string text;
  for (size_t i = 0; i < sizes.size();) {
    size_t end = i;
    while (end < sizes.size() && sizes[end] == sizes[i]) ++end;
    const bool fold = end - i > kMany;
    text += fmt::format("{}{}{}", text.empty() ? "" : ", ", sizes[i], fold ? fmt::format(" (x {})", end - i) : "");
    i = fold ? end : i + 1;
  }
  return text;
}

// Of a pipeline whose stages are cut by cost: slow links may leave most of the work to a few of them.
std::string small_stages_note(const Plan& plan, const Entry& entry) {
  constexpr double kNothing = 0.01;  // of what the busiest stage does
  std::vector<double> flops;
  for (const Mesh& mesh : plan.meshes) {
    flops.push_back(0);
    for (const int32_t d : mesh.devices)
      if (d >= 0) flops.back() += step_of(entry.programs[entry.rows[d].program]).flops;
  }
  if (flops.size() < 2 || plan.micro_batches < 2) return "";
  const double most = *std::ranges::max_element(flops);
  std::vector<size_t> small;
  for (size_t s = 0; s < flops.size(); ++s)
    if (flops[s] < kNothing * most) small.push_back(s);
  if (small.empty()) return "";
  return fmt::format(
      "Stage{} {} of {} {} next to nothing to do: less than {:g} % of the work of the busiest. Messages between stages "
      "take longer than what others would save; fewer stages, or faster links between them, do as well.",
      small.size() > 1 ? "s" : "", fmt::join(small, ", "), flops.size(), small.size() > 1 ? "have" : "has",
      100 * kNothing);
}

// Bytes of trained parameters where a split is: those that no device of it has but whole, and the others.
std::pair<double, double> parameters_of_splits(const Plan& plan) {
  double whole = 0, cut = 0;
  for (const PlanVariable& v : plan.variables) {
    if (v.role != Role::kParameter || !v.trainable) continue;
    const std::vector<MeshAxis>& axes = plan.meshes[v.mesh].axes;
    bool split = false, parts = false;
    for (size_t a = 0; a < axes.size(); ++a) {
      if (axes[a].size == 1 || axes[a].name != "split") continue;
      split = true;
      parts |= v.storage_sharding.axes[a].placement == Placement::kShard;
    }
    if (split) (parts ? cut : whole) += static_cast<double>(element_count(v.dims) * size_of(v.dtype));
  }
  return {whole, cut};
}

// Bytes that a device has whole until the end of a step, since a split gathered them before its micro-batches.
int64_t gathered_for_step(const Plan& plan, const Program& program) {
  int64_t bytes = 0;
  for (const Segment& segment : program.segments)
    for (const Instruction& i : segment.instructions)
      if (segment.name == "prologue" && i.kind() == InstructionKind::kCollective && i.op() == OpCode::k_all_gather &&
          !has_replicas(plan.groups[i.group()].axis))
        for (const BufferId b : i.out) bytes += program.buffers[b].bytes;
  return bytes;
}

}  // namespace

std::vector<std::string> notes_of(const Plan& plan) {
  std::vector<std::string> notes;
  if (plan.entries.empty()) return notes;
  const Entry& e = plan.entries[0];
  if (plan.devices.size() > 1) {
    Ints sizes;
    for (const DeviceRow& row : e.rows) sizes.push_back(samples_of(e, row));
    if (e.batch == 1)
      notes.push_back("The batch is one sample, which cannot be cut: every device computes all of it.");
    else
      notes.push_back(fmt::format("{} samples are cut over {} devices as [{}]; {} program(s) for them.", e.batch,
                                  e.rows.size(), sizes_text(sizes), e.programs.size()));
  }
  if (plan.micro_batches > 1)
    notes.push_back(fmt::format("Each step runs {} micro-batches and updates once.", plan.micro_batches));
  const StepFigures f = step_of(e.programs[0]);
  if (f.collectives)
    notes.push_back(fmt::format("{} collective(s) a step carry {}, {} of them beside the computation.", f.collectives,
                                bytes_text(f.communicated), f.on_the_side));
  const bool replicas = most_replicas(plan.meshes) > 1;
  const std::string who = plan.devices.size() > 1 ? fmt::format("'{}'", plan.strategy) : "one device";
  if (plan.options.zero > 0 && !replicas) {
    const bool unlike = plan.strategy.find('[') != std::string::npos;
    notes.push_back(fmt::format("ZeRO {} cuts over replicas; {} has none{}, so nothing is cut{}.", plan.options.zero,
                                who, unlike ? " that are alike" : "",
                                unlike                    ? ": put replica into its parts"
                                : plan.devices.size() > 1 ? ": put replica around it"
                                                          : ""));
  }
  if (const auto [whole, cut] = parameters_of_splits(plan); whole > cut)
    notes.push_back(
        fmt::format("A split leaves parameters of {} whole on each of its devices, and cuts {}: what it cuts is what "
                    "takes least time "
                    "by the cost model. factor=columns, or heads, experts, asks for parts of them ('{}').",
                    bytes_text(whole), cut > 0 ? bytes_text(cut) : "none", plan.strategy));
  if (const int64_t gathered = gathered_for_step(plan, e.programs[0]);
      gathered > variables_of_device(plan, e.rows[0].device).parameters) {
    const bool chosen = plan.strategy.find("factor=") == std::string::npos;
    notes.push_back(fmt::format(
        "Weights of {} are put together along a split once a step and lie whole on each of its devices until "
        "its end: that takes least time by the cost model{} ('{}').",
        bytes_text(static_cast<double>(gathered)),
        chosen ? ". factor=columns, or heads, experts, leaves most of them in parts" : "", plan.strategy));
  }
  if (plan.options.gradient_dtype)
    notes.push_back(
        replicas
            ? fmt::format("Gradients are rounded to {} before replicas sum them: by this option the plan changes the "
                          "result.",
                          name_of(*plan.options.gradient_dtype))
            : fmt::format("Gradients are summed in {} between replicas; {} has none, so nothing is rounded.",
                          name_of(*plan.options.gradient_dtype), who));
  if (const auto dtype = plan.options.accumulate_dtype)
    notes.push_back(plan.micro_batches > 1
                        ? fmt::format("Gradients are summed over micro-batches in {}: by this option the plan changes "
                                      "the result.",
                                      name_of(*dtype))
                        : fmt::format("Gradients are summed over micro-batches in {}; a step has one, so nothing is "
                                      "rounded.",
                                      name_of(*dtype)));
  if (const std::string note = small_stages_note(plan, e); !note.empty()) notes.push_back(note);
  if (plan.options.adasum)
    notes.push_back(
        replicas ? "Replicas combine their gradients by Adasum: by this option the plan changes the result."
                 : fmt::format("Adasum combines gradients of replicas; {} has none, so nothing is combined.", who));
  return notes;
}

std::string idle_note(const TaskGraphs& tasks, int64_t micro_batches, bool exact) {
  int64_t replicas = 1;
  for (size_t a = 0; a < tasks.by_micro_batch.size(); ++a)
    if (tasks.by_micro_batch[a]) replicas *= tasks.meshes[0].axes[a].size;
  if (replicas <= micro_batches) return "";
  const std::string who = exact ? fmt::format("Exact mode: {} replicas take whole micro-batches", replicas)
                                : fmt::format("{} replicas take whole micro-batches (by=micro_batch)", replicas);
  const std::string what = micro_batches == 1 ? "there is one, which each of them computes"
                                              : fmt::format("there are {}, so {} of them have nothing to do",
                                                            micro_batches, replicas - micro_batches);
  return fmt::format("{}; {}: plan with accumulation {} or more to share the work.", who, what, replicas);
}

}  // namespace whale
