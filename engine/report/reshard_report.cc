#include "report/reshard_report.h"

#include <algorithm>
#include <map>

#include "base/error.h"
#include "base/text.h"
#include "lower/localise.h"
#include "plan/figures.h"

namespace whale {
namespace {

int64_t elements(const Part& part) { return element_count(part.extents()); }

int64_t common(const Part& a, const Part& b) {
  int64_t n = 1;
  for (size_t d = 0; d < a.dims.size(); ++d) {
    int64_t here = 0;
    for (const Interval& x : a.dims[d])
      for (const Interval& y : b.dims[d])
        here += std::max<int64_t>(0, std::min(x.end, y.end) - std::max(x.begin, y.begin));
    n *= here;
  }
  return n;
}

// What the members of one group hold before and want after, in elements.
struct Group {
  std::vector<Part> own, want;
  bool partial = false, cut = false;  // before
  bool halo = false;                  // after
  int64_t from = -1;                  // the member that all get their boxes from
  int64_t whole = 0;                  // of all members together, each element once
  size_t size() const { return want.size(); }

  int64_t missing(size_t k) const { return elements(want[k]) - common(own[k], want[k]); }
  template <class F>
  double most(F f) const {
    int64_t n = 0;
    for (size_t k = 0; k < size(); ++k) n = std::max<int64_t>(n, f(k));
    return static_cast<double>(n);
  }
};

struct Pricer {
  const CostModel& cost;
  const LinkRates& link;  // of the axis
  double element_bytes;

  ReshardWay way(std::string name, double elements, int64_t rounds) const {
    const double bytes = elements * element_bytes;
    return {std::move(name), bytes, rounds, link_seconds(bytes, rounds, link)};
  }
  // Nothing is received; reading and writing the part takes its time.
  ReshardWay slice(const Group& g) const {
    ReshardWay w = way("local_slice", 0, 0);
    const double part = g.most([&](size_t k) { return elements(g.want[k]); });
    w.seconds = op_seconds({0, 2 * part * element_bytes}, cost.device);
    return w;
  }
  static ReshardWay then(const ReshardWay& a, const ReshardWay& b) {
    return {a.name + " + " + b.name, a.bytes + b.bytes, a.rounds + b.rounds, a.seconds + b.seconds};
  }
  static ReshardWay named(ReshardWay w, const char* name) {
    w.name = name;
    return w;
  }

