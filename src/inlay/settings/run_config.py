"""The settings of a run: one frozen tree, read and written as TOML, overridden with `--set train.lr=3e-4`.

Config holds values, never import paths or devices. Defaults live here (those of several tasks as one run in
`joint_config.py`) and nowhere else. A run's id is the hash of the resolved `method` and `train` settings, the data
digest and the backbone fingerprint. The settings of the data are not part of it, since the digest covers the rows.
`trees.py` reads and writes trees of settings.
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

from inlay.settings.fields import check_at_least, check_below_one, check_values, require, setting
from inlay.settings.joint_config import JointConfig
from inlay.settings.trees import assign, from_tree, read_tree

_EPOCHS = 10


@dataclass(frozen=True)
class MethodConfig:
    """The parameters that a task adds to the backbone. The method chooses settings that are `auto`, None or empty.

    >>> inlay.MethodConfig("lora", size=8).size
    8
    """

    name: str = setting(
        "houlsby",
        "method: houlsby, mahabadi, pfeiffer, parallel, lora, dora, ia3, bitfit, pal, norms, head, full, top, "
        "pal-full; for several tasks as one run: hyperformer, hyperformer++, mahabadi-multi, full-multi, pal-published",
    )
    size: int | None = setting(None, "bottleneck size m (64), or rank r of LoRA (8)")
    init_std: float = setting(1e-2, "standard deviation of the truncated normal that adapters are initialised from")
    activation: str = setting("auto", "auto (the method's own), gelu (tanh form), gelu-exact, relu, tanh, swish")
    norms: str = setting("auto", "which layer norms are trained", choices=("auto", "all", "encoder", "none"))
    places: tuple[str, ...] = setting((), "which sublayers are adapted: attention, feedforward, or both")
    layers: str = setting(
        "auto", "which layers are adapted: all, 6: (from the seventh on), -3: (the last three), 0,2,5"
    )
    sharing: str = setting(
        "none", "which adapters share their weights: none, within-layer, every-3 (any number of layers), all"
    )
    depth: int = setting(1, "layers of the bottleneck: each one after the first adds an m × m matrix")
    inner_norm: str = setting(
        "auto",
        "norm inside the adapter: none, layer or batch (before its activation), output (of its output), alone (of its "
        "input, in place of the bottleneck)",
        choices=("auto", "none", "layer", "batch", "output", "alone"),
    )
    form: str = setting(
        "auto",
        "sequential (reads a sublayer's output) or parallel (its input)",
        choices=("auto", "sequential", "parallel"),
    )
    combine: str = setting("add", "add: x + f(x); multiply: x·(1 + f(x))", choices=("add", "multiply"))
    scale: float | None = setting(None, "factor of the update; default: 4 for parallel, 1 otherwise")
    alpha: float | None = setting(None, "LoRA's alpha: the factor of the update is alpha / r")
    linears: tuple[str, ...] = setting((), "linear layers that LoRA or IA3 change: query, key, value, project, …")
    task_size: int | None = setting(
        None, "width of the task embedding that a hypernetwork reads (64; hyperformer 512)", is_later=True
    )
    projector: int | None = setting(
        None,
        "hidden width of a hypernetwork's projector (128); 0: no projector, its heads read the embeddings directly",
        is_later=True,
    )
    writes: str = setting(
        "both",
        "what a hypernetwork generates: adapter blocks, the norms after them, or both",
        choices=("both", "blocks", "norms"),
        is_later=True,
    )

    def __post_init__(self) -> None:
        check_at_least(self, "method", 1, "task_size")
        check_at_least(self, "method", 0, "projector")
        require(self.size is None or 0 < self.size <= 8192, "method.size", self.size, "a whole number from 1 to 8192")
        require(0 < self.init_std <= 10, "method.init_std", self.init_std, "a number above 0, at most 10")
        require(1 <= self.depth <= 8, "method.depth", self.depth, "a whole number from 1 to 8")
        for name in ("scale", "alpha"):
            value = getattr(self, name)
            fits = value is None or (math.isfinite(value) and value != 0)
            require(fits, f"method.{name}", value, "a number that is not 0")
        for name in ("places", "linears"):  # a manifest's JSON has lists
            object.__setattr__(self, name, tuple(getattr(self, name)))
        check_values(self, "method")


@dataclass(frozen=True)
class TrainConfig:
    """The settings of a run's training. All of them belong to the run, not to the cohort it is trained in.

    >>> inlay.TrainConfig(lr=5e-4, epochs=3).batch_size
    32
    """

    lr: float | None = setting(
        None,
        "peak learning rate; default: the method's own, such as 5e-4 for houlsby, 1e-4 for hyperformer, 5e-5 for "
        "full (on T5 3e-4 for the last two)",
    )
    epochs: int | None = setting(
        None,
        "most passes over the training rows; default: 10, or by the number of rows if `train.lr` is not set either",
    )
    batch_size: int = setting(32, "rows per step")
    steps: str = setting(
        "epochs",
        "how steps are counted: epochs (each to its end), or bert (rows / batch_size · epochs, rounded down)",
        choices=("epochs", "bert"),
    )
    bucket: int | None = setting(
        None,
        "number of batches whose rows are sorted by length together, to save padding; default: 1 (no sorting), 4 "
        "where rows are padded",
    )
    max_length: int | None = setting(
        None, "tokens a text (or pair) is cut to (128); for span the width of a window (384)"
    )
    stride: int = setting(128, "tokens that neighbouring windows of a long context share (span tasks)")
    seed: int = setting(0, "seed of the initial values and the data order")
    optimizer: str = setting(
        "adamw", "adamw, or bert-adam (no bias correction, as Houlsby et al.)", choices=("adamw", "bert-adam")
    )
    schedule: str = setting(
        "linear",
        "linear (warm-up, then decay from the peak), bert (decay from the first step, overridden by warm-up), constant",
        choices=("linear", "bert", "constant"),
    )
    warmup: float = setting(0.1, "share of the steps over which the learning rate rises")
    weight_decay: float = setting(0.01, "decoupled weight decay on matrices; none on biases and layer norms")
    clip_norm: float = setting(
        1.0, "largest gradient norm of the run, over all its trained tensors; 0 switches clipping off"
    )
    dropout: float | None = setting(None, "dropout in the backbone; default: the backbone's own")
    attention_dropout: float = setting(0.0, "dropout on attention weights; attention is fastest without it")
    head_dropout: float = setting(0.1, "dropout on the pooled vector the head reads")
    pooling: str = setting(
        "auto",
        "how a row's tokens become one vector: auto (as suits the backbone), cls, pooler, mean; text on a "
        "text-to-text backbone",
        choices=("auto", "cls", "pooler", "mean", "text"),
    )
    hidden: str = setting(
        "none",
        "layer before the head: none, tanh (width × width, fresh), pooler (the backbone's own, trained)",
        choices=("none", "tanh", "pooler"),
    )
    features: str = setting(
        "last", "what pooling reads: last (the last layer), or mix (a learned mix of all)", choices=("last", "mix")
    )
    patience: int | None = setting(
        None,
        "stop after this many epochs without a better dev score (with train.keep `loss`: without a smaller dev loss); "
        "0: never stop early; default: 0, or by the recipe if neither `train.lr` nor `train.epochs` is set",
    )
    class_weights: str = setting(
        "none",
        "weights of the classes in the loss: none, or balanced (rare classes count more)",
        choices=("none", "balanced"),
    )
    label_smoothing: float | None = setting(
        None,
        "share of every target that is spread over the vocabulary, on a text-to-text backbone (0.1)",
        is_later=True,
    )
    beams: int | None = setting(
        None, "number of beams when a text is generated (1: greedy, the likeliest token each time)", is_later=True
    )
    max_answer: int | None = setting(None, "most tokens of a generated answer (64)", is_later=True)
    prompt: str | None = setting(
        None,
        "text put before every row on a text-to-text backbone; default: none, or, where nothing else tells a run's "
        "tasks apart (full-multi), the task's name and a colon (with `joint.like` the old task's name)",
        is_later=True,
    )
    thresholds: str = setting(
        "auto",
        "probability from which a label of a set, or the second of two classes, is given: none (one half), or dev "
        "(best for the metric on dev rows, if the gain is beyond chance); auto: dev if `train.lr` is not set",
        choices=("auto", "none", "dev"),
        is_later=True,
        before="none",
    )
    start: tuple[str, ...] = setting(
        (), "stored task to start from, with its method (or several tasks, whose mean is taken)"
    )
    head_start: str = setting(
        "auto",
        "first weights of the head: probe (a linear model fitted to the backbone's vectors of the training rows), or "
        "fresh (random); auto: probe if `train.lr` is not set, except on a text-to-text backbone",
        choices=("auto", "probe", "fresh"),
        is_later=True,
        before="fresh",
    )
    contrast: int | None = setting(
        None,
        "number of contrastive steps before all others, which pull texts of one label together and push others apart; "
        "default: some if rows are few; 0: none",
        is_later=True,
        before=0,
    )
    contrast_folds: int | None = setting(
        None,
        "folds that judge contrastive steps: without each of them the steps are taken once more, and the linear probe "
        "stays where it does better on the rows left out; default: 3 from 101 to 500 rows; 0: none",
        is_later=True,
        before=0,
    )
    blend: float | None = setting(
        None,
        "share of the contrastive steps' change that is kept; default: 0.6, less if the probe does badly; 1: all of it",
        is_later=True,
    )
    keep: str = setting(
        "auto",
        "which epoch is kept: best (highest dev score), loss (lowest dev loss), or late (the last whose score is "
        "within chance of the best); auto: best, but if `train.lr` is not set mostly loss where the head began as a "
        "probe, and late where it did not and dev rows are few",
        choices=("auto", "best", "loss", "late"),
        is_later=True,
        before="best",
    )

    @property
    def num_epochs(self) -> int:
        """Return the number of passes over the training rows at most, where a recipe says nothing else."""
        return _EPOCHS if self.epochs is None else self.epochs

    def __post_init__(self) -> None:
        require(self.lr is None or 0 < self.lr < 10, "train.lr", self.lr, "a number above 0, below 10")
        fewest = 0 if self.head_start == "probe" else 1  # a probe is trained before the first step
        require(self.num_epochs >= fewest, "train.epochs", self.epochs, f"a whole number of at least {fewest}")
        require(self.blend is None or 0 < self.blend <= 1, "train.blend", self.blend, "above 0, at most 1")
        check_at_least(self, "train", 0, "contrast", "stride", "patience")
        require(self.contrast_folds != 1, "train.contrast_folds", self.contrast_folds, "0, or at least 2")
        check_at_least(self, "train", 0, "contrast_folds")
        check_at_least(self, "train", 1, "bucket", "batch_size", "beams", "max_answer")
        check_at_least(self, "train", 4, "max_length")
        check_at_least(self, "train", 0, "weight_decay", "clip_norm", kind="number")
        check_below_one(self, "train", "warmup", "head_dropout", "attention_dropout", "dropout", "label_smoothing")
        check_values(self, "train")


KIND_NAMES = ("classify", "multilabel", "regress", "ordinal", "tag", "span", "text")
"""The kinds of task, as `inlay.data.kinds.KINDS` has them; a test holds them equal."""
ONE_CELL_KINDS = ("classify", "multilabel", "regress", "ordinal", "text")
"""those whose label is one cell, which a person can write"""
ONE_LABEL_KINDS = ("classify",)
"""those whose cell is one of the labels themselves, to be counted as it stands"""


DATA_FORMATS = ("auto", "csv", "tsv", "txt", "jsonl", "json", "conll", "parquet", "xlsx")
"""The formats of data files, which their suffixes say too."""


@dataclass(frozen=True)
class DataConfig:
    """The place of a task's rows and the way they are read.

    A run's id has the digest of what was read, not these settings. The exception is `pairs`, which the digest does not
    cover: `towers` is part of the id.

    >>> inlay.DataConfig(source="mail.csv", text="body", label="folder").dev_share
    0.1
    """

    source: str = setting("", "file, glue/NAME, extra/NAME, or hub:NAME")
    format: str = setting(
        "auto",
        "format of the file; auto: by its suffix",
        choices=DATA_FORMATS,
    )
    header: bool | None = setting(None, "whether the first row names the columns; default: detected, with a note")
    text: str | None = setting(
        None, "column of the text, by name or number; several (title,body) are joined; default: recognised by name"
    )
    pair: str | None = setting(None, "column of the second text")
    pairs: str = setting(
        "auto",
        "how pairs are read: joined (as one text), towers (each text by itself: u, v, |u-v|, u*v and their cosine), or "
        "auto (like the task it starts from, else joined)",
        choices=("auto", "joined", "towers"),
    )
    label: str | None = setting(None, "column of the label, or one column of 0 and 1 for each label (a,b,c)")
    kind: str = setting(
        "auto",
        "kind of task: classify, multilabel, regress, ordinal (levels), tag (words), span (answers in a context), text "
        "(generated); auto infers it",
        choices=("auto", *KIND_NAMES),
    )
    labels: tuple[str, ...] = setting((), "label names in order; default: those found, sorted")
    merge_labels: bool = setting(
        False,
        "read labels that differ only in case, blanks or final punctuation as one, in the most frequent spelling",
        is_later=True,
    )
    answers: tuple[str, ...] = setting(
        (),
        "text that stands for a label on a text-to-text backbone, if not its name: entailment=0,neutral=1 (classify)",
    )
    metric: str = setting("auto", "metric that picks the best epoch; auto: the usual one for the kind of task")
    dev: str | None = setting(None, "file of dev rows")
    test: str | None = setting(None, "file of test rows")
    split: str | None = setting(None, "column that says train, dev or test")
    dev_share: float = setting(0.1, "share of the rows split off for dev if no dev rows are given")
    test_share: float = setting(0.0, "share of the rows split off for test if no test rows are given")
    test_from: str = setting(
        "train",
        "rows that `data.test_share` is split off from: train, or dev (which must be given)",
        choices=("train", "dev"),
    )
    split_seed: int = setting(0, "seed of the split")
    on_bad_row: str = setting("refuse", "what happens to a bad row", choices=("refuse", "skip"))
    limit: int | None = setting(None, "use at most this many training rows")
    sample: int | None = setting(None, "use at most this many training rows, drawn at random by `data.sample_seed`")
    sample_seed: int = setting(0, "seed of the sample")
    most_dev: int | None = setting(None, "use at most this many dev rows, drawn at random")
    most_test: int | None = setting(None, "use at most this many test rows, drawn at random")
    encoding: str | None = setting(None, "text encoding; default: detected")
    root: str | None = setting(None, "folder of the GLUE and extra sets; default: $INLAY_DATA")

    def __post_init__(self) -> None:
        check_below_one(self, "data", "dev_share", "test_share")
        require(self.dev_share + self.test_share < 1, "data.test_share", self.test_share, "below 1 with dev_share")
        check_at_least(self, "data", 1, "limit", "sample", "most_dev", "most_test")
        check_values(self, "data")


@dataclass(frozen=True)
class RunConfig:
    """The settings of a run. With the data it reads and the backbone it stands on, they decide the run.

    >>> inlay.RunConfig(train=inlay.TrainConfig(lr=1e-3)).override(["method.size=8"]).method.size
    8
    """

    task: str = setting("task", "name of the task")
    backbone: str = setting("minilm", "built-in name, local folder or hub name")
    method: MethodConfig = field(default_factory=MethodConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    data: DataConfig = field(default_factory=DataConfig)
    joint: JointConfig = field(default_factory=JointConfig)

    def identify(self, data_digest: str, fingerprint: str) -> str:
        """Return the run's id: 16 hex digits over the resolved settings, the data and the backbone."""
        return digest(
            {
                "method": settled(self.method),
                "train": settled(self.train),
                "data": data_digest,
                "backbone": fingerprint,
                # The only setting of `data` that is not covered by the digest. It was added after ids existed.
                **({"pairs": self.data.pairs} if self.data.pairs == "towers" else {}),
            }
        )[:16]

    def override(self, assignments: Iterable[str]) -> Self:
        """Return a copy with `section.key=value` assignments applied, as `--set` gives them."""
        tree = dataclasses.asdict(self)
        assign(tree, assignments)
        return from_tree(type(self), tree)


