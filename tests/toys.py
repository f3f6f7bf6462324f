"""Small learnable tasks for tests, by fixtures and in processes of their own."""

from __future__ import annotations

from typing import Any

WORDS = (
    "the a an it is was good bad fine awful great terrible movie film plot actor story of and very not so quite free "
    "win prize call now text me you i we they see go come home late early cat dog sat on mat red blue green one two "
    "three four five six seven eight nine ten . , ! ? ' yes no why what who when where how"
).split()


def make_toy_task(
    name: str = "toy", *, num_labels: int = 2, num_rows: int = 48, seed: int = 0, kind: str = "classify"
) -> Any:
    """A small learnable task: the label is which group of words a text draws from. Lengths vary from 2 to 14 words."""
    import numpy as np

    from inlay.data.tasks import Split, Task

    generator = np.random.default_rng(seed)
    groups = [WORDS[start::num_labels] for start in range(num_labels)]

    def split(size: int) -> Split:
        chosen = generator.integers(num_labels, size=size)
        texts = [" ".join(generator.choice(groups[label], size=generator.integers(2, 15))) for label in chosen]
        targets: Any = chosen.astype(np.int64)
        if kind == "regress":
            targets = 100.0 + 10.0 * chosen.astype(np.float64)
        elif kind == "multilabel":
            targets = np.eye(num_labels, dtype=np.float32)[chosen]
        return Split(texts, None, targets, list(range(1, size + 1)))

    labels = () if kind == "regress" else tuple(f"label-{index}" for index in range(num_labels))
    metric = {"classify": "accuracy", "regress": "rmse", "multilabel": "micro_f1"}[kind]
    train, dev = split(num_rows), split(num_rows // 2)
    digest = f"toy/{kind}/{num_labels}/{num_rows}/{seed}"
    return Task(name, kind, labels, metric, train, dev, None, (), digest, digest + "/dev")


def make_toy_texts(name: str = "texts", *, num_rows: int = 48, seed: int = 0) -> Any:
    """A task whose answers are texts: two words, which the group of the text's words decides."""
    import dataclasses

    import numpy as np

    task = make_toy_task(name, num_rows=num_rows, seed=seed)
    answers = np.array(["good movie", "bad plot"], dtype=object)
    sides = {
        side: dataclasses.replace(getattr(task, side), targets=answers[getattr(task, side).targets])
        for side in ("train", "dev")
    }
    digest = f"toy/text/{num_rows}/{seed}"
    known = {"kind": "text", "labels": (), "metric": "exact_match", "digest": digest, "dev_digest": f"{digest}/dev"}
    return dataclasses.replace(task, **known, **sides)


def make_toy_tags(name: str = "tags", *, num_rows: int = 48, seed: int = 0) -> Any:
    """A tagging task: some words are places, and two words in a row a person; some are several pieces."""
    import numpy as np

    from inlay.data.kinds import Scheme
    from inlay.data.tags import join_words
    from inlay.data.tasks import Split, Task

    generator = np.random.default_rng(seed)
    labels = ("O", "B-LOC", "I-LOC", "B-PER", "I-PER")
    entities = [(["home"], ["B-LOC"]), (["oslo"], ["B-LOC"]), (["actor", "zed"], ["B-PER", "I-PER"])]
    others = "the a it is was good bad of and very not so quite see go come late early".split()
    scheme = Scheme("tag", labels)

    def split(size: int) -> Split:
        texts, targets = [], []
        for _ in range(size):
            words, tags = [], []
            for _ in range(generator.integers(2, 7)):
                drawn = generator.integers(6)
                more = entities[drawn] if drawn < len(entities) else ([str(generator.choice(others))], ["O"])
                words, tags = words + more[0], tags + more[1]
            text, places = join_words(words)
            texts.append(text)
            targets.append(scheme.read([(*place, tag) for place, tag in zip(places, tags, strict=True)]))
        return Split(texts, None, scheme.collect(targets), list(range(1, size + 1)))

    digest = f"toy/tag/{num_rows}/{seed}"
    return Task(
        name, "tag", labels, "entity_f1", split(num_rows), split(num_rows // 2), None, (), digest, digest + "/d"
    )


def make_toy_answers(
    name: str = "answers", *, num_rows: int = 48, seed: int = 0, with_none: bool = False, longest: int = 60
) -> Any:
    """A question answering task: the answer is the number after the word `prize`, wherever in the context it stands."""
    import numpy as np

    from inlay.data.kinds import Scheme
    from inlay.data.tasks import Split, Task

    generator = np.random.default_rng(seed)
    numbers = "one two three four five six seven eight nine ten".split()
    others = "the a it is was good bad of and very not so quite see go come late early".split()
    scheme = Scheme("span", ())

    def split(size: int) -> Split:
        contexts, targets = [], []
        for row in range(size):
            words = [str(word) for word in generator.choice(others, size=generator.integers(4, longest))]
            golds: tuple[tuple[int, str], ...] = ()
            if not with_none or row % 3:
                place = int(generator.integers(len(words)))
                number = str(generator.choice(numbers))
                before = " ".join([*words[:place], "prize", ""])
                words[place:place] = ["prize", number]
                golds = ((len(before), number),)
            contexts.append(" ".join(words))
            targets.append(golds)
        return Split(["what prize ?"] * size, contexts, scheme.collect(targets), list(range(1, size + 1)))

    digest = f"toy/span/{num_rows}/{seed}/{with_none}/{longest}"
    return Task(name, "span", (), "token_f1", split(num_rows), split(num_rows // 2), None, (), digest, digest + "/d")


def make_toy_pairs(name: str = "pairs", *, num_rows: int = 48, seed: int = 0, kind: str = "classify") -> Any:
    """A task of pairs: whether two texts draw their words from the same of three groups."""
    import numpy as np

    from inlay.data.tasks import Split, Task

    generator = np.random.default_rng(seed)
    groups = [WORDS[start::3] for start in range(3)]

    def split(size: int) -> Split:
        first = generator.integers(3, size=size)
        second = np.where(generator.random(size) < 0.5, first, generator.integers(3, size=size))
        texts, pairs = (
            [" ".join(generator.choice(groups[group], size=generator.integers(1, 10))) for group in side]
            for side in (first, second)
        )
        targets: Any = (first == second).astype(np.int64)
        if kind == "regress":
            targets = 2.0 + 3.0 * targets.astype(np.float64)
        elif kind == "multilabel":
            targets = np.eye(2, dtype=np.float32)[targets]
        return Split(texts, pairs, targets, list(range(1, size + 1)))

    labels = () if kind == "regress" else ("differ", "agree")
    metric = {"classify": "accuracy", "regress": "pearson", "multilabel": "micro_f1"}[kind]
    train, dev = split(num_rows), split(num_rows // 2)
    digest = f"toy/pairs/{kind}/{num_rows}/{seed}"
    return Task(name, kind, labels, metric, train, dev, None, (), digest, digest + "/dev")
