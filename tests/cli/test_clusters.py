"""Mixed devices on the command line: clusters as text and files, shares that are dealt, strategies that nobody wrote, steps on the clock."""

import json
import os
import pathlib

import pytest
from test_cli import whale

MIXED = "2xV100-32GB + 2xP100-16GB"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("clusters") / "gpt.whale"
    whale("model", "gpt", "--layers", "2", "--dim", "256", "--heads", "4", "--seq", "64", "--vocab", "256", "--batch", "48", "-o", path)
    return path


def planned(model, *arguments):
    return json.loads(whale("plan", model, *arguments, "--json"))


def shares_of(plan):
    """Samples of each device."""
    return [row["samples"][1] - row["samples"][0] for row in plan["entries"][0]["rows"]]


def test_samples_are_dealt_by_speed_and_the_notes_say_why(model):
    plan = planned(model, "--devices", MIXED, "--strategy", "replica")
    samples = shares_of(plan)
    assert sum(samples) == 48 and samples[0] == samples[1] > samples[2] == samples[3]
    assert any("equal shares would take" in note and "V100-32GB gets" in note for note in plan["notes"])
    equal = planned(model, "--devices", MIXED, "--strategy", "replica(4, shares=[1,1,1,1])")
    assert plan["entries"][0]["timeline"]["seconds"] < equal["entries"][0]["timeline"]["seconds"]


def test_a_cluster_file_is_a_cluster(model, tmp_path):
    file = tmp_path / "c.json"
    file.write_text(json.dumps({"nodes": [{"devices": [{"type": "V100-32GB", "count": 2}, {"type": "P100-16GB", "count": 2}]}]}))
    assert "V100-32GB:2,P100-16GB:2" in whale("plan", model, "--devices", f"file:{file}", "--strategy", "replica")
    file.write_text('{"nodes": [{"devices": [{"type": "V1000"}]}]}')
    assert f"cluster file '{file}': /nodes/0/devices/0/type: 'V1000' is not a type of device, nearest are V100-16GB" in whale("plan", model, "--devices", f"file:{file}", code=2)
    file.write_text('{"nodes": [{"devices": [{"type": "T4", "count": -1}]}]}')
    assert f"cluster file '{file}': /nodes/0/devices/0/count is -1" in whale("plan", model, "--devices", f"file:{file}", code=2)
    file.write_text('{"nodes": ')
    assert f"cluster file '{file}': line 1, column 11: unexpected end of input" in whale("plan", model, "--devices", f"file:{file}", code=2)
    for empty in ("", " \n\t"):
        file.write_text(empty)
        assert f"cluster file '{file}' is empty; expected an object with nodes" in whale("plan", model, "--devices", f"file:{file}", code=2)
    file.write_text("V100-32GB:2\nT4:x\n")
    assert f"cluster file '{file}', line 2: device list: item 'T4:x'" in whale("plan", model, "--devices", f"file:{file}", code=2)


NONSENSE = [
    ({"nodes": [{"devices": [{"type": "T4", "count": 1e18}]}]}, "/nodes/0/devices/0/count is 1e+18, expected a whole number from 1 to 65536"),
    ({"nodes": [{"devices": []}]}, "/nodes/0/devices is []"),
    ({"nodes": [{"devices": [{"type": "T4", "memory_bytes": -1}]}]}, "/nodes/0/devices/0/memory_bytes is -1"),
    ({"nodes": [{"devices": [{"type": "T4", "price_per_hour": "3"}]}]}, '/nodes/0/devices/0/price_per_hour is "3"'),
    ({"nodes": [{"devices": [{"type": "T4"}], "network": {"bytes_per_second": 1e9, "latency_seconds": 1000}}]}, "latency_seconds is 1000, expected a number from 0 to 1"),
    ({"nodes": [{"devices": [{"type": "T4"}], "network": "1Gb/s@1000s"}]}, "/nodes/0/network: device list: '1000s' is no latency"),
    ({"nodes": [{"name": "a", "count": 2, "devices": [{"device": "null", "flops_per_second": {"f32": 1e12}}]}]}, "/nodes/0 has no network"),
    ({"nodes": [{"name": "näh/\u0007", "devices": [{"type": "T4"}]}], "links": [{"between": ["näh/\u0007", "b"], "network": "1Gb/s"}]}, '/links/0/between/1 is "b"'),
    ({"nodes": [{"name": "a", "count": 30000, "devices": [{"type": "T4"}]}], "links": [{"between": ["a", "a"], "network": "1Gb/s"}]}, "at most 1048576 pairs"),
    ([{"type": "T4"}], "neither nodes nor what a probe measured"),
    ({"probe": 1, "devices": [3]}, "/devices/0 is 3, expected an object"),
    ({"probe": 1, "devices": [{"device_text": "ref", "node": 1.5}]}, "/devices/0/node is 1.5"),
]


