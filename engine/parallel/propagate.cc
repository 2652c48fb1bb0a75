#include "parallel/propagate.h"

#include <algorithm>
#include <map>
#include <set>

#include "base/error.h"
#include "parallel/bridges.h"

namespace whale {
namespace {

constexpr size_t kTime = 0;
constexpr int kDeepest = 64;  // of chains that are produced again

struct Cut {
  int factor = -1;
  SubDigit sub;
};

class Propagator {
 public:
  Propagator(const Graph& graph, const PropagateOptions& options) : b_(graph, options.micro_batches, options.devices) {}

  LayoutGraph run(const PropagateOptions& options) {
    std::vector<Op> ops;
    std::swap(ops, g().ops);
    for (Op& op : ops) place(std::move(op), {});
    finish(options);
    return std::move(b_.out);
  }

 private:
  Graph& g() { return b_.out.graph; }
  size_t axes() const { return b_.out.axes.size(); }
  const LayoutAxis& axis(size_t a) const { return b_.out.axes[a]; }
  Placement placement(TensorId id, size_t a) const {
    return id == kNone ? Placement::kReplicate : b_.out.at(id, a).placement;
  }

  // What an op needs along one axis when none of its operands says so: a factor that its results are to be cut along.
  using Forced = std::vector<std::pair<size_t, Cut>>;

  // Brings the operands into legal layouts, gives the results theirs, and appends the op.
  void place(Op op, const Forced& forced) {
    for (TensorId& id : op.inputs) id = b_.latest(id);
    hoist_operands(op);
    const OpView view = view_of(g(), op);
    const OpDef& d = def(op.code);
    const Factors factors = d.factors ? d.factors(view) : Factors{};
    for (size_t a = 0; a < axes(); ++a) {
      if (axis(a).size == 1) continue;
      Cut cut;
      for (const auto& [at, wanted] : forced)
        if (at == a) cut = wanted;
      if (cut.factor < 0) cut = choose(op, factors, a);
      if (cut.factor >= 0)
        apply_cut(op, factors, a, cut);
      else
        pass_partial(op, factors, a);
    }
    b_.append(std::move(op));
  }

  // ---- one axis of one op ---------------------------------------------------------------------------------------
  bool fits(const Factor& f, const Op& op, const Cut& cut) const {
    // Not kLookup: kernels are not told which rows of the table they have.
    if (f.kind != FactorKind::kMap && f.kind != FactorKind::kReduce) return false;
    if (f.unit > 1 && cut.sub.inner % f.unit) return false;
    // A result that neither carries the factor nor is partial would differ from device to device.
    for (size_t o = 0; o < op.outputs.size(); ++o) {
      if (op.outputs[o] == kNone) continue;
      const bool carries = o < f.outputs.size() && f.outputs[o].present();
      if (!carries && !(o < f.partial.size() && f.partial[o])) return false;
    }
    return true;
  }

  // The factor to cut: that of the largest operand that is cut and can stay so.
  Cut choose(const Op& op, const Factors& factors, size_t a) const {
    Cut best;
    int64_t most = -1;
    for (size_t i = 0; i < op.inputs.size(); ++i) {
      if (placement(op.inputs[i], a) != Placement::kShard) continue;
      const int64_t size = element_count(b_.out.graph.tensor(op.inputs[i]).dims);
      if (size <= most) continue;
      for (size_t k = 0; k < factors.list.size(); ++k) {
        const Factor& f = factors.list[k];
        Cut cut{static_cast<int>(k), {}};
        if (i >= f.inputs.size() ||
            !find_sub_digit(f.inputs[i], f.extent, b_.out.at(op.inputs[i], a).digit, axis(a).extent, cut.sub))
          continue;
        if (!fits(f, op, cut)) continue;
        best = cut, most = size;
        break;
      }
    }
    return best;
  }

  void apply_cut(Op& op, const Factors& factors, size_t a, const Cut& cut) {
    const Factor& f = factors.list[static_cast<size_t>(cut.factor)];
    for (size_t i = 0; i < op.inputs.size(); ++i) {
      if (op.inputs[i] == kNone) continue;
      const bool carries = i < f.inputs.size() && f.inputs[i].present();
      const Digit want = carries ? sub_digit(f.inputs[i], cut.sub) : Digit{};
      const AxisLayout now = b_.out.at(op.inputs[i], a);
      if (now.placement == Placement::kShard && carries && now.digit == want) continue;
      TensorId whole = make_whole(op, op.inputs[i], a);
      op.inputs[i] = carries ? sliced(op, whole, a, want) : whole;
    }
    for (size_t o = 0; o < op.outputs.size(); ++o) {
      if (op.outputs[o] == kNone) continue;
      AxisLayout& l = b_.out.layouts[static_cast<size_t>(op.outputs[o])].axes[a];
      if (o < f.outputs.size() && f.outputs[o].present())
        l = {.placement = Placement::kShard, .digit = sub_digit(f.outputs[o], cut.sub), .cut = {}};
      else
        l = {.placement = Placement::kPartial, .digit = {}, .cut = {}, .combine = f.combine};
    }
  }

