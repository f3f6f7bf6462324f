"""The eighteen real tasks of the transfer study, read from the shared data folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas

from inlay.data import Task, load_task, make_task
from inlay.settings.run_config import DataConfig

CROWD = "houlsby17/crowdflower_"


@dataclass(frozen=True)
class Entry:
    """Where a task's rows are. `read` makes a frame with the columns text, label and perhaps pair."""

    metric: str
    read: Callable[[Path], pandas.DataFrame] | None = None
    glue: str = ""
    kind: str = "auto"


def table(path: str, text: str, label: str, pair: str | None = None, clean=None):
    """A reader of a CSV file as Crowdflower publishes them; `clean` maps a label to another, or to None to drop it."""

    def read(root: Path) -> pandas.DataFrame:
        raw = pandas.read_csv(root / path, encoding="latin-1")
        names = {next(name for name in raw if name.startswith(text)): "text"}
        names[next(name for name in raw if name.startswith(label))] = "label"
        if pair is not None:
            names[pair] = "pair"
        return tidy(raw[list(names)].rename(columns=names), clean)

    return read


def lines(path: str):
    """A reader of JSON lines with premise, hypothesis and label."""

    def read(root: Path) -> pandas.DataFrame:
        raw = pandas.read_json(root / path, lines=True)
        return tidy(raw.rename(columns={"premise": "text", "hypothesis": "pair"})[["text", "pair", "label"]])

    return read


def newsgroups(root: Path) -> pandas.DataFrame:
    return tidy(pandas.read_parquet(root / "houlsby17/20_newsgroups/train.parquet")[["text", "label"]])


def sms(root: Path) -> pandas.DataFrame:
    path = root / "houlsby17/sms_spam_collection/SMSSpamCollection"
    return tidy(pandas.read_csv(path, sep="\t", header=None, names=["label", "text"], quoting=3))


def tidy(frame: pandas.DataFrame, clean=None) -> pandas.DataFrame:
    """Rows that have everything, each text once, in the order of the file."""
    frame = frame.dropna().copy()
    if clean is not None:
        frame["label"] = frame["label"].map(clean)
    texts = [name for name in frame if name != "label"]
    for name in texts:
        frame[name] = frame[name].astype(str).str.strip()
    frame = frame[(frame[texts] != "").all(axis=1)]
    return frame.dropna().drop_duplicates(texts).reset_index(drop=True)


TASKS = {
    "cola": Entry("matthews", glue="cola"),
    "sst2": Entry("accuracy", glue="sst2"),
    "mrpc": Entry("f1", glue="mrpc"),
    "stsb": Entry("spearman", glue="stsb"),
    "rte": Entry("accuracy", glue="rte"),
    "wnli": Entry("accuracy", glue="wnli"),
    "mnli": Entry("accuracy", lines("MNLI/train_subset_9888.jsonl")),
    "cb": Entry("macro_f1", lines("CB/train.jsonl")),
    "airline": Entry("macro_f1", table(CROWD + "airline/Tweets.csv", "text", "airline_sentiment")),
    "disasters": Entry(
        "accuracy",
        table(
            CROWD + "disasters/socialmedia-disaster-tweets-DFE.csv",
            "text",
            "choose_one",
            clean=lambda label: None if label == "Can't Decide" else label,
        ),
    ),
    "emotion": Entry("macro_f1", table(CROWD + "emotion/text_emotion.csv", "content", "sentiment")),
    "global-warming": Entry(
        "macro_f1",
        table(
            CROWD + "global_warming/1377884570_tweet_global_warming.csv",
            "tweet",
            "existence",
            clean=lambda label: "yes" if label.startswith("Y") else "no",
        ),
    ),
    "political-bias": Entry("macro_f1", table(CROWD + "political/political_media.csv", "text", "bias")),
    "political-message": Entry("macro_f1", table(CROWD + "political/political_media.csv", "text", "message")),
    "stance": Entry(
        "macro_f1",
        table(
            CROWD + "progressive/progressive-tweet-sentiment.csv",
            "tweet",
            "q1_",
            "target",
            clean=lambda label: None if label.startswith("NEUTRAL") else label.partition(":")[0].lower(),
        ),
    ),
    "economy": Entry(
        "spearman",
        table(CROWD + "us_economic_performance/us-economic-newspaper.csv", "text", "positivity"),
        kind="regress",
    ),
    "sms-spam": Entry("f1", sms),
    "newsgroups": Entry("macro_f1", newsgroups),
}


def read_task(name: str, root: Path, *, num_train: int, num_dev: int, dev_share: float = 0.2) -> Task:
    """A task with at most so many training and dev rows; the same rows every time."""
    entry = TASKS[name]
    config = DataConfig(metric=entry.metric, kind=entry.kind, limit=num_train, dev_share=dev_share)
    if entry.glue:
        task = load_task(dataclasses.replace(config, source=f"glue/{entry.glue}", root=str(root)), name)
    else:
        assert entry.read is not None
        frame = entry.read(root)
        pair = "pair" if "pair" in frame else None
        task = make_task(frame, name, dataclasses.replace(config, text="text", pair=pair, label="label"))
    if num_dev >= len(task.dev):
        return task
    chosen = np.sort(np.random.default_rng(0).permutation(len(task.dev))[:num_dev])
    digests = {key: f"{getattr(task, key)}/{num_dev}" for key in ("digest", "dev_digest")}
    return dataclasses.replace(task, dev=task.dev.take(chosen), **digests)
