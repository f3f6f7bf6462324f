"""A run: one task trained once, with its settings, its folder and its result.

A run's folder is `runs/<id>/`: `config.toml`, `fingerprint` (of the backbone), `metrics.jsonl` (a line per epoch),
`curve.png`, `best.safetensors`, `last.safetensors`, `probe.safetensors` (the head it began with, if that is a linear
probe), and `result.json`, which is written last: a folder that has one is
a finished run. Of several tasks `tasks/` has the settings of each and the digest of its rows.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import WeakKeyDictionary

from torch import Tensor

from inlay.data import KINDS, Reading, Task, describe_unknown, is_better
from inlay.errors import BadConfig, Missing, StoreDamaged, Unsupported, WrongBackbone
from inlay.locks import lock_of
from inlay.model import (
    HEADS,
    JOINED,
    POOLED,
    TOWERS,
    WRITTEN,
    Backbone,
    HeadSpec,
    SlotSpec,
    find_head,
    find_method,
    resolve_method,
)
from inlay.notebook import show_metrics
from inlay.settings import RunConfig, TrainConfig, read_toml, write_toml
from inlay.store import Store, write_atomically
from inlay.training.recipe.probe import compare_readings
from inlay.training.recipe.recipe import find_recipe
from inlay.training.run.checked_files import Checked, read_checked, seal, unseal
from inlay.training.run.start import Start, StartSource, load_sources, make_start

if TYPE_CHECKING:
    from inlay.training.run.joint import JointRun

AnyRun: TypeAlias = "Run | JointRun"

FINISHED, STOPPED_EARLY, DIVERGED = "finished", "stopped-early", "diverged"
JOINT_TASKS = "tasks"
"""The folder inside a multi-task run's folder with the settings of each task."""
DIGEST = ".digest"
"""The suffix of the file beside a task's settings that holds the digest of its rows."""
WEIGHTS = "best.safetensors"
PROBE_HEAD = "probe.safetensors"
"""The file with the head that a run began with, if that was a linear probe."""
_FINGERPRINT = "fingerprint"


