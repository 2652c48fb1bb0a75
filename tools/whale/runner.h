// A session with its feeding, or one for each of several ranks of this process: what run, verify and bench share.
#pragma once

#include <functional>
#include <map>

#include "data.h"
#include "plan_arguments.h"
#include "tensors.h"

namespace tool {

struct SessionArguments {
  uint64_t seed = 0;
  bool ignore_nan = false;
  bool no_pin = false;
  bool no_bf16 = false;
  double loss_scale = 0;  // f16
  int64_t loss_scale_growth = 0;
  int32_t ranks = 1;             // in this process, each with an engine of its own
  whale_world* world = nullptr;  // of this process, one of several; with one rank here
};
// Those of a session that is not of the plan.
inline SessionArguments alone(SessionArguments a) {
  a.ranks = 1, a.world = nullptr;
  return a;
}

// Those of a run that is not in f16.
inline SessionArguments without_scale(SessionArguments a) {
  a.loss_scale = 0, a.loss_scale_growth = 0;
  return a;
}

// Among the processes that a launcher started together; alone, where none did.
// Says which devices its plan is for where the command line does not: a CPU device a process.
World join_processes(whale_engine* engine, PlanArguments& plan, bool devices_given, SessionArguments& session);

inline int32_t ranks_of(const SessionArguments& a) { return a.world == nullptr ? a.ranks : whale_world_size(a.world); }
inline bool is_first(const SessionArguments& a) { return a.world == nullptr || whale_world_rank(a.world) == 0; }

class Runner {
  using Call = decltype(&whale_session_step);

 public:
  Runner(whale_engine* engine, Plan plan, const SessionArguments& arguments);
  // One training step; returns the loss. `names`: further outputs to fetch.
  double step(const Batch& batch) { return step(batch, {}, nullptr); }
  double step(const Batch& batch, const std::vector<std::string>& names, std::vector<Values>* values);
  double eval(const Batch& batch, const std::vector<std::string>& names, std::vector<Values>* values);
  // As they are. Throws where a rank has others than the first.
  double step(const Batch& batch, const std::vector<std::string>& names, std::vector<Tensor>& tensors);
  double eval(const Batch& batch, const std::vector<std::string>& names, std::vector<Tensor>& tensors);
  Tensor read(const std::string& variable, int64_t copy = 0) const;  // put together of what the ranks hold
  void write(const std::string& variable, const whale_tensor* tensor);
  void save(const std::string& directory) const;
  void load(const std::string& directory) const;
  whale_session* session() const { return sessions_[0].get(); }  // of the first rank
  void each(const std::function<void(whale_session*)>& body) const {
    for (const Session& session : sessions_) body(session.get());
  }
  const whale_plan* plan() const { return plan_.get(); }

 private:
  double run(Call call, const Batch& batch, const std::vector<std::string>& names, std::vector<Tensor>& fetched);
  void at_once(const std::function<void(whale_session*)>& body) const;  // on every rank, each on a thread
  double run(Call call, const Batch& batch, const std::vector<std::string>& names, std::vector<Values>* values);
  Plan plan_;
  std::vector<Engine> engines_;    // of the ranks, where there are several
  std::vector<Session> sessions_;  // by rank
};

// A file's first bytes say what it is.
enum class FileKind { kGraph, kPlan, kOther };
FileKind kind_of(const std::string& path);
// Whether a model or a plan file ends in a checksum, which loading it compares.
bool has_checksum(const std::string& path);

// Throws for options that the plan file has fixed.
void check_fixed(const std::string& path, const PlanArguments& arguments);
// From a plan file (devices and strategy are in it) or a model file.
Plan open_plan(whale_engine* engine, const std::string& path, const PlanArguments& arguments);

double seconds_now();
double peak_rss_mb();
std::string duration(double seconds);

}  // namespace tool
