// What launchers say of a process: every launcher's variables, and what is wrong with them.
#include <doctest/doctest.h>

#include <map>
#include <string>
#include <vector>

#include "base/error.h"
#include "caught.h"
#include "world/environment.h"

using namespace whale;

namespace {

using Variables = std::map<std::string, std::string>;

std::optional<LaunchEnvironment> none(const LaunchEnvironment& /*given*/, bool needed) {
  CHECK(!needed);
  return std::nullopt;
}

std::optional<LaunchEnvironment> read(const Variables& variables, const AskPmix& ask = none) {
  return launch_environment(
      [&](const char* name) {
        const auto found = variables.find(name);
        return found == variables.end() ? nullptr : found->second.c_str();
      },
      ask);
}

// As one line: source rank/size local/size address port token.
std::string line(const Variables& variables, const AskPmix& ask = none) {
  const std::optional<LaunchEnvironment> e = read(variables, ask);
  if (!e) return "alone";
  return fmt::format("{} {}/{} {}/{} {} {} '{}'", e->source, e->rank, e->size, e->local_rank, e->local_size, e->address,
                     e->port, e->token);
}

// The first ones, changed by the second: "-" takes a variable away.
Variables with(Variables all, const Variables& changes) {
  for (const auto& [name, value] : changes) {
    all[name] = value;
    if (value == "-") all.erase(name);
  }
  return all;
}

const Variables kTorchrun{{"RANK", "3"},
                          {"WORLD_SIZE", "4"},
                          {"LOCAL_RANK", "1"},
                          {"LOCAL_WORLD_SIZE", "2"},
                          {"MASTER_ADDR", "node-a"},
                          {"MASTER_PORT", "29500"}};
const Variables kMpirun{{"OMPI_COMM_WORLD_RANK", "1"},
                        {"OMPI_COMM_WORLD_SIZE", "2"},
                        {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                        {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                        {"PMIX_NAMESPACE", "prterun-a-17@1"}};
const Variables kSlurm{{"SLURM_PROCID", "6"},
                       {"SLURM_NTASKS", "7"},
                       {"SLURM_LOCALID", "0"},
                       {"SLURM_NODEID", "3"},
                       {"SLURM_JOB_ID", "1234"},
                       {"SLURM_STEP_ID", "0"},
                       {"SLURM_STEP_NODELIST", "node[03-05,9],other1"},
                       {"SLURM_TASKS_PER_NODE", "2(x3),1"}};

}  // namespace

TEST_CASE("environment: what each launcher says") {
  CHECK(line({}) == "alone");
  CHECK(line({{"MASTER_ADDR", "a"}, {"MASTER_PORT", "1"}, {"LOCAL_RANK", "x"}}) == "alone");
  CHECK(line(kTorchrun) == "torchrun 3/4 1/2 node-a 29500 ''");
  CHECK(line(with(kTorchrun, {{"WHALE_JOB_TOKEN", "secret"}})) == "torchrun 3/4 1/2 node-a 29500 'secret'");
  // torchrun listens at its port itself.
  const std::string beside =
      line(with(kTorchrun, {{"TORCHELASTIC_USE_AGENT_STORE", "True"}, {"TORCHELASTIC_RUN_ID", "7"}}));
  CHECK(beside.starts_with("torchrun 3/4 1/2 node-a 2"));
  CHECK(beside.find("29500") == beside.npos);
  CHECK(line(with(kTorchrun, {{"TORCHELASTIC_USE_AGENT_STORE", "False"}})) == line(kTorchrun));
  // Of a Kubernetes pod: nothing of the ranks beside this one.
  CHECK(line(with(kTorchrun, {{"LOCAL_RANK", "-"}, {"LOCAL_WORLD_SIZE", "-"}})) == "torchrun 3/4 0/0 node-a 29500 ''");
  CHECK(line(with(kTorchrun, {{"LOCAL_WORLD_SIZE", "-"}})) == "torchrun 3/4 1/0 node-a 29500 ''");
  CHECK(line(with(kTorchrun, {{"LOCAL_RANK", "-"}, {"LOCAL_WORLD_SIZE", "-"}, {"MASTER_ADDR", "127.0.0.1"}})) ==
        "torchrun 3/4 3/4 127.0.0.1 29500 ''");

  CHECK(line(with(kMpirun, {{"MASTER_PORT", "29501"}})) == "mpirun 1/2 1/2 127.0.0.1 29501 ''");
  CHECK(line(with(kMpirun, {{"MASTER_PORT", "29501"},
                            {"MASTER_ADDR", "h"},
                            {"OMPI_COMM_WORLD_LOCAL_SIZE", "1"},
                            {"OMPI_COMM_WORLD_LOCAL_RANK", "0"}})) == "mpirun 1/2 0/1 h 29501 ''");

  CHECK(line(with(kSlurm, {{"MASTER_PORT", "29502"}})) == "slurm 6/7 0/1 node03 29502 ''");
  CHECK(line(with(kSlurm, {{"MASTER_PORT", "29502"}, {"MASTER_ADDR", "m"}})) == "slurm 6/7 0/1 m 29502 ''");
  CHECK(line(with(kSlurm,
                  {{"MASTER_PORT", "1"}, {"SLURM_NODEID", "2"}, {"SLURM_PROCID", "5"}, {"SLURM_LOCALID", "1"}})) ==
        "slurm 5/7 1/2 node03 1 ''");
  CHECK(line(with(kSlurm, {{"MASTER_PORT", "1"}, {"SLURM_NODEID", "-"}})) == "slurm 6/7 0/1 node03 1 ''");
  // What Slurm 22.05 says of `srun -N2 -n3`, and of the script of an sbatch.
  const Variables srun{{"SLURM_JOB_ID", "1"},
                       {"SLURM_JOB_NODELIST", "n[03-04]"},
                       {"SLURM_LOCALID", "1"},
                       {"SLURM_NODEID", "0"},
                       {"SLURM_NTASKS", "3"},
                       {"SLURM_PROCID", "1"},
                       {"SLURM_STEP_ID", "0"},
                       {"SLURM_STEP_NODELIST", "n[03-04]"},
                       {"SLURM_STEP_NUM_NODES", "2"},
                       {"SLURM_STEP_NUM_TASKS", "3"},
                       {"SLURM_STEP_TASKS_PER_NODE", "2,1"},
                       {"SLURM_TASKS_PER_NODE", "2,1"}};
  CHECK(has(line(srun), "slurm 1/3 1/2 n03 2"));
  CHECK(line({{"SLURM_JOB_ID", "2"},
              {"SLURM_JOB_NODELIST", "n[03-04]"},
              {"SLURM_LOCALID", "0"},
              {"SLURM_NODEID", "0"},
              {"SLURM_NTASKS", "3"},
              {"SLURM_PROCID", "0"},
              {"SLURM_TASKS_PER_NODE", "2,1"}}) == "alone");
  // Of a step that is smaller than its job.
  CHECK(line(with(kSlurm, {{"MASTER_PORT", "1"},
                           {"SLURM_STEP_NUM_TASKS", "2"},
                           {"SLURM_STEP_TASKS_PER_NODE", "1(x2)"},
                           {"SLURM_STEP_NODELIST", "-"},
                           {"SLURM_JOB_NODELIST", "b2,b7"},
                           {"SLURM_PROCID", "1"},
                           {"SLURM_NODEID", "1"}})) == "slurm 1/2 0/1 b2 1 ''");
  // On one host nobody else has to reach it.
  CHECK(line(with(
            kSlurm,
            {{"MASTER_PORT", "1"}, {"SLURM_TASKS_PER_NODE", "7"}, {"SLURM_LOCALID", "6"}, {"SLURM_NODEID", "0"}})) ==
        "slurm 6/7 6/7 127.0.0.1 1 ''");
}

TEST_CASE("environment: the first host of a list of Slurm's") {
  for (const auto& [list, first] : Variables{{"node[03-05,9],other1", "node03"},
                                             {"node[9,11]", "node9"},
                                             {"node[7]", "node7"},
                                             {"a", "a"},
                                             {"a,b", "a"},
                                             {"r[1-2]n[04-08].site,x", "r1n04.site"},
                                             {"rack-1-node[1-3]", "rack-1-node1"}})
    CHECK(read(with(kSlurm, {{"SLURM_STEP_NODELIST", list}}))->address == first);
}

TEST_CASE("environment: ports of jobs") {
  const auto port = [](const Variables& all) { return read(all)->port; };
  for (const Variables& all : {kMpirun, kSlurm}) {
    CHECK(port(all) >= 20000);
    CHECK(port(all) < 30000);
  }
  // All ranks of a job have one, and other jobs others.
  CHECK(port(kSlurm) == port(with(kSlurm, {{"SLURM_PROCID", "0"}, {"SLURM_NODEID", "0"}})));
  CHECK(port(kSlurm) != port(with(kSlurm, {{"SLURM_STEP_ID", "1"}})));
  CHECK(port(kSlurm) != port(with(kSlurm, {{"SLURM_JOB_ID", "1235"}})));
  CHECK(port(kMpirun) == port(with(kMpirun, {{"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_LOCAL_RANK", "0"}})));
  CHECK(port(kMpirun) != port(with(kMpirun, {{"PMIX_NAMESPACE", "prterun-a-18@1"}})));
  CHECK(port(kMpirun) != port(with(kMpirun, {{"OMPI_MCA_ess_base_jobid", "1743"}})));
}

TEST_CASE("environment: what PMIx is asked, and what it says") {
  std::string asked;  // of the last question
  const AskPmix ask = [&](const LaunchEnvironment& given, bool needed) {
    asked = fmt::format("{}:{} '{}'{}", given.address, given.port, given.token, needed ? " needed" : "");
    return LaunchEnvironment{3, 4, 1, 2, given.address.empty() ? "of-0" : given.address, 20001, "random"};
  };
  const Variables prterun{{"PMIX_NAMESPACE", "prterun-a-17@1"}, {"PMIX_RANK", "3"}};
  CHECK(line(prterun, ask) == "pmix 3/4 1/2 of-0 20001 'random'");
  CHECK(asked == ":0 '' needed");
  const Variables set{{"MASTER_ADDR", "h"}, {"MASTER_PORT", "29500"}, {"WHALE_JOB_TOKEN", "secret"}};
  CHECK(line(with(prterun, set), ask) == "pmix 3/4 1/2 h 20001 'random'");
  CHECK(asked == "h:29500 'secret' needed");
  CHECK(has(message_of([&] { read({{"PMIX_NAMESPACE", "a"}}, ask); }), "PMIX_RANK is not set, beside other variables"));
  CHECK(has(message_of([&] { read({{"PMIX_RANK", "0"}}, ask); }), "PMIX_NAMESPACE is not set"));
  CHECK(has(message_of([&] { read(with(prterun, {{"PMIX_RANK", "x"}}), ask); }), "PMIX_RANK is 'x', expected"));
  CHECK(has(message_of([&] { read(with(prterun, {{"MASTER_PORT", "0"}}), ask); }), "MASTER_PORT is '0', expected"));

  // Not where variables say enough.
  asked = "nobody";
  CHECK(line(with(prterun, kTorchrun), ask) == "torchrun 3/4 1/2 node-a 29500 ''");
  CHECK(line(with(with(kMpirun, prterun), {{"MASTER_PORT", "1"}}), ask) == "mpirun 1/2 1/2 127.0.0.1 1 ''");
  const Variables far = with(with(kMpirun, prterun), {{"OMPI_COMM_WORLD_RANK", "3"},
                                                      {"OMPI_COMM_WORLD_SIZE", "4"}});  // two on each of two hosts
  CHECK(line(with(far, {{"MASTER_ADDR", "h"}, {"MASTER_PORT", "1"}}), ask) == "mpirun 3/4 1/2 h 1 ''");
  CHECK(asked == "nobody");
  CHECK(line(far, ask) == "mpirun 3/4 1/2 of-0 20001 'random'");
  CHECK(asked == ":0 '' needed");
  CHECK(has(message_of([&] {
              read(with(far, {{"OMPI_COMM_WORLD_RANK", "2"}}), ask);
            }),
            "PMIx says that this is rank 3 of 4, and variables of mpirun that it is rank 2 of 4: unset"));

  // A step of Slurm whose server it is: without PMIx the step's first host will do.
  const Variables step{{"SLURM_PROCID", "3"},
                       {"SLURM_NTASKS", "4"},
                       {"SLURM_LOCALID", "1"},
                       {"SLURM_NODEID", "1"},
                       {"SLURM_TASKS_PER_NODE", "2(x2)"},
                       {"SLURM_STEP_NODELIST", "n[1-2]"}};
  const Variables slurm = with(with(kSlurm, step), {{"PMIX_NAMESPACE", "slurm.pmix.1234.0"}, {"PMIX_RANK", "3"}});
  CHECK(line(slurm, ask) == "slurm 3/4 1/2 of-0 20001 'random'");
  CHECK(asked == ":0 ''");
  CHECK(has(line(slurm), "slurm 3/4 1/2 n1 2"));
  asked = "nobody";
  CHECK(line(with(slurm, {{"MASTER_ADDR", "h"}, {"MASTER_PORT", "1"}}), ask) == "slurm 3/4 1/2 h 1 ''");
  CHECK(line(with(slurm, {{"SLURM_TASKS_PER_NODE", "4"}, {"SLURM_NODEID", "0"}, {"MASTER_PORT", "1"}}), ask) ==
        "slurm 3/4 1/4 127.0.0.1 1 ''");
  CHECK(asked == "nobody");
  // prterun in a job of Slurm's, whose tasks are its daemons; and outside of a step.
  CHECK(line(with(slurm, {{"PMIX_NAMESPACE", "prterun-a-17@1"}, {"SLURM_PROCID", "1"}}), ask) ==
        "pmix 3/4 1/2 of-0 20001 'random'");
  CHECK(line(with(slurm, {{"SLURM_STEP_ID", "-"}}), ask) == "pmix 3/4 1/2 of-0 20001 'random'");
}

TEST_CASE("environment: which launcher counts") {
  const auto source = [](const Variables& all) {
    const auto e = read(all);
    return std::string(e ? e->source : "alone");
  };
  const Variables both = with(kMpirun, kSlurm), all = with(both, kTorchrun);
  CHECK(source(all) == "torchrun");
  // mpirun in a job of two nodes, of which the first got both ranks: the step's tasks are its daemons.
  for (const char* rank : {"0", "1"})
    CHECK(source(with(both, {{"OMPI_COMM_WORLD_RANK", rank},
                             {"OMPI_COMM_WORLD_LOCAL_RANK", rank},
                             {"SLURM_PROCID", "0"},
                             {"SLURM_NTASKS", "2"},
                             {"SLURM_TASKS_PER_NODE", "1(x2)"},
                             {"SLURM_NODEID", "0"}})) == "mpirun");
  // The script of sbatch has variables of its job, and no step; the shell of salloc a step of its own.
  CHECK(source(with(kSlurm, {{"SLURM_STEP_ID", "-"}})) == "alone");
  CHECK(source(with(kSlurm, {{"SLURM_STEP_ID", "4294967290"}})) == "alone");
  CHECK(source(with(kSlurm, {{"SLURM_STEP_ID", "batch"}})) == "alone");
  CHECK(source(with(kSlurm, {{"SLURM_PROCID", "-"}})) == "alone");
}

TEST_CASE("environment: what is wrong is named") {
  struct Wrong {
    const Variables& base;
    Variables changes;
    std::string said;
  };
  const std::vector<Wrong> cases{
      // Half of a set.
      {kTorchrun, {{"WORLD_SIZE", "-"}}, "WORLD_SIZE is not set, beside other variables of torchrun"},
      {kTorchrun, {{"RANK", "-"}}, "RANK is not set"},
      {kTorchrun, {{"MASTER_ADDR", "-"}}, "MASTER_ADDR is not set"},
      {kTorchrun, {{"MASTER_PORT", "-"}}, "MASTER_PORT is not set"},
      {kTorchrun, {{"LOCAL_RANK", "-"}}, "LOCAL_RANK is not set"},
      {kMpirun, {{"OMPI_COMM_WORLD_RANK", "-"}}, "OMPI_COMM_WORLD_RANK is not set"},
      {kMpirun, {{"OMPI_COMM_WORLD_SIZE", "-"}}, "OMPI_COMM_WORLD_SIZE is not set"},
      {kMpirun, {{"OMPI_COMM_WORLD_LOCAL_SIZE", "-"}}, "OMPI_COMM_WORLD_LOCAL_SIZE is not set"},
      {kMpirun, {{"PMIX_NAMESPACE", "-"}}, "MASTER_PORT is not set, nor a name of mpirun's job"},
      {kMpirun,
       {{"OMPI_COMM_WORLD_LOCAL_SIZE", "1"}, {"OMPI_COMM_WORLD_LOCAL_RANK", "0"}, {"PMIX_NAMESPACE", "-"}},
       "mpirun has put 1 of 2 ranks on this host: set it to the host of rank 0 (mpirun -x MASTER_ADDR=HOST)"},
      {kMpirun,
       {{"OMPI_COMM_WORLD_LOCAL_SIZE", "1"}, {"OMPI_COMM_WORLD_LOCAL_RANK", "0"}},
       "PMIX_RANK is not set, beside other variables of PMIx"},
      {kSlurm, {{"SLURM_NTASKS", "-"}}, "SLURM_NTASKS is not set, beside other variables of a step of Slurm"},
      {kSlurm, {{"SLURM_LOCALID", "-"}}, "SLURM_LOCALID is not set"},
      {kSlurm, {{"SLURM_JOB_ID", "-"}}, "SLURM_JOB_ID is not set"},
      {kSlurm, {{"SLURM_STEP_NODELIST", "-"}}, "SLURM_JOB_NODELIST is not set"},
      {kSlurm, {{"SLURM_TASKS_PER_NODE", "-"}}, "SLURM_TASKS_PER_NODE is not set"},
      // Values that mean nothing.
      {kTorchrun, {{"RANK", "4"}}, "RANK is '4', expected a whole number from 0 to 3 (WORLD_SIZE is 4)"},
      {kTorchrun, {{"RANK", "-1"}}, "RANK is '-1', expected a whole number from 0 to 3"},
      {kTorchrun, {{"RANK", ""}}, "RANK is '', expected a whole number"},
      {kTorchrun, {{"RANK", " 1"}}, "RANK is ' 1', expected"},
      {kTorchrun, {{"RANK", "1.0"}}, "RANK is '1.0', expected"},
      {kTorchrun, {{"WORLD_SIZE", "0"}}, "WORLD_SIZE is '0', expected a whole number from 1 to 65536"},
      {kTorchrun, {{"WORLD_SIZE", "99999999999999999999"}}, "WORLD_SIZE is '99999999999999999999', expected"},
      {kTorchrun, {{"WORLD_SIZE", "2147483648"}}, "WORLD_SIZE is '2147483648', expected"},
      {kTorchrun, {{"MASTER_PORT", "65536"}}, "MASTER_PORT is '65536', expected a whole number from 1 to 65535"},
      {kTorchrun, {{"MASTER_PORT", "tcp://10.0.0.1:80"}}, "MASTER_PORT is 'tcp://10.0.0.1:80', expected"},
      {kTorchrun, {{"MASTER_ADDR", ""}}, "MASTER_ADDR is '', expected some text"},
      {kTorchrun,
       {{"LOCAL_RANK", "2"}},
       "LOCAL_RANK is '2', expected a whole number from 0 to 1 (LOCAL_WORLD_SIZE is 2)"},
      {kTorchrun,
       {{"LOCAL_WORLD_SIZE", "5"}},
       "LOCAL_WORLD_SIZE is '5', expected a whole number from 1 to 4 (WORLD_SIZE is 4)"},
      {kTorchrun,
       {{"LOCAL_WORLD_SIZE", "-"}, {"LOCAL_RANK", "4"}},
       "LOCAL_RANK is '4', expected a whole number from 0 to 3"},
      {kMpirun, {{"OMPI_COMM_WORLD_RANK", "2"}}, "expected a whole number from 0 to 1 (OMPI_COMM_WORLD_SIZE is 2)"},
      {kMpirun, {{"OMPI_COMM_WORLD_LOCAL_RANK", "two"}}, "OMPI_COMM_WORLD_LOCAL_RANK is 'two'"},
      {kSlurm, {{"SLURM_PROCID", "7"}}, "SLURM_PROCID is '7', expected a whole number from 0 to 6 (SLURM_NTASKS is 7)"},
      {kSlurm,
       {{"SLURM_LOCALID", "1"}},
       "SLURM_LOCALID is '1', expected a whole number from 0 to 0 (SLURM_TASKS_PER_NODE is 2(x3),1)"},
      {kSlurm, {{"SLURM_NODEID", "4"}}, "SLURM_TASKS_PER_NODE is '2(x3),1', expected a node for SLURM_NODEID"},
      {kSlurm, {{"SLURM_NODEID", "-"}, {"SLURM_TASKS_PER_NODE", "2(x3)"}}, "expected a node for each rank"}};
  for (const Wrong& wrong : cases) {
    const std::string said = message_of([&] { read(with(wrong.base, wrong.changes)); }, {Code::kInvalidArgument});
    CHECK_MESSAGE(has(said, wrong.said), said << " -- expected: " << wrong.said);
  }
  for (const char* tasks : {"", ",", "2(x", "2(x)", "2(x0)", "0", "x", "8", "2(x3),,1", "2(x3) ", "-2", "(x3)"}) {
    const std::string said = message_of([&] { read(with(kSlurm, {{"SLURM_TASKS_PER_NODE", tasks}})); });
    CHECK_MESSAGE(has(said, fmt::format("SLURM_TASKS_PER_NODE is '{}', expected", tasks)), tasks << ": " << said);
  }
  for (const char* nodes : {"", ",a", "[", "node[", "node[1", "node[]", "node[,2]", "node[-2]", "node]", "a b"}) {
    const std::string said = message_of([&] { read(with(kSlurm, {{"SLURM_STEP_NODELIST", nodes}})); });
    CHECK_MESSAGE(has(said, fmt::format("SLURM_STEP_NODELIST is '{}', expected", nodes)), nodes << ": " << said);
  }
  const std::string long_one = message_of([&] { read(with(kTorchrun, {{"RANK", std::string(100000, 'a')}})); });
  CHECK(long_one.size() < 500);
}
