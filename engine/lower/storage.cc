#include "lower/storage.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <span>

#include "base/error.h"
#include "base/watch.h"
#include "plan/lives.h"

namespace whale {
namespace {

constexpr size_t kStoresUnderWay = 2;

void share(Program& program, BufferId buffer, BufferId storage) {
  Buffer& b = program.buffers[buffer];
  const Buffer& s = program.buffers[storage];
  b.alias = storage;
  b.kind = s.kind == BufferKind::kInput ? BufferKind::kArena : s.kind;
  b.ref = b.kind == BufferKind::kArena ? -1 : s.ref;
  b.memory = s.memory;
  if (in_arena(s)) {
    const int32_t versions = std::max(b.versions, s.versions);
    b.versions = program.buffers[storage].versions = versions;
  } else {
    b.versions = 1;
  }
}

int64_t begin_of(const Program& program, BufferId id) {
  int64_t at = 0;
  for (; program.buffers[id].alias != kNone; id = program.buffers[id].alias) at += program.buffers[id].at;
  return at;
}

void resolve_aliases(Program& program) {
  for (size_t b = 0; b < program.buffers.size(); ++b)
    if (program.buffers[b].alias != kNone) {
      const auto id = static_cast<BufferId>(b);
      program.buffers[b].at = begin_of(program, id);
      share(program, id, storage_of(program, id));
    }
}

// An instruction of a program.
struct At {
  size_t segment = 0, index = 0;
  auto operator<=>(const At&) const = default;
};

// One operand or result of an instruction.
struct Touch {
  At at;
  bool made = false;  // a result
  size_t port = 0;
};

// Who touches which storage, and which results of an instruction work in place: an instruction may update thousands of
// variables, each of which asks for its own.
class Touches {
 public:
  Touches(const Draft& draft, const Graph& graph)
      : draft_(draft), graph_(graph), begins_(draft.program.buffers.size() + 1) {
    each([&](size_t storage, const Touch&) { ++begins_[storage + 1]; });
    std::partial_sum(begins_.begin(), begins_.end(), begins_.begin());
    touches_.resize(begins_.back());
    std::vector<size_t> end(begins_.begin(), begins_.end() - 1);  // of what is there
    each([&](size_t storage, const Touch& touch) { touches_[end[storage]++] = touch; });
  }

  // In the order of the instructions; at the first time that this was made.
  std::span<const Touch> of(BufferId storage) const {
    const auto s = static_cast<size_t>(storage);
    return {touches_.data() + begins_[s], begins_[s + 1] - begins_[s]};
  }

  // Of the instruction's result `output`.
  std::span<const Alias> aliases(const At& at, size_t output) {
    const Op* op = draft_.ops[at.segment][at.index];
    if (!op) return {};
    const auto [known, fresh] = aliases_.try_emplace(at);
    std::vector<Alias>& all = known->second;
    if (fresh) {
      all = aliases_of(graph_, *op);
      std::ranges::sort(all, {}, &Alias::output);
    }
    const int sought = static_cast<int>(output);
    return {std::ranges::lower_bound(all, sought, {}, &Alias::output),
            std::ranges::upper_bound(all, sought, {}, &Alias::output)};
  }

 private:
  template <class Take>
  void each(const Take& take) const {
    const Program& p = draft_.program;
    for (size_t s = 0; s < p.segments.size(); ++s)
      for (size_t k = 0; k < p.segments[s].instructions.size(); ++k) {
        const Instruction& i = p.segments[s].instructions[k];
        for (const bool made : {false, true}) {
          const BufferIds& list = made ? i.out : i.in;
          for (size_t port = 0; port < list.size(); ++port)
            if (list[port] != kNone) take(static_cast<size_t>(storage_of(p, list[port])), Touch{{s, k}, made, port});
        }
      }
  }

