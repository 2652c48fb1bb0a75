// What is said of a plan that does not fit: of which tensors, and that what is printed to make it fit does.
#include <doctest/doctest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <sstream>

#include "base/text.h"
#include "caught.h"
#include "cluster/devices.h"
#include "compile/compile.h"
#include "compile/estimate.h"
#include "compile/remedy_changes.h"
#include "plan/figures.h"
#include "plan/lives.h"
#include "report/fit.h"
#include "report/held.h"
#include "small_models.h"

namespace whale {
namespace {

// The lines of remedies in a message, each as the command line has it.
std::vector<std::string> printed(const std::string& text) {
  std::vector<std::string> out;
  std::istringstream lines(text);
  bool remedies = false;
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with("  ")) remedies = line.starts_with("What makes it fit") || line.starts_with("With another");
    if (remedies && line.starts_with("  --")) out.push_back(line.substr(2, line.find("  ", 2) - 2));
  }
  return out;
}

// The options with what the flags say in their place; a flag that is not known fails the test.
CompileOptions with_flags(CompileOptions options, const std::string& flags) {
  const std::map<std::string, Recompute> policies{{"selective", Recompute::kSelective}, {"full", Recompute::kFull}};
  for (size_t at = 0; at < flags.size();) {
    size_t end = flags.find(' ', at);
    const std::string flag = flags.substr(at, end - at);
    at = end + 1;
    const bool quoted = flags[at] == '\'';
    end = quoted ? flags.find('\'', at + 1) : std::min(flags.find(' ', at), flags.size());
    const std::string value = quoted ? flags.substr(at + 1, end - at - 1) : flags.substr(at, end - at);
    at = quoted ? end + 2 : end + 1;
    if (flag == "--strategy")
      options.strategy = value;
    else if (flag == "--accumulation")
      options.accumulation = std::stoll(value);
    else if (flag == "--zero")
      options.zero = std::stoi(value);
    else if (flag == "--recompute")
      options.recompute = policies.at(value);
    else if (flag == "--offload")
      options.offload = parse_offload(value);
    else
      FAIL("unknown flag ", flag);
  }
  return options;
}

std::string refused(const Graph& graph, const std::string& devices, const CompileOptions& options) {
  return message_of([&] { compile(graph, parse_devices(devices, {0}), options); }, {Code::kResourceExhausted});
}

int64_t fullest(const Plan& plan) {
  int64_t most = 0;
  for (const Entry& entry : plan.entries)
    for (size_t p = 0; p < entry.programs.size(); ++p) most = std::max(most, memory_of(plan, entry, p).device.total());
  return most;
}

CompileOptions of(const char* strategy) {
  CompileOptions options;
  options.strategy = strategy;
  return options;
}

struct Case {
  const char* name;
  Graph graph;
  int count;
  const char* strategy;
};
std::vector<Case> cases() {
  const Graph gpt = small::gpt(16, OptimizerKind::kAdamW, 3, 16, 64, 64).g;
  std::vector<Case> out;
  for (const auto& [count, strategy] : {std::pair(1, "replica"), std::pair(4, "replica"), std::pair(2, "split(2)"),
                                        std::pair(4, "replica(2) > pipeline(2, micro_batches=2)")})
    out.push_back({"gpt", gpt, count, strategy});
  out.push_back({"resnet", small::resnet(32, OptimizerKind::kAdamW).g, 4, "replica"});
  out.push_back({"mlp", small::mlp(64, OptimizerKind::kAdamW, 64, 256).g, 4, "replica(2) > split(2)"});
  return out;
}

// There may be time for one estimate with offload only.
TEST_CASE("offload of what is most is looked at first, and may be enough where it is as much as lacks") {
  const Graph graph = small::mlp(64, OptimizerKind::kAdamW).g;
  const CompileOptions asked = of("replica");
  const std::vector<DeviceSpec> devices = parse_devices("null:2", {0});
  const Plan plan = compile(graph, devices, asked);
  const Shortage shortage{.bytes = 50, .device = 1, .needed = {}, .entry = "train"};
  const RemedyChanges changes(graph, devices, asked, plan, shortage, false);
  RemedyChanges::Measured base{{.change = {asked}, .missing = 50}, std::vector<MemoryClasses>(2)};
  base.held[1] = {.parameters = 100, .state = 20, .gradients = 60, .activations = 40};
  std::vector<std::string> order, enough;
  for (const RemedyChanges::Change& change : changes.single_changes(base)) {
    if (change.options.offload == 0) continue;
    order.push_back(offload_text(change.options.offload));
    if (changes.may_be_enough(change, base)) enough.push_back(order.back());
  }
  CHECK(order == std::vector<std::string>{"parameters", "gradients", "activations", "state"});
  CHECK(enough == std::vector<std::string>{"parameters", "gradients"});
}

