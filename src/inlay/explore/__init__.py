"""The explore room: sweeps, starting points, baselines, learning curves; explanations, drift and rows to label.

Names are imported when they are first used. Word effects, unlabelled rows and learning curves need no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from inlay.lazy_imports import import_lazily

if TYPE_CHECKING:
    from inlay.explore.baseline import STRENGTHS, Baseline, fit_baseline
    from inlay.explore.drift import DriftReport, Shift, find_drift
    from inlay.explore.explain import Explanation, explain_answer, find_nearest
    from inlay.explore.explanation_page import draw_explanation
    from inlay.explore.learning_curve import (
        CurvePoint,
        LearningCurve,
        check_curve,
        check_picture,
        describe_curve,
        draw_learning_curve,
        fit_curve,
        make_curve_runs,
        read_points,
    )
    from inlay.explore.pick import PickedRow, PickedRows, PickSettings, pick_rows
    from inlay.explore.starting_points import Suggestion, Suggestions, SuggestSettings, suggest
    from inlay.explore.sweep import Ranking, make_grid, parse_axes, rank
    from inlay.explore.unlabelled import draw_rows, spread_numbers, take_shares
    from inlay.explore.version_reader import VersionReader, find_training_rows, split_of
    from inlay.explore.word_effects import MOST_WORDS, leave_out, measure_effects, place_words

# fmt: off
_HOMES = {
    "inlay.explore.baseline": ("STRENGTHS", "Baseline", "fit_baseline"),
    "inlay.explore.drift": ("DriftReport", "Shift", "find_drift"),
    "inlay.explore.explain": ("Explanation", "explain_answer", "find_nearest"),
    "inlay.explore.explanation_page": ("draw_explanation",),
    "inlay.explore.learning_curve": (
        "CurvePoint", "LearningCurve", "check_curve", "check_picture", "describe_curve", "draw_learning_curve",
        "fit_curve", "make_curve_runs", "read_points",
    ),
    "inlay.explore.pick": ("PickedRow", "PickSettings", "PickedRows", "pick_rows"),
    "inlay.explore.unlabelled": ("draw_rows", "spread_numbers", "take_shares"),
    "inlay.explore.starting_points": ("SuggestSettings", "Suggestion", "Suggestions", "suggest"),
    "inlay.explore.sweep": ("Ranking", "make_grid", "parse_axes", "rank"),
    "inlay.explore.version_reader": ("VersionReader", "find_training_rows", "split_of"),
    "inlay.explore.word_effects": ("MOST_WORDS", "leave_out", "measure_effects", "place_words"),
}
# fmt: on
__getattr__ = import_lazily(__name__, _HOMES)

__all__ = [
    "MOST_WORDS",
    "STRENGTHS",
    "Baseline",
    "CurvePoint",
    "DriftReport",
    "Explanation",
    "LearningCurve",
    "PickSettings",
    "PickedRow",
    "PickedRows",
    "Ranking",
    "Shift",
    "SuggestSettings",
    "Suggestion",
    "Suggestions",
    "VersionReader",
    "check_curve",
    "check_picture",
    "describe_curve",
    "draw_explanation",
    "draw_learning_curve",
    "draw_rows",
    "explain_answer",
    "find_drift",
    "find_nearest",
    "find_training_rows",
    "fit_baseline",
    "fit_curve",
    "leave_out",
    "make_curve_runs",
    "make_grid",
    "measure_effects",
    "parse_axes",
    "pick_rows",
    "place_words",
    "rank",
    "read_points",
    "split_of",
    "spread_numbers",
    "suggest",
    "take_shares",
]
