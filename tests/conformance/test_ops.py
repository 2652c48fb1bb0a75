"""Every op, forward and gradient, against JAX in float64."""

import functools
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
import jax

jax.config.update("jax_enable_x64", True)
import jax.numpy as jnp
import numpy as np
import pytest
import whale as wh
from cases import CASES, B, Case, F, I

# device, precision, relative bound on max |difference| / (1 + max |value|). Half formats round by u at most (2^-8 for bfloat16, 2^-11 for float16).
# Operands are exact and sums are float32: a result is rounded once, and in cases of two ops the value between them once more, so 2 u; in a gradient
# dy is rounded as well, and a rounded operand multiplies it: 4 u. Measured: 1.45 u and 2.6 u (the mixtures of experts, division).
RUNS = [("ref:1", "float64", 1e-11), ("ref:1", "float32", 3e-6), ("cpu:1", "float32", 6e-6), ("cpu:1", "bfloat16", 2 * 2**-8), ("cpu:1", "float16", 2 * 2**-11)]
HALF = {"bfloat16": wh.bfloat16, "float16": wh.float16}


def as_tuple(value):
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def data_of(case: Case):
    rng = np.random.default_rng(sum(map(ord, case.name)))
    return [arg.make(rng) for arg in case.args], rng


@functools.cache
def oracle(case: Case):
    """Operands and weights -> (results, gradients of the floating operands), by JAX; compiled once for all runs of the case."""
    def compute(arrays, weights):
        floating = [i for i, a in enumerate(arrays) if a.dtype == jnp.float64]

        def loss(values):
            full = list(arrays)
            for i, v in zip(floating, values):
                full[i] = v
            results = as_tuple(case.jax(*full))
            return sum(jnp.sum(r * w) for r, w in zip(results, weights) if jnp.issubdtype(r.dtype, jnp.floating)), results

        values = [arrays[i] for i in floating]
        if not case.grad:
            return loss(values)[1], {}
        (_, results), grads = jax.value_and_grad(loss, has_aux=True)(values)
        return results, dict(zip(floating, grads))

    return jax.jit(compute)


def expected(case: Case, arrays, weights):
    """Results and gradients in float64."""
    results, grads = oracle(case)([a.astype(np.float64) if a.dtype == np.float32 else a for a in arrays], weights)
    return [np.asarray(r) for r in results], {i: np.asarray(g) for i, g in grads.items()}


def actual(case: Case, arrays, weights, devices: str, precision: str):
    g = wh.Graph(case.name)
    with g:
        values = []
        for i, a in enumerate(arrays):
            if a.dtype == np.float32 and case.grad:
                values.append(wh.parameter(f"a{i}", a.shape))
            else:
                values.append(wh.input(f"a{i}", a.shape, a.dtype, batch_dim=-1))
        computed = [v.astype(HALF[precision]) if precision in HALF and v.dtype == wh.float32 else v for v in values]
        results = as_tuple(case.whale(wh.ops, *computed))
        results = [r.astype(wh.float32) if r.dtype in HALF.values() else r for r in results]
        for k, r in enumerate(results):
            g.output(f"r{k}", r)
        if case.grad:
            terms = [(r * wh.input(f"w{k}", r.shape, batch_dim=-1)).sum() for k, r in enumerate(results) if r.dtype == wh.float32]
            g.minimize(sum(terms[1:], terms[0]), wh.SGD(0.0))
    floating = [i for i, a in enumerate(arrays) if a.dtype == np.float32]
    fetch = [f"grad:a{i}" for i in floating] if case.grad else []
    job = wh.plan(g, devices=devices, fetch=fetch, precision="float64" if precision == "float64" else None).start()
    feeds = {f"a{i}": a for i, a in enumerate(arrays) if not (a.dtype == np.float32 and case.grad)}
    names = [f"r{k}" for k in range(len(results))]
    if not case.grad:
        out = job.eval(names, **feeds)
        return [out[n] for n in names], {}
    for i in floating:
        job.write(f"a{i}", arrays[i])
    feeds |= {f"w{k}": w for k, (r, w) in enumerate(zip(results, weights)) if r.dtype == wh.float32}
    _, out = job.step([*names, *fetch], **feeds)
    return [out[n] for n in names], {i: out[f"grad:a{i}"] for i in floating}


def weights_for(case: Case, arrays, rng):
    results = as_tuple(jax.eval_shape(case.jax, *arrays))
    return [rng.standard_normal(r.shape).astype(np.float32) for r in results]


