"""The one inference forward, used by evaluation and serving alike, and the canonical path that probes are proved on."""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from inlay.model.backbone.backbone import Backbone
from inlay.model.backbone.loading import load_backbone
from inlay.model.bank.bank import Bank
from inlay.model.bank.methods import SlotSpec
from inlay.model.batch.route import CacheDepth, Row, TokenIds, collate
from inlay.model.heads.readout import pair_features
from inlay.model.parts import head as head_part
from inlay.threads import single_thread

TOKEN_BUDGET = {"cpu": 4096, "cuda": 65536}
"""Tokens of one forward pass, padding included: enough to fill the device, small enough to stay in its caches."""
_MOST_DISTINCT = 0.75  # of a slot's texts that are read apart: with more of them, reading each once saves too little
_PAIRED = 1024  # pairs whose features are there at a time


def infer(
    bank: Bank,
    rows: Sequence[Row],
    *,
    on_batch: Callable[[int], None] | None = None,
    is_padded: bool = False,
    token_budget: int | None = None,
) -> list[Tensor]:
    """Return the logits of every row, float32 on the CPU, in order: [L], or [T, L] for a head that reads tokens.

    For a free text they are its letters, as numbers.

    `on_batch` is called with the number of rows just answered. Rows are packed where the family allows it, unless
    `is_padded`. A forward pass has at most `token_budget` tokens. Where pairs are read apart and share texts, such as
    one question with many documents, each text is read once.
    """
    backbone = bank.backbone
    answers: dict[int, Tensor] = {}
    for slot, sharing in ({} if is_padded else _find_sharing(bank, rows)).items():
        found = _infer_sharing(bank, slot, [rows[index] for index in sharing], on_batch, token_budget)
        answers |= dict(zip(sharing, found, strict=True))
    left = [index for index in range(len(rows)) if index not in answers]
    for batched in _batches(bank, [rows[index] for index in left], token_budget):
        indices = [left[position] for position in batched]
        chosen = [rows[index] for index in indices]
        with backbone.turn():  # the copies too: on a GPU they would spoil what another thread captures
            batch = collate(chosen, backbone.pad_id, backbone.device) if is_padded else backbone.collate(chosen)
            with torch.inference_mode(), bank.routed(batch.route):
                segments = bank.logits(batch)
            logits = [row for segment in _to_cpu(segments) for row in segment.unbind(0)]
        for position, row in zip(batch.order, logits, strict=True):
            index = indices[position]
            answers[index] = _trim(row, rows[index], bank)
        if on_batch is not None:
            on_batch(len(indices))
    return [answers[index] for index in range(len(rows))]


def _find_sharing(bank: Bank, rows: Sequence[Row]) -> dict[int, list[int]]:
    """Find the slots whose rows are pairs that share enough texts: slot -> positions of its rows."""
    by_slot: dict[int, list[int]] = {}
    for index, row in enumerate(rows):
        if row.other is not None:
            by_slot.setdefault(row.slot, []).append(index)
    # By slot, so that which other rows are asked for changes nothing.
    distinct = {slot: len({_key(text) for index in own for text in rows[index].texts}) for slot, own in by_slot.items()}
    return {
        slot: own
        for slot, own in by_slot.items()
        if len(own) > 1 and distinct[slot] <= _MOST_DISTINCT * 2 * len(own) and not bank.head_of(slot).is_written
    }


def _key(text: TokenIds) -> bytes:
    return np.asarray(text, dtype=np.int64).tobytes()


