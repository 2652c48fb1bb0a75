// Random programs: how properties are checked, and a session that is fed and read in doubles.
#pragma once

#include <rapidcheck.h>
#include <cmath>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "compile/compile.h"
#include "ops/op.h"
#include "session/session.h"

namespace whale::test {

bool is_full();  // WHALE_FULL=1 in the environment

// Checks `property` on `cases` random cases, with WHALE_FULL=1 in the environment on thirty times as many. The seed is
// fixed; RC_PARAMS (rapidcheck's: "seed=1 max_success=500", or the "reproduce=..." that a failure prints) overrides
// both.
bool holds(const std::string& name, int cases, const rc::detail::Property& property);
template <class Property>
bool holds(const std::string& name, int cases, Property property) {
  return holds(name, cases, rc::detail::toProperty(std::move(property)));
}

// Choices from one number, so that a failing case is a list of numbers that rapidcheck can shorten.
class Dice {
 public:
  explicit Dice(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15ull + 1) {}
  uint64_t next();
  int64_t below(int64_t n) { return static_cast<int64_t>(next() % static_cast<uint64_t>(n)); }
  int64_t between(int64_t low, int64_t high) { return low + below(high - low + 1); }  // both inclusive
  bool coin() { return next() & 1; }
  double real() { return static_cast<double>(next() >> 11) * 0x1p-52 - 1; }  // [-1, 1)
  std::vector<double> reals(size_t n);

 private:
  uint64_t state_;
};

using Values = std::map<std::string, std::vector<double>>;

// Appending to a graph without ceremony.
struct GraphMaker {
  Graph g;
  ScopeId scope = 0;  // of the ops to come
  TensorId input(std::string name, Dims dims, DType dtype = DType::kF32, int batch_dim = 0);
  TensorId variable(std::string name, Dims dims, Initializer init = {InitKind::kNormal, 0, 0.5, "", ""},
                    Role role = Role::kParameter);
  TensorId op(OpCode code, std::vector<TensorId> inputs, Attrs attrs = {});
  TensorId constant(double value);  // rank 0, f32
  Dims dims(TensorId id) const { return g.tensor(id).dims; }
};

// A device list, or "ref:3 unlike 7": of unlike speeds, by that seed.
std::vector<DeviceSpec> devices_of_text(const std::string& text);

// A plan on its devices ("ref:3"), which may be those of several ranks: a session for each, and what they hold put
// together.
class Runner {
 public:
  Runner(const Graph& graph, const std::string& devices, CompileOptions options = {}, uint64_t seed = 7, int ranks = 1);
  // Inputs come in the order of a whole tensor; their batch is what their number of elements says.
  Values step(const Values& inputs, const std::vector<std::string>& outputs) {
    return run(RunMode::kStep, inputs, outputs);
  }
  Values eval(const Values& inputs, const std::vector<std::string>& outputs) {
    return run(RunMode::kEval, inputs, outputs);
  }
  Values parameters();
  Values variables();  // optimizer state and buffers too; copies that differ from the first by names of their own
  std::vector<double> read(const std::string& name, int64_t copy = 0);
  void write(const std::string& name, const std::vector<double>& values);
  const Plan& plan() const { return *plan_; }
  Session& session(size_t rank = 0) { return *sessions_[rank]; }

 private:
  Values run(RunMode mode, const Values& inputs,
             const std::vector<std::string>& outputs);  // ends in a minute, or throws
  std::shared_ptr<const Plan> plan_;
  std::vector<std::unique_ptr<Session>> sessions_;  // by rank
};

// Noise for the float inputs of a graph, small numbers for the integer ones, for a batch of that many samples.
Values random_inputs(const Graph& graph, int64_t batch, Dice& dice, int64_t integers_below);

double norm(const std::vector<double>& a);
double distance(const std::vector<double>& a,
                const std::vector<double>& b);  // infinite when a number is missing or not finite

// Weights for n devices with some zeros, not all.
std::vector<double> random_shares(int64_t n, Dice& dice);
std::string replica(const std::vector<double>& shares);  // "replica(3, shares=[3,0,1])"

}  // namespace whale::test
