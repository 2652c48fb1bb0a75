#include "compile/remedies.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <set>
#include <thread>

#include "base/thread_seconds.h"
#include "base/watch.h"
#include "cluster/device_kinds.h"
#include "compile/automatic.h"
#include "compile/checks.h"
#include "compile/estimate.h"
#include "compile/remedy_changes.h"
#include "compile/rooms.h"
#include "compile/savings.h"
#include "grad/passes.h"

namespace whale {
namespace {

class Remedying {
 public:
  Remedying(const Graph& graph, const std::vector<DeviceSpec>& devices, const CompileOptions& asked, const Plan& plan,
            const Shortage& shortage, const RemedyEffort& effort, bool options_too)
      : graph_(graph),
        devices_(devices),
        asked_(asked),
        plan_(plan),
        shortage_(shortage),
        effort_(effort),
        trains_(shortage.entry == "train"),
        changes_(graph_, devices_, asked_, plan_, shortage_, options_too) {
    asked_.rooms = {}, asked_.stages = {}, asked_.dump = {}, asked_.verify_passes = false;
    asked_.search = {};
    // What is estimated is of the entry that lacks.
    const bool other = shortage.batch > 0 && shortage.batch != batch_of(graph);
    Graph batched = other ? rebatch(graph, shortage.batch) : graph;
    evaluates_ = !trains_ && trains(graph);
    if (evaluates_)
      estimated_ = graph, inference_ = for_inference(std::move(batched));
    else
      estimated_ = std::move(batched);
  }

  Remedies run() {
    within(effort_.estimates, [&] { estimate_all(); });
    within(effort_.plans, [&] { plan_the_best(); });
    within(effort_.plans / 2, [&] { find_batch(); });
    if (out_.fit.empty() && effort_.search > 0) search_others();
    settle();
    return std::move(out_);
  }

 private:
  using Change = RemedyChanges::Change;
  using Tried = RemedyChanges::Tried;
  using Measured = RemedyChanges::Measured;
  using Guess = RemedyChanges::Guess;
  static constexpr size_t kTold = 3;  // and twice as many are planned

  // Work that may end early, by this thread's own time: what it found by then is there.
  template <class Work>
  void within(double seconds, Work work) {
    if (seconds <= 0) return;
    try {
      const double end = thread_seconds() + seconds;
      const auto mine = std::this_thread::get_id();
      Watch watch("remedies", nullptr, 0);
      watch.looked = [=] {  // on other threads too, whose own time begins with the work that they are given
        constexpr int kSeldom = 64;
        static thread_local int looks = 0;
        if (++looks % kSeldom == 0 && thread_seconds() > (std::this_thread::get_id() == mine ? end : seconds))
          throw Stopped(error(Code::kDeadlineExceeded, "there is no more time for remedies"));
      };
      work();
    } catch (const Stopped&) {
      out_.out_of_time = true;
    } catch (const Error&) {  // there is another one to tell of
    }
  }

  // ---- estimates ------------------------------------------------------------------------------------------------
  Estimate estimate_of(const Graph& graph, CompileOptions options, double price) const {
    options.train_batches.clear(), options.eval_batches.clear();
    return are_unlike(devices_) ? fitted(graph, devices_, options, price, Rooms(devices_), Care::kQuick).estimate
                                : estimate_at(graph, devices_, options, price, Care::kQuick);
  }
  // Of the entry that is evaluated: what the plan keeps from step to step is that of training.
  Estimate estimate_of_evaluation(const Change& change, double price) const {
    CompileOptions options = changes_.options_of(change);
    Graph graph = inference_;
    if (options.accumulation > 0) graph.training.accumulation = options.accumulation;
    static_cast<PlanOptions&>(options) = {.overlap = asked_.overlap, .fusion = asked_.fusion};
    options.offload = change.options.offload & kOffloadParameters;
    options.accumulation = 0, options.fetch.clear();
    return estimate_of(graph, options, price);
  }
  std::optional<Measured> measured(const Change& change, size_t changes, double price) const {
    try {
      const Estimate e = estimate_of(estimated_, changes_.options_of(change), price);
      Measured out{{change, changes, price, missing_bytes(e, devices_), 0, e.seconds},
                   held_by_devices(e, devices_.size())};
      if (evaluates_) {
        const auto there = held_by_devices(estimate_of_evaluation(change, price), devices_.size());
        out.tried.missing = 0;
        for (size_t d = 0; d < devices_.size(); ++d) {
          MemoryClasses& m = out.held[d];
          m.gradients = there[d].gradients, m.copies = there[d].copies, m.activations = there[d].activations;
          if (const int64_t has = devices_[d].memory_bytes; has > 0)
            out.tried.missing = std::max(out.tried.missing, m.total() - has);
        }
      }
      for (const MemoryClasses& m : out.held) out.tried.bytes = std::max(out.tried.bytes, m.total());
      return out;
    } catch (const Error&) {  // not with this model and strategy
      return std::nullopt;
    }
  }
  // Noted as well, but for what was asked for itself.
  const Measured* look_at(const Change& change, size_t changes, double price) {
    const auto [at, is_new] = seen_.try_emplace({changes_.flags_of(changes_.options_of(change)), price});
    if (is_new) at->second = measured(change, changes, price);
    if (is_new && at->second && changes > 0) tried_.push_back(at->second->tried);
    return at->second ? &*at->second : nullptr;
  }

