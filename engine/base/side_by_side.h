// Pieces of work on the caller's thread and on others that end with the call.
#pragma once

#include <cstddef>
#include <functional>

namespace whale {

// Calls work(k, spent) for each k below `count` once, begun in this order as threads are free, on `threads` of them at
// most, the caller's among them; one where no other can be made. spent: seconds of its own work that the thread has
// done of this call. The caller's watch is in force on all of them, and none gets signals. What is thrown is the
// exception of the first piece that has one; none begins after it. Returns the own seconds of the busiest thread beyond
// the caller's.
double side_by_side(size_t count, size_t threads, const std::function<void(size_t k, double spent)>& work);

}  // namespace whale
