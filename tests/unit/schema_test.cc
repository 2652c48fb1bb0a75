#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>

#include "../fuzz/sample.h"
#include "base/error.h"
#include "base/utf8.h"
#include "schema/fields.h"
#include "schema/graph_file.h"
#include "unit/caught.h"

namespace whale {
namespace {

std::string error_of(const std::vector<uint8_t>& bytes) {
  return message_of([&] { read_graph(bytes.data(), bytes.size()); }, {Code::kInvalidArgument});
}

}  // namespace

TEST_CASE("a graph survives bytes") {
  const Graph graph = sample_graph();
  const std::vector<uint8_t> bytes = serialize(graph);
  const Graph again = read_graph(bytes.data(), bytes.size());
  CHECK(print(again) == print(graph));
  CHECK(serialize(again) == bytes);
  CHECK(again.op(0).location == "model.py:7");
  CHECK(again.scopes[1].shares == std::vector<double>{3, 1});
  CHECK(again.variables[0].init.b == 0.02);
  CHECK(again.training.lr_schedule.total_steps == 100);
  CHECK(again.default_strategy == "replica(2)");
  CHECK(is_graph_file(bytes.data(), bytes.size()));
  CHECK_FALSE(is_plan_file(bytes.data(), bytes.size()));
}

TEST_CASE("a negative zero survives bytes") {
  Graph graph = sample_graph();
  graph.variables[0].init.a = -0.0;
  const auto of_number = [](Op& op) -> double* {
    for (auto& [name, value] : op.attrs)
      if (auto* f = std::get_if<double>(&value)) return f;
    return nullptr;
  };
  const auto at = std::ranges::find_if(graph.ops, [&](Op& op) { return of_number(op) != nullptr; });
  REQUIRE(at != graph.ops.end());
  *of_number(*at) = -0.0;
  const std::vector<uint8_t> bytes = serialize(graph);
  Graph again = read_graph(bytes.data(), bytes.size());
  CHECK(std::signbit(again.variables[0].init.a));
  CHECK(std::signbit(*of_number(again.ops[at - graph.ops.begin()])));
}

TEST_CASE("a graph is read from any address") {
  const std::vector<uint8_t> bytes = serialize(sample_graph());
  for (size_t shift = 1; shift < 8; ++shift) {
    std::vector<uint8_t> moved(shift);
    moved.insert(moved.end(), bytes.begin(), bytes.end());
    CHECK(serialize(read_graph(moved.data() + shift, bytes.size())) == bytes);
  }
}

TEST_CASE("what is not a graph is refused with a reason") {
  CHECK(has(error_of({}), "empty"));
  CHECK(has(error_of({1, 2, 3}), "first bytes"));
  CHECK(has(error_of(std::vector<uint8_t>(100, 0)), "first bytes"));
  std::vector<uint8_t> bytes = serialize(sample_graph());
  for (size_t n = 8; n < bytes.size() - 8; n += 97) {
    const std::vector<uint8_t> cut(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(n));
    CHECK(error_of(cut) != "");
  }
  bytes[4] = 'X';
  CHECK(has(error_of(bytes), "first bytes"));
}

TEST_CASE("every number of a graph is checked") {
  const auto changed = [](auto change) {
    Graph g = sample_graph();
    change(g);
    return error_of(serialize(g));
  };
  CHECK(changed([](Graph&) {}) == "");
  CHECK(has(changed([](Graph& g) { g.tensors[0].dtype = static_cast<DType>(77); }), "dtype"));
  CHECK(has(changed([](Graph& g) { g.tensors[0].dims = {-1, 4}; }), "dimensions"));
  CHECK(has(changed([](Graph& g) { g.tensors[0].dims = {int64_t{1} << 40, int64_t{1} << 40}; }), "dimensions"));
  CHECK(has(changed([](Graph& g) { g.tensors[0].dims = Dims(60, 1); }), "dimensions"));
  CHECK(has(changed([](Graph& g) { g.tensors[0].batch_dim = 2; }), "batch_dim"));
  CHECK(has(changed([](Graph& g) { g.tensors[0].name = "a\nb"; }), "control"));
  CHECK(has(changed([](Graph& g) { g.tensors[0].name = "\xff\xfe"; }), "UTF-8"));
  CHECK(has(changed([](Graph& g) { g.ops[0].inputs[0] = 1000; }), "input"));
  CHECK(has(changed([](Graph& g) { g.ops[0].outputs[0] = -1; }), "output"));
  CHECK(has(changed([](Graph& g) { g.ops[0].code = static_cast<OpCode>(9999); }), "op number 9999"));
  CHECK(has(changed([](Graph& g) { g.ops[0].scope = 3; }), "scope"));
  CHECK(has(changed([](Graph& g) { g.ops[0].phase = static_cast<Phase>(9); }), "phase"));
  CHECK(has(changed([](Graph& g) { g.ops[0].origin = -7; }), "origin"));
  CHECK(has(changed([](Graph& g) { g.scopes[2].parent = 2; }), "parent"));
  CHECK(has(changed([](Graph& g) { g.scopes[1].shares = {1, -1}; }), "share"));
  CHECK(has(changed([](Graph& g) { g.scopes[1].kind = ScopeKind::kRoot; }), "root"));
  CHECK(has(changed([](Graph& g) { g.scopes.clear(); }), "scopes"));
  CHECK(has(changed([](Graph& g) { g.variables[0].tensor = -1; }), "variable"));
  CHECK(has(changed([](Graph& g) { g.variables[0].init.a = 1.0 / 0.0; }), "finite"));
  CHECK(has(changed([](Graph& g) { g.training.loss = 5000; }), "loss"));
  CHECK(has(changed([](Graph& g) { g.training.accumulation = 0; }), "accumulation"));
  CHECK(has(changed([](Graph& g) { g.training.optimizer.learning_rate = 0.0 / 0.0; }), "learning rate"));
  CHECK(has(changed([](Graph& g) { g.inputs.push_back(99); }), "input"));
  CHECK(has(changed([](Graph& g) { g.outputs.push_back({"x", -1}); }), "output"));
  // Well-formed, but not a program: found by verify and verify_ops.
  CHECK(changed([](Graph& g) { std::swap(g.ops[0], g.ops[1]); }) != "");
  CHECK(changed([](Graph& g) { g.tensors[g.ops[2].outputs[0]].dims = {8, 4, 17}; }) != "");
}

TEST_CASE("a small file cannot grow into a large graph") {
  // A thousand tensors share one name of a megabyte: two times the file's size is read, then it stops.
  flatbuffers::FlatBufferBuilder b;
  const auto name = b.CreateString(std::string(1 << 20, 'a'));
  std::vector<flatbuffers::Offset<fb::Tensor>> tensors(1000, fb::CreateTensor(b, name));
  std::vector<flatbuffers::Offset<fb::Scope>> scopes(1, fb::CreateScope(b));
  const auto tensors_at = b.CreateVector(tensors);
  const auto scopes_at = b.CreateVector(scopes);
  fb::GraphBuilder g(b);
  g.add_version(1);
  g.add_tensors(tensors_at);
  g.add_scopes(scopes_at);
  fb::FinishGraphBuffer(b, g.Finish());
  CHECK(has(error_of({b.GetBufferPointer(), b.GetBufferPointer() + b.GetSize()}), "over and over"));
}

TEST_CASE("an op with more attributes than any has is refused") {
  Graph graph = sample_graph();
  for (int k = 0; k < 200; ++k) graph.ops[0].attrs["extra" + std::to_string(k)] = int64_t{k};
  CHECK(error_of(serialize(graph)).find("attributes, no op has so many") != std::string::npos);
}

TEST_CASE("UTF-8") {
  for (const char* good :
       {"", "abc", "gr\xc3\xbc\xc3\x9f", "\xe2\x82\xac", "\xf0\x9f\x90\x8b", "\xed\x9f\xbf", "\xf4\x8f\xbf\xbf"})
    CHECK(is_utf8(good));
  for (const char* bad : {"\x80", "\xc0\xaf", "\xc3", "\xe0\x80\x80", "\xed\xa0\x80", "\xf0\x80\x80\x80",
                          "\xf4\x90\x80\x80", "\xf5\x80\x80\x80", "a\xff"}) {
    CHECK_FALSE(is_utf8(bad));
  }
  CHECK(is_name("block.3/w"));
  CHECK_FALSE(is_name("a\tb"));
}

}  // namespace whale
