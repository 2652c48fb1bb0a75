// What a session holds and where its last run spent its time, as JSON.
#pragma once

#include <optional>
#include <string>

#include "run/executor.h"

namespace whale {

// `last`: the entry of the last run; may be null.
std::string report_json(Machine& machine, const Executor* last, std::optional<double> loss_scale = {});

}  // namespace whale
