"""The forward passes of an engine: captured programs on a GPU once they pay off, launched kernels elsewhere.

A captured pass (model/heads/captured_inference.py) takes rows of any mix of tasks whose heads read one vector of a
row. Rows of other heads, and all rows on devices without capture, are launched kernel by kernel, so an unusual row does
not slow down the others. Launched rows that share a text share its frozen layers (`shared_texts.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Sequence

from torch import Tensor

from inlay.errors import Unsupported
from inlay.model import (
    MOST_TOKENS,
    Bank,
    GraphedForward,
    Row,
    SlotSpec,
    batches_by_length,
    find_obstacle,
    is_out_of_memory,
)
from inlay.serving.shared_texts import SharedTexts

PATIENCE_S = 5.0
"""Seconds of launched passes after which an engine that may choose begins to capture: about what compiling takes. (On
an H200 an engine of captured passes was warm after 6.3 s, one of launched passes after 4.0 s; see
results/speed/serve-h200.json.) So a short input never waits for a compiler, and a long one takes at most about twice as
long as the better choice would."""


class Passes:
    """Computes the logits of rows for any mix of a bank's slots.

    `is_compiled`: capture from the first row on (True), never (False), or once launched passes have taken `PATIENCE_S`
    (None). `on_compile` is called with a message whenever something new is compiled.
    """

    def __init__(self, bank: Bank, *, is_compiled: bool | None) -> None:
        obstacle = find_obstacle(bank.backbone)
        if is_compiled and obstacle is not None:
            raise Unsupported(f"a compiled engine on the backbone `{bank.backbone.name}`: {obstacle[0]}", obstacle[1])
        self.shared_texts, self._num_layers = SharedTexts(bank), bank.anatomy.num_layers
        self._graphed = None if obstacle is not None or is_compiled is False else GraphedForward(bank)
        self._patience_s = 0.0 if is_compiled else PATIENCE_S
        self._has_launched = False
        self.on_compile: Callable[[str], None] = lambda what: None

    @property
    def is_compiled(self) -> bool:
        """Return whether rows are captured from now on."""
        return self._graphed is not None and self._patience_s <= 0

    def find_share(self, spec: SlotSpec) -> float:
        """Return the share of a slot's layers that are computed once for all rows of a text."""
        return 0.0 if self.is_compiled else self.shared_texts.find_depth(spec).layer / self._num_layers

    def logits(self, rows: Sequence[Row], keys: Sequence[Hashable] | None = None) -> list[Tensor]:
        """Return the logits of every row, as `infer` gives them, in order; rows of one key have the same tokens."""
        keys = range(len(rows)) if keys is None else keys
        if self._graphed is None:
            return self.shared_texts.logits(rows, keys)
        is_taken = [self._graphed.takes(row) for row in rows]
        found: dict[int, Tensor] = {}
        late: list[int] = []  # rows that no captured pass takes go together at the end
        for indices in _chunks(rows):
            taken = [index for index in indices if is_taken[index]]
            if taken and self.is_compiled:
                found |= self._capture(rows, keys, taken)
                late += [index for index in indices if not is_taken[index]]
            else:
                found |= self._launch(rows, keys, indices, share=len(taken) / len(indices))
        found |= self._launch(rows, keys, late)
        return [found[index] for index in range(len(rows))]

    def _capture(self, rows: Sequence[Row], keys: Sequence[Hashable], indices: list[int]) -> dict[int, Tensor]:
        """Send rows through captured programs; if a capture does not fit in memory, launch from now on."""
        assert self._graphed is not None
        self._graphed.on_compile = self.on_compile
        try:
            return dict(zip(indices, self._graphed.logits([rows[index] for index in indices]), strict=True))
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            self._graphed = None
        self.on_compile("captured passes do not fit in memory: from now on passes are launched")
        return self._launch(rows, keys, indices)

    def _launch(
        self, rows: Sequence[Row], keys: Sequence[Hashable], indices: list[int], share: float = 0.0
    ) -> dict[int, Tensor]:
        """Send rows through launched kernels.

        The time counts against the patience for capturing, by the share of the rows that could have been captured.
        """
        began = time.perf_counter()
        chosen, own = [rows[index] for index in indices], [keys[index] for index in indices]
        found = dict(zip(indices, self.shared_texts.logits(chosen, own), strict=True))
        if self._has_launched:  # the first pass loads the kernels, which a captured one would do too
            self._patience_s -= share * (time.perf_counter() - began)
        self._has_launched = self._has_launched or bool(indices)
        return found


def _chunks(rows: Sequence[Row]) -> Iterator[list[int]]:
    """Yield row indices in as few batches as a captured pass allows, the long rows first.

    The batches have about equally many tokens, since batches of one size share a program.
    """
    lengths = [row.num_tokens for row in rows]
    room = MOST_TOKENS - max(lengths, default=0)
    if room <= 0:  # almost every row is a batch of its own; rows that are too long are not captured
        yield from batches_by_length(lengths, MOST_TOKENS, packs=True)
        return
    num_chunks = max(1, -(-sum(lengths) // room))
    yield from batches_by_length(lengths, -(-sum(lengths) // num_chunks) + MOST_TOKENS - room, packs=True)
