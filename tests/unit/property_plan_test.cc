// Random models, scope trees, shares, schedules and options: every plan is what one device computes.
#include <doctest/doctest.h>

#include <algorithm>
#include <cctype>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "cluster/devices.h"
#include "plan_case.h"
#include "prove/prove.h"
#include "prove/reference.h"

using namespace whale;
using namespace whale::test;

namespace {

// Failures that were found and mended, smallest first: run before any random case. A line each.
constexpr const char* kKept[] = {
#include "kept_cases.inc"
};

// Values with a row for every sample that no input feeds (first states, masks, gradients that are the same for all
// samples): once refused with micro-batches. They are cut like any other along time and replicas.
constexpr const char* kOnceRefused[] = {
    "graph image#6632 concat#85994 conv#73698 for_all#50013 plain_mean#86292 | batch 3 | devices 3 | strategy "
    "pipeline(3, micro_batches=3, schedule=interleaved, virtual_stages=2) | evaluated 4 | gradients true",
    "graph features#19801 residual#28713 scale#7270 plain_mean#27074 | batch 7 | devices 7 | strategy pipeline(3, "
    "micro_batches=5, schedule=gpipe) > split | optimizer adafactor#85302 | zero 2",
    "graph volume#23766 flatten#47028 frozen#67557 attention#79183 plain_mean#91432 | batch 11 | devices 4 | strategy "
    "split(2) > split(2) | micro_batches 5 | optimizer adamw#64401 | zero 1 | last 3",
    "graph pipeline(micro_batches=2,schedule=1f1b){ stage{ split(3,shares=[3,0,1]){ volume#79251 hand_norm#90613 } } "
    "stage{ replica(2){ replica(2){ token#29465 } } } stage{ split(1){ plain_mean#57130 } } } | batch 2 | devices 8 | "
    "micro_batches 2 | fusion false",
    "graph volume#61587 pad#54684 recurrent#82437 mean#23976 flatten#59944 regression#27888 | batch 9 | devices 6 | "
    "strategy pipeline(3, micro_batches=4, schedule=1f1b) > split | recompute 2 | overlap false",
};

// A learned weight times a loss whose denominator counts samples: refused with micro-batches once.
constexpr const char* kLearnedWeights[] = {
    "graph features#1 learned#1 | batch 6 | devices 1 | strategy replica | micro_batches 2 | last 3",
    "graph features#1 linear#3 learned#3 | batch 7 | devices 2 | strategy replica(2, shares=[2,1]) | micro_batches 3 | "
    "exact true | zero 3 | last 2",
    "graph features#1 temperature#1 linear#3 learned#4 | batch 8 | devices 2 | strategy pipeline(2, micro_batches=4) | "
    "optimizer adamw#7 | last 3",
    "graph features#1 temperature#1 linear#3 linear#4 learned#6 | batch 9 | devices 4 | strategy pipeline(2, "
    "micro_batches=3, schedule=zb_h1) > replica(2) | optimizer adam#7 | zero 2 | exact true | last 5",
    "graph features#1 linear#3 temperature#1 linear#4 learned#7 | batch 8 | devices 4 | strategy replica(2, "
    "by=micro_batch) > split(2) | micro_batches 4 | zero 1 | last 2 | gradients true",
};

// A message without its names and numbers, to count the reasons.
std::string kind_of(const std::string& message) {
  std::string out;
  bool quoted = false;
  for (const char c : message) {
    if (c == '\'') quoted = !quoted;
    if (quoted || std::isdigit(static_cast<unsigned char>(c))) continue;
    out += c;
  }
  return out.substr(0, 150);
}

struct Tally {
  std::map<Outcome, int> outcomes;
  std::map<ProofVerdict, int> proofs;
  std::map<std::string, int> reasons;
  long steps = 0;
  void add(const Verdict& v) {
    ++outcomes[v.outcome], steps += v.steps;
    if (v.proof) ++proofs[*v.proof];
    if (v.outcome == Outcome::kRefused) ++reasons["refused: " + kind_of(v.text)];
    if (v.proof == ProofVerdict::kNotCovered) ++reasons["not covered: " + kind_of(v.construct)];
  }
  int count(Outcome o) const { return outcomes.contains(o) ? outcomes.at(o) : 0; }
  int count(ProofVerdict p) const { return proofs.contains(p) ? proofs.at(p) : 0; }
  std::string text() const {
    std::string out;
    for (const Outcome o :
         {Outcome::kEqual, Outcome::kRefused, Outcome::kNotStable, Outcome::kRounding, Outcome::kWrong})
      out += fmt::format("{}{} {}", out.empty() ? "" : ", ", count(o), name_of(o));
    out += fmt::format("; {} steps compared; of the plans", steps);
    for (const ProofVerdict p : {ProofVerdict::kProven, ProofVerdict::kRefuted, ProofVerdict::kNotCovered})
      out += fmt::format(" {} {}{}", count(p), name_of(p), p == ProofVerdict::kNotCovered ? "\n" : ",");
    std::vector<std::pair<int, std::string>> sorted;
    for (const auto& [reason, n] : reasons) sorted.emplace_back(n, reason);
    std::sort(sorted.rbegin(), sorted.rend());
    for (const auto& [n, reason] : sorted) out += fmt::format("  {} {}\n", n, reason);
    return out;
  }
  std::string json(const std::string& hunt) const {
    std::map<std::string, int> all, proven;
    for (const auto& [outcome, n] : outcomes) all[std::string(name_of(outcome))] = n;
    for (const auto& [verdict, n] : proofs) proven[name_of(verdict)] = n;
    return nlohmann::json{{"hunt", hunt}, {"outcomes", all}, {"steps", steps}, {"proofs", proven}}.dump(2) + "\n";
  }
};

// The smallest case of the same failure that some hundred attempts find.
PlanCase shrunk(PlanCase c, const std::string& kind) {
  int tries = 300;
  for (bool again = true; again;) {
    again = false;
    for (const PlanCase& less : smaller_cases(c)) {
      if (--tries < 0) return c;
      try {
        const Verdict v = verdict_on(less);
        if (v.outcome != Outcome::kWrong || (kind_of(v.text).substr(0, 20) != kind.substr(0, 20))) continue;
      } catch (const Error&) {
        continue;
      }
      c = less, again = true;
      break;
    }
  }
  return c;
}

Tally hold(
    const std::string& name, int cases, int64_t most_devices, int steps,
    const std::function<void(PlanCase&, Dice&)>& change = [](PlanCase&, Dice&) {}) {
  Tally tally;
  CHECK(holds(name, cases, [&] {
    const auto generated = rc::gen::map(rc::gen::inRange<uint32_t>(0, 1u << 30), [&](uint32_t word) {
      Dice dice(word);
      PlanCase c = random_plan_case(dice, most_devices);
      c.steps = steps;
      change(c, dice);
      return c;
    });
    // Not by the word, which says nothing: by parts of the case.
    const PlanCase c = *rc::gen::shrink(rc::gen::noShrink(generated), [](const PlanCase& large) {
      return rc::seq::fromContainer(smaller_cases(large));
    });
    const std::string line = to_string(c);
    CAPTURE(line);
    RC_ASSERT(to_string(parse_case(line)) == line);
    const Verdict v = verdict_on(c);
    tally.add(v);
    RC_LOG() << line << "\n" << v.text << "\n";
    RC_ASSERT(v.outcome != Outcome::kWrong);
  }));
  MESSAGE(tally.text());
  CHECK(tally.count(ProofVerdict::kNotCovered) <= 1 + tally.count(ProofVerdict::kProven) / 50);
  return tally;
}

// "lag": on devices that are late; "ranks": of two or three, half of them of late devices.
void put_on(PlanCase& c, std::string_view where, Dice& dice) {
  const bool ranks = where == "ranks";
  if (ranks) c.ranks = static_cast<int>(dice.between(2, 3));
  if (!ranks || dice.coin()) c.kind = fmt::format("lag@{}", dice.between(1, 1000));
}

}  // namespace

