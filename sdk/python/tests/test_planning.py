"""Planning and proofs can be stopped: by a timeout, and by Ctrl-C."""

import json
import os
import signal
import threading

import numpy as np
import pytest
import whale as wh
import whale.job as job_module
from whale._library import lib
from test_worlds import on_each


def gpt(layers=24):
    g = wh.Graph("gpt")
    with g:
        tokens, targets = wh.input("tokens", (64, 128), wh.int32), wh.input("targets", (64, 128), wh.int32)
        x = wh.nn.embedding(tokens, 512, 256)
        for i in range(layers):
            x = wh.nn.transformer_block(x, heads=8, causal=True, name=f"block{i}")
        g.minimize(wh.nn.cross_entropy(wh.nn.linear(x, 512, name="head"), targets), wh.AdamW(1e-3))
    return g


def test_a_timeout_ends_it_and_leaves_the_graph_as_it_was():
    g = gpt(2)
    with pytest.raises(wh.DeadlineExceeded, match="planning took longer than its timeout of 1e-05 seconds"):
        wh.plan(g, "null:8", strategy="replica(2) > split(4)", timeout=1e-5)
    assert wh.plan(g, "null:8", strategy="replica(2) > split(4)", timeout=600).print() == wh.plan(g, "null:8", strategy="replica(2) > split(4)").print()
    for bad in (-1, float("nan"), float("inf")):
        with pytest.raises(wh.InvalidArgument, match="'timeout' is .*a number, 0 or more"):
            wh.plan(g, "null:1", timeout=bad)


def test_a_timeout_ends_a_proof(tmp_path):
    plan = wh.plan(gpt(2), "null:8", strategy="replica(2) > split(4)", timeout=600)
    plan.save(tmp_path / "p.plan")
    for each in plan, wh.Plan.load(tmp_path / "p.plan"):
        with pytest.raises(wh.DeadlineExceeded, match="proving took longer than its timeout of 1e-05 seconds"):
            each.prove(timeout=1e-5)
        assert each.prove(timeout=600) == each.prove() and each.prove()["verdict"] == "proven"
        for bad in (-1, float("nan"), float("inf"), "soon"):
            with pytest.raises(wh.InvalidArgument, match="'timeout' is .*a number, 0 or more"):
                each.prove(timeout=bad)
        with pytest.raises(wh.InvalidArgument, match="'progress' is"):
            each.prove(progress="yes")


def test_planning_off_the_main_thread():
    plans = []
    worker = threading.Thread(target=lambda: plans.append(wh.plan(gpt(1), "null:2")))
    worker.start()
    worker.join()
    assert len(plans) == 1


@pytest.fixture
def interrupted(monkeypatch):
    """Ctrl-C comes as soon as the work has begun on its thread; the list says how each piece of work ended."""
    ends, real, seen, trigger = [], job_module.interruptible, threading.Event(), lib.whale_cancel_trigger

    def triggered(cancel):
        trigger(cancel)
        seen.set()

    def spy(call, cancel):
        def work():
            seen.clear()
            os.kill(os.getpid(), signal.SIGINT)
            assert seen.wait(60)  # the main thread sees it, however busy the machine is
            try:
                result = call()
                ends.append("done")
                return result
            except wh.Cancelled:
                ends.append("cancelled")
                raise
        return real(work, cancel)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored when a shell started the tests in the background
    monkeypatch.setattr(job_module, "interruptible", spy)
    monkeypatch.setattr(lib, "whale_cancel_trigger", triggered)
    yield ends
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_stops_planning(interrupted, monkeypatch):
    g = gpt()
    strategy = "replica(2) > pipeline(2, micro_batches=8) > split(4)"
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            wh.plan(g, "null:16", strategy=strategy)
    assert interrupted == ["cancelled"] * 3
    monkeypatch.undo()
    assert "null:16" in wh.plan(g, "null:16", strategy=strategy).summary()


def test_ctrl_c_stops_planning_where_another_thread_gets_the_signal(interrupted):
    g, over = gpt(2), threading.Event()
    other = threading.Thread(target=over.wait)
    other.start()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with pytest.raises(KeyboardInterrupt):
            wh.plan(g, "null:16", strategy="replica(2) > pipeline(2, micro_batches=8) > split(4)")
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        over.set()
        other.join()
    assert interrupted == ["cancelled"]


def test_ctrl_c_stops_a_proof(request, monkeypatch):
    plan = wh.plan(gpt(2), "null:8", strategy="replica(2) > pipeline(2, micro_batches=8) > split(2)")
    ends = request.getfixturevalue("interrupted")
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            plan.prove()
    assert ends == ["cancelled"] * 2
    monkeypatch.undo()
    assert plan.prove()["verdict"] == "proven"


