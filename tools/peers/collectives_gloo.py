"""The collectives of tools/collectives.cc by torch.distributed over gloo; under `whale launch -n 2`, or torchrun. Rank 0 prints JSON lines."""

import argparse
import json
import os
import time

import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--sizes", default="4096,262144,4194304,67108864")
parser.add_argument("--seconds", type=float, default=0.5)
args = parser.parse_args()
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()


def calls(bytes_):
    n = bytes_ // 4
    whole, other = torch.ones(n), torch.ones(n)
    parts, part = list(torch.chunk(torch.ones(n), size)), torch.ones(n // size)
    yield "all_reduce", lambda: dist.all_reduce(whole)
    yield "reduce_scatter", lambda: dist.reduce_scatter(part, parts)
    yield "all_gather", lambda: dist.all_gather(parts, part)
    yield "all_to_all", lambda: dist.all_to_all_single(other[:n // size], whole[:n // size])
    yield "shift", lambda: [w.wait() for w in (dist.isend(whole, (rank + 1) % size), dist.irecv(other, (rank - 1) % size))]


for bytes_ in map(int, args.sizes.split(",")):
    for op, call in calls(bytes_):
        for _ in range(3):
            call()
        begin = time.perf_counter()
        for _ in range(3):
            call()
        count = torch.tensor([max(1, int(args.seconds / 15 / ((time.perf_counter() - begin) / 3)))])
        dist.broadcast(count, 0)
        seconds = []
        for _ in range(15):
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(int(count)):
                call()
            mine = torch.tensor([(time.perf_counter() - begin) / int(count)], dtype=torch.float64)
            dist.all_reduce(mine, op=dist.ReduceOp.MAX)
            seconds.append(float(mine))
        seconds.sort()
        if rank == 0:
            print(json.dumps({"op": op, "bytes": bytes_, "ranks": size, "microseconds": seconds[7] * 1e6}), flush=True)
dist.barrier()
os._exit(0)  # torch's own end may abort
