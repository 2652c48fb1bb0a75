// Plans: compiled, printed, saved.
#include "plan/plan.h"

#include "base/watch.h"
#include "compile.h"
#include "compile_checks.h"
#include "guard.h"
#include "handles.h"
#include "plan/in_float64.h"
#include "ir/plan_options.h"
#include "schema/graph_file.h"

using namespace whale;        // NOLINT
using namespace whale::capi;  // NOLINT

namespace whale::capi {
namespace {

CompileOptions read_options(const whale_plan_options& o) {
  CompileOptions out;
  out.verify_passes = false;  // which pass erred is looked for here, not at a user's
  out.strategy = text(o.strategy, "options.strategy");
  for (const whale_str& name : array(o.fetch, o.fetch_count, "options.fetch"))
    out.fetch.push_back(nonempty(name, "options.fetch"));
  out.bucket_bytes = number<int64_t>(o.bucket_bytes, 0, INT64_MAX, "options.bucket_bytes");
  out.accumulation = number<int64_t>(o.accumulation, 0, INT32_MAX, "options.accumulation");
  const auto precision = number<int>(o.precision, 0, WHALE_PRECISION_F16 + 1, "options.precision");
  if (precision > 0) out.precision = static_cast<Precision>(precision - 1);
  out.overlap = !flag(o.no_overlap, "options.no_overlap");
  out.fusion = !flag(o.no_fusion, "options.no_fusion");
  out.zero = number<int>(o.zero, 0, 3, "options.zero");
  for (const double share : array(o.state_shares, o.state_share_count, "options.state_shares"))
    out.state_shares.push_back(share);
  out.recompute = static_cast<Recompute>(number<int>(o.recompute, 0, WHALE_RECOMPUTE_FULL, "options.recompute"));
  const auto dtype = number<int>(o.gradient_dtype, 0, INT32_MAX, "options.gradient_dtype");
  if (dtype > 0) out.gradient_dtype = checked_dtype(dtype - 1);
  out.adasum = flag(o.adasum, "options.adasum");
  out.exact = flag(o.exact, "options.exact");
  out.offload = parse_offload(text(o.offload, "options.offload"));
  out.update = static_cast<UpdateForm>(number<int>(o.update, 0, WHALE_UPDATE_SLICED, "options.update"));
  for (const int32_t policy : array(o.stage_recompute, o.stage_recompute_count, "options.stage_recompute"))
    out.stage_recompute.push_back(
        static_cast<Recompute>(number<int>(policy, 0, WHALE_RECOMPUTE_FULL, "options.stage_recompute")));
  out.matmul_chunks = number<int64_t>(o.matmul_chunks, 0, INT32_MAX, "options.matmul_chunks");
  return out;
}

std::unique_ptr<whale_plan> handle(Plan plan, InitFiles init_files) {
  auto out = std::make_unique<whale_plan>();
  out->init_files = std::move(init_files);
  out->plan = std::make_shared<const Plan>(std::move(plan));
  return out;
}

std::unique_ptr<whale_plan> loaded(const whale_engine& engine, Plan plan, const std::string& path) {
  check_limits(engine.limits, plan);
  verify_source(plan);
  auto out = handle(std::move(plan), init_files_of(engine.limits, path, "plan"));
  out->from_file = true;
  return out;
}

// What is to be planned, looked through.
struct Request {
  Request(whale_engine* engine, const whale_graph* g, const whale_cluster* c, const whale_plan_options* o)
      : graph(need(g, "graph")), cluster(need(c, "cluster")) {
    need(engine, "engine");
    if (!graph.sealed)
      throw error(Code::kFailedPrecondition, "graph '{}' is not sealed; call whale_graph_seal first",
                  graph.graph->name);
    const whale_plan_options given = capi::options(o, whale_plan_options WHALE_PLAN_OPTIONS_INIT, "options");
    options = read_options(given);
    options.max_bytes = engine->limits.plan_bytes;
    if (given.cancel != nullptr) cancel = given.cancel->cancel;
    timeout_seconds = given.timeout_seconds;
  }
  Watch watch() const { return Watch("planning", cancel == nullptr ? nullptr : &cancel->flag(), timeout_seconds); }

  const whale_graph& graph;
  const whale_cluster& cluster;
  CompileOptions options;
  std::shared_ptr<const Cancel> cancel;
  double timeout_seconds = 0;
};

}  // namespace
}  // namespace whale::capi

whale_status* whale_plan_create(whale_engine* engine, const whale_graph* graph, const whale_cluster* cluster,
                                const whale_plan_options* options, whale_plan** out) {
  return guard([&] {
    const Request request(engine, graph, cluster, options);
    need(out, "out");
    const Watch watch = request.watch();
    auto plan =
        handle(compile(*request.graph.graph, request.cluster.devices, request.options), request.graph.init_files);
    plan->cancel = request.cancel;
    plan->timeout_seconds = request.timeout_seconds;
    *out = plan.release();
  });
}