TEST_CASE("a tally of plans counts what is not proven, and why") {
  Tally tally;
  tally.add({.outcome = Outcome::kEqual, .text = {}, .proof = ProofVerdict::kProven});
  for (int n = 0; n < 2; ++n)
    tally.add({.outcome = Outcome::kEqual, .text = {}, .proof = ProofVerdict::kNotCovered, .construct = "scan"});
  tally.add({.outcome = Outcome::kWrong, .text = {}, .proof = ProofVerdict::kRefuted});
  tally.add({.outcome = Outcome::kRefused, .text = "too large"});
  const std::string told = tally.text();
  CHECK_MESSAGE(told.find("of the plans 1 proven, 1 refuted, 2 not covered\n") != told.npos, told);
  CHECK_MESSAGE(told.find("  2 not covered: scan\n") != told.npos, told);
  CHECK_MESSAGE(told.find("  1 refused: too large\n") != told.npos, told);
  CHECK(nlohmann::json::parse(tally.json(""))["proofs"]["not covered"] == 2);
}

TEST_CASE("property: kept cases of plans are one device") {
  for (const char* line : kKept) {
    CAPTURE(line);
    const PlanCase c = parse_case(line);
    CHECK(to_string(c) == line);
    const Verdict v = verdict_on(c);
    CHECK_MESSAGE(v.outcome != Outcome::kWrong, v.text);
  }
}

