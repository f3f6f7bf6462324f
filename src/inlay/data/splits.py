"""Seeded stratified splits into train, dev and test rows; cross-validation folds; repeated texts.

Texts that differ only in case and blanks form a group, and a group is never split: a dev row whose text was also
trained on measures memory. The order in which groups are drawn comes from a hash of seed and text, not from a
generator, so a split depends neither on library versions nor on the order of the rows.

Cross-validation (`make_folds`): each fold is a task that leaves out another part of the labelled rows. Train and dev
rows are pooled; test rows are not used. The rows that a fold leaves out are its test rows; from the others a dev side
is split, with the same share as the task's own, to choose an epoch. So the rows that a fold is scored on have neither
trained it nor chosen anything.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from inlay.data.kinds import KINDS
from inlay.errors import BadConfig, BadData

if TYPE_CHECKING:
    from inlay.data.tasks import Split, Task

TRAIN, DEV, TEST = 0, 1, 2


def group_keys(texts: Sequence[str], pairs: Sequence[str] | None) -> list[str]:
    """Return a key of each text or pair, the same for texts that differ only in case or in the number of blanks."""
    known: dict[str, str] = {}  # thousands of questions may be about one long context

    def normalise(text: str) -> str:
        if text not in known:
            known[text] = " ".join(text.casefold().split())
        return known[text]

    if pairs is None:
        return [normalise(text) for text in texts]
    return [f"{normalise(text)}\0{normalise(pair)}" for text, pair in zip(texts, pairs, strict=True)]


def row_keys(kind: str, texts: Sequence[str], pairs: Sequence[str] | None) -> list[str]:
    """Return a key of each row; rows with the same key stay on one side.

    Questions about one context stay together: a context seen in training is half known.
    """
    if KINDS[kind].groups_by_pair and pairs is not None:
        return group_keys(pairs, None)
    return group_keys(texts, pairs)


def assign_sides(
    keys: Sequence[str],
    strata: np.ndarray,
    shares: tuple[float, float],
    seed: int,
    is_kept: np.ndarray | None = None,
) -> np.ndarray:
    """Assign TRAIN, DEV or TEST to each row, so that dev and test get their `shares` of the rows and of each stratum.

    Every stratum keeps a group for training. A row that `is_kept` marks is trained on, with its whole group. A side
    whose share is above 0 gets at least one group if there are enough different texts, dev before test; the caller
    must check whether it did.
    """
    # 1. groups of equal texts by stratum, and the rows that dev and test should get
    by_stratum = _group_by_stratum(keys, strata, seed, is_kept)
    wanted = {
        side: max(1, _round(share * len(keys))) if share else 0 for side, share in zip((DEV, TEST), shares, strict=True)
    }
    # 2. of each stratum, give all groups but the first to a side that still has room
    sides = np.full(len(keys), TRAIN, dtype=np.int8)
    num_free = sum(len(rows) for own in by_stratum.values() for rows in own)
    num_seen, num_taken = 0, {DEV: 0, TEST: 0}
    for stratum in sorted(by_stratum):
        num_seen += sum(len(rows) for rows in by_stratum[stratum])
        # The running total is rounded, not each stratum: many small classes would all round to 0.
        open_places = {side: _round(wanted[side] * num_seen / num_free) - num_taken[side] for side in wanted}
        for rows in by_stratum[stratum][1:]:
            side = next((side for side in wanted if len(rows) <= open_places[side]), None)
            if side is not None:
                sides[rows] = side
                open_places[side] -= len(rows)
                num_taken[side] += len(rows)
    # 3. no side stays empty if that can be avoided
    for side in wanted:
        if wanted[side] and not num_taken[side]:
            _fill(side, sides, by_stratum)
    return sides


def assign_folds(
    keys: Sequence[str], strata: np.ndarray, num_folds: int, seed: int, is_kept: np.ndarray | None = None
) -> np.ndarray:
    """Assign each row the fold that leaves it out, 0 to `num_folds` - 1, with equally many rows of each stratum.

    -1 for rows that no fold leaves out: those of a stratum with a single group, since no other row could teach it, and
    those that `is_kept` marks, with their whole group.
    """
    by_stratum = _group_by_stratum(keys, strata, seed, is_kept)
    folds = np.full(len(keys), -1, dtype=np.int64)
    num_rows = np.zeros(num_folds, dtype=np.int64)
    for stratum in sorted(by_stratum):
        if len(by_stratum[stratum]) == 1:
            continue
        num_own = np.zeros(num_folds, dtype=np.int64)
        for rows in by_stratum[stratum]:
            fold = int(np.lexsort((num_rows, num_own))[0])  # fewest rows of the stratum, then fewest rows in all
            folds[rows] = fold
            num_own[fold] += len(rows)
            num_rows[fold] += len(rows)
    return folds


def _group_by_stratum(
    keys: Sequence[str], strata: np.ndarray, seed: int, is_kept: np.ndarray | None
) -> dict[int, list[list[int]]]:
    """Return stratum -> its groups of rows with one text, in the order of drawing; without groups to be kept."""

    def rank(key: str) -> bytes:
        return hashlib.blake2b(f"{seed}\0{key}".encode(), digest_size=16).digest()

    groups: dict[str, list[int]] = {}
    for row, key in enumerate(keys):
        groups.setdefault(key, []).append(row)
    by_stratum: dict[int, list[list[int]]] = {}
    for key in sorted(groups, key=rank):
        rows = groups[key]
        if is_kept is not None and is_kept[rows].any():
            continue
        by_stratum.setdefault(int(strata[rows[0]]), []).append(rows)
    return by_stratum


def _fill(side: int, sides: np.ndarray, by_stratum: dict[int, list[list[int]]]) -> None:
    """Give an empty side the smallest group that training can spare; if there is none, one of the other side's.

    Only dev may take the other side's last group: without dev rows no epoch can be chosen.
    """
    groups = [rows for own in by_stratum.values() for rows in own[1:]]
    spare = [rows for rows in groups if sides[rows[0]] == TRAIN]
    if not spare and (side == DEV or len(groups) > 1):
        spare = groups
    if spare:
        sides[min(spare, key=len)] = side


def _round(value: float) -> int:
    return int(value + 0.5)


def find_repeats(keys: Sequence[str], targets: np.ndarray) -> tuple[int, list[tuple[int, int]]]:
    """Count rows that repeat an earlier text, and return two rows of each text whose targets differ."""
    first: dict[str, int] = {}
    conflicts: dict[str, tuple[int, int]] = {}
    num_repeats = 0
    for row, key in enumerate(keys):
        earlier = first.setdefault(key, row)
        if earlier == row:
            continue
        num_repeats += 1
        if key not in conflicts and not np.array_equal(targets[earlier], targets[row]):
            conflicts[key] = (earlier, row)
    return num_repeats, list(conflicts.values())


@dataclass(frozen=True, eq=False)
class Folds:
    """The labelled rows of a task, and the tasks that each leave some of them out."""

    rows: Split  # train rows, then dev rows
    paths: list[str]  # the file of each row
    tasks: list[Task]  # one for each fold; its test rows are those it leaves out
    left_out: list[np.ndarray]  # for each fold, the positions of its left-out rows in `rows`
    seed: int
    notes: tuple[str, ...] = ()


def make_folds(task: Task, num_folds: int, seed: int) -> Folds:
    """Make the folds of a task. Refuses more folds than there are different texts to leave out."""
    # 1. pool labelled rows that are not test rows
    rows, paths, notes = _pool(task)
    targets = rows.targets
    assert targets is not None
    # 2. deal out the rows, and split a dev side from what each fold keeps
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
        note = f"fold {fold + 1} of {num_folds}, seed {seed}: {len(left)} rows left out"
        train, dev = rows.take(kept[sides == TRAIN]), rows.take(kept[sides == DEV])
        tasks.append(task.with_sides({"train": train, "dev": dev, "test": rows.take(left)}, note))
        left_out.append(left)
    # 3. note the rows that no fold leaves out
    if num_kept := int((folds < 0).sum()):
        what = "1 row is" if num_kept == 1 else f"{num_kept} rows are"
        notes.append(f"{what} in no fold, since no other text has the label: trained on, and not scored")
    return Folds(rows, paths, tasks, left_out, seed, tuple(notes))


def _pool(task: Task) -> tuple[Split, list[str], list[str]]:
    """Pool train and dev rows; return them, the file of each row, and notes on rows left out."""
    train, dev, notes = task.train, task.dev, []
    if dev.unseen:
        assert dev.targets is not None
        form = KINDS[task.kind].targets
        is_known = form.find_known(dev.targets, len(task.labels))
        notes.append(f"{int((~is_known).sum())} dev rows have a label that training never saw: in no fold")
        dev = replace(dev, targets=form.ignore_unseen(dev.targets, len(task.labels))).take(np.flatnonzero(is_known))
    return train.join(dev), [train.path] * len(train) + [dev.path] * len(dev), notes
