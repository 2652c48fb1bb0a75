"""Parts of a graph that are no op of their own: gradients of values."""

import numpy as np
import pytest

import whale as wh

RNG = np.random.default_rng(5)
X = RNG.standard_normal((12, 5)).astype(np.float32)
W = (RNG.standard_normal((5, 3)) / 2).astype(np.float32)


# ---- gradients of values ----------------------------------------------------------------------------------------------------
def run(g, devices="ref:1", x=X, names=("dx", "dw"), **inputs):
    job = wh.plan(g, devices=devices).start()
    job.write("w", W)
    return job.eval(list(names), x=x, **inputs)


REDUCTIONS = {"sum": lambda y: y.sum(), "mean": lambda y: y.mean(), "mean of rows": lambda y: y.mean(1), "mean of columns": lambda y: y.mean(0),
              "values": lambda y: y}


def differentiated(reduce, batch=12):
    g = wh.Graph("gradients")
    with g:
        x = wh.input("x", (batch, 5))
        with wh.replica():
            w = wh.parameter("w", (5, 3))
            h = x @ w
            y = reduce(wh.ops.tanh(h))
            dx, dw, dh = g.gradients(y, [x, w, h])
            for name, value in dict(y=y, dx=dx, dw=dw, dh=dh).items():
                g.output(name, value)
    return g


@pytest.mark.parametrize("devices", ["ref:1", "ref:3", "cpu:2"])
@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("batch", [12, 7])
def test_gradients_of_a_value(devices, name, batch):
    """7: a batch smaller than the plan's, whose means have denominators of their own."""
    reduce = REDUCTIONS[name]
    x = X[:batch].astype(np.float64)
    tanh = np.tanh(x @ W)
    count = np.size(reduce(tanh)) / tanh.size if name.startswith("mean") else 1
    dh = (1 - tanh**2) * count
    found = run(differentiated(reduce), devices, X[:batch], ("dx", "dw", "dh"))
    np.testing.assert_allclose(found["dh"], dh, rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(found["dx"], dh @ W.T, rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(found["dw"], x.T @ dh, rtol=2e-5, atol=1e-5)


def test_a_penalty_on_a_gradient_trains():
    def loss_of(w):
        tanh = np.tanh(X.astype(np.float64) @ w)
        return ((((1 - tanh**2) @ w.T))**2).sum(1).mean()

    g = wh.Graph("penalty")
    with g:
        x = wh.input("x", (12, 5))
        with wh.replica():
            w = wh.parameter("w", (5, 3))
            dx = g.gradients(wh.ops.tanh(x @ w), x)
            loss = (dx * dx).sum(1).mean()
        g.minimize(loss, wh.SGD(1.0))
    job = wh.plan(g, devices="ref:3", precision="float64").start()
    job.write("w", W.astype(np.float64))
    assert job.step(x=X.astype(np.float64)) == pytest.approx(loss_of(W.astype(np.float64)), rel=1e-9)
    moved = W - job.read("w")
    for i, j in [(0, 0), (2, 1), (4, 2)]:
        step = np.zeros((5, 3))
        step[i, j] = 1e-6
        slope = (loss_of(W + step) - loss_of(W - step)) / 2e-6
        assert moved[i, j] == pytest.approx(slope, rel=1e-5, abs=1e-8)


def test_what_has_no_gradient():
    g = wh.Graph()
    with g:
        x, ids = wh.input("x", (12, 5)), wh.input("ids", (12,), wh.int32)
        w = wh.parameter("w", (5, 3))
        other = wh.parameter("other", (2,))
        y = (x @ w).sum()
        before = len(g.to_dict()["ops"])
        assert g.gradients(y, [other, w])[0] is None and g.gradients(y, other) is None
        with pytest.raises(wh.InvalidArgument, match="'ids' is i32; gradients are by floating-point values"):
            g.gradients(y, ids)
        with pytest.raises(wh.InvalidArgument, match="'x' is not computed by any op"):
            g.gradients(x, w)
        with pytest.raises(wh.InvalidArgument, match="`by` is empty|'by' is empty"):
            g.gradients(y, [])
        after = len(g.to_dict()["ops"])
        with pytest.raises(wh.Unimplemented, match="dropout.*random"):
            g.gradients(wh.ops.dropout(x @ w, rate=0.5).sum(), w)
        assert after > before
        kept = len(g.to_dict()["ops"])
        with pytest.raises(wh.Unimplemented):
            g.gradients(wh.nn.batch_norm(x @ w).sum(), w)
        g.seal()
    assert kept == after + 3  # matmul, dropout, sum: nothing of the gradient that failed
