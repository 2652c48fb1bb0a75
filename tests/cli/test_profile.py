"""`whale profile`, and plans by what it measured."""

import json
import subprocess

import pytest
from test_cli import WHALE, whale

SMALL = ("gpt", "--layers", "2", "--dim", "32", "--seq", "16", "--batch", "8")


def failed(*arguments, cwd) -> str:
    done = subprocess.run([WHALE, *map(str, arguments)], cwd=cwd, capture_output=True, text=True)
    assert done.returncode != 0
    return done.stderr


def scale(profile, factor):
    """All times in another unit."""
    for device in profile["devices"]:
        for times in device["steps"] + [point for op in device["ops"] for point in op["points"]]:
            times.update({name: value * factor for name, value in times.items() if name in ("seconds", "step", "forward", "backward", "update")})


def largest(profile):
    """The op with the most arithmetic."""
    return max(profile["devices"][0]["ops"], key=lambda op: op["points"][-1]["flops"])


@pytest.fixture(scope="module")
def profiled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("profiled")
    whale("model", *SMALL, "-o", folder / "m.whale")
    table = whale("profile", folder / "m.whale", "--devices", "ref:2", "--seconds", "0.01", "-o", folder / "m.json")
    assert "local batch" in table and "\n            8" in table and "\n            1" in table
    return folder


def test_what_a_profile_says_is_what_is_simulated(profiled):
    found = json.loads((profiled / "m.json").read_text())
    assert found["schema"] == "whale.profile/1" and found["units"]["seconds"] == "s" and found["model"]["name"] == "gpt"
    device, = found["devices"]
    assert device["kind"] == "ref" and [s["samples"] for s in device["steps"]] == [1, 2, 4, 8]
    assert len(device["ops"]) > 10 and all(p["seconds"] > 0 for op in device["ops"] for p in op["points"])
    for command in (("simulate", "--json"), ("plan", "--estimate", "--json")):
        kinds = []
        for factor in (None, 1, 10):
            scaled = json.loads(json.dumps(found))
            for op in scaled["devices"][0]["ops"]:
                for point in op["points"]:
                    point["seconds"] *= factor or 1
            (profiled / "scaled.json").write_text(json.dumps(scaled))
            profile = () if factor is None else ("--profile", profiled / "scaled.json")
            kinds.append(json.loads(whale(command[0], profiled / "m.whale", "--devices", "ref:2", "--strategy", "replica", *command[1:], *profile))["seconds"])
        assert kinds[2] > 3 * kinds[1] and kinds[0] != kinds[1]  # the collective, and updates of buckets without points, go by rates
    rows = json.loads(whale("predict", profiled / "m.whale", "--devices", "ref:2", "--counts", "1", "--profile", profiled / "m.json", "--json"))
    assert rows[0]["seconds"] > 0


def test_a_plan_keeps_its_profile(profiled):
    whale("plan", profiled / "m.whale", "--devices", "ref:2", "--strategy", "replica", "--profile", profiled / "m.json", "-o", profiled / "p.plan")
    direct = json.loads(whale("simulate", profiled / "m.whale", "--devices", "ref:2", "--strategy", "replica", "--profile", profiled / "m.json", "--json"))["seconds"]
    assert json.loads(whale("simulate", profiled / "p.plan", "--json"))["seconds"] == pytest.approx(direct)
    assert "loss" in whale("run", profiled / "p.plan", "--steps", "1", "--json")


