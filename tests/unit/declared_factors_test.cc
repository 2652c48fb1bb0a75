// What ops declare, by brute force: each op is computed in parts, in each way that its declarations allow, and the
// parts put together must be what the op gives as a whole. What plans do, and what proofs of them trust, rests on this.
#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <set>
#include <thread>

#include "base/error.h"
#include "faults.h"
#include "op_calls.h"
#include "op_parts.h"

namespace whale::test {
namespace {

using enum OpCode;

// Ops without a kernel: what they do is the plan's to say, and the prover has rules for each.
const std::map<OpCode, const char*> kNoKernel = {
    {k_all_reduce, "a collective"},
    {k_all_gather, "a collective"},
    {k_reduce_scatter, "a collective"},
    {k_all_to_all, "a collective"},
    {k_adasum, "a collective"},
    {k_shift, "a collective"},
    {k_transfer, "a message"},
    {k_to_host, "a copy"},
    {k_to_device, "a copy"},
    {k_part_view, "no instruction: a place in its operand"},
};

// Factors that are not for cutting.
bool is_for_rebatching(OpCode code, const Factor& f) {
  return code == k_batch_norm && f.name != "c";  // canonicalise takes it apart before anything is cut
}
bool may_be_cut(OpCode code, const Factor& f) {
  return f.kind != FactorKind::kFixed && f.kind != FactorKind::kScan && !is_for_rebatching(code, f);
}

Factors factors_of(const OpView& view) {
  const auto of = def(view.code).factors;
  return of ? of(view) : Factors{};
}

// ---- cuts ---------------------------------------------------------------------------------------------------------
using Intervals = std::vector<Interval>;

// Even, uneven, with nothing in one of them; ends on multiples of `unit`.
std::vector<Intervals> divisions(int64_t extent, int64_t unit) {
  const int64_t n = extent / unit;
  std::set<std::vector<int64_t>> ends;
  for (const auto& list : std::vector<std::vector<int64_t>>{{(n + 1) / 2, n},
                                                            {1, n},
                                                            {n - 1, n},
                                                            {(n + 2) / 3, (2 * n + 2) / 3, n},
                                                            {1, n - 1, n},
                                                            {0, n},
                                                            {n, n},
                                                            {1, 1, n}})
    if (std::is_sorted(list.begin(), list.end()) && list.front() >= 0) ends.insert(list);
  std::vector<Intervals> out;
  for (const auto& list : ends) {
    out.emplace_back();
    int64_t begin = 0;
    for (const int64_t end : list) out.back().push_back({begin * unit, end * unit}), begin = end;
  }
  return out;
}

bool is_placed(const OpView& view) {
  const OpDef& d = def(view.code);
  return d.flags & (kRandom | kOffsetAware) && (!d.placed_dims || d.placed_dims(view) != 0);
}

// All ways in which a factor is cut here.
std::vector<FactorCut> cuts_of(const OpView& view, const Factor& f) {
  std::vector<FactorCut> out;
  if (!may_be_cut(view.code, f) || f.extent < 1) return out;
  const int64_t rows = f.group.rows, groups = rows ? f.extent / rows : 0;
  const auto beyond = [&](const Interval& i) { return f.window.present() && read_by(f.window, i).size() == 0; };
  for (const Intervals& division : divisions(f.extent, f.unit)) {
    // Through a window everybody makes something and reads something.
    if (f.window.present() &&
        std::any_of(division.begin(), division.end(), [&](const Interval& i) { return i.size() == 0 || beyond(i); }))
      continue;
    FactorCut cut{&f, {}};
    for (const Interval& i : division) cut.parts.push_back({i, {0, groups}});
    out.push_back(cut);
    if (f.kind == FactorKind::kStream) {  // round a ring: in any order
      std::reverse(cut.parts.begin(), cut.parts.end());
      out.push_back(cut);
    }
    cut.samples = true;
    if (is_placed(view)) out.push_back(cut);
  }
  if (groups < 2) return out;
  // Micro-batches of whole groups, and two devices within each.
  for (const Intervals& times : divisions(groups, 1))
    for (const int64_t first : {int64_t{0}, int64_t{1}}) {
      FactorCut cut{&f, {}, true};
      for (const Interval& g : times) {
        const int64_t begin = g.begin * rows, end = g.end * rows, middle = std::min(begin + first, end);
        cut.parts.push_back({{begin, middle}, g});
        cut.parts.push_back({{middle, end}, g});
      }
      out.push_back(cut);
    }
  return out;
}

size_t parts_with_elements(const FactorCut& cut) {
  return static_cast<size_t>(
      std::count_if(cut.parts.begin(), cut.parts.end(), [](const FactorPart& p) { return p.at.size() > 0; }));
}

std::string name_of(const OpCall& call, const Factor& f) {
  return fmt::format("{} by {}", def(call.code).name, f.name);
}

// Both are terms of one result and are not combined alike: nobody cuts both.
bool combine_unlike(const Factor& a, const Factor& b) {
  for (size_t o = 0; o < std::min(a.partial.size(), b.partial.size()); ++o)
    if (a.partial[o] && b.partial[o] && a.combine_of(o) != b.combine_of(o)) return true;
  return false;
}

}  // namespace

TEST_CASE("declared: every op that has a kernel is called, and each of its factors is cut") {
  std::set<OpCode> called;
  std::map<std::string, bool> cut;  // by op and factor
  for (const OpCall& call : op_calls()) {
    called.insert(call.code);
    const OpView view = view_of(call);
    for (const Factor& f : factors_of(view).list) {
      // Dimensions are alike; random programs have more of them than a table says, many of one element.
      const bool dimension = f.name.size() == 2 && f.name[0] == 'd';
      if (!may_be_cut(call.code, f) || (dimension && f.extent < 2)) continue;
      bool& mine = cut[name_of(call, f)];
      for (const FactorCut& c : cuts_of(view, f)) mine |= parts_with_elements(c) > 1;
    }
  }
  for (const OpCode code : all_ops()) {
    CAPTURE(std::string(def(code).name));
    CHECK(called.contains(code) != kNoKernel.contains(code));
    CHECK(ref_device().has(code) != kNoKernel.contains(code));
  }
  for (const auto& factor : cut) CHECK_MESSAGE(factor.second, factor.first);
  MESSAGE(op_calls().size() << " calls of " << called.size() << " ops, " << cut.size() << " factors");
}

TEST_CASE("declared: an op computed in parts along one factor is the op") {
  Faults faults;
  int64_t cuts = 0;
  for (const OpCall& call : op_calls()) {
    const OpView view = view_of(call);
    const Factors factors = factors_of(view);
    const std::vector<Value> whole = ref_device().run(call);
    for (const Factor& f : factors.list)
      for (const FactorCut& cut : cuts_of(view, f)) {
        ++cuts;
        if (const std::string text = difference(ref_device(), call, whole, {cut}); !text.empty())
          faults.add(name_of(call, f), fmt::format("{} along {}: {}", to_string(call), to_string(cut), text));
      }
  }
  MESSAGE(cuts << " cuts");
}

TEST_CASE("declared: an op computed in parts along two factors is the op") {
  Faults faults;
  int64_t cuts = 0;
  for (const OpCall& call : op_calls()) {
    const OpView view = view_of(call);
    const Factors factors = factors_of(view);
    const std::vector<Value> whole = ref_device().run(call);
    for (size_t a = 0; a < factors.list.size(); ++a)
      for (size_t b = 0; b < factors.list.size(); ++b) {
        if (a == b || combine_unlike(factors.list[a], factors.list[b])) continue;
        std::vector<FactorCut> first = cuts_of(view, factors.list[a]), second = cuts_of(view, factors.list[b]);
        // A few of each, others for other calls.
        for (size_t k = 0; k < 2 && !first.empty() && !second.empty(); ++k) {
          const FactorCut &x = first[(static_cast<size_t>(cuts) * 7 + k) % first.size()],
                          &y = second[(static_cast<size_t>(cuts) * 5 + k) % second.size()];
          if (x.samples && y.samples) continue;
          ++cuts;
          if (const std::string text = difference(ref_device(), call, whole, {x, y}); !text.empty())
            faults.add(name_of(call, *x.factor) + " and " + y.factor->name,
                       fmt::format("{} along {} and {}: {}", to_string(call), to_string(x), to_string(y), text));
        }
      }
  }
  MESSAGE(cuts << " pairs");
}

TEST_CASE("declared: an op computed in parts along all of its factors at once is the op") {
  Faults faults;
  int64_t calls = 0;
  for (const OpCall& call : op_calls()) {
    const OpView view = view_of(call);
    const Factors factors = factors_of(view);
    std::vector<FactorCut> cuts;
    for (const Factor& f : factors.list)
      for (const FactorCut& cut : cuts_of(view, f)) {
        if (cut.parts.size() != 2 || parts_with_elements(cut) != 2 || cut.samples) continue;
        cuts.push_back(cut);
        break;
      }
    bool unlike = false;
    for (const FactorCut& a : cuts)
      for (const FactorCut& b : cuts) unlike |= combine_unlike(*a.factor, *b.factor);
    if (cuts.size() < 3 || unlike) continue;
    ++calls;
    if (const std::string text = difference(ref_device(), call, ref_device().run(call), cuts); !text.empty())
      faults.add(def(call.code).name, fmt::format("{}: {}", to_string(call), text));
  }
  MESSAGE(calls << " calls");
}

TEST_CASE("declared: the cpu device's kernels compute parts too") {
  // A thread of its own, as in the executor: the device binds it to its cores.
  Faults faults;
  int64_t cuts = 0;
  std::exception_ptr error;
  std::thread([&] {
    try {
      const OpDevice cpu(DeviceKind::kCpu);
      for (const OpCall& given : op_calls()) {
        const OpCall call = in_f32(given);
        if (!cpu.has(call)) continue;
        const OpView view = view_of(call);
        const Factors factors = factors_of(view);
        const std::vector<Value> whole = cpu.run(call);
        for (const Factor& f : factors.list) {
          const std::vector<FactorCut> all = cuts_of(view, f);
          if (all.empty()) continue;
          const FactorCut& cut = all[static_cast<size_t>(cuts++) % all.size()];
          if (const std::string text = difference(cpu, call, whole, {cut}); !text.empty())
            faults.add(name_of(call, f), fmt::format("{} along {}: {}", to_string(call), to_string(cut), text));
        }
      }
    } catch (...) {
      error = std::current_exception();
    }
  }).join();
  if (error) std::rethrow_exception(error);
  MESSAGE(cuts << " cuts");
}

}  // namespace whale::test
