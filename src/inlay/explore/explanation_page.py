"""An explanation as one self-contained HTML page: the text with coloured words, the checks, the nearest rows."""

from __future__ import annotations

from html import escape

from inlay.explore.explain import Explanation
from inlay.serving import answer_words

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2128; --soft: #59636e; --line: #d8dee4; --page: #fff; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ed; --soft: #9aa4af; --line: #3a424b; --page: #15191e; } }
body { font: 16px/1.6 system-ui, sans-serif; color: var(--ink); background: var(--page); max-width: 46rem;
  margin: 2.5rem auto; padding: 0 1rem; }
h1 { font-size: 1.35rem; margin: 0; } h2 { font-size: 1rem; margin: 2rem 0 .5rem; }
p { margin: .4rem 0; } .soft { color: var(--soft); font-size: .9rem; }
.text { font-size: 1.15rem; line-height: 2; border: 1px solid var(--line); border-radius: .5rem; padding: .8rem 1rem;
  margin: 1rem 0; white-space: pre-wrap; overflow-wrap: anywhere; }
.text span { border-radius: .25rem; padding: .12rem .15rem; }
table { border-collapse: collapse; width: 100%; font-size: .95rem; }
th { text-align: left; font-weight: 600; color: var(--soft); } th, td { border-bottom: 1px solid var(--line);
  padding: .3rem 1rem .3rem 0; vertical-align: top; white-space: nowrap; }
td:last-child { white-space: normal; overflow-wrap: anywhere; width: 100%; } td.number { width: auto; }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
"""
_MOST_LISTED = 10


def draw_explanation(found: Explanation) -> str:
    """Return an explanation as a page."""
    about = found.answer
    sure = f", {100 * about['probability']:.1f}% sure" if "probability" in about else ""
    title = f"{found.reference}: {answer_words(about)}{sure}"
    what = "the number that is the answer" if found.label is None else f"log-odds of “{found.label}”"
    top = sorted(found.words, key=lambda word: -abs(word.change))[:_MOST_LISTED]
    words = [[(f"{word.change:+.3f}", "number"), (word.text, "")] for word in top]
    heads = [("cosine", "number"), ("label", ""), ("where", ""), ("text", "")]
    near = []
    for row in found.nearest:
        label = ", ".join(row.label) if isinstance(row.label, list) else row.label
        shown = f"{label:g}" if isinstance(label, float) else str(label)
        texts = " / ".join(filter(None, (row.text, row.pair)))
        near.append([(f"{row.cosine:.3f}", "number"), (shown, ""), (f"line {row.line}", ""), (texts, "")])
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="soft">What moved the {escape(what)} ({found.evidence:+.3f}), by {found.by}. Green words speak for '
        "it, red ones against it.</p>",
        _colour(found, "text", found.text),
        "" if found.pair is None else _colour(found, "pair", found.pair),
        _list_checks(found),
        _table("The words that move it most", [("moves it by", "number"), ("word", "")], words),
        _table("The nearest training rows", heads, near),
        *(f'<p class="soft">{escape(note)}</p>' for note in found.notes),
    ]
    body = "\n".join(filter(None, parts))
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{escape(title)}</title>\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _colour(found: Explanation, side: str, text: str) -> str:
    """Return a text with every word coloured by its effect, relative to the largest effect."""
    largest = max((abs(word.change) for word in found.words), default=0.0) or 1.0
    pieces, last = [], 0
    for word in (item for item in found.words if item.side == side):
        strength = 0.6 * abs(word.change) / largest
        colour = "34, 160, 90" if word.change > 0 else "210, 60, 60"
        pieces.append(escape(text[last : word.start]))
        pieces.append(
            f'<span style="background: rgba({colour}, {strength:.2f})" title="{word.change:+.3f}">'
            f"{escape(text[word.start : word.end])}</span>"
        )
        last = word.end
    return f'<div class="text">{"".join(pieces)}{escape(text[last:])}</div>'


def _list_checks(found: Explanation) -> str:
    lines = []
    if found.deletion is not None:
        gone = found.deletion
        words = "the top word" if gone.num_words == 1 else f"the top {gone.num_words} words"
        lines.append(
            f"Without {words} it falls by {gone.top:.3f} and the answer is “{escape(gone.answer)}”; without as many "
            f"random ones it falls by {gone.random:.3f}."
        )
    if found.completeness is not None:
        parts = found.completeness
        lines.append(
            f"The words’ parts add up to {parts.total:+.3f}; from masked words it moves by {parts.change:+.3f}."
        )
    return "".join(f"<p>{line}</p>" for line in lines)


def _table(title: str, heads: list[tuple[str, str]], rows: list[list[tuple[str, str]]]) -> str:
    if not rows:
        return ""
    head = "".join(f'<th class="{kind}">{escape(name)}</th>' for name, kind in heads)
    lines = ["".join(f'<td class="{kind}">{escape(cell)}</td>' for cell, kind in row) for row in rows]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<h2>{title}</h2>\n<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
