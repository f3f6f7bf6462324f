"""The options of how training goes about it: refused before any work, or they reach the cohort."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from inlay.cli.flags import changes, parse_size
from inlay.errors import BadConfig
from inlay.settings.fit_settings import FitSettings

from .conftest import SETTINGS, Inlay, Mail

TRAINING = ("train", "sweep", "multitask", "study", "stream")


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        *(("0", 0), ("1000", 1000), ("10m", 10**7), ("2G", 2 * 10**9), ("2gb", 2 * 10**9), ("500 MB", 5 * 10**8)),
        *(("1.5GiB", 3 * 2**29), ("1k", 1000), ("7B", 7), ("1T", 10**12), ("1TB", 10**12), ("1TiB", 2**40)),
    ],
)
def test_sizes_are_read_as_people_write_them(text: str, num_bytes: int) -> None:
    assert parse_size(text, "--reuse-memory") == num_bytes


@pytest.mark.parametrize("text", ["", "much", "-1", "2X", "G", "1e9", "2GBs"])
def test_what_is_no_size_is_refused_with_one(text: str) -> None:
    with pytest.raises(BadConfig, match=re.escape(f"`--reuse-disk {text}`")) as caught:
        parse_size(text, "--reuse-disk")
    assert "2GB" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("options", "status", "words"),
    [
        (("--spread", "foo"), 3, "no way to spread training named `foo`\nhint: known: auto, cohorts, rows"),
        (("--spread", "row"), 3, "did you mean `rows`?"),
        (("--spread", "rows"), 2, "`--spread rows` is for several processes, and this is the only one"),
        (("--spread", "cohorts"), 2, "start it with `torchrun --nproc-per-node 2 -m inlay {command} …`"),
        (("--reuse-memory", "lots"), 2, "`--reuse-memory lots` is not a size"),
        (("--reuse-disk", "1GB", "--no-reuse"), 2, "`--reuse-disk 1GB` with `--no-reuse`"),
    ],
)
@pytest.mark.parametrize("command", ["train", "sweep", "multitask"])
def test_what_cannot_be_is_refused_before_anything_is_read(
    inlay: Inlay, mail: Mail, command: str, options: tuple[str, ...], status: int, words: str
) -> None:
    ended = inlay(command, mail.data, "--backbone", mail.backbone, *options)
    assert (ended.status, ended.out) == (status, "")
    assert words.format(command=command) in ended.err
    assert "task mail" not in ended.err, "the data was not read"


def test_torchrun_with_one_process_may_say_what_several_would_share(
    inlay: Inlay, mail: Mail, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    where = ("--task", "alone", "--backbone", mail.backbone, "--no-publish")
    assert inlay("train", mail.data, *where, *SETTINGS, "--spread", "rows").status == 0


@pytest.mark.parametrize("command", TRAINING)
def test_every_command_that_trains_has_what_the_hint_at_the_end_of_memory_names(inlay: Inlay, command: str) -> None:
    text = " ".join(inlay(command, "--help").out.split())
    assert "--checkpointing recompute activations" in text
    assert "steps are not compiled" in text
    assert "--reuse-memory SIZE" in text
    assert "default: a quarter of the free memory" in text
    assert "--reuse-disk SIZE" in text
    assert "default: half of the free space" in text
    assert "--threads N" in text


@pytest.mark.parametrize("command", ["sweep", "multitask", "stream"])
def test_the_help_says_how_many_runs_train_at_a_time(inlay: Inlay, command: str) -> None:
    text = " ".join(inlay(command, "--help").out.split())
    assert "most runs trained together; default: as many as fit in memory, up to 32" in text


def test_the_limits_of_what_is_reused_hold(inlay: Inlay, mail: Mail) -> None:
    command = ("train", mail.data, "--task", "upper", "--backbone", mail.backbone, *SETTINGS, "--no-publish")
    upper = ("--set", "method.layers=1:")
    full = "memory and disk hold the frozen layers of "
    assert full not in inlay(*command, *upper).err
    nothing = inlay(*command, *upper, "--seed", 1, "--reuse-memory", "0", "--reuse-disk", "0")
    assert nothing.status == 0, nothing.err
    assert f"{full}0 of " in nothing.err
    some = inlay(*command, *upper, "--seed", 2, "--reuse-memory", "0.02MB", "--reuse-disk", "0")
    num_kept = int(re.search(f"{full}(\\d+) of ", some.err)[1])  # type: ignore[index]
    assert 0 < num_kept < 64


def test_the_price_of_checkpointing_is_measured_with_it(
    inlay: Inlay, mail: Mail, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = watch_cohorts(monkeypatch, import_module("inlay.training.run.plan"))
    for options, is_checkpointed in (((), False), (("--checkpointing",), True)):
        ended = inlay("plan", mail.data, "--backbone", mail.backbone, *SETTINGS, *options)
        assert ended.status == 0, ended.err
        assert seen.pop() is is_checkpointed


def watch_cohorts(monkeypatch: pytest.MonkeyPatch, module: Any) -> list[bool]:
    """Whether the cohorts that a module makes compute activations again."""
    seen: list[bool] = []
    plain = module.Cohort

    def watched(runs: Any, backbone: Any, settings: Any, *rest: Any, **named: Any) -> Any:
        seen.append(settings.checkpointing)
        return plain(runs, backbone, settings, *rest, **named)

    monkeypatch.setattr(module, "Cohort", watched)
    return seen


def test_a_stream_trains_as_it_is_told(
    inlay: Inlay, mail: Mail, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = watch_cohorts(monkeypatch, import_module("inlay.training.cohort.fit"))
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "fresh.csv").write_bytes(mail.data.read_bytes())
    quick = ("--size", 8, "--epochs", 1, "--set", "train.max_length=24", "--once", "--settle", "0s")
    ended = inlay("stream", tmp_path / "in", "--backbone", mail.backbone, *quick, "--checkpointing")
    assert ended.status == 0, ended.err
    assert seen == [True]


@pytest.mark.parametrize("name", ["glue", "stream"])
def test_a_study_trains_as_it_is_told(name: str, inlay: Inlay, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watch_cohorts(monkeypatch, import_module("inlay.training.cohort.fit"))
    ended = inlay("study", name, "--profile", "tiny", "--no-report", "--checkpointing", "--json")
    assert ended.status == 0, ended.err
    assert set(seen) == {True}


def test_only_what_was_asked_for_is_laid_over_a_studys_own() -> None:
    assert changes(FitSettings()) == {}
    assert changes(FitSettings(checkpointing=True, prefix_bytes=0)) == {"checkpointing": True, "prefix_bytes": 0}


def test_a_study_whose_fit_cannot_be_is_refused_by_its_file(tmp_path: Path) -> None:
    from inlay.studies.spec.study import read_study

    path = tmp_path / "mine.toml"
    text = (Path(__file__).parents[2] / "studies" / "stream.toml").read_text()
    path.write_text("fit = { max_cohort = 0 }\n" + text)
    with pytest.raises(BadConfig, match=r"mine\.toml: `max_cohort` is `0`") as caught:
        read_study(path, "device")
    assert "from 1 on" in (caught.value.hint or "")
