#include "search/cluster_pipelines.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>

#include "base/error.h"
#include "base/thread_seconds.h"
#include "search/replica_kinds.h"
#include "search/share_out.h"

namespace whale {
namespace {

using Cuts = std::vector<int>;

class Searcher {
 public:
  Searcher(const ClusterProblem& problem, const ClusterSearch& search)
      : problem_(problem), search_(search), tables_(problem), begin_(thread_seconds()) {
    // Until something is found, kinds are rated by what the devices would take together, if nothing were lost.
    double rate = 0;
    for (size_t t = 0; t < problem.types.size(); ++t) {
      double best = 0;
      for (const LayerTimes& times : problem.times)
        if (times.type == static_cast<int>(t))
          best = std::max(
              best, static_cast<double>(times.micro_batch) / times.split /
                        (std::accumulate(times.seconds.begin(), times.seconds.end(), 1e-12) * problem.types[t].slower));
      rate += best * std::accumulate(problem.types[t].nodes.begin(), problem.types[t].nodes.end(), 0);
      for (const KindTables::Place& place : tables_.places())
        if (place.type == static_cast<int>(t) && problem.splits[place.split_at] == 1)
          for (size_t r = 0; r + 1 < tables_.rows(); ++r)
            if (place.use[r] > 0) rates_[r] = 0.7 * best;
    }
    if (rate > 0) guess_ = 2 * static_cast<double>(problem.batch) / rate;
    for (size_t a = 0; a < problem.types.size(); ++a)
      for (size_t b = 0; b < problem.types.size(); ++b)
        rings_.push_back(&problem.send(static_cast<int>(a), 0, static_cast<int>(b), 0));
  }

  double elapsed() const { return thread_seconds() - begin_; }
  // Longer, where there is nothing yet.
  bool late() const {
    constexpr double kPatience = 8;
    return search_.within_seconds > 0 && elapsed() > search_.within_seconds * (found() ? 1 : kPatience);
  }
  bool found() const { return !best_.classes.empty(); }

  // Whether the best plan became better.
  bool try_cuts(const Cuts& cuts) {
    if (!tried_.insert(cuts).second) return false;
    const double before = best_seconds_;
    const std::set<std::vector<int>> rows = least_splits(cuts);
    leasts_.assign(rows.begin(), rows.end());
    std::ranges::stable_sort(leasts_, {}, [&](const std::vector<int>& least) { return sync(least, 16); });
    try_leasts(cuts, 0, leasts_.size());
    return best_seconds_ < before;
  }

  // Moves single cuts as long as that helps.
  void climb() {
    for (bool better = found(); better && !late();) {
      better = false;
      const Cuts from = best_.cuts;
      for (size_t i = 1; i + 1 < from.size() && !late(); ++i)
        for (const int by : {-1, 1}) {
          Cuts cuts = from;
          cuts[i] += by;
          if (cuts[i] > cuts[i - 1] && cuts[i] < cuts[i + 1]) better |= try_cuts(cuts);
        }
    }
  }

  void all_stages() {
    const int most = std::min(search_.most_stages, problem_.layers);
    for (int stages = 1; stages <= most && !late(); ++stages)
      for (const Cuts& cuts : balanced(stages)) {
        if (late()) break;
        try_cuts(cuts);
      }
  }

  FoundPipelines result() const {
    if (!found()) throw invalid("no pipeline of up to {} stages fits the devices of this cluster", search_.most_stages);
    return {.plan = best_,
            .price = price(problem_, best_),
            .seconds = elapsed(),
            .cuts_tried = static_cast<int64_t>(tried_.size())};
  }

