// What a checkpoint holds, for people and as JSON.
#pragma once

#include <string>

#include "checkpoint/checkpoint.h"

namespace whale {

// Both say whether there are checksums; that they are right is what Checkpoint::verify found before.
std::string describe(const Checkpoint& checkpoint);
std::string describe_json(const Checkpoint& checkpoint);

}  // namespace whale
