"""A file of any length: constant memory, the order of its rows, mixed tasks, and what a stop leaves behind."""

from __future__ import annotations

import csv
import json
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .conftest import Inlay, Mail

WORDS = "free prize see you home late now cat".split()


@pytest.fixture
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inlay.cli.predict.CHUNK_ROWS", 16)
    monkeypatch.setattr("inlay.cli.predict.WINDOW_ROWS", 32)


def write_rows(path: Path, num_rows: int, tasks: tuple[str, ...] = ("mail",)) -> Path:
    """Rows of many lengths; every seventh has no text, every eleventh asks a task that is not there."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "task", "text"])
        for row in range(num_rows):
            text = " ".join(WORDS[(row + i) % 8] for i in range(1 + row % 13))
            task = "nope" if row % 11 == 3 else tasks[row % len(tasks)]
            writer.writerow([row, task, "" if row % 7 == 5 else text])
    return path


def name_tasks(inlay: Inlay, num_tasks: int) -> tuple[str, ...]:
    """The task `mail` under several names."""
    names = tuple(f"mail-{index}" for index in range(num_tasks))
    inlay("export", "mail", "mail.inlay")
    for name in names:
        assert inlay("import", "mail.inlay", "--name", name).status == 0
    return names


def test_a_file_is_answered_in_constant_memory(
    inlay: Inlay, mail: Mail, tmp_path: Path, small_windows: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from inlay import data

    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    most = 0

    def watched(*arguments: Any, **settings: Any) -> Iterator[list[Any]]:
        nonlocal most
        for chunk in plain(*arguments, **settings):
            alive.update(chunk)
            most = max(most, len(alive))
            yield chunk
            del chunk

    plain = data.stream_rows
    monkeypatch.setattr(data, "stream_rows", watched)
    write_rows(tmp_path / "in.csv", 400)
    assert inlay("predict", "--input", "in.csv", "--output", "out.csv").status == 0
    assert len(Path("out.csv").read_text().splitlines()) == 401
    assert most <= 2 * 32 + 8, "the window that was answered, the one that is read, and a chunk"


def test_long_rows_make_small_windows(mail: Mail, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from inlay.cli.predict import PredictInput

    monkeypatch.setattr("inlay.cli.predict.CHUNK_ROWS", 4)
    monkeypatch.setattr("inlay.cli.predict.WINDOW_LETTERS", 1000)
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": "x" * 400}) + "\n" for _ in range(10)))
    windows = PredictInput("mail", file=tmp_path / "in.jsonl").read(has_pairs=False)
    assert [len(window) for window in windows] == [4, 4, 2]


def test_answers_stand_in_the_order_of_their_rows_with_mixed_tasks_and_bad_rows(
    inlay: Inlay, mail: Mail, tmp_path: Path, small_windows: None
) -> None:
    tasks = name_tasks(inlay, 5)
    source = write_rows(tmp_path / "in.csv", 150, tasks)
    assert inlay("predict", "--input", source, "--output", "out.jsonl").status == 0
    answers = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    assert [int(answer["id"]) for answer in answers] == list(range(150))
    for row, answer in enumerate(answers):
        if row % 7 == 5 or row % 11 == 3:
            assert answer["error"]["message"].startswith(f"{source}:{row + 2}: "), "the header is line 1"
        else:
            assert answer["version"] == f"{tasks[row % 5]}@1"
    good = [answer for answer in answers if "error" not in answer]
    (alone,) = inlay("predict", good[-1]["task"], good[-1]["text"], "--json").lines
    assert good[-1]["probability"] == pytest.approx(alone["probability"], abs=1e-5)


def test_an_engine_makes_room_when_a_file_turns_to_more_tasks(
    inlay: Inlay, mail: Mail, tmp_path: Path, small_windows: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from inlay.serving import Engine

    made = []
    plain = Engine.__init__
    monkeypatch.setattr(
        Engine,
        "__init__",
        lambda self, *a, num_slots, **k: (made.append(num_slots), plain(self, *a, num_slots=num_slots, **k))[1],
    )
    tasks = name_tasks(inlay, 6)
    rows = [("mail-0", "now")] * 40 + [(task, "free prize") for task in tasks * 8]
    (tmp_path / "in.csv").write_text("task,text\n" + "".join(f"{task},{text}\n" for task, text in rows))
    ended = inlay("predict", "--input", "in.csv", "--strict")
    assert ended.status == 0
    assert [line["task"] for line in ended.lines] == [task for task, _ in rows]
    assert made == [1, 8], "one task at first, then room for the six"


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each captured pass had, on a machine that only seems to have a GPU."""
    from inlay.model.heads.captured_inference import GraphedForward
    from inlay.model.heads.inference import infer
    from inlay.serving import passes

    found: list[int] = []

    class Counted(GraphedForward):
        def logits(self, rows: Any) -> Any:
            if not found:
                self.on_compile("compiling passes of up to 256 tokens")
            found.append(len(rows))
            return infer(self._bank, rows)

    monkeypatch.setattr(passes, "GraphedForward", Counted)
    monkeypatch.setattr(passes, "find_obstacle", lambda backbone: None)
    return found


