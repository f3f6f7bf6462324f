"""The documents are true: commands run, examples work, links and names lead somewhere.

Commands are run as they are written, in process, on a tiny backbone and a few rows instead of the real ones.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest

import inlay

ROOT = Path(__file__).parents[1]
INTERNALS = sorted((ROOT / "docs" / "internals").glob("*.md"))
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "bench/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *INTERNALS,
]
README = DOCUMENTS[0].read_text(encoding="utf8")
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf8")
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SMALL = "--limit 64 --epochs 1 --max-length 32".split()  # given last, so they win


def blocks(text: str, language: str) -> list[str]:
    return [body for found, body in FENCED.findall(text) if found == language]


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf8")


def count_words(text: str) -> int:
    return len(FENCED.sub("", text).split())


def name_of(document: Path) -> str:
    return str(document.relative_to(ROOT))


class Command(NamedTuple):
    """A command of a shell block, or a file it writes: `cat > path <<'END'`."""

    words: list[str]
    content: str = ""


def read_commands(block: str) -> list[Command]:
    found, lines = [], iter(block.splitlines())
    for line in lines:
        if document := re.fullmatch(r"cat > (\S+) <<'(\w+)'", line):
            body = list(iter(lines.__next__, document[2]))
            found.append(Command(["cat", document[1]], "\n".join(body) + "\n"))
        elif words := shlex.split(line, comments=True):
            found.append(Command(words))
    return found


def read_tour() -> str:
    """The README's block of commands that begins by training a second task."""
    (tour,) = [block for block in blocks(README, "sh") if "inlay train" in block]
    return tour


