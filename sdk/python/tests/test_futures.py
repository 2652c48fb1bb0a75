"""Planning, saving and loading beside the caller."""

import gc
import os
import re
import subprocess
import sys
import warnings
import weakref

import numpy as np
import pytest

import whale as wh
from test_worlds import X, Y, graph


def deep(layers=400):
    """Planning it takes a while."""
    with wh.Graph("deep") as g:
        h = wh.input("x", (64, 8))
        with wh.replica(), wh.pipeline(4, micro_batches=8):
            for _ in range(layers):
                h = wh.ops.relu(wh.nn.linear(h, 8))
        g.minimize(wh.ops.square(h).mean(), wh.Adam(0.1))
    return g


def planned():
    return [row["message"] for row in wh.drain_log() if row["topic"] == "plan" and "is planned for" in row["message"]]


def test_a_plan():
    future = wh.plan_async(graph(), devices="ref:2", strategy="split(2)")
    assert isinstance(future, wh.Future)
    plan = future.result()
    assert future.done() and future.result() is plan
    assert plan.serialize() == wh.plan(graph(), devices="ref:2", strategy="split(2)").serialize()
    with plan.start(seed=1) as job:
        assert job.step(x=X[0], y=Y[0]) > 0
    world = wh.world()
    assert wh.plan_async(graph(), world=world).result().world is world


def test_what_is_wrong_with_a_plan():
    with pytest.raises(wh.InvalidArgument, match="'zero' is 7"):
        wh.plan_async(graph(), zero=7)
    with pytest.raises(TypeError, match="'zeros'"):
        wh.plan_async(graph(), zeros=1)
    future = wh.plan_async(graph(), devices="ref:2", strategy="replica(3)")
    for _ in range(2):
        with pytest.raises(wh.InvalidArgument, match="replica"):
            future.result()
    assert future.done()
    with pytest.raises(wh.InvalidArgument, match="'timeout' is -1"):
        future.result(timeout=-1)


def test_a_plan_is_cancelled_or_dropped():
    planned()
    future = wh.plan_async(deep(), devices="null:8")
    with pytest.raises(TimeoutError, match="has not ended within 0 s and goes on"):
        future.result(timeout=0)
    assert not future.done()
    future.cancel()
    with pytest.raises(wh.Cancelled, match="planning was cancelled"):
        future.result()
    future = wh.plan_async(deep(), devices="null:8")
    del future
    gc.collect()
    assert planned() == []  # it did not go on


def test_the_first_of_several():
    slow, quick = wh.plan_async(deep(), devices="null:8"), wh.plan_async(graph(), devices="ref:2")
    assert wh.wait_any([slow], timeout=0) is None and wh.wait_any([slow], timeout=0.01) is None
    assert wh.wait_any([slow, quick]) is quick
    assert wh.wait_any((each for each in (quick, slow)), timeout=0) is quick
    slow.cancel()
    assert wh.wait_any([slow]) is slow  # ended, though not well
    assert wh.wait_any([slow, quick]) is slow  # of several the first in order
    for wrong, said in (([], "one future or more"), ([quick, 3], r"'futures\[1\]' is 3, expected a whale.Future"), (quick, "a sequence of futures")):
        with pytest.raises(wh.InvalidArgument, match=said):
            wh.wait_any(wrong)
    with pytest.raises(wh.InvalidArgument, match="'timeout' is 'soon'"):
        wh.wait_any([quick], timeout="soon")


def test_saving_and_loading(tmp_path):
    with wh.plan(graph(), devices="ref:2").start(seed=1) as job:
        job.step(x=X[0], y=Y[0])
        assert job.save_async(tmp_path / "a").result() is None
        before = {name: value.tobytes() for name, value in job.parameters().items()}
        expected = job.step(x=X[1], y=Y[1])
        future = job.load_async(tmp_path / "a")
        assert job.iteration == 1 and future.done()  # what begins nothing waits for it
        future.result()
        assert {name: value.tobytes() for name, value in job.parameters().items()} == before
        missing = job.load_async(tmp_path / "b")
        with pytest.raises(wh.NotFound, match="/b'"):
            missing.result()
        assert {name: value.tobytes() for name, value in job.parameters().items()} == before
        assert job.step(x=X[1], y=Y[1]) == expected
        (tmp_path / "link").symlink_to("nowhere")
        with pytest.raises(wh.InvalidArgument, match="a link that leads nowhere"):
            job.save_async(tmp_path / "link")
        with pytest.raises(wh.InvalidArgument, match="'directory' is None"):
            job.load_async(None)