  // What holds least is of one price of memory for some changes, of another for others.
  std::vector<double> other_prices() const {
    std::vector<double> out;
    for (const double price : {last_price(asked_), price_of(asked_, kPrices - 1), price_of(asked_, 0)})
      if (price != plan_.memory_price && std::ranges::find(out, price) == out.end()) out.push_back(price);
    return out;
  }

  void estimate_all() {
    began_ = thread_seconds();
    const Measured* base = look_at({asked_}, 0, plan_.memory_price);
    if (base == nullptr) return;
    out_.seconds = base->tried.seconds;
    for (size_t d = 0; d < devices_.size(); ++d) {
      const MemoryClasses& m = base->held[d];
      const int64_t has = devices_[d].memory_bytes;
      if (has > 0 && m.parameters + m.state + m.buffers > has) variables_are_too_large_ = true;
    }
    // Offload last: it is slow as a rule, and of deep models slow to estimate; but for that of one class which is as
    // much as lacks, before other prices are tried. What half of the time was too short for comes behind all.
    const bool offloads = asked_.offload != 0;  // then each estimate takes as long
    if (offloads) look_at_singles(*base, true, true);
    look_at_singles(*base, false);
    if (!offloads && !any_fits(false)) look_at_singles(*base, true, true);
    for (const bool offload : {false, true}) estimate_some(*base, offload);
    if (!cut_short_) return;
    half_ = false;
    for (const bool offload : {false, true}) estimate_some(*base, offload);
  }

  // Half of the time is for offload.
  bool is_late(bool offload) {
    const bool late = half_ && !offload && thread_seconds() > began_ + effort_.estimates / 2;
    cut_short_ = cut_short_ || late;
    return late;
  }

  // Those that were not looked at, and what fits together with them; `offload`: with more of it than was asked for, and
  // without. `enough`: only what may fit alone.
  void look_at_singles(const Measured& base, bool offload, bool enough = false) {
    for (const Change& change : changes_.single_changes(base)) {
      if ((change.options.offload != asked_.offload) != offload || is_single(change)) continue;
      if (enough && !changes_.may_be_enough(change, base)) continue;
      if (is_late(offload)) break;
      if (const Measured* one = look_at(change, 1, plan_.memory_price)) singles_.push_back(*one);
      // There may be no time for the others, which free less.
      if (offload && !any_fits(true)) estimate_together(base, singles_, offload, Look::kAtFitting);
    }
    estimate_together(base, singles(offload), offload, Look::kAtFitting);
  }

  // At the plan's price; `offload`: also those with more of it.
  std::vector<Measured> singles(bool offload) const {
    std::vector<Measured> out;
    for (const Measured& one : singles_)
      if (offload || one.tried.change.options.offload == asked_.offload) out.push_back(one);
    return out;
  }

  void estimate_some(const Measured& base, bool offload) {
    look_at_singles(base, offload);
    if (is_late(offload)) return;
    const double price = any_fits(offload) ? plan_.memory_price : price_of_least(base, offload);
    const Measured* there = look_at({asked_}, 0, price);
    if (there == nullptr) return;
    std::vector<Measured> at_price;
    for (const Measured& one : singles(offload)) {
      if (is_late(offload)) return;
      if (const Measured* same = look_at(one.tried.change, 1, price)) at_price.push_back(*same);
    }
    estimate_together(*there, at_price, offload, Look::kAtAll);
  }

