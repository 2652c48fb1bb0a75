// One step of an entry as a picture shows it.
#pragma once

#include "base/json.h"
#include "plan/plan.h"

namespace whale {

// Seconds by the cost model, the class of each device, and for each queue what each class does when: stretches
// of one kind, [class, kind, start, end, "op, op"]. null where a step is too long to be drawn. By simulate/, which
// walks.
Json timeline_json(const Plan& plan, const Entry& entry);

}  // namespace whale
