// float16 with loss scaling, sums of gradients in narrow types, and Adasum, through whole sessions.
#include <doctest/doctest.h>

#include <unistd.h>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>
#include <utility>

#include "base/bf16.h"
#include "base/f16.h"
#include "checkpoint_kit.h"
#include "cluster/devices.h"
#include "compile/compile.h"
#include "property.h"
#include "prove/prove.h"
#include "session/session.h"
#include "small_models.h"
#include "unit/caught.h"

namespace whale {
namespace {

using small::Model;

// Where the build has put libwhale_cpu.so.
std::string backends_folder() {
  const char* folder = std::getenv("WHALE_LIBRARY_DIR");
  return folder ? folder : "";
}

struct Job {
  Session session;
  int64_t batch;
  float loss = -1;
  Job(const Model& m, const std::string& devices, const CompileOptions& options, double loss_scale = 0)
      : session(std::make_shared<const Plan>(compile(m.g, parse_devices(devices, {0, 1, 2, 3}), options)),
                std::make_shared<Backends>(backends_folder()), with_scale(loss_scale)),
        batch(session.plan().entries[0].batch) {}
  static SessionOptions with_scale(double scale) {
    SessionOptions options;
    options.loss_scale = scale;
    return options;
  }
  float step(int64_t number, float factor = 1) {
    std::vector<float> x(static_cast<size_t>(batch * 4));
    std::vector<int32_t> y(static_cast<size_t>(batch));
    for (size_t i = 0; i < x.size(); ++i)
      x[i] = factor * std::sin(static_cast<float>(i * 3 + static_cast<size_t>(number) * 11));
    for (size_t i = 0; i < y.size(); ++i) y[i] = static_cast<int32_t>((i + static_cast<size_t>(number)) % 3);
    session
        .step({{"x", {DType::kF32, {batch, 4}, x.data()}}, {"y", {DType::kI32, {batch}, y.data()}}},
              {{"loss", {DType::kF32, {}, &loss}}})
        .wait();
    return loss;
  }
  std::vector<std::vector<float>> everything() {
    std::vector<std::vector<float>> values;
    for (const VariableInfo& v : session.variables()) {
      values.emplace_back(static_cast<size_t>(element_count(v.dims)));
      session.read(v.name, {v.dtype, v.dims, values.back().data()});
    }
    return values;
  }
};

bool same_bits(const std::vector<std::vector<float>>& a, const std::vector<std::vector<float>>& b) {
  bool same = a.size() == b.size();
  for (size_t v = 0; same && v < a.size(); ++v)
    for (size_t i = 0; i < a[v].size(); ++i)
      same &= std::bit_cast<uint32_t>(a[v][i]) == std::bit_cast<uint32_t>(b[v][i]);
  return same;
}

double distance(const std::vector<std::vector<float>>& a, const std::vector<std::vector<float>>& b) {
  double sum = 0;
  for (size_t v = 0; v < a.size(); ++v)
    for (size_t i = 0; i < a[v].size(); ++i) sum += (a[v][i] - b[v][i]) * (a[v][i] - b[v][i]);
  return std::sqrt(sum);
}

CompileOptions in_f16(const std::string& strategy = "") {
  CompileOptions o;
  o.precision = Precision::kFloat16;
  o.strategy = strategy;
  return o;
}

struct Setting {
  const char *devices, *strategy;
  int zero = 0;
  int64_t accumulation = 0;
};
const std::vector<Setting> kSettings = {
    {"ref:2", ""},
    {"ref:3", "replica(3, shares=[4,3,1])"},
    {"ref:4", ""},
    {"ref:1", "", 0, 4},
    {"ref:2", "", 1},
    {"ref:2", "", 2, 2},
    {"ref:2", "", 3},
    {"ref:2", "split(2)"},
    {"ref:4", "replica(2) > split(2)"},
    {"ref:2", "pipeline(2, micro_batches=4)"},
    {"cpu@0*2", ""},
    {"cpu@0", ""},
};

TEST_CASE("f16: numbers convert exactly, round to even, and overflow to infinity") {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const float x = f16_to_float(static_cast<uint16_t>(bits));
    if (std::isnan(x))
      CHECK(std::isnan(f16_to_float(float_to_f16(x))));
    else
      CHECK(float_to_f16(x) == bits);
  }
  CHECK(f16_to_float(float_to_f16(65504)) == 65504);
  CHECK(f16_to_float(float_to_f16(65519)) == 65504);
  CHECK(std::isinf(f16_to_float(float_to_f16(65520))));
  CHECK(f16_to_float(float_to_f16(2049)) == 2048);
  CHECK(f16_to_float(float_to_f16(2051)) == 2052);
  CHECK(float_to_f16(0x1p-25f) == 0);
  CHECK(float_to_f16(0x1.8p-25f) == 1);
}

TEST_CASE("f16: training follows f32, by every strategy") {
  for (const OptimizerKind kind : {OptimizerKind::kSgd, OptimizerKind::kAdamW}) {
    Model m = small::mlp(8, kind);
    m.g.training.clip_norm = kind == OptimizerKind::kSgd ? 0.5 : 0;
    Job exact(m, "ref:1", {}), one(m, "ref:1", in_f16());
    for (int64_t s = 0; s < 6; ++s) exact.step(s), one.step(s);
    // 11 bits: each rounding is up to 2^-12, and a loss is a mean over rounded logits.
    CHECK(one.loss == doctest::Approx(exact.loss).epsilon(4 * 0x1p-11));
    CHECK(one.session.updates() == 6);
    CHECK(nlohmann::json::parse(one.session.report())["loss_scale"] == 65536);
    for (const Setting& at : kSettings) {
      CAPTURE(at.devices);
      CAPTURE(at.strategy);
      CAPTURE(at.zero);
      CompileOptions o = in_f16(at.strategy);
      o.zero = at.zero;
      o.accumulation = at.accumulation;
      Job job(m, at.devices, o);
      for (int64_t s = 0; s < 6; ++s) job.step(s);
      CHECK(job.loss == doctest::Approx(one.loss).epsilon(4 * 0x1p-11));
      CHECK(job.session.updates() == 6);
    }
  }
}

TEST_CASE("f16: losses whose gradient is a view of the scale") {
  using enum OpCode;
  const auto shape = [](Dims dims) { return Attrs{{"shape", std::move(dims)}}; };
  const Model plain = small::mlp(8);
  const auto losses = {
      +[](Model& m, TensorId rows) { return m.op(k_reduce_sum, {rows}); },
      +[](Model& m, TensorId rows) { return m.op(k_reduce_max, {rows}); },
      +[](Model& m, TensorId rows) { return m.op(k_reduce_mean, {rows}); },
  };
  for (const auto& loss : losses) {
    std::vector<Model> models;
    for (const bool reshaped : {false, true}) {
      Model m = plain;
      TensorId x = loss(m, m.g.op(m.g.tensor(plain.g.training.loss).producer).inputs[0]);
      if (reshaped) x = m.op(k_reshape, {m.op(k_reshape, {x}, shape({1, 1}))}, shape({}));
      m.g.training.loss = x;
      models.push_back(std::move(m));
    }
    Job exact(models[0], "ref:1", {});
    for (int64_t s = 0; s < 3; ++s) exact.step(s);
    for (const Model& m : models)
      for (const char* devices : {"ref:1", "ref:2", "cpu@0*2"})
        for (const bool fusion : {false, true}) {
          CAPTURE(devices);
          CompileOptions o = in_f16();
          o.fusion = fusion;
          Job job(m, devices, o, 1024);
          for (int64_t s = 0; s < 3; ++s) job.step(s);
          CHECK(job.loss == doctest::Approx(exact.loss).epsilon(8 * 0x1p-11));
          CHECK(job.session.updates() == 3);
        }
  }
}

TEST_CASE("f16: a step that overflows changes nothing, on no device, and halves the scale") {
  for (const OptimizerKind kind : {OptimizerKind::kSgd, OptimizerKind::kAdamW, OptimizerKind::kLamb,
                                   OptimizerKind::kAdagrad, OptimizerKind::kAdafactor}) {
    Model m = small::mlp(8, kind);
    if (kind == OptimizerKind::kSgd) m.g.training.optimizer.momentum = 0.9, m.g.training.clip_norm = 1;
    for (Setting at : kSettings) {
      if (kind != OptimizerKind::kAdamW && at.devices != std::string("ref:2") && at.devices != std::string("cpu@0*2"))
        continue;
      CAPTURE(static_cast<int>(kind));
      CAPTURE(at.devices);
      CAPTURE(at.strategy);
      CAPTURE(at.zero);
      CompileOptions o = in_f16(at.strategy);
      o.zero = at.zero;
      o.accumulation = at.accumulation;
      Job job(m, at.devices, o, 0x1p15);
      job.step(0);
      REQUIRE(job.session.updates() == 1);
      const auto before = job.everything();
      job.step(1, 1e7f);  // inputs beyond f16
      CHECK(same_bits(job.everything(), before));
      CHECK(job.session.iteration() == 2);
      CHECK(job.session.updates() == 1);
      CHECK(job.session.loss_scale() == 0x1p14);
      CHECK(std::isfinite(job.step(2)));
      CHECK_FALSE(same_bits(job.everything(), before));
      CHECK(job.session.updates() == 2);
      CHECK(job.session.loss_scale() == 0x1p14);
    }
  }
}

TEST_CASE("f16: a scale that is too large falls until gradients fit, and is kept in checkpoints") {
  const Model m = small::mlp(8, OptimizerKind::kAdamW);
  Job job(m, "ref:2", in_f16(), 0x1p24);
  const auto before = job.everything();
  job.step(0);
  CHECK(job.session.updates() == 0);
  CHECK(job.session.loss_scale() == 0x1p23);
  CHECK(same_bits(job.everything(), before));
  while (job.session.updates() < 3 && job.session.iteration() < 60) job.step(0);
  CHECK(job.session.updates() == 3);
  CHECK(job.session.iteration() > 5);
  char name[] = "/tmp/whale_precision_XXXXXX";
  const std::filesystem::path folder = mkdtemp(name);
  job.session.save(folder / "ckpt");
  Job other(m, "ref:1", in_f16());
  CHECK(other.session.loss_scale() == 65536);
  other.session.load(folder / "ckpt");
  CHECK(other.session.loss_scale() == job.session.loss_scale());
  CHECK(other.session.updates() == 3);
  std::filesystem::remove_all(folder);
  Job hopeless(m, "ref:1", in_f16(), 0x1p-14);
  CHECK_THROWS_AS(hopeless.step(0, INFINITY), Error);
  CHECK(hopeless.session.updates() == 0);
  CHECK(has(message_of([&] { Job job(m, "ref:1", {}, 128); }), "not f16"));
}

TEST_CASE("f16: a loss scale is 2^-14 to 2^24, given by hand or by a checkpoint of an older libwhale") {
  const Model m = small::mlp(8);
  for (const double scale : {1e300, 1e-300, 0x1.0001p24, 0x0.ffffp-14, -1.0, std::nan(""), HUGE_VAL})
    CHECK(has(message_of([&] { Job job(m, "ref:1", in_f16(), scale); }, {Code::kInvalidArgument}),
              "expected 2^-14 to 2^24"));
  for (const double scale : {0x1p-14, 0x1p24}) CHECK(Job(m, "ref:1", in_f16(), scale).session.loss_scale() == scale);
  const kit::TestFolder folder;
  const std::string at = folder.path / "ckpt", json = at + "/whale.json";
  Job job(m, "ref:1", in_f16());
  for (const auto& [stored, taken] : {std::pair(1e300, 0x1p24), std::pair(1e-300, 0x1p-14), std::pair(8.0, 8.0)}) {
    job.session.save(at);
    CheckpointIndex index = parse_index(json, kit::content(json));
    index.meta.loss_scale = stored;
    kit::put(json, to_text(index));
    job.session.load(at);
    CHECK(job.session.loss_scale() == taken);
  }
}

TEST_CASE("f16: running statistics are kept on overflow, batch norm and convolutions run") {
  const Model m = small::resnet(6);
  for (const char* devices : {"ref:1", "ref:2", "cpu@0"}) {
    CAPTURE(devices);
    Session session(std::make_shared<const Plan>(compile(m.g, parse_devices(devices, {0, 1}), in_f16())),
                    std::make_shared<Backends>(backends_folder()), {});
    std::vector<float> x(6 * 8 * 8 * 3);
    std::vector<int32_t> y{0, 1, 2, 3, 4, 0};
    float loss = 0;
    const auto step = [&](float factor) {
      for (size_t i = 0; i < x.size(); ++i) x[i] = factor * std::sin(static_cast<float>(i));
      session
          .step({{"x", {DType::kF32, {6, 8, 8, 3}, x.data()}}, {"y", {DType::kI32, {6}, y.data()}}},
                {{"loss", {DType::kF32, {}, &loss}}})
          .wait();
    };
    std::vector<float> mean(8), again(8);
    step(1);
    CHECK(std::isfinite(loss));
    CHECK(session.updates() == 1);
    session.read("stem.mean", {DType::kF32, {8}, mean.data()});
    step(1e9f);
    CHECK(session.updates() == 1);
    session.read("stem.mean", {DType::kF32, {8}, again.data()});
    CHECK(mean == again);
    step(1);
    CHECK(session.updates() == 2);
  }
}

TEST_CASE("f16: a transformer with tied embeddings, attention and dropout, on both devices") {
  const Model m = small::gpt(6, OptimizerKind::kAdamW);
  std::vector<float> losses;
  for (const auto& [devices, strategy] :
       std::vector<std::pair<const char*, const char*>>{{"ref:1", ""},
                                                        {"ref:3", ""},
                                                        {"cpu@0", ""},
                                                        {"ref:2", "split(2)"},
                                                        {"ref:2", "pipeline(2, micro_batches=3)"}}) {
    Session session(std::make_shared<const Plan>(compile(m.g, parse_devices(devices, {0, 1}), in_f16(strategy))),
                    std::make_shared<Backends>(backends_folder()), {});
    std::vector<int32_t> tokens(48), targets(48);
    for (size_t i = 0; i < 48; ++i)
      tokens[i] = static_cast<int32_t>(i * 7 % 32), targets[i] = static_cast<int32_t>(i * 5 % 32);
    float loss = 0;
    for (int s = 0; s < 3; ++s)
      session
          .step({{"tokens", {DType::kI32, {6, 8}, tokens.data()}}, {"targets", {DType::kI32, {6, 8}, targets.data()}}},
                {{"loss", {DType::kF32, {}, &loss}}})
          .wait();
    CHECK(session.updates() == 3);
    losses.push_back(loss);
    CHECK(losses.back() == doctest::Approx(losses[0]).epsilon(4 * 0x1p-11));
  }
}

// Ops between the sum that makes a gradient and the update.
bool carries_on(const Instruction& i) {
  if (i.kind() == InstructionKind::kCollective) return true;
  if (i.kind() != InstructionKind::kKernel) return false;
  return has_flag(i.kernel()->op, kElementwise) || has_flag(i.kernel()->op, kRearranges) || i.op() == OpCode::k_fused ||
         i.op() == OpCode::k_cast || i.op() == OpCode::k_unscale || i.op() == OpCode::k_slice ||
         i.op() == OpCode::k_concat;
}

// What the updates of a program read that was 16 bits wide after it was summed; empty: nothing.
std::string rounded_gradient(const Program& p) {
  std::vector<std::vector<const Instruction*>> makers(p.buffers.size());
  std::vector<BufferId> wide;
  std::vector<char> seen(p.buffers.size());
  const auto look_at = [&](BufferId id) {
    if (id != kNone && !std::exchange(seen[id], 1)) wide.push_back(id);
  };
  for (const Segment& s : p.segments)
    for (const Instruction& i : s.instructions) {
      if (i.kind() == InstructionKind::kKernel && has_flag(i.kernel()->op, kUpdateOp)) {
        for (const BufferId id : i.in) look_at(id);
      } else {
        for (const BufferId id : i.out)
          if (id != kNone) makers[id].push_back(&i);
      }
    }
  const auto is_wide = [&](BufferId id) {
    const DType t = p.buffers[id].dtype;
    return t != DType::kBF16 && t != DType::kF16;
  };
  while (!wide.empty()) {
    const BufferId id = wide.back();
    wide.pop_back();
    if (!is_wide(id)) return p.buffers[id].name;
    if (p.buffers[id].kind == BufferKind::kVariable) continue;
    if (const BufferId of = p.buffers[id].alias; of != kNone) look_at(of);
    for (const Instruction* i : makers[id])
      if (carries_on(*i))
        for (const BufferId from : i->in) look_at(from);
  }
  return "";
}

// Parameters that meet activations in every way that broadcasts them, some through views and functions of their own.
Model broadcast_parameters() {
  using enum OpCode;
  Model m;
  const TensorId x = m.input("x", {8, 4}), y = m.input("y", {8}, DType::kI32);
  const auto view = [&](const char* name, Dims dims) {
    return m.op(k_reshape, {m.variable(name, std::move(dims))}, {{"shape", Dims{16}}});
  };
  TensorId h = m.op(k_matmul, {x, m.variable("w", {4, 16})});
  h = m.op(k_sub, {h, m.variable("subtracted", {16})});
  h = m.op(k_sub, {m.variable("from", {1, 16}), h});
  h = m.op(k_mul, {h, m.variable("factor", {})});
  const TensorId twice = view("twice", {4, 4}), bent = m.op(k_tanh, {m.variable("bent", {16})});
  h = m.op(k_add, {m.op(k_tanh, {m.op(k_mul, {h, twice})}), twice});
  h = m.op(k_add, {m.op(k_tanh, {m.op(k_mul, {h, bent})}), bent});
  h = m.op(k_rms_norm, {h, m.variable("scale", {16})});
  h = m.op(k_matmul,
           {h, m.op(k_transpose, {m.variable("turned", {3, 16})}, {{"perm", Dims{1, 0}}}), m.variable("bias", {3})});
  m.minimize(m.op(k_reduce_mean, {m.op(k_cross_entropy, {h, y})}, {}, "loss"), OptimizerKind::kSgd);
  return m;
}

TEST_CASE("16 bits: no gradient is rounded between its sum and the update") {
  const Model models[] = {small::mlp(8), small::gpt(6), small::resnet(6), broadcast_parameters()};
  for (const Precision precision : {Precision::kBFloat16, Precision::kFloat16})
    for (const Model& m : models)
      for (const auto& [devices, strategy] : std::vector<std::pair<const char*, const char*>>{
               {"ref:1", "local"}, {"ref:2", "replica(2)"}, {"ref:2", "split(2)"}, {"ref:4", "replica(2) > split(2)"}})
        for (const bool fusion : {true, false}) {
          CAPTURE(static_cast<int>(precision));
          CAPTURE(m.g.name);
          CAPTURE(std::string(strategy));
          CompileOptions o;
          o.precision = precision;
          o.strategy = strategy;
          o.fusion = fusion;
          const Plan plan = compile(m.g, parse_devices(devices), o);
          for (const Program& p : plan.entries[0].programs) CHECK(rounded_gradient(p) == "");
        }
}

// exp reads f32: one device makes the product with its bias in f32, and where a split takes them apart so do others.
TEST_CASE("16 bits: a product with a bias that f32 ops read is rounded as on one device, by every strategy") {
  using enum OpCode;
  for (const Precision precision : {Precision::kBFloat16, Precision::kFloat16})
    for (const bool apart : {false, true})
      for (const bool relu : {false, true}) {
        if (apart && relu) continue;
        Model m;
        const TensorId x = m.input("x", {8, 4}), y = m.input("y", {8}, DType::kI32);
        const TensorId w = m.variable("w", {4, 4}), b = m.variable("b", {4});
        const Attrs activation = relu ? Attrs{{"activation", std::string("relu")}} : Attrs{};
        const TensorId h = apart ? m.op(k_add, {m.op(k_matmul, {x, w}), b}) : m.op(k_matmul, {x, w, b}, activation);
        const TensorId grown = m.op(k_reduce_mean, {m.op(k_exp, {h})});
        const TensorId head = m.op(k_matmul, {x, m.variable("head", {4, 4})});
        const TensorId none = m.op(k_fill, {}, {{"shape", Dims{}}, {"value", 0.0}, {"dtype", std::string("f32")}});
        const TensorId labels = m.op(k_mul, {m.op(k_reduce_mean, {m.op(k_cross_entropy, {head, y})}), none});
        m.minimize(m.op(k_add, {grown, labels}, {}, "loss"), OptimizerKind::kSgd);
        float one = 0;
        for (const auto& [devices, strategy] :
             std::vector<std::pair<const char*, const char*>>{{"ref:1", "local"},
                                                              {"ref:2", "split(2)"},
                                                              {"ref:2", "split(2, factor=k)"},
                                                              {"ref:2", "split(2, factor=columns)"},
                                                              {"ref:4", "replica(2) > split(2)"}}) {
          CAPTURE(strategy);
          CAPTURE(apart);
          CAPTURE(relu);
          CompileOptions o;
          o.precision = precision;
          o.strategy = strategy;
          Job job(m, devices, o, precision == Precision::kFloat16 ? 0x1p8 : 0);
          const Proof proof = prove(job.session.plan());
          CHECK_MESSAGE(proof.verdict == ProofVerdict::kProven, text(proof));
          const float loss = job.step(0);
          if (one == 0) one = loss;
          // Rounded to bf16 it is 2e-4 off, to f16 2e-5. What relu makes is of 16 bits, where one element may turn.
          CHECK(std::abs(loss - one) < (relu ? 4e-5 : 4e-6) * std::abs(one));
        }
      }
}

// 1.4 times the scale of 2^16 is more than f16 holds.
TEST_CASE("f16: a bias' gradient beyond f16 is no overflow where a split takes the bias out of its product") {
  using enum OpCode;
  Model m;
  const TensorId x = m.input("x", {8, 4}), y = m.input("y", {8}, DType::kI32);
  const TensorId h = m.op(k_matmul, {x, m.variable("w", {4, 4}), m.variable("b", {4})});
  const TensorId far = m.op(k_mul,
                            {m.op(k_reduce_mean, {m.op(k_cross_entropy, {h, y})}),
                             m.op(k_fill, {}, {{"shape", Dims{}}, {"value", 6.0}, {"dtype", std::string("f32")}})},
                            {}, "loss");
  m.minimize(far, OptimizerKind::kSgd);
  for (const auto& [devices, strategy] : std::vector<std::pair<const char*, const char*>>{
           {"ref:1", "local"}, {"ref:2", "split(2)"}, {"ref:4", "replica(2) > split(2)"}, {"cpu@0*2", "split(2)"}}) {
    CAPTURE(strategy);
    Job job(m, devices, in_f16(strategy), 0x1p16);
    job.step(0);
    CHECK(job.session.updates() == 1);
  }
}

TEST_CASE("gradients summed in a narrow type: near the exact plan, bit for bit alike on all devices, and noted") {
  for (const OptimizerKind kind : {OptimizerKind::kSgd, OptimizerKind::kAdamW}) {
    const Model m = small::mlp(8, kind);
    Job exact(m, "ref:1", {});
    const auto start = exact.everything();
    for (int64_t s = 0; s < 5; ++s) exact.step(s);
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16})
      for (const Setting& at : kSettings) {
        CAPTURE(name_of(dtype));
        CAPTURE(at.devices);
        CAPTURE(at.strategy);
        CAPTURE(at.zero);
        CompileOptions o;
        o.strategy = at.strategy;
        o.zero = at.zero;
        o.accumulation = at.accumulation;
        o.gradient_dtype = dtype;
        Job job(m, at.devices, o);
        for (int64_t s = 0; s < 5; ++s) job.step(s);
        const double epsilon = dtype == DType::kBF16 ? 0x1p-8 : dtype == DType::kF16 ? 0x1p-11 : 0x1p-23;
        CHECK(job.loss == doctest::Approx(exact.loss).epsilon(std::max(epsilon / 2, 1e-5)));
        if (kind == OptimizerKind::kSgd)  // Adam's steps do not shrink with their gradients
          CHECK(distance(job.everything(), exact.everything()) <=
                std::max(4 * epsilon, 1e-4) * distance(exact.everything(), start));
      }
  }
  CompileOptions o;
  o.gradient_dtype = DType::kBF16;
  const Plan plan = compile(small::mlp().g, parse_devices("ref:2"), o);
  CHECK(
      std::any_of(plan.notes.begin(), plan.notes.end(), [](const std::string& n) { return n.find("bf16") != n.npos; }));
  int collectives = 0;
  for (const Instruction& i : plan.entries[0].programs[0].segments[0].instructions)
    for (const BufferId id : i.in)
      if (i.op() == OpCode::k_all_reduce && plan.entries[0].programs[0].buffers[id].bytes > 4) {
        CHECK(plan.entries[0].programs[0].buffers[id].dtype == DType::kBF16);
        ++collectives;
      }
  CHECK(collectives > 0);
  const Plan read = deserialize(serialize(plan).data(), serialize(plan).size());
  CHECK(read.options.gradient_dtype == DType::kBF16);
  CHECK(compile_entry(read, "train", 4).batch == 4);
  o.gradient_dtype = DType::kI32;
  CHECK_THROWS_AS(compile(small::mlp().g, parse_devices("ref:2"), o), Error);
}

