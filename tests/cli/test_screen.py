"""What a terminal shows, and what it does not show where there is none."""

from __future__ import annotations

import io
import json
import sys
import time
from types import SimpleNamespace

import pytest

from inlay.cli import screen
from inlay.cli.screen import Column
from inlay.errors import BadData
from inlay.terminal import text_width


class Terminal(io.StringIO):
    """A stream that a person reads."""

    encoding = "utf-8"  # type: ignore[assignment]

    def isatty(self) -> bool:
        return True


def open_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Both streams on one terminal. No fixture: pytest puts its own streams back after the setup of a test."""
    made = Terminal()
    monkeypatch.setattr(sys, "stdout", made)
    monkeypatch.setattr(sys, "stderr", made)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return made


COLUMNS = [Column("task", is_flexible=True), Column("rows", is_number=True)]


@pytest.mark.parametrize("width", [40, 80, 120])
def test_table_fits_the_terminal(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    terminal = open_terminal(monkeypatch)
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("NO_COLOR", "1")
    screen.emit_table(COLUMNS, [["a long name " * 20, "12,345"], ["東京" * 40, "7"]])
    lines = terminal.getvalue().splitlines()
    assert max(map(text_width, lines)) == width
    assert all(line.endswith(number) for line, number in zip(lines[2:], ("12,345", "7"), strict=True))
    assert "…" in lines[2]


def test_table_is_whole_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    screen.emit_table(COLUMNS, [["n" * 300, "1"]])
    assert "n" * 300 in capsys.readouterr().out


def test_colour_needs_a_terminal_that_nobody_silenced(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch)
    screen.log("hello", "red")
    assert terminal.getvalue() == "\x1b[1;31mhello\x1b[0m\n"
    monkeypatch.setenv("NO_COLOR", "1")
    screen.log("hello", "red")
    assert terminal.getvalue().endswith("m\nhello\n")
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    screen.log("again", "red")
    assert terminal.getvalue().endswith("hello\nagain\n")


def test_notes_keep_their_indent_when_they_wrap(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch)
    monkeypatch.setenv("COLUMNS", "40")
    screen.detail("one two three four five six seven eight nine ten")
    assert terminal.getvalue() == "  one two three four five six seven\n  eight nine ten\n"


def test_meter_speaks_every_ten_seconds_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with screen.Meter("reading", 100) as meter:
        for now in range(0, 26, 5):
            meter.update(now)
    assert capsys.readouterr().err.splitlines() == ["reading  10/100", "reading  20/100"]


def test_meter_moves_on_a_terminal_and_leaves_only_what_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch)
    with screen.Meter("reading", 2) as meter:
        meter.update(1, "half")
        meter.log("a line that stays")
        assert screen.Meter.current is meter
    assert screen.Meter.current is None
    assert "a line that stays" in terminal.getvalue()


def test_seconds_pass_on_the_bar_while_something_without_steps_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, now = open_terminal(monkeypatch), 100.0
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with screen.Meter("training", 10) as meter:
        meter.update(3, "loss 0.5")
        bar = meter._bar
        assert bar is not None
        bar.refresh()
        meter.wait("compiling")
        now = 107.0
        bar.refresh()
        now = 175.0
        bar.refresh()
        meter.update(4, "loss 0.4", title="epoch 1/2")
        bar.refresh()
    shown = terminal.getvalue()
    places = [shown.index(words) for words in ("loss 0.5", "7.0 s", "1 min 15 s", "loss 0.4")]
    assert places == sorted(places)
    assert "compiling" in shown
    assert "compiling" not in shown[places[-1] :]


def test_how_long_it_took_to_compile_is_said_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    from inlay.pipeline import TrainingProgress
    from inlay.training.events import CompileEnded, CompileStarted

    what = "compiling steps of up to 1,280 tokens"
    with screen.Meter("training") as meter:
        show = TrainingProgress(meter)
        for seconds in (12.3, 0.2):
            show(CompileStarted(what))
            show(CompileEnded(what, seconds))
    assert capsys.readouterr().err.splitlines() == [what, f"{what}: 12 s", what], "what was compiled before is no news"


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (screen.count(1, "task"), "1 task"),
        (screen.count(1024, "task"), "1,024 tasks"),
        (screen.size(999), "999 bytes"),
        (screen.size(2_400_000), "2.4 MB"),
        (screen.duration(9.96), "10.0 s"),
        (screen.duration(138), "2 min 18 s"),
        (screen.duration(3 * 3600 + 59), "3 h 00 min"),
        (screen.share(1, 3), "33.33%"),
        (screen.score(float("nan")), "-"),
        (screen.score(0.98921), "0.9892"),
    ],
)
def test_numbers_are_shown_as_people_read_them(shown: str, expected: str) -> None:
    assert shown == expected


def test_number_that_is_none_is_null_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    screen.emit_json({"a": float("nan"), "b": (1.5, float("inf"))}, indent=None)
    assert capsys.readouterr().out == '{"a": null, "b": [1.5, null]}\n'


@pytest.mark.parametrize(
    ("num_seats", "told"),
    [(1, "one run after another, 2 waiting, up to 512 tokens"), (4, "4 runs together, 2 waiting, up to 512 tokens")],
)
def test_runs_that_train_one_at_a_time_are_not_called_together(num_seats: int, told: str) -> None:
    from inlay.pipeline.progress import _describe_cohort

    settings = SimpleNamespace(checkpointing=False, token_budget=512)
    queue = SimpleNamespace(waiting=[0, 0], runs=[0] * 6)
    assert _describe_cohort(SimpleNamespace(num_seats=num_seats, queue=queue, settings=settings)).startswith(told)  # type: ignore[arg-type]


EVIL = "a\x1b[2Jb\rc\x9b1md\u202ee\udc80"
TOLD = r"a\x1b[2Jb\x0dc\u009b1md\u202ee\udc80"


def test_data_cannot_move_the_cursor_or_turn_letters_round(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch)
    monkeypatch.setenv("NO_COLOR", "1")
    screen.emit(EVIL)
    screen.log(EVIL, "red")
    screen.detail(EVIL)
    screen.emit_table([Column(EVIL)], [[f"{EVIL}\n{EVIL}"]])
    screen.emit_pairs({"labels": f"{EVIL}\nfaked", f"{EVIL}\nname": "0.5"})
    screen.print_error(BadData(EVIL, EVIL, path=EVIL))
    with screen.Meter(EVIL) as meter:
        meter.log(EVIL)
    shown = terminal.getvalue()
    assert not set("\x1b\r\x9b\u202e\udc80") & set(shown)
    assert shown.count(TOLD) == 12
    assert rf"{TOLD}\n{TOLD}" in shown
    assert rf"{TOLD}\nfaked" in shown


def test_a_moving_bar_shows_data_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch)
    monkeypatch.setenv("COLUMNS", "120")
    with screen.Meter("[red]task[/]\x1b]0;title\x07") as meter:
        meter.update(1, "[/nothing]", total=2)
        meter.log("\x1b]0;title\x07")
    with screen.working("[/loading]\x07"):
        pass
    shown = terminal.getvalue()
    assert r"[red]task[/]\x1b]0;title\x07" in shown
    assert "[/nothing]" in shown
    assert r"[/loading]\x07" in shown
    assert "\x07" not in shown


def test_json_with_control_characters_is_the_same_json(capsys: pytest.CaptureFixture[str]) -> None:
    screen.emit_json({"label": EVIL}, indent=None)
    out = capsys.readouterr().out
    assert not set("\x9b\u202e\udc80") & set(out)
    assert json.loads(out) == {"label": EVIL}
