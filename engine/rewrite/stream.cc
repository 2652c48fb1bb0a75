#include "rewrite/stream.h"

#include <algorithm>
#include <map>
#include <optional>

#include "base/error.h"
#include "cluster/shares.h"
#include "cost/cost.h"
#include "ops/cost.h"
#include "rewrite/order.h"
#include "rewrite/rewrite.h"
#include "shard/reshards.h"
#include "shard/sub_axes.h"
#include "task/factor_names.h"

namespace whale {
namespace {

// A result whose sum goes around, the reshard that ended it, and those behind it that add it up along other axes.
struct Scatter {
  size_t result = 0;
  OpId reshard = kNone;
  std::vector<OpId> behind;
};
// An op, the axis around which its pieces go, and what stands for the reshards that are left out.
struct Ring {
  size_t axis = 0;
  Factor factor;
  int64_t ways = 1;
  std::vector<std::pair<size_t, TensorId>> pieces;  // operand, and what was gathered for it
  std::vector<Scatter> scatters;
};

class Streamer {
 public:
  explicit Streamer(ShardedGraph& graph) : lg_(graph), g_(graph.graph), readers_(readers_of(g_)) {}

  void run() {
    std::map<size_t, Ring> rings;  // by op
    std::vector<char> dropped(g_.ops.size());
    for (size_t i = 0; i < g_.ops.size(); ++i) {
      const std::optional<Ring> ring = ring_of(g_.ops[i]);
      if (!ring) continue;
      for (const Scatter& s : ring->scatters) dropped[s.reshard] = 1;
      rings.emplace(i, *ring);
    }
    if (rings.empty()) return;
    std::vector<Op> old = std::move(g_.ops);
    g_.ops.clear();
    for (size_t i = 0; i < old.size(); ++i) {
      if (dropped[i]) continue;
      if (const auto ring = rings.find(i); ring != rings.end())
        emit(old[i], ring->second, old);
      else
        g_.ops.push_back(old[i]);
      if (const auto cast = casts_.find(static_cast<OpId>(i)); cast != casts_.end())
        g_.ops.push_back(std::move(cast->second));
    }
    drop_unread_gathers();
  }

 private:
  // ---- which ops ------------------------------------------------------------------------------------------------
  std::optional<Ring> ring_of(const Op& op) const {
    if (!reads_gathered(op)) return {};
    const Factors factors = factors_of(g_, op);
    for (const Factor& f : factors.list) {
      if (f.kind != FactorKind::kStream || attr_int(op.attrs, f.piece_attr) != 0) continue;
      for (size_t a = 1; a < lg_.axes(); ++a) {
        Ring ring{.axis = a, .factor = f, .ways = lg_.size(a, op.stage), .pieces = {}, .scatters = {}};
        if (ring.ways > 1 && shares_fit(op, ring) && find_pieces(op, ring) && find_scatters(op, ring) &&
            (asked_for(op, factors, a) || worth(op, ring)))
          return ring;
      }
    }
    return {};
  }

  bool reads_gathered(const Op& op) const {
    return std::any_of(op.inputs.begin(), op.inputs.end(), [&](TensorId id) {
      const OpId made = id == kNone ? kNone : g_.tensor(id).producer;
      return made != kNone && g_.op(made).code == OpCode::k_all_gather;
    });
  }
  bool shares_fit(const Op& op, const Ring& ring) const {
    const MeshAxis& axis = lg_.mesh_axis(ring.axis, op.stage);
    if (axis.has_gaps()) return false;
    const int64_t rows = axis.ragged() ? static_cast<int64_t>(axis.shares.size()) / axis.size : 1;
    for (int64_t k = 0; k < rows * ring.ways; ++k)
      if (cut_of(axis, false, ring.factor.extent, k % ring.ways, k / ring.ways).size() == 0) return false;
    return true;
  }
  bool is_plain_cut(TensorId id, size_t a, const SubAxis& sub_axis) const {
    for (size_t b = 0; b < lg_.axes(); ++b)
      if (b != a && lg_.at(id, b).placement == Placement::kShard && lg_.at(id, b).sub_axis.dim == sub_axis.dim)
        return false;
    AxisSharding want{.placement = Placement::kShard, .sub_axis = sub_axis};
    return lg_.at(id, a) == want;
  }
  static bool is_reshard(const Op& op, OpCode code, size_t a) {
    return op.code == code && attr_int(op.attrs, "group") + 1 == static_cast<int64_t>(a);
  }