def test_a_short_file_is_not_kept_waiting_by_a_compilation(
    inlay: Inlay, mail: Mail, tmp_path: Path, captures: list[int]
) -> None:
    write_rows(tmp_path / "in.csv", 40)
    ended = inlay("predict", "--input", "in.csv")
    assert ended.status == 0
    assert not captures
    assert "compiling" not in ended.err


def test_a_long_file_is_captured_and_says_what_is_compiled_and_goes_on_so_with_more_tasks(
    inlay: Inlay, mail: Mail, tmp_path: Path, small_windows: None, captures: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = name_tasks(inlay, 4)
    rows = [(tasks[0], "now")] * 96 + [(task, "free prize") for task in tasks * 16]
    (tmp_path / "in.csv").write_text("task,text\n" + "".join(f"{task},{text}\n" for task, text in rows))
    plain = inlay("predict", "--input", "in.csv")
    assert not captures
    monkeypatch.setattr("inlay.serving.passes.PATIENCE_S", 1e-9)
    ended = inlay("predict", "--input", "in.csv")
    assert captures == [32, 32, 32]  # two windows are launched, and then none, though the last need a larger engine
    assert ended.err.count("compiling passes of up to 256 tokens") == 1
    for answer, other in zip(ended.lines, plain.lines, strict=True):
        assert answer["task"] == other["task"]
        assert answer["probability"] == pytest.approx(other["probability"], abs=1e-5)


def stop_after(monkeypatch: pytest.MonkeyPatch, num_windows: int) -> None:
    """Ctrl-C while the window after so many is answered."""
    from inlay.serving.pool import EnginePool

    plain, calls = EnginePool.answer, iter(range(num_windows))

    def answer(self: EnginePool, rows: Any) -> Any:
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return plain(self, rows)

    monkeypatch.setattr(EnginePool, "answer", answer)


@pytest.mark.parametrize("suffix", ["csv", "tsv", "jsonl"])
def test_a_stopped_run_leaves_whole_rows_under_a_name_that_says_so(
    inlay: Inlay, mail: Mail, tmp_path: Path, small_windows: None, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    write_rows(tmp_path / "in.csv", 150)
    assert inlay("predict", "--input", "in.csv", "--output", f"whole.{suffix}").status == 0
    stop_after(monkeypatch, 2)
    ended = inlay("predict", "--input", "in.csv", "--output", f"out.{suffix}")
    assert ended.status == 130
    assert f"the first 64 rows are in out.partial.{suffix}" in ended.err
    assert not Path(f"out.{suffix}").exists()
    has_header = suffix != "jsonl"
    whole = Path(f"whole.{suffix}").read_text().splitlines()
    assert Path(f"out.partial.{suffix}").read_text().splitlines() == whole[: 64 + has_header]
    assert not list(tmp_path.glob(".draft-*"))


def test_a_stop_in_the_middle_of_a_window_drops_its_rows(
    inlay: Inlay, mail: Mail, tmp_path: Path, small_windows: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from inlay.cli import output as rows

    write_rows(tmp_path / "in.csv", 150)
    plain, calls = rows.describe_answer, iter(range(40))

    def describe(answer: Any) -> Any:
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return plain(answer)

    monkeypatch.setattr(rows, "describe_answer", describe)
    assert inlay("predict", "--input", "in.csv", "--output", "out.jsonl").status == 130
    assert [json.loads(line)["id"] for line in Path("out.partial.jsonl").read_text().splitlines()] == [
        str(row) for row in range(32)
    ]
    assert not Path("out.jsonl").exists()


def test_a_run_stopped_before_its_first_rows_leaves_no_file(
    inlay: Inlay, mail: Mail, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rows(tmp_path / "in.csv", 20)
    Path("out.csv").write_text("as it was")
    stop_after(monkeypatch, 0)
    ended = inlay("predict", "--input", "in.csv", "--output", "out.csv")
    assert ended.status == 130
    assert Path("out.csv").read_text() == "as it was"
    assert sorted(path.name for path in tmp_path.glob("*out*")) == ["out.csv"]


def test_the_rate_is_said_and_given_as_data(inlay: Inlay, mail: Mail, tmp_path: Path) -> None:
    write_rows(tmp_path / "in.csv", 40)
    ended = inlay("predict", "--input", "in.csv", "--output", "out.csv", "--json")
    assert "40 rows in " in ended.err
    assert " rows/s, " in ended.err
    assert " tokens/s" in ended.err
    assert ended.data["num_rows"] == 40
    assert ended.data["num_tokens"] > 40
    assert ended.data["seconds"] > 0
    assert "80 rows in " in inlay("evaluate", "mail", mail.data).err
    assert inlay("evaluate", "mail", mail.data, "--json").data["seconds"] > 0
