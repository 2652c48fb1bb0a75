// Ranks as processes are, on threads of this one: they meet over TCP and send letters over UCX.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "world/process.h"

namespace whale::test {

uint16_t free_port();
std::string ucx_folder();  // where the build has put libwhale_ucx.so; empty: it has not

ProcessOptions process_of(int rank, int size, uint16_t port, const std::string& token = "secret");
std::vector<std::shared_ptr<Worlds>> join(int ranks);  // by rank

// body(rank) on a thread for each; what each throws.
std::vector<std::optional<Error>> on_each(size_t ranks, const std::function<void(size_t)>& body);

}  // namespace whale::test