  // Everything else that is cut along the axis stays where it is; what carries the factor was gathered for this.
  bool find_pieces(const Op& op, Ring& ring) const {
    bool cut = false;
    for (size_t i = 0; i < op.inputs.size(); ++i) {
      if (op.inputs[i] == kNone) continue;
      if (!ring.factor.inputs[i].present()) {
        cut |= lg_.at(op.inputs[i], ring.axis).placement == Placement::kShard;
        continue;
      }
      const OpId made = g_.tensor(op.inputs[i]).producer;
      if (made == kNone || !is_reshard(g_.op(made), OpCode::k_all_gather, ring.axis) ||
          !is_plain_cut(g_.op(made).inputs[0], ring.axis, ring.factor.inputs[i]))
        return false;
      ring.pieces.emplace_back(i, g_.op(made).inputs[0]);
    }
    return cut && !ring.pieces.empty();
  }
  bool find_scatters(const Op& op, Ring& ring) const {
    for (size_t o = 0; o < op.outputs.size(); ++o) {
      const TensorId id = op.outputs[o];
      if (id == kNone && ring.factor.merge != OpCode{}) return false;
      if (id == kNone || !ring.factor.outputs[o].present()) continue;
      const auto& r = readers_[id];
      const auto fetched = [&](const NamedTensor& f) { return f.tensor == id; };
      if (r.size() != 1 || std::any_of(lg_.fetches.begin(), lg_.fetches.end(), fetched)) return false;
      const Op& reshard = g_.op(r[0]);
      const bool whole = is_reshard(reshard, OpCode::k_all_reduce, ring.axis) && reshard.inputs.size() == 1;
      if (!whole && !is_reshard(reshard, OpCode::k_reduce_scatter, ring.axis)) return false;
      const SubAxis &origin = ring.factor.outputs[o], &to = lg_.at(reshard.outputs[0], ring.axis).sub_axis;
      for (size_t b = 0; b < lg_.axes(); ++b)
        if (b != ring.axis && lg_.at(id, b).placement == Placement::kShard && lg_.at(id, b).sub_axis.dim == origin.dim)
          return false;
      if (!whole && to.dim == origin.dim && !is_plain_cut(reshard.outputs[0], ring.axis, origin)) return false;
      if (!whole && lg_.at(reshard.outputs[0], ring.axis).state) return false;
      std::optional<std::vector<OpId>> behind = sums_behind(reshard.outputs[0]);
      if (!behind) return false;
      ring.scatters.push_back({o, r[0], std::move(*behind)});
    }
    return true;
  }

  bool in_parts(TensorId id) const {
    for (size_t a = 1; a < lg_.axes(); ++a)
      if (lg_.at(id, a).placement == Placement::kPartial) return true;
    return false;
  }
  // One reshard behind the other until the sum is whole; none: something else reads its parts.
  std::optional<std::vector<OpId>> sums_behind(TensorId id) const {
    std::vector<OpId> out;
    while (in_parts(id)) {
      const auto& r = readers_[id];
      if (r.size() != 1) return {};
      const Op& reshard = g_.op(r[0]);
      if (reshard.code != OpCode::k_all_reduce && reshard.code != OpCode::k_reduce_scatter) return {};
      if (reshard.inputs.size() != 1) return {};
      out.push_back(r[0]);
      id = reshard.outputs[0];
    }
    return out;
  }

  bool asked_for(const Op& op, const Factors& factors, size_t a) const {
    return std::any_of(factors.list.begin(), factors.list.end(),
                       [&](const Factor& f) { return asks_for(lg_.tasks, op, a, f); });
  }

  double share(TensorId id, size_t but) const {  // of the tensor, on one device
    double n = 1;
    for (size_t a = 0; a < lg_.axes(); ++a)
      if (a != but && lg_.at(id, a).placement == Placement::kShard)
        n *= static_cast<double>(lg_.size(a, lg_.stage(id)));
    return 1 / n;
  }
  // The gathered pieces are not kept, and travel beside the computation; what is merged is computed once more.
  bool worth(const Op& op, const Ring& ring) const {
    const CostModel& cost = lg_.tasks.cost;
    const DeviceRates& device = cost.device;
    const LinkRates& link = lg_.tasks.link(op.stage, ring.axis - 1);
    const auto n = static_cast<double>(ring.ways);
    double bytes = 0, gathering = 0;
    const auto moved = [&](TensorId id) {
      const double whole = static_cast<double>(bytes_of(g_.tensor(id))) * share(id, ring.axis);
      bytes += whole;
      gathering += all_gather_seconds(whole, ring.ways, link);
    };
    for (const auto& [i, source] : ring.pieces) moved(source);
    for (const Scatter& s : ring.scatters) moved(g_.op(s.reshard).outputs[0]);
    double merged = 0;
    for (size_t o = 0; o < op.outputs.size(); ++o)
      if (op.outputs[o] != kNone && !ring.factor.outputs[o].present())
        merged += static_cast<double>(bytes_of(g_.tensor(op.outputs[o]))) * share(op.outputs[o], 0);
    const double round = op_seconds(cost_of(g_, op), device) * share(op.outputs[0], 0) / n;
    const int64_t messages = std::ssize(ring.pieces) + std::ssize(ring.scatters);
    const double shifting = link_seconds(bytes / n, messages, link);
    const double merging =
        op_seconds({0, 3 * merged}, device) + op_seconds(OpCost{}, device) * static_cast<double>(messages);
    const double more = (n - 1) * (std::max(shifting - round, 0.0) + merging) - gathering;
    return more < cost.held_seconds(received_bytes({}, bytes, ring.ways));
  }

