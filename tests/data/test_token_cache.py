"""A text set is tokenised once: in a process, and by all processes together. What is known equals what is read."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from inlay.data import token_cache as once
from inlay.data.tasks import Split
from inlay.data.token_cache import MemoryCache, encode_cached, open_tokens
from inlay.data.windows import Reading, encode_split
from tiny_backbones import make_tokenizer
from toys import WORDS, make_toy_answers, make_toy_tags, make_toy_task

ROOT = Path(__file__).parents[2]


class Counter:
    """Counts the sets that are really tokenised."""

    def __init__(self, monkeypatch):
        self.count = 0
        monkeypatch.setattr(once, "encode_split", self)

    def __call__(self, *arguments):
        self.count += 1
        return encode_split(*arguments)


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("INLAY_CACHE_BYTES", str(2**30))
    monkeypatch.setattr(once, "SMALL_CHARACTERS", 100)
    monkeypatch.setattr(once, "_MEMORY", MemoryCache())


@pytest.fixture
def forget(monkeypatch):
    """What another process would know: nothing but the cache."""
    return lambda: monkeypatch.setattr(once, "_MEMORY", MemoryCache())


@pytest.fixture
def tokenised(monkeypatch):
    return Counter(monkeypatch)


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer("bert")


def make_split(num_rows=40, seed=0):
    generator = np.random.default_rng(seed)
    texts = [" ".join(generator.choice(WORDS, size=generator.integers(1, 20))) for _ in range(num_rows)]
    return Split(texts, None, None, [])


def pair_task():
    rows = make_split()
    return replace(make_toy_task(), train=replace(rows, pairs=rows.texts[::-1]))


TASKS = {
    "classify": make_toy_task,
    "pairs": pair_task,
    "towers": pair_task,
    "tag": make_toy_tags,
    "span": make_toy_answers,
}
READINGS = {
    "classify": Reading("classify", 8),
    "pairs": Reading("classify", 12),
    "towers": Reading("classify", 12, pairs="towers"),
    "tag": Reading("tag", 9),
    "span": Reading("span", 32, 8),
}


def same(found, wanted):
    left, right = found.arrays(), wanted.arrays()
    assert left.keys() == right.keys()
    for name in left:
        assert left[name].dtype == right[name].dtype
        assert np.array_equal(left[name], right[name])
    assert (found.num_truncated, found.num_lost) == (wanted.num_truncated, wanted.num_lost)
    assert found.words == wanted.words
    return True


@pytest.mark.parametrize("family", ["bert", "roberta"])
@pytest.mark.parametrize("kind", TASKS)
def test_what_is_known_equals_what_is_read(kind, family, tokenised, forget):
    tokenizer, split, reading = make_tokenizer(family), TASKS[kind]().train, READINGS[kind]
    wanted = encode_split(tokenizer, split, reading)
    assert same(encode_cached(tokenizer, split, reading), wanted)
    assert same(encode_cached(tokenizer, split, reading), wanted)
    forget()
    assert same(encode_cached(tokenizer, split, reading), wanted)
    assert tokenised.count == 1


def test_a_process_reads_a_set_once_though_it_is_handed_copies(tokenizer, tokenised):
    first, again = (encode_cached(tokenizer, make_split(), Reading("classify", 16)) for _ in range(2))
    assert first is again
    assert tokenised.count == 1


def test_another_call_in_between_changes_no_tokenizers_name(tokenizer, tokenised):
    encode_cached(tokenizer, make_split(), Reading("classify", 16))
    tokenizer(["the cat", "sat on the mat"], padding=True, truncation=True, max_length=4)
    fresh = make_tokenizer("bert")
    encode_cached(fresh, make_split(), Reading("classify", 16))
    assert tokenised.count == 1


CHANGES = {
    "a text": lambda split: replace(split, texts=[*split.texts[:-1], split.texts[-1] + "s"]),
    "the order": lambda split: replace(split, texts=split.texts[::-1]),
    "where a text ends": lambda split: replace(
        split, texts=[split.texts[0] + split.texts[1][:1], split.texts[1][1:], *split.texts[2:]]
    ),
    "a row less": lambda split: replace(split, texts=split.texts[:-1]),
    "pairs": lambda split: replace(split, pairs=split.texts),
}


@pytest.mark.parametrize("change", CHANGES)
def test_other_texts_are_another_set(change, tokenizer, tokenised, forget):
    split, reading = make_split(), Reading("classify", 16)
    encode_cached(tokenizer, split, reading)
    forget()
    changed = CHANGES[change](split)
    assert same(encode_cached(tokenizer, changed, reading), encode_split(tokenizer, changed, reading))
    assert tokenised.count == 2


@pytest.mark.parametrize("reading", [Reading("classify", 15), Reading("tag", 16)])
def test_another_reading_is_another_set(reading, tokenizer, tokenised):
    encode_cached(tokenizer, make_split(), Reading("classify", 16))
    assert same(encode_cached(tokenizer, make_split(), reading), encode_split(tokenizer, make_split(), reading))
    assert tokenised.count == 2


def test_pairs_that_are_read_apart_are_another_set_and_joined_ones_the_set_they_were(tokenizer, tokenised):
    split, names = pair_task().train, []
    for reading in (Reading("classify", 12), Reading("classify", 12, pairs="towers")):
        assert same(encode_cached(tokenizer, split, reading), encode_split(tokenizer, split, reading))
        names.append(once._name_set(tokenizer, split, reading))
    assert tokenised.count == 2
    assert names[0] != names[1]


def test_another_stride_is_another_set(tokenizer, tokenised):
    split = make_toy_answers().train
    first, other = (encode_cached(tokenizer, split, Reading("span", 32, stride)) for stride in (4, 8))
    assert tokenised.count == 2
    assert len(first.flat_ids) < len(other.flat_ids)


def test_other_words_in_the_same_texts_are_another_set(tokenizer, tokenised):
    split = make_toy_tags().train
    words = np.empty(len(split), dtype=object)
    words[:] = [target[:1] for target in split.targets]
    first, other = (
        encode_cached(tokenizer, rows, Reading("tag", 32)) for rows in (split, replace(split, targets=words))
    )
    assert tokenised.count == 2
    assert len(other.flat_words) == len(split) < len(first.flat_words)


def test_other_targets_of_whole_rows_are_the_same_set(tokenizer, tokenised):
    split = make_toy_task().train
    for targets in (split.targets, 1 - split.targets, None):
        encode_cached(tokenizer, replace(split, targets=targets), Reading("classify", 16))
    assert tokenised.count == 1


def test_another_tokenizer_is_another_set(tokenised):
    split, reading = make_split(), Reading("classify", 16)
    for family in ("bert", "roberta", "distilbert"):
        encode_cached(make_tokenizer(family), split, reading)
    cut_left = make_tokenizer("bert")
    cut_left.truncation_side = "left"
    encode_cached(cut_left, split, reading)
    assert tokenised.count == 4


def test_tokens_added_to_a_tokenizer_make_it_another(tokenised):
    tokenizer, split = make_tokenizer("bert"), Split(["the oslo cat"] * 20, None, None, [])
    before = encode_cached(tokenizer, split, Reading("classify", 16))
    tokenizer.add_tokens(["oslo"])
    after = encode_cached(tokenizer, split, Reading("classify", 16))
    assert tokenised.count == 2
    assert len(after.ids[0]) == 5 < len(before.ids[0])


def test_a_small_set_leaves_no_file(tokenizer, tokenised, forget, monkeypatch):
    monkeypatch.setattr(once, "SMALL_CHARACTERS", 10**6)
    for _ in range(2):
        encode_cached(tokenizer, make_split(), Reading("classify", 16))
        forget()
    assert tokenised.count == 2
    assert not open_tokens().folder.exists()


def test_no_cache_is_written_where_the_user_wants_none(tokenizer, tokenised, forget, monkeypatch):
    monkeypatch.setenv("INLAY_CACHE_BYTES", "0")
    for _ in range(2):
        encode_cached(tokenizer, make_split(), Reading("classify", 16))
        forget()
    assert tokenised.count == 2
    assert not open_tokens().folder.exists()


def test_a_damaged_file_is_read_anew_and_replaced(tokenizer, tokenised, forget):
    split, reading = make_split(), Reading("classify", 16)
    wanted = encode_cached(tokenizer, split, reading)
    (path,) = open_tokens().folder.iterdir()
    path.write_bytes(path.read_bytes()[:-5])
    for count in (2, 2):
        forget()
        assert same(encode_cached(tokenizer, split, reading), wanted)
        assert tokenised.count == count


def test_memory_keeps_what_was_asked_for_last_within_its_limit(tokenizer):
    sets = [encode_split(tokenizer, make_split(seed=seed), Reading("classify", 16)) for seed in range(3)]
    memory = MemoryCache(sum(item.num_bytes for item in sets) - 1)
    for key, item in zip("ab", sets, strict=False):
        memory.put(key, item)
    assert memory.get("a") is sets[0]
    memory.put("c", sets[2])
    assert memory.get("b") is None
    assert memory.get("a") is sets[0]
    assert memory.get("c") is sets[2]
    small = MemoryCache(sets[0].num_bytes - 1)
    small.put("a", sets[0])
    assert small.get("a") is None


def test_progress_is_heard_of_a_new_set_and_not_of_a_known_one(tokenizer, monkeypatch, forget):
    monkeypatch.setattr("inlay.data.encode.CHUNK_ROWS", 16)
    for kind, num_rows in (("classify", 40), ("tag", 40), ("span", 40)):
        split = make_split()
        split = replace(split, pairs=split.texts) if kind == "span" else split
        heard: list[int] = []
        for _ in range(2):
            encode_cached(tokenizer, split, Reading(kind, 24), heard.append)
            forget()
        assert heard == [16, 32, num_rows]


SECOND = """
import sys; sys.path.insert(0, sys.argv[1])
import os
import conftest  # which switches the cache off
from tiny_backbones import make_tokenizer
os.environ["INLAY_CACHE_BYTES"] = "1000000"
from inlay.data import encode, token_cache as once, windows
from inlay.data.tasks import Split
def never(*_, **__): raise AssertionError("tokenised again")
encode.tokenize = windows.tokenize = never
once.SMALL_CHARACTERS = 100
texts = sys.stdin.read().split("\\n")
found = once.encode_cached(make_tokenizer("bert"), Split(texts, None, None, []), windows.Reading("classify", 16))
print(int(found.flat_ids.sum()), len(found))
"""


def test_another_process_does_not_tokenise_again(tokenizer):
    split = make_split()
    found = encode_cached(tokenizer, split, Reading("classify", 16))
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-c", SECOND, str(ROOT / "tests")],
        input="\n".join(split.texts),
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.stdout.split() == [str(found.flat_ids.sum()), str(len(found))], done.stderr
