// What a library that carries letters between processes exports. As the back ends' (device.h): one symbol, `version` is
// compared for equality before anything else is touched.
#pragma once

#include <sys/types.h>

#include <string>

#include "comm/courier.h"

namespace whale {

struct CourierOptions {
  int rank = 0, size = 1;
  std::vector<bool> near;                            // by rank: its process is one of this host
  std::vector<pid_t> readable;                       // by rank: its process, where this one can read its memory; else 0
  std::function<void(std::string address)> publish;  // once, before the courier is there: how others reach it
  std::function<std::string(int rank)> address_of;   // waits until that rank has published it; throws
  // The connection to that rank has failed. True: somebody else says who is lost, be it that rank or another one whose
  // loss has ended it. False: the receiver is to be told. Called under the courier's locks.
  std::function<bool(int rank, const std::string& why)> doubt;
  std::function<bool(int rank)> has_left;  // that rank has ended its courier; likewise
};

struct CourierEntry {
  const char* version;
  std::unique_ptr<Courier> (*create)(const CourierOptions& options, Courier::Receiver& receiver);
};
#define WHALE_COURIER_SYMBOL "whale_courier"

}  // namespace whale
