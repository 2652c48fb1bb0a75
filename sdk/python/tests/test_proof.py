"""Plans that are right and were once refuted, or had no rule."""
import numpy as np
import pytest

import whale as wh

o = wh.ops


def dense(rows, features):
    x = wh.input("x", (rows, features))
    return x, o.matmul(x, wh.parameter("w", (features, features), wh.normal(0.3)))


def empty_part(graph):
    x = wh.input("x", (4, 3, 6))
    y = wh.input("y", (4, 3, 6))
    z = o.concat([x, x[:, 3:]], axis=1).reshape(4, 18)
    return wh.nn.mse(wh.nn.linear(z, 18), y.reshape(4, 18))


def zero_output(graph):
    x, h = dense(4, 4)
    graph.output("mid", h * 0.0)
    return (h * h).mean()


def zero_gradients_of_two_shapes(graph):
    x, h = dense(4, 4)
    u = wh.parameter("u", (1, 4), wh.normal(0.3))
    v = wh.parameter("v", (4, 1), wh.normal(0.3))
    return o.square(h).mean() + (o.fill((4, 4)) * o.matmul(o.matmul(h, v), u)).sum()


def sums_where_some_devices_have_none(graph):
    x, y = wh.input("x", (3, 2, 3)), wh.input("y", (3, 2, 3))
    h = o.matmul(x, wh.parameter("w", (3, 3), wh.normal(0.3)))
    z = o.softmax(h * h)
    total = o.cumsum(h * o.fill((3, 2, 3), value=1.0), axis=1)
    return wh.nn.mse(z, y) + (0.0 * z.sum() + total.sum() * 0.1 + o.maximum(z, y).sum() * 0.1 + z.sum() * 0.1)


def zeros_beside_summands(graph):
    x = wh.input("x", (1, 2, 3))
    h = o.matmul(x, wh.parameter("w", (3, 3), wh.normal(0.3)))
    z = o.matmul(o.softmax(o.matmul(h, h, transpose_b=True)), h)
    zeros = z * o.fill(())
    return abs(o.softmax(o.concat([zeros[:, :, :1], z[:, :, 1:]], axis=2))).sum(axis=[1, 2]).mean()


def cast_of_the_user(dtype):
    def build(graph):
        x, h = dense(4, 4)
        h = h + h.astype(dtype).astype(wh.float32)
        return o.square(h * h).mean()

    return build


def mean_over_a_map(layer):
    def build(graph):
        x = wh.input("x", (2, 10, 6, 2))
        y = wh.input("y", (2,), wh.int32)
        x = o.tanh(wh.nn.conv2d(x, 3, kernel=3))
        x = layer(x)
        return wh.nn.cross_entropy(wh.nn.linear(x.mean(axis=[1, 2]), 3), y)

    return build


def penalties(graph):
    x = wh.input("x", (3, 5))
    w = wh.parameter("w", (5, 3), wh.normal(0.3))
    k = [wh.parameter(f"k{i}", (3, 3), wh.normal(0.3)) for i in range(3)]
    h = o.tanh(o.matmul(x, w))
    for weight in k + k:
        h = o.tanh(o.matmul(h, weight))
    for weight in reversed(k):
        h = o.tanh(o.matmul(h, weight, transpose_b=True))
    mean, spread = wh.nn.linear(h, 3, name="mean"), wh.nn.linear(h, 3, name="spread")
    code = mean + o.exp(0.5 * spread) * o.dropout(mean, rate=0.5)
    divergence = (o.square(mean) + o.exp(spread) - 1.0 - spread).sum(axis=1).mean() * 0.5
    decay = abs(w).sum() + sum((o.square(weight).sum() for weight in k), 0.0 * divergence)
    return o.squared_difference(o.matmul(code, w, transpose_b=True), x).mean() + 0.1 * divergence + 0.01 * decay


def two_layers(graph):
    x, y = wh.input("x", (8, 4)), wh.input("y", (8,), wh.int32)
    return wh.nn.cross_entropy(wh.nn.linear(o.relu(wh.nn.linear(x, 8, name="first")), 4, name="last"), y)


