"""Loaders: what they read, in which order, how they go on, how they fail and end."""

import gc
import json
import struct
import threading
import time

import numpy as np
import pytest
from test_worlds import graph, on_each

import whale as wh

N = 41
RNG = np.random.default_rng(2)
X = RNG.standard_normal((N, 5)).astype(np.float32)
Y = RNG.integers(0, 3, N).astype(np.int32)


class Counting:
    """Remembers which samples were read."""

    def __init__(self, values):
        self.values, self.read = values, []

    def __len__(self):
        return len(self.values)

    def __getitem__(self, i):
        self.read.append(i)
        return self.values[i]


def images(batch=4):
    g = wh.Graph("image")
    with g:
        x, y = wh.input("x", (batch, 16, 8, 1)), wh.input("y", (batch, 2))
        with wh.split(2, factor="height"):
            h = wh.ops.relu(wh.nn.conv2d(x, 4, 3))
        g.minimize(wh.nn.mse(wh.nn.linear(h.reshape((batch, -1)), 2), y), wh.SGD(0.1))
    return g


def threads():
    gc.collect()
    return [each for each in threading.enumerate() if each.name == "whale.data.Loader"]


@pytest.mark.parametrize("prefetch", [0, 3])
@pytest.mark.parametrize("strategy, devices, more", [("replica", "ref:3", {}), ("replica", "ref:2", {"accumulation": 2}), ("pipeline(2, micro_batches=3)", "ref:2", {}),
                                                     ("replica(2, shares=[0,1])", "ref:2", {})])
def test_ranks_read_their_samples_and_train_the_same(strategy, devices, more, prefetch):
    options = dict(devices=devices, strategy=strategy, **more)

    def run(world, local=True):
        columns = {"x": Counting(X), "y": Counting(Y)}
        with wh.plan(graph(), world=world, **options).start(seed=3) as job, \
                wh.data.Loader(columns, 12, job=job if local else None, seed=5, epochs=2, drop_last=False, prefetch=prefetch) as loader:
            losses = [job.step(**batch) for batch in loader]
            return losses, {name: column.read for name, column in columns.items()}, {size: job.slices(size) for size in (12, 5)}

    alone = run(None, local=False)[0]
    batches = [batch["i"].tolist() for batch in wh.data.Loader({"i": np.arange(N)}, 12, seed=5, epochs=2, drop_last=False)]
    told = on_each(wh.worlds(int(devices[-1])), run)
    for losses, read, slices in told:
        assert losses == alone and len(alone) == 8
        for name, rows in read.items():
            assert rows == [i for batch in batches for box in slices[len(batch)][name] for i in batch[box[0]]], name
    if strategy == "replica" and not more:
        assert sorted(sum((read["x"] for _, read, _ in told), [])) == sorted(2 * list(range(N)))  # each sample once an epoch, by one rank


def test_a_dataset_of_samples_is_asked_for_its_own_alone():
    """By sample: whichever inputs need it, each sample is read once."""
    def run(world):
        dataset = Counting([{"x": X[i], "y": Y[i], "more": "text"} for i in range(N)])
        with wh.plan(graph(), devices="ref:3", strategy="replica", world=world).start(seed=3) as job, \
                wh.data.Loader(dataset, 12, job=job, seed=5, epochs=1) as loader:
            return [job.step(**batch) for batch in loader], dataset.read

    alone, every = run(None)
    told = on_each(wh.worlds(3), run)
    assert all(losses == alone for losses, _ in told)
    assert sorted(sum((read for _, read in told), [])) == sorted(every) and len(set(every)) == len(every) == 36


