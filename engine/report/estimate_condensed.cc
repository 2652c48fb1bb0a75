// A model's estimate from a plan of its condensed form: what belongs to a layer that stands for others counts as often,
// what is kept for several micro-batches as often as the model's schedule has them under way.
#include <algorithm>
#include <array>
#include <map>
#include <memory>

#include "cluster/device_kinds.h"
#include "plan/lives.h"
#include "report/estimate.h"
#include "schedule/timing.h"
#include "simulate/simulate.h"

namespace whale {
namespace {

// What outlives its layer by fewer instructions than that part of a layer is passed on: condense.cc keeps one layer
// behind it in each pass of a pipeline, and two elsewhere.
constexpr double kPassed = 0.75, kPassedFar = 1.75;

// What a stage needs in one memory of a device.
struct StageArena {
  MemoryClasses through;  // what lives through the body: other stages of the device have it beside them
  MemoryClasses peak;     // when most is alive
};

struct StageSeconds {
  StageTimes body;  // of the slowest micro-batch
  double all = 0, once = 0;
};

class CondensedEstimator {
 public:
  CondensedEstimator(const Condensed& condensed, const TaskGraphs& tasks, const ShardedGraph& lg, const Plan& plan)
      : c_(condensed),
        tasks_(tasks),
        plan_(plan),
        entry_(plan.entries[0]),
        seconds_(seconds_by(lg.tasks.cost, plan, entry_)),
        pipelined_(!tasks.schedule.empty() && plan.micro_batches > 1) {
    if (pipelined_)
      schedule_ = make_schedule(tasks.schedule, static_cast<int>(tasks.meshes.size()),
                                static_cast<int>(plan.micro_batches), static_cast<int>(tasks.virtual_stages));
    find_runs_of_variables();
    kinds_ = kinds_of(plan.devices);
    for (const Program& p : entry_.programs) {
      lives_.push_back(lives_of(p));
      holds_.push_back(contents_of(p, plan.groups));
      runs_.push_back(runs_of_storages(p));
    }
  }

  Estimate run() {
    Estimate out{.strategy = plan_.strategy, .classes = {}};
    std::vector<StageTimes> times(tasks_.stages());
    double once = 0;
    for (size_t m = 0; m < tasks_.meshes.size(); ++m) {
      std::map<std::vector<int32_t>, size_t> known;  // kind, programs of its stages -> class
      const std::vector<int32_t> stages = stages_of(m);
      const std::vector<int64_t> versions = versions_of(m, stages.size());
      const std::vector<int32_t>& devices = tasks_.meshes[m].devices;
      std::vector<int32_t> rows, programs;  // of the stages
      for (size_t k = 0; k < devices.size(); ++k) {
        if (devices[k] < 0) continue;
        rows.clear(), programs.clear();
        programs.push_back(kinds_[c_.tasks.mesh(like(stages[0])).devices[k]]);
        for (const int32_t v : stages) {
          rows.push_back(c_.tasks.mesh(like(v)).devices[k]);
          programs.push_back(entry_.rows[rows.back()].program);
        }
        const auto [at, fresh] = known.try_emplace(programs, out.classes.size());
        if (fresh) {
          Estimate::Class& mine = out.classes.emplace_back();
          mine.memory = memory_of(stages, versions, rows);
          double all_once = 0;
          for (size_t n = 0; n < stages.size(); ++n) {
            const StageSeconds s = seconds_of(stages[n], rows[n]);
            StageTimes& slowest = times[stages[n]];
            slowest.forward = std::max(slowest.forward, s.body.forward);
            slowest.backward = std::max(slowest.backward, s.body.backward);
            slowest.weight = std::max(slowest.weight, s.body.weight);
            mine.seconds += s.all, all_once += s.once;
          }
          once = std::max(once, all_once);
          out.seconds = std::max(out.seconds, mine.seconds);
        }
        out.classes[at->second].devices.push_back(devices[k]);
      }
    }
    for (Estimate::Class& c : out.classes) std::ranges::sort(c.devices);
    if (pipelined_) out.seconds = std::max(out.seconds, once + run_clock(schedule_, times).makespan);
    return out;
  }

 private:
  int32_t like(int32_t stage) const { return c_.stage_like[stage]; }
  // How many layers of the run one stands for in the stage; what is in no such layer stands for itself.
  int64_t layers(int32_t stage, int32_t run) const { return run < 0 ? 1 : c_.layers[stage][run]; }
  int32_t run_of(ScopeId scope) const { return c_.run_of_scope[scope]; }

  std::vector<int32_t> stages_of(size_t mesh) const {
    std::vector<int32_t> out;
    for (size_t v = 0; v < tasks_.stages(); ++v)
      if (tasks_.mesh_of_stage[v] == static_cast<int32_t>(mesh)) out.push_back(static_cast<int32_t>(v));
    return out;
  }