  void pass_partial(Op& op, const Factors& factors, size_t a) {
    std::vector<int> partial;
    bool sum = true, narrows = false;
    for (size_t i = 0; i < op.inputs.size(); ++i) {
      if (placement(op.inputs[i], a) == Placement::kShard) op.inputs[i] = make_whole(op, op.inputs[i], a);
      if (placement(op.inputs[i], a) != Placement::kPartial) continue;
      partial.push_back(static_cast<int>(i));
      sum &= b_.out.at(op.inputs[i], a).combine == Combine::kSum;
      for (const TensorId o : op.outputs)  // sums stay in the wider type
        if (o != kNone) narrows |= size_of(g().tensor(o).dtype) < size_of(g().tensor(op.inputs[i]).dtype);
    }
    if (partial.empty()) return;
    const bool passes =
        sum && !narrows && std::find(factors.linear.begin(), factors.linear.end(), partial) != factors.linear.end();
    if (!passes) {
      for (const int i : partial)
        op.inputs[static_cast<size_t>(i)] = make_whole(op, op.inputs[static_cast<size_t>(i)], a);
      return;
    }
    for (const TensorId o : op.outputs)
      if (o != kNone)
        b_.out.layouts[static_cast<size_t>(o)].axes[a] = {.placement = Placement::kPartial, .digit = {}, .cut = {}};
  }

  // ---- bridges of one operand -----------------------------------------------------------------------------------
  TensorId make_whole(const Op& op, TensorId id, size_t a) {
    id = b_.latest(id);
    switch (placement(id, a)) {
      case Placement::kReplicate: return id;
      case Placement::kPartial: return b_.reduce(id, a);
      case Placement::kShard:
        if (axis(a).is_time())
          throw invalid(
              "op '{}' ({}) needs all samples of '{}' at once, which {} micro-batches do not have; plan with one "
              "micro-batch "
              "(accumulation 1), or keep samples apart in this op",
              op.name, def(op.code).name, g().tensor(id).name, axis(a).size)
              .at_op(op.name)
              .at_scope(g().scope_path(op.scope));
        return b_.gather(id, a);
    }
    return id;
  }

  TensorId sliced(const Op& op, TensorId id, size_t a, const Digit& digit) {
    const auto key = std::make_tuple(id, a, digit.dim, digit.outer, digit.inner);
    if (const auto known = slices_.find(key); known != slices_.end()) return known->second;
    TensorId out = kNone;
    if (is_free(id, a, digit, 0)) {
      out = produce_cut(id, a, digit);
    } else if (!axis(a).is_time()) {
      out = b_.slice(id, a, digit);
    } else {
      throw unimplemented(
          "op '{}' ({}): operand '{}' has a value for every sample but does not come from a batched input; cutting it "
          "into "
          "{} micro-batches is not implemented: declare it as an input with a batch dimension",
          op.name, def(op.code).name, g().tensor(id).name, axis(a).size)
          .at_op(op.name)
          .at_scope(g().scope_path(op.scope));
    }
    return slices_[key] = out;
  }

