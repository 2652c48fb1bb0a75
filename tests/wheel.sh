#!/usr/bin/env bash
# Builds the wheel, installs it into a fresh environment, and takes a training step from there. $1: python with build tools.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
PATH=$(dirname "$1"):$PATH "$1" -m build --wheel --no-isolation -o "$folder" . >"$folder/log" 2>&1 || { tail -30 "$folder/log"; exit 1; }
ls -l "$folder"/*.whl
bytes=$(python3 -c 'import sys, zipfile; print(sum(f.file_size for f in zipfile.ZipFile(sys.argv[1]).infolist()))' "$folder"/*.whl)
echo "$((bytes / 1000000)) MB installed, without Python and numpy"
[ "$bytes" -lt 60000000 ] || { echo "the wheel is larger than 60 MB"; exit 1; }
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
with open("/proc/self/maps") as maps:
    used = {line.split()[-1] for line in maps if ".so" in line}
for name in ("libwhale.so", "libwhale_cpu.so", "libdnnl.so", "libOpenCL.so", "libgomp.so", "libhwy.so"):
    found = [path for path in used if name in path and "numpy" not in path]
    assert len(found) == 1 and ".libwhale.mesonpy.libs" in found[0], f"{name} is not the one of the wheel: {found}"
print(f"whale {wh.__version__} from the wheel: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
PYTHON
