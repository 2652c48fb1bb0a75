"""How gradients are computed and combined when an option says so: float16, narrow sums, Adasum."""

import numpy as np
import pytest
import whale as wh

PARAMETERS = ("hidden.weight", "hidden.bias", "head.weight", "head.bias")


def classifier(batch=12, optimizer=None, **minimize):
    g = wh.Graph("classifier")
    with g:
        x, y = wh.input("x", (batch, 6)), wh.input("y", (batch,), wh.int32)
        h = wh.ops.relu(wh.nn.linear(x, 16, name="hidden"))
        loss = wh.nn.cross_entropy(wh.nn.linear(h, 3, name="head"), y)
        g.minimize(loss, optimizer or wh.SGD(0.1, momentum=0.9), **minimize)
    return g


def data(batch=12, seed=0, scale=1.0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((batch, 6)).astype(np.float32)
    return dict(x=x * np.float32(scale), y=(x[:, 0] > 0).astype(np.int32) + (x[:, 1] > 0))


def start(devices="cpu:1", batch=12, seed=3, **options):
    return wh.plan(classifier(batch), devices=devices, fetch=[f"grad:{p}" for p in PARAMETERS], **options).start(seed=seed)


def gradients(job, **batch):
    return job.step([f"grad:{p}" for p in PARAMETERS], **batch)[1]


@pytest.mark.parametrize("devices,options", [
    ("cpu:1", {}), ("cpu:3", {}), ("cpu:2", {"zero": 1}), ("cpu:2", {"zero": 3}), ("cpu:2", {"accumulation": 3}),
    ("cpu:2", {"strategy": "split(2)"}), ("cpu:2", {"strategy": "pipeline(2, micro_batches=3)"})], ids=str)
def test_float16(devices, options, tmp_path):
    exact, job = start(), start(devices, precision="float16", **options)
    for i in range(8):
        want, found = gradients(exact, **data(seed=i)), gradients(job, **data(seed=i))
        for name in want:  # the loss scale is not in them; 11 bits, some roundings one behind the other
            np.testing.assert_allclose(found[name], want[name], atol=8 * 2.0 ** -11 * np.abs(want[name]).max())
    assert job.report()["loss_scale"] == 65536
    before = {v["name"]: job.read(v["name"]).tobytes() for v in job.variables()}
    wh.drain_log()
    job.step(**data(scale=1e6))  # beyond 65504
    assert [(row["severity"], row["message"]) for row in wh.drain_log()] == [
        ("warning", "a step overflowed in f16 and was not applied; the loss scale is 32768 now")]  # with that step, not with the next
    assert job.report()["loss_scale"] == 32768
    assert (job.iteration, job.updates) == (9, 8)
    assert {v["name"]: job.read(v["name"]).tobytes() for v in job.variables()} == before
    job.save(tmp_path / "checkpoint")
    other = start(precision="float16")
    other.load(tmp_path / "checkpoint")
    assert other.report()["loss_scale"] == 32768 and other.updates == 8
    assert other.step(**data(seed=9)) == pytest.approx(job.step(**data(seed=9)), rel=2.0 ** -9)
    assert other.updates == 9


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_erf", "silu", "tanh", "sigmoid"])
def test_a_product_trains_with_any_activation_as_with_the_separate_op(activation, precision):
    def losses(inside, **options):
        g = wh.Graph("m")
        with g:
            x, w, b = wh.input("x", (6, 4)), wh.parameter("w", (4, 5), wh.normal(1)), wh.parameter("b", (5,), wh.normal(1))
            h = wh.ops.matmul(x, w, b, activation=activation) if inside else getattr(wh.ops, activation)(wh.ops.matmul(x, w, b))
            g.output("h", h)
            g.minimize(wh.ops.square(wh.nn.linear(h, 3)).mean(), wh.Adam(0.05))
        with wh.plan(g, precision=precision, **options).start(seed=2) as job:
            batch = np.random.default_rng(0).standard_normal((6, 4)).astype(np.float32)
            steps = [job.step(x=batch) for _ in range(4)]
            return steps + [job.eval("h", x=batch)["h"], job.read("w"), job.read("b")]

    for options in {"devices": "cpu:1"}, {"devices": "cpu:2", "strategy": "split(2)"}, {"devices": "cpu:2", "recompute": "full", "zero": 3}:
        for found, want in zip(losses(True, **options), losses(False, **options)):
            np.testing.assert_array_equal(found, want)


def test_loss_scale_options():
    plan = wh.plan(classifier(12), devices="cpu:2", precision="float16")
    job = plan.start(loss_scale=256, loss_scale_growth=3)
    scales = []
    for i in range(7):
        job.step(**data(seed=i))
        scales.append(job.report()["loss_scale"])
    assert scales == [256, 256, 512, 512, 512, 1024, 1024]
    with pytest.raises(wh.InvalidArgument, match="'loss_scale' is -1"):
        plan.start(loss_scale=-1)
    for scale in (1e300, 1e-300, 2.0**24 + 1):
        with pytest.raises(wh.InvalidArgument, match=r"'loss_scale' is .*, expected a number from 2\*\*-14 to 2\*\*24, or 0"):
            plan.start(loss_scale=scale)
    assert [plan.start(loss_scale=scale).report()["loss_scale"] for scale in (2**24, 2**-14)] == [2**24, 2**-14]
    with pytest.raises(wh.InvalidArgument, match="loss_scale_growth"):
        plan.start(loss_scale_growth=-1)


def test_reshards():
    rows = wh.plan(classifier(12), devices="null:4").reshards()
    sums = [row for row in rows if row["chosen"]["name"] == "all_reduce"]
    assert sums and all(row["axis"] == "replica" and row["devices"] == 4 for row in sums)
    for row in sums:
        size = 4 * int(np.prod(row["dims"]))
        assert row["chosen"]["bytes"] == pytest.approx(1.5 * size)
        assert {other["name"]: other["bytes"] for other in row["alternatives"]}["plain transfers"] == 3 * size


def test_an_estimate_is_of_the_plan():
    graph = classifier(12)
    report, plan = wh.estimate(graph, devices="null:4", zero=1), wh.plan(graph, devices="null:4", zero=1).to_dict()
    entry = plan["entries"][0]
    for group in report["classes"]:
        for d in group["devices"]:
            memory = entry["programs"][entry["rows"][d]["program"]]["memory"]
            assert group["memory"]["total"] == sum(memory[k] for k in ("parameters", "state", "buffers", "arena"))
    assert sorted(sum((group["devices"] for group in report["classes"]), [])) == [0, 1, 2, 3]
    with pytest.raises(wh.InvalidArgument, match="zero"):
        wh.estimate(graph, zero=7)
    assert wh.estimate(graph, devices="null:4", zero=1, quick=True) == report  # there are no like layers
    with pytest.raises(wh.InvalidArgument, match="quick"):
        wh.estimate(graph, quick=7)
    with pytest.raises(TypeError):
        wh.estimate(graph, devices="null:4", nothing=1)
    with wh.Graph() as large:
        large.minimize(wh.nn.mse(wh.nn.linear(wh.input("x", (4, 700)), 700), wh.input("y", (4, 700))), wh.SGD(0.1))
    tight = wh.estimate(large, devices="null-1MB:2")
    assert tight["classes"][0]["memory_limit"] == 10 ** 6 < tight["classes"][0]["memory"]["total"]
    with pytest.raises(wh.ResourceExhausted):
        wh.plan(large, devices="null-1MB:2")


def test_choices():
    """Every gradient is read and summed over four replicas: 2 * 3/4 of four bytes an element; besides them a few scalars are."""
    plan = wh.plan(classifier(12), devices="null:4")
    trained = sum(int(np.prod(row["dims"])) * row["count"] for row in plan.reshards() if row["phase"] == "backward")
    assert 6 * trained <= plan.choices()["step"]["moved_bytes"] < 6 * trained + 100


@pytest.mark.parametrize("dtype,epsilon", [("bfloat16", 2.0 ** -8), ("float16", 2.0 ** -11)])
@pytest.mark.parametrize("zero", [0, 2])
def test_narrow_sums(dtype, epsilon, zero):
    want = gradients(start(), **data())
    found = gradients(start("cpu:3", gradient_dtype=dtype, zero=zero), **data())
    different = 0
    for name in want:
        np.testing.assert_allclose(found[name], want[name], atol=4 * epsilon * np.abs(want[name]).max())
        different += np.abs(found[name] - want[name]).max() > 1e-6
    assert different
    one = gradients(start(gradient_dtype=dtype), **data())  # nothing to sum: nothing is rounded
    assert all((one[name] == want[name]).all() for name in want)


@pytest.mark.parametrize("strategy,zero", [(None, 0), ("replica(2)", 0), ("replica(2)", 2), ("pipeline(2, micro_batches=4)", 0)])
def test_sums_over_micro_batches_in_16_bits(strategy, zero):
    want, options = gradients(start(), **data()), dict(accumulate_dtype="bfloat16", zero=zero, strategy=strategy)
    if not strategy or "pipeline" not in strategy:
        options["accumulation"] = 3
    found = gradients(start("cpu:2" if strategy else "cpu:1", **options), **data())
    assert any(np.abs(found[name] - want[name]).max() > 1e-6 for name in want)
    for name in want:
        np.testing.assert_allclose(found[name], want[name], atol=2.0 ** -6 * np.abs(want[name]).max())


def adasum(a, b):
    ab, aa, bb = np.sum(a * b), np.sum(a * a), np.sum(b * b)
    return (1 - ab / (2 * aa)) * a + (1 - ab / (2 * bb)) * b


def tree(x):
    power = 1 << (len(x).bit_length() - 1)
    for i in range(power, len(x)):
        x[i - power] = adasum(x[i - power], x[i])
    x = x[:power]
    while len(x) > 1:
        x = [adasum(x[i], x[i + 1]) for i in range(0, len(x), 2)]
    return x[0]


@pytest.mark.parametrize("shares", [[6, 6], [4, 4, 4], [3, 3, 3, 3], [5, 4, 3], [7, 5]], ids=str)
def test_adasum(shares):
    batch, at, parts = data(), 0, []
    for share in shares:
        part = {k: v[at:at + share] for k, v in batch.items()}
        parts.append(gradients(start(batch=share), **part))
        at += share
    strategy = f"replica({len(shares)}, shares={shares})".replace(" ", "")
    for options in ({}, {"zero": 1}):
        found = gradients(start(f"cpu:{len(shares)}", strategy=strategy, adasum=True, **options), **batch)
        for name in found:
            want = tree([p[name].astype(np.float64) for p in parts])
            np.testing.assert_allclose(found[name], want, rtol=1e-4, atol=1e-6)
    one = gradients(start(adasum=True), **batch)
    want = gradients(start(), **batch)
    assert all((one[name] == want[name]).all() for name in want)


@pytest.mark.parametrize("count,members,strategy,samples", [
    (2, 4, None, [[0, 1, 6, 7], [2, 3, 8, 9], [4, 10], [5, 11]]),  # a micro-batch is cut by itself: the first have more of each
    (3, 5, None, [[0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7, 11], []]),
    (3, 2, "replica(2, by=micro_batch)", [list(range(8)), list(range(8, 12))])], ids=str)
def test_adasum_weighs_the_samples_of_all_micro_batches(count, members, strategy, samples):
    whole = data()
    found = gradients(start(f"cpu:{members}", strategy=strategy, accumulation=count, adasum=True), **whole)
    parts = [gradients(start(batch=len(own)), **{k: v[own] for k, v in whole.items()}) for own in samples if own]
    for name in found:
        want = tree([p[name].astype(np.float64) for p in parts])
        np.testing.assert_allclose(found[name], want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("options,word", [({"adasum": True, "strategy": "split(2)"}, "split"),
                                          ({"adasum": True, "gradient_dtype": "bfloat16"}, "bf16"),
                                          ({"gradient_dtype": "int32"}, "i32"),
                                          ({"adasum": True, "accumulate_dtype": "bfloat16"}, "bf16"),
                                          ({"exact": True, "accumulate_dtype": "bfloat16", "accumulation": 2}, "bf16"),
                                          ({"adasum": True, "exact": True, "accumulation": 2}, "exact")])
def test_what_does_not_go_together(options, word):
    with pytest.raises(wh.WhaleError, match=word):
        start("cpu:2", **options)


@pytest.mark.parametrize("devices,strategy", [("ref:2", "replica"), ("ref:4", "replica(2) > replica(2)"), ("ref:4", "replica(2) > pipeline(2, micro_batches=2)")])
def test_adasum_of_a_parameter_with_a_penalty_is_refused(devices, strategy):
    def model(penalty):
        g = wh.Graph()
        with g:
            x, y = wh.input("x", (12, 10)), wh.input("y", (12,), wh.int32)
            w = wh.parameter("w", (10, 5), wh.normal(0.3))
            loss = wh.nn.cross_entropy(wh.nn.linear(wh.ops.matmul(x, w), 5), y)
            g.minimize(loss + 0.1 * wh.ops.square(w).sum() if penalty else loss, wh.SGD(0.1, weight_decay=0.1))
        return g

    wh.plan(model(False), devices=devices, strategy=strategy, adasum=True)
    wh.plan(model(True), devices=devices, strategy=strategy)
    with pytest.raises(wh.WhaleError, match="Adasum of the gradient of 'w'.*a penalty.*weight decay, or leave adasum out"):
        wh.plan(model(True), devices=devices, strategy=strategy, adasum=True)


@pytest.mark.parametrize("strategy", ["replica(2)", "replica(2, by=micro_batch)", "replica(2) > split(2)"])
@pytest.mark.parametrize("option", [dict(adasum=True), dict(gradient_dtype="bfloat16")], ids=["adasum", "bf16"])
def test_zero_3_combines_gradients_of_weights_that_are_computed(option, strategy):
    """It added them up as any sum: what the model makes of parameters was computed on each replica's part of them."""
    if "adasum" in option and "split" in strategy:
        pytest.skip("Adasum with a split is refused")
    g = wh.Graph("computed")
    with g:
        x = wh.input("x", (4, 4))
        w, v = wh.parameter("w", (4, 4), wh.normal(0.5)), wh.parameter("v", (4, 4), wh.normal(0.5))
        normed = w / wh.ops.sqrt(wh.ops.square(w).sum())
        g.minimize(wh.ops.square(wh.ops.tanh(x @ wh.ops.tanh(w)) @ (w * v) + x @ normed).mean(), wh.SGD(0.1))
    devices = "ref:4" if "split" in strategy else "ref:2"
    accumulation = 2 if "adasum" in option or "by" in strategy else 1  # ZeRO 2 and 3 round the sum of each micro-batch
    data = np.random.default_rng(0).standard_normal((4, 4))

    def found(zero, **options):
        job = wh.plan(g, devices, strategy=strategy, accumulation=accumulation, precision="float64", fetch=["grad:w", "grad:v"], zero=zero, **options).start(seed=1)
        return job.step(["grad:w", "grad:v"], x=data)[1]

    plain, wanted = found(0), found(0, **option)
    for zero in (1, 2, 3):
        for name, gradient in found(zero, **option).items():
            assert np.abs(gradient - wanted[name]).max() < 1e-12 < 1e-4 < np.abs(gradient - plain[name]).max()
