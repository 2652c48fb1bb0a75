// What a model's ops take on some devices, for the cost model (cost/measured.h): steps of the model are run by the
// kernels and the executor that train it, each device by itself and all of them at once, so that what they share
// counts.
#pragma once

#include <memory>
#include <vector>

#include "base/json.h"
#include "compile/compile.h"
#include "device/device.h"
#include "run/handle.h"
#include "session/cores.h"
#include "session/init_files.h"

namespace whale {

struct ModelProfileOptions {
  CompileOptions compile = {};        // the precision; the strategy is not looked at
  std::vector<int64_t> samples = {};  // local batches; empty: the graph's own, a half, a quarter, ... of it
  double seconds = 1;                 // of each local batch, about
  std::shared_ptr<CoreLeases> leases = {};
  std::shared_ptr<const Cancel> cancel = {};
  InitFiles init_files = {};
};
// JSON as measured_of() reads it, with `profile`: figures of the machine, as a probe has them. Throws what compile()
// throws for one device, and unimplemented for devices that compute nothing.
Json profile_model(const std::shared_ptr<Backends>& backends, const Graph& graph,
                   const std::vector<DeviceSpec>& devices, const ModelProfileOptions& options);

}  // namespace whale
