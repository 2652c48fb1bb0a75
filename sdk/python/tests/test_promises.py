"""What docs/promises.md says of interrupts and of indices, from Python."""

import contextlib
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import whale as wh

TRIES = 200


@pytest.fixture
def alarms():
    """A timer whose signal is Ctrl-C to Python: the same handler."""
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def model(width=192):
    g = wh.Graph()
    with g:
        x, y = wh.input("x", (32, 16)), wh.input("y", (32,), wh.int32)
        h = x
        for _ in range(4):
            h = wh.ops.tanh(wh.nn.linear(h, width))
        g.minimize(wh.nn.cross_entropy(wh.nn.linear(h, 5), y), wh.AdamW(1e-3))
    return g


def batch(iteration):
    rng = np.random.default_rng(iteration)
    return {"x": rng.standard_normal((32, 16), np.float32), "y": rng.integers(0, 5, 32).astype(np.int32)}


def state(job):
    return {row["name"]: job.read(row["name"]) for row in job.variables()}


@pytest.mark.parametrize("devices, strategy", [("cpu:2", "replica(2)"), ("ref:2", "pipeline(2, micro_batches=2)")])
def test_an_interrupt_says_whether_the_step_was_applied(devices, strategy, alarms):
    tries = TRIES if devices.startswith("cpu") else TRIES // 10
    plan = wh.plan(model(192 if devices.startswith("cpu") else 24), devices=devices, strategy=strategy)
    reference = plan.start(seed=1)
    wanted, losses = [state(reference)], []
    start = time.perf_counter()
    for i in range(tries + 1):
        losses.append(reference.step(**batch(i)))
        wanted.append(state(reference))
    seconds = (time.perf_counter() - start) / (tries + 1)

    job, rng = plan.start(seed=1), random.Random(7)
    outcomes = {"applied": 0, "not applied": 0, "outside": 0, "none": 0}
    for _ in range(tries):
        before = job.iteration
        given = batch(before)
        try:
            try:
                alarms(rng.uniform(1e-5, 1.2 * seconds))
                loss = job.step(**given)
                alarms(0)
            except wh.Interrupted as stop:
                alarms(0)
                outcomes["applied" if stop.applied else "not applied"] += 1
                assert stop.iteration == before + stop.applied
                assert job.iteration == stop.iteration and job.updates == stop.iteration
                assert ("not applied" in str(stop)) == (not stop.applied)
            else:
                outcomes["none"] += 1
                assert job.iteration == before + 1 and loss == losses[before]
        except KeyboardInterrupt as stop:  # in this loop, or before the step
            alarms(0)
            assert not isinstance(stop, wh.Interrupted)
            outcomes["outside"] += 1
        found = state(job)
        assert all(np.array_equal(found[name], value) for name, value in wanted[job.iteration].items()), outcomes
    assert outcomes["applied"] + outcomes["not applied"] > 0, outcomes
    assert job.iteration <= tries
    job.step(**batch(job.iteration))  # and it goes on


def test_an_interrupted_evaluation_changes_nothing(alarms):
    g = wh.Graph()
    with g:
        x = wh.input("x", (512, 512), batch_dim=-1)
        h, w = x, wh.parameter("w", (512, 512), wh.normal(0.01))
        for _ in range(12):
            h = wh.ops.tanh(h @ w)
        g.output("y", h)
    job = wh.plan(g, devices="ref:1").start()  # several seconds a run
    before = job.read("w")
    alarms(0.3)
    with pytest.raises(wh.Interrupted) as stop:
        job.eval("y", x=np.ones((512, 512), np.float32))
    assert not stop.value.applied and "evaluation" in str(stop.value)
    np.testing.assert_array_equal(job.read("w"), before)


def lookup(ids_of=lambda ids: ids):
    g = wh.Graph()
    with g:
        ids, y = wh.input("ids", (6, 4), wh.int32), wh.input("y", (6,), wh.int32)
        h = wh.ops.reduce_sum(wh.nn.embedding(ids_of(ids), 10, 8), axes=[1])
        g.minimize(wh.nn.cross_entropy(wh.nn.linear(h, 3), y), wh.Adam(1e-2))
    return g


