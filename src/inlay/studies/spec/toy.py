"""Generated rows for a study's `tiny` profile: small, learnable tasks of the right kind and shape."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from inlay.data import GLUE, KINDS, PASSAGES, WHOLE_ROW, Scheme, Split, Task, resolve_metric
from inlay.settings import DataConfig, digest

WORDS = (
    "the a it is was good bad fine awful great movie film plot story of and very not so free win prize call now text "
    "you we see go home late early cat dog sat on mat red blue one two three four five six what ?"
).split()
_NUMBERS = ("one", "two", "three", "four", "five", "six")
_NUM_ROWS = {"train": 24, "dev": 16, "test": 16}


def make_toy_task(name: str, config: DataConfig) -> Task:
    """Make a task like `name`: with GLUE's kind and metric for `glue/…`, with answers for SQuAD, else with classes.

    Each class has its own words. Only tasks with classes outside GLUE have test rows.
    """
    entry = GLUE.get(name.removeprefix("glue/")) if name.startswith("glue/") else None
    labels: tuple[str, ...]
    if "squad" in name.lower() or config.kind == PASSAGES:
        kind, labels, has_pairs, metric = PASSAGES, (), True, "auto"
    elif entry is not None:
        num_classes = 3 if name.startswith("glue/mnli") else 2
        kind, has_pairs, metric = entry.kind, entry.columns[1] is not None, entry.metric
        labels = () if not KINDS[kind].targets.has_labels else tuple(f"class-{index}" for index in range(num_classes))
    else:
        kind, has_pairs, metric = WHOLE_ROW, False, "auto"
        labels = ("class-0", "class-1", "class-2")
    metric = resolve_metric(metric if config.metric == "auto" else config.metric, kind, len(labels), has_entities=False)
    generator = np.random.default_rng(int(hashlib.sha256(name.encode()).hexdigest()[:8], 16))
    sides = {side: _make_split(generator, size, kind, len(labels), has_pairs) for side, size in _NUM_ROWS.items()}
    test = sides["test"] if entry is None and KINDS[kind].is_classifier else None
    content = digest([name, kind, metric, [side.texts for side in sides.values()]])
    return Task(name, kind, labels, metric, sides["train"], sides["dev"], test, ("toy rows",), content, content[:32])


def _make_split(generator: np.random.Generator, size: int, kind: str, num_labels: int, has_pairs: bool) -> Split:
    if kind == PASSAGES:
        return _make_answers(generator, size)
    num_groups = num_labels or 4
    chosen = np.arange(size) % num_groups  # every class in every split, however few the rows
    texts = [_draw(generator, int(label), num_groups) for label in chosen]
    pairs = [_draw(generator, int(label), num_groups) for label in chosen] if has_pairs else None
    targets = chosen.astype(np.int64) if num_labels else chosen + generator.random(size)
    return Split(texts, pairs, targets, list(range(1, size + 1)))


def _draw(generator: np.random.Generator, label: int, num_groups: int) -> str:
    words: Any = WORDS[label::num_groups]
    return " ".join(generator.choice(words, size=generator.integers(3, 9)))


def _make_answers(generator: np.random.Generator, size: int) -> Split:
    """Make rows whose answer is the number after the word `prize`."""
    others = [word for word in WORDS if word not in (*_NUMBERS, "prize", "?")]
    contexts, targets = [], []
    for _ in range(size):
        words = [str(word) for word in generator.choice(others, size=generator.integers(4, 12))]
        place, number = int(generator.integers(len(words))), str(generator.choice(_NUMBERS))
        before = " ".join([*words[:place], "prize", ""])
        words[place:place] = ["prize", number]
        contexts.append(" ".join(words))
        targets.append(((len(before), number),))
    scheme = Scheme(PASSAGES, ())
    return Split(["what prize ?"] * size, contexts, scheme.collect(targets), list(range(1, size + 1)))
