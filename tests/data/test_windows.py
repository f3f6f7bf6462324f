"""Rows become windows: targets lie on the right tokens, and no token of a context is left out."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from inlay.data.kinds import Scheme
from inlay.data.targets import IGNORED
from inlay.data.tasks import Split
from inlay.data.windows import Reading, align_targets, encode_split
from tiny_backbones import make_tokenizer

LABELS = ("O", "B-LOC", "I-LOC")


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer("bert")


def tagged(text, tags):
    """A split of one row whose words stand between blanks."""
    value, start = [], 0
    for word, tag in zip(text.split(), tags.split(), strict=True):
        value.append((start, start + len(word), tag))
        start += len(word) + 1
    scheme = Scheme("tag", LABELS)
    return Split([text], None, scheme.collect([scheme.read(value)]), [1])


def test_a_words_first_piece_has_its_tag_and_nothing_else_has(tokenizer):
    split = tagged("the oslo cat", "O B-LOC I-LOC")
    encoded = encode_split(tokenizer, split, Reading("tag", 32))
    tokens = tokenizer.convert_ids_to_tokens(encoded.ids[0].tolist())
    assert tokens == ["[CLS]", "the", "o", "##s", "##l", "##o", "cat", "[SEP]"]
    (targets,) = align_targets("tag", encoded, split.targets)
    assert targets.tolist() == [IGNORED, 0, 1, IGNORED, IGNORED, IGNORED, 2, IGNORED]
    assert encoded.places[0][[1, 2, 6]].tolist() == [[0, 3], [4, 8], [9, 12]]
    assert (encoded.places[0][[0, 3, 4, 5, 7]] == -1).all()


def place_row_by_row(words, offsets):
    """The first piece of a word, by its last character, stands for the word; no word comes before one that has its."""
    places, taken = [], -1
    for start, end in offsets:
        holding = [index for index, span in enumerate(words) if span[0] <= end - 1 < span[1]]
        stands = end > start and bool(holding) and holding[0] > taken
        places.append(words[holding[0]] if stands else (-1, -1))
        taken = holding[0] if stands else taken
    return places


def test_words_of_all_rows_at_once_are_placed_as_row_by_row(tokenizer):
    generator = np.random.default_rng(0)
    texts = ["the oslo cat . 12 xyz , very not", "", "   ", "no", "quite zzzz yes " * 3, "a"] * 3
    targets = np.empty(len(texts), dtype=object)
    for row, text in enumerate(texts):
        edges = sorted(generator.choice(len(text) + 1, size=min(len(text) + 1, 6) // 2 * 2, replace=False).tolist())
        targets[row] = tuple((start, end, 0) for start, end in zip(edges[::2], edges[1::2], strict=True))
    for labels in (None, targets):
        split = Split(texts, None, labels, [])
        encoded = encode_split(tokenizer, split, Reading("tag", 11))
        offsets = tokenizer(texts, truncation=True, max_length=11, return_offsets_mapping=True)["offset_mapping"]
        wanted = [place_row_by_row(*row) for row in zip(encoded.words, offsets, strict=True)]
        assert [list(map(tuple, row.tolist())) for row in encoded.places] == wanted
        num_placed = sum(place != (-1, -1) for row in wanted for place in row)
        assert encoded.num_lost == sum(map(len, encoded.words)) - num_placed


def test_words_beyond_the_last_token_have_no_place_and_are_counted(tokenizer):
    split = tagged("the cat sat on oslo mat red", "O O O O B-LOC O O")
    encoded = encode_split(tokenizer, split, Reading("tag", 8))
    assert len(encoded.ids[0]) == 8
    assert encoded.num_truncated == 1
    assert encoded.num_lost == 2  # `oslo` keeps its first piece
    (targets,) = align_targets("tag", encoded, split.targets)
    assert targets[targets != IGNORED].tolist() == [0, 0, 0, 0, 1]
    assert len(encoded.words[0]) == 7


def test_without_targets_the_words_are_those_of_the_text_and_the_tokens_the_same(tokenizer):
    split = tagged("oslo , the cat", "B-LOC O O O")
    given = encode_split(tokenizer, split, Reading("tag", 32))
    found = encode_split(tokenizer, Split(split.texts, None, None, []), Reading("tag", 32))
    assert given.ids[0].tolist() == found.ids[0].tolist()
    assert found.words == [((0, 4), (5, 6), (7, 10), (11, 14))]


def long_context(num_words):
    return " ".join("one two three four five six seven eight nine ten".split()[n % 10] for n in range(num_words))


@pytest.mark.parametrize("stride", [0, 5, 500])
def test_windows_cover_every_token_of_the_context_and_share_the_stride(tokenizer, stride):
    context = long_context(100)
    split = Split(["who ?", "why ?"], [context, "one two"], None, [])
    encoded = encode_split(tokenizer, split, Reading("span", 32, stride))
    first, second = encoded.windows_of_rows()
    assert len(second) == 1
    assert len(first) > 3
    assert max(encoded.lengths) <= 32
    windows = [{tuple(place) for place in encoded.places[window].tolist()} - {(-1, -1)} for window in first]
    words = {(start, start + len(word)) for start, word in zip(starts(context), context.split(), strict=True)}
    assert set().union(*windows) == words
    shared = min(stride, (32 - 16 - 4) // 2)  # never so much that a window would not move on
    assert all(len(a & b) == shared for a, b in itertools.pairwise(windows[:-1]))


def starts(text):
    return np.cumsum([0, *(len(word) + 1 for word in text.split())])[:-1].tolist()


def answered(context, start, text, max_length=32, stride=8):
    scheme = Scheme("span", ())
    split = Split(["who ?"], [context], scheme.collect([((start, text),) if text else ()]), [1])
    tokenizer = make_tokenizer("bert")
    encoded = encode_split(tokenizer, split, Reading("span", max_length, stride))
    return encoded, align_targets("span", encoded, split.targets)


def test_an_answer_in_the_overlap_is_found_in_both_windows():
    context = long_context(60)
    encoded, _ = answered(context, 0, "one")
    shared = [place for place in encoded.places[0].tolist() if place in encoded.places[1].tolist() and place[0] >= 0]
    (start, _), (_, end) = shared[1], shared[2]
    encoded, targets = answered(context, start, context[start:end])
    found = [window for window, target in enumerate(targets) if target[0, 0] != 1]
    assert found == [0, 1]
    for window in found:
        first, last = (int(np.flatnonzero(targets[window][:, side] == 1)[0]) for side in (0, 1))
        assert context[encoded.places[window][first, 0] : encoded.places[window][last, 1]] == context[start:end]


def test_a_window_without_the_whole_answer_points_to_its_first_token():
    context = long_context(60)
    encoded, targets = answered(context, 0, context[:40])
    assert targets[0][0].tolist() == [0, 0]
    for target in targets[1:]:
        assert target[0].tolist() == [1, 1]
    for target in answered(context, 0, "")[1]:
        assert target[0].tolist() == [1, 1]
    for target, places in zip(targets, encoded.places, strict=True):
        is_context = places[:, 0] >= 0
        assert (target[is_context] != IGNORED).all()
        assert (target[1:][~is_context[1:]] == IGNORED).all()  # question and special tokens
        assert ((target == 1).sum(0) == 1).all()


def test_an_answer_inside_a_word_takes_the_pieces_it_needs():
    encoded, targets = answered("the oslonian cat", 4, "oslo")
    (first,), (last,) = np.flatnonzero(targets[0][:, 0] == 1), np.flatnonzero(targets[0][:, 1] == 1)
    assert encoded.places[0][first, 0] == 4
    assert encoded.places[0][last, 1] == 8


def test_a_question_longer_than_half_a_window_is_cut(tokenizer):
    split = Split([long_context(80)], [long_context(50)], None, [])
    encoded = encode_split(tokenizer, split, Reading("span", 32, 4))
    assert max(encoded.lengths) <= 32
    assert len(encoded) > 1
    assert (encoded.places[0][:, 0] >= 0).sum() >= 12


@pytest.mark.parametrize("pairs", [None, ["a dog ."]])
def test_a_prompt_stands_before_a_text_and_before_a_pair_that_is_read_as_one(pairs):
    t5 = make_tokenizer("t5")
    encoded = encode_split(t5, Split(["the cat sat"], pairs, None, [1]), Reading("text", 64, prompt="two: "))
    whole = "two: the cat sat" if pairs is None else "two: sentence1: the cat sat sentence2: a dog ."
    assert encoded.ids[0].tolist() == t5(whole)["input_ids"]


def test_what_stands_before_the_texts_makes_another_set_of_tokens(tokenizer):
    from inlay.data.token_cache import _name_set

    split = Split(["the cat"], None, None, [1])
    names = {_name_set(tokenizer, split, Reading("classify", 8, prompt=prompt)) for prompt in ("", "a: ", "b: ")}
    assert len(names) == 3


def test_an_answer_torn_by_a_window_s_edge_is_a_target_in_neither():
    context = long_context(60)
    windows = [
        [place for place in places.tolist() if place[0] >= 0] for places in answered(context, 0, "one")[0].places
    ]
    start, end = windows[0][-10][0], windows[1][8][1]
    assert start < windows[1][0][0], "it begins before the second window"
    assert end > windows[0][-1][1], "it ends after the first"
    _, targets = answered(context, start, context[start:end])
    for target in targets:
        assert target[0].tolist() == [1, 1]
        assert (target == 1).sum() == 2