  // Micro-batches under way, per stage of the mesh.
  std::vector<int64_t> versions_of(size_t mesh, size_t stages) const {
    std::vector<int64_t> out(stages, 1);
    if (pipelined_)
      for (const auto& [virtual_stage, n] : alive_at_once(schedule_.devices[mesh], false)) out[virtual_stage] = n;
    return out;
  }

  // Per storage: the run of what writes it first; -1: none. Of a bucket, each result is of its operand's.
  std::vector<int32_t> runs_of_storages(const Program& p) const {
    std::vector<int32_t> out(p.buffers.size(), -1);
    std::vector<char> known(p.buffers.size());
    for (size_t b = 0; b < p.buffers.size(); ++b)
      if (p.buffers[b].kind == BufferKind::kVariable) known[b] = 1, out[b] = runs_of_variables_[p.buffers[b].ref];
    for (const Segment& s : p.segments)
      for (const Instruction& i : s.instructions)
        for (size_t k = 0; k < i.out.size(); ++k) {
          if (i.out[k] == kNone) continue;
          const auto storage = static_cast<size_t>(storage_of(p, i.out[k]));
          if (std::exchange(known[storage], 1)) continue;
          const bool each = i.as<work::Collective>() != nullptr && i.in.size() == i.out.size() && i.in[k] != kNone;
          out[storage] = each ? out[storage_of(p, i.in[k])] : run_of(i.scope);
        }
    for (const Segment& s : p.segments)
      for (const Instruction& i : s.instructions)
        if (i.kind() == InstructionKind::kSend) out[storage_of(p, i.in[0])] = -1;  // once a stage
    return out;
  }

  // Of variables that standing layers alone read, and their state: not of what a pass has moved to another stage.
  void find_runs_of_variables() {
    struct Reader {
      int32_t run = -1, stage = -1;
      bool operator==(const Reader&) const = default;
    };
    std::map<std::string_view, Reader> readers;
    for (const Op& op : c_.graph.ops)
      for (const TensorId id : op.inputs) {
        if (id == kNone || c_.graph.tensor(id).kind != TensorKind::kVariable) continue;
        const Reader mine{run_of(op.scope), op.stage};
        const auto [at, fresh] = readers.try_emplace(c_.graph.tensor(id).name, mine);
        if (!fresh && at->second != mine) at->second = {};
      }
    for (const PlanVariable& v : plan_.variables) {
      const auto at = readers.find(v.owner.empty() ? v.name : v.owner);
      runs_of_variables_.push_back(at == readers.end() || at->second.stage != v.mesh ? -1 : at->second.run);
    }
  }

  MemoryFigures memory_of(const std::vector<int32_t>& stages, const std::vector<int64_t>& versions,
                          const std::vector<int32_t>& rows) const {
    MemoryFigures out;
    for (const Memory memory : {Memory::kDevice, Memory::kHost}) {
      std::vector<StageArena> arenas;  // packed without gaps, as those of large plans are
      for (size_t n = 0; n < stages.size(); ++n)
        arenas.push_back(arena_of(stages[n], versions[n], entry_.rows[rows[n]].program, memory));
      MemoryClasses& mine = out.in(memory);
      for (size_t at = 0; at < arenas.size(); ++at) {  // which of them is at work
        MemoryClasses sum = arenas[at].peak;
        for (size_t n = 0; n < arenas.size(); ++n) {
          if (n == at) continue;
          sum.gradients += arenas[n].through.gradients;
          sum.copies += arenas[n].through.copies;
          sum.activations += arenas[n].through.activations;
        }
        if (sum.arena() > mine.arena()) mine = sum;
      }
    }
    for (size_t v = 0; v < plan_.variables.size(); ++v) {
      const PlanVariable& variable = plan_.variables[v];
      for (size_t n = 0; n < stages.size(); ++n)
        if (variable.mesh == like(stages[n]))
          out.in(variable.memory).of(variable.role) += layers(stages[n], runs_of_variables_[v]) *
                                                       element_count(local_dims(plan_, variable, rows[n])) *
                                                       size_of(variable.dtype);
    }
    return out;
  }

