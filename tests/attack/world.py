"""What is attacked: a tiny backbone, a store with tasks of its own, and how a bystander is seen to be unharmed."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import math
import shutil
from pathlib import Path
from typing import Any

from inlay.cli import main
from inlay.errors import InlayError
from inlay.model import load_backbone
from inlay.serving import Engine, Request, describe_answer, verify
from inlay.settings import MethodConfig, RunConfig
from inlay.settings.run_config import DataConfig, TrainConfig
from inlay.store import Store
from inlay.training import FitSettings, fit, make_run, publish
from tiny_backbones import make_folder
from toys import make_toy_task

TEXT = "the movie was good and the plot was fine"
SETTINGS = RunConfig(
    method=MethodConfig(size=4), train=TrainConfig(epochs=3, max_length=16, batch_size=8, lr=1e-3, seed=1)
)


class Silent(Exception):
    """A change that nobody noticed, or a bystander that was harmed."""


class World:
    """A tiny backbone and a store with two tasks of its own, made once."""

    def __init__(self, folder: Path, backbone: Any = None) -> None:
        self.folder = folder
        self.backbone = backbone or load_backbone(str(make_folder("bert", folder / "backbone")), device="cpu")
        self.store = Store(folder / "store")
        self.runs = folder / "store" / "runs"
        self.tasks = {name: make_toy_task(name, seed=seed) for seed, name in enumerate(("victim", "second"))}
        self.versions = {name: self._train(name) for name in self.tasks}
        self.answers = {name: self.ask(self.store, name) for name in self.tasks}

    def run(self, name: str) -> Any:
        return make_run(self.tasks[name], dataclasses.replace(SETTINGS, task=name), self.backbone, self.store)

    def publish(
        self, store: Store, method: MethodConfig, task: Any = None, *, pooling: str | None = None, pairs: str = "joined"
    ) -> Any:
        """A version of another method, or of another task, trained for an epoch."""
        task = task or self.tasks["victim"]
        train = dataclasses.replace(SETTINGS.train, epochs=1, pooling=pooling or SETTINGS.train.pooling)
        config = RunConfig(task=task.name, method=method, train=train, data=DataConfig(pairs=pairs))
        run = make_run(task, config, self.backbone, store)
        (result,) = fit([run], self.backbone, store.root / "runs", FitSettings(draw_curves=False))
        return publish(run, result, self.backbone, store)

    def _train(self, name: str) -> Any:
        (result,) = fit([self.run(name)], self.backbone, self.runs, FitSettings(draw_curves=False))
        return publish(self.run(name), result, self.backbone, self.store)

    def ask(self, store: Store, name: str, pair: str | None = None) -> dict[str, Any]:
        """The answer of a task as it is printed; the error of a task that does not answer."""
        (answer,) = Engine(self.backbone, store, num_slots=2).predict([Request(name, TEXT, pair)])
        about = describe_answer(answer)
        json.dumps(about, allow_nan=False).encode()
        if answer.error is not None:
            raise answer.error
        return {key: value for key, value in about.items() if key not in ("task", "version")}

    def copy_store(self, folder: Path) -> Store:
        shutil.copytree(self.store.root, folder / "store", ignore=shutil.ignore_patterns("runs"))
        return Store(folder / "store")

    def check_bystander(self, store: Store) -> None:
        """List, show, verify and ask: another task than the damaged one is as it was."""
        if call("tasks", store) or call("show", store, "second"):
            raise Silent("`inlay tasks` or `inlay show` fails")
        requests = [Request("victim", TEXT), Request("second", TEXT), Request("victim@1", TEXT)]
        versions = [store.resolve("second")]
        with contextlib.suppress(InlayError):
            versions.append(store.resolve("victim"))
        try:
            about = describe_answer(Engine(self.backbone, store, num_slots=4).predict(requests)[1])
            checks = {check.version.name: check for check in verify(versions, self.backbone, store)}
        except InlayError as error:
            raise Silent(f"answering or verifying ends for all: {error}") from error
        if not checks["second"].stands:
            raise Silent(f"another task does not stand: {checks['second'].problem}")
        if not is_same(about, self.answers["second"]):
            raise Silent(f"another task answers {about} in a batch with this one")


def is_same(about: dict[str, Any], expected: dict[str, Any]) -> bool:
    """Whether an answer of a batch is the one that was given alone, up to rounding."""
    return about.get("label") == expected["label"] and math.isclose(
        about["probability"], expected["probability"], abs_tol=1e-4
    )


def call(*words: Any) -> int:
    """The exit status of a command that only looks; what is no `InlayError` comes out as it is."""
    command, store, *more = words
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
            main([command, *map(str, more), "--store", str(store.root), "--json"])
    except SystemExit as stop:
        if not stop.code:
            json.loads(out.getvalue(), parse_constant=_refuse)
        return int(stop.code or 0)
    return 0


def _refuse(word: str) -> None:
    raise Silent(f"`{word}` in what is printed as JSON")


def find_version(store: Store, name: str) -> Any:
    """What a listing says of a task's latest version."""
    version = store.resolve(name)
    return next(info for info in store.versions(name) if info.version == version)
