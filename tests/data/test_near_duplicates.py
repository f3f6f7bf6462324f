"""Near texts are those whose runs of three words are mostly the same, and all of them are found."""

import itertools
import random
import re
import time

import pytest

from inlay.data import load_task
from inlay.data import near_duplicates as near_module
from inlay.data.near_duplicates import find_near
from inlay.settings.run_config import DataConfig

WORDS = [f"word{n}" for n in range(300)]


def single(*texts):
    return [(text,) for text in texts]


def runs(text):
    """The definition, plainly."""
    words = re.findall(r"[^\W_]+", text.casefold())
    return set(zip(words, words[1:], words[2:], strict=False)) if len(words) >= 3 else {tuple(words)}


def make_texts(generator, number):
    texts = []
    for _ in range(number):
        if texts and generator.random() < 0.5:  # another text with a few words changed
            words = generator.choice(texts).split()
            for _ in range(generator.randrange(3)):
                words[generator.randrange(len(words))] = generator.choice(WORDS)
        else:
            words = generator.choices(WORDS, k=generator.randrange(1, 40))
        texts.append(" ".join(words))
    return texts


@pytest.mark.parametrize("seed", range(3))
def test_exactly_the_near_texts_are_found(seed):
    texts = make_texts(random.Random(seed), 500)
    train, others = texts[:400], texts[400:]
    found = find_near(single(*train), single(*others))
    known = [runs(text) for text in train]
    wanted = [row for row, text in enumerate(others) if any(len(runs(text) & own) >= 0.8 * len(runs(text) | own)
                                                            for own in known)]  # fmt: skip
    assert [row for row, _ in found.pairs] == wanted
    assert 10 < len(wanted) < 90
    for row, match in found.pairs:
        one, other = runs(others[row]), known[match]
        assert len(one & other) >= 0.8 * len(one | other)


def test_case_and_punctuation_do_not_count_but_numbers_do():
    train = single("Call now, to claim the PRIZE!", "see you at 3")
    assert find_near(train, single("call now: to claim... the prize")).pairs == [(0, 0)]
    assert find_near(train, single("see you at 4", "!!!", "\U0001f44d")).pairs == []
    assert find_near(single("\U0001f44d", "!?"), single("\U0001f44e", "...")).pairs == []
    assert find_near(single("Yes", "thank you"), single("yes!", "Thank you.", "no")).pairs == [(0, 0), (1, 1)]


def test_scripts_without_blanks_are_compared_by_character():
    train = single(
        "\u4eca\u65e5\u306f\u3068\u3066\u3082\u826f\u3044\u5929\u6c17\u3067\u3059\u306d\u6563\u6b69\u306b\u884c\u304d\u307e\u3057\u3087\u3046"
    )
    (text,) = train[0]
    assert find_near(train, single(text[:-1])).pairs == [(0, 0)]
    assert find_near(train, single(text[::-1])).pairs == []


def test_of_pairs_both_texts_must_be_near():
    premise = " ".join(WORDS[:30])
    train = [(premise, "a man sleeps in the sun")]
    assert find_near(train, [(premise + " end", "A man sleeps in the sun.")]).pairs == [(0, 0)]
    assert find_near(train, [(premise, "nobody is awake")]).pairs == []


def test_of_many_texts_some_are_looked_at_and_that_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(near_module, "MOST_OTHERS", 5)
    monkeypatch.setattr(near_module, "MOST_CHARACTERS", 500)
    rows = [f"one two three four five six seven eight nine {'ab'[n % 2]} {n},{'xy'[n % 2]}" for n in range(40)]
    path = tmp_path / "a.csv"
    path.write_text("\n".join(["text,label", *rows]))
    task = load_task(DataConfig(source=str(path), dev_share=0.25), "task")
    (note,) = (note for note in task.notes if "nearly" in note)
    assert note.startswith("5 dev texts are nearly the same as a training text, such as dev line ")
    assert re.search(r" \(looked at 5 of 10 dev and 10 of 30 training texts\)$", note)


def test_near_and_conflicting_texts_of_given_rows_are_told_with_their_lines(tmp_path):
    train = tmp_path / "train.csv"
    train.write_text("text,label\nwe will meet at the old station tomorrow morning as planned,ham\nfree prize,spam\n"
                     "hello,ham\nwin now,spam\n")  # fmt: skip
    dev = tmp_path / "dev.csv"
    dev.write_text("text,label\nnew,ham\nWe will meet at the old station tomorrow morning as planned!!,ham\n"
                   "Free prize,ham\nhello,ham\n")  # fmt: skip
    task = load_task(DataConfig(source=str(train), dev=str(dev)), "task")
    assert "2 of 4 dev texts are also in the training rows" in task.notes
    assert "1 of them has another label there, such as dev line 4 and training line 3" in task.notes
    assert "1 dev text is nearly the same as a training text, such as dev line 3 and training line 2" in task.notes


def test_ten_thousand_texts_take_well_below_a_second():
    generator = random.Random(0)
    texts = [" ".join(generator.choices(WORDS, k=20)) + " kind regards from all of us" for _ in range(10_000)]
    began = time.process_time()
    find_near(single(*texts[1000:]), single(*texts[:1000]))
    assert time.process_time() - began < 1.0


def test_what_all_texts_share_finds_nothing():
    footer = " ".join(WORDS[:12])
    texts = [f"{' '.join(three)} {footer}" for three in itertools.islice(itertools.combinations(WORDS[50:], 12), 60)]
    found = find_near(single(*texts[:50]), single(f"{' '.join(WORDS[20:32])} {footer}"))
    assert found.pairs == []