  StageArena arena_of(int32_t stage, int64_t versions, int32_t program, Memory memory) const {
    const auto number = static_cast<size_t>(program);
    const Program& p = entry_.programs[number];
    // At each place of a life: the run of its instruction, how many instructions of no layer that stands for others
    // came before (without updates, which come when they may), and how many of such a layer its segment has of the same
    // pass.
    std::vector<int32_t> runs;
    std::vector<int64_t> outside{0}, as_long;
    for (const Segment& s : p.segments) {
      // What the backward pass gathers or computes again has the phase of what it repeats, but is of this pass.
      const auto backward = std::ranges::find(s.instructions, Phase::kBackward, &Instruction::phase);
      const Instruction* const begins = std::to_address(backward);
      const auto pass_of = [&](const Instruction& i) {
        return i.phase == Phase::kForward && &i >= begins ? Phase::kBackward : i.phase;
      };
      std::map<std::pair<int32_t, Phase>, int64_t> standing;
      for (const Instruction& i : s.instructions) ++standing[{run_of(i.scope), pass_of(i)}];
      for (const Instruction& i : s.instructions) {
        runs.push_back(run_of(i.scope));
        outside.push_back(outside.back() + (runs.back() < 0 && i.phase != Phase::kUpdate));
        as_long.push_back(standing[{runs.back(), pass_of(i)}]);
      }
      runs.push_back(-1), outside.push_back(outside.back()), as_long.push_back(0);
    }
    // Of what a layer leaves to the next one each layer has its own, but not all at once.
    const auto lasts = [&](const Life& life) {
      const auto first = static_cast<size_t>(life.first), last = static_cast<size_t>(life.last);
      return life.first_segment != life.last_segment ||
             static_cast<double>(outside[last + 1] - outside[first]) >=
                 (pipelined_ ? kPassed : kPassedFar) * static_cast<double>(as_long[first]);
    };
    std::vector<MemoryClasses> change(runs.size() + 1);
    StageArena out;
    const auto add = [&](MemoryClasses& to, size_t b, int64_t bytes) {
      (holds_[number][b] == Holds::kGradient ? to.gradients
       : holds_[number][b] == Holds::kCopy   ? to.copies
                                             : to.activations) += bytes;
    };
    for (size_t b = 0; b < p.buffers.size(); ++b) {
      const Life& life = lives_[number][b];
      const Buffer& buffer = p.buffers[b];
      if (life.first < 0 || buffer.memory != memory) continue;
      const int64_t once = buffer.versions > 1 ? (versions - 1) * version_stride(buffer) + buffer.bytes : buffer.bytes;
      const int64_t bytes = lasts(life) ? layers(stage, runs_[number][b]) * once : once;
      const auto first = static_cast<size_t>(life.first), last = static_cast<size_t>(life.last);
      add(change[first], b, bytes), add(change[last + 1], b, -bytes);
      if (life.first_segment != life.last_segment && p.segments.size() > 1) add(out.through, b, bytes);
    }
    MemoryClasses now;
    // Others of its kind may be done or still to come while a layer is at work, whose neighbours show what it needs.
    const bool alone = outside.back() == 0;
    for (size_t at = 0; at < runs.size(); ++at) {
      now.gradients += change[at].gradients, now.copies += change[at].copies, now.activations += change[at].activations;
      if ((alone || layers(stage, runs[at]) == 1) && now.arena() > out.peak.arena()) out.peak = now;
    }
    return out;
  }

  StageSeconds seconds_of(int32_t stage, int32_t device) const {
    const DeviceRow& row = entry_.rows[device];
    const Program& program = entry_.programs[row.program];
    std::vector<double> seconds;
    for (const Segment& s : program.segments) {
      std::array<double, kCarriers> of{};
      for (const Instruction& i : s.instructions)
        of[static_cast<size_t>(carrier_of(i.queue))] +=
            static_cast<double>(layers(stage, run_of(i.scope))) * seconds_(i, device);
      seconds.push_back(*std::ranges::max_element(of));
    }
    StageSeconds out;
    for (const ScheduleRow& r : program.schedule) {
      const double mine = seconds[r.segment];
      out.all += mine;
      if (r.whole)
        out.once += mine;
      else if (pipelined_) {
        const std::string& name = program.segments[r.segment].name;
        double& slowest = name.starts_with("forward")    ? out.body.forward
                          : name.starts_with("backward") ? out.body.backward
                                                         : out.body.weight;
        slowest = std::max(slowest, mine);
      }
    }
    return out;
  }

  const Condensed& c_;
  const TaskGraphs& tasks_;
  const Plan& plan_;
  const Entry& entry_;
  Duration seconds_;
  bool pipelined_;
  PipelineSchedule schedule_;
  // Per program.
  std::vector<std::vector<Life>> lives_;
  std::vector<std::vector<Holds>> holds_;
  std::vector<std::vector<int32_t>> runs_;
  std::vector<int32_t> runs_of_variables_;
  std::vector<int32_t> kinds_;  // of the devices of the condensed form
};

}  // namespace

bool agree(const Estimate& one, const Estimate& other, int64_t layers, int64_t least) {
  constexpr double kMost = 0.01;
  std::map<int32_t, int64_t> arenas;
  for (const Estimate::Class& c : one.classes)
    for (const int32_t d : c.devices) arenas[d] = c.memory.device.arena();
  size_t same = 0;
  for (const Estimate::Class& c : other.classes)
    for (const int32_t d : c.devices) {
      const auto at = arenas.find(d);
      if (at == arenas.end()) return false;
      const auto apart = static_cast<double>(std::abs(at->second - c.memory.device.arena()) * layers);
      if (apart > kMost * static_cast<double>(least)) return false;
      ++same;
    }
  return same == arenas.size();
}

Estimate estimate_of(const Condensed& condensed, const TaskGraphs& tasks, const ShardedGraph& graph, const Plan& plan) {
  return CondensedEstimator(condensed, tasks, graph, plan).run();
}

}  // namespace whale
