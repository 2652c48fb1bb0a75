"""Parts of a graph that are no op of their own: constants from data, parameter groups, gradients of values."""

import os
import pathlib
import subprocess

import numpy as np
import pytest

import whale as wh

RNG = np.random.default_rng(5)
X = RNG.standard_normal((12, 5)).astype(np.float32)
W = (RNG.standard_normal((5, 3)) / 2).astype(np.float32)


# ---- constants ----------------------------------------------------------------------------------------------------------
def table_model():
    table, order = RNG.standard_normal((7, 3)).astype(np.float32), np.array([6, 0, 3], np.int32)
    g = wh.Graph("tables")
    with g:
        x = wh.input("x", (12, 3))
        with wh.replica():
            rows = wh.ops.gather(g.constant("table", table), g.constant("order", order), axis=0)
            mask = g.constant("mask", np.array([True, False, True]))
            g.output("y", wh.ops.where(mask, x + rows[1], x))
    return g, table, order


@pytest.mark.parametrize("devices", ["ref:1", "ref:3", "cpu:2"])
@pytest.mark.parametrize("again", [lambda g: g, lambda g: wh.Graph.parse(g.serialize())], ids=["built", "parsed"])
def test_constants_come_from_data(devices, again):
    g, table, order = table_model()
    g.seal()
    plan = wh.Plan.parse(wh.plan(again(g), devices=devices).serialize())
    x = RNG.standard_normal((12, 3)).astype(np.float32)
    y = plan.start().eval(["y"], x=x)["y"]
    np.testing.assert_array_equal(y, np.where([True, False, True], x + table[order[1]], x))


def test_a_constant_is_copied_and_not_trained(tmp_path):
    values = np.full((4,), 2.0)
    g = wh.Graph()
    with g:
        x = wh.input("x", (6, 4))
        c = g.constant("c", values)
        assert c.dtype == wh.float32 and c.shape == (4,)
        g.minimize((x * c * wh.parameter("w", (4,), wh.from_array(np.array([1, 2, 3, 4.0])))).sum(), wh.AdamW(0.1))
    values[:] = 9
    job = wh.plan(g, devices="ref:2", precision="float64").start()
    np.testing.assert_array_equal(job.read("w"), [1, 2, 3, 4])
    job.step(x=np.ones((6, 4)))
    np.testing.assert_array_equal(job.read("c"), [2, 2, 2, 2])
    assert (job.read("w") != [1, 2, 3, 4]).all()
    job.save(tmp_path / "a")
    job.load(tmp_path / "a")


def test_values_that_do_not_fit_are_refused():
    g = wh.Graph()
    with g:
        with pytest.raises(wh.InvalidArgument, match=r"'w' is \[3\], and its initial values are \[2\]"):
            wh.parameter("w", (3,), wh.from_array([1.0, 2.0]))
        with pytest.raises(wh.AlreadyExists):
            wh.input("a", (2,))
            wh.input("a", (2,))
        first, second = g.constant("c", [1, 2]), g.constant("c", [1.0])
        assert first.dtype == wh.int64 and second.shape == (1,)
        assert [v["name"] for v in g.to_dict()["variables"]] == ["c", "c_1"]


# ---- parameter groups -----------------------------------------------------------------------------------------------------
def grouped(optimizer, groups, precision="float64"):
    g = wh.Graph("grouped")
    with g:
        x, t = wh.input("x", (12, 5)), wh.input("t", (12, 3))
        with wh.replica():
            with wh.scope("body"):
                h = wh.ops.tanh(wh.nn.linear(x, 4, name="a"))
            y = wh.nn.linear(h, 3, name="head")
            loss = ((y - t) * (y - t)).mean()
        for pattern, options in groups:
            g.parameter_group(pattern, **options)
        g.minimize(loss, optimizer, precision=precision)
    return g


def parameters_after(g, devices, steps=3, **options):
    job = wh.plan(g, devices=devices, **options).start(seed=3)
    t = np.linspace(-1, 1, 36).reshape(12, 3)
    before = job.parameters()
    for _ in range(steps):
        job.step(x=X.astype(np.float64), t=t) if devices.startswith("ref") else job.step(x=X, t=t.astype(np.float32))
    return before, job.parameters()


def test_a_group_has_its_share_of_the_learning_rate():
    before, plain = parameters_after(grouped(wh.SGD(0.1), []), "ref:1", steps=1)
    _, found = parameters_after(grouped(wh.SGD(0.1), [("body.*", dict(learning_rate_factor=0.25)), ("*.bias", dict(learning_rate_factor=0))]),
                                "ref:1", steps=1)
    for name in before:
        factor = 0 if name.endswith(".bias") else 0.25 if name.startswith("body.") else 1
        np.testing.assert_allclose(found[name] - before[name], factor * (plain[name] - before[name]), rtol=1e-9, atol=1e-15)


