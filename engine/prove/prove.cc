#include "prove/prove.h"

#include <algorithm>
#include <stdexcept>

#include "base/philox.h"
#include "base/progress.h"
#include "base/watch.h"
#include "prove/lacking.h"
#include "prove/meetings.h"
#include "prove/races.h"
#include "prove/settings.h"
#include "prove/walk.h"
#include "schema/graph_file.h"

namespace whale {
namespace {

using proof::At;
using proof::Reference;
using proof::Stopped;
using proof::Symmetry;
using proof::Walk;

// Where a segment runs several times, in which micro-batch.
std::string told(const Walk& walk, const At& at) {
  const Instruction& i = walk.instruction(at);
  const std::string of = walk.runs(at) > 1 ? fmt::format(", micro-batch {}", walk.schedule_row(at).micro_batch) : "";
  return fmt::format("instruction {} of {}{}: {} '{}' on device {}", at.instruction, walk.segment(at).name, of,
                     i.verb(), i.name, at.device);
}

void fill(EntryProof& out, const Plan& plan, const Entry& entry, const Walk& walk, Reference& reference,
          Stopped&& stopped) {
  out.verdict = stopped.stop.covered ? ProofVerdict::kRefuted : ProofVerdict::kNotCovered;
  out.what = std::move(stopped.stop.what);
  out.path = std::move(stopped.path);
  std::stable_partition(stopped.reads.begin(), stopped.reads.end(),
                        [](const proof::Held& v) { return !v->terms.whole(); });
  const auto of = [&](const proof::Held& v) {
    return v->device < 0 ? "there before" : "of " + told(walk, {v->device, v->row, v->instruction});
  };
  std::string missing;  // of the first sum that has not all terms
  for (const proof::Held& value : stopped.reads) {
    const proof::Lacking without = proof::lacking(entry, reference, stopped.at.device, *value);
    out.path.push_back(fmt::format("it reads {}{}, {}", proof::describe(reference, *value),
                                   without.what.empty() ? "" : " (" + without.what + ")", of(value)));
    if (!missing.empty() || value->terms.whole()) continue;
    missing = without.what;
    const bool known = without.device != kNone;
    for (const proof::Held& v : proof::traced(entry, value, known ? without.device : value->device))
      out.path.push_back(fmt::format("that was made of {}, {}", proof::describe(reference, *v), of(v)));
  }
  if (!missing.empty() && stopped.stop.covered && stopped.stop.lacks) out.what += "; it is " + missing;
  out.at.device = stopped.at.device;
  if (stopped.at.device < 0 || stopped.at.instruction < 0) return;
  const Instruction& i = walk.instruction(stopped.at);
  if (walk.runs(stopped.at) > 1) out.at.micro_batch = walk.schedule_row(stopped.at).micro_batch;
  out.at.segment = walk.segment(stopped.at).name;
  out.at.instruction = i.name;
  out.at.verb = std::string(i.verb());
  out.at.number = stopped.at.instruction;
  out.at.scope = plan.scope_path(i.scope);
  if (out.verdict == ProofVerdict::kNotCovered) out.construct = out.at.verb;
}

// A session plans steps of other batch sizes by the options of the plan.
std::set<std::string> exemptions_by(const PlanOptions& options) {
  std::set<std::string> out;
  if (options.adasum) out.insert("steps of other batch sizes are planned with Adasum, which is no sum");
  for (const auto& dtype : {options.gradient_dtype, options.accumulate_dtype})
    if (dtype)
      out.insert(fmt::format("steps of other batch sizes are planned to add gradients up in {}", name_of(*dtype)));
  return out;
}

std::string statement(const Entry& entry, bool exact, const std::string& order,
                      const std::set<std::string>& exemptions) {
  std::string out =
      entry.name == "train"
          ? "every copy of every variable is, after a step, what the one-device program makes of it, and all that is "
            "handed out is the program's, up to the order of sums"
          : "all that is handed out is the one-device program's, up to the order of sums";
  if (exact) out += "; in exact mode micro-batches are whole and added by the tree";
  if (exact && order.empty())
    out += "; nothing is said of bits: copies, or parts that are the same all along, are made in unlike ways";
  if (!order.empty())
    out += fmt::format("; bit for bit what plans of this program with order {} give, as far as kernels are the same",
                       order);
  for (const std::string& e : exemptions) out += "; " + e;
  return out;
}

// By name, and of all.
void tell_orders(EntryProof& out, const std::map<std::string, uint64_t>& orders) {
  std::string all;
  for (const auto& [name, order] : orders) {
    out.orders.emplace_back(name, fmt::format("{:016x}", order));
    all += fmt::format("{}\n{}\n", name, out.orders.back().second);
  }
  if (!orders.empty()) out.order = fmt::format("{:016x}", hash_name(all));
}

// What is wrong with the order of the instructions.
std::optional<Stopped> order_of(const Plan& plan, const Entry& entry, const Symmetry& symmetry) {
  std::vector<bool> seen(entry.programs.size());
  for (const DeviceRow& row : entry.rows) {
    const auto number = static_cast<size_t>(row.program);
    if (seen[number] || !symmetry.walked(row.device)) continue;
    seen[number] = true;
    if (auto race = proof::race_of(entry.programs[number], row.device)) return race;
  }
  return proof::standstill_of(plan, entry, symmetry);
}

void walk_all(EntryProof& out, const Plan& plan, const Entry& entry, Reference& reference, const Symmetry& symmetry,
              bool shown) {
  Walk walk(plan, entry, reference, symmetry);
  auto stopped = order_of(plan, entry, symmetry);
  if (!stopped) {
    std::optional<Progress> progress;
    if (shown) progress.emplace(static_cast<size_t>(walk.to_walk()), "proving " + entry.name);
    stopped = walk.run(progress ? &*progress : nullptr);
  }
  out.walked = walk.walked();
  if (stopped) {
    fill(out, plan, entry, walk, reference, std::move(*stopped));
  } else {
    out.verdict = ProofVerdict::kProven;
    std::set<std::string> exemptions = walk.exemptions();
    exemptions.merge(exemptions_by(plan.options));
    if (reference.rounds_apart())
      exemptions.insert(
          "products are rounded before their bias or activation, which one device adds first, and the gradients of "
          "such "
          "biases once");
    if (walk.tree().asked()) tell_orders(out, walk.tree().orders());
    out.what = statement(entry, walk.tree().asked(), out.order, exemptions);
  }
}

// Has the plan taken products apart and put them together again, so that nobody can tell which of the source they are?
bool has_own_products(const Plan& plan, const proof::Form& form) {
  proof::Form::Names known;
  for (const Op& op : plan.source.ops) known.insert(op.name);
  const auto is_own = [&](const std::string& name) { return !known.contains(name); };
  return std::ranges::any_of(form.biased, is_own) || std::ranges::any_of(form.active, is_own);
}

EntryProof prove_as(const Plan& plan, const Entry& entry, const proof::Form& form, Symmetry::Sought sought,
                    bool shown) {
  EntryProof out;
  out.entry = entry.name, out.batch = entry.batch;
  try {
    Reference reference(plan, entry, form);
    proof::check_settings(plan, entry, reference);
    // Whether the samples of two are halves of a node is nothing that grows by equal steps.
    const bool alike = plan.options.exact && sought == Symmetry::Sought::kYes;
    const Symmetry symmetry(plan, entry, alike ? Symmetry::Sought::kSamplesAlike : sought);
    if (symmetry.found()) {
      try {
        walk_all(out, plan, entry, reference, symmetry, shown);
        return out;
      } catch (const proof::Uneven&) {  // what was left out has to be walked
      }
    }
    walk_all(out, plan, entry, reference, Symmetry(plan, entry, Symmetry::Sought::kNo), shown);
  } catch (const proof::Stop& stop) {
    out.verdict = stop.covered ? ProofVerdict::kRefuted : ProofVerdict::kNotCovered;
    out.what = stop.what;
    if (!stop.covered) out.construct = stop.what;
  } catch (const Error& e) {
    if (e.code() == Code::kCancelled || e.code() == Code::kDeadlineExceeded) throw;
    out.verdict = ProofVerdict::kNotCovered;
    out.what = out.construct = fmt::format("the one-device program: {}", e.message());
  } catch (const std::out_of_range&) {  // an attribute that its op must have is missing, or shorter than it must be
    out.verdict = ProofVerdict::kNotCovered;
    out.what = out.construct = "an op without an attribute that it must have";
  }
  return out;
}

// What verify(plan) says; none: nothing.
std::optional<Proof> contradiction(const Plan& plan) {
  try {
    verify(plan);
    return {};
  } catch (const PlanFault& fault) {
    return refutation(fault);
  }
}

}  // namespace

EntryProof prove(const Plan& plan, const Entry& entry, Symmetry::Sought sought, bool shown) {
  proof::Form form = proof::form_of(entry);
  EntryProof out = prove_as(plan, entry, form, sought, shown);
  if (out.verdict == ProofVerdict::kProven || !is_half(plan.precision)) return out;
  // In 16 bits it matters when a plan takes products apart and puts them together; the statement says so.
  const auto proven_as = [&](const proof::Form& other) -> std::optional<EntryProof> {
    EntryProof proof = prove_as(plan, entry, other, sought, shown);
    return proof.verdict == ProofVerdict::kProven ? std::optional(std::move(proof)) : std::nullopt;
  };
  if (!form.biased.empty()) {
    for (const auto which : {proof::Form::Late::kAll, proof::Form::Late::kInSplits}) {
      proof::Form late = form;
      late.late = which;
      if (auto proof = proven_as(late)) return *proof;
    }
  }
  if (has_own_products(plan, form)) {
    form.whole = false;
    if (auto proof = proven_as(form)) return *proof;
  }
  return out;
}

namespace {

// Of the source, as plans of other strategies, micro-batches and fetched values have it too.
std::string program_of(const Plan& plan) {
  Graph source = plan.source;
  source.default_strategy.clear(), source.outputs.clear(), source.training.accumulation = 1;
  const std::vector<uint8_t> bytes = serialize(source);
  return fmt::format("{:016x}", hash_name({reinterpret_cast<const char*>(bytes.data()), bytes.size()}));
}

}  // namespace

Proof refutation(const PlanFault& fault) {
  EntryProof of;
  of.entry = fault.entry, of.batch = fault.batch, of.verdict = ProofVerdict::kRefuted, of.what = fault.found;
  of.at = fault.at, of.path = fault.path;
  return {ProofVerdict::kRefuted, {std::move(of)}, ""};
}

Proof prove(const Plan& plan, bool shown) {
  return stoppable([&] {
    Proof out;
    if (std::optional<Proof> refuted = contradiction(plan)) return std::move(*refuted);
    const auto has = [&](const char* name) { return std::ranges::count(plan.entries, name, &Entry::name) > 0; };
    const char* missing = plan.source.training.loss != kNone &&
                                  plan.source.training.optimizer.kind != OptimizerKind::kNone && !has("train")
                              ? "train"
                          : !has("eval") ? "eval"
                                         : nullptr;
    if (missing != nullptr) {
      EntryProof none;
      none.entry = missing, none.verdict = out.verdict = ProofVerdict::kRefuted;
      none.what = fmt::format("the plan has no entry '{}', which the model asks for", missing);
      out.entries.push_back(std::move(none));
      return out;
    }
    for (const Entry& entry : plan.entries) {
      out.entries.push_back(prove(plan, entry, Symmetry::Sought::kYes, shown));
      const ProofVerdict v = out.entries.back().verdict;
      if (v == ProofVerdict::kRefuted || out.verdict == ProofVerdict::kProven) out.verdict = v;
    }
    out.program = program_of(plan);
    return out;
  });
}

}  // namespace whale