TEST_CASE("gradients summed in a narrow type: what a split sums comes first, wherever replicas are") {
  for (const char* strategy :
       {"replica > split(2)", "split(2) > replica", "split(2) > replica(4, shares=[3,2,2,1])",
        "replica(2) > split(2) > replica(2)", "replica(2) > pipeline(2, micro_batches=2) > split(2)"})
    for (const int zero : {0, 1, 2, 3})
      for (const int64_t accumulation : {1, 2}) {
        if (accumulation > 1 && std::string_view(strategy).find("pipeline") != std::string_view::npos) continue;
        CAPTURE(strategy);
        CAPTURE(zero);
        CAPTURE(accumulation);
        // LAMB's norms share buckets with what splits sum.
        const OptimizerKind kind = zero % 2 == 0 ? OptimizerKind::kAdamW : OptimizerKind::kLamb;
        CompileOptions o;
        o.strategy = strategy;
        o.zero = zero;
        o.accumulation = accumulation;
        o.gradient_dtype = DType::kBF16;
        std::string laid_out;
        o.dump = [&](std::string_view pass, const std::string& text) {
          if (pass == "train.insert_reshards") laid_out = text;
        };
        const Plan plan = compile(small::gpt(8, kind).g, parse_devices("null:8"), o);
        int rounded = 0;
        std::istringstream lines(laid_out);
        for (std::string line; std::getline(lines, line);) {
          const size_t cast = line.find(" = cast(");
          if (cast == line.npos || line.find(" bf16[") == line.npos) continue;
          std::istringstream axes(line.substr(line.rfind(' ', cast - 1), cast - line.rfind(' ', cast - 1)));
          std::string of_time, sharding;
          std::getline(axes, of_time, ',');
          for (const MeshAxis& axis : plan.meshes[0].axes)
            if (std::getline(axes, sharding, ',') && axis.name == "split") CHECK_MESSAGE(sharding != "P(sum)", line);
          ++rounded;
        }
        CHECK(rounded > 0);
      }
}

