"""The settings of a run: one frozen tree, read and written as TOML, overridden with `--set train.lr=3e-4`.

Config holds values, never import paths or devices. Defaults live here and nowhere else. A run's id is the hash of the
resolved `method` and `train` settings, the data digest and the backbone fingerprint; where the data lay (`data`) is
not part of it, since the digest covers what was read. How trees are read and written is in `trees.py`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from inlay.errors import BadConfig
from inlay.settings.trees import assign, from_tree, read_tree

_SAME = object()


def setting(
    default: Any, text: str, choices: Iterable[str] = (), *, is_later: bool = False, before: Any = _SAME
) -> Any:
    """A config field with the line `--help` prints for it, and the values it may take.

    One that `is_later` came when runs had ids already: left open, it is no part of them, so that they stay. `before` is
    the value that all runs had until then, where that is not the default: with it, too, ids stay.
    """
    known = {"help": text, "choices": tuple(choices), "is_later": is_later}
    return field(default=default, metadata={**known, "before": default if before is _SAME else before})


_EPOCHS = 10


@dataclass(frozen=True)
class MethodConfig:
    """Which parameters a task adds to the backbone. What is `auto`, None or empty is left to the method."""

    name: str = setting(
        "houlsby",
        "method: houlsby, mahabadi, pfeiffer, parallel, lora, dora, ia3, bitfit, pal, norms, head, full, top, "
        "pal-full; of several tasks: hyperformer, hyperformer++, mahabadi-multi, full-multi, pal-published",
    )
    size: int | None = setting(None, "bottleneck size m (64), rank r of LoRA (8)")
    init_std: float = setting(1e-2, "standard deviation of the truncated normal the adapters start from")
    activation: str = setting("auto", "auto (the method's own), gelu (tanh form), gelu-exact, relu, tanh, swish")
    norms: str = setting("auto", "layer norms trained", choices=("auto", "all", "encoder", "none"))
    places: tuple[str, ...] = setting((), "sublayers adapted: attention, feedforward, or both")
    layers: str = setting("auto", "layers adapted: all, 6: (from the seventh on), -3: (the last three), 0,2,5")
    sharing: str = setting("none", "adapters that are one: none, within-layer, every-3 (any number of layers), all")
    depth: int = setting(1, "layers of the bottleneck: each beyond the first is another m × m")
    inner_norm: str = setting(
        "auto",
        "norm inside the adapter: none, layer or batch (before its activation), output (of what it adds), alone (of "
        "what it reads, and nothing else)",
        choices=("auto", "none", "layer", "batch", "output", "alone"),
    )
    form: str = setting(
        "auto",
        "sequential (reads a sublayer's output) or parallel (its input)",
        choices=("auto", "sequential", "parallel"),
    )
    combine: str = setting("add", "add: x + f(x); multiply: x·(1 + f(x))", choices=("add", "multiply"))
    scale: float | None = setting(None, "factor of the update: 4 for parallel, 1 otherwise")
    alpha: float | None = setting(None, "LoRA's alpha: the factor is alpha / r")
    linears: tuple[str, ...] = setting((), "linear layers that LoRA or IA3 change: query, key, value, project, …")
    task_size: int | None = setting(
        None, "width of a task's embedding, which a hypernetwork reads (64; hyperformer 512)", is_later=True
    )
    projector: int | None = setting(
        None,
        "hidden width of a hypernetwork's projector (128); 0: embeddings go straight into its heads",
        is_later=True,
    )
    writes: str = setting(
        "both",
        "what a hypernetwork writes: adapter blocks, the norms behind them, or both",
        choices=("both", "blocks", "norms"),
        is_later=True,
    )

    def __post_init__(self) -> None:
        _require(self.task_size is None or self.task_size >= 1, "method.task_size", self.task_size, "at least 1")
        _require(self.projector is None or self.projector >= 0, "method.projector", self.projector, "at least 0")
        _require(self.size is None or 0 < self.size <= 8192, "method.size", self.size, "a whole number from 1 to 8192")
        _require(0 < self.init_std <= 10, "method.init_std", self.init_std, "a number above 0, at most 10")
        _require(1 <= self.depth <= 8, "method.depth", self.depth, "a whole number from 1 to 8")
        for name in ("scale", "alpha"):
            value = getattr(self, name)
            fits = value is None or (math.isfinite(value) and value != 0)
            _require(fits, f"method.{name}", value, "a number that is not 0")
        for name in ("places", "linears"):  # a manifest's JSON has lists
            object.__setattr__(self, name, tuple(getattr(self, name)))
        _check_choices(self, "method")


@dataclass(frozen=True)
class TrainConfig:
    """How a run is trained. All of it belongs to the run, not to the cohort it is trained in."""

    lr: float | None = setting(
        None,
        "peak learning rate; default: the method's own, such as 5e-4 for houlsby, 1e-3 for mahabadi, 1e-4 for "
        "hyperformer, 5e-5 for full; on T5 3e-4 for the last three; 0.03 for hyperformer with joint.trained task",
    )
    epochs: int | None = setting(
        None, "passes over the training rows at most; default: 10, or by the number of rows where the rate is open too"
    )
    batch_size: int = setting(32, "rows per step")
    steps: str = setting(
        "epochs",
        "steps in all: epochs (each to its end), or bert (rows / batch_size · epochs rounded down, as the original)",
        choices=("epochs", "bert"),
    )
    bucket: int | None = setting(
        None, "batches that share their rows by length, to save padding; default: 1 (none), 4 where rows are padded"
    )
    max_length: int | None = setting(None, "tokens a text (or pair) is cut to (128); for span a window's width (384)")
    stride: int = setting(128, "tokens that neighbouring windows of a long context share (span)")
    seed: int = setting(0, "seed of the initial values and the data order")
    optimizer: str = setting(
        "adamw", "adamw, or bert-adam (no bias correction, as Houlsby et al.)", choices=("adamw", "bert-adam")
    )
    schedule: str = setting(
        "linear",
        "linear (warm-up, then decay from the peak) or bert (the original's: decay overridden by warm-up)",
        choices=("linear", "bert", "constant"),
    )
    warmup: float = setting(0.1, "share of the steps the learning rate rises over")
    weight_decay: float = setting(0.01, "decoupled weight decay on matrices; none on biases and layer norms")
    clip_norm: float = setting(1.0, "largest gradient norm of the run, over its trained tensors; 0 switches it off")
    dropout: float | None = setting(None, "dropout in the backbone; default: the backbone's own")
    attention_dropout: float = setting(0.0, "dropout on attention's weights; 0, the default, is the fast path")
    head_dropout: float = setting(0.1, "dropout on the pooled vector the head reads")
    pooling: str = setting(
        "auto",
        "auto (suits the backbone), cls, pooler, mean; text where it writes",
        choices=("auto", "cls", "pooler", "mean", "text"),
    )
    hidden: str = setting(
        "none",
        "layer before the head: none, tanh (width × width, fresh), pooler (the backbone's own, trained)",
        choices=("none", "tanh", "pooler"),
    )
    features: str = setting(
        "last", "what pooling reads: last (layer), or mix (a learned mix of all layers)", choices=("last", "mix")
    )
    patience: int = setting(0, "stop after this many epochs without a better dev score; 0: train to the end")
    class_weights: str = setting("none", "none, or balanced (rare classes count more)", choices=("none", "balanced"))
    label_smoothing: float | None = setting(
        None, "share of every target that is spread over the vocabulary, where answers are written (0.1)", is_later=True
    )
    beams: int | None = setting(
        None, "texts pursued at a time while a free text is written (1: the likeliest token after each)", is_later=True
    )
    max_answer: int | None = setting(None, "tokens of a written answer at most (64)", is_later=True)
    prompt: str | None = setting(
        None,
        "what stands before every text, where answers are written; default: nothing, or the task's name and a colon "
        "(that of the task it is like) where nothing else tells the tasks of a run apart (full-multi)",
        is_later=True,
    )
    thresholds: str = setting(
        "auto",
        "where sets of labels, and two classes, are cut: none (at one half), or dev (where the metric is best on dev "
        "rows, if that gains beyond chance); auto: dev where the learning rate is left open",
        choices=("auto", "none", "dev"),
        is_later=True,
        before="none",
    )
    start: tuple[str, ...] = setting((), "start from a stored task (of several, from their mean) and its method")
    head_start: str = setting(
        "auto",
        "first weights of the head: probe (a linear model fitted to what the backbone gives of the training rows), "
        "fresh (random); auto: probe where the learning rate is left open, and answers are not written",
        choices=("auto", "probe", "fresh"),
        is_later=True,
        before="fresh",
    )
    contrast: int | None = setting(
        None,
        "steps before all others that pull texts with one label together and push the rest apart (few rows); 0: none",
        is_later=True,
        before=0,
    )

    blend: float | None = setting(
        None,
        "share of what a contrastive start changed that is kept; default: 0.6, less where the probe does badly; 1: all",
        is_later=True,
    )
    keep: str = setting(
        "auto",
        "which epoch is kept: best (by dev score), or late (the last one whose score is within chance of the best); "
        "auto: late where the learning rate is left open and dev rows are few",
        choices=("auto", "best", "late"),
        is_later=True,
        before="best",
    )

    @property
    def num_epochs(self) -> int:
        """Passes over the training rows at most, where a recipe says nothing else."""
        return _EPOCHS if self.epochs is None else self.epochs

    def __post_init__(self) -> None:
        _require(self.lr is None or 0 < self.lr < 10, "train.lr", self.lr, "a number above 0, below 10")
        _require(self.bucket is None or self.bucket >= 1, "train.bucket", self.bucket, "at least 1")
        _require(self.batch_size >= 1, "train.batch_size", self.batch_size, "a whole number of at least 1")
        fewest = 0 if self.head_start == "probe" else 1  # a probe is trained before the first step
        _require(self.num_epochs >= fewest, "train.epochs", self.epochs, f"a whole number of at least {fewest}")
        fits = self.blend is None or 0 < self.blend <= 1
        _require(fits, "train.blend", self.blend, "above 0, at most 1")
        fits = self.contrast is None or self.contrast >= 0
        _require(fits, "train.contrast", self.contrast, "a whole number of at least 0")
        fits = self.max_length is None or self.max_length >= 4
        _require(fits, "train.max_length", self.max_length, "a whole number of at least 4")
        _require(self.stride >= 0, "train.stride", self.stride, "a whole number of at least 0")
        _require(self.patience >= 0, "train.patience", self.patience, "a whole number of at least 0")
        for name in ("warmup", "head_dropout"):
            _require(0 <= getattr(self, name) < 1, f"train.{name}", getattr(self, name), "at least 0 and below 1")
        _require(
            0 <= self.attention_dropout < 1, "train.attention_dropout", self.attention_dropout, "at least 0, below 1"
        )
        _require(self.dropout is None or 0 <= self.dropout < 1, "train.dropout", self.dropout, "at least 0, below 1")
        for name in ("beams", "max_answer"):
            value = getattr(self, name)
            _require(value is None or value >= 1, f"train.{name}", value, "a whole number of at least 1")
        fits = self.label_smoothing is None or 0 <= self.label_smoothing < 1
        _require(fits, "train.label_smoothing", self.label_smoothing, "at least 0, below 1")
        for name in ("weight_decay", "clip_norm"):
            _require(getattr(self, name) >= 0, f"train.{name}", getattr(self, name), "a number of at least 0")
        _check_choices(self, "train")


@dataclass(frozen=True)
class JointConfig:
    """How several tasks are trained as one run. A run of one task has nothing of it."""

    sampling: str = setting(
        "temperature",
        "how tasks are drawn: temperature (p ∝ rows^(1/T)), uniform, annealed (p ∝ rows^a, a from 1 to 0.2, as PALs)",
        choices=("temperature", "uniform", "annealed"),
    )
    temperature: float = setting(10.0, "T of p ∝ rows^(1/T); 1 draws tasks by their rows")
    batches: str = setting(
        "homogeneous", "rows of a batch: homogeneous (all of one task), or mixed", choices=("homogeneous", "mixed")
    )
    weights: tuple[str, ...] = setting((), "what a task's loss counts, if not 1: cola=2,sst2=0.5")
    steps: int | None = setting(
        None, "steps in all, cut into `train.epochs` equal parts; default: as many as rows need"
    )
    trained: str = setting(
        "all",
        "all, or task: nothing but what a task has of its own, all else as it started; the default lr is then another",
        choices=("all", "task"),
    )
    start: str | None = setting(
        None, "run (of several tasks; `--from-run` takes a task of it too) whose shared parameters this one starts from"
    )
    like: tuple[str, ...] = setting((), "tasks whose own parameters start as those of one of that run: new=old")

    def __post_init__(self) -> None:
        fits = math.isfinite(self.temperature) and self.temperature > 0
        _require(fits, "joint.temperature", self.temperature, "a finite number above 0")
        _require(self.steps is None or self.steps >= 1, "joint.steps", self.steps, "a whole number of at least 1")
        _check_choices(self, "joint")

    def weight_of(self, task: str) -> float:
        """What the loss of a task counts."""
        return self._weights().get(task, 1.0)

    def resemblances(self) -> dict[str, str]:
        """New task -> the one of the run it starts from whose own parameters it begins with."""
        found = _read_pairs("joint.like", self.like)
        for new, old in found.items():
            _require(
                bool(new and old),
                "joint.like",
                f"{new}={old}" if old else new,
                "a new task and an old one: `--like new=old`",
            )
        return found

    def check_tasks(self, names: Iterable[str]) -> None:
        """Refuse what is said of tasks that are not there, and what has no sense without a run to start from."""
        known = list(names)
        for key, tasks in (("joint.weights", self._weights()), ("joint.like", self.resemblances())):
            for name in tasks:
                if name not in known:
                    raise BadConfig(
                        f"`{key}` names `{name}`, which is no task of the run", f"its tasks: {', '.join(known)}"
                    )
        for key, value in (("like", ", ".join(self.like)), ("trained", self.trained)):
            if self.start is None and value not in ("", "all"):
                raise BadConfig(
                    f"`joint.{key}` is `{value}`, but there is no run to start from",
                    "name one that `inlay multitask` trained: `--from-run RUN`",
                )

    def _weights(self) -> dict[str, float]:
        found = {}
        for name, number in _read_pairs("joint.weights", self.weights).items():
            try:
                found[name] = float(number)
            except ValueError:
                given = f": `{number}`" if number else ""
                raise BadConfig(
                    f"`joint.weights` has no number for `{name}`{given}", "write `--set joint.weights=cola=2,sst2=0.5`"
                ) from None
            fits = math.isfinite(found[name]) and found[name] > 0
            _require(fits, "joint.weights", f"{name}={number}", "a finite number above 0 for each task")
        return found


@dataclass(frozen=True)
class DataConfig:
    """Where a task's rows are and how they are read. The digest of what was read counts, not these settings; but for
    `pairs`, which is no part of it and names a run where it is `towers`."""

    source: str = setting("", "file, glue/NAME, extra/NAME, or hub:NAME")
    text: str | None = setting(None, "column of the text; default: recognised by name")
    pair: str | None = setting(None, "column of the second text")
    pairs: str = setting(
        "auto",
        "how pairs are read: joined (as one text), towers (each text by itself: u, v, |u-v|, u*v and their cosine), or "
        "auto (as the task it starts from, else joined)",
        choices=("auto", "joined", "towers"),
    )
    label: str | None = setting(None, "column of the label")
    kind: str = setting(
        "auto",
        "classify, multilabel, regress, tag (words), span (answers in a context), text (written); auto infers it",
        choices=("auto", "classify", "multilabel", "regress", "tag", "span", "text"),
    )
    labels: tuple[str, ...] = setting((), "label names in order; default: those found, sorted")
    merge_labels: bool = setting(
        False,
        "read labels that differ in case, blanks or punctuation at the end as one, spelled as most rows have it",
        is_later=True,
    )
    answers: tuple[str, ...] = setting(
        (), "what stands for a label where answers are written, if not its name: entailment=0,neutral=1 (classify)"
    )
    metric: str = setting("auto", "metric that picks the best epoch; auto suits the kind")
    dev: str | None = setting(None, "file of dev rows")
    test: str | None = setting(None, "file of test rows")
    split: str | None = setting(None, "column that says train, dev or test")
    dev_share: float = setting(0.1, "share split off for dev where none is given")
    test_share: float = setting(0.0, "share split off for test where none is given")
    test_from: str = setting(
        "train",
        "rows that the share for test is split off: train, or dev, which must be given",
        choices=("train", "dev"),
    )
    split_seed: int = setting(0, "seed of the split")
    on_bad_row: str = setting("refuse", "what a bad row does", choices=("refuse", "skip"))
    limit: int | None = setting(None, "use at most this many training rows")
    sample: int | None = setting(None, "use at most this many training rows, drawn by `data.sample_seed`")
    sample_seed: int = setting(0, "seed of the sample")
    most_dev: int | None = setting(None, "use at most this many dev rows, drawn by chance")
    most_test: int | None = setting(None, "use at most this many test rows, drawn by chance")
    encoding: str | None = setting(None, "text encoding; default: detected")
    root: str | None = setting(None, "folder of the GLUE and extra sets; default: $INLAY_DATA")

    def __post_init__(self) -> None:
        for name in ("dev_share", "test_share"):
            _require(0 <= getattr(self, name) < 1, f"data.{name}", getattr(self, name), "at least 0 and below 1")
        _require(self.dev_share + self.test_share < 1, "data.test_share", self.test_share, "below 1 with dev_share")
        for name in ("limit", "sample", "most_dev", "most_test"):
            value = getattr(self, name)
            _require(value is None or value >= 1, f"data.{name}", value, "a whole number of at least 1")
        _check_choices(self, "data")


@dataclass(frozen=True)
class RunConfig:
    """Everything that decides a run, besides the data it reads and the backbone it stands on."""

    task: str = setting("task", "name of the task")
    backbone: str = setting("minilm", "built-in name, local folder or hub name")
    method: MethodConfig = field(default_factory=MethodConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    data: DataConfig = field(default_factory=DataConfig)
    joint: JointConfig = field(default_factory=JointConfig)

    def identify(self, data_digest: str, fingerprint: str) -> str:
        """The run's id: 16 hex digits over the resolved settings, the data and the backbone. No paths, no device."""
        return digest(
            {
                "method": settled(self.method),
                "train": settled(self.train),
                "data": data_digest,
                "backbone": fingerprint,
                # Of `data`, which is where rows lie, the one setting that says how they are read; it came later.
                **({"pairs": self.data.pairs} if self.data.pairs == "towers" else {}),
            }
        )[:16]

    def override(self, assignments: Iterable[str]) -> Self:
        """A copy with `section.key=value` assignments applied, as `--set` gives them."""
        tree = dataclasses.asdict(self)
        assign(tree, assignments)
        return from_tree(type(self), tree)