def _infer_sharing(
    bank: Bank, slot: int, rows: Sequence[Row], on_batch: Callable[[int], None] | None, token_budget: int | None
) -> list[Tensor]:
    """Compute the logits of pairs of one slot; each text goes through the backbone once, however many pairs it is in.

    They differ from those of pairs read one by one in rounding alone.
    """
    backbone = bank.backbone
    # 1. every text once, two in a row as any pair, neighbours in length
    texts = {_key(text): text for row in rows for text in row.texts}
    order = sorted(texts, key=lambda key: len(texts[key]))
    halves = list(zip(order[::2], [*order[1::2], *order[-1:]], strict=False))  # an odd one goes beside itself
    singles = [Row(texts[first], slot, other=texts[second]) for first, second in halves]
    vectors: dict[bytes, Tensor] = {}
    for indices in _batches(bank, singles, token_budget):
        with backbone.turn():
            batch = backbone.collate([singles[index] for index in indices])
            with torch.inference_mode(), bank.routed(batch.route):
                (read,) = bank.logits(batch, as_vectors={slot})
        both = read[:, : 2 * backbone.hidden_size].unflatten(1, (2, -1))
        for position, (u_D, v_D) in zip(batch.order, both, strict=True):
            first, second = halves[indices[position]]
            vectors[first], vectors[second] = u_D, v_D
        if on_batch is not None:
            on_batch(0)
    # 2. the head, on the vectors of both texts of every pair
    num_outputs = bank.head_of(slot).num_outputs
    names = (head_part.WEIGHT, head_part.BIAS, head_part.PAIR_WEIGHT)
    answers: list[Tensor] = []
    for start in range(0, len(rows), _PAIRED):
        chosen = [row.texts for row in rows[start : start + _PAIRED]]
        with backbone.turn(), torch.inference_mode():
            weight, bias, pair_weight = (bank.stacks[name][slot][:num_outputs] for name in names)
            u_BD, v_BD = (torch.stack([vectors[_key(pair[side])] for pair in chosen]) for side in (0, 1))
            logits = F.linear(u_BD, weight, bias) + F.linear(pair_features(u_BD, v_BD), pair_weight)
            answers += _to_cpu([logits])[0].unbind(0)
        if on_batch is not None:
            on_batch(len(chosen))
    return answers


def infer_vectors(bank: Bank, rows: Sequence[Row], *, token_budget: int | None = None) -> np.ndarray:
    """Return the vectors that the head of each row's slot reads, without dropout, in order: [n, D], float64."""
    found: dict[int, np.ndarray] = {}
    for indices in _batches(bank, rows, token_budget):
        batch = bank.backbone.collate([rows[index] for index in indices])
        with torch.inference_mode(), bank.routed(batch.route):
            read = bank.logits(batch, as_vectors={segment.slot for segment in batch.rows})
        vectors = torch.cat(read).double().cpu().numpy()
        found |= {indices[position]: vector for position, vector in zip(batch.order, vectors, strict=True)}
    return np.stack([found[index] for index in range(len(rows))])


def _to_cpu(segments: Sequence[Tensor]) -> list[Tensor]:
    """Return segments as float32 on the CPU, where written texts are already.

    All others are copied together, since every copy waits for the device.
    """
    found = [segment.float() for segment in segments]
    away = [index for index, segment in enumerate(found) if segment.device.type != "cpu"]
    if away:
        flat = torch.cat([found[index].flatten() for index in away]).cpu()
        parts = flat.split([found[index].numel() for index in away])
        for index, part in zip(away, parts, strict=True):
            found[index] = part.view_as(found[index])
    return found


def _trim(logits: Tensor, row: Row, bank: Bank) -> Tensor:
    """Return a row's logits without the padding."""
    if logits.dim() > 1:
        return logits[: len(row.ids)].clone()
    return logits[~(logits < 0)] if bank.head_of(row.slot).is_free_text else logits  # NaN: no text was written


def _batches(bank: Bank, rows: Sequence[Row], token_budget: int | None) -> Iterator[list[int]]:
    """Yield indices in batches of similar length; rows that begin elsewhere, or have own weights, go apart."""
    budget = token_budget or TOKEN_BUDGET[bank.backbone.device.type]
    groups: dict[tuple[int | None, CacheDepth | None], list[int]] = {}
    for index, row in enumerate(rows):
        begins_at = None if row.prefix is None else row.prefix.reach
        group = (row.slot if bank.is_finetuned(row.slot) else None, begins_at)
        groups.setdefault(group, []).append(index)
    for indices in groups.values():
        # Rows that are answered by the same texts lie together: a decoder's pass is for one set of texts.
        kinds = [bank.head_of(rows[index].slot).texts for index in indices] if bank.backbone.is_seq2seq else None
        chosen = [rows[index] for index in indices]
        for batch in batch_rows(chosen, budget, packs=bank.backbone.packs, kinds=kinds):
            yield [indices[position] for position in batch]


