#include "base/json.h"
#include "prove/prove.h"

namespace whale {

namespace {

// What is not known is left out.
Json place_of(const InstructionPlace& at) {
  Json out{{"device", at.device}};
  if (!at.segment.empty()) out["segment"] = at.segment;
  if (at.number >= 0)
    out.update({{"number", at.number}, {"verb", at.verb}, {"instruction", at.instruction}, {"scope", at.scope}});
  if (at.micro_batch >= 0 || at.number >= 0) out["micro_batch"] = at.micro_batch;
  return out;
}

}  // namespace

std::string text(const Proof& proof) {
  std::string out;
  for (const EntryProof& e : proof.entries) {
    const std::string of = e.batch > 0 ? fmt::format(" of {} samples", e.batch) : "";
    out += fmt::format("{}{}: {}: ", e.entry, of, name_of(e.verdict));
    const InstructionPlace& at = e.at;
    const std::string micro_batch = at.micro_batch < 0 ? "" : fmt::format(", micro-batch {}", at.micro_batch);
    if (at.device >= 0 && at.number < 0)
      out += fmt::format("device {}{}{}: ", at.device, at.segment.empty() ? "" : ", " + at.segment, micro_batch);
    if (at.device >= 0 && at.number >= 0)
      out += fmt::format("device {}, instruction {} of {}{}: {} '{}'{}: ", at.device, at.number, at.segment,
                         micro_batch, at.verb, at.instruction, at.scope.empty() ? "" : " in " + at.scope);
    out += e.what + "\n";
    for (const std::string& step : e.path) out += "  " + step + "\n";
    if (e.verdict != ProofVerdict::kProven && at.number >= 0)
      out += "  (names in quotes are the plan's, others are of the one-device program)\n";
  }
  return out;
}

std::string to_json(const Proof& proof) {
  Json out{{"verdict", name_of(proof.verdict)},
           {"text", text(proof)},
           {"program", proof.program},
           {"entries", Json::array()}};
  for (const EntryProof& e : proof.entries) {
    Json each{{"entry", e.entry}, {"batch", e.batch},   {"verdict", name_of(e.verdict)},
              {"what", e.what},   {"walked", e.walked}, {"construct", e.construct},
              {"path", e.path}};
    if (!e.order.empty()) {
      each["order"] = e.order, each["orders"] = Json::object();
      for (const auto& [name, order] : e.orders) each["orders"][name] = order;
    }
    if (e.at.device >= 0) each["at"] = place_of(e.at);
    out["entries"].push_back(std::move(each));
  }
  return text_of(out);
}

}  // namespace whale
