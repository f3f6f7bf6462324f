"""`--precision int8`: what it changes is measured and said, and it is refused where it cannot be."""

from __future__ import annotations

import pytest
import torch

from .conftest import Inlay, Mail


def test_evaluate_shows_float32_and_int8_side_by_side(inlay: Inlay, mail: Mail) -> None:
    plain = inlay("evaluate", "mail", mail.data, "--json").data
    data = inlay("evaluate", "mail", mail.data, "--precision", "int8", "--json").data
    change = data["int8"]
    for name, found in change["metrics"].items():
        assert found["float32"] == pytest.approx(plain["metrics"][name]["value"])
        assert found["int8"] == data["metrics"][name]["value"]
        assert found["difference"] == pytest.approx(found["int8"] - found["float32"])
    assert change["num_rows"] == 80
    right = {key: 80 * change["metrics"]["accuracy"][key] for key in ("float32", "int8")}
    assert change["num_changed"] >= abs(right["int8"] - right["float32"]) - 1e-6, "each row changes one answer at most"
    assert 0 < change["largest_logit_change"] < 0.5
    shown = inlay("evaluate", "mail", mail.data, "--precision", "int8").out
    assert "float32" in shown
    assert f"{change['num_changed']} of 80 rows changed their answer" in shown


def test_predict_says_how_far_the_probes_moved(inlay: Inlay, mail: Mail) -> None:
    ended = inlay("predict", "mail", "free prize now", "--precision", "int8", "--json")
    assert ended.status == 0
    assert "int8: of 8 probes of 1 version, " in ended.err
    assert "the largest change of a logit is " in ended.err
    plain = inlay("predict", "mail", "free prize now", "--json")
    assert "int8" not in plain.err
    assert ended.lines[0]["label"] == plain.lines[0]["label"]
    assert ended.lines[0]["probability"] != plain.lines[0]["probability"]


def test_the_drift_of_a_run_that_is_stopped_is_said_too(
    inlay: Inlay, mail: Mail, monkeypatch: pytest.MonkeyPatch
) -> None:
    from inlay.cli.output import Writer

    def stop(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Writer, "write", stop)
    ended = inlay("predict", "mail", "--input", mail.data, "--precision", "int8")
    assert ended.status == 130
    assert "int8: of 8 probes of 1 version, " in ended.err


@pytest.mark.parametrize("command", [("predict", "mail", "text"), ("evaluate", "mail", "mail.csv")])
@pytest.mark.parametrize(
    ("options", "status", "words"),
    [
        (("--precision", "int8", "--device", "cuda"), 5, "use `--device cpu`"),
        (("--precision", "int4"), 2, "use auto or int8"),
    ],
)
def test_a_precision_that_cannot_be_had_is_refused_before_any_work(
    inlay: Inlay, mail: Mail, command: tuple[str, ...], options: tuple[str, ...], status: int, words: str
) -> None:
    ended = inlay(*command, *options)
    assert (ended.status, ended.out) == (status, "")
    assert words in ended.err
    assert "loading" not in ended.err


def test_a_task_that_int8_cannot_answer_is_refused_before_any_pass(inlay: Inlay, mail: Mail) -> None:
    quick = ("--epochs", 1, "--max-length", 24, "--lr", "1e-4")
    trained = inlay("train", mail.data, "--task", "whole", "--backbone", mail.backbone, "--method", "full", *quick)
    assert trained.status == 0, trained.err
    ended = inlay("evaluate", "whole", mail.data, "--precision", "int8")
    assert (ended.status, ended.out) == (5, "")
    assert "int8 for a task of the method `full`" in ended.err
    assert "leave out `--precision int8`" in ended.err
    assert "rows/s" not in ended.err, "no row was judged"
    assert "loading" not in ended.err


def test_int8_is_refused_where_torch_has_no_kernels_for_it(
    inlay: Inlay, mail: Mail, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inlay.model.backbone.int8._ENGINE", "sparkle")
    assert "sparkle" not in torch.backends.quantized.supported_engines
    ended = inlay("predict", "mail", "text", "--precision", "int8")
    assert ended.status == 5
    assert "it lacks `sparkle`" in ended.err
    assert "leave out `--precision int8`" in ended.err