  static int64_t n(const Group& g) { return static_cast<int64_t>(g.size()); }
  ReshardWay all_gather(const Group& g) const {
    return way("all_gather", g.most([&](size_t k) { return g.whole - elements(g.own[k]); }), n(g) - 1);
  }
  ReshardWay reduce_scatter(const Group& g) const {
    return way("reduce_scatter", g.most([&](size_t k) { return g.whole - elements(g.want[k]); }), n(g) - 1);
  }
  ReshardWay all_reduce(const Group& g) const {
    const auto members = static_cast<double>(n(g));
    return way("all_reduce", 2 * (members - 1) / members * static_cast<double>(g.whole), 2 * (n(g) - 1));
  }
  ReshardWay all_to_all(const Group& g) const {
    return way("all_to_all", g.most([&](size_t k) { return g.missing(k); }), n(g) - 1);
  }
  // A halo; or, between groups that cut in ways of their own, boxes of one member (`from`) to the others.
  ReshardWay exchange_boxes(const Group& g) const {
    if (g.halo) return named(transfers(g), "halo transfer");
    if (g.from < 0) return transfers(g);
    return way("transfer of one part",
               g.most([&](size_t k) { return static_cast<int64_t>(k) == g.from ? int64_t{0} : elements(g.want[k]); }),
               1);
  }
  // Every device asks every holder for what it lacks; of a sum, everybody's part.
  ReshardWay transfers(const Group& g) const {
    const double bytes = g.most([&](size_t k) { return g.partial ? (n(g) - 1) * elements(g.want[k]) : g.missing(k); });
    const double rounds = g.most([&](size_t k) {
      if (g.partial) return n(g) - 1;
      int64_t peers = 0;
      for (size_t s = 0; s < g.size(); ++s) peers += s != k && g.missing(k) > 0 && common(g.own[s], g.want[k]) > 0;
      return peers;
    });
    return way("plain transfers", bytes, static_cast<int64_t>(rounds));
  }
};

// Each op that is a reshard: how it is priced, and what else would have been legal.
struct Kind {
  OpCode code;
  ReshardWay (*chosen)(const Pricer&, const Group&);
  std::vector<ReshardWay> (*others)(const Pricer&, const Group&);
};
using Ways = std::vector<ReshardWay>;
const Kind kKinds[] = {
    {OpCode::k_all_reduce, [](const Pricer& p, const Group& g) { return p.all_reduce(g); },
     [](const Pricer& p, const Group& g) {
       return Ways{Pricer::named(p.all_reduce(g), "reduce_scatter + all_gather"), p.transfers(g)};
     }},
    {OpCode::k_adasum, [](const Pricer& p, const Group& g) { return Pricer::named(p.all_reduce(g), "adasum"); },
     [](const Pricer& p, const Group& g) { return Ways{p.transfers(g)}; }},
    {OpCode::k_reduce_scatter, [](const Pricer& p, const Group& g) { return p.reduce_scatter(g); },
     [](const Pricer& p, const Group& g) {
       return Ways{Pricer::then(p.all_reduce(g), p.slice(g)), p.transfers(g)};
     }},
    {OpCode::k_all_gather, [](const Pricer& p, const Group& g) { return p.all_gather(g); },
     [](const Pricer& p, const Group& g) {
       return Ways{Pricer::named(p.all_reduce(g), "all_reduce of parts padded with zeros"), p.transfers(g)};
     }},
    {OpCode::k_all_to_all, [](const Pricer& p, const Group& g) { return p.all_to_all(g); },
     [](const Pricer& p, const Group& g) {
       return Ways{Pricer::then(p.all_gather(g), p.slice(g)), p.transfers(g)};
     }},
    {OpCode::k_shift,  // one round of a ring
     [](const Pricer& p, const Group& g) {
       return p.way("shift", g.most([&](size_t k) { return elements(g.want[k]); }), 1);
     },
     [](const Pricer& p, const Group& g) { return Ways{Pricer::then(p.all_gather(g), p.slice(g))}; }},
    {OpCode::k_local_slice, [](const Pricer& p, const Group& g) { return p.slice(g); },
     [](const Pricer& p, const Group& g) {
       const double most = g.most([&](size_t k) { return k ? elements(g.want[k]) : int64_t{0}; });
       return Ways{p.way("sent by one device", most, 1)};
     }},
    {OpCode::k_transfer, [](const Pricer& p, const Group& g) { return p.exchange_boxes(g); },
     [](const Pricer& p, const Group& g) { return g.halo ? Ways{Pricer::then(p.all_gather(g), p.slice(g))} : Ways{}; }},
};

class Reporter {
 public:
  explicit Reporter(const ShardedGraph& lg) : lg_(lg), local_(lg) {}

  std::vector<ReshardRow> run() {
    for (const Op& op : lg_.graph.ops) {
      const auto* kind =
          std::find_if(std::begin(kKinds), std::end(kKinds), [&](const Kind& k) { return k.code == op.code; });
      if (kind == std::end(kKinds)) continue;
      for (size_t i = 0; i < op.inputs.size() && i < op.outputs.size(); ++i)
        add(op, *kind, op.inputs[i], op.outputs[i]);
    }
    for (ReshardRow& row : rows_)
      std::stable_sort(row.alternatives.begin(), row.alternatives.end(),
                       [](const ReshardWay& a, const ReshardWay& b) { return a.seconds > b.seconds; });
    std::stable_sort(rows_.begin(), rows_.end(),
                     [](const ReshardRow& a, const ReshardRow& b) { return a.seconds() > b.seconds(); });
    return std::move(rows_);
  }

 private:
  // The axis that the reshard works along; kTime: none, it goes to another stage.
  size_t axis_of(const Op& op, TensorId x, TensorId y) const {
    if (op.attrs.contains("group")) return static_cast<size_t>(attr_int(op.attrs, "group")) + 1;
    if (lg_.stage(x) != op.stage) return kTime;
    for (size_t a = 1; a < lg_.axes(); ++a)
      if (!(lg_.at(x, a) == lg_.at(y, a))) return a;
    return kTime;
  }

  Place place(int32_t stage, Ints coordinates) const {
    return {lg_.tasks.mesh_of_stage[stage], std::move(coordinates), 0};
  }