def test_ctrl_c_stops_the_planning_of_another_batch(request, monkeypatch):
    """The job goes on from where it was."""
    batch = lambda n: dict(tokens=np.zeros((n, 128), np.int32), targets=np.zeros((n, 128), np.int32))
    job = wh.plan(gpt(), "null:8", strategy="replica(2) > pipeline(2, micro_batches=8) > split(2)").start()
    job.eval(**batch(64))
    ends = request.getfixturevalue("interrupted")
    for n in (33, 34):
        with pytest.raises(KeyboardInterrupt):
            job.eval(**batch(n))
    assert ends == ["cancelled"] * 2
    job.eval(**batch(64))  # no new size: nothing to plan
    monkeypatch.undo()
    assert len(job.eval(**batch(33))) > 0 and job.iteration == 0


def test_more_micro_batches_than_samples():
    for arguments in (dict(accumulation=65), dict(accumulation=1_000_000), dict(accumulation=1 << 31 - 1), dict(strategy="pipeline(2, micro_batches=1000000)")):
        with pytest.raises(wh.InvalidArgument, match="micro-batches of a batch of 64 sample"):
            wh.plan(gpt(2), "null:2", **arguments)
    with pytest.raises(wh.InvalidArgument, match="'accumulation' is 4611686018427387904"):
        wh.plan(gpt(2), "null:2", accumulation=1 << 62)


@pytest.mark.parametrize("options", [dict(accumulation=2), dict(devices="cpu:2", strategy="split(2)", accumulation=2)])
def test_a_softmax_along_the_batch_has_no_micro_batches(options):
    """Whether the op is cut or not: its gradient needs the sum over all samples in the body of the step."""
    g = wh.Graph("listwise")
    with g:
        scores = wh.nn.linear(wh.input("x", (8, 4)), 1).reshape(1, 8)
        loss = wh.ops.cross_entropy(scores, wh.ops.fill((1,), value=3, dtype="i32"))[0].sum()
        g.minimize(loss, wh.SGD(0.1))
    with pytest.raises(wh.InvalidArgument, match=r"cross_entropy.*needs all samples of 'reshape' at once, which .*micro-batches do not have"):
        wh.plan(g, **options)


def test_without_a_thread_to_plan_on_it_is_planned_here(request, monkeypatch):
    """Planning has a thread of its own only so that Ctrl-C is seen; without one Ctrl-C is seen when it has ended."""
    def none(self):
        raise RuntimeError("can't start new thread")
    monkeypatch.setattr("threading.Thread.start", none)
    batch = lambda n: dict(tokens=np.zeros((n, 128), np.int32), targets=np.zeros((n, 128), np.int32))
    job = wh.plan(gpt(), "null:1", strategy="local").start()
    assert len(job.eval(**batch(33))) > 0
    with pytest.raises(wh.InvalidArgument, match="replica"):
        wh.plan(gpt(), "null:1", strategy="replica(3)")
    request.getfixturevalue("interrupted")
    with pytest.raises(KeyboardInterrupt):
        wh.plan(gpt(), "null:1", strategy="local")
    with pytest.raises(KeyboardInterrupt):
        job.eval(**batch(31))
    monkeypatch.undo()
    assert len(job.eval(**batch(33))) > 0


def test_inputs_say_what_their_integers_may_be():
    g = wh.Graph()
    with g:
        t, i, c, n = (wh.input(name, (6, 4), wh.int32) for name in ("t", "i", "c", "n"))
        table = wh.parameter("table", (50, 4), wh.normal(1))
        looked = wh.ops.embedding(table, t.reshape(-1)).reshape(6, 16)
        gathered = wh.ops.gather(table, wh.ops.cast(i, dtype="i64")).reshape(6, 16)
        hot = wh.ops.one_hot(c, depth=7).reshape(6, 28)
        both = wh.ops.embedding(wh.parameter("small", (9, 4), wh.normal(1)), t).reshape(6, 16)
        parts = [wh.nn.linear(x, 3) for x in (looked, gathered, hot, both, wh.ops.cast(n, dtype="f32"))]
        g.minimize(wh.ops.square(sum(parts[1:], parts[0])).mean(), wh.SGD(0.1))
    inputs = wh.plan(g, devices="cpu:1").to_dict()["entries"][0]["inputs"]
    assert {x["name"]: x["limit"] for x in inputs} == {"t": 9, "i": 50, "c": 7, "n": 0}