  bool is_single(const Change& change) const {
    const std::string flags = changes_.flags_of(changes_.options_of(change));
    return std::ranges::any_of(
        singles_, [&](const Measured& m) { return changes_.flags_of(changes_.options_of(m.tried.change)) == flags; });
  }

  // Whether anything fits at all, and what the least memory is: the single ones that help, together, and all of them,
  // at each price. That of the least.
  double price_of_least(const Measured& base, bool offload) {
    double least = std::numeric_limits<double>::infinity(), price = plan_.memory_price;
    const auto look = [&](const Guess& all, double at) {
      if ((all.change.options.offload != asked_.offload) != offload || is_late(offload)) return;
      const Measured* one = look_at(all.change, all.changes, at);
      if (one != nullptr && static_cast<double>(one->tried.bytes) < least)
        least = static_cast<double>(one->tried.bytes), price = at;
    };
    const std::vector<Measured> mine = singles(offload);
    const std::vector<Guess> helping = changes_.together(base, mine, true);
    for (const Guess& all : helping) look(all, plan_.memory_price);
    for (const Guess& all : changes_.together(base, mine, false)) look(all, plan_.memory_price);
    for (const double other : other_prices())
      for (const Guess& all : helping) look(all, other);
    return price;
  }

  // Those that fit by what single ones let expect, or all.
  enum class Look { kAtFitting, kAtAll };
  // All at the price of `base` and `singles`; `offload`: as for estimate_some.
  void estimate_together(const Measured& base, const std::vector<Measured>& singles, bool offload, Look look) {
    constexpr size_t kMost = 100;  // estimates
    std::vector<Guess> guesses = changes_.combined(base, singles);
    // Guesses are not exact: what lacks a little may fit, and is looked at behind what lacks nothing.
    int64_t least = INT64_MAX;
    for (const DeviceSpec& d : devices_)
      if (d.memory_bytes > 0) least = std::min(least, d.memory_bytes);
    const auto hopeful = [&](const Guess& g) { return g.missing <= 0.2 * static_cast<double>(least); };
    std::ranges::stable_sort(guesses, [&](const Guess& a, const Guess& b) {
      const auto key = [&](const Guess& g) {
        return hopeful(g) ? std::tuple(0, g.missing > 0, about(g.seconds), g.changes, g.seconds)
                          : std::tuple(1, g.changes > 2, int64_t{0}, size_t{0}, g.missing);
      };
      return key(a) < key(b);
    });
    size_t estimates = 0;
    for (const Guess& guess : guesses) {
      if (look == Look::kAtFitting && guess.missing > 0) continue;
      if ((guess.change.options.offload != asked_.offload) != offload || is_pointless(guess.change, guess.seconds))
        continue;
      // The rest is not likely to fit, or to be among the fastest that do.
      if (fitting(hopeful(guess) ? guess.seconds : std::numeric_limits<double>::infinity()) >= 2 * kTold) continue;
      if (++estimates > kMost) out_.out_of_time = true;
      if (estimates > kMost || is_late(offload)) break;
      look_at(guess.change, guess.changes, base.tried.price);
    }
  }

  // `offload`: also with more of it.
  bool any_fits(bool offload) const {
    return std::ranges::any_of(tried_, [&](const Tried& t) {
      return t.missing == 0 && (offload || t.change.options.offload == asked_.offload);
    });
  }
  // Those that fit, as fast as this.
  size_t fitting(double seconds) const {
    return static_cast<size_t>(
        std::ranges::count_if(tried_, [&](const Tried& t) { return t.missing == 0 && t.seconds <= seconds; }));
  }
  // Alike where what is between them is worth no change more: steps of 2 %.
  static int64_t about(double seconds) { return seconds > 0 ? std::llround(std::log(seconds) / std::log(1.02)) : 0; }
  // Does all that one that fits does, and more, which brings nothing.
  static bool does_more(const Change& more, double seconds, const Tried& less) {
    return saves_as_much(more.options, less.change.options) && more.times >= less.change.times &&
           about(seconds) >= about(less.seconds);
  }
  bool is_pointless(const Change& change, double seconds) const {
    return std::ranges::any_of(tried_, [&](const Tried& t) { return t.missing == 0 && does_more(change, seconds, t); });
  }

