// Random cases, and smaller ones of a case that fails.
#include <algorithm>
#include <cstdlib>
#include <functional>
#include <numeric>
#include <span>

#include "plan_blocks.h"
#include "plan_case.h"
#include "property_graph.h"
#include "rewrite/offload.h"
#include "schedule/schedule.h"
#include "task/strategy.h"

namespace whale::test {
namespace {

constexpr int64_t kFew = 8;

template <class T>
const T& one_of(const std::vector<T>& list, Dice& dice) {
  return list[dice.below(std::ssize(list))];
}

std::string with_word(const std::string& name, Dice& dice) {
  return fmt::format("{}#{}", name, dice.between(1, 99999));
}

// ---- scopes -----------------------------------------------------------------------------------------------------
// Counts that multiply to `devices`, outermost first.
std::vector<int64_t> factors(int64_t devices, Dice& dice) {
  std::vector<int64_t> out;
  while (devices > 1) {
    std::vector<int64_t> divisors;
    for (int64_t d = 2; d <= devices; ++d)
      if (devices % d == 0) divisors.push_back(d);
    out.push_back(one_of(divisors, dice));
    devices /= out.back();
  }
  if (out.empty() || dice.below(12) == 0) out.insert(out.begin() + dice.below(std::ssize(out) + 1), 1);
  return out;
}

std::string shares_of(int64_t n, Dice& dice) { return fmt::format("{}", fmt::join(random_shares(n, dice), ",")); }

// What a split of these blocks can be told to cut.
std::vector<std::string> factors_in(std::span<const std::string> blocks) {
  const std::pair<std::string_view, std::vector<std::string>> kFactors[] = {{"linear", {"columns", "rows"}},
                                                                            {"residual", {"columns", "rows"}},
                                                                            {"classes", {"classes"}},
                                                                            {"tied", {"vocabulary"}},
                                                                            {"tokens", {"vocabulary"}},
                                                                            {"attention", {"heads", "sequence"}},
                                                                            {"moe", {"experts"}},
                                                                            {"conv", {"channels", "spatial"}},
                                                                            {"pool", {"spatial"}}};
  std::vector<std::string> out;
  for (const std::string& block : blocks)
    for (const auto& [name, list] : kFactors)
      if (block.starts_with(name)) out.insert(out.end(), list.begin(), list.end());
  return out;
}

std::string replica_or_split(int64_t count, bool split, bool shares, Dice& dice,
                             const std::vector<std::string>& factors = {}) {
  std::string inside = std::to_string(count);
  if (shares) inside += fmt::format(", shares=[{}]", shares_of(count, dice));
  if (split && !factors.empty() && dice.below(4) == 0) inside += ", factor=" + one_of(factors, dice);
  if (!split && dice.below(20) == 0) inside += ", by=micro_batch";
  return fmt::format("{}({})", split ? "split" : "replica", inside);
}

// Each level replica or split; every level may have shares.
std::vector<std::string> levels(const std::vector<int64_t>& counts, Dice& dice, bool may_share = true,
                                const std::vector<std::string>& factors = {}) {
  std::vector<std::string> out;
  for (const int64_t n : counts)
    out.push_back(replica_or_split(n, dice.below(5) < 2, may_share && dice.below(4) == 0, dice, factors));
  return out;
}

// `most`: stages that the model can be cut into, about.
std::string pipeline(int64_t stages, int64_t micro_batches, int64_t most, Dice& dice) {
  std::string schedule = one_of<std::string>({"1f1b", "1f1b", "gpipe", "interleaved", "zb_h1", "zb_v"}, dice);
  const int64_t virtual_stages = schedule == "interleaved" ? dice.between(2, 3) : schedule == "zb_v" ? 2 : 1;
  if (stages * virtual_stages > most) schedule = "gpipe";
  std::string out = stages ? fmt::format("pipeline({}, micro_batches={}", stages, micro_batches)
                           : fmt::format("pipeline(micro_batches={}", micro_batches);
  if (schedule != "1f1b" || dice.coin()) out += ", schedule=" + schedule;
  if (schedule == "interleaved") out += fmt::format(", virtual_stages={}", virtual_stages);
  if (stages && (schedule == "1f1b" || schedule == "zb_h1") && dice.below(3) == 0) {
    Ints depths;
    for (int64_t s = 0; s < stages; ++s) depths.push_back(dice.between(1, depths.empty() ? micro_batches : depths[0]));
    std::ranges::sort(depths, std::greater{});
    out += fmt::format(", warmup=[{}]", fmt::join(depths, ","));
  }
  return out + ")";
}

using Blocks = std::span<const std::string>;

// A row of shares for each position of the scopes outside; with gaps, some groups have fewer members. Gives the
// devices.
int64_t ragged(std::vector<std::string>& levels, const std::vector<int64_t>& counts, bool gaps, Dice& dice) {
  const auto at = static_cast<size_t>(std::ssize(counts) - 1);
  const int64_t groups = std::accumulate(counts.begin(), counts.end() - 1, int64_t{1}, std::multiplies<>());
  std::string rows;
  int64_t devices = 0;
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t members = gaps && g > 0 ? dice.between(1, counts[at]) : counts[at];
    devices += members;
    rows += fmt::format("{}[{}]", g ? "," : "", shares_of(members, dice));
  }
  const bool split = dice.coin(), whole = !split && dice.below(10) == 0;
  levels[at] = fmt::format("{}({}, shares=[{}]{})", split ? "split" : "replica", counts[at], rows,
                           whole ? ", by=micro_batch" : "");
  return devices;
}

// Of the whole model, by text.
std::string nest(int64_t& devices, int64_t micro_batches, Blocks blocks, Dice& dice) {
  const std::vector<int64_t> counts = factors(devices, dice);
  const auto most = std::ssize(blocks) + 1;
  std::vector<std::string> out = levels(counts, dice, true, factors_in(blocks));
  if (dice.below(5) < 2) {
    const auto at = static_cast<size_t>(dice.below(std::ssize(out)));
    // Stages with different numbers of devices: a pipeline over what they have together.
    if (devices >= 3 && most >= 3 && dice.below(4) == 0)
      return pipeline(dice.between(2, 3), micro_batches, most, dice) + (dice.coin() ? " > replica" : " > split");
    if (counts[at] <= most || dice.below(12) == 0) out[at] = pipeline(counts[at], micro_batches, most, dice);
    return fmt::format("{}", fmt::join(out, " > "));
  }
  if (counts.size() > 1 && dice.below(6) == 0) {
    devices = ragged(out, counts, dice.coin(), dice);
    if (devices <= 4 && most >= 2 && dice.coin()) {
      out.insert(dice.below(3) ? out.end() : out.begin(), pipeline(2, micro_batches, most, dice));
      devices *= 2;
    }
    return fmt::format("{}", fmt::join(out, " > "));
  }
  if (dice.below(12) == 0) {  // the devices in another order
    std::vector<int64_t> order(static_cast<size_t>(devices));
    std::iota(order.begin(), order.end(), int64_t{0});
    for (size_t i = order.size(); i-- > 1;) std::swap(order[i], order[dice.below(std::ssize(order))]);
    return fmt::format("cluster(device_order=[{}]) > {}", fmt::join(order, ","), fmt::join(out, " > "));
  }
  if (dice.below(8) == 0) {  // the count of one level follows from the others
    std::string& level = out[dice.below(std::ssize(out))];
    if (level.find(',') == level.npos) level = level.substr(0, level.find('('));
  }
  return fmt::format("{}", fmt::join(out, " > "));
}

// Replicas that are unlike; micro-batches are the case's.
std::string unlike_replicas(int64_t devices, Blocks blocks, Dice& dice) {
  const auto most = std::ssize(blocks) + 1;
  const std::string schedule = one_of<std::string>({"1f1b", "1f1b", "gpipe", "zb_h1"}, dice);
  std::vector<std::string> replicas;
  for (int64_t left = devices; left > 0;) {
    const bool last = replicas.size() == 2 || (!replicas.empty() && dice.coin());
    const int64_t own = last || left == 1 ? left : dice.between(1, left - 1);
    left -= own;
    const std::vector<int64_t> counts = factors(own, dice);
    std::vector<std::string> levels;
    const auto at = static_cast<size_t>(dice.below(std::ssize(counts)));
    const bool piped = counts[at] <= most && dice.coin();
    for (size_t k = 0; k < counts.size(); ++k)
      levels.push_back(piped && k == at    ? fmt::format("pipeline({},schedule={})", counts[k], schedule)
                       : dice.below(5) < 2 ? fmt::format("split({})", counts[k])
                       : dice.below(4)     ? fmt::format("replica({})", counts[k])
                                       : fmt::format("replica({},shares=[{}])", counts[k], shares_of(counts[k], dice)));
    replicas.push_back(fmt::format("{}", fmt::join(levels, ">")));
  }
  const auto n = std::ssize(replicas);
  const std::string shares = dice.coin() ? fmt::format(", shares=[{}]", shares_of(n, dice)) : "";
  return fmt::format("replica([{}]{})", fmt::join(replicas, ","), shares);
}

// Several nests that cut the devices at the same places.
std::string clauses(const std::vector<int64_t>& counts, int64_t blocks, Dice& dice) {
  std::string out;
  for (int64_t n = dice.between(1, 2); n-- > 0;) {
    const int64_t block = dice.below(blocks);
    if (out.find(fmt::format("b{}:", block)) == out.npos)
      out += fmt::format("b{}: {}; ", block, fmt::join(levels(counts, dice, false), " > "));
  }
  return out + fmt::format("{}", fmt::join(levels(counts, dice, false), " > "));
}

// Scopes around runs of the blocks [from, to).
void open(std::vector<std::string>& out, const std::vector<std::string>& nest) {
  for (const std::string& scope : nest) out.push_back(scope + "{"), std::erase(out.back(), ' ');
}
void close(std::vector<std::string>& out, size_t n) { out.insert(out.end(), n, "}"); }

void siblings(std::vector<std::string>& out, Blocks blocks, const std::vector<int64_t>& counts, Dice& dice) {
  const bool shares = dice.below(4) == 0;
  for (size_t at = 0; at < blocks.size();) {
    const auto n = std::min(static_cast<size_t>(dice.between(1, 4)), blocks.size() - at);
    const bool annotated = dice.below(5) != 0;
    const std::vector<std::string> scopes = levels(counts, dice, shares && at == 0);
    if (annotated) open(out, scopes);
    out.insert(out.end(), blocks.begin() + static_cast<std::ptrdiff_t>(at),
               blocks.begin() + static_cast<std::ptrdiff_t>(at + n));
    if (annotated) close(out, scopes.size());
    at += n;
  }
}

// A pipeline with written stages; gives the devices that it takes, up to about `most`.
int64_t stages(std::vector<std::string>& out, Blocks blocks, int64_t micro_batches, int64_t most, Dice& dice) {
  std::string schedule = one_of<std::string>({"1f1b", "gpipe", "zb_h1", "interleaved", "zb_v"}, dice);
  if (blocks.size() < 3) schedule = "1f1b";
  const int64_t virtual_stages = schedule == "interleaved" || schedule == "zb_v" ? 2 : 1;
  const int64_t outer = dice.below(3) ? 1 : 2,
                sites = std::min(dice.between(1, 3), std::max<int64_t>((std::ssize(blocks) - 1) / virtual_stages, 1)),
                n = sites * virtual_stages;
  std::vector<std::string> around;
  if (outer > 1) around = {replica_or_split(2, dice.below(4) == 0, dice.below(4) == 0, dice)};
  around.push_back(fmt::format("pipeline(micro_batches={}, schedule={}{})", micro_batches, schedule,
                               schedule == "interleaved" ? ", virtual_stages=2" : ""));
  open(out, around);
  // Stages of one site share its devices.
  std::vector<int64_t> devices;
  int64_t left = most / outer;
  for (int64_t s = 0; s < sites; ++s) {
    devices.push_back(dice.between(1, std::max<int64_t>(1, left - (sites - s - 1))));
    left -= devices.back();
  }
  std::vector<std::vector<int64_t>> counts;
  for (const int64_t d : devices) counts.push_back(factors(d, dice));
  size_t at = 0;
  for (int64_t s = 0; s < n; ++s) {
    const int64_t site = virtual_stages == 1 ? s : schedule == "zb_v" && s >= sites ? 2 * sites - 1 - s : s % sites;
    const auto& mine = counts[site];
    const int64_t rest = std::ssize(blocks) - (n - s - 1) - static_cast<int64_t>(at);
    const int64_t least = s == 0 ? 2 : 1;  // an input alone is no op
    const size_t end = s + 1 < n ? at + static_cast<size_t>(dice.between(least, std::max(rest, least))) : blocks.size();
    std::vector<std::string> scopes{"stage"};
    if (devices[site] > 1 || dice.coin())
      for (std::string& level : levels(mine, dice, virtual_stages == 1)) scopes.push_back(std::move(level));
    else
      scopes[0] += "(1)";
    open(out, scopes);
    out.insert(out.end(), blocks.begin() + static_cast<std::ptrdiff_t>(at),
               blocks.begin() + static_cast<std::ptrdiff_t>(end));
    close(out, scopes.size());
    at = end;
  }
  close(out, around.size());
  return outer * std::accumulate(devices.begin(), devices.begin() + sites, int64_t{0});
}

// Two pipelines one after the other on the same devices; gives the devices.
int64_t pipelines(std::vector<std::string>& out, Blocks blocks, int64_t micro_batches, int64_t most, Dice& dice) {
  const size_t half = blocks.size() / 2;
  const int64_t stages = dice.between(1, 3), inside = dice.between(1, most / stages);
  const std::vector<int64_t> counts = factors(inside, dice);
  std::vector<std::string> around;
  const int64_t outer = stages * inside <= most / 2 && dice.below(3) == 0 ? 2 : 1;
  if (outer > 1) around = {replica_or_split(2, dice.below(4) == 0, dice.below(4) == 0, dice)};
  open(out, around);
  for (const Blocks part : {blocks.first(half), blocks.subspan(half)}) {
    std::vector<std::string> scopes{fmt::format("pipeline({}, micro_batches={})", stages, micro_batches)};
    for (std::string& level : levels(counts, dice, false)) scopes.push_back(std::move(level));
    open(out, scopes);
    out.insert(out.end(), part.begin(), part.end());
    close(out, scopes.size());
  }
  close(out, around.size());
  return outer * stages * inside;
}

// ---- models -----------------------------------------------------------------------------------------------------
std::vector<std::string> random_blocks(Dice& dice) {
  std::vector<std::string> out{with_word(one_of(first_blocks(), dice), dice)};
  const bool tokens = out[0].starts_with("tokens");
  for (int64_t n = dice.between(0, 6); n-- > 0;) out.push_back(with_word(one_of(middle_blocks(), dice), dice));
  out.push_back(with_word(tokens && dice.coin() ? "tied" : one_of(last_blocks(), dice), dice));
  // Batch norm mixes samples: most models with it are trained without micro-batches, so it comes seldom.
  if (dice.below(4)) std::erase_if(out, [](const std::string& b) { return b.starts_with("batch_norm"); });
  return out;
}

std::vector<std::string> random_ops(Dice& dice) {
  std::vector<std::string> out;
  for (int64_t n = dice.between(1, 6); n-- > 0;)
    out.push_back(with_word("op." + one_of(random_graph_ops(), dice), dice));
  return out;
}

}  // namespace