@pytest.mark.parametrize("change, said", [
    (lambda p: p["devices"][0]["ops"][0]["points"][0].update(seconds=-1), "'seconds' -1"),
    (lambda p: p["devices"][0]["ops"][0]["points"][0].update(seconds=float("nan")), "no profile"),
    (lambda p: p["devices"][0]["ops"][0]["points"][0].update(seconds=1e9), "at most 86400 (a day)"),
    (lambda p: scale(p, 1000), "are these in milliseconds"),
    (lambda p: scale(p, .001), "are these in milliseconds"),
    (lambda p: largest(p)["points"].append({**largest(p)["points"][-1], "seconds": 3 * largest(p)["points"][-1]["seconds"]}), "has two times of matmul"),
    (lambda p: p["devices"][0]["steps"][-1].update(step=p["devices"][0]["steps"][0]["step"] / 30), "says that a step of "),
    (lambda p: p.clear(), "no profile"),
    (lambda p: p["devices"][0].update(type="V1000"), "nearest are V100-16GB"),
    (lambda p: p["devices"][0].update(kind="banana"), "has kind 'banana'"),
    (lambda p: p["devices"].append(p["devices"][0]), "twice"),
    (lambda p: p["units"].update(seconds="ms"), "expected 's'"),
    (lambda p: p.update(devices=[]), "is empty"),
    (lambda p: p.update(schema="whale.profile/7"), "measure again"),
])
def test_what_cannot_be_right_is_refused(profiled, tmp_path, change, said):
    profile = json.loads((profiled / "m.json").read_text())
    change(profile)
    (tmp_path / "bad.json").write_text(json.dumps(profile))
    told = failed("plan", profiled / "m.whale", "--devices", "ref:2", "--profile", tmp_path / "bad.json", cwd=tmp_path)
    assert said in told and str(tmp_path / "bad.json") in told, told


def test_what_may_be_wrong_is_noted(profiled, tmp_path):
    def notes(*change):
        profile = json.loads((profiled / "m.json").read_text())
        for each in change:
            each(profile)
        (tmp_path / "p.json").write_text(json.dumps(profile))
        text = whale("plan", profiled / "m.whale", "--devices", "ref:2", "--strategy", "replica", "--profile", tmp_path / "p.json")
        return [line for line in text.splitlines() if f"profile '{tmp_path / 'p.json'}'" in line]

    def again(p):
        largest(p)["points"].append({**largest(p)["points"][-1], "seconds": 1.6 * largest(p)["points"][-1]["seconds"]})

    assert any("has two times of matmul" in note for note in notes(again))
    assert not any("another graph" in note for note in notes())
    assert any("was measured with another graph: model 'gpt' of digest 00000000000000ff" in note for note in notes(lambda p: p["model"].update(digest="00000000000000ff")))


def test_of_another_model_or_other_devices(profiled, tmp_path):
    whale("model", "mlp", "-o", tmp_path / "other.whale")
    told = failed("plan", tmp_path / "other.whale", "--devices", "ref:2", "--profile", profiled / "m.json", cwd=tmp_path)
    assert "is of model 'gpt'" in told and "has hardly an op of model 'mlp'" in told
    assert "The profile has none of T4" in whale("plan", profiled / "m.whale", "--devices", "T4:1", "--profile", profiled / "m.json")
    # A shallower model of the same layers serves.
    whale("model", *SMALL[:2], "6", *SMALL[3:], "-o", tmp_path / "deep.whale")
    assert "are measured" in whale("plan", tmp_path / "deep.whale", "--devices", "ref:2", "--profile", profiled / "m.json")


@pytest.mark.parametrize("arguments, said", [
    (("profile",), "needs a model"),
    (("profile", "m.whale", "--import", "x"), "excludes"),
    (("profile", "m.whale", "--devices", "null:1"), "not profiled"),
    (("profile", "m.whale", "--devices", "ref:1", "--samples", "9"), "a local batch of 9"),
    (("profile", "--import", "m.whale"), "is neither JSON nor such a table"),
    (("launch", "-n", "2", "--", WHALE, "profile", "m.whale", "--devices", "ref:2", "-o", "two.json"), "of 2: run it without `whale launch`"),
])
def test_usage(profiled, arguments, said):
    assert said in failed(*arguments, cwd=profiled)
    assert not (profiled / "two.json").exists()