@pytest.mark.parametrize("cluster, said", NONSENSE, ids=lambda c: str(c)[:40])
def test_nonsense_in_a_cluster_file_is_refused_with_file_and_place(model, tmp_path, cluster, said):
    file = tmp_path / "c.json"
    file.write_text(json.dumps(cluster))
    told = whale("plan", model, "--devices", f"file:{file}", code=2)
    assert told.startswith(f"whale: cluster file '{file}': ") and said in told, told


@pytest.mark.parametrize("text, devices", [("4xTitan RTX", "(TITAN-RTX:4)"), ("RTX3090", "(RTX-3090:1)"), ("2xrtx 3090 + 2xtitan_rtx", "(RTX-3090:2|TITAN-RTX:2)"),
                                           ("H100-80GB:2", "(H100:2)"), ("2 nodes of 1xP100, 100Gb/s@0us", "(2xP100-16GB:1~100Gb/s@0us)")])
def test_device_types_are_found_however_they_are_written(model, text, devices):
    assert devices in whale("plan", model, "--devices", text, "--strategy", "replica")


def test_whole_micro_batches_are_dealt_as_such(model):
    notes = planned(model, "--devices", "V100-32GB:1,P100-16GB:1", "--strategy", "replica(2, by=micro_batch)", "--accumulation", "4")["notes"]
    assert any("of 4 micro-batches each V100-32GB gets 2" in note for note in notes) and not any("samples of a micro-batch" in note for note in notes)


SCHEMA = json.loads((pathlib.Path(__file__).resolve().parents[2] / "docs" / "cluster.schema.json").read_text())


def objects_of(schema, path=()):
    """Each object of the schema with the names it permits, and where it is."""
    schema = SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
    if "properties" in schema:
        yield path, set(schema["properties"])
        for name, value in schema["properties"].items():
            yield from objects_of(value, path + (name,))
    for other in schema.get("oneOf", []):
        if "required" not in other or "properties" in other:
            yield from objects_of(other, path)
    if "items" in schema:
        yield from objects_of(schema["items"], path + (0,))
    if isinstance(schema.get("additionalProperties"), dict):
        yield from objects_of(schema["additionalProperties"], path + ("a",))


FULL = {"nodes": [{"name": "n", "count": 2, "zone": "a", "inside": {"bytes_per_second": 1e9}, "network": {"bytes_per_second": 1e9, "latency_seconds": 1e-5},
                   "devices": [{"type": "T4", "count": 2, "memory_bytes": 1e9, "flops_per_second": {"f32": {"128": 1e12}, "bf16": 1e12, "f16": {"128": 1e12}},
                                "bytes_per_second": 1e11, "seconds_per_op": 1e-6, "host": {"bytes_per_second": 1e9}, "price_per_hour": 1}]}],
        "zones": {"a": {"network": {"bytes_per_second": 1e8}}}, "links": [{"between": ["n", "n"], "network": {"bytes_per_second": 2e9}}]}


