"""Ranks that are given what their devices read of a batch: the same results as of whole batches, bit by bit."""

import contextlib
import re

import numpy as np
import pytest
from test_worlds import equal, graph, on_each

import whale as wh

RNG = np.random.default_rng(1)


def classifier():
    return graph(), {"x": RNG.standard_normal((12, 5)).astype(np.float32), "y": RNG.integers(0, 3, 12).astype(np.int32)}


def image(factor, nested=False, batch=4):
    """Two convolutions cut by height or width, over all devices or in each of two replicas."""
    g = wh.Graph("image")
    with g:
        x, y = wh.input("x", (batch, 16, 8, 1)), wh.input("y", (batch, 2))
        with contextlib.ExitStack() as stack:
            if nested:
                stack.enter_context(wh.replica(2))
            with wh.split(2, factor=factor):
                h = wh.ops.relu(wh.nn.conv2d(wh.ops.relu(wh.nn.conv2d(x, 4, 3)), 4, 3))
        g.minimize(wh.nn.mse(wh.nn.linear(h.reshape((batch, -1)), 2), y), wh.SGD(0.1))
    return g, {"x": RNG.standard_normal((batch, 16, 8, 1)).astype(np.float32), "y": RNG.standard_normal((batch, 2)).astype(np.float32)}


def staged():
    """Samples are read by the first stage, labels by the last."""
    g = wh.Graph("staged")
    with g, wh.pipeline(2, micro_batches=3):
        x, y = wh.input("x", (12, 5)), wh.input("y", (12,), wh.int32)
        with wh.stage():
            h = wh.ops.relu(wh.nn.linear(x, 8))
        with wh.stage():
            logits = wh.nn.linear(h, 3)
            g.output("logits", logits)
            g.minimize(wh.nn.cross_entropy(logits, y), wh.AdamW(1e-2))
    return g, classifier()[1]


def weighted():
    """An input that counts no samples, and one whose samples stand second."""
    g = wh.Graph("weighted")
    with g:
        x, w = wh.input("x", (3, 8), batch_dim=1), wh.input("w", (3, 2), batch_dim=-1)
        g.minimize((wh.ops.matmul(x, wh.nn.linear(w, 4), transpose_a=True) * wh.parameter("p", (4,), wh.ones())).mean(), wh.SGD(0.1))
    return g, {"x": RNG.standard_normal((3, 8)).astype(np.float32), "w": RNG.standard_normal((3, 2)).astype(np.float32)}


def cut(data, slices, batch=None):
    return {name: wh.Local([data[name][box] for box in boxes], batch) for name, boxes in slices.items()}


def train(world, made, devices, local, smaller=None, **options):
    g, data = made
    with wh.plan(g, devices=devices, world=world, **options).start(seed=3) as job:
        slices = job.slices() if local else None
        give = lambda data, slices, batch=None: cut(data, slices, batch) if local else data
        losses = [job.step(**give(data, slices)) for _ in range(3)]
        if smaller:
            less = {name: value[:smaller] for name, value in data.items()}
            losses.append(job.step(**give(less, job.slices(smaller) if local else None, smaller)))
        all_of = give(data, job.slices(run="eval") if local else None)
        evaluated = [job.eval(**all_of)]
        if any(port.name == "logits" for port in job.outputs()):  # which need no labels
            evaluated.append(job.eval(["logits"], x=all_of["x"]))
        return losses, {each.name: job.read(each.name) for each in job.variables()}, evaluated, slices


@pytest.mark.parametrize("strategy, devices, more", [
    ("replica", "ref:3", {"smaller": 7}), ("replica(3, shares=[3,1,2])", "ref:3", {"smaller": 5}), ("replica", "ref:2", {"accumulation": 3, "smaller": 8}),
    ("pipeline(2, micro_batches=3)", "cpu:2", {"smaller": 7}), ("pipeline(2, micro_batches=2) > replica(2)", "lag:4", {}), ("replica(2) > split(2)", "ref:4", {}),
    ("replica(2) > pipeline(2, micro_batches=2)", "ref:4", {"zero": 1}), ("split", "ref:2", {}), ("replica(2, by=micro_batch)", "ref:2", {"accumulation": 4, "exact": True})])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_slices_train_what_whole_batches_train(strategy, devices, more, ranks):
    if ranks > int(devices[-1]):
        pytest.skip("fewer devices than ranks")
    made = classifier()
    alone = train(None, made, devices, False, strategy=strategy, **more)
    for told in on_each(wh.worlds(ranks), lambda world: train(world, made, devices, True, strategy=strategy, **more)):
        assert not isinstance(told, Exception), told
        assert equal(told[:3], alone[:3])


