"""The proof that published versions still answer as they did: bytes, backbone, and probes, alone and in batches.

Probes are compared bit for bit on the machine and libraries they were published with, and with a tolerance elsewhere;
the check says which it used.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from inlay.data import KINDS, METRICS, Split, encode_split
from inlay.errors import InlayError, StoreDamaged
from inlay.model import (
    Backbone,
    Bank,
    SlotSpec,
    canonical_backbone,
    canonical_environment,
    collect_outputs,
    find_head,
    infer_canonically,
    make_rows,
)
from inlay.serving.answers import Request
from inlay.serving.engine import Engine
from inlay.serving.hot_versions import check_backbone, find_reading, read_slot
from inlay.store import HASHED, Loaded, Manifest, Probe, Store, Version

CANONICAL_TOLERANCE = 1e-4
"""tolerance of canonical answers on another machine or with other libraries, as a share of the largest logit"""
ENGINE_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""the same for answers in a mixed batch, by the backbone's precision"""
_MOST_PROBES = 64
_ROUNDING = 1e-6
ProbeRow = tuple[str, str | None]
"""a text and its pair, if the task reads pairs"""
_MixedAnswers = dict[str, list[Tensor] | InlayError]
"""reference -> the answers to the version's probes in a batch of all versions, or the error that prevented them"""


@dataclass(frozen=True)
class Check:
    """The result for one version. `problem` is empty if the version stands."""

    version: Version
    is_exact: bool = False
    """whether the probes were compared bit for bit"""
    canonical_difference: float = 0.0
    engine_difference: float = 0.0
    problem: str = ""
    num_probes: int = 0
    """probes that were answered again; hashed probes count only if their rows were given"""

    @property
    def stands(self) -> bool:
        return not self.problem


def verify(
    versions: Sequence[Version],
    backbone: Backbone,
    store: Store,
    on_check: Callable[[Check], None] | None = None,
    engine: Engine | None = None,
    *,
    rows: Sequence[ProbeRow] = (),
) -> list[Check]:
    """Check versions trained on `backbone`: digest, fingerprint, probes alone and in a batch of all versions.

    `on_check` is called with each result as it is made. `rows` are texts with their pairs, among which hashed probes
    find the rows they were made from.
    """
    mixed = _mixed_answers(versions, engine or Engine(backbone, store), store, rows)
    environment = canonical_environment()
    canonical_backbone(backbone)  # loaded once; if that fails, every check would, so it is raised here
    checks = []
    for version in versions:
        try:
            check = _check(version, backbone, store, mixed, environment, rows)
        except InlayError as error:
            check = Check(version, problem=str(error))
        checks.append(check)
        if on_check is not None:
            on_check(check)
    return checks


def check_through_engine(version: Version, engine: Engine) -> int:
    """Load a version and have the engine answer its probes; return how many, or raise what is wrong with it.

    The answers are compared with the published ones, except in int8, which is expected to drift.
    """
    manifest = engine.find_version(version.reference).manifest
    engine.load(version, manifest)
    probes = manifest.probes
    answers = engine.predict([Request(version.reference, probe.text, probe.pair) for probe in probes])
    found = []
    for answer in answers:
        if answer.error is not None:
            raise answer.error
        assert answer.logits is not None
        found.append(answer.logits)
    if engine.precision == "auto":
        tolerance = ENGINE_TOLERANCE[engine.backbone.dtype]
        _, problem = _compare_in_batch(manifest, [torch.tensor(probe.logits) for probe in probes], found, tolerance)
        if problem:
            raise StoreDamaged(f"`{version.reference}`: {problem}", "check it with `inlay verify`, or train it again")
    return len(probes)


def _compare_in_batch(
    manifest: Manifest, expected: Sequence[Tensor], in_batch: Sequence[Tensor], tolerance: float
) -> tuple[float, str]:
    """Return how far answers in a mixed batch are from the published ones, and what is wrong, if anything."""
    through = _difference(expected, in_batch)
    if find_head(manifest.kind).reads == "nothing" and tolerance > CANONICAL_TOLERANCE:
        through = 0.0  # in bf16 a near tie may be decided differently, and the generated text then differs
    if not through <= tolerance:
        return through, f"a probe's answer in a mixed batch is off by {through:.2g} of its size"
    if KINDS[manifest.kind].is_classifier and any(
        int(a.argmax()) != int(b.argmax()) and float(a.max() - a[int(b.argmax())]) > tolerance
        for a, b in zip(expected, in_batch, strict=True)
    ):
        return through, "a probe gets another label in a mixed batch"
    return through, ""


