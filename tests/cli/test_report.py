"""The page of a plan: one file that needs no network, with data that are the plan's own, whatever names hold."""

import base64
import collections
import hashlib
import html.parser
import json
import os
import pathlib
import re
import shutil
import subprocess

import numpy as np
import pytest
from test_cli import GPT, MLP, whale

import whale as wh

HOSTILE = ["</script><img src=x onerror=alert(1)>", "<!--<script>", "\"'`&amp;<b>", "\u2028\u202e\u0085", "${alert(1)}", "]]></style>", "\U0001f40b"]
VOID = {"meta", "link", "img", "br", "hr", "input"}


class Page(html.parser.HTMLParser):
    """A page taken apart; every element is closed where it has to be."""

    def __init__(self, text):
        super().__init__()
        self.open, self.texts, self.attributes, self.tags = [], collections.defaultdict(list), [], collections.Counter()
        assert text.startswith("<!doctype html>\n") and text.isascii()
        self.feed(text)
        self.close()
        assert not self.open, self.open
        scripts = [(attributes, self.texts[f"script {n}"]) for n, attributes in enumerate(a for tag, a in self.attributes if tag == "script")]
        assert [a for a, _ in scripts] == [{"type": "application/json", "id": "data"}, {}]
        data, self.script = ("".join(texts) for _, texts in scripts)
        assert not set("<>&") & set(data)
        self.data = json.loads(data)
        self.style = "".join(self.texts["style 0"])

    def handle_starttag(self, tag, attributes):
        self.attributes.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append((tag, f"{tag} {self.tags[tag]}"))
        self.tags[tag] += 1

    def handle_endtag(self, tag):
        assert self.open and self.open[-1][0] == tag, f"</{tag}> in {self.open}"
        self.open.pop()

    def handle_data(self, data):
        if self.open:
            self.texts[self.open[-1][1]].append(data)


def page_of(path):
    return Page(path.read_text("utf-8") if isinstance(path, pathlib.Path) else path)


def spans_of(timeline):
    """Of each track: class, queue, [label, start, end, micro-batch] in ticks."""
    for track in timeline["tracks"]:
        flat = track["spans"]
        assert len(flat) % 4 == 0
        yield track["class"], track["queue"], [(flat[k], flat[k + 1], flat[k + 1] + flat[k + 2], flat[k + 3]) for k in range(0, len(flat), 4)]


def check(data, plan):
    """The page's data against what `whale plan --json` says."""
    entry = plan["entries"][0]
    assert data["model"] == plan["model"] and data["strategy"] == plan["strategy"] and data["devices"] == len(plan["devices"])
    assert sum(c["count"] for c in data["classes"]) == len(plan["devices"])
    assert sum(node["count"] * node["devices"] for node in data["nodes"]["list"]) == len(plan["devices"])
    seconds = data["predicted"]["seconds"]
    assert seconds == pytest.approx(entry["timeline"]["seconds"])
    for c in data["classes"]:
        row = entry["rows"][c["first"]]
        program = entry["programs"][row["program"]]
        assert {name: c["memory"][name] for name in ("gradients", "activations", "copies")} == {name: program["memory"][name] for name in ("gradients", "activations", "copies")}
        held = collections.Counter()
        for variable in plan["variables"]:  # by what it holds of each variable of its stage
            if variable["mesh"] == row["mesh"] and variable["memory"] == "device":
                held[variable["role"]] += int(np.prod(variable["local"])) * {"f32": 4, "i64": 8, "bf16": 2, "f16": 2, "f64": 8, "i32": 4}[variable["dtype"]]
        if len(plan["devices"]) == len({p["coordinates"][-1] for p in entry["rows"]}) == 1:
            assert c["memory"]["parameters"] == held["parameter"] and c["memory"]["state"] == held["state"]
        assert c["memory_total"] == sum(c["memory"].values())
        assert c["memory_total"] == c["memory"]["parameters"] + c["memory"]["state"] + c["memory"]["buffers"] + program["arena_bytes"]
        assert 0 <= c["predicted"]["compute"] <= seconds * (1 + 1e-9) and sum(c["predicted"]["activities"].values()) <= len(data["queues"]) * seconds * (1 + 1e-9)
        flops = sum(i["flops"] for s in program["schedule"] for i in program["segments"][s["segment"]]["instructions"])
        assert c["flops"] == pytest.approx(flops)
    for kind, queue, spans in spans_of(data["predicted"]):
        assert spans and all(0 <= a <= b <= 2**24 for _, a, b, _ in spans)
        assert all(before[2] <= after[1] + 1 for before, after in zip(spans, spans[1:])), "a queue does one thing at a time"
        assert all(0 <= label < len(data["predicted"]["labels"]) for label, *_ in spans)
        if queue == 0:  # what is drawn is what the load says, but for what is folded away
            drawn = sum(b - a for label, a, b, _ in spans if data["activities"][data["predicted"]["labels"][label][3]] != "communication") * data["predicted"]["tick"]
            assert drawn >= data["classes"][kind]["predicted"]["compute"] * (1 - 1e-3)


