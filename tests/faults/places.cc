// What rows fill the holes of their programs with.
#include <algorithm>

#include "fault.h"
#include "plan/placed.h"

namespace whale::test {
namespace {

// A row of a program with holes, by chance; null: the plan has none.
DeviceRow* row_with_holes(Plan& plan, Dice& dice) {
  return choose(train_of(plan).rows, dice, [](const DeviceRow& row) { return !row.placed.empty(); });
}
bool is_first(const Entry& entry, const DeviceRow& row) {
  return std::ranges::find(entry.rows, row.program, &DeviceRow::program)->device == row.device;
}
// The program says what its first row does.
void follow(Entry& entry, const DeviceRow& row) {
  Program& p = entry.programs[row.program];
  if (!is_first(entry, row)) return;
  for (size_t k = 0; k < p.holes.size(); ++k) set_value(p, p.holes[k], row.placed[k]);
}

// One hole by a little; all integers of an instruction together, so that an interval keeps its size.
bool other_place(Plan& plan, Dice& dice) {
  Entry& entry = train_of(plan);
  DeviceRow* row = row_with_holes(plan, dice);
  if (!row) return false;
  const Program& p = entry.programs[row->program];
  const auto k = static_cast<size_t>(dice.below(std::ssize(p.holes)));
  const Hole& hole = p.holes[k];
  const int64_t step = hole.kind == HoleKind::kAt ? size_of(p.buffers[hole.buffer].dtype) : 1;
  const int64_t by = row->placed[k] >= step && dice.coin() ? -step : step;
  for (size_t n = 0; n < p.holes.size(); ++n) {
    const Hole& h = p.holes[n];
    const bool together = h.kind == HoleKind::kAttribute && hole.kind == HoleKind::kAttribute &&
                          h.segment == hole.segment && h.instruction == hole.instruction;
    if (n == k || together) row->placed[n] += by;
  }
  follow(entry, *row);
  return true;
}

// A device works at the place of another one of its program.
bool place_of_another(Plan& plan, Dice& dice) {
  Entry& entry = train_of(plan);
  DeviceRow* row = row_with_holes(plan, dice);
  if (!row) return false;
  const DeviceRow* other = choose(
      entry.rows, dice, [&](const DeviceRow& r) { return r.program == row->program && r.placed != row->placed; });
  if (!other) return false;
  row->placed = other->placed;
  follow(entry, *row);
  return true;
}

bool lost_value(Plan& plan, Dice& dice) {
  DeviceRow* row = row_with_holes(plan, dice);
  if (!row) return false;
  row->placed.erase(row->placed.begin() + dice.below(std::ssize(row->placed)));
  return true;
}

bool far_away(Plan& plan, Dice& dice) {
  DeviceRow* row = row_with_holes(plan, dice);
  if (!row) return false;
  row->placed[dice.below(std::ssize(row->placed))] =
      dice.coin() ? -1 - dice.below(1 << 20) : (int64_t{1} << 40) + dice.below(1 << 20);
  follow(train_of(plan), *row);
  return true;
}

// A hole says something of another buffer or instruction.
bool other_hole(Plan& plan, Dice& dice) {
  Program* p = choose(train_of(plan).programs, dice, [](const Program& each) { return !each.holes.empty(); });
  if (!p) return false;
  Hole& hole = p->holes[dice.below(std::ssize(p->holes))];
  int32_t& number = hole.kind == HoleKind::kAt ? hole.buffer : dice.coin() ? hole.instruction : hole.index;
  number += number > 0 && dice.coin() ? -1 : 1;
  return true;
}

}  // namespace

std::vector<Fault> faults_of_places() {
  return {
      {"a placed value", Catcher::kEither, other_place, true},
      {"the place of another device", Catcher::kEither, place_of_another, true},
      {"a placed value lost", Catcher::kVerifier, lost_value, true},
      {"a placed value far away", Catcher::kEither, far_away, true},
      {"another hole", Catcher::kEither, other_hole, true},
  };
}

}  // namespace whale::test
