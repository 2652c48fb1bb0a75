"""One device against JAX over 20 steps, in float64: the models are written again here, from the same initial parameters, on the same data,
with an optimizer of optax. What the equality suite compares with is right itself."""

import os
import pathlib
import subprocess

os.environ.setdefault("JAX_PLATFORMS", "cpu")
import jax

jax.config.update("jax_enable_x64", True)
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import whale as wh

WHALE = os.environ.get("WHALE", str(pathlib.Path(__file__).resolve().parents[2] / "build" / "tools" / "whale" / "whale"))
STEPS, BOUND = 20, 1e-8


def linear(p, name, x):
    return x @ p[f"{name}.weight"] + p[f"{name}.bias"]


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def mlp(p, x, y):
    x = jax.nn.relu(linear(p, "layer0", x))
    return cross_entropy(linear(p, "head", jax.nn.relu(linear(p, "layer1", x))), y)


def layer_norm(p, name, x):
    mean = x.mean(-1, keepdims=True)
    return (x - mean) / jnp.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-5) * p[f"{name}.weight"] + p[f"{name}.bias"]


def gpt(p, tokens, targets, heads=4):
    b, t = tokens.shape
    x = p["tokens.weight"][tokens] + p["positions.weight"]
    for block in ("block0", "block1"):
        qkv = linear(p, f"{block}.attention.qkv", layer_norm(p, f"{block}.norm1", x)).reshape(b, t, 3, heads, -1)
        q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
        scores = jnp.where(np.tril(np.ones((t, t), bool)), scores, -jnp.inf)
        y = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(b, t, -1)
        x = x + linear(p, f"{block}.attention.out", y)
        y = jax.nn.gelu(linear(p, f"{block}.mlp.up", layer_norm(p, f"{block}.mlp.norm", x)), approximate=True)
        x = x + linear(p, f"{block}.mlp.down", y)
    return cross_entropy(layer_norm(p, "norm", x) @ p["tokens.weight"].T, targets)


def conv_norm(p, name, x, stride=1):
    w = p[f"{name}.conv.weight"]
    side = (w.shape[1] - 1) // 2
    x = jax.lax.conv_general_dilated(x, w, (stride, stride), [(side, side)] * 2, dimension_numbers=("NHWC", "OHWI", "NHWC"))
    mean = x.mean((0, 1, 2))
    return (x - mean) / jnp.sqrt(((x - mean) ** 2).mean((0, 1, 2)) + 1e-5) * p[f"{name}.norm.weight"] + p[f"{name}.norm.bias"]


def resnet(p, x, y):
    x = jax.nn.relu(conv_norm(p, "stem", x))
    for stage in range(3):
        name = f"stage{stage}.block0"
        h = conv_norm(p, f"{name}.b", jax.nn.relu(conv_norm(p, f"{name}.a", x, 2 if stage else 1)))
        x = jax.nn.relu(h + (conv_norm(p, f"{name}.skip", x, 2) if stage else x))
    return cross_entropy(linear(p, "head", x.mean((1, 2))), y)


def rms_norm(p, name, x):
    return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * p[f"{name}.weight"]


def product(p, name, x):
    return x @ p[f"{name}.weight"]


def swiglu(p, name, x):
    gate = product(p, f"{name}.gate", x)
    return product(p, f"{name}.down", gate * jax.nn.sigmoid(gate) * product(p, f"{name}.up", x))


def rotated(x, base):
    """Each pair (i, i + d / 2) of a head at place t, as a complex number, times e^(i t base^(-2 i / d)). x: [b, t, h, d]."""
    t, half = x.shape[1], x.shape[-1] // 2
    angles = np.arange(t)[:, None] * base ** (-np.arange(half) / half)
    turned = jax.lax.complex(x[..., :half], x[..., half:]) * np.exp(1j * angles)[None, :, None]
    return jnp.concatenate([turned.real, turned.imag], -1)