  // ---- what it becomes ------------------------------------------------------------------------------------------
  TensorId like(TensorId id, const std::string& suffix, DType dtype) {
    const TensorId made = add_like(lg_, id, suffix);
    g_.tensor(made).dtype = dtype;
    return made;
  }
  // What lay `from` places before lies one further on; after a whole round it is where it began.
  TensorId shift(const Op& op, const Ring& ring, TensorId id, const std::string& suffix, TensorId to = kNone) {
    if (to == kNone) to = like(id, suffix, g_.tensor(id).dtype);
    lg_.at(to, ring.axis) = lg_.at(id, ring.axis);
    lg_.at(to, ring.axis).rotate = (lg_.at(id, ring.axis).rotate + 1) % ring.ways;
    Op made = op_beside(op, OpCode::k_shift, g_.tensor(to).name, {id}, {to});
    made.attrs = {{"group", static_cast<int64_t>(ring.axis) - 1}};
    g_.ops.push_back(std::move(made));
    return to;
  }
  // Into `to`, which may be of a narrower type.
  void finish(const Op& op, TensorId from, TensorId to) { g_.ops.push_back(cast_of(op, from, to)); }
  Op cast_of(const Op& op, TensorId from, TensorId to) const {
    Op made = op_beside(op, OpCode::k_cast, g_.tensor(to).name + ".cast", {from}, {to});
    made.attrs = {{"dtype", std::string(name_of(g_.tensor(to).dtype))}};
    return made;
  }
  TensorId add(const Op& op, TensorId a, TensorId b, const std::string& suffix, TensorId to = kNone) {
    if (to == kNone) to = like(b, suffix, g_.tensor(b).dtype);
    g_.ops.push_back(op_beside(op, OpCode::k_add, g_.tensor(to).name, {a, b}, {to}));
    return to;
  }

  // The op over the pieces of round r.
  TensorIds work(const Op& op, const Ring& ring, const TensorIds& now, int64_t r) {
    const std::string suffix = fmt::format(".{}", r);
    Op piece = op;
    piece.name += suffix;
    piece.attrs[ring.factor.piece_attr] = ring.factor.extent;
    for (size_t p = 0; p < now.size(); ++p) piece.inputs[ring.pieces[p].first] = now[p];
    OpView view = view_of(g_, piece);
    const std::vector<TensorType> types = infer(piece.code, piece.attrs, view.inputs, view.present);
    for (size_t o = 0; o < piece.outputs.size(); ++o) {
      if (op.outputs[o] == kNone) continue;
      const TensorId made = piece.outputs[o] = like(op.outputs[o], suffix, types[o].dtype);
      if (ring.factor.outputs[o].present())
        lg_.at(made, ring.axis) = {.placement = Placement::kShard, .sub_axis = ring.factor.outputs[o], .rotate = r};
    }
    TensorIds results = piece.outputs;
    g_.ops.push_back(std::move(piece));
    return results;
  }

  // The results of this round and of those before, as one.
  void combine(const Op& op, const Ring& ring, TensorIds& sums, const TensorIds& made, int64_t r) {
    const bool last = r + 1 == ring.ways;
    const std::string suffix = fmt::format(".to{}", r);
    if (ring.factor.merge != OpCode{}) {
      TensorIds in = sums, out = op.outputs;
      in.insert(in.end(), made.begin(), made.end());
      if (!last)
        for (size_t o = 0; o < made.size(); ++o) out[o] = like(made[o], suffix, g_.tensor(made[o]).dtype);
      Op merge = op_beside(op, ring.factor.merge, op.name + suffix, std::move(in), out);
      merge.attrs = complete_attrs(def(merge.code), {{"out_dtype", std::string(name_of(g_.tensor(out[0]).dtype))}});
      g_.ops.push_back(std::move(merge));
      sums = out;
      return;
    }
    for (size_t o = 0; o < made.size(); ++o) {
      if (made[o] == kNone) continue;
      const bool ends = last && !ring.factor.outputs[o].present();
      const bool narrows = ends && g_.tensor(made[o]).dtype != g_.tensor(op.outputs[o]).dtype;
      sums[o] = add(op, sums[o], made[o], suffix, ends && !narrows ? op.outputs[o] : kNone);
      if (narrows) finish(op, sums[o], op.outputs[o]);
    }
  }