  // Can the producer make it cut from operands that are there (or free themselves)?
  Cut cut_of_result(const Op& op, size_t a, const Digit& digit) {
    if (has_flag(op.code, kCollective) || has_flag(op.code, kUpdateOp) || op.outputs.size() != 1) return {};
    const OpDef& d = def(op.code);
    if (!d.factors) return {};
    const Factors factors = d.factors(view_of(g(), op));
    for (size_t k = 0; k < factors.list.size(); ++k) {
      Cut cut{static_cast<int>(k), {}};
      const Factor& f = factors.list[k];
      if (f.kind == FactorKind::kMap && find_sub_digit(f.outputs[0], f.extent, digit, axis(a).extent, cut.sub) &&
          fits(f, op, cut))
        return cut;
    }
    return {};
  }
  bool is_free(TensorId id, size_t a, const Digit& digit, int depth) {
    const OpId producer = b_.producer(id);
    if (producer == kNone || depth > kDeepest) return false;
    const Op op = g().op(producer);
    const Cut cut = cut_of_result(op, a, digit);
    if (cut.factor < 0) return false;
    const Factor f = def(op.code).factors(view_of(g(), op)).list[static_cast<size_t>(cut.factor)];
    for (size_t i = 0; i < op.inputs.size(); ++i)
      if (op.inputs[i] != kNone && f.inputs[i].present() &&
          !is_free(op.inputs[i], a, sub_digit(f.inputs[i], cut.sub), depth + 1))
        return false;
    return true;
  }
  TensorId produce_cut(TensorId id, size_t a, const Digit& digit) {
    Op op = g().op(b_.producer(id));
    const Cut cut = cut_of_result(op, a, digit);
    op.name += ".cut";
    op.outputs = {b_.like(id, ".cut")};
    b_.out.layouts[static_cast<size_t>(op.outputs[0])] = b_.out.layouts[static_cast<size_t>(id)];
    // Along the other axes the layout stays what it was.
    Forced forced{{a, cut}};
    for (size_t other = 0; other < axes(); ++other) {
      if (other == a || placement(id, other) != Placement::kShard) continue;
      const Cut kept = cut_of_result(op, other, b_.out.at(id, other).digit);
      if (kept.factor >= 0) forced.emplace_back(other, kept);
    }
    const TensorId out = op.outputs[0];
    place(std::move(op), forced);
    return out;
  }

  // ---- time: what the body needs of the whole batch -------------------------------------------------------------
  // An op with operands that differ from micro-batch to micro-batch belongs to the body. Operands that exist only after
  // the body (sums over micro-batches) are then computed from the whole batch in the prologue, when no parameter is
  // involved.
  void hoist_operands(Op& op) {
    if (axis(kTime).size == 1) return;
    const auto any = [&](Placement p) {
      return std::any_of(op.inputs.begin(), op.inputs.end(), [&](TensorId id) { return placement(id, kTime) == p; });
    };
    if (!any(Placement::kShard)) {
      // A partial value beside a finished sum goes on in the epilogue.
      const bool late = std::any_of(op.inputs.begin(), op.inputs.end(),
                                    [&](TensorId id) { return b_.region(id) == Region::kEpilogue; });
      for (TensorId& id : op.inputs)
        if (late && placement(id, kTime) == Placement::kPartial) id = b_.reduce(id, kTime);
      return;
    }
    for (TensorId& id : op.inputs) {
      if (id == kNone || placement(id, kTime) == Placement::kShard) continue;
      if (placement(id, kTime) == Placement::kPartial || b_.region(id) == Region::kEpilogue) id = whole(op, id, 0);
    }
  }

  TensorId whole(const Op& user, TensorId id, int depth) {
    if (const auto known = wholes_.find(id); known != wholes_.end()) return known->second;
    if (!b_.out.time_varies(id) && b_.region(id) != Region::kEpilogue) return id;
    TensorId out = kNone;
    if (g().tensor(id).kind == TensorKind::kInput) {
      out = b_.whole_input(id);
    } else {
      const OpId producer = b_.producer(id);
      const Op source = producer == kNone ? Op{} : g().op(producer);
      if (producer == kNone || depends_on_variable(id) || depth > 4 * kDeepest || has_flag(source.code, kUpdateOp)) {
        const bool stats = source.code == OpCode::k_batch_stats || user.code == OpCode::k_batch_norm_apply;
        throw invalid(
            "op '{}' ({}) uses '{}', which mixes all samples of the batch, before the loss; with {} micro-batches no "
            "more than a "
            "part of them is there. Plan with one micro-batch (accumulation 1){}",
            user.name, def(user.code).name, g().tensor(id).name, axis(kTime).size,
            stats ? fmt::format(", or set the attribute 'groups' of the batch norm to {} (or a multiple), so that a "
                                "micro-batch is a "
                                "union of whole groups (it is 1)",
                                axis(kTime).size)
                  : std::string())
            .at_op(user.name)
            .at_scope(g().scope_path(user.scope));
      }
      if (source.code == OpCode::k_accumulate) {
        out = whole(user, source.inputs[1], depth + 1);
      } else if (source.code == OpCode::k_all_reduce) {
        const TensorId x = whole(user, source.inputs[0], depth + 1);
        out = placement(x, 1) == Placement::kPartial ? b_.reduce(x, 1) : x;
      } else {
        Op op = source;
        for (TensorId& input : op.inputs)
          if (input != kNone) input = whole(user, input, depth + 1);
        op.name += ".whole";
        const auto at =
            static_cast<size_t>(std::find(source.outputs.begin(), source.outputs.end(), id) - source.outputs.begin());
        for (TensorId& o : op.outputs)
          if (o != kNone) o = b_.like(o, ".whole");
        out = op.outputs[at];
        const std::vector<TensorId> old = source.outputs, fresh = op.outputs;
        place(std::move(op), {});
        for (size_t i = 0; i < old.size(); ++i)
          if (old[i] != kNone) wholes_[old[i]] = fresh[i];
      }
      // The user wants the value itself, not this device's part of a sum.
      if (depth == 0)
        for (size_t a = 1; a < axes(); ++a)
          if (placement(out, a) == Placement::kPartial) out = b_.reduce(out, a);
    }
    return wholes_[id] = out;
  }

