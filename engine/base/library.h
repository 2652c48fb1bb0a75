// Libraries that come with this one and are opened when they are needed: what links foreign code.
#pragma once

#include <string>

namespace whale {

// The folder that the running library lies in; a link to it may lie elsewhere. Empty: not known.
std::string own_folder();

// The symbol of a library, whose first member is a `const char* version` equal to this one's. It stays open until the
// process ends: its threads and its code may outlive everything here. `what`: "back end"; `install`: what to do where
// it cannot be opened. Throws unavailable.
const void* open_library(const std::string& folder, const char* file, const char* symbol, const char* what,
                         const char* install);

}  // namespace whale
