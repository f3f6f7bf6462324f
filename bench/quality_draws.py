"""The files that `bench/quality.py` trains on: rows drawn from the real sets, as a user's own small file would be.

Of each set there is a pool of training rows and a set of test rows: the official dev set, or a seeded part where the
set has none, at most 1,000 rows. A draw is a plain random sample of the pool; the smaller draws of a number are the
beginnings of its larger ones. Rare classes are in a draw once or not at all, as they would be in a user's file: test
rows of a class that the draw does not have are wrong, whatever a system says.

There is no set of tagged words among the data, and none is made up.
"""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from report import say, write_whole

from inlay.data import load_task
from inlay.data.published_sets import EXTRA
from inlay.data.splits import group_keys
from inlay.data.tasks import Split, Task
from inlay.settings.run_config import DataConfig

GLUE_SETS = ("cola", "sst2", "mrpc", "stsb", "mnli", "qnli", "rte", "wnli")
EXTRA_SETS = (
    *("sms-spam", "airline", "disasters", "emotion", "global-warming", "primary-emotions"),
    *("political-audience", "political-bias", "political-message", "progressive-opinion", "progressive-stance"),
    *("us-economic-performance", "20-newsgroups", "imdb", "cb"),
)
SETS = (*(f"glue/{name}" for name in GLUE_SETS), *(f"extra/{name}" for name in EXTRA_SETS))
LEFT_OUT = {"glue/qqp": "missing", "extra/scitail": "has test rows only", "extra/squad": "answers are spans"}
SIZES = (50, 200, 1000, 5000)
DRAWS = 3
MOST_TEST, LEAST_TEST = 1000, 250
MOST_TEST_SHARE = 0.25
RECIPE = 2
"""changes when the same name would stand for other rows"""


@dataclass(frozen=True)
class Draw:
    """A training file and its test file, and what is known of them."""

    set: str
    size: int
    """rows that were asked for; the largest size takes what a smaller set has"""
    draw: int
    kind: str
    metric: str
    labels: tuple[str, ...]
    """of the training rows"""
    unseen: tuple[str, ...]
    """labels of test rows that no training row has"""
    num_train: int
    num_test: int
    num_words: float
    """of a row, in the mean"""
    digest: str
    """of both files"""
    folder: str

    @property
    def train(self) -> Path:
        return Path(self.folder) / "train.csv"

    @property
    def test(self) -> Path:
        return Path(self.folder) / "test.csv"

    @property
    def cell(self) -> tuple[str, int, int]:
        """What records of several systems have in common."""
        return self.set, self.size, self.draw


def list_draws(name: str, root: Path, folder: Path, sizes: Sequence[int] = SIZES, draws: int = DRAWS) -> list[Draw]:
    """The draws of a set, whose files are written if they are not there yet."""
    place = folder / name.replace("/", "-")
    index = place / "draws.json"
    asked = {"recipe": RECIPE, "sizes": list(sizes), "draws": draws, "root": str(root)}
    known = json.loads(index.read_text(encoding="utf8")) if index.is_file() else {}
    if known.get("asked") != asked:
        say(f"drawing rows of {name}")
        task = _open_task(name, root)
        made = [_write_draw(task, size, draw, sizes, place) for size in sizes for draw in range(draws)]
        known = {"asked": asked, "draws": [asdict(one) for one in made if one is not None]}
        write_whole(index, json.dumps(known, indent=1))
    return [Draw(**{**one, "labels": tuple(one["labels"]), "unseen": tuple(one["unseen"])}) for one in known["draws"]]


@dataclass(frozen=True)
class _Pool:
    """The rows of a set that draws are made of, and those that test them."""

    name: str
    task: Task
    train: Split
    test: Split


def _open_task(name: str, root: Path) -> _Pool:
    """Read a set: its test rows, at most 1,000, and a pool of rows whose texts are not among them."""
    kind, _, short = name.partition("/")
    config = DataConfig(source=name, root=str(root))
    task = load_task(config, short)
    is_cut = kind == "extra" and EXTRA[short].is_cut
    if is_cut and task.test is not None and len(task.test) < LEAST_TEST:
        num_rows = len(task.train) + len(task.dev) + len(task.test)
        share = min(LEAST_TEST / num_rows, MOST_TEST_SHARE)
        task = load_task(DataConfig(source=name, root=str(root), test_share=share), short)
    train, test = (task.train, task.dev) if task.test is None else (_join(task.train, task.dev), task.test)
    order = np.random.default_rng(0).permutation(len(test))[:MOST_TEST]
    test = test.take(np.sort(order))
    known = set(group_keys(test.texts, test.pairs))
    apart = [row for row, key in enumerate(group_keys(train.texts, train.pairs)) if key not in known]
    return _Pool(name, task, train.take(apart), test)


def _join(first: Split, second: Split) -> Split:
    """The rows of two sides as one."""
    assert first.targets is not None
    assert second.targets is not None
    return Split(
        [*first.texts, *second.texts],
        None if first.pairs is None or second.pairs is None else [*first.pairs, *second.pairs],
        np.concatenate([first.targets, second.targets]),
        [*first.lines, *second.lines],
    )


def count_rows(num_pool: int, size: int, sizes: Sequence[int]) -> int | None:
    """How many rows a draw of a size has; None: the set is too small for it.

    The largest size means so many rows at most: a set takes part that has twice the size before.
    """
    if num_pool >= size:
        return size
    is_largest = size == max(sizes) and len(sizes) > 1
    return num_pool if is_largest and num_pool >= 2 * sorted(sizes)[-2] else None


def _write_draw(pool: _Pool, size: int, draw: int, sizes: Sequence[int], place: Path) -> Draw | None:
    num_rows = count_rows(len(pool.train), size, sizes)
    if num_rows is None or (num_rows == len(pool.train) and draw > 0):  # all rows can be drawn only once
        return None
    order = np.random.default_rng(1 + draw).permutation(len(pool.train))[:num_rows]
    train, test = pool.train.take(order), pool.test
    labels, tested = _find_labels(train, pool.task), _find_labels(test, pool.task)
    if pool.task.kind == "classify" and len(labels) < 2:
        return None
    folder = place / f"{size}-{draw}"
    folder.mkdir(parents=True, exist_ok=True)
    for side, split in (("train", train), ("test", test)):
        _write_rows(folder / f"{side}.csv", split, pool.task)
    content = (folder / "train.csv").read_bytes() + (folder / "test.csv").read_bytes()
    num_words = np.mean([len(text.split()) for text in [*train.texts, *(train.pairs or ())]])
    return Draw(
        set=pool.name,
        size=size,
        draw=draw,
        kind=pool.task.kind,
        metric=pool.task.metric,
        labels=labels,
        unseen=tuple(label for label in tested if label not in labels),
        num_train=len(train),
        num_test=len(test),
        num_words=round(float(num_words) * (1 if train.pairs is None else 2), 1),
        digest=hashlib.sha256(content).hexdigest()[:16],
        folder=str(folder),
    )


def _find_labels(split: Split, task: Task) -> tuple[str, ...]:
    """The labels that rows have, in the order of the set's."""
    if task.kind != "classify":
        return ()
    assert split.targets is not None
    return tuple(task.labels[int(label)] for label in np.unique(split.targets))


def _write_rows(path: Path, split: Split, task: Task) -> None:
    assert split.targets is not None
    labels = [task.labels[int(target)] if task.kind == "classify" else repr(float(target)) for target in split.targets]
    columns = {"text": split.texts} | ({} if split.pairs is None else {"pair": split.pairs}) | {"label": labels}
    with path.open("w", encoding="utf8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
