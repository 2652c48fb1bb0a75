// What a session has taken on one device, by what it holds.
#pragma once

#include <cstddef>

namespace whale {

struct DeviceBytes {
  size_t parameters = 0, state = 0, buffers = 0;  // variables
  size_t gradients = 0, inputs = 0;               // of the last run
  size_t activations = 0;                         // the rest of the arena
  size_t workspace = 0;
  size_t host = 0;  // in the host's memory
  size_t total() const { return parameters + state + buffers + gradients + inputs + activations + workspace; }
};

}  // namespace whale
