// How many forward passes each stage of 1F1B runs before its first backward one, where messages take time.
//
// A micro-batch comes back to stage s after all that is behind the stage has worked on it and sent it on, and in that
// time the stage has work for as many micro-batches as it has let in. With messages that take no time that is one for
// each stage behind it. With others it waits, unless it lets in more.
#pragma once

#include <span>
#include <vector>

#include "schedule/timing.h"

namespace whale {

// Seconds of what one micro-batch sends from a stage to the next one, and what comes back.
struct LinkTimes {
  double forward = 0;
  double backward = 0;
};

// Depths of 1F1B as it has them: min(m, p - s).
std::vector<int> usual_warmup(int stages, int micro_batches);

// The first start to the last end of 1F1B with these depths, as plans run it: a device computes, sends and receives
// beside each other, each in the order of its work and at most two passes apart; sends go one after the other, each
// when its channel has free capacity (the least that these depths need). `links`: one fewer than `times`. Infinite
// where the depths deadlock.
double seconds_of_1f1b(int micro_batches, std::span<const StageTimes> times, std::span<const LinkTimes> links,
                       std::span<const int> warmup);

struct Warmup {
  std::vector<int> depths;
  double seconds = 0;  // seconds_of_1f1b
};

// The depths that take least time, of those the least deep; never below the usual ones. `most`: of each stage, what its
// memory has room for. `worth`: the usual ones where the others save no larger part of the time, and of the others the
// least deep that are within a quarter of it. Candidates are the depths that let a micro-batch come back after a whole
// number of periods, for every period that is not much shorter than the slowest stage's passes, and what is reached
// from the best by steps of one, on any of up to five stages at once, of more on stages beside each other, as long as
// these gain; of the first stages by two as well.
Warmup find_warmup(int micro_batches, std::span<const StageTimes> times, std::span<const LinkTimes> links,
                   std::span<const int> most, double worth = 0);

}  // namespace whale
