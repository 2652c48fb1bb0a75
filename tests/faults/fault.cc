#include "fault.h"

#include <algorithm>

#include "plan/memory.h"
#include "plan/row_waits.h"

namespace whale::test {

std::vector<Fault> all_faults() {
  std::vector<Fault> all;
  const auto add = [&](const char* group, std::vector<Fault> faults) {
    for (Fault& f : faults) f.group = group, all.push_back(std::move(f));
  };
  add("collectives", faults_of_collectives());
  add("order", faults_of_order());
  add("memory", faults_of_memory());
  add("links", faults_of_links());
  add("samples", faults_of_samples());
  add("attributes", faults_of_attributes());
  add("values", faults_of_values());
  add("variables", faults_of_variables());
  add("places", faults_of_places());
  return all;
}

Entry& train_of(Plan& plan) {
  for (Entry& e : plan.entries)
    if (e.name == "train") return e;
  return plan.entries.front();
}

std::string base_name(const std::string& segment) { return segment.substr(0, segment.find('/')); }

bool damage(Plan& plan, Dice& dice, Reach reach, const Wanted& wanted, const Change& change) {
  Entry& entry = train_of(plan);
  std::vector<Spot> spots;
  for (Program& p : entry.programs)
    for (size_t s = 0; s < p.segments.size(); ++s) {
      const bool runs = std::any_of(p.schedule.begin(), p.schedule.end(),
                                    [&](const ScheduleRow& r) { return r.segment == static_cast<int32_t>(s); });
      for (size_t k = 0; runs && k < p.segments[s].instructions.size(); ++k)
        if (const Spot spot{&p, &p.segments[s], k}; wanted(spot)) spots.push_back(spot);
    }
  if (reach == Reach::kAny) reach = dice.coin() ? Reach::kOne : Reach::kEverywhere;
  for (size_t left = spots.size(); left > 0; --left) {
    std::swap(spots[left - 1], spots[dice.below(static_cast<int64_t>(left))]);
    const Spot first = spots[left - 1];
    const uint64_t word = dice.next();
    Dice same(word);
    if (reach == Reach::kOne) {
      if (change(first, same)) return true;
      continue;
    }
    // From the last to the first, so that instructions may come and go.
    const std::string name = first.at().name, segment = base_name(first.segment->name);
    const std::optional<OpCode> op = first.at().op();
    const InstructionKind kind = first.at().kind();
    bool changed = false;
    for (Program& p : entry.programs)
      for (Segment& s : p.segments) {
        if (base_name(s.name) != segment) continue;
        for (size_t k = s.instructions.size(); k-- > 0;) {
          const Instruction& i = s.instructions[k];
          if (i.name != name || i.op() != op || i.kind() != kind || !wanted({&p, &s, k})) continue;
          Dice each(word);
          changed |= change({&p, &s, k}, each);
        }
      }
    if (changed) return true;
  }
  return false;
}

void erase_instruction(const Spot& spot) {
  std::vector<Instruction>& list = spot.segment->instructions;
  const auto k = static_cast<int32_t>(spot.index);
  const Queue queue = spot.at().queue;
  std::vector<Wait> instead = spot.at().waits;
  for (int32_t before = k; before-- > 0;)
    if (list[before].queue == queue) {
      instead.push_back({queue, before});
      break;
    }
  list.erase(list.begin() + k);
  for (size_t i = spot.index; i < list.size(); ++i) {
    std::vector<Wait> waits;
    for (Wait w : list[i].waits) {
      if (w.index == k) {
        waits.insert(waits.end(), instead.begin(), instead.end());
        continue;
      }
      if (w.index > k) --w.index;
      waits.push_back(w);
    }
    list[i].waits = std::move(waits);
  }
  add_row_waits(*spot.program);
}

void insert_instruction(const Spot& spot, size_t at, Instruction instruction) {
  std::vector<Instruction>& list = spot.segment->instructions;
  list.insert(list.begin() + static_cast<std::ptrdiff_t>(at), std::move(instruction));
  for (size_t i = at + 1; i < list.size(); ++i)
    for (Wait& w : list[i].waits)
      if (w.index >= static_cast<int32_t>(at)) ++w.index;
  add_row_waits(*spot.program);
}

BufferId add_buffer(Program& program, Buffer like) {
  like.kind = BufferKind::kArena;
  like.ref = -1, like.alias = kNone, like.at = 0, like.versions = 1, like.memory = Memory::kDevice;
  like.bytes = element_count(like.dims) * size_of(like.dtype);
  like.offset = (program.arena_bytes + kAlignment - 1) / kAlignment * kAlignment;
  program.arena_bytes = like.offset + (like.bytes + kAlignment - 1) / kAlignment * kAlignment;
  program.buffers.push_back(std::move(like));
  return static_cast<BufferId>(program.buffers.size()) - 1;
}

BufferId add_alias(Program& program, BufferId like) {
  Buffer b = program.buffers[like];
  b.alias = storage_of(program, like);
  b.name += ".again";
  program.buffers.push_back(std::move(b));
  return static_cast<BufferId>(program.buffers.size()) - 1;
}

void read_instead(Program& program, BufferId from, BufferId to, const Segment* segment, size_t behind) {
  for (Segment& s : program.segments) {
    if (segment != nullptr && &s != segment) continue;
    for (size_t k = segment == nullptr ? 0 : behind + 1; k < s.instructions.size(); ++k)
      for (BufferId& b : s.instructions[k].in)
        if (b == from) b = to;
  }
}

bool same_type(const Buffer& a, const Buffer& b) { return a.dtype == b.dtype && a.dims == b.dims; }

bool is_update(const Instruction& i) {
  return i.kind() == InstructionKind::kKernel && has_flag(i.kernel()->op, kUpdateOp);
}

}  // namespace whale::test