TEST_CASE("remedies that are printed fit when they are given, and take what is said") {
  size_t checked = 0, together = 0, searched = 0;
  for (const Case& c : cases()) {
    const CompileOptions options = of(c.strategy);
    const int64_t needed = fullest(compile(c.graph, parse_devices(fmt::format("null:{}", c.count), {0}), options));
    for (const int percent : {20, 40, 80}) {
      const std::string devices = fmt::format("null-{}B:{}", needed * percent / 100, c.count);
      const std::string text = refused(c.graph, devices, options);
      CAPTURE(c.name);
      CAPTURE(c.strategy);
      CAPTURE(text);
      for (const std::string& flags : printed(text)) {
        CAPTURE(flags);
        std::string said = text.substr(text.find("  " + flags) + 2 + flags.size());
        said = said.substr(said.find_first_not_of(" \n"));
        try {
          const Plan plan = compile(c.graph, parse_devices(devices, {0}), with_flags(options, flags));
          CHECK(said.starts_with(bytes_text(static_cast<double>(fullest(plan)))));
        } catch (const Error& e) {
          FAIL_CHECK("does not fit: ", e.message());
        }
        ++checked, together += flags.find(" --") != flags.npos;
      }
      searched += has(text, "As strategy auto finds it");
    }
  }
  CHECK(checked >= 20);
  CHECK(together >= 10);
  CHECK(searched >= 1);
}

// All changes, by their estimates: none that fits is much faster than the first that is printed.
TEST_CASE("the first remedy is the fastest of all changes that fit") {
  const Graph graph = small::gpt(16, OptimizerKind::kAdamW, 4, 16, 64, 64).g;
  const auto all = parse_devices("null:4", {0});
  for (const char* strategy : {"replica(4)", "replica(2) > pipeline(2, micro_batches=2)"}) {
    const CompileOptions options = of(strategy);
    const bool pipeline = options.strategy != "replica(4)";
    const int64_t needed = fullest(compile(graph, all, options));
    for (const int percent : {pipeline ? 75 : 50}) {
      const auto devices = parse_devices(fmt::format("null-{}B:4", needed * percent / 100), {0});
      const std::string text = message_of([&] { compile(graph, devices, options); });
      CAPTURE(text);
      const std::vector<std::string> remedies = printed(text);
      REQUIRE(!remedies.empty());
      double fastest = 1e9, first = 1e9;
      std::string best;
      const auto seconds = [&](const CompileOptions& with) {
        const Estimate e = estimate_at(graph, devices, with, 1, Care::kQuick);
        return missing_bytes(e, devices) == 0 ? e.seconds : 1e9;
      };
      for (const std::string& flags : remedies) first = std::min(first, seconds(with_flags(options, flags)));
      for (int zero = 0; zero <= 3; ++zero)
        for (const Recompute recompute : {Recompute::kNone, Recompute::kSelective, Recompute::kFull})
          for (const uint32_t offload : {0U, 1U, 8U, 9U, 15U})
            for (const int64_t times : {1, 2}) {
              CompileOptions with = options;
              with.zero = zero, with.recompute = recompute, with.offload = offload;
              if (pipeline)
                with.strategy = fmt::format("replica(2) > pipeline(2, micro_batches={})", 2 * times);
              else
                with.accumulation = times;
              if (const double s = seconds(with); s < fastest) {
                fastest = s;
                best = fmt::format("{} --zero {} --recompute {} --offload {} x {}", s, zero,
                                   static_cast<int>(recompute), offload_text(offload), times);
              }
            }
      REQUIRE(fastest < 1e9);
      CAPTURE(best);
      CHECK(first <= 1.05 * fastest);
    }
  }
}