// loss = sum(x w + x v): the gradient of either is the sum of the rows of x, whatever they are.
Model sum_of_products(int64_t batch, OptimizerKind kind = OptimizerKind::kSgd) {
  using enum OpCode;
  Model m;
  const TensorId x = m.input("x", {batch, 6}), w = m.variable("w", {6, 4}), v = m.variable("v", {6, 4});
  const TensorId y = m.op(k_add, {m.op(k_matmul, {x, w}), m.op(k_matmul, {x, v})});
  m.minimize(m.op(k_reduce_sum, {y}, {}, "loss"), kind);
  m.g.training.optimizer.learning_rate = 0.125;
  return m;
}

struct Summed {
  std::vector<float> gradient;
  std::vector<std::vector<float>> variables;
};
Summed summed(const Model& m, const std::string& devices, CompileOptions o, std::vector<float> x) {
  o.fetch = {"grad:w"};
  Session session(std::make_shared<const Plan>(compile(m.g, parse_devices(devices, {0, 1, 2, 3}), o)),
                  std::make_shared<Backends>(backends_folder()), {});
  Summed out;
  out.gradient.resize(24);
  session
      .step({{"x", {DType::kF32, {static_cast<int64_t>(x.size()) / 6, 6}, x.data()}}},
            {{"grad:w", {DType::kF32, {6, 4}, out.gradient.data()}}})
      .wait();
  for (const VariableInfo& v : session.variables()) {
    out.variables.emplace_back(static_cast<size_t>(element_count(v.dims)));
    session.read(v.name, {v.dtype, v.dims, out.variables.back().data()});
  }
  return out;
}

