#include "flight.h"

#include <algorithm>
#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>

#include "api.h"
#include "file.h"

namespace tool {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::string_view kBegin = "{\"flight_record\":";
constexpr size_t kLast = 8;     // instructions of a device that are shown
constexpr size_t kWidth = 72;   // of what is said of an instruction
constexpr size_t kWide = 2000;  // of an error

Json read(const std::string& path) {
  try {
    Json record = Json::parse(read_file(path));
    if (record.at("flight_record") != 1)
      throw Failure("'" + shown(path) + "' is a flight record of a newer libwhale: show it with that");
    return record;
  } catch (const Json::exception&) {
    throw Failure("'" + shown(path) + "' is no flight record, or not all of it");
  }
}

std::vector<Json> read(const std::vector<std::string>& paths) {
  std::vector<Json> records;
  for (const std::string& path : paths) records.push_back(read(path));
  std::sort(records.begin(), records.end(), [](const Json& a, const Json& b) { return a.at("rank") < b.at("rank"); });
  return records;
}

std::string word(const Json& record, const char* key) { return shown(record.at(key).get<std::string>(), kWidth); }
std::string number(const Json& value) { return std::to_string(value.get<int64_t>()); }

std::string seconds(const Json& value) {
  const double s = value.get<double>();
  char text[32];
  if (s < 1e-3)
    std::snprintf(text, sizeof text, "%.1f us", s * 1e6);
  else if (s < 1)
    std::snprintf(text, sizeof text, "%.1f ms", s * 1e3);
  else
    std::snprintf(text, sizeof text, "%.1f s", s);
  return text;
}

std::string padded(std::string text, size_t width) {
  text.resize(std::max(width, text.size() + 1), ' ');
  return text;
}

std::string ranks_text(const std::vector<int64_t>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) text += (i > 0 ? "," : "") + std::to_string(ranks[i]);
  return text;
}

// "ranks 0,2 wait for all_reduce of h": those at the same together, and whose records are missing.
std::string together(const std::vector<Json>& records) {
  std::map<std::string, std::vector<int64_t>> at;
  std::vector<std::string> order;
  std::vector<bool> there(records.front().at("ranks").get<size_t>());
  for (const Json& record : records) {
    const auto rank = record.at("rank").get<size_t>();
    if (rank < there.size()) there[rank] = true;
    if (!record.contains("at")) continue;
    const std::string what = (record.at("waits").get<bool>() ? "w" : "i") + word(record, "at");
    if (!at.contains(what)) order.push_back(what);
    at[what].push_back(static_cast<int64_t>(rank));
  }
  std::string text;
  for (const std::string& what : order) {
    const bool one = at[what].size() == 1;
    text += ranks_text(at[what]) +
            (what[0] == 'w' ? one ? " waits for " : " wait for "
             : one          ? " is "
                            : " are ") +
            what.substr(1) + "\n";
  }
  std::vector<int64_t> missing;
  for (size_t r = 0; r < there.size(); ++r)
    if (!there[r]) missing.push_back(static_cast<int64_t>(r));
  return missing.empty() ? text : text + "no record of " + ranks_text(missing) + "\n";
}

std::string state_of(const Json& queue) {
  const Json& all = queue.at("instructions");
  if (all.empty() || !queue.at("in_run").get<bool>()) return "has begun nothing in this run";
  const Json& last = all.back();
  const std::string what = word(last, "what");
  if (last.at("began").is_null()) return "waits for other queues of its device before " + what;
  if (!last.at("seconds").is_null()) return "is behind " + what;
  return (last.at("waits").get<bool>() ? "waits for " : "is at ") + what + ", for " + seconds(last.at("began"));
}

void add_device(std::string& text, const std::vector<const Json*>& queues) {
  text += "  device " + number(queues[0]->at("device")) + " (" + word(*queues[0], "kind") + ")\n";
  std::vector<std::pair<const Json*, const Json*>> last;  // instructions that have begun, and their queues
  for (const Json* queue : queues) {
    text += "    " + padded(word(*queue, "queue"), 9) + state_of(*queue) + "\n";
    for (const Json& i : queue->at("instructions"))
      if (!i.at("began").is_null()) last.emplace_back(&i, queue);
  }
  std::stable_sort(last.begin(), last.end(), [](const auto& a, const auto& b) {
    return a.first->at("began").template get<double>() > b.first->at("began").template get<double>();
  });
  if (last.empty()) return;
  text += "    began before  took       step  queue    last instructions\n";
  for (size_t n = last.size() - std::min(last.size(), kLast); n < last.size(); ++n) {
    const auto& [i, queue] = last[n];
    text += "    " + padded(seconds(i->at("began")), 14) +
            padded(i->at("seconds").is_null() ? "-" : seconds(i->at("seconds")), 11) +
            padded(number(i->at("step")), 6) + padded(word(*queue, "queue"), 9) + word(*i, "what") + "\n";
  }
}

}  // namespace

bool is_flight_record(const std::string& path) { return read_start(path, kBegin.size()) == kBegin; }

std::string flight_text(const std::vector<std::string>& paths) {
  const std::vector<Json> records = read(paths);
  try {
    std::string text = "'" + word(records[0], "model") + "' under '" + word(records[0], "strategy") + "' on " +
                       number(records[0].at("ranks")) + " rank(s)\n" + together(records);
    for (const Json& record : records) {
      text += "\nrank " + number(record.at("rank")) + " (host '" + word(record, "host") + "', process " +
              number(record.at("process")) + ")";
      if (record.contains("entry"))
        text += ", last in '" + word(record, "entry") + "' of " + number(record.at("batch"));
      const std::string error = shown(record.at("error").get<std::string>(), kWide);
      text += error.empty() ? "\n" : "\n  ended by: " + error + "\n";
      std::map<int64_t, std::vector<const Json*>> devices;
      for (const Json& queue : record.at("queues")) devices[queue.at("device").get<int64_t>()].push_back(&queue);
      for (const auto& [device, queues] : devices) add_device(text, queues);
    }
    return text;
  } catch (const Json::exception&) {
    throw Failure("a file is no flight record of this libwhale");
  }
}

std::string flight_json(const std::vector<std::string>& paths) {
  return Json(read(paths)).dump(-1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace tool
