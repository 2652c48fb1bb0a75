// What strategies would take: by estimates, with the savings of memory that they need; by the simulator.
#pragma once

#include <optional>
#include <vector>

#include "compile/automatic.h"
#include "compile/shapes.h"

namespace whale {

class Judge {
 public:
  // All of which outlive it.
  Judge(const Graph& graph, const std::vector<DeviceSpec>& devices, const CompileOptions& options,
        const ModelCounts& counts)
      : graph_(graph), devices_(devices), options_(options), counts_(counts) {}

  // With the savings that make it fit and cost least; where none do, with those that come nearest. None is looked for
  // where a step would take longer than `seconds` without.
  std::optional<Judged> first_that_fits(const Shape& shape, double seconds) const;
  // As it is. `by_plan`: what takes as long to estimate as to plan is timed by the simulator at once.
  Judged as_written(Candidate candidate, bool by_plan) const;
  // By the simulator, on the plan itself. False: it has more instructions than are walked. Throws where there is none.
  bool simulate(Judged& judged) const;

  // As fast, cheap and small as was asked for.
  bool is_allowed(const Judged& judged) const;
  // Were its seconds `off` times what they are.
  bool would_be_allowed(const Judged& judged, double off) const;
  // What is to be least: seconds, or the price.
  double worth(const Judged& judged) const;
  // Seconds of a step are set; price follows.
  void set_seconds(Judged& judged, double seconds) const;
  bool is_too_slow(const Judged& judged) const;
  // How many times what was allowed it takes, of the budget or of the time; at least 1.
  double times_over(const Judged& judged) const;

 private:
  Plan plan_of(const Candidate& candidate, const std::vector<DeviceSpec>& mine) const;
  bool walk(Judged& judged, const Plan& plan) const;
  void judge(Judged& judged, const std::vector<DeviceSpec>& mine, SavingsSeen* seen) const;
  CompileOptions options_of(const Candidate& candidate) const;

  const Graph& graph_;
  const std::vector<DeviceSpec>& devices_;
  const CompileOptions& options_;
  const ModelCounts& counts_;
};

}  // namespace whale
