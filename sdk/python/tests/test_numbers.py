"""Numbers at the edge: integers under plans (sums and extremes, also where a device has no samples), constants that are no numbers."""

import numpy as np
import pytest

import whale as wh


def model(batch=8):
    g = wh.Graph("integers")
    with g:
        x, y = wh.input("x", (batch, 3)), wh.input("y", (batch,), wh.int32)
        loss = wh.nn.cross_entropy(wh.nn.linear(x, 20), y)
        g.output("sum", (y > 6).astype(wh.int64).sum())
        g.output("least", y.min())
        g.output("most", (y - 15).max())
        g.minimize(loss, wh.SGD(0.1))
    return g


def data(batch=8):
    return dict(x=np.ones((batch, 3), np.float32), y=np.arange(5, 5 + batch, dtype=np.int32))


@pytest.mark.parametrize("devices", ["cpu:4", "ref:4"])
@pytest.mark.parametrize("batch", [8, 6, 2])
def test_extremes_of_integers_where_a_device_has_no_samples(devices, batch):
    for strategy in ["replica(4)", "replica(4, shares=[1,1,1,0])"]:
        job = wh.plan(model(), devices=devices, strategy=strategy).start()
        y = data(batch)["y"]
        assert [int(v) for v in job.step(["sum", "least", "most"], **data(batch))[1].values()] == [(y > 6).sum(), y.min(), (y - 15).max()]


def test_a_plan_that_sums_integers_over_micro_batches_loads_from_its_file(tmp_path):
    g = wh.Graph("counts")
    with g:
        x, y = wh.input("x", (4, 3)), wh.input("y", (4,), wh.int32)
        g.output("count", (y > 0).astype(wh.int64).sum())
        g.minimize(wh.nn.cross_entropy(wh.nn.linear(x, 2), y), wh.SGD(0.1))
    inputs = dict(x=np.ones((4, 3), np.float32), y=np.array([0, 1, 1, 1], np.int32))
    for devices, options in [("cpu:1", dict(accumulation=2)), ("ref:1", dict(accumulation=2, exact=True)),
                             ("cpu:2", dict(strategy="pipeline(2, micro_batches=2)"))]:
        wh.plan(g, devices=devices, **options).save(tmp_path / "counts.plan")
        assert int(wh.Plan.load(tmp_path / "counts.plan").start().step("count", **inputs)[1]["count"]) == 3


@pytest.mark.parametrize("devices", ["cpu:2", "ref:2"])
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "int64"])
def test_integers_of_every_width_are_summed_between_devices(devices, dtype):
    g = wh.Graph("widths")
    with g:
        x, y = wh.input("x", (4, 3)), wh.input("y", (4,), wh.int32)
        g.output("sum", y.astype(dtype).sum())
        g.minimize(wh.nn.linear(x, 2).mean(), wh.SGD(0.1))
    job = wh.plan(g, devices=devices, strategy="replica(2)").start()
    assert int(job.step(["sum"], x=np.ones((4, 3), np.float32), y=np.array([1, 2, 3, 5], np.int32))[1]["sum"]) == 11


def test_a_sum_of_integers_is_handed_out_in_two_shapes():
    g = wh.Graph("shapes")
    with g:
        x, y = wh.input("x", (6, 3)), wh.input("y", (6, 3), wh.int64)
        total = y.sum(axis=0)
        g.output("a", total)
        g.output("b", total.reshape(1, 3))
        g.minimize(wh.nn.linear(x, 2).mean(), wh.SGD(0.1))
    y = np.arange(18).reshape(6, 3)
    found = wh.plan(g, devices="cpu:2", strategy="replica(2)").start().step(["a", "b"], x=np.ones((6, 3), np.float32), y=y)[1]
    assert (found["a"] == y.sum(axis=0)).all() and (found["b"] == y.sum(axis=0, keepdims=True)).all()


def test_a_constant_that_is_no_number_saves_and_loads(tmp_path):
    g = wh.Graph("nan")
    with g:
        x = wh.input("x", (4, 3))
        g.output("y", wh.ops.where(x > 0, x, float("nan")))
    g.save(tmp_path / "nan.whale")
    out = wh.plan(wh.Graph.load(tmp_path / "nan.whale"), devices="ref:1").start().eval("y", x=np.array([[-1, 0, 2]] * 4, np.float32))["y"]
    assert np.isnan(out[0, 0]) and out[0, 2] == 2


@pytest.mark.parametrize("momentum", [2.0, -1.0, float("inf"), float("nan")])
def test_batch_norm_refuses_a_momentum_that_is_no_weight(momentum):
    with wh.Graph("bn"):
        x = wh.input("x", (4, 3))
        operands = [wh.parameter(name, (3,), trainable=name in ("gamma", "beta")) for name in ("gamma", "beta", "mean", "var")]
        with pytest.raises(wh.InvalidArgument, match="momentum"):
            wh.ops.batch_norm(x, *operands, momentum=momentum)


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int32", "int64"])
@pytest.mark.parametrize("devices, options", [
    ("cpu:1", dict(accumulation=3)), ("ref:2", dict(strategy="replica(2)", accumulation=3)), ("cpu:1", dict(accumulation=3, exact=True)),
    ("cpu:4", dict(strategy="replica(2) > pipeline(2, micro_batches=3)")), ("cpu:2", dict(strategy="replica(2, shares=[5,1])", accumulation=2))])
def test_extremes_of_integers_over_micro_batches(dtype, devices, options):
    g = wh.Graph("extremes")
    with g:
        x, y = wh.input("x", (12, 3)), wh.input("y", (12, 2), wh.int32)
        z = y.astype(dtype)
        g.output("least", z.min())
        g.output("most", z.max(axis=0))
        g.minimize(wh.nn.linear(wh.nn.linear(x, 4), 2).mean(), wh.SGD(0.1))
    y = np.arange(24).reshape(12, 2).astype(np.int32) * (3 if dtype[0] == "u" else -3) + (7 if dtype[0] == "u" else -1)
    found = wh.plan(g, devices=devices, **options).start().step(["least", "most"], x=np.ones((12, 3), np.float32), y=y)[1]
    assert int(found["least"]) == y.min() and (found["most"] == y.max(axis=0)).all()


def test_outputs_of_no_elements():
    g = wh.Graph("none")
    with g:
        x = wh.input("x", (4, 3))
        g.output("samples", x[:, 0:0])
        g.output("summed", x[:, 0:0].sum(axis=0))
        g.minimize(wh.nn.linear(x, 2).mean(), wh.SGD(0.1))
    for devices, strategy in [("cpu:1", ""), ("cpu:2", "replica"), ("ref:2", "split"), ("cpu:2", "pipeline(2, micro_batches=2)")]:
        found = wh.plan(g, devices=devices, strategy=strategy).start().step(["samples", "summed"], x=np.ones((4, 3), np.float32))[1]
        assert found["samples"].shape == (4, 0) and found["summed"].shape == (0,)
