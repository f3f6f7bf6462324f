"""The settings of a run as keyword arguments, which editors can complete: all fields of the settings' dataclasses.

A test holds names, types and choices equal to those of the dataclasses, where each field says what it is for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict


class DataSettings(TypedDict, total=False):
    """The fields of `DataConfig`."""

    format: Literal["auto", "csv", "tsv", "txt", "jsonl", "json", "conll", "parquet", "xlsx"]
    header: bool | None
    text: str | None
    pair: str | None
    pairs: Literal["auto", "joined", "towers"]
    label: str | None
    kind: Literal["auto", "classify", "multilabel", "regress", "ordinal", "tag", "span", "text"]
    labels: Sequence[str]
    merge_labels: bool
    answers: Sequence[str]
    metric: str
    split: str | None
    dev_share: float
    test_share: float
    test_from: Literal["train", "dev"]
    split_seed: int
    on_bad_row: Literal["refuse", "skip"]
    limit: int | None
    sample: int | None
    sample_seed: int
    most_dev: int | None
    most_test: int | None
    encoding: str | None
    root: str | None


class MethodSettings(TypedDict, total=False):
    """The fields of `MethodConfig`."""

    method: str
    size: int | None
    init_std: float
    activation: str
    norms: Literal["auto", "all", "encoder", "none"]
    places: Sequence[str]
    layers: str
    sharing: str
    depth: int
    inner_norm: Literal["auto", "none", "layer", "batch", "output", "alone"]
    form: Literal["auto", "sequential", "parallel"]
    combine: Literal["add", "multiply"]
    scale: float | None
    alpha: float | None
    linears: Sequence[str]
    task_size: int | None
    projector: int | None
    writes: Literal["both", "blocks", "norms"]


class _CommonTrainingSettings(TypedDict, total=False):
    """The fields of `TrainConfig` that runs of one task and of several have alike."""

    lr: float | None
    epochs: int | None
    batch_size: int
    bucket: int | None
    max_length: int | None
    stride: int
    seed: int
    optimizer: Literal["adamw", "bert-adam"]
    schedule: Literal["linear", "bert", "constant"]
    warmup: float
    weight_decay: float
    clip_norm: float
    dropout: float | None
    attention_dropout: float
    head_dropout: float
    pooling: Literal["auto", "cls", "pooler", "mean", "text"]
    hidden: Literal["none", "tanh", "pooler"]
    features: Literal["last", "mix"]
    patience: int | None
    class_weights: Literal["none", "balanced"]
    label_smoothing: float | None
    beams: int | None
    max_answer: int | None
    prompt: str | None
    thresholds: Literal["auto", "none", "dev"]
    head_start: Literal["auto", "probe", "fresh"]
    contrast: int | None
    contrast_folds: int | None
    blend: float | None
    keep: Literal["auto", "best", "loss", "late"]


class TrainingSettings(_CommonTrainingSettings, total=False):
    """The fields of `TrainConfig`."""

    steps: Literal["epochs", "bert"]
    start: Sequence[str]


class JointSettings(TypedDict, total=False):
    """The fields of `JointConfig`."""

    sampling: Literal["temperature", "uniform", "annealed"]
    temperature: float
    batches: Literal["homogeneous", "mixed"]
    weights: str | Sequence[str] | Mapping[str, float]
    steps: int | None
    trained: Literal["all", "task"]
    start: str | None
    like: str | Sequence[str] | Mapping[str, str]


class RunSettings(MethodSettings, TrainingSettings, total=False):
    """The settings of a run but those of its data."""


class JointRunSettings(JointSettings, MethodSettings, _CommonTrainingSettings, total=False):
    """The settings of a run of several tasks but those of their data."""


class TaskSettings(DataSettings, RunSettings, total=False):
    """All settings of a run of one task."""
