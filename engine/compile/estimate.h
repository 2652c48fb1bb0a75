// What a plan would take, at one price of memory; of models that repeat, from a few of their layers.
#pragma once

#include <optional>
#include <vector>

#include "compile/compile.h"
#include "compile/prepare.h"
#include "compile/rooms.h"

namespace whale {

// Memory becomes dearer from attempt to attempt, until what is planned fits the devices that say how much they have.
constexpr int kPrices = 4;
double price_of(const CompileOptions& options, int attempt);
// Dearer than all, tried last: where devices are fast, seconds that are saved by holding bytes weigh much; and blocks
// that are recomputed then exchange again what else they keep.
double last_price(const CompileOptions& options);

// Of few layers only where one layer more says the same; quickly without that.
Estimate estimate_at(const Graph& graph, const std::vector<DeviceSpec>& devices, const CompileOptions& options,
                     double memory_price, Care care = Care::kChecked);

// A few layers say that so much more is needed than there is, that it need not be planned to know. Looked at quickly,
// and false where all layers would have to be.
bool is_hopeless(const Graph& graph, const std::vector<DeviceSpec>& devices, const CompileOptions& options,
                 double memory_price);

// The plan's first entry alone, unverified and whether it fits or not: what the simulator needs of it.
Plan plan_of_step(const Graph& graph, const std::vector<DeviceSpec>& devices, const CompileOptions& options,
                  double memory_price);

// Options by which stages are cut and shares are dealt so that every device has room (CompileOptions::rooms, stages),
// and what is missing with them: found by some estimates, the first with the options as they are.
struct Fitted {
  CompileOptions options;
  int64_t missing = 0;
  Estimate estimate = {};
};
Fitted fitted(const Graph& graph, const std::vector<DeviceSpec>& devices, CompileOptions options, double memory_price,
              Rooms rooms, Care care = Care::kChecked);
// The same where devices are unlike; else the options as they are, which a plan tries first.
CompileOptions with_rooms(const Graph& graph, const std::vector<DeviceSpec>& devices, CompileOptions options,
                          Care care = Care::kChecked);

}  // namespace whale