  const Draft& draft_;
  const Graph& graph_;
  std::vector<Touch> touches_;                // storage by storage
  std::vector<size_t> begins_;                // of each storage in `touches_`, and the end
  std::map<At, std::vector<Alias>> aliases_;  // by output
};

// Can what makes the next value of a variable write it to the variable: nobody reads the old one later, nor does the
// body, which runs many times, change it.
bool goes_direct(const Draft& draft, BufferId from, BufferId variable, Touches& touches) {
  const Program& p = draft.program;
  const std::span<const Touch> of_value = touches.of(from), of_variable = touches.of(variable);
  auto value = of_value.begin(), old = of_variable.begin();
  bool made = false;
  while (value != of_value.end() || old != of_variable.end()) {
    const At at = old == of_variable.end() || (value != of_value.end() && value->at < old->at) ? value->at : old->at;
    const Instruction& i = p.segments[at.segment].instructions[at.index];
    bool makes = false, reads = false, overwrites = false;
    bool in_place = false, elsewhere = false;  // what an op changes in place has a place already
    for (; value != of_value.end() && value->at == at; ++value) {
      if (!value->made) continue;
      makes = true;
      for (const Alias& a : touches.aliases(at, value->port)) {
        const auto x = static_cast<size_t>(a.input);
        if (x >= i.in.size() || i.in[x] == kNone) continue;
        const bool here = storage_of(p, i.in[x]) == variable;
        in_place |= here;
        elsewhere |= a.must && !here;
      }
    }
    for (; old != of_variable.end() && old->at == at; ++old) (old->made ? overwrites : reads) = true;
    if (elsewhere || (makes && reads && !in_place)) return false;
    if (made && (reads || overwrites)) return false;
    made |= makes;
    if (makes && draft.regions[at.segment] == Region::kBody && p.segments.size() > 1) return false;
  }
  return made;
}

// The new value of a variable goes straight to the variable where it can, and is copied at the end where it cannot.
void place_next_values(Draft& draft, const Graph& graph) {
  Program& p = draft.program;
  Touches touches(draft, graph);
  for (const auto& [variable, next] : draft.next) {
    Watch::look();
    const BufferId from = storage_of(p, next);
    const Buffer& source = p.buffers[from];
    const Buffer& target = p.buffers[variable];
    const bool away = target.memory == Memory::kHost;
    const bool alike = in_arena(source) && source.kind == BufferKind::kArena && source.memory == target.memory &&
                       source.bytes == target.bytes;
    if (alike && goes_direct(draft, from, variable, touches)) {
      share(p, from, variable);
      continue;
    }
    if (target.bytes == 0) continue;  // nothing of it is here
    WHALE_CHECK(!away, "a variable in the host's memory is written by the copy to it alone");
    Instruction copy;
    copy.work = work::Kernel{.op = OpCode::k_stop_gradient};
    copy.name = "store." + target.name;
    copy.in = {next};
    copy.out = {variable};
    copy.phase = Phase::kUpdate;
    copy.bytes = 2.0 * static_cast<double>(target.bytes);
    p.segments.back().instructions.push_back(std::move(copy));
    draft.ops.back().push_back(nullptr);
  }
  resolve_aliases(p);
}

// `must`: what an op always does in place (updates, collectives). Otherwise: where the operand dies.
void work_in_place(Draft& draft, const Graph& graph, bool must) {
  Program& p = draft.program;
  std::vector<Life> lives = lives_of(p);
  int64_t start = 0;
  for (size_t s = 0; s < p.segments.size(); ++s) {
    for (size_t k = 0; k < p.segments[s].instructions.size(); ++k) {
      Watch::look();
      const Instruction& i = p.segments[s].instructions[k];
      const Op* op = draft.ops[s][k];
      if (!op || i.in.size() != op->inputs.size()) continue;
      std::vector<Alias> aliases = aliases_of(graph, *op);
      if (aliases.empty()) continue;
      for (const Alias& a : aliases) {
        if (a.must != must || static_cast<size_t>(a.output) >= i.out.size() ||
            static_cast<size_t>(a.input) >= i.in.size())
          continue;
        if (i.in[a.input] == kNone || i.out[a.output] == kNone) continue;
        const BufferId out = i.out[a.output], in = i.in[a.input];
        const BufferId from = storage_of(p, in), to = storage_of(p, out);
        if (from == to) continue;
        const Buffer &b_in = p.buffers[from], &b_out = p.buffers[out];
        if (must) {
          WHALE_CHECK(to == out && p.buffers[in].bytes == b_out.bytes,
                      "an in-place result has storage of its own already");
          p.buffers[out].at = begin_of(p, in);
          draft.lies_in[out] = in;
          share(p, out, from);
          continue;
        }
        if (to != out || !in_arena(b_in) || !in_arena(b_out) || b_in.bytes != b_out.bytes || b_in.dtype != b_out.dtype)
          continue;
        Life &life = lives[from], &mine = lives[out];
        const auto here = start + static_cast<int64_t>(k);
        if (life.last != here || mine.first != here || life.first_segment != static_cast<int32_t>(s) ||
            mine.last_segment != static_cast<int32_t>(s))
          continue;
        int operands = 0;
        for (const BufferId b : i.in) operands += b != kNone && storage_of(p, b) == from;
        if (operands > 1 || b_in.dims.empty()) continue;
        share(p, out, from);
        life.last = mine.last;
        mine = {};
      }
    }
    start += static_cast<int64_t>(p.segments[s].instructions.size()) + 1;
  }
  resolve_aliases(p);
}

// Storages that are used in several segments of the body and in no other: a micro-batch has them from one to the next.
std::vector<char> kept_in_body(const Program& p) {
  constexpr int32_t kSeveral = -2;
  std::vector<int32_t> only(p.buffers.size(), kNone);  // segment
  const auto body = static_cast<int32_t>(p.segments.size()) - 1;
  std::vector<char> elsewhere(p.buffers.size());
  for (int32_t s = 0; s <= body; ++s)
    for (const Instruction& i : p.segments[s].instructions)
      for (const BufferIds* list : {&i.in, &i.out})
        for (const BufferId b : *list) {
          if (b == kNone) continue;
          const auto storage = static_cast<size_t>(storage_of(p, b));
          only[storage] = only[storage] == kNone || only[storage] == s ? s : kSeveral;
          elsewhere[storage] |= s == 0 || s == body;
        }
  std::vector<char> out(p.buffers.size());
  for (size_t b = 0; b < out.size(); ++b) out[b] = only[b] == kSeveral && !elsewhere[b];
  return out;
}

// What lives from segment to segment has versions, one for each micro-batch that is alive; micro-batches of other sizes
// have other versions of the same storage, not storage of their own.
void share_between_sizes(Draft& draft) {
  Program& p = draft.program;
  constexpr int32_t kMixed = -2;
  std::vector<int32_t> variant(p.buffers.size(), kNone);  // of all that a storage holds
  std::vector<char> known(p.buffers.size());
  const auto root = [&](BufferId b) { return static_cast<size_t>(storage_of(p, b)); };
  const auto note = [&](BufferId b, int32_t mine) {
    int32_t& of = variant[root(b)];
    of = of == kNone || of == mine ? mine : kMixed;
    known[b] = 1;
  };
  std::map<TensorId, std::vector<BufferId>> sizes;
  draft.buffers.each([&](TensorId id, int32_t mine, BufferId b) {
    note(b, mine < 0 ? kMixed : mine);
    if (mine >= 0) sizes[id].push_back(b);
  });
  for (size_t b = 0; b < p.buffers.size(); ++b)
    if (!known[b]) note(static_cast<BufferId>(b), kMixed);
  if (std::ranges::all_of(sizes, [](const auto& of) { return of.second.size() < 2; })) return;
  const std::vector<char> kept = kept_in_body(p);
  for (const auto& [id, buffers] : sizes) {
    std::vector<size_t> storages;
    for (const BufferId b : buffers) {
      const size_t s = root(b);
      const Buffer& storage = p.buffers[s];
      if (storage.kind == BufferKind::kArena && kept[s] && variant[s] != kMixed) storages.push_back(s);
    }
    std::ranges::sort(storages);
    storages.erase(std::unique(storages.begin(), storages.end()), storages.end());
    if (storages.size() < 2) continue;
    const size_t largest = *std::ranges::max_element(storages, {}, [&](size_t s) { return p.buffers[s].bytes; });
    for (const size_t s : storages) {
      const Buffer &one = p.buffers[s], &whole = p.buffers[largest];
      if (s == largest || one.versions != whole.versions || one.memory != whole.memory) continue;
      share(p, static_cast<BufferId>(s), static_cast<BufferId>(largest));
      variant[largest] = variant[s] = kMixed;
    }
  }
  resolve_aliases(p);
}

const MemoryPlan& place_arena(Program& program, const std::vector<Life>& lives, Memory memory, MemoryPlanner& planner) {
  std::vector<Block> blocks;
  std::vector<size_t> owner;
  for (size_t b = 0; b < program.buffers.size(); ++b) {
    if (lives[b].first < 0 || program.buffers[b].memory != memory) continue;
    const int64_t versions = program.buffers[b].versions;
    blocks.push_back({versions > 1 ? versions * version_stride(program.buffers[b]) : program.buffers[b].bytes,
                      lives[b].first, lives[b].last});
    owner.push_back(b);
  }
  const MemoryPlan& plan = planner.plan(std::move(blocks));
  for (size_t k = 0; k < owner.size(); ++k) program.buffers[owner[k]].offset = plan.offsets[k];
  return plan;
}

// Parts of storages, and the last instruction of each queue that made or read them in a segment.
class LastUses {
 public:
  explicit LastUses(const Program& program) : p_(program), of_(program.buffers.size()) {}

