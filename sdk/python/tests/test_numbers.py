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


def test_what_the_cpu_cannot_compute_is_named():
    g = wh.Graph("wide")
    with g, wh.scope("tower"):
        x = wh.input("x", (6, 5))
        h = x @ wh.parameter("w", (5, 8), wh.normal(1), dtype=wh.float64).astype(wh.float32)
        g.minimize(h.mean(), wh.SGD(0.1))
    with pytest.raises(wh.Unimplemented, match=r"test_numbers.py:\d+: op 'tower.cast.grad' in scope 'tower': device cpu has no kernel for matmul_weight_grad "
                                               r"\(f32, f32\) -> \(f64\); use float32 .* or ref devices"):
        wh.plan(g, devices="cpu:1").start()
    wh.plan(g, devices="ref:1").start().step(x=np.ones((6, 5), np.float32))


def test_an_epsilon_that_float64_has():
    g = wh.Graph("wide")
    with g:
        g.minimize(wh.nn.linear(wh.input("x", (6, 5)), 3).mean(), wh.Adam(epsilon=1e-60))
    wh.plan(g, devices="ref:1", precision="float64")


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


# Ops of integers: libwhale's, numpy's. A result has the type of its operands, modulo which it is exact.
INTEGER_OPS = {
    **{name: (function, function) for name, function in {
        "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b, "neg": lambda a, b: -a,
        "fused": lambda a, b: (a * 73 + 19) * b * 91 - a, "less": lambda a, b: a < b, "less_equal": lambda a, b: a <= b,
        "greater": lambda a, b: a > b, "greater_equal": lambda a, b: a >= b, "max": lambda a, b: a.max(), "min": lambda a, b: a.min(),
        "maxima": lambda a, b: a.max(axis=1), "minima": lambda a, b: b.min(axis=0)}.items()},
    **{name: (getattr(wh.ops, name), getattr(np, name)) for name in ("maximum", "minimum", "equal", "not_equal")},
    **{name: (lambda a, b, name=name: getattr(wh.ops, name)(a), lambda a, b, name=name: getattr(np, name)(a)) for name in ("abs", "sign", "square")},
    "where": (lambda a, b: wh.ops.where(a > b, a, b - a), lambda a, b: np.where(a > b, a, b - a)),
    "sum": (lambda a, b: a.sum(), lambda a, b: a.sum(dtype=a.dtype)),
    "sums": (lambda a, b: (a * b).sum(axis=0), lambda a, b: (a * b).sum(axis=0, dtype=a.dtype)),
    "argmax": (lambda a, b: wh.ops.argmax(a, axis=1), lambda a, b: a.argmax(axis=1)),
    "cumsum": (lambda a, b: wh.ops.cumsum(a, axis=1), lambda a, b: a.cumsum(axis=1, dtype=a.dtype)),
    "cumsum of samples": (lambda a, b: wh.ops.cumsum(a, axis=0, reverse=True), lambda a, b: a[::-1].cumsum(axis=0, dtype=a.dtype)[::-1]),
    "top_k": (lambda a, b: wh.ops.top_k(a, k=3)[0], lambda a, b: np.sort(a, axis=1)[:, :-4:-1]),
    "gather": (lambda a, b: wh.ops.gather(a, wh.ops.argmax(b[:1], axis=1), axis=1), lambda a, b: a[:, b[:1].argmax(axis=1)]),
    "pad": (lambda a, b: wh.ops.pad(a, low=[0, 1], high=[0, 2], value=77), lambda a, b: np.pad(a, ((0, 0), (1, 2)), constant_values=77)),
    "moved": (lambda a, b: wh.ops.concat([a, b], axis=1)[:, 1::2].transpose(1, 0), lambda a, b: np.concatenate([a, b], axis=1)[:, 1::2].T),
    **{f"to {to}": (lambda a, b, to=to: a.astype(to), lambda a, b, to=to: a.astype(to))
       for to in ["int8", "uint8", "uint16", "int32", "int64", "bool", "float32"]},
    **{f"fused to {to}": (lambda a, b, to=to: (a + b).astype(to) * 3, lambda a, b, to=to: (a + b).astype(to) * np.dtype(to).type(3))
       for to in ["int8", "uint8", "uint16", "int32", "int64", "float32"]},
}


