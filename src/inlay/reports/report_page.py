"""The report on a task as one HTML page: no other file, no script, no other host; light and dark, wide and narrow."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from inlay.reports.diagrams import Plot, draw_calibration, draw_epochs, draw_pairs
from inlay.reports.markup import Html, join, tag, ticked
from inlay.reports.report_style import STYLE
from inlay.reports.snippets import LOCAL_SERVICE, write_command, write_curl, write_library
from inlay.reports.task_report import SideDetails, SideScores, TaskReport
from inlay.reports.version_reports import SHOWN_LABELS, choose_labels
from inlay.reports.wording import (
    duration,
    first_large,
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
    made = [make(report) for make in _SECTIONS]
    sections = [(anchor, title, body) for anchor, title, body in made if body]
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
            Html(f"<style>{STYLE}</style>"),
        ],
        "\n",
    )
    body = join([tag("main", None, join(parts, "\n"))], "\n")
    return f'<!doctype html>\n<html lang="en">\n<head>\n{head}\n</head>\n<body>\n{body}\n</body>\n</html>\n'


_Section = tuple[str, str, Html]


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


def _draw_scores(report: TaskReport) -> _Section:
    names = list(dict.fromkeys(name for side in report.scores for name in side.metrics))
    rows = []
    for name in names:
        cells = [tag("th", {"scope": "row"}, first_large(metric_words(name)))]
        for side in report.scores:
            value, low, high = side.metrics.get(name, (None, None, None))
            cells.append(tag("td", _NUMBER, show_score(value, name)))
            bounds = "" if low is None else f"{show_score(low, name)} to {show_score(high, name)}"
            cells.append(tag("td", {"class": "number soft"}, bounds))
        rows.append(cells)
    heads = ["Metric", *(word for side in report.scores for word in (f"{side.side} rows", "95% interval"))]
    notes = [_say_drawn(side) for side in report.scores if side.num_judged < side.num_rows]
    dev = "Dev rows chose the best epoch, and probabilities and thresholds were fitted on them: scores there are a "
    notes += [dev + "little too good. Rows that were not looked at while training tell more."]
    body = join(
        [draw_table("Scores", heads, rows, num_words=1), *(tag("p", {"class": "soft"}, note) for note in notes)]
    )
    return "scores", "Scores", body


def _say_drawn(side: SideScores) -> str:
    return f"Intervals are of {side.num_judged:,} of the {side.num_rows:,} {side.side} rows, drawn evenly."


def _draw_data(report: TaskReport) -> _Section:
    heads = ["Side", "Rows", "Words, median", "95% have at most", "From"]
    rows = []
    for side in report.sides:
        numbers = (side.num_rows, side.median_words, side.long_words)
        cells = [tag("th", {"scope": "row"}, side.side), *(tag("td", _NUMBER, show_number(each)) for each in numbers)]
        rows.append([*cells, tag("td", None, side.path or "memory")])
    parts: list[Html | None] = [draw_table("Rows", heads, rows, num_words=1)]
    labels = list(dict.fromkeys(label for side in report.sides for label in side.labels))
    if labels:
        lines = [
            [
                tag("th", {"scope": "row", "dir": "auto"}, label),
                *(tag("td", _NUMBER, _share(side.labels.get(label, 0), side.num_rows)) for side in report.sides),
            ]
            for label in labels[:_MOST_LABELS]
        ]
        heads = ["Label", *(side.side for side in report.sides)]
        parts.append(draw_table("Rows of each label", heads, lines, num_words=1))
        parts.append(_say_more(len(labels), _MOST_LABELS, "label"))
    parts.append(tag("p", {"class": "soft"}, "Digest of the rows: ", tag("code", None, report.data_digest)))
    return "data", "Data", join(parts)


def _share(count: int, total: int) -> str:
    return f"{count:,} ({percent(count / total, 0)})" if total else f"{count:,}"


def _list_notes(report: TaskReport) -> _Section:
    items = [tag("li", None, ticked(note)) for note in report.training.notes]
    return "found", "What was inferred", tag("ul", None, *items) if items else Html()


def _of_sides(report: TaskReport, draw: Callable[[SideDetails], Html]) -> Html:
    """Return what is drawn of the main side, and the same of the other one, folded."""
    drawn = [(item.side, draw(item)) for item in report.details]
    if not drawn or not drawn[0][1]:
        return Html()
    folded = [
        tag("details", None, tag("summary", None, f"The same of the {side} rows"), body)
        for side, body in drawn[1:]
        if body
    ]
    return join([drawn[0][1], *folded])


def _draw_confusion(report: TaskReport) -> _Section:
    return "confusion", "What was taken for what", _of_sides(report, _draw_matrix)


def _draw_matrix(details: SideDetails) -> Html:
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
    left_out = (
        f"The {SHOWN_LABELS} of {len(labels)} labels that are confused most." if len(shown) < len(labels) else None
    )
    note = None if left_out is None else tag("p", {"class": "soft"}, left_out)
    title = f"Confusion matrix of the {details.side} rows"
    return join([tag("p", {"class": "soft"}, said), _scroll(title, table), note])


def _list_labels(report: TaskReport) -> _Section:
    return "labels", "Label by label", _of_sides(report, _score_labels)


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
    return join([table, _say_more(len(scores), _MOST_LABELS, "label"), note])


def _draw_calibration(report: TaskReport) -> _Section:
    return "sure", "Is it as sure as it should be?", _of_sides(report, _draw_sureness)


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


def _draw_numbers(report: TaskReport) -> _Section:
    return "numbers", "Answers and right numbers", _of_sides(report, _draw_points)


def _draw_points(details: SideDetails) -> Html:
    plot = draw_pairs(details.points)
    if plot is None:
        return Html()
    ideal = tag("line", {"class": "ideal", "x1": 40, "y1": 215, "x2": 310, "y2": 15})
    said = f"Each dot is a {details.side} row. On the dashed line the answer is the right number."
    return join([_draw(plot, "the right number", "answer", [ideal]), tag("p", {"class": "soft"}, said)])


def _draw_training(report: TaskReport) -> _Section:
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
        return "training", "Training", Html()
    table = draw_table(
        "Epochs", ["Epoch", "Training loss", f"Dev {metric_words(report.metric)}", ""], rows, num_words=1
    )
    figures = [
        tag("figure", None, tag("figcaption", None, plot.title), _draw(plot, "epoch", "", [], wide_line=True))
        for plot in plots
    ]
    folded = tag("details", None, tag("summary", None, "Every epoch"), table) if plots else table
    return "training", "Training, epoch by epoch", join([tag("div", {"class": "pair"}, *figures), folded])


def _list_wrong(report: TaskReport) -> _Section:
    if report.main is None:
        return "wrong", "Labels and rows", tag("p", None, ticked(report.left_out))
    title = "Rows it got wrong" if report.main.about["has_errors"] else "Rows it missed by most"
    if not report.shows_rows:
        return "wrong", title, tag("p", None, "The rows are left out of this report.")
    is_test = report.main.side == "test" and report.main.errors
    warning = "Mend what you see in the dev rows: test rows that shaped a task no longer judge it."
    return "wrong", title, join([_of_sides(report, _tell_wrong), tag("p", None, warning) if is_test else None])


def _tell_wrong(details: SideDetails) -> Html:
    if not details.errors:
        return tag("p", None, f"None of the {details.side} rows.")
    has_verdicts = details.about["has_errors"]
    many = plural(details.num_errors, f"{details.side} row")
    said = f"{many}, the surest first." if has_verdicts else f"Of {many}, the worst first."
    if has_verdicts and len(details.errors) < details.num_errors:
        said = f"{len(details.errors)} of {said}"
    if has_verdicts:
        said += " Confident mistakes are often wrong labels: look at the row in its file."
    return join([tag("p", None, said), _rows(f"Wrong {details.side} rows", details.errors)])


def _list_unsure(report: TaskReport) -> _Section:
    return "unsure", "Rows it was least sure of", _of_sides(report, _tell_unsure)


def _tell_unsure(details: SideDetails) -> Html:
    if not details.unsure:
        return Html()
    words = tag("p", None, f"The {details.side} rows whose answers it was least sure of, right or wrong.")
    return join([words, _rows(f"Least sure {details.side} rows", details.unsure)])


def _rows(title: str, rows: Sequence[Mapping[str, Any]]) -> Html:
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


def _list_costs(report: TaskReport) -> _Section:
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
    rows = [
        [tag("th", {"scope": "row"}, name), tag("td", None, _spell(value))]
        for name, value in settings.items()
        if value is not None
    ]
    table = draw_table("Settings", ["Setting", "Value"], rows, num_words=2)
    folded = tag("details", None, tag("summary", None, "Every setting"), table)
    return "cost", "What it cost", join([tag("dl", {"class": "facts"}, *items), folded])


def _spell(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _show_use(report: TaskReport) -> _Section:
    if not report.digest:
        words = "This run is not in the store. Training with its settings reads it back and publishes it."
        return "use", "How to use it", tag("p", None, words)
    text, pair = "a text", "the second text" if report.has_pairs else None
    pieces = {
        "On the command line": write_command(report.name, text, pair),
        "In Python": write_library(report.name, text, pair),
        "From a service (inlay serve)": write_curl(LOCAL_SERVICE, report.name, text, pair, needs_key=False),
    }
    parts = []
    for title, code in pieces.items():
        parts += [tag("h3", None, title), tag("pre", {"tabindex": 0}, tag("code", None, code))]
    return "use", "How to use it", join(parts)


_SECTIONS = (
    *(_draw_scores, _draw_data, _list_notes, _draw_confusion, _list_labels, _draw_calibration, _draw_numbers),
    *(_draw_training, _list_wrong, _list_unsure, _list_costs, _show_use),
)


def _draw(plot: Plot, below: str, above: str, more: Sequence[Html], *, wide_line: bool = False) -> Html:
    """Return a plot as SVG."""
    parts = []
    for mark in plot.rows:
        parts.append(tag("line", {"class": "grid", "x1": 40, "x2": 310, "y1": mark.y, "y2": mark.y}))
        parts.append(tag("text", {"x": 36, "y": mark.y + 4, "text-anchor": "end"}, mark.words))
    parts += [tag("text", {"x": mark.x, "y": 232, "text-anchor": "middle"}, mark.words) for mark in plot.columns]
    if wide_line:
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
    """Return a table that scrolls by itself where the page is narrow, with the keyboard too."""
    return tag("div", {"class": "scroll", "tabindex": 0, "role": "group", "aria-label": title}, table)


def _say_more(number: int, most: int, noun: str) -> Html | None:
    return tag("p", {"class": "soft"}, f"The first {most} of {plural(number, noun)}.") if number > most else None
