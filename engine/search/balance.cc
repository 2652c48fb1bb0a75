#include "search/balance.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>

#include "base/error.h"
#include "base/text.h"
#include "plan/figures.h"

namespace whale {
namespace {

constexpr int64_t kMostUnits = int64_t{1} << 53;  // whole in a double
constexpr int64_t kMostWorkers = int64_t{1} << 20;

double checked(double value, const char* what, const Worker& worker, const Member& member, int64_t units) {
  if (!std::isfinite(value) || value < 0)
    throw invalid("{} of '{}' ({}) for {} units are {}, expected a finite number that is not negative", what,
                  brief(worker.name), brief(member.name), units, value);
  return value;
}

double seconds_of(const Worker& worker, int64_t units) {
  double slowest = 0;
  for (const Member& m : worker.members)
    slowest = std::max(slowest, checked(m.seconds(units), "seconds", worker, m, units));
  return slowest;
}

double bytes_of(const Worker& worker, const Member& member, int64_t units) {
  return member.bytes ? checked(member.bytes(units), "bytes", worker, member, units) : 0;
}

bool has_room(const Worker& worker, int64_t units) {
  return std::all_of(worker.members.begin(), worker.members.end(), [&](const Member& m) {
    return m.memory == Member::kNoLimit || bytes_of(worker, m, units) <= static_cast<double>(m.memory);
  });
}

// The last of [low, high] for which it holds, if it holds up to some place; none: -1.
template <class Holds>
int64_t last_that(int64_t low, int64_t high, Holds holds) {
  if (high < low || !holds(low)) return -1;
  while (low < high) {
    const int64_t middle = low + (high - low + 1) / 2;
    if (holds(middle))
      low = middle;
    else
      high = middle - 1;
  }
  return low;
}

// At 0, 1, 2, 4, ... and the last.
void check_rises(const char* what, const OfUnits& f, const Worker& worker, const Member& member, int64_t last) {
  int64_t before = 0;
  double value = checked(f(0), what, worker, member, 0);
  for (int64_t at = 1; before < last; at *= 2) {
    at = std::min(at, last);
    const double now = checked(f(at), what, worker, member, at);
    if (now < value)
      throw invalid("{} of '{}' ({}) fall from {} for {} units to {} for {}; they must not fall with the units", what,
                    brief(worker.name), brief(member.name), value, before, now, at);
    before = at, value = now;
  }
}

void check_member(const Worker& worker, const Member& member, int64_t units) {
  if (!member.seconds)
    throw invalid("'{}' ({}) does not say how many seconds its units take; give a function or measured points",
                  brief(worker.name), brief(member.name));
  if (member.memory < 0)
    throw invalid("'{}' ({}) has {} bytes of memory, expected 0 or more", brief(worker.name), brief(member.name),
                  member.memory);
  if (member.bytes) check_rises("bytes", member.bytes, worker, member, units);
}

void check(const BalanceRequest& r) {
  if (r.units < 1 || r.units > kMostUnits)
    throw invalid("{} units are to be dealt, expected 1 to {}", r.units, kMostUnits);
  if (r.workers.empty() || std::ssize(r.workers) > kMostWorkers)
    throw invalid("{} units are to be dealt to {} workers, expected 1 to {}", r.units, r.workers.size(), kMostWorkers);
  for (const int32_t kind : r.workers)
    if (kind < 0 || kind >= std::ssize(r.kinds))
      throw invalid("a worker is of kind {}, expected one of the {} kinds, counted from 0", kind, r.kinds.size());
  for (const Worker& worker : r.kinds) {
    if (worker.members.empty()) throw invalid("worker '{}' has no members, expected at least one", brief(worker.name));
    for (const Member& member : worker.members) check_member(worker, member, r.units);
  }
}

class Dealer {
 public:
  explicit Dealer(const BalanceRequest& request) : r_(request), low_(request.may_idle ? 1 : 0) {
    check(r_);
    for (const Worker& worker : r_.kinds) {
      const int64_t room = last_that(low_, r_.units, [&](int64_t units) { return has_room(worker, units); });
      room_.push_back(room);
      if (room < 0) continue;
      for (const Member& member : worker.members) check_rises("seconds", member.seconds, worker, member, room);
      enough_ = std::max(enough_, seconds_of(worker, room));
    }
    of_kind_.resize(r_.kinds.size());
    for (size_t w = 0; w < r_.workers.size(); ++w) of_kind_[r_.workers[w]].push_back(static_cast<int32_t>(w));
    for (int32_t k = 0; k < std::ssize(r_.kinds); ++k)
      if (!of_kind_[k].empty()) kinds_.push_back(k);
    std::ranges::sort(kinds_, {}, [&](int32_t k) { return of_kind_[k][0]; });
  }

