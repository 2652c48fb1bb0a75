#include "validate/sheets.h"

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "base/error.h"
#include "base/json.h"
#include "cluster/device_types.h"
#include "validate/csv.h"

namespace whale {

GpuSheet parse_gpu_sheet(const std::string& content, const std::string& path) {
  const Json json = Json::parse(content, nullptr, false);
  if (!json.is_object() || !json.contains("Device") || !json["Device"].is_string())
    throw invalid("{} is no data sheet: expected a JSON object with Device, Mem_Bw, Num_Sm, SingleFLOPs, L2Cache",
                  path);
  const auto figure = [&](const char* name) {
    const Json value = json.contains(name) ? json[name] : Json();
    const double number = value.is_number() ? value.get<double>() : 0;
    if (!(number > 0) || !std::isfinite(number) || number > 1e12)
      throw invalid("{}: {} is {}, expected a number above 0", path, name, text_of(value));
    return number;
  };
  const double flops = 1e9 * figure(json.contains("SingleFLOPs") ? "SingleFLOPs" : "SingleFLOPsMM");
  GpuSheet sheet;
  sheet.name = json["Device"].get<std::string>();
  sheet.flops_per_second = sheet.flops_per_second16 = flops;
  sheet.bytes_per_second = 1e9 * figure("Mem_Bw");
  sheet.processors = std::max<int64_t>(1, std::llround(std::min(figure("Num_Sm"), 1e6)));
  sheet.cache_bytes = std::max<int64_t>(1, std::llround(std::min(figure("L2Cache"), 1e9) * (1 << 20)));
  return sheet;
}

GpuSheet Curves::sheet_of(const std::string& gpu) const {
  if (const DeviceType* known = find_gpu(gpu)) return known->sheet;
  if (!folder_.empty()) {
    std::error_code failed;
    std::vector<std::string> paths;
    for (const auto& entry : std::filesystem::directory_iterator(folder_, failed))
      if (entry.path().extension() == ".json") paths.push_back(entry.path().string());
    if (failed) throw invalid("cannot read the folder of data sheets {}: {}", folder_, failed.message());
    std::ranges::sort(paths);
    for (const std::string& path : paths) {
      GpuSheet sheet = parse_gpu_sheet(read_measured(path), path);
      if (same_gpu(sheet.name, gpu)) return sheet;
    }
  }
  throw invalid(
      "no data sheet of the GPU '{}'; give a folder that has one as JSON (--profiles), with Device, Mem_Bw, "
      "Num_Sm, SingleFLOPs and L2Cache",
      gpu);
}

const DeviceCurve& Curves::of(const std::string& gpu) {
  const auto at = known_.find(gpu);
  return at != known_.end() ? at->second : known_.emplace(gpu, curve_of(sheet_of(gpu))).first->second;
}

std::vector<std::string> Curves::note_list() const {
  std::vector<std::string> out;
  for (const auto& [name, curve] : known_)
    if (!curve.note.empty()) out.push_back(curve.note);
  return out;
}

std::string Curves::notes() const {
  std::string out;
  for (const std::string& note : note_list()) out += note + "\n";
  return out;
}

}  // namespace whale
