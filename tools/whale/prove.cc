// prove: is a plan equal to the program on one device? Runs nothing.
#include "prove.h"

#include <nlohmann/json.hpp>

#include "commands.h"
#include "runner.h"

namespace tool {

int print_proof(const whale_plan* plan, bool json, FILE* to) {
  const std::string told = text(whale_plan_prove, plan);
  const auto proof = nlohmann::json::parse(told);
  const std::string verdict = proof.at("verdict");
  if (json)
    std::fprintf(to, "%s\n", told.c_str());
  else
    std::fprintf(to, "%s%s\n", proof.at("text").get<std::string>().c_str(), verdict.c_str());
  constexpr int kRefuted = 1, kNotCovered = 3;
  return verdict == "proven" ? 0 : verdict == "refuted" ? kRefuted : kNotCovered;
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
      "prove a plan equal to the program on one device, without running it (docs/proof.md); exit code 0: proven, 1: "
      "refuted, 3: not covered, 2: it was no plan");
  command->add_option("FILE", state->path, "a .plan file, or a .whale file that is planned first")->required();
  command->add_flag("--json", state->json, "print as JSON");
  add_plan_options(*command, state->arguments);
  command->callback([state, &exit_code] {
    const Engine engine = make_engine(state->arguments.init_dir);
    const Plan plan = open_plan(engine.get(), state->path, state->arguments);
    exit_code = print_proof(static_cast<const whale_plan*>(plan.get()), state->json, stdout);
  });
}

}  // namespace tool
