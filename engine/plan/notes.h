// What a person should know about a plan, in sentences: how the batch is cut, what travels, which options change the
// result or have no effect.
#pragma once

#include <string>
#include <vector>

#include "plan/plan.h"

namespace whale {

std::vector<std::string> notes_of(const Plan& plan);

}  // namespace whale
