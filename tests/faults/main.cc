// The kit of planted faults: damages random plans in random places, and counts who notices.
//
//   fault_kit --damages 2000 --seed 1 --whale build/tools/whale/whale [--undamaged 500] [--json FILE] [--kind TEXT]
//   [--precision f32|bf16|f16] [--keep FOLDER] [-v]
//   fault_kit --damages 2000 --seed 1 --prove: asks the prover in the place of `whale verify`; a damage is caught when
//   it is refuted, missed when it is proven, and "not compared" when there is no rule for something in the plan
//
// A damage counts when the judge (judge.h) sees another result. The plan verifier is to refuse it, or `whale verify M
// --plan P` to call it unequal: exit code 1 and nothing else. Code 3 says that nothing was compared, which is no catch;
// a crash, no end in time and code 2 are failures of a column of their own. Prints a row for each kind; ends with 1
// when a rate is below what is promised: 99 % of all that is to be noticed and of all that runs and counts, and 90 % of
// each kind of which two or more went unnoticed. What is missed, and what the plan verifier was to refuse, is kept in
// the folder: N.whale and N.plan.
#include <fmt/format.h>
#include <sys/wait.h>
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <thread>

#include "base/error.h"
#include "cluster/devices.h"
#include "fault.h"
#include "judge.h"
#include "own_programs.h"
#include "plan_case.h"
#include "prove/prove.h"
#include "races.h"
#include "schema/graph_file.h"

namespace whale::test {
namespace {

constexpr int kPerPlan = 12;  // damages of one plan
constexpr double kOfAll = 0.99, kOfKind = 0.9;

// Of a run, for the table that is made of it.
std::string today() {
  const std::time_t now = std::time(nullptr);
  char text[16];
  return {text, std::strftime(text, sizeof text, "%Y-%m-%d", std::gmtime(&now))};
}
std::string machine() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);)
    if (const size_t colon = line.find(": "); line.starts_with("model name") && colon != line.npos)
      return fmt::format("{}, {} cores", line.substr(colon + 2), std::thread::hardware_concurrency());
  return "a machine without a name";
}

struct Arguments {
  int64_t damages = 200, undamaged = 0, seed = 1;
  std::string whale, json, kind, keep, precision = "f64";
  bool verbose = false, prove = false;
  bool asks() const { return prove || !whale.empty(); }
};

// A plan to damage, with what it makes of its variables.
struct Ground {
  PlanCase from;
  Case with;
  Plan plan;
  Trained trained;
};

class Folder {
 public:
  Folder() {
    char name[] = "/tmp/whale-faults-XXXXXX";
    if (mkdtemp(name) == nullptr) throw internal("no temporary folder");
    path_ = name;
  }
  ~Folder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  std::string write(const char* name, const std::vector<uint8_t>& bytes) const {
    const std::string path = path_ + "/" + name;
    std::ofstream(path, std::ios::binary).write(reinterpret_cast<const char*>(bytes.data()), std::ssize(bytes));
    return path;
  }

  // What was asked about last.
  void copy(const std::string& to, int64_t number) const {
    std::filesystem::create_directories(to);
    for (const char* kind : {"whale", "plan"})
      std::filesystem::copy_file(fmt::format("{}/{}.{}", path_, kind[0] == 'w' ? "m" : "p", kind),
                                 fmt::format("{}/{}.{}", to, number, kind),
                                 std::filesystem::copy_options::overwrite_existing);
  }

 private:
  std::string path_;
};

enum class Answer : uint8_t { kEqual, kUnequal, kNotCompared, kFailed };
struct Answered {
  Answer answer = Answer::kFailed;
  std::string text;
};

Answered ask_prover(const Plan& plan) {
  const Proof proof = prove(plan);
  switch (proof.verdict) {
    case ProofVerdict::kProven: return {Answer::kEqual, text(proof)};
    case ProofVerdict::kRefuted: return {Answer::kUnequal, text(proof)};
    case ProofVerdict::kNotCovered: return {Answer::kNotCompared, text(proof)};
  }
  return {};
}

