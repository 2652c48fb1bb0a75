// The engine: back ends and the table of ops.
#include "guard.h"
#include "handles.h"
#include "json.h"
#include "ops/op.h"

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

void write_value(Json& json, const Attr& attr) {
  std::visit([&json](const auto& v) { json.value(v); }, attr);
}

void write_ports(Json& json, const char* key, const std::vector<PortSpec>& ports) {
  json.key(key).open('[');
  for (const PortSpec& p : ports) {
    json.open('{')
        .field("name", p.name)
        .field("kind", kPortKinds[static_cast<size_t>(p.kind)])
        .field("doc", p.doc)
        .close('}');
  }
  json.close(']');
}

void write_op(Json& json, OpCode code) {
  const OpDef& d = def(code);
  json.open('{')
      .field("name", d.name)
      .field("number", static_cast<int32_t>(code))
      .field("doc", d.doc == nullptr ? "" : d.doc);
  json.key("flags").open('[');
  for (const FlagName& f : kFlags) {
    if ((d.flags & f.flag) != 0) json.value(f.name);
  }
  json.close(']');
  json.field("differentiable", d.gradient != nullptr);
  write_ports(json, "inputs", d.inputs);
  write_ports(json, "outputs", d.outputs);
  json.key("attributes").open('[');
  for (const AttrSpec& a : d.attrs) {
    json.open('{')
        .field("name", a.name)
        .field("type", kAttrTypes[static_cast<size_t>(a.type)])
        .field("required", a.required);
    if (!a.required) write_value(json.key("default"), a.fallback);
    json.field("doc", a.doc).close('}');
  }
  json.close(']').close('}');
}

struct BackendLine {
  const char* name;
  bool available = false;
  std::string text;
};

std::vector<BackendLine> backend_lines(Backends& backends) {
  std::vector<BackendLine> out;
  for (const DeviceKind kind : {DeviceKind::kCpu, DeviceKind::kRef, DeviceKind::kNull}) {
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
    *out = engine.release();
  });
}

void whale_engine_release(whale_engine* engine) { delete engine; }

whale_status* whale_engine_devices(whale_engine* engine, int32_t json, whale_text* out) {
  return guard([&] {
    need(engine, "engine");
    need(out, "out");
    const bool as_json = flag(json, "json");
    Json j;
    std::string lines;
    j.open('[');
    for (const BackendLine& line : backend_lines(*engine->backends)) {
      j.open('{').field("name", line.name).field("available", line.available).field("text", line.text).close('}');
      lines += fmt::format("{:<5} {:<12} {}\n", line.name, line.available ? "available" : "unavailable", line.text);
    }
    j.close(']');
    *out = make_text(as_json ? j.text() : lines);
  });
}

whale_status* whale_engine_ops(whale_engine* engine, whale_text* out) {
  return guard([&] {
    need(engine, "engine");
    need(out, "out");
    Json json;
    json.open('[');
    for (const OpCode code : all_ops()) write_op(json, code);
    json.close(']');
    *out = make_text(json.text());
  });
}
