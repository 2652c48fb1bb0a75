"""Options: each is refused at once where it cannot mean anything, or its docstring says what it means. And what errors say: the argument's name in
Python, what was found, what was wanted, the line of the user's program."""

import inspect
import re

import numpy as np
import pytest
import whale as wh


def graph(body=None, optimizer=None, trained=True, **options):
    g = wh.Graph()
    with g:
        x, y = wh.input("x", (12, 6)), wh.input("y", (12,), wh.int32)
        loss = wh.nn.cross_entropy(wh.nn.linear(body(x) if body else wh.nn.linear(x, 8), 4), y)
        if trained:
            g.minimize(loss, optimizer or wh.SGD(0.1), **options)
    return g


def planned(**options):
    return wh.plan(graph(), **{"devices": "cpu:2", **options})


def batch():
    return {"x": np.zeros((12, 6), np.float32), "y": np.zeros(12, np.int32)}


def defaulted(strategy):
    g = graph()
    g.default_strategy(strategy)
    return g


def inside(scope):
    def body(x):
        with scope():
            return wh.nn.linear(x, 8)
    return graph(body)


def job():
    return planned().start()


IMAGE = lambda x: x.reshape(-1, 2, 3, 1)
PLACES = lambda x: x.reshape(-1, 1, 6)
# What is called, and words of the error.
REFUSED = {
    # optimizers and schedules
    "learning_rate negative": (lambda: wh.SGD(-0.1), "'learning_rate' is -0.1"),
    "learning_rate nan": (lambda: wh.SGD(float("nan")), "'learning_rate' is nan"),
    "learning_rate text": (lambda: wh.Adam("0.1"), "'learning_rate' is '0.1'"),
    "momentum": (lambda: wh.SGD(0.1, momentum=1.5), "'momentum' is 1.5"),
    "nesterov without momentum": (lambda: wh.SGD(0.1, nesterov=True), "'nesterov'.*momentum"),
    "split with momentum": (lambda: wh.SGD(0.1, momentum=0.9, split_master_weights=True), "'split_master_weights'.*momentum"),
    "sparse_updates without a table": (lambda: wh.plan(graph(optimizer=wh.SGD(0.1, sparse_updates=True))), "sparse updates are of tables"),
    "betas of one": (lambda: wh.Adam(betas=(0.9,)), "'betas'"),
    "beta": (lambda: wh.AdamW(betas=(0.9, 1.0)), r"'betas\[1\]' is 1.0, expected 0 <= betas\[1\] < 1"),
    "epsilon": (lambda: wh.Lamb(epsilon=-1), "'epsilon'"),
    "epsilon below float32": (lambda: wh.plan(graph(optimizer=wh.Adam(epsilon=1e-60))), "epsilon is 1e-60, which f32 does not have.*'linear.weight'"),
    "epsilon of a norm": (lambda: graph(lambda x: wh.nn.layer_norm(x, epsilon=1e-60)), "test_arguments.py:.*'epsilon' is 1e-60, which f32 does not have"),
    "epsilon of a batch norm": (lambda: graph(lambda x: wh.nn.batch_norm(x, epsilon=1e-60)), "test_arguments.py:.*'epsilon' is 1e-60, which f32 does not have"),
    "weight_decay": (lambda: wh.AdamW(weight_decay=-0.1), "'weight_decay'"),
    "decay_rate": (lambda: wh.Adafactor(decay_rate=0.8), "'decay_rate'"),
    "clip_threshold": (lambda: wh.Adafactor(clip_threshold=-1), "'clip_threshold'"),
    "clip_threshold 0": (lambda: wh.Adafactor(clip_threshold=0), "'clip_threshold' is 0, expected a number above 0"),
    "nesterov text": (lambda: wh.SGD(momentum=0.9, nesterov="no"), "'nesterov' is 'no', expected True or False"),
    "sparse_updates": (lambda: wh.Adam(sparse_updates="no"), "'sparse_updates' is 'no', expected True or False"),
    "split": (lambda: wh.SGD(split_master_weights=0), "'split_master_weights' is 0, expected True or False"),
    "base": (lambda: wh.Optimizer(0.1), "base of SGD"),
    "schedule text": (lambda: wh.SGD(0.1, lr_schedule="cosine"), "'lr_schedule' is 'cosine'"),
    "schedule kind": (lambda: wh.LRSchedule("exp"), "'kind' is 'exp'.*inverse_sqrt"),
    "warmup": (lambda: wh.cosine(100, warmup=0.1), "'warmup' is 0.1"),
    "warmup too long": (lambda: wh.linear(100, warmup=100), "'total_steps' is 100.*100 updates"),
    "final": (lambda: wh.cosine(100, final=2), "'final' is 2"),
    "final of a constant": (lambda: wh.LRSchedule(final=0.1), "'final' is 0.1"),
    "end of a constant": (lambda: wh.LRSchedule(total_steps=10), "'total_steps' is 10.*'constant' has no end"),
    "end of inverse_sqrt": (lambda: wh.LRSchedule("inverse_sqrt", warmup=5, total_steps=10), "'total_steps' is 10"),
    # minimize
    "optimizer class": (lambda: graph(optimizer=wh.SGD), "'optimizer'.*AdamW"),
    "loss": (lambda: wh.Graph().minimize(None, wh.SGD()), "'loss' is None"),
    "clip_norm": (lambda: graph(clip_norm=-1), "'clip_norm' is -1"),
    "accumulation": (lambda: graph(accumulation=0), "'accumulation' is 0"),
    "precision": (lambda: graph(precision="int32"), "'precision' is 'int32'.*bfloat16"),
    # the graph
    "input's shape": (lambda: graph(lambda x: wh.input("q", (3.7, 2))), r"'shape\[0\]' is 3.7"),
    "batch_dim": (lambda: graph(lambda x: wh.input("q", (3, 2), batch_dim=5)), "test_arguments.py:.*input 'q' of shape"),
    "batch_dim of a scalar": (lambda: graph(lambda x: x * wh.input("q", (), batch_dim=1)), "input 'q'.*batch dimension 1"),
    "input twice": (lambda: graph(lambda x: wh.input("x", (3,))), "test_arguments.py:.*input 'x': that name is taken"),
    "init": (lambda: graph(lambda x: x * wh.parameter("q", (6,), 0.5)), "'init' is 0.5.*constant"),
    "std": (lambda: wh.normal(-1), "'std' is -1"),
    "std, truncated": (lambda: wh.truncated_normal(-1), "'std' is -1"),
    "uniform": (lambda: wh.uniform(1, -1), "'high' is -1"),
    "decay of a statistic": (lambda: graph(lambda x: x * wh.parameter("q", (6,), buffer=True, decay=True)), "'decay' is True"),
    "decay of a frozen one": (lambda: graph(lambda x: x * wh.parameter("q", (6, 1), trainable=False, decay=True)), "'decay' is True"),
    "trainable": (lambda: graph(lambda x: x * wh.parameter("q", (6,), trainable="no")), "'trainable' is 'no', expected True or False"),
    "decay": (lambda: graph(lambda x: x * wh.parameter("q", (6,), decay="no")), "'decay' is 'no', expected True or False"),
    "keep_dims": (lambda: graph(lambda x: x.sum(1, keep_dims="no")), "'keep_dims' is 'no', expected True or False"),
    "keep_dims of an op": (lambda: graph(lambda x: wh.ops.reduce_sum(x, axes=[1], keep_dims="no")), "'keep_dims' is 'no', expected True or False"),
    "shape of an op": (lambda: graph(lambda x: x * wh.ops.fill(6)), "'shape' is 6, expected a sequence of integers"),
    "number cut": (lambda: graph(lambda x: x + (wh.input("k", (12, 1), wh.int32) + 0.5).astype("float32")), "0.5 beside a tensor of int32"),
    "number too large": (lambda: graph(lambda x: x + (wh.input("k", (12, 1), wh.int32) * 2**40).astype("float32")), "1099511627776 beside a tensor of int32"),
    "number beyond float64": (lambda: graph(lambda x: x + wh.ops.fill((12, 1), value=2**53 + 1, dtype="int64").astype("float32")), "'value' is 9007199254740993, expected a number that float64 has, such as 9007199254740992"),
    "number as text": (lambda: graph(lambda x: x + wh.ops.fill((12, 1), value="3")), "'value' is '3', expected a number"),
    "count beyond uint8": (lambda: graph(lambda x: x * wh.ops.iota((12, 300), dim=1, dtype="uint8").astype("float32").sum()), "u8 counts to 255, and there are 300"),
    "initial value beyond float64": (lambda: wh.constant(2**53 + 1), "'value' is 9007199254740993, expected a number that float64 has"),
    "initial value of a type": (lambda: wh.plan(graph(lambda x: x * wh.parameter("q", (6,), wh.constant(300), dtype="uint8", buffer=True).astype("float32"))), "300, which u8 does not have"),
    "heads of rotary": (lambda: graph(lambda x: wh.ops.rotary(x.reshape(2, 2, 3, 6), heads=9).reshape(12, 6)), "'heads' is 9.*the heads of x"),
    "reshape": (lambda: graph(lambda x: x.reshape(12, 6.9)), r"'shape\[1\]' is 6.9"),
    "axis": (lambda: graph(lambda x: x.sum(axis=1.5)), r"'axis\[0\]' is 1.5"),
    "index by a tensor": (lambda: graph(lambda x: x[x > 0]), "whale.ops.gather"),
    "truth": (lambda: graph(lambda x: x if x > 0 else -x), "whale.ops.where"),
    "another graph's output": (lambda: wh.Graph().output("q", foreign()), "belongs to another"),
    # names and paths
    "a graph's name": (lambda: wh.Graph(3), "'name' is 3, expected text"),
    "a scope's name": (lambda: inside(lambda: wh.scope(3)), "'name' is 3, expected text"),
    "factor": (lambda: inside(lambda: wh.split(factor=3)), "'factor' is 3, expected text"),
    "schedule, a number": (lambda: inside(lambda: wh.pipeline(schedule=3)), "'schedule' is 3, expected text"),
    "load a graph": (lambda: wh.load(None), "'path' is None, expected a path"),
    "save a graph": (lambda: graph().save(None), "'path' is None, expected a path"),
    "load a plan": (lambda: wh.Plan.load(3), "'path' is 3, expected a path"),
    "save a plan": (lambda: planned().save(None), "'path' is None, expected a path"),
    "level": (lambda: graph().print("all"), "'level' is 'all', expected 'graph' or 'train'"),
    "inspect": (lambda: wh.inspect_checkpoint(None), "'directory' is None, expected a path"),
    "init_dir": (lambda: wh.configure(init_dir=3), "'init_dir' is 3, expected a path"),
    "default strategy's scope": (lambda: defaulted("nosuch: split").seal(), "no scope is called 'nosuch'; the model has"),
    # steps
    "save": (lambda: job().save(None), "'directory' is None, expected a path"),
    "load": (lambda: job().load(3), "'directory' is 3, expected a path"),
    "variable": (lambda: job().read(3), "'name' is 3, expected text"),
    "written variable": (lambda: job().write(None, 1.0), "'name' is None, expected text"),
    "copy, text": (lambda: job().read("linear.weight", copy="a"), "'copy' is 'a', expected an integer"),
    "fetched number": (lambda: job().step(3, **batch()), "'fetch' is 3, expected a name or a list of names"),
    "fetched numbers": (lambda: job().eval([1], **batch()), r"'fetch' is \[1\], expected a name"),
    "ragged rows": (lambda: job().step(**(batch() | {"x": [[1, 2], [3]]})), "'x' expects float32, got no array"),
    # primitives
    "count": (lambda: inside(lambda: wh.replica(2.5)), "'count' is 2.5"),
    "count negative": (lambda: inside(lambda: wh.replica(-1)), "'count' is -1"),
    "ways": (lambda: inside(lambda: wh.split(-1)), "'ways' is -1"),
    "stages": (lambda: inside(lambda: wh.pipeline(True)), "'stages' is True"),
    "devices of a stage": (lambda: inside(lambda: wh.stage(-1)), "'devices' is -1"),
    "micro_batches": (lambda: inside(lambda: wh.pipeline(micro_batches=-2)), "'micro_batches' is -2"),
    "shares empty": (lambda: inside(lambda: wh.replica(shares=[])), r"'shares' is \[\]"),
    "shares text": (lambda: inside(lambda: wh.replica(shares="12")), "'shares' is '12'"),
    "shares of others": (lambda: inside(lambda: wh.replica(2, shares=[1, 2, 3])), "test_arguments.py:.*3 shares for a count of 2"),
    "by": (lambda: inside(lambda: wh.replica(by="batch")), "test_arguments.py:.*by is 'batch'"),
    "depths": (lambda: inside(lambda: wh.pipeline(2, warmup=3)), "'warmup' is 3, expected a depth for each stage"),
    "no depths": (lambda: inside(lambda: wh.pipeline(2, warmup=[])), r"'warmup' is \[\], expected a depth for each stage"),
    "depth of 0": (lambda: inside(lambda: wh.pipeline(2, warmup=[2, 0])), "'warmup' is 0, expected an integer 1 or more"),
    "schedule": (lambda: inside(lambda: wh.pipeline(schedule="fast")), "test_arguments.py:.*schedule is 'fast'"),
    # layers
    "features": (lambda: graph(lambda x: wh.nn.linear(x, 0)), "'features' is 0"),
    "heads": (lambda: graph(lambda x: wh.nn.attention(PLACES(x), 4)), "'heads' is 4.*divisor of the 6"),
    "heads 0": (lambda: graph(lambda x: wh.nn.attention(PLACES(x), 0)), "'heads' is 0"),
    "kv_heads": (lambda: graph(lambda x: wh.nn.attention(PLACES(x), 3, kv_heads=2)), "'kv_heads' is 2"),
    "rotary of odd heads": (lambda: graph(lambda x: wh.nn.attention(PLACES(x), 2, rotary=True)), "'rotary'.*even size"),
    "x of attention": (lambda: graph(lambda x: wh.nn.attention(x, 2)), r"'x' is whale.Tensor\(float32\[12, 6\]\)"),
    "scale": (lambda: graph(lambda x: wh.nn.attention(PLACES(x), 2, scale=-1)), "'scale' is -1"),
    "activation": (lambda: graph(lambda x: wh.nn.mlp(x, 3, activation="swish")), "'activation' is 'swish'.*'silu'"),
    "rate": (lambda: graph(lambda x: wh.nn.dropout(x, -0.5)), "'rate' is -0.5"),
    "rate of 1": (lambda: graph(lambda x: wh.nn.dropout(x, 1)), "'rate' is 1, expected 0 <= rate < 1"),
    "dropout of 1": (lambda: graph(lambda x: wh.nn.attention(PLACES(x), 2, dropout=1.0)), "'dropout' is 1.0, expected 0 <= dropout < 1"),
    "top_k": (lambda: graph(lambda x: wh.nn.moe(PLACES(x), 2, 4, top_k=3)[0]), "'top_k' is 3"),
    "kernel": (lambda: graph(lambda x: wh.nn.conv2d(IMAGE(x), 3, (3,))), r"'kernel' is \(3,\)"),
    "padding": (lambda: graph(lambda x: wh.nn.conv2d(IMAGE(x), 3, 3, padding="full")), "'padding' is 'full'"),
    "groups": (lambda: graph(lambda x: wh.nn.conv2d(IMAGE(x), 3, 3, groups=0)), "'groups' is 0"),
    "stride text": (lambda: graph(lambda x: wh.nn.conv2d(IMAGE(x), 3, 3, stride="2")), "'stride' is '2', expected an integer"),
    "padding of a transposed convolution": (lambda: graph(lambda x: wh.nn.conv2d_transpose(IMAGE(x), 3, 2, padding="same")), "'padding' is 'same', expected an integer"),
    "bias": (lambda: graph(lambda x: wh.nn.linear(x, 3, bias="no")), "'bias' is 'no', expected True or False"),
    "causal": (lambda: graph(lambda x: wh.nn.attention(PLACES(x), 2, causal="no")), "'causal' is 'no', expected True or False"),
    "include_pad": (lambda: graph(lambda x: wh.nn.avg_pool(IMAGE(x), 2, include_pad="no")), "'include_pad' is 'no', expected True or False"),
    "momentum of a norm": (lambda: graph(lambda x: wh.nn.batch_norm(x, momentum=2)), "'momentum' is 2, expected a number from 0 to 1"),
    "capacity_factor": (lambda: graph(lambda x: wh.nn.moe(PLACES(x), 2, 4, capacity_factor=0)[0]), "'capacity_factor' is 0, expected a number above 0"),
    "two capacities": (lambda: graph(lambda x: wh.ops.moe_gate(PLACES(x), capacity=3, capacity_factor=7.0)[1]), "test_arguments.py:.*'capacity_factor' is 7, and 'capacity' is 3"),
    "hidden": (lambda: graph(lambda x: wh.nn.mlp(x, -3)), "'hidden' is -3"),
    "hidden of a block": (lambda: graph(lambda x: wh.nn.transformer_block(PLACES(x), 2, hidden=-3)), "'hidden' is -3"),
    "window": (lambda: graph(lambda x: wh.nn.max_pool(IMAGE(x), 0)), "'window' is 0"),
    "x of a transposed convolution": (lambda: graph(lambda x: wh.nn.conv2d_transpose(x, 3, 2)), "'x' is whale.Tensor"),
    # plan
    "plan's graph": (lambda: wh.plan(None), "'graph' is None"),
    "devices list": (lambda: planned(devices=["cpu:0"]), r"'devices' is \['cpu:0'\]"),
    "devices empty": (lambda: planned(devices=""), "'devices' is ''"),
    "fetch": (lambda: planned(fetch=3), "'fetch' is 3"),
    "plan's accumulation": (lambda: planned(accumulation=-1), "'accumulation' is -1"),
    "plan's precision": (lambda: planned(precision="int8"), "'precision' is 'int8'"),
    "bucket_bytes": (lambda: planned(bucket_bytes=-1), "'bucket_bytes' is -1"),
    "zero": (lambda: planned(zero=4), "'zero' is 4"),
    "exact": (lambda: planned(exact="no"), "'exact' is 'no', expected True or False"),
    "adasum": (lambda: planned(adasum=None), "'adasum' is None, expected True or False"),
    "overlap": (lambda: planned(overlap="no"), "'overlap' is 'no', expected True or False"),
    "fusion": (lambda: planned(fusion="False"), "'fusion' is 'False', expected True or False"),
    "zero as a truth": (lambda: planned(zero=True), "'zero' is True"),
    "zero without training": (lambda: wh.plan(graph(trained=False), zero=1), "'zero' is 1.*minimize"),
    "adasum without training": (lambda: wh.plan(graph(trained=False), adasum=True), "'adasum' is True.*minimize"),
    "state_shares": (lambda: planned(state_shares=[1, 2]), "shares of state are given without ZeRO"),
    "recompute": (lambda: planned(recompute="all"), "'recompute' is 'all'"),
    "recompute of nothing": (lambda: planned(recompute=[]), r"'recompute' is \[\]"),
    "a dtype of None": (lambda: graph(lambda x: wh.ops.cast(x, dtype=None)), "no such element type: None"),
    "padding beyond any image": (lambda: graph(lambda x: wh.ops.max_pool(IMAGE(x), window=(1, 1), padding=(2**62,) * 4)), "'padding'.*expected entries <= 2147483647"),
    "no bytes of a graph": (lambda: wh.Graph.parse(None), "'data' is None, expected the bytes that Graph.serialize gave"),
    "gradient_dtype": (lambda: planned(gradient_dtype="int32"), "gradients summed in i32"),
    "accumulate_dtype": (lambda: planned(accumulate_dtype="int32"), "gradients accumulated in i32"),
    "offload": (lambda: planned(offload=["weights"]), "offload 'weights'"),
    "update": (lambda: planned(update="x"), "'update' is 'x'"),
    "timeout": (lambda: planned(timeout=-1), "'timeout' is -1"),
    "limits of files": (lambda: wh.configure(max_ops=-1), "'max_ops' is -1"),
    "limits of files, cut": (lambda: wh.configure(max_devices=1.5), "'max_devices' is 1.5"),
    "matmul_chunks": (lambda: planned(matmul_chunks=-1), "'matmul_chunks' is -1"),
    "prefetch": (lambda: planned(prefetch=-1), "'prefetch' is -1"),
    **{f"{name} of a graph that is not trained": (lambda option={name: value}: wh.plan(graph(trained=False), **option),
                                                  rf"{name}.*(which has no loss with an optimizer: these options are of training|this one is not trained)")
       for name, value in dict(accumulation=2, zero=1, state_shares=[1, 1], gradient_dtype="bfloat16", accumulate_dtype="bfloat16", adasum=True, recompute="full",
                               offload=["state"], update="sliced", bucket_bytes=512).items()},
    # jobs
    "seed negative": (lambda: planned().start(seed=-1), "'seed' is -1"),
    "seed beyond 64 bits": (lambda: planned().start(seed=2**64), "'seed' is 18446744073709551616"),
    "seed float": (lambda: planned().start(seed=1.5), "'seed' is 1.5"),
    "nan": (lambda: planned().start(nan="warn"), "'nan' is 'warn'.*'error' or 'ignore'"),
    "threads": (lambda: planned().start(threads=-1), "'threads' is -1"),
    "more threads than cores": (lambda: planned().start(threads=5000), "'threads' is 5000, expected at most [0-9]+, the cores"),
    "pin": (lambda: planned().start(pin="no"), "'pin' is 'no', expected True or False"),
    "trace": (lambda: job().trace("off"), "'enable' is 'off', expected True or False"),
    "loss_scale": (lambda: planned().start(loss_scale=2.0), "loss scale.*precision is not f16"),
    "loss_scale_growth": (lambda: planned().start(loss_scale_growth=5), "precision is not f16"),
    "learning rate set": (lambda: setattr(job(), "learning_rate", -0.5), "'learning_rate' is -0.5"),
    "picture's entry": (lambda: wh.display.plan_svg(planned().to_dict(), "evel"), "'entry' is 'evel'"),
}


