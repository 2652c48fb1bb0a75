"""Entries for other batch sizes: asked for with the plan, or ahead of the run; never planned in a run that may not."""

import pathlib
import subprocess
import sys

import numpy as np
import pytest

import whale as wh
from test_worlds import X, Y, graph, on_each

SIZES = {"train_batches": (5, 7, 12), "eval_batches": (3, 20)}


def planned():
    """Of the records since this was asked last, those of entries that a job planned."""
    return [row["message"] for row in wh.drain_log() if " is planned for a step" in row["message"] or " is planned for an evaluation" in row["message"]]


def batch(n):
    return {"x": np.resize(X[0], (n, 5)), "y": np.resize(Y[0], n)}


def run(job):
    return [job.step(**batch(n)) for n in (12, 7, 5)] + [job.eval(["logits"], **batch(n))["logits"].tobytes() for n in (12, 3, 20)]


@pytest.mark.parametrize("options", [{}, {"accumulation": 3}, {"strategy": "pipeline(2, micro_batches=2)"}, {"strategy": "split(2)"}], ids=str)
def test_what_is_asked_for_ahead_is_not_planned_in_a_run(options, tmp_path):
    with wh.plan(graph(), devices="ref:2", **options).start(seed=1) as job:
        planned()
        expected = run(job)
        assert planned() == [f"'classifier' is planned for {what} samples, in the run" for what in
                             ("a step of 7", "a step of 5", "an evaluation of 3", "an evaluation of 20")]
    plan = wh.plan(graph(), devices="ref:2", **options, **SIZES)
    plan.save(tmp_path / "p.plan")
    for made in plan, wh.Plan.load(tmp_path / "p.plan"):
        with made.start(seed=1, plan_in_run=False) as job:
            planned()
            assert run(job) == expected and planned() == []
    with wh.plan(graph(), devices="ref:2", **options).start(seed=1, plan_in_run=False) as job:
        job.prepare(**SIZES)
        assert planned() == [f"'classifier' is planned for {what} samples, ahead of it" for what in
                             ("a step of 7", "a step of 5", "an evaluation of 20", "an evaluation of 3")]
        job.prepare(**SIZES)
        assert run(job) == expected and planned() == []


def test_what_was_not_asked_for_is_refused_by_name():
    with wh.plan(graph(), devices="ref:2", train_batches=[5]).start(plan_in_run=False) as job:
        for call, size in (job.step, 7), (job.eval, 3):
            with pytest.raises(wh.FailedPrecondition, match=f"'classifier' has no entry '(train|eval)' of {size} samples.*train of 12, eval of 12, train of 5"):
                call(**batch(size))
        assert job.iteration == 0 and job.step(**batch(5)) > 0
        with pytest.raises(wh.InvalidArgument, match="13 samples; this plan is for at most 12"):
            job.prepare(train_batches=[13])


@pytest.mark.parametrize("wrong, said", [
    ({"train_batches": [0]}, r"'train_batches\[0\]' is 0, expected an integer 1 or more"), ({"eval_batches": [2.5]}, r"'eval_batches\[0\]' is 2.5"),
    ({"eval_batches": 3}, "'eval_batches' is 3, expected a sequence"), ({"train_batches": [13]}, "'train_batches' asks for 13 samples.* at most 12")])
def test_wrong_sizes(wrong, said):
    with pytest.raises(wh.InvalidArgument, match=said):
        wh.plan(graph(), devices="ref:2", **wrong)


def test_a_graph_that_is_not_trained_has_no_train_batches():
    with wh.Graph("forward") as g:
        g.output("y", wh.nn.linear(wh.input("x", (4, 3)), 2))
    with pytest.raises(wh.InvalidArgument, match="'train_batches'.*minimize"):
        wh.plan(g, train_batches=[2])
    with wh.plan(g, eval_batches=[2]).start(plan_in_run=False) as job:
        assert job.eval(x=np.zeros((2, 3), np.float32))["y"].shape == (2, 2)
        with pytest.raises(wh.FailedPrecondition, match="has no loss with an optimizer"):
            job.prepare(train_batches=[2])