def test_the_order_is_that_of_seed_and_epoch():
    def order(seed, **more):
        loader = wh.data.Loader({"i": np.arange(N)}, 8, seed=seed, epochs=2, **more)
        return [batch["i"].tolist() for batch in loader]

    first = order(0)
    assert first == order(0) == order(0, prefetch=0) and len(first) == 10
    assert first != order(1) and first[:5] != first[5:]
    for epoch in (first[:5], first[5:]):
        assert len(set(sum(epoch, []))) == 40
    assert sorted(sum(order(0, drop_last=False)[:6], [])) == list(range(N))
    assert sum(order(0, shuffle=False)[:5], []) == list(range(40))
    # With every version of numpy, or a run that goes on would see other batches.
    assert first[0] == [11, 3, 20, 13, 2, 21, 32, 15]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_it_goes_on_with_the_next_batch_on_any_number_of_ranks(ranks, tmp_path):
    def run(world, stop=None, state=None, checkpoint=None):
        with wh.plan(graph(), devices="ref:3", strategy="replica", world=world).start(seed=3) as job, \
                wh.data.Loader({"x": X, "y": Y}, 12, job=job, seed=0 if checkpoint else 9) as loader:  # the seed is the state's
            if checkpoint:
                job.load(checkpoint)
                loader.load_state(state)
            losses = []
            for batch in loader:
                losses.append(job.step(**batch))
                if job.iteration == stop and not checkpoint:
                    job.save(tmp_path / "c")
                    return losses, loader.state()
                if job.iteration == 7:
                    return losses, loader.state()

    whole, end = run(None)
    assert end == {"seed": 9, "epoch": 2, "batch": 1, "samples": N, "batch_size": 12}
    told = on_each(wh.worlds(2), lambda world: run(world, stop=4))
    assert told[0] == told[1] and told[0][0] == whole[:4]
    state = json.loads(json.dumps(told[0][1]))
    for losses, at in on_each(wh.worlds(ranks), lambda world: run(world, None, state, tmp_path / "c")):
        assert losses == whole[4:] and at == end


def test_a_state_of_another_loader_is_refused():
    loader = wh.data.Loader({"i": np.arange(N)}, 8)
    state = loader.state()
    for change in ({"samples": 40}, {"batch_size": 4}, {"batch": 5}, {"epoch": -1}, {"seed": "a"}):
        with pytest.raises(wh.InvalidArgument, match="'state'|" + next(iter(change))):
            loader.load_state({**state, **change})
    for wrong in ({}, None, 3):
        with pytest.raises(wh.InvalidArgument, match="what Loader.state"):
            loader.load_state(wrong)
    next(loader), next(loader)
    loader.load_state(state)
    first = next(loader)
    assert np.array_equal(first["i"], next(wh.data.Loader({"i": np.arange(N)}, 8))["i"])


@pytest.mark.parametrize("rank, rows", [(0, (0, 9)), (1, (7, 16))])
def test_of_each_image_only_the_part_is_read(rank, rows, tmp_path):
    data = RNG.standard_normal((6, 16, 8, 1)).astype(np.float32)
    np.save(tmp_path / "x.npy", data)
    y = np.zeros((6, 2), np.float32)

    def run(world):
        with wh.plan(images(), devices="ref:2", world=world).start(seed=1) as job, \
                wh.data.Loader({"x": wh.data.npy(tmp_path / "x.npy"), "y": y}, 4, job=job, shuffle=False) as loader:
            batch = next(loader)
            return job.step(**batch), batch["x"].parts

    with wh.plan(images(), devices="ref:2").start(seed=1) as job:
        alone = job.step(x=data[:4], y=y[:4])
    loss, part = on_each(wh.worlds(2), run)[rank]
    assert loss == alone and np.array_equal(part, data[:4, rows[0]:rows[1]])


@pytest.mark.parametrize("prefetch", [0, 2])
def test_what_the_dataset_raises_is_raised_with_its_index_and_left_behind(prefetch):
    class Breaks:
        broken = True

        def __len__(self):
            return 12

        def __getitem__(self, i):
            if i == 7 and self.broken:
                raise OSError("the disk is gone")
            return {"i": i}

    dataset = Breaks()
    with wh.data.Loader(dataset, 4, shuffle=False, prefetch=prefetch) as loader:
        assert next(loader)["i"].tolist() == [0, 1, 2, 3]
        before = loader.state()
        for again in (False, True):
            with pytest.raises(wh.data.SampleError, match="sample 7 of the dataset could not be read: OSError: the disk is gone") as raised:
                next(loader)
            assert raised.value.index == 7 and isinstance(raised.value.__cause__, OSError) and loader.state()["batch"] == 2
            if not again:
                loader.load_state(before)
        assert next(loader)["i"].tolist() == [8, 9, 10, 11]
        dataset.broken = False
        loader.load_state(before)
        assert next(loader)["i"].tolist() == [4, 5, 6, 7]


