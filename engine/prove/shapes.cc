#include "prove/shapes.h"

#include <algorithm>
#include <numeric>

#include "prove/between.h"
#include "prove/tree.h"

namespace whale::proof {

Shapes::Shapes(const Symmetry& symmetry, size_t devices) : symmetry_(symmetry), line_of_(devices), made_(devices) {
  std::iota(line_of_.begin(), line_of_.end(), size_t{0});
  const auto first = [&](int32_t device) {
    auto d = static_cast<size_t>(device);
    while (line_of_[d] != d) d = line_of_[d];
    return d;
  };
  for (size_t d = 0; d < devices; ++d) {
    const auto device = static_cast<int32_t>(d);
    if (symmetry.walked(device)) continue;
    const Symmetry::Line l = symmetry.line(device);
    for (const int32_t other : {l.first, l.second, l.last}) {
      const size_t a = first(device), b = first(other);
      line_of_[std::max(a, b)] = std::min(a, b);
    }
  }
  lines_.resize(devices);
  for (size_t d = 0; d < devices; ++d) {
    line_of_[d] = first(static_cast<int32_t>(d));
    Line& line = lines_[line_of_[d]];
    line.devices.push_back(static_cast<int32_t>(d));
    line.walked += symmetry.walked(static_cast<int32_t>(d));
  }
}

Held Shapes::of(int32_t device, const std::map<int32_t, Held>& walked) const {
  if (symmetry_.walked(device)) return walked.at(device);
  const Symmetry::Line l = symmetry_.line(device);
  return between(of(l.first, walked), of(l.second, walked), of(l.last, walked), l.steps, l.span);
}

void Shapes::add(int32_t device, Value made) {
  const auto d = static_cast<size_t>(device);
  Line& line = lines_[line_of_[d]];
  const auto at = static_cast<size_t>(made_[d]++ - line.complete);
  if (line.waiting.size() <= at) line.waiting.resize(at + 1);
  line.waiting[at][device] = std::make_shared<const Value>(std::move(made));
  for (; !line.waiting.empty() && line.waiting.front().size() == line.walked; line.waiting.pop_front(), ++line.complete)
    for (const int32_t each : line.devices) {
      const Held value = of(each, line.waiting.front());
      all_.insert(hash(value->order, value->region));
    }
}

}  // namespace whale::proof
