"""The tokens of a cohort's rows: what several runs read is tokenised once, and forgotten when none does."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from inlay.data.encode import Encoded
from inlay.data.kinds import WRITTEN_TEXT
from inlay.data.tasks import Split
from inlay.data.token_cache import encode_cached
from inlay.data.windows import Reading
from inlay.model.backbone.backbone import Backbone
from inlay.training.cohort.member import MemberRows
from inlay.training.evaluate import find_texts
from inlay.training.run.run import Run


class Encoder:
    """Tokenises each (task, split, length) once, however many runs share it."""

    def __init__(self, backbone: Backbone, on_encode: Callable[[int, int], None]) -> None:
        self._backbone, self._on_encode = backbone, on_encode
        self._known: dict[tuple[str, str, Reading], Encoded] = {}

    def encode(self, run: Run, split: str) -> Encoded:
        """The rows of a split as a run reads them."""
        key = (run.task.digest, split, run.reading)
        if key not in self._known:
            rows = run.task.train if split == "train" else run.task.dev
            number = len(rows)
            self._known[key] = encode_cached(
                self._backbone.tokenizer, rows, run.reading, lambda num_done: self._on_encode(num_done, number)
            )
        return self._known[key]

    def rows_of(self, run: Run) -> MemberRows:
        """All rows that a run trains and is judged on."""
        written = self._write(run)
        return MemberRows(self.encode(run, "train"), self.encode(run, "dev"), written, self._count_unwritable(written))

    def _write(self, run: Run) -> Encoded | None:
        """The tokens of the answers to a run's training rows, where they are written."""
        head, targets = run.spec.head, run.task.train.targets
        if not head.is_written:
            return None
        assert targets is not None
        chosen = [head.texts[index] for index in find_texts(targets, head)] if head.texts else list(targets)
        max_length = max(head.max_answer, *(len(self._backbone.tokenizer(text)["input_ids"]) for text in head.texts), 1)
        return encode_cached(self._backbone.tokenizer, Split(chosen, None, None, []), Reading(WRITTEN_TEXT, max_length))

    def _count_unwritable(self, written: Encoded | None) -> int:
        """Answers with a token that stands for whatever has none."""
        unknown = self._backbone.tokenizer.unk_token_id
        if written is None or unknown is None:
            return 0
        return len(np.unique(np.searchsorted(written.offsets, np.flatnonzero(written.flat_ids == unknown), "right")))

    def keep(self, runs: Sequence[Run]) -> None:
        """Forget the rows that none of these runs reads."""
        read = {(run.task.digest, run.reading) for run in runs}
        self._known = {key: rows for key, rows in self._known.items() if (key[0], key[2]) in read}