def causal(scores, v):
    """scores [b, h, q, k], v [b, k, h, d] -> [b, q, h d]."""
    t = scores.shape[-1]
    shares = jax.nn.softmax(jnp.where(np.tril(np.ones((t, t), bool)), scores, -jnp.inf))
    return jnp.einsum("bhqk,bkhd->bqhd", shares, v).reshape(v.shape[0], t, -1)


def llama(p, tokens, targets, heads=4, groups=2):
    x = p["tokens.weight"][tokens]
    for block in ("block0", "block1"):
        h = rms_norm(p, f"{block}.norm1", x)
        q, k, v = (product(p, f"{block}.attention.{name}", h).reshape(*tokens.shape, n, -1) for name, n in (("query", heads), ("key", groups), ("value", groups)))
        k, v = (jnp.repeat(each, heads // groups, axis=2) for each in (rotated(k, 5e5), v))
        x = x + product(p, f"{block}.attention.out", causal(jnp.einsum("bqhd,bkhd->bhqk", rotated(q, 5e5), k) / np.sqrt(q.shape[-1]), v))
        x = x + swiglu(p, f"{block}.mlp", rms_norm(p, f"{block}.norm2", x))
    return cross_entropy(product(p, "head", rms_norm(p, "norm", x)), targets)


def latent_attention(p, name, x, heads, n):
    """Scores are a sum: of what comes of the latent vectors, and of the positions, whose keys all heads share."""
    b, t, _ = x.shape
    q = product(p, f"{name}.query_up", rms_norm(p, f"{name}.query_norm", product(p, f"{name}.query_down", x))).reshape(b, t, heads, -1)
    kv = product(p, f"{name}.kv_up", rms_norm(p, f"{name}.kv_norm", product(p, f"{name}.kv_down", x))).reshape(b, t, heads, -1)
    shared = rotated(product(p, f"{name}.key_position", x)[:, :, None], 1e4)[:, :, 0]
    scores = jnp.einsum("bqhd,bkhd->bhqk", q[..., :n], kv[..., :n]) + jnp.einsum("bqhd,bkd->bhqk", rotated(q[..., n:], 1e4), shared)
    return product(p, f"{name}.out", causal(scores / np.sqrt(q.shape[-1]), kv[..., n:]))


def routed(p, name, x, k, places):
    """Every expert computes every token; of each token the chosen ones are added that have a place for it. Sigmoids of the scores, over the sum of
    those chosen, are the weights (DeepSeek-V3's equations 12 to 15). Also the balance of each sequence, by first choices."""
    score = jax.nn.sigmoid(product(p, f"{name}.router", x))
    b, t, experts = score.shape
    order = jnp.argsort(-score, axis=-1)[..., :k]
    chosen = jnp.take_along_axis(score, order, -1)
    weight = chosen / chosen.sum(-1, keepdims=True)
    asked = jnp.swapaxes(order, 1, 2).reshape(b, -1)  # all first choices, then all second ones
    before = ((asked[:, None, :] == asked[:, :, None]) & np.tri(k * t, k=-1, dtype=bool)).sum(-1)
    fits = jnp.swapaxes((before < places).reshape(b, k, t), 1, 2)
    w = {each: p[f"{name}.experts.{each}.weight"] for each in ("gate", "up", "down")}
    hidden = jax.nn.silu(jnp.einsum("btd,edh->bteh", x, w["gate"])) * jnp.einsum("btd,edh->bteh", x, w["up"])
    all_of = jnp.einsum("bteh,ehd->bted", hidden, w["down"])
    y = (jnp.where(fits, weight, 0)[..., None] * jnp.take_along_axis(all_of, order[..., None], 2)).sum(2)
    first = jax.nn.one_hot(order[..., 0], experts).mean(1)
    return y, experts * (first * (score / score.sum(-1, keepdims=True)).mean(1)).sum(-1)


def deepseek(p, tokens, targets, heads=4, n=4, k=2, places=4):
    x = p["tokens.weight"][tokens]
    balance = 0
    for i in range(3):
        x = x + latent_attention(p, f"block{i}.attention", rms_norm(p, f"block{i}.norm1", x), heads, n)
        h = rms_norm(p, f"block{i}.norm2", x)
        if i == 0:
            x = x + swiglu(p, "block0.mlp", h)
        else:
            y, aux = routed(p, f"block{i}.moe", h, k, places)
            x, balance = x + swiglu(p, f"block{i}.moe.shared", h) + 2.5 * y, balance + aux
    return cross_entropy(product(p, "head", rms_norm(p, "norm", x)), targets) + 1e-4 * balance.mean()


def clipped_adamw():
    decayed = lambda params: {name: value.ndim >= 2 for name, value in params.items()}
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, weight_decay=0.1, mask=decayed))