@pytest.mark.parametrize("devices, strategy", [("cpu:1", ""), ("cpu:2", "split(2)"), ("ref:2", "replica(2, shares=[2,1])")])
def test_an_id_or_label_out_of_range_names_where_it_is(devices, strategy):
    job = wh.plan(lookup(), devices=devices, strategy=strategy).start()
    ids, y = np.arange(24, dtype=np.int32).reshape(6, 4) % 10, np.arange(6, dtype=np.int32) % 3
    job.step(ids=ids, y=y)
    before = state(job)
    bad = ids.copy()
    bad[4, 1] = 10
    with pytest.raises(wh.InvalidArgument, match=r"input 'ids' has the value 10 at \[4, 1\].*0 to 9"):
        job.step(ids=bad, y=y)
    with pytest.raises(wh.InvalidArgument, match=r"input 'y' has the value -1 at \[2\].*0 to 2 or -100"):
        job.step(ids=ids, y=np.array([0, 1, -1, 0, -100, 2], np.int32))
    after = state(job)
    assert job.iteration == 1 and all(np.array_equal(after[name], value) for name, value in before.items())
    assert np.isfinite(job.step(ids=ids[:3], y=y[:3]))  # a smaller batch
    with pytest.raises(wh.InvalidArgument, match=r"at \[1, 1\]"):
        job.step(ids=bad[3:5], y=y[:2])


def test_a_computed_index_out_of_range_names_the_op():
    job = wh.plan(lookup(lambda ids: ids * 2), devices="cpu:2").start()
    ids, y = np.arange(24, dtype=np.int32).reshape(6, 4) % 5, np.zeros(6, np.int32)
    job.step(ids=ids, y=y)
    with pytest.raises(wh.WhaleError, match="an index of 10 at") as error:
        job.step(ids=ids + 1, y=y)
    assert isinstance(error.value, wh.OutOfRange) and error.value.code == "OUT_OF_RANGE" and error.value.damage == "step" and "embedding" in error.value.op
    assert job.iteration == 1
    job.step(ids=ids, y=y)


FORKED = {"iteration": lambda job: job.iteration, "updates": lambda job: job.updates, "learning_rate": lambda job: job.learning_rate,
          "set": lambda job: setattr(job, "learning_rate", 0.1), "step": lambda job: job.step(**batch(1)), "eval": lambda job: job.eval(**batch(1)),
          "read": lambda job: job.read(job.variables()[0].name), "memory": lambda job: job.memory(0), "save": lambda job: job.save("never"),
          "load": lambda job: job.load("never"), "trace": lambda job: job.trace(), "timeline": lambda job: job.timeline(),
          "report": lambda job: job.report()}


@pytest.mark.parametrize("call", FORKED)
def test_a_child_of_fork_is_told_that_the_job_is_its_parents(call):
    import os
    job = wh.plan(model(8), devices="cpu:2").start()
    job.step(**batch(0))
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            FORKED[call](job)
            os._exit(1)
        except wh.FailedPrecondition as e:
            os._exit(0 if "fork" in str(e) else 2)
        except BaseException:
            os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert job.iteration == 1 and job.step(**batch(1)) > 0


@pytest.mark.parametrize("rate", [1e31, 1e300, -0.1, float("inf"), float("nan")])
def test_a_learning_rate_is_what_an_optimizer_takes(rate):
    job = wh.plan(model(8), devices="ref:1").start()
    with pytest.raises(wh.InvalidArgument, match="learning_rate.*from 0 to 1e\\+30"):
        job.learning_rate = rate
    job.learning_rate = 1e30


def test_a_plan_beyond_the_machines_memory_is_refused_before_any_is_taken():
    g = wh.Graph("huge")
    with g:
        g.minimize(wh.nn.linear(wh.input("x", (4, 10**6)), 10**6).mean(), wh.SGD(0.1))
    for devices in ("cpu:2", "ref:2"):
        with pytest.raises(wh.WhaleError, match="2 devices of the plan of 'huge' need .* GB .* are there .*zero 1 to 3") as e:
            wh.plan(g, devices=devices).start()
        assert e.value.code == "RESOURCE_EXHAUSTED" and e.value.device == 0


