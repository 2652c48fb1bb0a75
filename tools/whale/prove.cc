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
const nlohmann::json* entry_like(const nlohmann::json& proof, const nlohmann::ordered_json& entry) {
  for (const auto& each : proof.at("entries"))
    if (each.at("entry") == entry.at("entry") && each.at("batch") == entry.at("batch")) return &each;
  return nullptr;
}

}  // namespace

void Proof::compare(const Proof& other, const std::string& name) {
  auto mine = nlohmann::ordered_json::parse(json_);
  const auto theirs = nlohmann::json::parse(other.json_);
  bool known = mine.at("verdict") == "proven" && theirs.at("verdict") == "proven", same = true;
  bool any = false;
  for (const auto& entry : mine.at("entries")) {
    const nlohmann::json* other_entry = entry_like(theirs, entry);
    if (other_entry == nullptr) continue;  // of a batch that the other plan has not been made for
    const std::string a = entry.value("order", ""), b = other_entry->value("order", "");
    any = true, known &= !a.empty() && !b.empty(), same &= a == b;
  }
  known &= any;
  const bool one_program = mine.at("program") == theirs.at("program");
  const std::string told = !known         ? "not known"
                           : !one_program ? "no, it is of another program"
                           : same         ? "yes, as far as their kernels are the same"
                                          : "no, its sums are added in another order";
  same &= one_program;
  mine["same_bits"] = nlohmann::ordered_json{{"as", name}, {"verdict", !known ? "not known" : same ? "yes" : "no"}};
  json_ = mine.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
  const size_t last = text_.rfind('\n');
  text_.insert(last == std::string::npos ? 0 : last + 1, "same bits as " + name + ": " + told + "\n");
  if (exit_code_ == 0 && !(known && same)) exit_code_ = known ? kRefuted : kNotCovered;
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
      ->add_option(
          "--same-bits", state->beside,
          "another .plan file: say whether both give the same bits, as exact mode has them (exit code 1: others, 3: "
          "not known)")
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