def close(name, got, want, bound, rounded_to=None):
    """Within a relative bound; with `rounded_to`, what one rounding to that type gives."""
    got, want = np.asarray(got), np.asarray(want)
    assert got.shape == want.shape, f"{name}: shape {got.shape}, expected {want.shape}"
    if not np.issubdtype(want.dtype, np.floating):
        assert np.array_equal(got.astype(want.dtype), want), f"{name} differs"
        return
    if rounded_to is not None:
        wanted = want.astype(rounded_to).astype(np.float64)
        at = np.argwhere(got.astype(np.float64) != wanted)
        assert not len(at), f"{name}: {got[tuple(at[0])]} at {at[0].tolist()}, {wanted[tuple(at[0])]} expected; {len(at)} of {want.size} differ"
        return
    scale = 1 + np.abs(want).max() if want.size else 1.0
    error = np.abs(got.astype(np.float64) - want).max() / scale if want.size else 0.0
    assert error <= bound, f"{name}: relative error {error:.2e} above {bound:.0e}"


@pytest.mark.parametrize("case,devices,precision,bound", [
    pytest.param(case, *run, id=f"{case.name}-{run[0].split(':')[0]}-{run[1]}") for case in CASES for run in RUNS
    if run[1] not in HALF or any(isinstance(a, F) for a in case.args)])
def test_op(case: Case, devices: str, precision: str, bound: float):
    arrays, rng = data_of(case)
    number = HALF[precision].numpy if precision in HALF else np.dtype(precision)
    if precision in HALF:  # the operands that both sides see are exactly representable
        arrays = [a.astype(number).astype(np.float32) if a.dtype == np.float32 else a for a in arrays]
    weights = weights_for(case, arrays, rng)
    want, want_grads = expected(case, arrays, weights)
    got, got_grads = actual(case, arrays, weights, devices, precision)
    scale = case.tolerance if precision == "float32" else 1.0
    for k, (a, b) in enumerate(zip(got, want)):
        close(f"result {k}", a, b, bound * scale, number if case.exact else None)
    for i, b in want_grads.items():
        close(f"gradient of operand {i}", got_grads[i], b, bound * scale * (2 if precision in HALF else 1))


def philox(index, iteration, key):
    """Words of Philox4x32-10 (Salmon et al., 2011) for blocks `index`: an array [..., 4] of uint32."""
    low = np.uint64(0xFFFFFFFF)
    c = [index & low, index >> np.uint64(32), np.full_like(index, iteration), np.zeros_like(index)]
    k0, k1 = int(key) & 0xFFFFFFFF, int(key) >> 32
    for _ in range(10):
        a, b = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        c = [(b >> np.uint64(32)) ^ c[1] ^ np.uint64(k0), b & low, (a >> np.uint64(32)) ^ c[3] ^ np.uint64(k1), a & low]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack(c, -1)


def mix64(x):
    x = (x + 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


@pytest.mark.parametrize("devices,strategy", [("1", ""), ("3", "replica(3, shares=[1,3,2])"), ("4", "replica(2) > split(2)")])
@pytest.mark.parametrize("kind,precision,bound", [(d.split(":")[0], p, b) for d, p, b in RUNS], ids=[f"{d.split(':')[0]}-{p}" for d, p, _ in RUNS])
def test_dropout(kind, precision, bound, devices, strategy):
    """The mask is that of Philox by (seed, op, iteration, global element), written again here, on any number of devices; its gradient too."""
    rate, seed, shape = 0.3, 7, (12, 5)
    g = wh.Graph("dropout")
    with g:
        x, w = wh.input("x", shape), wh.parameter("w", shape[1:])
        y = x * w
        y = y.astype(HALF[precision]) if precision in HALF else y
        dropped = wh.ops.dropout(y, rate=rate).astype(wh.float32)
        g.output("dropped", dropped)
        g.minimize((dropped * wh.input("dy", shape)).sum(), wh.SGD(0.0))
    op = next(i for i, each in enumerate(g.to_dict()["ops"]) if each["op"] == "dropout")
    job = wh.plan(g, devices=f"{kind}:{devices}", strategy=strategy or None, fetch=["grad:w"], precision="float64" if precision == "float64" else None).start(seed=seed)
    rng = np.random.default_rng(1)
    job.write("w", np.ones(shape[1:], np.float32))
    for iteration in range(3):
        data, dy = (rng.standard_normal(shape).astype(HALF[precision].numpy if precision in HALF else np.float32).astype(np.float32) for _ in range(2))
        words = philox(np.arange(np.prod(shape) // 4, dtype=np.uint64), iteration, mix64(seed + mix64(2**32 + op))).reshape(shape)
        kept = (words >= np.uint64(rate * 2**32)) / (1 - rate)
        _, out = job.step(["dropped", "grad:w"], x=data, dy=dy)
        close("dropped", out["dropped"], data * kept, bound)
        close("gradient", out["grad:w"], (data * kept * dy).astype(np.float64).sum(0), 2 * bound)


def test_every_public_op_has_a_case():
    """An op that SDKs offer appears in the table, or here with the test that covers it."""
    elsewhere = {"dropout"}  # test_dropout
    source = open(os.path.join(os.path.dirname(__file__), "cases.py")).read()
    missing = [name for name in wh.ops.__all__ if name not in elsewhere and f".{name}(" not in source and f'"{name}"' not in source]
    assert not missing, f"no case for {missing}"