  bool fits() const {
    if (!r_.may_idle)
      for (const int32_t k : kinds_)
        if (room_[k] < 0) return false;
    return together(room_, counts()) == r_.units;
  }

  Balance deal() const {
    const auto there = std::ssize(r_.workers);
    Choice best;
    if (!r_.may_idle) {
      best = choice(there);
    } else {
      // Numbers far from each other in turn: a better one is found seldom, and most are turned down by one look.
      const int64_t most = std::min(there, r_.units);
      int64_t step = std::max<int64_t>(1, static_cast<int64_t>(0.618 * static_cast<double>(most)));
      while (std::gcd(step, most) != 1) ++step;
      for (int64_t i = 0, k = most; i < most; ++i, k = (k + step - 1) % most + 1)
        if (better(k, best)) best = choice(k);
    }
    return dealt(best);
  }

  Error shortage() const {
    const int64_t lacks = r_.units - together(room_, counts());
    std::vector<std::string> each;
    for (const int32_t kind : kinds_) {
      const auto k = static_cast<size_t>(kind);
      const Worker& worker = r_.kinds[k];
      const bool one = of_kind_[k].size() == 1;
      std::string room;
      if (room_[k] == r_.units)
        room = "could take all of them";
      else
        room = fmt::format("{}{}: {}", room_[k] < 1 ? "no room" : "room for " + units_text(room_[k]),
                           one ? "" : " each", lacking(worker, std::max(room_[k] + 1, low_)));
      each.push_back(fmt::format("'{}' (worker{} {}) {}{}", brief(worker.name), one ? "" : "s",
                                 devices_text(of_kind_[k], 4),
                                 room_[k] == r_.units ? ""
                                 : one                ? "has "
                                                      : "have ",
                                 room));
    }
    const std::string what = lacks > 0 ? fmt::format("room for {} is missing", units_text(lacks))
                                       : "not all have room for what they hold without any";
    return error(Code::kResourceExhausted, "{} do not fit, {}: {}", units_text(r_.units), what, fmt::join(each, "; "));
  }

 private:
  struct Choice {  // of who takes part
    int64_t workers = 0;
    double seconds = std::numeric_limits<double>::infinity(), slowest = 0;
    Ints used, most;  // of each kind: workers, and the units that one can take in that time
  };

  Ints counts() const {
    Ints out(of_kind_.size());
    for (size_t k = 0; k < out.size(); ++k) out[k] = std::ssize(of_kind_[k]);
    return out;
  }

  // Units, all of them at most.
  int64_t together(const Ints& each, const Ints& workers) const {
    int64_t left = r_.units;
    for (size_t k = 0; k < each.size(); ++k) {
      if (workers[k] < 1 || each[k] < 1) continue;
      if (each[k] >= (left + workers[k] - 1) / workers[k]) return r_.units;
      left -= each[k] * workers[k];
    }
    return r_.units - left;
  }

