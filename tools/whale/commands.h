// The subcommands of `whale`. Each adds itself to the command line and returns nothing; its callback sets the exit
// code.
#pragma once

#include <CLI/CLI.hpp>

namespace tool {

void add_model(CLI::App& app);
void add_inspect(CLI::App& app);
void add_plan(CLI::App& app);
void add_run(CLI::App& app, int& exit_code);
void add_verify(CLI::App& app, int& exit_code);
void add_bench(CLI::App& app);
void add_devices(CLI::App& app);

struct PlanArguments;
void add_plan_options(CLI::App& command, PlanArguments& arguments);
struct SessionArguments;
void add_scale_options(CLI::App& command, SessionArguments& arguments);  // --precision f16

}  // namespace tool