@pytest.mark.parametrize("strategy", ["replica", "pipeline(2, micro_batches=2)"])
def test_ranks_have_them_too(strategy):
    with wh.plan(graph(), devices="ref:2", strategy=strategy).start(seed=1) as job:
        expected = run(job) + [job.step(**batch(4))]

    def both(world):
        with wh.plan(graph(), devices="ref:2", strategy=strategy, world=world, **SIZES).start(seed=1, plan_in_run=False) as job:
            job.prepare(train_batches=[4] if world.rank == 0 else [4, 6])
            found = run(job) + [job.step(**batch(4))]
            with pytest.raises(wh.FailedPrecondition, match="'classifier' has no entry 'train' of 6 samples") as refused:
                job.step(**batch(6))
            return found, refused.value.rank, job.step(**batch(4))

    planned()
    (zero, whose, last), (one, also, same) = on_each(wh.worlds(2), both)
    assert zero == one == expected and also == 0 and last == same
    assert sorted(planned()) == [f"'classifier' is planned for a step of {n} samples, ahead of it" for n in (4, 4, 6)]


def test_nothing_is_prepared_before_all_sizes_are_looked_at():
    with wh.plan(graph(), devices="ref:2").start() as job:
        before = job.entries()
        with pytest.raises(wh.InvalidArgument, match=r"eval_batches\[0\]"):
            job.prepare(train_batches=[5], eval_batches=[0])
        assert job.entries() == before


def test_arrays_of_sizes():
    plan = wh.plan(graph(), devices="ref:2", train_batches=np.array([5, 7]), eval_batches=np.array([3]))
    assert [(e.run, e.batch) for e in plan.entries()] == [("train", 12), ("eval", 12), ("train", 5), ("train", 7), ("eval", 3)]


def test_a_model_without_samples_has_no_other_sizes():
    with wh.Graph("forward") as g:
        g.output("y", wh.nn.linear(wh.input("x", (4, 3), batch_dim=-1), 2))
    with wh.plan(g).start() as job:
        before = job.entries()
        with pytest.raises(wh.InvalidArgument, match="3 samples are asked for, and no input of 'forward' counts samples"):
            job.prepare(eval_batches=[3])
        assert job.entries() == before


def test_areas_that_grow_stay_within_a_device():
    """Areas of entries before stay where they are, so that the sum counts; those of a plan's entries are one."""
    with wh.plan(graph(), devices="ref-600KB:2").start() as job:
        job.prepare(eval_batches=[10000])
        before = job.memory(0).total, job.entries()
        with pytest.raises(wh.ResourceExhausted, match="a batch of 15000 samples .'eval'. takes a larger area of device 0 .*of 600000 bytes"):
            job.prepare(eval_batches=[15000])
        assert (job.memory(0).total, job.entries()) == before
        job.prepare(eval_batches=[9000])
    with wh.plan(graph(), devices="ref:2", eval_batches=[20000, 10000]).start() as all_ahead, wh.plan(graph(), devices="ref:2", eval_batches=[20000]).start() as one:
        assert all_ahead.memory(0).total == one.memory(0).total


TOO_LARGE = """
import resource
import whale as wh
from test_worlds import graph
job = wh.plan(graph(), devices="ref:2").start()
before = job.memory(0), job.memory(1), job.entries()
mapped = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (mapped + (150 << 20), resource.RLIM_INFINITY))
try:
    job.prepare(eval_batches=[4_000_000])
    print("prepared")
except wh.ResourceExhausted:
    print((job.memory(0), job.memory(1), job.entries()) == before)
"""


def test_memory_that_one_device_gets_and_the_other_does_not_is_given_back():
    told = subprocess.run([sys.executable, "-c", TOO_LARGE], cwd=pathlib.Path(__file__).parent, capture_output=True, text=True)
    assert told.stdout.split() == ["True"], told.stdout + told.stderr