  // That a worker of each kind can take in this time (-1: it cannot take part), at least and at most what is known.
  Ints within(double seconds, const Ints& least, const Ints& most) const {
    Ints out(r_.kinds.size(), -1);
    for (const int32_t kind : kinds_) {
      const auto k = static_cast<size_t>(kind);
      const auto in_time = [&](int64_t units) { return seconds_of(r_.kinds[k], units) <= seconds; };
      if (least[k] < low_)
        out[k] = last_that(low_, most[k], in_time);
      else
        out[k] = least[k] == most[k] || !in_time(least[k] + 1) ? least[k] : last_that(least[k] + 1, most[k], in_time);
    }
    return out;
  }
  Ints within(double seconds) const { return within(seconds, Ints(r_.kinds.size(), -1), room_); }

  struct Least {
    double seconds;
    Ints most;  // that a worker of each kind can take in that time
  };
  // The least time in which what each can take is enough. Exact: times that are not negative are in the order of their
  // bits.
  template <class Enough>
  Least least_seconds(Enough enough) const {
    uint64_t low = 0, high = std::bit_cast<uint64_t>(enough_);
    Ints least(r_.kinds.size(), -1), most = room_;
    while (low < high) {
      const uint64_t middle = low + (high - low) / 2;
      Ints now = within(std::bit_cast<double>(middle), least, most);
      if (enough(now))
        high = middle, most = std::move(now);
      else
        low = middle + 1, least = std::move(now);
    }
    return {std::bit_cast<double>(high), std::move(most)};
  }

  // Of each kind, so that they are `workers` and can take as much as possible; fewer where fewer can take part.
  Ints those_with_most(const Ints& most, int64_t workers) const {
    std::vector<int32_t> order = kinds_;
    std::ranges::stable_sort(order, std::greater<>(), [&](int32_t k) { return most[k]; });
    Ints out(most.size());
    for (const int32_t kind : order) {
      const auto k = static_cast<size_t>(kind);
      if (most[k] < low_) break;
      out[k] = std::min(workers, static_cast<int64_t>(of_kind_[k].size()));
      workers -= out[k];
    }
    return out;
  }

  bool enough(int64_t workers, const Ints& most) const {
    const Ints used = those_with_most(most, workers);
    return std::reduce(used.begin(), used.end(), int64_t{0}) == workers && together(most, used) == r_.units;
  }
  bool enough(const Ints& used, const Ints& most) const {
    for (size_t k = 0; k < used.size(); ++k)
      if (used[k] > 0 && most[k] < low_) return false;
    return together(most, used) == r_.units;
  }

  double communication(int64_t workers) const {
    if (!r_.communication) return 0;
    const double seconds = r_.communication(workers);
    if (!std::isfinite(seconds) || seconds < 0)
      throw invalid("communication of {} workers takes {} seconds, expected a finite number that is not negative",
                    workers, seconds);
    return seconds;
  }

  // So many would be faster than the best, or as fast and fewer.
  bool better(int64_t workers, const Choice& best) const {
    if (best.workers == 0) return enough(workers, room_);
    const double other = communication(workers);
    const auto good = [&](double slowest) {
      return workers < best.workers ? slowest + other <= best.seconds : slowest + other < best.seconds;
    };
    if (!good(0)) return false;
    // The last time that is good.
    const int64_t last = last_that(0, std::bit_cast<int64_t>(best.seconds),
                                   [&](int64_t bits) { return good(std::bit_cast<double>(bits)); });
    return enough(workers, within(std::bit_cast<double>(last)));
  }

  Choice choice(int64_t workers) const {
    Least least = least_seconds([&](const Ints& most) { return enough(workers, most); });
    Choice out{.workers = workers,
               .seconds = least.seconds + communication(workers),
               .slowest = least.seconds,
               .used = those_with_most(least.most, workers),
               .most = {}};
    out.most = std::move(least.most);
    return out;
  }