TEST_CASE("gradients accumulated in a narrow type: rounded after each micro-batch, and the update reads the sum") {
  const Model m = sum_of_products(8);
  std::vector<float> x(48);
  for (size_t i = 0; i < x.size(); ++i) x[i] = std::sin(static_cast<float>(i * 7 + 1));
  const Summed exact = summed(m, "ref:1", {}, x);
  const std::pair<DType, float (*)(float)> types[] = {
      {DType::kBF16, [](float v) { return bf16_to_float(float_to_bf16(v)); }},
      {DType::kF16, [](float v) { return f16_to_float(float_to_f16(v)); }}};
  for (const auto& [dtype, rounded] : types)
    for (const char* devices : {"ref:1", "cpu@0"}) {
      CAPTURE(name_of(dtype));
      CAPTURE(devices);
      CompileOptions o;
      o.accumulation = 4, o.accumulate_dtype = dtype;
      const Summed found = summed(m, devices, o, x);
      int differ = 0;
      for (size_t k = 0; k < 6; ++k) {
        float sum = 0;
        for (size_t u = 0; u < 4; ++u) sum = rounded(sum + (x[12 * u + k] + x[12 * u + 6 + k]));
        for (size_t n = 0; n < 4; ++n) CHECK(found.gradient[4 * k + n] == sum);
        differ += sum != exact.gradient[4 * k];
        // From the same start: w' = w - g / 8.
        for (size_t n = 0; n < 4; ++n)
          CHECK(found.variables[0][4 * k + n] ==
                doctest::Approx(exact.variables[0][4 * k + n] + (exact.gradient[4 * k] - sum) / 8).epsilon(1e-6));
      }
      CHECK(differ > 3);
    }
}