PLANS = {
    "mixed": (GPT, ("--devices", "null-80MB:2,null-40MB:1", "--strategy", "replica(3, shares=[3,2,1])")),
    "pipeline": (GPT, ("--devices", "null:4", "--strategy", "replica(2) > pipeline(2, micro_batches=3)")),
    "weights": (["gpt", "--layers", "4", "--dim", "32", "--heads", "4", "--seq", "16", "--batch", "8"], ("--devices", "null:2", "--strategy", "pipeline(2, micro_batches=4, schedule=zb_h1)")),
    "split": (GPT, ("--devices", "null:2", "--strategy", "split(2)", "--zero", "0")),
    "zero": (GPT, ("--devices", "null:3", "--strategy", "replica(3)", "--zero", "3", "--offload", "state")),
    "one": (MLP, ("--devices", "ref:1")),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_page_says_what_the_plan_says(name, tmp_path):
    model, options = PLANS[name]
    whale("model", *model, "-o", tmp_path / "m.whale")
    whale("plan", tmp_path / "m.whale", *options, "-o", tmp_path / "p.plan")
    plan = json.loads(whale("plan", tmp_path / "p.plan", "--json", "--report", tmp_path / "r.html"))
    page = page_of(tmp_path / "r.html")
    check(page.data, plan)
    assert page.data["measured"] is None
    per_stage = collections.Counter()
    for c in page.data["classes"]:
        axes = plan["meshes"][c["stage"]]["axes"]
        cut = next((a["size"] for a in axes if a["name"] == "split"), 1)
        per_stage[c["stage"]] += c["samples"] * c["count"] / cut
    assert set(per_stage.values()) == {plan["entries"][0]["batch"]}
    reshards = json.loads(whale("plan", tmp_path / "p.plan", "--reshards", "--json"))
    assert [r["tensor"] for r in page.data["reshards"]] == [r["tensor"] for r in reshards][:100]
    for row, known in zip(page.data["reshards"], reshards):
        assert row["bytes"] == pytest.approx(known["chosen"]["bytes"] * known["count"] * known["runs"]) and row["from"] == known["from"]
    seen = {page.data["activities"][label[3]] for label in page.data["predicted"]["labels"] if label[1] not in ("vote", "commit")}
    assert {"forward", "backward", "weight gradient", "update"} <= seen and ("communication" in seen) == (len(plan["devices"]) > 1)
    assert ("host copy" in seen) == ("--offload" in options)
    assert all(c["why"] and len(c["parts"]) == sum(a["size"] > 1 for a in plan["meshes"][c["stage"]]["axes"]) for c in page.data["classes"])
    assert (name == "mixed") == any("of its" in why for c in page.data["classes"] for why in c["why"])


def test_a_page_needs_nothing_and_nothing_else_can_run_in_it(tmp_path):
    whale("model", *GPT, "-o", tmp_path / "m.whale")
    whale("plan", tmp_path / "m.whale", "--devices", "null:2", "--strategy", "replica", "--report", tmp_path / "r.html")
    page = page_of(tmp_path / "r.html")
    assert not any(name in ("src", "href", "srcset", "style", "action") or name.startswith("on") for _, attributes in page.attributes for name in attributes)
    assert not re.search(r"https?:|//\w+\.|@import|url\(|\bfetch\b|XMLHttpRequest|innerHTML|outerHTML|document\.write|insertAdjacent|\beval\b|setAttribute\('(style|on)", page.script + page.style)
    policy = next(a["content"] for tag, a in page.attributes if tag == "meta" and a.get("http-equiv") == "Content-Security-Policy")
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    for text, rule in ((page.script, "script-src"), (page.style, "style-src")):
        assert rules[rule] == f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
    assert rules["default-src"] == rules["base-uri"] == "'none'"


def hostile_plan(name="", strategy="replica(2)"):
    g = wh.Graph(name or HOSTILE[0])
    with g:
        x, y = wh.input("x", (8, 4)), wh.input("y", (8,), wh.int32)
        for each in HOSTILE:
            with wh.scope(each):
                x = wh.nn.linear(x, 4, name=each)
        loss = wh.nn.cross_entropy(x, y)
        g.minimize(loss, wh.SGD(0.1))
    return wh.plan(g, devices="ref:2", strategy=strategy)


def hostile_trace(plan):
    events = [{"ph": "X", "pid": device, "tid": 0, "ts": 10 * k, "dur": 5, "name": text + "\x00\x1b\x7f\r\n", "cat": "forward", "args": {"op": text, "scope": text, "micro_batch": 0}}
              for device in range(2) for k, text in enumerate(HOSTILE)]
    return json.dumps({"traceEvents": events})


def test_names_stay_text(tmp_path):
    plan = hostile_plan()
    (tmp_path / "t.json").write_text(hostile_trace(plan))
    page = page_of(plan.show(measured=tmp_path / "t.json").html)
    assert page.tags["img"] == page.tags["b"] == 0 and page.tags["script"] == 2 and page.tags["style"] == 1
    assert page.data["model"] == HOSTILE[0]
    names = [label[0] for label in page.data["predicted"]["labels"]]
    assert all(any(each in name for name in names) for each in HOSTILE)
    assert {label[1] for label in page.data["measured"]["labels"]} == set(HOSTILE)
    assert all(label[0].endswith("\x00\x1b\x7f\r\n") for label in page.data["measured"]["labels"])
    frame = plan.show()._repr_html_()
    assert frame.count("<") == 2 and frame.startswith('<iframe srcdoc="') and frame.endswith("</iframe>")


@pytest.mark.parametrize("batch, strategy, micro_batches", [(1024, "replica(16) > pipeline(8, micro_batches=64) > split(8)", 64), (1024, "replica(1024)", 1)])
def test_a_thousand_devices_are_a_small_page(batch, strategy, micro_batches, tmp_path):
    whale("model", "gpt", "--layers", "8", "--dim", "64", "--heads", "8", "--seq", "16", "--batch", batch, "-o", tmp_path / "m.whale")
    whale("plan", tmp_path / "m.whale", "--devices", "null:1024", "--strategy", strategy, "--report", tmp_path / "r.html", "-o", tmp_path / "p.plan")
    assert (tmp_path / "r.html").stat().st_size < 2_000_000
    data = page_of(tmp_path / "r.html").data
    assert sum(c["count"] for c in data["classes"]) == 1024 and len(data["classes"]) <= 64
    assert data["predicted"]["spans"] <= data["predicted"]["instructions"] and sum(label[4] >= 1 for label in data["predicted"]["labels"]) == len(data["predicted"]["labels"])
    queues = collections.Counter(queue for _, queue, _ in spans_of(data["predicted"]))
    assert queues[0] == len(data["classes"])


def tracks_of(trace):
    out = collections.defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            out[event["pid"], event["tid"]].append(event)
    return out


def test_a_predicted_trace_is_in_the_format_of_a_measured_one(tmp_path):
    """The same tracks, of the same instructions in the same order; one after the other on each."""
    whale("model", *GPT, "-o", tmp_path / "m.whale")
    whale("plan", tmp_path / "m.whale", "--devices", "cpu:4", "--strategy", "replica(2) > pipeline(2, micro_batches=3)", "-o", tmp_path / "p.plan", "--trace", tmp_path / "predicted.json")
    whale("run", tmp_path / "p.plan", "--steps", "2", "--quiet", "--trace", tmp_path / "measured.json")
    predicted, measured = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("predicted", "measured"))
    assert predicted["otherData"].pop("timeline") == "predicted" and measured["otherData"].pop("timeline") == "measured"
    assert predicted["otherData"] == measured["otherData"] and predicted["otherData"]["entry"] == "train"
    one, other = tracks_of(predicted), tracks_of(measured)
    assert set(one) <= set(other) and len({pid for pid, _ in other}) == 4
    for track, events in one.items():
        keys = [[(e["name"], e["cat"], e["args"]["op"], e["args"]["scope"], e["args"]["micro_batch"], e["args"]["flops"]) for e in list_] for list_ in (events, other[track])]
        assert keys[0] == keys[1], track
    for trace in (predicted, measured):
        assert min(e["ts"] for events in tracks_of(trace).values() for e in events) == 0
        threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name" and e["ph"] == "M"}
        assert set(threads) == set(tracks_of(trace)) and set(threads.values()) >= {"compute", "send", "receive", "replica"}
        processes = [e["pid"] for e in trace["traceEvents"] if e["name"] == "process_name" and e["ph"] == "M"]
        assert sorted(processes) == sorted({pid for pid, _ in threads})
        for events in tracks_of(trace).values():
            nanoseconds = [(round(e["ts"] * 1000), round((e["ts"] + e["dur"]) * 1000)) for e in events]
            assert all(b <= c for (_, b), (c, _) in zip(nanoseconds, nanoseconds[1:]))
    assert any(e["args"]["scope"].startswith("block0") or "block0" in e["args"]["scope"] for events in one.values() for e in events)


