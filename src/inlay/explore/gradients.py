"""Integrated gradients through a slot (Sundararajan et al. 2017): each token's part of the change of an output.

The path goes in a straight line of word embeddings from the text with every token masked to the text itself; special
tokens and positions stay. The integral is a Gauss-Legendre sum whose points are rows of shared batches. The parts must
add up to the change of the output (completeness); the number of points is doubled until they do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from inlay.data import Split
from inlay.explore.version_reader import VersionReader
from inlay.locks import lock_of
from inlay.model import TOKEN_BUDGET, find_head, make_rows

_FEWEST_POINTS, _MOST_POINTS = 16, 256
TOLERANCE = 0.01
"""the allowed gap, as a share of the change of the output, or of its unit if that is larger"""


@dataclass(frozen=True)
class Completeness:
    """The sum of the parts, and the change of the output from the masked text to the text."""

    total: float
    change: float
    num_points: int
    unit: float = 1.0
    """1 for log-odds; the standard deviation of the training targets if the answer is a number"""

    @property
    def gap(self) -> float:
        """The difference between the sum and the change."""
        return abs(self.total - self.change)

    @property
    def holds(self) -> bool:
        """Whether the gap is within the tolerance."""
        return self.gap <= TOLERANCE * max(self.unit, abs(self.change))


@dataclass(frozen=True)
class TokenParts:
    """Each token's part and position; `sides` has 0 for the first text, 1 for the second, None for special tokens."""

    parts_T: np.ndarray
    sides: list[int | None]
    places: list[tuple[int, int]]
    completeness: Completeness


def integrate_gradients(reader: VersionReader, row: Split, label: int) -> TokenParts:
    """Return each token's part of the evidence for a label, for one row."""
    (window,) = list(reader.encode(row))
    tokens = _find_tokens(reader, row)
    ids = [*window[0].tolist(), *([] if window[2] is None else window[2].tolist())]
    assert ids == [token.id for token in tokens], "the tokenizer gives the tokens that the version reads"
    num_points = _FEWEST_POINTS
    while True:
        parts_T, change = _integrate(reader, window, tokens, label, num_points)
        found = Completeness(float(parts_T.sum()), change, num_points, reader.spec.head.target_std)
        if found.holds or num_points >= _MOST_POINTS:
            break
        num_points *= 2
    return TokenParts(parts_T, [token.side for token in tokens], [token.place for token in tokens], found)


@dataclass(frozen=True)
class _Token:
    id: int
    side: int | None
    place: tuple[int, int]


def _find_tokens(reader: VersionReader, row: Split) -> list[_Token]:
    """Return the tokens of a row, each with its side and position."""
    texts = [row.texts[0]] if row.pairs is None else [row.texts[0], row.pairs[0]]
    calls: list[tuple[list[str], int]] = [([text], side) for side, text in enumerate(texts)]
    if not reader.spec.head.has_towers:
        calls = [(texts, 0)]
    tokens = []
    tokenizer = reader.backbone.tokenizer
    for given, first in calls:
        with lock_of(tokenizer):
            found = tokenizer(
                *given, truncation=True, max_length=reader.reading.max_length, return_offsets_mapping=True
            )
        sides = [None if side is None else side + first for side in found.sequence_ids(0)]
        tokens += [_Token(*item) for item in zip(found["input_ids"], sides, found["offset_mapping"], strict=True)]
    return tokens


def _integrate(
    reader: VersionReader, window: Any, tokens: list[_Token], label: int, num_points: int
) -> tuple[np.ndarray, float]:
    """Return the tokens' parts, computed with `num_points` points, and the change of the output."""
    tokenizer = reader.backbone.tokenizer
    blank = next(item for item in (tokenizer.mask_token_id, tokenizer.unk_token_id, reader.backbone.pad_id) if item)
    is_real = np.array([token.side is not None for token in tokens])
    ids = np.array([token.id for token in tokens])
    masked_ids, first = np.where(is_real, blank, ids), len(window[0])
    masked = (masked_ids[:first], window[1], None if window[2] is None else masked_ids[first:])
    nodes, weights = np.polynomial.legendre.leggauss(num_points)
    nodes, weights = (nodes + 1) / 2, weights / 2
    at_once = max(1, TOKEN_BUDGET[reader.backbone.device.type] // len(tokens) - 2)
    parts_T, change = np.zeros(len(tokens)), 0.0
    for start in range(0, num_points, at_once):
        chosen = slice(start, start + at_once)
        slopes_PT, ends = _slopes(reader, (window, masked), nodes[chosen], label)
        parts_T += (weights[chosen, None] * slopes_PT).sum(0)
        change = ends[0] - ends[1]
    return parts_T, change


def _slopes(
    reader: VersionReader, windows: tuple[Any, Any], nodes: np.ndarray, label: int
) -> tuple[np.ndarray, tuple[float, float]]:
    """Return each token's slope at points of the path [points, T], and the outputs of the whole and the masked text."""
    whole, masked = windows
    # 1. a batch with the whole text for each point and once more, and the masked text
    shares = np.array([*nodes, 1.0, 0.0])
    batch = reader.backbone.collate(make_rows([*[whole] * (len(nodes) + 1), masked]))
    place_of = {position: row for row, position in enumerate(batch.order)}
    whole_at, masked_at = place_of[len(nodes)], place_of[len(nodes) + 1]
    shares_R11 = torch.tensor(shares[list(batch.order)], dtype=torch.float32, device=reader.backbone.device)[
        :, None, None
    ]
    kept: list[Tensor] = []

    def move(embedded: Tensor) -> Tensor:
        """Move every row to its point of the path."""
        rows_RTE = embedded.reshape(len(shares), -1, embedded.shape[-1]).float()
        line_TE = rows_RTE[whole_at] - rows_RTE[masked_at]
        moved = (rows_RTE[masked_at] + shares_R11 * line_TE).to(embedded.dtype).detach().requires_grad_()
        kept.extend((moved, line_TE))
        return moved.view_as(embedded)

    # 2. one forward and backward pass
    evidence = find_head(reader.spec.head.kind).evidence
    assert evidence is not None
    with torch.enable_grad(), reader.bank.routed(batch.route), reader.backbone.changing_inputs(move):
        (logits_RL,) = reader.bank.logits(batch)
        found_R = evidence(logits_RL.cpu(), reader.spec.head, label)
        (gradients_RTE,) = torch.autograd.grad(found_R.sum(), kept[0])
    # 3. in the order of the points, without padding
    slopes_RT = (gradients_RTE.float() * kept[1]).sum(-1).double().cpu().numpy()
    slopes_PT = slopes_RT[[place_of[point] for point in range(len(nodes))]]
    ends = found_R.detach().tolist()
    return slopes_PT[:, _real_places(whole, slopes_RT.shape[1])], (ends[whole_at], ends[masked_at])


def _real_places(window: Any, width: int) -> np.ndarray:
    """Return the positions of a row's real tokens: two texts that are read apart may be padded to the same width."""
    first, second = len(window[0]), 0 if window[2] is None else len(window[2])
    begins = width // 2 if second and width > first + second else first
    return np.concatenate([np.arange(first), begins + np.arange(second)])
