"""The explore room: sweeps, starting points and cheap baselines, before and around training."""

from __future__ import annotations

from inlay.explore.baseline import STRENGTHS, Baseline, fit_baseline
from inlay.explore.suggest import Suggestion, Suggestions, SuggestSettings, suggest
from inlay.explore.sweep import Ranking, make_grid, parse_axes, rank

__all__ = [
    "STRENGTHS",
    "Baseline",
    "Ranking",
    "SuggestSettings",
    "Suggestion",
    "Suggestions",
    "fit_baseline",
    "make_grid",
    "parse_axes",
    "rank",
    "suggest",
]