TEST_CASE("property: rows that no input feeds are cut along time") {
  for (const char* line : kOnceRefused) {
    CAPTURE(line);
    const Verdict v = verdict_on(parse_case(line));
    CHECK_MESSAGE(v.outcome == Outcome::kEqual, v.text);
  }
}

TEST_CASE("property: what a loss counts may be learned") {
  for (const char* line : kLearnedWeights) {
    CAPTURE(line);
    const Verdict v = verdict_on(parse_case(line));
    CHECK_MESSAGE(v.outcome == Outcome::kEqual, v.text);
  }
}

TEST_CASE("property: every plan is one device") {
  const Tally tally = hold("plans", 1000, 8, is_full() ? 20 : 8);
  CHECK(tally.count(Outcome::kRefused) * 4 <= tally.count(Outcome::kEqual));
  CHECK(tally.count(Outcome::kNotStable) * 50 <= tally.count(Outcome::kEqual));
  CHECK(tally.count(Outcome::kRounding) * 100 <= tally.count(Outcome::kEqual));
}

// Few: sixty threads take turns on the cores that are there.
TEST_CASE("property: every plan of 9 to 64 devices is one device") {
  const Tally tally = hold("plans of many devices", 20, 64, 20);
  CHECK(tally.count(Outcome::kRefused) <= tally.count(Outcome::kEqual));
}

// Pieces of as little as 64 bytes, where replicas alone share the work.
TEST_CASE("property: gradients that are made in pieces are those of one device") {
  hold("pieces of gradients", 200, 8, 5, [](PlanCase& c, Dice& dice) {
    c.zero = static_cast<int>(dice.between(2, 3)), c.exact = false, c.bucket_bytes = 64, c.profile = 1;
    if (splits(c) && dice.below(4) != 0) {
      std::erase_if(c.graph, [](const std::string& item) { return item == "}" || item.back() == '{'; });
      c.strategy = "replica", c.state_shares.clear(), c.devices = dice.between(2, 4);
    }
  });
}

// In float64 a sum in float32 is near: what is not near is another sum.
TEST_CASE("property: sums over micro-batches in another type are those sums") {
  // Of one step, whose rounding no later one enlarges.
  const Tally tally = hold("narrow sums", 200, 8, 1, [](PlanCase& c, Dice&) {
    c.narrow_sums = true, c.exact = false, c.last = 0, c.optimizer = "sgd#0", c.sparse_updates = false;
    c.micro_batches = std::max<int64_t>(c.micro_batches, 2), c.batch = std::max(c.batch, micro_batches_of(c));
  });
  CHECK(tally.count(Outcome::kRefused) * 2 <= tally.count(Outcome::kEqual));
}

// Their queues overtake each other wherever the plan lets them.
TEST_CASE("property: every plan on devices that are late is one device") {
  hold("plans, late", 100, 8, 3, [](PlanCase& c, Dice& dice) { put_on(c, "lag", dice); });
}

// They share a store and a wire of flat bytes, and nothing else.
TEST_CASE("property: every plan of two or three ranks is one device") {
  const Tally tally = hold("plans of ranks", 150, 8, 3, [](PlanCase& c, Dice& dice) { put_on(c, "ranks", dice); });
  CHECK(tally.count(Outcome::kRefused) * 4 <= tally.count(Outcome::kEqual));
}

