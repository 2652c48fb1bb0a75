// What a remedy for a plan that does not fit may change of what it was asked for; what changes come to together.
#pragma once

#include <string>
#include <vector>

#include "compile/compile.h"
#include "plan/figures.h"
#include "report/fit.h"

namespace whale {

class RemedyChanges {
 public:
  // What a plan is asked for, as far as a remedy changes it.
  struct Change {
    PlanOptions options;
    int64_t times = 1;  // as many micro-batches
  };

  struct Tried {
    Change change;
    size_t changes = 0;  // single ones that it is of
    int64_t missing = 0, bytes = 0;
    double seconds = 0;
  };

  struct Measured {
    Tried tried;
    std::vector<MemoryClasses> held;  // by device
  };

  // What it comes to if each single change takes the part that it takes alone.
  struct Guess {
    Change change;
    size_t changes = 0;
    double seconds = 0, missing = 0;
  };

  // All of which outlive it. `asked`: as Remedies have it; `options_too`: its options are printed too.
  RemedyChanges(const Graph& graph, const std::vector<DeviceSpec>& devices, const CompileOptions& asked,
                const Plan& plan, const Shortage& shortage, bool options_too);

  CompileOptions options_of(const Change& change) const;
  // As the command line has it.
  std::string flags_of(const CompileOptions& options) const;
  // One option more each, in the order of what they cost as a rule.
  std::vector<Change> single_changes() const;
  // All of single ones that go together, two or more of them.
  std::vector<Guess> combined(const Measured& base, const std::vector<Measured>& singles) const;
  // Of what all of them save. With any recompute, which may keep more alive than it frees.
  bool saves_all(const Change& change, const std::vector<Measured>& singles) const;

 private:
  bool may_have_more_micro_batches() const;
  // The samples of a micro-batch that a replica has, at most.
  int64_t samples_together() const;
  Guess guess_of(const Measured& base, const std::vector<const Measured*>& chosen) const;

  const Graph& graph_;
  const std::vector<DeviceSpec>& devices_;
  const CompileOptions& asked_;
  const Plan& plan_;
  const Shortage& shortage_;
  bool options_too_;
  bool trains_, evaluates_;  // what lacks is training; the evaluation of a model that is trained
  std::string strategy_;
};

}  // namespace whale
