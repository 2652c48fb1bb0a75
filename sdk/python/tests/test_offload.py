"""What waits in the host's memory: the numbers stay, checkpoints do not show it, reports do."""

import numpy as np
import pytest
import whale as wh

CLASSES = ("state", "gradients", "parameters", "activations")


def start(devices="cpu:1", **options):
    g = wh.Graph("offloaded")
    with g:
        x, y = wh.input("x", (12, 32)), wh.input("y", (12,), wh.int32)
        for i in range(4):
            x = wh.ops.relu(wh.nn.linear(x, 32, name=f"layer{i}"))
        g.minimize(wh.nn.cross_entropy(wh.nn.linear(x, 3, name="head"), y), wh.AdamW(0.01), clip_norm=1.0)
    return wh.plan(g, devices=devices, **options).start(seed=3)


def batch(seed):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((12, 32)).astype(np.float32)
    return dict(x=x, y=(x[:, 0] > 0).astype(np.int32) + (x[:, 1] > 0))


def values(job):
    return {v["name"]: job.read(v["name"]).tobytes() for v in job.variables()}


@pytest.mark.parametrize("offload", [*((c,) for c in CLASSES), CLASSES], ids=",".join)
@pytest.mark.parametrize("options", [{}, {"accumulation": 3}, {"devices": "cpu:2", "zero": 3}], ids=str)
def test_the_numbers_and_the_checkpoint_stay(offload, options, tmp_path):
    plain, job = start(**options), start(offload=offload, **options)
    assert [plain.step(**batch(i)) for i in range(3)] == [job.step(**batch(i)) for i in range(3)]
    assert values(job) == values(plain)
    job.save(tmp_path / "checkpoint")
    plain = start(**options)
    plain.load(tmp_path / "checkpoint")
    assert plain.step(**batch(4)) == job.step(**batch(4))
    job.load(tmp_path / "checkpoint")
    assert job.step(**batch(4)) == start_again(tmp_path / "checkpoint", options)


def start_again(checkpoint, options):
    job = start(**options)
    job.load(checkpoint)
    return job.step(**batch(4))


def test_the_report_has_both_memories():
    job = start(offload=["state", "parameters"])
    job.step(**batch(0))
    told = job.report()["devices"][0]["bytes"]
    assert told["state"] == told["parameters"] == 0 < told["host"]


def test_an_unknown_class_lists_the_known():
    with pytest.raises(wh.WhaleError, match="'weights'.*state, gradients, parameters, activations"):
        start(offload=["weights"])
