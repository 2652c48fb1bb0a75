"""Every example, and every command in the README that needs no network, runs as printed."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("WHALE", ROOT / "build/tools/whale/whale")).parents[2]


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "t.txt"
    path.write_text("In the beginning was the word, and the word was with many devices. " * 200)
    return path


def run(command, **options):
    env = {**os.environ, "PATH": f"{BUILD}/tools/whale:{os.environ['PATH']}"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, **options)
    assert done.returncode == 0, done.stderr[-2000:] + done.stdout[-500:]
    return done.stdout + done.stderr


def test_gpt_text(text, tmp_path):
    out = run([sys.executable, str(ROOT / "examples/python/gpt_text.py"), str(text), "--steps", "12", "--dim", "32", "--layers", "1", "--seq", "16",
               "--sample", "5", "--devices", "cpu:4", "--save", str(tmp_path / "ckpt"), "--picture", str(tmp_path / "plan.svg")])
    assert "loss of a bigram model" in out and "The model writes" in out
    assert (tmp_path / "ckpt" / "model.safetensors").exists()
    assert (tmp_path / "plan.svg").read_text().startswith("<svg")


@pytest.mark.parametrize("example", sorted(str(p.relative_to(ROOT / "examples/python")) for p in (ROOT / "examples/python").rglob("*.py")
                                           if p.name != "gpt_text.py") + ["../mixed/mixed.py"])
def test_python_example(example, tmp_path):
    run([sys.executable, str(ROOT / "examples/python" / example)], cwd=tmp_path)


@pytest.mark.skipif(not (BUILD / "capi/libwhale_ucx.so").exists(), reason="built without UCX")
def test_multi_process_example_alone_and_in_two_processes(tmp_path):
    """tests/launchers runs it under every launcher."""
    program = [sys.executable, str(ROOT / "examples/multi-process/train.py")]
    alone, two = run([*program, "cpu:2"], cwd=tmp_path), run(["whale", "launch", "-n", "2", "--", *program], cwd=tmp_path)
    assert alone.count("loss") == 3 and two == alone.replace("in 1 process", "in 2 process")


@pytest.mark.skipif(not (BUILD / "capi/libwhale_ucx.so").exists(), reason="built without UCX")
def test_each_rank_reads_its_own_samples_as_the_docs_say(tmp_path):
    section = re.search(r"^## Each rank reads its own samples\n(.*?)^## ", (ROOT / "docs/many-processes.md").read_text(), re.S | re.M).group(1)
    with_loader, without = re.findall(r"```py\n(.*?)```", section, re.S)
    example = (ROOT / "examples/python/own_samples.py").read_text()
    assert with_loader in example
    shown = re.search(r"# (\{.*\}) on rank 0 of 2$", without, re.M).group(1)
    program = f"{example}\n{without}\nassert (slices == {shown}) == (world.rank == 0)\n"
    alone = run([sys.executable, "-c", example], cwd=tmp_path)
    both = run(["whale", "launch", "-n", "2", "--", sys.executable, "-c", program], cwd=tmp_path)
    assert both == alone.replace("in 1 process", "in 2 process") and "epoch 3" in alone


def test_strategy_diffs_are_those_of_the_examples():
    """Each diff of docs/strategies.md, ignoring its marks, is a piece of its example; at most four lines are added."""
    sections = re.findall(r"^## [^\n]*: `(\w+\.py)`\n(.*?)(?=^## |\Z)", (ROOT / "docs/strategies.md").read_text(), re.S | re.M)
    assert len(sections) >= 6
    for example, section in sections:
        lines = re.search(r"```diff\n(.*?)```", section, re.S).group(1).splitlines()
        assert all(line[0] in " +" for line in lines) and sum(line[0] == "+" for line in lines) <= 4, example
        assert "\n".join(line[1:] for line in lines) in (ROOT / "examples/python" / example).read_text(), example


def test_levels_of_a_plan_are_those_of_the_docs(tmp_path):
    """Each line that docs/how-a-plan-is-made.md shows stands in a level of its model, and so many collectives and updates as it says."""
    page = (ROOT / "docs/how-a-plan-is-made.md").read_text()
    model, levels = re.search(r"^whale (model .*)$", page, re.M).group(1).split(), re.search(r"build/tools/levels (.*)$", page, re.M).group(1)
    run(["whale", *model], cwd=tmp_path)
    run(f"{BUILD}/tools/levels {levels}", cwd=tmp_path, shell=True)
    passes = {path.name.split(".", 1)[1].removesuffix(".txt"): path.read_text() for path in (tmp_path / "levels").iterdir()}
    known = re.sub(r"[ ]+", " ", "\n".join(passes.values()))
    shown = [line for block in re.findall(r"```text\n(.*?)```", page, re.S) for line in block.splitlines() if "build/tools/levels" not in line]
    assert len(shown) > 30
    assert not [line for line in shown if re.sub(r"[ ]+", " ", line).strip() not in known]
    prose = " ".join(page.split())
    reduces, buckets = re.search(r"merges (\d+) all-reduces into (\d+)", prose).groups()
    updates, groups = re.search(r"`group_updates` (\d+) `adam` ops into (\d+)", prose).groups()
    for level, op, count in [("train.insert_reshards", "all_reduce", reduces), ("train.form_buckets", "all_reduce", buckets),
                             ("train.insert_reshards", "adam", updates), ("train.group_updates", "adam", groups)]:
        assert passes[level].count(f"= {op}(") == int(count), (level, op)


def test_plans_of_the_overlap_page_are_those_of_its_commands(tmp_path):
    """Each line that docs/overlap.md shows of a plan, "..." standing for anything, is one of its command's, without the attributes."""
    page = (ROOT / "docs/overlap.md").read_text()
    run(["whale", "model", "gpt", "-o", "gpt.whale"], cwd=tmp_path)
    shown = re.findall(r"^(whale plan gpt[^\n]*)\n```\n\n```text\n(.*?)```", page, re.S | re.M)
    assert len(shown) == 3
    for command, block in shown:
        plan = re.sub(r' [a-z_0-9]+=(\[[^]]*\]|"[^"]*"|\S+)', "", run(command, cwd=tmp_path, shell=True))
        for line in block.splitlines():
            assert re.search("^ *" + ".*".join(map(re.escape, line.split("..."))), plan, re.M), line