TEST_CASE("where nothing fits, the least memory is said, and it is less than any single change leaves") {
  const Graph graph = small::gpt(16, OptimizerKind::kAdamW, 4, 16, 64, 64).g;
  const auto devices = parse_devices("null-20KB:4", {0});
  const std::string text = message_of([&] { compile(graph, devices, of("replica")); });
  CAPTURE(text);
  CHECK(printed(text).empty());
  const size_t at = text.find("makes it fit. Least memory:\n  --");
  REQUIRE(at != text.npos);
  const size_t begin = text.find("--", at), end = text.find("  ", begin);
  std::string flags = text.substr(begin, end - begin);
  while (flags.ends_with('\n')) flags.pop_back();
  const auto held = [&](const CompileOptions& with) {
    int64_t most = 0;
    for (const Estimate::Class& c : estimate(graph, devices, with).classes)
      most = std::max(most, c.memory.device.total());
    return most;
  };
  const int64_t least = held(with_flags(of("replica"), flags));
  for (const char* single : {"--zero 3", "--recompute full", "--offload state,gradients,parameters,activations",
                             "--accumulation 4", "--zero 3 --offload activations"})
    CHECK(least < held(with_flags(of("replica"), single)));
  CHECK(has(text, "other strategies that auto looked at fits; the nearest:\n  --"));
  CHECK(has(text, "What else makes it less: "));
}

// Each change alone, and two of them.
std::vector<CompileOptions> one_change_or_two(const CompileOptions& asked) {
  using Change = std::pair<int, std::function<void(CompileOptions&)>>;  // of a kind, of which there is one
  std::vector<Change> changes;
  for (int zero = 1; zero <= 3; ++zero) changes.push_back({0, [=](CompileOptions& o) { o.zero = zero; }});
  for (const Recompute each : {Recompute::kSelective, Recompute::kFull})
    changes.push_back({1, [=](CompileOptions& o) { o.recompute = each; }});
  for (const OffloadClass each : {kOffloadState, kOffloadActivations, kOffloadGradients, kOffloadParameters})
    changes.push_back({2 + static_cast<int>(each), [=](CompileOptions& o) { o.offload |= each; }});
  std::vector<CompileOptions> out;
  for (const Change& a : changes) {
    out.push_back(asked);
    a.second(out.back());
    for (const Change& b : changes) {
      if (b.first <= a.first) continue;
      out.push_back(asked);
      a.second(out.back()), b.second(out.back());
    }
  }
  return out;
}

// By the estimates of all prices of memory; of what fits nowhere.
int64_t least_of(const Case& c, const CompileOptions& with) {
  const auto none = parse_devices(fmt::format("null-1B:{}", c.count), {0});
  try {
    return 1 + missing_bytes(estimate(c.graph, none, with), none);
  } catch (const Error&) {  // not with this model and strategy
    return INT64_MAX;
  }
}

TEST_CASE("what fits with one change or two is found") {
  const Case all[] = {{"gpt", small::gpt(16, OptimizerKind::kAdamW, 3, 16, 64, 64).g, 4, "replica(2) > split(2)"},
                      {"resnet", small::resnet(32, OptimizerKind::kAdamW).g, 4, "replica"}};
  for (const Case& c : all) {
    CAPTURE(c.name);
    int64_t least = INT64_MAX;
    for (const CompileOptions& with : one_change_or_two(of(c.strategy))) least = std::min(least, least_of(c, with));
    const std::string text = refused(c.graph, fmt::format("null-{}B:{}", least * 101 / 100, c.count), of(c.strategy));
    CAPTURE(text);
    CHECK(!printed(text).empty());
  }
}

// The plan holds least at one price of memory, what makes it fit at another.
TEST_CASE("what fits at a price of memory that is not the plan's is found") {
  const Graph graph = small::gpt(16, OptimizerKind::kAdamW, 4, 32, 64, 64).g;
  for (const auto& [strategy, flags] :
       {std::pair("replica(4)", "--zero 3 --offload state,gradients,parameters,activations"),
        std::pair("split(4)", "--offload state,gradients,parameters,activations")}) {
    const Case c{"gpt", graph, 4, strategy};
    const CompileOptions with = with_flags(of(strategy), flags);
    const std::string devices = fmt::format("null-{}B:4", least_of(c, with) * 102 / 100);
    CHECK_NOTHROW(compile(graph, parse_devices(devices, {0}), with));
    const std::string text = refused(graph, devices, of(strategy));
    CAPTURE(text);
    CHECK(!printed(text).empty());
  }
}