def test_the_clock_of_null_devices_is_the_simulators(tmp_path):
    whale("model", *GPT, "-o", tmp_path / "m.whale")
    whale("plan", tmp_path / "m.whale", "--devices", "V100-32GB:2,P100-16GB:2", "--strategy", "replica(2) > pipeline(2, micro_batches=3)", "-o", tmp_path / "p.plan", "--trace", tmp_path / "predicted.json",
          "--report", tmp_path / "plan.html")
    whale("run", tmp_path / "p.plan", "--steps", "2", "--quiet", "--trace", tmp_path / "run.json", "--report", tmp_path / "run.html")
    assert (tmp_path / "run.json").read_text() == (tmp_path / "predicted.json").read_text()
    assert page_of(tmp_path / "run.html").data["measured"] is None
    assert (tmp_path / "run.html").read_text() == (tmp_path / "plan.html").read_text()


def test_what_was_measured_stands_beside_the_prediction(tmp_path):
    whale("model", *GPT, "-o", tmp_path / "m.whale")
    whale("plan", tmp_path / "m.whale", "--devices", "cpu:2", "--strategy", "replica(2, shares=[2,1])", "-o", tmp_path / "p.plan")
    for ranks in (1, 2):
        whale("run", tmp_path / "p.plan", "--steps", "2", "--quiet", "--ranks", ranks, "--trace", tmp_path / "t.json", "--report", tmp_path / f"r{ranks}.html")
        traces = [tmp_path / "t.json"] if ranks == 1 else [tmp_path / f"t.rank{r}.json" for r in range(2)]
        again = [each for path in traces for each in ("--measured", path)]
        whale("plan", *again, tmp_path / "p.plan", "--report", tmp_path / "again.html")
        assert (tmp_path / "again.html").read_text() == (tmp_path / f"r{ranks}.html").read_text()
        data = page_of(tmp_path / "again.html").data
        events = [e for path in traces for events in tracks_of(json.loads(path.read_text())).values() for e in events]
        assert data["measured"]["seconds"] == pytest.approx(max(e["ts"] + e["dur"] for e in events) * 1e-6)
        assert data["measured"]["instructions"] == len(events) and {t["device"] for t in data["measured"]["tracks"]} == {0, 1}
        for c in data["classes"]:
            compute = sum(e["dur"] for e in events if e["pid"] == c["first"] and e["tid"] == 0 and e["args"]["op"] not in ("vote", "commit", "send", "receive")) * 1e-6
            assert c["measured"]["compute"] == pytest.approx(compute) and c["measured"]["devices"] == 1 and compute <= data["measured"]["seconds"] * (1 + 1e-9)
        activities = [{tuple(label[:4]) for label in data[which]["labels"]} for which in ("predicted", "measured")]
        assert activities[0] == activities[1], "an instruction is coloured alike in both"


