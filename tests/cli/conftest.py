"""The command line in process: `inlay(...)` gives exit status, stdout and stderr; `mail` is a task trained once."""

from __future__ import annotations

import csv
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

SETTINGS = ("--size", "8", "--epochs", "2", "--lr", "1e-2", "--max-length", "24", "--batch-size", "16")
HAM, SPAM = "we see you home late cat dog mat".split(), "free win prize call now text".split()


class Ended(NamedTuple):
    status: int
    out: str
    err: str

    @property
    def data(self) -> Any:
        """Stdout as JSON: fails if anything else was printed there."""
        return json.loads(self.out)

    @property
    def lines(self) -> list[Any]:
        """Stdout as JSON lines."""
        return [json.loads(line) for line in self.out.splitlines()]


Inlay = Callable[..., Ended]


@pytest.fixture(autouse=True)
def plain_surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("INLAY_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("INLAY_DEBUG", raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def inlay(capsys: pytest.CaptureFixture[str]) -> Inlay:
    from inlay.cli import main

    def call(*arguments: object) -> Ended:
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Ended(int(stop.value.code or 0), captured.out, captured.err)

    return call


def write_mail(path: Path, num_rows: int = 80, seed: int = 0) -> Path:
    """Ham and spam that a tiny backbone can tell apart."""
    generator = random.Random(seed)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label"])
        for row in range(num_rows):
            words = generator.choices(SPAM if row % 2 else HAM, k=6)
            writer.writerow([f"{' '.join(words)} {row}", "spam" if row % 2 else "ham"])
    return path


class Mail(NamedTuple):
    store: Path
    data: Path
    backbone: Path


@pytest.fixture(scope="session")
def trained_mail(tiny_bert_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Mail:
    from inlay.cli import main

    folder = tmp_path_factory.mktemp("mail")
    mail = Mail(folder / "store", write_mail(folder / "mail.csv"), tiny_bert_folder)
    where = ("--backbone", str(mail.backbone), "--store", str(mail.store))
    with pytest.raises(SystemExit) as stop:
        main(["train", str(mail.data), "--task", "mail", "--test-share", "0.2", *where, *SETTINGS])
    assert stop.value.code == 0
    return mail


@pytest.fixture
def mail(trained_mail: Mail, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mail:
    """A store of one's own with the task `mail` in it."""
    store = Path(shutil.copytree(trained_mail.store, tmp_path / "home"))
    return trained_mail._replace(store=store)
