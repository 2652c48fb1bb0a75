// prove: is a plan equal to the program on one device? Runs nothing.
#include "prove.h"

#include <cstdio>
#include <nlohmann/json.hpp>

#include "commands.h"
#include "runner.h"

namespace tool {

Proof::Proof(const whale_plan* plan, double timeout) {
  whale_proof_options options = WHALE_PROOF_OPTIONS_INIT;
  options.timeout_seconds = timeout, options.progress = 1;
  json_ = tool::text(whale_plan_prove_json, plan, static_cast<const whale_proof_options*>(&options));
  const auto told = nlohmann::json::parse(json_);
  const std::string verdict = told.at("verdict");
  text_ = told.at("text").get<std::string>() + verdict;
  constexpr int kRefuted = 1, kNotCovered = 3;
  exit_code_ = verdict == "proven" ? 0 : verdict == "refuted" ? kRefuted : kNotCovered;
}

Proof Proof::refuted(const std::string& what) {
  Proof out;
  const std::string text = "refuted: " + what + "\n";
  const nlohmann::ordered_json entry{{"entry", "all"},
                                     {"verdict", "refuted"},
                                     {"what", what},
                                     {"walked", 0},
                                     {"batch", 0},
                                     {"construct", ""},
                                     {"path", nlohmann::ordered_json::array()}};
  const nlohmann::ordered_json told{{"verdict", "refuted"}, {"text", text}, {"entries", {entry}}};
  out.json_ = told.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace), out.text_ = text + "refuted",
  out.exit_code_ = 1;
  return out;
}

void add_prove(CLI::App& app, int& exit_code) {
  struct State {
    std::string path;
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
  add_fetch(*command, state->arguments);
  add_plan_options(*command, state->arguments);
  bound_proof(*command);
  command->callback([state, &exit_code] {
    if (state->arguments.trials > 0)
      throw Failure(
          "--trials runs candidates, and `whale prove` opens no device; plan with it, and prove the plan file");
    const Engine engine = make_engine(state->arguments.init_dir);
    const Proof proof = [&] {
      try {
        const Plan plan = open_plan(engine.get(), state->path, state->arguments);
        return Proof(plan.get(), state->arguments.timeout);
      } catch (const Failure& e) {
        if (e.code() != WHALE_FAILED_PRECONDITION || kind_of(state->path) != FileKind::kPlan) throw;
        return Proof::refuted(e.what());
      }
    }();
    std::printf("%s\n", (state->json ? proof.json() : proof.text()).c_str());
    exit_code = proof.exit_code();
  });
}

}  // namespace tool
