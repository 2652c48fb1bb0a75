// Ranges of bytes and what is known of each: what was said last holds.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <unordered_map>

#include "prove/memory.h"

namespace whale::proof {

template <class T>
class Ranges {
 public:
  void put(const Place& place, const T& what) {
    if (place.bytes == 0) return;
    auto& ranges = spaces_[place.space];
    const int64_t end = place.begin + place.bytes;
    auto at = first(ranges, place.begin);
    while (at != ranges.end() && at->first < end) {
      const auto [begin, old] = *at;
      at = ranges.erase(at);
      if (begin < place.begin) ranges.emplace(begin, Range{place.begin, old.what});
      if (old.end > end) at = ranges.emplace(end, Range{old.end, old.what}).first;
    }
    ranges.emplace(place.begin, Range{end, what});
  }
  // f(begin, end, what) of each range within the place, in order; of what nothing is known of, with null.
  template <class F>
  void each(const Place& place, const F& f) const {
    if (place.bytes == 0) return;
    const auto found = spaces_.find(place.space);
    const int64_t end = place.begin + place.bytes;
    int64_t from = place.begin;
    if (found != spaces_.end())
      for (auto at = first(found->second, from); at != found->second.end() && at->first < end; ++at) {
        if (at->first > from) f(from, at->first, static_cast<const T*>(nullptr));
        const int64_t to = std::min(end, at->second.end);
        f(std::max(from, at->first), to, &at->second.what);
        from = to;
      }
    if (from < end) f(from, end, static_cast<const T*>(nullptr));
  }
  // Is anything known of some of it?
  bool meets(const Place& place) const {
    const auto found = spaces_.find(place.space);
    if (found == spaces_.end() || place.bytes == 0) return false;
    const auto at = first(found->second, place.begin);
    return at != found->second.end() && at->first < place.begin + place.bytes;
  }

 private:
  struct Range {
    int64_t end = 0;
    T what;
  };
  using Map = std::map<int64_t, Range>;  // by begin
  // The first that ends behind `begin`.
  template <class M>
  static auto first(M& ranges, int64_t begin) {
    auto at = ranges.upper_bound(begin);
    if (at != ranges.begin() && std::prev(at)->second.end > begin) --at;
    return at;
  }
  std::unordered_map<int32_t, Map> spaces_;
};

}  // namespace whale::proof
