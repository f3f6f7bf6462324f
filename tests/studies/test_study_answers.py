"""What studies of several tasks have written for labels: as published, and the same for what means the same."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from inlay.data import make_task
from inlay.settings.run_config import DataConfig
from inlay.studies.spec.study import list_studies, read_study

STUDIES = list_studies([Path(__file__).parents[2] / "studies"])
SEVERAL_TASKS = ["embeddings", "fewshot", "hyper-ablation", "lowresource", "multitask"]


@pytest.mark.parametrize("name", SEVERAL_TASKS)
def test_numbers_are_written_for_labels_as_published(name):
    """HyperFormer's targets; CB's are those of MNLI, which it starts from."""
    entailed = ("entailment=0", "not_entailment=1")
    judged, liked = ("entailment=0", "neutral=1", "contradiction=2"), ("negative=0", "positive=1")
    wanted = {"glue/mnli": judged, "glue/qnli": entailed, "glue/rte": entailed, "cb": judged, "scitail": entailed,
              "imdb": liked, "yelp-polarity": liked}  # fmt: skip
    study = read_study(STUDIES[name], "paper")
    for task in study.tasks:  # the other labels are numbers
        assert study.data_config(task, None).answers == wanted.get(task, ()), task
    assert any("as published" in note and "`device` and `long` write" in note for note in study.notes)


LABELS = {"mnli": ("contradiction", "entailment", "neutral"), "sst2": ("0", "1"), "scitail": ("entailment",
          "not_entailment"), "cb": ("contradiction", "entailment", "neutral"), "imdb": ("negative", "positive"),
          "yelp-polarity": ("negative", "positive")}  # fmt: skip


@pytest.mark.parametrize("profile", ["paper", "device", "long"])
def test_a_few_shot_task_writes_what_the_task_it_is_like_was_taught_to_write(profile):
    study = read_study(STUDIES["fewshot"], profile)
    assert study.like
    for task in study.tasks:
        old = study.like[task]
        ours = written(study.data_config(task, None), LABELS[task])
        theirs = written(study.sources["multitask"].data_config(f"glue/{old}", None), LABELS[old])
        assert set(ours.values()) <= set(theirs.values()), f"{task} is like {old}"
        assert all(ours[label] == theirs[label] for label in ours.keys() & theirs.keys())


def written(config, labels):
    rows = pd.DataFrame({"text": [f"{label} {n}" for label in labels for n in range(8)],
                         "label": [label for label in labels for _ in range(8)]})  # fmt: skip
    task = make_task(rows, "any", DataConfig(kind="classify", answers=config.answers))
    return dict(zip(task.labels, task.written, strict=True))
