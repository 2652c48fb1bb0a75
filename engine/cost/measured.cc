#include "cost/measured.h"

#include <algorithm>
#include <cmath>

#include "base/format.h"
#include "base/philox.h"
#include "base/text.h"
#include "cluster/device_types.h"
#include "cost/cost.h"

namespace whale {
namespace {

constexpr size_t kMostOperands = 16;  // those of ops with more (updates of a bucket) are counted together
constexpr size_t kMostOfList = 8;     // numbers of an attribute that are written out

// What says where a part lies, or numbers a draw: it takes no time.
bool is_place(std::string_view attr) { return attr == kIndexLimit || attr.ends_with("key") || attr.ends_with("begin"); }

class ShapeWriter {
 public:
  explicit ShapeWriter(std::string_view op) { out_.key = op; }

  void operands(const std::vector<TensorType>& types, const std::vector<bool>& present) {
    out_.key += '(';
    if (types.size() > kMostOperands)
      together(types, present);
    else
      for (size_t i = 0; i < types.size(); ++i) {
        if (i > 0) out_.key += ", ";
        if (i < present.size() && !present[i]) {
          out_.key += '_';
          continue;
        }
        out_.key += fmt::format("{}:{}", name_of(types[i].dtype), types[i].dims.size());
        out_.numbers.insert(out_.numbers.end(), types[i].dims.begin(), types[i].dims.end());
      }
    out_.key += ')';
  }

  void attribute(const OpDef& def, const std::string& name, const Attr& value) {
    if (is_place(name)) return;
    if (const auto* flag = std::get_if<bool>(&value)) {
      if (*flag) out_.key += " " + name;
    } else if (const auto* number = std::get_if<int64_t>(&value)) {
      out_.numbers.push_back(*number);
    } else if (const auto* real = std::get_if<double>(&value)) {
      if (*real != 0) out_.key += fmt::format(" {}!=0", name);
    } else if (const auto* text = std::get_if<std::string>(&value)) {
      if (!text->empty() && *text != "none") out_.key += fmt::format(" {}={}", name, *text);
    } else if (const auto* list = std::get_if<Ints>(&value)) {
      if (role_of(def, name) != AttrRole::kOwn)
        out_.numbers.insert(out_.numbers.end(), list->begin(), list->end());
      else if (list->size() <= kMostOfList)
        out_.key += fmt::format(" {}=[{}]", name, fmt::join(*list, ","));
      else if (!together_)
        out_.key += fmt::format(" {}=#{:x}", name, hash_name(fmt::format("{}", fmt::join(*list, ","))));
    }
  }

  OpShape done(const OpCost& cost) {
    out_.cost = cost;
    return std::move(out_);
  }

 private:
  void together(const std::vector<TensorType>& types, const std::vector<bool>& present) {
    together_ = true;
    int64_t elements = 0;
    std::string_view dtype;
    for (size_t i = 0; i < types.size(); ++i) {
      if (i < present.size() && !present[i]) continue;
      elements += element_count(types[i].dims);
      if (types[i].dims.size() > 0) dtype = name_of(types[i].dtype);
    }
    out_.key += fmt::format("many {}", dtype);
    out_.numbers.push_back(elements);
  }

  OpShape out_;
  bool together_ = false;
};

// The op and the type of its first operand: what is alike in kind, whatever its shape.
std::string_view family_of(std::string_view key) { return key.substr(0, key.find_first_of(":,)", key.find('('))); }

// A key with all of its f32 operands in another type.
std::string in_type(const std::string& key, std::string_view type) {
  constexpr std::string_view kWide = "f32:";
  std::string out;
  for (size_t at = 0; at < key.size();) {
    const bool here = key.compare(at, kWide.size(), kWide) == 0 && at > 0 && (key[at - 1] == '(' || key[at - 1] == ' ');
    if (here)
      out += type, at += kWide.size();
    else
      out += key[at++];
  }
  return out;
}

// b as a multiple of a, where it is that in all places in which they differ; `mask`: these places. 0: it is not.
double multiple_of(const std::vector<int64_t>& a, const std::vector<int64_t>& b, std::vector<bool>& mask) {
  double multiple = 1;
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i] == b[i]) continue;
    if (a[i] <= 0 || b[i] <= 0) return 0;
    const double mine = static_cast<double>(b[i]) / static_cast<double>(a[i]);
    if (multiple != 1 && std::abs(mine / multiple - 1) > 1e-9) return 0;
    multiple = mine, mask[i] = true;
  }
  return multiple;
}

