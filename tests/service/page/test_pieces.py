"""The pieces of pages: numbers in words, drawings, snippets, words that moved an answer, errors explained."""

from __future__ import annotations

import json
import random
import shlex
import subprocess
from datetime import UTC, datetime, timedelta

import pytest
from page_bench import OWN

from inlay.errors import BadConfig, UnknownName
from inlay.reports import (
    capitalize_first,
    choose_labels,
    draw_calibration,
    duration,
    level,
    plural,
    show_bytes,
    show_number,
    show_score,
    write_curl,
)
from inlay.service.page.drawings import draw_days, draw_difference, draw_spark
from inlay.service.page.explaining import explain, explain_problem, plain_note
from inlay.service.page.new_task_screens import show_cell
from inlay.service.page.rendering import ago, nth, ticked
from inlay.service.page.sign_in import safe_path
from inlay.service.page.task_screens import say_labels
from inlay.service.page.version_screens import _look_of


def test_numbers_read_as_people_write_them():
    assert [nth(number) for number in (1, 2, 3, 4, 11, 12, 13, 21, 102, 111)] == [
        *("1st", "2nd", "3rd", "4th", "11th", "12th", "13th", "21st", "102nd", "111th"),
    ]
    assert [show_number(value) for value in (None, 0, 12345, 1.5, 1234.5678)] == ["–", "0", "12,345", "1.5", "1,235"]
    assert [show_bytes(size) for size in (1, 2048, 1536, 2**30, 10 * 2**30)] == [
        "1 byte",
        "2 kB",
        "1.5 kB",
        "1 GB",
        "10 GB",
    ]
    assert [duration(seconds) for seconds in (0.2, 59, 61, 5400, 10_000, 200_000)] == [
        *("1 second", "59 seconds", "1 minute", "1.5 hours", "2.8 hours", "2 days"),
    ]
    assert [plural(count, "row") for count in (0, 1, 2)] == ["0 rows", "1 row", "2 rows"]
    assert show_score(0.98765, "accuracy") == "98.8%"
    assert show_score(0.98765, "spearman") == "0.988"
    assert show_score(float("nan"), "accuracy") == "–"
    assert ago((datetime.now(UTC) - timedelta(minutes=3)).isoformat()) == "3 minutes ago"


def test_ticks_become_code_and_nothing_else_becomes_anything():
    assert str(ticked("no column `<b>`")) == "no column <code>&lt;b&gt;</code>"
    assert str(ticked("it`s one <i>")) == "it`s one &lt;i&gt;"


def test_a_scale_of_colours_has_nothing_only_for_nothing():
    assert [level(value, 100) for value in (0, 0.1, 25, 26, 100, 400)] == [0, 1, 1, 2, 4, 4]
    assert level(1, 0) == 0


def test_drawings_stay_inside_their_frames():
    spark = draw_spark([0, 5, 10, 2])
    places = [tuple(map(float, pair.split())) for pair in spark.line[1:].split("L")]
    assert all(0 <= x <= spark.width and 0 <= y <= spark.height for x, y in places)
    assert draw_spark([0, 0]) is None
    assert draw_spark([3]) is None
    days = {f"2026-11-{day:02}": day % 5 for day in range(1, 15)}
    bars = draw_days(days)
    assert all(0 <= bar.x <= bars.width and bar.y >= 0 and bar.y + bar.height <= bars.base for bar in bars.bars)
    assert bars.bars[3].words == "4 Nov 2026: 4 rows"
    assert draw_days(dict.fromkeys(days, 0)) is None
    plot = draw_difference(-0.01, 0.02, 0.05)
    assert 0 < plot["low"] < plot["zero"] < plot["middle"] < plot["high"] < 600


def test_calibration_says_whether_it_is_too_sure():
    sure = [{"confidence": 0.95, "accuracy": 0.6, "count": 50}, {"confidence": 0.5, "accuracy": 0.5, "count": 0}]
    found = draw_calibration(sure)
    assert "too sure" in found["words"]
    assert len(found["points"]) == 1
    assert "better than it thinks" in draw_calibration([{"confidence": 0.6, "accuracy": 0.9, "count": 20}])["words"]
    assert "as sure as it should be" in draw_calibration([{"confidence": 0.9, "accuracy": 0.9, "count": 20}])["words"]
    assert draw_calibration([]) is None


