#include "run/slice.h"

#include <algorithm>
#include <map>
#include <set>
#include <string_view>

#include "run/bound.h"

namespace whale {
namespace {

class Slicer {
 public:
  Slicer(const Entry& entry, const std::vector<bool>& outputs_wanted)
      : entry_(entry), outputs_(outputs_wanted), links_(entry.links.size()) {
    for (const Program& program : entry.programs) {
      masks_.emplace_back();
      for (const Segment& segment : program.segments) masks_.back().emplace_back(segment.instructions.size(), 0);
      needed_.emplace_back(program.buffers.size());
    }
    for (size_t p = 0; p < entry.programs.size(); ++p) {
      made_.emplace_back();
      for (const Segment& segment : entry.programs[p].segments) {
        made_[p].emplace_back(entry.programs[p].buffers.size());
        for (size_t i = 0; i < segment.instructions.size(); ++i)
          for (const BufferId id : segment.instructions[i].out)
            if (id != kNone) made_[p].back()[root(p, id)].push_back({bytes_of(p, id), i});
      }
    }
  }

  std::vector<Mask> run() {
    do {  // again, because a segment or a peer may read what a later run of another one left
      changed_ = false;
      for (size_t p = 0; p < masks_.size(); ++p)
        for (size_t s = masks_[p].size(); s-- > 0;)
          for (size_t i = masks_[p][s].size(); i-- > 0;)
            if (masks_[p][s][i] == 0 && wanted(p, s, i)) {
              masks_[p][s][i] = 1;
              take(p, s, i);
            }
    } while (changed_);
    return std::move(masks_);
  }

 private:
  // Who reads a place. A value that its own segment makes before it is read depends on no write behind the reader (an
  // op that works in place on it, say); any other may be what a later instruction, or another segment, left there.
  struct Reads {
    bool anywhere = false;
    std::map<size_t, size_t> last;  // by segment, the last reader of what the segment itself made
  };
  static bool read_after(const Reads& reads, size_t s, size_t i) {
    const auto at = reads.last.find(s);
    return reads.anywhere || (at != reads.last.end() && at->second > i);
  }

  // Bytes of a storage, and what in a segment writes them: also those of a view, that has another buffer.
  struct Written {
    Interval bytes;
    size_t by = 0;
  };
  Interval bytes_of(size_t p, BufferId id) const {
    const Buffer& b = entry_.programs[p].buffers[id];
    const int64_t begin = b.alias == kNone ? 0 : b.at;
    return {begin, begin + b.bytes};
  }
  bool made_before(size_t p, size_t s, BufferId id, size_t i) const {
    const Interval mine = bytes_of(p, id);
    const std::vector<Written>& all = made_[p][s][root(p, id)];
    return std::any_of(all.begin(), all.end(), [&](const Written& w) {
      return w.by < i && w.bytes.begin <= mine.begin && mine.end <= w.bytes.end;
    });
  }

  size_t root(size_t p, BufferId id) const { return static_cast<size_t>(root_of(entry_.programs[p], id)); }

  const Instruction& at(size_t p, size_t s, size_t i) const { return entry_.programs[p].segments[s].instructions[i]; }

  bool wanted(size_t p, size_t s, size_t i) const {
    const Instruction& instruction = at(p, s, i);
    if (const auto* fetch = instruction.as<work::Fetch>()) return outputs_[fetch->output];
    if (instruction.link() != kNone && links_.at(static_cast<size_t>(instruction.link()))) return true;
    if (instruction.group() != kNone && collectives_.contains({instruction.group(), instruction.name})) return true;
    for (const BufferId id : instruction.out)
      if (id != kNone && (read_after(needed_[p][root(p, id)], s, i) ||
                          entry_.programs[p].buffers[root(p, id)].kind == BufferKind::kVariable))
        return true;
    return false;
  }

  void take(size_t p, size_t s, size_t i) {
    const Instruction& instruction = at(p, s, i);
    changed_ = true;
    for (const BufferId id : instruction.in)
      if (id != kNone) {
        Reads& reads = needed_[p][root(p, id)];
        if (made_before(p, s, id, i))
          reads.last[s] = std::max(reads.last[s], i);
        else
          reads.anywhere = true;
      }
    if (instruction.link() != kNone) links_[instruction.link()] = true;
    if (instruction.group() != kNone) collectives_.emplace(instruction.group(), instruction.name);
  }

  const Entry& entry_;
  const std::vector<bool>& outputs_;
  std::vector<Mask> masks_;
  std::vector<std::vector<Reads>> needed_;  // by storage, so that every write to a needed place is kept
  std::vector<std::vector<std::vector<std::vector<Written>>>> made_;  // [program][segment][storage], in order
  std::vector<bool> links_;
  std::set<std::pair<int32_t, std::string_view>> collectives_;  // group and name: the same op of the model
  bool changed_ = false;
};

}  // namespace

std::vector<Mask> slice(const Entry& entry, const std::vector<bool>& outputs_wanted) {
  return Slicer(entry, outputs_wanted).run();
}

void mark_inputs(const Program& program, const Mask& mask, std::vector<bool>& inputs) {
  for (size_t s = 0; s < mask.size(); ++s)
    for (size_t i = 0; i < mask[s].size(); ++i) {
      const auto* feed = program.segments[s].instructions[i].as<work::Feed>();
      if (mask[s][i] != 0 && feed != nullptr) inputs[feed->input] = true;
    }
}

int missing_input(const Program& program, const Mask& mask, const std::vector<const void*>& inputs) {
  for (size_t s = 0; s < mask.size(); ++s)
    for (size_t i = 0; i < mask[s].size(); ++i) {
      const auto* feed = program.segments[s].instructions[i].as<work::Feed>();
      if (mask[s][i] != 0 && feed != nullptr && inputs[feed->input] == nullptr) return feed->input;
    }
  return -1;
}

}  // namespace whale
