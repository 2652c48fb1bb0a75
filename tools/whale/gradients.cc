#include "gradients.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <map>

#include <nlohmann/json.hpp>

namespace tool {
namespace {

using Json = nlohmann::json;
using Gradient = std::vector<double>;

// Sums of several axes round again, and none need add in the order that the bound is taken in.
constexpr double kOrders = 2;

double dot(const Gradient& a, const Gradient& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}
double norm(const Gradient& a) { return std::sqrt(dot(a, a)); }
double apart(const Gradient& a, const Gradient& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += (a[i] - b[i]) * (a[i] - b[i]);
  return std::sqrt(sum);
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

// The samples of a batch, in this order.
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

class Gradients {
 public:
  Gradients(whale_engine* engine, const Sides& sides, const SessionArguments& arguments, const GradientSum& sum,
            Report& report)
      : sum_(sum),
        report_(report),
        plan_(engine, sides.plan(), arguments),
        one_(engine, sides.single(), arguments),
        shake_(report.setting.amplitude, 1),
        inputs_(inputs_of(one_.plan(), "train")),
        variables_(variables_of(plan_)) {
    for (const GradientSum::Parameter& p : sum.parameters) names_.push_back("grad:" + p.name);
    report_.parameters.tensors = report_.parameters.copies = static_cast<int64_t>(names_.size());
    envelope_.assign(names_.size(), 0);
  }

  void step(const Batch& given, int64_t number) {
    const Batch batch = widen(given, inputs_);
    start_.clear();
    for (const Variable& v : variables_) start_.push_back(read_value(plan_, v));
    std::vector<double> rounding(names_.size(), 0), moved_rounding = rounding;
    const std::vector<Gradient> one = wanted(batch, rounding);
    restore();
    shake_.add(one_, variables_);
    moved_.clear();
    for (const Variable& v : variables_) moved_.push_back(read_value(one_, v));
    std::swap(start_, moved_);
    const std::vector<Gradient> moved = wanted(shake_.inputs(batch), moved_rounding);
    std::swap(start_, moved_);
    std::vector<Values> of_plan;
    try {
      plan_.step(batch, names_, &of_plan);
    } catch (const Failure& failure) {
      report_.failure = "step " + std::to_string(number) + ": " + failure.what();
      return;
    }
    ++report_.steps, ++report_.compared;
    for (size_t k = 0; k < names_.size(); ++k) {
      envelope_[k] = std::max(envelope_[k], apart(moved[k], one[k]));
      Figure f{names_[k], number, 0, {}, apart(of_plan[k].data, one[k]), envelope_[k], 0, 0, norm(one[k])};
      f.floor = rounding[k] + 16 * report_.setting.epsilon * f.norm;
      f.bound = report_.setting.factor * f.envelope + f.floor;
      worsen(report_.parameters.worst, f);
    }
    for (const Variable& v : variables_) check_copies(v, number);
  }

 private:
  void restore() {
    for (size_t v = 0; v < variables_.size(); ++v) write_value(one_, variables_[v], start_[v].get());
  }
  std::vector<Gradient> gradients(const Batch& batch) {
    restore();
    std::vector<Values> values;
    one_.step(batch, names_, &values);
    std::vector<Gradient> out;
    for (Values& v : values) out.push_back(std::move(v.data));
    return out;
  }

  // Of the mean over a replica's own samples. Where they cannot be run by themselves (groups of batch norm), only the
  // norm is wanted: that of a gradient which is all noise, the root of the number of replicas larger.
  std::vector<Gradient> of_replica(const Batch& batch, const Replica& replica, size_t replicas,
                                   const std::vector<Gradient>& whole) {
    std::vector<Gradient> own = whole;
    const double scale = replica.samples.empty() ? 0 : std::sqrt(static_cast<double>(replicas));
    for (Gradient& g : own)
      for (double& x : g) x *= scale;
    if (replica.samples.empty()) return own;
    try {
      return gradients(pick(batch, inputs_, replica.samples));
    } catch (const Failure&) {
      if (sum_.adasum) throw;
    }
    return own;
  }

  // What the option asks for, and how far the rounding of its format may be from it.
  std::vector<Gradient> wanted(const Batch& batch, std::vector<double>& rounding) {
    const std::vector<Gradient> whole = gradients(batch);
    std::vector<Gradient> out = whole;
    for (size_t mesh = 0; mesh < sum_.meshes.size(); ++mesh) {
      std::vector<size_t> here;
      for (size_t k = 0; k < names_.size(); ++k)
        if (sum_.parameters[k].mesh == mesh) here.push_back(k);
      if (!here.empty()) combine(batch, sum_.meshes[mesh], here, whole, out, rounding);
    }
    for (double& r : rounding) r *= kOrders;
    return out;
  }

  // The gradients `here`, of parameters of one mesh.
  void combine(const Batch& batch, const std::vector<Replica>& replicas, const std::vector<size_t>& here,
               const std::vector<Gradient>& whole, std::vector<Gradient>& out, std::vector<double>& rounding) {
    std::map<std::vector<int64_t>, std::vector<Gradient>> level;
    int64_t all = 0;
    for (const Replica& r : replicas) all += static_cast<int64_t>(r.samples.size());
    std::vector<Gradient> partial(names_.size());
    for (const Replica& r : replicas) {
      std::vector<Gradient> own = of_replica(batch, r, replicas.size(), whole);
      const double share = static_cast<double>(r.samples.size()) / static_cast<double>(all);
      for (const size_t k : here) {
        if (sum_.roundoff == 0) break;
        // Each part is rounded, and each sum of the first so many.
        rounding[k] +=
            sum_.roundoff * share * norm(own[k]) + sum_.smallest * std::sqrt(static_cast<double>(own[k].size()));
        const bool first = partial[k].empty();
        partial[k].resize(own[k].size());
        for (size_t i = 0; i < own[k].size(); ++i) partial[k][i] += share * own[k][i];
        if (!first) rounding[k] += sum_.roundoff * norm(partial[k]);
      }
      if (sum_.adasum) level[r.at] = std::move(own);
    }
    if (!sum_.adasum) return;
    while (!level.begin()->first.empty()) {  // the innermost axis first
      std::map<std::vector<int64_t>, std::vector<std::vector<Gradient>>> groups;
      for (auto& [at, own] : level) groups[{at.begin(), at.end() - 1}].push_back(std::move(own));
      level.clear();
      for (auto& [at, members] : groups) {
        level[at].resize(names_.size());
        for (const size_t k : here) {
          std::vector<Gradient> of;
          for (std::vector<Gradient>& member : members) of.push_back(std::move(member[k]));
          level[at][k] = adasum(std::move(of));
        }
      }
    }
    for (const size_t k : here) out[k] = std::move(level.begin()->second[k]);
  }

  void check_copies(const Variable& v, int64_t number) {
    Tensor first;
    for (size_t copy = 0; copy < v.copies.size(); ++copy) {
      Tensor value = read_value(plan_, v, static_cast<int64_t>(copy));
      if (copy > 0 && !same_bits(value.get(), first.get())) report_.found_unlike(v, copy, number);
      if (copy == 0) first = std::move(value);
    }
  }

  const GradientSum& sum_;
  Report& report_;
  Runner plan_, one_;
  Shake shake_;
  std::vector<InputSpec> inputs_;
  std::vector<Variable> variables_;
  std::vector<std::string> names_;
  std::vector<Tensor> start_, moved_;
  std::vector<double> envelope_;
};

}  // namespace

GradientSum gradient_sum_of(const std::string& plan_json, const std::string& graph_json) {
  const Json plan = Json::parse(plan_json), graph = Json::parse(graph_json);
  GradientSum out;
  out.adasum = plan.at("adasum");
  const Json dtype = plan.at("gradient_dtype");
  if (dtype == "bf16") out.roundoff = 0x1p-9, out.smallest = 0x1p-134;
  if (dtype == "f16") out.roundoff = 0x1p-12, out.smallest = 0x1p-25;
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
      for (const Json& range : row.at("micro_batches"))
        for (int64_t i = range.at(0); i < range.at(1); ++i) samples.push_back(i);
      replicas[mesh].emplace(std::move(at), std::move(samples));
      for (const Json& buffer : entry.at("programs").at(row.at("program").get<size_t>()).at("buffers"))
        if (buffer.at("kind") == "variable") mesh_of.emplace(buffer.at("name"), mesh);
    }
  }
  for (const auto& of_mesh : replicas) {
    std::vector<Replica>& mesh = out.meshes.emplace_back();
    for (const auto& [at, samples] : of_mesh) mesh.push_back({at, samples});
  }
  for (const Json& variable : graph.at("variables"))
    if (variable.at("role") == "parameter" && variable.at("trainable") == true)
      out.parameters.push_back({variable.at("name"), mesh_of[variable.at("name")]});
  return out;
}

std::string why_not_by_replica(const std::string& graph_json) {
  const Json graph = Json::parse(graph_json);
  for (const Json& op : graph.at("ops")) {
    const std::string name = op.at("op");
    if (name == "dropout" || op.at("attributes").value("dropout", 0.0) > 0)
      return "random masks follow the place of a sample in the batch";
    if (name.starts_with("batch_norm")) return "batch norm mixes the samples of all replicas";
  }
  return "";
}

Report compare_gradients(whale_engine* engine, const Sides& sides, const std::vector<Batch>& batches,
                         const SessionArguments& arguments, const GradientSum& sum, const Setting& setting,
                         const Tick& tick) {
  Report report;
  report.setting = setting;
  report.setting.runs = 1;
  report.subject = sum.adasum ? "gradients combined by Adasum" : "gradients summed in fewer bits";
  Gradients gradients(engine, sides, arguments, sum, report);
  for (size_t i = 0; i < batches.size() && report.failure.empty(); ++i) {
    tick(static_cast<int64_t>(i));
    gradients.step(batches[i], static_cast<int64_t>(i) + 1);
  }
  return report;
}

}  // namespace tool