def view_of_a_parameter(graph):
    x = wh.input("x", (2, 2))
    w = wh.parameter("w", (2, 2), wh.normal(0.3))
    graph.output("u", w.reshape(4))
    return o.square(o.matmul(x, w)).mean()


def summand_that_a_device_has_none_of(bias):
    def build(graph):
        x, y = wh.input("x", (4, 3, 3)), wh.input("y", (4, 3), wh.int32)
        h = wh.nn.linear(x, 3)
        f = h + wh.nn.linear(h, 3, name="q", bias=bias)
        f = f + o.concat([f[:, 3:], f], axis=1)
        return wh.nn.cross_entropy(wh.nn.linear(wh.nn.layer_norm(f), 7, name="head", bias=False), y)

    return build


def trunk():
    return o.tanh(o.matmul(wh.input("x", (4, 4)), wh.parameter("v", (4, 4), wh.normal(0.3))))


def two_biases(graph):
    h, w = trunk(), wh.parameter("w", (4, 2), wh.normal(0.3))
    b, c = (wh.parameter(name, (2,), wh.normal(0.3)) for name in "bc")
    return o.square(o.matmul(h, w, b)).mean() + o.sin(o.matmul(h, w, c)).mean()


def computed_weight(graph):
    h, b = trunk(), wh.parameter("b", (4,), wh.normal(0.3))
    w = o.matmul(wh.parameter("s", (4, 2), wh.normal(0.3)), wh.parameter("t", (2, 4), wh.normal(0.3)))
    return o.square(o.matmul(h, w, b)).mean()


def weight_and_product(graph):
    a, b = wh.parameter("a", (4, 2), wh.normal(0.3)), wh.parameter("b", (2, 4), wh.normal(0.3))
    return o.square(o.matmul(trunk(), wh.parameter("w", (4, 4), wh.normal(0.3)) + o.matmul(a, b))).mean()


def scaled_input(*shape):
    return wh.input("x", (4, *shape)) * wh.parameter("w", (shape[-1],))


def constant_gradients_of_two_shapes(graph):
    h = wh.ops.matmul(wh.input("x", (4, 6)), wh.parameter("w", (6, 4)))
    return wh.ops.square(wh.ops.tanh(h)).mean() + wh.parameter("p", (4, 4)).sum() + wh.parameter("q", (2, 4)).sum()


def one_product_of_two_shapes(graph):
    table = wh.parameter("table", (5, 4))
    x = wh.ops.embedding(table, wh.input("ids", (2, 3), wh.int32)) * wh.parameter("scale", (1,)) + wh.parameter("shift", ())
    of_rows = wh.ops.matmul(x.reshape(-1, 4), table, transpose_b=True)
    loss = wh.nn.cross_entropy(wh.ops.matmul(x, table, transpose_b=True), wh.input("y", (2, 3), wh.int32))
    return loss + wh.nn.cross_entropy(of_rows.reshape(2, 3, 5), wh.input("z", (2, 3), wh.int32))


def groups_of_no_weight(graph):
    h = wh.nn.batch_norm(wh.ops.matmul(wh.input("x", (4, 6)), wh.parameter("w", (6, 4))), groups=2)
    return 0.0 * wh.ops.square(h).mean()


def attention_and_a_mean(graph):
    return wh.ops.square(wh.nn.attention(wh.input("x", (4, 4, 4)), 2)).mean()


def low_rank_weight(graph):
    a, b = wh.parameter("a", (6, 2)), wh.parameter("b", (2, 4))
    frozen = wh.parameter("frozen", (6, 4), trainable=False)
    weight = wh.ops.matmul(a, b) + frozen
    h = wh.ops.matmul(wh.input("x", (4, 6)), weight) + wh.parameter("bias", (4,))
    return wh.ops.square(wh.ops.tanh(h)).mean()


def loss_of_weight_zero(graph):
    h = trunk()
    return o.square(h).mean() + 0.0 * o.sin(h).mean() + o.cos(h).mean()