def _find_probes(manifest: Manifest, rows: Sequence[ProbeRow]) -> tuple[Probe, ...]:
    """Return a version's probes; hashed ones only if their rows are given."""
    hashed = manifest.extra.get(HASHED)
    if not hashed or not rows:
        return manifest.probes
    try:
        known = {probe["row"]: tuple(map(float.fromhex, probe["logits"])) for probe in hashed}
    except (KeyError, TypeError, ValueError, OverflowError):
        raise StoreDamaged("its hashed probes are not rows with logits") from None
    asked = {probe.hash_row(manifest.run_id): probe for probe in (Probe(*row, ()) for row in rows)}
    return tuple(replace(asked[row], logits=logits) for row, logits in known.items() if row in asked)


def _mixed_answers(
    versions: Sequence[Version], engine: Engine, store: Store, rows: Sequence[ProbeRow]
) -> _MixedAnswers:
    """Answer every version's probes through the engine, in batches that mix all the versions."""
    requests = []
    owners = []
    for version in versions:
        try:
            probes = _find_probes(store.manifest(version), rows)
        except InlayError:
            continue  # the check of that version will find and report it
        requests += [Request(version.reference, probe.text, probe.pair) for probe in probes]
        owners += [version.reference] * len(probes)
    found: _MixedAnswers = {}
    for owner, answer in zip(owners, engine.predict(requests), strict=True):
        if answer.error is not None or answer.logits is None:
            found[owner] = answer.error or InlayError("no answer")
        elif isinstance(state := found.setdefault(owner, []), list):
            state.append(answer.logits)
    return found


def _check(
    version: Version,
    backbone: Backbone,
    store: Store,
    mixed: _MixedAnswers,
    environment: dict[str, str],
    rows: Sequence[ProbeRow],
) -> Check:
    """Compare a version's probes with its answers now, alone and in a mixed batch; raise what makes it impossible."""
    # 1. bytes and backbone
    store.check(version)
    manifest = store.manifest(version)
    check_backbone(version, manifest, backbone)
    spec = read_slot(manifest, backbone)
    probes = _find_probes(manifest, rows)
    in_batch = mixed.get(version.reference, [])
    if isinstance(in_batch, InlayError):
        raise in_batch
    tensors = store.load(version).tensors
    lost = [name for name, tensor in tensors.items() if not tensor.isfinite().all()]
    if lost:
        return Check(version, problem=f"tensor `{lost[0]}` has values that are not finite")
    if not probes:  # it has none, or their rows are not given: then only its bytes can be proved
        return Check(version)
    # 2. the probes' answers now, alone on the canonical path
    alone = _answer_alone(manifest, probes, spec, tensors, backbone)
    # 3. how far they are from the published ones
    expected = [torch.tensor(probe.logits) for probe in probes]
    is_exact = (store.sidecar(version) or {}).get("environment") == environment
    tolerance = ENGINE_TOLERANCE[next(backbone.model.parameters()).dtype]
    canonical = _difference(expected, alone)
    through, problem = _compare_in_batch(manifest, expected, in_batch, tolerance)
    # 4. the first problem, if there is one
    if is_exact and any(not torch.equal(a, b) for a, b in zip(expected, alone, strict=True)):
        problem = f"a probe's canonical answer is not bit-identical to the published one (off by {canonical:.2g})"
    elif not canonical <= CANONICAL_TOLERANCE:  # so that NaN is a problem too
        problem = f"a probe's canonical answer is off by {canonical:.2g} of its size"
    return Check(version, is_exact, canonical, through, problem, len(probes))


