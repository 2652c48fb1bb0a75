#include "plan/placed.h"

#include <array>
#include <numeric>

#include "base/error.h"
#include "base/watch.h"
#include "plan/lives.h"

namespace whale {
namespace {

template <class List>
bool inside(int64_t i, const List& list) {
  return i >= 0 && i < static_cast<int64_t>(list.size());
}

const Instruction& instruction_of(const Program& program, const Hole& hole) {
  return program.segments[hole.segment].instructions[hole.instruction];
}
const work::Kernel& kernel_of(const Program& program, const Hole& hole) {
  return *instruction_of(program, hole).kernel();
}

std::string fault_of_hole(const Program& p, const Hole& hole) {
  if (hole.kind == HoleKind::kAt) {
    const bool own = hole.segment == 0 && hole.instruction == 0 && hole.attribute.empty() && hole.index == 0;
    if (!own || !inside(hole.buffer, p.buffers)) return fmt::format("no buffer {}", hole.buffer);
    const Buffer& b = p.buffers[hole.buffer];
    return b.alias == kNone ? fmt::format("buffer '{}' lies inside of nothing", b.name) : "";
  }
  if (hole.buffer != kNone || !inside(hole.segment, p.segments) ||
      !inside(hole.instruction, p.segments[hole.segment].instructions))
    return fmt::format("no instruction {} of segment {}", hole.instruction, hole.segment);
  const Instruction& i = instruction_of(p, hole);
  const work::Kernel* kernel = i.kernel();
  bool there = kernel != nullptr && hole.attribute.empty();
  switch (hole.kind) {
    case HoleKind::kAt: break;
    case HoleKind::kAttribute: {
      if (kernel == nullptr) break;
      const auto at = kernel->attrs.find(hole.attribute);
      there = hole.index == 0 && may_be_placed(hole.attribute) && at != kernel->attrs.end() &&
              std::holds_alternative<int64_t>(at->second);
      break;
    }
    case HoleKind::kOrigin:
      there = there && inside(hole.index, kernel->box.origin) && inside(hole.index, kernel->box.global);
      break;
    case HoleKind::kCut: there = there && inside(hole.index, kernel->box.cuts); break;
  }
  return there ? "" : fmt::format("'{}' does not have '{}' {} for a place to say", i.name, hole.attribute, hole.index);
}

// Overlaps, first inside second, second inside first.
std::array<bool, 3> relation(const Interval& a, const Interval& b) {
  return {a.begin < b.end && b.begin < a.end, b.begin <= a.begin && a.end <= b.end,
          a.begin <= b.begin && b.end <= a.end};
}

}  // namespace

bool may_be_placed(std::string_view attribute) {
  return attribute == "begin" || attribute == "end" || attribute.ends_with("_begin");
}

int64_t value_of(const Program& program, const Hole& hole) {
  switch (hole.kind) {
    case HoleKind::kAt: return program.buffers[hole.buffer].at;
    case HoleKind::kAttribute: return std::get<int64_t>(kernel_of(program, hole).attrs.at(hole.attribute));
    case HoleKind::kOrigin: return kernel_of(program, hole).box.origin[hole.index];
    case HoleKind::kCut: return kernel_of(program, hole).box.cuts[hole.index].begin;
  }
  throw internal("a hole of no kind");
}

void set_value(Program& program, const Hole& hole, int64_t value) {
  if (hole.kind == HoleKind::kAt) {
    program.buffers[hole.buffer].at = value;
    return;
  }
  Segment& segment = program.segments[hole.segment];
  auto& kernel = *segment.instructions[hole.instruction].as<work::Kernel>();
  if (hole.kind == HoleKind::kAttribute) kernel.attrs[hole.attribute] = value;
  if (hole.kind == HoleKind::kOrigin) kernel.box.origin[hole.index] = value;
  if (hole.kind == HoleKind::kCut) kernel.box.cuts[hole.index].begin = value;
}

Program bound(const Program& program, const DeviceRow& row) {
  WHALE_CHECK(row.placed.size() == program.holes.size(), "a row has a value for each hole of its program");
  Program out = program;
  for (size_t k = 0; k < program.holes.size(); ++k) set_value(out, program.holes[k], row.placed[k]);
  out.holes.clear();
  return out;
}

std::vector<std::vector<const DeviceRow*>> rows_of_programs(const Entry& entry) {
  std::vector<std::vector<const DeviceRow*>> rows(entry.programs.size());
  for (const DeviceRow& row : entry.rows)
    if (inside(row.program, rows)) rows[row.program].push_back(&row);
  return rows;
}

HoleFault fault_of_holes(const Program& program) {
  for (size_t k = 0; k < program.holes.size(); ++k) {
    Watch::look();
    if (k > 0 && !(program.holes[k - 1] < program.holes[k]))
      return {k, fmt::format("hole {} is not behind the last", k)};
    if (std::string fault = fault_of_hole(program, program.holes[k]); !fault.empty())
      return {k, fmt::format("hole {}: {}", k, fault)};
  }
  return {};
}

HoleFault fault_of_values(const Program& program, const Ints& values) {
  for (size_t k = 0; k < values.size(); ++k) {
    Watch::look();
    const Hole& hole = program.holes[k];
    const int64_t value = values[k];
    int64_t most = 0, step = 1;
    std::string what;
    switch (hole.kind) {
      case HoleKind::kAttribute: continue;
      case HoleKind::kAt: {
        const Buffer& b = program.buffers[hole.buffer];
        most = program.buffers[b.alias].bytes - b.bytes;
        step = size_of(b.dtype);
        what = b.name;
        break;
      }
      case HoleKind::kOrigin:
        most = kernel_of(program, hole).box.global[hole.index];
        what = instruction_of(program, hole).name;
        break;
      case HoleKind::kCut: {
        const BoxCut& cut = kernel_of(program, hole).box.cuts[hole.index];
        most = cut.extent - cut.size;
        what = instruction_of(program, hole).name;
        break;
      }
    }
    if (value < 0 || value > most || value % step)
      return {k,
              fmt::format("'{}' is placed at {}, outside of [0, {}] or not a multiple of {}", what, value, most, step)};
  }
  return {};
}

Overlaps::Overlaps(const Program& program, const std::vector<Hole>& holes) {
  std::vector<size_t> hole_of(program.buffers.size(), SIZE_MAX);
  std::vector<size_t> number(program.buffers.size(), SIZE_MAX);  // of storages
  size_t storages = 0;
  for (size_t k = 0; k < holes.size(); ++k) {
    if (holes[k].kind != HoleKind::kAt) continue;
    hole_of[holes[k].buffer] = k;
    size_t& mine = number[storage_of(program, holes[k].buffer)];
    if (mine == SIZE_MAX) mine = storages++;
  }
  begins_.resize(storages + 1);
  if (storages == 0) return;
  const auto each = [&](const auto& take) {  // part, with the number of its storage
    for (size_t b = 0; b < program.buffers.size(); ++b) {
      const auto id = static_cast<BufferId>(b);
      if (const size_t mine = number[storage_of(program, id)]; mine != SIZE_MAX) take(mine, Part{id, hole_of[b]});
    }
  };
  each([&](size_t mine, const Part&) { ++begins_[mine + 1]; });
  std::partial_sum(begins_.begin(), begins_.end(), begins_.begin());
  parts_.resize(begins_.back());
  std::vector<size_t> end(begins_.begin(), begins_.end() - 1);  // of what is there
  each([&](size_t mine, const Part& part) { parts_[end[mine]++] = part; });
}

bool Overlaps::hold(const Program& program, const Ints& values) const {
  const auto there = [&](const Part& part, bool moved) {
    const Buffer& b = program.buffers[part.buffer];
    const int64_t at = moved && part.hole != SIZE_MAX ? values[part.hole] : b.at;
    return Interval{at, at + b.bytes};
  };
  for (size_t s = 0; s + 1 < begins_.size(); ++s)
    for (size_t a = begins_[s]; a < begins_[s + 1]; ++a) {
      Watch::look();
      for (size_t b = begins_[s]; b < a; ++b)
        if (relation(there(parts_[a], false), there(parts_[b], false)) !=
            relation(there(parts_[a], true), there(parts_[b], true)))
          return false;
    }
  return true;
}

}  // namespace whale
