#include "lower/lower.h"

#include <algorithm>
#include <map>
#include <set>

#include "base/error.h"
#include "base/watch.h"
#include "lower/chunk_products.h"
#include "lower/program.h"
#include "lower/program_pattern.h"
#include "lower/storage.h"
#include "plan/limits.h"
#include "plan/row_waits.h"
#include "rewrite/copies.h"
#include "rewrite/order.h"
#include "schedule/verify.h"
#include "task/unlike.h"

namespace whale {
namespace {

std::vector<PlanInput> inputs_of(const Graph& g) {
  std::vector<PlanInput> out;
  for (const TensorId id : g.inputs) {
    const Tensor& t = g.tensor(id);
    out.push_back({t.name, t.dtype, t.dims, t.batch_dim});
  }
  return out;
}

// Several fetches of one name are one output: the first one hands it over.
std::vector<PlanOutput> outputs_of(const ShardedGraph& lg) {
  std::vector<PlanOutput> out;
  std::set<std::string> names;
  for (const NamedTensor& f : lg.fetches) {
    if (!names.insert(f.name).second) continue;
    const Tensor& t = lg.graph.tensor(f.tensor);
    PlanOutput o;
    o.name = f.name;
    o.dtype = t.dtype;
    o.dims = t.dims;
    o.mesh = lg.tasks.mesh_of_stage[lg.stage(f.tensor)];
    for (size_t a = 0; a < lg.axes(); ++a) {
      const bool cut = lg.at(f.tensor, a).placement == Placement::kShard;
      const bool samples = cut && lg.at(f.tensor, a).samples;
      if (cut) o.merge = OutputMerge::kConcat;
      if (samples) o.batch_dim = lg.at(f.tensor, a).sub_axis.dim;
      if (a != kTime) o.cut_by.push_back(cut || (lg.by_micro_batch(a) && lg.time_varies(f.tensor)));
      if (a != kTime) o.parts.axes.push_back(cut && !samples ? lg.at(f.tensor, a) : AxisSharding{});
    }
    if (std::all_of(o.parts.axes.begin(), o.parts.axes.end(),
                    [](const AxisSharding& l) { return l.placement == Placement::kReplicate; }))
      o.parts = {};
    for (const NamedTensor& other : lg.fetches) {  // unlike replicas hand over their own samples
      if (!lg.of_unlike(1) || other.name != f.name || !lg.at(other.tensor, 1).samples) continue;
      if (lg.stage(other.tensor) != lg.stage(f.tensor)) o.mesh = kNone;
      for (size_t a = 1; a < lg.axes(); ++a)
        if (lg.at(other.tensor, a).placement == Placement::kShard) o.cut_by[a - 1] = true;
    }
    const bool summed = t.producer != kNone && lg.graph.op(t.producer).code == OpCode::k_accumulate;
    if (o.merge == OutputMerge::kSame && summed) o.merge = OutputMerge::kSum;
    out.push_back(std::move(o));
  }
  return out;
}

class Lowerer {
  // Per axis that cuts a tensor: the axis, the sub-axis's whole extent, by state, how far it has gone round, and which
  // entry cuts this sub-axis first.
  using Signature = std::vector<std::tuple<size_t, int64_t, bool, int64_t, size_t>>;
  struct Pattern {
    size_t program = 0;
    ProgramPattern pattern;
  };

 public:
  Lowerer(const ShardedGraph& lg, const LowerOptions& options) : lg_(lg), low_(lg, options) {}

  Entry run() {
    entry_.name = low_.options.entry;
    entry_.batch = lg_.batch;
    entry_.inputs = inputs_of(lg_.graph);
    entry_.outputs = outputs_of(lg_);
    find_sizes();
    find_masks();
    make_schedule_of_pipeline();
    low_.index();
    make_links();
    find_axes();
    make_rows();
    for (const auto& [sizes, patterns] : patterns_)
      for (const Pattern& pattern : patterns) leave_holes(pattern);
    return std::move(entry_);
  }

 private:
  void find_sizes() {
    std::map<int64_t, int32_t> first;
    for (int64_t u = 0; u < lg_.micro_batches; ++u) {
      Watch::look();
      const int64_t size =
          lg_.micro_batches > 1 ? low_.local.samples(1, Place{0, lg_.tasks.meshes[0].coordinates(0), u}).size() : 0;
      low_.size_class.push_back(first.try_emplace(size, static_cast<int32_t>(u)).first->second);
    }
  }