def momentum():
    return optax.sgd(0.02, momentum=0.9)


CASES = {
    "mlp": (mlp, momentum, "mlp --layers 3 --dim 10 --hidden 14 --classes 7 --batch 12 --optimizer momentum --lr 0.02 --weight-decay 0",
            [("x", (12, 10), 0), ("y", (12,), 7)]),
    "gpt": (gpt, clipped_adamw, "gpt --tied --layers 2 --dim 16 --heads 4 --seq 6 --vocab 25 --batch 6 --optimizer adamw --lr 0.001 --weight-decay 0.1 --clip 1.0",
            [("tokens", (6, 6), 25), ("targets", (6, 6), 25)]),
    "llama": (llama, clipped_adamw, "llama --layers 2 --dim 16 --heads 4 --kv-heads 2 --hidden 24 --seq 6 --vocab 25 --batch 6 --lr 0.001 --weight-decay 0.1 --clip 1.0",
              [("tokens", (6, 6), 25), ("targets", (6, 6), 25)]),
    "deepseek": (deepseek, clipped_adamw, "deepseek --layers 3 --dim 16 --heads 4 --head-dim 4 --hidden 6 --experts 4 --seq 6 --vocab 25 --batch 6 --lr 0.001 --weight-decay 0.1 --clip 1.0",
                 [("tokens", (6, 6), 25), ("targets", (6, 6), 25)]),
    "resnet": (resnet, momentum, "resnet --layers 8 --dim 4 --image 8 --classes 6 --batch 6 --optimizer momentum --lr 0.02 --weight-decay 0",
               [("images", (6, 8, 8, 3), 0), ("labels", (6,), 6)]),
}
PLANS = [("ref:1", ""), ("ref:8", "replica(2) > split(4)")]


@pytest.mark.parametrize("devices,strategy", PLANS, ids=[d.replace(":", "") for d, _ in PLANS])
@pytest.mark.parametrize("name", CASES)
def test_against_jax(tmp_path, name, devices, strategy):
    model, make_optimizer, arguments, inputs = CASES[name]
    path = str(tmp_path / "model.whale")
    subprocess.run([WHALE, "model", *arguments.split(), "-o", path], check=True, capture_output=True)
    job = wh.plan(wh.Graph.load(path), devices=devices, strategy=strategy, precision="float64").start(seed=3)
    trained = {v["name"] for v in job.variables() if v["role"] == "parameter"}
    params = {n: jnp.array(np.array(v, np.float64)) for n, v in job.parameters().items() if n in trained}
    optimizer = make_optimizer()
    state = optimizer.init(params)

    @jax.jit
    def step(params, state, *data):
        loss, grads = jax.value_and_grad(model)(params, *data)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    rng = np.random.default_rng(5)
    for i in range(STEPS):
        data = [rng.integers(0, below, shape).astype(np.int32) if below else rng.standard_normal(shape) for _, shape, below in inputs]
        params, state, want = step(params, state, *data)
        got = float(job.step(**{n: a for (n, _, _), a in zip(inputs, data)}))
        assert abs(got - float(want)) <= BOUND * abs(float(want)), f"loss of step {i}: {got}, JAX has {float(want)}"
    for n, value in job.parameters().items():
        error = np.abs(np.asarray(value) - np.asarray(params[n])).max()
        assert error <= 1e-6 * (1 + np.abs(np.asarray(params[n])).max()), f"{n} is off by {error:.2e}"
