#include "schedule/warmup.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <set>

#include "base/watch.h"

namespace whale {
namespace {

constexpr double kUnknown = -1;

// Passes of one stage, by their place in its order.
class StageOrder {
 public:
  StageOrder(int micro_batches, int depth) : m_(micro_batches), ahead_(depth - 1) {}
  struct Pass {
    bool forward;
    int micro_batch;
  };
  Pass at(int row) const {
    if (row < ahead_) return {true, row};
    const int pairs = m_ - ahead_, in = row - ahead_;
    if (in >= 2 * pairs) return {false, in - pairs};
    return in % 2 == 0 ? Pass{true, ahead_ + in / 2} : Pass{false, in / 2};
  }
  int row_of(Pass pass) const {
    const int pairs = m_ - ahead_, u = pass.micro_batch;
    if (pass.forward) return u < ahead_ ? u : ahead_ + 2 * (u - ahead_);
    return u < pairs ? ahead_ + 2 * u + 1 : ahead_ + pairs + u;
  }

 private:
  int m_, ahead_;
};

class Walk {
 public:
  Walk(int m, std::span<const StageTimes> times, std::span<const LinkTimes> links, std::span<const int> warmup)
      : m_(m), times_(times), links_(links) {
    for (size_t s = 0; s < times.size(); ++s) {
      stages_.push_back({.order = StageOrder(m, warmup[s]), .taken = unknown(), .ended = unknown(), .sent = unknown()});
      if (s > 0) capacity_ = std::max(capacity_, (warmup[s - 1] - warmup[s] + 1) / 2);
    }
  }

  double run() {
    for (bool goes = true; goes;) {
      goes = false;
      // Forward passes go down the stages and backward ones up.
      for (size_t s = 0; s < stages_.size(); ++s) goes |= advance(s);
      for (size_t s = stages_.size(); s-- > 0;) goes |= advance(s);
    }
    double end = 0;
    for (const Stage& stage : stages_) {
      if (stage.computed < rows()) return std::numeric_limits<double>::infinity();
      end = std::max(end, stage.ended.back());
    }
    return end;
  }

 private:
  struct Stage {
    StageOrder order;
    std::vector<double> taken, ended, sent;  // by row
    int computed = 0, posted = 0;            // rows that are known
  };

  int rows() const { return 2 * m_; }
  std::vector<double> unknown() const { return std::vector<double>(static_cast<size_t>(rows()), kUnknown); }
  static double at(const std::vector<double>& list, int row) { return row < 0 ? 0 : list[row]; }

  bool advance(size_t s) {
    bool any = false;
    while (compute(s) || send(s)) any = true;
    return any;
  }

  // The next pass, where all that it waits for is known.
  bool compute(size_t s) {
    Stage& me = stages_[s];
    const int row = me.computed;
    if (row == rows() || me.posted < row - 1) return false;
    const auto [forward, u] = me.order.at(row);
    const size_t from = forward ? s - 1 : s + 1;
    double arrived = 0;
    if (from < stages_.size()) {
      const Stage& other = stages_[from];
      arrived = at(other.sent, other.order.row_of({forward, u}));
      if (arrived == kUnknown) return false;
    }
    const double free = std::max(at(me.ended, row - 2), at(me.sent, row - 2));
    const double taken = std::max({arrived, free, at(me.taken, row - 1)});
    const StageTimes& t = times_[s];
    me.taken[row] = taken;
    me.ended[row] =
        std::max({taken, at(me.ended, row - 1), at(me.sent, row - 2)}) + (forward ? t.forward : t.backward + t.weight);
    ++me.computed;
    return true;
  }

  bool send(size_t s) {
    Stage& me = stages_[s];
    const int row = me.posted;
    if (row >= me.computed) return false;
    const auto [forward, u] = me.order.at(row);
    const size_t to = forward ? s + 1 : s - 1;
    double begin = std::max(at(me.ended, row), at(me.sent, row - 1));
    double seconds = 0;
    if (to < stages_.size()) {
      const Stage& other = stages_[to];
      if (u >= capacity_) {
        const double taken = at(other.taken, other.order.row_of({forward, u - capacity_}));
        if (taken == kUnknown) return false;
        begin = std::max(begin, taken);
      }
      seconds = forward ? links_[s].forward : links_[to].backward;
    } else {
      begin = at(me.sent, row - 1);  // nothing is sent
    }
    me.sent[row] = std::max(begin, 0.0) + seconds;
    ++me.posted;
    return true;
  }

  int m_;
  std::span<const StageTimes> times_;
  std::span<const LinkTimes> links_;
  std::vector<Stage> stages_;
  int capacity_ = 1;
};

class WarmupSearch {
 public:
  WarmupSearch(int m, std::span<const StageTimes> times, std::span<const LinkTimes> links, std::span<const int> most)
      : m_(m), times_(times), links_(links), usual_(usual_warmup(static_cast<int>(times.size()), m)), most_(usual_) {
    for (size_t s = 0; s < most_.size(); ++s) most_[s] = std::max(most_[s], std::min(m, most[s]));
  }

