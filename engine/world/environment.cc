#include "world/environment.h"

#include <algorithm>
#include <cstdlib>
#include <string_view>
#include <tuple>
#include <utility>

#include "base/error.h"
#include "base/text.h"
#include "world/pmix.h"

namespace whale {
namespace {

constexpr int64_t kMostRanks = 65536;
constexpr const char* kLoopback = "127.0.0.1";

class Variables {
 public:
  Variables(const GetVariable& get, std::string launcher) : get_(get), launcher_(std::move(launcher)) {}

  bool has(const char* name) const { return get_(name) != nullptr; }
  std::string text(const char* name) const {
    const char* value = get_(name);
    if (value == nullptr) throw invalid("{} is not set, beside other variables of {}", name, launcher_);
    if (*value == '\0') throw invalid("{} is '', expected some text; set it or unset it", name);
    return value;
  }
  int64_t number(const char* name, int64_t low, int64_t high, const std::string& why = "") const {
    const char* value = get_(name);
    if (value == nullptr) throw invalid("{} is not set, beside other variables of {}", name, launcher_);
    const std::optional<int64_t> number = whole_number(value);
    if (!number || *number < low || *number > high)
      throw invalid("{} is '{}', expected a whole number from {} to {}{}", name, brief(value), low, high, why);
    return *number;
  }
  // The first of the names that is set, or the last.
  const char* first_of(const char* name, const char* otherwise) const { return has(name) ? name : otherwise; }

  // Rank and size, by the names of their variables.
  std::pair<int, int> pair(const char* rank, const char* size, int64_t most = kMostRanks,
                           const std::string& why = "") const {
    if (!has(rank)) text(rank);
    const int64_t of = number(size, 1, most, why);
    return {static_cast<int>(number(rank, 0, of - 1, fmt::format(" ({} is {})", size, of))), static_cast<int>(of)};
  }
  std::string token() const {
    const char* value = get_("WHALE_JOB_TOKEN");
    return value == nullptr ? "" : value;
  }
  uint16_t port() const { return static_cast<uint16_t>(number("MASTER_PORT", 1, 65535)); }