  // Calls body(makers, readers) for every part that overlaps with the buffer.
  template <class Body>
  void each(BufferId b, Body body) const {
    const Interval mine = at(b);
    for (const Use& u : of_[storage_of(p_, b)])
      if (u.at.begin < mine.end && mine.begin < u.at.end) body(u.made, u.read);
  }
  void note_read(BufferId b, size_t queue, int64_t now) {
    const Interval mine = at(b);
    auto& uses = of_[storage_of(p_, b)];
    auto use = std::find_if(uses.begin(), uses.end(), [&](const Use& u) { return u.at == mine; });
    if (use == uses.end()) use = uses.insert(use, Use{mine});
    use->read[queue] = now;
  }
  // Who makes something has waited for all that were here before.
  void note_made(BufferId b, size_t queue, int64_t now) {
    const Interval mine = at(b);
    auto& uses = of_[storage_of(p_, b)];
    std::erase_if(uses, [&](const Use& u) { return mine.begin <= u.at.begin && u.at.end <= mine.end; });
    uses.push_back(Use{mine});
    uses.back().made[queue] = now;
  }

 private:
  struct Use {
    Interval at;
    QueueClock made = kNothingDone, read = kNothingDone;
  };
  Interval at(BufferId b) const {
    const int64_t begin = begin_of(p_, b);
    return {begin, begin + p_.buffers[b].bytes};
  }
  const Program& p_;
  std::vector<std::vector<Use>> of_;
};

// The waits that a queue needs in order to know this, the latest instruction first: it may know of the others.
std::vector<Wait> waits_for(const QueueClock& need, Queue queue, const RowClock& clock) {
  std::vector<Wait> waits;
  QueueClock known = clock.known(queue);
  known[static_cast<size_t>(queue)] = INT64_MAX;
  for (;;) {
    size_t latest = kQueues;
    for (size_t t = 0; t < kQueues; ++t)
      if (need[t] > known[t] && (latest == kQueues || need[t] > need[latest])) latest = t;
    if (latest == kQueues) return waits;
    waits.push_back({static_cast<Queue>(latest), static_cast<int32_t>(need[latest])});
    merge(known, clock.begun(static_cast<size_t>(need[latest])));
    known[latest] = need[latest];
  }
}

}  // namespace

void add_waits(Draft& draft, const Graph& graph) {
  Program& program = draft.program;
  for (size_t s = 0; s < program.segments.size(); ++s) {
    Segment& segment = program.segments[s];
    LastUses uses(program);
    RowClock clock;
    std::vector<int64_t> stores;  // copies to the host
    QueueClock vote = kNothingDone, commit = kNothingDone;
    int64_t last_compute = -1;
    for (size_t k = 0; k < segment.instructions.size(); ++k) {
      Watch::look();
      Instruction& i = segment.instructions[k];
      const auto queue = static_cast<size_t>(i.queue);
      QueueClock need = kNothingDone;
      for (const BufferId b : i.in)
        if (b != kNone) uses.each(b, [&](const QueueClock& made, const QueueClock&) { merge(need, made); });
      for (const BufferId b : i.out)
        if (b != kNone)
          uses.each(b, [&](const QueueClock& made, const QueueClock& read) { merge(need, made), merge(need, read); });
      if (i.kind() == InstructionKind::kCommit) merge(need, vote);
      if (updates(draft, graph, s, k)) merge(need, commit);
      // What a queue beside compute works on may lie where something was before: it waits for all compute so far.
      if (i.queue != Queue::kCompute) need[static_cast<size_t>(Queue::kCompute)] = last_compute;
      // Compute runs ahead of a few copies to the host, whose operands lie there until they are done.
      if (i.queue == Queue::kCompute && stores.size() > kStoresUnderWay) {
        int64_t& copied = need[static_cast<size_t>(Queue::kCopyOut)];
        copied = std::max(copied, stores[stores.size() - 1 - kStoresUnderWay]);
      }
      i.waits = waits_for(need, i.queue, clock);
      clock.begin(i.queue, i.waits);
      const auto now = static_cast<int64_t>(k);
      for (const BufferId b : i.in)
        if (b != kNone) uses.note_read(b, queue, now);
      for (const BufferId b : i.out)
        if (b != kNone) uses.note_made(b, queue, now);
      if (i.queue == Queue::kCompute) last_compute = now;
      if (i.kind() == InstructionKind::kVote) vote[queue] = now;
      if (i.kind() == InstructionKind::kCommit) commit[queue] = now;
      if (i.queue == Queue::kCopyOut) stores.push_back(now);
    }
  }
}

void share_storage(Draft& draft, const Graph& graph, int32_t loss) {
  place_next_values(draft, graph);
  place_commit(draft, graph, loss);
  work_in_place(draft, graph, true);
  add_waits(draft, graph);
  work_in_place(draft, graph, false);
  share_between_sizes(draft);
}

void place_arenas(Program& program, MemoryPlanner& planner) {
  const std::vector<Life> lives = lives_of(program);
  const MemoryPlan& device = place_arena(program, lives, Memory::kDevice, planner);
  program.arena_bytes = device.bytes;
  program.peak_live_bytes = device.peak_live;
  program.host_bytes = place_arena(program, lives, Memory::kHost, planner).bytes;
  for (size_t b = 0; b < program.buffers.size(); ++b)
    if (const BufferId s = program.buffers[b].alias; s != kNone) program.buffers[b].offset = program.buffers[s].offset;
}

}  // namespace whale
