// The engine: back ends and the table of ops.
#include "base/json.h"
#include "cost/profile_import.h"
#include "guard.h"
#include "handles.h"
#include "ops/op.h"
#include "probe/probe.h"
#include "validate/validate.h"

using namespace whale;        // NOLINT
using namespace whale::capi;  // NOLINT

namespace {

constexpr const char* kAttrTypes[] = {"int", "float", "bool", "string", "ints", "floats"};  // as AttrType
constexpr const char* kPortKinds[] = {"one", "optional", "variadic"};                       // as PortKind

struct FlagName {
  OpFlag flag;
  const char* name;
};
constexpr FlagName kFlags[] = {{kElementwise, "elementwise"}, {kRandom, "random"},   {kOffsetAware, "offset_aware"},
                               {kCollective, "collective"},   {kUpdateOp, "update"}, {kNoGradient, "no_gradient"},
                               {kInternal, "internal"}};

Json json_of(const std::vector<PortSpec>& ports) {
  Json out = Json::array();
  for (const PortSpec& p : ports)
    out.push_back({{"name", p.name}, {"kind", kPortKinds[static_cast<size_t>(p.kind)]}, {"doc", p.doc}});
  return out;
}

Json json_of(OpCode code) {
  const OpDef& d = def(code);
  Json flags = Json::array(), attributes = Json::array();
  for (const FlagName& f : kFlags)
    if ((d.flags & f.flag) != 0) flags.push_back(f.name);
  for (const AttrSpec& a : d.attrs) {
    Json each{{"name", a.name}, {"type", kAttrTypes[static_cast<size_t>(a.type)]}, {"required", a.required}};
    if (!a.required) each["default"] = std::visit([](const auto& v) { return json_value(v); }, a.fallback);
    each["doc"] = a.doc;
    attributes.push_back(std::move(each));
  }
  return {{"name", d.name},
          {"number", static_cast<int32_t>(code)},
          {"doc", d.doc == nullptr ? "" : d.doc},
          {"flags", flags},
          {"differentiable", d.gradient != nullptr},
          {"inputs", json_of(d.inputs)},
          {"outputs", json_of(d.outputs)},
          {"attributes", attributes}};
}

struct BackendLine {
  const char* name;
  bool available = false;
  std::string text;
};

std::vector<BackendLine> backend_lines(Backends& backends) {
  std::vector<BackendLine> out;
  for (const DeviceKind kind :
       {DeviceKind::kCpu, DeviceKind::kRef, DeviceKind::kLag, DeviceKind::kLagCpu, DeviceKind::kNull}) {
    BackendLine line{name_of(kind), false, {}};
    try {
      line.text = backends.get(kind).describe();
      line.available = true;
    } catch (const Error& e) {
      line.text = e.message();
    }
    out.push_back(std::move(line));
  }
  return out;
}

}  // namespace

whale_status* whale_engine_create(const whale_engine_options* options, whale_engine** out) {
  return guard([&] {
    need(out, "out");
    const whale_engine_options o = capi::options(options, whale_engine_options WHALE_ENGINE_OPTIONS_INIT, "options");
    auto engine = std::make_unique<whale_engine>();
    engine->backends = std::make_shared<Backends>(text(o.library_dir, "options.library_dir"));
    engine->leases = std::make_shared<CoreLeases>();
    engine->limits = read_limits(o);
    engine->log = std::make_shared<Log>();
    *out = engine.release();
  });
}

void whale_engine_release(whale_engine* engine) { delete engine; }

whale_status* whale_engine_devices(whale_engine* engine, whale_text* out) {
  return guard([&] {
    need(engine, "engine");
    need(out, "out");
    std::string lines;
    for (const BackendLine& line : backend_lines(*engine->backends))
      lines += fmt::format("{:<7} {:<12} {}\n", line.name, line.available ? "available" : "unavailable", line.text);
    *out = make_text(lines);
  });
}

whale_status* whale_engine_devices_json(whale_engine* engine, whale_text* out) {
  return guard([&] {
    need(engine, "engine");
    need(out, "out");
    Json rows = Json::array();
    for (const BackendLine& line : backend_lines(*engine->backends))
      rows.push_back({{"name", line.name}, {"available", line.available}, {"text", line.text}});
    *out = make_text(text_of(rows));
  });
}

whale_status* whale_engine_probe_json(whale_engine* engine, const whale_cluster* cluster, whale_world* world,
                                      whale_cancel* cancel, whale_text* out) {
  return guard([&] {
    ProbeOptions options;
    options.leases = need(engine, "engine").leases;
    const std::vector<DeviceSpec>& devices = need(cluster, "cluster").devices;
    need(out, "out");
    if (world != nullptr) options.world = world->worlds->next();
    options.cancel = cancel == nullptr ? nullptr : &cancel->cancel->flag();
    *out = make_text(text_of(probe(*engine->backends, devices, options).json()));
  });
}

whale_status* whale_engine_validate_json(whale_engine* engine, whale_str path, whale_str form, whale_str profiles,
                                         whale_text* out) {
  return guard([&] {
    need(engine, "engine");
    need(out, "out");
    const ValidateOptions options{.form = text(form, "form"), .profiles = text(profiles, "profiles")};
    *out = make_text(text_of(validate(nonempty(path, "path"), options)));
  });
}

whale_status* whale_engine_profile_import_json(whale_engine* engine, whale_str path, whale_str device,
                                               whale_text* out) {
  return guard([&] {
    need(engine, "engine");
    need(out, "out");
    *out = make_text(text_of(json_of(*import_profile(nonempty(path, "path"), text(device, "device")))));
  });
}

whale_status* whale_engine_ops_json(whale_engine* engine, whale_text* out) {
  return guard([&] {
    need(engine, "engine");
    need(out, "out");
    Json rows = Json::array();
    for (const OpCode code : all_ops()) rows.push_back(json_of(code));
    *out = make_text(text_of(rows));
  });
}