def batch_rows(
    rows: Sequence[Row], token_budget: int, *, packs: bool, kinds: Sequence[Hashable] | None = None
) -> Iterator[list[int]]:
    """Divide rows into batches as `batches_by_length` does; where rows are padded, each of two texts is."""
    if packs:
        return batches_by_length([row.num_tokens for row in rows], token_budget, packs=True, kinds=kinds)
    counts = [len(row.texts) for row in rows]
    return batches_by_length([row.width for row in rows], token_budget, kinds=kinds, counts=counts)


def batches_by_length(
    lengths: Sequence[int],
    token_budget: int,
    *,
    packs: bool = False,
    kinds: Sequence[Hashable] | None = None,
    counts: Sequence[int] | None = None,
) -> Iterator[list[int]]:
    """Divide rows into batches of similar length, each at most `token_budget` tokens (or one row), with padding.

    If the rows are packed there is no padding; equal lengths still lie together, as attention likes them. Rows of a
    kind come one after another; a batch may have the last of one and the first of the next. `counts` says how many
    texts of its length a row is, where some are two.
    """
    order = {kind: number for number, kind in enumerate(dict.fromkeys(kinds or ()))}
    ranks = [order[kind] for kind in kinds] if kinds else [0] * len(lengths)
    batch: list[int] = []
    num_tokens = longest = num_texts = 0
    for index in sorted(range(len(lengths)), key=lambda i: (ranks[i], -lengths[i])):
        own = 1 if counts is None else counts[index]
        longest, num_texts = max(longest, lengths[index]), num_texts + own
        num_tokens = num_tokens + lengths[index] if packs else longest * num_texts
        if batch and num_tokens > token_budget:
            yield batch
            batch, num_tokens, longest, num_texts = [], lengths[index], lengths[index], own
        batch.append(index)
    if batch:
        yield batch


def infer_canonically(
    backbone: Backbone, spec: SlotSpec, tensors: Mapping[str, Tensor], rows: Sequence[Row]
) -> list[Tensor]:
    """Compute logits on the canonical path: reference kernels, float32, CPU, one thread, one row at a time, one slot.

    On one machine with the same library versions they are the same to the last bit, whatever else was trained since.
    """
    assert backbone.device.type == "cpu", "the canonical path runs on the CPU"
    bank = Bank(backbone, 1)
    bank.put(0, spec, tensors)
    with single_thread():
        return [infer(bank, [replace(row, slot=0, prefix=None)], is_padded=True)[0] for row in rows]


def canonical_backbone(backbone: Backbone) -> Backbone:
    """Return the same backbone in float32 on the CPU, where the canonical path runs."""
    is_float = backbone.dtype == torch.float32 and backbone.precision != "int8"
    if backbone.device.type == "cpu" and is_float:
        return backbone
    return _load_canonical(backbone.name, backbone.fingerprint)


@functools.lru_cache(maxsize=1)  # every publication and proof of a long stream needs it
def _load_canonical(name: str, fingerprint: str) -> Backbone:
    return load_backbone(name, device="cpu", dtype=torch.float32)


def canonical_environment() -> dict[str, str]:
    """Return the versions and hardware that must be equal for canonical answers to be equal to the last bit."""
    import transformers

    cpuinfo = Path("/proc/cpuinfo")
    models = [line for line in cpuinfo.read_text().splitlines() if "model name" in line] if cpuinfo.exists() else []
    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "processor": models[0].split(":", 1)[1].strip() if models else platform.processor(),
        "capability": torch.backends.cpu.get_cpu_capability(),
    }