  // Along an axis that has one place in a mesh, cut or not is the same there.
  uint64_t seen_in(int32_t mesh, uint64_t mask) const {
    const auto& axes = lg_.tasks.meshes[mesh].axes;
    for (size_t a = 0; a < axes.size(); ++a)
      if (axes[a].size == 1 && axes[a].only < 0) mask &= ~(uint64_t{1} << (a + 1));
    return mask;
  }

  // The first one is what most ops follow.
  void find_masks() {
    std::set<uint64_t> masks;
    std::map<std::pair<int32_t, uint64_t>, int64_t> seen;  // in each mesh
    std::vector<int64_t> times(lg_.graph.tensors.size());
    const auto use = [&](TensorId id) { ++times[id]; };
    for (const Op& op : lg_.graph.ops) {
      for (const TensorId id : op.inputs)
        if (id != kNone) use(id);
      for (const TensorId id : op.outputs)
        if (id != kNone) use(id);
    }
    for (const NamedTensor& f : lg_.fetches) use(f.tensor);
    for (const TensorId id : lg_.graph.inputs) use(id);
    for (size_t t = 0; t < times.size(); ++t) {
      if (times[t] == 0) continue;
      const int32_t mesh = lg_.tasks.mesh_of_stage[lg_.stages[t]];
      const uint64_t mask = low_.local.sample_mask(static_cast<TensorId>(t));
      masks.insert(mask);
      seen[{mesh, seen_in(mesh, mask)}] += times[t];
    }
    // None counts last, and what is none in a mesh does not count for it: parameters are not cut either.
    std::map<uint64_t, int64_t> uses{{0, 0}};
    for (const uint64_t mask : masks)
      for (const auto& [in, n] : seen)
        if (in.second != 0 && seen_in(in.first, mask) == in.second) uses[mask] += n;
    low_.masks.assign(masks.begin(), masks.end());
    if (low_.masks.empty()) low_.masks.push_back(0);
    std::stable_sort(low_.masks.begin(), low_.masks.end(), [&](uint64_t a, uint64_t b) { return uses[a] > uses[b]; });
  }

  void make_schedule_of_pipeline() {
    if (lg_.tasks.schedule.empty() || lg_.micro_batches == 1) return;
    bool backward = false;
    for (const Op& op : lg_.graph.ops) backward |= op.phase == Phase::kBackward;
    const Mesh& first = lg_.tasks.meshes[0];
    for (size_t k = 0; k < first.devices.size(); ++k) {
      if (first.devices[k] < 0) continue;
      const int64_t run = low_.local.micro_batches({0, first.coordinates(static_cast<int64_t>(k)), 0}).size();
      const auto [at, fresh] = low_.schedules.try_emplace(run);
      if (!fresh) continue;
      PipelineSchedule& schedule = at->second;
      const std::vector<PipelineSchedule> pipelines = pipelines_of(lg_.tasks, run);
      const bool few = low_.options.detail == Detail::kFiguresOfFew;
      for (const PipelineSchedule& pipeline : pipelines) {
        const int capacity = few ? 1 : std::max(capacity_needed(pipeline), 1);
        capacity_ = std::max(capacity_, capacity);
        if (backward && !few) verify_schedule(pipeline, capacity);
      }
      schedule = beside_each_other(pipelines);
      if (!backward) {  // evaluation: the forward items in the order that they have
        for (auto& order : schedule.devices)
          std::erase_if(order, [](const WorkItem& item) { return item.kind != WorkKind::kForward; });
      }
      if (run == 0)
        for (auto& order : schedule.devices) order.clear();
    }
    low_.schedule = &low_.schedules.begin()->second;
    low_.weight_op = weight_ops(lg_);
  }

  // ---- links ----------------------------------------------------------------------------------------------------
  void make_links() {
    for (const Op& op : lg_.graph.ops) {
      if (op.code != OpCode::k_transfer) continue;
      const bool body = lg_.micro_batches > 1 && op.region == Region::kBody;
      std::set<int32_t> sizes(low_.size_class.begin(), low_.size_class.end());
      if (!body) sizes = {0};
      for (const int32_t u : sizes) {
        low_.link_of[{&op, u}] = static_cast<int32_t>(entry_.links.size());
        const bool inside = lg_.stage(op.inputs[0]) == op.stage;
        entry_.links.push_back(inside || low_.options.detail != Detail::kFiguresOfFew ? link_of(op, u, body) : Link{});
        if (inside) low_.inside[low_.link_of[{&op, u}]] = most_received(entry_.links.back());
      }
    }
  }

