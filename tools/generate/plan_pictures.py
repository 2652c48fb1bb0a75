#!/usr/bin/env python3
"""Draws docs/pictures/{primitive}.svg from real plans: which device holds which part of which tensor, and for pipelines who computes what when.

usage: plan_pictures.py [--check]     needs the Python SDK and numpy; no device is opened"""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "sdk/python"))

import whale as wh  # noqa: E402
from whale.display import _box, _svg, _text  # noqa: E402

BLUE, ORANGE, GREEN, EMPTY = "#4c78a8", "#f58518", "#54a24b", "#f1f1f1"
ROW, PART, LEFT = 54, 40, 190


def gpt(layers: int = 2) -> wh.Graph:
    g = wh.Graph("gpt")
    with g:
        tokens, targets = wh.input("tokens", (8, 16), wh.int32), wh.input("targets", (8, 16), wh.int32)
        x = wh.nn.embedding(tokens, 64, 32, name="tokens")
        for i in range(layers):
            x = wh.nn.transformer_block(x, heads=4, causal=True, name=f"block{i}")
        loss = wh.nn.cross_entropy(wh.nn.linear(wh.nn.layer_norm(x), 64, bias=False, name="head"), targets)
        g.minimize(loss, wh.AdamW(1e-3))
    return g


def classifier() -> wh.Graph:
    g = wh.Graph("classifier")
    with g:
        x, y = wh.input("features", (8, 32)), wh.input("labels", (8,), wh.int32)
        with wh.replica(2):
            h = wh.ops.relu(wh.nn.linear(x, 64, name="backbone"))
        with wh.split(2):
            loss = wh.nn.cross_entropy(wh.nn.linear(h, 1000, name="classifier"), y)
        g.minimize(loss, wh.SGD(0.1))
    return g


def stages() -> wh.Graph:
    g = wh.Graph("stages")
    with g:
        x, y = wh.input("x", (8, 32)), wh.input("y", (8,), wh.int32)
        with wh.pipeline(micro_batches=2):
            with wh.stage(1):
                h = wh.ops.relu(wh.nn.linear(x, 64, name="first"))
            with wh.stage(2), wh.split(2):
                h = wh.ops.relu(wh.nn.linear(h, 256, name="second"))
                loss = wh.nn.cross_entropy(wh.nn.linear(h, 10, name="third"), y)
        g.minimize(loss, wh.AdamW(1e-3))
    return g


def cut(extent: int, ways: int, k: int) -> tuple[int, int]:
    """Part k of `ways` equal ones, the larger first."""
    size, more = divmod(extent, ways)
    begin = k * size + min(k, more)
    return begin, begin + size + (k < more)


def storage_shardings(text: str) -> dict[str, dict]:
    """Variables of a printed plan: dims, role, and the cuts {axis: (dim, outer, inner)}."""
    out = {}
    for line in text.splitlines():
        m = re.match(r"  variable \d+ (\S+) \w+\[([\d, ]*)\] (\w+)(.*)", line)
        if m:
            cuts = [(axis, int(dim), int(outer or 1), int(inner or 1))
                    for axis, dim, outer, inner in re.findall(r"([\w|]+)(?: state)? dim (\d+)(?: \((\d+),(\d+)\))?", m[4])]
            out[m[1]] = dict(dims=[int(d) for d in m[2].split(",") if d.strip()], role=m[3], cuts=cuts)
    return out


def intervals(extent: int, pieces: list[tuple[int, int, int, int]]) -> list[tuple[int, int]]:
    """What is held of a dimension after cuts (outer, inner, ways, coordinate), the outer axis first."""
    if not pieces:
        return [(0, extent)]
    outer, inner = pieces[0][:2]
    begin, end = 0, extent // (outer * inner)
    for _, _, ways, k in pieces:
        a, b = cut(end - begin, ways, k)
        begin, end = begin + a, begin + b
    middle = extent // (outer * inner)
    return [((o * middle + begin) * inner, (o * middle + end) * inner) for o in range(outer)]


def held(x: float, y: float, w: float, h: float, variable: dict, axes: dict, color: str) -> str:
    """The tensor as a rectangle, its part of this device filled."""
    dims = variable["dims"] if len(variable["dims"]) > 1 else [1, *variable["dims"]]
    shift = len(dims) - len(variable["dims"])
    part = [intervals(e, [(o, i, *axes[a]) for a, dim, o, i in variable["cuts"] if dim + shift == d]) for d, e in enumerate(dims[-2:], len(dims) - 2)]
    body = _box(x, y, w, h, EMPTY)
    for a, b in part[0]:
        for c, d in part[1]:
            if b > a and d > c:
                body += _box(x + c / dims[-1] * w, y + a / dims[-2] * h, (d - c) / dims[-1] * w, (b - a) / dims[-2] * h, color)
    return body + f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" fill="none" stroke="#999"/>'