 private:
  // How much each stage has to be split at least on devices of each type, so that its gradients' all-reduce is no
  // longer than some stage's at some split: one row for each such bound. A ring is as slow as its slowest link, so that
  // a stage whose replicas are all on one type may be split less.
  std::set<std::vector<int>> least_splits(const Cuts& cuts) {
    const size_t stages = cuts.size() - 1, types = problem_.types.size(), degrees = problem_.splits.size();
    weights_.assign(stages, 0);
    for (size_t i = 0; i < stages; ++i)
      for (int l = cuts[i]; l < cuts[i + 1]; ++l) weights_[i] += problem_.weight_bytes[l];
    const int64_t replicas = found() ? std::max<int64_t>(2, best_.replicas()) : 16;
    // [stage][split][type, or any]
    std::vector<double> rings, bounds;
    for (size_t i = 0; i < stages; ++i)
      for (size_t d = 0; d < degrees; ++d)
        for (size_t t = 0; t <= types; ++t) {
          double slowest = 0;
          for (size_t a = 0; a < types; ++a)
            for (size_t b = 0; b < types; ++b)
              if (t == types || (a == t && b == t))
                slowest = std::max(slowest, ring_seconds(problem_, weights_[i] / problem_.splits[d], replicas,
                                                         *rings_[a * types + b]));
          rings.push_back(slowest);
        }
    bounds = rings;
    std::ranges::sort(bounds);
    std::set<std::vector<int>> out;
    const int none = static_cast<int>(degrees);
    for (const double bound : bounds) {
      const auto least = [&](size_t stage, size_t type) {
        for (size_t d = 0; d < degrees; ++d)
          if (rings[(stage * degrees + d) * (types + 1) + type] <= bound) return static_cast<int>(d);
        return none;
      };
      // Stages in [from, to) on one type alone, the others on any.
      const auto add = [&](size_t from, size_t to, size_t only) {
        std::vector<int> row(stages * types, none);
        for (size_t i = 0; i < stages; ++i) {
          const bool alone = i >= from && i < to;
          const int d = least(i, alone ? only : types);
          if (d == none) return;
          for (size_t t = 0; t < types; ++t)
            if (!alone || t == only) row[i * types + t] = d;
        }
        out.insert(std::move(row));
      };
      add(0, 0, 0);
      for (size_t t = 0; t < types && types > 1; ++t) {
        bool less = false;
        for (size_t i = 0; i < stages; ++i) less |= least(i, t) < least(i, types);
        if (!less) continue;
        for (size_t k = 1; k <= stages; ++k) add(0, k, t);
        for (size_t k = 1; k < stages; ++k) add(k, stages, t);
      }
    }
    return out;
  }

  double sync(const std::vector<int>& least, int64_t replicas) const {
    const size_t types = problem_.types.size();
    double most = 0;
    for (size_t i = 0; i < weights_.size(); ++i) {
      const auto here = std::span(least).subspan(i * types, types);
      const int d = *std::ranges::min_element(here);
      for (size_t a = 0; a < types; ++a)
        for (size_t b = 0; b < types; ++b)
          if (here[a] < static_cast<int>(problem_.splits.size()) && here[b] < static_cast<int>(problem_.splits.size()))
            most = std::max(most,
                            ring_seconds(problem_, weights_[i] / problem_.splits[d], replicas, *rings_[a * types + b]));
    }
    return most;
  }

  double goal() const { return best_seconds_ * (1 - search_.worth); }

  // Of those in [from, to), which are in the order of their all-reduces: none, if all that any of them allows, with the
  // shortest all-reduce of all, is too slow.
  void try_leasts(const Cuts& cuts, size_t from, size_t to) {
    if (from >= to || late()) return;
    std::vector<int> least = leasts_[from];
    for (size_t j = from + 1; j < to; ++j)
      for (size_t i = 0; i < least.size(); ++i) least[i] = std::min(least[i], leasts_[j][i]);
    if (!found()) {
      // Any plan first, for a bound: of those that allow most.
      for (size_t j = to; j-- > from && !found();)
        if (make_kinds(cuts, leasts_[j], leasts_[j])) try_least(cuts, leasts_[j]);
      if (!found()) return;
    }
    if (to - from == 1) {
      if (make_kinds(cuts, leasts_[from], leasts_[from])) try_least(cuts, leasts_[from]);
      return;
    }
    if (!make_kinds(cuts, least, leasts_[from])) return;
    const size_t middle = (from + to) / 2;
    try_leasts(cuts, from, middle);
    try_leasts(cuts, middle, to);
  }

