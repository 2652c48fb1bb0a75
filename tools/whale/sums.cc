#include "sums.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <map>
#include <set>
#include <utility>

#include <nlohmann/json.hpp>

namespace tool {
namespace {

using Json = nlohmann::json;

double dot(const Gradient& a, const Gradient& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}
// Maleki et al., 2021: parallel gradients are averaged, orthogonal ones summed.
void take_in(Gradient& a, const Gradient& b) {
  const double ab = dot(a, b), aa = dot(a, a), bb = dot(b, b);
  const double fa = aa == 0 ? 1 : 1 - ab / (2 * aa), fb = bb == 0 ? 1 : 1 - ab / (2 * bb);
  for (size_t i = 0; i < a.size(); ++i) a[i] = fa * a[i] + fb * b[i];
}
// Neighbours, then pairs of those; members behind the largest power of two enter first.
Gradient adasum(std::vector<Gradient> members) {
  const size_t n = members.size(), power = std::bit_floor(n);
  for (size_t i = power; i < n; ++i) take_in(members[i - power], members[i]);
  for (size_t step = 1; step < power; step *= 2)
    for (size_t k = 0; k + step < power; k += 2 * step) take_in(members[k], members[k + step]);
  return std::move(members.front());
}

// Each element of an array of integers, with the sample that it belongs to.
template <class Visit>
void for_labels(Array& array, const InputSpec& input, Visit visit) {
  const auto axis = static_cast<size_t>(input.batch_dim);
  const size_t bytes = size_of(array.dtype), samples = static_cast<size_t>(array.dims[axis]);
  size_t inner = 1;
  for (size_t d = axis + 1; d < array.dims.size(); ++d) inner *= static_cast<size_t>(array.dims[d]);
  for (size_t i = 0; i < array.bytes.size() / bytes; ++i)
    visit(i / inner % samples, array.bytes.data() + i * bytes, bytes);
}

// Labels that a loss ignores where they are so: inputs, perhaps reshaped.
std::vector<Labels> labels_of(const Json& graph) {
  std::vector<Labels> out;
  for (const Json& op : graph.at("ops")) {
    if (op.at("op") != "cross_entropy") continue;
    size_t tensor = op.at("inputs").at(1);
    for (int64_t made; (made = graph.at("tensors").at(tensor).at("producer")) >= 0;) {
      const Json& by = graph.at("ops").at(static_cast<size_t>(made));
      if (by.at("op") != "reshape") return {};
      tensor = by.at("inputs").at(0);
    }
    out.push_back(
        {graph.at("tensors").at(tensor).at("name"), op.at("attributes").value("ignore_index", int64_t{-100})});
  }
  return out;
}

bool has_masks(const Json& graph) {
  for (const Json& op : graph.at("ops"))
    if (op.at("op") == "dropout" || op.at("attributes").value("dropout", 0.0) > 0) return true;
  return false;
}

// Per tensor: whether a gradient of the loss gets there.
std::vector<bool> reached(const Json& graph) {
  const Json &tensors = graph.at("tensors"), &ops = graph.at("ops");
  std::vector<bool> out(tensors.size());
  std::vector<size_t> todo{graph.at("training").at("loss")};
  while (!todo.empty()) {
    const Json& tensor = tensors.at(todo.back());
    const bool fresh = !out[todo.back()] && tensor.at("dtype").get<std::string>().find('f') != std::string::npos;
    const int64_t producer = tensor.at("producer");
    if (fresh) out[todo.back()] = true;
    todo.pop_back();
    if (!fresh || producer < 0 || ops.at(static_cast<size_t>(producer)).at("op") == "stop_gradient") continue;
    for (const Json& input : ops.at(static_cast<size_t>(producer)).at("inputs"))
      if (input.get<int64_t>() >= 0) todo.push_back(input);
  }
  return out;
}

// Which micro-batches a program runs: replicas may share them out among themselves.
std::set<size_t> micro_batches_of(const Json& program) {
  std::set<size_t> out;
  for (const Json& row : program.at("schedule")) {
    const std::string segment = program.at("segments").at(row.at("segment").get<size_t>()).at("name");
    if (segment != "prologue" && segment != "epilogue") out.insert(row.at("micro_batch").get<size_t>());
  }
  return out;
}

}  // namespace

double norm(const Gradient& a) { return std::sqrt(dot(a, a)); }
double apart(const Gradient& a, const Gradient& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += (a[i] - b[i]) * (a[i] - b[i]);
  return std::sqrt(sum);
}

Gradient adasum_of(const std::vector<Replica>& replicas, std::vector<Gradient> own) {
  std::map<std::vector<int64_t>, Gradient> level;
  for (size_t r = 0; r < replicas.size(); ++r) level[replicas[r].at] = std::move(own[r]);
  while (!level.begin()->first.empty()) {
    std::map<std::vector<int64_t>, std::vector<Gradient>> groups;
    for (auto& [at, each] : level) groups[{at.begin(), at.end() - 1}].push_back(std::move(each));
    level.clear();
    for (auto& [at, members] : groups) level[at] = adasum(std::move(members));
  }
  return std::move(level.begin()->second);
}

Batch pick(const Batch& batch, const std::vector<InputSpec>& inputs, const std::vector<int64_t>& samples) {
  Batch out = batch;
  for (size_t k = 0; k < out.size(); ++k) {
    if (inputs[k].batch_dim < 0) continue;
    const auto axis = static_cast<size_t>(inputs[k].batch_dim);
    const auto whole = static_cast<size_t>(batch[k].dims[axis]);
    size_t inner = size_of(batch[k].dtype), outer = 1;
    for (size_t d = 0; d < axis; ++d) outer *= static_cast<size_t>(batch[k].dims[d]);
    for (size_t d = axis + 1; d < batch[k].dims.size(); ++d) inner *= static_cast<size_t>(batch[k].dims[d]);
    out[k].dims[axis] = static_cast<int64_t>(samples.size());
    out[k].bytes.clear();
    for (size_t o = 0; o < outer; ++o)
      for (const int64_t sample : samples) {
        const auto at =
            batch[k].bytes.begin() + static_cast<std::ptrdiff_t>((o * whole + static_cast<size_t>(sample)) * inner);
        out[k].bytes.insert(out[k].bytes.end(), at, at + static_cast<std::ptrdiff_t>(inner));
      }
  }
  return out;
}

Batch keep(const Batch& batch, const std::vector<InputSpec>& inputs, const std::vector<int64_t>& samples,
           const std::vector<Labels>& labels) {
  std::vector<int64_t> from;
  for (size_t k = 0; k < batch.size() && from.empty(); ++k) {
    if (inputs[k].batch_dim < 0) continue;
    from.resize(static_cast<size_t>(batch[k].dims[inputs[k].batch_dim]));
  }
  for (size_t i = 0; i < from.size(); ++i) from[i] = samples[i % samples.size()];
  std::vector<bool> others(from.size(), true);
  for (const int64_t sample : samples) from[sample] = sample, others[sample] = false;
  Batch out = pick(batch, inputs, from);
  for (size_t k = 0; k < out.size(); ++k)
    for (const Labels& each : labels)
      if (out[k].name == each.input && inputs[k].batch_dim >= 0)
        for_labels(out[k], inputs[k], [&](size_t sample, uint8_t* at, size_t bytes) {
          if (others[sample]) std::memcpy(at, &each.ignore, bytes);  // little endian, of two's complement
        });
  return out;
}

double counted(const Batch& batch, const std::vector<InputSpec>& inputs, const std::vector<int64_t>& samples,
               const std::vector<Labels>& labels) {
  const std::set<int64_t> wanted(samples.begin(), samples.end());
  double out = 0;
  for (size_t k = 0; k < batch.size(); ++k)
    for (const Labels& each : labels) {
      if (batch[k].name != each.input || inputs[k].batch_dim < 0) continue;
      Array copy = batch[k];
      for_labels(copy, inputs[k], [&](size_t sample, const uint8_t* at, size_t bytes) {
        out += wanted.count(static_cast<int64_t>(sample)) > 0 && std::memcmp(at, &each.ignore, bytes) != 0;
      });
    }
  return out;
}

Values rows_of(const Values& whole, int64_t batch, const std::vector<int64_t>& samples) {
  if (whole.dims.empty() || batch <= 0 || whole.dims[0] % batch != 0) return {};
  const size_t each = whole.data.size() / static_cast<size_t>(batch);
  Values out{whole.dims, {}};
  out.dims[0] = whole.dims[0] / batch * static_cast<int64_t>(samples.size());
  for (const int64_t sample : samples) {
    const auto at = whole.data.begin() + static_cast<std::ptrdiff_t>(static_cast<size_t>(sample) * each);
    out.data.insert(out.data.end(), at, at + static_cast<std::ptrdiff_t>(each));
  }
  return out;
}

GradientSum gradient_sum_of(const std::string& plan_json, const std::string& graph_json, bool by_micro_batch) {
  const Json plan = Json::parse(plan_json), graph = Json::parse(graph_json);
  GradientSum out;
  out.adasum = plan.at("adasum");
  for (const char* option : {"gradient_dtype", "accumulate_dtype"}) {  // a sum may be rounded by both
    const Json dtype = plan.at(option);
    if (dtype == "bf16") out.roundoff += 0x1p-9, out.smallest += 0x1p-134;
    if (dtype == "f16") out.roundoff += 0x1p-12, out.smallest += 0x1p-25;
    if (dtype == "f32" && plan.at("precision") == "f64") out.roundoff += 0x1p-24, out.smallest += 0x1p-150;
  }
  const Json& meshes = plan.at("meshes");
  std::vector<std::map<std::vector<int64_t>, std::vector<int64_t>>> replicas(meshes.size());
  std::map<std::string, size_t> mesh_of;  // of a variable: the first that holds a part of it
  for (const Json& entry : plan.at("entries")) {
    if (entry.at("name") != "train") continue;
    for (const Json& row : entry.at("rows")) {
      const size_t mesh = row.at("mesh");
      const Json& axes = meshes.at(mesh).at("axes");
      std::vector<int64_t> at, samples;
      for (size_t a = 0; a < axes.size(); ++a)
        if (axes[a].at("name").get<std::string>().find("replica") != std::string::npos)
          at.push_back(row.at("coordinates").at(a));
      int64_t number = 0;
      for (const size_t u : micro_batches_of(entry.at("programs").at(row.at("program").get<size_t>()))) {
        const Json& range = row.at("micro_batches").at(u);
        for (int64_t i = range.at(0); i < range.at(1); ++i) samples.push_back(i);
        if (!by_micro_batch) continue;
        std::vector<int64_t> of_part = at;
        of_part.push_back(number++);
        replicas[mesh].emplace(std::move(of_part), std::exchange(samples, {}));
      }
      if (!by_micro_batch) replicas[mesh].emplace(std::move(at), std::move(samples));
      for (const Json& buffer : entry.at("programs").at(row.at("program").get<size_t>()).at("buffers"))
        if (buffer.at("kind") == "variable") mesh_of.emplace(buffer.at("name"), mesh);
    }
  }
  for (const auto& of_mesh : replicas) {
    std::vector<Replica>& mesh = out.meshes.emplace_back();
    for (const auto& [at, samples] : of_mesh) mesh.push_back({at, samples});
  }
  const std::vector<bool> trained = reached(graph);
  for (const Json& variable : graph.at("variables"))
    if (variable.at("role") == "parameter" && variable.at("trainable") == true &&
        trained[variable.at("tensor").get<size_t>()])
      out.parameters.push_back({variable.at("name"), mesh_of[variable.at("name")]});
  out.masks = has_masks(graph);
  out.labels = labels_of(graph);
  return out;
}

void mark_whole(GradientSum& sum, const std::string& plan_json) {
  const Json plan = Json::parse(plan_json);
  std::set<std::string> combined;  // outputs that a collective of the backward pass leads to
  for (const Json& entry : plan.at("entries")) {
    if (entry.at("name") != "train") continue;
    for (const Json& program : entry.at("programs")) {
      const Json& buffers = program.at("buffers");
      const auto storage_of = [&](int64_t buffer) {
        const int64_t alias = buffers.at(static_cast<size_t>(buffer)).value("alias", int64_t{-1});
        return alias < 0 ? buffer : alias;
      };
      std::map<int64_t, std::vector<const Json*>> writers;
      for (const Json& segment : program.at("segments"))
        for (const Json& instruction : segment.at("instructions"))
          for (const Json& out : instruction.at("out")) writers[storage_of(out)].push_back(&instruction);
      const auto leads = [&](const Json& fetch) {
        std::set<int64_t> seen;
        std::vector<int64_t> todo{storage_of(fetch.at("in").at(0))};
        while (!todo.empty()) {
          const int64_t storage = todo.back();
          todo.pop_back();
          if (!seen.insert(storage).second) continue;
          for (const Json* by : writers[storage]) {
            if (by->at("phase") == "forward") continue;
            if (by->at("kind") == "collective" || by->at("kind") == "receive") return true;
            for (const Json& in : by->at("in"))
              if (in.get<int64_t>() >= 0) todo.push_back(storage_of(in));
          }
        }
        return false;
      };
      for (const Json& segment : program.at("segments"))
        for (const Json& instruction : segment.at("instructions"))
          if (instruction.at("kind") == "fetch" && leads(instruction)) combined.insert(instruction.at("name"));
    }
  }
  for (GradientSum::Parameter& p : sum.parameters) p.whole = !combined.contains("fetch.grad:" + p.name);
}

std::string why_not_by_replica(const std::string& graph_json) {
  const Json graph = Json::parse(graph_json);
  for (const Json& op : graph.at("ops"))
    if (op.at("op").get<std::string>().starts_with("batch_norm")) return "batch norm mixes the samples of all replicas";
  if (has_masks(graph) && labels_of(graph).empty())
    return "random masks follow the place of a sample in the batch, where no labels leave the others out of the loss";
  return "";
}

}  // namespace tool
