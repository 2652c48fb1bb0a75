// What tests of the prover begin with.
#pragma once

#include <functional>
#include <string>

#include "cluster/devices.h"
#include "compile/compile.h"
#include "prove/prove.h"

namespace whale::test {

inline Plan plan_of(
    const Graph& graph, const std::string& devices, const std::string& strategy,
    const std::function<void(CompileOptions&)>& more = [](CompileOptions&) {}) {
  CompileOptions options;
  options.strategy = strategy;
  more(options);
  return compile(graph, parse_devices(devices), options);
}

inline bool is_op(const Instruction& i, const char* name) { return i.verb() == name; }

}  // namespace whale::test
