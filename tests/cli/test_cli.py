"""The command line: every command, every way to feed it, and what it says when something is wrong."""

import contextlib
import json
import os
import pathlib
import pty
import re
import shlex
import struct
import subprocess

import numpy as np
import pytest

import whale as wh

WHALE = os.environ.get("WHALE", str(pathlib.Path(__file__).resolve().parents[2] / "build" / "tools" / "whale" / "whale"))
GPT = ["gpt", "--layers", "1", "--dim", "32", "--heads", "4", "--seq", "16", "--batch", "6"]
MLP = ["mlp", "--layers", "2", "--dim", "8", "--hidden", "16", "--classes", "3", "--batch", "10"]


def whale(*arguments, code=0):
    done = subprocess.run([WHALE, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == code, f"exit {done.returncode}: {done.stderr}{done.stdout[-500:]}"
    return done.stdout if code == 0 else done.stderr


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli")
    whale("model", *GPT, "-o", folder / "gpt.whale")
    whale("model", *MLP, "-o", folder / "mlp.whale")
    (folder / "book.txt").write_text("It was the best of times, it was the worst of times. " * 50)
    rng = np.random.default_rng(0)
    arrays = dict(x=rng.standard_normal((23, 8)).astype(np.float32), y=rng.integers(0, 3, 23).astype(np.int32))
    np.savez(folder / "data.npz", **arrays)
    np.savez_compressed(folder / "compressed.npz", **arrays)
    np.savez(folder / "wrong.npz", x=arrays["x"].astype(np.float64), y=arrays["y"])
    from safetensors.numpy import save_file
    save_file(arrays, str(folder / "data.safetensors"))
    return folder


@pytest.mark.parametrize("name", ["gpt", "gpt2", "bert", "bert-large", "t5", "t5-large", "resnet", "resnet20", "resnet50", "mlp", "dlrm", "cosmoflow", "unet3d", "classifier100k", "moe-gpt", "m6", "llama", "deepseek", "gnmt", "m6-10b"])
def test_every_model_is_written_and_planned(name, tmp_path):
    out = whale("model", name, "-o", tmp_path / "m.whale")
    assert "parameters" in out and (tmp_path / "m.whale").stat().st_size < 1 << 20, "weights are never inside"
    assert "parameters" in whale("inspect", tmp_path / "m.whale")
    assert "device" in whale("plan", tmp_path / "m.whale", "--devices", "null:4", "-o", tmp_path / "p.plan")
    assert "device" in whale("inspect", tmp_path / "p.plan")


@pytest.mark.parametrize("name,parameters", [("gpt3-175b", "175 G"), ("m6-10b", "10.0 G"), ("m6-1t", "1.00 T"), ("m6-10t", "10.1 T"), ("llama3-405b", "406 G"), ("deepseek-v3", "671 G")])
def test_large_models_are_files_of_metadata(name, parameters, tmp_path):
    assert f"{parameters} parameters" in whale("model", name, "-o", tmp_path / "m.whale")
    assert (tmp_path / "m.whale").stat().st_size < 1 << 20


def test_the_papers_numbers_of_parameters(tmp_path):
    """Llama 3.1 405B (Grattafiori et al., 2024, table 3): 405.9 billion; DeepSeek-V3 (DeepSeek-AI, 2024, section 4.2): 671 billion, 37 of them
    for a token. Each beside the sum of its matrices, written out."""
    d, heads, groups, hidden, vocab, layers = 16384, 128, 8, 53248, 128256, 126
    llama = layers * (2 * d * d + 2 * d * d * groups // heads + 3 * d * hidden + 2 * d) + 2 * vocab * d + d
    assert llama == pytest.approx(405.9e9, rel=2e-4)
    d, heads, hidden, experts, vocab, layers, dense = 7168, 128, 2048, 256, 129280, 61, 3
    attention = d * 1536 + 1536 * heads * 192 + d * (512 + 64) + 512 * heads * (128 + 128) + heads * 128 * d + 1536 + 512 + 2 * d
    expert = 3 * d * hidden
    others = layers * attention + dense * 3 * d * 18432 + (layers - dense) * d * experts + 2 * vocab * d + d
    deepseek = others + (layers - dense) * (experts + 1) * expert
    assert deepseek == pytest.approx(671e9, rel=1e-3)
    assert others + (layers - dense) * 9 * expert == pytest.approx(37e9, rel=0.02)
    for name, count in ("llama3-405b", llama), ("deepseek-v3", deepseek):
        whale("model", name, "-o", tmp_path / "m.whale")
        variables = json.loads(whale("inspect", tmp_path / "m.whale", "--json"))["variables"]
        assert sum(v["elements"] for v in variables) == count


def test_what_a_plan_has_fixed_is_refused_beside_it(files, tmp_path):
    whale("plan", files / "mlp.whale", "--devices", "cpu:1", "-o", tmp_path / "p.plan")
    for option, value in (("--devices", "cpu:2"), ("--zero", "1"), ("--strategy", "replica"), ("--exact", None)):
        more = [option] if value is None else [option, value]
        for command in (["run", tmp_path / "p.plan", "--steps", "1"], ["bench", tmp_path / "p.plan"], ["verify", files / "mlp.whale", "--plan", tmp_path / "p.plan"]):
            assert f"made with its own {option}" in whale(*command, *more, code=2)
    whale("run", tmp_path / "p.plan", "--steps", "1", "--init-dir", tmp_path, "--plan-timeout", "9")


def test_what_cannot_be_written_at_the_end_is_known_at_the_start(files, tmp_path):
    (tmp_path / "file").write_text("mine")
    for name, content in ("theirs/model.safetensors", "mine"), ("index/whale.json", "mine"), ("lock/.whale.saving", "mine"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(content)
    (tmp_path / "taken" / "optimizer.safetensors").mkdir(parents=True)
    (tmp_path / "link").symlink_to("nowhere")
    before = sorted(tmp_path.rglob("*"))
    for more, word in (
            ("--save", tmp_path / "file"), "is not a directory"), (("--save", tmp_path / "file" / "below"), "Not a directory"), (
            ("--save", tmp_path / "theirs"), "is not part of a checkpoint"), (("--save", tmp_path / "index"), "is not the index of a checkpoint"), (
            ("--save", tmp_path / "lock"), "was not made by libwhale"), (("--save", tmp_path / "taken"), "is not a regular file"), (
            ("--save", tmp_path / "link"), "leads nowhere"), (("--save", tmp_path / "none" / ("n" * 300)), "name too long"), (
            ("--save", "/proc/zz"), "cannot make the directory '/proc/zz'"), (("--save", "/proc"), "cannot write"), (
            ("--trace", tmp_path), "a directory stands there"), (("--trace", tmp_path / "none" / "t.json"), "No such file"), (
            ("--trace", "/proc/zz.json"), "cannot write there"), (("--trace", "/dev/null"), "a device"):
        said = whale("run", files / "mlp.whale", "--steps", "1", *more, code=2)
        assert word in said and "step 1" not in said and "parameters" not in said, said
    assert (tmp_path / "file").read_text() == "mine" and sorted(tmp_path.rglob("*")) == before
    whale("run", files / "mlp.whale", "--steps", "1", "--save", tmp_path / "new" / "folder" / "ckpt")


def test_inspect_levels(files):
    graph = whale("inspect", files / "gpt.whale", "--level", "graph")
    train = whale("inspect", files / "gpt.whale", "--level", "train")
    assert "attention" in graph and "adam" not in graph and "adam" in train and "attention_grad" in train
    assert json.loads(whale("inspect", files / "gpt.whale", "--json"))["name"] == "gpt"


def without_rule(folder):
    """A plan's model and options: parts of one tensor, of which one device has other terms than the other."""
    graph = wh.Graph("attention")
    with graph:
        a = wh.nn.attention(wh.input("x", (1, 4, 2)), 1)
        scores = wh.ops.exp(wh.ops.matmul(a, a, transpose_b=True)).sum(axis=1)
        graph.minimize(wh.ops.log(scores).mean(), wh.SGD(0.1))
    graph.save(str(folder / "attention.whale"))
    return folder / "attention.whale", "--devices", "null:4", "--strategy", "replica(2) > split(2, shares=[[3,1],[1,1]])", "--zero", "3"


def test_prove(files, tmp_path):
    told = whale("prove", files / "gpt.whale", "--devices", "null:4", "--strategy", "replica(2) > split(2)")
    assert told.splitlines()[-1] == "proven"
    plan = tmp_path / "gpt.plan"
    assert whale("plan", files / "gpt.whale", "--devices", "null:2", "--prove", "-o", plan).splitlines()[-1] == "proven"
    proof = json.loads(whale("prove", plan, "--json"))
    assert proof["verdict"] == "proven" and [e["entry"] for e in proof["entries"]] == ["train", "eval"]
    assert wh.Plan.load(str(plan)).prove() == proof
    ring = ("prove", files / "gpt.whale", "--devices", "null:2", "--strategy", "split(2, factor=sequence)")
    assert whale(*ring).splitlines()[-1] == "proven"
    # What there is no rule for is said, and nothing else. Adasum is named.
    done = subprocess.run([WHALE, "prove", *without_rule(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 3 and done.stdout.splitlines()[-1] == "not covered"
    handed_out = json.loads(whale("prove", files / "gpt.whale", "--fetch", "grad:head.weight", "--json"))
    assert handed_out["verdict"] == "proven"
    assert "--fetch" in whale("prove", plan, "--fetch", "grad:head.weight", code=2)
    for other in ("--pareto", "--candidates"):  # have no plan that could be proven
        refused = subprocess.run([WHALE, "plan", files / "mlp.whale", "--devices", "null:2", "--prove", other], capture_output=True, text=True)
        assert refused.returncode not in (0, 1, 3) and "excludes" in refused.stderr
    assert "Adasum, which is no sum" in whale("prove", files / "mlp.whale", "--devices", "null:2", "--adasum")


def test_a_plan_that_contradicts_itself_is_refuted(tmp_path):
    """As the reader says, which a file that is no plan is not (exit code 2)."""
    graph = wh.Graph("wide")
    with graph:
        graph.minimize(wh.nn.linear(wh.input("x", (2, 3)), 1013).mean(), wh.SGD(0.1))
    path, told, damaged = tmp_path / "wide.plan", [], 0
    wh.plan(graph, devices="null:2", strategy="replica").save(str(path))
    data = path.read_bytes()
    data = data[:8] + bytes(4) + data[12:]  # without the mark of a checksum, as from another producer
    for at in [m.start() for m in re.finditer(re.escape((1013).to_bytes(8, "little")), data)]:
        path.write_bytes(data[:at] + (1014).to_bytes(8, "little") + data[at + 8:])
        done = subprocess.run([WHALE, "prove", "--json", path], capture_output=True, text=True)
        assert done.returncode in (0, 1, 2, 3), done
        if done.returncode == 1:
            proof = json.loads(done.stdout)
            assert proof["verdict"] == "refuted"
            told.append(proof["text"])
            found = next(each for each in proof["entries"] if each["verdict"] == "refuted")
            assert found["entry"] == "all" or found["at"]["device"] == 0, proof
            again = wh.Plan.prove_file(str(path))
            assert again == proof, (again, proof)
            with pytest.raises((wh.FailedPrecondition, wh.DataLoss)) as raised:
                wh.Plan.load(str(path))
            if isinstance(raised.value, wh.FailedPrecondition):
                assert raised.value.device == 0, vars(raised.value)
        elif done.returncode == 2:  # damaged: nothing is said of it
            with pytest.raises(wh.WhaleError):
                wh.Plan.prove_file(str(path))
            damaged += 1
    assert damaged > 0
    assert any("device 0, instruction" in each and "it reads" in each for each in told), told
    # The learning rate, in each of the places where a plan says it: the command and the SDK say the same of each file.
    rates, codes = [m.start() for m in re.finditer(re.escape(struct.pack("<d", 0.1)), data)], []
    for at in rates:
        path.write_bytes(data[:at] + struct.pack("<d", 0.2) + data[at + 8:])
        done = subprocess.run([WHALE, "prove", "--json", path], capture_output=True, text=True)
        codes.append(done.returncode)
        if done.returncode == 1:
            assert wh.Plan.prove_file(str(path)) == json.loads(done.stdout)
            assert "the learning rate is" in done.stdout, done
    assert 1 in codes, (rates, codes)
    path.write_bytes(b"")
    assert "is empty" in whale("prove", path, code=2)
    path.write_bytes(data[:100])
    assert "wide.plan" in whale("prove", path, code=2)


def test_plans_of_one_order_are_told(tmp_path):
    """Exact mode, without a split like one device, with one not; and what is not exact says nothing of bits."""
    model = tmp_path / "mlp.whale"
    whale("model", "mlp", "-o", model)
    fetch = ["--fetch", "grad:head.weight"]
    for name, devices, strategy, more in (
        ("one", 1, "replica", ["--exact"]), ("two", 2, "replica", ["--exact"]), ("split", 2, "split(2)", ["--exact"]),
        ("free", 2, "replica", []), ("fetching", 1, "replica", ["--exact", *fetch]),
    ):
        whale("plan", model, "--devices", f"null:{devices}", "--strategy", strategy, *more, "-o", tmp_path / f"{name}.plan")
    for name, code, told in (
        ("two", 0, "yes, as far as their kernels are the same"), ("split", 1, "no, output "), ("free", 3, "not known, nothing says the bits of this plan"),
        ("fetching", 0, "yes, as far as their kernels are the same; 1 output(s) are handed out by one of them alone"),
    ):
        done = subprocess.run(
            [WHALE, "prove", tmp_path / f"{name}.plan", "--same-bits", tmp_path / "one.plan"], capture_output=True, text=True
        )
        assert done.returncode == code and f"one.plan: {told}" in done.stdout and done.stdout.endswith("\nproven\n"), done
    whale("model", "mlp", "--lr", "0.3", "-o", model)  # another program
    whale("plan", model, "--devices", "null:2", "--strategy", "replica", "--exact", "-o", tmp_path / "other.plan")
    done = subprocess.run([WHALE, "prove", tmp_path / "other.plan", "--same-bits", tmp_path / "one.plan"], capture_output=True, text=True)
    assert done.returncode == 1 and "no, it is of another program" in done.stdout, done
    told = whale("prove", tmp_path / "two.plan", "--same-bits", tmp_path / "one.plan", "--json")
    assert json.loads(told)["same_bits"]["verdict"] == "yes"


def test_a_recurrence_is_proven(tmp_path):
    """Each step of it adds terms by twice as many ways as the one before: more than anybody counts, of few kinds."""
    model = tmp_path / "gnmt.whale"
    whale("model", "gnmt", "--layers", "2", "--dim", "32", "--seq", "12", "--batch", "8", "--vocab", "64", "-o", model)
    assert whale("prove", model, "--devices", "null:5", "--strategy", "replica([pipeline(3), split(2)])").splitlines()[-1] == "proven"


def test_what_a_plan_is_proven_in_json(files, tmp_path):
    """Beside the plan, as `whale prove --json` has it, also where it is not proven; the exit code is the verdict's."""
    options = (files / "gpt.whale", "--devices", "null:4", "--strategy", "replica(2) > split(2)", "--json")
    proof = json.loads(whale("prove", *options))
    assert proof["verdict"] == "proven"
    for more in (), ("--choices",):
        told, plain = json.loads(whale("plan", *options, "--prove", *more)), json.loads(whale("plan", *options, *more))
        assert told.pop("proof") == proof and told == plain and list(told) == list(plain)
    assert "is a list" in whale("plan", *options, "--prove", "--reshards", code=2)
    done = subprocess.run([WHALE, "plan", *without_rule(tmp_path), "--prove", "--json", "-o", tmp_path / "a.plan"], capture_output=True, text=True)
    assert done.returncode == 3 and json.loads(done.stdout)["proof"]["verdict"] == "not covered"
    again = subprocess.run([WHALE, "prove", tmp_path / "a.plan", "--json"], capture_output=True, text=True)
    assert again.returncode == 3 and json.loads(again.stdout) == json.loads(done.stdout)["proof"]


def test_a_timeout_says_what_it_ended(files, tmp_path):
    plan, at_once = tmp_path / "p.plan", ("--plan-timeout", "1e-9")
    whale("plan", files / "gpt.whale", "--devices", "null:2", "-o", plan)
    for command in ("prove", files / "gpt.whale"), ("plan", files / "gpt.whale", "--prove"):
        assert "whale: planning took longer than its timeout of 1e-09 seconds" in whale(*command, *at_once, code=2)
    for command in ("prove", plan), ("prove", plan, "--json"), ("plan", plan, "--prove"), ("plan", plan, "--prove", "--json"):
        done = subprocess.run([WHALE, *command, *at_once], capture_output=True, text=True)
        assert done.returncode == 2 and "whale: proving took longer than its timeout of 1e-09 seconds" in done.stderr, done.stderr
        assert "Give a longer --plan-timeout" in done.stderr and "proven" not in done.stdout and ("--json" not in command or not done.stdout)
    # What was made before the time ran out is there.
    copy = tmp_path / "copy.plan"
    whale("plan", plan, "--prove", "-o", copy, *at_once, code=2)
    assert copy.read_bytes() == plan.read_bytes()
    assert whale("prove", plan, "--plan-timeout", "600").splitlines()[-1] == "proven"


def test_a_long_proof_shows_how_far_it_is(tmp_path):
    """On a terminal, which is this test's; elsewhere nothing."""
    model, plan = tmp_path / "m.whale", tmp_path / "p.plan"
    whale("model", *GPT[:-1], 8192, "-o", model)
    whale("plan", model, "--devices", "null:2", "--strategy", "replica(2)", "--accumulation", 8192, "--exact", "-o", plan)
    mine, its = pty.openpty()
    with subprocess.Popen([WHALE, "prove", plan], stdout=subprocess.DEVNULL, stderr=its) as child:
        os.close(its)
        shown = b""
        with contextlib.suppress(OSError):  # EIO: it has ended
            while b"proving train" not in shown and (more := os.read(mine, 4096)):
                shown += more
        child.kill()
    os.close(mine)
    assert re.search(rb"\r\[[#.]{28}\] proving train [0-9]+/[0-9]+", shown), shown
    with subprocess.Popen([WHALE, "prove", plan, "--plan-timeout", "2.5"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        said, told = child.communicate()
    assert b"proving train" not in told + said and b"\r" not in told + said


def test_reshards(files):
    plan = ("plan", files / "gpt.whale", "--devices", "null:4", "--strategy", "replica(2) > split(2)", "--reshards")
    table, rows = whale(*plan), json.loads(whale(*plan, "--json"))
    assert "chosen" in table and "instead" in table and "along split 2" in table
    assert rows == sorted(rows, key=lambda row: -row["seconds"])
    assert all(row["chosen"]["bytes"] <= other["bytes"] for row in rows for other in row["alternatives"])


def test_choices(files):
    plan = ("plan", files / "gpt.whale", "--devices", "null:4", "--strategy", "replica(2) > split(2)", "--choices")
    table, report = whale(*plan), json.loads(whale(*plan, "--json"))
    assert "variables live" in table and "replica by b, split by" in table
    assert report["strategy"] == "replica(2) > split(2)"
    assert sum(row["price"]["moved_bytes"] for row in report["ops"]) == pytest.approx(report["step"]["moved_bytes"])
    # The same cuts as the reshards were inserted for.
    reshards = json.loads(whale(*plan[:-1], "--reshards", "--json"))
    assert {row["from"] for row in reshards} & {result.split(" ")[-1] for row in report["ops"] for result in row["results"]}


@pytest.mark.parametrize("options", [(), ("--zero", "1", "--recompute", "full")])
def test_estimate(files, tmp_path, options):
    """Memory as the plan says, device by device; and where it does not fit, how much is missing."""
    arguments = (files / "gpt.whale", "--devices", "null:4", "--strategy", "replica(2) > split(2)", *options, "--json")
    entry, report = json.loads(whale("plan", *arguments))["entries"][0], json.loads(whale("plan", *arguments, "--estimate"))
    memory = {row["device"]: entry["programs"][row["program"]]["memory"] for row in entry["rows"]}
    assert report["strategy"] == "replica(2) > split(2)" and report["seconds"] > 0
    assert sorted(d for group in report["classes"] for d in group["devices"]) == sorted(memory)
    for group in report["classes"]:
        for d in group["devices"]:
            parts = memory[d]["parameters"] + memory[d]["state"] + memory[d]["buffers"] + memory[d]["arena"]
            assert group["memory"]["total"] == parts
    whale("model", "mlp", "-o", tmp_path / "mlp.whale")
    table = whale("plan", tmp_path / "mlp.whale", "--devices", "null-1MB:2", "--strategy", "replica", "--estimate")
    assert "it does not fit" in table and "1.0 MB" in table


def lines(text):
    return [json.loads(line) for line in text.splitlines()]


def test_run_synthetic_and_text(files):
    rows = lines(whale("run", files / "gpt.whale", "--devices", "cpu:2", "--steps", "3", "--json"))
    assert [r["step"] for r in rows] == [1, 2, 3] and all(set(r) == {"step", "loss", "seconds", "items_per_second"} for r in rows)
    rows = lines(whale("run", files / "gpt.whale", "--devices", "cpu:3", "--steps", "30", "--json", "--data", files / "book.txt", "--lr", "0.01"))
    assert rows[-1]["loss"] < 0.8 * rows[0]["loss"]


@pytest.mark.parametrize("name", ["data.npz", "data.safetensors"])
def test_run_arrays_with_a_smaller_last_batch(files, name):
    rows = lines(whale("run", files / "mlp.whale", "--devices", "cpu:2", "--steps", "6", "--json", "--data", files / name))
    assert len(rows) == 6  # 10, 10, 3, 10, 10, 3 samples
    assert all(np.isfinite(r["loss"]) for r in rows)


def test_data_of_a_model_without_samples(tmp_path):
    """"has no samples", it said of every file."""
    with wh.Graph("whole") as g:
        x = wh.input("x", (4, 3), batch_dim=-1)
        g.minimize(wh.ops.square(wh.nn.linear(x, 2)).mean(), wh.SGD(0.1))
    g.save(tmp_path / "m.whale")
    np.savez(tmp_path / "m.npz", x=np.ones((4, 3), np.float32))
    whale("run", tmp_path / "m.whale", "--data", tmp_path / "m.npz", "--steps", 3)
    np.savez(tmp_path / "m.npz", x=np.full((4, 3), np.nan, np.float32))
    assert "every step takes the whole of" in whale("run", tmp_path / "m.whale", "--data", tmp_path / "m.npz", "--steps", 3, code=2)


def test_names_with_commas_are_fetched(tmp_path):
    with wh.Graph("commas") as g:
        w = wh.parameter("a,b\\", (3, 2), wh.normal(1.0))
        g.minimize(wh.ops.square(wh.input("x", (4, 3)) @ w).mean(), wh.Adam(0.1))
    g.save(tmp_path / "m.whale")
    plan = ["plan", tmp_path / "m.whale", "--devices", "cpu:2", "--strategy", "replica", "--gradient-dtype", "bf16", "-o", tmp_path / "m.plan"]
    whale(*plan)
    said = subprocess.run([WHALE, "verify", tmp_path / "m.whale", "--plan", tmp_path / "m.plan"], capture_output=True, text=True).stdout
    advice = said[said.index("--fetch ") + 8:].splitlines()[0]
    assert advice == r"'grad:a\,b\\'"
    whale(*plan, "--fetch", *shlex.split(advice))
    whale("verify", tmp_path / "m.whale", "--plan", tmp_path / "m.plan")


def test_plan_file_runs_as_the_model_does(files, tmp_path):
    whale("plan", files / "gpt.whale", "--devices", "cpu:3", "--strategy", "replica(3, shares=[3,2,1])", "-o", tmp_path / "p.plan")
    a = [r["loss"] for r in lines(whale("run", tmp_path / "p.plan", "--steps", "3", "--json"))]
    b = [r["loss"] for r in lines(whale("run", files / "gpt.whale", "--steps", "3", "--json"))]
    np.testing.assert_allclose(a, b, rtol=1e-5)
    c = [r["loss"] for r in lines(whale("run", tmp_path / "p.plan", "--steps", "3", "--json", "--no-pin"))]
    assert a == c


def test_checkpoint_goes_on(files, tmp_path):
    run = lambda *more: [r["loss"] for r in lines(whale("run", files / "mlp.whale", "--data", files / "data.npz", "--json", *more))]
    run("--steps", "3", "--save", tmp_path / "c")
    assert (tmp_path / "c" / "model.safetensors").exists()
    resumed = lines(whale("run", files / "mlp.whale", "--data", files / "data.npz", "--json", "--steps", "1", "--load", tmp_path / "c"))
    assert resumed[0]["step"] == 4


def test_trace_bench_devices(files, tmp_path):
    whale("run", files / "mlp.whale", "--steps", "2", "--devices", "cpu:2", "--trace", tmp_path / "t.json", "--quiet")
    assert json.loads((tmp_path / "t.json").read_text())
    row = json.loads(whale("bench", files / "mlp.whale", "--steps", "4", "--warmup", "2"))
    assert row["ms_per_step"] > 0 and row["peak_rss_mb"] > 0
    assert "ref" in whale("devices") and {d["name"] for d in json.loads(whale("devices", "--json"))} >= {"cpu", "ref", "null"}


def test_clusters_of_several_nodes(files, tmp_path):
    across = ("--strategy", "cluster(device_order=column) > replica(2) > split(2)")
    (tmp_path / "cluster.txt").write_text("# two machines\n2x null:2\n")
    for devices in ("2xnull:2", f"file:{tmp_path / 'cluster.txt'}"):
        plan = json.loads(whale("plan", files / "gpt.whale", "--devices", devices, *across, "--json"))
        assert plan["meshes"][0]["devices"] == [0, 2, 1, 3] and [d["node"] for d in plan["devices"]] == [0, 0, 1, 1]
    assert "does not change the result" in whale("verify", files / "mlp.whale", "--devices", "2xcpu:1", "--steps", "2",
                                                 "--strategy", "cluster(device_order=row) > replica(2)")


def test_loss_scale(files):
    rows = lines(whale("run", files / "mlp.whale", "--steps", "2", "--precision", "f16", "--loss-scale", "128",
                       "--loss-scale-growth", "1", "--json"))
    assert len(rows) == 2


def test_verify_compares_decisions(tmp_path):
    whale("model", "moe-gpt", "--layers", "2", "--dim", "16", "--heads", "2", "--seq", "8", "--vocab", "32", "--batch", "4",
          "--experts", "4", "-o", tmp_path / "moe.whale")
    for more in ((), ("--precision", "bf16")):
        out = json.loads(whale("verify", tmp_path / "moe.whale", "--devices", "cpu:2", "--steps", "3", "--json", *more))
        for row in out["comparisons"]:
            assert row["decisions"] > 0 and row["passed"]
            assert row["steps_compared"] + row["steps_left_out"] == 3
            assert row["decisions_that_differ"] == 0 or row["largest_margin"] <= row["margin_bound"] and row["steps_left_out"] > 0


def test_verify_reads_both_halves_of_split_parameters(tmp_path):
    whale("model", "dlrm", "--layers", "3", "--dim", "8", "--vocab", "30", "--seq", "2", "--hidden", "16", "--batch", "12", "--precision", "bf16",
          "--optimizer", "split_sgd", "-o", tmp_path / "dlrm.whale")
    out = json.loads(whale("verify", tmp_path / "dlrm.whale", "--devices", "cpu:2", "--strategy", "split(2, factor=table_rows)", "--steps", "8", "--json"))
    row = next(r for r in out["comparisons"] if r["precision"] == "bfloat16")
    assert out["passed"] and row["parameters"]["tensors"] > 0 and row["state"]["tensors"] == 0  # the lower halves belong to their weights


def test_verify_prints_the_figures(files):
    out = json.loads(whale("verify", files / "mlp.whale", "--devices", "cpu:3", "--strategy", "replica(3, shares=[1,0,2])", "--steps", "3", "--json"))
    assert out["passed"] and [c["precision"] for c in out["comparisons"]] == ["float64", "float32"]
    assert "does not change the result" in whale("verify", files / "mlp.whale", "--devices", "cpu:2", "--steps", "2")


BAD = [
    (["model", "nothing", "-o", "{f}/x.whale"], "nothing"),
    (["model", "gpt", "--dim", "30", "--heads", "4", "-o", "{f}/x.whale"], "heads"),
    (["model", "gpt", "--layers", "1", "-o", "/proc/nowhere/x.whale"], "nowhere"),
    (["inspect", "{f}/missing.whale"], "missing.whale"),
    (["inspect", "{f}/book.txt"], "neither"),
    (["plan", "{f}/gpt.whale", "--devices", "tpu:4"], "tpu"),
    (["plan", "{f}/gpt.whale", "--strategy", "replica(3, shares=[1,2])"], "shares"),
    (["plan", "{f}/gpt.whale", "--devices", "cpu:4", "--strategy", "replica(3)"], "3"),
    (["run", "{f}/mlp.whale", "--data", "{f}/book.txt"], "token"),
    (["run", "{f}/mlp.whale", "--data", "{f}/wrong.npz"], "float64"),
    (["run", "{f}/mlp.whale", "--data", "{f}/compressed.npz"], "savez"),
    (["run", "{f}/mlp.whale", "--data", "{f}/missing.npz"], "missing.npz"),
    (["run", "{f}/mlp.whale", "--load", "{f}"], ""),
    (["run", "{f}/mlp.whale", "--precision", "f8"], "f8"),
    (["run", "{f}/mlp.whale", "--precision", "f64", "--devices", "cpu:1"], "ref"),
    (["run", "{f}/mlp.whale", "--devices", "cpu@4095"], "may not run on core 4095"),
]


@pytest.mark.parametrize("arguments,word", BAD, ids=[" ".join(a[:2]) + ":" + w for a, w in BAD])
def test_what_is_wrong_is_said(files, arguments, word):
    message = whale(*[a.replace("{f}", str(files)) for a in arguments], code=2)
    assert word in message and any(line.startswith("whale: ") for line in message.splitlines()), message


def test_broken_files_are_errors(files, tmp_path):
    raw = (files / "gpt.whale").read_bytes()
    for i, bad in enumerate([raw[:100], raw[:-15], raw[:8] + b"\xff" * 64 + raw[72:], b"\0" * 64]):
        (tmp_path / f"{i}.whale").write_bytes(bad)
        whale("inspect", tmp_path / f"{i}.whale", code=2)


def test_help_is_there_for_every_command():
    for command in ("", "model", "inspect", "plan", "run", "verify", "bench", "devices"):
        assert "--help" in whale(*([command] if command else []), "--help")


def test_a_file_of_another_kind_is_called_what_was_wanted(files, tmp_path):
    other = tmp_path / "t.txt"
    other.write_text("some text")
    assert f"--plan '{other}' is no plan (.plan)" in whale("verify", files / "mlp.whale", "--plan", other, code=2)
    for command in "run", "plan", "bench":
        assert "neither a model (.whale) nor a plan (.plan)" in whale(command, other, code=2)
    for name, advice in ("nodir", ""), ("no.whale", "; `whale model gpt -o gpt.whale` writes a model"), ("no.plan", "; `whale plan MODEL -o FILE` writes a plan"):
        assert whale("inspect", tmp_path / name, code=2) == f"whale: cannot open '{tmp_path / name}': No such file or directory{advice}\n"
    assert "`whale plan MODEL" in whale("verify", files / "mlp.whale", "--plan", tmp_path / "no.plan", code=2)


@pytest.mark.parametrize("micro_batches", [2, 4])
def test_samples_of_stages_with_unlike_meshes_are_those_that_they_work_on(tmp_path, micro_batches):
    """Experts make stages of a split, beside stages of replicas, which have half of the batch."""
    whale("model", "moe-gpt", "--layers", "4", "--dim", "32", "--heads", "4", "--seq", "16", "--vocab", "64", "--experts", "4", "--batch", "8", "-o", tmp_path / "m.whale")
    text = whale("plan", tmp_path / "m.whale", "--devices", "null:8", "--strategy",
                 f"pipeline(4, micro_batches={micro_batches}) > replica(2); experts: split(2, factor=experts)")
    assert "8 samples are cut over 8 devices as [4, 4, 8, 8, 4, 4, 8, 8]" in text


def test_m6_10t_fits_the_papers_machines(tmp_path):
    """512 devices of 32 GB; Adafactor's sums of squares are small, and held the gradients of all layers back until they were sent together."""
    whale("model", "m6-10t", "-o", tmp_path / "m.whale")
    text = whale("plan", tmp_path / "m.whale", "--devices", "64xnull-32GB:8", "--strategy", "replica; experts: split(512, factor=experts)",
                 "--recompute", "full", "--offload", "parameters,state,gradients")
    assert float(text.split("memory of one device: ")[1].split(" GB")[0]) < 10
