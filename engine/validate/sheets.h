// The curve of a GPU that a table names: its own, or by a data sheet from a folder.
#pragma once

#include <map>
#include <string>

#include "cost/curve.h"

namespace whale {

class Curves {
 public:
  // `folder`: of JSON files with Device, Mem_Bw (GB/s), Num_Sm, SingleFLOPs or SingleFLOPsMM (GFLOP/s), L2Cache (MiB),
  // for GPUs that cluster/device_types.h does not know; empty: none.
  explicit Curves(std::string folder) : folder_(std::move(folder)) {}

  // Throws for a GPU without a sheet.
  const DeviceCurve& of(const std::string& gpu);
  // What was assumed of those that were asked for, a line each.
  std::string notes() const;
  std::vector<std::string> note_list() const;

 private:
  GpuSheet sheet_of(const std::string& gpu) const;
  std::string folder_;
  std::map<std::string, DeviceCurve> known_;
};

// Of a file in the folder's form. Throws for a figure that is missing or not above 0.
GpuSheet parse_gpu_sheet(const std::string& content, const std::string& path);

}  // namespace whale