  static int64_t most_received(const Link& link) {
    std::map<int32_t, int64_t> received;
    for (const Transfer& t : link.transfers) {
      int64_t n = t.from != t.to;
      for (const Interval& i : t.source) n *= i.size();
      received[t.to] += n;
    }
    int64_t most = 0;
    for (const auto& [device, n] : received) most = std::max(most, n);
    return most;
  }

  Link link_of(const Op& op, int32_t u, bool body) const {
    const TensorId x = op.inputs[0], y = op.outputs[0];
    const int32_t from = lg_.stage(x), to = op.stage;
    const Mesh &source = lg_.tasks.mesh(from), &target = lg_.tasks.mesh(to);
    Link link;
    link.name = lg_.graph.tensor(y).name;
    const int distance = std::abs(to - from);
    link.capacity = body ? std::max({1, capacity_, distance > 1 ? static_cast<int>(lg_.micro_batches) : 1}) : 1;
    check_versions(link.capacity, lg_.tasks.schedule);
    const auto place_of = [&](int32_t stage, const Mesh& mesh, size_t k) {
      return Place{lg_.tasks.mesh_of_stage[stage], mesh.coordinates(static_cast<int64_t>(k)), u};
    };
    const bool of_one = op.attrs.contains("from");  // what one coordinate along the axis holds
    const size_t axis = of_one ? static_cast<size_t>(attr_int(op.attrs, "group")) + 1 : 0;
    // Of several copies, the one at the same coordinates (or next to it); parts of a sum meet their own.
    std::vector<size_t> same;
    for (size_t a = 1; a < lg_.axes(); ++a)
      if ((!of_one || a != axis) && (lg_.at(x, a).placement != Placement::kShard || lg_.at(x, a).window.present()))
        same.push_back(a - 1);
    struct Holder {
      int32_t device = 0;
      Part part;
      size_t number = 0;
      Ints members;  // along each of `same`
    };
    std::map<Ints, std::vector<Holder>> holders;  // by coordinates along each of `same`
    std::set<Ints> members;
    for (size_t s = 0; s < source.devices.size(); ++s) {
      const Place place = place_of(from, source, s);
      if (source.devices[s] < 0 || (of_one && place.coordinates[axis - 1] != attr_int(op.attrs, "from"))) continue;
      Holder holder{source.devices[s], low_.local.part(x, place), s, {}};
      Ints coordinates;
      for (const size_t a : same) {
        coordinates.push_back(place.coordinates[a]);
        holder.members.push_back(source.axes[a].members(row_of(source.axes, a, place.coordinates)));
      }
      members.insert(holder.members);
      holders[std::move(coordinates)].push_back(std::move(holder));
    }
    for (size_t k = 0; k < target.devices.size(); ++k) {
      if (target.devices[k] < 0) continue;
      const Place place = place_of(to, target, k);
      const Part want = low_.local.part(y, place);
      std::vector<const Holder*> mine;
      for (const Ints& groups : members) {
        Ints wanted;
        for (size_t n = 0; n < same.size(); ++n) wanted.push_back(place.coordinates[same[n]] % groups[n]);
        const auto there = holders.find(wanted);
        if (there == holders.end()) continue;
        for (const Holder& holder : there->second)
          if (holder.members == groups) mine.push_back(&holder);
      }
      std::ranges::sort(mine, {}, &Holder::number);
      for (const Holder* holder : mine) {
        Watch::look();
        add_boxes(link, holder->device, holder->part, target.devices[k], want);
      }
    }
    return link;
  }

  // The intersection of two parts, box by box, in coordinates of both.
  static void add_boxes(Link& link, int32_t from, const Part& source, int32_t to, const Part& target) {
    if (source.empty() || target.empty()) return;
    for (size_t d = 0; d < source.dims.size(); ++d)  // most parts are apart, and that is soon seen
      if (source.dims[d].back().end <= target.dims[d].front().begin ||
          target.dims[d].back().end <= source.dims[d].front().begin)
        return;
    struct Piece {
      Interval source, target;
    };
    std::vector<std::vector<Piece>> pieces(source.dims.size());
    for (size_t d = 0; d < source.dims.size(); ++d) {
      int64_t s = 0;
      for (const Interval& a : source.dims[d]) {
        int64_t t = 0;
        for (const Interval& b : target.dims[d]) {
          const Interval both{std::max(a.begin, b.begin), std::min(a.end, b.end)};
          if (both.size() > 0)
            pieces[d].push_back({{s + both.begin - a.begin, s + both.end - a.begin},
                                 {t + both.begin - b.begin, t + both.end - b.begin}});
          t += b.size();
        }
        s += a.size();
      }
      if (pieces[d].empty()) return;
    }
    std::vector<size_t> at(pieces.size());
    for (;;) {
      Transfer box{.from = from, .to = to, .source = {}, .target = {}};
      for (size_t d = 0; d < pieces.size(); ++d) {
        box.source.push_back(pieces[d][at[d]].source);
        box.target.push_back(pieces[d][at[d]].target);
      }
      link.transfers.push_back(std::move(box));
      size_t d = pieces.size();
      while (d > 0 && ++at[d - 1] == pieces[d - 1].size()) at[--d] = 0;
      if (d == 0) return;
    }
  }

