#include "task/strategy.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <functional>
#include <iterator>
#include <set>

#include "base/error.h"
#include "base/text.h"
#include "ir/renamed_options.h"
#include "schedule/schedule.h"

namespace whale {
namespace {

constexpr size_t kMostScopes = 64;  // of a nest

using Value = std::string;  // a word, a number, a quoted text, or a list in brackets, as written

struct Reader {
  std::string_view text;
  size_t at = 0;
  std::string_view whole = text;  // of which `text` is the beginning, for messages
  [[noreturn]] void fail(std::string_view wanted) const {
    const std::string found = at < whole.size() ? fmt::format("'{}'", whole.substr(at, 12)) : "the end";
    throw invalid("strategy '{}': at character {}: expected {}, found {}", brief(whole), at + 1, wanted, found);
  }
  // For messages that show a word of it too: a long one is not shown twice.
  std::string named_beside(std::string_view word) const {
    return word.size() > 60 ? "strategy" : fmt::format("strategy '{}'", brief(whole));
  }
  void skip() {
    while (at < text.size() && (text[at] == ' ' || text[at] == '\t' || text[at] == '\n')) ++at;
  }
  bool take(char c) {
    skip();
    if (at >= text.size() || text[at] != c) return false;
    ++at;
    return true;
  }
  void expect(char c) {
    if (!take(c)) fail(fmt::format("'{}'", c));
  }
  static bool is_word(char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '.' ||
           c == '+' || c == '-';
  }
  std::string word(std::string_view wanted) {
    skip();
    const size_t begin = at;
    while (at < text.size() && is_word(text[at])) ++at;
    if (begin == at) fail(wanted);
    return std::string(text.substr(begin, at - begin));
  }
  // A list keeps its brackets; parentheses as in average(2) are part of a word.
  Value value() {
    skip();
    if (at < text.size() && (text[at] == '"' || text[at] == '\'')) {
      const char quote = text[at++];
      const size_t end = text.find(quote, at);
      if (end == text.npos) fail("a closing quote");
      std::string inside(text.substr(at, end - at));
      at = end + 1;
      return inside;
    }
    if (at < text.size() && text[at] == '[') {
      const size_t begin = at;
      int depth = 0;
      do {
        depth += text[at] == '[' ? 1 : text[at] == ']' ? -1 : 0;
        ++at;
      } while (at < text.size() && depth > 0);
      if (depth > 0) fail("']'");
      std::string list;
      for (const char c : text.substr(begin, at - begin))
        if (c != ' ') list += c;
      return list;
    }
    std::string out = word("a value");
    if (at < text.size() && text[at] == '(') {
      const size_t end = text.find(')', at);
      if (end == text.npos) fail("')'");
      out += text.substr(at, end + 1 - at);
      at = end + 1;
    }
    return out;
  }
};

struct Parameter {
  ScopeKind kind;
  const char* name;
  bool positional;
  void (*read)(Scope&, const Value&);
  std::string (*write)(const Scope&);  // "" when at its default
};

int64_t number(const Value& v) {
  const int64_t n = whole_number(v).value_or(0);
  constexpr int64_t kMost = int64_t{1} << 31;
  if (n < 1 || n > kMost) throw invalid("'{}', expected a whole number from 1 to {}", brief(v), kMost);
  return n;
}
std::vector<double> weights(const Value& v) {
  if (v.size() < 3 || v.front() != '[') throw invalid("'{}', expected a list such as [3,1]", brief(v));
  std::vector<double> out;
  for (size_t at = 1; at < v.size();) {
    const size_t end = v.find_first_of(",]", at);
    double w = 0;
    const auto [stop, error] = std::from_chars(v.data() + at, v.data() + end, w);
    if (error != std::errc{} || stop != v.data() + end || !(w >= 0) || !std::isfinite(w))
      throw invalid("'{}', expected numbers >= 0 in brackets", brief(v));
    out.push_back(w);
    at = end + 1;
  }
  return out;
}
std::string count_text(const Scope& s) { return s.count ? fmt::format("{}", s.count) : ""; }
void read_count(Scope& s, const Value& v) { s.count = number(v); }
std::string replicas_text(const Scope& s) { return s.nests.empty() ? count_text(s) : s.nests; }
// How many there are, or what each of unlike ones has inside.
void read_replicas(Scope& s, const Value& v) {
  if (!v.starts_with('[')) return read_count(s, v);
  s.nests = v;
  s.count = std::ssize(parse_nests(v));
}
// One list, or a list of lists; short ones are of groups with fewer devices.
void read_shares(Scope& s, const Value& v) {
  if (!v.starts_with("[[")) return void(s.shares = weights(v));
  if (!v.ends_with("]]")) throw invalid("'{}', expected lists in a list, such as [[3,1],[1,1]]", brief(v));
  std::vector<std::vector<double>> rows;
  size_t columns = 0;
  for (size_t at = 1; at + 1 < v.size();) {
    const size_t end = v.find(']', at);
    rows.push_back(weights(v.substr(at, end + 1 - at)));
    columns = std::max(columns, rows.back().size());
    at = end + 2;
  }
  if (s.count && s.count != static_cast<int64_t>(columns))
    throw invalid("'{}', expected {} weights in the longest list", brief(v), s.count);
  s.count = static_cast<int64_t>(columns);
  for (std::vector<double>& row : rows) {
    row.resize(columns, kNoDevice);
    s.shares.insert(s.shares.end(), row.begin(), row.end());
  }
}
std::string shares_text(const Scope& s) {
  const auto count = static_cast<size_t>(s.count);
  const size_t columns = count && s.shares.size() % count == 0 ? count : s.shares.size();
  std::string text;
  for (size_t i = 0; i < s.shares.size(); ++i)
    if (s.shares[i] != kNoDevice) text += fmt::format("{}{}", i % columns ? "," : i ? "],[" : "[", s.shares[i]);
  if (!text.empty()) text += "]";
  return s.shares.size() > columns ? "[" + text + "]" : text;
}
// The depths of a warm-up stand behind the schedule's name, in either order of the two parameters.
void read_schedule_name(Scope& s, const Value& v) {
  for (const ScheduleRule& rule : schedule_rules())
    if (rule.name == v) return void(s.schedule = v + s.schedule);
  throw invalid("'{}', expected one of {}", brief(v), schedule_names());
}
void read_warmup(Scope& s, const Value& v) {
  if (!v.starts_with('[')) throw invalid("'{}', expected a list such as [3,2,1]", brief(v));
  s.schedule += to_string(read_schedule(v));
}
std::string warmup_text(const Scope& s) { return to_string(ScheduleText{"", read_schedule(s.schedule).warmup}); }

const Parameter kParameters[] = {
    {ScopeKind::kReplica, "count", true, read_replicas, replicas_text},
    {ScopeKind::kReplica, "shares", false, read_shares, shares_text},
    {ScopeKind::kReplica, "by", false,
     [](Scope& s, const Value& v) {
       if (v != "sample" && v != "micro_batch") throw invalid("'{}', expected sample or micro_batch", brief(v));
       s.by = v;
     },
     [](const Scope& s) { return s.by; }},
    {ScopeKind::kReplica, "device_order", false, [](Scope& s, const Value& v) { s.device_order = v; },
     [](const Scope& s) { return s.device_order; }},
    {ScopeKind::kSplit, "ways", true, read_count, count_text},
    {ScopeKind::kSplit, "factor", false, [](Scope& s, const Value& v) { s.factor = v; },
     [](const Scope& s) { return s.factor; }},
    {ScopeKind::kSplit, "shares", false, read_shares, shares_text},
    {ScopeKind::kStage, "devices", true, read_count, count_text},
    {ScopeKind::kPipeline, "stages", true, read_count, count_text},
    {ScopeKind::kPipeline, "micro_batches", false, [](Scope& s, const Value& v) { s.micro_batches = number(v); },
     [](const Scope& s) { return s.micro_batches ? fmt::format("{}", s.micro_batches) : ""; }},
    {ScopeKind::kPipeline, "schedule", false, read_schedule_name,
     [](const Scope& s) { return read_schedule(s.schedule).name; }},
    {ScopeKind::kPipeline, "virtual_stages", false, [](Scope& s, const Value& v) { s.virtual_stages = number(v); },
     [](const Scope& s) { return s.virtual_stages ? fmt::format("{}", s.virtual_stages) : ""; }},
    {ScopeKind::kPipeline, "warmup", false, read_warmup, warmup_text},
    {ScopeKind::kCluster, "devices", true, [](Scope& s, const Value& v) { s.devices = v; },
     [](const Scope& s) { return s.devices.empty() ? "" : "\"" + s.devices + "\""; }},
    {ScopeKind::kCluster, "device_order", false, [](Scope& s, const Value& v) { s.device_order = v; },
     [](const Scope& s) { return s.device_order; }},
};

constexpr ScopeKind kKinds[] = {ScopeKind::kReplica, ScopeKind::kSplit, ScopeKind::kStage, ScopeKind::kPipeline,
                                ScopeKind::kCluster};

void set_parameter(const Reader& in, Scope& scope, const std::string& name, const Value& value, bool positional) {
  std::string known;
  for (const Parameter& p : kParameters) {
    if (p.kind != scope.kind) continue;
    if (positional ? p.positional : p.name == name) {
      if (!p.write(scope).empty())
        throw invalid("strategy '{}': {}: parameter '{}' is given twice", brief(in.whole), name_of(scope.kind), p.name);
      try {
        return p.read(scope, value);
      } catch (const Error& e) {
        throw invalid("{}: {}: parameter '{}' is {}", in.named_beside(value), name_of(scope.kind), p.name, e.message());
      }
    }
    known += fmt::format("{}{}", known.empty() ? "" : ", ", p.name);
  }
  if (const std::string_view now = renamed_option(name_of(scope.kind), name); !now.empty())
    throw invalid("{}: parameter '{}' of {} is called '{}' now", in.named_beside(name), name, name_of(scope.kind), now);
  throw invalid("{}: {} has no parameter '{}'; it has {}", in.named_beside(name), name_of(scope.kind), brief(name),
                known);
}

Scope parse_scope(Reader& in) {
  const std::string kind = in.word("a scope: replica, split, stage, pipeline or cluster");
  Scope scope;
  for (const ScopeKind k : kKinds)
    if (kind == name_of(k)) scope.kind = k;
  if (scope.kind == ScopeKind::kRoot)
    throw invalid("{}: unknown scope '{}'; expected replica, split, stage, pipeline or cluster", in.named_beside(kind),
                  brief(kind));
  if (!in.take('(') || in.take(')')) return scope;
  for (bool first = true;; first = false) {
    const Value value = in.value();
    if (in.take('=')) {
      set_parameter(in, scope, value, in.value(), false);
    } else {
      if (!first) in.fail("'=' after a parameter's name (only the first value may stand alone)");
      set_parameter(in, scope, "", value, true);
    }
    if (in.take(')')) return scope;
    if (!in.take(',')) in.fail("',' or ')'");
  }
}

// Up to the end of the text.
std::vector<Scope> parse_nest(Reader& in) {
  std::vector<Scope> out;
  do {
    out.push_back(parse_scope(in));
    if (out.size() > kMostScopes)
      throw invalid("strategy '{}' nests more than {} scopes; each cuts the devices again, so few are of use",
                    brief(in.whole), kMostScopes);
  } while (in.take('>'));
  in.skip();
  if (in.at != in.text.size()) in.fail("'>' or the end");
  return out;
}

}  // namespace

const char* name_of(ScopeKind kind) {
  constexpr const char* kNames[] = {"root", "replica", "split", "stage", "pipeline", "cluster", "name"};
  return static_cast<size_t>(kind) < 7 ? kNames[static_cast<size_t>(kind)] : "?";
}

std::vector<Scope> parse_strategy(std::string_view text) {
  Reader in{text};
  return parse_nest(in);
}

std::vector<std::vector<Scope>> parse_nests(std::string_view list) {
  const std::string_view whole = list;
  const auto fail = [&](const std::string& what) { return invalid("'{}', {}", brief(whole), what); };
  if (list.size() < 2 || list.front() != '[' || list.back() != ']')
    throw fail("expected a list such as [pipeline(2), split(2)]");
  list = list.substr(1, list.size() - 2);
  // A nest with nests of its own begins so, whatever stands between: it is read no further.
  std::string dense;
  std::copy_if(list.begin(), list.end(), std::back_inserter(dense),
               [](char c) { return c != ' ' && c != '\t' && c != '\n'; });
  if (dense.find("([") != dense.npos) throw fail("has unlike replicas inside of unlike replicas; one list is enough");
  std::vector<std::vector<Scope>> out;
  int depth = 0;
  for (size_t from = 0, at = 0; at <= dense.size(); ++at) {
    if (at < dense.size()) {
      const char c = dense[at];
      depth += c == '(' || c == '[' ? 1 : c == ')' || c == ']' ? -1 : 0;
      if (c != ',' || depth > 0) continue;
    }
    out.push_back(parse_strategy(std::string_view(dense).substr(from, at - from)));
    from = at + 1;
  }
  if (out.size() < 2)
    throw fail(
        "a list of one replica, and a list has what is inside of each of two or more; write that without replica");
  return out;
}

std::vector<StrategyClause> parse_clauses(std::string_view text) {
  std::vector<StrategyClause> out;
  for (size_t at = 0; at <= text.size();) {
    const size_t end = std::min(text.find(';', at), text.size());
    std::string_view part = text.substr(at, end - at);
    at = end + 1;
    while (!part.empty() && part.front() == ' ') part.remove_prefix(1);
    StrategyClause clause;
    if (const size_t colon = part.find(':'); colon != part.npos && colon < part.find_first_of("(>\"'")) {
      clause.name = std::string(part.substr(0, colon));
      while (!clause.name.empty() && clause.name.back() == ' ') clause.name.pop_back();
      part.remove_prefix(colon + 1);
      if (clause.name.empty()) throw invalid("strategy '{}': expected the name of a scope before ':'", brief(text));
    }
    Reader in{text.substr(0, end), end - part.size(), text};
    clause.nest = parse_nest(in);
    for (const StrategyClause& other : out)
      if (other.name == clause.name)
        throw invalid("{}: {} twice", Reader{text}.named_beside(clause.name),
                      clause.name.empty() ? std::string("the ops without a clause of their own are given a nest")
                                          : "scope '" + brief(clause.name) + "' is given a nest");
    out.push_back(std::move(clause));
  }
  return out;
}

void check_clauses(const Graph& graph, const std::vector<StrategyClause>& clauses) {
  constexpr size_t kMost = 12;                 // shown
  const auto named_path = [&](size_t scope) {  // "encoder/block0"
    std::string path;
    for (auto id = static_cast<ScopeId>(scope); id > 0; id = graph.scopes[id].parent)
      if (const std::string& name = graph.scopes[id].name; !name.empty())
        path = path.empty() ? name : name + "/" + path;
    return path;
  };
  for (const StrategyClause& clause : clauses) {
    if (clause.name.empty()) continue;
    bool found = false;
    std::vector<std::string> names;
    std::set<std::string_view> seen;
    for (size_t id = 1; id < graph.scopes.size() && !found; ++id) {
      const std::string& name = graph.scopes[id].name;
      if (name.empty()) continue;
      found = clause.name == name || clause.name == named_path(id);
      if (seen.insert(name).second && names.size() < kMost) names.push_back(name);
    }
    if (found) continue;
    const size_t more = seen.size() - names.size();
    throw invalid("strategy: no scope is called '{}'; the model has {}{}", brief(clause.name),
                  names.empty() ? "none with a name" : fmt::format("{}", fmt::join(names, ", ")),
                  more > 0 ? fmt::format(" and {} more", more) : "");
  }
}

bool is_annotated(const Graph& graph) {
  return std::ranges::any_of(graph.scopes, [](const Scope& s) {
    return s.kind != ScopeKind::kRoot && s.kind != ScopeKind::kName && s.kind != ScopeKind::kCluster;
  });
}

std::string to_string(const Scope& scope) {
  std::string inside;
  for (const Parameter& p : kParameters) {
    if (p.kind != scope.kind) continue;
    const std::string value = p.write(scope);
    if (value.empty()) continue;
    if (!inside.empty()) inside += ", ";
    inside += p.positional ? value : fmt::format("{}={}", p.name, value);
  }
  return inside.empty() ? name_of(scope.kind) : fmt::format("{}({})", name_of(scope.kind), inside);
}

std::string to_string(const std::vector<Scope>& nest) {
  std::string text;
  for (const Scope& scope : nest) text += (text.empty() ? "" : " > ") + to_string(scope);
  return text;
}

}  // namespace whale
