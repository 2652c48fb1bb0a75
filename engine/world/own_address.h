// Where other hosts reach this one.
#pragma once

#include <cstdint>
#include <string>

namespace whale {

// For other hosts. The number behind `name`, or, where this host takes its name for a loopback address (Debian's
// /etc/hosts), the name, which others know better; where nobody knows the name, the number of the first network that is
// up. `name` empty: what this host calls itself. Throws unavailable where there is none of these.
std::string own_address(std::string name);

// One that is free there now, below those that systems give to outgoing connections. Throws what listen_on() does.
uint16_t free_port(const std::string& address);

}  // namespace whale
