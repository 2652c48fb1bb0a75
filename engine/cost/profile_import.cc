#include "cost/profile_import.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <optional>
#include <regex>

#include "base/error.h"
#include "base/file.h"
#include "base/json_input.h"
#include "base/text.h"
#include "cluster/device_types.h"
#include "cost/plausible.h"

namespace whale {
namespace {

constexpr size_t kMostBytes = 256 << 20;
// Of a layer's time, where a file has forward and backward together: a backward pass is two products for one.
constexpr double kForwardShare = 1.0 / 3;

std::string content_of(const std::string& path) { return InputFile(path).text(kMostBytes, "it is no profile"); }

Error none(const std::string& path, const std::string& what) {
  return invalid(
      "'{}' {}; expected Sailor's profile.json ({{\"micro-batch\": {{\"ways\": {{\"layer\": [forward, backward, "
      "update]}}}}}}), "
      "Metis's DeviceType.NAME_tpN_bsN.json, or a table with the columns op, gpu, B, M, N, K, H, ms",
      brief(path), what);
}

// The type of the table that a name stands for: "A100-40", "NVIDIA A100-PCIE-40GB", "Tesla T4".
const DeviceType* type_of(std::string_view name) {
  if (const DeviceType* type = find_device_type(name)) return type;
  std::string upper;
  for (const char c : name)
    upper += c == ' ' || c == '_' ? '-' : static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  upper = '-' + upper + '-';
  for (const DeviceType& type : device_types()) {
    bool all = true;
    const std::string_view whole = type.name;
    for (size_t at = 0; at <= whole.size();) {
      const size_t end = std::min(whole.find('-', at), whole.size());
      all &= upper.find(fmt::format("-{}-", whole.substr(at, end - at))) != std::string::npos;
      at = end + 1;
    }
    if (all) return &type;
  }
  return nullptr;
}

const DeviceType& need_type(const std::string& given, const std::string& named, const std::string& path) {
  const std::string& name = given.empty() ? named : given;
  if (const DeviceType* type = type_of(name)) return *type;
  if (name.empty())
    throw invalid("'{}': nothing says whose times these are; give a device type with --devices, such as V100-32GB",
                  brief(path));
  throw invalid("'{}': {}; give one with --devices", brief(path), no_device_type(name));
}

int64_t whole(const std::string& text, const std::string& path, const char* what) {
  int64_t out = 0;
  const auto [end, bad] = std::from_chars(text.data(), text.data() + text.size(), out);
  if (bad != std::errc() || end != text.data() + text.size() || out < 1 || out > (1 << 30))
    throw none(path, fmt::format("has '{}' where a {} was expected", brief(text), what));
  return out;
}

double seconds_of(const Json& from, double unit, const std::string& path) {
  const double out = from.is_number() ? from.get<double>() * unit : NAN;
  if (!(out >= 0 && out <= kMostMeasuredSeconds))
    throw none(path, fmt::format("has a layer's time of {}, expected {}", brief(from.dump()),
                                 unit == 1 ? "seconds" : "milliseconds"));
  return out;
}

// Sailor's: keys are numbers, the leaves three numbers.
MeasuredLayers sailor_layers(const Json& from, const std::string& path) {
  MeasuredLayers out;
  std::map<int64_t, MeasuredLayer> layers;
  for (const auto& [number, times] : from.items()) {
    if (!times.is_array() || times.size() != 3) throw none(path, "has a layer without forward, backward and update");
    layers[number == "0" ? 0 : whole(number, path, "layer's number")] = {
        seconds_of(times[0], 1, path), seconds_of(times[1], 1, path), seconds_of(times[2], 1, path)};
  }
  int64_t next = 0;
  for (const auto& [number, layer] : layers) {
    if (number != next++) throw none(path, fmt::format("has no layer {}", next - 1));
    out.layers.push_back(layer);
  }
  return out;
}

void add_sailor(const Json& json, const std::string& path, MeasuredDevice& to) {
  for (const auto& [samples, by_ways] : json.items()) {
    if (!by_ways.is_object()) throw none(path, "is another JSON");
    for (const auto& [ways, layers] : by_ways.items()) {
      if (!layers.is_object()) throw none(path, "is another JSON");
      MeasuredLayers mine = sailor_layers(layers, path);
      mine.samples = whole(samples, path, "micro-batch"), mine.ways = whole(ways, path, "number of ways");
      to.layers.push_back(std::move(mine));
    }
  }
}

void add_metis(const Json& json, const std::string& path, int64_t ways, int64_t samples, MeasuredDevice& to) {
  MeasuredLayers out{.ways = ways, .samples = samples, .layers = {}};
  const Json none_there = Json::object();
  const Json& times = json.contains("execution_time") ? json["execution_time"] : none_there;
  if (!times.contains("layer_compute_total_ms") || !times["layer_compute_total_ms"].is_array())
    throw none(path, "has no execution_time.layer_compute_total_ms");
  for (const Json& each : times["layer_compute_total_ms"]) {
    const double all = seconds_of(each, 1e-3, path);
    out.layers.push_back({all * kForwardShare, all * (1 - kForwardShare), 0});
  }
  to.layers.push_back(std::move(out));
}

struct MetisName {
  std::string device;
  int64_t ways = 1, samples = 1;
};
std::optional<MetisName> metis_name(const std::string& path) {
  static const std::regex form(R"(DeviceType\.(.+)_tp(\d{1,6})_bs(\d{1,6})\.json)");
  const std::string name = std::filesystem::path(path).filename().string();
  std::smatch found;
  if (!std::regex_match(name, found, form)) return std::nullopt;
  return MetisName{found[1], whole(found[2], path, "number of ways"), whole(found[3], path, "batch size")};
}

std::vector<std::string> cells_of(const std::string& line) {
  std::vector<std::string> out(1);
  for (const char c : line) {
    if (c == ',')
      out.emplace_back();
    else if (c != '\r')
      out.back() += c;
  }
  return out;
}

void check(MeasuredProfile& profile, const std::string& path) {
  try {
    check_plausible(profile, nullptr);
  } catch (const Error& e) {
    throw Error(e.code(), fmt::format("'{}': {}", brief(path), e.message()));
  }
}

struct TableRow {
  std::string op, gpu;
  int64_t b = 0, m = 0, n = 0, k = 0, h = 0;
  double seconds = 0;
};

// The table's N is the inner dimension of a product, its K the columns of the result.
std::optional<OpView> view_of(const TableRow& row, Attrs& attrs) {
  OpView out;
  const auto put = [&](const char* op, const std::vector<Dims>& dims, size_t operands) {
    const OpDef* d = find_op(op);
    if (d == nullptr) return false;
    out.code = code_of(op);
    attrs = complete_attrs(*d, {});
    out.attrs = &attrs;
    for (size_t i = 0; i < operands; ++i) {
      out.present.push_back(i < dims.size());
      out.inputs.push_back({DType::kF32, i < dims.size() ? dims[i] : Dims{}});
    }
    out.outputs = infer(out.code, attrs, out.inputs, out.present);
    return true;
  };
  bool known = false;
  if (row.op == "linear")
    known = put("matmul", {{row.b, row.m, row.n}, {row.n, row.k}, {row.k}}, 3);
  else if (row.op == "bmm")
    known = put("matmul", {{row.b, row.m, row.n}, {row.b, row.n, row.k}}, 3);
  else if (row.op == "softmax")
    known = put("softmax", {{row.b, row.h}}, 1);
  else if (row.op == "ln")
    known = put("layer_norm", {{row.b, row.h}, {row.h}, {row.h}}, 3);
  if (!known) return std::nullopt;
  return out;
}

std::shared_ptr<MeasuredProfile> import_table(const std::string& text, const std::string& path,
                                              const std::string& device) {
  std::map<std::string, size_t> columns;
  std::map<std::string, std::unique_ptr<MeasuredDevice>> devices;  // by type
  size_t begin = 0, line_number = 0;
  while (begin < text.size()) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    const std::vector<std::string> cells = cells_of(text.substr(begin, end - begin));
    begin = end + 1;
    if (line_number++ == 0) {
      for (size_t c = 0; c < cells.size(); ++c) columns[cells[c]] = c;
      continue;
    }
    if (cells.size() == 1 && cells[0].empty()) continue;
    if (cells.size() != columns.size())
      throw none(path, fmt::format("has a line {} of {} cells", line_number, cells.size()));
    const auto cell = [&](const char* name) { return cells[columns.at(name)]; };
    const auto size = [&](const char* name) {
      return cell(name).empty() ? int64_t{1} : whole(cell(name), path, "size");
    };
    TableRow row{cell("op"), cell("gpu"), size("B"), size("M"), size("N"), size("K"), size("H"), 0};
    const DeviceType* type = device.empty() ? type_of(row.gpu) : type_of(device);
    if (type == nullptr) {
      if (!device.empty()) need_type(device, "", path);
      continue;  // of a GPU that plans do not know
    }
    const std::string ms = cell("ms");
    const auto [stop, bad] = std::from_chars(ms.data(), ms.data() + ms.size(), row.seconds);
    row.seconds *= 1e-3;
    if (bad != std::errc() || stop != ms.data() + ms.size() ||
        !(row.seconds > 0 && row.seconds <= kMostMeasuredSeconds))
      throw none(path,
                 fmt::format("has a line {} with ms '{}', expected milliseconds above 0", line_number, brief(ms)));
    Attrs attrs;
    const std::optional<OpView> view = view_of(row, attrs);
    if (!view) continue;
    auto& to = devices[type->name];
    if (!to)
      to = std::make_unique<MeasuredDevice>(), to->kind = {.kind = "null", .type = type->name}, to->device = type->name;
    const OpShape shape = shape_of(*view, cost_of(*view));
    to->ops[shape.key].push_back({shape.numbers, row.seconds, shape.cost, 0});
  }
  auto out = std::make_shared<MeasuredProfile>();
  for (auto& [_, each] : devices) each->index(), out->devices.push_back(std::move(each));
  if (out->devices.empty()) throw none(path, "has no op of a device type that plans know");
  check(*out, path);
  return out;
}

}  // namespace

