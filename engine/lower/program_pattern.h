// Programs that differ only by where along an axis their device is: one is built, the others are made from it.
#pragma once

#include <optional>

#include "lower/program.h"

namespace whale {

// Does the place say no more than attributes and boxes of the op's instruction? Otherwise it says what is built.
bool is_patched(const LayoutGraph& graph, const Op& op);

class ProgramPattern {
 public:
  // Of a draft whose storage is shared; `place`: where it was built for.
  ProgramPattern(const Lowering& lowering, const Draft& draft, const Place& place);

  // `program`, which was made from the draft, for a device of the same local sizes at another place. None: something
  // that follows from the place says more, and this one has to be built.
  std::optional<Program> at(const Program& program, const Place& place) const;

 private:
  struct Placed {
    size_t segment = 0, index = 0;
    const Op* op = nullptr;
    int64_t micro_batch = 0;
  };

  const Lowering& low_;
  std::vector<Placed> placed_;
};

}  // namespace whale