def test_a_word_is_marked_by_how_far_it_moves_the_answer():
    assert [_look_of(change) for change in (0.6, 0.0, -0.06, 0.02)] == ["up3", "", "down2", "up1"]


def test_any_text_comes_through_a_shell_as_it_was_typed():
    generator = random.Random(0)
    for _ in range(50):
        text = "".join(generator.choice("ab '\"\\$`!\n{}é😀\t;&|") for _ in range(30))
        command = write_curl("http://x", "mail", text, None, needs_key=False)
        done = subprocess.run(
            ["bash", "-c", command.replace("curl", "printf '%s\\0'", 1)], capture_output=True, check=True
        )
        words = done.stdout.decode().split("\0")
        assert json.loads(words[words.index("-d") + 1]) == {"task": "mail", "rows": [text]}
        assert shlex.split(command.replace("\\\n", " "))[0] == "curl"


def test_errors_are_explained_to_people_and_not_to_programs():
    known = explain(UnknownName("task", "mial", ["mail", "secret"]))
    assert known.status == 404
    assert "secret" not in str(known)
    assert "/v1/" not in str(known)
    told = explain(BadConfig("a value", "give it with `--lr 0.1`, or read `inlay train --help`; or use another"))
    assert told.hint == "or use another"
    kept = explain_problem(
        {"code": "diverged", "message": "it diverged", "hint": "try a smaller `settings.lr`", "status": 500}
    )
    assert kept.hint == "try a smaller learning rate (under “More settings”)"
    assert explain_problem(None) is None


def test_notes_on_rows_are_in_plain_words():
    note = plain_note("split: 5017 train, 557 dev rows; dev made with seed 0, stratified, same texts on one side")
    assert note == "5,017 rows are learned from, 557 chosen at random to judge by"
    assert "dev" not in plain_note("23 dev texts are nearly the same as a training text, such as dev line 59")


@pytest.mark.parametrize("path", ["https://x/", "//x", "/\\x", "x", "", "/a\nb", "javascript:1", "/\t/x", "\\/x"])
def test_only_paths_of_this_service_are_gone_on_to(path):
    assert safe_path(path) == "/"
    assert safe_path("/tasks/mail?a=1&b=2") == "/tasks/mail?a=1&b=2"


def test_forms_are_bounded_and_nothing_but_forms(bench):
    large = bench.client.post("/sign-in", content=b"key=" + b"x" * 9_000_000, headers=OWN | _FORM)
    assert large.status_code == 413
    many = bench.client.post("/sign-in", content=b"&".join(b"a=1" for _ in range(3000)), headers=OWN | _FORM)
    assert many.status_code == 413
    other = bench.client.post("/sign-in", content=b"{}", headers=OWN | {"content-type": "application/json"})
    assert other.status_code == 415
    odd = bench.client.post("/sign-in", content=b"key=%ff%00%zz&next=%2f%2fx\xff", headers=OWN | _FORM)
    assert odd.status_code == 401


_FORM = {"content-type": "application/x-www-form-urlencoded"}


def test_words_begin_large_but_names_of_files_stay():
    assert capitalize_first("every row has one label") == "Every row has one label"
    assert capitalize_first("mail.csv: every row has one label") == "mail.csv: every row has one label"


def test_cells_and_labels_are_shown_without_the_marks_of_a_file():
    assert show_cell('["food", "staff"]') == "food, staff"
    assert show_cell('{"text": ["Oslo"], "answer_start": [14]}') == "Oslo"
    assert show_cell("[not a list") == "[not a list"
    assert say_labels({"kind": "tag", "labels": ["O", "B-LOC", "I-LOC", "B-PER"]}) == "LOC, PER"


def test_of_many_labels_those_that_are_confused_are_shown():
    labels = [f"label-{number:02}" for number in range(50)]
    counts = [[9 * (row == column) for column in range(50)] for row in range(50)]
    counts[3][41] = 2
    shown = choose_labels({"confusion": {"labels": labels, "counts": counts}})
    assert {"label-03", "label-41"} <= set(shown)
    assert len(shown) == 20
    assert shown == sorted(shown)


def test_problems_of_columns_name_the_fields_of_the_page():
    problem = {"code": "bad-data", "detail": "no label column recognised", "hint": "name it with `label`; more"}
    said = explain_problem(problem)
    assert said is not None
    assert said.hint == "choose it under “Right answer”; more"
