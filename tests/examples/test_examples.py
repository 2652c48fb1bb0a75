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


@pytest.mark.parametrize("example", sorted(p.name for p in (ROOT / "examples/python").glob("*.py") if p.name != "gpt_text.py"))
def test_python_example(example, tmp_path):
    run([sys.executable, str(ROOT / "examples/python" / example)], cwd=tmp_path)


def test_strategy_diffs_are_those_of_the_examples():
    """Each diff of docs/strategies.md, ignoring its marks, is a piece of its example; at most four lines are added."""
    sections = re.findall(r"^## .*: `(\w+\.py)`\n(.*?)(?=^## |\Z)", (ROOT / "docs/strategies.md").read_text(), re.S | re.M)
    assert len(sections) >= 6
    for example, section in sections:
        lines = re.search(r"```diff\n(.*?)```", section, re.S).group(1).splitlines()
        assert all(line[0] in " +" for line in lines) and sum(line[0] == "+" for line in lines) <= 4, example
        assert "\n".join(" " + line[1:] if line[1:2] != " " else line[1:] for line in lines) in (ROOT / "examples/python" / example).read_text(), example


PAGES = ["README.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md"))]


def blocks():
    for file in PAGES:
        body = (ROOT / file).read_text() if (ROOT / file).exists() else ""
        for i, (language, block) in enumerate(re.findall(r"```(python|sh)\n(.*?)```", body, re.S)):
            yield f"{file}:{i}", language, block


@pytest.mark.parametrize("name,language,block", list(blocks()), ids=lambda v: v if isinstance(v, str) and ":" in v and len(v) < 40 else "")
def test_page(name, language, block, text, tmp_path):
    if language == "python":
        (tmp_path / "block.py").write_text(block)
        run([sys.executable, "block.py"], cwd=tmp_path)
        return
    if "tools/quickstart" in block or "tools/check" in block or "pip install" in block:
        pytest.skip("sets up the machine: run by hand and by CI itself")
    (tmp_path / "book.txt").write_text(text.read_text())
    run(["bash", "-euo", "pipefail", "-c", block], cwd=tmp_path)