@pytest.mark.parametrize("precision", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("devices, strategy, options", [("cpu:2", "replica", dict(zero=1)), ("cpu:4", "replica(2) > split(2)", {}),
                                                        ("cpu:4", "pipeline(2, micro_batches=2) > replica(2)", dict(recompute="full", offload="state"))])
def test_a_plan_in_float64_is_the_same_plan_without_rounding(precision, devices, strategy, options):
    def model():
        g = wh.Graph("wide")
        with g:
            x, y = wh.input("x", (8, 6)), wh.input("y", (8,), wh.int32)
            h = wh.nn.layer_norm(wh.ops.gelu(wh.nn.linear(x, 8)))
            g.minimize(wh.nn.cross_entropy(wh.nn.linear(h, 4), y), wh.AdamW(0.01))
        return g
    plan = wh.plan(model(), devices=devices, strategy=strategy, precision=precision, **options)
    wide = plan.in_float64()
    given, made = (p.to_dict()["entries"][0] for p in (plan, wide))
    names = lambda entry: [[i["name"] for i in s["instructions"]] for p in entry["programs"] for s in p["segments"]]
    assert names(given) == names(made)
    assert not any(b["dtype"] in ("f32", "bf16", "f16") for p in made["programs"] for b in p["buffers"])
    job, one = wide.start(), wh.plan(model(), devices="ref:1", precision="f64").start()
    q = np.random.default_rng(0)
    for _ in range(3):
        batch = dict(x=q.standard_normal((8, 6)), y=q.integers(0, 4, 8).astype(np.int32))
        assert abs(job.step(**batch) - one.step(**batch)) < 1e-13
    assert all(np.abs(job.read(name) - one.read(name)).max() < 1e-9 for name in one.parameters())


def test_split_weights_have_no_float64():
    g = wh.Graph("halves")
    with g:
        g.minimize(wh.nn.linear(wh.input("x", (4, 3)), 2).mean(), wh.SGD(0.1, split_master_weights=True))
    with pytest.raises(wh.Unimplemented, match="two halves"):
        wh.plan(g, devices="cpu:1", precision="bf16").in_float64()


def test_a_machine_is_measured_and_a_plan_keeps_its_figures(tmp_path):
    found = wh.probe("ref:2")
    assert [d["kind"] for d in found["devices"]] == ["ref", "ref"] and found["devices"][0]["flops_per_second"]["f32"]
    assert [(link["from"], link["to"]) for link in found["links"]] == [(0, 1)] and found["links"][0]["bytes_per_second"] > 0
    (tmp_path / "here.json").write_text(json.dumps(found, indent=2))
    seconds = []
    for profile in (None, found, tmp_path / "here.json", {"device.flops_per_second": 1e3, "device.bytes_per_second": 1e3}):
        g = wh.Graph()
        with g:
            x = wh.input("x", (8, 64))
            g.output("y", wh.nn.linear(x, 64))
        seconds.append(wh.estimate(g, "ref:2", strategy="replica", profile=profile)["seconds"])
        wh.plan(g, "ref:2", strategy="replica", profile=profile)
    assert seconds[1] == seconds[2] and seconds[3] > 10 * seconds[0] and seconds[3] > 10 * seconds[1]
    for bad, said in (({"link": 3}, "no figure 'link'"), ({"passes": -1}, "expected a number from 0"), ([3], "profile")):
        with pytest.raises(wh.InvalidArgument, match=said):
            wh.plan(g, "ref:2", profile=bad)
    with pytest.raises(wh.Unimplemented, match="null devices are not probed"):
        wh.probe("null:2")


def test_a_model_is_profiled_and_a_plan_goes_by_it(tmp_path):
    def model(width=64):
        g = wh.Graph("wide")
        with g:
            x = wh.input("x", (8, width))
            g.minimize(wh.ops.square(wh.nn.linear(x, 2 * width)).mean(), wh.SGD(.1))
        return g

    found = wh.profile(model(), "ref:2", samples=(8, 4), seconds=.01)
    assert found["schema"] == "whale.profile/1" and [s["samples"] for s in found["devices"][0]["steps"]] == [4, 8]
    (tmp_path / "m.profile.json").write_text(json.dumps(found))
    seconds = [wh.estimate(model(), "ref:2", strategy="replica", profile=p)["seconds"] for p in (None, found, tmp_path / "m.profile.json")]
    assert seconds[0] != seconds[1] == seconds[2]
    assert wh.plan(model(), "ref:2", strategy="replica", profile=found).start(seed=0).step(x=np.zeros((8, 64), np.float32)) is not None
    found["devices"][0]["ops"][0]["points"][0]["seconds"] = -1
    with pytest.raises(wh.InvalidArgument, match="'seconds' -1"):
        wh.plan(model(), "ref:2", profile=found)
    with pytest.raises(wh.Unimplemented, match="null devices are not profiled"):
        wh.profile(model(), "null:1")
    with pytest.raises(wh.NotFound):
        wh.import_profile(tmp_path / "nothing")


def test_ranks_measure_alike():
    found = on_each(wh.worlds(2), lambda world: wh.probe("ref:2", world=world))
    assert found[0] == found[1] and [d["rank"] for d in found[0]["devices"]] == [0, 1]


@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize("strategy", ["split(3) > split(2, shares=[3,1])", "split(2, shares=[3,1]) > split(3)"])
def test_members_without_what_is_gathered_cut_products_like_the_others(strategy, chunks):
    """Two heads on six devices: some have none, and nothing to gather, of a product whose result they add up with the others."""
    g = wh.Graph("heads")
    with g:
        context, ids, table = wh.input("context", (8, 5, 8)), wh.input("ids", (8, 5), wh.int32), wh.parameter("table", (7, 8), wh.normal(0.3))
        x = wh.nn.attention(wh.nn.linear(wh.ops.embedding(table, ids), 8), 2, context=context)
        g.minimize(wh.ops.square(wh.nn.linear(x, 8)).mean(), wh.AdamW(0.1))
    assert wh.plan(g, devices="null:6", strategy=strategy, matmul_chunks=chunks).prove()["verdict"] == "proven"