// So many times the arithmetic: a layer of twice the width is twice its sizes, and four times the work.
bool is_linear(const OpCost& one, const OpCost& other, double multiple) {
  constexpr double kNear = 0.05;
  return one.flops <= 0 || std::abs(other.flops / (one.flops * multiple) - 1) < kNear;
}

double work_seconds(const OpCost& cost, double flops_per_second, double bytes_per_second) {
  return std::max({cost.flops / flops_per_second, cost.bytes / bytes_per_second, 1e-12});
}

}  // namespace

OpShape shape_of(const OpView& op, const OpCost& cost) {
  const OpDef& d = def(op.code);
  ShapeWriter out(d.name);
  out.operands(op.inputs, op.present);
  out.operands(op.outputs, {});
  if (op.attrs != nullptr)
    for (const auto& [name, value] : *op.attrs) out.attribute(d, name, value);
  return out.done(cost);
}

OpShape shape_of(std::string_view verb, DType dtype, int64_t elements, const OpCost& cost) {
  ShapeWriter out(verb);
  out.operands({{dtype, {elements}}}, {});
  return out.done(cost);
}

std::string to_string(const MeasuredKind& kind) {
  if (!kind.type.empty()) return kind.type;
  if (kind.cores == 0) return kind.kind;
  return fmt::format("{} with {} core{}{}", kind.kind, kind.cores, kind.cores == 1 ? "" : "s",
                     kind.sharing > 1 ? fmt::format(" shared by {}", kind.sharing) : "");
}

MeasuredKind kind_of(const DeviceSpec& device, int64_t sharing) {
  MeasuredKind out{.kind = name_of(device.kind), .type = device.type};
  if (const DeviceType* type = device.type.empty() ? nullptr : find_device_type(device.type)) out.type = type->name;
  if (!out.type.empty() || !traits(device.kind).takes_cores) return out;
  out.cores = std::ssize(device.cores), out.sharing = sharing;
  return out;
}

MeasuredTimes::MeasuredTimes(std::vector<std::pair<double, double>> points) {
  std::ranges::sort(points);
  for (size_t k = 0; k < points.size();) {  // those of one multiple: their mean
    double sum = 0;
    size_t end = k;
    for (; end < points.size() && points[end].first <= points[k].first * (1 + 1e-9); ++end)
      sum += std::log(points[end].second);
    logarithms_.emplace_back(std::log(points[k].first), sum / static_cast<double>(end - k));
    k = end;
  }
}

double MeasuredTimes::at(double multiple) const {
  if (multiple <= 0) return 0;
  const double x = std::log(multiple);
  const auto& p = logarithms_;
  if (x >= p.back().first) return std::exp(p.back().second + x - p.back().first);
  if (x <= p.front().first) {
    const double slope = p.size() < 2 ? 1 : (p[1].second - p[0].second) / (p[1].first - p[0].first);
    return std::exp(p[0].second + std::clamp(slope, 0.0, 1.0) * (x - p[0].first));
  }
  const auto right = std::ranges::upper_bound(p, x, {}, [](const auto& each) { return each.first; });
  const auto left = right - 1;
  const double part = (x - left->first) / (right->first - left->first);
  return std::exp(left->second + part * (right->second - left->second));
}

void MeasuredDevice::index() {
  alike_.clear();
  for (const auto& [key, points] : ops)
    for (const MeasuredPoint& point : points) alike_[std::string(family_of(key))].push_back(&point);
}

