#include "cluster/links_text.h"

#include <algorithm>
#include <charconv>
#include <cmath>

#include "base/error.h"
#include "base/text.h"
#include "cluster/device_types.h"

namespace whale {
namespace {

constexpr double kLeastRate = 1e3, kMostRate = 1e18;  // bytes/s: no link is beyond

// Of the base unit, or parts of it: whole numbers, so that reading rounds once and 10us is 1e-5 s.
struct Unit {
  std::string_view name;
  double times, parts = 1;
  double of(double number) const { return number * times / parts; }
};
constexpr Unit kRates[] = {{"Gb/s", 1e9 / 8}, {"Mb/s", 1e6 / 8}, {"Tb/s", 1e12 / 8}, {"GB/s", 1e9},
                           {"MB/s", 1e6},     {"TB/s", 1e12},    {"B/s", 1}};
constexpr Unit kTimes[] = {{"us", 1, 1e6}, {"ms", 1, 1e3}, {"ns", 1, 1e9}, {"s", 1}};

template <size_t N>
double read(std::string_view text, const Unit (&units)[N], double least, double most, const char* what) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const std::string_view unit(end, static_cast<size_t>(text.data() + text.size() - end));
  for (const Unit& u : units)
    if (error == std::errc{} && unit == u.name && u.of(value) >= least && u.of(value) <= most) return u.of(value);
  throw invalid("device list: '{}' is no {}", brief(text, 40), what);
}

// Text that reads as the value, exactly: in the unit of which there are so many, or in the base unit with all digits.
std::string exact(double value, const Unit& unit, std::string_view base, double (*read_back)(std::string_view)) {
  const double number = value * unit.parts / unit.times;
  for (const std::string& text : {fmt::format("{:.6g}{}", number, unit.name), fmt::format("{}{}", number, unit.name)})
    if (read_back(text) == value) return text;
  return fmt::format("{}{}", value, base);
}

double read_rate(std::string_view text) {
  return read(text, kRates, kLeastRate, kMostRate,
              "rate of a link such as 100Gb/s, 12.5GB/s or, with its latency, 100Gb/s@10us, from 1000B/s on");
}
double read_latency(std::string_view text) {
  return read(text, kTimes, 0, kMostLatency, "latency of a link such as 10us, 0.5ms, at most 1s");
}

std::string text_of(const LinkRates& rates) {
  const double bytes = std::clamp(rates.bytes_per_second, kLeastRate, kMostRate);
  const double seconds = std::clamp(rates.latency_seconds, 0.0, kMostLatency);
  const std::string_view rate = bytes >= 1e6 ? "Gb/s" : bytes >= 1e4 ? "Mb/s" : "B/s";
  const std::string_view time = seconds >= 1e-2 ? "ms" : seconds >= 1e-7 || seconds == 0 ? "us" : "ns";
  return exact(bytes, *std::ranges::find(kRates, rate, &Unit::name), "B/s", read_rate) + "@" +
         exact(seconds, *std::ranges::find(kTimes, time, &Unit::name), "s", read_latency);
}

}  // namespace

void NodeLinks::put(DeviceFigures& figures) const {
  if (network.bytes_per_second > 0) figures.network = network;
  if (inside.bytes_per_second > 0) figures.inside = inside;
}

LinkRates parse_rate(std::string_view text) {
  const size_t at = std::min(text.find('@'), text.size());
  return {read_rate(text.substr(0, at)), at == text.size() ? kUsualLatency : read_latency(text.substr(at + 1))};
}

NodeLinks parse_links(std::string_view text) {
  const size_t mark = std::min(text.find('~'), text.size());
  NodeLinks out{.network = parse_rate(text.substr(0, mark))};
  if (mark < text.size()) out.inside = parse_rate(text.substr(mark + 1));
  return out;
}

std::string links_text(const DeviceSpec& device) {
  const DeviceType* type = device.type.empty() ? nullptr : find_device_type(device.type);
  const DeviceFigures usual = type != nullptr ? figures_of(*type) : DeviceFigures{};
  const DeviceFigures& mine = device.figures;
  if (mine.network.bytes_per_second <= 0 || (mine.network == usual.network && mine.inside == usual.inside)) return "";
  std::string out = "~" + text_of(mine.network);
  if (mine.inside.bytes_per_second > 0 && mine.inside != usual.inside) out += "~" + text_of(mine.inside);
  return out;
}

}  // namespace whale
