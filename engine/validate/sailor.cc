#include "validate/sailor.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <filesystem>
#include <map>
#include <memory>
#include <tuple>

#include "base/error.h"
#include "base/progress.h"
#include "plan/figures.h"
#include "validate/csv.h"
#include "validate/errors.h"
#include "validate/step.h"

namespace whale {
namespace {

const std::vector<std::string_view> kColumns{
    "model", "pp", "dp", "tp", "micro_batch", "global_batch", "step_s", "layers_per_stage", "devices_stage_replica"};

// Chosen on the rows of GH200, one for each of what times of layers do not have: bytes/s of a node, of messages
// between stages and of a ring, which uses all of its links.
constexpr double kMessageBytes = 28e9, kRingBytes = 38e9;
// Between the mixed nodes, from Sailor's own tables (multizone_bandwidths_het.json), not fitted: 1 Gb/s where one end
// is a node of RTX-3090, else 25.
constexpr double kSlowBytes = 0.115e9, kFastBytes = 2.86e9;
// NCCL's buffer of a channel (NCCL_BUFFSIZE as it comes): a message that fits leaves its sender at once. Of a larger
// one, sender and receiver both wait until it is through: DeepSpeed sends and receives in order, and waits for each.
constexpr double kBufferBytes = 4 << 20;

// Memory beside what the plan has. Fitted on the rows of GH200: what every device has before the model (CUDA's context,
// loaded kernels, NCCL), and what PyTorch's allocator holds beyond what is alive.
constexpr double kContextBytes = 4.1e9, kAllocatorShare = 0.05;
// DeepSpeed keeps the gradients again, to sum them, and the parameters; Megatron's loss over a cut vocabulary holds the
// logits twice more.
constexpr double kMoreOfParameters = 2, kMoreOfLogits = 2;

constexpr const char* kMemoryColumn = "max_mem_bytes";  // may be missing
constexpr int64_t kEnds = 2;  // entries of `layers_per_stage` that are no blocks: the embedding and the classifier

struct Model {
  const char* name;
  GptSizes sizes;  // as its configuration says
};
constexpr Model kModels[] = {
    {"OPT-350", {.layers = 24, .hidden = 1024, .heads = 16, .sequence = 2048, .vocabulary = 50272, .batch = 0}},
    {"GPT-Neo-2.7", {.layers = 32, .hidden = 2560, .heads = 32, .sequence = 2048, .vocabulary = 50304, .batch = 0}},
};
// As the file names them, and a device type (cluster/device_types.h) that stands for each.
const std::map<std::string, std::string> kGpus{
    {"GH-96", "H100"}, {"RTX-3090", "RTX-3090"}, {"RTX-2080", "RTX-2080"}, {"Titan-RTX", "TITAN-RTX"}};

struct LayerTime {
  double forward = 0, backward = 0, update = 0;
};
using Key = std::tuple<std::string, std::string, int64_t, int64_t, int64_t>;  // model, gpu, micro-batch, tp, layer
using LayerTimes = std::map<Key, LayerTime>;

LayerTimes times_of(const std::string& path) {
  const Csv csv = read_csv(path);
  LayerTimes out;
  for (size_t r = 0; r < csv.rows.size(); ++r)
    out[{csv.text(r, "model"), csv.text(r, "gpu"), csv.whole(r, "micro_batch"), csv.whole(r, "tp"),
         csv.whole(r, "layer")}] = {csv.number(r, "fwd_s"), csv.number(r, "bwd_s"), csv.number(r, "update_s")};
  return out;
}

std::vector<std::string> split(const std::string& text, char by) {
  std::vector<std::string> out(1);
  for (const char c : text)
    if (c == by)
      out.emplace_back();
    else
      out.back() += c;
  return out;
}

struct Row {
  StepRun run;
  std::string group;
  double seconds = 0;
  std::vector<std::vector<std::array<double, 3>>> of;  // [stage][replica]: seconds of forward, backward, update
  std::vector<std::vector<bool>> slow;                 // [stage][replica]: a node with a slow network
  bool mixed = false;
  double bytes = 0;  // of the fullest device; 0: not measured, or of mixed nodes, which count other things
};

Row row_of(const Csv& csv, size_t row, const LayerTimes& layers) {
  const auto bad = [&](const char* column, const std::string& expected) {
    return invalid("{}, row {}: column '{}' is '{}', expected {}", csv.path, row + 1, column, csv.text(row, column),
                   expected);
  };
  const auto count = [&](const char* column) {
    const int64_t n = csv.whole(row, column);
    if (n < 1 || n > 65536) throw bad(column, "1 to 65536");
    return n;
  };
  const std::string& name = csv.text(row, "model");
  const auto model = std::ranges::find_if(kModels, [&](const Model& m) { return name == m.name; });
  if (model == std::end(kModels)) throw bad("model", "OPT-350 or GPT-Neo-2.7");
  const int64_t p = count("pp"), d = count("dp"), t = count("tp"), micro = count("micro_batch"),
                batch = count("global_batch");
  if (batch % (d * micro)) throw bad("global_batch", fmt::format("a multiple of {} replicas of {} samples", d, micro));
  Row out;
  out.run.sizes = model->sizes;
  out.run.sizes.batch = batch;
  out.run.sizes.dropout = 0, out.run.sizes.keeps_scores = true;
  out.run.cuts = {.layers = {}, .replicas = d, .ways = t, .micro_batches = batch / (d * micro)};
  out.run.devices_of_node = t;
  out.run.half = false;
  // What goes on inside a node is in the layers' times, so cuts are chosen by what leaves it, as Megatron-LM's are.
  out.run.inside = {1e15, 1e-9};
  out.seconds = csv.number(row, "step_s");
  const std::vector<std::string> cuts = split(csv.text(row, "layers_per_stage"), '|'),
                                 stages = split(csv.text(row, "devices_stage_replica"), '|');
  if (std::ssize(cuts) != p) throw bad("layers_per_stage", fmt::format("{} numbers, joined by |", p));
  if (std::ssize(stages) != p) throw bad("devices_stage_replica", fmt::format("{} stages, joined by |", p));
  int64_t from = 0;
  for (size_t k = 0; k < cuts.size(); ++k) {
    int64_t n = 0;
    const auto [end, error] = std::from_chars(cuts[k].data(), cuts[k].data() + cuts[k].size(), n);
    if (error != std::errc{} || end != cuts[k].data() + cuts[k].size() || n < 1 || n > 1024)
      throw bad("layers_per_stage", "numbers from 1, joined by |");
    out.run.cuts.layers.push_back(n - (k == 0) - (k + 1 == cuts.size()));
    const std::vector<std::string> replicas = split(stages[k], '+');
    if (std::ssize(replicas) != d)
      throw bad("devices_stage_replica", fmt::format("{} replicas a stage, joined by +", d));
    out.of.emplace_back(), out.slow.emplace_back();
    for (const std::string& replica : replicas) {
      const std::string gpu = replica.substr(0, replica.rfind('x'));
      const auto type = kGpus.find(gpu);
      if (type == kGpus.end()) throw bad("devices_stage_replica", "GH-96, RTX-3090, RTX-2080, Titan-RTX");
      out.run.types.push_back(type->second);
      out.slow.back().push_back(gpu == "RTX-3090");
      out.mixed |= gpu != "GH-96";
      std::array<double, 3> sum{};
      for (int64_t l = from; l < from + n; ++l) {
        const auto at = layers.find({name, gpu, micro, t, l});
        if (at == layers.end())
          throw invalid("{}, row {}: there are no times of layer {} of {} on {} with micro-batches of {} and tp {}",
                        csv.path, row + 1, l, name, gpu, micro, t);
        const LayerTime& time = at->second;
        sum[0] += time.forward;
        sum[1] += time.backward;
        sum[2] += time.update;
      }
      out.of.back().push_back(sum);
    }
    from += n;
  }
  if (from != model->sizes.layers + kEnds)
    throw bad("layers_per_stage", fmt::format("{} layers together", model->sizes.layers + kEnds));
  for (const int64_t n : out.run.cuts.layers)
    if (n < 0) throw bad("layers_per_stage", "an embedding and a classifier beside the blocks");
  out.group = out.mixed ? "mixed" : "GH200";
  if (!out.mixed && csv.has(kMemoryColumn) && !csv.text(row, kMemoryColumn).empty())
    out.bytes = csv.number(row, kMemoryColumn);
  return out;
}

double bytes_of(const Program& p, const BufferIds& list) {
  double sum = 0;
  for (const BufferId b : list)
    if (b != kNone) sum += static_cast<double>(p.buffers[b].bytes);
  return sum;
}

// Messages that fit the sender's buffer go beside its work.
void send_beside(Plan& plan) {
  for (Program& p : plan.entries[0].programs)
    for (Segment& s : p.segments)
      for (size_t k = 0; k < s.instructions.size(); ++k) {
        Instruction& i = s.instructions[k];
        if (i.kind() != InstructionKind::kSend || bytes_of(p, i.in) > kBufferBytes) continue;
        i.queue = Queue::kSend;
        if (k > 0) i.waits.push_back({s.instructions[k - 1].queue, static_cast<int32_t>(k) - 1});
      }
}

// Of the fullest device.
double fullest_bytes(const Row& row, const Plan& plan) {
  const Entry& entry = plan.entries[0];
  const GptSizes& sizes = row.run.sizes;
  const GptCuts& cuts = row.run.cuts;
  const double logits = 4.0 * static_cast<double>(sizes.batch / (cuts.replicas * cuts.micro_batches) * sizes.sequence *
                                                  sizes.vocabulary / cuts.ways);
  double most = 0;
  for (const DeviceRow& device : entry.rows) {
    const MemoryClasses m = memory_of(plan, entry, static_cast<size_t>(device.program)).device;
    const bool last = device.mesh + 1 == std::ssize(cuts.layers);
    most = std::max(most, static_cast<double>(m.total()) + kAllocatorShare * static_cast<double>(m.activations) +
                              kMoreOfParameters * static_cast<double>(m.parameters) +
                              (last ? kMoreOfLogits * logits : 0) + kContextBytes);
  }
  return most;
}

// Passes and updates as the layers' times say, whatever instructions they are made of; messages and sums of gradients
// by their bytes.
Duration seconds_by(const Row& row, const Plan& plan) {
  using Known = std::map<std::pair<int32_t, const Instruction*>, double>;
  const auto known = std::make_shared<Known>();
  const Entry& entry = plan.entries[0];
  const WorkOf work = work_of(plan, entry);
  const Stack stack;
  // Of messages of a replica, and of the sum of a stage.
  const auto slow = [&](size_t stage, size_t replica) { return row.slow[stage][replica]; };
  const auto rate = [&](bool message, size_t stage, size_t replica) {
    if (!row.mixed) return message ? kMessageBytes : kRingBytes;
    bool any = false;
    for (size_t k = 0; message && k < row.slow.size(); ++k) any |= slow(k, replica);
    for (size_t r = 0; !message && r < row.slow[stage].size(); ++r) any |= slow(stage, r);
    return any ? kSlowBytes : kFastBytes;
  };
  for (const DeviceRow& device : entry.rows) {
    const auto stage = static_cast<size_t>(device.mesh), replica = static_cast<size_t>(device.coordinates[0]);
    const std::array<double, 3>& seconds = row.of[stage][replica];
    const Program& p = entry.programs[device.program];
    for (const Segment& s : p.segments) {
      double sums[4] = {};
      const std::vector<StackRun> runs = runs_of(plan, s);
      const auto own = [&](const Instruction& i, StepPart part) {
        return i.link() == kNone && !(part == StepPart::kEpilogue && i.kind() == InstructionKind::kCollective);
      };
      for (const StackRun& run : runs)
        for (size_t k = run.begin; k < run.end; ++k)
          if (own(s.instructions[k], run.part))
            sums[static_cast<size_t>(run.part)] += work(s.instructions[k], device.device).device_seconds(stack);
      for (const StackRun& run : runs)
        for (size_t k = run.begin; k < run.end; ++k) {
          const Instruction& i = s.instructions[k];
          const StackWork w = work(i, device.device);
          double& at = (*known)[{device.device, &i}];
          const auto part = static_cast<size_t>(run.part);
          const double per = rate(i.link() != kNone, stage, replica);
          const double received = i.kind() == InstructionKind::kReceive ? bytes_of(p, i.out) : 0;
          if (received > kBufferBytes)
            at = received * static_cast<double>(row.run.cuts.ways) / per;
          else if (!own(i, run.part))
            at = w.network_bytes / per + w.inside_bytes / plan.devices[device.device].figures.inside.bytes_per_second;
          else if (run.part != StepPart::kPrologue && sums[part] > 0)
            at = w.device_seconds(stack) / sums[part] * seconds[part - 1];
        }
    }
  }
  return [known](const Instruction& i, int32_t device) {
    const auto at = known->find({device, &i});
    return at == known->end() ? 0 : at->second;
  };
}

}  // namespace

bool is_sailor(const std::string& path) { return has_columns(path, kColumns); }

Json validate_sailor(const std::string& path, const ValidateOptions& options) {
  const std::filesystem::path folder =
      options.profiles.empty() ? std::filesystem::path(path).parent_path() : std::filesystem::path(options.profiles);
  const LayerTimes layers = times_of((folder / "layer_times.csv").string());
  const Csv csv = read_csv(path);
  std::vector<Row> rows;
  for (size_t r = 0; r < csv.rows.size(); ++r) rows.push_back(row_of(csv, r, layers));
  Progress done(rows.size(), "row");
  Errors errors, memory;
  Json list = Json::array();
  bool bytes = false;
  for (const Row& row : rows) {
    Plan plan = plan_of(row.run);
    send_beside(plan);
    const double predicted = whale::times_of(plan, plan.entries[0], seconds_by(row, plan)).seconds;
    errors.add({row.group}, predicted, row.seconds);
    list.push_back({{"group", row.group}, {"measured_s", row.seconds}, {"predicted_s", predicted}});
    if (row.bytes > 0) {
      const double most = fullest_bytes(row, plan);
      memory.add({row.group}, most, row.bytes);
      list.back()["measured_bytes"] = row.bytes;
      list.back()["predicted_bytes"] = most;
      bytes = true;
    }
    done.add();
  }
  Json out;
  errors.write(out);
  out["steps"] = std::move(list);
  std::string text = errors.table();
  if (bytes) {
    memory.write(out["memory"]);
    text += "\nmemory of the fullest device\n" + memory.table();
  }
  out["text"] = text;
  return out;
}

}  // namespace whale