  bool depends_on_variable(TensorId id) {
    std::vector<TensorId> todo{id};
    std::set<TensorId> seen{id};
    while (!todo.empty()) {
      const TensorId t = todo.back();
      todo.pop_back();
      if (g().tensor(t).kind == TensorKind::kVariable) return true;
      const OpId producer = b_.producer(t);
      if (producer == kNone) continue;
      for (const TensorId input : g().op(producer).inputs)
        if (input != kNone && seen.insert(input).second) todo.push_back(input);
    }
    return false;
  }

  // ---- the ends -------------------------------------------------------------------------------------------------
  // Stands for whoever reads the tensor at the end of the step, in messages.
  Op reader_of(TensorId id) {
    Op op;
    op.code = OpCode::k_stop_gradient;
    op.name = g().tensor(id).name;
    return op;
  }

  TensorId everywhere(TensorId id) {
    id = b_.latest(id);
    const Op end = reader_of(id);
    for (size_t a = 0; a < axes(); ++a) id = make_whole(end, id, a);
    return id;
  }

  // Sums are finished; samples stay where they are and are put together by the session.
  TensorId fetchable(TensorId id) {
    id = b_.latest(id);
    for (size_t a = 0; a < axes(); ++a)
      if (placement(id, a) == Placement::kPartial) id = b_.reduce(id, a);
    const bool in_time = placement(id, kTime) == Placement::kShard, in_space = placement(id, 1) == Placement::kShard;
    if (in_time && !in_space && axis(1).size > 1) {
      const Digit digit = b_.out.at(id, kTime).digit;
      id = sliced(reader_of(id), id, 1, digit);
    } else if (in_space && ((!in_time && axis(kTime).size > 1) || b_.out.at(id, 1).digit.outer != 1)) {
      id = b_.gather(id, 1);
    }
    if (placement(id, kTime) == Placement::kShard && b_.out.at(id, kTime).digit.outer != 1)
      throw unimplemented(
          "fetching '{}' with {} micro-batches: its samples are not the outermost part of a dimension; transpose it "
          "first",
          g().tensor(id).name, axis(kTime).size);
    return id;
  }

  void finish(const PropagateOptions& options) {
    LayoutGraph& out = b_.out;
    std::set<std::string> names;
    const auto fetch = [&](const std::string& name, TensorId id) {
      if (names.insert(name).second) out.fetches.push_back({name, fetchable(id)});
    };
    if (g().training.loss != kNone) fetch("loss", g().training.loss);
    for (const NamedTensor& o : std::vector<NamedTensor>(g().outputs)) fetch(o.name, o.tensor);
    for (const std::string& name : options.fetch_gradients) {
      const auto it = std::find_if(g().gradients.begin(), g().gradients.end(),
                                   [&](const NamedTensor& n) { return n.name == name; });
      if (it == g().gradients.end())
        throw error(Code::kNotFound, "fetch 'grad:{}': no trained parameter has this name", name);
      fetch("grad:" + name, everywhere(it->tensor));
    }
    for (Variable& v : g().variables)
      if (v.next != kNone) v.next = everywhere(v.next);
    b_.finish();
  }

  BridgeBuilder b_;
  std::map<std::tuple<TensorId, size_t, int, int64_t, int64_t>, TensorId> slices_;
  std::map<TensorId, TensorId> wholes_;
};

}  // namespace

LayoutGraph propagate(const Graph& graph, const PropagateOptions& options) {
  return Propagator(graph, options).run(options);
}

}  // namespace whale
