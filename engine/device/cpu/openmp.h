// The part of OpenMP's runtime that oneDNN (in its OpenMP build) and the kernels here call, over threads that wait as
// patience.h says: libgomp's spin for milliseconds, also where somebody else wants their core, and it ends the process
// when it cannot make a thread. Defined in this library, these come before libgomp's for it and for the oneDNN that it
// brings; a host that has linked an OpenMP runtime itself keeps that one for everybody.
//
// A team belongs to the thread that first wanted one, and ends with it. Regions inside of regions run on one thread.
#pragma once

namespace whale::cpu {

bool own_openmp();  // false: the host's is called
// The team of this thread, itself included. Throws resource_exhausted when the system does not give the threads.
void make_workers(int threads);

}  // namespace whale::cpu
