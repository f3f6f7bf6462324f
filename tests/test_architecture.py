"""The arrows between rooms, and what the light commands may import."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "inlay"

# room -> rooms it may import (docs/architecture.md, "Arrows"); a room may always import itself
LEAVES = {"errors", "settings", "processes", "caches", "threads", "locks", "archives", "lazy_imports", "notebook"}
ROOMS = {"model", "data", "store"}
ARROWS = {
    "errors": set(),
    "processes": {"errors"},
    "settings": {"errors", "processes"},
    "caches": {"errors"},
    "locks": {"errors"},
    "archives": set(),
    "threads": {"locks"},
    "lazy_imports": set(),
    "terminal": {"processes"},
    "notebook": set(),
    "model": LEAVES,
    "data": LEAVES,
    "store": LEAVES,
    "training": LEAVES | ROOMS,
    "serving": LEAVES | ROOMS,
    "explore": LEAVES | ROOMS | {"training", "serving"},
    "exchange": LEAVES | ROOMS | {"training", "serving"},
    "stream": LEAVES | ROOMS | {"training", "serving", "reports"},
    "studies": LEAVES | ROOMS | {"training", "serving", "explore", "cluster"},
    "reports": LEAVES | ROOMS | {"training", "serving"},
    "cluster": LEAVES | ROOMS | {"training"},
    "pipeline": LEAVES | ROOMS | {"training", "serving", "explore", "reports", "cluster", "terminal"},
    "estimators": LEAVES | ROOMS | {"training", "serving", "pipeline", "terminal"},
    "api": LEAVES | ROOMS | {"training", "serving", "explore", "exchange", "reports", "pipeline", "terminal"},
    "client": LEAVES,
    "service": LEAVES | ROOMS | {"training", "serving", "explore", "exchange", "reports", "cluster"},
    "cli": LEAVES
    | ROOMS
    | {
        "training",
        "serving",
        "explore",
        "studies",
        "exchange",
        "stream",
        "service",
        "client",
        "reports",
        "cluster",
        "pipeline",
        "terminal",
    },
    "__main__": {"cli"},
}


def room_of(path: Path) -> str:
    first = path.relative_to(SOURCE).parts[0]
    return first.removesuffix(".py")


def imports_of(path: Path):
    """The rooms of ours that a file imports, anywhere in it, with the line."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            names = [node.module or ""]
            if node.module == "inlay":
                names = [f"inlay.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            parts = name.split(".")
            if parts[0] == "inlay" and len(parts) > 1:
                yield parts[1], node.lineno


FILES = sorted(path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_follow_the_arrows(path):
    room = room_of(path)
    allowed = ARROWS[room] | {room}
    against = [f"{path}:{line} imports {name}" for name, line in imports_of(path) if name not in allowed]
    assert not against


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_room_is_entered_through_its_init(path):
    """Other rooms import only what a room's `__init__.py` lists."""
    past = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf8"))):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for parts in (name.split(".") for name in names):
            if parts[0] == "inlay" and len(parts) > 2 and parts[1] != room_of(path):
                past.append(f"{path}:{node.lineno} reaches past inlay.{parts[1]} to {'.'.join(parts)}")
    assert not past


def test_every_room_is_in_the_arrow_table():
    assert {room_of(path) for path in FILES} <= ARROWS.keys()


def test_transformers_is_touched_only_in_the_model_room():
    users = set()
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf8"))):
            modules = [node.module] if isinstance(node, ast.ImportFrom) else []
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if any(module and module.split(".")[0] == "transformers" for module in modules):
                users.add(room_of(path))
    assert users <= {"model", "cli"}  # `inlay doctor` prints its version


@pytest.mark.parametrize(
    "arguments",
    [
        *(["--help"], ["tasks", "--help"], ["tasks"], ["tasks", "--json"], ["presets"]),
        *(["study", "--help"], ["study", "list"]),
        *(["train", "--help"], ["predict", "--help"], ["evaluate", "--help"]),
    ],
)
def test_light_commands_import_no_heavy_library(arguments, tmp_path):
    program = (
        "import sys; from inlay.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit as stop: assert not stop.code, stop.code\n"
        "heavy = ('torch', 'transformers', 'numpy', 'pandas', 'matplotlib')\n"
        "print([name for name in heavy if name in sys.modules], file=sys.stderr)"
    )
    environment = {"INLAY_HOME": str(tmp_path), "PATH": "", "PYTHONPATH": str(SOURCE.parent)}
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip().endswith("[]"), done.stderr


def test_the_core_imports_without_the_extras_and_pydantic():
    program = (
        "import sys\n"
        "extras = ('pydantic', 'fastapi', 'datasets', 'ray', 'uvicorn', 'peft', 'adapters', 'onnx', 'onnxscript')\n"
        "for name in (*extras, 'onnxruntime', 'seqeval', 'triton'): sys.modules[name] = None\n"
        "import inlay.training, inlay.serving.verification, inlay.stream, inlay.cli, inlay.explore.sweep\n"
        "import inlay.exchange, inlay.exchange.onnx, inlay.model.kernels.fused_bottleneck, inlay.model.kernels.grouped"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env={"PYTHONPATH": str(SOURCE.parent)}
    )
    assert done.returncode == 0, done.stderr


def test_pickle_is_never_loaded():
    for path in FILES:
        text = path.read_text(encoding="utf8")
        assert "import pickle" not in text
        assert "weights_only=False" not in text
        for line in text.splitlines():
            assert "torch.load(" not in line or "weights_only=True" in line, f"{path}: {line}"


# First words that make a riddle of a docstring: what is described has no noun. ("Of one step, with padding.")
RIDDLES = re.compile(r"(Of|That|Those|Whether there|What an?)\b")
# Classes of one name in two files: `Engine` in api.py is the engine with the user's own store.
CLASSES_TWICE = {"Engine"}


def first_lines(path: Path):
    """The first line of every docstring in a file, with the line it belongs to."""
    tree = ast.parse(path.read_text(encoding="utf8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            docstring = ast.get_docstring(node)
            if docstring:
                yield docstring.splitlines()[0], getattr(node, "lineno", 1)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_docstrings_begin_with_a_verb_or_a_noun(path):
    riddles = [f"{path}:{line}: {text}" for text, line in first_lines(path) if RIDDLES.match(text)]
    assert not riddles


def test_no_two_classes_have_one_name():
    trees = [ast.parse(path.read_text(encoding="utf8")) for path in FILES]
    counts = Counter(node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    assert {name for name, count in counts.items() if count > 1} <= CLASSES_TWICE


def test_no_two_rooms_have_a_file_of_one_name():
    """But for `cli`, whose files are named after commands."""
    named = [path for path in FILES if path.name not in ("__init__.py", "__main__.py") and room_of(path) != "cli"]
    counts = Counter(path.name for path in named)
    assert not [name for name, count in counts.items() if count > 1]