def settled(config: Any) -> dict[str, Any]:
    """The settings that name a run: all but those that came later and are left open."""
    settings = dataclasses.asdict(config)
    if isinstance(config, TrainConfig):  # left open, ids have what it always was: where it counts it is resolved
        settings["epochs"] = config.num_epochs
    return leave_out_later(type(config), settings)


def leave_out_later(section: type[Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a section without those that came later and are as all runs had them before, or left open."""
    items = {item.name: item for item in dataclasses.fields(section) if item.metadata.get("is_later")}
    later = {name: (item.default, item.metadata["before"]) for name, item in items.items()}
    return {name: value for name, value in settings.items() if name not in later or value not in later[name]}


def digest(value: Any) -> str:
    """sha256 of a value's canonical JSON."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def read_toml(path: Path) -> RunConfig:
    """The run config of a TOML file; an unknown key or a wrong type is a `BadConfig` that names it."""
    return from_tree(RunConfig, read_tree(path))


def overlay(config: RunConfig, tree: Mapping[str, Any]) -> RunConfig:
    """A copy of `config` with the settings of a nested mapping put over it, checked as those of a file are."""
    merged = dataclasses.asdict(config)
    for key, value in tree.items():
        is_section = isinstance(merged.get(key), dict) and isinstance(value, Mapping)
        merged[key] = {**merged[key], **value} if is_section else value
    return from_tree(RunConfig, merged)


def _read_pairs(key: str, items: Iterable[str]) -> dict[str, str]:
    """Task -> what is said of it, from items such as `cola=2`; refuses a task that is named twice."""
    found: dict[str, str] = {}
    for item in items:
        name, _, value = (part.strip() for part in item.partition("="))
        if name in found:
            raise BadConfig(
                f"`{key}` names `{name}` twice: `{name}={found[name]}` and `{item}`", "name every task once"
            )
        found[name] = value
    return found


def _require(holds: bool, name: str, value: Any, wanted: str) -> None:
    if not holds:
        raise BadConfig(f"`{name}` is `{value}`", f"it must be {wanted}")


def _check_choices(config: Any, section: str) -> None:
    for item in dataclasses.fields(config):
        choices, value = item.metadata.get("choices"), getattr(config, item.name)
        if choices and value not in choices:
            raise BadConfig(f"`{section}.{item.name}` is `{value}`", f"it must be one of: {', '.join(choices)}")
