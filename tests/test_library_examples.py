"""Every public name of the library says what it takes and shows an example that works."""

from __future__ import annotations

import dataclasses
import doctest
import inspect
import shutil
import typing
from pathlib import Path
from typing import Any, Literal

import pandas
import pytest

import inlay
from inlay.settings import DataConfig, JointConfig, MethodConfig, TrainConfig, keywords
from tiny_backbones import make_folder

QUICK = {"size": 4, "lr": 1e-2, "epochs": 1, "batch_size": 8, "max_length": 16, "progress": False}
FAST = {name: value for name, value in QUICK.items() if name != "progress"}
TEXTS = [f"{word} film {number}" for number in range(20) for word in ("good", "bad")]


@pytest.fixture(scope="module")
def surroundings(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """The names that examples use, and a store with the task `mood`."""
    folder = tmp_path_factory.mktemp("examples")
    backbone = inlay.load_backbone(str(make_folder("bert", folder / "backbone")))
    rows = pandas.DataFrame({"text": TEXTS, "label": ["yes", "no"] * 20})
    task = inlay.load_task(rows, name="mood")
    store = inlay.Store(folder / "home")
    run = inlay.make_run(task, backbone, **{**FAST, "epochs": 8})
    (result,) = inlay.fit([run], backbone, store)
    inlay.publish(run, result, backbone, store)
    quick = {**QUICK, "backbone": backbone.name}
    known = {"inlay": inlay, "backbone": backbone, "rows": rows, "task": task, "texts": TEXTS, "run": run}
    known |= {"result": result, "other": dataclasses.replace(task, name="other"), "QUICK": quick, "FAST": FAST}
    return known, store.root


@pytest.mark.parametrize("name", [name for name in inlay.__all__ if name != "__version__"])
def test_the_example_of_a_public_name_works(name, surroundings, tmp_path, monkeypatch):
    known, home = surroundings
    shutil.copytree(home, tmp_path / "home")
    monkeypatch.setenv("INLAY_HOME", str(tmp_path / "home"))
    if name == "import_":
        inlay.export("mood", tmp_path / "mood.inlay")
    found = doctest.DocTestFinder(recurse=False).find(getattr(inlay, name), name, globs={**known, "folder": tmp_path})
    (example,) = [test for test in found if test.examples]
    told: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    runner.run(example, out=told.append)
    assert not runner.failures, "".join(told)


@pytest.mark.parametrize("name", [name for name in inlay.__all__ if name != "__version__"])
def test_a_docstring_names_every_parameter(name):
    """Fields of dataclasses have lines of their own."""
    public = getattr(inlay, name)
    if dataclasses.is_dataclass(public) or issubclass_of_error(public):
        return
    text = f"{public.__doc__} {getattr(public.__init__, '__doc__', '')}"
    assert not [
        item for item in inspect.signature(public).parameters if f"`{item}" not in text and f"{item}`" not in text
    ]


def issubclass_of_error(public: Any) -> bool:
    return isinstance(public, type) and issubclass(public, Exception)


@pytest.mark.parametrize(
    ("config", "settings", "left_out"),
    [
        (DataConfig, keywords.DataSettings, {"source", "dev", "test"}),
        (MethodConfig, keywords.MethodSettings, set()),
        (TrainConfig, keywords.TrainingSettings, set()),
        (JointConfig, keywords.JointSettings, set()),
    ],
)
def test_keywords_are_the_fields_of_the_settings_with_their_types_and_choices(config, settings, left_out):
    fields, hints = {item.name: item for item in dataclasses.fields(config)}, typing.get_type_hints(config)
    found = typing.get_type_hints(settings)
    renamed = {("method" if config is MethodConfig and name == "name" else name): name for name in fields}
    assert found.keys() == renamed.keys() - left_out
    for keyword, hint in found.items():
        name = renamed[keyword]
        if choices := fields[name].metadata["choices"]:
            assert hint == Literal[tuple(choices)], keyword
        elif hints[name] != tuple[str, ...]:
            assert hint == hints[name], keyword