def test_nothing_is_saved_from_null_devices(tmp_path):
    plan = {devices: wh.plan(model(8), devices=devices) for devices in ("ref:1", "null:2")}
    good = plan["ref:1"].start()
    good.step(**batch(0))
    good.save(tmp_path / "c")
    files = {f.name: f.read_bytes() for f in (tmp_path / "c").iterdir()}
    job = plan["null:2"].start()
    job.load(tmp_path / "c")
    with pytest.raises(wh.FailedPrecondition, match="device 0 of the plan is 'null.*computes nothing") as e:
        job.save(tmp_path / "c")
    assert e.value.device == 0
    with pytest.raises(wh.FailedPrecondition):
        job.save(tmp_path / "new")
    assert files == {f.name: f.read_bytes() for f in (tmp_path / "c").iterdir()} and not (tmp_path / "new").exists()


CAST = [float("nan"), float("-inf"), float("inf"), -0.9, 0.9, -1.5, 3e9, -3e9, 4294967296.0, 1e30, 255.9, 256.0, -129.0, 65536.0, 2147483520.0, 5.5]


@pytest.mark.parametrize("devices, precision", [("cpu:1", None), ("cpu:2", None), ("cpu:1", "bfloat16"), ("ref:1", None), ("ref:1", "float64")])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8", "int8", "bool"])
def test_a_cast_to_integers_saturates_and_nan_is_the_lowest(dtype, fused, devices, precision):
    kind = np.dtype(dtype)
    g = wh.Graph()
    with g:
        x = wh.input("x", (len(CAST),))
        y = (x * 1.0 if fused else x).astype(dtype)
        g.output("y", y if dtype == "bool" or not fused else wh.ops.maximum(y, y))
    x = np.array(CAST, np.float32)
    got = wh.plan(g, devices=devices, precision=precision).start().eval(x=x)["y"]
    if dtype == "bool":
        want = x != 0
    else:
        least, most = int(np.iinfo(kind).min), int(np.iinfo(kind).max)
        if precision == "bfloat16" and fused:
            pytest.skip("where products are rounded is the plan's")
        want = np.array([least if v != v else most if v >= most else least if v <= least else int(v) for v in x.tolist()], kind)
    np.testing.assert_array_equal(np.asarray(got), want)


@pytest.mark.parametrize("devices", ["cpu:1", "ref:1"])
@pytest.mark.parametrize("index", [float("nan"), float("-inf"), float("inf"), 4294967296.0, 3e9])
def test_an_index_from_a_float_that_is_none_is_out_of_range(index, devices):
    g = wh.Graph()
    with g:
        table = wh.parameter("table", (5, 2), wh.ones())
        g.minimize(wh.ops.square(wh.ops.gather(table, wh.input("x", (4,)).astype(wh.int32))).mean(), wh.SGD(0.1))
    job = wh.plan(g, devices=devices).start()
    with pytest.raises(wh.OutOfRange, match="an index of (-2147483648|2147483647) at"):
        job.step(x=np.array([0, 1, 2, index], np.float32))
    assert (job.read("table") == 1).all() and job.iteration == 0


def test_cores_that_are_not_there_are_refused():
    plan = wh.plan(model(8), devices="cpu@4095")
    with pytest.raises(wh.InvalidArgument, match=r"core 4095; it may on \d"):
        plan.start()
    assert wh.plan(model(8), devices="cpu:1").start(pin=False).step(**batch(0)) > 0


def test_an_interrupt_while_a_handle_is_collected_is_not_lost():
    """Nothing of Python runs then: in __del__ the KeyboardInterrupt would be printed as ignored. The handle's release function here raises the signal."""
    from whale import _library
    before, handlers = len(_library._finalizers), signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for way in ("collected", "closed"):
            handle = _library.Handle(int(signal.SIGINT), "raise")  # the C library's raise(), called as raise(SIGINT)
            with pytest.raises(KeyboardInterrupt):
                if way == "closed":
                    handle.close()
                del handle
                for _ in range(10):
                    pass
        calls = []
        handle = _library.Handle(int(signal.SIGINT), "raise")
        signal.signal(signal.SIGINT, lambda *_: calls.append(1))
        handle.close(), handle.close()
        del handle
        assert calls == [1] and len(_library._finalizers) == before
    finally:
        signal.signal(signal.SIGINT, handlers)


def test_nothing_that_c_calls_is_python():
    """Ctrl-C inside of a callback is printed as ignored, and what the callback was to free is lost."""
    import ctypes
    import sys
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "whale" and name != "whale._abi":
            assert not [each for each, value in vars(module).items() if isinstance(value, ctypes._CFuncPtr)], name


