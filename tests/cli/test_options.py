"""Options mean something where they are accepted: an empty value is refused, a model refuses the sizes that it does not read, a file that cannot be
planned is not written, and errors speak of the command line's own options."""

import functools
import os
import re
import subprocess

import pytest
from test_cli import GPT, MLP, WHALE, whale

EMPTY = [("model", "mlp", "-o"), ("model", "mlp", "-o", "{f}/x.whale", "--strategy"), ("model", "mlp", "-o", "{f}/x.whale", "--optimizer"),
         *((command, "{f}/m.whale", option) for command, options in {
             "inspect": ["--level"], "simulate": ["--trace", "--report", "--measured", "--cluster"], "plan": ["-o", "--devices", "--cluster", "--strategy", "--fetch", "--offload", "--recompute", "--init-dir", "--report", "--trace", "--measured"],
             "run": ["--save", "--load", "--data", "--trace", "--report", "--devices", "--strategy", "--seed"], "verify": ["--plan", "--data", "--strategy"],
             "bench": ["--data", "--name"], "launch": ["--hosts", "--address", "--output-dir"]}.items() for option in options)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("options")
    whale("model", *MLP, "-o", folder / "m.whale")
    return folder


@pytest.mark.parametrize("arguments", EMPTY, ids=lambda a: f"{a[0]} {a[-1]}")
def test_an_empty_value_is_refused(arguments, folder):
    """`--save "$UNSET"`: a training whose result would be lost."""
    arguments = [each.replace("{f}", str(folder)) for each in arguments]
    assert f"'{arguments[-1]}' is followed by nothing" in whale(*arguments, "", code=2)
    if arguments[-1].startswith("--"):
        assert f"'{arguments[-1]}=' is followed by nothing" in whale(*arguments[:-1], arguments[-1] + "=", "--json", code=2)


def test_an_empty_file_name_is_refused():
    for command in ("inspect", "plan", "run", "verify", "bench"):
        assert "an argument is empty" in whale(command, "", code=2)


OF_A_MODEL = {("m6-10b", "--dim"): "80", ("cosmoflow", "--layers"): "2", ("unet3d", "--layers"): "2", ("cosmoflow", "--image"): "32", ("unet3d", "--image"): "32",
              ("llama", "--kv-heads"): "4"}


@functools.cache
def sizes():
    """Those that not every model reads, each with a value that no model has by default."""
    said = subprocess.run([WHALE, "model", "--help"], capture_output=True, text=True, check=True).stdout
    values = {"--layers": "14", "--dim": "48", "--seq": "20", "--image": "40", "--dropout": "0.25", "--capacity": "3.5", "--tied": None, "--heads": "2",
              "--norm-groups": "2", "--top-k": "3", "--moe-every": "3", "--decoder": "3"}
    found = re.findall(r"^  (--[\w-]+)", said[:said.index("--batch")], re.M)
    assert len(found) == 19, found
    return [(name, values.get(name, "12")) for name in found if name != "--help"]


@pytest.mark.parametrize("model", ["gpt", "bert", "t5", "moe-gpt", "m6", "m6-10b", "llama", "deepseek", "gnmt", "resnet", "resnet50", "mlp", "dlrm", "cosmoflow", "unet3d", "classifier100k"])
def test_a_model_uses_a_size_or_refuses_it(model, tmp_path):
    """Each size alone changes the file, or is refused by name beside those that the model has."""
    def written(*more):
        done = subprocess.run([WHALE, "model", model, *more, "-o", str(tmp_path / "x.whale")], capture_output=True, text=True)
        return (tmp_path / "x.whale").read_bytes() if done.returncode == 0 else done.stderr
    before, taken = written(), []
    assert isinstance(before, bytes)
    for option, value in sizes():
        value = OF_A_MODEL.get((model, option), value)
        now = written(option, *([value] if value else []))
        if isinstance(now, bytes):
            assert now != before, f"{option} is accepted and changes nothing"
            taken.append(option)
        else:
            assert f"model '{model}' has no {option}; its sizes are --batch, --layers" in now or f"model '{model}' would not use {option}: it wants --" in now, now
    assert len(taken) >= 3, taken


@pytest.mark.parametrize("arguments,words", [
    ("mlp --heads 3", "model 'mlp' has no --heads; its sizes are --batch, --layers, --dim, --hidden, --classes, --dropout"),
    ("mlp --layers 1 --hidden 8", "wants --layers of 2 or more"),
    ("m6-10b --top-k 2", "wants --experts"),
    ("moe-gpt --layers 1 --experts 4", "--moe-every of at most the layers"),
    ("llama --kv-heads 3", "--kv-heads is a divisor of the heads, 8; got 3"),
    ("llama --dim 24", "heads of 3, expected an even number"),
    ("deepseek --head-dim 6", "--head-dim is a multiple of 4"),
    ("deepseek --experts 1", "top-k is 1 to the number of experts, 1; got 2"),
    ("deepseek --dense-layers 4 --experts 4", "--dense-layers of less than the layers"),
    ("mlp --sparse-updates", "no trained parameter of this model is one"),
    ("bert --sparse-updates", "need that it is only looked up"),
    ("dlrm --optimizer momentum", "with momentum 0.9"),
    ("gpt --sparse-updates --clip 1", "needs the norm of the whole gradient"),
    ("mlp --accumulation 1000000", "1000000 micro-batches"),
    ("resnet --accumulation 2", "mixes all samples"),
    ("gpt --parameters f16", "no parameters 'f16'; there are f32, bf16"),
])
def test_a_file_that_means_nothing_is_not_written(arguments, words, tmp_path):
    said = whale("model", *arguments.split(), "-o", tmp_path / "m.whale", code=2)
    assert words in said and "options." not in said and not (tmp_path / "m.whale").exists(), said


@pytest.mark.parametrize("arguments", ["mlp --no-sparse-updates", "gpt --sparse-updates", "gpt --tied --no-sparse-updates", "m6-10b --layers 1 --decoder 1 --experts 4 --dim 40", "mlp --accumulation 3",
                                       "resnet --norm-groups 4 --accumulation 2", "mlp --accumulation 2 --precision f64", "dlrm --sparse-updates",
                                       "mlp --parameters bf16", "dlrm --parameters bf16", "resnet --parameters bf16 --precision bf16"])
def test_what_means_something_is_written(arguments, tmp_path):
    whale("model", *arguments.split(), "-o", tmp_path / "m.whale")
    whale("inspect", tmp_path / "m.whale")


def test_an_expert_has_no_more_places_than_there_are_tokens(tmp_path):
    files = [tmp_path / name for name in ("some", "many")]
    for path, capacity in zip(files, ("1e6", "1e300")):
        whale("model", "moe-gpt", "--capacity", capacity, "-o", path)
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_plan_reads_initial_values_from_init_dir(tmp_path):
    """A plan keeps the names of the files that parameters start from: --init-dir is what it may read."""
    import numpy as np
    import whale as wh
    from safetensors.numpy import save_file
    for name in ("values", "plans", "elsewhere"):
        (tmp_path / name).mkdir()
    save_file({"w": np.ones((4, 3), np.float32)}, str(tmp_path / "values/w.safetensors"))
    g = wh.Graph()
    with g:
        x, y = wh.input("x", (8, 4)), wh.input("y", (8,), wh.int32)
        g.minimize(wh.nn.cross_entropy(x @ wh.parameter("w", (4, 3), wh.from_file(str(tmp_path / "values/w.safetensors"))), y), wh.SGD(0.1))
    g.save(str(tmp_path / "values/m.whale"))
    whale("plan", tmp_path / "values/m.whale", "-o", tmp_path / "plans/m.plan")
    run = ["run", tmp_path / "plans/m.plan", "--steps", "1", "--quiet"]
    refused = whale(*run, code=2)
    assert f"outside of '{tmp_path}/plans', the folder of the plan file, which alone may be read" in refused
    assert "give --init-dir, the folder that may be read" in refused
    again = whale(*run, "--init-dir", tmp_path / "elsewhere", code=2)
    assert "outside of" in again and f"give a folder that it is in, such as '{tmp_path}/values'" in again
    assert "give --init-dir" not in again
    whale(*run, "--init-dir", tmp_path / "values")


@pytest.mark.parametrize("arguments,words", [
    (["plan", "{f}/m.whale", "--accumulation", "2147483648"], "--accumulation: '2147483648', expected a whole number from 0 to 2147483647"),
    (["plan", "{f}/m.whale", "--fetch", "a\x01b"], "--fetch is not UTF-8 text"),
    (["run", "{f}/m.whale", "--init-dir", "{f}/nowhere"], "--init-dir is '"),
    (["plan", "{f}/m.whale", "--strategy", "pipeline(2, micro_batches=4611686018427387904)"], "a whole number from 1 to 2147483648"),
    (["run", "{f}/m.whale", "--save", "{f}/dangling"], "--save: '{f}/dangling' is a link that leads nowhere"),
    (["run", "{f}/m.whale", "--save", "{f}/loop"], "--save: '{f}/loop' is a link that leads nowhere"),
    (["model", "mlp", "--lr-schedule", "constant", "--total-steps", "9", "-o", "{f}/x.whale"], "--total-steps is 9, which only linear and cosine schedules have"),
    (["model", "mlp", "--strategy", "bogus: split", "-o", "{f}/x.whale"], "no scope is called 'bogus'; the model has layer0, layer1, head"),
    (["model", "gpt", "--layers", "20", "--strategy", "bogus: split", "-o", "{f}/x.whale"], "block1, block2, block3 and 17 more"),
    *((["run", "{f}/m.whale", "--precision", "f16", "--loss-scale", scale], f"--loss-scale: '{scale}', expected a number from 2^-14 to 2^24")
      for scale in ("0", "1e300", "1e-300", "16777217", "x")),
    (["verify", "{f}/m.whale", "--precision", "f16", "--loss-scale", "1e300"], "--loss-scale: '1e300', expected a number from 2^-14 to 2^24"),
    (["verify", "{f}/m.whale", "--seeds", "17"], "--seeds: '17', expected a whole number from 1 to 16"),
    (["verify", "{f}/m.whale", "--amplitude", "x"], "'x', expected a number from 0"),
    (["plan", "{f}/m.whale", "--zero", "4"], "--zero: '4', expected a whole number from 0 to 3"),
    (["bench", "{f}/m.whale", "--lr", "1"], "`whale bench` has no option '--lr'; there are --data, --overhead, --steps"),
    (["bench", "--lr", "1"], "`whale bench` has no option '--lr'"),
    (["bench", "--lr=1"], "`whale bench` has no option '--lr'"),
    (["model", "mlp", "--zero", "1", "-o", "{f}/x.whale"], "`whale model` has no option '--zero'; there are --output, --layers"),
    (["run", "{f}/m.whale", "--ignore-nan=3"], "'--ignore-nan=3': --ignore-nan takes no value"),
    (["model", "mlp", "--no-sparse-updates=0", "-o", "{f}/x.whale"], "'--no-sparse-updates=0': --no-sparse-updates takes no value"),
    (["devices", "--json=yes"], "'--json=yes': --json takes no value"),
    (["run", "{f}/m.whale", "{f}/m.whale"], "m.whale' is one argument too many: `whale run` takes one FILE besides options;"),
    (["devices", "cpu:1"], "'cpu:1' is one argument too many: `whale devices` takes options alone;"),
    (["run"], "`whale run` needs FILE: a .whale or a .plan file. `whale run --help` shows how it is used"),
    (["model", "mlp"], "`whale model` needs --output: the file to write, such as gpt.whale"),
    (["run", "{f}/m.whale", "--steps", "1", "--steps", "2"], "--steps is given 2 times; give it once"),
    (["run", "{f}/m.whale", "--steps"], "--steps is followed by nothing; give it its value: training steps"),
    (["model", "moe-gpt", "--capacity", "0", "-o", "{f}/x.whale"], "--capacity: '0', expected a number above 0"),
    (["plan", "{f}/m.whale", "--zero", "1", "--state-shares", "a,b"], "--state-shares: 'a', expected a number from 0"),
    (["verify", "{f}/m.whale", "--plan", "{f}/m.whale"], "--plan '{f}/m.whale' is a model, not a plan: leave --plan out"),
    (["inspect", "{f}/m.whale", "--json", "--level", "train"], "--json shows everything: leave --level out"),
    (["inspect", "{f}/cut", "--level", "graph"], "a checkpoint has no levels"),
    (["plan", "{f}/m.whale", "--reshards", "--all"], "--all excludes --reshards"),
    (["Run", "{f}/m.whale"], "no command 'Run'; there are model, inspect, plan, run, verify, prove, bench, devices, profile, validate, predict, simulate, launch"),
    ([], "give a command; there are model"),
    (["run", "{f}/m.whale", "--load", "{f}/cut"], "whale.json' is damaged or not the index of a checkpoint: a JSON object was expected"),
], ids=lambda v: v if isinstance(v, str) else "")
def test_errors_speak_the_command_line(arguments, words, folder):
    if not (folder / "cut").exists():
        (folder / "cut").mkdir()
        (folder / "cut/whale.json").write_text("")
        os.symlink("nowhere", folder / "dangling")
        os.symlink("loop", folder / "loop")
    said = whale(*[each.replace("{f}", str(folder)) for each in arguments], code=2)
    assert words.replace("{f}", str(folder)) in said and "options." not in said, said


@pytest.mark.parametrize("command", ["model", "inspect", "plan", "run", "verify", "bench", "devices", "launch"])
def test_what_a_command_does_not_know_is_said_in_its_own_words(command):
    """Every option that there is, and none of another command."""
    for arguments in (["--nonsense", "1"], ["--nonsense=1"], ["-q"]):
        said = whale(command, *arguments, code=2)
        assert f"`whale {command}` has no option '{arguments[0][:10]}'; there are " in said and f"`whale {command} --help`" in said, said
        listed = re.search("there are (.*)\\. `whale", said).group(1).split(", ")
        for option in listed:
            assert re.search(rf"(^|[ ,]){option}\b", whale(command, "--help"), re.M), option
        assert set(re.findall(r"^ .*?(--[\w-]+)", whale(command, "--help"), re.M)) <= {*listed, "--help"}


def test_a_long_argument_is_shown_once_and_shortened(folder):
    long = "a" * 50000 + "b" * 50000
    for arguments in (["plan", long], ["run", folder / "m.whale", "--load", long], ["run", folder / "m.whale", "--save", long], ["run", folder / "m.whale", "--trace", long],
                      ["plan", folder / "m.whale", "--strategy", long], ["plan", folder / "m.whale", "--strategy", long + ": split(2)"], ["plan", folder / "m.whale", "--devices", long],
                      ["plan", folder / "m.whale", "--devices", "file:" + long], ["plan", folder / "m.whale", "--devices", "cpu:" + long], ["plan", folder / "m.whale", "--devices", f"cpu-{long}:1"],
                      ["plan", folder / "m.whale", "--strategy", f"replica(2, {long}=1)"], ["plan", folder / "m.whale", "--strategy", f"replica(2, shares={long})"],
                      ["plan", folder / "m.whale", "--strategy", f"split(2, factor={long})"], ["plan", folder / "m.whale", "--strategy", f"cluster(device_order={long})"],
                      ["plan", folder / "m.whale", "--fetch", long], ["plan", folder / "m.whale", "--fetch", "grad:" + long], ["plan", folder / "m.whale", "--offload", long],
                      ["plan", folder / "m.whale", "--update", long], ["plan", folder / "m.whale", "--recompute", long], ["plan", folder / "m.whale", "--precision", long],
                      ["plan", folder / "m.whale", "--init-dir", long], ["run", folder / "m.whale", "--data", long], ["run", folder / "m.whale", "--steps", long],
                      ["run", folder / "m.whale", "--seed", long], ["run", folder / "m.whale", "--lr", long], ["model", long, "-o", folder / "x.whale"],
                      ["model", "mlp", "--optimizer", long, "-o", folder / "x.whale"], ["model", "mlp", "-o", long], ["model", "mlp", "--strategy", long, "-o", folder / "x.whale"],
                      ["inspect", folder / "m.whale", "--level", long], ["verify", folder / "m.whale", "--plan", long], [long], ["bench", folder / "m.whale", "--" + long],
                      ["bench", folder / "m.whale", "--" + long + "=1"], ["bench", folder / "m.whale", long], ["run", folder / "m.whale", "--quiet=" + long]):
        said = whale(*arguments, code=2)
        assert len(said) < 1500 and "aaaa" in said, said
        assert len(re.findall("aaaaa[^a]", said)) == 1, f"{str(arguments)[:60]}: {said}"


def test_split_sgd_outside_of_bf16_is_said(folder):
    for precision, said in ((None, True), ("f32", True), ("f16", True), ("bf16", False)):
        done = subprocess.run([WHALE, "model", "mlp", "--optimizer", "split_sgd", *(["--precision", precision] if precision else []), "-o", str(folder / "split.whale")],
                              capture_output=True, text=True, check=True)
        assert ("split_sgd splits weights in bf16, and this model is " + (precision or "f32") + ": it trains by plain sgd unless" in done.stderr) is said, done.stderr
    assert subprocess.run([WHALE, "model", "mlp", "--optimizer", "sgd", "-o", str(folder / "split.whale")], capture_output=True, text=True, check=True).stderr == ""


@pytest.mark.parametrize("arguments", [[], ["nothing"], ["run"], ["plan", "{f}/m.whale", "--unknown"], ["plan", "{f}/m.whale", "--accumulation", "x"], ["plan", "{f}/m.whale", "--devices"]],
                         ids=lambda a: " ".join(a)[-20:])
def test_a_wrong_command_line_exits_with_2(arguments, folder):
    """As everything else that could not be done: scripts tell 0 to 3 apart."""
    whale(*[each.replace("{f}", str(folder)) for each in arguments], code=2)


@pytest.mark.parametrize("arguments", [["plan", "{f}/own.whale", "-o", "{f}/own.whale"], ["run", "{f}/own.whale", "--steps", "1", "--trace", "{f}/own.whale"],
                                       ["run", "{f}/own.whale", "--steps", "1", "--trace", "{f}/./linked.whale"]], ids=lambda a: a[-2])
def test_a_command_does_not_overwrite_what_it_reads(arguments, folder):
    whale("model", *MLP, "-o", folder / "own.whale")
    if not (folder / "linked.whale").exists():
        os.symlink("own.whale", folder / "linked.whale")
    before = (folder / "own.whale").read_bytes()
    assert "this command reads that file, and would overwrite it" in whale(*[each.replace("{f}", str(folder)) for each in arguments], code=2)
    assert (folder / "own.whale").read_bytes() == before


def test_a_checkpoint_makes_the_folders_above_it(folder):
    """On the command line as in the library, also where each name is a letter long and the path is relative."""
    (folder / "here").mkdir()
    for path in ("a/b/c", "./d/e", "f"):
        done = subprocess.run([WHALE, "run", str(folder / "m.whale"), "--steps", "1", "--quiet", "--save", path], cwd=folder / "here", capture_output=True, text=True)
        assert done.returncode == 0 and (folder / "here" / path / "whale.json").exists(), done.stderr


def test_a_default_strategy_has_clauses(folder):
    whale("model", "mlp", "--strategy", "head: split(2); replica(2)", "-o", folder / "clauses.whale")
    assert "split(2); replica(2)" in whale("plan", folder / "clauses.whale", "--devices", "null:2")


def test_a_pipelines_cut_is_no_scope_of_the_user(folder):
    whale("model", "resnet", "--batch", "8", "--image", "8", "-o", folder / "r.whale")
    said = whale("plan", folder / "r.whale", "--devices", "null:2", "--strategy", "pipeline(2, micro_batches=2)", code=2)
    assert "mixes all samples" in said and "--norm-groups" in said and "scope stage" not in said, said


def test_bench_of_a_plan_names_the_plans_devices(folder):
    import json
    whale("plan", folder / "m.whale", "--devices", "null:2", "-o", folder / "n.plan")
    assert json.loads(whale("bench", folder / "n.plan", "--steps", "1", "--warmup", "1"))["devices"].count("null") == 2


@pytest.mark.parametrize("strategy", ["split(2)", "replica(2) > split(2)"])
def test_sums_wider_than_16_bit_parameters_go_beside_a_split(tmp_path, strategy):
    """Their parts are added up before they are rounded."""
    model = tmp_path / "m.whale"
    whale("model", "mlp", "-o", model, "--batch", "8", "--accumulation", "2", "--parameters", "bf16")
    options = ["--devices", "cpu:4" if ">" in strategy else "cpu:2", "--strategy", strategy, "--precision", "bf16", "--accumulate-dtype", "f32"]
    whale("plan", model, *options)
    whale("verify", model, *options, "--steps", "2", "--skip-float64")


@pytest.mark.parametrize("options", [["--accumulate-dtype", "bf16"], ["--accumulate-dtype", "f16"], ["--gradient-dtype", "bf16"]], ids=" ".join)
def test_16_bit_parameters_are_verified_with_narrow_sums(tmp_path, options):
    model = tmp_path / "m.whale"
    whale("model", "gpt", "-o", model, "--layers", "1", "--dim", "32", "--heads", "2", "--seq", "8", "--vocab", "64", "--batch", "8",
          "--parameters", "bf16", "--precision", "bf16", "--accumulation", "4")
    whale("verify", model, "--devices", "cpu:2", "--strategy", "replica(2)", *options, "--skip-float64")
    assert "Adasum in 16 bits with parameters of 16 bits" in whale("plan", model, "--devices", "cpu:2", "--strategy", "replica(2)", "--adasum", code=2)


def test_other_batch_sizes_are_planned_ahead(folder):
    plan = folder / "sizes.plan"
    whale("plan", folder / "m.whale", "--devices", "cpu:2", "--train-batches", "4,7", "--eval-batches", "3", "-o", plan)
    assert re.findall(r"^(\w+): batch (\d+)", whale("plan", plan), re.M) == [("train", "10"), ("eval", "10"), ("train", "4"), ("train", "7"), ("eval", "3")]
    whale("verify", folder / "m.whale", "--plan", plan, "--steps", "2")
    assert "argument" not in (said := whale("plan", folder / "m.whale", "--train-batches", "11", code=2)) and "--train-batches asks for 11 samples" in said
    for option in "--train-batches", "--eval-batches":
        assert option in whale("plan", folder / "m.whale", option, "0", code=2)
        assert option in whale("run", plan, option, "5", code=2)  # the plan is made
