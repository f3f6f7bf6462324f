"""The whole way on the real default backbone, through the installed command: a file in, a filter that works out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAJORITY = 4827 / 5574  # of the messages are ham
# About 0.98 on the test rows, whatever the seed. Unsorted batches, since sorting by length would sort out the spam.
SETTINGS = "--limit 400 --epochs 1 --lr 2e-3 --batch-size 8 --max-length 64 --dev-share 0.05 --test-share 0.1".split()
SETTINGS += ["--set", "train.bucket=1"]


def inlay(store: Path, *arguments: str) -> str:
    command = [str(Path(sys.executable).with_name("inlay")), *arguments, "--json", "--device", "cpu"]
    environment = {**os.environ, "INLAY_HOME": str(store)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_spam_filter_is_trained_kept_and_used(tmp_path):
    report = json.loads(inlay(tmp_path, "train", "examples/sms_spam/sms_spam.tsv", "--task", "spam", *SETTINGS))
    assert report["reference"] == "spam@1"
    assert report["backbone_parameters"] == 22_713_216
    assert report["metrics"]["test"]["accuracy"] >= 0.95 > MAJORITY

    texts = ["WINNER!! You have been selected for a free prize, call 09061701461 now", "Running late, home by eight."]
    answers = [json.loads(line) for line in inlay(tmp_path, "predict", "spam", *texts).splitlines()]
    assert [answer["label"] for answer in answers] == ["spam", "ham"]
    assert {answer["version"] for answer in answers} == {"spam@1"}
