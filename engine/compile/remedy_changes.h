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
    double price = 1;    // of memory, that it was looked at
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
  // Whether a strategy's text is the one asked for, or the plan's, which is it in full; in its form: but for the
  // numbers of micro-batches.
  bool is_asked_for(const std::string& strategy) const;
  bool has_form_asked_for(const std::string& strategy) const;
  // One option more each, in the order of what they cost as a rule; ZeRO behind those that make activations less where
  // these alone are more than a device has. Of offload what frees most comes first.
  std::vector<Change> single_changes(const Measured& base) const;
  // Whether what is offloaded more is as much as lacks, on the device that lacks most.
  bool may_be_enough(const Change& change, const Measured& base) const;
  // All of single ones that go together, two or more of them.
  std::vector<Guess> combined(const Measured& base, const std::vector<Measured>& singles) const;
  // The one of each kind that leaves least, together: with each recompute, which may keep more alive than it frees.
  // `helping`: of those that alone leave less than there was.
  std::vector<Guess> together(const Measured& base, const std::vector<Measured>& singles, bool helping) const;

 private:
  bool may_have_more_micro_batches() const;
  bool activations_are_too_many(const Measured& base) const;
  std::vector<OffloadClass> offload_by_size(const Measured& base) const;
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
