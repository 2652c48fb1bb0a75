// Elements of an index that name nothing: found before a step in what the caller gives, during it in what the graph
// computes; the step has not happened, and the session goes on. The same for every plan.
#include "data/indices.h"

#include <doctest/doctest.h>

#include <functional>
#include <limits>

#include "caught.h"
#include "schema/graph_file.h"
#include "trained.h"

namespace whale {
namespace {

constexpr int64_t kBatch = 8, kWords = 12, kClasses = 6, kTime = 3;

// Looks up `ids` (an input, or the sum of two) in a table and classifies; cut as `strategy` says.
struct Case {
  std::string devices, strategy;
  int64_t accumulation = 1;
  bool sparse_updates = false;
  OpCode lookup = OpCode::k_embedding;
};

const std::vector<Case> kCases = {
    {"ref:1", ""},
    {"cpu:1", ""},
    {"ref:3", "replica(3, shares=[3,2,1])"},
    {"cpu:2", "replica(2)", 2},
    {"ref:2", "split(2)"},
    {"ref:4", "replica(2) > split(2)", 2},
    {"ref:2", "pipeline(2, micro_batches=4)"},
    {"ref:2", "replica(2)", 2, true},
    {"cpu:2", "split(2)", 1, true},
    {"ref:2", "replica(2)", 1, false, OpCode::k_embedding_bag},
    {"cpu:1", "", 1, true, OpCode::k_embedding_bag},
    {"ref:2", "replica(2)", 1, false, OpCode::k_gather},
    {"cpu:2", "replica(2)", 1, false, OpCode::k_one_hot},
    {"ref:2", "replica(2)", 2, false, OpCode::k_moe_combine},
    {"cpu:2", "split(2)", 1, false, OpCode::k_moe_combine},
    {"cpu:2", "replica(2)", 2, false, OpCode::k_moe_dispatch},
    {"ref:2", "split(2)", 1, false, OpCode::k_moe_dispatch},
};

// The words are the places of 3 experts: combine reads those of the ids, dispatch says which ones are named.
TensorId look_by_experts(small::Model& m, OpCode lookup, TensorId table, TensorId ids) {
  const auto to = [&](OpCode op, TensorId x, Dims shape) { return m.op(op, {x}, {{"shape", std::move(shape)}}); };
  const TensorId slots = to(OpCode::k_reshape, ids, {kBatch, kTime, 1});
  if (lookup == OpCode::k_moe_combine) {
    const TensorId places = to(OpCode::k_broadcast_to, to(OpCode::k_reshape, table, {3, 1, 4, 4}), {3, kBatch, 4, 4});
    return m.op(OpCode::k_reduce_sum, {m.op(lookup, {places, slots}, {}, "look")}, {{"axes", Dims{1}}});
  }
  const TensorId ones = m.op(OpCode::k_fill, {}, {{"shape", Dims{kBatch, kTime, 1}}, {"value", 1.0}});
  const TensorId named = m.op(lookup, {ones, slots}, {{"experts", int64_t{3}}, {"capacity", int64_t{4}}}, "look");
  const TensorId rows = m.op(OpCode::k_transpose, {named}, {{"perm", Dims{1, 0, 2, 3}}});
  return m.op(OpCode::k_matmul, {to(OpCode::k_reshape, rows, {kBatch, kWords}), table});
}

Graph model(const Case& c, bool computed) {
  small::Model m;
  TensorId ids = m.input("ids", {kBatch, kTime}, DType::kI32);
  if (computed) ids = m.op(OpCode::k_add, {ids, m.input("more", {kBatch, kTime}, DType::kI32)}, {}, "sum");
  const TensorId labels = m.input("labels", {kBatch}, DType::kI32);
  const TensorId table = m.variable("table", {kWords, 4});
  TensorId h;
  if (def(c.lookup).index.or_none)
    h = look_by_experts(m, c.lookup, table, ids);
  else if (c.lookup == OpCode::k_one_hot)
    h = m.op(OpCode::k_matmul, {m.op(c.lookup, {ids}, {{"depth", kWords}}, "look"), table});
  else
    h = m.op(c.lookup, {table, ids}, {}, "look");
  if (c.lookup == OpCode::k_embedding_bag)
    h = m.op(OpCode::k_reshape, {h}, {{"shape", std::vector<int64_t>{kBatch, 4}}});
  else if (!def(c.lookup).index.or_none)
    h = m.op(OpCode::k_reduce_sum, {h}, {{"axes", std::vector<int64_t>{1}}});
  const TensorId logits = m.op(OpCode::k_matmul, {h, m.variable("w", {4, kClasses})});
  m.g.outputs.push_back({"logits", logits});
  const TensorId loss = m.op(OpCode::k_cross_entropy, {logits, labels}, {}, "loss_of_rows");
  m.minimize(m.op(OpCode::k_reduce_mean, {loss}), OptimizerKind::kSgd);
  m.g.training.optimizer.sparse_updates = c.sparse_updates;
  m.g.training.accumulation = c.accumulation;
  return m.g;
}

struct Job {
  std::vector<int32_t> ids, more, labels;
  bool computed;
  Session session;
  Job(const Case& c, bool computed_)
      : ids(kBatch * kTime),
        more(kBatch * kTime),
        labels(kBatch),
        computed(computed_),
        session(std::make_shared<const Plan>(plan(c, computed_)), std::make_shared<Backends>(small::backends_folder()),
                {}) {
    for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int32_t>(i * 5 % (kWords - 2)), more[i] = 1;
    for (size_t i = 0; i < labels.size(); ++i) labels[i] = static_cast<int32_t>(i % kClasses);
    labels[3] = -100;
  }
  static Plan plan(const Case& c, bool computed) {
    CompileOptions options;
    options.strategy = c.strategy;
    // As from a file: what is checked is part of the plan.
    const auto bytes = serialize(compile(model(c, computed), parse_devices(c.devices, {0, 1}), options));
    return deserialize(bytes.data(), bytes.size());
  }
  std::vector<NamedHost> inputs() {
    std::vector<NamedHost> all{{"ids", {DType::kI32, {kBatch, kTime}, ids.data()}},
                               {"labels", {DType::kI32, {kBatch}, labels.data()}}};
    if (computed) all.push_back({"more", {DType::kI32, {kBatch, kTime}, more.data()}});
    return all;
  }
  float step() {
    float loss = -1;
    session.step(inputs(), {{"loss", {DType::kF32, {}, &loss}}}).wait();
    return loss;
  }
  void eval(const char* output) {
    float loss = -1;
    std::vector<float> logits(kBatch * kClasses);
    const HostTensor to = output == std::string("loss") ? HostTensor{DType::kF32, {}, &loss}
                                                        : HostTensor{DType::kF32, {kBatch, kClasses}, logits.data()};
    session.eval(inputs(), {{output, to}}).wait();
  }
  std::vector<float> all() {
    std::vector<float> values;
    for (const VariableInfo& v : session.variables()) {
      std::vector<float> one(static_cast<size_t>(element_count(v.dims)));
      session.read(v.name, {v.dtype, v.dims, one.data()});
      values.insert(values.end(), one.begin(), one.end());
    }
    return values;
  }
};

TEST_CASE("indices: an input out of range is an error before the step, under every plan") {
  for (const Case& c : kCases) {
    CAPTURE(c.devices);
    CAPTURE(c.strategy);
    CAPTURE(static_cast<int>(c.lookup));
    Job job(c, false), good(c, false);
    CHECK(job.step() == good.step());
    const auto before = job.all();
    const bool or_none = def(c.lookup).index.or_none;
    for (const int32_t bad : {or_none ? -2 : -1, int32_t{kWords}, int32_t{1 << 30}, INT32_MIN}) {
      const int32_t kept = std::exchange(job.ids[5 * kTime + 2], bad);  // a sample in the middle: one device has it
      const std::string text = message_of([&] { job.step(); }, {Code::kInvalidArgument});
      CHECK_MESSAGE(has(text, fmt::format("input 'ids' has the value {} at [5, 2]", bad)), text);
      CHECK(has(text, or_none ? "may be 0 to 11 or -1." : "may be 0 to 11."));
      CHECK(has(message_of([&] { job.eval("logits"); }, {Code::kInvalidArgument}), "at [5, 2]"));
      job.ids[5 * kTime + 2] = kept;
    }
    const int32_t kept = std::exchange(job.labels[7], int32_t{kClasses});
    const std::string text = message_of([&] { job.step(); }, {Code::kInvalidArgument});
    CHECK_MESSAGE(has(text, "input 'labels' has the value 6 at [7]; it is an index and may be 0 to 5 or -100"), text);
    job.eval("logits");  // does not read them
    CHECK(has(message_of([&] { job.eval("loss"); }, {Code::kInvalidArgument}), "'labels'"));
    job.labels[7] = kept;
    CHECK(job.all() == before);
    CHECK(job.session.iteration() == 1);
    CHECK(job.step() == good.step());
    CHECK(job.all() == good.all());
  }
}

TEST_CASE("indices: one that the graph computes out of range is an error of the step, under every plan") {
  for (const Case& c : kCases) {
    CAPTURE(c.devices);
    CAPTURE(c.strategy);
    CAPTURE(static_cast<int>(c.lookup));
    Job job(c, true), good(c, true);
    CHECK(job.step() == good.step());
    const auto before = job.all();
    for (const size_t sample : {size_t{0}, size_t{5}, size_t{7}})
      for (const int32_t bad : {int32_t{-20}, int32_t{kWords}}) {
        const int32_t kept = std::exchange(job.more[sample * kTime + 1], bad);
        try {
          job.step();
          FAIL("no error");
        } catch (const Error& e) {
          CHECK(e.code() == Code::kOutOfRange);
          const std::string where =
              fmt::format("op '{}' ({}) on device {}: ", e.where().op, def(c.lookup).name, e.where().device);
          CHECK_MESSAGE(has(e.message(), where), e.message());
          CHECK(e.damage() == Damage::kStep);
          CHECK_MESSAGE(e.where().op.find("look") != std::string::npos, e.where().op);
          CHECK(has(e.message(), fmt::format("an index of {}", bad + job.ids[sample * kTime + 1])));
          CHECK(has(e.message(), "may be 0 to 11"));
        }
        CHECK(message_of([&] { job.eval("logits"); }, {Code::kOutOfRange}) != "");
        job.more[sample * kTime + 1] = kept;
        CHECK(job.all() == before);
        CHECK(job.session.iteration() == 1);
      }
    CHECK(job.step() == good.step());
    CHECK(job.all() == good.all());
  }
}

// Nothing that the update needs depends on the lookup: without an order between them it could come first.
TEST_CASE("indices: an update waits for checks that it does not depend on") {
  for (const char* devices : {"ref:1", "ref:3", "cpu:2"}) {
    small::Model m;
    const TensorId x = m.input("x", {kBatch, 4}), ids = m.input("ids", {kBatch}, DType::kI32);
    const TensorId w = m.variable("w", {4, 4}), frozen = m.input("rows", {5, 4}, DType::kF32, -1);
    const TensorId y = m.op(OpCode::k_matmul, {x, w});
    m.minimize(m.op(OpCode::k_reduce_mean, {y}), OptimizerKind::kSgd);
    const TensorId computed = m.op(OpCode::k_add, {ids, ids});
    m.g.outputs.push_back({"aside", m.op(OpCode::k_gather, {frozen, computed}, {}, "aside_of")});
    Session session(std::make_shared<const Plan>(compile(m.g, parse_devices(devices, {0, 1}), {})),
                    std::make_shared<Backends>(small::backends_folder()), {});
    std::vector<float> in(kBatch * 4, 0.5f), rows(20, 1.0f), before(16), after(16);
    std::vector<int32_t> at(kBatch, 1);
    float loss = 0;
    const auto step = [&] {
      session
          .step({{"x", {DType::kF32, {kBatch, 4}, in.data()}},
                 {"ids", {DType::kI32, {kBatch}, at.data()}},
                 {"rows", {DType::kF32, {5, 4}, rows.data()}}},
                {{"loss", {DType::kF32, {}, &loss}}})
          .wait();
    };
    step();
    session.read("w", {DType::kF32, {4, 4}, before.data()});
    at[6] = 3;
    for (int i = 0; i < 20; ++i) CHECK(message_of(step, {Code::kOutOfRange}) != "");
    session.read("w", {DType::kF32, {4, 4}, after.data()});
    CHECK(after == before);
    CHECK(session.updates() == 1);
    at[6] = 2;
    step();
    CHECK(session.updates() == 2);
  }
}

// The first stage computes its index from the whole batch, behind all micro-batches and after much work; the second one
// could update meanwhile.
TEST_CASE("indices: an update waits for the checks of other devices") {
  constexpr int64_t kSlow = 160;
  const Attrs all{{"axes", std::vector<int64_t>{0, 1}}};
  small::Model m;
  const TensorId x = m.input("x", {kBatch, 4}), ids = m.input("ids", {kBatch}, DType::kI32, -1);
  const TensorId square = m.input("square", {kSlow, kSlow}, DType::kF32, -1);
  const TensorId rows = m.input("rows", {5, 4}, DType::kF32, -1);
  const ScopeId pipeline = m.enter(ScopeKind::kPipeline, 2);
  m.g.scopes.back().micro_batches = 2;
  m.enter(ScopeKind::kStage, 1);
  const TensorId h = m.op(OpCode::k_matmul, {x, m.variable("w1", {4, 4})});
  TensorId work = m.op(OpCode::k_mul, {square, m.op(OpCode::k_reduce_sum, {h}, all)});
  for (int i = 0; i < 12; ++i) work = m.op(OpCode::k_matmul, {work, square});
  const TensorId none =
      m.op(OpCode::k_cast, {m.op(OpCode::k_reduce_sum, {work}, all)}, {{"dtype", std::string("i32")}});
  m.g.outputs.push_back({"aside", m.op(OpCode::k_gather, {rows, m.op(OpCode::k_add, {ids, none})}, {}, "aside_of")});
  m.scope = pipeline;
  m.enter(ScopeKind::kStage, 1);
  m.minimize(m.op(OpCode::k_reduce_mean, {m.op(OpCode::k_matmul, {h, m.variable("w2", {4, 4})})}), OptimizerKind::kSgd);
  Session session(std::make_shared<const Plan>(compile(m.g, parse_devices("ref:2"), {})), std::make_shared<Backends>(),
                  {});
  std::vector<float> in(kBatch * 4, 0.5f), zeros(kSlow * kSlow, 0.0f), table(20, 1.0f), before(16), after(16);
  std::vector<int32_t> at(kBatch, 1);
  at[6] = 5;
  float loss = 0;
  session.read("w2", {DType::kF32, {4, 4}, before.data()});
  try {
    session
        .step({{"x", {DType::kF32, {kBatch, 4}, in.data()}},
               {"ids", {DType::kI32, {kBatch}, at.data()}},
               {"square", {DType::kF32, {kSlow, kSlow}, zeros.data()}},
               {"rows", {DType::kF32, {5, 4}, table.data()}}},
              {{"loss", {DType::kF32, {}, &loss}}})
        .wait();
    FAIL("no error");
  } catch (const Error& e) {
    CHECK(e.damage() == Damage::kStep);
    CHECK_MESSAGE(has(e.message(), "an index of 5 at [6]"), e.message());
  }
  session.read("w2", {DType::kF32, {4, 4}, after.data()});
  CHECK(after == before);
}

// They depend on nothing behind them and could be written before the labels are looked at.
TEST_CASE("indices: running statistics wait for checks that come later in the model") {
  for (const char* devices : {"ref:1", "ref:2", "cpu:1"}) {
    CAPTURE(devices);
    small::Model m;
    const TensorId x = m.input("x", {kBatch, 4}), y = m.input("y", {kBatch}, DType::kI32);
    const TensorId more = m.input("more", {kBatch}, DType::kI32);
    const TensorId h =
        m.op(OpCode::k_batch_norm, {x, m.variable("gamma", {4}), m.variable("beta", {4}),
                                    m.variable("mean", {4}, Role::kBuffer), m.variable("var", {4}, Role::kBuffer)});
    const TensorId logits = m.op(OpCode::k_matmul, {h, m.variable("w", {4, 3})});
    m.minimize(m.op(OpCode::k_reduce_mean, {m.op(OpCode::k_cross_entropy, {logits, m.op(OpCode::k_add, {y, more})})}),
               OptimizerKind::kSgd);
    Session session(std::make_shared<const Plan>(compile(m.g, parse_devices(devices, {0}), {})),
                    std::make_shared<Backends>(small::backends_folder()), {});
    std::vector<float> in(kBatch * 4), before(4), after(4);
    for (size_t i = 0; i < in.size(); ++i) in[i] = static_cast<float>(i % 7);
    std::vector<int32_t> labels(kBatch, 1), shift(kBatch, 0);
    shift[6] = 2;
    float loss = 0;
    session.read("mean", {DType::kF32, {4}, before.data()});
    try {
      session
          .step({{"x", {DType::kF32, {kBatch, 4}, in.data()}},
                 {"y", {DType::kI32, {kBatch}, labels.data()}},
                 {"more", {DType::kI32, {kBatch}, shift.data()}}},
                {{"loss", {DType::kF32, {}, &loss}}})
          .wait();
      FAIL("no error");
    } catch (const Error& e) {
      CHECK_MESSAGE(e.damage() == Damage::kStep, e.message());
    }
    session.read("mean", {DType::kF32, {4}, after.data()});
    CHECK(after == before);
  }
}

// A gate of 3 experts with 2 places, and what its slots become before they reach dispatch and combine.
Graph gated(int64_t experts, int64_t capacity, const std::function<TensorId(small::Model&, TensorId)>& change = {}) {
  using enum OpCode;
  small::Model m;
  const TensorId x = m.input("x", {kBatch, kTime, 4});
  const TensorId logits = m.op(k_matmul, {x, m.variable("router", {4, 3})});
  const Op gate =
      m.g.op(append_op(m.g, k_moe_gate, {logits}, {{"k", int64_t{1}}, {"capacity", int64_t{2}}}, m.scope, "gate"));
  const TensorId slots = change ? change(m, gate.outputs[0]) : gate.outputs[0];
  TensorId h = m.op(k_moe_dispatch, {x, slots}, {{"experts", experts}, {"capacity", capacity}}, "there");
  h = m.op(k_mul, {h, m.variable("scale", {experts, 1, 1, 4})});
  h = m.op(k_moe_combine, {h, slots, gate.outputs[1]}, {}, "back");
  m.minimize(m.op(k_reduce_mean, {h}), OptimizerKind::kSgd);
  return m.g;
}

// Of all instructions that have such a limit, those that check.
std::vector<std::string> checks_of(const Graph& graph, int64_t limit) {
  std::vector<std::string> names;
  const Plan plan = compile(graph, parse_devices("null:1", {0}), {});
  for (const Program& p : plan.entries.at(0).programs)
    for (const Segment& segment : p.segments)
      for (const Instruction& i : segment.instructions)
        if (const auto* k = i.kernel(); k != nullptr && attr_int(k->attrs, kIndexLimit) > 0) {
          CHECK(attr_int(k->attrs, kIndexLimit) == limit);
          names.push_back(i.name);
        }
  return names;
}

TEST_CASE(
    "indices: slots of a gate of the same places need no check, of others are an error, computed ones are checked") {
  using enum OpCode;
  const auto moved = [](small::Model& m, TensorId slot) {
    const TensorId flat = m.op(k_reshape, {slot}, {{"shape", Dims{kBatch * kTime}}});
    return m.op(k_reshape, {flat}, {{"shape", Dims{kBatch, kTime, 1}}});
  };
  const auto added = [](small::Model& m, TensorId slot) {
    return m.op(k_add, {slot, m.op(k_fill, {}, {{"shape", Dims{}}, {"dtype", std::string("i32")}, {"value", 1.0}})});
  };
  CHECK(checks_of(gated(3, 2), 0).empty());
  CHECK(checks_of(gated(3, 2, moved), 0).empty());
  CHECK(checks_of(gated(3, 2, added), 6) == std::vector<std::string>{"there", "back"});  // the gradients' are theirs
  CHECK(checks_of(gated(4, 2, added), 8) == std::vector<std::string>{"there", "back"});

  const std::vector<std::tuple<int64_t, int64_t, const char*>> others{{3, 4, "0 to 11 or -1 (places of [3, 4])"},
                                                                      {4, 2, "0 to 7 or -1 (places of [4, 2])"},
                                                                      {2, 3, "0 to 5 or -1 (places of [2, 3])"}};
  for (const auto& [experts, capacity, wanted] : others)
    for (const bool by_reshape : {false, true}) {
      const Graph graph = by_reshape ? gated(experts, capacity, moved) : gated(experts, capacity);
      const std::string text =
          message_of([&] { compile(graph, parse_devices("null:1", {0}), {}); }, {Code::kInvalidArgument});
      for (const std::string& part :
           {std::string("moe_dispatch: operand 'slot' has indices 0 to 5 or -1 (places of [3, 2]) of op 'gate' "
                        "(moe_gate), expected "),
            std::string(wanted), std::string("give both the same sizes")})
        CHECK_MESSAGE(has(text, part), text);
    }
}

TEST_CASE("indices: a graph file written before there were limits can be read") {
  Graph old = model(kCases[0], true);
  const std::string text = print(old);
  for (Op& op : old.ops) op.attrs.erase(kIndexLimit);
  const auto bytes = serialize(old);
  CHECK(print(read_graph(bytes.data(), bytes.size())) == text);
}

TEST_CASE("indices: ranges, positions, and values that are ignored") {
  std::vector<int64_t> x(5000, 3);
  const auto find = [&](IndexRange range) {
    const auto bad = first_outside(DType::kI64, x.data(), static_cast<int64_t>(x.size()), range);
    return bad ? bad->position : -1;
  };
  CHECK(find({4, {}}) == -1);
  CHECK(find({3, {}}) == 0);
  CHECK(find({3, 3}) == -1);
  CHECK(find({0, {}}) == 0);
  x[4321] = -100;
  CHECK(find({4, {}}) == 4321);
  CHECK(find({4, -100}) == -1);
  x[4999] = INT64_MAX;
  CHECK(find({4, -100}) == 4999);
  x[0] = 0;
  CHECK(find({0, {}}) == 0);
  // Every value against every range: the fast scan says what the definition says.
  const auto same = [](auto zero) {
    using T = decltype(zero);
    constexpr T kLeast = std::numeric_limits<T>::min(), kMost = std::numeric_limits<T>::max();
    const std::vector<T> values = {kLeast, kLeast + 1, -101, -100, -1, 0, 1, 99, 100, 101, kMost - 1, kMost};
    const std::vector<int64_t> limits = {INT64_MIN, -1, 0, 1, 100, kMost - 1, kMost, int64_t{kMost} / 2 + 1, INT64_MAX};
    for (const int64_t limit : limits)
      for (const T value : values)
        for (size_t k = 0; k <= values.size() + 2; ++k) {
          const int64_t beyond[] = {INT64_MIN + 7, int64_t{1} << 40};  // no 32-bit element is that
          const auto ignored = k == 0               ? std::optional<int64_t>()
                               : k <= values.size() ? std::optional<int64_t>(values[k - 1])
                                                    : beyond[k - values.size() - 1];
          const IndexRange range{limit, ignored};
          const auto bad = first_outside(sizeof(T) == 8 ? DType::kI64 : DType::kI32, &value, 1, range);
          CHECK(bad.has_value() == !range.permits(value));
        }
  };
  same(int32_t{});
  same(int64_t{});
  CHECK(position_text({2, 3, 4}, 23) == "[1, 2, 3]");
  CHECK(to_string(IndexRange{10, -1}) == "0 to 9 or -1");
}

}  // namespace
}  // namespace whale