def foreign():
    g = wh.Graph()
    with g:
        return wh.input("z", (3,))


@pytest.mark.parametrize("name", REFUSED)
def test_refused_at_once(name):
    call, words = REFUSED[name]
    with pytest.raises((wh.WhaleError, TypeError, IndexError), match=words) as info:
        call()
    assert "options." not in str(info.value) and "NULL" not in str(info.value), "a word of the C ABI"


def test_what_numpy_has_for_a_truth_is_one():
    wh.SGD(momentum=0.9, nesterov=np.bool_(True)), planned(exact=np.bool_(False), overlap=np.True_)


def test_what_a_graph_that_is_not_trained_can_use_is_legal():
    plan = wh.plan(graph(trained=False), devices="cpu:2", offload=["parameters"], exact=True, overlap=False, fusion=False, accumulation=0, update="auto", recompute="none")
    assert all(v["memory"] == "host" for v in plan.to_dict()["variables"])


@pytest.mark.parametrize("options, said", [(dict(offload=["state"]), "the optimizer keeps none"), (dict(zero=1, devices="cpu:2"), "this optimizer keeps none"),
                                           (dict(offload=["activations"]), "Offload of activations: none is large")])
def test_an_option_that_finds_nothing_is_noted(options, said):
    for optimizer, noted in ((wh.SGD(0.1), True), (wh.SGD(0.1, momentum=0.9), "activations" in said)):
        notes = wh.plan(graph(optimizer=optimizer), **{"devices": "cpu:1", **options}).to_dict()["notes"]
        assert any(said in note for note in notes) is noted