  int64_t most_replicas(const Cuts& cuts) const {
    int64_t devices = 0;
    for (const ClusterDevices& type : problem_.types)
      devices += std::accumulate(type.nodes.begin(), type.nodes.end(), 0);
    return std::max<int64_t>(1, devices / static_cast<int64_t>(cuts.size() - 1));
  }

  // Whether kinds of replicas as `least` allows may do better than the best plan, with the all-reduce of `reduced`.
  bool make_kinds(const Cuts& cuts, const std::vector<int>& least, const std::vector<int>& reduced) {
    const int64_t most = most_replicas(cuts);
    const double fastest = tables_.fastest(cuts, least);  // samples a second of one replica
    double deadline = 8 * guess_;
    if (found()) {
      // The fewer replicas, the less there is to reduce; but so many there have to be.
      const auto replicas =
          static_cast<int64_t>(std::ceil(static_cast<double>(problem_.batch) / (fastest * goal()) - 1e-9));
      fewest_ = std::max<int64_t>(1, replicas);
      deadline = goal() - sync(reduced, fewest_);
    }
    if (deadline <= 0 || fewest_ > most) return false;
    // Kinds that are worth more than their devices, until there are none, or enough are known.
    kinds_.clear();
    const size_t rows = tables_.rows();
    const auto batch = static_cast<double>(problem_.batch);
    const ShareRow all = have(most);
    std::array<double, kShareRows> worth{};
    for (size_t r = 0; r < rows; ++r) worth[r] = rates_[r] * deadline;
    // Where there are few, no bound has to choose.
    const bool complete = tables_.all_kinds(cuts, least, deadline, 128, kinds_);
    double reached = 0;
    for (int turn = 0; turn < 10; ++turn) {
      const double ratio = complete ? 1.0 : tables_.kinds(cuts, least, deadline, worth, 1.1, kinds_);
      if (ratio == 0 || kinds_.empty()) return false;  // nothing fits, or nothing ends in time
      double bound = 0;
      for (size_t r = 0; r < rows; ++r) bound += worth[r] * all[r];
      // By duality: where no kind is worth more than its devices, no shares of kinds reach more than all of them.
      if (!complete && ratio < 1.01 && bound * 1.01 < batch) return false;
      if (complete ? turn > 0 : ratio < 1.01 && reached > 0.98 * bound) break;
      std::vector<ShareKind> shares;
      for (const ReplicaKind& k : kinds_)
        shares.push_back({k.use, static_cast<double>(k.micro_batch) * (deadline - k.fill) / k.peak});
      std::array<double, kShareRows> row{};
      reached = share_bound(shares, all, rows, &row);
      for (size_t r = 0; r < rows; ++r) worth[r] = turn == 0 ? row[r] : 0.7 * row[r] + 0.3 * worth[r];
    }
    if (reached >= batch)
      for (size_t r = 0; r < rows; ++r) rates_[r] = worth[r] / deadline;
    return !kinds_.empty() && reached >= batch * (1 - 1e-9);
  }

  // Whole replicas do not sum up as fractions do: what is best at prices nearby may round better.
  void enrich(const Cuts& cuts, const std::vector<int>& least) {
    const double deadline = found() ? goal() - sync(least, fewest_) : 8 * guess_;
    const size_t rows = tables_.rows();
    std::array<double, kShareRows> worth{};
    for (const double tilt : {1.0, 0.8, 1.25}) {
      for (size_t r = 0; r < rows; ++r) worth[r] = rates_[r] * deadline * (r == 0 ? tilt : 1 / std::sqrt(tilt));
      tables_.kinds(cuts, least, deadline, worth, 1.02, kinds_);
    }
  }