// Auto looks at the strategy that was asked for, too.
TEST_CASE("what auto finds of the strategy asked for is a change of it; what it finds besides is of others") {
  const Case c{"gpt", small::gpt(4, OptimizerKind::kAdamW, 4, 64, 64, 64).g, 4, "replica(4)"};
  const int64_t least =
      least_of(c, with_flags(of(c.strategy), "--zero 3 --offload state,gradients,parameters,activations"));
  for (const int64_t bytes : {least * 3 / 4, least / 2}) {
    const std::string text = refused(c.graph, fmt::format("null-{}B:4", bytes), of(c.strategy));
    CAPTURE(text);
    const size_t at = text.find("Least memory:\n  --");
    REQUIRE(at != text.npos);
    const size_t begin = text.find("--", at);
    std::string flags = text.substr(begin, text.find("  ", begin) - begin);
    while (flags.ends_with('\n')) flags.pop_back();
    CHECK(least_of(c, with_flags(of(c.strategy), flags)) <= least);
    const size_t other = std::min(text.find("looked at fits; the nearest:"), text.find("As strategy auto finds it:"));
    REQUIRE(other != text.npos);
    CHECK(text.substr(text.find('\n', other) + 1).starts_with("  --strategy '"));
  }
}

TEST_CASE("a remedy that leaves micro-batches to the strategy says how many there are without it") {
  const Graph graph = small::gpt(16, OptimizerKind::kAdamW, 3, 16, 64, 64).g;
  CompileOptions options = of("replica");
  options.accumulation = 4;
  const int64_t needed = fullest(compile(graph, parse_devices("null:4", {0}), options));
  for (const int percent : {5, 10, 15, 20}) {
    const std::string text = refused(graph, fmt::format("null-{}B:4", needed * percent / 100), options);
    CAPTURE(text);
    CHECK(!has(text, "--accumulation 0"));
  }
}

TEST_CASE("a message about memory fits a terminal, on many unlike devices too") {
  const Graph graph = small::gpt(64, OptimizerKind::kAdamW, 6, 16, 32, 64).g;
  std::string mixed;
  for (int k = 0; k < 6; ++k) mixed += fmt::format("{}null-{}B:1", k > 0 ? "," : "", 30'000 + 5'000 * k);
  for (const auto& [devices, strategy] :
       {std::pair<std::string, const char*>("null-30KB:16", "replica(2) > pipeline(4, micro_batches=8) > split(2)"),
        {mixed, "pipeline(6, micro_batches=8)"},
        {mixed, "replica"}}) {
    const std::string text = refused(graph, devices, of(strategy));
    CAPTURE(text);
    CHECK(std::ranges::count(text, '\n') < 25);
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line);)
      if (!line.starts_with("  --")) CHECK(line.size() <= 120);  // what is to be pasted stays whole
    CHECK(!text.ends_with('\n'));
    for (const char* part : {"devices ", "parameters", "gradients", "state", "activations", "needed", "there", "lacks"})
      CHECK(has(text, part));
  }
}

// By the positions themselves: what is live is added up at each of them.
TEST_CASE("tensors that a device holds are all that it holds, by class") {
  for (const Case& c : cases()) {
    CAPTURE(c.name);
    CAPTURE(c.strategy);
    const Plan plan = compile(c.graph, parse_devices(fmt::format("null:{}", c.count), {0}), of(c.strategy));
    const Entry& entry = plan.entries[0];
    for (const DeviceRow& row : entry.rows) {
      const Program& program = entry.programs[row.program];
      const std::vector<Life> lives = lives_of(program);
      int64_t end = 0, most = 0;
      for (const Life& life : lives) end = std::max(end, life.last);
      for (int64_t at = 0; at <= end; ++at) {
        int64_t now = 0;
        for (size_t b = 0; b < lives.size(); ++b)
          if (lives[b].first >= 0 && lives[b].first <= at && at <= lives[b].last)
            now += bytes_of_versions(program.buffers[b]);
        most = std::max(most, now);
      }
      std::map<std::string, int64_t> of_class;
      const HeldTensors held = held_tensors(plan, entry, row.device);
      int64_t last = INT64_MAX;
      for (const Held& h : held.list) {
        of_class[h.kind] += h.bytes;
        CHECK(h.bytes <= last);
        last = h.bytes;
      }
      const MemoryClasses m = memory_of(plan, entry, static_cast<size_t>(row.program)).device;
      CHECK(of_class["parameters"] == m.parameters);
      CHECK(of_class["state"] == m.state);
      CHECK(of_class["buffers"] == m.buffers);
      CHECK(of_class["gradients"] == m.gradients);
      CHECK(of_class["gradients"] + of_class["activations"] + of_class["copies"] == most);
      CHECK(has(held.when, " pass of "));
    }
  }
}