// Not a test: one case, or the kinds of failures among many, each with a small example.
TEST_CASE("hunt for failing plans" * doctest::skip()) {
  const char* text = std::getenv("WHALE_HUNT");  // "first count seconds steps most_devices", or a case's line
  if (text && std::string_view(text).starts_with("graph ")) {
    const PlanCase c = parse_case(text);
    Graph g = graph_of(c);
    if (const char* half = std::getenv("WHALE_PRECISION"))  // "bf16", of the proof
      g.training.precision = std::string_view(half) == "bf16" ? Precision::kBFloat16 : Precision::kFloat16;
    CompileOptions options = options_of(c, g);
    const char* level = std::getenv("WHALE_LEVEL");  // a pass to show, "train.insert_reshards"; "program": the prover's
    options.dump = [&](std::string_view pass, const std::string& shown) {
      if (pass == (level ? level : "source")) fmt::print("{}\n", shown);
    };
    try {
      const Plan plan = compile(g, devices_of_text(devices_of(c)), options);
      if (const Proof proof = prove(plan); proof.verdict != ProofVerdict::kProven)
        fmt::print("{}\n", whale::text(proof));
      if (std::string_view(level ? level : "") == "program") {
        const Entry& entry = plan.entries[0];
        fmt::print("{}\n", print(proof::Reference(plan, entry, proof::form_of(entry)).graph()));
      }
    } catch (const Error& e) {
      fmt::print("{}\n", e.what());
    }
    const Verdict v = verdict_on(c);
    fmt::print("{} after {} steps, {}: {}\n", name_of(v.outcome), v.steps, v.proof ? name_of(*v.proof) : "no plan",
               v.text);
    return;
  }
  long first = 0, count = 1000, seconds = 1000000, steps = 20, most = 8;
  if (text) std::sscanf(text, "%ld %ld %ld %ld %ld", &first, &count, &seconds, &steps, &most);
  const char* exact = std::getenv("WHALE_EXACT");              // all of them in exact mode
  const bool unlike = std::getenv("WHALE_UNLIKE") != nullptr;  // those with unlike replicas alone
  const char* on = std::getenv("WHALE_ON");                    // "lag", "ranks": see put_on
  Tally tally;
  std::map<std::string, int> kinds;
  const auto began = std::chrono::steady_clock::now();
  for (long i = first; i < first + count; ++i) {
    if (std::chrono::steady_clock::now() - began > std::chrono::seconds(seconds)) break;
    Dice dice(Dice(static_cast<uint64_t>(i)).next());
    PlanCase c = random_plan_case(dice, most);
    c.steps = static_cast<int>(steps);
    if (unlike && c.strategy.find("([") == c.strategy.npos) continue;
    if (exact) c.exact = true, c.sliced = false, c.matmul_chunks = 1;
    if (on) put_on(c, on, dice);
    const std::string line = to_string(c);
    if (count == 1) fmt::print(stderr, "{}\n", line);
    const Verdict v = verdict_on(c);
    tally.add(v);
    if (v.outcome == Outcome::kRefused && tally.reasons["refused: " + kind_of(v.text)] == 1)
      fmt::print("{}\n  {}\n", line, v.text);
    if (v.outcome == Outcome::kNotStable || v.outcome == Outcome::kRounding)
      fmt::print("{}: {}\n  {}\n", name_of(v.outcome), line, v.text);
    if (v.outcome != Outcome::kWrong) continue;
    const std::string kind = kind_of(v.text);
    if (++kinds[kind] > 3) continue;
    const PlanCase small = shrunk(c, kind);
    fmt::print("{}: {}\n  {}\n  {}: {}\n", i, line, v.text, to_string(small), verdict_on(small).text);
    std::fflush(stdout);
  }
  for (const auto& [kind, n] : kinds) fmt::print("{} wrong: {}\n", n, kind);
  fmt::print("{}", tally.text());
  if (const char* file = std::getenv("WHALE_HUNT_RESULT"))
    std::ofstream(file) << tally.json(text ? text : "");  // of docs/equality.md
}
