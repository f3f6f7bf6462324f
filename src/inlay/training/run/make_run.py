"""Makes runs: every setting that was left open is resolved for a task and a backbone, and checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from inlay.data import KINDS, Task, describe_unknown, is_better
from inlay.errors import BadConfig, Unsupported, WrongBackbone
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
from inlay.settings import RunConfig, TrainConfig, read_toml
from inlay.store import Store
from inlay.training.recipe.probe import compare_readings
from inlay.training.recipe.recipe import find_recipe
from inlay.training.run.run import Run, Trained
from inlay.training.run.run_folder import read_finished
from inlay.training.run.start import StartSource, load_sources, make_start


def make_run(
    task: Task, config: RunConfig, backbone: Backbone, store: Store | None = None, *, is_trained: bool = False
) -> Run:
    """Resolve every `auto` of `config` for this task and backbone, and check that they go together.

    `store` has the versions that `config.train.start` names. A run that `is_trained` may have settings that Inlay no
    longer trains with.
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

    The setting decides, then the versions that the run starts from; else, if the head begins as a linear probe, the way
    in which such probes of the training rows score better.
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
                "say what is written for each label: `--set data.answers=LABEL=text,…` (for several tasks "
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
    """Resolve the pooling. A trained copy of the pooler reads the first token, as the pooler itself does."""
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
_TEXT_NOTES: WeakKeyDictionary[Task, dict[str, list[str]]] = WeakKeyDictionary()


def _describe_texts(task: Task, backbone: Backbone) -> list[str]:
    """Return notes on characters of the training texts that the backbone's tokenizer does not know."""
    said = _TEXT_NOTES.setdefault(task, {})
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
        yield f"it still reads a pooler that is noise: {noise}"


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
