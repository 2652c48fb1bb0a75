#include "compile/profile_check.h"

#include <algorithm>
#include <cctype>

#include "base/error.h"
#include "base/philox.h"
#include "base/text.h"
#include "cost/measured_layers.h"
#include "cost/plausible.h"
#include "plan/groups.h"
#include "schema/graph_file.h"

namespace whale {
namespace {

std::string capital(std::string text) {
  if (!text.empty()) text[0] = static_cast<char>(std::toupper(static_cast<unsigned char>(text[0])));
  return text;
}

// Of an op as it is written, and of what a plan may make of it: a product takes a bias and an activation in.
bool is_measured(const MeasuredDevice& device, OpView view, const OpCost& cost) {
  if (device.own(shape_of(view, cost))) return true;
  if (!has_flag(view.code, kProduct) || view.inputs.size() != 3 || view.outputs.empty()) return false;
  Attrs attrs = *view.attrs;
  view.attrs = &attrs;
  for (const bool bias : {false, true}) {
    if (bias && view.present[2]) break;
    if (bias) view.present[2] = true, view.inputs[2] = {view.outputs[0].dtype, {view.outputs[0].dims.back()}};
    for (const OpCode op : all_ops()) {
      if (op != all_ops().front() && def(op).as_activation == nullptr) continue;
      attrs["activation"] = std::string(def(op).as_activation == nullptr ? "none" : def(op).as_activation);
      if (device.own(shape_of(view, cost))) return true;
    }
  }
  return false;
}

}  // namespace

std::vector<std::string> check_profile(const Profile& profile, const Graph& source, const Graph& given) {
  if (!profile.measured || profile.measured->devices.empty()) return {};
  const MeasuredProfile& measured = *profile.measured;
  std::vector<std::string> notes;
  const auto note = [&](const std::string& doubt) {
    notes.push_back(
        fmt::format("What {} says may be wrong: {}{}", measured.name(), doubt, doubt.ends_with('?') ? "" : "."));
  };
  for (const std::string& doubt : measured.doubts) note(doubt);
  const std::string of =
      measured.model.empty() ? std::string() : fmt::format(" is of model '{}' and", brief(measured.model));
  for (const auto& device : measured.devices) {
    const int64_t blocks = blocks_of(source.scopes).count;
    if (!device->layers.empty() && std::ssize(device->layers[0].layers) != blocks + 2)
      throw invalid("{}{} has times of {} layers; model '{}' has {} blocks, with the embedding and the head {} layers",
                    measured.name(), of, device->layers[0].layers.size(), source.name, blocks, blocks + 2);
  }
  const bool of_model = measured.of_ops() && !measured.model.empty();  // a table of ops is of none
  double all = 0, known = 0, ops = 0;                                  // FLOPs; kernels
  for (const Op& op : source.ops) {
    if (has_flag(op.code, kView)) continue;
    const OpView view = view_of(source, op);
    const OpCost cost = cost_of(view);
    all += cost.flops, ++ops;
    const auto has = [&](const auto& device) { return is_measured(*device, view, cost); };
    if (of_model && std::ranges::any_of(measured.devices, has)) known += cost.flops;
  }
  int64_t batch = 1;
  for (const TensorId id : source.inputs)
    if (const Tensor& t = source.tensor(id); t.batch_dim >= 0) batch = t.dims[t.batch_dim];
  std::vector<std::string> doubts;
  check_layers(measured, all / static_cast<double>(std::max<int64_t>(1, batch)), ops, doubts);
  for (const std::string& doubt : doubts) note(doubt);
  if (!of_model) return notes;
  constexpr double kLeast = 0.1;  // of the work: any two models have some small op in common
  if (known < kLeast * all)
    throw invalid(
        "{}{} has hardly an op of model '{}' ({:.2g} % of its FLOPs are of ops with the same types, attributes and "
        "sizes beside the batch); measure this model with `whale profile`",
        measured.name(), of, source.name, 100 * known / all);
  if (measured.digest.empty()) return notes;
  const std::vector<uint8_t> file = serialize(given);
  const std::string digest =
      fmt::format("{:016x}", hash_name({reinterpret_cast<const char*>(file.data()), file.size()}));
  if (digest != measured.digest)
    notes.push_back(
        fmt::format("{} was measured with another graph: model '{}' of digest {}, and this is '{}' of {}. Of this "
                    "one's FLOPs {:.3g} % are of ops that it has.",
                    capital(measured.name()), brief(measured.model), brief(measured.digest, 40), source.name, digest,
                    100 * known / std::max(all, 1.0)));
  return notes;
}

}  // namespace whale