TEST_CASE("alike tensors are one line, named as in the model") {
  Graph graph = small::gpt(8, OptimizerKind::kAdamW, 12, 16, 32, 64).g;
  for (Op& op : graph.ops)
    if (op.name.ends_with(".attention")) op.location = "model.py:12";
  const Plan plan = compile(graph, parse_devices("null:2", {0}), of("replica(2)"));
  const HeldTensors held = held_tensors(plan, plan.entries[0], 0);
  const auto find = [&](const char* name, const std::string& kind) {
    const auto it = std::ranges::find_if(held.list, [&](const Held& h) { return h.name == name && h.kind == kind; });
    REQUIRE(it != held.list.end());
    return *it;
  };
  const Held up = find("h*.up.w", "parameters"), state = find("h*.up.w", "state"), wpe = find("wpe", "parameters");
  CHECK(up.count == 12);
  CHECK(up.dims == Dims{32, 128});
  CHECK(up.bytes == 12 * 32 * 128 * 4);
  CHECK(state.count == 24);
  CHECK(state.state == "m,v");
  CHECK(state.bytes == 2 * up.bytes);
  CHECK(wpe.count == 1);
  // An activation: named after the op of the model that made it, which its line says.
  const Held attention = find("h*.attention", "activations");
  CHECK(attention.count == 12);
  CHECK(attention.dims[0] == 4);  // of 8 samples
  CHECK(attention.made_by == "attention, model.py:12");
}

TEST_CASE("other batches that do not fit: by which tensors, what makes them fit, and the largest that does") {
  const Graph graph = small::gpt(16, OptimizerKind::kAdamW, 4, 16, 64, 64).g;
  CompileOptions options = of("replica(2)");
  const int64_t needed = fullest(compile(graph, parse_devices("null:2", {0}), options));
  const std::string devices = fmt::format("null-{}B:2", needed);
  options.eval_batches = {4096};
  const std::string text = refused(graph, devices, options);
  CAPTURE(text);
  CHECK(has(text, "the plan fits, but a batch of 4096 samples in its place does not fit: device "));
  CHECK(has(text, "entry 'eval'"));
  CHECK(has(text, "in the forward pass of "));
  CHECK(has(text, "Batches of the plan's own size fit."));
  const std::vector<std::string> remedies = printed(text);
  CHECK(!remedies.empty());
  for (const std::string& flags : remedies) {
    CAPTURE(flags);
    CHECK_NOTHROW(compile(graph, parse_devices(devices, {0}), with_flags(options, flags)));
  }
  // The largest of three quarters and halves that fits.
  const size_t at = text.find("As it is, a batch of ");
  REQUIRE(at != text.npos);
  const int64_t batch = std::stoll(text.substr(at + 21));
  options.eval_batches = {batch};
  CHECK_NOTHROW(compile(graph, parse_devices(devices, {0}), options));
  options.eval_batches = {2 * batch};
  CHECK(!refused(graph, devices, options).empty());
  // A session asks for it later: from the plan, which keeps what it was made of.
  const Plan plan = compile(graph, parse_devices(devices, {0}), of("replica(2)"));
  const std::string later = message_of([&] { compile_entry(plan, "eval", 4096); }, {Code::kResourceExhausted});
  CHECK(has(later, "a batch of 4096 samples in its place does not fit: device "));
  CHECK(has(later, "As it is, a batch of "));
}

TEST_CASE("a smaller batch of the model that is said to fit does") {
  const small::Model m = small::gpt(32, OptimizerKind::kSgd, 4, 16, 64, 64);
  const CompileOptions options = of("replica(2)");
  const int64_t needed = fullest(compile(m.g, parse_devices("null:2", {0}), options));
  const std::string devices = fmt::format("null-{}B:2", needed * 6 / 10);
  const std::string text = refused(m.g, devices, options);
  CAPTURE(text);
  const size_t at = text.find("As it is, the model with a batch of ");
  REQUIRE(at != text.npos);
  const int64_t batch = std::stoll(text.substr(at + 36));
  CHECK(batch < 32);
  const auto other = [&](int64_t n) { return small::gpt(n, OptimizerKind::kSgd, 4, 16, 64, 64).g; };
  CHECK_NOTHROW(compile(other(batch), parse_devices(devices, {0}), options));
}

TEST_CASE("strategy auto that finds nothing says what the nearest lacks, and of which tensors") {
  const Graph graph = small::gpt(16, OptimizerKind::kAdamW, 4, 16, 64, 64).g;
  const std::string text = refused(graph, "null-10KB:2", of("auto"));
  CAPTURE(text);
  for (const char* part : {"strategy auto: none of ", "nearest is\n", "the plan does not fit: device ", "lacks",
                           " pass of ", "What else makes it less: "})
    CHECK(has(text, part));
}

}  // namespace
}  // namespace whale
