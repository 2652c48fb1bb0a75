#!/usr/bin/env bash
# Builds the wheel, installs it into a fresh environment, and takes a training step from there. $1: python with build tools.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(realpath "$1")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
PATH=$(dirname "$1"):$PATH "$1" -m build --wheel --no-isolation -o "$folder" . >"$folder/log" 2>&1 || { tail -30 "$folder/log"; exit 1; }
ls -l "$folder"/*.whl
case $(ls "$folder"/*.whl) in *py3-none-*) ;; *) echo "the wheel is not py3-none"; exit 1 ;; esac
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check "$folder"/*.whl
cd "$folder"
env -u PYTHONPATH -u WHALE_LIBRARY "$folder/venv/bin/python" - <<'PYTHON'
import numpy as np
import whale as wh
g = wh.Graph()
with g:
    x, y = wh.input("x", (8, 4)), wh.input("y", (8,), wh.int32)
    with wh.replica():
        loss = wh.nn.cross_entropy(wh.nn.linear(x, 3), y)
    g.minimize(loss, wh.SGD(0.1))
job = wh.plan(g, devices="cpu:2").start(seed=0)
losses = [job.step(x=np.ones((8, 4), np.float32), y=np.zeros(8, np.int32)) for _ in range(5)]
assert losses[-1] < losses[0], losses
print(f"whale {wh.__version__} from the wheel: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
PYTHON
