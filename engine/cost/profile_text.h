// A profile as JSON: figures by name, as each_figure() has them, or an object that has them as its "profile" (what a
// probe writes), or what `whale profile` measured of a model. What is left out is as of devices that nobody has
// measured.
#pragma once

#include <string_view>

#include "cost/cost.h"

namespace whale {

// Throws invalid for what is none, for unknown figures and those that mean nothing.
Profile profile_of_text(std::string_view json);

}  // namespace whale
