"""Every study's command that docs/results.md prints finds the records it is printed beside, as many as it says."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from inlay.model import load_backbone

from .conftest import Inlay

ROOT = Path(__file__).parents[2]


sys.path.insert(0, str(ROOT / "docs"))
found_runs = importlib.import_module("found_runs")
PRINTED = found_runs.list_printed(found_runs.RESULTS.read_text(encoding="utf8"))


@pytest.fixture(scope="module")
def shipped():
    return found_runs.read_shipped()


def name_command(printed):
    return f"{printed.arguments[1]}-{printed.backbone}-{printed.option('--profile')}"


def test_the_document_prints_commands_of_every_backbone_that_has_records(shipped):
    assert {printed.backbone for printed in PRINTED} == {record.backbone for record in shipped} == set(found_runs.FACTS)


@pytest.mark.parametrize("printed", PRINTED, ids=name_command)
def test_a_printed_command_finds_as_many_records_as_stands_beside_it(printed, shipped):
    count = printed.count(shipped)
    assert printed.counts == [count], f"line {printed.line}: `{printed.text}` should be followed by `{count.words}`"


def test_the_facts_of_backbones_are_those_of_the_records_and_of_minilm(shipped):
    for facts in found_runs.FACTS.values():
        own = [record for record in shipped if record.backbone == facts.name]
        assert {record.fingerprint for record in own} == {facts.fingerprint}
        assert {record.extra["layers"] for record in own if "layers" in record.extra} == {facts.num_layers}
    minilm, facts = load_backbone("minilm", device="cpu"), found_runs.FACTS["minilm"]
    assert (minilm.fingerprint, minilm.default_pooling) == (facts.fingerprint, facts.pooling)
    assert minilm.anatomy.num_layers == facts.num_layers


@pytest.mark.slow
@pytest.mark.parametrize("printed", [each for each in PRINTED if each.backbone == "minilm"], ids=name_command)
def test_a_dry_run_of_a_command_on_minilm_finds_what_stands_beside_it(printed, inlay: Inlay, data_root: Path) -> None:
    given = [str(data_root) if each == "DATA" else each for each in printed.arguments]
    rooted = [] if "--data-root" in given else ["--data-root", data_root]
    ended = inlay(*given, *rooted, "--out", ROOT / "results", "--device", "cpu", "--dry-run", "--no-measure", "--json")
    assert ended.status == 0, ended.err
    assert [study["left_out"] for study in ended.data["studies"] if study["left_out"]] == []
    assert printed.counts == [found_runs.Count(ended.data["done"], ended.data["done"] + ended.data["left"])]


def test_words_belong_to_the_command_before_them_and_to_no_other():
    first, second = (
        "`inlay study glue --profile device --backbone minilm`",
        "`inlay study squad --backbone T5 --profile long`",
    )
    line = f"- {first} (finds 1 of 1,234 runs), then `inlay study report`; {second}, and no more"
    one, two = found_runs.list_printed(f"# title\n{line}\nfinds 9 of 9 runs\n")
    assert (one.line, one.backbone, one.counts) == (2, "minilm", [found_runs.Count(1, 1234)])
    assert (two.backbone, two.option("--profile"), two.counts) == ("flan-t5-small", "long", [])
