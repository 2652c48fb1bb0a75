// How the units of a batch or of a cut (samples, micro-batches, heads, columns, ...) are dealt to devices of unlike
// speed and memory: the fastest step, found exactly. Pure functions.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/small_vector.h"

namespace whale {

// Seconds or bytes of so many units: finite, not negative, not falling with the units (looked at at powers of two). A
// fixed term is the value at 0 units; speed may depend on the units. Seconds of more units than there is room for are
// not asked for.
using OfUnits = std::function<double(int64_t units)>;

// Lines through measured points (units, value): beyond the first and last one the nearest line goes on, but not below
// 0; a single point is a line through the origin. Values that fall with the units, as noise makes them, are replaced by
// their means (the non-decreasing values nearest to them by least squares).
OfUnits through_points(std::vector<std::pair<int64_t, double>> points);

struct Member {
  std::string name;  // for messages
  OfUnits seconds;
  OfUnits bytes = {};  // empty: none
  int64_t memory = kNoLimit;
  static constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();
};

// Who gets units: a device, or several that work on the same units together (the ways of a split inside a replica, the
// stages of a pipeline). It takes as long as its slowest member, and every member must have room.
struct Worker {
  std::string name;
  std::vector<Member> members;
};
Worker alone(Member member);

struct BalanceRequest {
  int64_t units = 0;
  std::vector<Worker> kinds;
  std::vector<int32_t> workers;  // of each: its kind. Like workers get like shares, so give them one kind
  // What it costs the step that so many take part; it need not grow with them. Empty: nothing.
  std::function<double(int64_t workers)> communication = {};
  // Workers may be left out: then they cost, hold and communicate nothing, and who takes part has at least one unit.
  // Else all take part, some perhaps with no unit: they hold and cost what they do at 0 units.
  bool may_idle = false;
};

struct Idle {
  int32_t kind = 0;
  std::vector<int32_t> workers;
  double slower_seconds = 0;  // by how much the step would be, with those that take part and one of these
  std::string reason;         // "would make the step slower by 1.20 ms"
};

struct Balance {
  Ints units;               // of each worker
  double seconds = 0;       // of the step: the slowest worker's and the communication
  double slowest = 0;       // without the communication
  int64_t taking_part = 0;  // workers
  std::vector<Idle> idle;   // by kind
};

// The least seconds of all ways to deal them. Of those that are as fast: the fewest workers, of them those that can
// take most units in that time; then the least sum of squares of the units, so that workers of a kind differ by one
// unit at most; then whole kinds get the one more, the first ones first, and of one kind the first workers.
Balance balance(const BalanceRequest& request);  // throws where they do not fit, with all shortages
std::optional<Balance> balance_if_fits(const BalanceRequest& request);  // the same, for searches

// Shares of `bytes` of state that is cut over devices with so much room left: the same for all, as far as they have
// room; the others take the rest. Bytes of each, weights for MeshAxis::state_shares. They do not depend on the shares
// of the batch, but for the room that these leave.
std::vector<double> state_shares(double bytes, const std::vector<double>& room);

}  // namespace whale