  // ---- classes ----------------------------------------------------------------------------------------------------
  // Along which axes a program depends on the coordinate itself; and all extents that are cut, so that devices with
  // equal sizes share a program.
  void find_axes() {
    const size_t meshes = lg_.tasks.meshes.size();
    apart_.assign(meshes, std::vector<char>(lg_.axes()));
    placed_ = apart_;
    signatures_.resize(meshes);
    for (const Op& op : lg_.graph.ops) {
      const auto mesh = static_cast<size_t>(lg_.tasks.mesh_of_stage[op.stage]);
      for (size_t a = 1; a < lg_.axes(); ++a)
        if (lg_.tasks.meshes[mesh].axes[a - 1].size > 1 && !apart_[mesh][a] && low_.local.depends_on_coordinate(op, a))
          (is_patched(lg_, op) && !(lg_.exact && lg_.by_micro_batch(a)) ? placed_ : apart_)[mesh][a] = 1;
    }
    Signature s;
    std::vector<SubAxis> sub_axes;
    for (size_t t = 0; t < lg_.graph.tensors.size(); ++t) {
      Watch::look();
      const auto mesh = static_cast<size_t>(lg_.tasks.mesh_of_stage[lg_.stages[t]]);
      s.clear(), sub_axes.clear();
      const auto& cuts = lg_.shardings[t].axes;
      for (size_t a = 0; a < lg_.axes(); ++a) {
        const AxisSharding& l = cuts[a];
        const bool counts =
            std::any_of(cuts.begin(), cuts.end(), [&](const AxisSharding& other) {  // else a mask says it
              return other.placement == Placement::kShard && !other.samples && other.sub_axis == l.sub_axis;
            });
        if (l.placement != Placement::kShard || !counts) continue;
        const auto outer = std::find(sub_axes.begin(), sub_axes.end(), l.sub_axis);
        s.push_back({a, extent_of(lg_.graph.tensors[t].dims, l.sub_axis), l.state, l.rotate,
                     outer == sub_axes.end() ? s.size() : static_cast<size_t>(outer - sub_axes.begin())});
        sub_axes.push_back(l.sub_axis);
      }
      if (!s.empty()) signatures_[mesh].insert(s);
    }
  }

  void make_rows() {
    size_t devices = 0;
    for (const Mesh& mesh : lg_.tasks.meshes)
      devices += mesh.devices.size() - static_cast<size_t>(std::count(mesh.devices.begin(), mesh.devices.end(), kNone));
    entry_.rows.resize(devices);
    for (size_t m = 0; m < lg_.tasks.meshes.size(); ++m) {
      const Mesh& mesh = lg_.tasks.meshes[m];
      for (size_t k = 0; k < mesh.devices.size(); ++k) {
        Watch::look();
        if (mesh.devices[k] < 0) continue;
        DeviceRow row;
        row.device = mesh.devices[k];
        row.mesh = static_cast<int32_t>(m);
        row.coordinates = mesh.coordinates(static_cast<int64_t>(k));
        Place place{row.mesh, row.coordinates, 0};
        const Interval run = low_.local.micro_batches(place);
        Ints key{static_cast<int64_t>(m), run.begin, run.end};
        // Without micro-batches it still takes part in gathering their sums, of which every group has other nodes.
        for (size_t a = 1; a < lg_.axes() && lg_.exact && run.size() == 0; ++a)
          if (lg_.by_micro_batch(a)) key.push_back(row.coordinates[a - 1]);
        for (const uint64_t mask : low_.masks) {
          const auto& [cut, sizes] = samples_at(mask, place);
          key.push_back(sizes);
          if (low_.options.detail == Detail::kWhole) row.samples.push_back(cut);
        }
        for (size_t a = 1; a < lg_.axes(); ++a)
          key.push_back(apart_[m][a] || cuts_differ(mesh, a) ? row.coordinates[a - 1] : -1);
        for (const Signature& s : signatures_[m]) key.push_back(sizes_at(s, place));
        Ints sizes = key;  // of programs that differ by their place alone
        for (size_t a = 1; a < lg_.axes(); ++a)
          if (placed_[m][a]) key.push_back(row.coordinates[a - 1]);
        if (!low_.options.share) sizes.push_back(row.device), key.push_back(row.device);
        give_program(row, place, std::move(sizes), std::move(key));
        entry_.rows[row.device] = std::move(row);
      }
    }
  }