// Sums of small integers are rounded nowhere: whatever shares the work, not a bit is another.
TEST_CASE("gradients accumulated in a narrow type: every plan adds up all that there is") {
  struct Plans {
    const char *devices, *strategy;
    int64_t accumulation;
  };
  std::vector<float> x(16 * 6);
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(static_cast<int>(i * 5 % 7) - 3);
  for (const OptimizerKind kind : {OptimizerKind::kSgd, OptimizerKind::kAdamW, OptimizerKind::kAdafactor}) {
    Model m = sum_of_products(16, kind);
    for (const double clip : {0.0, 1.0}) {
      m.g.training.clip_norm = clip;
      const Summed exact = summed(m, "ref:1", {}, x);
      for (const Plans& at : std::vector<Plans>{{"ref:1", "", 4},
                                                {"ref:2", "replica", 4},
                                                {"ref:3", "replica(3, shares=[4,3,1])", 3},
                                                {"ref:2", "replica(2, by=micro_batch)", 4},
                                                {"ref:4", "replica(2) > split(2)", 2},
                                                {"ref:4", "split(2) > replica(2)", 2},
                                                {"ref:4", "replica(2) > replica(2)", 2},
                                                {"ref:4", "replica(2) > pipeline(2, micro_batches=4)", 0},
                                                {"ref:2", "pipeline(2, micro_batches=4, schedule=zb_h1)", 0}})
        for (const int zero : {0, 1, 2, 3})
          for (const int form : {0, 1, 2, 3}) {
            CAPTURE(static_cast<int>(kind));
            CAPTURE(clip);
            CAPTURE(at.strategy);
            CAPTURE(zero);
            CAPTURE(form);
            CompileOptions o;
            o.strategy = at.strategy, o.accumulation = at.accumulation, o.zero = zero;
            o.accumulate_dtype = DType::kBF16, o.bucket_bytes = 64;
            if (form == 1) o.gradient_dtype = DType::kBF16;
            if (form == 2) o.offload = kOffloadAll;
            if (form == 3) o.update = UpdateForm::kSliced, o.fusion = false;
            const Summed found = summed(m, at.devices, o, x);
            CHECK(found.gradient == exact.gradient);
            CHECK(distance(found.variables, exact.variables) <= (kind == OptimizerKind::kSgd && clip == 0 ? 0 : 1e-5));
          }
    }
  }
}