def check_whole(loaded: Loaded, version: Version, backbone: Backbone) -> None:
    """Refuse a version from outside that does not fit its backbone, contradicts itself or gives other answers.

    It is built and its probes are answered, as `verify` does, before anything of it is stored.
    """
    manifest, tensors = loaded.manifest, loaded.tensors
    # 1. its slot: the head, the reading, the tensors
    check_backbone(version, manifest, backbone)
    spec = read_slot(manifest, backbone)
    for name, tensor in tensors.items():
        if not bool(tensor.isfinite().all()):
            raise StoreDamaged(f"the tensor `{name}` has values that are not finite")
    Bank(backbone, 1).put(0, spec, tensors)
    # 2. what the manifest says of it
    if not manifest.num_parameters <= sum(tensor.numel() for tensor in tensors.values()):
        raise StoreDamaged(f"`num_parameters` is {manifest.num_parameters:,}, more than its tensors have")
    _check_metrics(manifest)
    _check_texts(manifest)
    # 3. the probes, and their answers
    if len(manifest.probes) > _MOST_PROBES:
        raise StoreDamaged(f"{len(manifest.probes)} probes, more than {_MOST_PROBES}")
    for probe in manifest.probes:
        if not probe.text.strip() or (probe.pair is None) == bool(manifest.extra.get("pairs")):
            raise StoreDamaged("a probe is not a row that the version could read")
    expected = [torch.tensor(probe.logits) for probe in manifest.probes]
    answers = _answer_alone(manifest, manifest.probes, spec, tensors, backbone)
    if not all(bool(answer.isfinite().all()) for answer in answers):
        raise StoreDamaged("its answers to its probes are not finite")
    difference = _difference(expected, answers)
    if not difference <= CANONICAL_TOLERANCE:
        raise StoreDamaged(f"a probe's canonical answer is off by {difference:.2g} of its size")


def _check_metrics(manifest: Manifest) -> None:
    """Refuse a metric that its kind of task does not have, and scores that no metric can have."""
    if manifest.metric not in KINDS[manifest.kind].metrics:
        raise StoreDamaged(f"a {manifest.kind} task has no metric `{manifest.metric}`")
    if manifest.higher_is_better != METRICS[manifest.metric].higher_is_better:
        raise StoreDamaged(f"`higher_is_better` is `{manifest.higher_is_better}` for `{manifest.metric}`")
    for split, scores in manifest.metrics.items():
        for name, value in scores.items():
            is_share = name in METRICS and METRICS[name].higher_is_better  # or a correlation
            if value < (-1 - _ROUNDING if is_share else 0) or (is_share and value > 1 + _ROUNDING):
                raise StoreDamaged(f"the {split} score {name} is {value:g}, which is impossible")


def _check_texts(manifest: Manifest) -> None:
    """Refuse texts (labels, probes, the head's prompt) that cannot be printed."""
    shown = replace(manifest, config={}).to_json()  # a setting may be a path, which may hold any bytes
    try:
        json.dumps(json.loads(shown), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise StoreDamaged("a text of its manifest has half a character (a lone surrogate)") from None


def _answer_alone(
    manifest: Manifest, probes: Sequence[Probe], spec: SlotSpec, tensors: Mapping[str, Tensor], backbone: Backbone
) -> list[Tensor]:
    """Return a version's answers to probes on the canonical path."""
    plain, texts = canonical_backbone(backbone), [probe.text for probe in probes]
    if not texts:
        return []
    pairs = [probe.pair or "" for probe in probes] if manifest.extra.get("pairs") else None
    encoded = encode_split(plain.tokenizer, Split(texts, pairs, None, []), find_reading(manifest))
    logits = infer_canonically(plain, spec, tensors, make_rows(encoded))
    return [output.flat for output in collect_outputs(encoded, logits, texts)]


def _difference(expected: Sequence[Tensor], found: Sequence[Tensor]) -> float:
    """Return the largest difference, as a share of the largest expected value (or of 1); NaN if any is NaN."""
    pairs = list(zip(expected, found, strict=True))
    if any(a.shape != b.shape for a, b in pairs):
        return float("inf")  # not even the same tokens
    filled = [(a, b) for a, b in pairs if len(a)]  # a generated text may be empty
    shares = [float((a - b).abs().max() / max(1.0, float(a.abs().max()))) for a, b in filled]
    # Not by `max` alone: max(NaN, number) is whichever comes first.
    return math.nan if any(map(math.isnan, shares)) else max(shares, default=0.0)
