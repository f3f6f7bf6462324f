"""`plan` and a dry run of several tasks: counts from shapes first, time and memory only if they are measured."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from .conftest import SETTINGS, Inlay, Mail, write_mail


@pytest.fixture
def no_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any step, and any text that is tokenised, fails the test."""

    def refuse(*arguments: object, **settings: object) -> None:
        raise AssertionError("measured")

    for name in ("Cohort", "measure_step_cost", "_timed"):
        monkeypatch.setattr(f"inlay.training.run.plan.{name}", refuse)
    monkeypatch.setattr("inlay.data.token_cache.encode_cached", refuse)


def plan_mail(mail: Mail, *more: object) -> tuple[object, ...]:
    return ("plan", mail.data, "--backbone", mail.backbone, *SETTINGS, *more)


def test_without_measuring_all_that_shapes_tell_is_there(inlay: Inlay, mail: Mail, no_steps: None) -> None:
    data = inlay(*plan_mail(mail, "--no-measure", "--tasks", 9, "--json")).data
    for way in ("inlay", "full"):
        assert data[way]["seconds"] is data[way]["peak_memory_bytes"] is None
    assert data["token_budget"] is data["truncated_share"] is None
    parts, backbone, totals = data["parameters_by_part"], data["backbone_parameters"], data["totals"]
    assert data["inlay"]["trained_parameters"] == sum(parts.values()) == totals["trained"]
    assert totals["adapters_alone"] == parts["adapters"]
    assert totals["trained_without_last_layer"] == parts["adapters"] + parts["norms"]
    assert totals["with_backbone"] == backbone + parts["adapters"] + parts["head"]
    assert totals["share_per_task"] == data["trained_share"]
    assert data["totals_of_tasks"]["num_tasks"] == 9
    assert data["totals_of_tasks"]["times_backbone"] == pytest.approx(1 + 9 * data["trained_share"])
    assert data["totals_of_tasks"]["times_full_fine_tuning"] == 9
    shown = inlay(*plan_mail(mail, "--no-measure", "--tasks", 9)).out
    lines = dict(line.split("  ", 1) for line in shown.splitlines() if "  " in line)
    named = {name.strip(): text.strip() for name, text in lines.items()}
    assert named["adapters alone"] == f"{parts['adapters']:,}"
    assert named["without last layer"] == f"{parts['adapters'] + parts['norms']:,} trained"
    assert named["with the backbone"].startswith(f"{totals['with_backbone']:,} in all; {parts['norms']:,} that replace")
    times, share = data["totals_of_tasks"]["times_backbone"], 100 * data["trained_share"]
    assert named["9 tasks"] == (
        f"{times:.2f}× the backbone, {share:.2f}% of it for each task; full fine-tuning of each: 9×"
    )
    assert named["time"] == named["memory"] == "not measured"


def test_counts_stand_on_the_screen_before_anything_is_measured(
    inlay: Inlay, mail: Mail, monkeypatch: pytest.MonkeyPatch
) -> None:
    from inlay.training.run import plan

    make, seen = plan.make_plan, []

    def watched(*arguments: object, **settings: object) -> plan.RunPlan:
        seen.append(sys.stdout.getvalue())  # type: ignore[attr-defined]
        return make(*arguments, **settings)  # type: ignore[arg-type]

    monkeypatch.setattr("inlay.training.make_plan", watched)
    shown = inlay(*plan_mail(mail)).out
    assert "with the backbone" in seen[0]
    assert "1 task " in seen[0]
    assert "memory" not in seen[0]
    measured = shown.removeprefix(seen[0])
    assert all(word in measured for word in ("time", "memory", "tokens a forward pass", "of the texts"))


def test_measuring_changes_no_count(inlay: Inlay, mail: Mail) -> None:
    counted, measured = (inlay(*plan_mail(mail, "--json", *more)).data for more in (("--no-measure",), ()))
    assert counted.keys() == measured.keys()
    known = [key for key in counted if key not in ("inlay", "full", "truncated_share", "token_budget", "max_together")]
    assert {key: counted[key] for key in known} == {key: measured[key] for key in known}
    assert measured["inlay"]["seconds"] > 0
    assert measured["full"]["peak_memory_bytes"] > 0


def test_long_contexts_are_more_windows_than_rows(
    inlay: Inlay, tiny_bert_folder: Path, tmp_path: Path, no_steps: None
) -> None:
    answers = {"text": ["cat"], "answer_start": [7]}
    rows = [{"question": f"who {n} ?", "context": f"it was cat {n} .", "answers": answers} for n in range(12)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = ("--max-length", 40, "--set", "train.stride=6", "--no-measure")
    ended = inlay("plan", "rows.jsonl", "--backbone", tiny_bert_folder, *settings)
    assert ended.status == 0, ended.err
    assert "at least " in next(line for line in ended.out.splitlines() if line.startswith("steps"))


def test_no_tasks_are_refused(inlay: Inlay, mail: Mail) -> None:
    ended = inlay(*plan_mail(mail, "--tasks", 0))
    assert ended.status == 2
    assert "--tasks" in ended.err


def test_a_dry_run_of_several_tasks_counts_as_the_papers_do(
    inlay: Inlay, tiny_bert_folder: Path, tmp_path: Path, no_steps: None
) -> None:
    first, second = write_mail(tmp_path / "mail.csv"), write_mail(tmp_path / "b.csv", num_rows=40, seed=1)
    same = ("multitask", first, f"post={second}", "--backbone", tiny_bert_folder, *SETTINGS, "--dry-run")
    made = inlay(*same, "--no-measure", "--json").data
    assert made["seconds"] is made["memory_bytes"] is None
    totals, backbone = made["totals"], made["backbone_parameters"]
    assert totals["trained"] == made["trained_parameters"]
    assert totals["share_per_task"] == pytest.approx(made["trained_parameters"] / 2 / backbone)
    assert totals["times_backbone"] == pytest.approx(1 + made["trained_parameters"] / backbone)
    assert totals["times_full_fine_tuning"] == 2
    shown = inlay(*same, "--no-measure").out
    assert f"{totals['with_backbone']:,} in all" in shown
    assert f"2 tasks             {totals['times_backbone']:.2f}× the backbone" in shown
    assert "time    not measured" in shown
