#include "base/json.h"
#include "prove/prove.h"

namespace whale {

std::string text(const Proof& proof) {
  std::string out;
  for (const EntryProof& e : proof.entries) {
    const std::string of = e.batch > 0 ? fmt::format(" of {} samples", e.batch) : "";
    out += fmt::format("{}{}: {}: ", e.entry, of, name_of(e.verdict));
    if (e.device >= 0 && e.number < 0) out += fmt::format("device {}: ", e.device);
    if (e.device >= 0 && e.number >= 0)
      out += fmt::format("device {}, instruction {} of {}{}: {} '{}'{}: ", e.device, e.number, e.segment,
                         e.micro_batch < 0 ? "" : fmt::format(", micro-batch {}", e.micro_batch), e.verb, e.instruction,
                         e.scope.empty() ? "" : " in " + e.scope);
    out += e.what + "\n";
    for (const std::string& step : e.path) out += "  " + step + "\n";
  }
  return out;
}

std::string to_json(const Proof& proof) {
  Json out{{"verdict", name_of(proof.verdict)}, {"text", text(proof)}, {"entries", Json::array()}};
  for (const EntryProof& e : proof.entries) {
    Json each{{"entry", e.entry}, {"batch", e.batch},   {"verdict", name_of(e.verdict)},
              {"what", e.what},   {"walked", e.walked}, {"construct", e.construct},
              {"path", e.path}};
    if (!e.order.empty()) each["order"] = e.order;
    if (e.device >= 0 && e.number < 0) each["at"] = {{"device", e.device}};
    if (e.device >= 0 && e.number >= 0)
      each["at"] = {
          {"device", e.device},           {"segment", e.segment}, {"number", e.number},          {"verb", e.verb},
          {"instruction", e.instruction}, {"scope", e.scope},     {"micro_batch", e.micro_batch}};
    out["entries"].push_back(std::move(each));
  }
  return text_of(out);
}

}  // namespace whale
