#include "compile/remedies.h"

#include <algorithm>
#include <limits>
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
    return std::move(out_);
  }

 private:
  using Change = RemedyChanges::Change;
  using Tried = RemedyChanges::Tried;
  using Measured = RemedyChanges::Measured;
  using Guess = RemedyChanges::Guess;
  static constexpr size_t kTold = 3;

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
  std::optional<Measured> measured(const Change& change, size_t changes) const {
    try {
      const double price = plan_.memory_price;
      const Estimate e = estimate_of(estimated_, changes_.options_of(change), price);
      Measured out{{change, changes, missing_bytes(e, devices_), 0, e.seconds}, held_by_devices(e, devices_.size())};
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

  void estimate_all() {
    std::optional<Measured> base = measured({asked_}, 0);
    if (!base) return;
    out_.seconds = base->tried.seconds;
    for (size_t d = 0; d < devices_.size(); ++d) {
      const MemoryClasses& m = base->held[d];
      const int64_t has = devices_[d].memory_bytes;
      if (has > 0 && m.parameters + m.state + m.buffers > has) variables_are_too_large_ = true;
    }
    // Offload last: it is slow as a rule, and of deep models slow to estimate.
    std::vector<Measured> singles;
    for (const bool offload : {false, true}) {
      bool more = false;
      for (const Change& change : changes_.single_changes()) {
        if ((change.options.offload != asked_.offload) != offload) continue;
        if (std::optional<Measured> one = measured(change, 1))
          tried_.push_back(one->tried), singles.push_back(std::move(*one)), more = true;
      }
      if (more) estimate_together(*base, singles, offload);
    }
  }

  // `offload`: those alone that have some.
  void estimate_together(const Measured& base, const std::vector<Measured>& singles, bool offload) {
    constexpr size_t kMost = 100;  // estimates
    std::vector<Guess> guesses = changes_.combined(base, singles);
    // Guesses are not exact: what lacks a little may fit, and is looked at behind what lacks nothing.
    int64_t least = INT64_MAX;
    for (const DeviceSpec& d : devices_)
      if (d.memory_bytes > 0) least = std::min(least, d.memory_bytes);
    const auto hopeful = [&](const Guess& g) { return g.missing <= 0.2 * static_cast<double>(least); };
    std::ranges::stable_sort(guesses, [&](const Guess& a, const Guess& b) {
      const auto key = [&](const Guess& g) {
        return std::tuple(!hopeful(g), g.missing > 0, hopeful(g) ? g.seconds : g.missing);
      };
      return key(a) < key(b);
    });
    // First what saves most: whether anything fits, and the least memory there is.
    std::stable_partition(guesses.begin(), guesses.end(),
                          [&](const Guess& g) { return changes_.saves_all(g.change, singles); });
    size_t estimates = 0;
    for (const Guess& guess : guesses) {
      if ((guess.change.options.offload != asked_.offload) != offload || is_pointless(guess.change, guess.seconds))
        continue;
      // The rest is not likely to fit, or to be among the fastest that do.
      if (fitting(hopeful(guess) ? guess.seconds : std::numeric_limits<double>::infinity()) >= 2 * kTold) continue;
      if (++estimates > kMost) {
        out_.out_of_time = true;
        break;
      }
      if (const std::optional<Measured> one = measured(guess.change, guess.changes)) tried_.push_back(one->tried);
    }
  }

  // Those that fit, as fast as this.
  size_t fitting(double seconds) const {
    return static_cast<size_t>(
        std::ranges::count_if(tried_, [&](const Tried& t) { return t.missing == 0 && t.seconds <= seconds; }));
  }
  // Does all that one that fits does, and more, which brings nothing.
  static bool does_more(const Change& more, double seconds, const Tried& less) {
    return saves_as_much(more.options, less.change.options) && more.times >= less.change.times &&
           seconds >= less.seconds;
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
      return std::tuple(a.missing, a.seconds, a.changes) < std::tuple(b.missing, b.seconds, b.changes);
    });
    std::vector<const Tried*> fits, told;
    for (const Tried& t : tried_)
      if (t.missing == 0) fits.push_back(&t);
    // The fastest, the one of fewest changes, and others by their time.
    if (fits.size() > 2) {
      const auto simplest = std::ranges::min_element(fits, {}, &Tried::changes);
      std::rotate(fits.begin() + (simplest == fits.begin() ? 0 : 1), simplest, simplest + 1);
    }
    for (const Tried* t : fits) {
      if (told.size() == kTold) break;
      if (std::ranges::any_of(told, [&](const Tried* o) { return does_more(t->change, t->seconds, *o); })) continue;
      const CompileOptions options = changes_.options_of(t->change);
      const std::optional<Fits> made = planned(graph_, options);
      if (!made) continue;
      told.push_back(t);
      Remedy& r = out_.fit.emplace_back(Remedy{changes_.flags_of(options), made->bytes, 0, t->seconds});
      if (made->memory_price == plan_.memory_price) continue;
      r.seconds = estimate_of(estimated_, options, made->memory_price).seconds;
    }
    std::ranges::stable_sort(out_.fit, {}, &Remedy::seconds);
    const auto nearest = std::ranges::find_if(tried_, [](const Tried& t) { return t.missing > 0; });
    if (out_.fit.empty() && nearest != tried_.end()) out_.nearest = remedy_of(*nearest);
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
  void search_others() {
    within(2 * effort_.search + effort_.plans, [&] {
      CompileOptions options = asked_;
      options.search = {.seconds = effort_.search, .simulated = 1, .ranks = 2};  // all devices, as listed
      options.accumulation = 0;
      const Found found = search(graph_, devices_, options);
      size_t looked = 0;
      for (const Judged& j : found.list) {
        if (j.missing > 0 || !(j.seconds > 0) || ++looked > kTold) break;
        CompileOptions with = asked_;
        static_cast<PlanOptions&>(with) = j.candidate.options;
        with.accumulation = j.candidate.accumulation;
        if (!j.candidate.strategy.empty()) with.strategy = j.candidate.strategy;
        const std::optional<Fits> fits = planned(graph_, with);
        if (!fits) continue;
        out_.automatic = Remedy{changes_.flags_of(with), fits->bytes, 0, j.seconds};
        return;
      }
      const Judged* nearest = nullptr;
      for (const Judged& j : found.list)
        if (j.missing > 0 && (nearest == nullptr || j.missing < nearest->missing)) nearest = &j;
      out_.automatic_lost = fmt::format("Nor does any of {} other strategies that auto looked at", found.list.size());
      if (nearest != nullptr)
        out_.automatic_lost +=
            fmt::format(" (nearest {}, {})", bytes_text(static_cast<double>(nearest->bytes)), whole_text(*nearest));
    });
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
  bool variables_are_too_large_ = false;  // of a device, before any sample
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