def test_the_schema_of_cluster_files_permits_what_is_read(tmp_path):
    file = tmp_path / "c.json"
    file.write_text(json.dumps(FULL))
    whale("model", "mlp", "--batch", "8", "-o", tmp_path / "m.whale")
    plan = json.loads(whale("plan", tmp_path / "m.whale", "--devices", f"file:{file}", "--strategy", "replica", "--json"))
    assert len(plan["devices"]) == 4 and plan["devices"][0]["links"] == [{"place": 1, "bytes_per_second": 2e9, "latency_seconds": 1e-5}]
    seen = 0
    for path, names in objects_of(SCHEMA):
        damaged = json.loads(json.dumps(FULL))
        at = damaged
        for step in path:
            at = at[step]
        if not isinstance(at, dict):
            continue
        at["nobody"] = 1
        file.write_text(json.dumps(damaged))
        told = whale("plan", tmp_path / "m.whale", "--devices", f"file:{file}", code=2)
        assert "'nobody' is not known; there are " in told, path
        assert set(told.partition("there are ")[2].splitlines()[0].rstrip(".").split(", ")) == names, path
        seen += 1
    assert seen >= 10  # every kind of object


def test_trials_of_devices_that_are_not_here_are_refused(model):
    told = whale("plan", model, "--devices", MIXED, "--strategy", "auto", "--trials", "2", code=2)
    assert "--trials" in told and "are not here" in told


def test_a_profile_has_what_a_machine_may_have(model, tmp_path):
    file = tmp_path / "p.json"
    for text, named in (("", "the file is empty"), ('{"device.flops_per_second": 1}', "expected a number from 1000 to 1e+18"),
                        ('{"link.bytes_per_second": 1e30}', "expected a number from 1000 to 1e+18"), ('{"link.latency_seconds": 1e6}', "at most 1"), ("{}", f"'{file}': no profile: ")):
        file.write_text(text)
        assert named in whale("plan", model, "--devices", "cpu:2", "--strategy", "replica", "--profile", file, code=2), text


def test_idle_devices_are_named_whatever_is_asked_for(model):
    notes = planned(model, "--devices", MIXED, "--strategy", "auto", "--objective", "price")["notes"]
    assert any("stay idle: " in note for note in notes)


def test_bounds_that_cannot_be_met_are_told_with_what_comes_nearest(model):
    every = json.loads(whale("plan", model, "--devices", MIXED, "--candidates", "--json"))["candidates"]
    least = min(row["price"] for row in every if row["missing_bytes"] == 0)
    told = whale("plan", model, "--devices", MIXED, "--strategy", "auto", "--budget", f"{least / 2}", code=2)
    assert "over the budget: " in told and f"at most {least / 2:.4g} was asked for" in told
    nearest = float(told.split("over the budget: ")[1].split()[0])
    assert nearest == pytest.approx(least, rel=0.02)
    told = whale("plan", model, "--devices", MIXED, "--strategy", "auto", "--min-throughput", "1e9", code=2)
    assert "samples a second, at least 1e+09 were asked for" in told
    front = whale("plan", model, "--devices", MIXED, "--pareto", "--budget", f"{least / 2}")
    assert " on " not in front and "within what was asked for" in front
    for only in (("--budget", "1"), ("--objective", "price"), ("--min-throughput", "1")):
        assert "only a search goes by them" in whale("plan", model, "--devices", MIXED, "--strategy", "replica", *only, code=2)
    assert "there was no time for any of" in whale("plan", model, "--devices", MIXED, "--strategy", "auto", "--search-seconds", "1e-9", code=2)


def test_a_strategy_that_nobody_wrote(model):
    found = json.loads(whale("plan", model, "--devices", MIXED, "--candidates", "--json"))
    best = found["candidates"][0]
    assert found["fits"] and best["lost"] == "" and best["simulated"]
    assert all(other["lost"] for other in found["candidates"][1:])
    plan = planned(model, "--devices", MIXED, "--strategy", "auto")
    assert plan["strategy"] == best["strategy"] and plan["notes"][0].startswith("Strategy auto chose")
    prices = [row["price"] for row in found["pareto"]]
    assert prices == sorted(prices) and prices
    front = whale("plan", model, "--devices", MIXED, "--pareto")
    assert front.count(" on ") == len(prices) and json.loads(whale("plan", model, "--devices", MIXED, "--pareto", "--json"))[-1]["price"] == prices[-1]
    cheap = json.loads(whale("plan", model, "--devices", MIXED, "--candidates", "--json", "--objective", "price"))
    assert cheap["candidates"][0]["price"] <= best["price"]
    table = whale("plan", model, "--devices", MIXED, "--candidates")
    assert best["strategy"] in table and "times as slow" in table
    assert "what fits" not in whale("plan", model, "--devices", "null-1MB:2", "--strategy", "auto", code=2)
    assert "no objective 'speed'; there are throughput, price" in whale("plan", model, "--objective", "speed", code=2)


