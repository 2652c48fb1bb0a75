// Random models, scope trees, shares, schedules and options: every plan is what one device computes.
#include <doctest/doctest.h>

#include <algorithm>
#include <cctype>
#include <chrono>
#include <cstdlib>
#include <map>

#include "base/error.h"
#include "cluster/devices.h"
#include "plan_case.h"

using namespace whale;
using namespace whale::test;

namespace {

// Failures that were found and mended, smallest first: run before any random case. A line each.
constexpr const char* kKept[] = {
#include "kept_cases.inc"
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
  int equal = 0, refused = 0, wrong = 0;
  std::map<std::string, int> reasons;
  void add(const Verdict& v) {
    equal += v.outcome == Outcome::kEqual, refused += v.outcome == Outcome::kRefused;
    wrong += v.outcome == Outcome::kWrong;
    if (v.outcome == Outcome::kRefused) ++reasons[kind_of(v.text)];
  }
  std::string text() const {
    std::vector<std::pair<int, std::string>> sorted;
    for (const auto& [reason, n] : reasons) sorted.emplace_back(n, reason);
    std::sort(sorted.rbegin(), sorted.rend());
    std::string out = fmt::format("{} equal, {} refused, {} wrong\n", equal, refused, wrong);
    for (const auto& [n, reason] : sorted) out += fmt::format("  {} refused: {}\n", n, reason);
    return out;
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

}  // namespace

TEST_CASE("property: kept cases of plans are one device") {
  for (const char* line : kKept) {
    CAPTURE(line);
    const PlanCase c = parse_case(line);
    CHECK(to_string(c) == line);
    const Verdict v = verdict_on(c);
    CHECK_MESSAGE(v.outcome != Outcome::kWrong, v.text);
  }
}

TEST_CASE("property: every plan is one device") {
  Tally tally;
  CHECK(holds("plans", 1000, [&] {
    const auto generated = rc::gen::map(rc::gen::inRange<uint32_t>(0, 1u << 30), [](uint32_t word) {
      Dice dice(word);
      return random_plan_case(dice);
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
  CHECK(tally.refused * 4 <= tally.equal);
}

// Not a test: one case, or the kinds of failures among many, each with a small example.
TEST_CASE("hunt for failing plans" * doctest::skip()) {
  const char* text = std::getenv("WHALE_HUNT");  // "first count seconds", or the line of a case
  if (text && std::string_view(text).starts_with("graph ")) {
    const PlanCase c = parse_case(text);
    const Graph g = graph_of(c);
    CompileOptions options = options_of(c, g);
    const char* level = std::getenv("WHALE_LEVEL");  // a pass to show, "train.propagate"
    options.dump = [&](std::string_view pass, const std::string& shown) {
      if (pass == (level ? level : "source")) fmt::print("{}\n", shown);
    };
    try {
      compile(g, parse_devices(fmt::format("ref:{}", c.devices)), options);
    } catch (const Error& e) {
      fmt::print("{}\n", e.what());
    }
    const Verdict v = verdict_on(c);
    fmt::print("{}: {}\n", std::vector{"equal", "refused", "wrong"}.at(static_cast<size_t>(v.outcome)), v.text);
    return;
  }
  long first = 0, count = 1000, seconds = 1000000;
  if (text) std::sscanf(text, "%ld %ld %ld", &first, &count, &seconds);
  Tally tally;
  std::map<std::string, int> kinds;
  const auto began = std::chrono::steady_clock::now();
  for (long i = first; i < first + count; ++i) {
    if (std::chrono::steady_clock::now() - began > std::chrono::seconds(seconds)) break;
    Dice dice(Dice(static_cast<uint64_t>(i)).next());
    const PlanCase c = random_plan_case(dice);
    const std::string line = to_string(c);
    if (count == 1) fmt::print(stderr, "{}\n", line);
    const Verdict v = verdict_on(c);
    tally.add(v);
    if (v.outcome == Outcome::kRefused && tally.reasons[kind_of(v.text)] == 1) fmt::print("{}\n  {}\n", line, v.text);
    if (v.outcome != Outcome::kWrong) continue;
    const std::string kind = kind_of(v.text);
    if (++kinds[kind] > 3) continue;
    const PlanCase small = shrunk(c, kind);
    fmt::print("{}: {}\n  {}\n  {}: {}\n", i, line, v.text, to_string(small), verdict_on(small).text);
    std::fflush(stdout);
  }
  for (const auto& [kind, n] : kinds) fmt::print("{} wrong: {}\n", n, kind);
  fmt::print("{}", tally.text());
}
