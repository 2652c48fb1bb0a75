// prove: is a plan equal to the program on one device? Runs nothing.
#include "prove.h"

#include <cstdio>
#include <nlohmann/json.hpp>

#include "commands.h"
#include "runner.h"

namespace tool {

namespace {

constexpr int kRefuted = 1, kNotCovered = 3;  // exit codes

whale_proof_options options_of(double timeout) {
  whale_proof_options options = WHALE_PROOF_OPTIONS_INIT;
  options.timeout_seconds = timeout, options.progress = 1;
  return options;
}

}  // namespace

Proof::Proof(const whale_plan* plan, double timeout) {
  const whale_proof_options options = options_of(timeout);
  take(tool::text(whale_plan_prove_json, plan, &options));
}

Proof::Proof(whale_engine* engine, const std::string& path, double timeout) {
  const whale_proof_options options = options_of(timeout);
  take(tool::text(whale_plan_file_prove_json, engine, str(path), &options));
}

void Proof::take(std::string json) {
  json_ = std::move(json);
  const auto told = nlohmann::json::parse(json_);
  const std::string verdict = told.at("verdict");
  text_ = told.at("text").get<std::string>() + verdict;
  exit_code_ = verdict == "proven" ? 0 : verdict == "refuted" ? kRefuted : kNotCovered;
}

namespace {

// The entry of that name and batch; null: the other plan has none.
const nlohmann::ordered_json* entry_like(const nlohmann::ordered_json& proof, const nlohmann::ordered_json& entry) {
  for (const auto& each : proof.at("entries"))
    if (each.at("entry") == entry.at("entry") && each.at("batch") == entry.at("batch")) return &each;
  return nullptr;
}

// Whether two proofs say that their plans give the same bits ("yes", "no", "not known"), and why.
std::pair<std::string, std::string> compared(const nlohmann::ordered_json& mine, const nlohmann::ordered_json& theirs,
                                             const std::string& name) {
  const auto unknown = [](std::string why) { return std::pair(std::string("not known"), std::move(why)); };
  const auto text_of = [](const auto& value) { return value.template get<std::string>(); };
  if (mine.at("verdict") != "proven") return unknown("this plan is " + text_of(mine.at("verdict")));
  if (theirs.at("verdict") != "proven")
    return unknown(name + " is " + text_of(theirs.at("verdict")) + ":\n" + text_of(theirs.at("text")));
  if (mine.at("program") != theirs.at("program")) return {"no", "it is of another program"};
  size_t alike = 0, unlike = 0, alone = 0;
  std::string first;
  for (const auto& entry : mine.at("entries")) {
    const nlohmann::ordered_json* other_entry = entry_like(theirs, entry);
    if (other_entry == nullptr) continue;  // of a batch that the other plan has not been made for
    if (!entry.contains("orders") || !other_entry->contains("orders"))
      return unknown("nothing says the bits of " + (entry.contains("orders") ? name : "this plan") +
                     ": it was not planned in exact mode, or makes copies of one value in unlike ways");
    const auto &orders = entry.at("orders"), &others = other_entry->at("orders");
    size_t both = 0;
    for (const auto& [what, order] : orders.items()) {
      if (!others.contains(what)) continue;
      ++both;
      if (others.at(what) == order)
        ++alike;
      else if (++unlike == 1)
        first = what + " of " + text_of(entry.at("entry"));
    }
    alone += orders.size() + others.size() - 2 * both;
  }
  if (alike + unlike == 0) return unknown("they have no entry of one name and batch");
  if (unlike > 0)
    return {"no", first + (unlike > 1 ? " (and " + std::to_string(unlike - 1) + " more)" : "") +
                      " may have other bits: other kernels make it, or sums are added in another order"};
  return {"yes", "as far as their kernels are the same" +
                     (alone > 0 ? "; " + std::to_string(alone) + " output(s) are handed out by one of them alone"
                                : std::string())};
}

}  // namespace

void Proof::compare(const Proof& other, const std::string& name) {
  auto mine = nlohmann::ordered_json::parse(json_);
  const auto [verdict, why] = compared(mine, nlohmann::ordered_json::parse(other.json_), name);
  mine["same_bits"] = nlohmann::ordered_json{{"as", name}, {"verdict", verdict}, {"why", why}};
  json_ = mine.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
  const size_t last = text_.rfind('\n');
  std::string line = "same bits as " + name + ": " + verdict + ", " + why;
  while (line.ends_with('\n')) line.pop_back();
  text_.insert(last == std::string::npos ? 0 : last + 1, line + "\n");
  if (exit_code_ == 0 && verdict != "yes") exit_code_ = verdict == "no" ? kRefuted : kNotCovered;
}

void add_prove(CLI::App& app, int& exit_code) {
  struct State {
    std::string path, beside;
    bool json = false;
    PlanArguments arguments;
  };
  const auto state = std::make_shared<State>();
  CLI::App* command = app.add_subcommand(
      "prove",
      "prove a plan equal to the program on one device, without running it or opening a device (docs/proof.md); exit "
      "code 0: proven, 1: refuted, 3: not covered (there is no rule for something in it, nothing is said), 2: there "
      "was "
      "no plan to prove, or no time");
  command->add_option("FILE", state->path, "a .plan file, or a .whale file that is planned first")->required();
  command->add_flag("--json", state->json, "print as JSON");
  command
      ->add_option("--same-bits", state->beside,
                   "another .plan file: say whether both are certain to give the same bits, as exact mode has them "
                   "(exit code 1: "
                   "not certain, 3: not known)")
      ->type_name("PLAN");
  add_fetch(*command, state->arguments);
  add_plan_options(*command, state->arguments);
  bound_proof(*command);
  command->callback([state, &exit_code] {
    if (state->arguments.trials > 0)
      throw Failure(
          "--trials runs candidates, and `whale prove` opens no device; plan with it, and prove the plan file");
    const Engine engine = make_engine(state->arguments.init_dir);
    Proof proof = [&] {
      try {
        const Plan plan = open_plan(engine.get(), state->path, state->arguments);
        return Proof(plan.get(), state->arguments.timeout);
      } catch (const Failure& e) {
        const bool wrong = e.code() == WHALE_FAILED_PRECONDITION || e.code() == WHALE_DATA_LOSS;
        if (!wrong || kind_of(state->path) != FileKind::kPlan) throw;
        return Proof(engine.get(), state->path, state->arguments.timeout);
      }
    }();
    if (!state->beside.empty())
      proof.compare(Proof(engine.get(), state->beside, state->arguments.timeout), state->beside);
    std::printf("%s\n", (state->json ? proof.json() : proof.text()).c_str());
    exit_code = proof.exit_code();
  });
}

}  // namespace tool