def test_a_group_has_its_weight_decay():
    still = dict(weight_decay=0.5)
    before, plain = parameters_after(grouped(wh.SGD(0.1, weight_decay=0), []), "ref:1", steps=1)
    _, found = parameters_after(grouped(wh.SGD(0.1, weight_decay=0), [("head.bias", still), ("body.a.weight", still)]), "ref:1", steps=1)
    for name in before:
        decay = 0.5 if name in ("head.bias", "body.a.weight") else 0
        np.testing.assert_allclose(found[name], plain[name] - 0.1 * decay * before[name], rtol=1e-9, atol=1e-15)
    _, none = parameters_after(grouped(wh.SGD(0.1, weight_decay=0.5), [("*", dict(weight_decay=0))]), "ref:1", steps=1)
    for name in before:
        np.testing.assert_allclose(none[name], plain[name], rtol=1e-12)


@pytest.mark.parametrize("optimizer", [wh.SGD(0.1, momentum=0.9), wh.AdamW(0.1), wh.Lamb(0.1), wh.Adagrad(0.1), wh.Adafactor(0.1, weight_decay=0.1)],
                         ids=lambda o: type(o).__name__)
@pytest.mark.parametrize("devices, options", [("ref:3", {}), ("ref:2", dict(zero=2)), ("ref:2", dict(strategy="pipeline(2, micro_batches=2)")),
                                              ("ref:2", dict(update="sliced"))], ids=["replica", "zero", "pipeline", "sliced"])
def test_groups_under_plans(optimizer, devices, options):
    groups = [("body.*", dict(learning_rate_factor=0.5, weight_decay=0.2)), ("head.bias", dict(learning_rate_factor=3))]
    _, one = parameters_after(grouped(optimizer, groups), "ref:1")
    _, found = parameters_after(grouped(optimizer, groups), devices, **options)
    for name in one:
        np.testing.assert_allclose(found[name], one[name], rtol=1e-7, atol=1e-10)


def test_groups_are_in_the_file():
    g = grouped(wh.AdamW(0.1), [("body.*", dict(learning_rate_factor=0.5, weight_decay=0.2))])
    _, built = parameters_after(g, "ref:1")
    _, parsed = parameters_after(wh.Graph.parse(g.serialize()), "ref:1")
    _, other = parameters_after(grouped(wh.AdamW(0.1), []), "ref:1")
    for name in built:
        np.testing.assert_array_equal(parsed[name], built[name])
    assert (other["body.a.weight"] != built["body.a.weight"]).all()


def test_a_later_group_replaces_an_earlier_one():
    before, plain = parameters_after(grouped(wh.SGD(0.1, weight_decay=0.5), []), "ref:1", steps=1)
    groups = [("*.bias", dict(weight_decay=0.1)), ("*.bias", dict(learning_rate_factor=1))]
    _, found = parameters_after(grouped(wh.SGD(0.1, weight_decay=0.5), groups), "ref:1", steps=1)
    for name in before:
        np.testing.assert_allclose(found[name], plain[name], rtol=1e-12)


