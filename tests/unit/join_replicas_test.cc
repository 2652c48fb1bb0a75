// Replicas directly inside replicas are planned as one scope of all of them, where nothing tells them apart.
#include <doctest/doctest.h>

#include <string>

#include "cluster/devices.h"
#include "compile/compile.h"
#include "unit/small_models.h"
#include "unit/trained.h"

using namespace whale;

namespace {

Plan planned(const std::string& strategy, int64_t devices, CompileOptions options = {}) {
  options.strategy = strategy;
  return compile(small::mlp(16).g, parse_devices(fmt::format("null:{}", devices), {0}), options);
}

std::vector<int64_t> sizes(const Plan& plan) {
  std::vector<int64_t> out;
  for (const MeshAxis& axis : plan.meshes[0].axes) out.push_back(axis.size);
  return out;
}

}  // namespace

TEST_CASE("replicas of replicas: even ones have one axis, and each device its samples") {
  const Plan one = planned("replica(8)", 8);
  for (const char* strategy : {"replica(2) > replica(4)", "replica(2) > replica(2) > replica(2)"}) {
    CAPTURE(strategy);
    const Plan nested = planned(strategy, 8);
    CHECK(nested.strategy == strategy);
    CHECK(nested.meshes == one.meshes);
    for (size_t d = 0; d < 8; ++d) CHECK(nested.entries[0].rows[d].samples == one.entries[0].rows[d].samples);
  }
  CHECK(sizes(planned("replica(2) > replica(2) > split(2)", 8)) == std::vector<int64_t>{4, 2});
  CHECK(sizes(planned("replica(2) > pipeline(2, micro_batches=2) > replica(2)", 8)) == std::vector<int64_t>{4});
}

TEST_CASE("replicas of replicas: shares, 'by', shares of state and splits on the same devices keep them apart") {
  CHECK(sizes(planned("replica(2, shares=[2,1]) > replica(2)", 4)) == std::vector<int64_t>{2, 2});
  CHECK(sizes(planned("replica(2) > replica(2, shares=[2,1])", 4)) == std::vector<int64_t>{2, 2});
  CHECK(sizes(planned("replica(2, by=micro_batch) > replica(2)", 4, {{}, {}, {}, 2})) == std::vector<int64_t>{2, 2});
  CHECK(sizes(planned("replica(2) > replica(4)", 8, {{.zero = 1, .state_shares = {2, 1}}})) ==
        std::vector<int64_t>{2, 4});
}

TEST_CASE("replicas of replicas: train like one device, where samples do not divide evenly, too") {
  const small::Model m = small::mlp(10);
  const small::Trained one = small::train(m, "ref:1", {{}, "local"});
  for (const int zero : {0, 2, 3})
    for (const char* strategy : {"replica(2) > replica(2)", "replica(2) > pipeline(2, micro_batches=2) > replica(2)"}) {
      CAPTURE(zero);
      CAPTURE(strategy);
      const int64_t devices = std::string(strategy).find("pipeline") == std::string::npos ? 4 : 8;
      CHECK(small::distance(one, small::train(m, fmt::format("ref:{}", devices), {{.zero = zero}, strategy})) < 1e-5);
    }
}
