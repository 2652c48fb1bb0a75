// Updates of the rows of tables (Optimizer::sparse_updates), split weights (Optimizer::split_master_weights), and the
// ops that recommendation models need: kernels against the reference, whole training against dense updates.
#include <doctest/doctest.h>
#include <unistd.h>

#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "base/philox.h"
#include "cluster/devices.h"
#include "compile/compile.h"
#include "cpu_compare.h"
#include "session/session.h"
#include "small_models.h"
#include "unit/caught.h"

namespace whale {
namespace {

using enum OpCode;
using test::bf16, test::compare, test::f32, test::Input, test::run_op;

Input ids_of(DType dtype, Dims dims, int64_t below, uint64_t seed = 5) {  // -1 and `below` lie outside
  Input x{dtype, std::move(dims), {}};
  const RandomStream random(3, seed, 0);
  for (int64_t i = 0; i < element_count(x.dims); ++i)
    x.values.push_back(static_cast<double>(random.word(static_cast<uint64_t>(i)) % static_cast<uint32_t>(below + 2)) -
                       1);
  return x;
}
Input values(DType dtype, Dims dims, std::vector<double> list) { return {dtype, std::move(dims), std::move(list)}; }
Input noise(DType dtype, Dims dims, uint64_t seed) { return {dtype, std::move(dims), {}, seed}; }

TEST_CASE("row updates: cpu kernels of bags and pairs agree with the reference") {
  for (const auto type : {f32, bf16}) {
    const double tolerance = type == bf16 ? 1e-2 : 5e-6;
    for (const char* mode : {"sum", "mean"}) {
      const Attrs attrs{{"mode", std::string(mode)}};
      for (const auto& [bag, width] : {std::pair<int64_t, int64_t>{1, 64}, {3, 37}, {5, 1500}, {0, 4}}) {
        for (const DType index : {DType::kI32, DType::kI64}) {
          const Input ids = ids_of(index, {4, 9, bag}, 40);
          compare(k_embedding_bag, attrs, {type({40, width}), ids}, tolerance);
          Attrs grad = attrs;
          grad["rows"] = int64_t{40};
          compare(k_embedding_bag_grad, grad, {type({4, 9, width}), ids}, tolerance);
        }
      }
    }
    for (const auto& [n, width] : {std::pair<int, int64_t>{2, 1}, {5, 19}, {27, 64}, {40, 33}, {256, 3}}) {
      std::vector<Input> x(static_cast<size_t>(n), type({3, 50, width}));
      compare(k_pairwise_dot, {}, x, tolerance);
      x.insert(x.begin(), type({3, 50, int64_t{n} * (n - 1) / 2}));
      compare(k_pairwise_dot_grad, {}, x, tolerance);
    }
  }
}

TEST_CASE("row updates: cpu kernels agree with the reference") {
  const Input lr = values(DType::kF32, {}, {0.1}), clip = values(DType::kF32, {}, {0.5}),
              steps = values(DType::kI64, {}, {3});
  const auto positive = [](Dims dims) {
    Input x = values(DType::kF32, dims, {});
    x.values.assign(static_cast<size_t>(element_count(dims)), 0.25);
    return x;
  };
  for (const auto dy : {f32, bf16}) {
    for (const bool mean : {false, true}) {
      const Attrs attrs{{"weight_decay", 0.1}, {"mean", mean}, {"decays", std::vector<int64_t>{1, 0}}};
      for (const auto& [rows, width] : {std::pair<int64_t, int64_t>{30, 64}, {700, 5}, {9, 1030}}) {
        const Input a = ids_of(DType::kI32, {20, 3}, rows, 1), b = ids_of(DType::kI64, {4, 100}, rows, 2);
        const Input da = dy({20, width}), db = dy({4, 100, width}), p = f32({rows, width}), v = positive({rows, width});
        compare(k_sgd_rows, attrs, {lr, clip, p, a, da, p, b, db}, 1e-6);
        compare(k_adagrad_rows, attrs, {lr, {}, p, v, a, da, p, v, b, db}, 1e-6);
        for (const bool decoupled : {false, true}) {
          Attrs adam = attrs;
          adam["decoupled"] = decoupled;
          compare(k_adam_rows, adam, {lr, steps, clip, p, p, v, a, da, p, p, v, b, db}, 2e-6);
        }
      }
    }
  }
}

// Weights as one list of fp32 bits, and split.
struct Split {
  Input high, low;
};
Split split(const Input& p) {
  Split s{values(DType::kBF16, p.dims, {}), values(DType::kU16, p.dims, {})};
  for (const double v : p.values) {
    const auto bits = std::bit_cast<uint32_t>(static_cast<float>(v));
    s.high.values.push_back(static_cast<double>(std::bit_cast<float>(bits & 0xFFFF0000u)));
    s.low.values.push_back(bits & 0xFFFFu);
  }
  return s;
}
std::vector<double> join(const std::vector<std::vector<double>>& halves) {
  std::vector<double> all;
  for (size_t i = 0; i < halves[0].size(); ++i) {
    const auto high = std::bit_cast<uint32_t>(static_cast<float>(halves[0][i]));
    all.push_back(static_cast<double>(std::bit_cast<float>(high | static_cast<uint32_t>(halves[1][i]))));
  }
  return all;
}

TEST_CASE("split weights: bit-equal to fp32 descent, whole and by rows, over steps of random gradients") {
  const Input lr = values(DType::kF32, {}, {0.03});
  const Attrs decay{{"weight_decay", 0.01}};
  for (const DeviceKind kind : {DeviceKind::kRef, DeviceKind::kCpu}) {
    const int64_t rows = 50, width = 37;
    Input plain = values(DType::kF32, {rows, width}, {}), by_rows;
    for (int64_t i = 0; i < rows * width; ++i) plain.values.push_back(static_cast<float>(std::sin(i * 0.7)) / 3);
    by_rows = plain;
    Split s = split(plain), r = split(plain);
    int64_t low_bits = 0;
    for (uint64_t step = 0; step < 20; ++step) {
      const Input g = noise(DType::kF32, {rows, width}, 100 + step);
      plain.values = run_op(kind, 1, k_sgd, decay, {lr, {}, plain, g})[0];
      const auto halves = run_op(kind, 1, k_split_sgd, decay, {lr, {}, s.high, s.low, g});
      s.high.values = halves[0], s.low.values = halves[1];
      CHECK(join(halves) == plain.values);
      for (const double low : halves[1]) low_bits += low != 0;

      const Input ids = ids_of(DType::kI32, {64}, rows, step + 1), dy = noise(DType::kF32, {64, width}, 300 + step);
      by_rows.values = run_op(kind, 1, k_sgd_rows, decay, {lr, {}, by_rows, ids, dy})[0];
      const auto row_halves = run_op(kind, 1, k_split_sgd_rows, decay, {lr, {}, r.high, r.low, ids, dy});
      r.high.values = row_halves[0], r.low.values = row_halves[1];
      CHECK(join(row_halves) == by_rows.values);
    }
    CHECK(low_bits > 20 * rows * width / 2);  // the low halves carry something
    CHECK(s.low.dims == plain.dims);
    CHECK(size_of(DType::kBF16) + size_of(DType::kU16) == size_of(DType::kF32));
  }
}

TEST_CASE("row updates: without decay, rows give the bits of the dense gradient") {
  const Input lr = values(DType::kF32, {}, {0.1}), ids = ids_of(DType::kI32, {200}, 60), p = f32({60, 33});
  for (const DeviceKind kind : {DeviceKind::kRef, DeviceKind::kCpu}) {
    for (const DType type : {DType::kF32, DType::kBF16}) {
      const Input dy = noise(type, {200, 33}, 9);
      const Attrs attrs{{"rows", int64_t{60}}, {"out_dtype", std::string("f32")}};
      // The reference sums in float64 and rounds a dense gradient once more.
      const auto dense = run_op(kind, 1, k_embedding_grad, attrs, {dy, ids})[0];
      const auto want = run_op(kind, 1, k_sgd, {}, {lr, {}, p, values(DType::kF32, {60, 33}, dense)})[0];
      const auto got = run_op(kind, 2 - (kind == DeviceKind::kRef), k_sgd_rows, {}, {lr, {}, p, ids, dy})[0];
      if (kind == DeviceKind::kCpu) CHECK(got == want);
      for (size_t i = 0; i < got.size(); ++i) CHECK(got[i] == doctest::Approx(want[i]).epsilon(1e-6));
    }
  }
}

// ---- training ---------------------------------------------------------------------------------------------------
constexpr int64_t kRowCount = 40, kWidth = 8;

enum class Dense { kNo, kHead };

// A table looked up by bags and, once more, one by one; a second table; a linear layer.
Graph recommender(const Optimizer& optimizer, Precision precision = Precision::kFloat32, Dense dense = Dense::kNo,
                  int64_t batch = 6) {
  small::Model m;
  m.g.name = "recommender";
  const TensorId bags = m.input("bags", {batch, 3}, DType::kI32), one = m.input("one", {batch}, DType::kI32),
                 labels = m.input("labels", {batch}, DType::kI32);
  const TensorId items = m.variable("items", {kRowCount, kWidth}), users = m.variable("users", {kRowCount, kWidth});
  const TensorId w = m.variable("w", {kWidth, kRowCount});
  const TensorId a = m.op(k_embedding_bag, {items, bags}, {{"mode", std::string("mean")}}),
                 b = m.op(k_embedding, {items, one}), c = m.op(k_embedding, {users, one});
  const TensorId pairs = m.op(k_pairwise_dot, {a, b, c});
  const TensorId wide = m.op(k_concat, {m.op(k_add, {m.op(k_add, {a, b}), c}), pairs}, {{"axis", int64_t{1}}});
  const TensorId h = m.op(k_tanh, {m.op(k_matmul, {wide, m.variable("mix", {kWidth + 3, kWidth})})});
  const TensorId logits = dense == Dense::kHead ? m.op(k_matmul, {h, items}, {{"transpose_b", true}}, "head")
                                                : m.op(k_matmul, {h, w}, {}, "head");
  m.minimize(m.op(k_reduce_mean, {m.op(k_cross_entropy, {logits, labels})}), optimizer.kind);
  m.g.training.optimizer = optimizer;
  m.g.training.precision = precision;
  return m.g;
}

Optimizer optimizer_of(OptimizerKind kind, bool sparse_updates, bool split = false) {
  Optimizer o;
  o.kind = kind, o.sparse_updates = sparse_updates, o.split_master_weights = split, o.learning_rate = 0.5;
  return o;
}

std::shared_ptr<Backends> backends() {
  const char* folder = std::getenv("WHALE_LIBRARY_DIR");
  return std::make_shared<Backends>(std::string(folder ? folder : ""));
}

struct Trainer {
  Session session;
  explicit Trainer(const Graph& graph, const std::string& devices = "ref:1", const std::string& strategy = "",
                   int zero = 0)
      : session(std::make_shared<const Plan>(compile(graph, parse_devices(devices), options(strategy, zero))),
                backends()) {}
  static CompileOptions options(const std::string& strategy, int zero) {
    CompileOptions o;
    o.strategy = strategy;
    o.zero = zero;
    return o;
  }
  // Only even rows are ever looked up.
  float step(int64_t number, int64_t batch = 6) {
    std::vector<int32_t> bags, one, labels;
    const auto id = [&](int64_t k) { return static_cast<int32_t>((k * 7 + number * 11) % (kRowCount / 4) * 2); };
    for (int64_t i = 0; i < 3 * batch; ++i) bags.push_back(id(i));
    for (int64_t i = 0; i < batch; ++i) one.push_back(id(i * i)), labels.push_back(id(i + 3));
    float loss = 0;
    session
        .step({{"bags", {DType::kI32, {batch, 3}, bags.data()}},
               {"one", {DType::kI32, {batch}, one.data()}},
               {"labels", {DType::kI32, {batch}, labels.data()}}},
              {{"loss", {DType::kF32, {}, &loss}}})
        .wait();
    return loss;
  }
  std::vector<char> bytes(const std::string& name) {
    const TensorType type = session.variable_type(name);
    std::vector<char> all(static_cast<size_t>(element_count(type.dims) * size_of(type.dtype)));
    session.read(name, {type.dtype, type.dims, all.data()});
    return all;
  }
  std::vector<float> floats(const std::string& name) {
    const std::vector<char> raw = bytes(name);
    std::vector<float> all(raw.size() / 4);
    std::memcpy(all.data(), raw.data(), raw.size());
    return all;
  }
};

double worst(const std::vector<float>& a, const std::vector<float>& b) {
  double most = a.size() == b.size() ? 0 : 1e30;
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i)
    most = std::max(most, std::abs(static_cast<double>(a[i]) - b[i]));
  return most;
}

TEST_CASE("sparse_updates: sgd and adagrad give what dense updates give, on one device and on several") {
  for (const OptimizerKind kind : {OptimizerKind::kSgd, OptimizerKind::kAdagrad}) {
    Optimizer by_rows = optimizer_of(kind, true), whole = optimizer_of(kind, false);
    by_rows.learning_rate = whole.learning_rate = kind == OptimizerKind::kSgd ? 5 : 0.01;
    Trainer dense(recommender(whole)), sparse_updates(recommender(by_rows)), cpu(recommender(by_rows), "cpu:2");
    Trainer uneven(recommender(by_rows), "ref:3", "replica(3, shares=[3,1,2])");
    const auto start = dense.floats("items");
    for (int64_t step = 0; step < 8; ++step) {
      const float loss = dense.step(step);
      for (Trainer* other : {&sparse_updates, &uneven, &cpu})
        CHECK(other->step(step) == doctest::Approx(loss).epsilon(1e-5));
    }
    CHECK(worst(start, dense.floats("items")) > 1e-3);
    for (const char* name : {"items", "users", "w", "mix"})
      for (Trainer* other : {&sparse_updates, &uneven, &cpu})
        CHECK(worst(dense.floats(name), other->floats(name)) < 2e-5);
  }
}

// One update of all tables began at row 0 on every device.
TEST_CASE("sparse_updates: tables that are cut by rows, several in one model") {
  Optimizer o = optimizer_of(OptimizerKind::kSgd, true);
  o.learning_rate = 5;
  Trainer one(recommender(o)), zero(recommender(o), "ref:3", "replica(3, shares=[3,1,2])", 3),
      split(recommender(o), "ref:2", "split(2, factor=table_rows)"),
      cpu(recommender(o), "cpu:2", "split(2, factor=table_rows)");
  for (int64_t step = 0; step < 4; ++step) {
    const float loss = one.step(step);
    for (Trainer* other : {&zero, &split, &cpu}) CHECK(other->step(step) == doctest::Approx(loss).epsilon(1e-5));
  }
  for (const char* name : {"items", "users", "w", "mix"})
    for (Trainer* other : {&zero, &split, &cpu}) CHECK(worst(one.floats(name), other->floats(name)) < 2e-5);
}

TEST_CASE("sparse_updates: rows of all micro-batches are updated at once") {
  for (const OptimizerKind kind : {OptimizerKind::kAdam, OptimizerKind::kAdagrad}) {
    Optimizer o = optimizer_of(kind, true);
    o.learning_rate = 0.01;
    Graph parts = recommender(o);
    parts.training.accumulation = 4;  // of 6 samples: 2, 2, 1, 1
    Trainer whole(recommender(o)), one(parts), several(parts, "ref:3", "replica(3, shares=[3,1,2])"),
        cut(parts, "cpu:2", "replica(2, by=micro_batch)"), rows(parts, "ref:2", "split"),
        stages(recommender(o), "ref:2", "pipeline(2, micro_batches=3)");
    for (int64_t step = 0; step < 4; ++step) {
      const float loss = whole.step(step);
      for (Trainer* other : {&one, &several, &cut, &rows, &stages})
        CHECK(other->step(step) == doctest::Approx(loss).epsilon(1e-5));
    }
    for (const char* name : {"items", "users", "w", "mix"})
      for (Trainer* other : {&one, &several, &cut, &rows, &stages})
        CHECK(worst(whole.floats(name), other->floats(name)) < 2e-5);
  }
}

TEST_CASE("sparse_updates: rows that are not looked up keep their values and state; others decay") {
  Optimizer o = optimizer_of(OptimizerKind::kAdamW, true);
  o.weight_decay = 0.1, o.learning_rate = 0.01;
  Trainer job(recommender(o)), other(recommender(o), "ref:2");
  const auto start = job.floats("items");
  for (int64_t step = 0; step < 4; ++step) CHECK(job.step(step) == doctest::Approx(other.step(step)).epsilon(1e-6));
  const auto now = job.floats("items"), m = job.floats("items/m");
  CHECK(worst(now, other.floats("items")) < 1e-6);
  int64_t moved = 0;
  for (size_t i = 0; i < now.size(); ++i) {
    const auto row = static_cast<int64_t>(i) / kWidth;
    if (row % 2 == 1 || row >= kRowCount / 2) {
      CHECK(now[i] == start[i]);
      CHECK(m[i] == 0);
    } else {
      moved += now[i] != start[i];
    }
  }
  CHECK(moved > 50);
}

TEST_CASE("sparse_updates: what it cannot do is an error that says so") {
  const auto compiled = [](Graph g) { return message_of([&] { compile(g, parse_devices("ref:1"), {}); }); };
  const Optimizer o = optimizer_of(OptimizerKind::kSgd, true);
  const std::string dense = compiled(recommender(o, Precision::kFloat32, Dense::kHead));
  CHECK(has(dense, "'items'"));
  CHECK(has(dense, "'head' (matmul)"));
  Graph clipped = recommender(o), momentum = recommender(o), lamb = recommender(o);
  clipped.training.clip_norm = 1;
  CHECK(has(compiled(clipped), "clip_norm"));
  momentum.training.optimizer.momentum = 0.9;
  CHECK(has(compiled(momentum), "momentum"));
  lamb.training.optimizer.kind = OptimizerKind::kLamb;
  CHECK(has(compiled(lamb), "sparse updates"));
  Graph split_adam = recommender(optimizer_of(OptimizerKind::kAdam, false, true));
  CHECK(has(compiled(split_adam), "split"));
}

TEST_CASE("sparse_updates: the table's gradient is not made") {
  const Plan sparse_updates = compile(recommender(optimizer_of(OptimizerKind::kSgd, true)), parse_devices("ref:1"), {});
  int64_t by_rows = 0, dense = 0;
  for (const Program& p : sparse_updates.entries[0].programs) {
    for (const Segment& s : p.segments) {
      for (const Instruction& i : s.instructions) {
        by_rows += i.op() == k_sgd_rows;
        dense += i.op() == k_embedding_grad || i.op() == k_embedding_bag_grad;
      }
    }
  }
  CHECK(by_rows >= 1);
  CHECK(dense == 0);
}

TEST_CASE("split weights: trained in bf16 with the memory of fp32, on any device, through a checkpoint") {
  const std::string folder = "/tmp/whale_split_" + std::to_string(getpid());
  for (const bool sparse_updates : {false, true}) {
    const Graph graph = recommender(optimizer_of(OptimizerKind::kSgd, sparse_updates, true), Precision::kBFloat16);
    const Graph plain = recommender(optimizer_of(OptimizerKind::kSgd, sparse_updates), Precision::kBFloat16);
    Trainer job(graph, "cpu:1"), several(graph, "cpu:2"), fp32(plain, "cpu:1");
    CHECK(job.session.variable_type("items").dtype == DType::kBF16);
    CHECK(job.session.variable_type("items/low").dtype == DType::kU16);
    int64_t bytes = 0, fp32_bytes = 0;
    for (const VariableInfo& v : job.session.variables()) bytes += static_cast<int64_t>(job.bytes(v.name).size());
    for (const VariableInfo& v : fp32.session.variables())
      fp32_bytes += static_cast<int64_t>(fp32.bytes(v.name).size());
    CHECK(bytes == fp32_bytes);
    const auto start = job.bytes("items");
    for (int64_t step = 0; step < 3; ++step) {
      const float loss = job.step(step);
      CHECK(several.step(step) == doctest::Approx(loss).epsilon(2e-3));
      CHECK(fp32.step(step) == doctest::Approx(loss).epsilon(2e-2));
    }
    CHECK(job.bytes("items") != start);
    std::filesystem::remove_all(folder);
    job.session.save(folder);
    for (int64_t step = 3; step < 6; ++step) job.step(step);
    Trainer resumed(graph, "cpu:1");
    resumed.session.load(folder);
    for (int64_t step = 3; step < 6; ++step) resumed.step(step);
    for (const VariableInfo& v : job.session.variables()) CHECK(job.bytes(v.name) == resumed.bytes(v.name));
  }
  std::filesystem::remove_all(folder);
}

// Halves and whole weights are the same numbers, whichever way a checkpoint goes. w1 is longer than a block of the
// load.
TEST_CASE("split weights: a checkpoint of halves loads into whole weights and back, to the bit") {
  const std::string folder = "/tmp/whale_halves_" + std::to_string(getpid());
  const auto graph = [](OptimizerKind kind, bool split, Precision precision) {
    small::Model m = small::mlp(8, kind, 4, 20000);
    m.g.training.optimizer.split_master_weights = split;
    m.g.training.precision = precision;
    return m.g;
  };
  using enum OptimizerKind;
  using enum Precision;
  Trainer halves(graph(kSgd, true, kBFloat16), "ref:1"), whole(graph(kSgd, false, kFloat32), "ref:1");
  const auto bits = [](Trainer& t, const std::string& name) {
    std::vector<uint32_t> all;
    if (t.session.variable_type(name).dtype == DType::kF32) {
      for (const float value : t.floats(name)) all.push_back(std::bit_cast<uint32_t>(value));
      return all;
    }
    const std::vector<char> high = t.bytes(name), low = t.bytes(name + "/low");
    for (size_t i = 0; i < high.size(); i += 2) {
      uint16_t h, l;
      std::memcpy(&h, high.data() + i, 2), std::memcpy(&l, low.data() + i, 2);
      all.push_back(static_cast<uint32_t>(h) << 16 | l);
    }
    return all;
  };
  const auto fill = [&](Trainer& t) {  // with numbers of all kinds, NaN and infinities too
    for (const char* name : {"w1", "b1", "w2"}) {
      const RandomStream random(1, hash_name(name), 0);
      const TensorType type = t.session.variable_type(name);
      std::vector<float> values(static_cast<size_t>(element_count(type.dims)));
      for (size_t i = 0; i < values.size(); ++i) values[i] = std::bit_cast<float>(random.word(i));
      t.session.write(name, {DType::kF32, type.dims, values.data()});
    }
  };
  fill(whole);
  const auto goes = [&](Trainer& from, Trainer& to) {
    std::filesystem::remove_all(folder);
    from.session.save(folder);
    to.session.load(folder);
    for (const char* name : {"w1", "b1", "w2"}) CHECK(bits(to, name) == bits(whole, name));
    CHECK(has(to.session.report(), R"("left_out":[])"));
  };
  Graph untrained = graph(kNone, false, kFloat32);
  untrained.training.loss = whale::kNone;
  Trainer both(graph(kSgd, true, kBFloat16), "ref:2"), plain(graph(kSgd, false, kFloat32), "ref:2"),
      low(graph(kSgd, false, kBFloat16), "ref:1"), predicts(untrained, "ref:1");
  goes(whole, halves);
  for (Trainer* to : {&both, &plain, &low, &predicts}) goes(halves, *to);
  goes(predicts, both);
  // In float64 as well, and what keeps state of its own is another optimizer, with halves as without.
  Trainer wide(graph(kSgd, false, kFloat64), "ref:1"), adam(graph(kAdam, false, kFloat32), "ref:1");
  fill(adam);
  std::filesystem::remove_all(folder);
  adam.session.save(folder);
  both.session.load(folder);
  for (const char* name : {"w1", "b1", "w2"}) CHECK(bits(both, name) == bits(whole, name));
  const std::string loaded = both.session.report();
  CHECK(has(loaded, R"("w1/m")"));
  CHECK_FALSE(has(loaded, "/low\""));
  std::filesystem::remove_all(folder);
  halves.session.save(folder);
  const std::string message = message_of([&] { adam.session.load(folder); }, {Code::kInvalidArgument});
  CHECK_MESSAGE(has(message, "sgd; this job: adam"), message);
  wide.session.load(folder);
  const std::vector<char> raw = wide.bytes("b1");
  for (size_t i = 0; i < raw.size() / 8; ++i) {
    double value = 0;
    std::memcpy(&value, raw.data() + 8 * i, 8);
    const float expected = whole.floats("b1")[i];
    CHECK((value == expected || (std::isnan(value) && std::isnan(expected))));
  }
  std::filesystem::remove_all(folder);
}

// With everything but the weights in fp32, the halves follow fp32 training bit by bit: the gradients are then the same.
TEST_CASE("split weights: tables whose values are bf16 numbers train as fp32 does while gradients agree") {
  const Graph graph = recommender(optimizer_of(OptimizerKind::kSgd, true, true), Precision::kBFloat16);
  const Graph plain = recommender(optimizer_of(OptimizerKind::kSgd, true), Precision::kBFloat16);
  Trainer a(graph, "cpu:1"), b(plain, "cpu:1");
  for (const char* name : {"items", "users", "w", "mix"}) {  // the same start: what bf16 can hold
    const TensorType type = a.session.variable_type(name);
    const std::vector<char> high = a.bytes(name);
    std::vector<float> wide(high.size() / 2);
    for (size_t i = 0; i < wide.size(); ++i) {
      uint16_t bits;
      std::memcpy(&bits, high.data() + 2 * i, 2);
      wide[i] = std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
    }
    b.session.write(name, {DType::kF32, type.dims, wide.data()});
  }
  CHECK(a.step(0) == b.step(0));
  for (const char* name : {"items", "users", "w", "mix"}) {
    const std::vector<char> high = a.bytes(name), low = a.bytes(std::string(name) + "/low");
    const std::vector<float> wide = b.floats(name);
    for (size_t i = 0; i < wide.size(); ++i) {
      uint16_t h, l;
      std::memcpy(&h, high.data() + 2 * i, 2), std::memcpy(&l, low.data() + 2 * i, 2);
      CHECK((static_cast<uint32_t>(h) << 16 | l) == std::bit_cast<uint32_t>(wide[i]));
    }
  }
}

}  // namespace
}  // namespace whale
