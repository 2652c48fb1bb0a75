"""Pictures of graphs and plans: inline SVG, no JavaScript, readable on light and dark pages."""

from __future__ import annotations

from html import escape
from typing import Any, Iterable

from . import arguments

_COLORS = {"forward": "#4c78a8", "backward": "#f58518", "update": "#54a24b", "communication": "#b279a2", "feed": "#9d9d9d"}


def _svg(width: float, height: float, body: Iterable[str]) -> str:
    return (f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}" '
            'font-family="system-ui, sans-serif" font-size="12"><rect width="100%" height="100%" fill="#ffffff"/>' + "".join(body) + "</svg>")


def _text(x: float, y: float, text: str, *, color: str = "#222", anchor: str = "start", size: int = 12, weight: str = "normal") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{color}" text-anchor="{anchor}" font-size="{size}" font-weight="{weight}">{escape(text)}</text>'


def _box(x: float, y: float, w: float, h: float, color: str, title: str = "", radius: float = 0) -> str:
    tip = f"<title>{escape(title)}</title>" if title else ""
    return f'<rect x="{x:.2f}" y="{y:.2f}" width="{max(w, 0.4):.2f}" height="{h:.1f}" rx="{radius}" fill="{color}">{tip}</rect>'


def human(value: float, unit: str = "") -> str:
    for scale, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= scale:
            return f"{value / scale:.1f} {prefix}{unit}"
    return f"{value:.0f} {unit}"


# ---- graph ------------------------------------------------------------------------------------------------------------
def _blocks(graph: dict) -> list[dict]:
    """Top-level name scopes in order: ops without one are gathered by their neighbours."""
    scopes, blocks = graph["scopes"], []
    parameters = {v["tensor"]: v["elements"] for v in graph["variables"] if v["role"] == "parameter"}
    for op in graph["ops"]:
        path, at = [], op["scope"]
        while at > 0:
            if scopes[at]["kind"] == "name" and scopes[at]["name"]:
                path.append(scopes[at]["name"])
            at = scopes[at]["parent"]
        name = path[-1] if path else ""
        if not blocks or blocks[-1]["name"] != name:
            blocks.append(dict(name=name, ops=[], flops=0.0, parameters=0, dims=[]))
        block = blocks[-1]
        block["ops"].append(op["op"])
        block["flops"] += op["flops"]
        block["parameters"] += sum(parameters.pop(t, 0) for t in op["inputs"])
        block["dims"] = graph["tensors"][op["outputs"][0]]["dims"]
    return blocks


def graph_svg(graph: dict) -> str:
    """The blocks of a model from input to loss, each with its result's shape, parameters and FLOPs."""
    blocks = _blocks(graph)
    width, row = 560, 34
    body, y = [_text(16, 24, graph["name"], weight="bold", size=14)], 40.0
    inputs = ", ".join(f"{graph['tensors'][t]['name']} {graph['tensors'][t]['dims']}" for t in graph["inputs"])
    body.append(_text(16, y + 14, "inputs: " + inputs))
    y += 26
    most = max((b["flops"] for b in blocks), default=1.0) or 1.0
    for block in blocks:
        label = block["name"] or ", ".join(dict.fromkeys(block["ops"]))
        label = label if len(label) < 34 else label[:31] + "..."
        body.append(_box(16, y, 240, row - 10, "#e8eef5" if block["name"] else "#f3f3f3", " ".join(block["ops"]), 4))
        body.append(_text(26, y + 16, label))
        body.append(_box(264, y + 8, 80 * block["flops"] / most, 8, _COLORS["forward"], human(block["flops"], "FLOP")))
        note = f"{block['dims']}" + (f", {human(block['parameters'])}parameters" if block["parameters"] else "")
        body.append(_text(352, y + 16, note, color="#555"))
        body.append(f'<line x1="136" y1="{y + row - 10:.0f}" x2="136" y2="{y + row:.0f}" stroke="#888"/>')
        y += row
    return _svg(width, y + 12, body)


def graph_html(graph: Any) -> str:
    return f"<div>{graph_svg(graph.to_dict())}<details><summary>table</summary><pre>{escape(graph.summary())}</pre></details></div>"


# ---- plan --------------------------------------------------------------------------------------------------------------
def plan_svg(plan: dict, entry: str | None = None, most_devices: int = 8) -> str:
    """Each device's samples, its queues over one step (lengths by the cost model), and its memory."""
    chosen = plan["entries"][0] if entry is None else next(e for e in plan["entries"] if e["name"] == arguments.choice("entry", entry, [e["name"] for e in plan["entries"]]))
    left, lane, right, width = 150, 16, 170, 960
    scale_width = width - left - right
    times = chosen["timeline"] or {"seconds": 0.0, "classes": [0] * len(chosen["rows"]), "queues": {}}
    total = times["seconds"] or 1.0
    memories = [sum(p["memory"].values()) for p in chosen["programs"]]
    largest = max(memories, default=1) or 1
    title = f"{plan['model']}: {plan['strategy'] or 'replica'} on {len(plan['devices'])} devices, one {chosen['name']} step of {chosen['batch']} samples"
    body, y = [_text(12, 22, title, weight="bold", size=14)], 40.0
    x = float(left)
    for name in ("forward", "backward", "update", "communication"):
        body.append(_box(x, y - 8, 10, 10, _COLORS[name]) + _text(x + 14, y + 1, name, color="#555"))
        x += 34 + 7 * len(name)
    body.append(_text(width - right + 14, y + 1, "memory", color="#555"))
    if chosen["timeline"] is None:
        body.append(_text(x + 20, y + 1, "(a step too long to draw)", color="#555"))
    y += 14
    for row, kind in list(zip(chosen["rows"], times["classes"]))[:most_devices]:
        spans = {queue: [span for of, *span in list_ if of == kind] for queue, list_ in times["queues"].items()}
        lanes = ["compute", *(queue for queue in spans if queue != "compute" and spans[queue])]
        begin, end = row["samples"]
        body.append(_text(12, y + 13, plan["devices"][row["device"]]["name"], weight="bold"))
        body.append(_text(12, y + 28, f"samples {begin}..{end - 1}" if end > begin else "no samples", color="#555", size=11))
        for k, queue in enumerate(lanes):
            body.append(_box(left, y + k * (lane + 2), scale_width, lane, "#f4f4f4"))
            for work, start, stop, ops in spans.get(queue, []):
                body.append(_box(left + start / total * scale_width, y + k * (lane + 2), (stop - start) / total * scale_width, lane, _COLORS[work], f"{queue}: {ops}"))
        memory, at = chosen["programs"][row["program"]]["memory"], float(width - right + 14)
        for part, color in (("parameters", "#4c78a8"), ("state", "#54a24b"), ("buffers", "#9d9d9d"), ("arena", "#f58518")):
            w = (right - 90) * memory[part] / largest
            if w > 0:
                body.append(_box(at, y + 2, w, 12, color, f"{part}: {human(memory[part], 'B')}"))
                at += w
        body.append(_text(at + 6, y + 12, human(memories[row["program"]], "B"), size=11, color="#555"))
        y += len(lanes) * (lane + 2) + 16
    if len(chosen["rows"]) > most_devices:
        body.append(_text(12, y + 8, f"... and {len(chosen['rows']) - most_devices} more devices", color="#555"))
        y += 20
    return _svg(width, y + 6, body)


def plan_html(plan: Any) -> str:
    return f"<div>{plan_svg(plan.to_dict())}<details><summary>table</summary><pre>{escape(plan.summary())}</pre></details></div>"