def test_a_profile_of_a_job(tmp_path):
    plan = hostile_plan("m")
    with plan.start(seed=0) as job:
        feeds = dict(x=np.ones((8, 4), np.float32), y=np.zeros(8, np.int32))
        with job.profile() as profile:
            with pytest.raises(wh.FailedPrecondition, match="behind its block"):
                profile.show()
            job.step(**feeds)
        profile.report(tmp_path / "r.html")
        profile.trace(tmp_path / "t.json")
        assert page_of(tmp_path / "r.html").data["measured"]["instructions"] > 10
        plan.report(tmp_path / "again.html", measured=[tmp_path / "t.json"])
        assert (tmp_path / "again.html").read_text() == (tmp_path / "r.html").read_text() == profile.show().html
        with job.profile() as small:  # a batch that the plan does not hold
            job.eval(**{name: value[:3] for name, value in feeds.items()})
        data = page_of(small.show().html).data
        assert any("eval with batch 3" in note for note in data["notes"]) and data["measured"]["seconds"] > 0
        with pytest.raises(wh.FailedPrecondition, match="nothing ran"):
            with job.profile():
                pass
        job.step(**feeds)
    assert json.loads(plan.timeline())["otherData"]["timeline"] == "predicted"
    plan.report(tmp_path / "plan.html")
    assert page_of(tmp_path / "plan.html").data["measured"] is None and "bytes" in repr(plan.show())