def test_null_devices_beside_others_are_refused():
    g = wh.Graph()
    with g:
        x = wh.input("x", (6, 4))
        g.minimize(wh.ops.square(wh.nn.linear(x, 4)).mean(), wh.SGD(0.1))
    wh.plan(g, devices="null:2").start()
    mixed = wh.plan(g, devices="cpu:2,null:1")  # to look at
    with pytest.raises(wh.WhaleError, match="device 2 of the plan is 'null' beside 'cpu.*compute nothing") as e:
        mixed.start()
    assert e.value.device == 2


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_a_nan_in_the_data_is_an_error_and_changes_nothing(precision):
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((12, 8)).astype(np.float32), rng.integers(0, 4, 12).astype(np.int32)
    bad = x.copy()
    bad[3, 2] = np.nan

    def model(activation, layer):
        g = wh.Graph()
        with g:
            h = activation(layer(wh.input("x", (12, 8))))
            g.minimize(wh.nn.cross_entropy(wh.nn.linear(h, 4), wh.input("y", (12,), wh.int32)), wh.AdamW(1e-2))
        return g

    linear = lambda t: wh.nn.linear(t, 16)
    pooled = lambda t: wh.ops.max_pool(wh.nn.linear(t, 16).reshape(12, 16, 1), window=[4])[0].reshape(12, -1)
    for activation in (wh.ops.relu, wh.ops.gelu, wh.ops.silu, wh.ops.tanh, wh.ops.sigmoid, lambda t: wh.ops.maximum(t, 0.0 * t)):
        for layer in (linear, pooled):
            for devices, fusion in (("cpu:1", True), ("cpu:2", True), ("cpu:1", False)):
                job = wh.plan(model(activation, layer), devices=devices, precision=precision, fusion=fusion).start(seed=1)
                job.step(x=x, y=y)
                before = {v["name"]: job.read(v["name"]).tobytes() for v in job.variables()}
                if precision == "float16":  # an overflow: no error, and nothing is changed
                    job.step(x=bad, y=y)
                else:
                    with pytest.raises(wh.WhaleError, match="loss of step 1 is not finite; the step was not applied"):
                        job.step(x=bad, y=y)
                assert {v["name"]: job.read(v["name"]).tobytes() for v in job.variables()} == before
                assert np.isfinite(job.step(x=x, y=y))


@pytest.mark.parametrize("strategy, devices, options", [
    ("replica > split(2)", 4, {}), ("split(2) > replica", 4, {}), ("replica", 2, {"zero": 3}), ("replica(2) > split(2)", 4, {"zero": 1}), ("replica(2) > pipeline(2, micro_batches=2)", 4, {}),
    ("pipeline(2, micro_batches=4)", 2, {}), ("pipeline(2, micro_batches=4, schedule=zb_h1)", 2, {}), ("stages", 3, {})])
@pytest.mark.parametrize("optimizer", [wh.SGD(0.1), wh.Lamb(1e-2)], ids=["sgd", "lamb"])
def test_a_nan_changes_nothing_on_any_device_of_any_plan(strategy, devices, options, optimizer):
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((8, 8)).astype(np.float32), rng.standard_normal((8, 4)).astype(np.float32)
    bad = y.copy()
    bad[3, 2] = np.nan
    g = wh.Graph()
    stage = wh.stage if strategy == "stages" else contextlib.nullcontext
    with g, wh.pipeline(micro_batches=4) if strategy == "stages" else contextlib.nullcontext():
        with stage():
            h = wh.ops.tanh(wh.nn.linear(wh.input("x", (8, 8)), 16))
        with stage():
            h = wh.nn.linear(h, 4)
        with stage():  # the loss is on a device that has nothing to update
            g.minimize(wh.ops.square(h - wh.input("y", (8, 4))).mean(), optimizer, clip_norm=1.0 if strategy == "stages" else 0.0)
    plan = wh.plan(g, devices=f"cpu:{devices}", strategy=None if strategy == "stages" else strategy, **options)
    job = plan.start(seed=1)
    job.step(x=x, y=y)
    before = {v["name"]: [job.read(v["name"], copy=k).tobytes() for k in range(len(v["copies"]))] for v in job.variables()}
    with pytest.raises(wh.WhaleError, match="loss of step 1 is not finite; the step was not applied"):
        job.step(x=x, y=bad)
    assert {v["name"]: [job.read(v["name"], copy=k).tobytes() for k in range(len(v["copies"]))] for v in job.variables()} == before
    assert np.isfinite(job.step(x=x, y=y))