@pytest.mark.parametrize("option, said", [(dict(zero=1), "ZeRO 1 cuts over replicas; one device has none"), (dict(adasum=True), "Adasum combines gradients of replicas; one device has none"),
                                          (dict(gradient_dtype="bfloat16"), "Gradients are summed in bf16 between replicas; one device has none")])
def test_options_of_replicas_are_noted_on_one_device(option, said):
    assert any(said in note for note in wh.plan(graph(optimizer=wh.Adam(0.1)), devices="cpu:1", **option).to_dict()["notes"])


def test_shapes_may_stand_first():
    assert graph(lambda x: x * wh.ops.fill((12, 6), value=2.0) + wh.ops.iota((12, 6), dtype="f32")).trained


def test_a_link_that_leads_nowhere_is_no_directory(tmp_path):
    (tmp_path / "dangling").symlink_to("nowhere"), (tmp_path / "loop").symlink_to("loop")
    for name in ("dangling", "loop"):
        with pytest.raises(wh.InvalidArgument, match="'directory' is .*: it is a link that leads nowhere"):
            job().save(tmp_path / name)


def public():
    for owner in (wh, wh.nn, wh.Graph, wh.Plan, wh.Job, wh.Tensor):
        for name, value in vars(owner).items():
            value = getattr(value, "__func__", value)
            ours = getattr(value, "__module__", "").startswith("whale.") and (inspect.isfunction(value) or inspect.isclass(value))
            if ours and not name.startswith("_") and not (inspect.isclass(value) and value.__init__ is object.__init__):
                yield f"{owner.__name__}.{name}", value