def span(**changes):
    return {"ph": "X", "pid": 0, "tid": 0, "ts": 0, "dur": 1, "name": "a", "cat": "forward", "args": {}, **changes}


@pytest.mark.parametrize("trace, said", [
    ("", "is no JSON"), ("{", "is no JSON"), ("3", "has no list"), ("{}", "has no list"), ({"traceEvents": 3}, "has no list"), ({"traceEvents": []}, "holds no spans"), ([], "holds no spans"),
    ([span(pid=9)], "process 9; the plan has the devices 0 to 1"), ([span(pid=-1)], "process -1"), ([span(pid="a")], "process none"), ([span(tid=7)], "thread 7"),
    ([span(ts=-1)], "begins at -1"), ([span(dur=1e300)], "lasts 1e+300"), ([span(dur=None)], "lasts none"), ([3, None, span(ts="x")], "event 2 begins at none"),
    ({"traceEvents": [span()], "otherData": {"model": "other"}}, "is of model 'other'"), ({"traceEvents": [span()], "otherData": {"devices": 3}}, "is of 3 devices"),
    ({"traceEvents": [span()], "otherData": {"timeline": "predicted"}}, "is a predicted timeline"), ("[" * 100_000, "is no JSON"),
    ({"traceEvents": [span()], "otherData": {"batch": "x"}}, "is of batch none"),
])
def test_what_is_no_timeline_of_the_plan_is_refused(trace, said, tmp_path):
    whale("model", *MLP, "-o", tmp_path / "m.whale")
    (tmp_path / "t.json").write_text(trace if isinstance(trace, str) else json.dumps(trace))
    text = whale("plan", tmp_path / "m.whale", "--devices", "cpu:2", "--strategy", "replica", "--report", tmp_path / "r.html", "--measured", tmp_path / "t.json", code=2)
    assert said in text and "trace 1" in text and "whale run --trace" in text and not (tmp_path / "r.html").exists()


