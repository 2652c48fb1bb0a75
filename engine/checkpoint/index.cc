#include "checkpoint/index.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "base/crc32c.h"
#include "base/error.h"
#include "base/version.h"
#include "checkpoint/shards.h"
#include "ir/learning_rate.h"

namespace whale {
namespace {

using Json = nlohmann::json;

constexpr std::string_view kBegin = "{\n  \"format\": ";
constexpr std::string_view kSum = ",\n  \"crc32c\": \"", kEnd = "\"\n}\n";
constexpr size_t kDigits = 8;

std::string hex(uint32_t crc) { return fmt::format("{:08x}", crc); }

// The text of an index with the digits of its own checksum as zeros; empty: it does not end as an index does.
std::string with_zeros(std::string text) {
  const size_t tail = kSum.size() + kDigits + kEnd.size();
  if (text.size() < tail || !text.ends_with(kEnd) || text.compare(text.size() - tail, kSum.size(), kSum) != 0)
    return {};
  text.replace(text.size() - kEnd.size() - kDigits, kDigits, kDigits, '0');
  return text;
}

std::string seal(const std::string& text) {  // `text` ends with the zeros
  std::string out = text;
  out.replace(out.size() - kEnd.size() - kDigits, kDigits, hex(crc32c(text.data(), text.size())));
  return out;
}

// Reads values by key, each checked, each failure a data_loss with its key.
class Reader {
 public:
  Reader(const std::string& path, const Json& json) : path_(path), json_(json) {
    if (json_.is_object()) return;
    throw error(Code::kDataLoss, "'{}' is damaged or not the index of a checkpoint: a JSON object was expected", path_);
  }
  [[noreturn]] void bad(std::string_view what) const {
    throw error(Code::kDataLoss, "'{}' is damaged or not the index of a checkpoint: it has no valid {}", path_, what);
  }
  bool has(const char* key) const { return json_.contains(key) && !json_[key].is_null(); }
  uint64_t natural(const char* key) const {
    if (!json_.contains(key) || !json_[key].is_number_unsigned()) bad(key);
    return json_[key].get<uint64_t>();
  }
  double real(const char* key) const {
    if (!json_.contains(key) || !json_[key].is_number()) bad(key);
    return json_[key].get<double>();
  }
  template <class T>
  void at_most(T value, T most, std::string_view what) const {
    if (value <= most) return;
    throw error(Code::kDataLoss, "'{}' is damaged or not the index of a checkpoint: its {} is {}, expected 0 to {}",
                path_, what, value, most);
  }
  std::string text(const char* key) const {
    if (!json_.contains(key) || !json_[key].is_string()) bad(key);
    return json_[key].get<std::string>();
  }
  uint32_t checksum(const std::string& key) const {
    const std::string digits = text(key.c_str());
    if (digits.size() != kDigits || digits.find_first_not_of("0123456789abcdef") != std::string::npos) bad(key);
    return static_cast<uint32_t>(std::stoul(digits, nullptr, 16));
  }
  Reader object(const std::string& key) const {
    if (!json_.contains(key) || !json_[key].is_object()) bad(key);
    return {path_, json_[key]};
  }
  Dims dims(const char* key) const {
    if (!json_.contains(key) || !json_[key].is_array()) bad(key);
    constexpr int64_t kMostElements = INT64_MAX / 16;
    Dims out;
    int64_t elements = 1;
    for (const Json& extent : json_[key]) {
      if (!extent.is_number_unsigned() || extent.get<uint64_t>() > uint64_t{kMostElements}) bad(key);
      out.push_back(extent.get<int64_t>());
      if (out.back() > 0 && elements > kMostElements / out.back()) bad(key);
      elements *= std::max<int64_t>(out.back(), 1);
    }
    return out;
  }
  template <class F>
  void each(F&& f) const {
    for (const auto& [key, value] : json_.items()) f(key);
  }