def large(name, size=1500):
    with wh.Graph(name) as g:
        g.minimize(wh.ops.square(wh.nn.linear(wh.input("x", (2, size)), size)).mean(), wh.Adam(0.1))
    return wh.plan(g, devices="cpu:1").start(seed=1)


def test_while_one_is_under_way(tmp_path):
    job, x = large("busy"), np.ones((2, 1500), np.float32)

    def is_refused(call):
        saving = job.save_async(tmp_path / "a")
        try:
            done = call()  # on a busy machine the save may have ended before it
        except wh.FailedPrecondition as e:
            assert re.search("a save or a load of this (job|session) is under way", str(e))
            return True
        finally:
            saving.result()
        if hasattr(done, "cancel"):  # a load
            done.result()
        return False

    for call in lambda: job.step(x=x), lambda: job.eval(x=x), lambda: job.save(tmp_path / "b"), lambda: job.load_async(tmp_path / "a"):
        assert any(is_refused(call) for _ in range(50))
    before = job.iteration
    job.step(x=x)
    weight = next(iter(job.parameters()))
    written = job.read(weight).tobytes()
    for start in job.save_async, job.load_async:
        future = start(tmp_path / "a")
        future.cancel()
        with pytest.raises(wh.Cancelled):
            future.result()
        assert (job.iteration, job.read(weight).tobytes()) == (before + 1, written)
    loading = job.load_async(tmp_path / "a")  # the first one, whole
    job.close()
    assert loading.done() and loading.result() is None


def test_optimizer_state_that_is_left_out_is_warned_of(tmp_path):
    with wh.plan(graph(), devices="ref:2").start() as job:
        job.save(tmp_path / "a")
    plain = wh.Graph("classifier")
    with plain:
        x, y = wh.input("x", (12, 5)), wh.input("y", (12,), wh.int32)
        logits = wh.nn.linear(wh.ops.relu(wh.nn.linear(x, 8)), 3)
        plain.output("logits", logits)
        plain.minimize(wh.nn.cross_entropy(logits, y), wh.SGD(0.1))
    with wh.plan(plain, devices="ref:2").start() as job:
        future = job.load_async(tmp_path / "a")
        with pytest.warns(UserWarning, match="keeps none: it was left out") as warned:
            future.result()
        assert warned[0].filename == __file__
        job.save(tmp_path / "b")
        for first, then in ("a", "b"), ("b", "a"):  # of what is there now, it says nothing of another load
            future = job.load_async(tmp_path / first)
            while not future.done():
                pass
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                job.load(tmp_path / then)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                future.result()


def test_a_plan_is_whole_when_its_future_is_gone():
    plan = wh.plan_async(graph(), devices="ref:2").result()
    gc.collect()
    assert plan.choices() == wh.plan(graph(), devices="ref:2").choices()
    future = wh.plan_async(graph(), devices="ref:2")
    plan = future.result()
    future.cancel()
    assert plan.reshards() == wh.plan(graph(), devices="ref:2").reshards()


def test_a_job_goes_when_nobody_holds_it(tmp_path):
    job = wh.plan(graph(), devices="ref:2").start()
    job.save_async(tmp_path / "a").result()
    job.load_async(tmp_path / "a").result()
    gc.collect()
    gc.disable()
    try:
        seen = weakref.ref(job)
        del job
        assert seen() is None
    finally:
        gc.enable()


def test_a_wait_without_an_end():
    future = wh.plan_async(graph(), devices="ref:2")
    assert wh.wait_any([future], float("inf")) is future and isinstance(future.result(float("inf")), wh.Plan)


def test_a_child_process_is_told_whose_future_it_is():
    future = wh.plan_async(graph(), devices="ref:2")
    future.result()
    if (child := os.fork()) == 0:
        try:
            future.done()
        except wh.FailedPrecondition:
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("held", ["future = ", "futures.append(", "print("])
def test_a_program_that_ends_meanwhile_ends(held):
    program = f"""
import sys; sys.path.insert(0, {repr(sys.path[0])}); sys.path.insert(0, {repr(__file__.rsplit('/', 1)[0])})
import whale as wh
from test_futures import deep
futures = []
{held}wh.plan_async(deep(), devices="null:8"){')' if '(' in held else ''}
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stderr == "", (done.returncode, done.stderr)
