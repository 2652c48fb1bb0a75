// The subcommands of `whale`. Each adds itself to the command line and returns nothing; its callback sets the exit
// code.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

namespace tool {

// What an option takes, told in its refusal: whole numbers from low to high, 64 bits, finite numbers from 0 or
// above 0. (CLI11 cuts numbers that are too large.)
CLI::Validator whole(int64_t low, int64_t high);
CLI::Validator seed_number();
CLI::Validator not_negative();
CLI::Validator above_zero();
CLI::Validator loss_scale();

void add_model(CLI::App& app);
void add_inspect(CLI::App& app);
void add_plan(CLI::App& app, int& exit_code);
void add_prove(CLI::App& app, int& exit_code);
void add_run(CLI::App& app, int& exit_code);
void add_verify(CLI::App& app, int& exit_code);
void add_bench(CLI::App& app);
void add_devices(CLI::App& app);
void add_profile(CLI::App& app);
void add_validate(CLI::App& app);
void add_predict(CLI::App& app);
void add_simulate(CLI::App& app);
// program: what stands behind --.
void add_launch(CLI::App& app, const std::vector<std::string>& program, int& exit_code);

struct SessionArguments;
void add_precision_options(CLI::App& command, SessionArguments& arguments);
void add_ranks_option(CLI::App& command, SessionArguments& arguments);

}  // namespace tool