  // Many devices of a mesh have the same samples, and parts of the same sizes: those at one place along the axes that
  // cut them, and along the axes outside of a ragged one. What stands for the axes that do not matter is -1.
  Ints where(const Place& place, uint64_t axes) const {
    Ints out{place.mesh};
    const Mesh& mesh = lg_.tasks.meshes[place.mesh];
    bool ragged = false;
    for (size_t a = lg_.axes(); a-- > 1;) {
      out.push_back(ragged || (axes >> a & 1) ? place.coordinates[a - 1] : -1);
      ragged |= (axes >> a & 1) && mesh.axes[a - 1].ragged();
    }
    return out;
  }
  // A number for each list of sizes.
  int64_t number_of(Ints sizes) { return numbers_.try_emplace(std::move(sizes), std::ssize(numbers_)).first->second; }

  // With the number of their sizes.
  const std::pair<SampleCut, int64_t>& samples_at(uint64_t mask, Place place) {
    const auto [at, fresh] = samples_.try_emplace({mask, where(place, mask)});
    if (!fresh) return at->second;
    SampleCut& cut = at->second.first;
    cut.whole = low_.local.samples(mask & ~uint64_t{1}, place);
    Ints sizes{cut.whole.size()};
    for (int64_t u = 0; u < lg_.micro_batches; ++u) {
      Watch::look();
      const bool like_before = low_.size_class[u] != u;
      if (like_before && low_.options.detail != Detail::kWhole) continue;
      place.micro_batch = u;
      cut.micro_batches.push_back(low_.local.samples(mask, place));
      if (!like_before) sizes.push_back(cut.micro_batches.back().size());
    }
    at->second.second = number_of(std::move(sizes));
    return at->second;
  }

  // Of the sub-axes that the signature cuts, in each micro-batch if they are cut by time.
  int64_t sizes_at(const Signature& signature, Place place) {
    uint64_t axes = 0;
    for (const auto& cut : signature) axes |= uint64_t{1} << std::get<0>(cut);
    const auto [known, fresh] = sizes_.try_emplace({&signature, where(place, axes)});
    if (!fresh) return known->second;
    const bool timed = std::get<0>(signature.front()) == kTime;
    Ints all;
    for (place.micro_batch = 0; place.micro_batch < (timed ? lg_.micro_batches : 1); ++place.micro_batch) {
      Ints sizes;  // an inner cut of the same sub-axis cuts what is left of it
      for (const auto& [a, extent, state, rotate, sub_axis] : signature) {
        const int64_t whole = sub_axis < sizes.size() ? sizes[sub_axis] : extent;
        sizes.push_back(low_.local.interval(a, state, whole, place, rotate).size());
        sizes[sub_axis] = sizes.back();
      }
      all.insert(all.end(), sizes.begin(), sizes.end());
    }
    return known->second = number_of(std::move(all));
  }

  // `sizes`: what programs that differ by their place alone have in common; `key`: what devices of one program have.
  void give_program(DeviceRow& row, const Place& place, Ints sizes, Ints key) {
    constexpr size_t kMostPatterns = 4;  // places that say more make as many programs; each is tried at all of them
    std::vector<Pattern>& patterns = patterns_[std::move(sizes)];
    for (Pattern& p : patterns)
      if (auto values = p.pattern.at(entry_.programs[p.program], place)) {
        row.program = static_cast<int32_t>(p.program);
        row.placed = std::move(*values);
        return;
      }
    const auto [known, fresh] = classes_.try_emplace(std::move(key), static_cast<int32_t>(entry_.programs.size()));
    row.program = known->second;
    if (!fresh) return;
    Draft draft = draft_program(low_, place);
    ChunkReport report;
    if (low_.options.overlap && !lg_.exact) chunk_products(draft, low_, report);  // other rows, other kernels
    if (entry_.programs.empty()) note(report);
    share_storage(draft, lg_.graph, entry_.loss());
    number_versions(draft.program);
    if (low_.options.detail == Detail::kWhole) {
      place_arenas(draft.program, memory_);
      add_row_waits(draft.program);
    }
    draft.program.variable_bytes = variable_bytes(place);
    const auto& placed = placed_[place.mesh];
    if (patterns.size() < kMostPatterns && std::any_of(placed.begin(), placed.end(), [](char axis) { return axis; })) {
      Pattern made{entry_.programs.size(), {low_, draft, place}};
      if (auto values = made.pattern.at(draft.program, place)) {  // not so where products run in chunks of their own
        row.placed = std::move(*values);
        patterns.push_back(std::move(made));
      }
    }
    entry_.programs.push_back(std::move(draft.program));
  }