Answered ask(const Arguments& a, const Folder& folder, const Graph& graph, const Plan& plan) {
  if (a.prove) {
    folder.write("m.whale", serialize(graph)), folder.write("p.plan", serialize(plan));
    return ask_prover(plan);
  }
  const std::string m = folder.write("m.whale", serialize(graph)), p = folder.write("p.plan", serialize(plan));
  const std::string told = folder.write("told", {});
  const std::string command =
      fmt::format("timeout 120 '{}' verify {} --plan {} --steps 5 --json 2>{}", a.whale, m, p, told);
  FILE* pipe = popen(command.c_str(), "r");
  Answered out;
  char block[4096];
  for (size_t n; (n = fread(block, 1, sizeof block, pipe)) > 0;) out.text.append(block, n);
  const int status = pclose(pipe);
  const int code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  if (code == 126 || code == 127) throw internal("'{}' does not run", a.whale);
  const auto said = nlohmann::json::parse(out.text, nullptr, false);
  const std::string verdict = said.is_object() ? said.value("verdict", "") : "";
  // Both the code and the word: a sanitizer ends with 1 as well.
  if (code == 0 && verdict == "equal")
    out.answer = Answer::kEqual;
  else if (code == 1 && verdict == "not equal")
    out.answer = Answer::kUnequal;
  else if (code == 3 && verdict == "not compared")
    out.answer = Answer::kNotCompared;
  std::ifstream errors(told);
  out.text =
      fmt::format("ended with {}: {}{}", code, std::string(std::istreambuf_iterator<char>(errors), {}), out.text);
  return out;
}

struct Row {
  int64_t planted = 0, refused = 0, unbound = 0, same = 0, counted = 0, caught = 0, missed = 0;
  int64_t not_compared = 0;  // by whale verify
  int64_t failed = 0;        // the run or whale verify crashed or did not end, or whale verify could not run
  // Of those that somebody has to notice.
  int64_t noticed() const { return refused + unbound + caught; }
  int64_t due() const { return noticed() + missed + not_compared + failed; }
  void add(const Row& o) {
    planted += o.planted, refused += o.refused, unbound += o.unbound, same += o.same, counted += o.counted;
    caught += o.caught, missed += o.missed, not_compared += o.not_compared, failed += o.failed;
  }
};

// What refusals say of where the damage is.
struct Told {
  int64_t refusals = 0, device = 0, instruction = 0, path = 0;
  std::map<std::string, int64_t> vague;  // without a device or an instruction, by how the message begins

  // What the proof says; none: it is no plan file.
  std::optional<ProofVerdict> count(const Plan& damaged) {
    Proof proof;
    try {
      const std::vector<uint8_t> bytes = serialize(damaged);
      proof = prove(deserialize_unverified(bytes.data(), bytes.size()));
    } catch (const Error&) {
      return {};
    }
    if (proof.verdict != ProofVerdict::kRefuted) return proof.verdict;
    const auto refuted = std::ranges::find(proof.entries, ProofVerdict::kRefuted, &EntryProof::verdict);
    const bool at_device = refuted->at.device >= 0, at_instruction = at_device && refuted->at.number >= 0;
    ++refusals, device += at_device, instruction += at_instruction, path += !refuted->path.empty();
    if (!at_instruction) ++vague[fmt::format("{}: {}", at_device ? "a device" : "nobody", refuted->what.substr(0, 60))];
    return proof.verdict;
  }
};

class Kit {
 public:
  explicit Kit(const Arguments& a) : a_(a), faults_(all_faults()), rows_(faults_.size()) {
    static const std::map<std::string, Precision> kPrecisions = {{"f64", Precision::kFloat64},
                                                                 {"f32", Precision::kFloat32},
                                                                 {"bf16", Precision::kBFloat16},
                                                                 {"f16", Precision::kFloat16}};
    if (!kPrecisions.contains(a.precision))
      throw invalid("precision '{}', expected f64, f32, bf16 or f16", a.precision);
    precision_ = kPrecisions.at(a.precision);
    if (!a.kind.empty()) {
      std::erase_if(faults_,
                    [&](const Fault& f) { return std::string_view(f.kind).find(a.kind) == std::string::npos; });
      if (faults_.empty()) throw invalid("no kind of fault has '{}' in its name", a.kind);
    }
  }