@pytest.mark.parametrize("devices, strategy", [("cpu:1", ""), ("ref:1", ""), ("cpu:2", "replica(2)"), ("ref:2", "replica(2)")])
@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint16", "int32", "int64"])
def test_ops_of_integers_are_exact(dtype, devices, strategy):
    limits, rng = np.iinfo(dtype), np.random.default_rng(3)
    a, b = (rng.integers(limits.min, limits.max, (8, 6), dtype, endpoint=True) for _ in range(2))
    a[2, :4] = limits.min, limits.max, 0, 1
    a[5] = b[5] + (np.arange(6) % 2).astype(dtype)  # next to each other: beyond 2^53 alike as float64
    g = wh.Graph("integers")
    with g:
        operands = wh.input("a", a.shape, dtype), wh.input("b", b.shape, dtype)
        for name, (ours, _) in INTEGER_OPS.items():
            g.output(name, ours(*operands))
    found = wh.plan(g, devices=devices, strategy=strategy).start().eval(a=a, b=b)
    with np.errstate(over="ignore"):
        wanted = {name: np.asarray(numpys(a, b)) for name, (_, numpys) in INTEGER_OPS.items()}
    wrong = [name for name in INTEGER_OPS if not np.array_equal(found[name], wanted[name])]
    assert not wrong, {name: (found[name], wanted[name]) for name in wrong}


@pytest.mark.parametrize("devices, options", [
    ("cpu:1", dict(accumulation=2)), ("ref:1", dict(accumulation=2)), ("cpu:3", dict(strategy="replica(3, shares=[1,1,0])"))])
def test_extremes_of_the_ends_of_int64(devices, options):
    """They start from the type's own ends, of which float64 does not have the upper one."""
    g = wh.Graph("ends")
    with g:
        x, least, most = wh.input("x", (4, 3)), wh.input("least", (4,), wh.int64), wh.input("most", (4,), wh.int64)
        g.output("most", least.max())
        g.output("least", most.min())
        g.minimize(wh.nn.linear(x, 2).mean(), wh.SGD(0.1))
    limits = np.iinfo(np.int64)
    found = wh.plan(g, devices=devices, **options).start().step(["most", "least"], x=np.ones((4, 3), np.float32),
                                                               least=np.full(4, limits.min), most=np.full(4, limits.max))[1]
    assert int(found["most"]) == limits.min and int(found["least"]) == limits.max


@pytest.mark.parametrize("devices", ["cpu:1", "ref:1"])
def test_rewrites_of_integers_keep_their_numbers(devices):
    g = wh.Graph("rewritten")
    with g:
        x = wh.input("x", (2,), wh.uint8)
        g.output("saturated", x.astype(wh.float32).astype(wh.int8))
        g.output("back", x.astype(wh.float32).astype(wh.uint8))
        g.output("-5", -wh.ops.fill((2,), value=5, dtype="u8") + x * 0)
        g.output("-least", -wh.ops.fill((2,), value=-128, dtype="i8") + x.astype(wh.int8) * 0)
    found = wh.plan(g, devices=devices).start().eval(x=np.array([3, 200], np.uint8))
    assert {name: value.tolist() for name, value in found.items()} == {
        "saturated": [3, 127], "back": [3, 200], "-5": [251, 251], "-least": [-128, -128]}


@pytest.mark.parametrize("devices", ["cpu:1", "ref:1"])
def test_constants_are_what_their_types_hold(devices):
    """Folding keeps the digits of a double, which no narrow type between has."""
    g = wh.Graph("constants")
    with g:
        x = wh.input("x", (2,))
        def full(value, dtype="f32"):
            return wh.ops.fill((2,), value=value, dtype=dtype)
        for dtype in "bf16", "f16":
            g.output(dtype, full(0.1, dtype).astype(wh.float32) + x)
            g.output(f"narrowed to {dtype}", full(0.1).astype(dtype).astype(wh.float32) + x)
            g.output(f"product in {dtype}", (full(0.1, dtype) * full(3.0, dtype)).astype(wh.float32) + x)
        g.output("bf16 in f16", full(0.1, "bf16").astype(wh.float16).astype(wh.float32) + x)
        g.output("halves", full(0.5, "bf16").astype(wh.float32) + x)
        g.output("sum", full(1.0) + full(1e-8) - full(1.0) + x)
        g.output("quotient", full(1.0) / full(1e-60) + x)
        g.output("integers", full(16777217, "i32").astype(wh.float32) + x)
    found = wh.plan(g, devices=devices).start().eval(x=np.zeros(2, np.float32))
    bf16, f16 = 0.10009765625, 0.0999755859375
    assert {name: float(value[0]) for name, value in found.items()} == {
        "bf16": bf16, "narrowed to bf16": bf16, "product in bf16": 0.30078125, "f16": f16, "narrowed to f16": f16, "product in f16": 0.2998046875,
        "bf16 in f16": bf16, "halves": 0.5, "sum": 0.0, "quotient": np.inf, "integers": 16777216.0}


