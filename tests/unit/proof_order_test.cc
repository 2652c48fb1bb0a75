// The prover's own check of the order, against the plan's verifier, which shares no code with it.
#include <doctest/doctest.h>

#include <functional>

#include "base/error.h"
#include "own_programs.h"
#include "proof_case.h"
#include "property.h"
#include "prove/flow.h"
#include "prove/meetings.h"
#include "prove/races.h"
#include "unit/small_models.h"

using namespace whale;
using test::plan_of;

namespace {

struct Case {
  const char* devices;
  const char* strategy;
  std::function<void(CompileOptions&)> more = [](CompileOptions&) {};
};
const Case kCases[] = {
    {"null:1", "replica(1)"},
    {"null:4", "replica(4)", [](CompileOptions& o) { o.zero = 3, o.accumulation = 2, o.bucket_bytes = 2000; }},
    {"null:4", "replica(4)", [](CompileOptions& o) { o.zero = 2, o.accumulation = 3, o.recompute = Recompute::kFull; }},
    {"null:4", "replica(2) > split(2)", [](CompileOptions& o) { o.bucket_bytes = 1000; }},
    {"null:2", "split(2, factor=sequence)"},
    {"null:4", "split(2) > pipeline(2, micro_batches=4)"},
    {"null:2", "pipeline(2, micro_batches=4, schedule=\"zb_h1\")"},
    {"null:2", "pipeline(2, micro_batches=6, schedule=\"interleaved\", virtual_stages=2)"},
    {"null:2", "replica(2)", [](CompileOptions& o) { o.offload = kOffloadAll, o.accumulation = 3; }},
};

// What is wrong with it; "": nothing.
std::string fault_of(const Plan& plan) {
  try {
    verify(plan);
    return "";
  } catch (const Error& e) {
    return e.what();
  }
}

bool is_ordered(const Plan& plan) {
  for (const Entry& e : plan.entries) {
    for (const Program& p : e.programs)
      if (proof::race_of(p, 0)) return false;
    if (proof::standstill_of(plan, e, proof::Symmetry(plan, e, proof::Symmetry::Sought::kNo))) return false;
  }
  return true;
}

// Where it reads and writes: an instruction that does the same there is the same.
std::vector<std::pair<int64_t, int64_t>> places_of(const Program& p, const Instruction& i) {
  std::vector<std::pair<int64_t, int64_t>> out;
  for (const BufferIds* list : {&i.in, &i.out})
    for (const BufferId id : *list) {
      const Buffer& b = p.buffers[id];
      out.emplace_back(b.offset + b.at, b.bytes);
    }
  return out;
}

template <class Case>
Plan made_of(const Case& c) {
  Plan plan = plan_of(small::gpt(24).g, c.devices, c.strategy, c.more);
  plan.entries.resize(1);
  give_own_programs(plan.entries[0]);
  return plan;
}

}  // namespace

TEST_CASE("order: where a wait is left out, both say whether it was needed") {
  test::Dice dice(test::Dice(3).next());
  int needed = 0, spare = 0;
  for (const Case& c : kCases) {
    CAPTURE(std::string(c.strategy));
    Plan plan = made_of(c);
    REQUIRE(fault_of(plan).empty());
    REQUIRE(is_ordered(plan));
    for (int n = 0; n < 120; ++n) {
      Plan damaged = plan;
      Program& p = damaged.entries[0].programs[dice.below(std::ssize(plan.entries[0].programs))];
      const auto one_of = [&](auto& list) -> auto& { return list[dice.below(std::ssize(list))]; };
      std::string what;
      if (dice.coin() && !p.row_waits.empty()) {
        RowWaits& waits = one_of(p.row_waits);
        if (waits.empty()) continue;
        waits.erase(waits.begin() + dice.below(std::ssize(waits)));
      } else {
        Segment& s = one_of(p.segments);
        if (s.instructions.empty()) continue;
        Instruction& i = one_of(s.instructions);
        if (i.waits.empty()) continue;
        i.waits.erase(i.waits.begin() + dice.below(std::ssize(i.waits)));
        what = s.name + "/" + i.name;
      }
      CAPTURE(what);
      const std::string fault = fault_of(damaged);
      CAPTURE(fault);
      const bool verified = fault.empty();
      CHECK(is_ordered(damaged) == verified);
      ++(verified ? spare : needed);
    }
  }
  MESSAGE(needed << " needed, " << spare << " not");
  CHECK(needed > 200);
}

TEST_CASE("order: collectives and messages that are exchanged on one device come to no end") {
  test::Dice dice(test::Dice(5).next());
  int wrong = 0;
  for (const Case& c : kCases) {
    CAPTURE(std::string(c.strategy));
    const Plan plan = made_of(c);
    for (int n = 0; n < 40; ++n) {
      Plan damaged = plan;
      Program& p = damaged.entries[0].programs[0];
      Segment& s = p.segments[dice.below(std::ssize(p.segments))];
      std::vector<Instruction*> meets;
      for (Instruction& i : s.instructions)
        if (i.group() != kNone || i.link() != kNone) meets.push_back(&i);
      if (meets.size() < 2) continue;
      Instruction &a = *meets[dice.below(std::ssize(meets))], &b = *meets[dice.below(std::ssize(meets))];
      if (&a == &b || places_of(p, a) == places_of(p, b)) continue;
      std::swap(a.work, b.work), std::swap(a.name, b.name), std::swap(a.in, b.in), std::swap(a.out, b.out);
      const std::string fault = fault_of(damaged), what = s.name + ": " + a.name + " and " + b.name;
      CAPTURE(fault);
      CAPTURE(what);
      if (fault.empty()) continue;
      ++wrong;
      CHECK(prove(damaged, damaged.entries[0]).verdict != ProofVerdict::kProven);
    }
  }
  CHECK(wrong > 60);
}

TEST_CASE("order: a race is told by both instructions and the tensor") {
  Plan plan = made_of(kCases[1]);
  std::string told;
  for (Program& p : plan.entries[0].programs)
    for (Segment& s : p.segments)
      for (Instruction& i : s.instructions) {
        const std::vector<Wait> waits = std::exchange(i.waits, {});
        if (const auto race = proof::race_of(p, 3); race && told.empty()) {
          told = race->stop.what;
          CHECK(race->at.device == 3);
          CHECK(race->stop.covered);
        }
        i.waits = waits;
      }
  CHECK_MESSAGE(told.find("does not wait for instruction") != told.npos, told);
}
