"""How well a tokenizer knows the texts of a task: tokens that stand for anything unknown, and scripts read by letters.

A tokenizer made for English has single letters of other scripts and hardly a piece of two: Russian becomes one token a
letter, which is not unknown but says next to nothing. So both are looked at: the share of unknown tokens, and how many
letters a token has in texts of another script than Latin. Chinese characters are words of their own, and good
tokenizers have a token for each; only fewer than that is a sign.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from typing import Any, NamedTuple

import numpy as np

from inlay.data.encode import tokenize
from inlay.data.tasks import Split

NUM_ROWS = 400  # looked at, spread over all
NUM_CHARACTERS = 300  # of each text
MOST_UNKNOWN = 0.05  # share of tokens
LEAST_FOREIGN = 0.2  # share of the letters that a script must have to be spoken of
_LATIN = "LATIN"
_FEWEST_LETTERS = 1.5  # a token of an alphabet that the tokenizer knows: measured 4.6 for English, 1.0 for Russian
_FEWEST_SIGNS = 0.9  # a token of a script with many signs
_MANY_SIGNS = ("CJK", "HIRAGANA", "KATAKANA", "HANGUL")
_NAMES = {"CJK": "Chinese characters", "HANGUL": "Korean letters"}
ADVICE = "use a multilingual backbone, such as `--backbone FacebookAI/xlm-roberta-base`"


class _Row(NamedTuple):
    """One text: its tokens, those that are unknown, and its letters by script."""

    line: int
    num_tokens: int
    unknown: list[str]  # what stands in the text at every unknown token
    letters: Counter[str]


def describe_unknown(tokenizer: Any, split: Split, backbone: str) -> list[str]:
    """A note where a tokenizer does not know what the texts are made of; at most 400 rows are looked at."""
    rows = _look_at(tokenizer, split)
    num_tokens = sum(row.num_tokens for row in rows)
    letters = sum((row.letters for row in rows), Counter[str]())
    if not num_tokens:
        return []
    script = _find_foreign(letters)
    pieces = Counter(piece for row in rows for piece in row.unknown)
    share = pieces.total() / num_tokens
    if share >= MOST_UNKNOWN:
        lines = [str(row.line) for row in rows if row.unknown][:3]
        shown = ", ".join(f"`{piece[:20]}`" for piece, _ in pieces.most_common(3))
        where = f"line{'' if len(lines) == 1 else 's'} {', '.join(lines)}"
        advice = f"many letters are {_name(script)}: {ADVICE}" if script else "it cannot tell them apart"
        return [f"{share:.0%} of the tokens are unknown to `{backbone}`, such as {shown} ({where}); {advice}"]
    if script is None:
        return []
    own = [row for row in rows if row.letters[script] * 2 > row.letters.total()]
    per_token = sum(row.letters.total() for row in own) / max(1, sum(row.num_tokens for row in own))
    if not own or per_token >= (_FEWEST_SIGNS if script in _MANY_SIGNS else _FEWEST_LETTERS):
        return []
    return [
        f"many letters are {_name(script)}, of which `{backbone}` has hardly a word ({per_token:.1f} letters a token, "
        f"such as in line {own[0].line}): {ADVICE}"
    ]


def _look_at(tokenizer: Any, split: Split) -> list[_Row]:
    chosen = np.unique(np.linspace(0, len(split) - 1, min(NUM_ROWS, len(split))).astype(np.int64)).tolist()
    texts = [split.texts[row][:NUM_CHARACTERS] for row in chosen]
    lines = [split.lines[row] for row in chosen]
    if split.pairs is not None:
        texts += [split.pairs[row][:NUM_CHARACTERS] for row in chosen]
        lines += lines
    scripts = {character: _find_script(character) for character in set().union(*texts)}
    rows = []
    encodings = tokenize(tokenizer, texts, None, None, with_offsets=True)
    for text, line, encoding in zip(texts, lines, encodings, strict=True):
        places = [place for place, token in enumerate(encoding.ids) if token == tokenizer.unk_token_id]
        unknown = [text[slice(*encoding.offsets[place])] for place in places]
        letters = Counter(script for character in text if (script := scripts[character]))
        rows.append(_Row(line, len(encoding.ids), unknown, letters))
    return rows


def _find_script(character: str) -> str:
    """The script of a letter, or of a sign that goes with letters; nothing for any other character."""
    if unicodedata.category(character)[0] not in "LM":
        return ""
    return unicodedata.name(character, "").partition(" ")[0]


def _find_foreign(letters: Counter[str]) -> str | None:
    """The script other than Latin that has most of the letters, if they are many."""
    foreign = [(number, script) for script, number in letters.items() if script != _LATIN]
    if not foreign:
        return None
    number, script = max(foreign)
    return script if number >= LEAST_FOREIGN * letters.total() else None


def _name(script: str | None) -> str:
    return _NAMES.get(str(script), str(script).capitalize())
