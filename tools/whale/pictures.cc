#include "pictures.h"

#include <cstdio>

#include "file.h"

namespace tool {

std::vector<CLI::Option*> Pictures::add_options(CLI::App& command) {
  auto* report = command.add_option("--report", report_,
                                    "write the plan as a page for a browser, which needs no network: cluster, "
                                    "timeline, shares and why, reshards");
  auto* measured = command.add_option(
      "--measured", measured_,
      "timelines that `whale run --trace` wrote for this plan, one of each rank: in the report they stand "
      "beside the predicted one");
  measured->allow_extra_args(false)->needs(report);
  auto* trace = command.add_option(
      "--trace", trace_,
      "write the predicted timeline of a step, as `whale run --trace` writes a measured one (open at "
      "ui.perfetto.dev)");
  return {report, measured, trace};
}

void Pictures::check(const std::string& model) const {
  std::vector<std::string> read = measured_;
  read.push_back(model);
  if (!report_.empty()) check_target(report_, "--report", read);
  if (!trace_.empty()) check_target(trace_, "--trace", read);
}

void Pictures::write(const whale_plan* plan) const {
  const auto put = [](const std::string& path, const std::string& content) {
    if (path.empty()) return;
    write_file(path, content);
    std::fprintf(stderr, "wrote %s\n", shown(path).c_str());
  };
  if (!report_.empty()) {
    std::vector<std::string> traces;
    for (const std::string& path : measured_) traces.push_back(read_file(path));
    put(report_, report_of(plan, traces));
  }
  if (!trace_.empty()) put(trace_, text(whale_plan_timeline_json, plan));
}

}  // namespace tool
