"""How `fit` goes about it: every field refuses what it cannot be, by name and value, before anything is loaded."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import numpy as np
import pytest

import inlay
from inlay.errors import BadConfig, InlayError, UnknownName
from inlay.settings.fit_settings import FitSettings

# Field -> values that it cannot have.
BAD = {
    "max_cohort": (0, -3, 1.5, "4", True),
    "token_budget": (0, -7, 2048.0),
    "threads": (0, -2, 1.5, "2", True),
    "checkpointing": (None, 1, "yes"),
    "save_every": (0, -1, None, 2.5),
    "save_seconds": (-1, float("nan"), None, "60"),
    "draw_curves": (1, "no"),
    "keep_last": (None, 0),
    "restart": (None, "false"),
    "spread": ("row", "", None),
    "reuse_prefix": (None, 1),
    "prefix_bytes": (-5, 1e9, "2GB"),
    "prefix_file_bytes": (-1, 0.5),
}


def test_every_field_is_checked():
    assert BAD.keys() == {item.name for item in dataclasses.fields(FitSettings)}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_a_value_that_cannot_be_is_refused_with_what_to_do(name, value):
    with pytest.raises(InlayError) as caught:
        FitSettings(**{name: value})
    assert f"`{value}`" in caught.value.message
    assert caught.value.hint
    if name != "spread":
        assert isinstance(caught.value, BadConfig)
        assert f"`{name}`" in caught.value.message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("max_cohort", 1), ("max_cohort", np.int64(4)), ("token_budget", 1), ("save_every", 10**9)),
        *(("save_seconds", 0), ("save_seconds", 1e9), ("save_seconds", float("inf")), ("draw_curves", False)),
        *(("prefix_bytes", 0), ("prefix_file_bytes", 0), ("spread", "rows"), ("spread", "cohorts")),
    ],
)
def test_the_ends_of_a_range_are_inside_it(name, value):
    assert getattr(FitSettings(**{name: value}), name) == value


@pytest.mark.parametrize("make", [np.int64, np.int32, np.uint8])
def test_numbers_of_numpy_are_written_as_any_other(make):
    names = ("max_cohort", "token_budget", "save_every", "save_seconds", "prefix_bytes", "prefix_file_bytes")
    given, plain = FitSettings(**dict.fromkeys(names, make(4))), FitSettings(**dict.fromkeys(names, 4))
    assert json.dumps(dataclasses.asdict(given)) == json.dumps(dataclasses.asdict(plain))
    assert json.dumps(FitSettings(save_seconds=np.float32(1.5)).save_seconds) == "1.5"


def test_what_is_left_open_stays_open():
    open_fields = ("max_cohort", "token_budget", "draw_curves", "prefix_bytes", "prefix_file_bytes")
    assert all(getattr(FitSettings(**dict.fromkeys(open_fields)), name) is None for name in open_fields)


def test_settings_that_are_changed_are_checked_again():
    with pytest.raises(UnknownName, match="`row`") as caught:
        dataclasses.replace(FitSettings(), spread="row")
    assert caught.value.hint == "did you mean `rows`?"


def test_a_script_finds_them_beside_fit_without_torch():
    assert inlay.FitSettings is FitSettings
    assert "FitSettings" in inlay.__all__
    program = "import sys, inlay; inlay.FitSettings(max_cohort=2); print([n for n in ('torch',) if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
