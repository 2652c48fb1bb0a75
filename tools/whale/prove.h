// Proofs of plans, told.
#pragma once

#include <string>

#include "api.h"

namespace tool {

class Proof {
 public:
  // timeout: seconds, 0: any. On a terminal it shows how far it is.
  Proof(const whale_plan* plan, double timeout);
  // Of a file, also of a plan that contradicts itself.
  Proof(whale_engine* engine, const std::string& path, double timeout);
  // Adds whether both give the same bits: one that is not proven, or of no order, says nothing of it.
  void compare(const Proof& other, const std::string& name);
  const std::string& json() const { return json_; }
  const std::string& text() const { return text_; }  // lines for a person, the last is the verdict
  int exit_code() const { return exit_code_; }       // 0 proven, 1 refuted, 3 not covered

 private:
  void take(std::string json);

  std::string json_, text_;
  int exit_code_ = 0;
};

}  // namespace tool