def test_each_rank_is_told_its_samples():
    def of(strategy, devices, ranks, batch=None, **more):
        def ask(world):
            with wh.plan(graph(), devices=devices, strategy=strategy, world=world, **more).start() as job:
                return [job.slices(batch)["y"], job.slices(batch)["x"]]
        return [[[(box[0].start, box[0].stop) for box in boxes] for boxes in told] for told in on_each(wh.worlds(ranks), ask)]

    assert of("replica", "ref:3", 3) == [[[(0, 4)]] * 2, [[(4, 8)]] * 2, [[(8, 12)]] * 2]
    assert of("replica", "ref:3", 2) == [[[(0, 8)]] * 2, [[(8, 12)]] * 2]
    assert of("replica", "ref:2", 2, 5) == [[[(0, 3)]] * 2, [[(3, 5)]] * 2]
    # Labels are counted before the first micro-batch too, by each device those of a half of the batch.
    assert of("replica", "ref:2", 2, accumulation=2) == [[[(0, 9)], [(0, 3), (6, 9)]], [[(3, 12)], [(3, 6), (9, 12)]]]
    assert of("replica(2, shares=[0,1])", "ref:2", 2) == [[[]] * 2, [[(0, 12)]] * 2]
    assert of("replica", "ref:2", 1) == [[[(0, 12)]] * 2]