def whole_and_half(loss_of):
    """The loss of a model of eight rows of 36 each on 8 samples and on 4."""
    g = wh.Graph("rows")
    with g:
        x = wh.input("x", (8, 6))
        rows = wh.ops.square(wh.ops.matmul(x, wh.parameter("w", (6, 1), wh.ones()))).reshape(-1)
        g.minimize(loss_of(rows), wh.SGD(0.0))
    job = wh.plan(g, devices="ref:1", precision="float64").start(pin=False)
    return [job.step(x=np.ones((samples, 6), np.float32)) for samples in (8, 4)]


def ones(shape=(8,)):
    return wh.ops.fill(shape, value=1.0)


def weighted(rows, weights):
    return (rows * weights).sum() / weights.sum()


@pytest.mark.parametrize("loss_of,half", [
    (lambda rows: rows.mean(), 36), (lambda rows: rows.sum() / 8, 18), (lambda rows: rows.sum() / rows.shape[0], 18),
    (lambda rows: rows.sum() / ones().sum(), 18), (lambda rows: weighted(rows, ones()), 36),
    (lambda rows: (rows * ones()).sum() / ones().sum(), 18), (lambda rows: weighted(rows, ones((8, 1)).reshape(-1)), 36),
    (lambda rows: rows.sum() / wh.ops.broadcast_to(wh.parameter("p", (1,), wh.ones()), shape=(8,)).sum(), 18),
    (lambda rows: weighted(rows, wh.ops.broadcast_to(wh.parameter("p", (1,), wh.ones()), shape=(8,))), 36)])
def test_what_follows_a_smaller_batch(loss_of, half):
    """The rule of docs/semantics.md, section 2: a source follows the batch where an op lays it along samples."""
    assert whole_and_half(loss_of) == pytest.approx([36, half])


@pytest.mark.parametrize("loss_of,op", [
    (lambda rows: wh.ops.matmul(rows.reshape(8, 1), rows.reshape(1, 8)).mean(), "matmul"), (lambda rows: wh.ops.softmax(rows).sum(), "softmax"),
    (lambda rows: (rows * wh.parameter("p", (8,), wh.ones())).sum(), "mul")])
def test_a_model_of_whole_batches_says_so(loss_of, op):
    with pytest.raises(wh.Unimplemented, match=rf"test_promises.py:\d+: op '[^']*' \({op}\).*holds for its batch of 8 only. Feed whole batches of 8"):
        whole_and_half(loss_of)


@pytest.mark.parametrize("what", ["plan", "estimate", "step"])
def test_an_exception_of_the_programs_own_handler_waits_for_the_call(what):
    """signal.alarm and handlers of SIGTERM raise anywhere; the call went on with memory that had been freed, and the process died."""
    program = f"""
import random, signal, numpy as np, whale as wh
class Late(Exception): pass
def late(*_): raise Late
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background of a shell begins with it ignored
signal.signal(signal.SIGALRM, late)
def graph():
    with wh.Graph("m") as g:
        h = wh.input("x", (8, 6))
        for _ in range(6):
            h = wh.ops.tanh(wh.nn.linear(h, 24))
        g.minimize(wh.ops.square(h).mean(), wh.Adam(0.01))
    return g
random.seed(1)
late_ones = 0
job = wh.plan(graph(), "cpu:2", strategy="replica(2)").start(seed=1)
for i in range(150):
    g = graph()
    try:
        signal.setitimer(signal.ITIMER_REAL, 2e-4 + random.random() * 8e-3)
        if {what!r} == "step":
            wh.plan(g, "cpu:2", strategy="replica(2)", zero=3).start(seed=1).step(x=np.ones((1 + i % 8, 6)))
        else:
            getattr(wh, {what!r})(g, "cpu:2", strategy="replica(2)", zero=3)
        signal.setitimer(signal.ITIMER_REAL, 0)
    except Late:
        late_ones += 1
signal.setitimer(signal.ITIMER_REAL, 0)
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
print("alive", late_ones, np.isfinite(job.step(x=np.ones((8, 6)))))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout.startswith("alive") and done.stdout.strip().endswith("True"), done.stderr[-2000:]
    assert int(done.stdout.split()[1]) > 0