def make_lines(target: str) -> list[str]:
    """What `make TARGET` would run. Without the flags of a make that runs these tests."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """An empty folder with the repository's examples, and a store of its own."""
    monkeypatch.setenv("INLAY_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    return tmp_path


@pytest.fixture
def run(elsewhere, capsys, tiny_bert_folder):
    """Run one command as it is written, on the tiny backbone; returns what it printed to stdout."""
    from inlay.cli import main

    def call(words: list[str]) -> str:
        trains = words[1] in ("train", "sweep", "stream", "plan")
        small = ["--backbone", str(tiny_bert_folder), *SMALL] if trains else []
        small += ["--backbone", str(tiny_bert_folder)] if words[1] == "suggest" else []
        small += ["--backbone", str(tiny_bert_folder), *SMALL, "--steps", "2"] if words[1] == "multitask" else []
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main([*words[1:], *small])
        captured = capsys.readouterr()
        assert not stop.value.code, f"{shlex.join(words)}\n{captured.err}"
        return captured.out

    return call


def test_quickstart_and_the_tour_run_from_top_to_bottom(run, elsewhere):
    printed = {}
    for line in make_lines("quickstart"):
        if line.startswith(".venv/bin/inlay "):
            words = shlex.split(line)
            printed["quickstart", words[1]] = run(words)
    assert re.search(r"^test +accuracy [01]\.\d+", printed["quickstart", "train"], re.MULTILINE)
    assert re.findall(r"^(?:spam|ham) ", printed["quickstart", "predict"], re.MULTILINE)

    for words, content in read_commands(read_tour()):
        if words[0] == "cat":
            (elsewhere / words[1]).write_text(content)
        else:
            assert words[0] == "inlay"
            printed["tour", words[1]] = run(words)
    assert [command for part, command in printed if part == "tour"] == ["train", "predict", "sweep", "tasks", "verify"]
    assert "desk@1" in printed["tour", "train"]
    answers = [json.loads(line) for line in printed["tour", "predict"].splitlines()]
    assert [answer["task"] for answer in answers] == ["desk", "sms-spam", "desk", "sms-spam"]
    assert {answer["label"] for answer in answers} <= {"billing", "support", "sales", "spam", "ham"}
    assert len(re.findall(r"^ +(?:8|64) +0\.00[13] ", printed["tour", "sweep"], re.MULTILINE)) == 4
    assert [line.split()[0] for line in printed["tour", "tasks"].splitlines()[2:5]] == ["desk", "sms-400", "sms-spam"]
    assert "all 3 versions answer as published, bit for bit" in printed["tour", "verify"]

    (training,) = blocks(page("training.md"), "sh")
    for words, _ in read_commands(training):
        printed["more", words[1]] = run(words)
    commands = [command for part, command in printed if part == "more"]
    assert commands == ["train", "presets", "suggest", "baseline", "predict", "export"]
    assert "desk-from-sms@1" in printed["more", "train"]
    assert "houlsby2019" in printed["more", "presets"]
    assert "sms-spam" in printed["more", "suggest"]
    assert (elsewhere / "graph" / "model.onnx").is_file()

    (several,) = blocks(page("multitask.md"), "sh")
    found = [run(words) for words, _ in read_commands(several)]
    assert all("sms-joint" in each and "desk-joint" in each for each in found[:2])
    assert "about" in found[0]
    assert "desk-joint@1" in found[1]
    assert "sms-few@1" in found[2]
    assert "desk-written@1" in found[3]

    (studies,) = blocks(page("studies.md"), "sh")
    found = [run(words) for words, _ in read_commands(studies)]
    assert all(name in found[0] for name in ("glue", "tradeoff", "stream"))
    assert "report.html" in found[1]
    assert len(found) == 3


def test_the_start_page_runs_from_an_empty_folder(run, elsewhere, tiny_bert, monkeypatch, capsys):
    _install, *parts = blocks(page("start.md"), "sh")
    printed = {}
    for words, content in read_commands("".join(parts)):
        if words[0] == "cat":
            (elsewhere / words[1]).write_text(content)
        else:
            printed[words[1]] = run(words)
    assert list(printed) == ["train", "predict", "evaluate", "tasks", "show"]
    assert "desk@1" in printed["train"]
    assert len((elsewhere / "answers.csv").read_text().splitlines()) == 3
    (example,) = blocks(page("start.md"), "python")
    monkeypatch.setattr(inlay, "load_backbone", lambda name: tiny_bert)
    make_run = inlay.make_run
    monkeypatch.setattr(inlay, "make_run", lambda *given: make_run(*given, epochs=1, lr=1e-3, max_length=32))
    exec(compile(example, "docs/start.md", "exec"), {})
    assert "desk@2" in capsys.readouterr().out


def test_python_example_runs_and_is_the_shipped_script(elsewhere, tiny_bert, monkeypatch, capsys):
    (example,) = blocks(README, "python")
    path = ROOT / "examples" / "python_quickstart.py"
    assert example == path.read_text(encoding="utf8")
    assert len(example.splitlines()) < 20
    load_task, make_run = inlay.load_task, inlay.make_run
    monkeypatch.setattr(inlay, "load_backbone", lambda name: tiny_bert)
    monkeypatch.setattr(inlay, "load_task", lambda data, **settings: load_task(data, **{**settings, "limit": 64}))
    monkeypatch.setattr(inlay, "make_run", lambda *given, **settings: make_run(*given, **settings, max_length=32))
    exec(compile(example, str(path), "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("sms@1 {'accuracy':")
    assert [line.split()[0] for line in lines[1:3]] == ["sms@1", "sms@1"]
    assert lines[3] == "all versions stand: True"


def test_python_example_of_several_tasks_runs(elsewhere, tiny_bert, monkeypatch, capsys):
    (example,) = blocks(page("multitask.md"), "python")
    desk = next(content for words, content in read_commands(read_tour()) if "desk.csv" in words)
    (elsewhere / "desk.csv").write_text(desk)
    make_joint_run = inlay.make_joint_run
    monkeypatch.setattr(inlay, "load_backbone", lambda name: tiny_bert)
    monkeypatch.setattr(
        inlay,
        "make_joint_run",
        lambda *given, **settings: make_joint_run(*given, **{**settings, "steps": 2, "max_length": 32, "epochs": 1}),
    )
    exec(compile(example, "docs/multitask.md", "exec"), {})
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["sms-joint@1", "desk-joint@1"]


def test_the_two_commands_do_what_the_readme_says():
    install, first = [read_commands(block) for block in blocks(README, "sh")[:2]]
    assert [command.words[:2] for command in install] == [["pip", "install"], ["pip", "install"], ["inlay", "backbone"]]
    assert install[0].words[2:] == ["-c", "constraints.txt", "."]
    assert [command.words for command in first] == [["make", "quickstart"], ["make", "test"]]
    quickstart = [line for line in make_lines("quickstart") if line.startswith(".venv/bin/inlay ")]
    assert [shlex.split(line)[1] for line in quickstart] == ["train", "predict", "tasks"]
    assert "examples/sms_spam/sms_spam.tsv" in quickstart[0]
    assert any(".venv/bin/python -m pytest" in line for line in make_lines("test"))


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_make_targets_named_in_a_document_exist(document):
    text = document.read_text(encoding="utf8")
    targets = set(re.findall(r"`make (?!\w+=)([a-z-]+)", text))
    targets |= {line.split()[1] for block in blocks(text, "sh") for line in block.splitlines() if line[:5] == "make "}
    known = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf8"), re.MULTILINE))
    assert targets <= known


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_relative_links_lead_to_files_and_headings(document):
    prose = FENCED.sub("", document.read_text(encoding="utf8"))
    for link in re.findall(r"\]\(([^)\s]+)\)", prose):
        if re.match(r"https?://", link):
            continue
        path, _, anchor = link.partition("#")
        target = document.parent / path if path else document
        assert target.exists(), f"{document.name}: {link}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", target.read_text(encoding="utf8"), re.MULTILINE)
            slugs = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
            assert anchor in slugs, f"{document.name}: {link}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_code_named_in_a_document_exists(document):
    """Files by path from the root or, in the documents of the code, from `src/inlay`; tests by path and name."""
    text = document.read_text(encoding="utf8")
    named = re.findall(r"`([a-z_0-9]+/[a-z_0-9./-]+\.(?:py|md|toml))(?=[`:])", text)
    roots = (ROOT, ROOT / "src" / "inlay")
    missing = sorted({path for path in named if not any((root / path).is_file() for root in roots)})
    # The changelog tells what was; what is named there may have moved since.
    assert document.name == "CHANGELOG.md" or not missing, f"{name_of(document)}: {missing}"
    for path in re.findall(r"`((?:src|tests|docs|examples)/[\w./-]+\.(?:py|md|tsv|svg))(?=[`:])", text):
        assert (ROOT / path).is_file(), f"{document.name}: {path}"
    for path, name in re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", text):
        tree = ast.parse((ROOT / path).read_text(encoding="utf8"))
        names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert name in names, f"{document.name}: {path}::{name}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_a_document_cites_no_file_outside_the_repository(document):
    text = document.read_text(encoding="utf8")
    assert not re.findall(r"SEMANTICS|DESIGN\.md|HOUSE\.md|STYLE\.md|PUBLISHED\.md|\.\./shared", text)


def test_documents_that_the_code_cites_exist():
    for folder in ("src", "tests", "bench"):
        for path in (ROOT / folder).rglob("*.py"):
            cited = set(re.findall(r"(?<![\w/])docs/[\w/-]+\.md", path.read_text(encoding="utf8")))
            missing = [name for name in cited if not (ROOT / name).is_file()]
            assert not missing, f"{name_of(path)}: {missing}"


def test_every_invariant_of_the_architecture_names_its_tests():
    rows = re.findall(r"^\| (\d)\. [^|]+ \| ([^|]+) \|$", ARCHITECTURE, re.MULTILINE)
    assert [number for number, _ in rows] == list("123456789")
    assert all("::test_" in tests for _, tests in rows)


def test_every_mechanism_has_a_short_page_that_the_architecture_links():
    linked = re.findall(r"^\| \[[\w-]+\.md\]\(internals/([\w-]+\.md)\) \|", ARCHITECTURE, re.MULTILINE)
    assert sorted(linked) == [path.name for path in INTERNALS]
    too_long = {path.name: count_words(path.read_text(encoding="utf8")) for path in INTERNALS}
    assert not {name: words for name, words in too_long.items() if words > 400}


def test_readme_is_short():
    assert count_words(README) <= 900


def test_map_names_every_file_of_the_code():
    map_page = page("map.md")
    assert map_page == load_script("draw_map").render(), "run `python docs/draw_map.py`"
    linked = set(re.findall(r"\]\(\.\./(src/inlay/[\w/]+\.py)\)", map_page))
    files = {name_of(path) for path in (ROOT / "src" / "inlay").rglob("*.py") if path.name != "__init__.py"}
    assert linked == files


def test_families_methods_and_kinds_of_the_readme_are_those_there_are():
    from inlay.model.backbone.families import FAMILIES
    from inlay.model.bank.methods import JOINT_METHODS, METHODS
    from inlay.model.heads.heads import HEADS

    rows = dict(re.findall(r"^\| (backbones|methods|kinds of task) \| (.+) \|$", README, re.MULTILINE))
    assert {name for name in re.split(r"[,:; ]+", rows["backbones"]) if name in FAMILIES} == FAMILIES.keys()
    assert set(re.findall(r"`([\w+-]+)`", rows["methods"])) == METHODS.keys() | JOINT_METHODS.keys()
    assert set(re.findall(r"`(\w+)`", rows["kinds of task"])) == HEADS.keys()


def test_training_page_names_every_command():
    from inlay.cli import COMMANDS

    (listed,) = re.findall(r"^All commands: (.+)$", page("training.md"), re.MULTILINE)
    assert set(re.findall(r"`([a-z-]+)`", listed)) == COMMANDS.keys()


def test_picture_is_drawn_by_its_script(tmp_path):
    script, drawn = ROOT / "docs" / "draw_picture.py", tmp_path / "picture.svg"
    subprocess.run([sys.executable, str(script), str(drawn)], check=True)
    # Not byte for byte: another matplotlib may write the same picture in other words.
    kept = (ROOT / "docs" / "picture.svg").read_text(encoding="utf8")
    assert kept.count("<path ") == drawn.read_text(encoding="utf8").count("<path ")


def test_settings_page_is_what_the_code_says():
    assert page("settings.md") == load_script("draw_settings").render(), "run `python docs/draw_settings.py`"


def test_http_page_is_what_the_service_says():
    assert page("http.md") == load_script("draw_http").render(), "run `python docs/draw_http.py`"


def test_command_page_is_what_the_commands_say():
    assert page("commands.md") == load_script("draw_commands").render(), "run `python docs/draw_commands.py`"


def test_the_site_leads_to_every_page():
    """Built by `make docs`, whose libraries are no part of the tests' environment."""
    led = re.findall(r"^ *- [^:]+: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf8"), re.MULTILINE)
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert sorted(led) == sorted(pages | {"CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"})
    assert "font: false" in (ROOT / "mkdocs.yml").read_text(encoding="utf8")


def load_script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
