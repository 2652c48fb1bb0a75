// A profile as JSON: figures by name, as each_figure() has them, or an object that has them as its "profile" (what a
// probe writes), or what `whale profile` measured of a model. What is left out is as of devices that nobody has
// measured.
#pragma once

#include <string>
#include <string_view>

#include "cost/cost.h"

namespace whale {

// Throws invalid for what is none or has nothing in it, for unknown figures, those that mean nothing, and times that
// cannot be right (cost/plausible.h). `path`: of the file that it is from, which messages name.
Profile profile_of_text(std::string_view json, const std::string& path = "");

}  // namespace whale
