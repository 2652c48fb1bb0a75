// Sailor's tables (docs/validation-planners.md): a folder of profiles, bandwidths and settings, as problems of
// planning.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "search/pipeline_price.h"

namespace whale {

class SailorTables {
 public:
  // `profiles`: the folder of <model>/<device>/profile.json; empty: the one inside.
  SailorTables(std::string folder, std::string profiles);
  // How many devices of which types.
  ClusterProblem problem(const std::string& model, const std::vector<std::pair<std::string, int>>& devices) const;

 private:
  std::string folder_, profiles_;
};

}  // namespace whale
