// A plan as one HTML page that needs nothing else: cluster, timeline, shares, reshards; beside it what a run measured.
#pragma once

#include <string>
#include <vector>

#include "base/json.h"
#include "plan/plan.h"
#include "report/reshard_report.h"

namespace whale {

// What the page shows, as data (page/page.js draws it): of many devices one for each class. traces: timelines of a run
// of the plan, as `whale run --trace` writes them, one for each rank; none: the prediction alone.
Json page_data(const Plan& plan, const std::vector<ReshardRow>& reshards, const std::vector<std::string>& traces);

// Self-contained. Whatever names hold stays text: data are JSON without '<', and the only script that may run is the
// page's own, by its hash.
std::string page_html(const Json& data);

}  // namespace whale
