#include "compile/passes.h"

#include <algorithm>

#include "base/watch.h"
#include "compile/checks.h"
#include "grad/passes.h"
#include "rewrite/copies.h"
#include "rewrite/copy_replicas.h"
#include "rewrite/fold.h"
#include "rewrite/fuse.h"
#include "rewrite/gather_late.h"
#include "rewrite/gathers.h"
#include "rewrite/offload.h"
#include "rewrite/order.h"
#include "rewrite/slice_updates.h"
#include "rewrite/stream.h"
#include "shard/insert.h"
#include "task/strategy.h"

namespace whale {
namespace {

// What an update works on is copied in and out as a whole: smaller groups keep less on the device.
int64_t update_bytes(const CostModel& cost, const CompileOptions& options) {
  const bool copied = options.offload & (kOffloadState | kOffloadParameters);
  const int64_t bytes = bucket_bytes(cost, options);
  return copied ? std::min(bytes, cost.copied_bytes) : bytes;
}

enum When : unsigned { kTrain = 1, kEval = 2, kAlways = 3 };

// Large gradients that replicas reduce into parts as they arrive; a split's devices make parts of them as it is, of
// columns too.
void pieces_of_gradients(Graph& graph, const TaskGraphs& tasks, const CompileOptions& options) {
  if (options.zero < 2 || options.exact || options.adasum || !many_micro_batches(graph)) return;
  int64_t most = 1;  // replicas
  for (const Mesh& mesh : tasks.meshes)
    for (size_t a = 0; a < mesh.axes.size(); ++a) {
      if (mesh.axes[a].size > 1 && tasks.by_micro_batch[a]) return;
      most = std::max(most, mesh.axes[a].size);
    }
  const auto may_be_cut = [&](const Op& op, const Dims& gradient) {
    const TaskGraph& task = tasks.task(op);
    bool replicas = false;
    for (const Mesh& mesh : tasks.meshes)
      for (size_t a = 0; a < mesh.axes.size(); ++a) {
        if (mesh.axes[a].size == 1) continue;
        if (task.roles[a] != AxisRole::kReplica) return false;
        replicas = true;
      }
    return replicas && gradient[0] >= most;
  };
  constexpr int64_t kBuckets = 16;  // a product of its own is worth more than a bucket
  const CostModel& cost = tasks.cost;
  cut_gradients(graph, {.bytes = options.bucket_bytes > 0 ? options.bucket_bytes : kBuckets * cost.bucket_bytes,
                        .columns = cost.product_rows,
                        .may_be_cut = may_be_cut});
}

struct GraphPass {
  const char* name;
  void (*run)(Graph&, const TaskGraphs&, const CompileOptions&);
  unsigned when;
  bool fuses;  // left out by fusion = false
};

template <void (*Pass)(Graph&)>
void plain(Graph& graph, const TaskGraphs&, const CompileOptions&) {
  Pass(graph);
}
template <void (*Pass)(Graph&, const TaskGraphs&)>
void of_tasks(Graph& graph, const TaskGraphs& tasks, const CompileOptions&) {
  Pass(graph, tasks);
}

template <void (*Check)(const Graph&, const TaskGraphs&)>
void checked(Graph& graph, const TaskGraphs& tasks, const CompileOptions&) {
  Check(graph, tasks);
}

void clean_scopes(Graph& graph, const TaskGraphs& tasks, const CompileOptions&) {
  clean_as_written(graph, tasks.written);
}

constexpr GraphPass kGraphPasses[] = {
    {"canonicalise", plain<canonicalise>, kAlways, false},
    {"copy_replicas", of_tasks<copy_replicas>, kAlways, false},
    {"decompose_splits", of_tasks<decompose_splits>, kAlways, false},
    {"fold_bias", of_tasks<fold_bias>, kAlways, true},
    {"apply_precision", plain<apply_precision>, kAlways, false},
    {"part_casts", of_tasks<part_casts>, kAlways, false},
    {"clean", clean_scopes, kAlways, false},
    {"differentiate", plain<differentiate>, kTrain, false},
    {"check_copies", checked<check_copies>, kTrain, false},
    {"add_before_casts", of_tasks<add_before_casts>, kTrain, false},
    {"split_weights", plain<split_weights>, kAlways, false},
    {"add_updates", plain<add_updates>, kTrain, false},
    {"clean_updates", clean_scopes, kTrain, false},
    {"cut_gradients", pieces_of_gradients, kTrain, false},
    {"fold_activation", of_tasks<fold_activation>, kAlways, true},
    {"check_indices", plain<check_indices>, kAlways, false},
    {"assign_regions", plain<assign_regions>, kAlways, false},
    {"place_in_stages", of_tasks<place_in_stages>, kAlways, false},
    {"name_apart", plain<name_apart>, kAlways, false},
};

struct ShardedGraphPass {
  const char* name;
  void (*run)(ShardedGraph&, const CompileOptions& options);
  bool fuses;
};

// The stages that have one of the policies.
std::vector<char> stages_with(const ShardedGraph& g, const CompileOptions& o,
                              std::initializer_list<Recompute> policies) {
  std::vector<char> out(g.tasks.stages());
  for (size_t s = 0; s < out.size(); ++s) {
    const Recompute mine = o.stage_recompute.empty() ? o.recompute : o.stage_recompute[s];
    out[s] = std::find(policies.begin(), policies.end(), mine) != policies.end();
  }
  return out;
}

constexpr ShardedGraphPass kShardedGraphPasses[] = {
    {"slice_updates",
     [](ShardedGraph& g, const CompileOptions& o) {
       const bool by_cost = o.update == UpdateForm::kByCost && g.tasks.cost.beside;
       if (by_cost || o.update == UpdateForm::kSliced) slice_updates(g, !by_cost);
     },
     false},
    {"gather_late", [](ShardedGraph& g, const CompileOptions&) { gather_late(g); }, false},
    {"view_slices", [](ShardedGraph& g, const CompileOptions&) { view_slices(g); }, false},
    // Where a stage ends would say what is folded, and a product with its bias has other bits.
    {"fold_whole_products",
     [](ShardedGraph& g, const CompileOptions& o) {
       if (!o.exact) fold_whole_products(g);
     },
     true},
    {"fuse_elementwise", [](ShardedGraph& g, const CompileOptions&) { fuse_elementwise(g); }, true},
    {"reshard_late", [](ShardedGraph& g, const CompileOptions&) { reshard_late(g); }, false},
    {"recompute_blocks",
     [](ShardedGraph& g, const CompileOptions& o) { recompute_blocks(g, stages_with(g, o, {Recompute::kFull})); },
     false},
    {"recompute_cheap",
     [](ShardedGraph& g, const CompileOptions& o) {
       recompute_cheap(g, {.ops = stages_with(g, o, {Recompute::kSelective}),
                           .gathers = stages_with(g, o, {Recompute::kSelective, Recompute::kFull}),
                           .short_of_memory = g.tasks.cost.memory_price > 1});
     },
     false},
    {"gather_for_weights", [](ShardedGraph& g, const CompileOptions&) { gather_for_weights(g); }, false},
    {"stream_gathers", [](ShardedGraph& g, const CompileOptions&) { stream_gathers(g); }, false},
    {"copy_before_sums", [](ShardedGraph& g, const CompileOptions&) { copy_before_sums(g); }, false},
    {"order_sources", [](ShardedGraph& g, const CompileOptions& o) { order_ops(g, o.prefetch); }, false},
    {"shorten_lives", [](ShardedGraph& g, const CompileOptions&) { shorten_lives(g); }, false},
    {"form_buckets",
     [](ShardedGraph& g, const CompileOptions& o) {
       form_buckets(g, bucket_bytes(g.tasks.cost, o), (o.offload & kOffloadGradients) != 0);
     },
     false},
    {"group_updates", [](ShardedGraph& g, const CompileOptions& o) { group_updates(g, update_bytes(g.tasks.cost, o)); },
     true},
    {"order_ops", [](ShardedGraph& g, const CompileOptions& o) { order_ops(g, o.prefetch); }, false},
    {"offload", [](ShardedGraph& g, const CompileOptions& o) { offload(g, o.offload); }, false},
};

template <class Check>
void check(const std::string& pass, Check holds) {
  try {
    holds();
  } catch (const Error& e) {
    throw Error(Code::kInternal,
                fmt::format("after pass {}: {} (planning refuses what it has made itself: this is a bug in "
                            "libwhale, please report it with the model, the devices and the options)",
                            pass, e.message()))
        .at_op(e.where().op)
        .at_scope(e.where().scope);
  }
}

}  // namespace

int64_t bucket_bytes(const CostModel& cost, const CompileOptions& options) {
  return options.bucket_bytes > 0 ? options.bucket_bytes : cost.bucket_bytes;
}

template <class Level>
void Passes::after(const std::string& pass, const Level& level, bool last) const {
  Watch::look();
  if ((last && checks) || options.verify_passes)
    check(pass, [&] {
      verify(level);
      if constexpr (std::is_same_v<Level, Graph>) verify_ops(level);
    });
  if (options.dump) options.dump(pass, print(level));
}

template void Passes::after(const std::string&, const Plan&, bool) const;

Graph Passes::on_graph(Graph graph, const std::string& entry) const {
  const unsigned when = entry == "train" ? kTrain : kEval;
  if (when == kEval) {
    graph = for_inference(std::move(graph));
    after(entry + ".for_inference", graph, false);
  }
  for (const GraphPass& pass : kGraphPasses) {
    if (!(pass.when & when) || (pass.fuses && !options.fusion)) continue;
    pass.run(graph, tasks, options);
    after(entry + "." + pass.name, graph, &pass == std::end(kGraphPasses) - 1);
  }
  return graph;
}

ShardOptions Passes::shard_options(const Graph& graph, const std::string& entry, int64_t micro_batches,
                                   const StorageShardings* storage_shardings) const {
  return {.micro_batches = micro_batches,
          .fetch_gradients = entry == "train" ? gradients : std::vector<std::string>{},
          .zero = options.zero,
          .exact = options.exact,
          .gradient_dtype = options.gradient_dtype,
          .accumulate_dtype = options.accumulate_dtype,
          .adasum = options.adasum && batch_of(graph) != 1,  // of one sample's gradient it is that gradient
          .storage_shardings = storage_shardings};
}

ShardedGraph Passes::on_shardings(Graph graph, const std::string& entry, int64_t micro_batches,
                                  const StorageShardings* storage_shardings) const {
  const ShardOptions sharding = shard_options(graph, entry, micro_batches, storage_shardings);
  const Choices choices = choose_cuts(graph, tasks, sharding);
  if (options.dump) options.dump(entry + ".choose_cuts", choices_text(choice_report(graph, tasks, choices, false)));
  const Graph before = options.verify_passes ? graph : Graph{};
  ShardedGraph lg = insert_reshards(std::move(graph), tasks, sharding, choices);
  if (options.verify_passes) check(entry + ".insert_reshards", [&] { verify(before, choices, lg); });
  after(entry + ".insert_reshards", lg, false);
  for (const ShardedGraphPass& pass : kShardedGraphPasses) {
    if (pass.fuses && !options.fusion) continue;
    pass.run(lg, options);
    after(entry + "." + pass.name, lg, &pass == std::end(kShardedGraphPasses) - 1);
  }
  return lg;
}

Entry Passes::make_entry(const ShardedGraph& lg, const std::vector<std::vector<IndexRange>>& indices,
                         const std::string& name, const std::vector<PlanVariable>& variables,
                         std::vector<std::string>* notes, Detail detail) const {
  LowerOptions lowering;
  lowering.detail = detail;
  lowering.entry = name;
  lowering.share = options.share_programs;
  lowering.overlap = options.overlap;
  lowering.matmul_chunks = options.matmul_chunks;
  lowering.notes = notes;
  lowering.variables.reserve(variables.size());
  for (size_t v = 0; v < variables.size(); ++v) lowering.variables.emplace(variables[v].name, static_cast<int32_t>(v));
  Entry entry = lower(lg, lowering);
  for (size_t i = 0; i < indices.size(); ++i) entry.inputs.at(i).indices = indices[i];
  return entry;
}

}  // namespace whale