  Warmup run(double worth) {
    best_ = {usual_, seconds(usual_)};
    const double before = best_.seconds;
    // All passes of the slowest stage behind the way to it and back: nothing is faster.
    if (before - least() <= worth * before) return best_;
    for (const std::vector<int>& depths : of_periods())
      if (items_ < kMostItems) take(depths);
    for (bool better = true; better && items_ < kMostItems;) {
      better = false;
      const std::vector<int> from = best_.depths;
      for (const std::vector<int>& step : steps()) {
        std::vector<int> depths = from;
        for (size_t s = 0; s < depths.size(); ++s) depths[s] += step[s];
        if (items_ < kMostItems) better |= take(depths);
      }
    }
    if (before - best_.seconds <= worth * before) return {usual_, before};
    // What is nearly as fast and holds less.
    constexpr double kPart = 0.25;
    Warmup out = best_;
    for (const auto& [depths, seconds] : known_)
      if (seconds <= (1 + kPart * worth) * best_.seconds && total(depths) < total(out.depths)) out = {depths, seconds};
    return before - out.seconds > worth * before ? out : best_;
  }

 private:
  static constexpr int64_t kMostItems = 20'000'000;  // passes that are walked: a second, about
  static constexpr double kApart = 1e-9;

  double seconds(const std::vector<int>& depths) {
    items_ += 2 * static_cast<int64_t>(depths.size()) * m_;
    Watch::look();
    return seconds_of_1f1b(m_, times_, links_, depths);
  }

  double pass(size_t s) const { return times_[s].forward + times_[s].backward + times_[s].weight; }

  double least() const {
    double most = 0, way = 0;
    for (size_t s = 0; s < times_.size(); ++s) {
      most = std::max(most, way + m_ * pass(s));
      if (s + 1 < times_.size())
        way += times_[s].forward + links_[s].forward + links_[s].backward + times_[s].backward + times_[s].weight;
    }
    return most;
  }

  static int64_t total(const std::vector<int>& depths) {
    return std::accumulate(depths.begin(), depths.end(), int64_t{0});
  }

  // By one, on any of a few stages; of many, on some beside each other.
  std::vector<std::vector<int>> steps() const {
    constexpr size_t kFew = 5;
    const size_t stages = usual_.size();
    std::vector<std::vector<int>> out;
    if (stages <= kFew) {
      std::vector<int> step(stages, -1);
      for (size_t s = 0; s < stages;) {
        out.push_back(step);
        for (s = 0; s < stages && step[s] == 1; ++s) step[s] = -1;
        if (s < stages) ++step[s];
      }
      for (size_t a = 1; a < stages; ++a) {  // which may take two
        std::fill(step.begin(), step.end(), 0);
        std::fill_n(step.begin(), a, 2);
        out.push_back(step);
      }
      return out;
    }
    for (size_t a = 0; a < stages; ++a)
      for (size_t b = a; b < stages; ++b)
        for (const int by : {1, -1}) {
          out.emplace_back(stages);
          std::fill(out.back().begin() + static_cast<std::ptrdiff_t>(a),
                    out.back().begin() + static_cast<std::ptrdiff_t>(b) + 1, by);
        }
    return out;
  }

  bool legal(const std::vector<int>& depths) const {
    for (size_t s = 0; s < depths.size(); ++s)
      if (depths[s] < usual_[s] || depths[s] > most_[s] || (s > 0 && depths[s] > depths[s - 1])) return false;
    return true;
  }

  bool take(const std::vector<int>& depths) {
    if (!legal(depths) || known_.contains(depths)) return false;
    const double mine = known_[depths] = seconds(depths);
    const int64_t now = total(depths), then = total(best_.depths);
    const double apart = kApart * best_.seconds;
    if (mine > best_.seconds + apart || (mine > best_.seconds - apart && now >= then)) return false;
    best_ = {depths, mine};
    return true;
  }

  // So many that a micro-batch may come back after a whole number of periods, none of which is much shorter than the
  // slowest stage takes for one.
  std::set<std::vector<int>> of_periods() const {
    constexpr double kShortest = 0.8;
    std::vector<double> round(times_.size());  // until a micro-batch is back, and done with
    double slowest = 0;
    for (size_t s = times_.size(); s-- > 0;) {
      slowest = std::max(slowest, pass(s));
      round[s] = pass(s) + (s + 1 < times_.size() ? round[s + 1] + links_[s].forward + links_[s].backward : 0);
    }
    std::set<std::vector<int>> out;
    for (size_t s = 0; s < times_.size(); ++s)
      for (int n = usual_[s]; n <= most_[s] && round[s] / n > kShortest * slowest; ++n) {
        const double period = round[s] / n;
        std::vector<int> depths = usual_;
        for (size_t k = 0; k < depths.size(); ++k) {
          depths[k] =
              static_cast<int>(std::clamp(std::ceil(round[k] / period - kApart), double(usual_[k]), double(most_[k])));
          if (k > 0) depths[k] = std::min(depths[k], depths[k - 1]);
        }
        if (legal(depths)) out.insert(depths);
      }
    return out;
  }

  int m_;
  std::span<const StageTimes> times_;
  std::span<const LinkTimes> links_;
  std::vector<int> usual_, most_;
  std::map<std::vector<int>, double> known_;  // that were walked
  Warmup best_;
  int64_t items_ = 0;
};

}  // namespace

std::vector<int> usual_warmup(int stages, int micro_batches) {
  std::vector<int> out;
  for (int s = 0; s < stages; ++s) out.push_back(std::min(micro_batches, stages - s));
  return out;
}

double seconds_of_1f1b(int micro_batches, std::span<const StageTimes> times, std::span<const LinkTimes> links,
                       std::span<const int> warmup) {
  return Walk(micro_batches, times, links, warmup).run();
}

Warmup find_warmup(int micro_batches, std::span<const StageTimes> times, std::span<const LinkTimes> links,
                   std::span<const int> most, double worth) {
  return WarmupSearch(micro_batches, times, links, most).run(worth);
}

}  // namespace whale
