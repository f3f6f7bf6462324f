"""Helps to sample rows: finds the first row of each text, and orders rows with even shares of every class."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def find_firsts(keys: Sequence[str]) -> dict[str, int]:
    """Map each key to its first position."""
    firsts: dict[str, int] = {}
    for place, key in enumerate(keys):
        firsts.setdefault(key, place)
    return firsts


def order_evenly(rows: np.ndarray, strata: np.ndarray) -> np.ndarray:
    """Order rows so that any first part of them has about the same share of every stratum.

    `strata` has the stratum of each of `rows`, whose order within a stratum is kept.
    """
    # Each row's place within its stratum, as a share of it: the smallest shares are an even sample of all strata.
    places = np.empty(len(rows))
    for stratum in np.unique(strata):
        members = np.flatnonzero(strata == stratum)
        places[members] = (np.arange(len(members)) + 0.5) / len(members)
    return np.asarray(rows[np.argsort(places, kind="stable")])