std::shared_ptr<const MeasuredProfile> import_profile(const std::string& path, const std::string& device) {
  std::vector<std::string> files;
  std::error_code failed;
  if (std::filesystem::is_directory(path, failed)) {
    for (const auto& entry : std::filesystem::directory_iterator(path, failed))
      if (metis_name(entry.path().string())) files.push_back(entry.path().string());
    if (files.empty()) throw none(path, "is a folder without files of Metis's names");
    std::ranges::sort(files);
  } else {
    files.push_back(path);
  }
  auto out = std::make_shared<MeasuredProfile>();
  const auto device_of = [&](const DeviceType& type) -> MeasuredDevice& {
    for (auto& each : out->devices)
      if (each->kind.type == type.name) return *each;
    out->devices.push_back(std::make_unique<MeasuredDevice>());
    out->devices.back()->kind = {.kind = "null", .type = type.name};
    out->devices.back()->device = type.name;
    return *out->devices.back();
  };
  for (const std::string& file : files) {
    const std::string text = content_of(file);
    const std::string first = text.substr(0, text.find('\n'));
    if (files.size() == 1 && first.find("gpu") != std::string::npos && first.find("ms") != std::string::npos &&
        first.find(',') != std::string::npos && first[0] != '{')
      return import_table(text, file, device);
    Json json;
    try {
      json = parse_json(text);
    } catch (const Error& e) {
      throw none(file, "is neither JSON nor such a table: " + brief(e.message()));
    }
    if (!json.is_object() || json.empty()) throw none(file, "is neither JSON nor such a table");
    if (const auto name = metis_name(file)) {
      add_metis(json, file, name->ways, name->samples, device_of(need_type(device, name->device, file)));
      continue;
    }
    const std::string folder = std::filesystem::absolute(file).parent_path().filename().string();
    MeasuredDevice mine;
    add_sailor(json, file, mine);
    device_of(need_type(device, type_of(folder) != nullptr ? folder : "", file)).layers = std::move(mine.layers);
  }
  check(*out, path);
  for (auto& each : out->devices) {
    each->index();
    for (const MeasuredLayers& layers : each->layers)
      if (layers.layers.size() < 3 || layers.layers.size() != each->layers[0].layers.size())
        throw none(path,
                   "has other numbers of layers for other sizes, or fewer than the embedding, a block and the head");
  }
  return out;
}

}  // namespace whale
