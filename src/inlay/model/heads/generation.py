"""A text-to-text backbone at work: it reads the rows of a batch and writes their answers, each row by its own slot.

Answers are known texts that are scored (a label's score is the sum of its tokens' log-probabilities, the end included,
not divided by its length), or texts written token by token, greedily or by beam search. Texts that are scored are one
pass of a row: a tree, in which each token sees those before it in its own text, and texts share how they begin. The
slots of rows follow them through all of it: repeated and reordered for beams, with the keys and values that earlier
tokens left. Invariant: a row's answer does not depend on the rows beside it.

Shape letters: B rows, T tokens of a row, D hidden, V vocabulary, R rows of the decoder, K beams, L texts, W tokens of a
text.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from inlay.model.batch.route import Batch, Route, Tiling

if TYPE_CHECKING:
    from inlay.model.bank.bank import Bank

MOST_SCORED = {"cpu": 2**25, "cuda": 2**28}
"""Probabilities at a time: a token of a text that is scored has one for every word of the vocabulary."""


@dataclass(frozen=True)
class EncoderStates:
    """The encoder's states of rows, which a decoder attends to."""

    states_BTD: Tensor
    """[1, N, D] where rows are packed"""
    mask_BT: Tensor
    """which tokens are real; all ones for a pack"""
    tiling: Tiling | None = None
    """where the rows lie, if they are packed"""