  void emit(const Op& op, const Ring& ring, std::vector<Op>& old) {
    TensorIds now, sums;
    for (const auto& [i, source] : ring.pieces) now.push_back(source);
    for (int64_t r = 0; r < ring.ways; ++r) {
      // While this round's pieces are worked on, the next ones come, and the sums so far follow their pieces.
      TensorIds next;
      for (size_t p = 0; p < now.size() && r + 1 < ring.ways; ++p)
        next.push_back(shift(op, ring, now[p], fmt::format(".{}", r + 1)));
      for (const Scatter& s : ring.scatters)
        if (r > 0) sums[s.result] = shift(op, ring, sums[s.result], ".on");
      const TensorIds made = work(op, ring, now, r);
      if (r == 0)
        sums = made;
      else
        combine(op, ring, sums, made, r);
      now = std::move(next);
    }
    for (const Scatter& s : ring.scatters) {
      widen(s, g_.tensor(sums[s.result]).dtype, old);
      end(op, ring, s.result, sums[s.result], old[s.reshard]);
    }
  }

  // What is still to be added up along other axes is rounded afterwards.
  void widen(const Scatter& scatter, DType dtype, std::vector<Op>& old) {
    if (scatter.behind.empty()) return;
    TensorId id = old[scatter.reshard].outputs[0];
    if (g_.tensor(id).dtype == dtype) return;
    for (const OpId i : scatter.behind) {
      g_.tensor(id).dtype = dtype;
      id = old[i].outputs[0];
    }
    Op& last = old[scatter.behind.back()];
    last.outputs[0] = like(id, ".wide", dtype);
    casts_[scatter.behind.back()] = cast_of(last, last.outputs[0], id);
  }

  // Where it began, and on to where the reshard that is left out put it.
  void end(const Op& op, const Ring& ring, size_t o, TensorId sum, const Op& reshard) {
    const TensorId to = reshard.outputs[0];
    const bool origin = is_plain_cut(to, ring.axis, ring.factor.outputs[o]);
    const bool narrows = g_.tensor(sum).dtype != g_.tensor(to).dtype;
    TensorId id = shift(op, ring, sum, ".back", origin && !narrows ? to : kNone);
    if (narrows) {
      const TensorId narrow = origin ? to : like(id, ".cast", g_.tensor(to).dtype);
      finish(op, id, narrow);
      id = narrow;
    }
    if (origin) return;
    const bool whole = lg_.at(to, ring.axis).placement == Placement::kReplicate;
    Op last = op_beside(op, whole ? OpCode::k_all_gather : OpCode::k_all_to_all, reshard.name, {id}, {to});
    last.attrs = sub_axis_attr("sub_axis", ring.factor.outputs[o]);
    last.attrs["group"] = static_cast<int64_t>(ring.axis) - 1;
    last.attrs["cuts"] = Ints{};
    if (!whole) {
      for (auto& [name, value] : sub_axis_attr("to_sub_axis", lg_.at(to, ring.axis).sub_axis)) last.attrs[name] = value;
      last.attrs["to_cuts"] = Ints{};
    }
    g_.ops.push_back(std::move(last));
  }

  void drop_unread_gathers() {
    const auto readers = readers_of(g_);
    std::vector<char> kept(g_.tensors.size());
    for (const NamedTensor& f : lg_.fetches) kept[f.tensor] = 1;
    for (const Variable& v : g_.variables)
      if (v.next != kNone) kept[v.next] = 1;
    std::vector<char> removed(g_.ops.size());
    for (size_t i = 0; i < g_.ops.size(); ++i) {
      const auto y = static_cast<size_t>(g_.ops[i].outputs.empty() ? 0 : g_.ops[i].outputs[0]);
      removed[i] = g_.ops[i].code == OpCode::k_all_gather && readers[y].empty() && !kept[y];
    }
    compact(g_, removed);
  }

  ShardedGraph& lg_;
  Graph& g_;
  Lists readers_;
  std::map<OpId, Op> casts_;  // behind an op
};

}  // namespace

void stream_gathers(ShardedGraph& graph) { Streamer(graph).run(); }

}  // namespace whale
