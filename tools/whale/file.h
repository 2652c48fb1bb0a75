// Files of the command line: read whole, known by their content, written whole.
#pragma once

#include <string>
#include <vector>

namespace tool {

// The whole file; throws Failure for what cannot be read to its end, and for what is not a regular file (a pipe, a
// socket, a device, a directory), which is never waited for.
std::string read_file(const std::string& path);
std::string read_start(const std::string& path, size_t bytes);  // or less, where the file ends

// Written under another name and renamed: a failure leaves what was there.
void write_file(const std::string& path, const std::string& text);

bool is_directory(const std::string& path);

// Throws for a file that could not be made at the end of a long run: something else stands there, or a file beside it
// cannot be made, which is tried. `option` names it.
// `reads`: files that the command reads, which it would destroy; empty names are none.
void check_target(const std::string& path, const char* option, const std::vector<std::string>& reads = {});

}  // namespace tool
