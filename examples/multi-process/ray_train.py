#!/usr/bin/env python3
"""train.py's ranks as four actors of Ray, on as many nodes as Ray has."""

import ray
import train
import whale.ray

ray.init(runtime_env={"working_dir": "."})  # RAY_ADDRESS says which cluster; without it Ray starts one here
losses = whale.ray.launch(train.train, 4, resources={"CPU": 0.5})[0]  # half a core each, so that four find room on two
print(f"step {len(losses)}, loss {losses[-1]:.9g}, in 4 actor(s)")