  void try_least(const Cuts& cuts, const std::vector<int>& least) {
    enrich(cuts, least);
    const int64_t most = most_replicas(cuts);
    const auto sync_of = [&](int64_t n) { return sync(least, n); };
    // Fewer replicas reduce less; more of them do more.
    for (int64_t hi = most; hi >= fewest_; hi /= 2) range(cuts, sync_of, std::max(hi / 2, fewest_ - 1), hi);
  }

  // The kinds that are worth having by a deadline, and their samples.
  void shares_by(double deadline) {
    shares_.clear();
    share_kinds_.clear();
    for (size_t k = 0; k < kinds_.size(); ++k) {
      const int64_t m = kinds_[k].micro_batches_by(deadline);
      if (m < 1) continue;
      const ShareKind share{kinds_[k].use, static_cast<double>(m * kinds_[k].micro_batch)};
      const auto dominates = [&](const ShareKind& a, const ShareKind& b) {
        if (a.samples < b.samples) return false;
        for (size_t r = 0; r < tables_.rows(); ++r)
          if (a.use[r] > b.use[r]) return false;
        return true;
      };
      if (std::ranges::any_of(shares_, [&](const ShareKind& other) { return dominates(other, share); })) continue;
      size_t keep = 0;
      for (size_t j = 0; j < shares_.size(); ++j)
        if (!dominates(share, shares_[j])) {
          shares_[keep] = shares_[j];
          share_kinds_[keep++] = share_kinds_[j];
        }
      shares_.resize(keep);
      share_kinds_.resize(keep);
      shares_.push_back(share);
      share_kinds_.push_back(k);
    }
  }

  bool bound_allows(double deadline, int64_t replicas) {
    shares_by(deadline);
    if (shares_.empty()) return false;
    return share_bound(shares_, have(replicas), tables_.rows()) >= static_cast<double>(problem_.batch) - 1e-6;
  }

  ShareRow have(int64_t replicas) const {
    ShareRow row = tables_.have();
    row[tables_.rows() - 1] = static_cast<int32_t>(replicas);
    return row;
  }

  // Replicas in (lo, hi].
  template <class Sync>
  void range(const Cuts& cuts, const Sync& sync_of, int64_t lo, int64_t hi) {
    if (!found()) {
      for (double deadline = guess_ / 8; deadline < guess_ * 1e4 && !found(); deadline *= 1.5) by(cuts, deadline, hi);
      if (!found()) return;
    }
    if (late()) return;
    const double least = sync_of(lo + 1), most = sync_of(hi);
    if (goal() <= least || !bound_allows(goal() - least, hi)) return;
    if (most - least > search_.worth * best_seconds_ && hi > lo + 1) {
      const int64_t middle = (lo + hi + 1) / 2;
      range(cuts, sync_of, middle, hi);
      range(cuts, sync_of, lo, middle);
      return;
    }
    double good = goal() - most;
    if (good <= 0 || !by(cuts, good, hi)) return;
    good = std::min(good, goal() - most);
    double bad = good * 0.9;
    while (bad > 0 && !late() && bound_allows(bad, hi) && by(cuts, bad, hi)) {
      good = std::min(bad, goal() - most);
      bad = good * 0.9;
    }
    while (good - bad > search_.worth * good && !late()) {
      const double middle = (good + bad) / 2;
      if (bound_allows(middle, hi) && by(cuts, middle, hi))
        good = std::min(middle, goal() - most);
      else
        bad = middle;
    }
  }