PlanCase random_plan_case(Dice& dice, int64_t most) {
  PlanCase c;
  const bool ops = dice.below(5) == 0;
  const std::vector<std::string> blocks = ops ? random_ops(dice) : random_blocks(dice);
  c.batch = dice.between(ops ? 2 : 1, 11 * most / kFew);
  c.devices = dice.between(most > kFew ? kFew + 1 : 1, most);
  c.micro_batches = dice.coin() ? 1 : dice.between(1, 5);
  const int64_t kind = dice.below(10);
  if (kind < 6) {
    c.graph = blocks;
    c.strategy = nest(c.devices, dice.below(6) ? dice.between(2, 6) : c.batch, blocks, dice);
  } else if (kind < 7) {
    c.graph = blocks;
    c.strategy = clauses(factors(c.devices, dice), std::ssize(blocks), dice);
  } else if (kind < 8 || blocks.size() < 2) {
    const std::vector<int64_t> counts = factors(c.devices, dice);
    siblings(c.graph, blocks, counts, dice);
    if (dice.coin()) c.strategy = fmt::format("{}", fmt::join(levels(counts, dice, false), " > "));
  } else if (blocks.size() >= 4 && dice.below(4) == 0) {
    c.devices = pipelines(c.graph, blocks, dice.between(1, 5), most, dice);
  } else {
    c.devices = stages(c.graph, blocks, dice.between(1, 5), most, dice);
  }
  c.optimizer =
      with_word(one_of<std::string>({"sgd", "sgd", "adamw", "adam", "lamb", "adagrad", "adafactor"}, dice), dice);
  if (dice.below(3) == 0) c.zero = static_cast<int>(dice.between(1, 3));
  if (c.zero && dice.below(3) == 0) {  // of some replica scope, if there is one
    std::string text = c.strategy;
    for (const std::string& item : c.graph) text += item;
    if (const size_t at = text.find("replica("); at != text.npos)
      if (const int64_t n = std::atoll(text.c_str() + at + 8); n >= 1) c.state_shares = random_shares(n, dice);
  }
  if (dice.below(4) == 0) c.recompute = static_cast<int>(dice.between(1, 2));
  c.exact = dice.below(6) == 0;
  // Replicas take whole micro-batches then: some are needed.
  bool whole = c.exact || c.strategy.find("by=") != c.strategy.npos;
  for (const std::string& item : c.graph) whole |= item.find("by=") != item.npos;
  if (whole && dice.below(8)) c.micro_batches = c.devices + dice.below(3);
  c.batch = std::max(c.batch, micro_batches_of(c));  // more micro-batches than samples are an error (limits_test.cc)
  c.fusion = dice.below(4) != 0;
  c.overlap = dice.below(8) != 0;
  if (dice.coin()) c.bucket_bytes = 64;
  c.gradients = dice.below(6) == 0;
  c.sliced = !c.exact && dice.below(4) == 0;
  if (!c.exact && dice.below(4) == 0) c.matmul_chunks = dice.between(2, 4);
  if (dice.below(3) == 0) c.prefetch = dice.between(1, 3);
  const auto has_block = [&](const char* name) {
    return std::any_of(blocks.begin(), blocks.end(), [&](const std::string& b) { return b.starts_with(name); });
  };
  const bool rows = c.optimizer.starts_with("sgd") || c.optimizer.starts_with("ada");
  if (rows && !c.optimizer.starts_with("adafactor") && (has_block("tokens") || has_block("bags")) &&
      !has_block("tied") && dice.coin())
    c.sparse_updates = true, c.gradients = false;
  if (dice.below(3) == 0) c.profile = static_cast<int>(dice.between(1, 2));
  if (dice.below(8) == 0) c.offload = static_cast<uint32_t>(dice.between(1, kOffloadAll));
  c.steps = 20;
  if (c.batch > 1 && dice.below(4) == 0) c.last = dice.between(1, c.batch - 1);
  if (dice.below(4) == 0) c.evaluated = dice.between(1, c.batch + 2);
  // By what was drawn, so that a seed gives the cases that it always gave.
  uint64_t drawn = 0xcbf29ce484222325ull;
  for (const char letter : to_string(c)) drawn = (drawn ^ static_cast<uint8_t>(letter)) * 0x100000001b3ull;
  if (kind < 6 && !c.exact && c.devices > 1 && drawn / 4096 % 6 == 0) {
    Dice more(drawn / 65536);
    c.strategy = unlike_replicas(c.devices, blocks, more), c.state_shares.clear();
    c.batch = std::max(c.batch, c.micro_batches), c.last = std::min(c.last, c.batch - 1);
  }
  if (drawn % 4 == 0) c.unlike = static_cast<int64_t>(1 + drawn / 4 % 999);
  return c;
}

