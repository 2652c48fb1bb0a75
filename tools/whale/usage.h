// What is wrong with a command line that CLI11 did not take, in words of the command line: its own speak of "arguments
// that were not expected" and of what the options are to C++.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

namespace tool {

// Flags of every command take no value, where CLI11 reads `--flag=3` as true. Once all commands are there.
void refuse_values_of_flags(CLI::App& app);

std::string wrong_usage(const CLI::App& app, const CLI::Error& error, int argc, char** argv);

}  // namespace tool
