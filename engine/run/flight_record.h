// What the flight recorders of a rank hold, as JSON, which `whale inspect` shows. From any thread.
#pragma once

#include <string>

#include "base/json.h"
#include "run/executor.h"

namespace whale {

// `last`: the entry of the last run; may be null. `error`: how that ended; empty: it has not ended, or well.
std::string flight_record_json(const Machine& machine, const Executor* last, const std::string& error);

}  // namespace whale
