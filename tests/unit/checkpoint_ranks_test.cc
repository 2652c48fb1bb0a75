// Checkpoints of several ranks: what they save, any plan of any number of ranks goes on from; an error of one is one of
// all, and changes nothing.
#include <doctest/doctest.h>

#include <functional>
#include <mutex>
#include <set>
#include <thread>

#include "base/watch.h"
#include "checkpoint/describe.h"
#include "checkpoint/shards.h"
#include "checkpoint_kit.h"
#include "property.h"
#include "session/restore.h"
#include "small_models.h"
#include "trained.h"

using namespace whale;        // NOLINT
using namespace whale::kit;   // NOLINT
using namespace whale::test;  // NOLINT
namespace fs = std::filesystem;

namespace {

// body(rank) on a thread for each; what each throws.
std::vector<std::optional<Error>> on_each(size_t ranks, const std::function<void(size_t)>& body) {
  std::vector<std::optional<Error>> ends(ranks);
  std::vector<std::thread> threads;
  for (size_t r = 0; r < ranks; ++r)
    threads.emplace_back([&, r] {
      try {
        body(r);
      } catch (const Error& e) {
        ends[r] = e;
      } catch (const Stopped& e) {
        ends[r] = e.error();
      }
    });
  for (std::thread& thread : threads) thread.join();
  return ends;
}

void fine(const std::vector<std::optional<Error>>& ends) {
  for (const auto& end : ends) {
    if (end) MESSAGE(end->message());
    REQUIRE_FALSE(end);
  }
}

struct Setup {
  const char* strategy;
  const char* devices;
  int zero = 0;
};

CompileOptions options_of(const Setup& setup) {
  CompileOptions options;
  options.strategy = setup.strategy;
  options.zero = setup.zero;
  return options;
}

void save(Runner& runner, size_t ranks, const std::string& at) {
  fine(on_each(ranks, [&](size_t r) { runner.session(r).save(at); }));
}
void load(Runner& runner, size_t ranks, const std::string& at) {
  fine(on_each(ranks, [&](size_t r) { runner.session(r).load(at); }));
}

}  // namespace

TEST_CASE("what ranks save, any plan of any number of ranks goes on from") {
  const small::Model m = small::gpt(12, OptimizerKind::kAdamW, 2);
  const Setup setups[] = {{"replica", "ref:3"},
                          {"split", "ref:2"},
                          {"pipeline(2, micro_batches=2)", "ref:2"},
                          {"replica(shares=[2,1]) > split(2)", "ref:4"},
                          {"replica", "ref:3", 1},
                          {"replica", "ref:4", 3},
                          {"replica(2) > split(2)", "ref:4", 3}};
  const Setup one{"replica", "ref:1"};
  constexpr size_t kBefore = 2, kAfter = 3;
  Dice dice(3);
  std::vector<Values> batches;
  for (size_t i = 0; i < kBefore + kAfter; ++i) batches.push_back(random_inputs(m.g, 12, dice, 31));
  // For each plan, what it trains on from what it has saved; on the devices that compute as one does it is the same.
  for (const Setup& from : setups) {
    const auto devices = static_cast<size_t>(from.devices[4] - '0');
    for (size_t ranks = 2; ranks <= devices; ++ranks) {
      const TestFolder folder;
      const std::string at = folder.path / "c";
      CAPTURE(from.strategy);
      CAPTURE(from.zero);
      CAPTURE(ranks);
      Runner whole(m.g, from.devices, options_of(from), 7);  // the same plan, uninterrupted, as one rank
      Runner many(m.g, from.devices, options_of(from), 7, static_cast<int>(ranks));
      for (size_t i = 0; i < kBefore; ++i) {
        whole.step(batches[i], {"loss"});
        many.step(batches[i], {"loss"});
      }
      fine(on_each(ranks, [&](size_t r) { many.session(r).set_learning_rate(0.01); }));
      whole.session().set_learning_rate(0.01);
      save(many, ranks, at);
      CHECK(names_in(at).size() == 2 * ranks + 1);
      const Checkpoint c = open_checkpoint(at);
      c.verify();
      CHECK(c.index.format == 3);
      CHECK(c.index.ranks == static_cast<int64_t>(ranks));
      CHECK(c.index.meta.iteration == kBefore);
      // Value for value what one rank writes.
      const std::string alone = folder.path / "alone";
      whole.session().save(alone);
      const Checkpoint a = open_checkpoint(alone);
      CHECK(a.index.format == 2);
      for (const bool state : {false, true}) {
        const StoredTensors &mine = *(state ? c.optimizer : c.model), &theirs = *(state ? a.optimizer : a.model);
        REQUIRE(mine.tensors().size() == theirs.tensors().size());
        for (const StoredTensor& t : theirs.tensors()) {
          const StoredTensor* found = mine.find(t.name);
          REQUIRE(found != nullptr);
          REQUIRE(found->dims == t.dims);
          std::vector<char> x(t.bytes()), y(t.bytes());
          mine.read(*found, 0, x.data(), x.size());
          theirs.read(t, 0, y.data(), y.size());
          CHECK(x == y);
          if (x.size() > 11) {  // from the middle
            mine.read(*found, 7, y.data(), x.size() - 11);
            CHECK(std::equal(x.begin() + 7, x.end() - 4, y.begin()));
          }
        }
      }
      std::vector<Values> losses;
      for (size_t i = kBefore; i < kBefore + kAfter; ++i) losses.push_back(whole.step(batches[i], {"loss"}));
      // Into the same plan, of 1 to n ranks, and into others.
      for (size_t r = 1; r <= devices; ++r) {
        Runner again(m.g, from.devices, options_of(from), 99, static_cast<int>(r));
        load(again, r, at);
        CHECK(again.session(r - 1).iteration() == kBefore);
        CHECK(again.session(r - 1).seed() == 7);
        CHECK(again.session(r - 1).learning_rate() == 0.01);
        for (size_t i = 0; i < kAfter; ++i) CHECK(again.step(batches[kBefore + i], {"loss"}) == losses[i]);
        CHECK(again.variables() == whole.variables());
      }
      for (const Setup& to : {one, setups[2], setups[5]}) {
        CAPTURE(to.strategy);
        const size_t r = to.devices[4] == '1' ? 1 : 2;
        Runner reference(m.g, to.devices, options_of(to), 99),
            other(m.g, to.devices, options_of(to), 98, static_cast<int>(r));
        reference.session().load(alone);
        load(other, r, at);
        CHECK(other.variables() == reference.variables());
        for (size_t i = 0; i < kAfter; ++i)
          CHECK(other.step(batches[kBefore + i], {"loss"}) == reference.step(batches[kBefore + i], {"loss"}));
        CHECK(distance(other.read("wte"), whole.read("wte")) < 1e-4);
      }
    }
  }
}
