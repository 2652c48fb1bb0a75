#include "checkpoint/describe.h"

#include <algorithm>
#include <filesystem>

#include "base/format.h"
#include "base/json.h"
#include "checkpoint/shards.h"

namespace whale {
namespace {

std::string size_text(uint64_t bytes) {
  constexpr const char* kUnits[] = {"B", "kB", "MB", "GB", "TB"};
  size_t unit = 0;
  auto size = static_cast<double>(bytes);
  for (; size >= 1000 && unit < 4; ++unit) size /= 1000;
  return unit == 0 ? fmt::format("{} B", bytes) : fmt::format("{:.1f} {}", size, kUnits[unit]);
}

std::string name_of(const SafetensorsFile& file, const std::string& id) {
  std::string name = std::filesystem::path(file.path()).filename();
  return name.ends_with("." + id) ? name.substr(0, name.size() - id.size() - 1) : name;  // of a save that just died
}

}  // namespace

std::string describe(const Checkpoint& c) {
  const CheckpointMeta& meta = c.index.meta;
  std::string out = fmt::format("checkpoint of model '{}': iteration {}, updates {}, seed {}\n", meta.model,
                                meta.iteration, meta.updates, meta.seed);
  if (meta.learning_rate) out += fmt::format("learning rate {}, set by hand\n", *meta.learning_rate);
  if (meta.loss_scale) out += fmt::format("loss scale {}, for {} steps\n", *meta.loss_scale, meta.steps_at_scale);
  if (!meta.optimizer.empty()) out += fmt::format("optimizer {}\n", meta.optimizer);
  out += c.has_checksums()
             ? fmt::format("saved by libwhale {}, format {}, id {}\n", c.index.library, c.index.format, c.index.id)
             : fmt::format("saved by an older libwhale, format {}\n", c.index.format);
  if (c.index.ranks > 1) out += fmt::format("by {} ranks, each its own files\n", c.index.ranks);
  size_t widest = 6;
  for (const StoredTensors* kind : {c.model.get(), c.optimizer.get()})
    for (const StoredTensor& tensor : kind->tensors()) widest = std::max(widest, tensor.name.size());
  for (const StoredTensors* kind : {c.model.get(), c.optimizer.get()}) {
    out += fmt::format("\n{}: {} tensors, {}\n",
                       name_of(*kind->files().front(), c.index.id) + (c.index.ranks > 1 ? " and so on" : ""),
                       kind->tensors().size(), size_text(kind->bytes()));
    for (const StoredTensor& tensor : kind->tensors())
      out += fmt::format("  {:<{}}  {:<5} {}\n", tensor.name, widest, name_of(tensor.dtype), to_string(tensor.dims));
  }
  return out + (c.has_checksums() ? "\nevery checksum is right"
                                  : "\nwithout checksums: the files are complete, but a changed byte in their data "
                                    "would not be noticed. Load it and save it again to have them");
}

std::string describe_json(const Checkpoint& c) {
  const CheckpointMeta& meta = c.index.meta;
  Json json = {{"format", c.index.format},       {"library", c.index.library}, {"id", c.index.id},
               {"checksums", c.has_checksums()}, {"model", meta.model},        {"seed", meta.seed},
               {"iteration", meta.iteration},    {"updates", meta.updates}};
  json["learning_rate"] = meta.learning_rate ? Json(*meta.learning_rate) : nullptr;
  if (meta.loss_scale) json["loss_scale"] = *meta.loss_scale;
  json["optimizer"] = meta.optimizer.empty() ? Json() : Json(meta.optimizer);
  json["ranks"] = c.index.ranks;
  Json tensors = Json::array();
  for (const StoredTensors* kind : {c.model.get(), c.optimizer.get()})
    for (const StoredTensor& tensor : kind->tensors()) {
      const std::vector<StoredPiece>& pieces = kind->pieces(tensor);
      tensors.push_back({{"name", tensor.name},
                         {"file", name_of(*pieces.front().file, c.index.id)},
                         {"dtype", name_of(tensor.dtype)},
                         {"dims", tensor.dims},
                         {"bytes", tensor.bytes()}});
      if (c.index.ranks == 1) continue;
      Json parts = Json::array();
      for (const StoredPiece& piece : pieces)
        parts.push_back({{"file", name_of(*piece.file, c.index.id)}, {"at", to_text(piece.part.part())}});
      tensors.back()["parts"] = std::move(parts);
    }
  json["tensors"] = std::move(tensors);
  return json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

}  // namespace whale
