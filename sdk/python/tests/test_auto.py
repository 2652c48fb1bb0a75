"""Mixed devices from Python: shares that are dealt, strategies that nobody wrote, steps on the clock."""

import pytest
import whale as wh

MIXED = "2xV100-32GB + 2xP100-16GB"


def gpt():
    g = wh.Graph("gpt")
    with g:
        tokens, targets = wh.input("tokens", (32, 64), wh.int32), wh.input("targets", (32, 64), wh.int32)
        x = wh.nn.embedding(tokens, 256, 128)
        for i in range(2):
            x = wh.nn.transformer_block(x, heads=4, causal=True, name=f"block{i}")
        g.minimize(wh.nn.cross_entropy(wh.nn.linear(x, 256, name="head"), targets), wh.AdamW(1e-3))
    return g


def test_candidates_and_auto():
    found = wh.candidates(gpt(), MIXED)
    best = found["candidates"][0]
    assert found["fits"] and best["lost"] == ""
    plan = wh.plan(gpt(), MIXED, strategy="auto")
    assert plan.to_dict()["strategy"] == best["strategy"]
    assert plan.simulate()["seconds"] == pytest.approx(best["seconds"])
    cheap = wh.candidates(gpt(), MIXED, objective="price")["candidates"][0]
    assert cheap["price"] <= best["price"]
    with pytest.raises(wh.ResourceExhausted, match="nearest is"):
        wh.plan(gpt(), "null-64KB:2", strategy="auto")
    with pytest.raises(wh.InvalidArgument, match="objective"):
        wh.plan(gpt(), MIXED, strategy="auto", objective="speed")
    for bad in (-1, float("nan")):
        with pytest.raises(wh.InvalidArgument, match="budget"):
            wh.plan(gpt(), MIXED, strategy="auto", budget=bad)


def test_predict():
    rows = wh.predict(gpt(), "4xT4", [1, 2], [16, 32])
    assert [(r["devices"], r["batch"]) for r in rows] == [(1, 16), (2, 16), (1, 32), (2, 32)]
    with pytest.raises(wh.InvalidArgument, match="counts"):
        wh.predict(gpt(), "1xT4", [2])


def test_steps_on_the_clock():
    step = wh.plan(gpt(), MIXED, strategy="pipeline(2, micro_batches=4) > replica(2)").simulate()
    assert step["seconds"] > 0 and all(c["compute_seconds"] <= step["seconds"] for c in step["classes"])


def test_auto_trains_on_devices_that_are_here():
    import numpy as np
    plan = wh.plan(gpt(), "cpu:2", strategy="auto")
    with plan.start(seed=0) as job:
        tokens = np.zeros((32, 64), np.int32)
        assert job.step(tokens=tokens, targets=tokens) > 0
