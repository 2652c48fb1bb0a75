"""Replicas with stages, splits and devices of their own train what one device trains."""
import numpy as np
import pytest

import whale as wh

RANDOM = np.random.default_rng(0)
X, Y = RANDOM.normal(size=(12, 8)).astype(np.float32), RANDOM.integers(0, 4, 12).astype(np.int32)


def losses(devices, strategy):
    g = wh.Graph()
    with g:
        x, y = wh.input("x", (12, 8)), wh.input("y", (12,), wh.int32)
        h = wh.ops.relu(wh.nn.linear(x, 32))
        h = wh.ops.dropout(wh.ops.relu(wh.nn.linear(h, 32)), rate=0.2)
        g.minimize(wh.nn.cross_entropy(wh.nn.linear(h, 4), y), wh.Adam(0.01))
    with wh.plan(g, devices=devices, strategy=strategy).start(seed=1) as job:
        trained = [job.step(x=X, y=Y) for _ in range(4)] + [job.step(x=X[:7], y=Y[:7])]
        return trained + [float(job.eval(x=X[:5], y=Y[:5])["loss"])], job.parameters()


@pytest.mark.parametrize("devices, strategy", [
    ("ref:4", "replica([pipeline(2, micro_batches=3), split(2)], shares=[1,2])"),
    ("ref:3", "replica([pipeline(2, micro_batches=2), replica(1)])"),
    ("lag:4", "replica([replica(2), replica(1), replica(1)], shares=[2,0,1])"),
    ("cpu:3", "replica([split(2), replica(1)], shares=[3,1])"),
])
def test_they_train_what_one_device_trains(devices, strategy):
    want, parameters = losses("ref:1", "local")
    got, theirs = losses(devices, strategy)
    np.testing.assert_allclose(got, want, rtol=1e-5 if devices.startswith("cpu") else 1e-6)
    for name, value in parameters.items():
        np.testing.assert_allclose(theirs[name], value, rtol=1e-4, atol=1e-5, err_msg=name)
    assert want[3] < want[0]


def test_what_they_cannot_do_is_said():
    for strategy, said in [("replica([split(2), split(3)])", "wants 5"), ("replica([split(2)])", "two or more"), ("replica([split(2), split(2)], shares=[1])", "1 shares for 2")]:
        with pytest.raises(wh.WhaleError, match=said):
            losses("ref:4", strategy)
