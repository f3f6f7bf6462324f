"""The lock of a model: one thread at a time has its forward passes, and finds it in the mode that the thread set.

The active route, hooks on blocks, replaced weights, dropout and recomputation are state of the one model that all
engines and runs share. So a pass is made in a turn (`Bank.routed` takes it), and what a thread changes for longer than
a pass (`changed`) is put away while another thread has the model. Between passes turns go round in the order in which
they were asked for.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import get_ident
from typing import Any

from torch import nn

from inlay.locks import FairLock


@dataclass(frozen=True)
class _Mode:
    """What threads may change in a model."""

    is_training: bool
    rates: list[tuple[str, nn.Module, str, float]]
    forwards: list[Any]
    """what each block has in place of its class's `forward`; None: nothing"""


class ModelLock:
    """The lock of a model's passes, and the mode that each thread wants the model in.

    `with lock:` has the model alone, in this thread's mode. A thread may take a turn within its turn.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module]) -> None:
        self._model, self._blocks = model, blocks
        self._lock = FairLock()
        self._modes: dict[int | None, _Mode] = {}
        """thread -> the mode it left the model in; None: that of all threads that changed nothing. Empty at rest"""
        self._holder: int | None = None
        """the thread whose mode the model is in"""

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelLock:
        return ModelLock(copy.deepcopy(self._model, memo), copy.deepcopy(self._blocks, memo))

    def __enter__(self) -> None:
        self._lock.__enter__()
        if self._modes:
            try:
                self._switch()
            except BaseException:
                self._lock.__exit__()
                raise

    def __exit__(self, *raised: object) -> None:
        self._lock.__exit__()

    @contextmanager
    def changed(self, change: Callable[[], object]) -> Iterator[None]:
        """Change the model's mode for this thread's passes inside the block."""
        thread = get_ident()
        with self:
            before, outer = self._note(), self._holder
            self._modes.setdefault(outer, before)
            self._modes[thread], self._holder = before, thread
        try:
            with self:
                change()
            yield
        finally:
            with self:
                self._set(before)
                self._holder = outer
                if outer is None:
                    del self._modes[thread]
                if self._modes.keys() == {None}:
                    self._modes.clear()

    def _switch(self) -> None:
        """Put away the mode that another thread left the model in, and bring back this one's."""
        thread = get_ident()
        wanted = thread if thread in self._modes else None
        if wanted != self._holder:
            self._modes[self._holder] = self._note()
            self._set(self._modes[wanted])
            self._holder = wanted

    def _note(self) -> _Mode:
        forwards = [vars(block).get("forward") for block in self._blocks]
        return _Mode(self._model.training, list(dropout_rates(self._model)), forwards)

    def _set(self, mode: _Mode) -> None:
        self._model.train(mode.is_training)
        for _, module, name, rate in mode.rates:
            setattr(module, name, rate)
        for block, forward in zip(self._blocks, mode.forwards, strict=True):
            if forward is None:
                vars(block).pop("forward", None)
            else:
                block.forward = forward


def dropout_rates(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, float]]:
    """Yield the dropout rates of a model: in modules, or as plain numbers in ModernBERT's and T5's attention."""
    for path, module in model.named_modules():
        for name in ("p",) if isinstance(module, nn.Dropout) else ("attention_dropout", "dropout"):
            rate = vars(module).get(name)
            if isinstance(rate, int | float) and not isinstance(rate, bool):
                yield path, module, name, rate
