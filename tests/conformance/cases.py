"""The table: one row a case of an op. A row says how libwhale and how JAX compute it, and on what.

Each row is run forward and backward (the gradient of sum(result * weight) for every floating operand) on `ref` in float64 and
float32 and on `cpu` in float32, bfloat16 and float16 (a row without a floating operand, which has no 16-bit form, in float64 and
float32 only); the test file compares. Operands are numbers of the type of the run, so both sides decide on the same ones: a choice,
a comparison or a step is as comparable in 16 bits as in 64."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Callable, Optional, Sequence

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class F:
    """A floating operand: standard normal, moved into [low, high] when given."""
    shape: tuple
    low: Optional[float] = None
    high: Optional[float] = None
    distinct: bool = False  # no ties, in no precision: different numbers of 8 bits

    def make(self, rng: np.random.Generator) -> np.ndarray:
        if self.distinct:
            n = int(np.prod(self.shape))
            size = np.ldexp(np.arange(128, 256), np.arange(-21, -5)[:, None]).reshape(-1)  # all from 2^-14, float16's least normal one, to 4
            numbers = np.concatenate([-size[::-1], size])
            assert n <= len(numbers), f"{n} distinct numbers, there are {len(numbers)}"
            chosen = numbers[np.linspace(0, len(numbers) - 1, n).round().astype(int)]
            return rng.permutation(chosen).reshape(self.shape).astype(np.float32)
        if self.low is not None:
            return rng.uniform(self.low, self.high, self.shape).astype(np.float32)
        return rng.standard_normal(self.shape).astype(np.float32)


@dataclass(frozen=True)
class I:
    """An integer operand in [low, high)."""
    shape: tuple
    high: int
    low: int = 0

    def make(self, rng: np.random.Generator) -> np.ndarray:
        return rng.integers(self.low, self.high, self.shape).astype(np.int32)


@dataclass(frozen=True)
class B:
    """A boolean operand."""
    shape: tuple

    def make(self, rng: np.random.Generator) -> np.ndarray:
        return rng.random(self.shape) < 0.5


@dataclass(frozen=True)
class Case:
    name: str
    whale: Callable[..., Any]     # (ops, *tensors) -> tensor or tuple of them
    jax: Callable[..., Any]       # (*arrays) -> array or tuple of them
    args: Sequence[Any]
    grad: bool = True
    exact: bool = False           # results are operands, or exact products of them, rounded once: compared bit by bit
    tolerance: float = 1.0        # multiplies the bounds, float64's excepted


CASES: list[Case] = []


def case(name, whale, jax_, *args, **options):
    CASES.append(Case(name, whale, jax_, args, **options))


# ---- elementwise ----------------------------------------------------------------------------------------------------
for name, f in {"add": jnp.add, "sub": jnp.subtract, "mul": jnp.multiply, "maximum": jnp.maximum, "minimum": jnp.minimum,
                "squared_difference": lambda a, b: (a - b) ** 2}.items():
    for i, shapes in enumerate([((5, 7), (5, 7)), ((4, 3, 33), (33,)), ((4, 1, 5), (3, 1)), ((6,), ()), ((2, 3, 4), (2, 1, 1))]):
        case(f"{name}-{i}", lambda o, a, b, n=name: getattr(o, n)(a, b), f, *[F(s) for s in shapes], exact=name in ("maximum", "minimum"))
case("div", lambda o, a, b: o.div(a, b), jnp.divide, F((4, 9)), F((4, 9), 0.5, 2.0))
case("div-broadcast", lambda o, a, b: o.div(a, b), jnp.divide, F((4, 9)), F((4, 1), 0.5, 2.0))
case("pow", lambda o, a, b: o.pow(a, b), jnp.power, F((4, 9), 0.3, 2.0), F((4, 9), -1.5, 2.0), tolerance=4)
case("maximum-ties", lambda o, a, b: o.maximum(o.sign(a), o.sign(b)) * a * b, lambda a, b: jnp.maximum(jnp.sign(a), jnp.sign(b)) * a * b, F((8, 9)), F((8, 9)))
UNARY = {"neg": jnp.negative, "abs": jnp.abs, "exp": jnp.exp, "square": jnp.square, "sin": jnp.sin, "cos": jnp.cos,
         "erf": jax.scipy.special.erf, "tanh": jnp.tanh, "sigmoid": jax.nn.sigmoid, "softplus": jax.nn.softplus, "relu": jax.nn.relu,
         "gelu": lambda x: jax.nn.gelu(x, approximate=True), "gelu_erf": lambda x: jax.nn.gelu(x, approximate=False), "silu": jax.nn.silu}
for name, f in UNARY.items():
    case(name, lambda o, a, n=name: getattr(o, n)(a), f, F((3, 41)), tolerance=2, exact=name in ("neg", "abs", "relu"))
    case(f"{name}-wide", lambda o, a, n=name: getattr(o, n)(a), f, F((3, 19), -6.0, 6.0), tolerance=4, exact=name in ("neg", "abs", "relu"))
POSITIVE = {"log": jnp.log, "log1p": jnp.log1p, "sqrt": jnp.sqrt, "rsqrt": jax.lax.rsqrt, "reciprocal": jnp.reciprocal}
for name, f in POSITIVE.items():
    case(name, lambda o, a, n=name: getattr(o, n)(a), f, F((3, 41), 0.2, 4.0), tolerance=4)
for name, f in {"sign": jnp.sign, "floor": jnp.floor}.items():
    case(name, lambda o, a, n=name: getattr(o, n)(a) * a, lambda a, f=f: jax.lax.stop_gradient(f(a)) * a, F((3, 41), -3.0, 3.0), exact=True)
for name, f in {"equal": jnp.equal, "not_equal": jnp.not_equal, "less": jnp.less, "less_equal": jnp.less_equal,
                "greater": jnp.greater, "greater_equal": jnp.greater_equal}.items():
    case(f"{name}-int", lambda o, a, b, n=name: getattr(o, n)(a, b), f, I((6, 7), 3), I((7,), 3), grad=False)
    case(f"{name}-float", lambda o, a, b, n=name: getattr(o, n)(a, b), f, F((6, 7)), F((6, 7)), grad=False)
case("logical_and", lambda o, a, b: o.logical_and(a, b), jnp.logical_and, B((6, 7)), B((7,)), grad=False)
case("logical_or", lambda o, a, b: o.logical_or(a, b), jnp.logical_or, B((6, 7)), B((6, 1)), grad=False)
case("logical_not", lambda o, a: o.logical_not(a), jnp.logical_not, B((6, 7)), grad=False)
case("where", lambda o, c, a, b: o.where(c, a, b), jnp.where, B((6, 7)), F((6, 7)), F((7,)), exact=True)
case("where-scalar", lambda o, c, a, b: o.where(c, a, b), jnp.where, B((6, 1)), F((6, 7)), F(()), exact=True)
case("cast-int", lambda o, i, a: o.cast(i, dtype=a.dtype) * a, lambda i, a: i.astype(a.dtype) * a, I((5, 6), 100, -100), F((5, 6)), exact=True)
case("cast-to-int", lambda o, a: o.cast(a, dtype="i32"), lambda a: a.astype(jnp.int32), F((5, 6), -9.0, 9.0), grad=False)
case("cast-bool", lambda o, b, a: o.cast(b, dtype=a.dtype) * a, lambda b, a: b.astype(a.dtype) * a, B((5, 6)), F((5, 6)), exact=True)
case("int-arithmetic", lambda o, a, b: o.sub(o.mul(a, b), o.add(a, b)), lambda a, b: a * b - (a + b), I((5, 6), 100, -100), I((6,), 50), grad=False)
case("stop_gradient", lambda o, a: o.stop_gradient(a) * a, lambda a: jax.lax.stop_gradient(a) * a, F((5, 6)))
case("bce_with_logits", lambda o, x, t: o.bce_with_logits(x, t), lambda x, t: jnp.maximum(x, 0) - x * t + jnp.log1p(jnp.exp(-jnp.abs(x))), F((5, 6), -8.0, 8.0), F((5, 6), 0.0, 1.0), tolerance=2)
case("chain", lambda o, a, b, c: o.tanh(a * b + c) * o.sigmoid(a) - b, lambda a, b, c: jnp.tanh(a * b + c) * jax.nn.sigmoid(a) - b, F((64, 65)), F((65,)), F((64, 1)), tolerance=2)

# ---- sources ----------------------------------------------------------------------------------------------------------
case("fill", lambda o, a: o.fill(shape=[3, 4], value=2.5, dtype=a.dtype) * a, lambda a: jnp.full((3, 4), 2.5) * a, F((3, 4)), exact=True)
case("iota", lambda o, a: o.cast(o.iota(shape=[3, 4], dim=1, dtype="i32"), dtype=a.dtype) + a, lambda a: jnp.arange(4)[None, :] + a, F((3, 4)), exact=True)

# ---- reductions -------------------------------------------------------------------------------------------------------
for i, (shape, axes, keep) in enumerate([((4, 5, 6), [], False), ((4, 5, 6), [2], False), ((4, 5, 6), [0], True), ((4, 5, 6), [0, 2], False),
                                         ((4, 5, 6), [1], True), ((70, 33), [-1], False), ((70, 33), [0], False), ((2, 3, 4, 5), [1, 3], True)]):
    ax = tuple(axes) if axes else None
    case(f"reduce_sum-{i}", lambda o, a, x=axes, k=keep: o.reduce_sum(a, axes=x, keep_dims=k), lambda a, x=ax, k=keep: jnp.sum(a, x, keepdims=k), F(shape), tolerance=2)
    case(f"reduce_mean-{i}", lambda o, a, x=axes, k=keep: o.reduce_mean(a, axes=x, keep_dims=k), lambda a, x=ax, k=keep: jnp.mean(a, x, keepdims=k), F(shape), tolerance=2)
    case(f"reduce_max-{i}", lambda o, a, x=axes, k=keep: o.reduce_max(a, axes=x, keep_dims=k), lambda a, x=ax, k=keep: jnp.max(a, x, keepdims=k), F(shape, distinct=True), exact=True)
    case(f"reduce_min-{i}", lambda o, a, x=axes, k=keep: o.reduce_min(a, axes=x, keep_dims=k), lambda a, x=ax, k=keep: jnp.min(a, x, keepdims=k), F(shape, distinct=True), exact=True)
case("reduce_max-ties", lambda o, a: o.reduce_max(o.maximum(a, o.fill(shape=[], value=0.0, dtype=a.dtype)), axes=[1]), lambda a: jnp.max(jnp.maximum(a, 0.0), 1), F((9, 5), -3.0, -0.1), grad=False, exact=True)
case("sum_of_squares", lambda o, a, b: o.sum_of_squares([a, b]), lambda a, b: (a * a).sum() + (b * b).sum(), F((5, 6)), F((70,)), tolerance=4)
for axis in (0, 1, -1):
    case(f"argmax-{axis}", lambda o, a, x=axis: o.argmax(a, axis=x), lambda a, x=axis: jnp.argmax(a, x).astype(jnp.int32), F((6, 7, 8)), grad=False)
case("argmax-ties", lambda o, a: o.argmax(a, axis=1), lambda a: jnp.argmax(a, 1).astype(jnp.int32), I((20, 9), 3), grad=False)
case("cumsum", lambda o, a: o.cumsum(a, axis=1), lambda a: jnp.cumsum(a, 1), F((4, 9)), tolerance=2)
case("cumsum-reverse", lambda o, a: o.cumsum(a, axis=0, reverse=True), lambda a: jnp.cumsum(a[::-1], 0)[::-1], F((4, 9)), tolerance=2)
case("cumsum-exclusive", lambda o, a: o.cumsum(a, axis=1, exclusive=True), lambda a: jnp.cumsum(a, 1) - a, F((4, 9)), tolerance=4)
case("top_k", lambda o, a: o.top_k(a, k=3), lambda a: jax.lax.top_k(a, 3), F((6, 11), distinct=True), exact=True)
case("top_k-ties", lambda o, a: o.top_k(a, k=4)[1], lambda a: jax.lax.top_k(a, 4)[1], I((6, 11), 3), grad=False)

# ---- matmul -----------------------------------------------------------------------------------------------------------
MATMUL = [((5, 7), (7, 3)), ((2, 5, 7), (7, 3)), ((2, 3, 5, 7), (2, 3, 7, 4)), ((33, 65), (65, 17)), ((1, 7), (7, 1)), ((4, 3, 16, 24), (24, 8))]
for i, (sa, sb) in enumerate(MATMUL):
    case(f"matmul-{i}", lambda o, a, b: o.matmul(a, b), jnp.matmul, F(sa), F(sb), tolerance=4)
    st = sb[:-2] + (sb[-1], sb[-2])
    case(f"matmul-tb-{i}", lambda o, a, b: o.matmul(a, b, transpose_b=True), lambda a, b: a @ jnp.swapaxes(b, -1, -2), F(sa), F(st), tolerance=4)
case("matmul-ta", lambda o, a, b: o.matmul(a, b, transpose_a=True), lambda a, b: a.T @ b, F((7, 5)), F((7, 3)), tolerance=4)
case("matmul-ta-batched", lambda o, a, b: o.matmul(a, b, transpose_a=True, transpose_b=True), lambda a, b: jnp.swapaxes(a, -1, -2) @ jnp.swapaxes(b, -1, -2), F((2, 7, 5)), F((2, 3, 7)), tolerance=4)
case("matmul-bias", lambda o, a, b, c: o.matmul(a, b, c), lambda a, b, c: a @ b + c, F((4, 5, 7)), F((7, 3)), F((3,)), tolerance=4)
case("matmul-bias-relu", lambda o, a, b, c: o.relu(o.matmul(a, b, c)), lambda a, b, c: jax.nn.relu(a @ b + c), F((40, 7)), F((7, 9)), F((9,)), tolerance=4)

# ---- movement ---------------------------------------------------------------------------------------------------------
case("reshape", lambda o, a: o.reshape(a, shape=[6, -1]) * o.reshape(a, shape=[6, 4]), lambda a: a.reshape(6, 4) ** 2, F((2, 3, 4)))
for perm in [(1, 0, 2), (2, 0, 1), (0, 2, 1), (2, 1, 0)]:
    case(f"transpose-{''.join(map(str, perm))}", lambda o, a, p=perm: o.transpose(a, perm=list(p)), lambda a, p=perm: jnp.transpose(a, p), F((4, 5, 6)), exact=True)
case("transpose-4d", lambda o, a: o.transpose(a, perm=[0, 2, 1, 3]), lambda a: jnp.transpose(a, (0, 2, 1, 3)), F((2, 3, 4, 17)), exact=True)
case("slice", lambda o, a: o.slice(a, starts=[1, 2], limits=[4, 9]), lambda a: a[1:4, 2:9], F((5, 10)), exact=True)
case("slice-strided", lambda o, a: o.slice(a, starts=[1, 0], limits=[5, 10], strides=[2, 3]), lambda a: a[1:5:2, 0:10:3], F((5, 10)), exact=True)
case("concat", lambda o, a, b, c: o.concat([a, b, c], axis=1), lambda a, b, c: jnp.concatenate([a, b, c], 1), F((3, 2)), F((3, 5)), F((3, 1)), exact=True)
case("concat-0", lambda o, a, b: o.concat([a, b], axis=0), lambda a, b: jnp.concatenate([a, b], 0), F((3, 2)), F((4, 2)), exact=True)
case("pad", lambda o, a: o.pad(a, low=[1, 0], high=[0, 3], value=0.5), lambda a: jnp.pad(a, ((1, 0), (0, 3)), constant_values=0.5), F((3, 4)), exact=True)
case("broadcast_to", lambda o, a: o.broadcast_to(a, shape=[5, 3, 4]), lambda a: jnp.broadcast_to(a, (5, 3, 4)), F((3, 1)), exact=True)
case("gather", lambda o, a, i: o.gather(a, i, axis=0), lambda a, i: jnp.take(a, i, 0), F((6, 5)), I((2, 3), 6), exact=True)
case("gather-1", lambda o, a, i: o.gather(a, i, axis=1), lambda a, i: jnp.take(a, i, 1), F((4, 6, 5)), I((7,), 6), exact=True)
case("one_hot", lambda o, i, a: o.one_hot(i, depth=5, dtype=a.dtype) * a, lambda i, a: jax.nn.one_hot(i, 5) * a, I((6,), 5), F((6, 5)), exact=True)

# ---- embedding, rotary ---------------------------------------------------------------------------------------------------
case("embedding", lambda o, t, i: o.embedding(t, i), lambda t, i: t[i], F((11, 8)), I((4, 5), 11), exact=True)
for mode, pool in (("sum", jnp.sum), ("mean", jnp.mean)):
    for bag in (1, 4):
        case(f"embedding_bag-{mode}-{bag}", lambda o, t, i, m=mode: o.embedding_bag(t, i, mode=m), lambda t, i, p=pool: p(t[i], axis=-2), F((11, 8)), I((3, 5, bag), 11), tolerance=4)


def _pairs(*x):
    x = jnp.stack(x, -2)
    i, j = jnp.tril_indices(x.shape[-2], -1)
    return (x @ jnp.swapaxes(x, -1, -2))[..., i, j]


for n, d in ((2, 5), (5, 8), (19, 33)):
    case(f"pairwise_dot-{n}", lambda o, *x: o.pairwise_dot(x), _pairs, *[F((3, 4, d))] * n, tolerance=8)


def _rotary(x, heads, base=10000.0, interleaved=False):
    b, t, h, d = x.shape
    angle = jnp.arange(t)[:, None] * base ** (-jnp.arange(0, d, 2) / d)
    c, s = jnp.cos(angle)[None, :, None, :], jnp.sin(angle)[None, :, None, :]
    y = x[:, :, :heads]
    if interleaved:
        y1, y2 = y[..., 0::2], y[..., 1::2]
        r = jnp.stack([y1 * c - y2 * s, y2 * c + y1 * s], -1).reshape(y.shape)
    else:
        y1, y2 = y[..., :d // 2], y[..., d // 2:]
        r = jnp.concatenate([y1 * c - y2 * s, y2 * c + y1 * s], -1)
    return jnp.concatenate([r, x[:, :, heads:]], 2)


case("rotary", lambda o, x: o.rotary(x), lambda x: _rotary(x, 3), F((2, 5, 3, 8)), tolerance=4)
case("rotary-heads", lambda o, x: o.rotary(x, heads=2, base=100.0), lambda x: _rotary(x, 2, 100.0), F((2, 5, 3, 8)), tolerance=4)
case("rotary-interleaved", lambda o, x: o.rotary(x, interleaved=True), lambda x: _rotary(x, 3, interleaved=True), F((2, 5, 3, 8)), tolerance=4)


# ---- norms -------------------------------------------------------------------------------------------------------------
def _ln(x, g, b, e):
    m, v = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - m) * jax.lax.rsqrt(v + e) * g + b


def _bn(x, g, b, e=1e-5):
    ax = tuple(range(x.ndim - 1))
    return (x - x.mean(ax)) * jax.lax.rsqrt(x.var(ax) + e) * g + b


case("layer_norm", lambda o, x, g, b: o.layer_norm(x, g, b)[0], lambda x, g, b: _ln(x, g, b, 1e-5), F((4, 5, 32)), F((32,)), F((32,)), tolerance=8)
case("layer_norm-odd", lambda o, x, g, b: o.layer_norm(x, g, b, epsilon=1e-3)[0], lambda x, g, b: _ln(x, g, b, 1e-3), F((7, 13)), F((13,)), F((13,)), tolerance=8)
case("layer_norm-plain", lambda o, x: o.layer_norm(x, None, None)[0], lambda x: _ln(x, 1.0, 0.0, 1e-5), F((7, 48)), tolerance=8)
case("rms_norm", lambda o, x, g: o.rms_norm(x, g)[0], lambda x, g: x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * g, F((4, 5, 32)), F((32,)), tolerance=8)
case("softmax", lambda o, x: o.softmax(x), jax.nn.softmax, F((5, 33)), tolerance=2)
case("log_softmax", lambda o, x: o.log_softmax(x), jax.nn.log_softmax, F((5, 33)), tolerance=4)


# ---- losses -------------------------------------------------------------------------------------------------------------
def _ce(x, y, ignore=-100, smoothing=0.0):
    lp = jax.nn.log_softmax(x)
    safe = jnp.where(y == ignore, 0, y)
    rows = -(1 - smoothing) * jnp.take_along_axis(lp, safe[..., None], -1)[..., 0] - smoothing * lp.mean(-1)
    return jnp.where(y == ignore, 0.0, rows)


case("cross_entropy", lambda o, x, y: o.cross_entropy(x, y)[0], _ce, F((6, 17)), I((6,), 17), tolerance=4)
case("cross_entropy-ignore", lambda o, x, y: o.cross_entropy(x, y, ignore_index=2)[0], lambda x, y: _ce(x, y, 2), F((3, 6, 9)), I((3, 6), 9), tolerance=4)
case("cross_entropy-few", lambda o, x, y: o.cross_entropy(x, y, ignore_index=1, label_smoothing=0.2)[0], lambda x, y: _ce(x, y, 1, smoothing=0.2), F((5, 9, 3)), I((5, 9), 3), tolerance=4)
case("cross_entropy-smooth", lambda o, x, y: o.cross_entropy(x, y, label_smoothing=0.1)[0], lambda x, y: _ce(x, y, smoothing=0.1), F((6, 100)), I((6,), 100), tolerance=4)


# ---- attention ------------------------------------------------------------------------------------------------------------
def _attention(q, k, v, bias=None, causal=False, scale=None):
    h, hk = q.shape[2], k.shape[2]
    k, v = jnp.repeat(k, h // hk, 2), jnp.repeat(v, h // hk, 2)
    s = jnp.einsum("bqhd,bkhd->bhqk", q, k) * (scale or q.shape[-1] ** -0.5)
    if bias is not None:
        s = s + bias
    if causal:
        tq, tk = s.shape[-2:]
        s = jnp.where(jnp.arange(tk)[None, :] <= jnp.arange(tq)[:, None] + tk - tq, s, -jnp.inf)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(s), v)


def _piece(q, k, v, keys, begin):
    """Keys [begin, begin + n) of `keys`, causal: what attention over all of them would be if the others were masked; and the log of its sum."""
    group = q.shape[2] // k.shape[2]
    k, v = jnp.repeat(k, group, 2), jnp.repeat(v, group, 2)
    s = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
    row, col = np.arange(q.shape[1])[:, None], begin + np.arange(k.shape[1])[None]
    s = jnp.where(col <= row + keys - q.shape[1], s, -jnp.inf)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(s), v), jax.scipy.special.logsumexp(s, -1)


def _packed(x, h, hk, **o):
    return _attention(x[:, :, :h], x[:, :, h:h + hk], x[:, :, h + hk:], **o)


case("attention", lambda o, q, k, v: o.attention(q, k, v)[0], _attention, F((2, 5, 3, 8)), F((2, 7, 3, 8)), F((2, 7, 3, 8)), tolerance=8)
case("attention-causal", lambda o, q, k, v: o.attention(q, k, v, causal=True)[0], lambda q, k, v: _attention(q, k, v, causal=True), F((2, 9, 2, 16)), F((2, 9, 2, 16)), F((2, 9, 2, 16)), tolerance=8)
case("attention-causal-longer", lambda o, q, k, v: o.attention(q, k, v, causal=True)[0], lambda q, k, v: _attention(q, k, v, causal=True), F((1, 4, 2, 16)), F((1, 9, 2, 16)), F((1, 9, 2, 16)), tolerance=8)
case("attention-grouped", lambda o, q, k, v: o.attention(q, k, v, causal=True)[0], lambda q, k, v: _attention(q, k, v, causal=True), F((2, 6, 4, 8)), F((2, 6, 2, 8)), F((2, 6, 2, 8)), tolerance=8)
case("attention-piece", lambda o, q, k, v: o.attention(q, k, v, causal=True, keys=12, key_begin=3)[:2], lambda q, k, v: _piece(q, k, v, 12, 3), F((2, 9, 4, 16)), F((2, 5, 2, 16)), F((2, 5, 2, 16)), grad=False, tolerance=8)
case("attention-bias", lambda o, q, k, v, b: o.attention(q, k, v, b, scale=1.0)[0], lambda q, k, v, b: _attention(q, k, v, b, scale=1.0), F((2, 5, 3, 8)), F((2, 7, 3, 8)), F((2, 7, 3, 8)), F((1, 3, 5, 7)), tolerance=8)
case("attention-bias-full", lambda o, q, k, v, b: o.attention(q, k, v, b)[0], _attention, F((2, 5, 3, 8)), F((2, 7, 3, 8)), F((2, 7, 3, 8)), F((2, 1, 5, 7)), tolerance=8)
case("attention-packed", lambda o, x: o.attention(x, None, None, None, kv_heads=2, causal=True)[0], lambda x: _packed(x, 4, 2, causal=True), F((2, 6, 8, 8)), tolerance=8)
case("attention-long", lambda o, x: o.attention(x, None, None, None, kv_heads=2, causal=True)[0], lambda x: _packed(x, 2, 2, causal=True), F((1, 150, 6, 64)), tolerance=16)
case("attention-long-full", lambda o, q, k, v: o.attention(q, k, v)[0], _attention, F((1, 70, 2, 32)), F((1, 130, 2, 32)), F((1, 130, 2, 48)), tolerance=16)


# ---- convolution and pooling ------------------------------------------------------------------------------------------------
def _conv(x, w, b=None, strides=None, padding=None, dilation=None, groups=1):
    r = x.ndim - 2
    s = "DHW"[-r:]
    pads = [(0, 0)] * r if padding is None else [(padding[2 * i], padding[2 * i + 1]) for i in range(r)]
    y = jax.lax.conv_general_dilated(x, w, strides or (1,) * r, pads, rhs_dilation=dilation or (1,) * r, feature_group_count=groups,
                                     dimension_numbers=(f"N{s}C", f"O{s}I", f"N{s}C"), precision="highest")
    return y if b is None else y + b


CONVS = [("1d", F((2, 9, 4)), F((6, 3, 4)), {}), ("1d-stride", F((2, 9, 4)), F((6, 3, 4)), dict(strides=[2], padding=[1, 0])),
         ("2d", F((2, 6, 7, 3)), F((5, 3, 3, 3)), dict(padding=[1, 1, 1, 1])),
         ("2d-stride", F((2, 8, 8, 16)), F((32, 3, 3, 16)), dict(strides=[2, 2], padding=[0, 1, 0, 1])),
         ("2d-1x1", F((2, 5, 5, 8)), F((12, 1, 1, 8)), dict(strides=[2, 2])), ("2d-dilated", F((1, 9, 9, 4)), F((4, 3, 3, 4)), dict(dilation=[2, 2], padding=[2, 2, 2, 2])),
         ("2d-groups", F((2, 6, 6, 8)), F((12, 3, 3, 2)), dict(groups=4, padding=[1, 1, 1, 1])), ("2d-depthwise", F((2, 6, 6, 8)), F((8, 3, 3, 1)), dict(groups=8, padding=[1, 1, 1, 1])),
         ("2d-7x7", F((1, 14, 14, 3)), F((8, 7, 7, 3)), dict(strides=[2, 2], padding=[3, 3, 3, 3])),
         ("2d-1x1-odd", F((2, 5, 7, 3)), F((19, 1, 1, 3)), {}), ("2d-1x1-odd-stride", F((2, 5, 7, 5)), F((3, 1, 1, 5)), dict(strides=[2, 2])),
         ("3d", F((2, 4, 5, 6, 3)), F((5, 3, 3, 3, 3)), dict(padding=[1, 1, 1, 1, 1, 1])), ("3d-16", F((1, 6, 6, 6, 16)), F((16, 3, 3, 3, 16)), dict(padding=[1, 1, 1, 1, 1, 1])),
         ("3d-stride", F((2, 6, 5, 7, 8)), F((16, 3, 2, 3, 8)), dict(strides=[2, 1, 2], padding=[0, 1, 1, 0, 1, 1])),
         ("3d-1x1", F((2, 3, 4, 5, 16)), F((3, 1, 1, 1, 16)), {}), ("3d-one-channel", F((1, 5, 6, 7, 1)), F((16, 3, 3, 3, 1)), dict(padding=[1, 1, 1, 1, 1, 1])),
         ("3d-dilated-groups", F((1, 7, 7, 7, 4)), F((6, 3, 3, 3, 2)), dict(groups=2, dilation=[2, 2, 2], padding=[2, 2, 2, 2, 2, 2]))]
for name, x, w, options in CONVS:
    case(f"conv-{name}", lambda o, x, w, p=options: o.conv(x, w, None, **p), lambda x, w, p=options: _conv(x, w, **p), x, w, tolerance=8)
case("conv-bias", lambda o, x, w, b: o.conv(x, w, b, padding=[1, 1, 1, 1]), lambda x, w, b: _conv(x, w, b, padding=[1, 1, 1, 1]), F((2, 6, 7, 3)), F((5, 3, 3, 3)), F((5,)), tolerance=8)
case("conv-3d-bias", lambda o, x, w, b: o.conv(x, w, b, padding=[1, 1, 1, 1, 1, 1]), lambda x, w, b: _conv(x, w, b, padding=[1, 1, 1, 1, 1, 1]), F((2, 4, 6, 5, 4)), F((16, 3, 3, 3, 4)), F((16,)), tolerance=8)


# Filters are those of the conv that it transposes, [c, k..., o / groups]: JAX convolves x, stretched by the strides, with them turned around.
def _conv_transpose(x, w, b=None, strides=None, padding=None, dilation=None, groups=1, output_padding=None):
    r = x.ndim - 2
    s = "DHW"[-r:]
    strides, dilation, extra = strides or (1,) * r, dilation or (1,) * r, output_padding or (0,) * r
    padding = padding or (0,) * (2 * r)
    span = [dilation[i] * (w.shape[1 + i] - 1) for i in range(r)]
    pads = [(span[i] - padding[2 * i], span[i] - padding[2 * i + 1] + extra[i]) for i in range(r)]
    c, k, og = w.shape[0], w.shape[1:-1], w.shape[-1]
    turned = jnp.flip(w, tuple(range(1, r + 1))).reshape(groups, c // groups, *k, og)
    turned = jnp.moveaxis(turned, -1, 1).reshape(groups * og, c // groups, *k)
    y = jax.lax.conv_general_dilated(x, turned, (1,) * r, pads, lhs_dilation=strides, rhs_dilation=dilation, feature_group_count=groups,
                                     dimension_numbers=(f"N{s}C", f"OI{s}", f"N{s}C"), precision="highest")
    return y if b is None else y + b


TRANSPOSED = [("1d", F((2, 5, 4)), F((4, 3, 6)), dict(strides=[2])), ("2d", F((2, 4, 5, 3)), F((3, 3, 3, 5)), dict(padding=[1, 1, 1, 1])),
              ("2d-stride", F((2, 4, 5, 16)), F((16, 3, 3, 32)), dict(strides=[2, 2], padding=[1, 0, 1, 1], output_padding=[1, 0])),
              ("2d-groups", F((2, 4, 5, 8)), F((8, 3, 3, 3)), dict(groups=2, strides=[2, 1])), ("2d-dilated", F((1, 5, 5, 4)), F((4, 3, 3, 4)), dict(dilation=[2, 2], padding=[1, 2, 2, 1])),
              ("3d", F((2, 3, 4, 5, 3)), F((3, 3, 3, 3, 5)), dict(padding=[1, 1, 1, 1, 1, 1])), ("3d-up", F((1, 4, 3, 5, 32)), F((32, 2, 2, 2, 16)), dict(strides=[2, 2, 2])),
              ("3d-overlap", F((1, 4, 3, 4, 16)), F((16, 3, 3, 3, 8)), dict(strides=[2, 2, 2], padding=[1, 1, 1, 1, 1, 1], output_padding=[1, 1, 1])),
              ("2d-tiles", F((2, 3, 4, 5)), F((5, 3, 2, 7)), dict(strides=[3, 2])), ("1d-tiles", F((2, 5, 8)), F((8, 2, 16)), dict(strides=[2])),
              ("3d-gaps", F((1, 3, 3, 3, 4)), F((4, 1, 2, 1, 4)), dict(strides=[2, 3, 2]))]
for name, x, w, options in TRANSPOSED:
    case(f"conv_transpose-{name}", lambda o, x, w, p=options: o.conv_transpose(x, w, None, **p), lambda x, w, p=options: _conv_transpose(x, w, **p), x, w, tolerance=8)
for name, x, w, options in TRANSPOSED[2], TRANSPOSED[6]:
    case(f"conv_transpose-bias-{name}", lambda o, x, w, b, p=options: o.conv_transpose(x, w, b, **p), lambda x, w, b, p=options: _conv_transpose(x, w, b, **p), x, w, F((w.shape[-1],)), tolerance=8)


def _pool(x, f, init, window, strides, padding):
    return jax.lax.reduce_window(x, init, f, (1, *window, 1), (1, *strides, 1), [(0, 0), *[(padding[2 * i], padding[2 * i + 1]) for i in range(len(window))], (0, 0)])


POOLS = [((2, 6, 6, 5), [2, 2], [2, 2], [0, 0, 0, 0]), ((2, 7, 7, 20), [3, 3], [2, 2], [1, 1, 1, 1]), ((2, 9, 5), [3], [1], [1, 1]),
         ((2, 4, 6, 4, 5), [2, 2, 2], [2, 2, 2], [0] * 6), ((1, 5, 7, 6, 16), [3, 2, 3], [2, 2, 1], [1, 1, 0, 1, 1, 0])]
for i, (shape, w, s, p) in enumerate(POOLS):
    case(f"max_pool-{i}", lambda o, x, w=w, s=s, p=p: o.max_pool(x, window=w, strides=s, padding=p)[0], lambda x, w=w, s=s, p=p: _pool(x, jax.lax.max, -jnp.inf, w, s, p), F(shape, distinct=True), exact=True)
    case(f"avg_pool-{i}", lambda o, x, w=w, s=s, p=p: o.avg_pool(x, window=w, strides=s, padding=p, include_pad=True), lambda x, w=w, s=s, p=p: _pool(x, jax.lax.add, 0.0, w, s, p) / float(np.prod(w)), F(shape), tolerance=2)
    case(f"avg_pool-exclude-{i}", lambda o, x, w=w, s=s, p=p: o.avg_pool(x, window=w, strides=s, padding=p), lambda x, w=w, s=s, p=p: _pool(x, jax.lax.add, 0.0, w, s, p) / _pool(jnp.ones_like(x), jax.lax.add, 0.0, w, s, p), F(shape), tolerance=2)


# Batch norm: in training, with the statistics of the batch; x carries the batch, so that it also runs on several devices.
def _whale_bn(o, x, g, b, groups=1):
    import whale as wh
    c = x.shape[-1]
    mean = wh.parameter("running_mean", (c,), wh.zeros(), buffer=True, trainable=False)
    var = wh.parameter("running_var", (c,), wh.ones(), buffer=True, trainable=False)
    return o.batch_norm(x, g, b, mean, var, groups=groups)


case("batch_norm", _whale_bn, _bn, F((4, 5, 6, 16)), F((16,)), F((16,)), tolerance=16)
case("batch_norm-odd", _whale_bn, _bn, F((9, 5)), F((5,)), F((5,)), tolerance=16)
case("batch_norm-groups", lambda o, x, g, b: _whale_bn(o, x, g, b, 3), lambda x, g, b: jax.vmap(lambda y: _bn(y, g, b))(x.reshape(3, 4, *x.shape[1:])).reshape(x.shape), F((12, 3, 5)), F((5,)), F((5,)), tolerance=16)


# ---- mixture of experts: one-hot masks and einsum, as GShard writes it --------------------------------------------------------
def _gate(logits, k, capacity, normalize=False):
    g, s, e = logits.shape
    p = jax.nn.softmax(logits, axis=-1)
    top = jax.lax.top_k(logits, k)[1]
    chosen = jax.nn.one_hot(top, e, dtype=jnp.int32)                                   # [g, s, k, e]
    in_order = jnp.swapaxes(chosen, 1, 2).reshape(g, k * s, e)                         # all first choices, then all second ones
    place = jnp.cumsum(in_order, axis=1) - in_order
    place = jnp.swapaxes((place * in_order).sum(-1).reshape(g, k, s), 1, 2)
    kept = place < capacity
    weight = jnp.take_along_axis(p, top, axis=-1)
    if normalize:
        weight = weight / weight.sum(-1, keepdims=True)
    share = jax.lax.stop_gradient(chosen[:, :, 0].astype(p.dtype).mean(1))
    return (jnp.where(kept, top * capacity + place, -1).astype(jnp.int32), jnp.where(kept, weight, 0),
            e * (share * p.mean(1)).sum(-1), (~kept).sum((1, 2)).astype(jnp.int32))


def _slots(slot, experts, capacity, dtype):  # [g, s, k, e, c]
    return jax.nn.one_hot(slot, experts * capacity, dtype=dtype).reshape(*slot.shape, experts, capacity)


def _moe(x, logits, k=1, capacity=3, normalize=False):
    e = logits.shape[-1]
    slot, weight, aux, dropped = _gate(logits, k, capacity, normalize)
    mask = _slots(slot, e, capacity, x.dtype)
    y = jnp.tanh(jnp.einsum("gskec,gsd->egcd", mask, x)) * (1 + jnp.arange(e, dtype=x.dtype)[:, None, None, None])
    return jnp.einsum("gskec,egcd,gsk->gsd", mask, y, weight), aux, dropped


def _whale_moe(o, x, logits, k=1, capacity=3, normalize=False):
    e = logits.shape[-1]
    slot, weight, aux, dropped = o.moe_gate(logits, k=k, capacity=capacity, normalize=normalize)
    y = o.tanh(o.moe_dispatch(x, slot, experts=e, capacity=capacity))
    y = y * (o.cast(o.iota(shape=[e, 1, 1, 1], dim=0, dtype="i32"), dtype=y.dtype) + 1.0)
    return o.moe_combine(y, slot, weight.astype(y.dtype)), aux, dropped


_SLOT = np.array([[[2, 0], [-1, 5], [3, -1], [1, 4], [-1, -1]], [[0, 4], [2, -1], [1, 3], [5, -1], [-1, -1]]], np.int32)  # 3 experts of 2


def _constant(o, x, slot):
    """Slots as a value of the graph."""
    planes = [o.fill(shape=[1], value=float(v), dtype="i32") for v in slot.reshape(-1)]
    return o.reshape(o.concat(planes, axis=0), shape=list(slot.shape))


for name, shape, options in [("top1", (2, 9, 4), dict(k=1, capacity=3)), ("top2", (2, 9, 4), dict(k=2, capacity=4)), ("tight", (3, 12, 5), dict(k=2, capacity=2)),
                             ("normalized", (2, 9, 4), dict(k=2, capacity=3, normalize=True)), ("wide", (1, 40, 16), dict(k=3, capacity=6, normalize=True))]:
    case(f"moe_gate-{name}", lambda o, x, p=options: o.moe_gate(x, **p), lambda x, p=options: _gate(x, **p), F(shape, distinct=True), tolerance=4)
    case(f"moe-{name}", lambda o, x, l, p=options: _whale_moe(o, x, l, **p), lambda x, l, p=options: _moe(x, l, **p), F((*shape[:2], 21)), F(shape, distinct=True), tolerance=8)
case("moe_gate-factor", lambda o, x: o.moe_gate(x, k=2, capacity_factor=0.75), lambda x: _gate(x, 2, 4), F((2, 9, 4), distinct=True), tolerance=4)
case("moe_gate-ties", lambda o, x: o.moe_gate(o.sign(x), k=2, capacity=4), lambda x: _gate(jnp.sign(x), 2, 4), F((2, 9, 4)), grad=False)
case("moe_dispatch-weight", lambda o, x, w: o.moe_dispatch(x, _constant(o, x, _SLOT), w, experts=3, capacity=2), lambda x, w: jnp.einsum("gskec,gsd,gsk->egcd", _slots(_SLOT, 3, 2, x.dtype), x, w), F((2, 5, 7)), F((2, 5, 2)), tolerance=4)
case("moe_combine-plain", lambda o, y: o.moe_combine(y, _constant(o, y, _SLOT)), lambda y: jnp.einsum("gskec,egcd->gsd", _slots(_SLOT, 3, 2, y.dtype), y), F((3, 2, 2, 33)), tolerance=4)
