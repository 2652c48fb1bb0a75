// What ops declare beside factors, by brute force: linearity, equal forms, aliases, views, elementwise ops, partial
// operands, lists of updates.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <thread>

#include "base/error.h"
#include "faults.h"
#include "op_calls.h"
#include "op_graph.h"
#include "op_parts.h"

namespace whale::test {
namespace {

using enum OpCode;

Factors factors_of(const OpView& view) {
  const auto of = def(view.code).factors;
  return of ? of(view) : Factors{};
}

std::vector<double> largest_of(const std::vector<Value>& values) {
  std::vector<double> out;
  for (const Value& v : values) out.push_back(largest(v));
  return out;
}

Value with_data(const Value& like, double (*make)(size_t, double)) {
  Value out = like;
  for (size_t k = 0; k < out.data.size(); ++k) out.data[k] = make(k, out.data[k]);
  return out;
}

}  // namespace

TEST_CASE("declared: a sum passes through what is linear in it") {
  Faults faults;
  int64_t sets = 0;
  for (const OpCall& call : op_calls())
    for (const std::vector<int>& set : factors_of(view_of(call)).linear) {
      // x = u + v + 0, each operand of the set.
      std::vector<OpCall> terms(3, call);
      bool numbers = true;
      for (const int i : set) {
        const auto at = static_cast<size_t>(i);
        if (at >= call.in.size() || !call.in[at].present()) continue;
        numbers &= call.in[at].dtype != DType::kBool;
        const bool real = is_float(call.in[at].dtype);
        terms[0].in[at] = with_data(
            call.in[at], real ? [](size_t k, double) { return std::sin(3.0 + 7.0 * static_cast<double>(k)); }
                              : [](size_t k, double) { return static_cast<double>(k % 3); });
        for (size_t k = 0; k < call.in[at].data.size(); ++k)
          terms[1].in[at].data[k] = call.in[at].data[k] - terms[0].in[at].data[k];
        for (double& x : terms[2].in[at].data) x = 0;
      }
      if (!numbers) continue;
      ++sets;
      std::vector<Value> sum;
      const std::vector<Value> whole = ref_device().run(call);
      std::vector<double> most = largest_of(whole);
      for (const OpCall& term : terms) {
        std::vector<Value> part = ref_device().run(term);
        for (size_t o = 0; o < part.size(); ++o) most[o] = std::max(most[o], largest(part[o]));
        for (size_t o = 0; o < part.size() && !sum.empty(); ++o)
          for (size_t k = 0; k < part[o].data.size(); ++k) part[o].data[k] += sum[o].data[k];
        sum = std::move(part);
      }
      const std::string text = difference(ref_device(), sum, whole, most);
      if (!text.empty())
        faults.add(fmt::format("{} in {}", def(call.code).name, fmt::join(set, ", ")),
                   fmt::format("{}: {}", to_string(call), text));
    }
  MESSAGE(sets << " sets of operands");
}

TEST_CASE("declared: what keeps zeros makes zeros of them") {
  std::set<OpCode> found;
  for (OpCall call : op_calls()) {
    if (!has_flag(call.code, kKeepsZero)) continue;
    found.insert(call.code);
    const bool many = def(call.code).inputs.back().kind == PortKind::kVariadic;
    for (size_t i = 0; i < (many ? call.in.size() : 1); ++i) std::ranges::fill(call.in[i].data, 0);
    for (const Value& made : ref_device().run(call))
      CHECK_MESSAGE(std::ranges::count(made.data, 0) == std::ssize(made.data), to_string(call));
  }
  CHECK(found.size() == 2);
}

// Proofs hold what is the same all along a dimension without saying where it lies.
TEST_CASE("declared: what is the same all along a factor of kind map makes what is the same all along it") {
  Faults faults;
  int64_t factors = 0;
  for (const OpCall& call : op_calls()) {
    const OpView view = view_of(call);
    const OpDef& d = def(call.code);
    const bool placed = d.flags & (kRandom | kOffsetAware);
    for (const Factor& f : factors_of(view).list) {
      if (f.kind != FactorKind::kMap || f.extent < 2 || placed || f.begin_attr || f.group.rows > 0) continue;
      const auto first_along = [&](const Value& v, const SubAxis& s, size_t k) {  // the element at its first position
        int64_t behind = s.inner;
        for (size_t n = static_cast<size_t>(s.dim) + 1; n < v.dims.size(); ++n) behind *= v.dims[n];
        return k - static_cast<size_t>(static_cast<int64_t>(k) / behind % f.extent * behind);
      };
      OpCall same = call;
      for (size_t i = 0; i < call.in.size() && i < f.inputs.size(); ++i)
        for (size_t k = 0; f.inputs[i].present() && k < call.in[i].data.size(); ++k)
          same.in[i].data[k] = call.in[i].data[first_along(call.in[i], f.inputs[i], k)];
      const std::vector<Value> made = ref_device().run(same);
      ++factors;
      for (size_t o = 0; o < made.size() && o < f.outputs.size(); ++o)
        for (size_t k = 0; f.outputs[o].present() && k < made[o].data.size(); ++k) {
          const double x = made[o].data[k], first = made[o].data[first_along(made[o], f.outputs[o], k)];
          if (std::abs(x - first) > 1e-12 * std::max(1.0, std::abs(first)))
            faults.add(fmt::format("{} by {}", d.name, f.name),
                       fmt::format("{}: {} and {}", to_string(call), first, x));
        }
    }
  }
  CHECK(factors > 500);
}

TEST_CASE("declared: an equal form gives the same") {
  Faults faults;
  int64_t forms = 0;
  for (const OpCall& call : op_calls())
    for (const auto form : {def(call.code).decompose, def(call.code).unpack}) {
      if (form == nullptr) continue;
      OpGraph made = graph_of(call);
      const TensorIds results = form(made.graph, Op(made.op()));
      if (results.empty()) continue;
      ++forms;
      const std::vector<Value> values = run_graph(ref_device(), made.graph, made.known), whole = ref_device().run(call);
      std::vector<Value> found;
      for (const TensorId id : results) found.push_back(values[id]);
      const std::string text = difference(ref_device(), found, whole, largest_of(whole));
      if (!text.empty()) faults.add(def(call.code).name, fmt::format("{}: {}", to_string(call), text));
    }
  MESSAGE(forms << " forms");
}

namespace {

// Sets of aliases of which a plan may use all at once: those that it must, with each of the others, and as many of the
// others as there are.
std::vector<std::vector<Alias>> aliases_at_once(const OpCall& call) {
  const OpView view = view_of(call);
  std::vector<Alias> must, may;
  for (const Alias& a : aliases_of(view)) {
    const auto i = static_cast<size_t>(a.input), o = static_cast<size_t>(a.output);
    if (i >= call.in.size() || o >= view.outputs.size() || !call.in[i].present()) continue;
    if (view.inputs[i] == view.outputs[o]) (a.must ? must : may).push_back(a);
  }
  std::vector<std::vector<Alias>> out;
  if (!must.empty()) out.push_back(must);
  std::vector<Alias> all = must;
  for (const Alias& a : may) {
    out.push_back(must);
    out.back().push_back(a);
    if (std::none_of(all.begin(), all.end(),
                     [&](const Alias& other) { return other.input == a.input || other.output == a.output; }))
      all.push_back(a);
  }
  if (all.size() > 1) out.push_back(all);
  return out;
}

void check_in_place(const OpDevice& device, const std::vector<OpCall>& list) {
  Faults faults;
  int64_t ways = 0;
  for (const OpCall& call : list) {
    if (aliases_of(view_of(call)).empty() || !device.has(call)) continue;
    const std::vector<TensorType> types = view_of(call).outputs;
    const std::vector<Value> apart = device.run(call);
    for (const std::vector<Alias>& aliases : aliases_at_once(call)) {
      ++ways;
      const std::string text =
          difference(device, device.run(call, {}, types, aliases), apart, std::vector<double>(types.size()));
      if (!text.empty()) faults.add(def(call.code).name, fmt::format("{}: {}", to_string(call), text));
    }
  }
  MESSAGE(ways << " ways in place");
}

}  // namespace

TEST_CASE("declared: results may be written over the operands that they are aliases of") {
  check_in_place(ref_device(), op_calls());
  // A thread of its own, as in the executor: the device binds it to its cores.
  std::vector<OpCall> narrow;
  for (const OpCall& call : op_calls()) narrow.push_back(in_f32(call));
  std::exception_ptr error;
  std::thread([&] {
    try {
      check_in_place(OpDevice(DeviceKind::kCpu), narrow);
    } catch (...) {
      error = std::current_exception();
    }
  }).join();
  if (error) std::rethrow_exception(error);
}

TEST_CASE("declared: a view has its operand's bytes, what rearranges has its elements") {
  int64_t views = 0;
  for (const OpCall& call : op_calls()) {
    CAPTURE(to_string(call));
    if (has_flag(call.code, kView)) {
      ++views;
      const Value made = ref_device().run(call)[0];
      CHECK(made.dtype == call.in[0].dtype);
      CHECK(made.data == call.in[0].data);
    }
    if (has_flag(call.code, kRearranges))
      for (const Value& made : ref_device().run(call))
        CHECK(std::set<double>(made.data.begin(), made.data.end()) ==
              std::set<double>(call.in[0].data.begin(), call.in[0].data.end()));
  }
  CHECK(views > 0);
}

TEST_CASE("declared: an element of an elementwise result depends on one of each operand") {
  Faults faults;
  int64_t elements = 0;
  for (const OpCall& call : op_calls()) {
    if (!has_flag(call.code, kElementwise)) continue;
    const std::vector<Value> whole = ref_device().run(call);
    if (call.in.size() == 1 && !has_flag(call.code, kRandom)) {  // the same of each, wherever it is
      OpCall flat = call;
      flat.in[0].dims = {element_count(call.in[0].dims)};
      if (ref_device().run(flat)[0].data != whole[0].data)
        faults.add(def(call.code).name, fmt::format("{}: another result of a flat operand", to_string(call)));
    }
    for (size_t i = 0; i < call.in.size(); ++i)
      for (size_t k = 0; k < call.in[i].data.size(); ++k) {
        ++elements;
        OpCall other = call;
        double& x = other.in[i].data[k];
        x = call.in[i].dtype == DType::kBool ? 1 - x : x + 1;
        // Its coordinates, from the last dimension; of extents of 1 all of the result's are.
        std::vector<int64_t> at;
        const Dims& dims = call.in[i].dims;
        auto rest = static_cast<int64_t>(k);
        for (size_t d = dims.size(); d-- > 0; rest /= dims[d]) at.push_back(dims[d] == 1 ? -1 : rest % dims[d]);
        const std::vector<Value> made = ref_device().run(other);
        for (size_t o = 0; o < made.size(); ++o)
          for (size_t e = 0; e < made[o].data.size(); ++e) {
            auto place = static_cast<int64_t>(e);
            bool reads = true;
            for (size_t d = 0; d < made[o].dims.size(); ++d) {
              const int64_t extent = made[o].dims[made[o].dims.size() - 1 - d];
              reads &= d >= at.size() || at[d] < 0 || at[d] == place % extent;
              place /= extent;
            }
            const double was = whole[o].data[e], is = made[o].data[e];
            if (!reads && was != is && !(std::isnan(was) && std::isnan(is)))
              faults.add(def(call.code).name,
                         fmt::format("{}: element {} of result {} changes with element {} of operand {}",
                                     to_string(call), e, o, k, i));
          }
      }
  }
  MESSAGE(elements << " elements changed");
}

TEST_CASE("declared: parts combined before an op or behind it are the same") {
  std::set<OpCode> found;
  for (const OpCall& call : op_calls()) {
    const auto combine = def(call.code).of_partial;
    if (!combine) continue;
    CAPTURE(to_string(call));
    found.insert(call.code);
    OpCall other = call, both = call;
    for (size_t i = 0; i < call.in.size(); ++i)
      for (size_t k = 0; k < call.in[i].data.size(); ++k) {
        double& x = other.in[i].data[k];
        x = std::round(10 * std::sin(5.0 + 3.0 * static_cast<double>(k + i)));
        both.in[i].data[k] = combined(*combine, call.in[i].data[k], x);
      }
    std::vector<Value> made = ref_device().run(call);
    const std::vector<Value> more = ref_device().run(other);
    for (size_t k = 0; k < made[0].data.size(); ++k)
      made[0].data[k] = combined(*combine, made[0].data[k], more[0].data[k]);
    CHECK(difference(ref_device(), made, ref_device().run(both), {10}) == "");
  }
  for (const OpCode code : all_ops()) CHECK(found.contains(code) == def(code).of_partial.has_value());
}

TEST_CASE("declared: ops that stand for a combination of two parts are that") {
  const std::map<OpCode, Combine> kCombine = {{k_add, Combine::kSum},
                                              {k_maximum, Combine::kMax},
                                              {k_minimum, Combine::kMin},
                                              {k_logaddexp, Combine::kLogSumExp}};
  int64_t elements = 0;
  for (const OpCall& call : op_calls()) {
    auto combine = kCombine.find(call.code);
    const std::string& said = attr_string(call.attrs, "combine");
    if (call.code == k_accumulate)
      combine = kCombine.find(said == "max" ? k_maximum : said == "min" ? k_minimum : k_add);
    if (combine == kCombine.end() || call.in[0].dims != call.in[1].dims) continue;
    CAPTURE(to_string(call));
    Value both = call.in[0];
    for (size_t k = 0; k < both.data.size(); ++k, ++elements)
      both.data[k] = combined(combine->second, both.data[k], call.in[1].data[k]);
    CHECK(difference(ref_device(), ref_device().run(call), {both}, {largest(both)}) == "");
  }
  CHECK(elements > 0);
}

TEST_CASE("declared: a product of matrices is one of all their rows") {
  int64_t products = 0;
  for (const OpCall& call : op_calls()) {
    const bool shared = has_flag(call.code, kProduct) && call.in[1].dims.size() == 2;
    if (!shared || attr_bool(call.attrs, "transpose_a")) continue;
    CAPTURE(to_string(call));
    ++products;
    OpCall rows = call;
    Dims& dims = rows.in[0].dims;
    dims = {element_count(dims) / dims.back(), dims.back()};
    CHECK(ref_device().run(rows)[0].data == ref_device().run(call)[0].data);
  }
  CHECK(products > 0);
}

TEST_CASE("declared: an update of many is an update of each") {
  std::set<OpCode> found;
  for (const OpCall& call : op_calls()) {
    const OpDef& d = def(call.code);
    if (!(d.flags & kUpdateOp) || d.inputs.back().kind != PortKind::kVariadic) continue;
    const Ints& decays = attr_ints(call.attrs, "decays");
    const size_t first = d.inputs.size() - 1;
    // The results are the tensors that are written, so that their number says how many tuples the operands are: those
    // of the first parameter's shape are one.
    const std::vector<Value> whole = ref_device().run(call);
    const auto per = static_cast<size_t>(
        std::count_if(whole.begin(), whole.end(), [&](const Value& v) { return v.dims == call.in[first].dims; }));
    if (per == whole.size()) continue;
    const size_t count = whole.size() / per, width = (call.in.size() - first) / count;
    CAPTURE(to_string(call));
    found.insert(call.code);
    for (size_t t = 0; t < count; ++t) {
      OpCall one{call.code, call.attrs, {}, 0};
      one.in.assign(call.in.begin(), call.in.begin() + static_cast<std::ptrdiff_t>(first));
      for (size_t k = 0; k < width; ++k) one.in.push_back(call.in[first + t * width + k]);
      if (!decays.empty()) one.attrs["decays"] = Ints{decays[t]};
      const auto mine = whole.begin() + static_cast<std::ptrdiff_t>(t * per);
      CHECK(difference(ref_device(), ref_device().run(one), {mine, mine + static_cast<std::ptrdiff_t>(per)},
                       std::vector<double>(per)) == "");
    }
  }
  CHECK(found.size() == 10);
}

}  // namespace whale::test