def places(title: str, plan: wh.job.Plan, tensors: list[str], note: str = "") -> str:
    """A row a device, a column a tensor."""
    info, found = plan.to_dict(), storage_shardings(plan.print())
    entry = info["entries"][0]
    width = LEFT + 130 + 120 * len(tensors)
    body = [_text(12, 22, title, weight="bold", size=14)]
    body.append(_text(LEFT, 50, "samples", color="#555"))
    body.append(_text(LEFT, 64, f"[{entry['batch']}]", color="#555", size=11))
    for k, name in enumerate(tensors):
        x = LEFT + 130 + 120 * k
        body.append(_text(x, 50, name.replace(".weight", "").replace("attention.", ""), color="#555"))
        body.append(_text(x, 64, str(found[name]["dims"]), color="#555", size=11))
    y = 76.0
    variable_mesh = {v["name"]: v["mesh"] for v in info["variables"]}
    for row in entry["rows"]:
        mesh = info["meshes"][row["mesh"]]
        axes = {a["name"]: (a["size"], c) for a, c in zip(mesh["axes"], row["coordinates"])}
        body.append(_text(12, y + 17, f"device {row['device']}", weight="bold"))
        where = ([f"stage {row['mesh']}"] if len(info["meshes"]) > 1 else []) + [f"{a} {c}" for a, (n, c) in axes.items() if n > 1]
        body.append(_text(12, y + 33, ", ".join(where), color="#555", size=11))
        begin, end = row["samples"]
        body.append(_box(LEFT, y, 100, PART, EMPTY))
        if end > begin:
            body.append(_box(LEFT + 100 * begin / entry["batch"], y, 100 * (end - begin) / entry["batch"], PART, ORANGE))
        body.append(f'<rect x="{LEFT}" y="{y:.1f}" width="100" height="{PART}" fill="none" stroke="#999"/>')
        for k, name in enumerate(tensors):
            x = LEFT + 130 + 120 * k
            if variable_mesh[name] == row["mesh"]:
                body.append(held(x, y, 96, PART, found[name], axes, GREEN if found[name]["role"] == "state" else BLUE))
            else:
                body.append(f'<rect x="{x}" y="{y:.1f}" width="96" height="{PART}" fill="none" stroke="#ccc" stroke-dasharray="3 3"/>')
        y += ROW
    if note:
        body.append(_text(12, y + 12, note, color="#555"))
        y += 22
    return _svg(width, y + 6, body)


def played(plan: wh.job.Plan) -> list[tuple[int, list[tuple[str, int, int, float, float]]]]:
    """Per row of the entry the items (kind, stage, micro-batch, start, end) of the plan's schedule: the forward of all that a device has takes 1,
    its backward 2, of which 1 for the weights."""
    entry = plan.to_dict()["entries"][0]
    programs, done, clocks = entry["programs"], {}, {}
    stages = max(int(s["name"].split(".")[1]) for p in programs for s in p["segments"] if "." in s["name"]) + 1
    apart = any(s["name"].startswith("weight.") for p in programs for s in p["segments"])
    unit = len({r["mesh"] for r in entry["rows"]}) / stages
    seconds = {"forward": unit, "backward": unit * (1 if apart else 2), "weight": unit}
    items = {r["device"]: [(programs[r["program"]]["segments"][s["segment"]]["name"], s["micro_batch"]) for s in programs[r["program"]]["schedule"]]
             for r in entry["rows"]}
    items = {d: [(n.split(".")[0], int(n.split(".")[1].split("/")[0]), u) for n, u in list_ if "." in n] for d, list_ in items.items()}
    at, out = dict.fromkeys(items, 0), {d: [] for d in items}
    while any(at[d] < len(items[d]) for d in items):
        moved = False
        for d in items:
            while at[d] < len(items[d]):
                kind, stage, u = items[d][at[d]]
                needs = [(kind, stage - 1, u)] if kind == "forward" and stage else []
                if kind == "backward" and stage + 1 < stages:
                    needs.append((kind, stage + 1, u))
                if kind != "forward":
                    needs.append(("forward", stage, u))
                if any(n not in done for n in needs):
                    break
                start = max([clocks.get(d, 0.0), *[done[n] for n in needs]])
                done[kind, stage, u] = clocks[d] = start + seconds[kind]
                out[d].append((kind, stage, u, start, clocks[d]))
                at[d] += 1
                moved = True
        assert moved, "the schedule waits for itself"
    return [(r["device"], out[r["device"]]) for r in entry["rows"]]