TEST_CASE("gradients accumulated in a narrow type: what it cannot go with is refused, and what it does is noted") {
  const auto plan = [](CompileOptions o) { return compile(small::mlp().g, parse_devices("ref:2"), o); };
  CompileOptions o;
  o.accumulation = 2, o.accumulate_dtype = DType::kBF16;
  const auto noted = [&](const char* words) {
    return std::ranges::any_of(plan(o).notes, [&](const std::string& n) { return n.find(words) != n.npos; });
  };
  CHECK(noted("summed over micro-batches in bf16: by this option"));
  CHECK(deserialize(serialize(plan(o)).data(), serialize(plan(o)).size()).options.accumulate_dtype == DType::kBF16);
  o.accumulation = 1;
  CHECK(noted("a step has one"));
  o.accumulation = 2, o.accumulate_dtype = DType::kF32;  // what it is anyway
  CHECK(!noted("summed over micro-batches"));
  CompileOptions plain;
  plain.accumulation = 2;
  CHECK(serialize(plan(o)) == serialize(plan(plain)));
  o.accumulate_dtype = DType::kBF16;
  const auto message = [&](auto set) {
    CompileOptions with = o;
    set(with);
    return message_of([&] { plan(with); });
  };
  CHECK(has(message([](CompileOptions& c) { c.exact = true; }), "accumulated in bf16"));
  CHECK(has(message([](CompileOptions& c) { c.adasum = true; }), "accumulated in bf16"));
  CHECK(has(message([](CompileOptions& c) { c.accumulate_dtype = DType::kI32; }), "accumulated in i32"));
}

