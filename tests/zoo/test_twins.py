"""Each model of the zoo beside its PyTorch twin (twins.py): the same initial parameters, the same data, ten steps of the same optimizer.

Losses and outputs agree within a relative bound (outputs by their norm). Parameters and optimizer state are judged after every step by what
rounding alone does to the twin: copies of it run with parameters and inputs that are off in their last bits, and libwhale may be as far from the
twin as a few times the farthest of them so far, tensor by tensor, with the moves of docs/semantics.md, section 10."""

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is installed by tools/check --full")
import numpy as np
import twins
import whale as wh
import zoo

torch.set_num_threads(1)
STEPS, COPIES, TIMES = 10, 4, 8
PRECISIONS = {"float64": (torch.float64, "ref:2", 1e-9, 2.0**-44), "float32": (torch.float32, "cpu:2", 1e-5, 2.0**-20)}
SLOTS = {"m": "exp_avg", "v": "exp_avg_sq", "momentum": "momentum_buffer", "h": "sum"}


class Twin:
    def __init__(self, name, start, dtype, noise=0.0, seed=0):
        self.name, self.dtype, self.noise = name, dtype, noise
        self.random = torch.Generator().manual_seed(seed)
        self.p = {k: torch.tensor(v, dtype=dtype, requires_grad=True) for k, v in start.items()}
        make, self.rate, self.clip = twins.OPTIMIZERS[name]
        self.optimizer = make(list(self.p.values()))
        self.peaks = [group["lr"] for group in self.optimizer.param_groups]

    def off(self, value):
        """What parameters are off by, a number for each element; of zeros by their neighbours' size."""
        size = torch.where(value == 0, value.square().mean().sqrt(), value)
        return self.noise * size * (2 * torch.rand(value.shape, generator=self.random, dtype=self.dtype) - 1)

    def step(self, number, feeds):
        feeds = {k: torch.tensor(v) if v.dtype.kind == "i" else torch.tensor(v, dtype=self.dtype) for k, v in feeds.items()}
        if self.noise:
            feeds = {k: v + self.off(v) if v.is_floating_point() else v for k, v in feeds.items()}
        off = {k: self.off(v.detach()) for k, v in self.p.items()} if self.noise else {}
        with torch.no_grad():
            for k, v in off.items():
                self.p[k] += v
        loss, outputs = twins.MODELS[self.name](self.p, **feeds, **zoo.SIZES[self.name]["model"])
        self.optimizer.zero_grad()
        loss.backward()
        if self.clip:
            torch.nn.utils.clip_grad_norm_(list(self.p.values()), self.clip)
        for group, peak in zip(self.optimizer.param_groups, self.peaks):
            group["lr"] = peak * (self.rate(number) if self.rate else 1.0)
        with torch.no_grad():
            for k, v in off.items():
                self.p[k] -= v
        self.optimizer.step()
        return loss.item(), {k: v.detach().numpy() for k, v in outputs.items()}

    def values(self):
        """Parameters, and state as ``"PARAMETER/STATE"``."""
        out = {k: v.detach().numpy().copy() for k, v in self.p.items()}
        for k, v in self.p.items():
            state = self.optimizer.state[v]
            out.update({f"{k}/{slot}": state[name].numpy().copy() for slot, name in SLOTS.items() if name in state})
        return out


def distance(a, b):
    return {k: float(np.linalg.norm(a[k].astype(np.float64) - b[k])) for k in b}


@pytest.mark.parametrize("annotated", [False, True], ids=["plain", "annotated"])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", zoo.SIZES)
def test_twin(name, precision, annotated):
    dtype, devices, bound, noise = PRECISIONS[precision]
    if annotated and name == "llama":
        devices = devices.replace("2", "4")
    batch = 8
    g = zoo.graph(name, batch, annotated)
    job = wh.plan(g, devices=devices, precision=precision).start(seed=1)
    start = job.parameters()
    twin = Twin(name, start, dtype)
    copies = [Twin(name, start, dtype, noise, seed) for seed in range(1, COPIES + 1)]
    names = [n for n in job.plan.to_dict()["entries"][0]["outputs"] if n["name"] != "loss"]
    kept = [v["name"] for v in job.variables() if v["role"] in ("parameter", "state")]
    floor, envelope = 4 * np.finfo(start[next(iter(start))].dtype).eps, {}
    for number in range(STEPS):
        feeds = zoo.data(name, number, batch)
        loss, outputs = job.step([n["name"] for n in names], **feeds)
        expected, theirs = twin.step(number, feeds)
        assert loss == pytest.approx(expected, rel=bound), f"step {number}"
        for key, value in outputs.items():
            off = np.linalg.norm(value - theirs[key]) / np.linalg.norm(theirs[key])
            assert off <= bound, f"step {number}: {key} is {off:.1e} off"
        for copy in copies:
            copy.step(number, feeds)
        theirs = twin.values()
        apart = distance({k: job.read(k) for k in kept}, {k: theirs[k] for k in kept})
        for each in [distance(copy.values(), theirs) for copy in copies]:
            envelope = {k: max(envelope.get(k, 0.0), each[k]) for k in each}
        wrong = {k: (apart[k], envelope[k]) for k in apart if not apart[k] <= TIMES * envelope[k] + floor * np.linalg.norm(theirs[k])}
        assert not wrong, f"step {number}: farther from the twin than rounding explains (distance, what rounding does): {wrong}"
    moved = {k: np.linalg.norm(theirs[k] - start[k]) for k in start}
    assert sum(m > 0 for m in moved.values()) == len(moved), "every parameter is trained"
    assert set(theirs) == set(kept), "all state is compared"