def times(plans: list[tuple[str, wh.job.Plan]]) -> str:
    width, body, y = 860, [], 8.0
    x = 12.0
    for name, color in (("forward", BLUE), ("backward", ORANGE), ("weight gradients", GREEN)):
        body.append(_box(x, y + 6, 10, 10, color) + _text(x + 14, y + 15, name, color="#555"))
        x += 34 + 7 * len(name)
    body.append(_text(x, y + 15, "numbers: micro-batches; pale: the second of two stages on one device", color="#555"))
    y += 30
    all_rows = [(label, plan, played(plan)) for label, plan in plans]
    longest = max(i[4] for _, _, rows in all_rows for _, items in rows for i in items)
    for label, plan, rows in all_rows:
        last = max(i[4] for _, items in rows for i in items)
        busy = sum(i[4] - i[3] for _, items in rows for i in items)
        body.append(_text(12, y + 14, f"{label}: {last:g} units, {100 - 100 * busy / last / len(rows):.0f} % of them idle", weight="bold"))
        y += 22
        for device, items in rows:
            body.append(_text(12, y + 14, f"device {device}"))
            body.append(_box(80, y, (width - 92) * last / longest, 18, EMPTY))
            first = min(i[1] for i in items)
            for kind, stage, u, start, end in items:
                x, w = 80 + (width - 92) * start / longest, (width - 92) * (end - start) / longest - 1
                color = {"forward": BLUE, "backward": ORANGE, "weight": GREEN}[kind]
                body.append(f'<rect x="{x:.1f}" y="{y}" width="{w:.1f}" height="18" fill="{color}" '
                            f'opacity="{1 if stage == first else 0.55}"><title>{kind} of stage {stage}, micro-batch {u}</title></rect>')
                body.append(_text(x + w / 2, y + 13, str(u), color="#fff", anchor="middle", size=11))
            y += 22
        y += 10
    return _svg(width, y, body)


def pictures() -> dict[str, str]:
    plan = lambda strategy, devices, g=None, **options: wh.plan(g or gpt(), devices=f"null:{devices}", strategy=strategy, **options)
    block = ["block0.norm1.weight", "block0.attention.qkv.weight", "block0.mlp.up.weight", "block0.mlp.down.weight"]
    ends = ["block0.mlp.up.weight", "block0.mlp.down.weight", "block1.mlp.up.weight", "block1.mlp.down.weight"]
    with_state = ["block0.mlp.up.weight", "block0.mlp.up.weight/m", "block0.mlp.down.weight", "block0.mlp.down.weight/m"]
    schedules = [f"pipeline(2, micro_batches=4, schedule={s})" for s in ("gpipe", "1f1b", "interleaved, virtual_stages=2", "zb_h1", "zb_v")]
    beside = "cluster(device_order=[[0,2],[1,3]]) > replica(2) > split(2)"
    return {
        "replica": places("replica(4, shares=[3,2,2,1]): samples are cut, parameters are copies", plan("replica(4, shares=[3,2,2,1])", 4), block[:3]),
        "split": places("split(2): every sample everywhere, parameters are cut", plan("split(2)", 2), block),
        "stage": places("a stage on one device, then a stage on two that splits", plan("", 3, stages()), ["first.weight", "second.weight", "third.weight"]),
        "pipeline": times([(s, plan(s, 2, gpt(4))) for s in schedules]),
        "cluster": places(beside + ": device 2 is beside 0", plan(beside, 4), block[1:]),
        "combination": places("replica(2) { backbone }; split(2) { classifier }", plan("", 2, classifier()), ["backbone.weight", "classifier.weight"]),
        "nested": places("replica(2) > pipeline(2, micro_batches=2) > split(2)", plan("replica(2) > pipeline(2, micro_batches=2) > split(2)", 8), ends),
        "zero": places("replica(4) with zero=1: parameters are copies, optimizer state (green) is cut", plan("replica(4)", 4, zero=1), with_state),
    }


def main() -> int:
    stale = []
    for name, svg in pictures().items():
        path = ROOT / "docs/pictures" / f"{name}.svg"
        if not path.exists() or path.read_text() != svg + "\n":
            stale.append(path.name)
            if "--check" not in sys.argv:
                path.write_text(svg + "\n")
    if stale:
        print(("stale: " if "--check" in sys.argv else "wrote ") + ", ".join(stale))
    return int("--check" in sys.argv and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