@dataclass(frozen=True)
class Tree:
    """The tokens of several texts as a tree of their prefixes; the root is the start token."""

    ids: tuple[int, ...]
    """tokens, without the ends of texts: no token follows an end"""
    parents: tuple[int, ...]
    """the token before each, by its place; -1: none"""
    paths: tuple[tuple[int, ...], ...]
    """for each text, the places in `ids` at which its tokens are predicted"""
    texts: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, texts: Sequence[Sequence[int]], start: int) -> Tree:
        """Build the tree of these texts after a start token."""
        ids, parents = [start], [-1]
        paths: list[tuple[int, ...]] = []
        known: dict[tuple[int, int], int] = {}  # (place of the token before, token) -> place
        for text in texts:
            path = [0]
            for token in text[:-1]:
                key = (path[-1], token)
                if key not in known:
                    known[key] = len(ids)
                    ids.append(token)
                    parents.append(path[-1])
                path.append(known[key])
            paths.append(tuple(path))
        return cls(tuple(ids), tuple(parents), tuple(paths), tuple(map(tuple, texts)))

    def layout(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the depth of each token [T], and which tokens each one sees [T, T]: itself and its ancestors."""
        sees_TT = torch.eye(len(self.ids), dtype=torch.bool)
        depths = [0] * len(self.ids)
        for place, parent in enumerate(self.parents[1:], 1):
            sees_TT[place] |= sees_TT[parent]
            depths[place] = depths[parent] + 1
        return torch.tensor(depths, device=device), sees_TT.to(device)


def forced_logits(bank: Bank, batch: Batch, weights: Mapping[str, Tensor] | None) -> Tensor:
    """Return the logits [B, T, V] of every token of the answers that the batch knows, each given those before it."""
    assert batch.written_BT is not None
    backbone = bank.backbone
    before_BT = batch.written_BT.clamp(min=0).roll(1, 1)  # padding comes last, and tokens see only those before them
    before_BT[:, 0] = backbone.start_id
    return backbone.write(backbone.read(batch, weights), before_BT, weights)[0]


def answer(bank: Bank, batch: Batch, weights: Mapping[str, Tensor] | None) -> list[Tensor]:
    """Score the texts of each segment's slot [n, L], or write answers as codes of letters [n, W], -1 after the end."""
    states, heads = bank.backbone.hidden_layers(batch, weights)[-1], [bank.head_of(slot) for slot, *_ in batch.rows]
    most_texts = max(len(head.texts) for head in heads)
    # One tensor for all rows: a tensor of each row would be a launch for each, and wait as often.
    scores_BL = torch.zeros(batch.num_rows, most_texts, device=states.device)
    written: dict[int, Tensor] = {}
    slots = [slot for slot, start, stop in batch.rows for _ in range(start, stop)]
    for rows in _groups(bank, slots):
        decoder = _Decoder(bank, read_rows(batch, states, rows), [slots[row] for row in rows], weights)
        head = decoder.heads[0]
        if head.texts:
            scores_BL[torch.as_tensor(rows, device=states.device), : len(head.texts)] = decoder.score()
        else:
            written |= dict(zip(rows, _write(decoder, head.beams, head.max_answer), strict=True))
    found = []
    for head, (_, start, stop) in zip(heads, batch.rows, strict=True):
        if head.texts:
            found.append(scores_BL[start:stop, : len(head.texts)])
        else:
            own = [written[row] for row in range(start, stop)]
            found.append(torch.nn.utils.rnn.pad_sequence(own, batch_first=True, padding_value=-1.0))
    return found


def read_rows(batch: Batch, states: Tensor, rows: Sequence[int]) -> EncoderStates:
    """Take some rows of a batch's encoder states, padded to the longest of them."""
    index_R = torch.as_tensor(rows, device=states.device)
    if batch.pack is None:
        assert batch.mask_BT is not None
        return EncoderStates(states[index_R], batch.mask_BT[index_R])
    longest = max(batch.pack.lengths[row] for row in rows)
    places_RT, is_real_RT = (of_BT[index_R, :longest] for of_BT in (batch.pack.places_BT, batch.pack.is_real_BT))
    return EncoderStates(states[0, places_RT], is_real_RT.long())


def _groups(bank: Bank, slots: Sequence[int]) -> Iterator[list[int]]:
    """Group rows that are answered together: with the same number of beams, or by the same texts, within a limit."""
    vocabulary = int(bank.backbone.model.config.vocab_size)  # type: ignore[union-attr, arg-type]
    limit = MOST_SCORED[bank.backbone.device.type] // vocabulary
    written: dict[tuple[int, int], list[int]] = {}
    scored: dict[tuple[str, ...], list[int]] = {}
    for row, slot in enumerate(slots):
        head = bank.head_of(slot)
        if head.texts:
            scored.setdefault(head.texts, []).append(row)
        else:
            written.setdefault((head.beams, head.max_answer), []).append(row)
    for rows in scored.values():
        most = max(1, limit // len(bank.tree_of(slots[rows[0]]).ids))
        yield from (rows[start : start + most] for start in range(0, len(rows), most))
    yield from written.values()


class _Decoder:
    """Writes answers for some rows of a batch, and keeps the keys and values of written tokens."""

    def __init__(
        self, bank: Bank, read: EncoderStates, slots: Sequence[int], weights: Mapping[str, Tensor] | None
    ) -> None:
        self._bank, self._weights, self._cache = bank, weights, None
        self._slots, self._read = list(slots), read
        self.heads = [bank.head_of(slot) for slot in self._slots]
        self.backbone: Any = bank.backbone
        self.device = read.mask_BT.device

    @property
    def num_rows(self) -> int:
        return len(self._slots)

    def start(self) -> Tensor:
        """Return the token [R, 1] that stands before all others."""
        return torch.full((self.num_rows, 1), self.backbone.start_id, device=self.device)

    def write(self, ids_RT: Tensor) -> Tensor:
        """Return the log-probabilities [R, T, V] of the tokens after these, which follow those written before."""
        route = Route.from_slots(self._slots, torch.ones_like(ids_RT))
        with self._bank.routed(route):
            logits, self._cache = self.backbone.write(self._read, ids_RT, self._weights, self._cache, keeps=True)
        return logits.float().log_softmax(-1)

    def score(self) -> Tensor:
        """Return the log-probabilities [R, L] of the texts of these rows, which have the same ones."""
        tree = self._bank.tree_of(self._slots[0])
        ids_RT = torch.tensor(tree.ids, device=self.device).expand(self.num_rows, -1)
        with self._bank.routed(Route.from_slots(self._slots, torch.ones_like(ids_RT))):
            logits, _ = self.backbone.write(self._read, ids_RT, self._weights, tree=tree)
        width = max(map(len, tree.texts))
        places_LW, tokens_LW = (
            torch.tensor([[*each, *[-1] * (width - len(each))] for each in own], device=self.device)
            for own in (tree.paths, tree.texts)
        )
        own_RLW = logits.float().log_softmax(-1)[:, places_LW.clamp(min=0), tokens_LW.clamp(min=0)]
        return own_RLW.masked_fill(tokens_LW < 0, 0.0).sum(-1)

    def spread(self, index_R: Tensor) -> None:
        """Continue with these rows; a row may be repeated. They must stay sorted by slot."""
        assert self._cache is not None
        self._cache.reorder_cache(index_R)
        self._slots = [self._slots[row] for row in index_R.tolist()]
        # The cache has the keys and values of the encoder's states: the states themselves are not read any more.
        states = self._read.states_BTD[:1].expand(len(index_R), -1, -1)
        self._read = EncoderStates(states, self._read.mask_BT[index_R])


def _write(decoder: _Decoder, num_beams: int, max_tokens: int) -> list[Tensor]:
    """Return the letters of each row's answer, as numbers; NaN where the probabilities of its tokens are."""
    found = _write_greedily(decoder, max_tokens) if num_beams == 1 else _search(decoder, num_beams, max_tokens)
    texts = decoder.backbone.tokenizer.batch_decode([ids or [] for ids in found], skip_special_tokens=True)
    return [
        torch.tensor([math.nan] if ids is None else [float(ord(letter)) for letter in text.strip()])
        for ids, text in zip(found, texts, strict=True)
    ]


def _write_greedily(decoder: _Decoder, max_tokens: int) -> list[list[int] | None]:
    """Take the likeliest token at each step; rows that have ended write padding. None: probabilities are NaN."""
    ids, written = decoder.start(), []
    is_done = torch.zeros(decoder.num_rows, dtype=torch.bool, device=decoder.device)
    is_lost = is_done.clone()
    for _ in range(max_tokens):
        log_RV = decoder.write(ids)[:, -1]
        next_R = log_RV.argmax(-1)
        # One logit that is NaN or infinite makes every probability NaN, so checking the chosen one is enough.
        is_lost |= log_RV.gather(-1, next_R.unsqueeze(-1)).squeeze(-1).isnan() & ~is_done
        is_done |= is_lost
        next_R = next_R.masked_fill(is_done, decoder.backbone.pad_id)
        written.append(next_R)
        is_done |= next_R == decoder.backbone.end_id
        if is_done.all():
            break
        ids = next_R.unsqueeze(1)
    return [None if lost else row for row, lost in zip(torch.stack(written, 1).tolist(), is_lost.tolist(), strict=True)]


@dataclass
class _Ended:
    """A row's finished texts, the best first, with their scores divided by their lengths."""

    texts: list[tuple[float, list[int]]]
    is_done: bool = False
    is_lost: bool = False
    """the probabilities of its tokens are NaN"""

    def add(self, score: float, text: list[int], num_beams: int) -> None:
        self.texts = sorted([*self.texts, (score, text)], key=lambda item: -item[0])[:num_beams]


def _search(decoder: _Decoder, num_beams: int, max_tokens: int) -> list[list[int] | None]:
    """Run the beam search until no open text can beat the ended ones; return None if probabilities are NaN.

    Texts are compared by the mean log-probability of their tokens, the end included.
    """
    # Every row begins with the start token, repeated once for each beam.
    num_rows, end = decoder.num_rows, decoder.backbone.end_id
    scores_BK = torch.full((num_rows, num_beams), -torch.inf, device=decoder.device)
    scores_BK[:, 0] = 0.0  # all beams are equal at first: only one of them counts
    log_BKV = decoder.write(decoder.start())[:, -1].unsqueeze(1).expand(-1, num_beams, -1)
    decoder.spread(torch.arange(num_rows, device=decoder.device).repeat_interleave(num_beams))
    texts: list[list[list[int]]] = [[[] for _ in range(num_beams)] for _ in range(num_rows)]
    ended = [_Ended([]) for _ in range(num_rows)]
    for length in range(1, max_tokens + 1):
        # 1. the best continuations; twice as many as beams, so that enough are left if the best ones end
        flat = (scores_BK.unsqueeze(-1) + log_BKV).flatten(1)
        best_BC, place_BC = flat.topk(min(2 * num_beams, flat.shape[1]))
        size = log_BKV.shape[-1]
        candidates = zip(best_BC.tolist(), (place_BC // size).tolist(), (place_BC % size).tolist(), strict=True)
        # 2. in each row, keep the texts that end and go on with the best of the others
        chosen: list[list[tuple[float, int, int]]] = []
        for row, options in enumerate(candidates):
            if math.isnan(options[0][0]) and not ended[row].is_done:  # NaN comes first
                ended[row].is_done = ended[row].is_lost = True
            going: list[tuple[float, int, int]] = []
            for rank, (score, beam, token) in enumerate(zip(*options, strict=True)):
                if token == end:
                    if rank < num_beams and not ended[row].is_done:
                        ended[row].add(score / length, texts[row][beam], num_beams)
                elif len(going) < num_beams:
                    going.append((score, beam, token))
            chosen.append(going)
            full = len(ended[row].texts) == num_beams
            ended[row].is_done |= full and ended[row].texts[-1][0] >= going[0][0] / length
        # 3. extend the beams; stop when every row is done
        texts = [[[*texts[row][beam], token] for _, beam, token in going] for row, going in enumerate(chosen)]
        scores_BK = torch.tensor([[score for score, *_ in going] for going in chosen], device=decoder.device)
        if length == max_tokens or all(item.is_done for item in ended):
            break
        # 4. reorder the decoder's rows to the chosen beams, and write one token
        beams_BK = torch.tensor([[beam for _, beam, _ in going] for going in chosen], device=decoder.device)
        tokens_BK = torch.tensor([[token for *_, token in going] for going in chosen], device=decoder.device)
        decoder.spread((beams_BK + num_beams * torch.arange(num_rows, device=decoder.device).unsqueeze(1)).flatten())
        log_BKV = decoder.write(tokens_BK.view(-1, 1))[:, -1].unflatten(0, (num_rows, num_beams))
    # Rows that never ended: their open texts count as they are.
    for row, item in enumerate(ended):
        if not item.is_done:
            for score, text in zip(scores_BK[row].tolist(), texts[row], strict=True):
                item.add(score / length, text, num_beams)
    return [None if item.is_lost else item.texts[0][1] for item in ended]