// ---- parameters of 16 bits ------------------------------------------------------------------------------------------
// The trained variables of a model in bf16, each read as f32.
Model in_16_bits(Model m) {
  Model out;
  out.scope = m.scope, out.g.name = m.g.name, out.g.scopes = m.g.scopes;
  std::vector<TensorId> now(m.g.tensors.size(), kNone);
  for (size_t t = 0; t < m.g.tensors.size(); ++t) {
    if (m.g.tensors[t].kind == TensorKind::kValue) continue;
    out.g.tensors.push_back(m.g.tensors[t]);
    now[t] = static_cast<TensorId>(out.g.tensors.size()) - 1;
  }
  for (Variable v : m.g.variables) {
    const TensorId was = v.tensor;
    v.tensor = now[was];
    out.g.variables.push_back(v);
    if (!v.trainable) continue;
    out.g.tensor(v.tensor).dtype = DType::kBF16;
    now[was] = out.op(OpCode::k_cast, {v.tensor}, {{"dtype", std::string("f32")}});
  }
  for (const TensorId id : m.g.inputs) out.g.inputs.push_back(now[id]);
  for (const Op& op : m.g.ops) {
    TensorIds inputs = op.inputs;
    for (TensorId& id : inputs)
      if (id != kNone) id = now[id];
    const OpId made = append_op(out.g, op.code, std::move(inputs), op.attrs, op.scope, op.name);
    for (size_t o = 0; o < op.outputs.size(); ++o) now[op.outputs[o]] = out.g.op(made).outputs[o];
  }
  for (const NamedTensor& o : m.g.outputs) out.g.outputs.push_back({o.name, now[o.tensor]});
  out.g.training = m.g.training;
  out.g.training.loss = now[m.g.training.loss];
  return out;
}

// Small integers are gradients in 16 bits as they are: a step makes of each parameter what 32 bits make, rounded once.
TEST_CASE("parameters of 16 bits: an update computes in 32 bits and rounds once") {
  std::vector<float> x(48);
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(static_cast<int>(i * 5 % 7) - 3);
  for (const OptimizerKind kind : {OptimizerKind::kSgd, OptimizerKind::kAdam, OptimizerKind::kAdamW,
                                   OptimizerKind::kAdagrad, OptimizerKind::kAdafactor}) {
    CAPTURE(static_cast<int>(kind));
    Model wide = sum_of_products(8, kind);
    for (Variable& v : wide.g.variables)
      v.init = {.kind = InitKind::kConstant, .a = 0.375, .b = 0, .file = {}, .key = {}};
    wide.g.training.optimizer.weight_decay = 0.125;
    const Summed exact = summed(wide, "ref:1", {}, x);
    for (const char* devices : {"ref:1", "cpu@0", "ref:2"})
      for (const int64_t accumulation : {1, 2}) {
        CAPTURE(devices);
        CompileOptions o;
        o.accumulation = accumulation;
        Model narrow = in_16_bits(wide);
        const Plan plan = compile(narrow.g, parse_devices(devices, {0, 1}), o);
        Session session(std::make_shared<const Plan>(plan), std::make_shared<Backends>(backends_folder()), {});
        session.step({{"x", {DType::kF32, {8, 6}, x.data()}}}, {}).wait();
        for (size_t v = 0; v < 2; ++v) {
          std::vector<uint16_t> bits(24);
          session.read(v == 0 ? "w" : "v", {DType::kBF16, {6, 4}, bits.data()});
          for (size_t i = 0; i < bits.size(); ++i)
            CHECK(bf16_to_float(bits[i]) == doctest::Approx(exact.variables[v][i]).epsilon(0x1p-8));
        }
      }
  }
}

// Of every parameter of two dimensions: no buffer of 32 bits and its size, but in the update of Adafactor.
TEST_CASE("parameters of 16 bits: in bf16 neither they nor their gradients have a copy in 32 bits") {
  for (const OptimizerKind kind : {OptimizerKind::kSgd, OptimizerKind::kAdamW, OptimizerKind::kAdafactor})
    for (const int zero : {0, 2, 3})
      for (const int64_t accumulation : {1, 2}) {
        CAPTURE(static_cast<int>(kind));
        CAPTURE(zero);
        CompileOptions o;
        o.strategy = "replica", o.zero = zero, o.accumulation = accumulation, o.precision = Precision::kBFloat16;
        const Plan plan = compile(in_16_bits(small::gpt(8, kind, 2, 8, 24, 40)).g, parse_devices("null:2"), o);
        for (const Program& p : plan.entries[0].programs)
          for (const Segment& s : p.segments)
            for (const Instruction& i : s.instructions)
              for (const BufferId b : i.out) {
                if (b == kNone || (i.phase == Phase::kUpdate && i.op() != OpCode::k_accumulate)) continue;
                const Buffer& buffer = p.buffers[b];
                const bool matrix = buffer.dims.size() == 2 && element_count(buffer.dims) >= 24 * 24 &&
                                    (buffer.dims[0] % 24 == 0 || buffer.dims[1] % 24 == 0 || buffer.dims[0] == 40);
                if (matrix) CHECK_MESSAGE(buffer.dtype != DType::kF32, (i.name + " " + buffer.name));
              }
      }
}