def test_quickstart_in_the_readme_is_a_real_run():
    """What the README shows of the quickstart's model and plan, on two cores, is what they print; the training itself is run by hand."""
    block = re.search(r"What the quickstart prints.*?```text\n(.*?)```", (ROOT / "README.md").read_text(), re.S).group(1)
    shown = [line for line in block[:block.index("[#")].splitlines() if line.strip() and line != "..."]
    code = """if True:
        import sys; sys.path.insert(0, "examples/python")
        import gpt_text, whale as wh
        g = gpt_text.build(batch=16, seq=128, dim=256, layers=4, heads=4, steps=1200, learning_rate=1e-3).seal()
        print(g.summary(), wh.plan(g, devices="cpu@0,cpu@1,cpu@0,cpu@1").summary(), sep="\\n")"""
    lines = iter(run([sys.executable, "-c", code], cwd=ROOT).splitlines())
    for line in shown:
        assert line in lines, f"not printed, or not in this order: {line}"


def test_every_model_has_a_strategy_that_runs():
    """docs/models.md has a row for each model that `whale model --help` lists, and runs it (test_page) as the row says."""
    models = re.findall(r"^  ([\w-]+) +\S.*$", run([str(BUILD / "tools/whale/whale"), "model", "--help"]).split("Models,")[1], re.M)
    page = (ROOT / "docs/models.md").read_text()
    rows = {name: (strategy, devices) for name, strategy, devices in re.findall(r"^\| `([\w-]+)` \| `([^`]+)` \| `([^`]+)` \|", page, re.M)}
    assert len(models) > 15 and sorted(models) == sorted(rows)
    blocks = dict(re.findall(r"^## ([\w-]+)\n\n```sh\n(.*?)^```", page, re.S | re.M))
    for name, (strategy, devices) in rows.items():
        assert f"whale run {name}.whale " in blocks[name], name
        assert f"whale model {name} " in blocks[name] and f"{name}.whale --devices {devices} --strategy '{strategy}'" in blocks[name], name


def test_pictures_are_those_of_the_plans():
    run([sys.executable, str(ROOT / "tools/generate/plan_pictures.py"), "--check"])


PAGES = ["README.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md"))]
BY_HAND = ("tools/quickstart", "tools/check", "pip install", "ninja ")  # set up the machine or need the build tree: CI runs these itself


@pytest.mark.parametrize("page", PAGES)
def test_page(page, text, tmp_path):
    """The blocks of a page, from top to bottom in one folder, run as printed; what follows `$ command` in a text block is its output."""
    (tmp_path / "book.txt").write_text(text.read_text())
    for folder in ("examples", "tools"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    bin = os.pathsep.join([str(pathlib.Path(sys.executable).parent), f"{BUILD}/tools/whale", os.environ["PATH"]])
    for language, block in re.findall(r"^```(python|sh|text)\n(.*?)^```", (ROOT / page).read_text(), re.S | re.M):
        if language == "text":
            for line, output in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block, re.M):
                done = subprocess.run(["bash", "-c", line + " 2>&1"], capture_output=True, text=True, env={**os.environ, "PATH": bin}, cwd=tmp_path)
                pattern = ".*".join(re.escape(part) for part in output.split("...\n"))  # a line of dots: anything
                assert re.fullmatch(pattern + (".*" if output.startswith("...") else ""), done.stdout, re.S), f"{line}\n{done.stdout}"
            continue
        if any(word in block for word in BY_HAND):
            continue
        command = [sys.executable, "-c", block] if language == "python" else ["bash", "-euo", "pipefail", "-c", block]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PATH": bin}, cwd=tmp_path)
        assert done.returncode == 0, f"{block}\n{done.stderr[-2000:]}{done.stdout[-500:]}"
