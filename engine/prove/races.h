// Whether instructions of a device that touch the same bytes wait for each other where one of them writes, however far
// each queue gets ahead of the others: then every order that its queues, waits and rows leave open does what one does.
#pragma once

#include <optional>

#include "plan/plan.h"
#include "prove/stopped.h"

namespace whale::proof {

// `device`: one that runs the program, to be named. Writes of variables wait for the commit, which waits for the vote.
std::optional<Stopped> race_of(const Program& program, int32_t device);

}  // namespace whale::proof
