// The judge: does a damage change what is trained? A comparison of its own, that shares nothing with `whale verify`:
// both plans train 20 steps on the same data, and every copy of every variable is compared, and all that every step
// hands out. Each run is in a process of its own under a watchdog, so that a crash or a hang is a result.
#pragma once

#include <optional>

#include "ir/graph.h"
#include "plan/plan.h"

namespace whale::test {

// What an undamaged plan made of its variables, and handed out.
struct Trained {
  struct Value {
    std::vector<double> elements;  // logical
    double movement = 0;           // norm of the difference to the start
    double rounding = 0;           // what inputs that are one rounding off change
  };
  struct Output {
    std::vector<std::vector<double>> elements;  // of each step
    double size = 0;                            // the largest norm
    double rounding = 0;                        // as above, at most
  };
  std::vector<Value> variables;
  std::vector<Output> outputs;  // in the order of the entry
};

enum class Judgement : uint8_t {
  kRefused,  // by the plan verifier
  kUnbound,  // when a session was made: nothing has run
  kFailed,   // a run ended with an error
  kDiffers,  // some copy of some variable is another one, or an output
  kSame,
  kCrash,  // a signal
  kHang,
};

struct Finding {
  Judgement judgement = Judgement::kSame;
  double worst = 0;  // of the distance, by the variable's movement or the output's size
  std::string text;  // which of them, or the error
};

struct Case {
  Graph graph;
  int64_t batch = 0;
  uint64_t seed = 0;
};

// None: it is no ground to plant in (a loss that grows, decisions that rounding makes, copies that differ); `why` says.
std::optional<Trained> train(const Plan& plan, const Case& c, std::string& why);
Finding judge(const Plan& damaged, const Case& c, const Trained& whole);

}  // namespace whale::test