namespace {
// A replica less, one that is a single device, or a scope less in one; those whose devices all are written.
std::vector<PlanCase> fewer_unlike(const PlanCase& c, const Scope& replicas) {
  std::vector<PlanCase> out;
  const std::vector<std::vector<Scope>> each = parse_nests(replicas.nests);
  const auto devices = [](const std::vector<Scope>& nest) {
    int64_t n = 1;
    for (const Scope& s : nest) n *= std::max<int64_t>(s.count, 1);
    return n;
  };
  const auto with = [&](std::vector<std::vector<Scope>> nests, Scope of) {
    PlanCase less = c;
    less.devices = 0;
    std::vector<std::string> texts;
    for (const std::vector<Scope>& nest : nests) texts.push_back(to_string(nest)), less.devices += devices(nest);
    of.nests = fmt::format("[{}]", fmt::join(texts, ","));
    less.strategy = to_string(of);
    out.push_back(std::move(less));
  };
  for (size_t r = 0; r < each.size(); ++r) {
    const auto at = static_cast<std::ptrdiff_t>(r);
    if (each.size() > 2) {
      std::vector<std::vector<Scope>> nests = each;
      Scope of = replicas;
      nests.erase(nests.begin() + at);
      if (!of.shares.empty()) of.shares.erase(of.shares.begin() + at);
      with(nests, of);
    }
    std::vector<std::vector<Scope>> single = each;
    single[r] = parse_strategy("replica(1)");
    with(single, replicas);
    for (size_t k = 0; each[r].size() > 1 && k < each[r].size(); ++k) {
      std::vector<std::vector<Scope>> nests = each;
      nests[r].erase(nests[r].begin() + static_cast<std::ptrdiff_t>(k));
      with(nests, replicas);
    }
  }
  return out;
}
}  // namespace

