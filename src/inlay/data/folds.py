"""Cross-validation: a task becomes several, each of which leaves out another part of its labelled rows.

Train and dev rows are pooled; test rows are left alone. Every fold is a task of its own: the rows it leaves out are its
test rows, and of the others a dev side is cut, as large a share as the task's own, to choose an epoch on. So nothing
that a fold is scored on has trained it or chosen anything. Repeated texts are on one side, as in any split.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from inlay.data.kinds import KINDS
from inlay.data.splits import DEV, TRAIN, assign_folds, assign_sides, row_keys
from inlay.data.tasks import Split, Task, with_sides
from inlay.errors import BadConfig, BadData


@dataclass(frozen=True, eq=False)
class Folds:
    """A task's labelled rows, and the tasks that each leave some of them out."""

    rows: Split
    """train rows, then dev rows"""
    paths: list[str]
    """the file of each row"""
    tasks: list[Task]
    """one for each fold; its test rows are those it leaves out"""
    left_out: list[np.ndarray]
    """for each fold, the positions of its left-out rows in `rows`"""
    seed: int
    notes: tuple[str, ...] = ()

    @property
    def num_judged(self) -> int:
        """Rows that some fold leaves out."""
        return sum(map(len, self.left_out))


def make_folds(task: Task, num_folds: int, seed: int) -> Folds:
    """The folds of a task. Refuses more folds than there are different texts to leave out."""
    # 1. pool labelled rows that are not test rows
    rows, paths, notes = _pool(task)
    targets = rows.targets
    assert targets is not None
    # 2. deal out the rows, and cut a dev side from what each fold keeps
    form = KINDS[task.kind].targets
    keys, strata = row_keys(task.kind, rows.texts, rows.pairs), form.find_strata(targets)
    is_kept = form.find_single(targets)
    folds = assign_folds(keys, strata, num_folds, seed, is_kept)
    if len(np.unique(folds[folds >= 0])) < num_folds:
        num_texts = len({key for key, fold in zip(keys, folds, strict=True) if fold >= 0})
        raise BadConfig(
            f"{num_folds} folds of {num_texts} different texts that can be left out", "use fewer folds, or add rows"
        )
    dev_share = len(task.dev) / (len(task.train) + len(task.dev))
    tasks, left_out = [], []
    for fold in range(num_folds):
        left, kept = np.flatnonzero(folds == fold), np.flatnonzero(folds != fold)
        own_keys = [keys[row] for row in kept]
        sides = assign_sides(own_keys, strata[kept], (dev_share, 0.0), seed, is_kept[kept])
        if not (sides == DEV).any():
            raise BadData(f"too few different texts for {num_folds} folds with dev rows", "add rows", path=rows.path)
        parts = {"train": rows.take(kept[sides == TRAIN]), "dev": rows.take(kept[sides == DEV])}
        note = f"fold {fold + 1} of {num_folds}, seed {seed}: {len(left)} rows left out"
        tasks.append(with_sides(task, {**parts, "test": rows.take(left)}, note))
        left_out.append(left)
    # 3. note the rows that no fold judges
    if num_kept := int((folds < 0).sum()):
        what = "1 row is" if num_kept == 1 else f"{num_kept} rows are"
        notes.append(f"{what} in no fold, since no other text has the label: trained on, and not judged")
    return Folds(rows, paths, tasks, left_out, seed, tuple(notes))


def _pool(task: Task) -> tuple[Split, list[str], list[str]]:
    """Train and dev rows as one, the file of each row, and notes on rows left out."""
    train, dev, notes = task.train, task.dev, []
    if dev.unseen:
        assert dev.targets is not None
        form = KINDS[task.kind].targets
        is_known = form.find_known(dev.targets, len(task.labels))
        notes.append(f"{int((~is_known).sum())} dev rows have a label that training never saw: in no fold")
        dev = replace(dev, targets=form.ignore_unseen(dev.targets, len(task.labels))).take(np.flatnonzero(is_known))
    return train.join(dev), [train.path] * len(train) + [dev.path] * len(dev), notes
