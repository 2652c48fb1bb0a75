// Reshards as a table for people and as JSON.
#include "base/format.h"
#include "base/json.h"
#include "plan/figures.h"
#include "report/reshard_report.h"

namespace whale {
namespace {

std::string way_text(const ReshardWay& way) {
  return fmt::format("{:<42} {:>9}  {:>4} rounds  {:>9}", way.name, bytes_text(way.bytes), way.rounds,
                     seconds_text(way.seconds));
}

}  // namespace

std::string reshards_text(const std::vector<ReshardRow>& rows, const LinkRates& link) {
  int64_t count = 0;
  double bytes = 0, seconds = 0;
  for (const ReshardRow& row : rows) count += row.count, bytes += row.bytes(), seconds += row.seconds();
  std::string text = fmt::format(
      "{} reshard(s) of {} kind(s): {} and {} of a step, one after the other\n"
      "Bytes: received by the device that gets most. Times: links of {}/s and {} (between nodes theirs), nothing "
      "beside "
      "them.\n",
      count, rows.size(), bytes_text(bytes), seconds_text(seconds), bytes_text(link.bytes_per_second),
      seconds_text(link.latency_seconds));
  for (const ReshardRow& row : rows) {
    text += fmt::format("\n{} {}{} {}, {}: {} -> {} along {} {}{}{}\n", row.tensor, whale::name_of(row.dtype),
                        to_string(row.dims), name_of(row.phase), row.way.name, row.from, row.to, row.axis, row.devices,
                        row.count > 1 ? fmt::format(", x {}", row.count) : "",
                        row.runs > 1 ? fmt::format(", {} micro-batches each", row.runs) : "");
    text += fmt::format("  chosen   {}\n", way_text(row.way));
    for (const ReshardWay& other : row.alternatives) text += fmt::format("  instead  {}\n", way_text(other));
  }
  return text;
}

std::string reshards_json(const std::vector<ReshardRow>& rows) {
  const auto way = [](const ReshardWay& w) {
    return Json{{"name", w.name}, {"bytes", w.bytes}, {"rounds", w.rounds}, {"seconds", w.seconds}};
  };
  Json out = Json::array();
  for (const ReshardRow& row : rows) {
    Json others = Json::array();
    for (const ReshardWay& other : row.alternatives) others.push_back(way(other));
    out.push_back({{"tensor", row.tensor},
                   {"dtype", whale::name_of(row.dtype)},
                   {"dims", row.dims},
                   {"phase", name_of(row.phase)},
                   {"axis", row.axis},
                   {"devices", row.devices},
                   {"from", row.from},
                   {"to", row.to},
                   {"count", row.count},
                   {"runs", row.runs},
                   {"seconds", row.seconds()},
                   {"bytes", row.bytes()},
                   {"chosen", way(row.way)},
                   {"alternatives", std::move(others)}});
  }
  return out.dump(2);
}

}  // namespace whale