  // A plan of at most so many replicas by a deadline, if there is one; kept where it is the best.
  bool by(const Cuts& cuts, double deadline, int64_t replicas) {
    shares_by(deadline);
    if (shares_.empty()) return false;
    const auto counts = share_out(shares_, have(replicas), tables_.rows(), static_cast<double>(problem_.batch));
    if (!counts) return false;
    ClusterPlan plan{.cuts = cuts, .classes = {}};
    int64_t samples = 0;
    struct Used {
      const ReplicaKind* kind;
      ReplicaClass* c;
      double seconds() const { return kind->fill + kind->peak * static_cast<double>(c->micro_batches); }
    };
    std::vector<Used> used;
    plan.classes.reserve(shares_.size());
    for (size_t j = 0; j < shares_.size(); ++j) {
      if ((*counts)[j] == 0) continue;
      const ReplicaKind& kind = kinds_[share_kinds_[j]];
      plan.classes.push_back({.replicas = (*counts)[j],
                              .micro_batches = kind.micro_batches_by(deadline),
                              .micro_batch = kind.micro_batch,
                              .stages = kind.stages});
      used.push_back({&kind, &plan.classes.back()});
      samples += plan.classes.back().replicas * plan.classes.back().micro_batches * kind.micro_batch;
    }
    // Samples beyond the batch are taken from whoever ends last, as long as all of that class can do without.
    for (;;) {
      const auto last = std::ranges::max_element(used, {}, &Used::seconds);
      const int64_t less = last->c->replicas * last->c->micro_batch;
      if (samples - less < problem_.batch || last->c->micro_batches == 1) break;
      samples -= less;
      --last->c->micro_batches;
    }
    const double seconds = price(problem_, plan).step_seconds;
    if (seconds < best_seconds_) {
      best_seconds_ = seconds;
      best_ = std::move(plan);
    }
    return true;
  }

  // Cuts that are even for some kind of replica.
  std::set<Cuts> balanced(int stages) const {
    std::set<Cuts> out;
    if (stages <= search_.exhaustive_stages) {
      Cuts cuts(static_cast<size_t>(stages) + 1);
      for (int i = 0; i < stages; ++i) cuts[i] = i;
      cuts.back() = problem_.layers;
      for (;;) {
        out.insert(cuts);
        int i = stages - 1;
        while (i > 0 && cuts[i] == problem_.layers - (stages - i)) --i;
        if (i <= 0) return out;
        ++cuts[i];
        for (int j = i + 1; j < stages; ++j) cuts[j] = cuts[static_cast<size_t>(j) - 1] + 1;
      }
    }
    const size_t places = tables_.places().size();
    for (size_t b = 0; b < tables_.micro_batches().size(); ++b)
      for (size_t p = 0; p < places; ++p) {
        add_balanced(out, b, std::vector<size_t>(static_cast<size_t>(stages), p));
        for (size_t q = 0; q < places && stages <= 6; ++q) {
          if (tables_.places()[p].type == tables_.places()[q].type) continue;
          for (int first = 1; first < stages; ++first) {
            std::vector<size_t> mixed(static_cast<size_t>(stages), q);
            std::fill_n(mixed.begin(), first, p);
            add_balanced(out, b, mixed);
          }
        }
      }
    return out;
  }

  void add_balanced(std::set<Cuts>& out, size_t b, const std::vector<size_t>& places) const {
    const int stages = static_cast<int>(places.size()), layers = problem_.layers;
    const auto width = static_cast<size_t>(layers + 1);
    std::vector<double> best(width * static_cast<size_t>(stages + 1), KindTables::kNever);
    std::vector<int> from(best.size(), 0);
    best[0] = 0;
    for (int i = 0; i < stages; ++i)
      for (int end = i + 1; end <= layers - (stages - 1 - i); ++end)
        for (int begin = end - 1; begin >= i; --begin) {
          const double before = best[static_cast<size_t>(i) * width + static_cast<size_t>(begin)];
          const double here = tables_.stage_seconds(b, places[i], begin, end);
          double& now = best[static_cast<size_t>(i + 1) * width + static_cast<size_t>(end)];
          if (here >= now) break;
          if (before >= KindTables::kNever || !tables_.fits(b, places[i], begin, end, stages - 1 - i)) continue;
          if (const double slowest = std::max(before, here); slowest < now) {
            now = slowest;
            from[static_cast<size_t>(i + 1) * width + static_cast<size_t>(end)] = begin;
          }
        }
    if (best.back() >= KindTables::kNever) return;
    Cuts cuts{layers};
    for (int i = stages; i > 0; --i)
      cuts.insert(cuts.begin(), from[static_cast<size_t>(i) * width + static_cast<size_t>(cuts.front())]);
    out.insert(std::move(cuts));
  }

