// Flight records, as whale_session_flight_record_json gives them, for people.
#pragma once

#include <string>
#include <vector>

namespace tool {

bool is_flight_record(const std::string& path);  // by how it begins
// Of the ranks of one job together: what each waits for, where its queues are, what they did last. Throws Failure for
// files that are none, or cut off.
std::string flight_text(const std::vector<std::string>& paths);
std::string flight_json(const std::vector<std::string>& paths);  // a list of them

}  // namespace tool
