// Random programs: gradients against finite differences, and every cut that the planner accepts against one device.
#include <doctest/doctest.h>

#include <set>

#include "base/error.h"
#include "property_graph.h"

using namespace whale;
using namespace whale::test;

namespace {

std::vector<std::string> gradient_names(const Graph& g) {
  std::vector<std::string> names;
  for (const Variable& v : g.variables)
    if (v.role == Role::kParameter) names.push_back("grad:" + g.tensor(v.tensor).name);
  return names;
}

std::vector<uint32_t> random_words(size_t most) {
  const size_t n = *rc::gen::resize(100, rc::gen::inRange<size_t>(1, most + 1));
  return *rc::gen::container<std::vector<uint32_t>>(n, rc::gen::inRange<uint32_t>(0, 1u << 30));
}

}  // namespace

TEST_CASE("property: gradients are the slopes of the loss") {
  std::set<std::string> met;
  int64_t checked = 0, kinks = 0;
  CHECK(holds("gradients", 250, [&] {
    const std::vector<uint32_t> words = random_words(7);
    const int64_t batch = words[0] % 4;
    Graph g = random_graph(words, batch);
    for (const Op& op : g.ops) met.insert(def(op.code).name);
    RC_LOG() << print(g);
    CompileOptions options;
    options.fetch = gradient_names(g);
    options.fusion = *rc::gen::arbitrary<bool>();
    Runner run(g, "ref:1", options);
    run.session().set_learning_rate(0);
    Dice dice(words[0]);
    const Values inputs = random_inputs(g, batch, dice, 3);
    std::vector<std::string> fetch = options.fetch;
    fetch.push_back("loss");
    const Values at = run.step(inputs, fetch);
    const double loss = at.at("loss")[0];
    for (const std::string& name : options.fetch) {
      const std::vector<double>& gradient = at.at(name);
      const std::string parameter = name.substr(5);
      const std::vector<double> values = run.read(parameter);
      RC_ASSERT(gradient.size() == values.size());
      const double scale = std::max(norm(gradient), 0.01);
      // All elements of small parameters, some of others.
      for (size_t i = 0; i<values.size(); i += values.size()> 6 ? static_cast<size_t>(dice.between(1, 4)) : 1) {
        const auto loss_at = [&](double step) {
          std::vector<double> moved = values;
          moved[i] += step;
          run.write(parameter, moved);
          return run.step(inputs, {"loss"}).at("loss")[0];
        };
        const double h = 1e-5, up = loss_at(h), down = loss_at(-h), slope = (up - down) / (2 * h);
        ++checked;
        const double tolerance = 1e-5 * scale + 1e-9;
        if (!(std::abs(slope - gradient[i]) <= tolerance)) {
          // A kink nearby, or too steep to see: the two sides differ, or half the step gives another slope.
          const double half = (loss_at(h / 2) - loss_at(-h / 2)) / h, bend = std::abs((up - loss) - (loss - down)) / h;
          if (bend > 1e-3 * scale || std::abs(half - slope) > tolerance / 2) {
            ++kinks;
            continue;
          }
          RC_LOG() << name << "[" << i << "] is " << gradient[i] << ", the slope is " << slope << "\n";
          RC_FAIL("gradient");
        }
      }
      run.write(parameter, values);
    }
  }));
  MESSAGE(checked << " slopes, " << kinks << " of them at kinks");
  CHECK(kinks * 50 <= checked);
  for (const std::string& name : random_graph_ops()) CHECK_MESSAGE(met.contains(name), name);
}

TEST_CASE("property: what the planner cuts is what one device computes") {
  int accepted = 0, cut = 0, refused = 0;
  CHECK(holds("cuts of random programs", 300, [&] {
    const std::vector<uint32_t> words = random_words(5);
    Dice dice(*rc::gen::inRange<uint32_t>(0, 1u << 30));
    const int64_t batch = dice.between(2, 6), devices = dice.between(1, 4),
                  micro_batches = dice.between(1, std::min<int64_t>(3, batch));
    Graph g = random_graph(words, batch);
    CompileOptions options;
    options.fetch = gradient_names(g);
    options.bucket_bytes = dice.coin() ? 0 : 64;
    const Values inputs = random_inputs(g, batch, dice, 3);
    std::vector<std::string> fetch = options.fetch;
    fetch.push_back("loss");
    const Values one = Runner(g, "ref:1", options).step(inputs, fetch);
    if (!(norm(one.at("loss")) < 1e6)) return;
    const std::vector<double> shares = random_shares(devices, dice);
    options.strategy = replica(shares);
    options.accumulation = micro_batches;
    RC_LOG() << options.strategy << ", batch " << batch << ", " << micro_batches << " micro-batches\n" << print(g);
    Values many;
    try {
      many = Runner(g, fmt::format("ref:{}", devices), options).step(inputs, fetch);
    } catch (const Error& e) {
      // Told why, before anything runs.
      RC_LOG() << e.what();
      RC_ASSERT(e.code() == Code::kInvalidArgument || e.code() == Code::kUnimplemented);
      RC_ASSERT(std::string(e.what()).find("after pass") == std::string::npos);
      ++refused;
      return;
    }
    ++accepted;
    cut += devices > 1 || micro_batches > 1;
    for (const std::string& name : fetch) {
      const double off = distance(one.at(name), many.at(name)), size = std::max(norm(one.at(name)), 0.01);
      if (off > 1e-9 * size) RC_LOG() << name << " is off by " << off << " of " << size << "\n";
      RC_ASSERT(off <= 1e-9 * size);
    }
  }));
  MESSAGE(accepted << " accepted, " << cut << " of them on several devices or micro-batches; " << refused
                   << " refused");
  CHECK(cut > refused / 2);
}