def test_a_mean_of_nothing_is_refused():
    """Where numpy gives NaN. Of a device or a micro-batch without samples it is the mean of the others'."""
    g = wh.Graph("nothing")
    with g:
        x = wh.input("x", (4, 3))
        for mean in (lambda: x[:, 0:0].mean(), lambda: x[:, 0:0].mean(axis=1)):
            with pytest.raises(wh.InvalidArgument, match=r"\[4, 0\] has no elements to take the mean of"):
                mean()
        g.output("none", x[:, 0:0].mean(axis=0))
        g.output("mean", x.mean())
        g.minimize(wh.nn.linear(x, 2).mean(), wh.SGD(0.1))
    for options in dict(strategy="replica(2, shares=[1,0])", devices="cpu:2"), dict(accumulation=4):
        found = wh.plan(g, **options).start().step(["none", "mean"], x=np.arange(12, dtype=np.float32).reshape(4, 3))[1]
        assert found["none"].shape == (0,) and found["mean"] == 5.5


@pytest.mark.parametrize("devices, options", [("cpu:1", {}), ("ref:1", {}), ("cpu:2", dict(strategy="split(2)")), ("cpu:3", dict(strategy="replica", accumulation=2))])
def test_a_mean_whose_sum_is_beyond_float16(devices, options):
    """It was infinite, silently: the sum was rounded before it was divided."""
    g = wh.Graph("means")
    with g:
        x = wh.input("x", (6, 64, 64, 3))
        h = wh.ops.relu(wh.nn.conv2d(x, 4, 1, bias=False, init=wh.constant(1 / 3)))
        pooled, spread = wh.nn.global_avg_pool(h), wh.ops.square(h - h.mean(axis=[1, 2], keep_dims=True)).mean(axis=[1, 2])
        for name, value in (("pooled", pooled), ("spread", spread), ("own", x.astype(wh.float16).mean(axis=[1, 2]))):
            g.output(name, value.astype(wh.float32))
        g.minimize(wh.ops.square(wh.nn.linear(pooled, 1)).mean(), wh.SGD(1e-3))
    job = wh.plan(g, devices, precision="float16", **options).start(loss_scale=64.0)
    assert np.all(job.eval(["pooled"], x=np.full((6, 64, 64, 3), 20.0))["pooled"] == 20)
    found = job.step(["pooled", "spread", "own"], x=np.full((6, 64, 64, 3), 20.0))[1]
    assert np.all(found["pooled"] == 20) and np.all(found["spread"] == 0) and np.all(found["own"] == 20) and job.updates == 1


@pytest.mark.parametrize("dtype, value", [("float32", 1e300), ("float16", 1e300), ("float16", 70000), ("bfloat16", 3.4e38), ("bfloat16", np.float32(3.4e38))])
def test_a_number_that_an_input_does_not_have_is_refused(dtype, value):
    g = wh.Graph("finite")
    with g:
        g.output("y", wh.input("x", (2,), dtype).astype(wh.float32))
    job = wh.plan(g, devices="ref:1").start()
    with pytest.raises(wh.InvalidArgument, match=f"'x' has values that do not fit {dtype}, such as"):
        job.eval(x=np.array([1, value]))
    kept = job.eval(x=np.array([np.inf, np.nan]))["y"]
    assert kept[0] == np.inf and np.isnan(kept[1])


@pytest.mark.parametrize("use", [lambda x: wh.SGD(10**400), lambda x: wh.Adam(0.1, betas=(10**400, 0.9)), lambda x: wh.constant(10**400),
                                 lambda x: wh.normal(10**400), lambda x: x * 10**400, lambda x: 10**400 - x, lambda x: wh.ops.dropout(x, rate=10**400)])
def test_integers_beyond_float64_are_refused_by_name(use):
    """They raised Python's own OverflowError, which names no argument."""
    with wh.Graph("beyond"), pytest.raises(wh.WhaleError, match="argument '.*' is 1000.*, expected"):
        use(wh.input("x", (4, 3)))