  int run() {
    Dice dice(Dice(static_cast<uint64_t>(a_.seed)).next());  // streams of neighbouring seeds overlap
    for (int64_t planted = 0, idle = 0; planted < a_.damages && idle < 400; ++idle) {
      const std::optional<Ground> ground = random_ground(dice);
      if (!ground) continue;
      ++plans_;
      const int64_t before = planted;
      for (const size_t f : order(dice)) {
        if (planted - before >= kPerPlan || planted >= a_.damages) break;
        planted += plant(*ground, f, dice);
      }
      if (planted > before) idle = 0;
    }
    for (int64_t n = 0; n < a_.undamaged;) {
      if (const std::optional<Ground> ground = random_ground(dice)) check_undamaged(*ground), ++n;
    }
    return report();
  }

 private:
  // Kinds that were planted least come first.
  std::vector<size_t> order(Dice& dice) const {
    std::vector<std::pair<std::pair<int64_t, uint64_t>, size_t>> keys;
    for (size_t f = 0; f < faults_.size(); ++f) keys.push_back({{rows_[f].planted, dice.next()}, f});
    std::sort(keys.begin(), keys.end());
    std::vector<size_t> out;
    for (const auto& [key, f] : keys) out.push_back(f);
    return out;
  }

  std::optional<Ground> random_ground(Dice& dice) {
    Ground g;
    g.from = random_plan_case(dice);
    g.with.seed = dice.next() % 1000;
    g.with.batch = g.from.batch;
    if (g.from.devices < 2 && dice.below(4)) return std::nullopt;
    try {
      g.with.graph = graph_of(g.from);
      CompileOptions options = options_of(g.from, g.with.graph);
      options.precision = precision_;
      const char* kind = precision_ == Precision::kFloat64 ? "ref" : "cpu";
      g.plan = compile(g.with.graph, parse_devices(fmt::format("{}:{}", kind, g.from.devices)), options);
    } catch (const Error& e) {
      if (e.code() == Code::kDataLoss) {
        ++alarms_;
        std::printf("REFUSED, UNDAMAGED: %s\n  %s\n", to_string(g.from).c_str(), e.what());
      } else {
        ++no_plan_;
      }
      return std::nullopt;
    }
    std::string why;
    std::optional<Trained> trained = train(g.plan, g.with, why);
    if (!trained) {
      ++grounds_[why.substr(0, why.find('\'')) + (why.find('\'') == why.npos ? "" : why.substr(why.rfind('\'')))];
      return std::nullopt;
    }
    if (const std::string race = race_in(plan_entry(g.plan)); !race.empty())
      std::printf("an undamaged plan: %s\n  %s\n", race.c_str(), to_string(g.from).c_str());
    g.trained = std::move(*trained);
    return g;
  }

  static const Entry& plan_entry(const Plan& plan) {
    for (const Entry& e : plan.entries)
      if (e.name == "train") return e;
    return plan.entries.front();
  }

  void say(const Ground& g, size_t f, uint64_t word, const char* what, const std::string& text) const {
    std::printf("%s: %s\n  %s | word %llu\n  %s\n", what, faults_[f].kind, to_string(g.from).c_str(),
                static_cast<unsigned long long>(word), text.substr(0, 600).c_str());
    std::fflush(stdout);
  }

