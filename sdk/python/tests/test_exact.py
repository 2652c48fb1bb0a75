"""Exact mode in 16 bits: fused or not, one device, replicas and pipelines train the same bits."""

import numpy as np
import pytest
import whale as wh

PLANS = (("cpu:1", "local"), ("cpu:2", "replica"), ("cpu:2", "pipeline(2, micro_batches=4)"), ("cpu:3", "pipeline(3, micro_batches=4)"))


def model(kind):
    """Sums and products along the depth: chains of elementwise ops that a pipeline cuts in their middle."""
    g = wh.Graph(kind)
    with g:
        x = wh.input("x", (8, 4))
        h = wh.nn.linear(x, 4, name="first")
        for i in range(3):
            branch = wh.nn.linear(wh.ops.tanh(h), 4, name=f"block{i}")
            h = h + branch if kind == "residual" else h * 0.7 + branch * 0.3
        g.minimize(wh.nn.mse(h, x), wh.SGD(0.1))
    return g


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
@pytest.mark.parametrize("kind", ["residual", "weighted"])
def test_every_plan_trains_the_same_bits(kind, precision):
    rng = np.random.default_rng(0)
    batches = [rng.standard_normal((8, 4)).astype(np.float32) for _ in range(4)]
    for kernels in ("cpu", "ref"):
        first = None
        for fusion in (True, False):
            for devices, strategy in PLANS:
                micro = {} if "pipeline" in strategy else {"accumulation": 4}
                job = wh.plan(model(kind), devices=devices.replace("cpu", kernels), strategy=strategy, exact=True, precision=precision,
                              fusion=fusion, **micro).start(seed=2)
                losses = [job.step(x=x) for x in batches]
                found = losses, {name: value.tobytes() for name, value in job.parameters().items()}
                first = first or found
                assert found == first, (kernels, fusion, devices, strategy)


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_statistics_of_the_data_itself(precision):
    """No parameter is in front of them, so they are sums of float64 that wait for each other: over micro-batches, and replicas with shares."""
    def of_data():
        g = wh.Graph("data")
        with g:
            x = wh.input("x", (8, 3))
            g.minimize(wh.ops.square(wh.nn.linear(wh.nn.batch_norm(x), 2)).mean(), wh.SGD(0.1))
        return g
    rng = np.random.default_rng(0)
    batches = [rng.standard_normal((8, 3)).astype(np.float32) for _ in range(3)]
    first = None
    for devices, strategy in (("cpu:1", "local"), ("cpu:2", "replica"), ("cpu:3", "replica"), ("cpu:3", "replica(3, shares=[3,0,1])"),
                              ("cpu:2", "pipeline(2, micro_batches=4)")):
        for fusion in (True, False):
            micro = {} if "pipeline" in strategy else {"accumulation": 4}
            job = wh.plan(of_data(), devices=devices, strategy=strategy, exact=True, precision=precision, fusion=fusion, **micro).start(seed=2)
            found = [job.step(x=x) for x in batches], {name: value.tobytes() for name, value in job.parameters().items()}
            first = first or found
            assert found == first, (devices, strategy, fusion)