def test_a_search_takes_no_written_strategy(model):
    for flag in ("--candidates", "--pareto"):
        said = whale("plan", model, "--devices", MIXED, flag, "--strategy", "replica(2)", code=2)
        assert f"{flag} looks for strategies, and --strategy 'replica(2)' says one" in said
    assert "times as slow" in whale("plan", model, "--devices", MIXED, "--candidates", "--strategy", "auto")
    said = whale("plan", model, "--devices", "cpu:3", "--strategy", "auto", "--present", "replica(50)", code=2)
    assert "needs 50 devices, and there are 3" in said


def test_a_scheduler_asks_for_counts_and_batches(model):
    rows = json.loads(whale("predict", model, "--devices", "4xV100-32GB", "--counts", "1..2,4", "--batches", "24,48", "--json"))
    assert [(row["batch"], row["devices"]) for row in rows] == [(24, 1), (24, 2), (24, 4), (48, 1), (48, 2), (48, 4)]
    assert all(row["samples_per_second"] == pytest.approx(row["batch"] / row["seconds"]) for row in rows)
    assert "samples/s" in whale("predict", model, "--devices", "1xT4")
    assert "expected numbers from 1 and ranges" in whale("predict", model, "--counts", "few", code=2)


def test_a_step_on_the_clock(model):
    step = json.loads(whale("simulate", model, "--devices", MIXED, "--strategy", "pipeline(4, micro_batches=8)", "--json"))
    assert len(step["classes"]) == 4 and step["instructions"] > 0
    for each in step["classes"]:
        busy = each["compute_seconds"] + each["communication_seconds"] - each["hidden_seconds"] + each["idle_seconds"]
        assert busy == pytest.approx(step["seconds"])
        assert 0 <= each["hidden_seconds"] <= min(each["compute_seconds"], each["communication_seconds"]) * (1 + 1e-9)
    text = whale("simulate", model, "--devices", MIXED, "--strategy", "replica")
    assert "a step takes" in text and "instructions walked" in text


def test_what_a_probe_wrote_is_a_cluster(tmp_path):
    """Of a small model: one device in float64, which verify compares with, took minutes for the other tests' one."""
    model = tmp_path / "m.whale"
    whale("model", "gpt", "--layers", "1", "--dim", "64", "--heads", "4", "--seq", "16", "--batch", "48", "-o", model)
    whale("devices", "--probe", "--devices", "cpu:2", "-o", tmp_path / "here.json")
    plan = planned(model, "--devices", f"file:{tmp_path / 'here.json'}", "--strategy", "replica")
    assert [d["kind"] for d in plan["devices"]] == ["cpu", "cpu"]
    assert sum(shares_of(plan)) == 48
    out = whale("verify", model, "--devices", f"file:{tmp_path / 'here.json'}", "--strategy", "replica", "--steps", "2")
    assert "equal" in out


def test_validate_says_what_it_knows(tmp_path):
    rows = tmp_path / "rows.csv"
    rows.write_text("a,b\n1,2\n")
    assert "the columns of no form that is known" in whale("validate", rows, code=2)
    assert "no form 'guess'; there are" in whale("validate", rows, "--form", "guess", code=2)
    assert "cannot" in whale("validate", tmp_path / "none.csv", code=2)
    rows.write_text("gpu,model,mode,seq,batch,strategy,num_layer,fw_ms,bwall_ms,e2e_ms\nTesla T4,bert_large,inf,512,8,,24,1,0,700\n"
                    "Tesla T4,bert_large,inf,512,8,dp4,24,1,0,700\nTesla T4,bert_large,inf,512,8,dp4,24,1,0,700\nTesla T4,nobody,inf,512,8,,24,1,0,700\n")
    assert "1 of 4 rows; 3 left out: 2 of strategy dp4, 1 of model nobody\n" in whale("validate", rows)
    found = json.loads(whale("validate", rows, "--json"))
    assert (found["rows"], found["rows_left_out"], found["left_out"]) == (1, 3, {"of strategy dp4": 2, "of model nobody": 1})


