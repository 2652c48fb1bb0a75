// validate: the cost model and the planner against what others measured.
#include <cstdio>
#include <nlohmann/json.hpp>

#include "commands.h"
#include "runner.h"

namespace tool {

void add_validate(CLI::App& app) {
  struct State {
    std::string path, form, profiles;
    bool json = false;
  };
  const auto state = std::make_shared<State>();
  CLI::App* command = app.add_subcommand(
      "validate", "what the cost model and the planner say of rows that somebody measured (docs/validation.md)");
  command->add_option("FILE", state->path, "a file of measurements")->required();
  command->add_option("--form", state->form, "what its rows are (default: told by its columns)");
  command->add_option("--profiles", state->profiles, "folder that the form reads besides");
  command->add_flag("--json", state->json, "print as JSON");
  command->callback([state] {
    const Engine engine = make_engine();
    const std::string told =
        text(whale_engine_validate_json, engine.get(), str(state->path), str(state->form), str(state->profiles));
    if (state->json)
      std::printf("%s\n", told.c_str());
    else
      std::printf("%s", nlohmann::json::parse(told).at("text").get<std::string>().c_str());
  });
}

}  // namespace tool
