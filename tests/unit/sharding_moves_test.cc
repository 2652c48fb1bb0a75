// Any sharding to any sharding: a variable with one random storage sharding is copied (or summed) into one with
// another, on the same mesh or another one, by the reshards that the planner chooses. Every element is looked up on
// every device.
#include <doctest/doctest.h>

#include <map>

#include "base/error.h"
#include "cluster/shares.h"
#include "device/ref/ref.h"
#include "lower/lower.h"
#include "plan/groups.h"
#include "property.h"
#include "rewrite/order.h"
#include "run/executor.h"
#include "shard/insert.h"
#include "unit/tasks.h"

using namespace whale;
using namespace whale::test;
using enum OpCode;

namespace {

using Places = std::vector<std::vector<int64_t>>;  // per device of a mesh: the logical elements, in local order

struct Move {
  Dims dims;          // of the target
  int64_t parts = 0;  // > 0: the source has a dimension more in front, which is cut along one axis and summed
  std::vector<Mesh> meshes;
  Sharding from, to;  // over the axes of the first and the last mesh, without time
  std::string text() const {
    std::string out = fmt::format("dims [{}], parts {}", fmt::join(dims, ", "), parts);
    for (const Mesh& mesh : meshes) {
      out += "; mesh";
      for (const MeshAxis& a : mesh.axes)
        out += fmt::format(" {}({})({})", a.size, fmt::join(a.shares, ","), fmt::join(a.state_shares, ","));
    }
    return out + fmt::format("; {} -> {}", to_string(from), to_string(to));
  }
};

// By the definition of a sharding, an element at a time.
Places places_of(const Dims& dims, const Mesh& mesh, const Sharding& sharding) {
  Places out;
  for (size_t k = 0; k < mesh.devices.size(); ++k) {
    const Ints at = mesh.coordinates(static_cast<int64_t>(k));
    struct Cut {
      SubAxis sub_axis;
      int64_t extent, begin, end;
    };
    std::vector<Cut> cuts;
    for (size_t a = 0; a < mesh.axes.size(); ++a) {
      const AxisSharding& l = sharding.axes[a];
      if (l.placement != Placement::kShard) continue;
      const int64_t extent = dims[l.sub_axis.dim] / l.sub_axis.outer / l.sub_axis.inner;
      auto cut = std::find_if(cuts.begin(), cuts.end(), [&](const Cut& c) { return c.sub_axis == l.sub_axis; });
      if (cut == cuts.end()) cut = cuts.insert(cuts.end(), {l.sub_axis, extent, 0, extent});
      std::vector<double> shares = l.state ? mesh.axes[a].state_shares : mesh.axes[a].shares;
      if (shares.empty()) shares.assign(static_cast<size_t>(mesh.axes[a].size), 1);
      const Ints sizes = round_shares(cut->end - cut->begin, shares);
      for (int64_t c = 0; c < at[a]; ++c) cut->begin += sizes[c];
      cut->end = cut->begin + sizes[at[a]];
    }
    const Dims strides = row_major_strides(dims);
    std::vector<int64_t> mine;
    for (int64_t e = 0; e < element_count(dims); ++e)
      if (std::all_of(cuts.begin(), cuts.end(), [&](const Cut& c) {
            const auto d = static_cast<size_t>(c.sub_axis.dim);
            const int64_t sub_axis = e / strides[d] % dims[d] / c.sub_axis.inner % c.extent;
            return sub_axis >= c.begin && sub_axis < c.end;
          }))
        mine.push_back(e);
    out.push_back(std::move(mine));
  }
  return out;
}

// ---- random shardings ---------------------------------------------------------------------------------------------
std::vector<MeshAxis> random_axes(Dice& dice, size_t n, int64_t most) {
  std::vector<MeshAxis> axes;
  for (size_t a = 0; a < n; ++a) {
    MeshAxis axis{fmt::format("axis{}", a), dice.between(1, std::min<int64_t>(most, 4)), {}, {}};
    most /= axis.size;
    if (dice.below(3) == 0) axis.shares = random_shares(axis.size, dice);
    if (dice.below(3) == 0) axis.state_shares = random_shares(axis.size, dice);
    axes.push_back(std::move(axis));
  }
  return axes;
}

Mesh mesh_of(std::vector<MeshAxis> axes, int32_t first) {
  Mesh mesh{std::move(axes), {}};
  int64_t n = 1;
  for (const MeshAxis& a : mesh.axes) n *= a.size;
  for (int64_t d = 0; d < n; ++d) mesh.devices.push_back(first + static_cast<int32_t>(d));
  return mesh;
}

Sharding random_sharding(const Dims& dims, const Mesh& mesh, Dice& dice) {
  Sharding out;
  for (const MeshAxis& axis : mesh.axes) {
    AxisSharding l;
    if (axis.size > 1 && dice.below(3)) {
      const int64_t d = dice.below(std::ssize(dims)), n = dims[d];
      // A sub-axis of the dimension: what lies outside and inside of it.
      std::vector<int64_t> divisors;
      for (int64_t k = 1; k <= n; ++k)
        if (n % k == 0) divisors.push_back(k);
      const auto pick = [&] { return dice.coin() ? 1 : divisors[dice.below(std::ssize(divisors))]; };
      l.sub_axis = {static_cast<int>(d), pick(), pick()};
      l.placement = Placement::kShard;
      l.state = dice.below(3) == 0;
      bool fits = n % (l.sub_axis.outer * l.sub_axis.inner) == 0;
      for (const AxisSharding& other : out.axes)
        fits = fits && (other.placement != Placement::kShard || compatible(dims, other.sub_axis, l.sub_axis));
      if (!fits) l = {};
    }
    out.axes.push_back(l);
  }
  return out;
}

Move random_move(Dice& dice) {
  Move m;
  for (int64_t rank = dice.between(1, 3); rank-- > 0;) m.dims.push_back(dice.between(1, 3) * dice.between(1, 4));
  const size_t axes = static_cast<size_t>(dice.between(1, 3));
  m.meshes.push_back(mesh_of(random_axes(dice, axes, 6), 0));
  if (dice.below(3) == 0)
    m.meshes.push_back(mesh_of(random_axes(dice, axes, 6), static_cast<int32_t>(m.meshes[0].devices.size())));
  m.from = random_sharding(m.dims, m.meshes.front(), dice);
  m.to = random_sharding(m.dims, m.meshes.back(), dice);
  if (dice.below(3) == 0) {  // a part of a sum along one axis
    const auto a = static_cast<size_t>(dice.below(static_cast<int64_t>(axes)));
    m.parts = dice.between(1, 5);
    for (AxisSharding& l : m.from.axes)
      if (l.placement == Placement::kShard) ++l.sub_axis.dim;
    if (m.meshes[0].axes[a].size > 1) m.from.axes[a] = {.placement = Placement::kShard, .sub_axis = {0, 1, 1}};
  }
  return m;
}

// ---- planned and run ----------------------------------------------------------------------------------------------
struct Made {
  ShardedGraph lg;
  Plan plan;
};
Made plan_of(const Move& m) {
  GraphMaker maker;
  Dims source = m.dims;
  if (m.parts) source.insert(source.begin(), m.parts);
  const TensorId a = maker.variable("a", source);
  maker.variable("b", m.dims);
  const TensorId y = m.parts ? maker.op(k_reduce_sum, {a}, {{"axes", Dims{0}}}) : maker.op(k_neg, {a});
  Graph& g = maker.g;
  g.variables[1].next = y;
  TaskGraphs tasks(CostModel({}, 1, kMachineOfCores));
  const auto meshes = static_cast<int32_t>(m.meshes.size());
  tasks.tasks.resize(1);
  tasks.tasks[0].roles.assign(m.from.axes.size(), AxisRole::kReplica);  // ops go along with what they read
  tasks.tasks[0].factors.resize(m.from.axes.size());
  tasks.tasks[0].ops = {0};
  tasks.task_of_scope = {0};
  tasks.stage_of_scope = {0};
  tasks.meshes = m.meshes;
  for (int32_t k = 0; k < meshes; ++k) tasks.mesh_of_stage.push_back(k);
  tasks.by_micro_batch.assign(m.from.axes.size(), 0);
  StorageShardings storage_shardings;
  storage_shardings["a"] = {&m.from, 0};
  storage_shardings["b"] = {&m.to, meshes - 1};
  ShardOptions options;
  options.storage_shardings = &storage_shardings;
  Made made{small::lay_out(g, tasks, options), {}};
  verify(made.lg);
  order_ops(made.lg);
  Plan& plan = made.plan;
  plan.model = "move";
  for (const Mesh& mesh : m.meshes)
    for (size_t d = 0; d < mesh.devices.size(); ++d) plan.devices.push_back({DeviceKind::kRef, {}, 0});
  plan.meshes = m.meshes;
  plan.groups = groups_of(tasks.meshes);
  plan.scopes = {Scope{}};
  for (const Variable& v : g.variables) {
    PlanVariable p;
    p.name = g.tensor(v.tensor).name;
    p.dtype = DType::kF32;
    p.dims = g.tensor(v.tensor).dims;
    p.init = v.init;
    p.mesh = storage_shardings[p.name].mesh;
    p.storage_sharding = p.name == "a" ? m.from : m.to;
    plan.variables.push_back(std::move(p));
  }
  plan.entries = {lower(made.lg, {.entry = "train", .variables = {{"a", 0}, {"b", 1}}})};
  verify(plan);
  return made;
}

struct Ended {
  RunState state;
  static void call(void* self, std::optional<Error>& error, bool) { static_cast<Ended*>(self)->state.finish(error); }
};

// Elements that devices get from others: by the collectives and transfers of the plan.
int64_t moved(const Plan& plan) {
  const Entry& e = plan.entries[0];
  int64_t n = 0;
  for (const DeviceRow& row : e.rows) {
    const Program& p = e.programs[row.program];
    const auto elements = [&](BufferId b) { return element_count(p.buffers[b].dims); };
    for (const Segment& s : p.segments)
      for (const Instruction& i : s.instructions) {
        if (i.kind() != InstructionKind::kCollective) continue;
        if (i.op() == k_all_gather) n += elements(i.out[0]) - elements(i.in[0]);
        if (i.op() == k_all_to_all) {
          const std::vector<Interval>& to = i.as<work::Collective>()->to.cuts;
          // What this device keeps: its own part of both cuts.
          int64_t at = 0;
          for (const auto& part : plan.groups[i.group()].parts)
            if (const auto me = std::find(part.begin(), part.end(), row.device); me != part.end())
              at = me - part.begin();
          const int64_t whole = to.back().end, mine = to[at].size();
          n += elements(i.out[0]) - (whole ? elements(i.in[0]) / whole * mine : 0);
        }
      }
  }
  for (const Link& link : e.links)
    for (const Transfer& t : link.transfers) {
      if (t.from == t.to) continue;
      int64_t box = 1;
      for (const Interval& i : t.source) box *= i.size();
      n += box;
    }
  return n;
}

int64_t plain_transfers(const Places& from, const Places& to) {
  int64_t n = 0;
  for (size_t d = 0; d < to.size(); ++d)
    for (const int64_t e : to[d]) n += !std::binary_search(from[d].begin(), from[d].end(), e);
  return n;
}

void check(const Move& m, int64_t& compared) {
  const Made made = plan_of(m);
  Dims source = m.dims;
  if (m.parts) source.insert(source.begin(), m.parts);
  const auto n = static_cast<size_t>(element_count(m.dims));
  const auto backend = make_ref_backend();
  std::vector<std::unique_ptr<Device>> devices;
  for (size_t d = 0; d < made.plan.devices.size(); ++d) devices.push_back(backend->open(made.plan.devices[d]));
  Machine machine(made.plan, std::move(devices));
  std::vector<float> a(static_cast<size_t>(element_count(source))), want(n);
  for (size_t i = 0; i < a.size(); ++i) {
    a[i] = static_cast<float>(i + 1);
    want[i % n] += m.parts ? a[i] : -a[i];
  }
  Executor executor(machine, made.plan.entries[0]);
  machine.write_variable(0, 0, a.data(), a.size() * 4);
  machine.variable_written(0);
  Ended ended;
  executor.start({}, &Ended::call, &ended);
  RC_ASSERT(ended.state.wait(30));
  machine.team().wait_idle();
  if (ended.state.error()) RC_LOG() << ended.state.error()->message() << "\n";
  RC_ASSERT(!ended.state.error());
  const Mesh& mesh = m.meshes.back();
  const Places to = places_of(m.dims, mesh, m.to);
  for (size_t k = 0; k < mesh.devices.size(); ++k) {
    DeviceMemory& memory = machine.memory(static_cast<size_t>(mesh.devices[k]));
    RC_ASSERT(memory.variable_bytes(1) == to[k].size() * 4);
    std::vector<float> found(to[k].size());
    memory.device().copy_out(found.data(), memory.variable(1), found.size() * 4);
    for (size_t i = 0; i < found.size(); ++i) {
      const float expected = want[to[k][i]];
      if (found[i] != expected)
        RC_LOG() << fmt::format("device {}, element {}: {}, expected {}\n", k, to[k][i], found[i], expected);
      RC_ASSERT(found[i] == expected);
    }
  }
  if (m.parts || m.meshes.size() > 1) return;
  const int64_t plain = plain_transfers(places_of(m.dims, mesh, m.from), to), chosen = moved(made.plan);
  if (chosen > plain) RC_LOG() << fmt::format("{} elements moved, {} are missing\n", chosen, plain) << print(made.lg);
  RC_ASSERT(chosen <= plain);
  ++compared;
}

}  // namespace

TEST_CASE("property: any sharding to any sharding") {
  int64_t compared = 0;
  CHECK(holds("moves", 2000, [&] {
    Dice dice(*rc::gen::noShrink(rc::gen::inRange<uint32_t>(0, 1u << 30)));
    const Move m = random_move(dice);
    RC_LOG() << m.text() << "\n";
    check(m, compared);
  }));
  CHECK(compared > 100);
}