  bool plant(const Ground& g, size_t f, Dice& dice) {
    Plan damaged = g.plan;
    if (!faults_[f].holes)
      for (Entry& entry : damaged.entries) give_own_programs(entry);
    const std::vector<uint8_t> before = serialize(damaged);
    const uint64_t word = dice.next();
    Dice own(word);
    if (!faults_[f].plant(damaged, own) || serialize(damaged) == before) return false;
    Row& row = rows_[f];
    ++row.planted;
    const Finding found = judge(damaged, g.with, g.trained);
    std::optional<ProofVerdict> proof;
    if (a_.prove && found.judgement != Judgement::kCrash && found.judgement != Judgement::kHang)
      proof = told_.count(damaged);
    switch (found.judgement) {
      case Judgement::kRefused:
        ++row.refused;
        if (a_.verbose) say(g, f, word, "refused", found.text);
        return true;
      case Judgement::kUnbound:
        if (proof == ProofVerdict::kProven) {
          ++row.missed;
          say(g, f, word, "MISSED: proven, and no session can have it", found.text);
          return true;
        }
        ++row.unbound;
        if (a_.verbose) say(g, f, word, "refused when bound", found.text);
        return true;
      case Judgement::kCrash:
      case Judgement::kHang:
        ++row.failed;
        say(g, f, word, found.judgement == Judgement::kHang ? "HANG" : "CRASH", found.text);
        return true;
      case Judgement::kSame:
        if (const std::string race = race_in(plan_entry(damaged)); !race.empty()) {
          ++row.missed;
          say(g, f, word, "MISSED RACE", race);
          return true;
        }
        ++row.same;
        if (a_.verbose) say(g, f, word, "the same", found.text);
        return true;
      case Judgement::kFailed:
      case Judgement::kDiffers: break;
    }
    ++row.counted;
    if (!a_.asks()) {
      if (a_.verbose || faults_[f].by == Catcher::kVerifier) say(g, f, word, "not refused", found.text);
      return true;
    }
    const Answered answered = ask(a_, folder_, g.with.graph, damaged);
    const std::string text = found.text + "\n  " + answered.text;
    switch (answered.answer) {
      case Answer::kEqual: {
        say(g, f, word, "MISSED", text);
        if (!a_.keep.empty()) folder_.copy(a_.keep, ++missed_);
        ++row.missed;
        break;
      }
      case Answer::kNotCompared: ++row.not_compared, say(g, f, word, "NOT COMPARED", text); break;
      case Answer::kFailed: ++row.failed, say(g, f, word, "FAILED", text); break;
      case Answer::kUnequal:
        ++row.caught;
        if (faults_[f].by != Catcher::kVerifier) break;
        say(g, f, word, "not refused", text);
        if (!a_.keep.empty()) folder_.copy(a_.keep, ++missed_);
        break;
    }
    return true;
  }

  void check_undamaged(const Ground& g) {
    ++undamaged_;
    const Answered answered = ask(a_, folder_, g.with.graph, g.plan);
    if (answered.answer == Answer::kEqual) return;
    // What is not compared raises no alarm, and says nothing either.
    const bool open = answered.answer == Answer::kNotCompared;
    ++(open ? open_ : alarms_);
    std::printf("%s: %s\n  %s\n", open ? "NOT COMPARED, UNDAMAGED" : "FALSE ALARM", to_string(g.from).c_str(),
                answered.text.substr(0, 1500).c_str());
    std::fflush(stdout);
  }