whale_status* whale_plan_estimate(whale_engine* engine, const whale_graph* graph, const whale_cluster* cluster,
                                  const whale_plan_options* options, int32_t json, whale_text* out) {
  return guard([&] {
    const Request request(engine, graph, cluster, options);
    need(out, "out");
    const bool as_json = flag(json, "json");
    const Watch watch = request.watch();
    const Estimate e = estimate(*request.graph.graph, request.cluster.devices, request.options);
    *out = make_text(as_json ? estimate_json(e, request.cluster.devices) : estimate_text(e, request.cluster.devices));
  });
}

whale_status* whale_plan_parse(whale_engine* engine, const void* data, size_t size, whale_plan** out) {
  return guard([&] {
    need(engine, "engine");
    array(static_cast<const char*>(data), size, "data");
    need(out, "out");
    check_file_bytes(engine->limits, static_cast<int64_t>(size), "a plan as bytes");
    const auto* bytes = static_cast<const uint8_t*>(data);
    *out = loaded(*engine, deserialize(bytes, without_checksum(bytes, size)), "").release();
  });
}

whale_status* whale_plan_load(whale_engine* engine, whale_str path, whale_plan** out) {
  return guard([&] {
    need(engine, "engine");
    need(out, "out");
    const std::string file = nonempty(path, "path");
    const std::vector<uint8_t> bytes = read_file(file, engine->limits.file_bytes);
    try {
      *out = loaded(*engine, deserialize(bytes.data(), without_checksum(bytes.data(), bytes.size())), file).release();
    } catch (const Error& e) {
      throw Error(e.code(), fmt::format("'{}': {}", brief(file), e.message()))
          .at_op(e.where().op)
          .at_scope(e.where().scope);
    }
  });
}

whale_status* whale_plan_serialize(const whale_plan* plan, whale_text* out) {
  return guard([&] {
    const Plan& p = *need(plan, "plan").plan;
    need(out, "out");
    const std::vector<uint8_t> bytes = with_checksum(serialize(p));
    *out = make_text({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
  });
}

whale_status* whale_plan_save(const whale_plan* plan, whale_str path) {
  return guard([&] {
    const whale_plan& p = need(plan, "plan");
    const std::string file = nonempty(path, "path");
    write_file(file, with_checksum(serialize(moved_to(*p.plan, p.init_files, file))));
  });
}

whale_status* whale_plan_print(const whale_plan* plan, whale_text* out) {
  return guard([&] {
    const Plan& p = *need(plan, "plan").plan;
    need(out, "out");
    *out = make_text(print(p));
  });
}

whale_status* whale_plan_summary(const whale_plan* plan, whale_text* out) {
  return guard([&] {
    const Plan& p = *need(plan, "plan").plan;
    need(out, "out");
    *out = make_text(summary(p));
  });
}

whale_status* whale_plan_json(const whale_plan* plan, whale_text* out) {
  return guard([&] {
    const Plan& p = *need(plan, "plan").plan;
    need(out, "out");
    *out = make_text(to_json(p));
  });
}

whale_status* whale_plan_bridges(const whale_plan* plan, int32_t json, whale_text* out) {
  return guard([&] {
    const whale_plan& p = need(plan, "plan");
    need(out, "out");
    const bool as_json = flag(json, "json");
    const Watch watch("planning", p.cancel == nullptr ? nullptr : &p.cancel->flag(), p.timeout_seconds);
    const std::vector<BridgeRow> rows = bridges_of(*p.plan);
    *out = make_text(as_json ? bridges_json(rows) : bridges_text(rows, CostModel(p.plan->devices).link));
  });
}

whale_status* whale_plan_choices(const whale_plan* plan, int32_t json, whale_text* out) {
  return guard([&] {
    const whale_plan& p = need(plan, "plan");
    need(out, "out");
    const bool as_json = flag(json, "json");
    const Watch watch("planning", p.cancel == nullptr ? nullptr : &p.cancel->flag(), p.timeout_seconds);
    const ChoiceReport report = choices_of(*p.plan);
    *out = make_text(as_json ? choices_json(report) : choices_text(report));
  });
}

whale_status* whale_plan_in_float64(const whale_plan* plan, whale_plan** out) {
  return guard([&] {
    const whale_plan& p = need(plan, "plan");
    need(out, "out");
    auto widened = handle(in_float64(*p.plan), p.init_files);
    widened->from_file = p.from_file;
    *out = widened.release();
  });
}

void whale_plan_release(whale_plan* plan) { delete plan; }