def test_options_that_do_not_go_together(tmp_path):
    whale("model", *MLP, "-o", tmp_path / "m.whale")
    (tmp_path / "t.json").write_text(json.dumps([span()]))
    assert "--measured requires --report" in whale("plan", tmp_path / "m.whale", "--measured", tmp_path / "t.json", code=2)
    assert "would overwrite it" in whale("plan", tmp_path / "m.whale", "--report", tmp_path / "m.whale", code=2)
    assert "would overwrite it" in whale("plan", tmp_path / "m.whale", "--report", tmp_path / "t.json", "--measured", tmp_path / "t.json", code=2)
    for each in ("--report", "--trace"):
        assert each in whale("plan", tmp_path / "m.whale", "--estimate", each, tmp_path / "r.html", code=2)
    text = whale("plan", tmp_path / "m.whale", "--devices", "null:2", "--strategy", "replica", "--report", tmp_path / "r.html", "--measured", tmp_path / "t.json", "--measured", tmp_path / "t.json", code=2)
    assert "trace 2 is of device 0, and so is one before it" in text


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.mark.skipif(not os.environ.get("WHALE_FULL"), reason="tools/check --full tries a real browser")
@pytest.mark.skipif(BROWSER is None, reason="no browser is installed: apt-get install chromium")
def test_a_browser_draws_it(tmp_path):
    """With hostile names, which make no element and run nothing; both timelines are drawn, and nothing is said to the console."""
    plan = hostile_plan(strategy="pipeline(2, micro_batches=4)")
    (tmp_path / "t.json").write_text(hostile_trace(plan))
    plan.report(tmp_path / "r.html", measured=tmp_path / "t.json")
    browser = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile", "--enable-logging=stderr", "--window-size=1200,1400", "--virtual-time-budget=3000"]
    done = subprocess.run([*browser, "--dump-dom", f"file://{tmp_path}/r.html"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "CONSOLE" not in done.stderr, done.stderr[-2000:]
    assert "<img" not in done.stdout and done.stdout.count("<script") == 2 + done.stdout.count("&lt;script")
    assert done.stdout.count('class="device"') == 2 and "&lt;/script&gt;&lt;img src=x onerror=alert(1)&gt;" in done.stdout
    assert done.stdout.count("<tr>") > 4 and "measured / predicted" in done.stdout
    assert int(re.search(r'<canvas id="spans"[^>]* height="(\d+)"', done.stdout).group(1)) > 100
    for scheme in ("light", "dark"):
        dark = ["--force-dark-mode", "--blink-settings=preferredColorScheme=0"] if scheme == "dark" else []
        subprocess.run([*browser, *dark, f"--screenshot={tmp_path}/{scheme}.png", f"file://{tmp_path}/r.html"], capture_output=True, timeout=120, check=True)
        assert (tmp_path / f"{scheme}.png").stat().st_size > 20_000


def test_what_simulate_writes_is_what_plan_writes(tmp_path):
    whale("model", *MLP, "-o", tmp_path / "m.whale")
    for command, devices in (("plan", "--devices"), ("simulate", "--cluster")):
        whale(command, tmp_path / "m.whale", devices, "V100-32GB:2", "--strategy", "replica", "--report", tmp_path / f"{command}.html", "--trace", tmp_path / f"{command}.json")
    assert (tmp_path / "plan.html").read_text() == (tmp_path / "simulate.html").read_text()
    events = json.loads((tmp_path / "simulate.json").read_text())
    assert events == json.loads((tmp_path / "plan.json").read_text())
    step = json.loads(whale("simulate", tmp_path / "m.whale", "--devices", "V100-32GB:2", "--strategy", "replica", "--json"))["seconds"]
    assert max(e["ts"] + e["dur"] for e in events["traceEvents"] if e["ph"] == "X") == pytest.approx(1e6 * step, rel=1e-3)