  int report() {
    Row all;
    nlohmann::json kinds = nlohmann::json::array();
    std::printf("%-44s %8s %8s %8s %8s %8s %8s %8s %8s %8s\n", "", "planted", "refused", "unbound", "same", "counted",
                "caught", "missed", "not comp", "failed");
    int64_t below = 0, races = 0;
    for (size_t f = 0; f < faults_.size(); ++f) {
      const Row& r = rows_[f];
      all.add(r);
      // One miss is no rate: a kind is low from its second one on.
      const bool low =
          r.due() - r.noticed() > 1 && static_cast<double>(r.noticed()) < kOfKind * static_cast<double>(r.due());
      const bool late = faults_[f].by == Catcher::kVerifier && r.counted > 0;
      below += (a_.asks() && low) || late;
      races += !a_.asks() ? r.missed : 0;
      print_row(faults_[f].kind, r, r.failed ? "  FAILURES" : late ? "  NOT REFUSED" : low ? "  LOW" : "");
      kinds.push_back({{"kind", faults_[f].kind},
                       {"group", faults_[f].group},
                       {"by", faults_[f].by == Catcher::kVerifier ? "plan verifier" : "either"},
                       {"planted", r.planted},
                       {"refused", r.refused},
                       {"refused_when_bound", r.unbound},
                       {"same_result", r.same},
                       {"counted", r.counted},
                       {"caught", r.caught},
                       {"missed", r.missed},
                       {"not_compared", r.not_compared},
                       {"failed", r.failed},
                       {"noticed", r.noticed()},
                       {"due", r.due()}});
    }
    print_row("all", all, "");
    const double due = static_cast<double>(all.due()), numbers_due = static_cast<double>(all.counted);
    const double noticed = due > 0 ? static_cast<double>(all.noticed()) / due : 1;
    const double caught = numbers_due > 0 ? static_cast<double>(all.caught) / numbers_due : 1;
    std::printf("\n%lld damages of %lld plans, %zu kinds: ", static_cast<long long>(all.planted),
                static_cast<long long>(plans_), faults_.size());
    if (!a_.asks())
      std::printf("%lld refused, %lld run and count (whale verify was not asked)\n",
                  static_cast<long long>(all.refused), static_cast<long long>(all.counted));
    else
      std::printf("%.2f %% of those that matter noticed, %.2f %% of those that run and count caught\n", 100 * noticed,
                  100 * caught);
    if (a_.undamaged)
      std::printf("%lld undamaged plans, %lld false alarms, %lld not compared\n", static_cast<long long>(undamaged_),
                  static_cast<long long>(alarms_), static_cast<long long>(open_));
    if (a_.prove) {
      std::printf("%lld refusals: %lld name a device, %lld an instruction, %lld what led there\n",
                  static_cast<long long>(told_.refusals), static_cast<long long>(told_.device),
                  static_cast<long long>(told_.instruction), static_cast<long long>(told_.path));
      for (const auto& [what, n] : told_.vague)
        if (a_.verbose) std::printf("  %lld at %s\n", static_cast<long long>(n), what.c_str());
    }
    std::printf("%lld random models that have no plan\n", static_cast<long long>(no_plan_));
    for (const auto& [why, n] : grounds_)
      std::printf("  %lld plans not used: %s\n", static_cast<long long>(n), why.c_str());
    if (!a_.json.empty()) {
      const nlohmann::json out{{"seed", a_.seed},
                               {"precision", a_.precision},
                               {"plans", plans_},
                               {"damages", all.planted},
                               {"noticed", noticed},
                               {"caught_by_numbers", caught},
                               {"undamaged", undamaged_},
                               {"false_alarms", alarms_},
                               {"undamaged_not_compared", open_},
                               {"no_plan", no_plan_},
                               {"set_aside", grounds_},
                               {"date", today()},
                               {"machine", machine()},
                               {"kinds", kinds}};
      std::ofstream(a_.json) << out.dump(1) << "\n";
    }
    // Without the comparison of numbers: nothing crashes, nothing that was not damaged is refused, and what is the plan
    // verifier's does not run.
    const bool numbers = !a_.asks() || (noticed >= kOfAll && caught >= kOfAll);
    const bool good = below == 0 && races == 0 && numbers && alarms_ == 0 && all.failed == 0;
    std::printf("%d passed, %d failed\n", good, !good);
    return good ? 0 : 1;
  }

  static void print_row(const char* name, const Row& r, const char* note) {
    const auto n = [](int64_t x) { return static_cast<long long>(x); };
    std::printf("%-44s %8lld %8lld %8lld %8lld %8lld %8lld %8lld %8lld %8lld%s\n", name, n(r.planted), n(r.refused),
                n(r.unbound), n(r.same), n(r.counted), n(r.caught), n(r.missed), n(r.not_compared), n(r.failed), note);
  }

  Precision precision_ = Precision::kFloat64;
  Told told_;
  const Arguments& a_;
  std::vector<Fault> faults_;
  std::vector<Row> rows_;
  Folder folder_;
  std::map<std::string, int64_t> grounds_;  // why plans were set aside, damaged or not
  int64_t no_plan_ = 0;                     // the planner refuses the model
  int64_t plans_ = 0, undamaged_ = 0, alarms_ = 0, open_ = 0, missed_ = 0;
};

}  // namespace
}  // namespace whale::test

int main(int count, char** texts) {
  whale::test::Arguments a;
  CLI::App app("damages random plans in random places, and counts who notices them");
  app.add_option("--damages", a.damages);
  app.add_option("--undamaged", a.undamaged);
  app.add_option("--seed", a.seed);
  app.add_option("--whale", a.whale);
  app.add_option("--json", a.json);
  app.add_option("--kind", a.kind);
  app.add_option("--precision", a.precision);
  app.add_option("--keep", a.keep);
  app.add_flag("--prove", a.prove);
  app.add_flag("-v", a.verbose);
  CLI11_PARSE(app, count, texts);
  try {
    return whale::test::Kit(a).run();
  } catch (const std::exception& e) {
    std::fprintf(stderr, "fault_kit: %s\n", e.what());
    return 2;
  }
}