// What two replicas that see the same samples, or different ones, make of their gradients.
TEST_CASE("adasum: equal replicas train like one, and every plan of the same replicas gives the same") {
  Model half = small::mlp(4, OptimizerKind::kSgd), m = small::mlp(8, OptimizerKind::kSgd);
  half.g.training.optimizer.learning_rate = m.g.training.optimizer.learning_rate = 0.1;
  CompileOptions o;
  o.adasum = true;
  const auto train = [&](const Model& model, const std::string& devices, const CompileOptions& options, bool repeat) {
    Session session(std::make_shared<const Plan>(compile(model.g, parse_devices(devices, {0, 1}), options)),
                    std::make_shared<Backends>(backends_folder()), {});
    const int64_t batch = session.plan().entries[0].batch;
    float loss = 0;
    std::vector<float> x(static_cast<size_t>(batch * 4));
    std::vector<int32_t> y(static_cast<size_t>(batch));
    for (size_t s = 0; s < 4; ++s) {
      for (size_t i = 0; i < x.size(); ++i) x[i] = std::sin(static_cast<float>((repeat ? i % 16 : i) * 3 + s * 11));
      for (size_t i = 0; i < y.size(); ++i) y[i] = static_cast<int32_t>(((repeat ? i % 4 : i) + s) % 3);
      session
          .step({{"x", {DType::kF32, {batch, 4}, x.data()}}, {"y", {DType::kI32, {batch}, y.data()}}},
                {{"loss", {DType::kF32, {}, &loss}}})
          .wait();
    }
    std::vector<std::vector<float>> values;
    for (const VariableInfo& v : session.variables()) {
      values.emplace_back(static_cast<size_t>(element_count(v.dims)));
      session.read(v.name, {v.dtype, v.dims, values.back().data()});
    }
    return values;
  };
  const auto single = train(half, "ref:1", {}, false);
  CHECK(distance(train(m, "ref:2", o, true), single) <= 1e-6);
  const auto different = train(m, "ref:2", o, false), summed = train(m, "ref:2", {}, false);
  CHECK(distance(different, summed) > 1e-4);  // not the mean
  for (const int zero : {1, 2, 3}) {
    CompileOptions cut = o;
    cut.zero = zero;
    CHECK(distance(train(m, "ref:2", cut, false), different) <= 1e-6);
  }
  CompileOptions more = o;
  more.accumulation = 2;  // a replica's micro-batches are summed first; its samples are others than without them
  const auto twice = train(m, "ref:2", more, false);
  more.accumulation = 0;
  more.strategy = "replica(2) > pipeline(2, micro_batches=2)";
  CHECK(distance(train(m, "ref:4", more, false), twice) <= 1e-6);
  more.strategy = "";
  CHECK(distance(train(m, "cpu@0*2", more, false), different) <= 1e-5);
  more.precision = Precision::kFloat16;
  CHECK(distance(train(m, "ref:2", more, false), different) <= 1e-2 * distance(different, train(m, "ref:2", {}, true)));
  for (const char* uneven : {"replica(3, shares=[4,3,1])", "replica(2) > replica(2)"}) {
    more = o;
    more.strategy = uneven;
    for (const auto& values : train(m, uneven[8] == '3' ? "ref:3" : "ref:4", more, false))
      for (const float v : values) CHECK(std::isfinite(v));
  }
}

TEST_CASE("adasum: what it cannot go with is refused by name") {
  const auto message = [](const CompileOptions& o, const char* devices) {
    return message_of([&] { compile(small::mlp().g, parse_devices(devices), o); });
  };
  CompileOptions o;
  o.adasum = true;
  o.strategy = "split(2)";
  CHECK(has(message(o, "ref:2"), "split"));
  o.strategy = "";
  o.gradient_dtype = DType::kBF16;
  CHECK(has(message(o, "ref:2"), "gradient dtype bf16"));
}

// Rows of what the other operand is, so both begin at one address.
TEST_CASE("f16: a product of a part of a tensor with all of it") {
  small::Model m;
  m.g.name = "gram";
  const TensorId x = m.input("x", {512, 64}), h = m.op(OpCode::k_matmul, {x, m.variable("w", {64, 64})});
  m.g.variables[0].init.b = 0.3;
  m.g.outputs = {{"y", m.op(OpCode::k_matmul, {h, h}, {{"transpose_b", true}})}};
  test::Dice dice(5);
  const test::Values inputs{{"x", dice.reals(512 * 64)}};
  const auto made = [&](Precision precision, int64_t chunks) {
    CompileOptions options;
    options.strategy = "split(2, factor=k)", options.precision = precision, options.matmul_chunks = chunks;
    test::Runner runner(m.g, "cpu:2", options);
    size_t parts = 0;
    for (const Program& p : runner.plan().entries[0].programs)
      for (const Segment& s : p.segments)
        for (const Instruction& i : s.instructions) parts += i.op() == OpCode::k_matmul;
    CHECK((parts > 2) == (chunks > 1));
    return runner.eval(inputs, {"y"}).at("y");
  };
  const std::vector<double> right = made(Precision::kFloat32, 1);
  CHECK(test::distance(made(Precision::kFloat16, 1), right) < 1e-2 * test::norm(right));
  CHECK(test::distance(made(Precision::kFloat16, 2), right) < 1e-2 * test::norm(right));
}

}  // namespace
}  // namespace whale