  // Keeps the holes that rows fill with different values.
  void leave_holes(const Pattern& pattern) {
    std::vector<DeviceRow*> rows;
    for (DeviceRow& row : entry_.rows)
      if (row.program == static_cast<int32_t>(pattern.program)) rows.push_back(&row);
    const std::vector<Hole>& all = pattern.pattern.holes();
    for (const DeviceRow* row : rows)
      WHALE_CHECK(row->placed.size() == all.size(), "a row of a pattern has its values");
    std::vector<size_t> kept;
    for (size_t k = 0; k < all.size(); ++k) {
      Watch::look();
      if (std::any_of(rows.begin(), rows.end(), [&](const DeviceRow* r) { return r->placed[k] != rows[0]->placed[k]; }))
        kept.push_back(k);
    }
    std::sort(kept.begin(), kept.end(), [&](size_t a, size_t b) { return all[a] < all[b]; });
    Program& program = entry_.programs[pattern.program];
    for (const size_t k : kept) program.holes.push_back(all[k]);
    for (DeviceRow* row : rows) {
      Ints values;
      for (const size_t k : kept) values.push_back(row->placed[k]);
      row->placed = std::move(values);
    }
    for (size_t k = 0; k < kept.size(); ++k) set_value(program, program.holes[k], rows[0]->placed[k]);
  }

  // Between coordinates along the axis: an axis inside of it is ragged.
  static bool cuts_differ(const Mesh& mesh, size_t axis) {
    return std::any_of(mesh.axes.begin() + static_cast<std::ptrdiff_t>(axis), mesh.axes.end(),
                       [](const MeshAxis& inner) { return inner.ragged(); });
  }

  void note(const ChunkReport& r) const {
    if (!low_.options.notes) return;
    if (r.products == 0 && low_.options.matmul_chunks > 1)
      low_.options.notes->push_back("No product runs in chunks: none stands beside a collective that overlaps.");
    if (r.products == 0) return;
    low_.options.notes->push_back(
        fmt::format("{} product(s) run in {} chunks beside their collectives: {}.", r.products, r.chunks,
                    low_.options.matmul_chunks
                        ? std::string("asked for")
                        : fmt::format("{:.3g} ms instead of {:.3g}", 1e3 * r.seconds, 1e3 * r.whole_seconds)));
  }

  int64_t variable_bytes(const Place& place) const {
    int64_t bytes = 0;
    for (const Variable& v : lg_.graph.variables)
      if (lg_.tasks.mesh_of_stage[lg_.stage(v.tensor)] == place.mesh)
        bytes += low_.local.elements(v.tensor, place) * size_of(lg_.graph.tensor(v.tensor).dtype);
    return bytes;
  }

  const ShardedGraph& lg_;
  Lowering low_;
  Entry entry_;
  MemoryPlanner memory_;
  int capacity_ = 1;
  std::map<std::pair<uint64_t, Ints>, std::pair<SampleCut, int64_t>> samples_;
  std::map<std::pair<const Signature*, Ints>, int64_t> sizes_;
  std::map<Ints, int64_t> numbers_;                // of lists of sizes
  std::map<Ints, int32_t> classes_;                // programs, by all that they follow from
  std::map<Ints, std::vector<Pattern>> patterns_;  // by sizes alone
  // [mesh][axis]: programs are built for each coordinate; or they have holes for what it says.
  std::vector<std::vector<char>> apart_, placed_;
  std::vector<std::set<Signature>> signatures_;  // [mesh]
};

}  // namespace

Entry lower(const ShardedGraph& graph, const LowerOptions& options) { return Lowerer(graph, options).run(); }

}  // namespace whale
