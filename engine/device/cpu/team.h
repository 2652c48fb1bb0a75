// The OpenMP threads of a device, made once, when the device's own thread starts. Where the host has brought libgomp,
// which ends the process when it cannot make a thread, a trial first shows that the system gives as many.
#pragma once

#include <cstddef>

namespace whale::cpu {

// On the thread that will run the device's kernels: its team of `threads`, itself included, from now on there. Throws
// resource_exhausted when the system does not give them; nothing is left behind then.
void make_team(int threads);

// Throws resource_exhausted when so many addresses cannot be had. Asked for in advance of what does not survive a
// failure: libgomp, and oneDNN when it makes code.
void need_addresses(size_t bytes);

// The C library loads what ends a thread of libgomp when the first one ends, and aborts when it cannot: now, while
// there is memory.
void prepare_thread_exit();

}  // namespace whale::cpu