def test_the_verifier_knows_of_groups(tmp_path):
    tool = os.environ.get("WHALE")
    if not tool or not pathlib.Path(tool).exists():
        pytest.skip("no whale program")
    path = tmp_path / "g.whale"
    g = grouped(wh.AdamW(0.1), [("body.*", dict(learning_rate_factor=0.5, weight_decay=0.2)), ("*.bias", dict(learning_rate_factor=0))], "float32")
    g.seal().save(path)
    run = subprocess.run([tool, "verify", str(path), "--devices", "cpu:2", "--steps", "2"], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize("pattern, matched", [("*", 4), ("body.a.?eight", 1), ("*.bias", 2), ("head.*", 2), ("b*y.*s", 1), ("*a*", 4)])
def test_patterns(pattern, matched):
    g = grouped(wh.SGD(0.1), [(pattern, dict(learning_rate_factor=2))])
    assert sum(v["learning_rate_factor"] == 2 for v in g.to_dict()["variables"]) == matched


def test_a_group_of_nothing_is_an_error():
    with pytest.raises(wh.NotFound, match="no trained parameter of 'grouped' matches 'bodi"):
        grouped(wh.SGD(0.1), [("bodi.*", dict(weight_decay=0))])
    with pytest.raises(wh.InvalidArgument, match="'weight_decay' is -1"):
        grouped(wh.SGD(0.1), [("*", dict(weight_decay=-1))])


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


@pytest.mark.parametrize("batch", [12, 7, 15])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_gradients_of_a_linear_value(name, batch):
    """Nothing but the reduction itself says how many samples there are. 15: more, in an evaluation."""
    g = wh.Graph("linear")
    with g:
        x = wh.input("x", (12, 5))
        w, bias = wh.parameter("w", (5, 3)), wh.parameter("bias", (3,))
        o = x @ w + bias
        for key, value in dict(dx=g.gradients(REDUCTIONS[name](o), x), db=g.gradients(REDUCTIONS[name](o), bias)).items():
            g.output(key, value)
    x = np.concatenate([X, X])[:batch]
    found = run(g, "cpu:1", x, ("dx", "db"))
    o = np.zeros((batch, 3))
    do = np.full((batch, 3), np.size(REDUCTIONS[name](o)) / o.size if name.startswith("mean") else 1)
    np.testing.assert_allclose(found["dx"], do @ W.T, rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(found["db"], do.sum(0), rtol=2e-5, atol=1e-6)


def test_a_penalty_on_the_gradient_of_a_linear_value_trains_on_fewer_samples():
    found = {}
    for batch in (12, 5):
        g = wh.Graph("penalty")
        with g:
            x = wh.input("x", (batch, 5))
            w = wh.parameter("w", (5, 3))
            y = x @ w
            dx = g.gradients(y, x)
            g.minimize((dx * dx).sum(1).mean() + y.mean(), wh.SGD(0.1))
        job = wh.plan(g, devices="cpu:1").start()
        job.write("w", W)
        found[batch] = job.step(x=X[:5]), job.read("w")
    assert found[12][0] == pytest.approx(found[5][0], rel=1e-6)
    np.testing.assert_allclose(found[12][1], found[5][1], rtol=1e-5)


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


# ---- scopes --------------------------------------------------------------------------------------------------------------
def two_towers(alternating):
    """Two stages of two layers each, written one after the other or in turns."""
    with wh.Graph("towers") as g:
        x = wh.input("x", (12, 5))
        with wh.pipeline(2, micro_batches=2):
            first, second = wh.stage(), wh.stage()
            with wh.scope("a") as a, first:
                h = wh.nn.linear(x, 6)
                if not alternating:
                    h = wh.nn.linear(wh.ops.relu(h), 4)
            if alternating:
                with second:
                    bias = wh.parameter("bias", (4,), wh.ones())
                with first, a:  # the first lies in "a": it is the same either way
                    h = wh.nn.linear(wh.ops.relu(h), 4)
            with second:
                h = h + (bias if alternating else wh.parameter("bias", (4,), wh.ones()))
        g.output("y", h)
        g.minimize(wh.ops.square(h).mean(), wh.SGD(0.1))
    return g


def test_a_scope_is_entered_again():
    graphs = [two_towers(False), two_towers(True)]
    kinds = [[scope["kind"] for scope in g.to_dict()["scopes"]] for g in graphs]
    assert kinds[0].count("stage") == kinds[1].count("stage") == 2 and sorted(kinds[0]) == sorted(kinds[1])
    jobs = [wh.plan(g, devices="ref:2").start(seed=1) for g in graphs]
    assert [v.name for v in jobs[0].variables()] == ["a.linear.weight", "a.linear.bias", "a.linear_1.weight", "a.linear_1.bias", "bias"]
    assert {v.name for v in jobs[0].variables()} == {v.name for v in jobs[1].variables()}
    losses = [[job.step(x=X) for _ in range(3)] for job in jobs]
    assert losses[0] == losses[1]


def test_an_op_is_where_its_scope_is_and_not_where_it_was_written():
    with wh.Graph("places") as g:
        x = wh.input("x", (12, 5))
        with wh.scope("outer"):
            with wh.scope("inner") as inner:
                wh.parameter("w", (5,))
        with wh.scope("other"):
            with inner:
                wh.parameter("w", (5,))
                y = wh.ops.relu(x)
            z = wh.ops.relu(x)
        g.output("y", y), g.output("z", z)
    described = g.to_dict()
    assert [described["tensors"][v["tensor"]]["name"] for v in described["variables"]] == ["outer.inner.w", "outer.inner.w_1"]
    assert [op["name"] for op in described["ops"]] == ["outer.inner.relu", "other.relu"]
    with pytest.raises(wh.FailedPrecondition, match="sealed"):
        g.seal()
        with inner:
            pass


def test_a_scope_of_another_graph():
    with wh.Graph("one"):
        with wh.stage() as first:
            wh.input("x", (2, 3))
    with wh.Graph("two"):
        with pytest.raises(wh.InvalidArgument, match="this scope is of graph 'one', and 'two' is open"):
            with first:
                pass


def test_a_scope_around_a_function():
    with wh.Graph("g") as g:
        @wh.scope("head")
        def head(x):
            return wh.nn.linear(x, 2)

        g.output("y", head(wh.input("x", (4, 3))))
    with wh.plan(g).start() as job:
        assert all(each.name.startswith("head.") for each in job.variables())