 private:
  const std::string& path_;
  const Json& json_;
};

CheckpointMeta read_meta(const Reader& r) {
  CheckpointMeta meta;
  meta.model = r.text("model");
  meta.seed = r.natural("seed");
  const uint64_t iteration = r.natural("iteration"), updates = r.natural("updates");
  r.at_most(iteration, uint64_t{kMostIterations}, "iteration");
  if (updates > iteration) r.bad("updates");
  meta.iteration = static_cast<int64_t>(iteration);
  meta.updates = static_cast<int64_t>(updates);
  if (r.has("learning_rate")) {
    meta.learning_rate = r.real("learning_rate");
    if (!std::isfinite(*meta.learning_rate) || *meta.learning_rate < 0) r.bad("learning_rate");
    r.at_most(*meta.learning_rate, kLargestLearningRate, "learning_rate");
  }
  if (r.has("loss_scale")) {
    meta.loss_scale = r.real("loss_scale");
    if (!std::isfinite(*meta.loss_scale) || *meta.loss_scale <= 0) r.bad("loss_scale");
    const uint64_t steps = r.natural("steps_at_scale");
    if (steps > iteration) r.bad("steps_at_scale");
    meta.steps_at_scale = static_cast<int64_t>(steps);
  }
  if (r.has("optimizer")) meta.optimizer = r.text("optimizer");
  return meta;
}

FileChecksums read_file_checksums(const Reader& r) {
  FileChecksums file;
  file.bytes = r.natural("bytes");
  file.header = r.checksum("header");
  const Reader tensors = r.object("tensors");
  tensors.each([&](const std::string& name) { file.tensors[name] = tensors.checksum(name); });
  return file;
}

StoredParts read_parts(const Reader& r) {
  StoredParts parts;
  r.each([&](const std::string& name) {
    const Reader part = r.object(name);
    StoredPart& to = parts[name];
    to.of = part.text("of");
    to.dims = part.dims("shape");
    try {
      to.at = part_of_text(part.text("at"), to.dims);
    } catch (const Error&) {
      part.bad("at");
    }
  });
  return parts;
}

void read_files(const Reader& files, CheckpointIndex& index) {
  files.each([&](const std::string& name) {
    const Reader file = files.object(name);
    index.files[name] = read_file_checksums(file);
    if (index.ranks > 1) index.parts[name] = read_parts(file.object("parts"));
  });
}

Json files_json(const CheckpointIndex& index) {
  Json json = Json::object();
  for (const auto& [name, file] : index.files) {
    Json tensors = Json::object();
    for (const auto& [tensor, crc] : file.tensors) tensors[tensor] = hex(crc);
    json[name] = {{"bytes", file.bytes}, {"header", hex(file.header)}, {"tensors", std::move(tensors)}};
    if (index.ranks == 1) continue;
    Json parts = Json::object();
    if (const auto at = index.parts.find(name); at != index.parts.end())
      for (const auto& [tensor, part] : at->second)
        parts[tensor] = {{"of", part.of}, {"shape", part.dims}, {"at", to_text(part.at)}};
    json[name]["parts"] = std::move(parts);
  }
  return json;
}

}  // namespace

std::string files_to_text(const CheckpointIndex& index) { return files_json(index).dump(); }

void add_files(CheckpointIndex& index, const std::string& text) {
  const Json json = Json::parse(text, nullptr, false);
  const std::string path = "what a rank says of its files";
  read_files(Reader(path, json), index);
}

std::string to_text(const CheckpointIndex& index) {
  const CheckpointMeta& meta = index.meta;
  Json json = {{"library", kVersion},         {"id", index.id},
               {"model", meta.model},         {"seed", meta.seed},
               {"iteration", meta.iteration}, {"updates", meta.updates},
               {"learning_rate", nullptr},    {"files", files_json(index)}};
  if (meta.learning_rate) json["learning_rate"] = *meta.learning_rate;
  if (meta.loss_scale) {
    json["loss_scale"] = *meta.loss_scale;
    json["steps_at_scale"] = meta.steps_at_scale;
  }
  if (!meta.optimizer.empty()) json["optimizer"] = meta.optimizer;
  if (index.ranks > 1) json["ranks"] = index.ranks;
  const std::string body = json.dump(2);  // "{\n", the lines, "\n}"
  return seal(fmt::format("{}{},\n{}{}{}{}", kBegin, index.ranks > 1 ? 3 : 2, body.substr(2, body.size() - 4), kSum,
                          std::string(kDigits, '0'), kEnd));
}

bool looks_like_index(const std::string& text) {
  const size_t n = std::min(text.size(), kBegin.size());
  return text.compare(0, n, kBegin, 0, n) == 0;
}

CheckpointIndex parse_index(const std::string& path, const std::string& text) {
  // Its own checksum first: a flipped bit in the format's number must not speak of a newer library.
  const std::string zeros = with_zeros(text);
  if (!zeros.empty() && seal(zeros) != text)
    throw error(Code::kDataLoss, "'{}' is damaged: its checksum is not that of its text. Load another checkpoint",
                path);
  const Json json = Json::parse(text, nullptr, false);
  const Reader r(path, json);
  CheckpointIndex index;
  const uint64_t format = r.natural("format");
  if (format > static_cast<uint64_t>(kCheckpointFormat))
    throw error(
        Code::kFailedPrecondition,
        "'{}' has checkpoint format {}{}; this is libwhale {}, which reads formats 1 to {}: load it with a newer "
        "libwhale",
        path, format,
        json.contains("library") && json["library"].is_string()
            ? fmt::format(", written by libwhale {}", json["library"].get<std::string>())
            : "",
        kVersion, kCheckpointFormat);
  if (format == 0) r.bad("format");
  index.format = static_cast<int64_t>(format);
  index.meta = read_meta(r);
  if (format == 1) return index;
  if (zeros.empty()) r.bad("checksum at its end");
  index.library = r.text("library");
  index.id = r.text("id");
  if (format > 2) {
    const uint64_t ranks = r.natural("ranks");
    r.at_most(ranks, uint64_t{kMostRanks}, "ranks");
    if (ranks < 2) r.bad("ranks");
    index.ranks = static_cast<int64_t>(ranks);
  }
  read_files(r.object("files"), index);
  return index;
}

}  // namespace whale