  Balance dealt(const Choice& c) const {
    // As even as what each can take allows: all have the level, or what they can take.
    const auto at = [&](int64_t level) {
      Ints out = c.most;
      for (int64_t& units : out) units = std::min(units, level);
      return out;
    };
    int64_t level = last_that(low_, r_.units, [&](int64_t l) {
      const Ints each = at(l);
      int64_t sum = 0;
      for (size_t k = 0; k < each.size(); ++k) {
        if (c.used[k] < 1 || each[k] < 1) continue;
        if (each[k] > (r_.units - sum) / c.used[k]) return false;
        sum += each[k] * c.used[k];
      }
      return true;
    });
    const Ints each = at(level);
    int64_t left = r_.units - together(each, c.used);
    Ints more(each.size());  // workers with one more
    for (const bool whole : {true, false})
      for (const int32_t kind : kinds_) {
        const auto k = static_cast<size_t>(kind);
        if (c.most[k] <= level || more[k] > 0 || (whole && c.used[k] > left)) continue;
        more[k] = std::min(left, c.used[k]);
        left -= more[k];
      }
    Balance out{.units = Ints(r_.workers.size()),
                .seconds = c.seconds,
                .slowest = c.slowest,
                .taking_part = c.workers,
                .idle = {}};
    for (const int32_t kind : kinds_) {
      const auto k = static_cast<size_t>(kind);
      for (int64_t i = 0; i < c.used[k]; ++i) out.units[of_kind_[k][i]] = each[k] + (i < more[k]);
      if (c.used[k] < std::ssize(of_kind_[k])) out.idle.push_back(idle(kind, c));
    }
    return out;
  }

  Idle idle(int32_t kind, const Choice& c) const {
    const auto k = static_cast<size_t>(kind);
    const Worker& worker = r_.kinds[k];
    Idle out{.kind = kind, .workers = {of_kind_[k].begin() + c.used[k], of_kind_[k].end()}, .reason = {}};
    if (room_[k] < low_) {
      out.reason = "has no room: " + lacking(worker, low_);
    } else if (c.workers == r_.units) {
      out.reason = "no unit is left for it";
    } else {
      Ints with = c.used;
      ++with[k];
      const double slowest = least_seconds([&](const Ints& most) { return enough(with, most); }).seconds;
      out.slower_seconds = std::max(0.0, slowest + communication(c.workers + 1) - c.seconds);
      out.reason = out.slower_seconds > 0 ? "would make the step slower by " + seconds_text(out.slower_seconds)
                                          : "would not make the step faster";
    }
    return out;
  }

  // Who has no room for so many units, and what they need.
  static std::string lacking(const Worker& worker, int64_t units) {
    std::vector<std::string> each;
    for (const Member& m : worker.members)
      if (const double bytes = bytes_of(worker, m, units);
          m.memory != Member::kNoLimit && bytes > static_cast<double>(m.memory))
        each.push_back(fmt::format("{} needs {} {} and has {}",
                                   worker.members.size() > 1 ? fmt::format("'{}'", brief(m.name)) : "it",
                                   bytes_text(bytes), units == 0 ? "without any unit" : "for " + units_text(units),
                                   bytes_text(static_cast<double>(m.memory))));
    return fmt::format("{}", fmt::join(each, ", "));
  }
  static std::string units_text(int64_t units) { return units == 1 ? "1 unit" : fmt::format("{} units", units); }

