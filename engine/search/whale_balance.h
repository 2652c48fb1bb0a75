// The balance of the Whale paper (Jia et al., USENIX ATC '22, section 3.3), as it stands there, to compare with
// (search/balance.h is what plans are made by). Loads are shares that add up to 1.
#pragma once

#include <cstdint>
#include <vector>

#include "base/small_vector.h"

namespace whale {

struct WhaleTask {
  double flop = 0, memory = 0;  // of a TaskGraph (TG_flop, TG_mem): FLOP, bytes at the peak
};
struct WhaleDevice {
  double flops = 0, memory = 0;  // DF: FLOP per second; DM: bytes
};
struct WhaleBalance {
  std::vector<double> loads;
  std::vector<int32_t> over;  // devices that hold more than they have; empty: all fits
};

// What becomes of a device that is over its memory once it has given something away.
enum class Peak : uint8_t {
  kDone,       // as printed: it is not looked at again, even where one device could not take all that is too much
  kUntilFits,  // a repair: it stays until it fits, or nobody has room
};

// Algorithm 1: loads in proportion to speed; then the device fullest above its memory gives to the one that works least
// for its speed, of these to the emptiest. What the paper leaves open is decided so:
// - `shift_load` moves the least of what the one has too much and of what the other has room for, and has succeeded if
//   that is more than nothing. (The paper has only the second bound, by which a peak could give away more than it has.)
// - Ties, up to rounding, go to the lower index. At first every device works as long: the emptiest one is next.
// - Memory is in proportion to the load: fixed terms such as weights are not seen. Nor is communication.
WhaleBalance whale_balance(const WhaleTask& task, const std::vector<WhaleDevice>& devices, Peak peak = Peak::kDone);

// In legal units, by largest remainder (cluster/shares.h): the paper says nothing about them. Memory is not looked at
// again, so that a device may be over by less than one unit.
Ints whale_units(int64_t units, const WhaleBalance& balance);

// The devices of a pipeline's stages: by memory, high to low, as early stages keep more activations. Equal ones as
// listed.
std::vector<int32_t> whale_stage_order(const std::vector<WhaleDevice>& devices);

}  // namespace whale
