#include "property.h"

#include <cstdlib>
#include <iostream>
#include <limits>
#include <optional>
#include <thread>

#include "base/error.h"
#include "base/format.h"
#include "cluster/devices.h"
#include "data/convert.h"
#include "plan/figures.h"
#include "plan/placed.h"

namespace whale::test {

bool is_full() {
  const char* full = std::getenv("WHALE_FULL");
  return full && *full && *full != '0';
}

bool holds(const std::string& name, int cases, const rc::detail::Property& property) {
  const rc::detail::Configuration& given = rc::detail::configuration();
  const char* text = std::getenv("RC_PARAMS");
  const std::string params = text ? text : "";
  rc::detail::TestParams p = given.testParams;
  if (params.find("max_success") == std::string::npos) p.maxSuccess = is_full() ? cases * 30 : cases;
  if (params.find("seed") == std::string::npos) p.seed = 20;
  p.maxSize = std::min(p.maxSize, 60);
  rc::detail::TestMetadata metadata;
  metadata.id = metadata.description = name;
  struct Quiet : rc::detail::TestListener {
    void onTestCaseFinished(const rc::detail::CaseDescription&) override {}
    void onShrinkTried(const rc::detail::CaseDescription&, bool) override {}
    void onTestFinished(const rc::detail::TestMetadata&, const rc::detail::TestResult&) override {}
  } quiet;
  const rc::detail::TestResult result = rc::detail::checkProperty(property, metadata, p, quiet, given.reproduce);
  if (result.is<rc::detail::SuccessResult>()) return true;
  std::cerr << "- " << name << "\n";
  rc::detail::printResultMessage(result, std::cerr);
  std::cerr << std::endl;
  return false;
}

uint64_t Dice::next() {  // splitmix64
  uint64_t z = state_ += 0x9e3779b97f4a7c15ull;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

std::vector<double> Dice::reals(size_t n) {
  std::vector<double> out(n);
  for (double& x : out) x = real();
  return out;
}

TensorId GraphMaker::input(std::string name, Dims dims, DType dtype, int batch_dim) {
  g.tensors.push_back({.name = std::move(name),
                       .dtype = dtype,
                       .dims = std::move(dims),
                       .kind = TensorKind::kInput,
                       .batch_dim = batch_dim});
  g.inputs.push_back(static_cast<TensorId>(g.tensors.size() - 1));
  return g.inputs.back();
}

TensorId GraphMaker::variable(std::string name, Dims dims, Initializer init, Role role) {
  const bool matrix = dims.size() >= 2;
  g.tensors.push_back(
      {.name = std::move(name), .dtype = DType::kF32, .dims = std::move(dims), .kind = TensorKind::kVariable});
  const auto id = static_cast<TensorId>(g.tensors.size() - 1);
  g.variables.push_back({.tensor = id,
                         .role = role,
                         .trainable = role == Role::kParameter,
                         .decay = matrix,
                         .init = std::move(init),
                         .state_name = ""});
  return id;
}

TensorId GraphMaker::op(OpCode code, std::vector<TensorId> inputs, Attrs attrs) {
  return g.op(append_op(g, code, std::move(inputs), std::move(attrs), scope)).outputs[0];
}

TensorId GraphMaker::constant(double value) {
  return op(OpCode::k_fill, {}, {{"shape", Dims{}}, {"value", value}, {"dtype", std::string("f32")}});
}

namespace {

constexpr double kLongest = 60;  // seconds of a run, also under sanitizers

std::shared_ptr<Backends> backends() {
  const char* folder = std::getenv("WHALE_LIBRARY_DIR");  // where the build has put libwhale_cpu.so
  static const auto all = std::make_shared<Backends>(folder ? folder : "");
  return all;
}

std::vector<char> pack(DType dtype, const std::vector<double>& values) {
  std::vector<char> out(values.size() * static_cast<size_t>(size_of(dtype)));
  if (dtype == DType::kI32) {
    for (size_t i = 0; i < values.size(); ++i)
      reinterpret_cast<int32_t*>(out.data())[i] = static_cast<int32_t>(values[i]);
  } else {
    convert(DType::kF64, values.data(), dtype, out.data(), values.size());
  }
  return out;
}

std::vector<double> unpack(DType dtype, const std::vector<char>& bytes) {
  std::vector<double> out(bytes.size() / static_cast<size_t>(size_of(dtype)));
  for (size_t i = 0; i < out.size(); ++i)
    out[i] = element(dtype, bytes.data() + i * static_cast<size_t>(size_of(dtype)));
  return out;
}

}  // namespace

namespace {
// What runs is what a plan file holds. That a file is refused is a fault, whatever the model.
Plan from_file(const Plan& plan) {
  const std::vector<uint8_t> bytes = serialize(plan);
  try {
    Plan read = deserialize(bytes.data(), bytes.size());
    WHALE_CHECK(print(read) == print(plan), "a plan's file holds that plan");
    return read;
  } catch (const Error& e) {
    throw internal("the plan's own file: {}", e.what());
  }
}

// One of unlike devices has less memory than it would take without a limit and the others more, where a plan fits that:
// cuts and shares by room are plans like any other. The limits are taken back afterwards, since other batches may need
// more.
std::optional<Plan> in_less_memory(const Graph& graph, std::vector<DeviceSpec> devices, const CompileOptions& options,
                                   const Plan& roomy) {
  Dice dice(roomy.model_hash);
  const auto small = static_cast<int32_t>(dice.below(std::ssize(devices)));
  for (const DeviceRow& row : roomy.entries[0].rows) {
    int64_t needed = 1;
    for (const Entry& e : roomy.entries)
      needed = std::max(needed, memory_of(roomy, e, static_cast<size_t>(e.rows[row.device].program)).device.total());
    devices[row.device].memory_bytes =
        needed * (row.device == small ? dice.between(80, 99) : dice.between(120, 300)) / 100 + 1;
  }
  try {
    Plan plan = compile(graph, devices, options);
    for (DeviceSpec& d : plan.devices) d.memory_bytes = 0;
    return plan;
  } catch (const Error& e) {
    if (e.code() != Code::kResourceExhausted) throw;
    return std::nullopt;
  }
}

// A device runs the program that it would have if it shared none.
Plan shared(const Graph& graph, const std::vector<DeviceSpec>& devices, CompileOptions options) {
  Plan plan = compile(graph, devices, options);
  options.share_programs = false;
  const Plan apart = compile(graph, devices, options);
  for (size_t e = 0; e < plan.entries.size(); ++e)
    for (size_t k = 0; k < plan.entries[e].rows.size(); ++k) {
      const auto text = [&](const Entry& entry) {
        const DeviceRow& row = entry.rows[k];
        return print(bound(entry.programs[row.program], row));
      };
      WHALE_CHECK(text(plan.entries[e]) == text(apart.entries[e]), "device {} shares a program that is not its own", k);
    }
  options.share_programs = true;
  if (are_unlike(devices))
    if (std::optional<Plan> less = in_less_memory(graph, devices, options, plan)) return std::move(*less);
  return plan;
}
}  // namespace

std::vector<DeviceSpec> devices_of_text(const std::string& text) {
  constexpr std::string_view kUnlike = " unlike ";
  const size_t at = text.find(kUnlike);
  std::vector<DeviceSpec> out = parse_devices(text.substr(0, at));
  if (at == text.npos) return out;
  Dice dice(std::stoull(text.substr(at + kUnlike.size())));
  for (DeviceSpec& d : out) {
    d.figures.f32_flops_per_second = 1e9 * static_cast<double>(dice.between(1, 4));
    d.figures.bytes_per_second = 1e12, d.figures.seconds_per_op = 1e-9;
  }
  return out;
}

Runner::Runner(const Graph& graph, const std::string& devices, CompileOptions options, uint64_t seed, int ranks)
    : plan_(std::make_shared<const Plan>(from_file(shared(graph, devices_of_text(devices), options)))),
      sessions_(static_cast<size_t>(ranks)) {
  SessionOptions o{.seed = seed, .threads = 1};
  if (ranks == 1) {
    sessions_[0] = std::make_unique<Session>(plan_, backends(), o);
    return;
  }
  // Each rank waits for the others to open theirs. They share no engine.
  const std::vector<World> worlds = make_inproc_worlds(ranks);
  std::vector<std::exception_ptr> failures(worlds.size());
  std::vector<std::thread> threads;
  for (size_t r = 0; r < worlds.size(); ++r)
    threads.emplace_back([&, r] {
      SessionOptions mine = o;
      mine.world = worlds[r];
      try {
        sessions_[r] = std::make_unique<Session>(std::make_shared<const Plan>(*plan_), backends(), mine);
      } catch (...) {
        failures[r] = std::current_exception();
      }
    });
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& failure : failures)
    if (failure) std::rethrow_exception(failure);
}

Values Runner::run(RunMode mode, const Values& inputs, const std::vector<std::string>& outputs) {
  const Entry* entry = nullptr;
  for (const Entry& e : plan_->entries)
    if (e.name == (mode == RunMode::kStep ? "train" : "eval")) entry = &e;
  std::vector<std::vector<char>> memory;
  std::vector<NamedHost> in, out;
  for (const PlanInput& port : entry->inputs) {
    const auto given = inputs.find(port.name);
    if (given == inputs.end()) continue;
    Dims dims = port.dims;
    if (port.batch_dim >= 0) {
      int64_t& batch = dims[port.batch_dim];
      batch = static_cast<int64_t>(given->second.size()) * batch / element_count(port.dims);
    }
    memory.push_back(pack(port.dtype, given->second));
    in.push_back({port.name, {port.dtype, dims, memory.back().data()}});
  }
  std::vector<TensorType> types;
  for (auto& session : sessions_) types = session->output_types(mode, in, outputs);
  std::vector<std::vector<std::vector<char>>> results(sessions_.size());  // by rank and output
  const auto cancel = std::make_shared<Cancel>();
  std::vector<RunHandle> handles(sessions_.size());
  std::optional<Error> failure;
  for (size_t r = 0; r < sessions_.size(); ++r) {
    out.clear();
    results[r].resize(outputs.size());
    for (size_t i = 0; i < outputs.size(); ++i) {
      HostTensor host{types[i].dtype, types[i].dims, nullptr};
      results[r][i].resize(host.bytes(), static_cast<char>(r));  // what nobody hands over is not the same
      host.data = results[r][i].data();
      out.push_back({outputs[i], host});
    }
    try {
      handles[r] = mode == RunMode::kStep ? sessions_[r]->step(in, out, cancel) : sessions_[r]->eval(in, out, cancel);
    } catch (const Error& e) {
      if (!failure) failure = e;
    }
  }
  for (const RunHandle& handle : handles) {
    try {
      if (handle.wait(kLongest)) continue;
    } catch (const Error& e) {
      if (!failure) failure = e;
      continue;
    }
    cancel->trigger();
    for (const RunHandle& each : handles) each.settle();
    throw internal("a run has not ended in {} seconds", kLongest);
  }
  if (failure) throw Error(*failure);
  Values values;
  for (size_t i = 0; i < outputs.size(); ++i) {
    for (size_t r = 1; r < results.size(); ++r)
      if (results[r][i] != results[0][i]) throw internal("rank {} has another '{}' than rank 0", r, outputs[i]);
    values[outputs[i]] = unpack(types[i].dtype, results[0][i]);
  }
  return values;
}

std::vector<double> Runner::read(const std::string& name, int64_t copy) {
  const TensorType type = session().variable_type(name);
  std::vector<char> bytes(static_cast<size_t>(element_count(type.dims) * size_of(type.dtype)));
  std::vector<char> other(bytes.size(), 1);
  for (auto& session : sessions_) {
    session->read_here(name, {type.dtype, type.dims, bytes.data()}, copy);
    session->read_here(name, {type.dtype, type.dims, other.data()}, copy);
  }
  WHALE_CHECK(bytes == other, "every byte of '{}' is somewhere", name);
  return unpack(type.dtype, bytes);
}

Values Runner::variables() {
  Values out;
  for (const VariableInfo& v : session().variables()) {
    const std::vector<double>& first = out[v.name] = read(v.name);
    for (int64_t k = 1; k < std::ssize(v.copies); ++k)
      if (std::vector<double> copy = read(v.name, k); copy != first)
        out[fmt::format("{}, copy {} of devices {}", v.name, k, fmt::join(v.copies[k], ","))] = copy;
  }
  return out;
}

void Runner::write(const std::string& name, const std::vector<double>& values) {
  const TensorType type = session().variable_type(name);
  std::vector<char> bytes = pack(type.dtype, values);
  for (auto& session : sessions_) session->write(name, {type.dtype, type.dims, bytes.data()});
}

Values Runner::parameters() {
  Values out;
  for (const VariableInfo& v : session().variables())
    if (v.role == Role::kParameter) out[v.name] = read(v.name);
  return out;
}

Values random_inputs(const Graph& graph, int64_t batch, Dice& dice, int64_t integers_below) {
  Values out;
  for (const TensorId id : graph.inputs) {
    const Tensor& t = graph.tensor(id);
    Dims dims = t.dims;
    if (t.batch_dim >= 0) dims[t.batch_dim] = batch;
    std::vector<double>& values = out[t.name] = dice.reals(static_cast<size_t>(element_count(dims)));
    for (double& x : values)
      x = is_float(t.dtype) ? static_cast<float>(x) : static_cast<double>(dice.below(integers_below));
  }
  return out;
}

double norm(const std::vector<double>& a) {
  double sum = 0;
  for (const double x : a) sum += x * x;
  return std::sqrt(sum);
}

double distance(const std::vector<double>& a, const std::vector<double>& b) {
  if (a.size() != b.size()) return std::numeric_limits<double>::infinity();
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += (a[i] - b[i]) * (a[i] - b[i]);
  return std::isfinite(sum) ? std::sqrt(sum) : std::numeric_limits<double>::infinity();
}

std::vector<double> random_shares(int64_t n, Dice& dice) {
  std::vector<double> shares(static_cast<size_t>(n));
  for (double& s : shares)
    s = dice.below(4) == 0 ? 0
        : dice.coin()      ? static_cast<double>(dice.between(1, 5))
                           : 0.25 * static_cast<double>(dice.between(1, 9));
  if (norm(shares) == 0) shares[dice.below(n)] = 1;
  return shares;
}

std::string replica(const std::vector<double>& shares) {
  return fmt::format("replica({}, shares=[{}])", shares.size(), fmt::join(shares, ","));
}

}  // namespace whale::test
