"""The gpt of `whale model gpt` by PyTorch's DistributedDataParallel over gloo; under `whale launch`, or torchrun. A rank has one core. Rank 0 prints a JSON line."""

import argparse
import json
import os
import statistics
import time

parser = argparse.ArgumentParser()
parser.add_argument("batches", help="int32 numbers: batches of samples of one token more than the model reads")
parser.add_argument("--cores", default="", help="of each rank, joined by commas")
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--warmup", type=int, default=3)
args = parser.parse_args()
if args.cores:  # before torch makes threads
    os.sched_setaffinity(0, {int(args.cores.split(",")[int(os.environ["RANK"])])})

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

VOCAB, DIM, LAYERS, HEADS, LENGTH, SAMPLES = 256, 256, 4, 4, 128, 16
torch.set_num_threads(1)
torch.manual_seed(0)
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.qkv, self.out = nn.LayerNorm(DIM), nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.norm2, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x):
        heads = (t.view(*x.shape[:2], HEADS, DIM // HEADS).transpose(1, 2) for t in self.qkv(self.norm1(x)).split(DIM, 2))
        x = x + self.out(functional.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).reshape(x.shape))
        return x + self.down(functional.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, DIM), nn.Embedding(LENGTH, DIM)
        self.blocks, self.norm, self.head = nn.Sequential(*(Block() for _ in range(LAYERS))), nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, tokens, targets):
        x = self.blocks(self.tokens(tokens) + self.places(torch.arange(LENGTH)))
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


model = Gpt()
parameters = sum(p.numel() for p in model.parameters())
optimizer = torch.optim.AdamW(model.parameters(), 3e-4, betas=(0.9, 0.999), weight_decay=0.01, fused=True)
model = nn.parallel.DistributedDataParallel(model)
batches = torch.from_numpy(np.fromfile(args.batches, np.int32).reshape(-1, SAMPLES, LENGTH + 1)).long().chunk(size, 1)[rank]
losses, times = [], []
for step in range(args.warmup + args.steps):
    batch = batches[step % len(batches)]
    tokens, targets = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
    begin = time.perf_counter()
    optimizer.zero_grad(set_to_none=True)
    loss = model(tokens, targets)
    loss.backward()
    optimizer.step()
    losses.append(float(loss))
    times.append(1e3 * (time.perf_counter() - begin))
whole = torch.tensor(losses, dtype=torch.float64)
dist.all_reduce(whole)
if rank == 0:
    print(json.dumps(dict(rank=0, ranks=size, parameters=parameters, ms_per_step=statistics.median(times[args.warmup:]), losses=(whole / size).tolist())), flush=True)
dist.barrier()
os._exit(0)  # torch's own end may abort