CONV, UP, POOL = (
    mean_over_a_map(lambda x: wh.nn.conv2d(x, 2, kernel=3, padding=1)),
    mean_over_a_map(lambda x: wh.nn.conv2d_transpose(x, 2, kernel=2, stride=2)),
    mean_over_a_map(lambda x: wh.nn.avg_pool(x, 2)),
)
SGD, ADAM, ADAFACTOR = wh.SGD(0.1), wh.Adam(0.1), wh.Adafactor(0.1)
HEIGHT = "split(2, factor=height)"
ALL = "replica(2, shares=[1,3]) > pipeline(2, micro_batches=3) > split(2, factor=columns)"
NARROW = {"accumulate_dtype": "float16", "accumulation": 2}
CASES = {
    "empty part of a concat": (empty_part, SGD, 2, "replica", {}),
    "output of zeros": (zero_output, SGD, 2, "replica", {}),
    "zero gradients of two shapes": (zero_gradients_of_two_shapes, ADAFACTOR, 1, "", {}),
    "zero gradient in 16 bits": (zero_gradients_of_two_shapes, ADAM, 2, "split(2)", NARROW),
    "zero gradient in 16 bits, clipped": (zero_gradients_of_two_shapes, ADAM, 2, "split(2)", NARROW),
    "sums that some devices have none of": (sums_where_some_devices_have_none, SGD, 2, "split(2, shares=[3,1])", {}),
    "zeros beside summands": (zeros_beside_summands, SGD, 3, "split(3, factor=rows)", {}),
    "cast to f16": (cast_of_the_user(wh.float16), SGD, 2, "replica", {"precision": "float16"}),
    "cast to bf16": (cast_of_the_user(wh.bfloat16), SGD, 2, "split(2)", {"precision": "bfloat16"}),
    "mean behind a transposed convolution": (UP, SGD, 4, "split(4, factor=height)", {}),
    "mean behind a convolution": (CONV, SGD, 2, HEIGHT, {}),
    "mean behind a pooling": (POOL, SGD, 2, HEIGHT, {}),
    "fewer samples than micro-batches": (
        sums_where_some_devices_have_none, SGD, 4, "replica(2) > pipeline(2, micro_batches=3)",
        {"exact": True, "train_batches": [2]},
    ),
    "unlike replicas in 16 bits": (
        two_layers, SGD, 4, "replica([pipeline(2, micro_batches=2), split(2)])", {"precision": "bfloat16"},
    ),
    "a view of an offloaded parameter": (view_of_a_parameter, SGD, 1, "", {"offload": ["parameters"]}),
    "a summand that a device has none of": (
        summand_that_a_device_has_none_of(True), SGD, 4, "split(4, factor=classes)", {},
    ),
    "the same without a bias": (summand_that_a_device_has_none_of(False), SGD, 4, "split(4, factor=classes)", {}),
    "one product with two biases": (two_biases, SGD, 2, "split(2)", {}),
    "the same in exact mode": (two_biases, SGD, 2, "split(2)", {"exact": True}),
    "a computed weight with a bias": (computed_weight, SGD, 2, "split(2)", {"precision": "bfloat16"}),
    "the same where nothing is cut": (computed_weight, SGD, 1, "split(1)", {"precision": "float16"}),
    "gradients of a summed gradient": (weight_and_product, SGD, 2, "replica", {"zero": 2, "gradient_dtype": "bfloat16"}),
    "a loss of weight 0": (loss_of_weight_zero, SGD, 2, "replica", {"exact": True, "accumulation": 2}),
    "mean straight behind a pooling": (lambda graph: wh.nn.max_pool(scaled_input(4, 1), 2).mean(), SGD, 1, "", {}),
    "mean straight behind a convolution": (
        lambda graph: wh.nn.conv1d(scaled_input(4, 1), 1, 3).mean(), SGD, 2, "split(2, factor=width)", {},
    ),
    "constant gradients, clipped": (constant_gradients_of_two_shapes, SGD, 2, "split(2)", {}),
    "one product of two shapes": (one_product_of_two_shapes, SGD, 2, "replica", {"recompute": "full"}),
    "groups of a loss of weight 0": (groups_of_no_weight, SGD, 2, "split(2)", {}),
    "attention by sequence in one replica": (
        attention_and_a_mean, SGD, 3, "replica([split(2, factor=sequence), split(1)])", {},
    ),
    "a low-rank weight in unlike replicas": (
        low_rank_weight, SGD, 4, "replica([split(2), pipeline(2, micro_batches=1)])", {"precision": "bfloat16"},
    ),
    "sums in 16 bits without fusion": (
        two_layers, SGD, 2, "replica", {"gradient_dtype": "bfloat16", "accumulate_dtype": "bfloat16", "fusion": False},
    ),
    "penalties": (
        penalties, SGD, 8, ALL,
        {"precision": "bfloat16", "zero": 3, "accumulate_dtype": "float16", "update": "whole"},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_right_plan_is_proven(case):
    build, optimizer, devices, strategy, options = CASES[case]
    graph = wh.Graph()
    with graph:
        graph.minimize(build(graph), optimizer, clip_norm=1.0 if "clipped" in case else 0)
    proof = wh.plan(graph, devices=f"null:{devices}", strategy=strategy, **options).prove(progress=False)
    assert proof["verdict"] == "proven", proof["text"]


@pytest.mark.parametrize("batch, devices, accumulation", [(6, 3, 3), (6, 3, 4), (5, 3, 2), (4, 4, 2)])
def test_rows_of_a_table_that_is_looked_up_under_a_split_and_elsewhere(batch, devices, accumulation):
    """In some micro-batches a device has rows of one lookup, and of the other none."""
    graph = wh.Graph()
    with graph:
        x, ids = wh.input("x", (batch, 2, 4)), wh.input("ids", (batch, 2), wh.int32)
        table = wh.parameter("table", (9, 4), wh.normal(0.3))
        with wh.split(devices):
            h = x + wh.nn.linear(wh.ops.embedding(table, ids), 4)
        with wh.replica(devices):
            h = (h * wh.ops.embedding(table, ids)).reshape(-1, 8)
            graph.minimize(wh.ops.square(wh.nn.linear(h, 6)).mean(), wh.SGD(0.1, sparse_updates=True))
    proof = wh.plan(graph, devices=f"null:{devices}", accumulation=accumulation).prove(progress=False)
    assert proof["verdict"] == "proven", proof["text"]


def test_plans_of_one_order_have_the_same_bits():
    """A loss that is computed whole, by the classes' parts, and through a pipeline, on CPU devices."""
    graph = wh.Graph()
    with graph:
        x, y = wh.input("x", (4, 3)), wh.input("y", (4,), wh.int32)
        graph.minimize(wh.nn.cross_entropy(wh.nn.linear(x, 5), y), wh.SGD(0.1))
    rng = np.random.default_rng(0)
    batches = [
        {"x": rng.standard_normal((4, 3)).astype(np.float32), "y": rng.integers(0, 5, 4).astype(np.int32)}
        for _ in range(5)
    ]
    found = {}
    for devices, strategy in (
        ("cpu:1", "local"), ("cpu:2", "pipeline(2, micro_batches=1)"), ("cpu:2", "split(2)"),
        ("cpu:4", "replica(1) > split(2) > split(2)"), ("cpu:3", "split(3, factor=classes)"), ("cpu:4", "replica(2) > split(2)"),
    ):
        plan = wh.plan(graph, devices=devices, strategy=strategy, exact=True)
        entry = plan.prove(progress=False)["entries"][0]
        assert entry["verdict"] == "proven" and len(entry["order"]) == 16, entry
        job = plan.start(seed=1, threads=1)
        bits = [job.step(**batch) for batch in batches], {n: v.tobytes() for n, v in job.parameters().items()}
        assert found.setdefault(entry["order"], bits) == bits, strategy
    assert len(found) > 2
