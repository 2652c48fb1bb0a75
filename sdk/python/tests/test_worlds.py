"""Worlds: several ranks of this process, a thread each."""

import threading

import numpy as np
import pytest

import whale as wh

RNG = np.random.default_rng(0)
X = RNG.standard_normal((4, 12, 5)).astype(np.float32)
Y = RNG.integers(0, 3, (4, 12)).astype(np.int32)


def graph():
    g = wh.Graph("classifier")
    with g:
        x, y = wh.input("x", (12, 5)), wh.input("y", (12,), wh.int32)
        h = wh.ops.relu(wh.nn.linear(x, 8))
        logits = wh.nn.linear(h, 3)
        g.output("logits", logits)
        g.minimize(wh.nn.cross_entropy(logits, y), wh.AdamW(1e-2))
    return g


def on_each(worlds, body):
    """What body(world) returns or raises, by rank; each on a thread of its own, and none hangs."""
    out = [None] * len(worlds)

    def run(world):
        try:
            out[world.rank] = body(world)
        except wh.WhaleError as error:
            out[world.rank] = error

    threads = [threading.Thread(target=run, args=(world,), daemon=True) for world in worlds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "a rank hangs"
    return out


def train(world, devices, **options):
    with wh.plan(graph(), devices=devices, world=world, **options).start(seed=3) as job:
        steps = [job.step(["logits"], x=x, y=y) for x, y in zip(X, Y)]
        smaller = job.step(x=X[0, :7], y=Y[0, :7])
        everything = {row["name"]: [job.read(row["name"], copy) for copy in range(len(row["copies"]))] for row in job.variables()}
        return [loss for loss, _ in steps], [got["logits"] for _, got in steps], smaller, everything, job.eval(x=X[0], y=Y[0])


def equal(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return np.array_equal(a, b)


@pytest.mark.parametrize("strategy, devices, more", [
    ("replica", "ref:3", {}), ("replica", "cpu:2", {"exact": True, "accumulation": 2}), ("replica", "ref:4", {"zero": 3}),
    ("pipeline(2, micro_batches=3)", "cpu:2", {"exact": True}), ("replica(2) > split(2)", "ref:4", {}),
    ("pipeline(2, micro_batches=2) > replica(2)", "lag:4", {})])
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_train_what_one_process_trains(strategy, devices, more, ranks):
    options = {"strategy": strategy, **more}
    if ranks > int(devices[-1]):
        pytest.skip("fewer devices than ranks")
    alone = train(None, devices, **options)
    for told in on_each(wh.worlds(ranks), lambda world: train(world, devices, **options)):
        assert not isinstance(told, Exception), told
        assert equal(told, alone)


@pytest.mark.parametrize("strategy, devices, more", [("replica", "ref:3", {"zero": 3}), ("split", "ref:2", {}), ("pipeline(2, micro_batches=3)", "cpu:2", {})])
def test_what_ranks_save_one_process_goes_on_from(strategy, devices, more, tmp_path):
    """Also beside the caller, and the other way round; a cancel of one rank is one of all, and leaves what was there."""
    options = dict(devices=devices, strategy=strategy, **more)

    def run(world):
        with wh.plan(graph(), world=world, **options).start(seed=3) as job:
            for x, y in zip(X[:2], Y[:2]):
                job.step(x=x, y=y)
            job.save(tmp_path / "c")
            rest = [job.step(x=x, y=y) for x, y in zip(X[2:], Y[2:])]
            job.save_async(tmp_path / "d").result()
            job.load(tmp_path / "c")
            again = [job.step(x=x, y=y) for x, y in zip(X[2:], Y[2:])]
            job.load_async(tmp_path / "d").result()
            return rest, again, {row["name"]: job.read(row["name"]) for row in job.variables()}

    told = on_each(wh.worlds(2), run)
    assert not isinstance(told[0], Exception) and equal(told[0], told[1]), told
    rest, again, values = told[0]
    assert rest == again and wh.inspect_checkpoint(tmp_path / "c")["ranks"] == 2
    with wh.plan(graph(), **options).start() as alone:
        alone.load(tmp_path / "c")
        assert [alone.step(x=x, y=y) for x, y in zip(X[2:], Y[2:])] == rest
        assert equal({row["name"]: alone.read(row["name"]) for row in alone.variables()}, values)


def test_a_save_that_one_rank_refuses_is_one_of_none(tmp_path):
    def run(world):
        with wh.plan(graph(), devices="ref:2", world=world).start() as job:
            job.save(tmp_path / "c")
            if world.rank == 1:
                job.learning_rate = 0.5
            try:
                job.save(tmp_path / "c")
            except wh.WhaleError as error:
                return error

    for error in on_each(wh.worlds(2), run):
        assert isinstance(error, wh.FailedPrecondition) and error.rank == 1 and "learning_rate" in str(error), error
    assert wh.inspect_checkpoint(tmp_path / "c")["iteration"] == 0


def test_a_world_says_whose_devices_are_whose():
    worlds = wh.worlds(2)
    plan = wh.plan(graph(), devices="ref:3", world=worlds[0])
    assert [world.devices(plan) for world in worlds] == [[0, 1], [2]]
    assert [(world.rank, world.size) for world in worlds] == [(0, 2), (1, 2)]
    assert repr(worlds[1]) == "<whale.World: rank 1 of 2>"
    with pytest.raises(wh.InvalidArgument, match="rank 1 of 2 has none of the plan's 1 device: launch at most 1 rank"):
        worlds[0].devices(wh.plan(graph(), devices="ref:1"))
    for wrong in (0, -1, 2.5, True, "2", 5000):
        with pytest.raises((wh.InvalidArgument, TypeError), match="ranks"):
            wh.worlds(wrong)
    with pytest.raises((wh.InvalidArgument, TypeError), match="world"):
        wh.plan(graph(), world=2)
    with pytest.raises((wh.InvalidArgument, TypeError), match="world"):
        plan.start(world="two")


def test_a_world_of_one_is_as_none():
    world = wh.world()
    assert (world.rank, world.size) == (0, 1)
    for _ in range(2):
        assert equal(train(world, "ref:2", strategy="replica"), train(None, "ref:2", strategy="replica"))
    assert world.devices(wh.plan(graph(), world=world)) == [0]


def test_without_devices_each_rank_has_one():
    worlds = wh.worlds(3)
    plan = wh.plan(graph(), world=worlds[0])
    assert [device["name"] for device in plan.to_dict()["devices"]] == [device["name"] for device in wh.plan(graph(), devices="cpu:3").to_dict()["devices"]]
    assert [world.devices(plan) for world in worlds] == [[0], [1], [2]]


@pytest.mark.parametrize("what, message", [
    (dict(strategy="split"), "rank 0 has 'strategy replica"), (dict(accumulation=2), "rank 0 has 'micro-batches 1', rank 1 has 'micro-batches 2'"), (dict(exact=True), "rank 1 has 'options of the plan exact=")])
def test_ranks_with_other_plans_do_not_start(what, message):
    def start(world):
        wh.plan(graph(), devices="ref:2", world=world, **(what if world.rank == 1 else {})).start()

    for error in on_each(wh.worlds(2), start):
        assert isinstance(error, wh.FailedPrecondition) and message in str(error) and error.rank == 1


@pytest.mark.parametrize("what", [dict(seed=7), dict(nan="ignore")])
def test_ranks_with_other_options_do_not_start(what):
    def start(world):
        wh.plan(graph(), devices="ref:2", world=world).start(**(what if world.rank == 1 else {}))

    for error in on_each(wh.worlds(2), start):
        assert isinstance(error, wh.FailedPrecondition) and "rank 0 has '" in str(error) and error.rank == 1


def test_what_one_rank_is_refused_ends_the_step_on_all():
    """As if it had not been: a label, outputs that the other does not ask for, a step beside an evaluation, a batch of another size."""
    wrong_label = np.full_like(Y[0], 77)
    first = {
        "a label": lambda job: job.step(x=X[0], y=wrong_label),
        "outputs": lambda job: job.step(["logits"], x=X[0], y=Y[0]),
        "an evaluation": lambda job: job.eval(x=X[0], y=Y[0]),
        "a smaller batch": lambda job: job.step(x=X[0, :5], y=Y[0, :5]),
        "a read": lambda job: job.read(job.variables()[0]["name"]),
    }

    def run(world):
        with wh.plan(graph(), devices="ref:2", world=world).start() as job:
            before, errors = job.parameters(), {}
            for name, call in first.items():
                try:
                    call(job) if world.rank == 1 else job.step(x=X[0], y=Y[0])
                except wh.WhaleError as error:
                    errors[name] = error
            return errors, equal(before, job.parameters()), job.step(x=X[0], y=Y[0])

    (theirs, _, loss), (mine, _, same) = told = on_each(wh.worlds(2), run)
    assert loss == same and all(unchanged for _, unchanged, _ in told)
    assert theirs.keys() == mine.keys() == first.keys()
    assert "rank 1: " in str(theirs["a label"]) and theirs["a label"].rank == 1 and isinstance(mine["a label"], wh.InvalidArgument)
    for name in ("outputs", "an evaluation", "a smaller batch", "a read"):
        assert "rank 1 runs something else than rank 0" in str(theirs[name]) and theirs[name].rank == 1
        assert "rank 0 runs something else than rank 1" in str(mine[name]) and mine[name].rank == 0


def test_a_loss_that_is_not_finite_on_one_rank_changes_nothing_on_any():
    bad = X[0].copy()
    bad[-1] = np.inf

    def run(world):
        with wh.plan(graph(), devices="ref:2", world=world).start() as job:
            before = job.parameters()
            with pytest.raises(wh.OutOfRange, match="not finite"):
                job.step(x=bad if world.rank == 1 else X[0], y=Y[0])
            return equal(before, job.parameters()), job.updates, job.step(x=X[0], y=Y[0])

    for told in on_each(wh.worlds(2), run):
        assert told[:2] == (True, 0)


def test_a_rank_that_closes_ends_the_others_steps():
    closed = threading.Event()

    def run(world):
        job = wh.plan(graph(), devices="ref:3", world=world).start()
        job.step(x=X[0], y=Y[0])
        if world.rank == 1:
            job.close()
            closed.set()
            return None
        closed.wait(60)
        for _ in range(2):
            with pytest.raises(wh.Unavailable, match="its session is closed") as caught:
                job.step(x=X[0], y=Y[0])
            assert caught.value.damage == "step"
        return job.iteration

    assert on_each(wh.worlds(3), run) == [1, None, 1]


def test_a_job_of_several_ranks_loads_what_one_process_saved_and_saves_over_it(tmp_path):
    with wh.plan(graph(), devices="ref:2").start(seed=5) as job:
        job.step(x=X[0], y=Y[0])
        job.save(tmp_path)
        expected = job.step(x=X[1], y=Y[1])

    def run(world):
        with wh.plan(graph(), devices="ref:2", world=world).start() as job:
            job.load(tmp_path)
            job.save(tmp_path)
            return job.step(x=X[1], y=Y[1])

    assert on_each(wh.worlds(2), run) == [expected, expected]
    assert not (tmp_path / "model.safetensors").exists() and len(list(tmp_path.iterdir())) == 5
    with wh.plan(graph(), devices="ref:2").start() as job:
        job.load(tmp_path)
        assert job.step(x=X[1], y=Y[1]) == expected


def test_what_one_rank_refuses_before_the_call_is_told_to_the_others_and_the_next_calls_meet():
    refused = [lambda job: job.step(x=X[0].astype(complex), y=Y[0]), lambda job: job.step(x=X[0], y=Y[0], z=Y[0]), lambda job: job.step(["nothing"], x=X[0], y=Y[0]),
               lambda job: job.step(3, x=X[0], y=Y[0]), lambda job: job.step(x=object(), y=Y[0]), lambda job: job.refuse(OSError("the disk is gone"))]

    def run(world):
        told = []
        with wh.plan(graph(), devices="ref:2", world=world).start(seed=3) as job:
            for call in refused:
                try:
                    call(job) if world.rank == 1 else job.step(x=X[0], y=Y[0])
                except (wh.WhaleError, TypeError) as error:
                    told.append(error)
            for call in (lambda: job.read(7), lambda: job.save(7)):
                try:
                    call() if world.rank == 1 else job.read(job.variables()[0].name)
                except (wh.WhaleError, TypeError) as error:
                    told.append(error)
            return told, [job.step(x=x, y=y) for x, y in zip(X, Y)]

    (theirs, losses), (mine, same) = on_each(wh.worlds(2), run)
    assert len(theirs) == 8 and all(error.rank == 1 for error in theirs), theirs
    assert len(mine) == 7
    assert "rank 1: OSError: the disk is gone" in str(theirs[5]) and theirs[5].code == "ABORTED"
    assert "nothing" in str(theirs[2]) and theirs[2].code == "INVALID_ARGUMENT"
    with wh.plan(graph(), devices="ref:2").start(seed=3) as job:
        assert losses == same == [job.step(x=x, y=y) for x, y in zip(X, Y)]


def test_a_sample_that_one_rank_cannot_read_ends_the_step_of_all():
    class Broken:
        def __init__(self, data, at):
            self.data, self.at = data, at

        def __len__(self):
            return len(self.data)

        def __getitem__(self, index):
            if index == self.at:
                raise OSError("a bad block")
            return self.data[index]

    x, y = X.reshape(48, 5), Y.reshape(48)

    def run(world):
        with wh.plan(graph(), devices="ref:2", world=world).start(seed=3) as job:
            with wh.data.Loader({"x": Broken(x, 20), "y": y}, 12, job=job, shuffle=False) as loader:
                losses = []
                try:
                    for batch in loader:
                        losses.append(job.step(**batch))
                except wh.WhaleError as error:
                    return losses, error, job.step(x=X[0], y=Y[0])

    (some, one, after), (same, other, then) = on_each(wh.worlds(2), run)
    assert some == same and len(some) == 1 and after == then
    (reads, told) = (one, other) if isinstance(one, wh.data.SampleError) else (other, one)
    assert reads.index == 20 and not isinstance(told, wh.data.SampleError)
    assert told.rank == (0 if reads is one else 1) and "sample 20 of the dataset could not be read: OSError: a bad block" in str(told)


def numbered():
    """A model whose two stages read an input each; what they have read can be fetched."""
    g = wh.Graph()
    with g:
        x, y = wh.input("x", (4, 1)), wh.input("y", (4, 1))
        with wh.pipeline(micro_batches=2):
            with wh.stage():
                h = wh.nn.linear(x, 4)
            with wh.stage():
                p = wh.nn.linear(h, 1)
                g.output("label", y * 1.0)
                loss = wh.nn.mse(p, y)
        g.output("sample", x * 1.0)
        g.minimize(loss, wh.SGD(1e-6))
    return g


@pytest.mark.parametrize("prefetch", [0, 2])
def test_after_a_sample_that_one_rank_could_not_read_all_go_on_with_the_next_batch(prefetch):
    class X:
        failed = False

        def __len__(self):
            return 24

        def __getitem__(self, index):
            if index == 6 and not self.failed:
                self.failed = True
                raise OSError("for a moment")
            return np.array([index], np.float32)

    def run(world):
        fed, told = [], []
        with wh.plan(numbered(), devices="ref:2", world=world).start() as job:
            loader = wh.data.Loader({"x": X(), "y": np.arange(24, dtype=np.float32).reshape(24, 1)}, 4, job=job, shuffle=False, epochs=1, prefetch=prefetch)
            while True:
                try:
                    _, out = job.step(["sample", "label"], **next(loader))
                    fed.append((out["sample"].ravel().tolist(), out["label"].ravel().tolist()))
                except StopIteration:
                    return fed, told
                except wh.WhaleError as error:
                    told.append(error)

    for fed, told in on_each(wh.worlds(2), run):
        assert [sample for sample, _ in fed] == [list(range(k, k + 4)) for k in (0, 8, 12, 16, 20)]
        assert all(sample == label for sample, label in fed)
        assert len(told) == 1 and "for a moment" in str(told[0])


def test_ranks_that_feed_parts_of_different_batches_are_refused():
    y = np.arange(24, dtype=np.float32).reshape(24, 1)

    def run(world):
        with wh.plan(numbered(), devices="ref:2", world=world).start() as job:
            loader = wh.data.Loader({"x": y, "y": y}, 4, job=job, seed=5)
            ahead = loader.state()
            before = job.parameters()
            if world.rank == 1:
                next(loader)
            errors = []
            for call in (job.step, job.eval):
                with pytest.raises(wh.FailedPrecondition, match="feeds another batch than rank") as raised:
                    call(**next(loader))
                errors.append(raised.value)
            assert all(error.rank == 1 - world.rank and "load_state" in str(error) for error in errors)
            unchanged = equal(before, job.parameters()) and job.iteration == 0
            loader.load_state(ahead)
            # Of a whole batch nobody says which it is: it goes beside parts of a loader's.
            whole = wh.data.Loader({"x": y, "y": y}, 4, seed=5)
            return unchanged, [job.step(**next(loader if world.rank == 0 else whole)) for _ in range(3)]

    (unchanged, loss), (other, same) = on_each(wh.worlds(2), run)
    assert unchanged and other and loss == same


def test_a_step_takes_inputs_of_one_batch():
    y = np.arange(24, dtype=np.float32).reshape(24, 1)
    with wh.plan(numbered(), devices="ref:2").start() as job:
        loader = wh.data.Loader({"x": y, "y": y}, 4, job=job)
        with pytest.raises(wh.InvalidArgument, match="'x' and 'y' are of different batches of a loader"):
            job.step(x=next(loader)["x"], y=next(loader)["y"])


@pytest.mark.parametrize("what", ["learning rate", "checkpoint"])
def test_ranks_that_would_train_apart_are_refused(what, tmp_path):
    with wh.plan(graph(), devices="ref:2").start() as job:
        job.step(x=X[0], y=Y[0])
        job.save(tmp_path)

    def run(world):
        with wh.plan(graph(), devices="ref:2", world=world).start() as job:
            before = job.parameters()
            if what == "learning rate" and world.rank == 1:
                job.learning_rate = 0.5
            elif what == "checkpoint":
                job.load(tmp_path)
                before = job.parameters()
                if world.rank == 1:
                    job.learning_rate = job.learning_rate * (1 + 2**-50)
            with pytest.raises(wh.FailedPrecondition, match="begins this step with other numbers than rank .*learning rate, loss scale, iteration") as raised:
                job.step(x=X[0], y=Y[0])
            assert raised.value.rank == 1 - world.rank and raised.value.damage == "step"
            evaluated = job.eval(["logits"], x=X[0])["logits"]
            unchanged = equal(before, job.parameters())
            job.learning_rate = None
            return unchanged, evaluated, job.step(x=X[0], y=Y[0])

    told = on_each(wh.worlds(2), run)
    assert told[0][0] and equal(*told)
