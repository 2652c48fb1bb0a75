"""The Python SDK: building, planning, running, errors, interrupts, exchange of arrays."""

import json
import os
import re
import signal
import threading
import time

import numpy as np
import pytest
import whale as wh


def classifier(batch=12, devices="cpu:2", optimizer=None, strategy=None, **minimize):
    g = wh.Graph("classifier")
    with g:
        x, y = wh.input("x", (batch, 6)), wh.input("y", (batch,), wh.int32)
        with wh.replica():
            h = wh.ops.relu(wh.nn.linear(x, 16, name="hidden"))
            logits = wh.nn.linear(h, 3, name="head")
            loss = wh.nn.cross_entropy(logits, y)
        g.output("logits", logits)
        g.minimize(loss, optimizer or wh.SGD(0.1, momentum=0.9), **minimize)
    return g


def data(batch=12, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((batch, 6)).astype(np.float32)
    return dict(x=x, y=(x[:, 0] > 0).astype(np.int32) + (x[:, 1] > 0))


def numpy_loss(p, x, y):
    h = np.maximum(x @ p["hidden.weight"] + p["hidden.bias"], 0)
    z = h @ p["head.weight"] + p["head.bias"]
    z = z - z.max(1, keepdims=True)
    return float(np.mean(np.log(np.exp(z).sum(1)) - z[np.arange(len(y)), y]))


def test_training_matches_numpy_and_learns():
    job = wh.plan(classifier(), devices="cpu:2").start(seed=3)
    batch = data()
    before = job.parameters()
    assert job.step(**batch) == pytest.approx(numpy_loss(before, batch["x"], batch["y"]), rel=1e-5)
    losses = [job.step(**batch) for _ in range(30)]
    assert losses[-1] < 0.5 * losses[0]
    assert job.iteration == 31 and job.updates == 31


def test_same_seed_same_result_on_any_devices():
    runs = []
    for devices in ("cpu:1", "cpu:2", "cpu:3", "ref:2"):
        job = wh.plan(classifier(), devices=devices).start(seed=5)
        runs.append([job.step(**data(seed=i)) for i in range(5)])
    for other in runs[1:]:
        np.testing.assert_allclose(other, runs[0], rtol=1e-5)


def test_fetch_outputs_and_gradients():
    g = classifier()
    job = wh.plan(g, devices="cpu:3", strategy="replica(3, shares=[3,2,1])", fetch=["grad:head.bias"]).start()
    p, batch = job.parameters(), data()
    loss, out = job.step(["logits", "grad:head.bias"], **batch)
    h = np.maximum(batch["x"] @ p["hidden.weight"] + p["hidden.bias"], 0)
    z = h @ p["head.weight"] + p["head.bias"]
    np.testing.assert_allclose(out["logits"], z, rtol=1e-4, atol=1e-5)
    soft = np.exp(z - z.max(1, keepdims=True))
    soft /= soft.sum(1, keepdims=True)
    soft[np.arange(12), batch["y"]] -= 1
    np.testing.assert_allclose(out["grad:head.bias"], soft.mean(0), rtol=1e-4, atol=1e-6)


def test_the_loss_may_be_fetched_by_name():
    named, plain = (wh.plan(classifier(), devices="cpu:1").start(seed=3) for _ in range(2))
    batch = data()
    loss, out = named.step(["loss", "logits"], **batch)
    assert loss == plain.step(**batch) == float(out["loss"]) and list(out) == ["loss", "logits"]
    loss, out = plain.step("loss", **batch)
    assert list(out) == ["loss"] and loss == float(out["loss"])


def test_a_gradient_that_is_not_there_says_why():
    g = wh.Graph()
    with g:
        x = wh.input("x", (4, 3))
        wh.ops.matmul(x, wh.parameter("beside", (3, 2), wh.zeros()))
        frozen = wh.parameter("frozen", (3, 3), wh.ones(), trainable=False)
        g.minimize(wh.nn.linear(wh.ops.matmul(x, frozen), 2, name="head").mean(), wh.Adam(0.1))
    for name, why in [("beside", "the loss does not reach this parameter: its gradient is zero"), ("frozen", "this parameter is not trainable"),
                      ("none", "no parameter has this name"), ("x", "no parameter has this name"), ("head.weight/m", "no parameter has this name")]:
        with pytest.raises(wh.NotFound, match=f"fetch 'grad:{name}': {why}"):
            wh.plan(g, fetch=[f"grad:{name}"])


def test_smaller_last_batch_and_eval():
    job = wh.plan(classifier(), devices="cpu:2").start()
    p, batch = job.parameters(), data(5)
    assert job.step(**batch) == pytest.approx(numpy_loss(p, batch["x"], batch["y"]), rel=1e-5)
    p = job.parameters()
    out = job.eval(**batch)
    assert float(out["loss"]) == pytest.approx(numpy_loss(p, batch["x"], batch["y"]), rel=1e-5)
    assert out["logits"].shape == (5, 3)
    logits = job.eval(x=batch["x"])["logits"]
    np.testing.assert_array_equal(logits, out["logits"])
    assert job.eval(["logits"], x=batch["x"][:1])["logits"].shape == (1, 3)
    after = job.parameters()
    assert all(np.array_equal(p[k], after[k]) for k in p), "evaluation changed parameters"


@pytest.mark.parametrize("devices, strategy", [("cpu:1", ""), ("cpu:2", "replica"), ("cpu:2", "split(2)")])
def test_a_view_of_what_the_loss_overwrites_needs_no_labels(devices, strategy):
    """The loss may work in place on what a fetched view shows; that is no reason to want the labels of who asks for the view alone."""
    g = wh.Graph()
    with g:
        x, y = wh.input("x", (6, 4)), wh.input("y", (6,))
        scores = (x @ wh.parameter("w", (4, 1), wh.normal(1.0))).reshape(-1)
        g.output("scores", scores)
        g.minimize(wh.nn.binary_cross_entropy_with_logits(scores, y), wh.SGD(0.1))
    job = wh.plan(g, devices=devices, strategy=strategy).start()
    x = np.random.default_rng(0).standard_normal((6, 4), np.float32)
    np.testing.assert_allclose(job.eval(["scores"], x=x)["scores"], (x @ job.read("w")).reshape(-1), rtol=1e-5)


@pytest.mark.parametrize("strategy,devices", [("", "cpu:1"), ("replica", "cpu:3"), ("split", "cpu:2"), ("pipeline(2, micro_batches=3)", "cpu:2")])
@pytest.mark.parametrize("loss", [wh.nn.mse, wh.nn.binary_cross_entropy_with_logits, lambda y, t: wh.nn.mse(y * t, t)])
def test_an_output_is_evaluated_without_the_targets(loss, strategy, devices):
    """Also where the loss is computed in the output's own place."""
    g = wh.Graph()
    with g:
        x, t = wh.input("x", (12, 6)), wh.input("t", (12, 4))
        y = wh.ops.tanh(wh.nn.linear(wh.ops.tanh(wh.nn.linear(x, 8)), 4))
        g.output("y", y)
        g.minimize(loss(y, t), wh.SGD(0.1))
    job = wh.plan(g, devices=devices, strategy=strategy).start()
    feeds = dict(x=data()["x"], t=np.full((12, 4), 0.5, np.float32))
    both = job.eval(**feeds)
    np.testing.assert_array_equal(job.eval(x=feeds["x"])["y"], both["y"])
    np.testing.assert_array_equal(job.eval(["loss"], **feeds)["loss"], both["loss"])


def test_read_write_learning_rate():
    job = wh.plan(classifier(optimizer=wh.SGD(0.1, lr_schedule=wh.cosine(100, warmup=10))), devices="cpu:2").start()
    job.write("head.bias", np.array([1, 2, 3], np.float32))
    np.testing.assert_array_equal(job.read("head.bias"), [1, 2, 3])
    job.learning_rate = 0.0
    before = job.parameters()
    job.step(**data())
    assert all(np.array_equal(before[k], v) for k, v in job.parameters().items())
    job.learning_rate = None
    assert 0 < job.learning_rate <= 0.1
    with pytest.raises(wh.NotFound, match="no such variable"):
        job.write("nothing", np.zeros(3))
    with pytest.raises(wh.InvalidArgument, match="head.bias"):
        job.write("head.bias", np.zeros(4, np.float32))


def test_every_copy_can_be_read():
    """Replicas hold a copy each; ZeRO leaves one copy of the state, in parts on all devices; a write reaches every copy."""
    job = wh.plan(classifier(optimizer=wh.AdamW(0.1)), devices="cpu:3", zero=1).start()
    job.step(**data())
    rows = {row["name"]: row for row in job.variables()}
    for name, row in rows.items():
        copies = [job.read(name, copy=k) for k in range(len(row["copies"]))]
        assert all((c == copies[0]).all() for c in copies) and (copies[0] == job.read(name)).all()
        assert sorted({d for devices in row["copies"] for d in devices}) == [0, 1, 2], row
        assert len(copies) == (3 if row["role"] == "parameter" else 1)
    name = next(name for name, row in rows.items() if row["role"] == "parameter")
    job.write(name, np.full_like(job.read(name), 2))
    assert all((job.read(name, copy=k) == 2).all() for k in range(3))
    with pytest.raises(wh.InvalidArgument, match="copy 3"):
        job.read(name, copy=3)


@pytest.mark.parametrize("zero", [0, 2])
@pytest.mark.parametrize("devices,strategy", [(5, "replica(2) > split(shares=[[2,1,1],[1,1]])"), (3, "replica(2) > split(shares=[[1,1],[1]])"),
                                              (4, "replica(2) > split(shares=[[3,1],[1,1]])"), (6, "replica(2) > split(3, shares=[[2,0,1],[1,1,1]])")])
def test_groups_that_cut_in_their_own_ways_keep_copies_alike(devices, strategy, zero):
    """Without samples to share, every group computes the whole gradient, each with products of its own widths."""
    graph = wh.Graph("whole")
    with graph:
        x = wh.input("x", (6, 16), batch_dim=-1)
        h = wh.nn.attention(wh.nn.rms_norm(x.reshape(1, 6, 16)), 4, causal=True, rotary=True, kv_heads=2)
        graph.minimize(wh.ops.square(h - x.reshape(1, 6, 16)).mean(), wh.Adam(0.01))
    job = wh.plan(graph, devices=f"cpu:{devices}", strategy=strategy, zero=zero).start()
    rng = np.random.default_rng(0)
    for _ in range(3):
        job.step(x=rng.standard_normal((6, 16)).astype(np.float32))
    for row in job.variables():
        copies = [job.read(row["name"], copy=k) for k in range(len(row["copies"]))]
        assert all(c.tobytes() == copies[0].tobytes() for c in copies), row["name"]


@pytest.mark.parametrize("devices", ["cpu:1", "ref:1"])
@pytest.mark.parametrize("optimizer", [wh.Adam(0.1), wh.AdamW(0.1, weight_decay=0.0), wh.Lamb(0.1, weight_decay=0.0), wh.Adam(0.1, sparse_updates=True)], ids=["adam", "adamw", "lamb", "sparse_updates"])
def test_moments_are_right_to_rounding(optimizer, devices):
    """1 - beta is small: taken in float32 it is 1.3e-5 off, and so is all that Adam moves."""
    g = wh.Graph()
    with g:
        ids = wh.input("ids", (6,), wh.int32)
        rows = wh.ops.embedding(wh.parameter("w", (6, 5), wh.normal(1.0)), ids)
        g.minimize((rows * rows * rows).sum(), optimizer)
    job = wh.plan(g, devices=devices).start(seed=1)
    gradient = 3 * job.read("w").astype(np.float64) ** 2
    job.step(ids=np.arange(6, dtype=np.int32))
    np.testing.assert_allclose(job.read("w/m"), 0.1 * gradient, rtol=5e-7)
    np.testing.assert_allclose(job.read("w/v"), 0.001 * gradient**2, rtol=5e-7)


def test_sparse_updates_and_split_updates_of_tables(tmp_path):
    def job(**options):
        g = wh.Graph("bags")
        with g:
            ids, y = wh.input("ids", (8, 3), wh.int32), wh.input("y", (8,), wh.int32)
            x = wh.ops.embedding_bag(wh.parameter("table", (40, 6), wh.normal(0.3)), ids, mode="mean")
            g.minimize(wh.nn.cross_entropy(wh.nn.linear(x, 3), y), wh.SGD(0.5, **options), precision="bfloat16" if options.get("split_master_weights") else "float32")
        return wh.plan(g, devices="cpu:1").start()

    rng = np.random.default_rng(0)
    feeds = dict(ids=rng.integers(0, 20, (8, 3)).astype(np.int32), y=rng.integers(0, 3, 8).astype(np.int32))
    dense, sparse_updates, split = job(), job(sparse_updates=True), job(sparse_updates=True, split_master_weights=True)
    start = sparse_updates.read("table")
    for _ in range(5):
        expected = dense.step(**feeds)
        assert sparse_updates.step(**feeds) == expected
        assert split.step(**feeds) == pytest.approx(expected, rel=2e-2)
    np.testing.assert_array_equal(sparse_updates.read("table"), dense.read("table"))
    np.testing.assert_array_equal(sparse_updates.read("table")[20:], start[20:])
    low = split.read("table/low")
    assert low.dtype == np.uint16 and low.shape == (40, 6) and low[:20].any() and not low[20:].any()
    assert split.eval(["loss"], **feeds)["loss"] == pytest.approx(expected, rel=5e-2)
    split.save(tmp_path / "ckpt")
    next_loss = split.step(**feeds)
    other = job(sparse_updates=True, split_master_weights=True)
    other.load(tmp_path / "ckpt")
    assert other.step(**feeds) == next_loss
    np.testing.assert_array_equal(other.read("table/low"), split.read("table/low"))
    with pytest.raises(wh.InvalidArgument, match="momentum"):
        job(split_master_weights=True, momentum=0.9)


@pytest.mark.parametrize("make,left", [(wh.SGD, 1.0), (wh.Adam, 1.0), (wh.AdamW, 1.0), (wh.Lamb, 1.0), (wh.Adagrad, 1.0), (wh.Adafactor, 0.75)],
                         ids=lambda v: getattr(v, "__name__", ""))
def test_weight_decay_is_multiplied_by_the_learning_rate_but_for_adafactor(make, left):
    """As each optimizer says of itself: with a learning rate of 0 all the others leave a parameter as it is."""
    with wh.plan(classifier(optimizer=make(0.0, weight_decay=0.25)), devices="cpu:1").start(seed=1) as job:
        before = job.parameters()
        job.step(**data())
        for name, value in job.parameters().items():
            np.testing.assert_array_equal(value, before[name] * np.float32(left if value.ndim >= 2 else 1))


@pytest.mark.parametrize("optimizer", [wh.SGD(0.1), wh.SGD(0.1, momentum=0.9, nesterov=True), wh.Adam(0.01), wh.AdamW(0.01), wh.Lamb(0.01),
                                       wh.Adagrad(0.1), wh.Adafactor(0.01)], ids=lambda o: type(o).__name__)
def test_optimizers_learn_and_checkpoint(optimizer, tmp_path):
    from safetensors.numpy import load_file
    job = wh.plan(classifier(optimizer=optimizer), devices="cpu:2").start(seed=1)
    first = job.step(**data())
    for _ in range(40):
        job.step(**data())
    job.save(tmp_path / "ckpt")
    stored = load_file(tmp_path / "ckpt" / "model.safetensors")
    for name, value in job.parameters().items():
        np.testing.assert_array_equal(stored[name], value)
    expected = [job.step(**data()) for _ in range(3)]
    assert expected[0] < first
    other = wh.plan(classifier(optimizer=optimizer), devices="cpu:2").start(seed=9)
    other.load(tmp_path / "ckpt")
    assert other.iteration == 41
    assert [other.step(**data()) for _ in range(3)] == expected, "a restored job goes on bitwise"
    third = wh.plan(classifier(optimizer=optimizer), devices="cpu:3").start()
    third.load(tmp_path / "ckpt")
    assert third.step(**data()) == pytest.approx(expected[0], rel=1e-5)


def test_two_runs_are_bitwise_equal():
    def run():
        job = wh.plan(classifier(), devices="cpu:3").start(seed=2)
        return [job.step(**data(seed=i)) for i in range(6)], job.parameters()
    (a, p), (b, q) = run(), run()
    assert a == b and all(np.array_equal(p[k], q[k]) for k in p)


def test_shape_error_names_the_line():
    g = wh.Graph()
    with g:
        a, b = wh.input("a", (4, 5)), wh.input("b", (4, 6))
        with pytest.raises(wh.InvalidArgument) as info:
            wh.ops.matmul(a, b)  # this line
    text = str(info.value)
    assert "test_sdk.py" in text and "5" in text and "4" in text


BAD_FEEDS = [
    (dict(x=np.zeros((12, 6), np.float32)), "y"),
    (dict(x=np.zeros((12, 6), np.float32), y=np.zeros(12, np.int32), z=np.zeros(1)), "z"),
    (dict(x=np.zeros((12, 7), np.float32), y=np.zeros(12, np.int32)), "x"),
    (dict(x=np.zeros((12, 6), np.float32), y=np.zeros(11, np.int32)), "11|12"),
    (dict(x=np.zeros((13, 6), np.float32), y=np.zeros(13, np.int32)), "13"),
    (dict(x=np.zeros((0, 6), np.float32), y=np.zeros(0, np.int32)), "0|empty"),
    (dict(x=np.zeros((12, 6), np.float32), y=np.zeros(12, np.float32)), "y"),
    (dict(x=np.zeros((12, 6), np.float32), y=np.full(12, 7, np.int32)), "y|label|nan|finite"),
]


@pytest.mark.parametrize("feeds,word", BAD_FEEDS, ids=[w for _, w in BAD_FEEDS])
def test_bad_feeds_leave_the_job_as_it_was(feeds, word):
    job = wh.plan(classifier(), devices="cpu:2").start()
    before = job.parameters()
    with pytest.raises(wh.WhaleError, match=word):
        job.step(**feeds)
    assert all(np.array_equal(before[k], v) for k, v in job.parameters().items())
    assert np.isfinite(job.step(**data()))


@pytest.mark.parametrize("devices", ["", "gpu:1", "cpu:0", "cpu:-1", "cpu:x", "cpu:2,", "cpu@99999", "cpu@0*0", "ref:1e9", "cpu:2 cpu:2"])
def test_bad_device_strings(devices):
    if devices == "":
        return
    with pytest.raises(wh.WhaleError):
        wh.plan(classifier(), devices=devices)


@pytest.mark.parametrize("strategy", ["replica(", "replica(3)", "nothing(2)", "replica(2, shares=[1,2,3])", "replica(2, shares=[-1,2])", "replica(0.5)", "replica > "])
def test_bad_strategies(strategy):
    with pytest.raises(wh.WhaleError):
        wh.plan(classifier(), devices="cpu:2", strategy=strategy)


def test_nan_policy():
    bad = data()
    bad["x"] = bad["x"] * np.nan
    g = wh.Graph()
    with g:  # no relu: a maximum with zero may swallow a NaN
        x, y = wh.input("x", (12, 6)), wh.input("y", (12,), wh.int32)
        g.minimize(wh.nn.cross_entropy(wh.nn.linear(x, 3), y), wh.SGD(0.1))
    plan = wh.plan(g, devices="cpu:2")
    with pytest.raises(wh.OutOfRange, match='not finite.*nan="ignore" in Python'):
        plan.start().step(**bad)
    assert np.isnan(plan.start(nan="ignore").step(**bad))


def test_interrupt_stops_a_running_step():
    g = wh.Graph()
    with g:
        x = wh.input("x", (512, 512), batch_dim=-1)
        w = wh.parameter("w", (512, 512), wh.normal(0.01))
        h = x
        for _ in range(12):
            h = wh.ops.tanh(h @ w)
        g.minimize(h.sum(), wh.SGD(1e-6))
    job = wh.plan(g, devices="ref:1").start()  # several seconds a step
    before = job.read("w")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored when a shell started the tests in the background
    threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        job.step(x=np.ones((512, 512), np.float32))
    assert time.monotonic() - start < 60
    np.testing.assert_array_equal(job.read("w"), before)


def test_what_the_engine_noticed_is_drained(tmp_path):
    wh.drain_log()
    plan = wh.plan(classifier(), devices="ref:2")
    job = plan.start()
    job.save(tmp_path / "a")
    without_state = wh.plan(classifier(optimizer=wh.SGD(0.1)), devices="ref:1").start()
    with pytest.warns(UserWarning, match="left out"):
        without_state.load(tmp_path / "a")
    log = wh.drain_log()
    said = [(row["severity"], row["topic"], row["message"]) for row in log]
    assert [message.split(":")[0] for _, topic, message in said if topic == "session"] == ["'classifier' runs on 2 device(s)", "'classifier' runs on 1 device(s)"]
    assert any(severity == "info" and message.startswith("saved 'classifier' after 0 updates to") for severity, _, message in said)
    assert any(severity == "warning" and "it was left out" in message for severity, topic, message in said if topic == "checkpoint")
    assert [row["nanoseconds"] for row in log] == sorted(row["nanoseconds"] for row in log)
    assert wh.drain_log() == []


def test_dlpack_both_ways():
    job = wh.plan(classifier(), devices="cpu:2").start()

    class Exporter:  # anything with DLPack
        def __init__(self, array): self.array = array
        def __dlpack__(self, **options): return self.array.__dlpack__(**options)
        def __dlpack_device__(self): return self.array.__dlpack_device__()

    batch = data()
    a = job.eval(**batch)["logits"]
    b = job.eval(x=Exporter(batch["x"]), y=Exporter(batch["y"]))["logits"]
    np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(job.eval(x=batch["x"].astype(np.float64)[::1], y=batch["y"].astype(np.int64))["logits"], a)
    array = job.read("head.bias")
    view = np.from_dlpack(array)
    view[0] = 42
    assert array[0] == 42, "DLPack shares memory"


def test_save_load_graph_and_plan(tmp_path):
    g = classifier().seal()
    g.save(tmp_path / "m.whale")
    loaded = wh.Graph.load(tmp_path / "m.whale")
    assert loaded.print() == g.print() and loaded.serialize() == g.serialize()
    plan = wh.plan(loaded, devices="cpu:2")
    plan.save(tmp_path / "p.plan")
    again = wh.Plan.load(tmp_path / "p.plan")
    assert again.print() == plan.print()
    assert again.start(seed=1).step(**data()) == plan.start(seed=1).step(**data())
    for name in ("m.whale", "p.plan"):
        raw = bytearray((tmp_path / name).read_bytes())
        (tmp_path / "broken").write_bytes(raw[:len(raw) // 2])
        with pytest.raises(wh.WhaleError):
            (wh.Graph if name == "m.whale" else wh.Plan).load(tmp_path / "broken")
    with pytest.raises(wh.WhaleError, match="nowhere"):
        wh.Graph.load(tmp_path / "nowhere.whale")


def test_displays():
    g = classifier().seal()
    assert "hidden" in g.summary() and g._repr_html_().count("<svg") == 1
    plan = wh.plan(g, devices="cpu:4")
    assert "cpu" in plan.summary() and plan.svg().startswith("<svg") and "<svg" in plan._repr_html_()
    times = plan.to_dict()["entries"][0]["timeline"]
    assert times["seconds"] > 0 and all(0 <= start <= end <= times["seconds"] * 1.0001 for _, _, start, end, _ in times["queues"]["compute"])
    assert "matmul" in plan.svg() and plan.svg().count('fill="#f4f4f4"') >= 4
    undrawn = {**plan.to_dict(), "entries": [{**plan.to_dict()["entries"][0], "timeline": None}]}
    assert "too long to draw" in wh.display.plan_svg(undrawn)
    assert "matmul" in g.print() and "sgd" in g.print("train") and "all_reduce" in plan.print()


def test_operators_and_indexing():
    g = wh.Graph()
    with g:
        x = wh.input("x", (4, 6), batch_dim=-1)
        g.output("a", (2.0 * x - 1 / (x * x + 1)) ** 2)
        g.output("b", x[1:, ::2])
        g.output("c", x[-1])
        g.output("d", (x > 0.0).astype(wh.float32).sum(axis=0))
        g.output("e", wh.ops.where(~(x > 0.0), x, -x).mean())
        g.output("f", x.transpose() @ x)
    v = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)
    out = wh.plan(g, devices="cpu:1").start().eval(x=v)
    np.testing.assert_allclose(out["a"], (2 * v - 1 / (v * v + 1)) ** 2, rtol=1e-5)
    np.testing.assert_array_equal(out["b"], v[1:, ::2])
    np.testing.assert_array_equal(out["c"], v[-1])
    np.testing.assert_array_equal(out["d"], (v > 0).sum(0))
    assert out["e"] == pytest.approx(-np.abs(v).mean(), rel=1e-5)
    np.testing.assert_allclose(out["f"], v.T @ v, rtol=1e-4, atol=1e-5)


def test_report_and_timeline():
    job = wh.plan(classifier(), devices="cpu:2").start()
    job.trace()
    job.step(**data())
    assert json.loads(job.timeline())
    assert job.report()


def test_bfloat16_stays_near_float32():
    losses = {}
    for precision in ("float32", "bfloat16"):
        job = wh.plan(classifier(optimizer=wh.AdamW(0.01)), devices="cpu:2", precision=precision).start(seed=0)
        losses[precision] = [job.step(**data(seed=i)) for i in range(10)]
        assert job.eval(["logits"], x=data()["x"])["logits"].dtype == np.float32
    np.testing.assert_allclose(losses["bfloat16"], losses["float32"], rtol=0.05, atol=0.02)
    assert losses["bfloat16"] != losses["float32"]


def normed(groups):
    g = wh.Graph("normed")
    with g:
        x, y = wh.input("x", (12, 5)), wh.input("y", (12,), wh.int32)
        h = wh.ops.relu(wh.nn.batch_norm(wh.nn.linear(x, 8, bias=False), groups=groups))
        g.minimize(wh.nn.cross_entropy(wh.nn.linear(h, 3, name="head"), y), wh.AdamW(0.01))
    return g


def test_batch_norm_of_groups_in_micro_batches(tmp_path):
    rng = np.random.default_rng(1)
    x, y = rng.standard_normal((12, 5)).astype(np.float32), rng.integers(0, 3, 12).astype(np.int32)
    wh.plan(normed(6), devices="cpu:2", strategy="pipeline(2, micro_batches=3)").save(tmp_path / "normed.plan")
    parts, whole = wh.Plan.load(tmp_path / "normed.plan").start(seed=1), wh.plan(normed(6), devices="cpu:1").start(seed=1)
    for _ in range(4):
        assert parts.step(x=x, y=y) == pytest.approx(whole.step(x=x, y=y), rel=1e-5)
    for v in whole.variables():  # running statistics among them
        np.testing.assert_allclose(parts.read(v["name"]), whole.read(v["name"]), rtol=1e-4, atol=1e-6)
    few = {"x": x[:5], "y": y[:5]}  # evaluation has no groups
    assert float(parts.eval(**few)["loss"]) == pytest.approx(float(whole.eval(**few)["loss"]), rel=1e-5)
    with pytest.raises(wh.WhaleError, match="'groups' is 6, expected a divisor of the batch 9"):
        whole.step(x=x[:9], y=y[:9])
    with pytest.raises(wh.WhaleError, match="attribute groups, a multiple of 3"):
        wh.plan(normed(1), devices="cpu:2", accumulation=3)


def test_mixture_of_experts_learns_and_counts_what_it_drops():
    def model():
        g = wh.Graph("experts")
        with g:
            x, y = wh.input("x", (4, 8, 6)), wh.input("y", (4, 8), wh.int32)
            z, balance, dropped = wh.nn.moe(x, 3, 16, top_k=2, capacity_factor=0.75)
            g.output("dropped", dropped)
            g.minimize(wh.nn.cross_entropy(wh.nn.linear(x + z, 3), y) + 0.01 * balance.mean(), wh.AdamW(1e-2))
        return g
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4, 8, 6)).astype(np.float32)
    batch = dict(x=x, y=(x.max(-1) > 1).astype(np.int32) + (x[..., 0] > 0))
    runs = []
    for devices in ("ref:1", "cpu:2"):
        job = wh.plan(model(), devices=devices).start()
        loss, out = job.step(["dropped"], **batch)
        assert out["dropped"].shape == (4,) and (out["dropped"] >= 16 - 12).all()  # 16 choices, 3 experts of 4 places
        runs.append([loss] + [job.step(**batch) for _ in range(29)])
        assert runs[-1][-1] < 0.7 * runs[-1][0]
        assert job.parameters()["moe.experts.up.weight"].shape == (3, 6, 16)
    np.testing.assert_allclose(runs[0], runs[1], rtol=1e-4)


def test_repeated_names_of_parameters_skip_those_of_ops():
    g = wh.Graph("names")
    with g:
        h = wh.input("x", (8, 6))
        for _ in range(4):
            h = h + wh.ops.tanh(h @ wh.parameter("tanh", (6, 6)))
        with pytest.raises(wh.AlreadyExists, match="parameter 'x'"):
            wh.parameter("x", (6, 6))
    names = [t["name"] for t in g.to_dict()["tensors"] if t["kind"] == "variable"]
    assert len(set(names)) == 4 and all(re.fullmatch(r"tanh(_\d+)?", name) for name in names), names
