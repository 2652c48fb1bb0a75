// Texts of what a graph has.
#pragma once

#include <string>

#include "ir/graph.h"

namespace whale {

std::string init_text(const Initializer& init);  // "normal(0, 0.02)"

}  // namespace whale
