"""The reports room: what a version answered to its dev rows, as scores, pages, model cards and comparisons of runs.

Names are imported when they are first used: what only reads needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from inlay.lazy_imports import import_lazily

if TYPE_CHECKING:
    from inlay.reports.diagrams import draw_calibration
    from inlay.reports.evaluations import (
        EvaluatedRow,
        Evaluation,
        answer_again,
        check_comparable,
        choose_rows,
        decide_rows,
        describe_version,
        digest_rows,
        evaluate_version,
        find_trained,
        has_same_rows,
        leave_out,
        list_labels,
        make_judged,
        read_answer,
    )
    from inlay.reports.version_reports import list_errors, make_report, spell_row
    from inlay.reports.wording import (
        duration,
        first_large,
        is_share,
        level,
        metric_words,
        percent,
        plural,
        show_bytes,
        show_number,
        show_score,
    )

_HOMES = {
    "inlay.reports.diagrams": ("draw_calibration",),
    "inlay.reports.evaluations": (
        *("EvaluatedRow", "Evaluation", "answer_again", "check_comparable", "choose_rows", "decide_rows"),
        *("describe_version", "digest_rows", "evaluate_version", "find_trained", "has_same_rows", "leave_out"),
        *("list_labels", "make_judged", "read_answer"),
    ),
    "inlay.reports.version_reports": ("list_errors", "make_report", "spell_row"),
    "inlay.reports.wording": (
        *("duration", "first_large", "is_share", "level", "metric_words", "percent", "plural"),
        *("show_bytes", "show_number", "show_score"),
    ),
}
__getattr__ = import_lazily(__name__, _HOMES)

__all__ = [
    "EvaluatedRow",
    "Evaluation",
    "answer_again",
    "check_comparable",
    "choose_rows",
    "decide_rows",
    "describe_version",
    "digest_rows",
    "draw_calibration",
    "duration",
    "evaluate_version",
    "find_trained",
    "first_large",
    "has_same_rows",
    "is_share",
    "leave_out",
    "level",
    "list_errors",
    "list_labels",
    "make_judged",
    "make_report",
    "metric_words",
    "percent",
    "plural",
    "read_answer",
    "show_bytes",
    "show_number",
    "show_score",
    "spell_row",
]