def test_profiles_of_one_model_are_joined(profiled, tmp_path):
    other = json.loads((profiled / "m.json").read_text())
    other["devices"][0].update(kind="null", type="T4")
    (tmp_path / "t4.json").write_text(json.dumps(other))
    whale("profile", "--import", profiled / "m.json", "--import", tmp_path / "t4.json", "-o", tmp_path / "both.json")
    both = json.loads((tmp_path / "both.json").read_text())
    assert [d.get("type", d["kind"]) for d in both["devices"]] == ["ref", "T4"] and both["model"] == other["model"]
    other["model"]["digest"] = "0"
    (tmp_path / "t4.json").write_text(json.dumps(other))
    assert "t4.json is of another model than" in failed("profile", "--import", profiled / "m.json", "--import", tmp_path / "t4.json", cwd=tmp_path)


def sailor(times):
    return json.dumps({str(b): {"1": {str(layer): [f * b, 2 * f * b, 0.001] for layer, f in enumerate(times)}} for b in (1, 2, 4)})


def test_profiles_of_others(tmp_path):
    whale("model", "gpt", "--layers", "4", "--dim", "64", "--seq", "32", "--batch", "8", "-o", tmp_path / "m.whale")
    for device, scale in (("V100-16", 1), ("A100-40", .5)):
        (tmp_path / device).mkdir()
        (tmp_path / device / "profile.json").write_text(sailor([scale * t for t in (.001, .01, .01, .01, .01, .002)]))
    shown = whale("profile", "--import", tmp_path / "V100-16" / "profile.json", "--import", tmp_path / "A100-40" / "profile.json", "-o", tmp_path / "both.json")
    assert "V100-16GB" in shown and "A100-40GB" in shown and "6 layers at 3 sizes" in shown
    plan = ("--strategy", "replica", "--profile", tmp_path / "both.json")
    one = json.loads(whale("simulate", tmp_path / "m.whale", "--devices", "V100-16GB", "--strategy", "local", "--profile", tmp_path / "both.json", "--json"))["seconds"]
    assert one == pytest.approx(8 * 3 * .043, rel=.01)  # forward and backward of all layers at 8 samples
    text = whale("plan", tmp_path / "m.whale", "--devices", "V100-16GB:1|A100-40GB:2", *plan)
    assert "Times of layers on A100-40GB, V100-16GB are measured" in text
    deep = tmp_path / "deep.whale"
    whale("model", "gpt", "--layers", "5", "--dim", "64", "--seq", "32", "--batch", "8", "-o", deep)
    assert "times of 6 layers" in failed("plan", deep, "--devices", "V100-16GB", *plan, cwd=tmp_path)
    # Metis's: forward and backward together, in milliseconds; the file's name says the rest.
    (tmp_path / "metis").mkdir()
    for b in (1, 2):
        (tmp_path / "metis" / f"DeviceType.A100_tp1_bs{b}.json").write_text(json.dumps({"execution_time": {"layer_compute_total_ms": [3 * b, 30 * b, 30 * b, 30 * b, 30 * b, 6 * b]}}))
    found = json.loads(whale("profile", "--import", tmp_path / "metis", "--json"))
    assert found["devices"][0]["type"] == "A100-40GB"
    assert found["devices"][0]["layers"][1]["times"][1] == {"forward": pytest.approx(.02), "backward": pytest.approx(.04), "update": 0}
    # A table of ops: the shapes themselves, and others by their work.
    (tmp_path / "ops.csv").write_text("set,op,gpu,torch,B,M,N,K,H,ms\ntrain,linear,Tesla T4,x,1,512,64,192,,0.05\ntrain,linear,Tesla T4,x,1,1024,1024,1024,,1\ntrain,ln,Tesla T4,x,256,,,,64,0.01\n")
    assert "3 points" in whale("profile", "--import", tmp_path / "ops.csv", "-o", tmp_path / "ops.json")
    assert json.loads(whale("simulate", tmp_path / "m.whale", "--devices", "T4", "--profile", tmp_path / "ops.json", "--json"))["seconds"] > 0
    for content, said in (('{"1": {"1": {"0": [-1, 2, 3]}}}', "a layer's time of -1"), ("{}", "neither JSON"), ('{"a": 3}', "another JSON")):
        (tmp_path / "V100-16" / "bad.json").write_text(content)
        assert said in failed("profile", "--import", tmp_path / "V100-16" / "bad.json", cwd=tmp_path)