std::optional<MeasuredTimes> MeasuredDevice::own(const OpShape& shape) const {
  auto at = ops.find(shape.key);
  // Before a plan has its precision an op is in f32; what ran may have been in 16 bits.
  for (const std::string_view half : {"bf16:", "f16:"})
    if (at == ops.end()) at = ops.find(in_type(shape.key, half));
  if (at == ops.end()) return std::nullopt;
  std::map<std::vector<bool>, std::vector<std::pair<double, double>>> groups;  // by the places that differ
  std::vector<std::pair<double, double>> same;
  for (const MeasuredPoint& point : at->second) {
    if (point.numbers.size() != shape.numbers.size()) continue;
    std::vector<bool> mask(shape.numbers.size());
    const double multiple = multiple_of(shape.numbers, point.numbers, mask);
    if (multiple == 1)
      same.emplace_back(1, point.seconds);
    else if (multiple > 0 && is_linear(shape.cost, point.cost, multiple))
      groups[mask].emplace_back(multiple, point.seconds);
  }
  // Of several ways to come from points to this shape the one with the most points, of equals that with the nearest.
  const auto nearness = [](const std::vector<std::pair<double, double>>& points) {
    double nearest = 1e300;
    for (const auto& [multiple, _] : points) nearest = std::min(nearest, std::abs(std::log(multiple)));
    return nearest;
  };
  std::vector<std::pair<double, double>> best;
  for (auto& [mask, points] : groups)
    if (points.size() > best.size() || (points.size() == best.size() && nearness(points) < nearness(best)))
      best = points;
  best.insert(best.end(), same.begin(), same.end());
  if (best.empty()) return std::nullopt;
  return MeasuredTimes(std::move(best));
}

std::optional<MeasuredTimes> MeasuredDevice::of(const OpShape& shape, double flops_per_second,
                                                double bytes_per_second) const {
  if (auto mine = own(shape)) return mine;
  auto at = alike_.find(family_of(shape.key));
  for (const std::string_view half : {"bf16:", "f16:"})
    if (at == alike_.end()) at = alike_.find(std::string(family_of(in_type(shape.key, half))));
  if (at == alike_.end()) return std::nullopt;
  const double mine = work_seconds(shape.cost, flops_per_second, bytes_per_second);
  std::vector<std::pair<double, double>> points;
  double most = 0;
  for (const MeasuredPoint* p : at->second) {
    const double work = work_seconds(p->cost, flops_per_second, bytes_per_second);
    points.emplace_back(work / mine, p->seconds), most = std::max(most, work);
  }
  // What took its start alone says nothing of much more work.
  constexpr double kTellsSeconds = 20e-6, kFarther = 2;
  if (most < kTellsSeconds && mine > kFarther * most) return std::nullopt;
  // Points of as much work, to a quarter: their mean. Shapes differ, and so do their times.
  std::ranges::sort(points);
  std::vector<std::pair<double, double>> merged;
  for (size_t k = 0; k < points.size();) {
    double x = 0, y = 0;
    size_t end = k;
    for (; end < points.size() && points[end].first <= points[k].first * 1.25; ++end)
      x += std::log(points[end].first), y += std::log(points[end].second);
    const auto n = static_cast<double>(end - k);
    merged.emplace_back(std::exp(x / n), std::exp(y / n));
    k = end;
  }
  for (size_t k = 1; k < merged.size(); ++k)  // more work is never faster
    merged[k].second = std::max(merged[k].second, merged[k - 1].second);
  return MeasuredTimes(std::move(merged));
}

double MeasuredDevice::passes(double samples) const {
  const MeasuredStep* nearest = nullptr;
  const auto distance = [&](const MeasuredStep& s) {
    return std::abs(std::log(static_cast<double>(s.samples) / std::max(samples, 1e-9)));
  };
  for (const MeasuredStep& s : steps)
    if (s.forward > 0 && s.backward > 0 && (nearest == nullptr || distance(s) < distance(*nearest))) nearest = &s;
  return nearest == nullptr ? 0 : 1 + nearest->backward / nearest->forward;
}

const MeasuredDevice* MeasuredProfile::of(const MeasuredKind& kind) const {
  for (const auto& device : devices)
    if (device->kind == kind) return device.get();
  return nullptr;
}

std::string MeasuredProfile::name() const {
  return path.empty() ? "the profile" : fmt::format("the profile '{}'", brief(path));
}

std::string MeasuredProfile::kinds() const {
  std::vector<std::string> names;
  for (const auto& device : devices) names.push_back(to_string(device->kind));
  return fmt::format("{}", fmt::join(names, ", "));
}

bool MeasuredProfile::of_ops() const {
  return std::ranges::any_of(devices, [](const auto& device) { return !device->ops.empty(); });
}

double seconds_in_parts(const OpView& op, const DeviceRates& rates, double parts) {
  const OpCost cost = cost_of(op);
  if (rates.measured != nullptr)
    if (const auto times = rates.measured->of(shape_of(op, cost), rates.flops_per_second, rates.bytes_per_second))
      return parts * times->at(1 / parts);
  return parts * op_seconds(cost, rates.curve != nullptr ? product_of(op, cost) : std::nullopt, rates, 1 / parts);
}

}  // namespace whale
