// Checkpoints of several ranks: what they save, any plan of any number of ranks goes on from; an error of one is one of
// all, and changes nothing.
#include <doctest/doctest.h>

#include <atomic>
#include <functional>
#include <mutex>
#include <set>
#include <span>
#include <thread>

#include "base/watch.h"
#include "checkpoint/describe.h"
#include "checkpoint/shards.h"
#include "checkpoint_kit.h"
#include "joined.h"
#include "property.h"
#include "session/restore.h"
#include "small_models.h"
#include "trained.h"
#include "unit/caught.h"

using namespace whale;        // NOLINT
using namespace whale::kit;   // NOLINT
using namespace whale::test;  // NOLINT
namespace fs = std::filesystem;

namespace {

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
#ifdef __SANITIZE_THREAD__  // many times as slow
  const auto saved = std::span(setups).subspan(3, 2);
#else
  const auto saved = std::span(setups);
#endif
  const Setup one{"replica", "ref:1"};  // the uninterrupted run of one device is near, that of the same plan the same
  constexpr size_t kBefore = 2, kAfter = 3;
  Dice dice(3);
  std::vector<Values> batches;
  for (size_t i = 0; i < kBefore + kAfter; ++i) batches.push_back(random_inputs(m.g, 12, dice, 31));
  for (const Setup& from : saved) {
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

TEST_CASE("every element is one rank's, of those that hold it, and they have the same to write") {
  Dice dice(11);
  for (int round = 0; round < 300; ++round) {
    const int ranks = static_cast<int>(dice.between(1, 5));
    Shards shards(ranks, static_cast<uint64_t>(dice.between(1, 200)));
    Dims dims;
    for (int64_t d = dice.between(0, 3); d > 0; --d) dims.push_back(dice.between(0, 9));
    // Parts that cover it, cut by the first two dimensions, copied, and one that overlaps them.
    const auto whole = [&] { return part_of(dims, std::vector<SubAxisCut>{}); };
    std::vector<HeldBy> held;
    const auto some_ranks = [&] {
      std::set<int32_t> out{static_cast<int32_t>(dice.below(ranks))};
      for (int r = 0; r < ranks; ++r)
        if (dice.coin()) out.insert(r);
      return std::vector<int32_t>(out.begin(), out.end());
    };
    if (dice.coin() && !dims.empty()) {
      Part some = whole();  // several intervals
      std::vector<Interval> odd;
      for (int64_t at = 0; at + 1 <= dims[0]; at += 3) odd.push_back({at, at + 1});
      some.dims[0] = odd;
      held.push_back({some, some_ranks()});
    }
    held.push_back({whole(), some_ranks()});
    const auto parts = shards.next(dims, 4, held);
    std::vector<int> times(static_cast<size_t>(element_count(dims)));
    for (size_t r = 0; r < parts.size(); ++r)
      for (const Part& part : parts[r]) {
        if (!part.empty()) CHECK(part.dims == part_of_text(to_text(part), dims).dims);
        CHECK(std::ranges::any_of(held, [&](const HeldBy& h) {
          return std::ranges::find(h.ranks, static_cast<int32_t>(r)) != h.ranks.end() || part.empty();
        }));
        for_each_run(dims, part, [&](int64_t logical, int64_t, int64_t n) {
          for (int64_t i = 0; i < n; ++i) ++times[logical + i];
        });
      }
    CHECK(std::ranges::all_of(times, [](int t) { return t == 1; }));
  }
  Shards even(4);
  for (int tensor = 0; tensor < 10; ++tensor)
    even.next({1000, 512}, 4, {{part_of({1000, 512}, std::vector<SubAxisCut>{}), {0, 1, 2, 3}}});
  for (int tensor = 0; tensor < 10; ++tensor)
    even.next({9}, 4, {{part_of({9}, std::vector<SubAxisCut>{}), {0, 1, 2, 3}}});
  const auto [least, most] = std::ranges::minmax(even.bytes());
  CHECK(most - least <= 9 * 4);
  CHECK(even.bytes()[0] + even.bytes()[1] + even.bytes()[2] + even.bytes()[3] == 10 * (512'000 + 9) * 4);
}

TEST_CASE("texts that are no parts are refused") {
  CHECK(part_of_text("0:2+3:4,0:5", {4, 5}).extents() == Dims{3, 5});
  CHECK(part_of_text("", {}).dims.empty());
  for (const char* bad : {"", "0:2", "0:2,0:6", "0:2,5:5", "0:2,3:1", "2:3+0:1,0:5", "0:2+1:3,0:5", "0:2,0:5,0:1",
                          "0:2,0:5 ", "a:2,0:5", "0:2;0:5", "-1:2,0:5", "0:99999999999999999999,0:5", "0:2+,0:5"})
    CHECK_MESSAGE(has(message_of([&] { part_of_text(bad, {4, 5}); }, {Code::kInvalidArgument}), "is no part"), bad);
  CHECK(has(message_of([&] { part_of_text("0:1", {}); }), "is no part"));
}

TEST_CASE("a shard that is missing or damaged is an error of all ranks, which stay as they were") {
  const small::Model m = small::gpt(12, OptimizerKind::kAdamW, 2);
  CompileOptions options;
  options.strategy = "pipeline(2, micro_batches=2)";
  const TestFolder folder;
  const std::string at = folder.path / "c";
  Runner saved(m.g, "ref:2", options, 7, 2);
  save(saved, 2, at);
  Runner other(m.g, "ref:2", options, 8, 2);
  const Values before = other.variables();
  const std::string good = content(at + "/model-00002-of-00002.safetensors");
  const auto refused = [&](const std::string& words) {
    const auto ends = on_each(2, [&](size_t r) { other.session(r).load(at); });
    for (const auto& end : ends) {
      REQUIRE(end);
      CHECK(says(*end, Code::kDataLoss, words));
      CHECK(end->message() == ends[0]->message());
      CHECK(end->where().rank == ends[0]->where().rank);
      CHECK(end->damage() == Damage::kCall);
    }
    CHECK(other.variables() == before);
    CHECK(other.session().seed() == 8);
    return ends[0]->where().rank;
  };
  std::string bad = good;
  bad.back() = static_cast<char>(bad.back() ^ 1);
  put(at + "/model-00002-of-00002.safetensors", bad);
  CHECK(refused("rank 1: '" + at + "/model-00002-of-00002.safetensors' is damaged: tensor '") == 1);
  // Rank 0 does not read what the other stage holds.
  const Plan plan = compile(m.g, parse_devices("ref:2"), options);
  const Checkpoint c = open_checkpoint(at);
  const std::vector<int32_t> ranks = {0, 1};
  Restoration(plan, c, {ranks, 0, 2}).verify();
  CHECK_THROWS_AS(Restoration(plan, c, {ranks, 1, 2}).verify(), Error);
  CHECK_THROWS_AS(c.verify(), Error);
  put(at + "/model-00002-of-00002.safetensors", good.substr(0, good.size() - 1));
  CHECK(refused("rank 0: '" + at + "/model-00002-of-00002.safetensors'") == 0);
  fs::remove(at + "/model-00002-of-00002.safetensors");
  CHECK(refused("whale.json describes has lost it") == 0);
  put(at + "/model-00002-of-00002.safetensors", good);
  load(other, 2, at);
  CHECK(other.variables() == saved.variables());
}

TEST_CASE("a shard's every changed byte is noticed, and shards of two saves are no checkpoint") {
  const small::Model m = small::mlp(8, OptimizerKind::kAdam);
  CompileOptions options;
  options.strategy = "split";
  const TestFolder folder;
  const std::string at = folder.path / "c", two = folder.path / "d";
  Runner runner(m.g, "ref:2", options, 7, 2);
  save(runner, 2, at);
  save(runner, 2, two);
  Dice dice(5);
  for (const std::string& file : names_in(at)) {
    const std::string good = content(at + "/" + file);
    for (size_t i = 0; i < good.size(); i += 1 + static_cast<size_t>(dice.below(7))) {
      std::string bad = good;
      bad[i] = static_cast<char>(bad[i] ^ (1 + dice.below(255)));
      put(at + "/" + file, bad);
      CAPTURE(i);
      const Error e = error_of([&] { open_checkpoint(at).verify(); });
      REQUIRE(says(e, Code::kDataLoss, file));
    }
    put(at + "/" + file, content(two + "/" + file));
    CHECK(says(error_of([&] { open_checkpoint(at); }), Code::kDataLoss, "is not of the save"));
    put(at + "/" + file, good);
  }
  open_checkpoint(at).verify();
}

TEST_CASE("a save that one rank refuses, cancels or does not make ends on all ranks") {
  const small::Model m = small::mlp(8, OptimizerKind::kAdam);
  CompileOptions options;
  options.strategy = "replica";
  const TestFolder folder;
  const std::string at = folder.path / "c";
  Runner runner(m.g, "ref:2", options, 7, 2);
  save(runner, 2, at);
  const std::string index = content(at + "/whale.json");
  const auto said = [&](const std::function<void(size_t)>& body, Code code, const std::string& words) {
    const auto ends = on_each(2, body);
    for (const auto& end : ends) {
      REQUIRE(end);
      CHECK(says(*end, code, words));
    }
    CHECK(content(at + "/whale.json") == index);
    // Where the other rank may still have been writing, the lock stays for the next save, which tidies.
    std::vector<std::string> names = names_in(at);
    std::erase(names, ".whale.saving");
    CHECK(names.size() == 5);
  };
  said([&](size_t r) { r == 0 ? runner.session(r).save(at) : runner.session(r).load(at); }, Code::kFailedPrecondition,
       "runs something else");
  std::atomic<bool> cancelled = true;
  for (const size_t who : {0, 1})
    said(
        [&](size_t r) {
          const Watch watch("saving", r == who ? &cancelled : nullptr, 0);
          runner.session(r).save(at);
        },
        Code::kCancelled, "cancelled");
  runner.session(1).set_learning_rate(0.5);
  said([&](size_t r) { runner.session(r).save(at); }, Code::kFailedPrecondition, "rank 1 at '\"learning_rate\": 0.5");
  runner.session(1).set_learning_rate(-1);
  said([&](size_t r) { runner.session(r).save(r == 1 ? "" : at); }, Code::kInvalidArgument, "has no name");
  save(runner, 2, at);
  CHECK(content(at + "/whale.json") != index);
  CHECK(names_in(at).size() == 5);
}
