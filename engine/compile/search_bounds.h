// What a search for strategies need not look at, by what it has seen.
#pragma once

#include <algorithm>
#include <iterator>
#include <limits>
#include <map>
#include <string_view>
#include <tuple>

#include "compile/shapes.h"

namespace whale {

// How far counts are off from what is estimated, for shapes of one form.
class CountsOff {
 public:
  void see(const Shape& shape, double seconds) {
    const double off = seconds / shape.rank;
    least_ = std::min(least_, off), ++seen_;
    Form& mine = forms_[form_of(shape)];
    mine.least = std::min(mine.least, off), ++mine.seen;
  }
  // Seconds that the shape takes at least, were its counts as far off to its favour as any were so far; twice as far
  // while few have said how far that is.
  double least_seconds(const Shape& shape) const {
    constexpr size_t kFew = 8, kFewOfForm = 2;
    constexpr double kSure = 0.9;
    double off = least_ * (seen_ >= kFew ? 1 : 0.5);
    const auto mine = forms_.find(form_of(shape));
    if (mine != forms_.end() && mine->second.seen >= kFewOfForm) off = std::max(off, kSure * mine->second.least);
    return shape.rank * off;
  }

 private:
  using Key = std::tuple<std::string_view, bool, bool, bool, bool, bool>;
  static Key form_of(const Shape& s) {
    return {s.set->types, s.cut > 0, s.stages > 1, s.outside, s.split > 1, s.replicas > 1};
  }
  struct Form {
    double least = std::numeric_limits<double>::infinity();
    size_t seen = 0;
  };
  double least_ = 1;
  size_t seen_ = 0;
  std::map<Key, Form> forms_;
};

// What others do better: a step of a worth, and by the price of an hour, since what takes longer on devices that cost
// as much or more is dearer, too.
class Bounds {
 public:
  void see(double worth, double price_hour, double seconds) {
    worth_ = std::min(worth_, worth);
    if (seconds >= seconds_for(price_hour)) return;
    const auto at = fastest_.insert_or_assign(price_hour, seconds).first;
    fastest_.erase(std::next(at), std::find_if(std::next(at), fastest_.end(),
                                               [&](const auto& cheaper) { return cheaper.second < seconds; }));
  }
  bool any() const { return worth_ < kNone; }
  double worth() const { return worth_; }
  double seconds_for(double price_hour) const {
    const auto behind = fastest_.upper_bound(price_hour);
    return behind == fastest_.begin() ? kNone : std::prev(behind)->second;
  }

 private:
  static constexpr double kNone = std::numeric_limits<double>::infinity();
  double worth_ = kNone;
  std::map<double, double> fastest_;  // falling
};

}  // namespace whale
