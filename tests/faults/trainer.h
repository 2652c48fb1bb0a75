// A plan that trains on its devices, below the session: what each device holds can be looked at.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "data/convert.h"
#include "property.h"
#include "run/executor.h"

namespace whale::test {

const Entry& train_entry(const Plan& plan);

class Trainer {
 public:
  // The plan must outlive it. `check_loss`: a step whose loss is not finite ends with an error.
  Trainer(const Plan& plan, uint64_t seed, bool check_loss = false);

  // What it hands out, in the order of the entry; throws what the run ends with.
  std::vector<std::vector<double>> step(const Values& inputs);
  // Of the last step, on each device that votes on it.
  std::vector<double> losses() const;
  const std::vector<PlanOutput>& outputs() const { return executor_->entry().outputs; }
  double loss(const std::vector<std::vector<double>>& handed) const {
    for (size_t k = 0; k < handed.size(); ++k)
      if (outputs()[k].name == "loss") return handed[k].at(0);
    return 0;
  }

  // body(device, logical element, value) for every element of every copy.
  template <class Body>
  void each_copy(size_t v, Body body) const {
    const PlanVariable& variable = plan_.variables[v];
    const auto size = static_cast<uint64_t>(size_of(variable.dtype));
    const uint64_t all = static_cast<uint64_t>(element_count(variable.dims)) * size;
    for (const DeviceRow& row : plan_.entries[0].rows) {
      if (row.mesh != variable.mesh) continue;
      const VariablePart part(
          part_of(variable.dims, variable.storage_sharding, plan_.meshes[row.mesh].axes, row.coordinates),
          variable.dims, size_of(variable.dtype));
      const std::vector<char> data = held_by(row.device, v);
      part.each(0, all, [&](uint64_t logical, uint64_t local, uint64_t bytes) {
        for (uint64_t k = 0; k < bytes; k += size)
          body(row.device, static_cast<size_t>((logical + k) / size), element(variable.dtype, data.data() + local + k));
      });
    }
  }

 private:
  std::vector<char> held_by(int32_t device, size_t variable) const;

  const Plan& plan_;
  uint64_t seed_;
  bool check_loss_;
  int64_t steps_ = 0;
  Backends backends_;
  std::unique_ptr<Machine> machine_;
  std::unique_ptr<Executor> executor_;
};

}  // namespace whale::test
