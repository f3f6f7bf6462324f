"""`inlay predict --server`: the command line, answered by the app in this process."""

from __future__ import annotations

import io
import json

import pytest
from web_bench import BASE, measure

import inlay
from inlay import cli, client

pytestmark = pytest.mark.filterwarnings("ignore:You should not use the 'timeout' argument")  # the test client has none


@pytest.fixture
def predict(bench, acme, monkeypatch, capsys):
    """Run `inlay predict ... --server` with the key of `acme`; return the exit status, stdout and stderr."""
    bench.store_task("acme", "length")
    bench.engine.rules["acme.length"] = measure
    monkeypatch.setenv("INLAY_KEY", bench.secrets["acme"])
    usual = inlay.Client

    def connect(url):
        found = usual(url)
        assert (found._http.url, found._http._client.headers["authorization"].split()[1]) == (
            BASE.rstrip("/"),
            bench.secrets["acme"],
        )
        found.close()
        found._http._client = acme
        return found

    monkeypatch.setattr(client, "Client", connect)

    def run(*words):
        status = 0
        try:
            cli.main(["predict", *map(str, words), "--server", BASE])
        except SystemExit as stop:
            status = int(stop.code or 0)
        said = capsys.readouterr()
        return status, said.out, said.err

    return run


def test_texts_are_answered_by_several_tasks_of_the_service(predict):
    status, out, err = predict("mail,length", "a prize", "see you")
    assert status == 0, err
    words = [line.split()[:2] for line in out.splitlines()]
    assert words == [["mail", "spam"], ["length", "7"], ["mail", "ham"], ["length", "7"]]


def test_a_file_is_answered_row_by_row_and_a_bad_row_costs_only_itself(predict, tmp_path):
    rows, answers = tmp_path / "rows.csv", tmp_path / "answers.csv"
    rows.write_text("id,task,text\n1,mail,a prize\n2,,see you\n3,nowhere,a prize\n4,length,abc\n")
    status, _, err = predict("--input", rows, "--output", answers)
    assert status == 0, err
    head, *lines = answers.read_text().splitlines()
    assert head == "id,task,text,label,probability,error"
    assert lines[0].startswith("1,mail,a prize,spam,")
    assert "the row names no task" in lines[1]
    assert "nowhere" in lines[2].split(",", 3)[3]
    assert lines[3].startswith("4,length,abc,3,")
    assert "tokens/s" not in err


def test_an_unknown_task_of_the_service_is_said_once_with_where_its_tasks_are_listed(predict):
    status, _, err = predict("nowhere", "a prize")
    assert status == 3
    assert err.count("no task named `nowhere`") == 1
    assert "hint: the page at the service's address lists its tasks" in err


def test_json_of_the_service_is_that_of_the_command_line(predict):
    status, out, _ = predict("mail", "a prize", "--json")
    assert status == 0
    (line,) = [json.loads(text) for text in out.splitlines()]
    assert (line["text"], line["task"], line["version"], line["label"]) == ("a prize", "mail", "mail@1", "spam")
    assert line["probability"] == max(line["probabilities"].values())


def test_lines_with_a_tab_are_pairs(predict, bench, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("a prize\nsee\tyou\n"))
    assert predict("mail")[0] == 0
    assert [(row.text, row.pair) for _, asked in bench.engine.asked for row in asked] == [
        ("a prize", None),
        ("see", "you"),
    ]


def test_a_wrong_name_and_options_of_this_machine_are_refused(predict):
    status, _, err = predict("nowhere", "a prize")
    assert status != 0
    assert "nowhere" in err
    status, _, err = predict("mail", "a prize", "--backbone", "minilm")
    assert status == 2
    assert "leave out `--backbone`" in err
    assert predict("mail", "a prize", "--precision", "int8")[0] == 2


def test_a_service_that_is_not_there_is_named(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["predict", "mail", "a prize", "--server", "http://127.0.0.1:9"])
    assert stop.value.code == 9
    assert "no service answers at http://127.0.0.1:9" in capsys.readouterr().err
