// The segments of a program and the order in which they run: micro-batches one after another, or a pipeline's items.
#include <algorithm>
#include <numeric>

#include "base/watch.h"
#include "rewrite/order.h"
#include "lower/accumulation.h"
#include "lower/program_builder.h"

namespace whale {

void ProgramBuilder::schedule_accumulation() {
  std::map<int32_t, int32_t> segment_of;  // by the first micro-batch of a size
  const std::vector<SegmentRun> rows = accumulation_schedule(lg_.micro_batches);
  const Interval mine = low_.local.micro_batches(place_);
  if (timed_) build_segment(Region::kPrologue, {}, "prologue");
  if (timed_) {
    std::vector<int64_t> order(static_cast<size_t>(mine.size()));
    std::iota(order.begin(), order.end(), mine.begin);
    plan_trees({}, order);
  }
  std::vector<ScheduleRow> body;
  for (const SegmentRun& row : watched(rows)) {
    if (row.region != Region::kBody || row.micro_batch < mine.begin || row.micro_batch >= mine.end) continue;
    const auto u = static_cast<int32_t>(row.micro_batch);
    const int32_t first = low_.size_class[static_cast<size_t>(u)];
    const auto [at, fresh] = segment_of.try_emplace(first, 0);
    if (fresh) {
      place_.micro_batch = first;
      const std::string name = !timed_                  ? "step"
                               : segment_of.size() == 1 ? "body"
                                                        : fmt::format("body/{}", low_.local.samples(1, place_).size());
      at->second = build_segment(Region::kBody, {-1, {}, first}, name);
    }
    body.push_back({.segment = at->second, .micro_batch = u});
    if (timed_) merge_row({-1, {}, first}, at->second, body.back());
    if (merged_) body.push_back(*merged_);
  }
  auto& schedule = draft_.program.schedule;
  if (timed_) schedule.push_back({.segment = 0, .whole = true});
  schedule.insert(schedule.end(), body.begin(), body.end());
  if (timed_) schedule.push_back({.segment = build_segment(Region::kEpilogue, {}, "epilogue"), .whole = true});
}

void ProgramBuilder::schedule_pipeline() {
  const Interval mine = low_.local.micro_batches(place_);
  const PipelineSchedule& pipeline = low_.schedules.at(mine.size());
  constexpr const char* kNames[] = {"forward", "backward", "weight"};
  build_segment(Region::kPrologue, {}, "prologue");
  std::map<SegmentKey, int32_t> segments;
  std::vector<ScheduleRow> body;
  // In the order of the model, so that a value's buffer is known before it is read.
  const auto& order = pipeline.devices[static_cast<size_t>(place_.mesh)];
  for (size_t kind = 0; kind < 3; ++kind)
    for (int32_t stage = 0; stage < static_cast<int32_t>(lg_.tasks.stages()); ++stage) {
      if (!on_this_mesh(stage)) continue;
      for (const int64_t u : watched(mine.begin, mine.end)) {
        const int32_t first = low_.size_class[static_cast<size_t>(u)];
        const SegmentKey key{stage, static_cast<WorkKind>(kind), first};
        if (segments.contains(key) || (kind == 2 && !pipeline.split_backward)) continue;
        place_.micro_batch = first;
        std::string name = fmt::format("{}.{}", kNames[kind], stage);
        if (first != low_.size_class[0]) name += fmt::format("/{}", low_.local.samples(1, place_).size());
        segments[key] = build_segment(Region::kBody, key, name);
      }
      std::vector<int64_t> done;
      for (const WorkItem& item : watched(order))
        if (item.kind == static_cast<WorkKind>(kind) && virtual_stage(pipeline, place_.mesh, item.chunk) == stage)
          done.push_back(mine.begin + item.micro_batch);
      plan_trees({stage, static_cast<WorkKind>(kind), -1}, done);
    }
  // How many micro-batches of a chunk are alive at once: slots go round. Values that pass from one chunk of this device
  // to another live until the last chunk is done with the micro-batch.
  bool between_chunks = false;
  for (const OpId i : low_.ops_of_mesh[static_cast<size_t>(place_.mesh)]) {
    const Op& op = g_.op(i);
    for (const TensorId id : op.inputs)
      between_chunks |= id != kNone && op.code != OpCode::k_transfer && on_this_mesh(op.stage) &&
                        lg_.stage(id) != op.stage && lg_.time_varies(id) && g_.tensor(id).kind == TensorKind::kValue;
  }
  const auto chunk_of = [&](const WorkItem& item) { return between_chunks ? 0 : item.chunk; };
  std::map<int, int64_t> slots;             // by chunk
  std::map<std::pair<int, int>, int> left;  // (chunk, u) -> items to come
  std::map<int, std::map<int, int>> alive;  // chunk -> u -> items to come
  for (const WorkItem& item : watched(order)) ++left[{chunk_of(item), item.micro_batch}];
  for (const WorkItem& item : order) {
    Watch::look();
    const int chunk = chunk_of(item);
    auto& mine_alive = alive[chunk];
    int& to_come = mine_alive.try_emplace(item.micro_batch, left[{chunk, item.micro_batch}]).first->second;
    const int64_t span = mine_alive.rbegin()->first - mine_alive.begin()->first + 1;
    slots[chunk] = std::max(slots[chunk], span);
    if (--to_come == 0) mine_alive.erase(item.micro_batch);
  }
  std::map<int32_t, int64_t> slots_of;  // by segment
  for (const WorkItem& item : order) {
    Watch::look();
    const auto u = static_cast<int32_t>(mine.begin) + item.micro_batch;
    const SegmentKey key{virtual_stage(pipeline, place_.mesh, item.chunk), item.kind,
                         low_.size_class[static_cast<size_t>(u)]};
    const int64_t n = slots_of[segments.at(key)] = slots.at(chunk_of(item));
    body.push_back({.segment = segments.at(key), .micro_batch = u, .slot = static_cast<int32_t>(item.micro_batch % n)});
    merge_row(key, body.back().segment, body.back());
    if (merged_) body.push_back(*merged_);
  }
  auto& schedule = draft_.program.schedule;
  schedule.push_back({.segment = 0, .whole = true});
  schedule.insert(schedule.end(), body.begin(), body.end());
  schedule.push_back({.segment = build_segment(Region::kEpilogue, {}, "epilogue"), .whole = true});
  assign_slots(slots_of);
}

// Values that one segment of the body hands to another have a slot for every micro-batch of their chunk that is alive.
void ProgramBuilder::assign_slots(const std::map<int32_t, int64_t>& slots_of) {
  Program& p = draft_.program;
  std::vector<int32_t> seen(p.buffers.size(), -1);
  std::vector<char> crosses(p.buffers.size());
  std::vector<int32_t> slots(p.buffers.size(), 1);
  const auto root = [&](BufferId b) {
    while (p.buffers[static_cast<size_t>(b)].alias != kNone) b = p.buffers[static_cast<size_t>(b)].alias;
    return static_cast<size_t>(b);
  };
  for (size_t s = 0; s < p.segments.size(); ++s) {
    if (draft_.regions[s] != Region::kBody) continue;
    const auto follows = follows_.find(static_cast<int32_t>(s));
    const int32_t base = follows == follows_.end() ? static_cast<int32_t>(s) : follows->second;
    for (const Instruction& i : p.segments[s].instructions)
      for (const auto* list : {&i.in, &i.out})
        for (const BufferId b : *list) {
          if (b == kNone) continue;
          int32_t& first = seen[root(b)];
          if (first >= 0 && first != base) crosses[root(b)] = 1;
          first = base;
          if (const auto n = slots_of.find(base); n != slots_of.end())
            slots[root(b)] = std::max(slots[root(b)], static_cast<int32_t>(n->second));
        }
  }
  std::vector<char> varies(p.buffers.size());
  for (const auto& [key, b] : buffers_)
    if (key.second >= 0 && g_.tensor(key.first).kind == TensorKind::kValue) varies[root(b)] = 1;
  for (size_t b = 0; b < p.buffers.size(); ++b)
    if (crosses[b] && varies[b] && p.buffers[b].kind == BufferKind::kArena) p.buffers[b].slots = slots[b];
  for (Buffer& b : p.buffers)
    if (b.alias != kNone) b.slots = p.buffers[root(b.alias)].slots;
}

// An item of the schedule takes its messages before it works and gives its own away after: what the verification of
// schedules assumes. What the item goes on to change in place (parts of a sum) is given away before that.
void ProgramBuilder::messages_at_the_ends() {
  std::vector<Instruction>& list = draft_.program.segments.back().instructions;
  std::vector<const Op*>& ops = draft_.ops.back();
  std::vector<size_t> order(list.size());
  std::iota(order.begin(), order.end(), size_t{0});
  const auto storage = [&](BufferId b) {
    const Buffer& buffer = draft_.program.buffers[static_cast<size_t>(b)];
    return buffer.alias == kNone ? b : buffer.alias;
  };
  const auto changed_after = [&](size_t send) {
    for (size_t k = send + 1; k < list.size(); ++k) {
      if (!ops[k]) continue;
      for (const Alias& a : aliases_of(view_of(g_, *ops[k])))
        if (a.must && static_cast<size_t>(a.input) < list[k].in.size() &&
            list[k].in[static_cast<size_t>(a.input)] != kNone &&
            storage(list[k].in[static_cast<size_t>(a.input)]) == storage(list[send].in[0]))
          return true;
    }
    return false;
  };
  const auto when = [&](size_t i) {
    const bool message = list[i].kind == InstructionKind::kReceive || list[i].kind == InstructionKind::kSend;
    if (message && low_.inside.contains(list[i].ref)) return 1;
    if (list[i].kind == InstructionKind::kSend && changed_after(i)) return 1;
    return list[i].kind == InstructionKind::kReceive ? 0 : list[i].kind == InstructionKind::kSend ? 2 : 1;
  };
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return when(a) < when(b); });
  std::vector<Instruction> sorted;
  std::vector<const Op*> sorted_ops;
  for (const size_t i : order) sorted.push_back(std::move(list[i])), sorted_ops.push_back(ops[i]);
  list = std::move(sorted);
  ops = std::move(sorted_ops);
}

}  // namespace whale