def settled(config: Any) -> dict[str, Any]:
    """Return the settings that are part of a run's id: all but those added later that are left open."""
    settings = dataclasses.asdict(config)
    if isinstance(config, TrainConfig):  # ids have always had numbers here; a recipe's are resolved before
        settings |= {"epochs": config.num_epochs, "patience": config.patience or 0}
    return leave_out_later(type(config), settings)


def leave_out_later(section: type[Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a section's settings without later ones at their default or earlier value."""
    items = {item.name: item for item in dataclasses.fields(section) if item.metadata.get("is_later")}
    later = {name: (item.default, item.metadata["before"]) for name, item in items.items()}
    return {name: value for name, value in settings.items() if name not in later or value not in later[name]}


def digest(value: Any) -> str:
    """Return the sha256 of a value's canonical JSON."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def read_toml(path: Path) -> RunConfig:
    """Read the run config of a TOML file; an unknown key or a wrong type is a `BadConfig` that names it."""
    return from_tree(RunConfig, read_tree(path))


def overlay(config: RunConfig, tree: Mapping[str, Any]) -> RunConfig:
    """Return a copy of `config` with the settings of a nested mapping laid over it, checked as those of a file are."""
    merged = dataclasses.asdict(config)
    for key, value in tree.items():
        is_section = isinstance(merged.get(key), dict) and isinstance(value, Mapping)
        merged[key] = {**merged[key], **value} if is_section else value
    return from_tree(RunConfig, merged)


def split_settings(settings: Mapping[str, Any], more: Mapping[str, type] = {}) -> dict[str, dict[str, Any]]:
    """Split settings by name into sections; what no other section knows is of `train`, which refuses unknown ones."""
    sections = {**more, "method": MethodConfig, "data": DataConfig}
    tree: dict[str, dict[str, Any]] = {name: {} for name in (*sections, "train")}
    for key, value in settings.items():
        key = "name" if key == "method" else key
        if key in ("weights", "like") and isinstance(value, Mapping):  # `{"cola": 2}`
            value = [f"{name}={item}" for name, item in value.items()]
        elif key in ("weights", "like") and isinstance(value, str):  # `"cola=2,rte=1"`
            value = value.split(",")
        known = (name for name, kind in sections.items() if key in {item.name for item in dataclasses.fields(kind)})
        tree[next(known, "train")][key] = value
    return tree
