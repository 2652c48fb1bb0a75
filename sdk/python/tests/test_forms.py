"""Forms of a plan that change when and where something is computed, and no bit of it."""

import numpy as np
import pytest
import whale as wh


def start(**options):
    g = wh.Graph("formed")
    with g:
        x, y = wh.input("x", (12, 32)), wh.input("y", (12,), wh.int32)
        for i in range(4):
            with wh.scope(f"block{i}"):
                x = wh.nn.linear(wh.ops.gelu(wh.nn.linear(x, 64, name="up")), 32, name="down")
        g.minimize(wh.nn.cross_entropy(wh.nn.linear(x, 3, name="head"), y), wh.AdamW(0.01))
    return wh.plan(g, **options)


def trained(plan):
    job = plan.start(seed=3)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((12, 32)).astype(np.float32)
    losses = [job.step(x=x, y=(x[:, 0] > 0).astype(np.int32)) for _ in range(3)]
    return losses, {v["name"]: job.read(v["name"]).tobytes() for v in job.variables()}


PIPELINE = {"devices": "cpu:2", "strategy": "pipeline(2, micro_batches=3)"}


@pytest.mark.parametrize(("options", "form"), [
    (PIPELINE, {"recompute": ["full", "none"]}),
    (PIPELINE, {"recompute": ["none", "full"]}),
    ({"devices": "cpu:2", "strategy": "replica(2)"}, {"update": "sliced"}),
    ({"devices": "cpu:2", "strategy": "split(2)"}, {"matmul_chunks": 3}),
    ({"devices": "cpu:2", "strategy": "replica(2)", "zero": 3, "bucket_bytes": 512}, {"prefetch": 1}),
], ids=str)
def test_no_bit_changes(options, form):
    plan = start(**options, **form)
    assert plan.print() != start(**options).print()
    assert trained(plan) == trained(start(**options))


@pytest.mark.parametrize(("form", "told"), [
    ({"recompute": ["full"]}, "1 recompute policies for 2 stage"),
    ({"recompute": ["full", "half"]}, "'half'.*'none', 'selective' or 'full'"),
    ({"update": "halved"}, "'halved'.*'auto', 'whole' or 'sliced'"),
    ({"matmul_chunks": -1}, "matmul_chunks"),
    ({"prefetch": -1}, "prefetch"),
], ids=str)
def test_what_cannot_be(form, told):
    with pytest.raises(wh.WhaleError, match=told):
        start(**PIPELINE, **form)
