#include "run/executor.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "base/philox.h"
#include "data/convert.h"
#include "data/indices.h"
#include "run/feeds.h"

namespace whale {

namespace {

constexpr int64_t kNanosecondsToTell = 500'000'000;  // until a rank has told where it is
constexpr size_t kMostPlaces = 3;                    // that it tells
constexpr double kStoodStill = 2;  // seconds between two looks of a rank that waits: it, or its host, was stopped

template <class Is>
bool any_instruction(const Entry& entry, Is is) {
  for (const Program& program : entry.programs)
    for (const Segment& segment : program.segments)
      if (std::any_of(segment.instructions.begin(), segment.instructions.end(), is)) return true;
  return false;
}

// Of a number that is not 0, another one.
uint32_t folded(uint64_t number) {
  return number == 0 ? 0 : std::max<uint32_t>(1, static_cast<uint32_t>(mix64(number) >> 32));
}

// What a step computes with besides its batch: where ranks differ in it, copies of a parameter drift apart.
uint32_t digest_of_numbers(const StepValues& values) {
  uint64_t digest = 0;
  for (const uint64_t each :
       {values.seed, static_cast<uint64_t>(values.iteration), static_cast<uint64_t>(values.updates),
        std::bit_cast<uint64_t>(values.learning_rate), std::bit_cast<uint64_t>(values.loss_scale)})
    digest = mix64(digest + each);
  return folded(digest);
}

}  // namespace

Executor::Executor(Machine& machine, Entry entry)
    : machine_(machine),
      entry_(std::make_unique<const Entry>(std::move(entry))),
      wire_(machine.wire()),
      begun_(wire_ ? wire_->size() : 1, wire_ ? wire_->rank() : 0) {
  WHALE_CHECK(entry_->rows.size() == machine.size(), "one row per device");
  for (size_t d = 0; d < machine.size(); ++d)
    WHALE_CHECK(entry_->rows[d].device == static_cast<int32_t>(d), "rows in the order of the devices");
  links_ = machine.transport().open_links(entry_->links);
  programs_.resize(machine.size());
  machine.team().on_each(fmt::format("make the kernels of entry '{}'", entry_->name), [&](int device) {
    const size_t d = static_cast<size_t>(device);
    programs_[d] = bind_program(machine_, *entry_, *links_, entry_->rows[d]);
  });
  slices_ = bind_slices(*entry_, programs_);
  indices_vote_ = true;
  for (const auto& program : programs_)
    if (program) indices_vote_ = indices_vote_ && program->indices_checked_before_commit;
  for (const auto& program : programs_)
    if (program) votes_wanted_ += program->votes + (indices_vote_ ? program->index_checks : 0);
  commits_ = any_instruction(*entry_, [](const Instruction& i) { return i.kind() == InstructionKind::kCommit; });
  for (size_t d = 0; d < programs_.size(); ++d)
    for (size_t s = 1; s < kQueues; ++s)
      if (programs_[d] && programs_[d]->queues[s]) machine.team().add_queue(static_cast<int>(d), static_cast<Queue>(s));
  runs_ = std::make_unique<DeviceRun[]>(programs_.size());
  timeline_.resize(programs_.size());
  recorders_.resize(programs_.size());
  for (size_t d = 0; d < programs_.size(); ++d)
    for (size_t s = 0; s < kQueues; ++s)
      if (programs_[d] && programs_[d]->queues[s]) recorders_[d][s] = std::make_unique<Recorder>();
  if (wire_ != nullptr)
    gone_.resize(static_cast<size_t>(wire_->size())), places_.resize(gone_.size()), told_.resize(gone_.size());
  doubted_.resize(gone_.size());
  inputs_.resize(entry_->inputs.size());
  outputs_.reserve(entry_->outputs.size() + 1);
  outputs_.resize(entry_->outputs.size());
  if (wire_ != nullptr) sharing_ = make_sharing();
}

// What the devices hand over, and behind the outputs a byte of each rank, where any device sees overflows: whether one
// of its own did.
std::unique_ptr<Sharing> Executor::make_sharing() {
  const auto size = static_cast<size_t>(wire_->size());
  auto parts = handed_over_by_rank(machine_.plan(), *entry_, machine_.ranks(), size);
  if (any_instruction(*entry_, [](const Instruction& i) {
        return i.kernel() != nullptr && has_flag(i.kernel()->op, kSkipsUpdates);
      })) {
    overflows_.resize(size);
    for (size_t r = 0; r < size; ++r) parts[r].push_back({{r, 1}});
  }
  return std::make_unique<Sharing>(*wire_, std::move(parts));
}

Executor::~Executor() { machine_.team().wait_idle(); }

void Executor::narrow_to_outputs() {
  std::vector<bool> wanted(outputs_.size());
  for (size_t o = 0; o < wanted.size(); ++o) wanted[o] = outputs_[o] != nullptr;
  Narrowed& narrowed = narrowed_[wanted];
  std::vector<Mask>& masks = narrowed.masks;
  if (masks.empty()) {
    masks = slice(*entry_, wanted);
    narrowed.inputs_read.resize(inputs_.size());
    for (size_t p = 0; p < masks.size(); ++p) mark_inputs(entry_->programs[p], masks[p], narrowed.inputs_read);
  }
  for (size_t p = 0; p < masks.size(); ++p)
    if (const int input = missing_input(entry_->programs[p], masks[p], inputs_); input >= 0) {
      const PlanInput& port = entry_->inputs[input];
      std::string names;
      for (size_t o = 0; o < wanted.size(); ++o)
        if (wanted[o]) names += (names.empty() ? "'" : ", '") + entry_->outputs[o].name + "'";
      throw invalid("input '{}' is missing, and the outputs asked for ({}) need it: expected {} {}", port.name, names,
                    name_of(port.dtype), to_string(port.dims));
    }
  narrow_ = &narrowed;
}

const std::vector<bool>& Executor::inputs_read() const {
  static const std::vector<bool> all;
  return narrow_ == nullptr ? all : narrow_->inputs_read;
}

void Executor::start(const StepValues& values, Ended ended, void* context) {
  machine_.team().wait_idle();
  values_ = values;
  step_.store(values.iteration, std::memory_order_relaxed);
  ended_ = ended;
  context_ = context;
  state_.store(kOpen, std::memory_order_relaxed);
  ready_.reset();
  votes_cast_.store(0, std::memory_order_relaxed);
  promises_heard_.store(0, std::memory_order_relaxed);
  overflowed_.store(false, std::memory_order_relaxed);
  error_.reset();
  links_->reset();
  votes_.reset();
  for (size_t d = 0; d < programs_.size(); ++d) {
    if (!programs_[d]) continue;
    for (Counter& done : runs_[d].done) done.reset();
    for (size_t s = 0; s < kQueues; ++s) {
      if (recorders_[d][s]) recorders_[d][s]->start_run();
      timeline_[d][s].times = {};
      timeline_[d][s].records.clear();
      if (values.timeline) timeline_[d][s].records.reserve(programs_[d]->runs[s]);  // once
    }
  }
  timeline_filled_ = values.timeline;
  stage_.store(kWalks, std::memory_order_relaxed);
  if (wire_ == nullptr)
    machine_.transport().reset();
  else
    begin_with_others();
  machine_.team().start(*this);
}

// Who runs something else is heard of before it has promised anything, and before this run has ended.
void Executor::begin_with_others() {
  begun_.reset();
  lost_one_ = is_stuck_ = warned_ = false;
  asked_ = asking_ = looked_ = 0;
  doubted_.assign(doubted_.size(), false);
  moved_.store(now_nanoseconds(), std::memory_order_relaxed);
  for (RankPlace& place : places_) place.what.clear();
  places_told_.reset();
  told_.assign(told_.size(), false);
  begins_ = {.kind = Notice::kBegun,
             .subject = mix64(hash_name(entry_->name) + static_cast<uint64_t>(entry_->batch)),
             .numbers = commits_ ? digest_of_numbers(values_) : 0,
             .same = folded(values_.same)};
  for (const void* output : outputs_) begins_.subject = mix64(begins_.subject + (output != nullptr));
  machine_.ear()->listen(this, [this] { machine_.transport().reset(); });  // it may stop this run at once
  try {
    wire_->tell(begins_);
  } catch (const std::exception& e) {
    stop(as_error(e, "begin a run with the other ranks"));
  }
}

// What other ranks' devices handed over; of this rank's they get it. And that one overflowed.
void Executor::share_outputs() noexcept {
  try {
    stage_.store(kBegins, std::memory_order_relaxed);
    if (!begun_.wait(this)) return;
    stage_.store(kShares, std::memory_order_relaxed);
    if (overflows_.empty()) {
      sharing_->run(outputs_, this);
      return;
    }
    overflows_[wire_->rank()] = overflowed();
    outputs_.push_back(overflows_.data());
    const bool shared = sharing_->run(outputs_, this);
    if (shared) overflowed_.store(std::find(overflows_.begin(), overflows_.end(), 1) != overflows_.end());
  } catch (const std::exception& e) {
    stop(as_error(e, "share the outputs with the other ranks"));
  }
  outputs_.resize(entry_->outputs.size());
}

// ---- the device threads -----------------------------------------------------------------------------------------
void Executor::run(int device, Queue queue) noexcept {
  const size_t d = static_cast<size_t>(device), s = static_cast<size_t>(queue);
  if (!programs_[d]->queues[s]) return;
  try {
    if (queue == Queue::kCompute) {
      DeviceMemory& memory = machine_.memory(d);
      memory.forget_arenas();
      memory.set_step({.parameters = {values_.seed, values_.iteration},
                       .learning_rate = values_.learning_rate,
                       .updates = static_cast<double>(values_.updates),
                       .loss_scale = values_.loss_scale});
    } else if (!runs_[d].done[0].wait(1, this)) {
      return;
    }
    if (queue == Queue::kCompute) runs_[d].done[0].advance(1);  // the scalars are there
    const int64_t cpu = values_.timeline ? cpu_nanoseconds() : 0;
    walk(d, s);
    if (values_.timeline) timeline_[d][s].times.cpu = cpu_nanoseconds() - cpu;
  } catch (const std::exception& e) {
    stop(as_error(e, "run a step").at_device(device));
  } catch (...) {
    stop(internal("an exception of an unknown type").at_device(device));
  }
}

bool Executor::walk(size_t device, size_t queue) {
  BoundProgram& program = *programs_[device];
  auto& done = runs_[device].done;
  if (queue != 0) done[queue].advance(1);  // all queues count from one
  Base base;
  const std::vector<ScheduleRow>& schedule = program.program->schedule;
  for (size_t r = 0; r < schedule.size(); ++r) {
    const ScheduleRow& row = schedule[r];
    BoundSegment& segment = program.segments[program.rows[r]];
    if (segment.queues[queue].empty()) {  // nobody waits for what it does here
      done[queue].advance(segment.count);
      base = {base.row + segment.count, base.row};
      continue;
    }
    for (size_t k = 0; k < program.row->samples.size(); ++k) {
      const SampleCut& cut = program.row->samples[k];
      program.contexts[queue][k].batch_begin =
          row.whole || cut.micro_batches.empty() ? cut.whole.begin : cut.micro_batches[row.micro_batch].begin;
    }
    const int64_t begin = now_nanoseconds();
    for (size_t other = 0; other < kQueues; ++other)
      if (other != queue && program.queues[other] && !done[other].wait(base.before, this)) return false;
    timeline_[device][queue].times.waiting += now_nanoseconds() - begin;
    if (!walk_row(device, queue, r, segment, base)) return false;
    base = {base.row + segment.count, base.row};
  }
  return true;
}

// After instruction i of the segment is done, this queue's counter is base.row + i + 1; at the end of the row
// base.row + count.
bool Executor::walk_row(size_t device, size_t queue, size_t number, BoundSegment& segment, const Base& base) {
  const BoundProgram& program = *programs_[device];
  const ScheduleRow& row = program.program->schedule[number];
  static const RowWaits kNothing;
  const RowWaits& row_waits = row.waits == kNone ? kNothing : program.program->row_waits[row.waits];
  auto next = row_waits.begin();
  const uint8_t* mask = narrow_ == nullptr ? nullptr : narrow_->masks[program.row->program][row.segment].data();
  auto& done = runs_[device].done;
  QueueTimeline& timeline = timeline_[device][queue];
  Recorder& recorder = *recorders_[device][queue];
  uint32_t reached = base.row;
  for (BoundInstruction& bound : segment.queues[queue]) {
    stop_if_cancelled();
    if (stopped()) return false;
    int64_t begin = now_nanoseconds();
    // What is left out waits too: memory is used again in the order that all waits give.
    while (next != row_waits.end() && next->at < bound.index) ++next;  // of other queues
    const bool waits = !bound.waits.empty() || (next != row_waits.end() && next->at == bound.index);
    const bool runs = mask == nullptr || mask[bound.index] != 0;
    if (runs) recorder.reach(static_cast<uint32_t>(number), bound.index, values_.iteration, waits ? 0 : begin);
    const auto wait = [&](const Wait& on, uint32_t row_base) {
      return done[static_cast<size_t>(on.queue)].wait(row_base + static_cast<uint32_t>(on.index) + 1, this);
    };
    for (; next != row_waits.end() && next->at == bound.index; ++next)
      if (!wait(next->on, base.before)) return false;
    for (const Wait& on : bound.waits)
      if (!wait(on, base.row)) return false;
    if (waits) {
      const int64_t ready = now_nanoseconds();
      timeline.times.waiting += ready - begin;
      begin = ready;
      if (runs) recorder.begin(begin);
    }
    if (runs) {
      const int64_t cpu = values_.timeline ? cpu_nanoseconds() : 0;
      try {
        if (!execute(bound, device, static_cast<size_t>(row.micro_batch))) return false;
      } catch (const std::exception& e) {
        throw as_error(e, fmt::format("run op '{}'", bound.source->name)).at_op(bound.source->name);
      }
      const int64_t end = now_nanoseconds();
      recorder.end(end);
      if (wire_ != nullptr) moved_.store(end, std::memory_order_relaxed);
      if (values_.timeline) timeline.times.cpu_inside += cpu_nanoseconds() - cpu;
      int64_t& total = bound.kernel       ? timeline.times.ops
                       : bound.collective ? timeline.times.collectives
                                          : timeline.times.copies;
      total += end - begin;
      if (values_.timeline) timeline.records.push_back({bound.source, row.micro_batch, begin, end});
    }
    const uint32_t target = base.row + static_cast<uint32_t>(bound.index) + 1;
    done[queue].advance(target - reached);
    reached = target;
  }
  if (reached != base.row + segment.count) done[queue].advance(base.row + segment.count - reached);
  return true;
}

bool Executor::execute(BoundInstruction& bound, size_t device, size_t micro_batch) {
  Device& memory = machine_.memory(device).device();
  switch (bound.source->kind()) {
    case InstructionKind::kKernel:
      if (bound.index_check) check_index(bound, memory, device, micro_batch);
      bound.kernel->run();
      if (has_flag(bound.source->kernel()->op, kSkipsUpdates)) {
        float scale = 0;
        memory.copy_out(&scale, bound.data, sizeof scale);
        if (std::isnan(scale)) overflowed_.store(true, std::memory_order_release);
      }
      break;
    case InstructionKind::kCollective:
    case InstructionKind::kSend:
    case InstructionKind::kReceive:
      if (!bound.collective->run(this)) return false;
      break;
    case InstructionKind::kFeed: feed(bound, memory, micro_batch); break;
    case InstructionKind::kFetch: fetch(bound, memory, micro_batch); break;
    case InstructionKind::kCopy:
      for (const BoundInstruction::Copy& m : bound.copies)
        if (bound.source->copies_to(Memory::kDevice))
          memory.copy_in(m.to, m.from, m.bytes);
        else if (memory.has_values())
          memory.copy_out(m.to, m.from, m.bytes);
      break;
    case InstructionKind::kVote:
      if (values_.check_loss && is_bad_loss(bound.data, *programs_[device], memory)) return stop(bad_loss()), false;
      vote();
      break;
    case InstructionKind::kCommit:
      if (!votes_.wait(votes_wanted_, this) || !commit()) return false;
      break;
  }
  for (uint64_t* version : bound.versions) ++*version;
  return true;
}

void Executor::check_index(BoundInstruction& bound, Device& device, size_t number, size_t micro_batch) {
  BoundInstruction::IndexCheck& check = *bound.index_check;
  const Operand& index = check.operand;
  const OpDef& op = def(bound.source->kernel()->op);
  device.copy_out(check.host.data(), index.data, check.host.size());
  const int64_t count = static_cast<int64_t>(check.host.size()) / size_of(index.dtype);
  if (const auto bad = first_outside(index.dtype, check.host.data(), count, check.range))
    throw error(
        Code::kOutOfRange,
        "op '{}' ({}) on device {}: the graph computes an index of {} at {} (of this device's part, micro-batch "
        "{}) for operand '{}'; it may be {}",
        bound.source->name, op.name, number, bad->value, position_text(index.dims, bad->position), micro_batch,
        op.inputs[op.index.input].name, to_string(check.range));
  if (indices_vote_) vote();
}

void Executor::feed(const BoundInstruction& bound, Device& device, size_t micro_batch) const {
  const char* host = static_cast<const char*>(inputs_[bound.source->as<work::Feed>()->input]);
  if (takes_slices_) {
    for (const FedRun& run : bound.slices[bound.slices.size() == 1 ? 0 : micro_batch])
      device.copy_in(bound.data + run.device, host + run.host, run.bytes);
    return;
  }
  const SampleRuns& piece = bound.pieces[bound.pieces.size() == 1 ? 0 : micro_batch];
  for (size_t row = 0; row < piece.rows && piece.run != 0; ++row)
    device.copy_in(bound.data + row * piece.run, host + piece.begin + row * piece.stride, piece.run);
}

void Executor::fetch(const BoundInstruction& bound, Device& device, size_t micro_batch) const {
  char* host = static_cast<char*>(outputs_[bound.source->as<work::Fetch>()->output]);
  if (host == nullptr || bound.runs.empty()) return;  // not wanted, or another device hands it over
  for (const HandedRun& run : bound.runs[bound.runs.size() == 1 ? 0 : micro_batch])
    device.copy_out(host + run.host, bound.data + run.local, run.bytes);
}

// ---- stopping ---------------------------------------------------------------------------------------------------
// A cancel is noticed between instructions and, by threads that wait, now and then.
void Executor::look() {
  stop_if_cancelled();
  if (wire_ != nullptr && machine_.world()->patience > 0 && !stopped()) look_at_others();
}

void Executor::stop_if_cancelled() {
  const bool cancelled = values_.cancel != nullptr && values_.cancel->load(std::memory_order_relaxed);
  const bool closing = values_.closing != nullptr && values_.closing->load(std::memory_order_relaxed);
  const uint8_t state = state_.load(std::memory_order_relaxed);
  if ((cancelled || closing) && state == kOpen)
    stop(error(Code::kCancelled, "the run was cancelled; the session is as before it"));
  else if (closing && state == kReady)
    stop(error(Code::kAborted, "the session was closed while the ranks agreed on the update"));
}

bool Executor::commit() {
  if (wire_ != nullptr) return promise(), agree();
  uint8_t open = kOpen;
  return state_.compare_exchange_strong(open, kCommitted, std::memory_order_acq_rel) || open == kCommitted;
}

void Executor::vote() {
  votes_.advance(1);
  if (votes_cast_.fetch_add(1) + 1 == votes_wanted_ && promises_heard_.load() > 0) promise();
}

void Executor::promise() {
  uint8_t open = kOpen;
  if (state_.compare_exchange_strong(open, kReady, std::memory_order_acq_rel)) wire_->tell({.kind = Notice::kReady});
}

bool Executor::agree() {
  if (!ready_.wait(static_cast<uint32_t>(wire_->size() - 1), this)) return false;
  uint8_t ready = kReady;
  return state_.compare_exchange_strong(ready, kCommitted, std::memory_order_acq_rel) || ready == kCommitted;
}

// What another rank tells; on the thread of the ear. It stops the run whatever memory there is.
void Executor::hear(const Notice& notice) noexcept {
  const bool begins = notice.kind == Notice::kBegun && begin_alike(notice, begins_);
  if (begins || notice.kind == Notice::kReady || notice.kind == Notice::kMoves)
    others_moved_.store(now_nanoseconds(), std::memory_order_relaxed);
  if (begins) return begun_.add(notice.rank);
  if (notice.kind == Notice::kMoves) return;
  if (notice.kind == Notice::kAsks) return answer();
  if (notice.kind == Notice::kReady) {
    promises_heard_.fetch_add(1);
    if (votes_cast_.load() == votes_wanted_) promise();
    ready_.advance(1);
    return;
  }
  if (notice.kind == Notice::kAt) return heard_place(notice);
  if (notice.kind == Notice::kGone) tell_place(notice.rank);
  if (notice.kind == Notice::kStopped && notice.code == Code::kDeadlineExceeded) tell_place(kNone);
  stop(error_of(notice, *machine_.world(), &begins_), &notice);
}

// ---- nothing moves ----------------------------------------------------------------------------------------------
std::vector<QueuePlace> Executor::places() const {
  std::vector<QueuePlace> out;
  for (size_t d = 0; d < recorders_.size(); ++d)
    for (const auto& recorder : recorders_[d]) {
      if (!recorder) continue;
      const Recorder::Seen seen = recorder->see();
      if (!seen.in_run || seen.events.empty() || seen.events.back().begin == 0 || seen.events.back().end != 0) continue;
      out.push_back(place_of(machine_.plan(), *entry_, d, seen.events.back()));
    }
  return out;
}

bool Executor::is_at_work() const {
  const int64_t long_ago = now_nanoseconds() - static_cast<int64_t>(machine_.world()->patience * 1e9);
  const std::vector<QueuePlace> at = places();
  return std::any_of(at.begin(), at.end(),
                     [&](const QueuePlace& p) { return !waits_for_others(*p.instruction) && p.began > long_ago; });
}

double Executor::still_seconds() const {
  const int64_t last = std::max(moved_.load(std::memory_order_relaxed), others_moved_.load(std::memory_order_relaxed));
  return static_cast<double>(now_nanoseconds() - last) * 1e-9;
}

// Early enough for answers before anybody warns or gives up, and for those who give none to be found out.
double Executor::asks_after() const {
  const double patience = machine_.world()->patience, warns_after = machine_.world()->warns_after;
  return (warns_after > 0 ? std::min(warns_after, patience) : patience) / 4;
}

// A rank that is in the run says whether something moves with it; one that has not begun it says nothing. It need not
// ask itself: all hear the answers.
void Executor::answer() noexcept {
  const int64_t now = now_nanoseconds();
  asked_.store(now, std::memory_order_relaxed);
  try {
    const auto still = static_cast<double>(now - moved_.load(std::memory_order_relaxed)) * 1e-9;
    if (is_at_work() || still < asks_after()) wire_->tell({.kind = Notice::kMoves});
  } catch (...) {  // no memory for it
  }
}

// Of a thread that waits, now and then.
void Executor::look_at_others() {
  const World& world = *machine_.world();
  if (still_seconds() < asks_after()) return;
  const std::unique_lock lock(patience_mutex_, std::try_to_lock);
  if (!lock) return;
  const int64_t now = now_nanoseconds(), before = std::exchange(looked_, now);
  const auto since = [&](int64_t then) { return static_cast<double>(now - then) * 1e-9; };
  // Who was stopped itself has not listened either.
  if (is_at_work() || (before > moved_ && since(before) > std::max(asks_after(), kStoodStill)))
    return moved_.store(now, std::memory_order_relaxed);
  const double seconds = still_seconds();
  // One that had begun may have sent all that this run needs of it, and others still do.
  const bool is_long = world.warns_after > 0 && seconds >= world.warns_after;
  if (const int left = who_left(world, is_long ? all_ranks(world) : begun_.late()); left >= 0) {
    tell_place(kNone);
    return stop(has_left(world, left));
  }
  if (asking_ < now - static_cast<int64_t>(seconds * 1e9)) asking_ = now;
  if (seconds >= world.patience) {
    const std::vector<int32_t> late = begun_.late();
    Error why(Code::kDeadlineExceeded, waiting_text(seconds));
    tell_place(kNone);
    stop(late.empty() ? why : why.at_rank(late[0]));
    return;
  }
  if (!warned_ && is_long) {
    warned_ = true;
    if (machine_.warn) machine_.warn(waiting_text(seconds));
  }
  doubt_who_is_silent(now);
  if (since(asked_.load(std::memory_order_relaxed)) < asks_after()) return;
  asked_.store(now, std::memory_order_relaxed);
  wire_->tell({.kind = Notice::kAsks});
}

// A rank whose process is there, and whose letters do not come: each is asked again and again. One that is only late
// with an answer, on a busy machine, is doubted no more.
void Executor::doubt_who_is_silent(int64_t now) {
  const World& world = *machine_.world();
  if (!world.doubt) return;
  for (int r = 0; r < wire_->size(); ++r) {
    const int64_t last = wire_->answered(r);
    const auto silent = static_cast<double>(now - std::max(asking_, last)) * 1e-9;
    const bool is_silent = r != wire_->rank() && silent >= 1.5 * asks_after();
    if (std::exchange(doubted_[r], is_silent) || !is_silent) continue;
    world.doubt(r, "it answers nothing that it is asked", silent, [weak = std::weak_ptr(world.wire), r, last] {
      const auto wire = weak.lock();
      return wire && wire->answered(r) == last;
    });
  }
}

std::string Executor::waiting_text(double seconds) const {
  const std::string run = run_text(values_.iteration);
  const std::vector<int32_t> late = begun_.late();
  if (late.empty()) return fmt::format("nothing has moved in {} for {:.3g} seconds", run, seconds);
  return fmt::format("{} {}, which rank {} waits for since {:.3g} seconds", have_not_begun(late, *machine_.world()),
                     run, wire_->rank(), seconds);
}

// ---- who waits for what, when a rank is lost or nothing moves ---------------------------------------------------
RankPlace Executor::place() const {
  static const std::vector<int32_t> kOneRank;
  const std::vector<int32_t>& ranks = wire_ == nullptr ? kOneRank : machine_.ranks();
  std::vector<std::string> waits, works;
  for (const QueuePlace& at : places()) {
    std::vector<std::string>& to = waits_for_others(*at.instruction) ? waits : works;
    std::string text = place_text(at, ranks);
    if (std::find(to.begin(), to.end(), text) == to.end()) to.push_back(std::move(text));
  }
  const auto listed = [](std::vector<std::string>& list) {
    const size_t more = list.size() - std::min(list.size(), kMostPlaces);
    list.resize(list.size() - more);
    return fmt::format("{}{}", fmt::join(list, ", "), more > 0 ? fmt::format(" and {} more", more) : "");
  };
  if (!waits.empty()) return {true, listed(waits)};
  if (!works.empty()) return {false, "at " + listed(works)};
  switch (stage_.load(std::memory_order_relaxed)) {
    case kAgrees: return {true, "the other ranks' word on the update"};
    case kBegins: return {true, "the other ranks to begin"};
    case kShares: return {true, "the outputs of the other ranks"};
    case kEnds: return {false, "in no run"};
    default: break;
  }
  for (const auto& of_device : recorders_)
    for (const auto& recorder : of_device)
      if (recorder && recorder->see().in_run) return {false, "between two instructions"};
  return {false, "at its beginning"};
}

Whereabouts::Place Executor::whereabouts() const {
  const bool in_run = stage_.load(std::memory_order_relaxed) != kEnds;
  const std::string run = run_text(step_.load(std::memory_order_relaxed));
  if (!in_run) return {false, fmt::format("in no run, after {}", run)};
  const RankPlace at = place();
  return {true, fmt::format("in {}, {}{}", run, at.waits ? "waiting for " : "", at.what)};
}

std::string Executor::run_text(int64_t step) const {
  return commits_ ? fmt::format("step {}", step) : std::string("an evaluation");
}

// Each rank hears by itself who is lost, and tells the others where it is then. One that was lost in an earlier run is
// no news.
void Executor::tell_place(int lost) noexcept {
  try {
    RankPlace mine = place();
    wire_->tell({.kind = Notice::kAt, .message = (mine.waits ? "w" : "i") + mine.what});
    const std::lock_guard lock(error_mutex_);
    places_[wire_->rank()] = std::move(mine);
    is_stuck_ = is_stuck_ || lost == kNone;
    if (lost == kNone) return;
    lost_one_ = lost_one_ || !gone_[lost];
    gone_[lost] = true;
    expect_no_more(lost);
  } catch (...) {  // no memory for it
  }
}

void Executor::heard_place(const Notice& notice) noexcept {
  try {
    const std::lock_guard lock(error_mutex_);
    if (!notice.message.empty()) places_[notice.rank] = {notice.message[0] == 'w', notice.message.substr(1)};
    expect_no_more(notice.rank);
  } catch (...) {
  }
}

void Executor::expect_no_more(int rank) {
  if (rank == wire_->rank() || told_[rank]) return;
  told_[rank] = true;
  places_told_.advance(1);
}

// Waits a moment for those who have not told: they may be in no run.
void Executor::add_places() {
  struct Patience final : Lookout {
    explicit Patience(Counter& told) : told(told) {}
    void look() override {
      if (now_nanoseconds() > until) told.abort();
    }
    Counter& told;
    const int64_t until = now_nanoseconds() + kNanosecondsToTell;
  } patience(places_told_);
  {
    const std::lock_guard lock(error_mutex_);
    const bool tells = error_ && ((lost_one_ && error_->code() == Code::kUnavailable) ||
                                  (is_stuck_ && error_->code() == Code::kDeadlineExceeded));
    if (!tells) return;
  }
  places_told_.wait(static_cast<uint32_t>(told_.size() - 1), &patience);
  const std::lock_guard lock(error_mutex_);
  for (size_t r = 0; r < gone_.size(); ++r)
    if (gone_[r]) places_[r].what.clear();
  const std::string joined = joined_places(places_);
  if (joined.empty()) return;
  // Where all others wait, it is for the one that does not.
  const auto works = [](const RankPlace& place) { return !place.waits && !place.what.empty(); };
  int at_fault = error_->where().rank;
  if (is_stuck_ && begun_.late().empty() && std::count_if(places_.begin(), places_.end(), works) == 1)
    at_fault = static_cast<int>(std::find_if(places_.begin(), places_.end(), works) - places_.begin());
  Error full(error_->code(), fmt::format("{}; in {} {}", error_->message(), run_text(values_.iteration), joined));
  full.at_rank(at_fault).with_damage(error_->damage());
  error_ = std::move(full);
}

// What an end at this moment means; none: it comes too late, or somebody was first. Who was ready has promised: an end
// of its own breaks the session.
std::optional<Damage> Executor::damage_at(uint8_t state, const Error& error, const Notice* heard) {
  if (state >= kStopped) return {};
  if (heard != nullptr && heard->kind == Notice::kLost) return Damage::kPeerLost;
  if (heard != nullptr && heard->kind == Notice::kGone && state != kOpen) return Damage::kPeerLost;
  if (state == kOpen || (state == kReady && heard != nullptr)) return Damage::kStep;
  if (heard != nullptr || error.code() == Code::kCancelled) return {};
  return Damage::kSession;
}

void Executor::stop(Error error, const Notice* heard) noexcept {
  const std::lock_guard lock(error_mutex_);
  uint8_t state = state_.load(std::memory_order_acquire);
  std::optional<Damage> damage;
  do {
    damage = damage_at(state, error, heard);
    if (!damage) return;
  } while (
      !state_.compare_exchange_weak(state, *damage == Damage::kStep ? kStopped : kBroken, std::memory_order_acq_rel));
  error.with_damage(*damage);
  error_ = std::move(error);
  for (size_t d = 0; d < programs_.size(); ++d)
    if (programs_[d])
      for (Counter& done : runs_[d].done) done.abort();
  machine_.transport().abort();
  links_->abort();
  votes_.abort();
  ready_.abort();
  begun_.abort();
  if (wire_ == nullptr || heard != nullptr) return;
  try {
    wire_->tell(notice_of(*damage == Damage::kStep ? Notice::kStopped : Notice::kLost, *error_));
  } catch (...) {  // no memory for it: the others learn of it when this session is closed
  }
}

void Executor::refuse(Machine& machine, const Error& error) {
  if (machine.wire() == nullptr) return;
  machine.team().wait_idle();
  machine.ear()->listen(nullptr, [&] { machine.transport().reset(); });
  machine.wire()->tell(notice_of(Notice::kStopped, error));
}

bool Executor::is_bad_loss(const char* loss, const BoundProgram& program, Device& device) const {
  alignas(8) char value[8] = {};
  device.copy_out(value, loss, static_cast<size_t>(size_of(program.loss_dtype)));
  return !std::isfinite(element(program.loss_dtype, value));
}

Error Executor::bad_loss() const {
  return error(Code::kOutOfRange,
               "the loss of step {} is not finite; the step was not applied. Look at the learning rate and the data, "
               "or let it pass (nan=\"ignore\" in Python, --ignore-nan on the command line, nan_policy 1 in C)",
               values_.iteration);
}

void Executor::finished() noexcept {
  if (wire_ != nullptr && commits_) {  // which no device here may do
    stage_.store(kAgrees, std::memory_order_relaxed);
    promise();
    agree();
  }
  if (wire_ != nullptr) {
    share_outputs();
    wire_->settle(this);  // what another rank reads of this run is there until it has
    try {
      add_places();
    } catch (...) {  // no memory for it
    }
    machine_.ear()->listen(nullptr);
  }
  stage_.store(kEnds, std::memory_order_relaxed);
  const bool committed = state_.load(std::memory_order_acquire) == kCommitted;
  try {
    size_t d = 0;  // a device that has the loss
    while (d < programs_.size() && (!programs_[d] || programs_[d]->loss == nullptr)) ++d;
    if (!error_ && values_.check_loss && d < programs_.size() && narrow_ == nullptr &&
        is_bad_loss(programs_[d]->loss, *programs_[d], machine_.memory(d).device()))
      error_ = bad_loss();
  } catch (Error& e) {
    error_ = e;
  } catch (...) {
  }
  narrow_ = nullptr;
  ended_(context_, error_, committed);
}

}  // namespace whale
