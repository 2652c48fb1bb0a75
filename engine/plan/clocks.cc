#include "plan/clocks.h"

#include "base/watch.h"

namespace whale {

RowClock clock_of(const Segment& s) {
  RowClock clock;
  for (const Instruction& i : s.instructions) {
    Watch::look();
    clock.begin(i.queue, i.waits);
  }
  return clock;
}

}  // namespace whale