GOLDEN = pathlib.Path(__file__).resolve().parent / "clusters.txt"
CLUSTERS = [("bert-large --batch 192", "8xV100-32GB,50Gb/s@20us + 8xP100-16GB,50Gb/s@20us", "replica", ""),
            ("t5-large --batch 32", "4xV100-32GB,50Gb/s@20us + 4xP100-16GB,50Gb/s@20us", "pipeline(4, micro_batches=4) > replica(2)", "--recompute full"),
            ("gpt --layers 24 --dim 1024 --heads 16 --seq 512 --vocab 50257 --batch 32", "3xV100-16GB:4~10Gb/s~170Gb/s|T4:4~50Gb/s~50Gb/s",
             "replica(4) > split(4)", "--precision f16")]


@pytest.mark.parametrize("cluster", CLUSTERS, ids=lambda c: c[0].split()[0])
def test_a_mixed_cluster_has_its_plan(cluster, tmp_path):
    """Who gets what, and what a step takes: tests/cli/clusters.txt (WHALE_RENEW_GOLDEN=1 writes it anew)."""
    name, devices, strategy, options = cluster
    whale("model", *name.split(), "-o", tmp_path / "m.whale")
    plan = planned(tmp_path / "m.whale", "--devices", devices, "--strategy", strategy, *options.split())
    step = json.loads(whale("simulate", tmp_path / "m.whale", "--devices", devices, "--strategy", strategy, *options.split(), "--json"))
    busy = ", ".join(f"{c['devices'][0]}: {c['compute_seconds'] * 1e3:.3g}" for c in step["classes"])
    flops = ",".join(f"{sum(i.get('flops', 0) for s in p['segments'] for i in s['instructions']) / 1e9:.0f}" for p in plan["entries"][0]["programs"])
    found = f"{name} | {devices} | {plan['strategy']} | samples {shares_of(plan)} | step {step['seconds'] * 1e3:.4g} ms | busy ms {busy} | GFLOP {flops}"
    if os.environ.get("WHALE_RENEW_GOLDEN"):
        others = [line for line in GOLDEN.read_text().splitlines() if not line.startswith(name + " |")] if GOLDEN.exists() else []
        GOLDEN.write_text("".join(line + "\n" for line in sorted([*others, found])))
    assert found in GOLDEN.read_text().splitlines(), f"expected another line, now: {found}"


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """1.3 billion parameters: 21 GB with gradients and Adam's state."""
    path = tmp_path_factory.mktemp("rooms") / "gpt.whale"
    whale("model", "gpt", "--layers", "24", "--dim", "2048", "--heads", "16", "--seq", "1024", "--vocab", "50257", "--batch", "64", "--precision", "bf16",
          "-o", path)
    return path


@pytest.mark.parametrize("devices, strategy, arguments", [
    ("2xRTX-2080 + 2xT4", "pipeline(4, micro_batches=16)", ()),
    ("2xRTX-2080 + 2xT4", "pipeline(4, micro_batches=8, schedule=gpipe)", ("--recompute", "full")),
    ("V100-16GB:4", "pipeline(4, micro_batches=16, virtual_stages=2)", ()),
])
def test_stages_are_cut_where_each_device_has_room(large, devices, strategy, arguments):
    """By time alone a device needs more than it has, at every price of memory: only a plan that is cut otherwise is not refused."""
    text = whale("plan", large, "--devices", devices, "--strategy", strategy, *arguments)
    assert "note: Stages are cut where each device has room" in text