def test_samples_of_another_shape_are_named():
    with wh.plan(graph(), devices="ref:1").start() as job:
        rows = [np.zeros(5, np.float32)] * 12
        rows[3] = np.zeros(4, np.float32)
        with pytest.raises(wh.data.SampleError, match=r"sample 3 of 'x' has shape \(4,\), expected \(5,\)"):
            next(wh.data.Loader({"x": rows, "y": Y[:12]}, 12, job=job, shuffle=False))
        with pytest.raises(wh.InvalidArgument, match="'y' has 11 samples, 'x' has 12"):
            wh.data.Loader({"x": rows, "y": Y[:11]}, 12, job=job)
        with pytest.raises(wh.InvalidArgument, match="no such input: 'z'; those that count samples are 'x', 'y'"):
            wh.data.Loader({"z": rows}, 12, job=job)
        with pytest.raises(wh.InvalidArgument, match="12 samples, which fill no batch of 13"):
            wh.data.Loader({"x": rows, "y": Y[:12]}, 13)
        with pytest.raises(wh.data.SampleError, match="sample 0 .*expected a mapping by input, or with names=.. a tuple, found tuple"):
            next(wh.data.Loader([(X[i], Y[i]) for i in range(12)], 12, job=job, shuffle=False))
        with pytest.raises(wh.data.SampleError, match="2 elements for the names x"):
            next(wh.data.Loader([(X[i], Y[i]) for i in range(12)], 12, job=job, names=["x"]))
        with pytest.raises(wh.InvalidArgument, match="'dataset'"):
            wh.data.Loader(iter(()), 12)
        by_tuple = wh.data.Loader([(X[i], Y[i]) for i in range(12)], 12, job=job, names=["x", "y"], shuffle=False)
        assert job.step(**next(by_tuple)) > 0


def test_it_reads_so_far_ahead_and_ends_its_thread():
    column = Counting(np.arange(N))
    loader = wh.data.Loader({"i": column}, 4, prefetch=2, shuffle=False)
    before = threads()
    assert not column.read
    next(loader)
    deadline = time.monotonic() + 20
    while len(column.read) < 12 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)
    assert column.read == list(range(12)) and len(threads()) == len(before) + 1  # what was given, and two more
    loader.close()
    assert threads() == before
    with pytest.raises(wh.FailedPrecondition, match="closed"):
        next(loader)
    dropped = wh.data.Loader({"i": column}, 4)
    next(dropped)
    assert threads() != before
    del dropped
    assert threads() == before


def test_files(tmp_path):
    np.save(tmp_path / "x.npy", X)
    assert isinstance(wh.data.npy(tmp_path / "x.npy"), np.memmap) and np.array_equal(wh.data.npy(tmp_path / "x.npy"), X)

    path = tmp_path / "a.safetensors"
    header = json.dumps({"__metadata__": {"a": "b"}, "x": {"dtype": "F32", "shape": [N, 5], "data_offsets": [0, X.nbytes]},
                         "y": {"dtype": "I32", "shape": [N], "data_offsets": [X.nbytes, X.nbytes + Y.nbytes]},
                         "h": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}, "far": {"dtype": "I32", "shape": [N], "data_offsets": [X.nbytes, X.nbytes + 8]}})
    path.write_bytes(struct.pack("<Q", len(header)) + header.encode() + X.tobytes() + Y.tobytes())
    assert np.array_equal(wh.data.safetensors(path, "x"), X) and np.array_equal(wh.data.safetensors(path, "y"), Y)
    assert isinstance(wh.data.safetensors(path, "x"), np.memmap)
    with pytest.raises(wh.NotFound, match="no tensor 'z'; it has far, h, x, y"):
        wh.data.safetensors(path, "z")
    with pytest.raises(wh.InvalidArgument, match="BF16"):
        wh.data.safetensors(path, "h")
    with pytest.raises(wh.DataLoss, match="tensor 'far'"):
        wh.data.safetensors(path, "far")
    for cut in (4, 30, len(header) + 100):
        path.write_bytes(path.read_bytes()[:cut] if cut < 100 else struct.pack("<Q", len(header)) + header.encode() + b"12")
        with pytest.raises(wh.DataLoss):
            wh.data.safetensors(path, "x")

    for dtype in ("uint16", "uint32"):
        np.arange(60000, 60023).astype(dtype).tofile(tmp_path / "t.bin")
        columns = wh.data.tokens(tmp_path / "t.bin", 5, dtype=dtype)
        assert [len(each) for each in columns.values()] == [4, 4]
        assert columns["tokens"][1].tolist() == list(range(60005, 60010)) and columns["targets"][1].tolist() == list(range(60006, 60011))
    with pytest.raises(wh.InvalidArgument, match="'dtype'"):
        wh.data.tokens(tmp_path / "t.bin", 5, dtype="int8")
    (tmp_path / "t.bin").write_bytes(b"123")
    with pytest.raises(wh.DataLoss, match="3 bytes"):
        wh.data.tokens(tmp_path / "t.bin", 5)
