"""The report on a task as one HTML page: no scripts, no other files; for light and dark, wide and narrow screens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from inlay.reports.diagrams import Plot, draw_calibration, draw_epochs, draw_pairs
from inlay.reports.markup import Html, join, tag, ticked
from inlay.reports.snippets import LOCAL_SERVICE, write_command, write_curl, write_library
from inlay.reports.task_report import SideDetails, TaskReport
from inlay.reports.version_reports import SHOWN_LABELS, choose_labels
from inlay.reports.wording import (
    capitalize_first,
    duration,
    level,
    metric_words,
    percent,
    plural,
    show_bytes,
    show_number,
    show_score,
)

_MOST_LABELS = 200  # rows of the table of labels
_MOST_LETTERS = 2000  # of a text in a table
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
_NUMBER = {"class": "number"}


def draw_report(report: TaskReport) -> str:
    """Return a report as a page."""
    sections = [
        ("scores", "Scores", _draw_scores(report)),
        ("data", "Data", _draw_data(report)),
        ("found", "What was inferred", _list_notes(report)),
        ("confusion", "What was taken for what", _draw_sides(report, _draw_confusion)),
        ("labels", "Label by label", _draw_sides(report, _score_labels)),
        ("sure", "Is it as sure as it should be?", _draw_sides(report, _draw_sureness)),
        ("numbers", "Answers and right numbers", _draw_sides(report, _draw_points)),
        ("training", "Training, epoch by epoch", _draw_training(report)),
        ("wrong", *_list_wrong(report)),
        ("unsure", "Rows it was least sure of", _draw_sides(report, _list_unsure)),
        ("cost", "What it cost", _list_costs(report)),
        ("use", "How to use it", _show_use(report)),
    ]
    sections = [section for section in sections if section[-1]]
    links = [tag("li", None, tag("a", {"href": f"#{anchor}"}, title)) for anchor, title, _ in sections]
    parts = [_head(report), tag("nav", {"aria-label": "Contents"}, tag("ul", None, *links))]
    for anchor, title, body in sections:
        heading = tag("h2", {"id": f"{anchor}-title"}, title)
        parts.append(tag("section", {"id": anchor, "aria-labelledby": f"{anchor}-title"}, heading, body))
    return frame_page(f"{report.reference}: report", parts)


def frame_page(title: str, parts: Sequence[Html]) -> str:
    """Return a whole page of these parts."""
    head = join(
        [
            tag("meta", {"charset": "utf-8"}),
            tag("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}),
            tag("meta", {"http-equiv": "Content-Security-Policy", "content": _POLICY}),
            tag("meta", {"name": "referrer", "content": "no-referrer"}),
            tag("title", None, title),
            Html(f"<style>{_STYLE}</style>"),
        ],
        "\n",
    )
    body = tag("main", None, join(parts, "\n"))
    return f'<!doctype html>\n<html lang="en">\n<head>\n{head}\n</head>\n<body>\n{body}\n</body>\n</html>\n'


def _head(report: TaskReport) -> Html:
    main = report.main_scores
    value, low, high = main.metrics.get(report.metric, (None, None, None))
    interval = (
        "" if low is None else f"95% interval {show_score(low, report.metric)} to {show_score(high, report.metric)}"
    )
    what = f"{report.kind}, {plural(len(report.labels), 'label')}" if report.labels else report.kind
    about = f"Task of the kind {what}, on the backbone {report.backbone['name']}. Report of {report.made_at[:10]}."
    return tag(
        "header",
        None,
        tag("h1", None, report.reference),
        tag("p", {"class": "soft"}, about),
        tag(
            "p",
            {"class": "score"},
            tag("strong", None, show_score(value, report.metric)),
            f" {metric_words(report.metric)} on {plural(main.num_rows, main.side + ' row')}",
            tag("span", {"class": "soft"}, f" {interval}") if interval else None,
        ),
    )


def _draw_scores(report: TaskReport) -> Html:
    names = list(dict.fromkeys(name for side in report.scores for name in side.metrics))
    rows = []
    for name in names:
        cells = [tag("th", {"scope": "row"}, capitalize_first(metric_words(name)))]
        for side in report.scores:
            value, low, high = side.metrics.get(name, (None, None, None))
            cells.append(tag("td", _NUMBER, show_score(value, name)))
            bounds = "" if low is None else f"{show_score(low, name)} to {show_score(high, name)}"
            cells.append(tag("td", {"class": "number soft"}, bounds))
        rows.append(cells)
    heads = ["Metric", *(word for side in report.scores for word in (f"{side.side} rows", "95% interval"))]
    notes = [
        f"Intervals are of {side.num_judged:,} of the {side.num_rows:,} {side.side} rows, drawn evenly."
        for side in report.scores
        if side.num_judged < side.num_rows
    ]
    notes.append(
        "Dev rows chose the best epoch, and probabilities and thresholds were fitted on them, so their scores are a "
        "little too good. Scores of rows that training did not use tell more."
    )
    table = draw_table("Scores", heads, rows, num_words=1)
    return join([table, *(tag("p", {"class": "soft"}, note) for note in notes)])


def _draw_data(report: TaskReport) -> Html:
    heads = ["Side", "Rows", "Words, median", "95% have at most", "From"]
    rows = []
    for side in report.sides:
        numbers = (side.num_rows, side.median_words, side.long_words)
        cells = [tag("th", {"scope": "row"}, side.side), *(tag("td", _NUMBER, show_number(each)) for each in numbers)]
        rows.append([*cells, tag("td", None, side.path or "memory")])
    parts: list[Html | None] = [draw_table("Rows", heads, rows, num_words=1)]
    labels = list(dict.fromkeys(label for side in report.sides for label in side.labels))
    if labels:
        lines = []
        for label in labels[:_MOST_LABELS]:
            cells = [tag("th", {"scope": "row", "dir": "auto"}, label)]
            for side in report.sides:
                count = side.labels.get(label, 0)
                share = f" ({percent(count / side.num_rows, 0)})" if side.num_rows else ""
                cells.append(tag("td", _NUMBER, f"{count:,}{share}"))
            lines.append(cells)
        heads = ["Label", *(side.side for side in report.sides)]
        parts.append(draw_table("Rows of each label", heads, lines, num_words=1))
        parts.append(_note_cut_labels(len(labels)))
    parts.append(tag("p", {"class": "soft"}, "Digest of the rows: ", tag("code", None, report.data_digest)))
    return join(parts)


def _list_notes(report: TaskReport) -> Html:
    items = [tag("li", None, ticked(note)) for note in report.training.notes]
    return tag("ul", None, *items) if items else Html()


def _draw_sides(report: TaskReport, draw: Callable[[SideDetails], Html]) -> Html:
    """Draw the details of the main side, and below it, folded, those of the other side."""
    drawn = [(item.side, draw(item)) for item in report.details]
    if not drawn or not drawn[0][1]:
        return Html()
    folded = [
        tag("details", None, tag("summary", None, f"The same of the {side} rows"), body)
        for side, body in drawn[1:]
        if body
    ]
    return join([drawn[0][1], *folded])


def _draw_confusion(details: SideDetails) -> Html:
    found = details.about["confusion"]
    if found is None:
        return Html()
    labels, counts = found["labels"], found["counts"]
    shown = [labels.index(label) for label in choose_labels(details.about)]
    heads = [tag("th", {"scope": "col", "dir": "auto"}, labels[said]) for said in shown]
    rows = []
    for true in shown:
        total = sum(counts[true])
        cells = [tag("th", {"scope": "row", "dir": "auto"}, labels[true])]
        for said in shown:
            strength = level(counts[true][said], total if true == said else total / 3)
            look = f"{'r' if true == said else 'w'}{strength}" if strength else "none"
            cells.append(tag("td", {"class": look}, show_number(counts[true][said])))
        rows.append(tag("tr", None, *cells))
    said = f"{details.side.title()} rows by their right label (down) and the label that was given (across)."
    caption = tag("caption", {"class": "hidden"}, said)
    head = tag("thead", None, tag("tr", None, tag("td"), *heads))
    table = tag("table", {"class": "confusion"}, caption, head, tag("tbody", None, *rows))
    note = None
    if len(shown) < len(labels):
        cut = f"The {SHOWN_LABELS} of {len(labels)} labels that are confused most."
        note = tag("p", {"class": "soft"}, cut)
    title = f"Confusion matrix of the {details.side} rows"
    return join([tag("p", {"class": "soft"}, said), _scroll(title, table), note])


def _score_labels(details: SideDetails) -> Html:
    scores = details.about["labels"]
    if not scores:
        return Html()
    rows = [
        [
            tag("th", {"scope": "row", "dir": "auto"}, item["label"]),
            *(tag("td", _NUMBER, percent(item[name])) for name in ("precision", "recall", "f1")),
            tag("td", _NUMBER, show_number(item["support"])),
        ]
        for item in scores[:_MOST_LABELS]
    ]
    words = "Precision: of the rows given a label, the share that has it. Recall: of the rows that have it, the share "
    note = tag("p", {"class": "soft"}, words + "found. F1 is the harmonic mean of both.")
    heads, title = ["Label", "Precision", "Recall", "F1", f"{details.side.title()} rows"], f"{details.side} rows"
    table = draw_table(f"Scores of each label on the {title}", heads, rows, num_words=1)
    return join([table, _note_cut_labels(len(scores)), note])


def _draw_sureness(details: SideDetails) -> Html:
    drawn = draw_calibration(details.about["calibration"])
    if drawn is None:
        return Html()
    grid, points = [], []
    for mark in drawn["grid"]:
        grid += [
            tag("line", {"class": "grid", "x1": 40, "x2": 310, "y1": mark["y"], "y2": mark["y"]}),
            tag("text", {"x": 34, "y": mark["y"] + 4, "text-anchor": "end"}, mark["words"]),
            tag("text", {"x": mark["x"], "y": 232, "text-anchor": "middle"}, mark["words"]),
        ]
    for point in drawn["points"]:
        place = {"class": f"point {point['look']}", "cx": point["x"], "cy": point["y"], "r": point["r"]}
        points.append(tag("circle", place, tag("title", None, point["words"])))
    ideal = tag("line", {"class": "ideal", "x1": 40, "y1": 215, "x2": 310, "y2": 15})
    axes = [
        tag("text", {"x": 175, "y": 248, "text-anchor": "middle"}, "how sure it was"),
        tag("text", {"x": 2, "y": 8}, "how often it was right"),
    ]
    svg = _svg(drawn["words"], [*grid, ideal, *points, *axes])
    said = (
        "A large dot is many rows. On the dashed line it is right exactly as often as it is sure; hollow dots are too "
    )
    spoken = f"Of the {details.side} rows: {drawn['words']}"
    return join([tag("p", None, spoken), svg, tag("p", {"class": "soft"}, said + "few rows to tell.")])


def _draw_points(details: SideDetails) -> Html:
    plot = draw_pairs(details.points)
    if plot is None:
        return Html()
    ideal = tag("line", {"class": "ideal", "x1": 40, "y1": 215, "x2": 310, "y2": 15})
    said = f"Each dot is a {details.side} row. On the dashed line the answer is the right number."
    return join([_draw_plot(plot, "the right number", "answer", [ideal]), tag("p", {"class": "soft"}, said)])


def _draw_training(report: TaskReport) -> Html:
    facts = report.training
    plots = draw_epochs(facts.history, report.metric, facts.best_epoch)
    rows = [
        [
            tag("th", {"scope": "row"}, str(line["epoch"])),
            tag("td", _NUMBER, "–" if line.get("train_loss") is None else f"{line['train_loss']:.4f}"),
            tag("td", _NUMBER, show_score(line["dev"].get(report.metric), report.metric)),
            tag("td", None, "best" if line["epoch"] == facts.best_epoch else str(line.get("stage") or "")),
        ]
        for line in facts.history
    ]
    if not rows:
        return Html()
    table = draw_table(
        "Epochs", ["Epoch", "Training loss", f"Dev {metric_words(report.metric)}", ""], rows, num_words=1
    )
    figures = [
        tag("figure", None, tag("figcaption", None, plot.title), _draw_plot(plot, "epoch", "", [], has_line=True))
        for plot in plots
    ]
    folded = tag("details", None, tag("summary", None, "Every epoch"), table) if plots else table
    return join([tag("div", {"class": "pair"}, *figures), folded])


def _list_wrong(report: TaskReport) -> tuple[str, Html]:
    """Return the title and the section on wrong rows; in a brief report, a note on what is left out."""
    if report.main is None:
        return "Labels and rows", tag("p", None, ticked(report.left_out))
    title = "Rows it got wrong" if report.main.about["has_errors"] else "Rows it missed by most"
    if not report.shows_rows:
        return title, tag("p", None, "The rows are left out of this report.")
    warning = None
    if report.main.side == "test" and report.main.errors:
        text = "Fix mistakes by looking at the dev rows: if you tune a task on its test rows, they no longer judge it."
        warning = tag("p", None, text)
    return title, join([_draw_sides(report, _list_side_errors), warning])


def _list_side_errors(details: SideDetails) -> Html:
    if not details.errors:
        return tag("p", None, f"None of the {details.side} rows.")
    has_verdicts = details.about["has_errors"]
    many = plural(details.num_errors, f"{details.side} row")
    said = f"{many}, the surest first." if has_verdicts else f"Of {many}, the worst first."
    if has_verdicts and len(details.errors) < details.num_errors:
        said = f"{len(details.errors)} of {said}"
    if has_verdicts:
        said += " Confident mistakes are often wrong labels: look at the row in its file."
    return join([tag("p", None, said), _draw_rows(f"Wrong {details.side} rows", details.errors)])


def _list_unsure(details: SideDetails) -> Html:
    if not details.unsure:
        return Html()
    words = tag("p", None, f"The {details.side} rows whose answers it was least sure of, right or wrong.")
    return join([words, _draw_rows(f"Least sure {details.side} rows", details.unsure)])


def _draw_rows(title: str, rows: Sequence[Mapping[str, Any]]) -> Html:
    lines = []
    for row in rows:
        pair = None if row["pair"] is None else tag("span", {"class": "second", "dir": "auto"}, _cut(row["pair"]))
        verdict = row.get("is_right")
        right = "" if verdict is None else " (right)" if verdict else " (wrong)"
        lines.append(
            [
                tag("td", _NUMBER, show_number(row["line"])),
                tag("td", {"class": "text", "dir": "auto"}, _cut(row["text"]), pair),
                tag("td", {"dir": "auto"}, _cut(row["expected"])),
                tag("td", {"dir": "auto"}, _cut(row["answer"]) + right),
                tag("td", _NUMBER, percent(row["confidence"], 0)),
            ]
        )
    heads = ["Line", "Text", "Right answer", "It said", "How sure"]
    return draw_table(title, heads, lines, num_words=0, words=(1, 2, 3))


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_LETTERS else f"{text[:_MOST_LETTERS]} …"


def _list_costs(report: TaskReport) -> Html:
    facts, whole = report.training, report.backbone["num_parameters"]
    share = f" ({percent(report.num_parameters / whole, 2)} of the backbone's {show_number(whole)})" if whole else ""
    pairs = {
        "Trained parameters": f"{report.num_parameters:,}{share}",
        "Size of the version": None if report.size_bytes is None else show_bytes(report.size_bytes),
        "Training took": None if facts.seconds is None else duration(facts.seconds),
        "Epochs": f"{facts.history[-1]['epoch']}, the best is {facts.best_epoch}" if facts.history else None,
        "Most memory": show_bytes(facts.peak_memory_bytes) if facts.peak_memory_bytes else None,
        "Backbone": str(report.backbone["name"]),
        "Digest of the version": report.digest or None,
    }
    items = [tag("div", None, tag("dt", None, name), tag("dd", None, value)) for name, value in pairs.items() if value]
    settings = {f"method.{name}": value for name, value in report.method.items()}
    settings |= {f"train.{name}": value for name, value in report.settings.items()}
    rows = []
    for name, value in settings.items():
        if value is not None:
            shown = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
            rows.append([tag("th", {"scope": "row"}, name), tag("td", None, shown)])
    table = draw_table("Settings", ["Setting", "Value"], rows, num_words=2)
    folded = tag("details", None, tag("summary", None, "Every setting"), table)
    return join([tag("dl", {"class": "facts"}, *items), folded])


def _show_use(report: TaskReport) -> Html:
    if not report.digest:
        words = "This run is not in the store. Training with its settings reads it back and publishes it."
        return tag("p", None, words)
    text, pair = "a text", "the second text" if report.has_pairs else None
    pieces = {
        "On the command line": write_command(report.name, text, pair),
        "In Python": write_library(report.name, text, pair),
        "From a service (inlay serve)": write_curl(LOCAL_SERVICE, report.name, text, pair, needs_key=False),
    }
    parts = []
    for title, code in pieces.items():
        parts += [tag("h3", None, title), tag("pre", {"tabindex": 0}, tag("code", None, code))]
    return join(parts)


def _draw_plot(plot: Plot, below: str, above: str, more: Sequence[Html], *, has_line: bool = False) -> Html:
    """Return a plot as SVG, with the names of its axes."""
    parts = []
    for mark in plot.rows:
        parts.append(tag("line", {"class": "grid", "x1": 40, "x2": 310, "y1": mark.y, "y2": mark.y}))
        parts.append(tag("text", {"x": 36, "y": mark.y + 4, "text-anchor": "end"}, mark.words))
    parts += [tag("text", {"x": mark.x, "y": 232, "text-anchor": "middle"}, mark.words) for mark in plot.columns]
    if has_line:
        parts.append(tag("polyline", {"class": "curve", "points": plot.line}))
    for mark in plot.points:
        place: dict[str, str | float] = {"class": f"point {mark.look}", "cx": mark.x, "cy": mark.y}
        place["r"] = 5 if mark.look else 3
        parts.append(tag("circle", place, tag("title", None, mark.words)))
    parts += [
        *more,
        tag("text", {"x": 175, "y": 248, "text-anchor": "middle"}, below),
        tag("text", {"x": 2, "y": 8}, above),
    ]
    return _svg(plot.words, parts)


def _svg(words: str, parts: Sequence[Html]) -> Html:
    return tag("svg", {"viewBox": "-12 0 344 254", "role": "img", "aria-label": words}, *parts)


def draw_table(
    title: str, heads: Sequence[str], rows: Sequence[Sequence[Html]], *, num_words: int, words: Sequence[int] = ()
) -> Html:
    """Return a table; its first `num_words` columns and those of `words` hold words, the others numbers."""
    kinds = [{} if column < num_words or column in words else _NUMBER for column in range(len(heads))]
    top = [tag("th", {"scope": "col", **kind}, head) for head, kind in zip(heads, kinds, strict=True)]
    lines = [tag("tr", None, *cells) for cells in rows]
    head = tag("thead", None, tag("tr", None, *top))
    caption = tag("caption", {"class": "hidden"}, title)
    return _scroll(title, tag("table", None, caption, head, tag("tbody", None, *lines)))


def _scroll(title: str, table: Html) -> Html:
    """Return a table that scrolls by itself on a narrow page, also with the keyboard."""
    return tag("div", {"class": "scroll", "tabindex": 0, "role": "group", "aria-label": title}, table)


def _note_cut_labels(number: int) -> Html | None:
    """Return a note if a table shows only the first of so many labels."""
    if number <= _MOST_LABELS:
        return None
    return tag("p", {"class": "soft"}, f"The first {_MOST_LABELS} of {plural(number, 'label')}.")


_STYLE = """
:root { color-scheme: light dark; --ink: #1c2128; --soft: #59636e; --line: #d8dee4; --page: #fff; --pane: #f6f8fa;
  --accent: #0b6bcb; --right: 34, 139, 87; --wrong: 200, 60, 50; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ed; --soft: #9da7b3; --line: #3a424b; --page: #15191e; --pane: #1d2229; --accent: #6cb6ff;
    --right: 63, 185, 120; --wrong: 235, 95, 85; } }
