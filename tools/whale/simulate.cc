// simulate: one step of a plan on the clock.
#include <cstdio>

#include "commands.h"
#include "pictures.h"
#include "plan_arguments.h"
#include "runner.h"

namespace tool {

void add_simulate(CLI::App& app) {
  struct State {
    std::string path;
    bool json = false;
    PlanArguments arguments;
    Pictures pictures;
  };
  const auto state = std::make_shared<State>();
  CLI::App* command = app.add_subcommand(
      "simulate", "one step of a plan on the clock, instruction for instruction: how long, who works and who waits");
  command->add_option("FILE", state->path, "a .plan file, or a .whale file that is planned first")->required();
  command->add_flag("--json", state->json, "print as JSON");
  state->pictures.add_options(*command);
  add_plan_options(*command, state->arguments);
  command->callback([state] {
    state->pictures.check(state->path);
    const Engine engine = make_engine(state->arguments.init_dir);
    const Plan plan = open_plan(engine.get(), state->path, state->arguments);
    std::printf("%s\n", text(state->json ? whale_plan_simulate_json : whale_plan_simulate,
                             static_cast<const whale_plan*>(plan.get()))
                            .c_str());
    state->pictures.write(plan.get());
  });
}

}  // namespace tool