@dataclass(frozen=True, eq=False)
class Run:
    """A task and resolved settings on one backbone. Make it with `make_run`.

    >>> inlay.make_run(task, backbone, size=8).config.method.size
    8
    """

    task: Task
    config: RunConfig
    spec: SlotSpec
    fingerprint: str
    start: Start = field(default_factory=Start)
    origin: Mapping[str, Any] = field(default_factory=dict)
    """the multi-task run that it was part of: its id, method and tasks"""
    notes: tuple[str, ...] = ()
    """notes for its user on how it reads the backbone"""

    def __repr__(self) -> str:
        return f"Run({self.name}: {describe_settings(self.config)}, id {self.id})"

    @cached_property
    def id(self) -> str:
        return self.origin["run"] if self.origin else self.config.identify(self.task.digest, self.fingerprint)

    @property
    def parts(self) -> tuple[Run, ...]:
        """The runs of its tasks; a run of one task has itself."""
        return (self,)

    @property
    def name(self) -> str:
        return self.task.name

    @property
    def metric(self) -> str:
        """The metric its epochs are compared by."""
        return self.task.metric

    @property
    def num_rows(self) -> int:
        """Rows it is trained on in an epoch."""
        return len(self.task.train)

    @property
    def reading(self) -> Reading:
        """The way the task's rows become windows of tokens."""
        head = self.spec.head
        return Reading(head.layout, self.max_length, self.config.train.stride, head.prompt, head.pairs)

    @property
    def max_length(self) -> int:
        """Tokens a text (or a window) is cut to."""
        assert self.config.train.max_length is not None, "make_run resolves it"
        return self.config.train.max_length

    @property
    def steps_per_epoch(self) -> int:
        """Steps of an epoch if every row is one window; `Member` counts the windows of long contexts."""
        return -(-len(self.task.train) // self.config.train.batch_size)

    @property
    def num_steps(self) -> int:
        return count_steps(len(self.task.train), self.config.train)


def describe_settings(config: RunConfig) -> str:
    """Describe a run's settings in a few words, for a `repr`."""
    method = config.method.name if config.method.size is None else f"{config.method.name} {config.method.size}"
    return f"{method}, lr {config.train.lr:g}, seed {config.train.seed}"


def count_steps(num_rows: int, train: TrainConfig) -> int:
    """Return the steps of a run over so many rows (or windows), by the rule of `train.steps`."""
    if not train.num_epochs:
        return 0
    if train.steps == "bert":  # batches go on across epochs, so none is smaller than the others
        return max(1, num_rows * train.num_epochs // train.batch_size)
    return -(-num_rows // train.batch_size) * train.num_epochs


@dataclass(frozen=True)
class Result:
    """The result of a run. `tensors` are the best epoch's, at the slot's own size.

    >>> result
    Result(... finished, dev ... at epoch ... of ..., ... s)
    """

    run_id: str
    status: str
    best_epoch: int
    dev_metric: float | None
    """score by the task's metric at the best epoch; None if the run diverged before its first epoch ended"""
    history: list[dict[str, Any]]
    seconds: float
    peak_memory_bytes: int
    message: str = ""
    folder: Path | None = None
    tensors: dict[str, Tensor] = field(default_factory=dict, repr=False, compare=False)

    def __repr__(self) -> str:
        score = "no score" if self.dev_metric is None else f"dev {self.dev_metric:.4f}"
        last = self.history[-1]["epoch"] if self.history else 0
        return (
            f"Result({self.run_id} {self.status}, {score} at epoch {self.best_epoch} of {last}, {self.seconds:.1f} s)"
        )

    def _repr_html_(self) -> str:
        metrics = {f"epoch {line['epoch']}": line.get("dev", {}) for line in self.history}
        return show_metrics(f"run {self.run_id}", {"status": self.status, "best epoch": self.best_epoch}, metrics)

    @property
    def dev_metrics(self) -> dict[str, float]:
        """All dev metrics of the best epoch; empty if no epoch ended."""
        return self._best.get("dev", {})

    @property
    def unpredicted(self) -> tuple[str, ...]:
        """Labels of dev rows that were never predicted at the best epoch."""
        return tuple(self._best.get("unpredicted", ()))

    def spec(self, run: Run) -> SlotSpec:
        """Return the run's slot, with the head settings that were fitted on the dev rows of the best epoch."""
        return dataclasses.replace(run.spec, head=dataclasses.replace(run.spec.head, **self._best.get("head", {})))

    @property
    def _best(self) -> dict[str, Any]:
        return next((line for line in self.history if line["epoch"] == self.best_epoch), {})


def make_run(
    task: Task, config: RunConfig, backbone: Backbone, store: Store | None = None, *, is_trained: bool = False
) -> Run:
    """Resolve every `auto` of `config` for this task and backbone, and check that they go together.

    `store` has the versions that `config.train.start` names. What `is_trained` is not refused for what later versions
    of Inlay train no more.
    """
    if find_method(config.method.name).is_joint:
        raise BadConfig(
            f"method `{config.method.name}` trains several tasks as one run, whose parameters they share",
            "use `inlay multitask` (with `--dry-run` it tells the cost), or `make_joint_run`",
        )
    for item in dataclasses.fields(config.joint):
        if (value := getattr(config.joint, item.name)) != item.default:
            raise BadConfig(
                f"`joint.{item.name}` is `{value}` for a run of one task",
                "leave it out: settings of `joint` are for `inlay multitask`",
            )
    return make_part(task, config, backbone, store, is_trained=is_trained)


def make_part(
    task: Task, config: RunConfig, backbone: Backbone, store: Store | None = None, *, is_trained: bool = False
) -> Run:
    """Make a run of one task, or one part of a run of several; see `make_run`."""
    # 1. The versions it starts from.
    sources = load_sources(config.train.start, store, backbone, config.method)
    # 2. Every setting of training that was left open. A run that was trained on a pooler of noise still reads it, and
    # so does what goes on from it.
    takes_noise = is_trained or any(source.spec.head.pooling == "pooler" for source in sources)
    pooling = _resolve_pooling(config.train, backbone, takes_noise=takes_noise)
    max_length = config.train.max_length or min(find_head(task.kind).max_length, backbone.max_length)
    if max_length > backbone.max_length:
        raise BadConfig(
            f"`train.max_length` is `{max_length}`, but `{backbone.name}` reads at most {backbone.max_length} tokens",
            f"use `--max-length {backbone.max_length}` or less",
        )
    if config.train.class_weights == "balanced" and not KINDS[task.kind].is_classifier:
        raise BadConfig(
            f"`train.class_weights` is `balanced` for the `{task.kind}` task `{task.name}`",
            "it is for `classify` tasks",
        )
    start = tuple(source.label for source in sources)
    bucket = config.train.bucket or (1 if backbone.packs else 4)
    known: dict[str, Any] = {"pooling": pooling, "max_length": max_length, "bucket": bucket, "start": start}
    known |= find_recipe(task, config, backbone, has_sources=bool(sources))
    writing = _resolve_writing(task, config.train, backbone)
    if backbone.is_seq2seq and config.train.prompt is None and find_method(config.method.name).shares_all:
        writing["prompt"] = f"{config.joint.resemblances().get(task.name, task.name)}: "
    train = dataclasses.replace(config.train, **known, **writing)
    # 3. The settings of the data, as the rows turned out.
    answers = tuple(f"{label}={text}" for label, text in zip(task.labels, task.answers, strict=bool(task.answers)))
    pairs, reason = _resolve_pairs(task, config, backbone, sources, train, is_trained=is_trained)
    data = dataclasses.replace(
        config.data, kind=task.kind, labels=task.labels, answers=answers, metric=task.metric, pairs=pairs
    )
    method = resolve_method(config.method)
    resolved = dataclasses.replace(
        config, task=task.name, method=method.as_config(), train=train, data=data, backbone=backbone.name
    )
    # 4. The slot: method and head, which must go with the backbone.
    spec = SlotSpec(method, _make_head(task, train, pairs))
    if backbone.is_seq2seq:
        _check_texts(task, spec.head.texts, backbone)
    spec.layout(backbone.anatomy)  # what the family cannot do is refused here, before any work
    notes = (*_describe_reading(config.train, spec.head, backbone), *_describe_texts(task, backbone))
    notes += (reason,) if reason else ()
    return Run(task, resolved, spec, backbone.fingerprint, make_start(sources, spec, task, backbone), notes=notes)


def _resolve_pairs(
    task: Task,
    config: RunConfig,
    backbone: Backbone,
    sources: Sequence[StartSource],
    train: TrainConfig,
    *,
    is_trained: bool,
) -> tuple[str, str]:
    """Choose how the task's pairs are read, and say why.

    As asked for, if it can be; else as what the run starts from; where nothing is said, as linear probes of the
    training rows do better with, if the head begins as one.
    """
    asked = config.data.pairs
    obstacle = _find_towers_obstacle(task, config.train, backbone)
    if asked == TOWERS and obstacle is not None:
        raise BadConfig(
            f"`data.pairs` is `towers` for the `{task.kind}` task `{task.name}`: {obstacle[0]}", obstacle[1]
        )
    if asked != "auto":
        return asked, ""
    if is_trained or obstacle is not None:  # runs from before there was a choice have `auto`, and read pairs joined
        return JOINED, ""
    if sources or train.head_start != "probe" or train.features != "last":
        return TOWERS if sources and all(source.spec.head.has_towers for source in sources) else JOINED, ""
    assert train.max_length is not None
    scores = compare_readings(task, backbone, train.max_length, train.pooling)
    chosen, other = (TOWERS, JOINED) if is_better(task.metric, scores[TOWERS], scores[JOINED]) else (JOINED, TOWERS)
    told = f"a linear probe of the training rows scores {scores[chosen]:.3f} with it, {scores[other]:.3f} with {other}"
    return chosen, f"pairs: read as {chosen}: {told}"


def _find_towers_obstacle(task: Task, train: TrainConfig, backbone: Backbone) -> tuple[str, str] | None:
    """Return why a task's two texts cannot be read apart, and a hint; None if they can."""
    leave_out = "leave out `data.pairs`"
    if backbone.is_seq2seq:
        return f"`{backbone.name}` writes its answers to one text", f"use an encoder, or {leave_out}"
    if find_head(task.kind).reads != "pooled":
        known = ", ".join(kind for kind, head in HEADS.items() if head.reads == "pooled")
        return "its head reads tokens, not a vector of each text", f"{leave_out}; towers are for {known}"
    if task.train.pairs is None:
        return "its rows have no second text", f"name its column with `--pair`, or {leave_out}"
    if train.hidden != "none":
        reason = f"`train.hidden` is `{train.hidden}`, and a head with towers has no layer before its own"
        return reason, f"leave out `train.hidden`, or {leave_out}"
    return None


def _make_head(task: Task, train: TrainConfig, pairs: str) -> HeadSpec:
    entry = find_head(task.kind)
    num_outputs = entry.num_outputs(len(task.labels))
    assert task.train.targets is not None
    if train.pooling == WRITTEN:
        spell_answers = KINDS[task.kind].spell_answers
        assert spell_answers is not None, "checked before"
        texts = spell_answers(task)
        beams, longest = train.beams or HeadSpec.beams, train.max_answer or HeadSpec.max_answer
        written: dict[str, Any] = {"texts": texts, "beams": beams, "max_answer": longest, "prompt": train.prompt or ""}
        return HeadSpec(task.kind, len(texts), WRITTEN, **written)
    pooling = train.pooling if entry.reads == "pooled" else entry.reads
    known = entry.fit_targets(task.train.targets)
    return HeadSpec(task.kind, num_outputs, pooling, hidden=train.hidden, features=train.features, pairs=pairs, **known)


def _check_texts(task: Task, texts: Sequence[str], backbone: Backbone) -> None:
    """Refuse texts that the backbone cannot tell apart: their tokens are equal, or all unknown."""
    known: dict[tuple[int, ...], str] = {}
    for text in texts:
        with lock_of(backbone.tokenizer):
            tokens = tuple(backbone.tokenizer(text)["input_ids"])
        if tokens in known:
            raise BadConfig(
                f"task `{task.name}`: to `{backbone.name}` the answers `{known[tokens]}` and `{text}` are the same "
                "tokens",
                "say what is written for each label: `--set data.answers=LABEL=text,…` (of several tasks "
                f"`data.{task.name}.answers`)",
            )
        known[tokens] = text


def _resolve_writing(task: Task, config: TrainConfig, backbone: Backbone) -> dict[str, Any]:
    """Return the settings of generated answers; refuse settings and tasks that do not fit the backbone."""
    is_free_text = find_head(task.kind).reads == "nothing"
    if backbone.is_seq2seq and KINDS[task.kind].spell_answers is None:
        known = ", ".join(name for name, kind in KINDS.items() if kind.spell_answers is not None)
        raise Unsupported(
            f"the `{task.kind}` task `{task.name}` on the backbone `{backbone.name}`, which writes its answers",
            f"it takes {known}; write the answers as texts, or use another backbone",
        )
    if not backbone.is_seq2seq and is_free_text:
        raise Unsupported(
            f"the `{task.kind}` task `{task.name}` on the backbone `{backbone.name}`, which writes no texts",
            "use a T5, or `--kind classify`",
        )
    used = ("label_smoothing", "beams", "max_answer") if is_free_text else ("label_smoothing",)
    for name in ("label_smoothing", "beams", "max_answer", "prompt"):
        if getattr(config, name) is not None and not (backbone.is_seq2seq and name in (*used, "prompt")):
            raise BadConfig(
                f"`train.{name}` is set for the `{task.kind}` task `{task.name}` on `{backbone.name}`", "leave it out"
            )
    if not backbone.is_seq2seq:
        return {}
    defaults = {"label_smoothing": 0.1, "beams": HeadSpec.beams, "max_answer": HeadSpec.max_answer}
    chosen = {name: getattr(config, name) for name in used}
    return {name: defaults[name] if value is None else value for name, value in chosen.items()}


def _resolve_pooling(config: TrainConfig, backbone: Backbone, *, takes_noise: bool) -> str:
    """Resolve the pooling. A trained copy of the pooler reads what the pooler reads: the first token."""
    if config.hidden != "pooler":
        return backbone.resolve_pooling(config.pooling, takes_noise=takes_noise)
    backbone.resolve_pooling("pooler", takes_noise=True)  # refuses a backbone that has none
    if config.pooling not in ("auto", "cls", "pooler"):
        raise BadConfig(
            f"`train.hidden` is `pooler` with `{config.pooling}` pooling",
            "it reads the first token: leave out `--pooling`",
        )
    return "cls"


# Notes on a task's texts, by the backbone's fingerprint: many runs share a task.
_SAID: WeakKeyDictionary[Task, dict[str, list[str]]] = WeakKeyDictionary()


def _describe_texts(task: Task, backbone: Backbone) -> list[str]:
    """Return notes on characters of the training texts that the backbone's tokenizer does not know."""
    said = _SAID.setdefault(task, {})
    if backbone.fingerprint not in said:
        said[backbone.fingerprint] = describe_unknown(backbone.tokenizer, task.train, backbone.name)
    return said[backbone.fingerprint]


def _describe_reading(config: TrainConfig, head: HeadSpec, backbone: Backbone) -> Iterator[str]:
    """Yield notes on what a head reads by default, and why; or that its pooler is untrained."""
    if not head.reads_rows or head.is_written:
        return
    noise = f"`{backbone.name}`'s pooler was never trained: {backbone.pooler_noise}"
    if head.hidden == "pooler" and backbone.pooler_noise:
        yield f"the pooler that is trained with the task begins as noise: {noise}"
    elif head.hidden != "pooler" and config.pooling == "auto":
        yield f"pooling: {backbone.default_pooling} ({POOLED[backbone.default_pooling]}): {backbone.pooling_reason}"
    if head.pooling == "pooler" and backbone.pooler_noise:
        yield f"it goes on reading a pooler that is noise: {noise}"


def write_start(folder: Path, run: AnyRun) -> None:
    """Write a run's settings to its folder before its first step; for several tasks, each task's too."""
    folder.mkdir(parents=True, exist_ok=True)
    if run.parts != (run,):
        (folder / JOINT_TASKS).mkdir(exist_ok=True)
        for number, part in enumerate(run.parts):
            path = folder / JOINT_TASKS / f"{number:03}-{part.name}.toml"
            write_atomically(path, write_toml(part.config).encode())
            write_atomically(path.with_suffix(DIGEST), f"{part.task.digest}\n".encode())
    write_atomically(folder / "config.toml", write_toml(run.config).encode())
    # The backbone's name in the settings is a path or an alias; the fingerprint says which weights it meant.
    write_atomically(folder / _FINGERPRINT, f"{run.parts[0].fingerprint}\n".encode())


def read_fingerprint(folder: Path) -> str:
    """Read the fingerprint of the backbone a run was trained on; "" in folders from before it was written."""
    path = folder / _FINGERPRINT
    return path.read_text(encoding="utf8").strip() if path.is_file() else ""


def write_history(folder: Path, history: list[dict[str, Any]]) -> None:
    """Write the metrics file, a line per epoch. It is written whole, so that a resumed run never repeats a line."""
    write_atomically(folder / "metrics.jsonl", "".join(json.dumps(line) + "\n" for line in history).encode())


def write_result(folder: Path, result: Result, weights: str = "") -> None:
    """Write the result, which marks a finished run: everything else is on disk before it, the `weights` too."""
    content = {
        "run": result.run_id,
        "status": result.status,
        "best_epoch": result.best_epoch,
        "dev_metric": result.dev_metric,
        "seconds": result.seconds,
        "peak_memory_bytes": result.peak_memory_bytes,
        "message": result.message,
        "history": result.history,
        "weights": weights,
    }
    write_atomically(folder / "result.json", seal(content))


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read the tensors in a file of a run's folder; empty if it is not there. Refuse one that changed since."""
    return _read_weights(path).tensors


def _read_weights(path: Path) -> Checked:
    try:
        return read_checked(path)
    except FileNotFoundError:  # dropped, perhaps just now by another process; or there never was one
        return Checked({}, "", "")
    except ValueError as error:
        raise damaged(path, str(error)) from None


def is_finished(folder: Path) -> bool:
    """Tell whether a run's folder has its result, which is written last."""
    return (folder / "result.json").is_file()


def read_result(folder: Path) -> Result | None:
    """Read the result of a finished run; None if it is not finished. Refuse files that changed since."""
    if not is_finished(folder):
        return None
    path, found = folder / "result.json", _read_weights(folder / WEIGHTS)
    try:
        content = unseal(path.read_bytes())
        weights = content.pop("weights", "")
        known = {name: content[name] for name in content if name != "run"}
        result = Result(run_id=content["run"], tensors=found.tensors, folder=folder, **known)
    except ValueError as error:
        raise damaged(path, str(error)) from None
    except (KeyError, TypeError):
        raise damaged(path, "not what a finished run writes") from None
    if found.tensors and weights not in ("", found.checksum):
        raise damaged(folder / WEIGHTS, f"these are not the weights that `{path.name}` is about")
    return result


def damaged(path: Path, reason: str) -> StoreDamaged:
    """Return the error for a run's file that changed since the run wrote it."""
    # A folder with a result is not trained again, so the folder has to go first.
    return StoreDamaged(
        f"{path}: {reason}", f"restore it from a copy, or delete `{path.parent}` and train the run again"
    )


@dataclass(frozen=True)
class Trained:
    """A finished run read back, with its result.

    >>> joint = inlay.make_joint_run([task, other], backbone, size=4, steps=2, epochs=1, batch_size=8)
    >>> inlay.materialize(joint, *inlay.fit([joint], backbone), backbone)[0]
    Trained(Run(mood: ...), Result(...))
    """

    run: Run
    result: Result

    def __repr__(self) -> str:
        return f"Trained({self.run!r}, {self.result!r})"

    @property
    def spec(self) -> SlotSpec:
        """The run's slot, with the head settings fitted on dev rows."""
        return self.result.spec(self.run)


def read_finished(folder: Path) -> Result:
    """Read the result of a finished run, with its weights; refuse a folder without them."""
    result = read_result(folder)
    if result is None or not result.tensors:
        raise Missing(f"no trained weights in `{folder}`", "give the folder of a run that finished (runs/<id>)")
    return result


def read_trained(folder: Path, task: Task, backbone: Backbone) -> Trained:
    """Read a finished run with its best weights; refuse a folder of other rows or another backbone."""
    result = read_finished(folder)
    config = read_toml(folder / "config.toml")
    if config.identify(task.digest, backbone.fingerprint) != result.run_id:
        raise WrongBackbone(
            f"run `{result.run_id}` was not trained on these rows of `{task.name}` with backbone `{backbone.name}`",
            f"its config says task `{config.task}` on `{config.backbone}`: load that task and that backbone, unchanged",
        )
    # The start is in the weights by now; the source versions may be gone.
    fresh = dataclasses.replace(config, train=dataclasses.replace(config.train, start=()))
    return Trained(dataclasses.replace(make_run(task, fresh, backbone, is_trained=True), config=config), result)
