// Files that show a plan: a page for a browser, a timeline.
#pragma once

#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include "plan_arguments.h"

namespace tool {

class Pictures {
 public:
  // Returns the options, which need a plan.
  std::vector<CLI::Option*> add_options(CLI::App& command);
  // Before there is a plan: whether they can be written, and are no file that is read.
  void check(const std::string& model) const;
  void write(const whale_plan* plan) const;

 private:
  std::string report_, trace_;
  std::vector<std::string> measured_;
};

}  // namespace tool