  const BalanceRequest& r_;
  int64_t low_;                                // units of who takes part
  Ints room_;                                  // of each kind, for one worker; -1: cannot take part
  double enough_ = 0;                          // seconds
  std::vector<std::vector<int32_t>> of_kind_;  // workers
  std::vector<int32_t> kinds_;                 // those that are there, in the order of their first workers
};

}  // namespace

OfUnits through_points(std::vector<std::pair<int64_t, double>> points) {
  if (points.empty()) throw invalid("no measured points, expected at least one");
  std::ranges::sort(points);
  for (size_t i = 0; i < points.size(); ++i) {
    const auto& [units, value] = points[i];
    if (units < 0 || units > kMostUnits || !std::isfinite(value) || value < 0 || (units == 0 && points.size() == 1))
      throw invalid(
          "a measured point has {} units and the value {}, expected units from {} to {} and a finite value "
          "that is not negative",
          units, value, points.size() == 1 ? 1 : 0, kMostUnits);
    if (i > 0 && points[i - 1].first == units)
      throw invalid("two measured points have {} units ({} and {}); give one, such as their mean", units,
                    points[i - 1].second, value);
  }
  // Pool adjacent violators: neighbours that fall become their mean.
  std::vector<std::pair<double, size_t>> pools;  // mean, how many
  for (const auto& [units, value] : points) {
    pools.emplace_back(value, 1);
    while (pools.size() > 1 && pools[pools.size() - 2].first > pools.back().first) {
      const auto [mean, n] = pools.back();
      pools.pop_back();
      auto& [other, m] = pools.back();
      other += (mean - other) * static_cast<double>(n) / static_cast<double>(n + m);
      m += n;
    }
  }
  size_t at = 0;
  for (const auto& [mean, n] : pools)
    for (size_t i = 0; i < n; ++i) points[at++].second = mean;
  if (points.size() == 1) points.insert(points.begin(), {0, 0.0});
  return [points = std::move(points)](int64_t units) {
    auto right = std::ranges::upper_bound(points, units, {}, &std::pair<int64_t, double>::first);
    right = std::clamp(right, points.begin() + 1, points.end() - 1);
    const auto& [x0, y0] = *(right - 1);
    const auto& [x1, y1] = *right;
    const double part = static_cast<double>(units - x0) / static_cast<double>(x1 - x0);
    const double value = y0 + (y1 - y0) * part;
    if (units <= x0) return std::clamp(value, 0.0, y0);
    if (units < x1) return std::clamp(value, y0, y1);
    return units == x1 ? y1 : std::max(value, y1);
  };
}

Worker alone(Member member) {
  std::string name = member.name;
  return {std::move(name), {std::move(member)}};
}

std::optional<Balance> balance_if_fits(const BalanceRequest& request) {
  const Dealer dealer(request);
  if (!dealer.fits()) return std::nullopt;
  return dealer.deal();
}

Balance balance(const BalanceRequest& request) {
  const Dealer dealer(request);
  if (!dealer.fits()) throw dealer.shortage();
  return dealer.deal();
}

std::vector<double> state_shares(double bytes, const std::vector<double>& room) {
  if (!std::isfinite(bytes) || bytes < 0)
    throw invalid("{} bytes of state are to be cut, expected a finite number that is not negative", bytes);
  if (room.empty()) throw invalid("{} of state are to be cut over no devices", bytes_text(bytes));
  std::vector<size_t> order(room.size());
  std::iota(order.begin(), order.end(), size_t{0});
  double all = 0;
  for (size_t i = 0; i < room.size(); ++i) {
    if (std::isnan(room[i]) || room[i] < 0)
      throw invalid("device {} has room for {} bytes of state, expected 0 or more", i, room[i]);
    all += room[i];
  }
  std::ranges::stable_sort(order, {}, [&](size_t i) { return room[i]; });
  std::vector<double> out(room.size());
  double left = bytes;
  for (size_t k = 0; k < order.size(); ++k) {
    const double even = left / static_cast<double>(order.size() - k);
    if (room[order[k]] >= even) {  // and so has everyone after it
      for (; k < order.size(); ++k) out[order[k]] = even;
      return out;
    }
    out[order[k]] = room[order[k]], left -= room[order[k]];
  }
  constexpr size_t kListed = 8;
  std::vector<std::string> each;
  for (size_t i = 0; i < std::min(room.size(), kListed); ++i)
    each.push_back(fmt::format("device {} {}", i, bytes_text(room[i])));
  if (room.size() > kListed) each.push_back(fmt::format("{} more devices", room.size() - kListed));
  throw error(Code::kResourceExhausted, "{} of state do not fit, {} more than there is room for: {}", bytes_text(bytes),
              bytes_text(bytes - all), fmt::join(each, ", "));
}

}  // namespace whale