std::vector<PlanCase> smaller_cases(const PlanCase& c) {
  std::vector<PlanCase> out;
  const auto with = [&](auto change) {
    PlanCase less = c;
    change(less);
    if (to_string(less) != to_string(c)) out.push_back(std::move(less));
  };
  // Scopes of the graph: all, then a pair; blocks: half, then one.
  const auto is_scope = [](const std::string& item) { return item == "}" || item.back() == '{'; };
  with([&](PlanCase& l) { std::erase_if(l.graph, is_scope); });
  for (size_t i = 0; i < c.graph.size(); ++i) {
    if (c.graph[i] == "}") continue;
    with([&](PlanCase& l) {
      if (is_scope(l.graph[i])) {
        int depth = 0;
        for (size_t k = i; k < l.graph.size(); ++k) {
          depth += l.graph[k].back() == '{' ? 1 : l.graph[k] == "}" ? -1 : 0;
          if (depth == 0) {
            l.graph.erase(l.graph.begin() + static_cast<std::ptrdiff_t>(k));
            break;
          }
        }
      }
      l.graph.erase(l.graph.begin() + static_cast<std::ptrdiff_t>(i));
      if (l.graph.empty()) l.graph = c.graph;
    });
  }
  with([](PlanCase& l) { l.exact = false; });
  with([](PlanCase& l) { l.zero = 0, l.state_shares.clear(); });
  with([](PlanCase& l) { l.state_shares.clear(); });
  with([](PlanCase& l) { l.recompute = 0; });
  with([](PlanCase& l) { l.fusion = true; });
  with([](PlanCase& l) { l.overlap = true; });
  with([](PlanCase& l) { l.bucket_bytes = 0; });
  with([](PlanCase& l) { l.steps = 3; });
  with([](PlanCase& l) { l.last = 0; });
  with([](PlanCase& l) { l.evaluated = 0; });
  with([](PlanCase& l) { l.gradients = false; });
  with([](PlanCase& l) { l.sliced = false; });
  with([](PlanCase& l) { l.matmul_chunks = 1; });
  with([](PlanCase& l) { l.prefetch = 0; });
  with([](PlanCase& l) { l.offload = 0; });
  with([](PlanCase& l) { l.profile = 0; });
  with([](PlanCase& l) { l.sparse_updates = false; });
  with([](PlanCase& l) { l.optimizer = "sgd#0"; });
  with([](PlanCase& l) { l.optimizer = l.optimizer.substr(0, l.optimizer.find('#')) + "#0"; });
  with([](PlanCase& l) { l.micro_batches = 1; });
  with([](PlanCase& l) { l.micro_batches = 2; });
  // A clause less, a scope less, a parameter less.
  const std::vector<StrategyClause> clauses = parse_clauses(c.strategy.empty() ? "replica" : c.strategy);
  const auto text = [](const std::vector<StrategyClause>& list) {
    std::string out;
    for (const StrategyClause& clause : list)
      out += fmt::format("{}{}{}", out.empty() ? "" : "; ", clause.name.empty() ? "" : clause.name + ": ",
                         to_string(clause.nest));
    return out;
  };
  for (size_t i = 0; i < clauses.size(); ++i) {
    if (clauses.size() > 1)
      with([&](PlanCase& l) {
        std::vector<StrategyClause> list = clauses;
        list.erase(list.begin() + static_cast<std::ptrdiff_t>(i));
        l.strategy = text(list);
      });
    for (size_t k = 0; k < clauses[i].nest.size(); ++k) {
      const auto scope = [&](auto change) {
        with([&](PlanCase& l) {
          std::vector<StrategyClause> list = clauses;
          const int64_t before = list[i].nest[k].count;
          change(list[i].nest, list[i].nest[k]);
          const int64_t after =
              k < list[i].nest.size() && list[i].nest.size() == clauses[i].nest.size() ? list[i].nest[k].count : 1;
          if (clauses.size() == 1 && before && after && l.devices % before == 0) l.devices = l.devices / before * after;
          l.strategy = text(list);
        });
      };
      if (clauses[i].nest.size() > 1)
        scope([&](std::vector<Scope>& nest, Scope&) { nest.erase(nest.begin() + static_cast<std::ptrdiff_t>(k)); });
      scope([](std::vector<Scope>&, Scope& s) { s.shares.clear(); });
      scope([](std::vector<Scope>&, Scope& s) { s.factor.clear(); });
      scope([](std::vector<Scope>&, Scope& s) { s.by.clear(); });
      scope([](std::vector<Scope>&, Scope& s) { s.schedule = read_schedule(s.schedule).name; });
      scope([](std::vector<Scope>&, Scope& s) {
        if (s.count > 2 && s.nests.empty()) s.count = 2, s.shares.clear(), s.schedule = read_schedule(s.schedule).name;
      });
      scope([](std::vector<Scope>&, Scope& s) {
        if (s.micro_batches > 1) --s.micro_batches, s.schedule = read_schedule(s.schedule).name;
      });
      if (!clauses[i].nest[k].nests.empty())
        for (PlanCase& less : fewer_unlike(c, clauses[i].nest[k])) with([&](PlanCase& l) { l = std::move(less); });
      scope([](std::vector<Scope>&, Scope& s) {
        if (s.virtual_stages != 2 || s.schedule != "interleaved") s.schedule.clear(), s.virtual_stages = 0;
      });
    }
  }
  for (const int64_t batch : {int64_t{2}, c.batch / 2, c.batch - 1})
    if (batch >= 1 && batch < c.batch)
      with([&](PlanCase& l) { l.batch = batch, l.last = std::min(l.last, batch - 1); });
  return out;
}

}  // namespace whale::test