  const ClusterProblem& problem_;
  const ClusterSearch& search_;
  KindTables tables_;
  double begin_;
  double guess_ = 1;
  std::vector<const BandwidthCurve*> rings_;
  std::set<Cuts> tried_;
  ClusterPlan best_;
  double best_seconds_ = 1e300;
  std::vector<double> weights_;             // of the cuts that are tried, by stage
  std::array<double, kShareRows> rates_{};  // what one more of each row was worth last, in samples a second
  std::vector<std::vector<int>> leasts_;
  int64_t fewest_ = 1;
  std::vector<ReplicaKind> kinds_;
  std::vector<ShareKind> shares_;
  std::vector<size_t> share_kinds_;
};

}  // namespace

FoundPipelines plan_pipelines(const ClusterProblem& problem, const ClusterSearch& search, const ClusterPlan* present) {
  verify(problem);
  Searcher searcher(problem, search);
  if (present != nullptr && !present->cuts.empty() && present->cuts.back() == problem.layers) {
    searcher.try_cuts(present->cuts);
    searcher.climb();
  }
  if (!search.near_only || !searcher.found()) {
    searcher.all_stages();
    searcher.climb();
  }
  return searcher.result();
}

ClusterProblem without_device(ClusterProblem problem, int type) {
  for (int& node : problem.types[type].nodes)
    if (node > 0) {
      --node;
      return problem;
    }
  throw invalid("no device of {} is left that could be lost", problem.types[type].name);
}

ClusterProblem with_slow_node(ClusterProblem problem, int type, double slower) {
  const auto t = static_cast<size_t>(type);
  if (problem.types[t].nodes.empty()) throw invalid("no node of {} could be slow", problem.types[t].name);
  ClusterDevices slow = problem.types[t];
  slow.name += " slow";
  slow.slower *= slower;
  slow.nodes.assign(1, problem.types[t].nodes.back());
  problem.types[t].nodes.pop_back();
  problem.types.push_back(slow);
  std::vector<LayerTimes> more;
  for (LayerTimes times : problem.times)
    if (times.type == type) {
      times.type = static_cast<int>(problem.types.size()) - 1;
      more.push_back(std::move(times));
    }
  problem.times.insert(problem.times.end(), more.begin(), more.end());
  // Its links are as they were: rows and columns of the type again.
  const size_t degrees = problem.splits.size();
  for (auto& row : problem.sends) {
    const std::vector<BandwidthCurve> again(row.begin() + static_cast<int64_t>(t * degrees),
                                            row.begin() + static_cast<int64_t>((t + 1) * degrees));
    row.insert(row.end(), again.begin(), again.end());
  }
  for (size_t d = 0; d < degrees; ++d) {
    std::vector<BandwidthCurve> row = problem.sends[t * degrees + d];
    problem.sends.push_back(std::move(row));
  }
  return problem;
}

FoundPipelines replan_slow(const ClusterProblem& problem, int type, double slower, const ClusterPlan& present,
                           double within_seconds) {
  const ClusterSearch search{.within_seconds = within_seconds / 2, .near_only = true};
  FoundPipelines idle = plan_pipelines(without_device(problem, type), search, &present);
  FoundPipelines used = plan_pipelines(with_slow_node(problem, type, slower), search, &present);
  FoundPipelines& best = used.price.step_seconds < idle.price.step_seconds ? used : idle;
  best.seconds = idle.seconds + used.seconds;
  return best;
}

}  // namespace whale