  // ---- plans ----------------------------------------------------------------------------------------------------
  // Where the plan that is made of these options fits in all of its entries.
  struct Fits {
    int64_t bytes = 0;  // of its fullest device
    double memory_price = 1;
  };
  std::optional<Fits> planned(const Graph& graph, const CompileOptions& options) const {
    try {
      std::optional<Plan> plan = plan_that_fits(graph, devices_, options);
      if (!plan) return std::nullopt;
      int64_t most = 0;
      const auto fits = [&](const Entry& entry) {
        for (size_t p = 0; p < entry.programs.size(); ++p)
          most = std::max(most, memory_of(*plan, entry, p).device.total());
        return shortage_of(*plan, entry).bytes == 0;
      };
      for (const Entry& entry : plan->entries)
        if (!fits(entry)) return std::nullopt;
      const auto other = [&](const char* name, int64_t batch) {
        return plan->find_entry(name, batch) != nullptr || fits(entry_for(*plan, name, batch));
      };
      if (shortage_.batch > 0 && !other(trains_ ? "train" : "eval", shortage_.batch)) return std::nullopt;
      for (const int64_t batch : options.train_batches)
        if (!other("train", batch)) return std::nullopt;
      for (const int64_t batch : options.eval_batches)
        if (!other("eval", batch)) return std::nullopt;
      return Fits{most, plan->memory_price};
    } catch (const Error&) {
      return std::nullopt;
    }
  }

  void plan_the_best() {
    std::ranges::stable_sort(tried_, [](const Tried& a, const Tried& b) {
      const auto key = [](const Tried& t) { return std::tuple(t.missing, about(t.seconds), t.changes, t.seconds); };
      return key(a) < key(b);
    });
    std::vector<const Tried*> fits, told;
    for (const Tried& t : tried_)
      if (t.missing == 0) fits.push_back(&t);
    // The fastest, the one of fewest changes, and others by their time.
    if (fits.size() > 2) {
      const auto simplest = std::ranges::min_element(fits, {}, &Tried::changes);
      std::rotate(fits.begin() + (simplest == fits.begin() ? 0 : 1), simplest, simplest + 1);
    }
    size_t plans = 0;
    std::set<std::string> planned_before;  // another price says the same of it
    for (const Tried* t : fits) {
      if (told.size() == kTold || plans == 2 * kTold) break;
      if (std::ranges::any_of(told, [&](const Tried* o) { return does_more(t->change, t->seconds, *o); })) continue;
      const CompileOptions options = changes_.options_of(t->change);
      if (!planned_before.insert(changes_.flags_of(options)).second) continue;
      ++plans;
      if (out_.fit.empty()) out_.likely = remedy_of(*t);
      const std::optional<Fits> made = planned(graph_, options);
      out_.likely.reset();
      if (!made) continue;
      told.push_back(t);
      Remedy& r = out_.fit.emplace_back(Remedy{changes_.flags_of(options), made->bytes, 0, t->seconds});
      if (made->memory_price == t->price) continue;
      r.seconds = estimate_of(estimated_, options, made->memory_price).seconds;
    }
  }

  // What is said of all that was found.
  void settle() {
    std::ranges::stable_sort(out_.fit, {}, &Remedy::seconds);
    if (!out_.fit.empty()) return;
    for (const Tried& t : tried_)
      if (t.missing > 0) come_nearer(remedy_of(t));
  }
  void come_nearer(const Remedy& other) {
    const auto key = [](const Remedy& r) { return std::tuple(r.missing, r.bytes, r.seconds); };
    if (!out_.nearest || key(other) < key(*out_.nearest)) out_.nearest = other;
  }

  Remedy remedy_of(const Tried& t) const {
    return {changes_.flags_of(changes_.options_of(t.change)), t.bytes, t.missing, t.seconds};
  }

  // Three quarters, and halves from there on.
  void find_batch() {
    if (variables_are_too_large_) return;
    const int64_t own = shortage_.batch > 0 ? shortage_.batch : batch_of(graph_);
    Ints smaller{own * 3 / 4};
    for (int64_t batch = own / 2; batch > 0; batch /= 2) smaller.push_back(batch);
    for (const int64_t batch : smaller) {
      if (batch < 1 || !(shortage_.batch > 0 ? entry_fits(batch) : model_fits(batch))) continue;
      out_.batch = batch;
      return;
    }
  }
  bool model_fits(int64_t batch) const {
    try {
      const Graph smaller = rebatch(graph_, batch);
      if (trains_ && missing_bytes(estimate_of(smaller, asked_, plan_.memory_price), devices_) > 0) return false;
      CompileOptions options = asked_;
      std::erase_if(options.train_batches, [&](int64_t other) { return other > batch; });
      return planned(smaller, options).has_value();
    } catch (const Error&) {  // not so many samples
      return false;
    }
  }
  bool entry_fits(int64_t batch) const {
    try {
      return shortage_of(plan_, entry_for(plan_, trains_ ? "train" : "eval", batch)).bytes == 0;
    } catch (const Error&) {
      return false;
    }
  }