* { box-sizing: border-box; }
body { margin: 0; font: 16px/1.55 system-ui, sans-serif; color: var(--ink); background: var(--page); }
main { max-width: 60rem; margin: 0 auto; padding: 2rem 1rem 4rem; }
h1 { font-size: 1.6rem; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 0 0 .6rem; } h3 { font-size: .95rem; margin: 1rem 0 .3rem; }
p { margin: .4rem 0; max-width: 46rem; } .soft { color: var(--soft); font-size: .9rem; }
.score { font-size: 1.05rem; } .score strong { font-size: 1.9rem; font-variant-numeric: tabular-nums; }
a { color: var(--accent); }
:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
nav ul { display: flex; flex-wrap: wrap; gap: .2rem 1rem; list-style: none; padding: 0; margin: 1rem 0 0;
  font-size: .9rem; }
section { border-top: 1px solid var(--line); padding-top: 1.2rem; margin-top: 1.8rem; }
section ul { margin: .3rem 0; padding-left: 1.2rem; max-width: 46rem; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; margin: .6rem 0; }
table { border-collapse: collapse; font-size: .92rem; }
caption { text-align: left; color: var(--soft); font-size: .9rem; padding-bottom: .3rem; }
caption.hidden { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
th, td { text-align: left; vertical-align: top; border-bottom: 1px solid var(--line); padding: .3rem 1rem .3rem 0;
  font-weight: normal; overflow-wrap: break-word; min-width: 4.5rem; max-width: 40rem; }
tbody th { min-width: 7.5rem; }
thead th { color: var(--soft); font-weight: 600; vertical-align: bottom; overflow-wrap: normal; }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td.text { min-width: 16rem; white-space: pre-wrap; }
.second { display: block; color: var(--soft); }
.confusion th, .confusion td { padding: .35rem .6rem; border: 1px solid var(--line); text-align: center;
  min-width: 3rem; max-width: 9rem; font-variant-numeric: tabular-nums; }
.confusion tbody th { text-align: left; } .confusion .none { color: var(--soft); }
.r1 { background: rgba(var(--right), .12); } .r2 { background: rgba(var(--right), .22); }
.r3 { background: rgba(var(--right), .32); } .r4 { background: rgba(var(--right), .42); }
.w1 { background: rgba(var(--wrong), .12); } .w2 { background: rgba(var(--wrong), .22); }
.w3 { background: rgba(var(--wrong), .32); } .w4 { background: rgba(var(--wrong), .42); }
svg { display: block; width: 100%; max-width: 26rem; height: auto; font: 10px system-ui, sans-serif; }
svg text { fill: var(--soft); } svg .grid { stroke: var(--line); } svg .ideal { stroke: var(--soft);
  stroke-dasharray: 4 4; } svg .point { fill: var(--accent); } svg .curve { fill: none; stroke: var(--accent);
  stroke-width: 1.5; } svg .few { fill: none; stroke: var(--accent); } svg .best { fill: var(--page);
  stroke: var(--accent); stroke-width: 2.5; }
.pair { display: flex; flex-wrap: wrap; gap: 1rem 2rem; } figure { margin: 0; flex: 1 1 18rem; max-width: 26rem; }
figcaption { font-weight: 600; font-size: .9rem; margin-bottom: .3rem; }
details { margin: .8rem 0; } summary { cursor: pointer; color: var(--accent); }
.facts { display: grid; grid-template-columns: repeat(auto-fill, minmax(15rem, 1fr)); gap: .8rem 1.5rem;
  margin: .5rem 0; }
dt { color: var(--soft); font-size: .9rem; } dd { margin: 0; overflow-wrap: anywhere; }
pre { background: var(--pane); border: 1px solid var(--line); border-radius: .4rem; padding: .7rem .9rem; margin: 0;
  overflow-x: auto; font-size: .88rem; }
code { font-family: ui-monospace, "DejaVu Sans Mono", monospace; overflow-wrap: anywhere; }
@media print { nav { display: none; } section { break-inside: avoid-page; } }
"""
