// The collectives of tools/collectives.cc by MPI: mpicc -O2 collectives_mpi.c && mpirun -n 2 a.out [SECONDS [SIZE...]].
// Rank 0 prints JSON lines.
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

enum { kBlocks = 15 };
static const char* const kOps[] = {"all_reduce", "reduce_scatter", "all_gather", "all_to_all", "shift"};

static int rank, size;

static int compare(const void* a, const void* b) {
  const double x = *(const double*)a, y = *(const double*)b;
  return (x > y) - (x < y);
}

static void call(int op, float* x, float* y, int n, const int* counts) {
  const int part = n / size;
  switch (op) {
    case 0: MPI_Allreduce(MPI_IN_PLACE, x, n, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD); break;
    case 1: MPI_Reduce_scatter(x, y, counts, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD); break;
    case 2: MPI_Allgather(x, part, MPI_FLOAT, y, part, MPI_FLOAT, MPI_COMM_WORLD); break;
    case 3: MPI_Alltoall(x, part / size, MPI_FLOAT, y, part / size, MPI_FLOAT, MPI_COMM_WORLD); break;
    default:
      MPI_Sendrecv(x, n, MPI_FLOAT, (rank + 1) % size, 0, y, n, MPI_FLOAT, (rank + size - 1) % size, 0, MPI_COMM_WORLD,
                   MPI_STATUS_IGNORE);
  }
}

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  const double seconds = argc > 1 ? atof(argv[1]) : 0.5;
  for (int s = 2; s < argc; ++s)
    for (int op = 0; op < 5; ++op) {
      const int n = (int)(atol(argv[s]) / 4);
      float *x = calloc((size_t)n, 4), *y = calloc((size_t)n, 4);
      for (int i = 0; i < n; ++i) x[i] = y[i] = 1;  // memory that was never written is one page of zeros, in the cache
      int* counts = calloc((size_t)size, sizeof *counts);
      for (int r = 0; r < size; ++r) counts[r] = n / size;
      for (int i = 0; i < 3; ++i) call(op, x, y, n, counts);
      double begin = MPI_Wtime(), took[kBlocks];
      for (int i = 0; i < 3; ++i) call(op, x, y, n, counts);
      int calls = (int)(seconds / kBlocks / ((MPI_Wtime() - begin) / 3));
      if (calls < 1) calls = 1;
      MPI_Bcast(&calls, 1, MPI_INT, 0, MPI_COMM_WORLD);
      for (int b = 0; b < kBlocks; ++b) {
        MPI_Barrier(MPI_COMM_WORLD);
        begin = MPI_Wtime();
        for (int i = 0; i < calls; ++i) call(op, x, y, n, counts);
        const double mine = (MPI_Wtime() - begin) / calls;
        MPI_Allreduce(&mine, &took[b], 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
      }
      qsort(took, kBlocks, sizeof *took, compare);
      if (rank == 0)
        printf("{\"op\": \"%s\", \"bytes\": %ld, \"ranks\": %d, \"microseconds\": %.3f}\n", kOps[op], atol(argv[s]), size,
               took[kBlocks / 2] * 1e6);
      fflush(stdout);
      free(x), free(y), free(counts);
    }
  MPI_Finalize();
  return 0;
}