 private:
  const GetVariable& get_;
  const std::string launcher_;
};

// Below the ports that systems give to outgoing connections; the same on all ranks of a job, most often another in
// another job.
uint16_t port_of(std::string_view job) {
  uint64_t hash = 0xcbf29ce484222325;  // FNV-1a
  for (const char c : job) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  return static_cast<uint16_t>(20000 + hash % 10000);
}

LaunchEnvironment of_torchrun(const GetVariable& get) {
  const Variables variables(get, "torchrun (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT)");
  LaunchEnvironment e{.source = "torchrun"};
  std::tie(e.rank, e.size) = variables.pair("RANK", "WORLD_SIZE");
  e.address = variables.text("MASTER_ADDR");
  e.port = variables.port();
  // torchrun listens at that port itself, for a store that its workers are to share.
  if (variables.has("TORCHELASTIC_USE_AGENT_STORE") && variables.text("TORCHELASTIC_USE_AGENT_STORE") == "True")
    e.port = port_of(fmt::format("torchrun {} {}", e.port,
                                 variables.has("TORCHELASTIC_RUN_ID") ? variables.text("TORCHELASTIC_RUN_ID") : ""));
  e.token = variables.token();
  if (variables.has("LOCAL_WORLD_SIZE")) {
    std::tie(e.local_rank, e.local_size) =
        variables.pair("LOCAL_RANK", "LOCAL_WORLD_SIZE", e.size, fmt::format(" (WORLD_SIZE is {})", e.size));
  } else if (variables.has("LOCAL_RANK")) {
    e.local_rank = static_cast<int>(variables.number("LOCAL_RANK", 0, e.rank, fmt::format(" (RANK is {})", e.rank)));
  } else if (e.address == kLoopback || e.address == "localhost" || e.address == "::1") {
    e.local_rank = e.rank, e.local_size = e.size;
  }
  return e;
}

// Of "node[03-05,9],other1": node03.
std::string first_host(const char* name, const std::string& list) {
  std::string host;
  for (size_t at = 0; at < list.size() && list[at] != ','; ++at) {
    if (list[at] != '[') {
      host += list[at];
      continue;
    }
    const size_t end = list.find(']', at), first = list.find_first_of("-,]", at);
    if (end == list.npos || first == at + 1) {
      host.clear();
      break;
    }
    host += list.substr(at + 1, first - at - 1);
    at = end;
  }
  if (host.empty() || host.find_first_of("[] ") != host.npos)
    throw invalid("{} is '{}', expected hosts such as node[03-05,9],other1", name, brief(list));
  return host;
}

// Of "2(x3),1": 2 on nodes 0, 1, 2 and 1 on node 3. Where the node is not said, ranks fill node after node.
int tasks_of_node(const char* name, const std::string& list, std::optional<int64_t> node, int rank, int size) {
  const auto wrong = [&](const char* expected) {
    return invalid("{} is '{}', expected {} (such as 2(x3),1 for four nodes)", name, brief(list), expected);
  };
  int64_t nodes = 0, ranks = 0;
  for (size_t begin = 0; begin <= list.size();) {
    const size_t end = std::min(list.find(',', begin), list.size());
    std::string_view tasks = std::string_view(list).substr(begin, end - begin);
    int64_t times = 1;
    if (const size_t bracket = tasks.find("(x"); bracket != tasks.npos && tasks.back() == ')') {
      times = whole_number(tasks.substr(bracket + 2, tasks.size() - bracket - 3)).value_or(0);
      tasks = tasks.substr(0, bracket);
    }
    const std::optional<int64_t> each = whole_number(tasks);
    if (!each || *each < 1 || *each > size || times < 1 || times > kMostRanks)
      throw wrong("the tasks of each node, no more than there are");
    nodes += times, ranks += times * *each;
    if (node ? *node < nodes : rank < ranks) return static_cast<int>(*each);
    begin = end + 1;
  }
  throw wrong(node ? "a node for SLURM_NODEID" : "a node for each rank");
}

// What srun has started, rather than the script of sbatch or the shell of salloc, whose step has one of the last
// numbers or none.
bool in_slurm_step(const GetVariable& get) {
  const char* step = get("SLURM_STEP_ID");
  if (step == nullptr || get("SLURM_PROCID") == nullptr) return false;
  const std::optional<int64_t> number = whole_number(step);
  return number && *number >= 0 && *number < 0xfffffff0;
}

// A server of PMIx is there for this process. Half of its variables is an error.
bool has_pmix(const GetVariable& get) {
  const Variables variables(get, "PMIx (PMIX_NAMESPACE, PMIX_RANK)");
  if (!variables.has("PMIX_NAMESPACE") && !variables.has("PMIX_RANK")) return false;
  variables.text("PMIX_NAMESPACE");
  variables.number("PMIX_RANK", 0, kMostRanks - 1);
  return true;
}
// Slurm's own server, rather than one of a launcher that srun has started.
bool has_slurms_pmix(const GetVariable& get) {
  return has_pmix(get) && std::string_view(get("PMIX_NAMESPACE")).starts_with("slurm.pmix.");
}

// What variables say of where ranks meet, which rank 0 has by itself or by them.
LaunchEnvironment given_meeting(const Variables& variables) {
  LaunchEnvironment given;
  if (variables.has("MASTER_ADDR")) given.address = variables.text("MASTER_ADDR");
  if (variables.has("MASTER_PORT")) given.port = variables.port();
  given.token = variables.token();
  return given;
}

LaunchEnvironment of_pmix(const GetVariable& get, const AskPmix& ask) {
  LaunchEnvironment e = *ask(given_meeting({get, "PMIx"}), true);
  e.source = "pmix";
  return e;
}

// Sets where ranks of several hosts meet. False: PMIx cannot be opened here.
bool meet_by_pmix(LaunchEnvironment& e, const Variables& variables, const AskPmix& ask, bool needed) {
  const std::optional<LaunchEnvironment> found = ask(given_meeting(variables), needed);
  if (!found) return false;
  if (found->rank != e.rank || found->size != e.size)
    throw invalid(
        "PMIx says that this is rank {} of {}, and variables of {} that it is rank {} of {}: unset those of a "
        "launcher that has not started this job",
        found->rank, found->size, e.source, e.rank, e.size);
  e.address = found->address, e.port = found->port, e.token = found->token;
  return true;
}

LaunchEnvironment of_slurm(const GetVariable& get, const AskPmix& ask) {
  const Variables variables(get, "a step of Slurm");
  LaunchEnvironment e{.source = "slurm"};
  std::tie(e.rank, e.size) = variables.pair("SLURM_PROCID", variables.first_of("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"));
  e.token = variables.token();
  const char* tasks = variables.first_of("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE");
  std::optional<int64_t> node;
  if (variables.has("SLURM_NODEID")) node = variables.number("SLURM_NODEID", 0, kMostRanks);
  e.local_size = tasks_of_node(tasks, variables.text(tasks), node, e.rank, e.size);
  e.local_rank = static_cast<int>(
      variables.number("SLURM_LOCALID", 0, e.local_size - 1, fmt::format(" ({} is {})", tasks, variables.text(tasks))));
  const bool is_said = variables.has("MASTER_ADDR") || e.local_size == e.size;
  if (!is_said && has_slurms_pmix(get) && meet_by_pmix(e, variables, ask, false)) return e;
  const char* nodes = variables.first_of("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST");
  e.address = variables.has("MASTER_ADDR") ? variables.text("MASTER_ADDR")
              : e.local_size == e.size     ? kLoopback
                                           : first_host(nodes, variables.text(nodes));
  e.port = variables.has("MASTER_PORT")
               ? variables.port()
               : port_of(variables.text("SLURM_JOB_ID") + "." + variables.text("SLURM_STEP_ID"));
  return e;
}

LaunchEnvironment of_mpirun(const GetVariable& get, const AskPmix& ask) {
  const Variables variables(get, "mpirun (OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE)");
  LaunchEnvironment e{.source = "mpirun"};
  std::tie(e.rank, e.size) = variables.pair("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE");
  std::tie(e.local_rank, e.local_size) = variables.pair("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE",
                                                        e.size, fmt::format(" (OMPI_COMM_WORLD_SIZE is {})", e.size));
  e.token = variables.token();
  if (!variables.has("MASTER_ADDR") && e.local_size != e.size) {
    if (has_pmix(get) && meet_by_pmix(e, variables, ask, true)) return e;
    throw invalid(
        "MASTER_ADDR is not set, nor PMIX_NAMESPACE and PMIX_RANK, and mpirun has put {} of {} ranks on this host: set "
        "it to the host of rank 0 (mpirun -x MASTER_ADDR=HOST)",
        e.local_size, e.size);
  }
  e.address = variables.has("MASTER_ADDR") ? variables.text("MASTER_ADDR") : kLoopback;
  if (variables.has("MASTER_PORT")) {
    e.port = variables.port();
  } else if (const char* job = variables.first_of("OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE"); variables.has(job)) {
    e.port = port_of(variables.text(job));
  } else {
    throw invalid(
        "MASTER_PORT is not set, nor a name of mpirun's job (OMPI_MCA_ess_base_jobid, PMIX_NAMESPACE) that a port "
        "could be made from: set it (mpirun -x MASTER_PORT=29500)");
  }
  return e;
}

}  // namespace

std::optional<LaunchEnvironment> launch_environment(const GetVariable& get, const AskPmix& ask) {
  if (get("RANK") != nullptr || get("WORLD_SIZE") != nullptr) return of_torchrun(get);
  // Before Slurm: within a job of Slurm's, mpirun and prterun have srun start their daemons, whose tasks are not ranks.
  if (get("OMPI_COMM_WORLD_RANK") != nullptr || get("OMPI_COMM_WORLD_SIZE") != nullptr) return of_mpirun(get, ask);
  if (has_pmix(get) && !(in_slurm_step(get) && has_slurms_pmix(get))) return of_pmix(get, ask);
  if (in_slurm_step(get)) return of_slurm(get, ask);
  return std::nullopt;
}

std::optional<LaunchEnvironment> launch_environment(const std::string& folder, double timeout_seconds) {
  return launch_environment(
      [](const char* name) { return std::getenv(name); },
      [&](const LaunchEnvironment& given, bool needed) { return ask_pmix(given, needed, folder, timeout_seconds); });
}

}  // namespace whale