PUBLIC = dict(public())
# Operands, and what every layer has.
PLAIN = {"self", "cls", "x", "a", "b", "name", "graph", "args", "kwargs", "inputs", "feeds", "path", "value", "ids", "op", "attrs", "handle", "loss", "optimizer",
         "id", "dtype", "shape", "prediction", "target", "logits", "labels", "label_smoothing", "bias", "init", "features", "hidden", "kernel", "stride", "dilation",
         "groups", "heads", "epsilon", "low", "high", "mean", "std"}


@pytest.mark.parametrize("name", [name for name, value in PUBLIC.items() if not (inspect.isclass(value) and issubclass(value, BaseException))])
def test_options_are_documented(name):
    """Each argument stands in its function's docstring, or in its class'."""
    value = PUBLIC[name]
    doc = "".join(each.__doc__ or "" for each in (getattr(value, "__mro__", None) or [value]) if each.__module__.startswith("whale"))
    missing = [p for p in inspect.signature(value).parameters if p not in PLAIN and p[0] != "_" and not re.search(rf"\b{p}\b", doc)]
    assert not missing, f"{name}: {', '.join(missing)} in no docstring"


def test_rotary_between_sequences_turns_queries_and_keys():
    g = wh.Graph()
    with g:
        x, context = wh.input("x", (2, 3, 8)), wh.input("context", (2, 5, 8))
        g.output("turned", wh.nn.attention(x, 2, context=context, rotary=True, linear_bias=False))
    rng = np.random.default_rng(0)
    feeds = dict(x=rng.standard_normal((2, 3, 8)), context=rng.standard_normal((2, 5, 8)))
    job = wh.plan(g, devices="ref:1", precision="float64").start()
    p = job.parameters()

    def turn(v):
        angle = np.arange(v.shape[1])[:, None] * 10000.0 ** (-np.arange(2) / 2)
        cos, sin, first, second = np.cos(angle)[:, None], np.sin(angle)[:, None], v[..., :2], v[..., 2:]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

    q = turn((feeds["x"] @ p["attention.query.weight"]).reshape(2, 3, 2, 4))
    k = turn((feeds["context"] @ p["attention.key.weight"]).reshape(2, 5, 2, 4))
    v = (feeds["context"] @ p["attention.value.weight"]).reshape(2, 5, 2, 4)
    scores = np.exp(np.einsum("bqhd,bkhd->bhqk", q, k) / 2)
    out = np.einsum("bhqk,bkhd->bqhd", scores / scores.sum(-1, keepdims=True), v).reshape(2, 3, 8) @ p["attention.out.weight"]
    np.testing.assert_allclose(job.eval(**feeds)["turned"], out, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("optimizer", [wh.SGD, wh.Adam, wh.AdamW, wh.Lamb, wh.Adagrad, wh.Adafactor])
def test_an_argument_of_an_earlier_version_names_its_successor(optimizer):
    with pytest.raises(TypeError, match=f"{optimizer.__name__}.*'schedule'; it is called 'lr_schedule' now"):
        optimizer(0.1, schedule=wh.cosine(10))


def test_a_number_that_is_0_is_no_default():
    """Zero is the default in whale.h; here it is a number."""
    g = wh.Graph()
    with g:
        g.minimize(wh.parameter("w", (2, 2)).sum(), wh.Adam(0.0, betas=(0.0, 0.5), epsilon=0))
    training = g.to_dict()["training"]
    assert (training["learning_rate"], training["beta1"], training["beta2"], training["epsilon"]) == (0, 0, 0.5, 0)


def test_weight_decay_where_it_was_asked_for():
    g = wh.Graph()
    with g:
        x = wh.input("x", (4, 3))
        scale = {decay: wh.parameter(f"scale_{decay}", (3,), wh.ones(), decay=decay) for decay in (None, False, True)}
        weight = {decay: wh.parameter(f"weight_{decay}", (3, 1), wh.ones(), decay=decay) for decay in (None, False, True)}
        g.minimize(sum(((x * 0.0 * scale[d]) @ weight[d]).sum() for d in scale), wh.SGD(0.5, weight_decay=0.5))
    job = wh.plan(g).start()
    job.step(x=np.ones((4, 3), np.float32))
    for name, kept in dict(scale_None=True, scale_False=True, scale_True=False, weight_None=False, weight_False=True, weight_True=False).items():
        assert (job.read(name) == 1).all() == kept, name


def test_a_closed_job_says_so():
    closed = job()
    closed.close()
    closed.close()
    feeds = dict(x=np.zeros((12, 6), np.float32), y=np.zeros(12, np.int32))
    for call in (lambda: closed.step(**feeds), lambda: closed.eval(**feeds), lambda: closed.read("linear.bias"), closed.variables, closed.report,
                 lambda: closed.save("x"), lambda: closed.load("x"), lambda: closed.learning_rate, lambda: closed.iteration, lambda: closed.updates,
                 lambda: setattr(closed, "learning_rate", 0.1), lambda: closed.write("linear.bias", np.zeros(8)), closed.timeline):
        with pytest.raises(wh.WhaleError, match="this job is closed"):
            call()


def test_indices_as_in_numpy():
    g = wh.Graph()
    taken = {"new": (slice(None), None), "dots": (..., 1), "both": (None, ..., None), "numpy": np.int64(2), "negative": -1, "middle": (1, ..., slice(0, 2))}
    with g:
        x = wh.input("x", (4, 5, 6), batch_dim=-1)
        for name, index in taken.items():
            g.output(name, x[index])
        g.output("over_none", x.sum(axis=()))
        g.output("numpy_axis", x.sum(axis=np.int64(1)))
        g.output("tuple", x.transpose((2, 0, 1)))
        g.output("numpy_number", x * np.float32(2) + np.float64(1))
        g.output("power", 2.0 ** (x / 60))
        with pytest.raises(IndexError, match="one '...'"):
            x[..., 0, ...]
    v = np.arange(120, dtype=np.float32).reshape(4, 5, 6)
    out = wh.plan(g).start().eval(x=v)
    for name, index in taken.items():
        np.testing.assert_array_equal(out[name], v[index])
    np.testing.assert_array_equal(out["over_none"], v)
    np.testing.assert_array_equal(out["numpy_axis"], v.sum(1))
    np.testing.assert_array_equal(out["tuple"], v.transpose(2, 0, 1))
    np.testing.assert_array_equal(out["numpy_number"], v * 2 + 1)
    np.testing.assert_allclose(out["power"], 2.0 ** (v / 60), rtol=1e-5)


def test_a_mask_is_not_lost():
    masked = np.ma.masked_array(np.ones((12, 6), np.float32), mask=np.eye(12, 6))
    one = job()
    weight = one.variables()[0]
    for value in (masked, list(masked), np.ma.masked_array(np.ones((12, 6), np.float32))):
        with pytest.raises(wh.InvalidArgument, match=r"'x' is a masked array.*x\.filled\(0\)"):
            one.step(**{**batch(), "x": value})
    with pytest.raises(wh.InvalidArgument, match=r"is a masked array.*filled"):
        one.write(weight["name"], np.ma.masked_array(np.zeros(weight["dims"], np.float32)))
    assert np.isfinite(one.step(**{**batch(), "x": masked.filled(0)}))


def test_an_integer_out_of_range_hears_of_the_bound_that_it_missed():
    for value, bound in ((2**70, f"an integer from 0 to {2**63 - 1}"), (-1, "an integer 0 or more"), (1.5, "an integer 0 or more"), (True, "an integer 0 or more")):
        with pytest.raises(wh.InvalidArgument, match=f"'bucket_bytes' is {value}, expected {bound}$"):
            planned(bucket_bytes=value)


def test_a_tensor_of_the_graph_is_no_array():
    """numpy would make an object of each element."""
    def body(x):
        with pytest.raises(TypeError, match="has no value while the model is being built"):
            np.asarray(x)
        return np.float32(2) * x + np.zeros(6, np.float32).sum()
    graph(body)


def test_each_status_code_has_its_class():
    from whale import _abi, _library
    codes = {name[6:] for name, value in vars(_abi).items() if name.startswith("WHALE_") and name[6:] in _library._KINDS}
    assert len(codes) == 16 == len(set(_library._CODES)), "OK is none"
    kinds = set(_library._KINDS.values())
    assert len(kinds) == 16, "UNKNOWN, which libwhale does not give, is plain"
    for kind in kinds:
        assert getattr(wh, kind.__name__) is kind and str(kind("what", "CODE", "op")) == "what" and kind("what").damage == "call"


def test_text_that_is_no_utf_8_is_an_error_of_its_own():
    for name in ("\udc80", "\ud800"):
        g = wh.Graph("text")
        with g:
            with pytest.raises(wh.InvalidArgument):
                wh.input(name, (2, 3))
            g.minimize(wh.nn.linear(wh.input("x", (2, 3)), 2).mean(), wh.SGD(0.1))
        with pytest.raises(wh.InvalidArgument):
            wh.plan(g, fetch=[name])


@pytest.mark.parametrize("layer", [lambda x: wh.nn.linear(x, 2), wh.nn.layer_norm, wh.nn.rms_norm, wh.nn.batch_norm, lambda x: wh.nn.mlp(x, 2)])
def test_layers_say_what_they_work_on(layer):
    with wh.Graph("layers"):
        x = wh.input("x", (4, 3))
        with pytest.raises(ValueError, match="works on the last dimension of x, and x is a scalar"):
            layer(x.sum())
        with pytest.raises(wh.InvalidArgument, match="'x' is None, expected a tensor of the graph"):
            layer(None)


def test_a_layer_of_nothing_is_named():
    with wh.Graph("layers"):
        for layer in (lambda x: wh.nn.conv2d(x, 2, 1), wh.nn.global_avg_pool, lambda x: wh.nn.max_pool(x, 2), lambda x: wh.nn.attention(x, 1)):
            with pytest.raises(wh.InvalidArgument, match="'x' is None, expected a tensor of the graph"):
                layer(None)


def test_a_truth_is_no_index():
    with wh.Graph("index"), pytest.raises(TypeError, match="an index is a number, a slice"):
        wh.input("x", (4, 3))[True]


def test_the_warmup_of_a_pipeline():
    def losses(scope, devices):
        g = wh.Graph("warm")
        with g:
            x, y = wh.input("x", (8, 3)), wh.input("y", (8, 2))
            with scope():
                loss = ((wh.nn.linear(wh.ops.relu(wh.nn.linear(x, 4)), 2) - y) ** 2).mean()
            g.minimize(loss, wh.SGD(0.1))
        plan = wh.plan(g, devices=devices)
        data = np.random.default_rng(0).standard_normal((8, 5)).astype(np.float32)
        job = plan.start(seed=1)
        return g, plan, [float(job.step(x=data[:, :3], y=data[:, 3:])) for _ in range(3)]

    g, plan, deep = losses(lambda: wh.pipeline(2, micro_batches=4, warmup=[4, 1]), "cpu:2")
    assert plan.to_dict()["strategy"] == "pipeline(2, micro_batches=4, warmup=[4,1])"
    scope = next(s for s in g.to_dict()["scopes"] if s["kind"] == "pipeline")
    assert scope["schedule"] == "" and scope["warmup"] == [4, 1]
    assert deep == pytest.approx(losses(lambda: wh.replica(), "cpu:1")[2], rel=1e-5)
    with pytest.raises(wh.WhaleError, match="do not rise"):
        losses(lambda: wh.pipeline(2, micro_batches=4, schedule="zb_h1", warmup=np.array([1, 2])), "cpu:2")


def test_stages_of_virtual_stages_are_counted_by_device():
    with pytest.raises(wh.InvalidArgument, match=r"wants 16 stages \(2 on each of 8 devices\), .* give at most \d devices or fewer virtual stages"):
        wh.plan(graph(), devices="null:8", strategy="pipeline(8, micro_batches=2, schedule=zb_v)")


def test_adafactor_of_no_rows_keeps_no_nan():
    with wh.Graph("rows") as g:
        x = wh.input("x", (4, 3))
        none = wh.parameter("none", (0, 3), wh.normal(1.0))
        g.minimize(wh.ops.square(wh.nn.linear(x, 2)).mean() + wh.ops.square(none).sum(), wh.Adafactor(0.1))
    job = wh.plan(g).start()
    job.step(x=np.ones((4, 3)))
    assert not any(np.isnan(job.read(v["name"])).any() for v in job.variables())


@pytest.mark.parametrize("offset", [0, 1, 2, 3])
def test_an_array_may_begin_anywhere(offset):
    """Such as behind a header of one byte; numpy calls it unaligned, and C reads no such array."""
    numbers = np.arange(12, dtype=np.float32)
    raw = b"H" * offset + numbers.tobytes()
    x = np.frombuffer(raw, np.float32, offset=offset).reshape(4, 3)
    g = wh.Graph()
    with g:
        g.output("y", wh.input("x", (4, 3)) + wh.parameter("w", (4, 3)))
        wh.parameter("s", ())
    job = wh.plan(g).start()
    job.write("w", x)
    assert (job.read("w") == x).all()
    assert (job.eval(x=x)["y"] == 2 * numbers.reshape(4, 3)).all()
    assert (job.eval(x=x.T.copy().T)["y"] == 2 * numbers.reshape(4, 3)).all()
    job.write("s", np.frombuffer(raw, np.float32, offset=offset)[5])
    job.write("s", np.frombuffer(raw, np.float32, offset=offset)[5:6].reshape(()))
    assert job.read("s") == 5 and job.read("s").shape == ()


def test_a_stage_without_an_op_is_named():
    def of(filled, pipeline=False):
        g = wh.Graph()
        with g, (wh.pipeline(2) if pipeline else wh.scope("m")):
            h = wh.input("x", (4, 3))
            for op in filled:
                with wh.stage(2) if not pipeline else wh.stage():
                    h = wh.nn.linear(h, 4) if op else h
            g.minimize(wh.ops.square(h).mean(), wh.SGD(0.1))
        return g
    with pytest.raises(wh.InvalidArgument, match="of the 2 stages written, counted from 0, stage 1 has no op that a result needs"):
        wh.plan(of([True, False]), "cpu:4")
    with pytest.raises(wh.InvalidArgument, match="of the 3 stages written, counted from 0, stages 0, 2 have no op that a result needs"):
        wh.plan(of([False, True, False]), "cpu:4")
    with pytest.raises(wh.InvalidArgument, match="has 1 stages written in it, expected 2 .*stage 0 has no op"):
        wh.plan(of([False, True], pipeline=True), "cpu:2")
    with pytest.raises(wh.InvalidArgument) as info:
        wh.plan(of([True, True]), "cpu:3")
    assert "no op" not in str(info.value)


def test_a_model_is_no_list_of_devices(tmp_path):
    graph().save(str(tmp_path / "m.whale"))
    planned().save(str(tmp_path / "m.plan"))
    (tmp_path / "noise").write_bytes(b"a\0")
    for name, word in ("m.whale", "it is binary, a model"), ("m.plan", "it is binary, a plan"), ("noise", "it is binary[.]"):
        with pytest.raises(wh.InvalidArgument, match=f"{name}' is no list of devices: {word}"):
            wh.plan(graph(), devices=f"file:{tmp_path / name}")
