// What a plan of a small model trains: losses of every step and all variables at the end, to compare plans bit by bit.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <string>
#include <vector>

#include "cluster/devices.h"
#include "compile/compile.h"
#include "session/session.h"
#include "small_models.h"

namespace whale::small {

struct Trained {
  std::vector<float> losses, logits;  // of every step; of the last one
  std::vector<std::vector<float>> variables;
  friend bool operator==(const Trained&, const Trained&) = default;
};

// The largest difference of a loss or an element.
inline double distance(const Trained& a, const Trained& b) {
  double most = 0;
  for (size_t i = 0; i < a.losses.size(); ++i)
    most = std::max(most, std::abs(static_cast<double>(a.losses[i]) - static_cast<double>(b.losses[i])));
  for (size_t v = 0; v < a.variables.size(); ++v)
    for (size_t i = 0; i < a.variables[v].size(); ++i)
      most = std::max(most, std::abs(static_cast<double>(a.variables[v][i]) - static_cast<double>(b.variables[v][i])));
  return most;
}

// Where the build has put libwhale_cpu.so.
inline std::string backends_folder() {
  const char* folder = std::getenv("WHALE_LIBRARY_DIR");
  return folder ? folder : "";
}

// Every input is filled by a formula of the step and the element; integers are below `classes`.
inline Trained train(const Plan& plan, int steps = 3, int64_t classes = 3, const SessionOptions& options = {}) {
  Session session(std::make_shared<const Plan>(plan), std::make_shared<Backends>(backends_folder()), options);
  const Entry& entry = plan.entries[0];
  Trained out;
  for (int step = 0; step < steps; ++step) {
    std::vector<std::vector<float>> floats(entry.inputs.size());
    std::vector<std::vector<int32_t>> ints(entry.inputs.size());
    std::vector<NamedHost> inputs;
    for (size_t i = 0; i < entry.inputs.size(); ++i) {
      const PlanInput& input = entry.inputs[i];
      const auto n = static_cast<size_t>(element_count(input.dims));
      if (input.dtype == DType::kI32) {
        for (size_t k = 0; k < n; ++k)
          ints[i].push_back(static_cast<int32_t>((k * 7 + i + static_cast<size_t>(step) * 5 + k / 11) %
                                                 static_cast<size_t>(classes)));
        inputs.push_back({input.name, {input.dtype, input.dims, ints[i].data()}});
      } else {
        for (size_t k = 0; k < n; ++k)
          floats[i].push_back(std::sin(static_cast<float>(k * 3 + i + static_cast<size_t>(step) * 11)));
        inputs.push_back({input.name, {input.dtype, input.dims, floats[i].data()}});
      }
    }
    float loss = -1;
    std::vector<float> logits;  // every model has them
    std::vector<NamedHost> outputs{{"loss", {DType::kF32, {}, &loss}}};
    for (const PlanOutput& o : entry.outputs) {
      if (o.name != "logits" || o.dtype != DType::kF32) continue;
      logits.resize(static_cast<size_t>(element_count(o.dims)));
      outputs.push_back({o.name, {o.dtype, o.dims, logits.data()}});
    }
    session.step(inputs, outputs).wait();
    out.losses.push_back(loss);
    out.logits = std::move(logits);
  }
  for (const VariableInfo& v : session.variables()) {
    const TensorType type = session.variable_type(v.name);
    std::vector<float> values(static_cast<size_t>(element_count(type.dims)));
    session.read(v.name, {type.dtype, type.dims, values.data()});
    out.variables.push_back(std::move(values));
  }
  return out;
}

inline Trained train(const Model& m, const std::string& devices, const CompileOptions& options, int steps = 3,
                     int64_t classes = 3) {
  return train(compile(m.g, parse_devices(devices, {0, 1, 2, 3}), options), steps, classes);
}

}  // namespace whale::small
