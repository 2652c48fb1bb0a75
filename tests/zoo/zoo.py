"""The models of examples/python/zoo, small, for the tests."""

import contextlib
import importlib
import pathlib
import sys

import whale as wh

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "examples" / "python" / "zoo"
# model() and data() of each take these; every extent that a strategy of the suite may cut is large enough.
SIZES = {
    "vit": dict(model=dict(dim=16, heads=4, size=8, patch=4, layers=2), data=dict(size=8)),
    "convnext": dict(model=dict(size=8, dims=(6, 8), depth=1), data=dict(size=8)),
    "llama": dict(model=dict(length=6, vocabulary=40, dim=16, heads=4, kv_heads=2, layers=2), data=dict(length=6, vocabulary=40)),
    "mixer": dict(model=dict(size=8, patch=4, dim=8, layers=2), data=dict(size=8)),
    "unet": dict(model=dict(size=8, channels=4, levels=1), data=dict(size=8)),
    "lstm": dict(model=dict(length=4, hidden=6, layers=2), data=dict(length=4)),
    "tied": dict(model=dict(length=4, vocabulary=9, dim=8, heads=4), data=dict(length=4, vocabulary=9)),
    "vae": dict(model=dict(size=6, hidden=12, latent=2), data=dict(size=6, latent=2)),
}


def module(name):
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))
    return importlib.import_module(name)


@contextlib.contextmanager
def without_annotations():
    """The primitives do nothing: what is built has no strategy of its own."""
    kept = {name: getattr(wh, name) for name in ("replica", "split", "stage", "pipeline", "cluster")}
    for name in kept:
        setattr(wh, name, lambda *_, **__: contextlib.nullcontext())
    try:
        yield
    finally:
        for name, primitive in kept.items():
            setattr(wh, name, primitive)


def graph(name, batch=6, annotated=False):
    with contextlib.nullcontext() if annotated else without_annotations():
        return module(name).model(batch=batch, **SIZES[name]["model"])


def data(name, seed, batch=6):
    return module(name).data(seed, batch=batch, **SIZES[name]["data"])