  // ---- other strategies -----------------------------------------------------------------------------------------
  // What auto found, as a change of what was asked for.
  CompileOptions options_of(const Candidate& found) const {
    CompileOptions out = asked_;
    static_cast<PlanOptions&>(out) = found.options;
    if (!found.strategy.empty()) out.strategy = found.strategy;
    if (changes_.is_asked_for(out.strategy)) out.strategy = asked_.strategy;
    // 0: the graph's, which a number that was given is not; a pipeline's own number goes with 1.
    const bool written = out.strategy.find("micro_batches=") != std::string::npos;
    out.accumulation = found.accumulation;
    if (found.accumulation == 0 && asked_.accumulation > 0)
      out.accumulation = written ? 1 : std::max<int64_t>(1, graph_.training.accumulation);
    return out;
  }

  // Of the same strategy they are changes like those that were looked at, and tried first.
  void search_others() {
    within(2 * effort_.search + effort_.plans, [&] {
      CompileOptions options = asked_;
      options.search = {.seconds = effort_.search, .simulated = 1, .ranks = 2};  // all devices, as listed
      options.accumulation = 0;
      const Found found = search(graph_, devices_, options);
      std::vector<const Judged*> same, others;
      for (const Judged& j : found.list)
        (changes_.has_form_asked_for(j.candidate.strategy) ? same : others).push_back(&j);
      for (const Judged* j : same)
        if (j->missing > 0 && !j->at_least) come_nearer(remedy_of(*j));
      std::optional<Remedy> found_same;
      if (plan_first(same, found_same)) return out_.fit.push_back(*found_same);
      if (plan_first(others, out_.automatic)) return;
      out_.others = others.size();
      const auto lacks = [](const Judged* j) { return j->missing > 0 && !j->at_least ? j->missing : INT64_MAX; };
      const auto nearest = std::ranges::min_element(others, {}, lacks);
      if (nearest != others.end() && lacks(*nearest) < INT64_MAX) out_.nearest_other = remedy_of(**nearest);
    });
  }
  Remedy remedy_of(const Judged& j) const {
    return {changes_.flags_of(options_of(j.candidate)), j.bytes, j.missing, j.seconds};
  }
  // Plans those that fit by their estimates, until one does. False: none of a few does.
  bool plan_first(const std::vector<const Judged*>& list, std::optional<Remedy>& out) const {
    size_t looked = 0;
    for (const Judged* j : list) {
      if (j->missing > 0 || !(j->seconds > 0) || ++looked > kTold) break;
      if (const std::optional<Fits> fits = planned(graph_, options_of(j->candidate))) {
        out = remedy_of(*j), out->bytes = fits->bytes;
        return true;
      }
    }
    return false;
  }

  const Graph& graph_;
  const std::vector<DeviceSpec>& devices_;
  CompileOptions asked_;
  const Plan& plan_;
  const Shortage& shortage_;
  const RemedyEffort& effort_;
  bool trains_;
  RemedyChanges changes_;
  bool evaluates_ = false;  // what lacks is the evaluation of a model that is trained
  Graph estimated_, inference_;
  bool variables_are_too_large_ = false;                                    // of a device, before any sample
  std::vector<Measured> singles_;                                           // at the plan's price
  std::map<std::pair<std::string, double>, std::optional<Measured>> seen_;  // by flags and price
  double began_ = 0;
  bool half_ = true, cut_short_ = false;  // of the time for what has no more offload; it was too short
  std::vector<Tried> tried_;
  Remedies out_;
};

}  // namespace

Remedies remedies_for(const Graph& graph, const std::vector<DeviceSpec>& devices, const CompileOptions& asked,
                      const Plan& plan, const Shortage& shortage, const RemedyEffort& effort, bool options_too) {
  try {
    return Remedying(graph, devices, asked, plan, shortage, effort, options_too).run();
  } catch (const Error&) {  // there is another one to tell of
    return {};
  }
}

}  // namespace whale
