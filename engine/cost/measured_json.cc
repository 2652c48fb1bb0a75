// Profiles of a model as JSON.
#include <algorithm>
#include <cmath>
#include <iterator>

#include "base/error.h"
#include "base/format.h"
#include "base/text.h"
#include "cluster/device_types.h"
#include "cost/measured.h"

namespace whale {
namespace {

constexpr double kMostFlops = 1e17;  // a second: beyond any device
constexpr double kMostBytes = 1e16;  // a second, also from caches
constexpr int64_t kMostCount = int64_t{1} << 50;
constexpr size_t kMostNumbers = 4096;

Error bad(const std::string& where, const std::string& what) { return invalid("profile: {} {}", where, what); }

const Json& member(const Json& from, const char* name, const std::string& where) {
  if (!from.is_object() || !from.contains(name)) throw bad(where, fmt::format("has no '{}'", name));
  return from[name];
}
const Json& list(const Json& from, const char* name, const std::string& where) {
  const Json& out = member(from, name, where);
  if (!out.is_array()) throw bad(where, fmt::format("has a '{}' that is no list", name));
  return out;
}
std::string text(const Json& from, const char* name, const std::string& where) {
  const Json& out = member(from, name, where);
  if (!out.is_string()) throw bad(where, fmt::format("has a '{}' that is no text", name));
  return out.get<std::string>();
}
std::string text_or_none(const Json& from, const char* name, const std::string& where) {
  return from.is_object() && from.contains(name) ? text(from, name, where) : std::string();
}
int64_t count(const Json& from, const char* name, const std::string& where, int64_t least) {
  const Json& out = member(from, name, where);
  if (!out.is_number_integer() || out.get<int64_t>() < least || out.get<int64_t>() > kMostCount)
    throw bad(where, fmt::format("has '{}' {}, expected a whole number from {}", name, brief(out.dump()), least));
  return out.get<int64_t>();
}
double number(const Json& from, const char* name, const std::string& where) {
  const Json& out = member(from, name, where);
  if (!out.is_number() || !(out.get<double>() >= 0) || !std::isfinite(out.get<double>()))
    throw bad(where, fmt::format("has '{}' {}, expected a number from 0", name, brief(out.dump())));
  return out.get<double>();
}
// `zero`: of something that may not be there at all.
double seconds(const Json& from, const char* name, const std::string& where, bool zero) {
  const Json& out = member(from, name, where);
  const bool is = out.is_number();
  const double mine = is ? out.get<double>() : NAN;
  if (!(zero ? mine >= 0 : mine > 0) || mine > kMostMeasuredSeconds)
    throw bad(where, fmt::format("has '{}' {}, expected seconds {} 0, at most {} (a day)", name, brief(out.dump()),
                                 zero ? "from" : "above", kMostMeasuredSeconds));
  return mine;
}

// What somebody has added by hand, and nobody would look at.
void no_other_unit(const Json& from, const std::string& where) {
  for (const char* name : {"unit", "time_unit"})
    if (from.is_object() && from.contains(name) && from[name] != "s")
      throw bad(where,
                fmt::format("has '{}' {}, expected \"s\": all times are in seconds", name, brief(from[name].dump())));
}

MeasuredPoint read_point(const Json& from, const std::string& where) {
  no_other_unit(from, where);
  MeasuredPoint out;
  const Json& numbers = list(from, "numbers", where);
  if (numbers.size() > kMostNumbers) throw bad(where, "has too many numbers");
  for (const Json& n : numbers) {
    if (!n.is_number_integer() || std::abs(n.get<double>()) > static_cast<double>(kMostCount))
      throw bad(where, fmt::format("has the number {}, expected a whole one", brief(n.dump())));
    out.numbers.push_back(n.get<int64_t>());
  }
  out.seconds = seconds(from, "seconds", where, false);
  out.cost = {number(from, "flops", where), number(from, "bytes", where)};
  out.samples = from.contains("samples") ? count(from, "samples", where, 0) : 0;
  if (out.cost.flops > kMostFlops * out.seconds || out.cost.bytes > kMostBytes * out.seconds)
    throw bad(where,
              fmt::format("says that {:g} FLOPs and {:g} bytes take {:g} seconds, which no device does; its times "
                          "are not in seconds",
                          out.cost.flops, out.cost.bytes, out.seconds));
  return out;
}

MeasuredStep read_step(const Json& from, const std::string& where) {
  return {.samples = count(from, "samples", where, 1),
          .forward = seconds(from, "forward", where, true),
          .backward = seconds(from, "backward", where, true),
          .update = seconds(from, "update", where, true),
          .step = seconds(from, "step", where, false)};
}

MeasuredLayers read_layers(const Json& from, const std::string& where) {
  no_other_unit(from, where);
  MeasuredLayers out{.ways = count(from, "ways", where, 1), .samples = count(from, "samples", where, 1), .layers = {}};
  for (const Json& each : list(from, "times", where))
    out.layers.push_back({.forward = seconds(each, "forward", where, true),
                          .backward = seconds(each, "backward", where, true),
                          .update = seconds(each, "update", where, true)});
  double all = 0;
  for (const MeasuredLayer& layer : out.layers) all += layer.forward;
  if (out.layers.size() < 3 || all <= 0)
    throw bad(where, "has no times of layers; expected the embedding, blocks and the head");
  return out;
}

std::unique_ptr<MeasuredDevice> read_device(const Json& from, const std::string& where) {
  no_other_unit(from, where);
  auto out = std::make_unique<MeasuredDevice>();
  out->kind = {.kind = text(from, "kind", where),
               .type = text_or_none(from, "type", where),
               .cores = from.contains("cores") ? count(from, "cores", where, 0) : 0,
               .sharing = from.contains("sharing") ? count(from, "sharing", where, 1) : 1};
  if (std::ranges::find(kDeviceKinds, out->kind.kind, [](const DeviceTraits& t) { return std::string(t.name); }) ==
      std::end(kDeviceKinds))
    throw bad(where, fmt::format("has kind '{}', expected one of devices: cpu, ref, cuda, or null with a type",
                                 brief(out->kind.kind)));
  if (!out->kind.type.empty()) {
    const DeviceType* type = find_device_type(out->kind.type);
    if (type == nullptr) throw bad(where, "has a type of which nothing is known: " + no_device_type(out->kind.type));
    out->kind.type = type->name;
  }
  out->device = text_or_none(from, "device", where);
  out->description = text_or_none(from, "description", where);
  if (from.contains("ops"))
    for (const Json& op : list(from, "ops", where)) {
      no_other_unit(op, where + ", an op");
      const std::string key = text(op, "op", where + ", an op");
      std::vector<MeasuredPoint>& points = out->ops[key];
      for (const Json& point : list(op, "points", where + ", " + brief(key)))
        points.push_back(read_point(point, where + ", a point of " + brief(key)));
    }
  std::erase_if(out->ops, [](const auto& op) { return op.second.empty(); });
  if (from.contains("steps"))
    for (const Json& step : list(from, "steps", where)) out->steps.push_back(read_step(step, where + ", a step"));
  if (from.contains("layers"))
    for (const Json& layers : list(from, "layers", where))
      out->layers.push_back(read_layers(layers, where + ", layers"));
  if (out->ops.empty() && out->layers.empty()) throw bad(where, "is empty: it has neither ops nor layers");
  out->index();
  return out;
}

Json json_of(const MeasuredDevice& d) {
  Json out{{"device", d.device}, {"kind", d.kind.kind}};
  if (!d.kind.type.empty()) out["type"] = d.kind.type;
  if (d.kind.cores > 0) out["cores"] = d.kind.cores, out["sharing"] = d.kind.sharing;
  if (!d.description.empty()) out["description"] = d.description;
  if (!d.steps.empty()) out["steps"] = Json::array();
  for (const MeasuredStep& s : d.steps)
    out["steps"].push_back({{"samples", s.samples},
                            {"forward", s.forward},
                            {"backward", s.backward},
                            {"update", s.update},
                            {"step", s.step}});
  if (!d.layers.empty()) out["layers"] = Json::array();
  for (const MeasuredLayers& l : d.layers) {
    Json times = Json::array();
    for (const MeasuredLayer& each : l.layers)
      times.push_back({{"forward", each.forward}, {"backward", each.backward}, {"update", each.update}});
    out["layers"].push_back({{"ways", l.ways}, {"samples", l.samples}, {"times", std::move(times)}});
  }
  if (!d.ops.empty()) out["ops"] = Json::array();
  for (const auto& [key, points] : d.ops) {
    Json all = Json::array();
    for (const MeasuredPoint& p : points) {
      Json each = Json::object();
      if (p.samples > 0) each["samples"] = p.samples;
      each["seconds"] = p.seconds, each["flops"] = p.cost.flops, each["bytes"] = p.cost.bytes;
      each["numbers"] = p.numbers;
      all.push_back(std::move(each));
    }
    out["ops"].push_back({{"op", key}, {"points", std::move(all)}});
  }
  return out;
}

}  // namespace

Json json_of(const MeasuredProfile& profile) {
  Json devices = Json::array();
  for (const auto& device : profile.devices) devices.push_back(json_of(*device));
  Json out{{"schema", kProfileSchema},
           {"units", {{"seconds", "s"}, {"flops", "1"}, {"bytes", "B"}, {"samples", "1"}}},
           {"devices", std::move(devices)}};
  if (!profile.model.empty() || !profile.digest.empty())
    out["model"] = {{"name", profile.model}, {"digest", profile.digest}};
  return out;
}

std::shared_ptr<MeasuredProfile> measured_of(const Json& json) {
  if (!json.is_object() || !json.contains("schema")) return nullptr;
  const std::string schema = text(json, "schema", "the file");
  if (schema != kProfileSchema)
    throw bad("the file", fmt::format("has schema '{}', expected '{}'; measure again with this libwhale", brief(schema),
                                      kProfileSchema));
  const Json& units = member(json, "units", "the file");
  if (text(units, "seconds", "its units") != "s")
    throw bad("the file", fmt::format("has times in '{}', expected 's': seconds", brief(text(units, "seconds", ""))));
  constexpr std::pair<const char*, const char*> kUnits[] = {{"flops", "1"}, {"bytes", "B"}, {"samples", "1"}};
  for (const auto& [name, unit] : kUnits)
    if (units.contains(name) && text(units, name, "its units") != unit)
      throw bad("the file", fmt::format("has {} in '{}', expected '{}'", name, brief(text(units, name, "")), unit));
  no_other_unit(json, "the file");
  auto out = std::make_shared<MeasuredProfile>();
  if (json.contains("model"))
    out->model = text(json["model"], "name", "its model"), out->digest = text(json["model"], "digest", "its model");
  const Json& devices = list(json, "devices", "the file");
  for (size_t d = 0; d < devices.size(); ++d) {
    auto device = read_device(devices[d], fmt::format("device {}", d));
    if (out->of(device->kind) != nullptr)
      throw bad("the file", fmt::format("has {} twice", brief(to_string(device->kind))));
    out->devices.push_back(std::move(device));
  }
  if (out->devices.empty()) throw bad("the file", "is empty: it has no devices");
  return out;
}

}  // namespace whale