@pytest.mark.parametrize("factor, dim, extent", [("height", 1, 16), ("width", 2, 8)])
@pytest.mark.parametrize("devices, more", [("ref:2", {}), ("lag:2", {}), ("ref:4", {"accumulation": 2})])
def test_of_images_that_are_cut_each_rank_gives_its_rows(factor, dim, extent, devices, more):
    ranks = int(devices[-1])
    made = image(factor, nested=ranks == 4)
    alone = train(None, made, devices, False, **more)
    for rank, told in enumerate(on_each(wh.worlds(ranks), lambda world: train(world, made, devices, True, **more))):
        assert not isinstance(told, Exception), told
        assert equal(told[:3], alone[:3])
        for box in told[3]["x"]:  # half of it, and the row behind the border that the window reaches
            assert (box[dim].start, box[dim].stop) == ((0, extent // 2 + 1) if rank % 2 == 0 else (extent // 2 - 1, extent))


def test_what_does_not_fit_is_named():
    made, data = graph(), classifier()[1]
    x, y = data["x"], data["y"]
    wrong = [({"x": wh.Local(x[:5]), "y": wh.Local(y[:6])}, r"the slices of rank 1 of input 'x' are f32 \[5, 5\], expected f32 \[6, 5\]: samples \[6, 12\)"),
             ({"x": wh.Local(x[6:])}, r"slices of rank 1 of input 'y' are missing: expected i32 \[6\], samples \[6, 12\)"),
             ({"x": wh.Local(x[6:], 10), "y": wh.Local(y[6:], 10)}, r"rank 1 of input 'x' are f32 \[6, 5\], expected f32 \[5, 5\]: samples \[5, 10\)"),
             ({"x": wh.Local(x[6:]), "y": wh.Local(np.full(6, 9, np.int32))}, r"input 'y' has the value 9 at \[0\] of this rank's slices")]

    def run(world):
        messages = []
        with wh.plan(made, devices="ref:2", strategy="replica", world=world).start(seed=3) as job:
            for i, (feeds, _) in enumerate(wrong):
                batch = next(iter(feeds.values())).batch or 12
                with pytest.raises(wh.InvalidArgument) as raised:
                    job.step(**(feeds if world.rank == 1 else cut(data, job.slices(batch), batch)))
                assert raised.value.rank == 1 or world.rank == 1, raised.value
                messages.append(str(raised.value))
            return messages, job.step(**cut(data, job.slices())), job.iteration

    for told in on_each(wh.worlds(2), run):
        assert not isinstance(told, Exception), told
        for message, (_, expected) in zip(told[0], wrong):
            assert re.search(expected, message), message
        assert told[2] == 1
    with wh.plan(made, devices="ref:1").start(seed=3) as job:
        alone = job.step(**data)
        assert alone == told[1]
        with pytest.raises(wh.InvalidArgument, match="'y' is a whole batch, and 'x' is whale.Local"):
            job.step(x=wh.Local(x), y=y)
        with pytest.raises(wh.InvalidArgument, match="'y' is of a batch of 6, 'x' of one of the graph"):
            job.step(x=wh.Local(x), y=wh.Local(y, 6))
        for bad in (0, -1, 2.5, True, "4"):
            with pytest.raises((wh.InvalidArgument, TypeError), match="batch"):
                job.slices(bad)
            with pytest.raises((wh.InvalidArgument, TypeError), match="batch"):
                wh.Local(x, bad)
        with pytest.raises(wh.InvalidArgument, match="at most 12"):
            job.slices(13)
        with pytest.raises(wh.InvalidArgument, match="run"):
            job.slices(run="test")
        assert repr(wh.Local([x[:3], x[3:6]], 12)) == "<whale.Local: [(3, 5), (3, 5)] of a batch of 12>"


def test_a_stage_is_given_what_it_reads():
    made = staged()
    alone = train(None, made, "ref:2", False, smaller=7)
    first, last = on_each(wh.worlds(2), lambda world: train(world, made, "ref:2", True, smaller=7))
    assert equal(first[:3], alone[:3]) and equal(last[:3], alone[:3])
    assert first[3]["y"] == [] and last[3]["x"] == [] and first[3]["x"] == [(slice(0, 12), slice(0, 5))] and last[3]["y"] == [(slice(0, 12),)]


@pytest.mark.parametrize("strategy", ["split(2, factor=sequence)", "split(2, factor=vocabulary)", "split(2)"])
def test_of_sequences_too(strategy):
    g = wh.Graph("text")
    with g:
        tokens, targets = wh.input("tokens", (4, 8), wh.int32), wh.input("targets", (4, 8), wh.int32)
        h = wh.nn.transformer_block(wh.nn.embedding(tokens, 16, 8), 2, causal=True)
        g.minimize(wh.nn.cross_entropy(wh.nn.linear(h, 16), targets), wh.SGD(0.1))
    made = g, {"tokens": RNG.integers(0, 16, (4, 8)).astype(np.int32), "targets": RNG.integers(0, 16, (4, 8)).astype(np.int32)}
    alone = train(None, made, "ref:2", False, strategy=strategy)
    for rank, told in enumerate(on_each(wh.worlds(2), lambda world: train(world, made, "ref:2", True, strategy=strategy))):
        assert not isinstance(told, Exception), told
        assert equal(told[:3], alone[:3])
        if "sequence" in strategy:
            assert told[3]["targets"] == [(slice(0, 4), slice(4 * rank, 4 * rank + 4))]


def test_samples_stand_where_the_input_has_them():
    made = weighted()
    alone = train(None, made, "ref:3", False, strategy="replica", accumulation=2)
    for told in on_each(wh.worlds(3), lambda world: train(world, made, "ref:3", True, strategy="replica", accumulation=2)):
        assert not isinstance(told, Exception), told
        assert equal(told[:3], alone[:3]) and told[3]["w"] == [(slice(0, 3), slice(0, 2))] and len(told[3]["x"]) == 2


def test_ranks_may_give_whole_batches_beside_slices():
    made = classifier()
    alone = train(None, made, "ref:2", False, strategy="replica")
    for told in on_each(wh.worlds(2), lambda world: train(world, made, "ref:2", world.rank == 1, strategy="replica")):
        assert not isinstance(told, Exception), told
        assert equal(told[:3], alone[:3])