  Group group_along(const Op& op, size_t axis, TensorId x, TensorId y) const {
    Group g;
    const Mesh& mesh = lg_.tasks.mesh(op.stage);
    for (int64_t k = 0; k < lg_.size(axis, op.stage); ++k) {
      Ints at(lg_.axes() - 1);
      at[axis - 1] = k;
      if (!mesh.axes[axis - 1].exists(k, row_of(mesh.axes, axis - 1, at))) continue;
      g.own.push_back(local_.part(x, place(op.stage, at)));
      g.want.push_back(local_.part(y, place(op.stage, at)));
    }
    const Placement before = lg_.at(x, axis).placement;
    g.halo = lg_.at(y, axis).window.present();
    if (op.code == OpCode::k_transfer && op.attrs.contains("from")) g.from = attr_int(op.attrs, "from");
    g.partial = before == Placement::kPartial, g.cut = before == Placement::kShard;
    if (g.cut)
      for (const Part& part : g.own) g.whole += elements(part);
    else
      g.whole = elements(g.own[0]);
    return g;
  }

  // Between stages every device receives its part from its like; the other way is the whole tensor, sent once for all.
  void price_stages(ReshardRow& row, const Pricer& p, TensorId x, TensorId y, int32_t to) const {
    const Mesh& mesh = lg_.tasks.mesh(to);
    int64_t part = 0;
    for (size_t k = 0; k < mesh.devices.size(); ++k)
      part = std::max(part, elements(local_.part(y, place(to, mesh.coordinates(static_cast<int64_t>(k))))));
    int64_t all = element_count(lg_.graph.tensor(x).dims);
    if (lg_.time_varies(x)) all = (all + lg_.micro_batches - 1) / lg_.micro_batches;
    const auto most = static_cast<double>(part), whole = static_cast<double>(all);
    row.axis = "stage", row.devices = static_cast<int64_t>(mesh.devices.size());
    row.way = p.way("transfer", most, 1);
    if (all > part) {
      const auto n = static_cast<int64_t>(lg_.tasks.mesh(lg_.stage(x)).devices.size());
      const ReshardWay gather = p.way("all_gather", whole - whole / static_cast<double>(n), n - 1);
      Group g;
      g.want.push_back(local_.part(y, place(to, mesh.coordinates(0))));
      row.alternatives.push_back(
          Pricer::then(Pricer::then(gather, p.way("transfer of the whole", whole, 1)), p.slice(g)));
    } else if (row.devices > 1) {
      row.alternatives.push_back(
          Pricer::then(p.way("transfer to one device", most, 1), p.way("all_gather", most, row.devices - 1)));
    }
  }

  void add(const Op& op, const Kind& kind, TensorId x, TensorId y) {
    const Tensor& t = lg_.graph.tensor(y);
    ReshardRow row;
    row.tensor = lg_.graph.tensor(x).name;
    row.dtype = t.dtype, row.dims = t.dims, row.phase = op.phase, row.count = 1;
    row.from = to_string(lg_.shardings[x]), row.to = to_string(lg_.shardings[y]);
    if (op.region == Region::kBody) row.runs = local_.micro_batches(place(op.stage, Ints(lg_.axes() - 1))).size();
    const size_t axis = axis_of(op, x, y);
    const CostModel& cost = lg_.tasks.cost;
    const Pricer p{cost, axis == kTime ? cost.link : lg_.tasks.link(op.stage, axis - 1),
                   static_cast<double>(size_of(t.dtype))};
    const std::string pattern = starred(row.tensor);
    const std::string key = fmt::format("{} {} {} {} {} {} {} {} {} {}", def(op.code).name, pattern, name_of(row.dtype),
                                        to_string(row.dims), axis, row.from, row.to, static_cast<int>(row.phase),
                                        row.runs, axis == kTime ? 0 : lg_.size(axis, op.stage));
    if (const auto known = row_of_.find(key); known != row_of_.end()) {
      ++rows_[known->second].count;
      rows_[known->second].tensor = pattern;
      return;
    }
    if (axis == kTime) {
      price_stages(row, p, x, y, op.stage);
    } else {
      const Group g = group_along(op, axis, x, y);
      row.axis = lg_.axis_name(axis), row.devices = Pricer::n(g);
      row.way = kind.chosen(p, g);
      row.alternatives = kind.others(p, g);
    }
    row_of_[key] = rows_.size();
    rows_.push_back(std::move(row));
  }

  const ShardedGraph& lg_;
  Localiser local_;
  std::vector<ReshardRow> rows_;
  std::map<std::string, size_t> row_of_;
};

}  // namespace

std::vector<ReshardRow> reshards_of(const ShardedGraph& graph) { return Reporter(graph).run(); }

}  // namespace whale
