"""A bank as one module with the task id as an input: the form in which it can be traced and leave Inlay.

In Inlay rows are sorted by slot and a banked operation is a product per segment. A traced graph has no segments: here
every row gathers its own slot's parameters by task id, and a banked operation is one batched product, whatever the
mix. The wrappers in the backbone call it as they call a bank. What a slot does not have is neutral (0 for what is
added, 1 for what is multiplied, the backbone's own norm and bias); columns beyond a slot's size are zero and stay so.
A gather also keeps slots apart: NaN in one cannot reach the rows of another.

Shape letters: S slots, B rows, T tokens of a row, D width, R bottleneck, L labels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inlay.errors import Unsupported
from inlay.model.backbone import Backbone
from inlay.model.bank import SlotSpec
from inlay.model.kernels import ACTIVATIONS
from inlay.model.methods import resolve_method
from inlay.model.route import Batch, Route

KINDS = ("classify", "multilabel", "regress")
"""Kinds of task whose answer is one row of logits: those that a graph can mix."""


@dataclass(frozen=True)
class Slot:
    """One task of the graph: its reference, for errors, and what a bank's slot would hold."""

    reference: str
    spec: SlotSpec
    tensors: Mapping[str, Tensor]


class Gathered(nn.Module):
    """The slots of several tasks; `bind(task_B)` gives the operations that the wrappers in the backbone ask for."""

    def __init__(self, backbone: Backbone, slots: Sequence[Slot]) -> None:
        super().__init__()
        anatomy, own = backbone.anatomy, backbone.norm_tensors()
        self.adapters = nn.ModuleDict()
        self.norms = nn.ModuleDict()
        for site in anatomy.sites:
            adapters = [_find_adapter(slot, site.key) for slot in slots]
            if any(adapters):
                self.adapters[_plain(site.key)] = Bottleneck(adapters, anatomy.hidden_size)
        for norm in anatomy.norms:
            names = [f"norm.{norm.key}.{part}" for part in ("scale", "shift")]
            if any(name in slot.tensors for slot in slots for name in names):
                self.norms[_plain(norm.key)] = Norm(
                    *(_stack([slot.tensors.get(name) for slot in slots], own.get(name)) for name in names)
                )

    def bind(self, task_B: Tensor) -> Bound:
        """The operations for rows of these tasks."""
        return Bound(self, task_B)


class Bound:
    """What the wrappers in the backbone call (`SlotOperations`), for the rows of one batch."""

    def __init__(self, bank: Gathered, task_B: Tensor) -> None:
        self._bank, self._task_B = bank, task_B

    def rewrite(self, key: str, output: Tensor) -> Tensor:
        adapter = _get(self._bank.adapters, key)
        return output if adapter is None else output + adapter(output, self._task_B)

    def normalize(self, norm_key: str, site_key: str | None, inner: Any, x: Tensor) -> Tensor:
        adapter = None if site_key is None else _get(self._bank.adapters, site_key)
        if adapter is not None:
            x = x + adapter(self._norm(norm_key, inner, x), self._task_B)
        return self._norm(norm_key, inner, x)

    def _norm(self, key: str, inner: Any, x: Tensor) -> Tensor:
        norm = _get(self._bank.norms, key)
        return inner(x) if norm is None else norm(x, inner.eps, self._task_B)


@dataclass(frozen=True)
class Adapter:
    """One slot's bottleneck at one site, at its own size."""

    down: Tensor
    down_bias: Tensor
    up: Tensor
    up_bias: Tensor
    activation: str


class Bottleneck(nn.Module):
    """The adapters of one site: up(act(down(h))) by each row's own slot, zero where a slot has none."""

    def __init__(self, adapters: Sequence[Adapter | None], width: int) -> None:
        super().__init__()
        size = max(len(adapter.down_bias) for adapter in adapters if adapter is not None)
        shapes = {"down": (width, size), "down_bias": (size,), "up": (size, width), "up_bias": (width,)}
        for name, shape in shapes.items():
            own = [None if adapter is None else getattr(adapter, name) for adapter in adapters]
            self.register_buffer(name, _stack(own, torch.zeros(shape)))
        self.activation = Activation(["" if adapter is None else adapter.activation for adapter in adapters])

    def forward(self, h_BTD: Tensor, task_B: Tensor) -> Tensor:
        z_BTR = h_BTD @ _own(self.down, task_B) + _rows(self.down_bias, task_B)
        return self.activation(z_BTR, task_B) @ _own(self.up, task_B) + _rows(self.up_bias, task_B)


class Activation(nn.Module):
    """Each row's own activation: every one that occurs is computed, and chosen by task."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self.names = sorted({name for name in names if name})
        self.register_buffer("choice", torch.tensor([self.names.index(name) if name else 0 for name in names]))

    def forward(self, z_BTR: Tensor, task_B: Tensor) -> Tensor:
        first, *others = (ACTIVATIONS[name](z_BTR) for name in self.names)
        return _choose(first, others, _own(self.choice, task_B))


class Norm(nn.Module):
    """A layer norm with each row's own scale and shift."""

    def __init__(self, scale_SD: Tensor, shift_SD: Tensor | None) -> None:
        super().__init__()
        self.register_buffer("scale", scale_SD)
        self.register_buffer("shift", shift_SD)

    def forward(self, x_BTD: Tensor, eps: float, task_B: Tensor) -> Tensor:
        normal = F.layer_norm(x_BTD, x_BTD.shape[-1:], eps=eps) * _rows(self.scale, task_B)
        return normal if self.shift is None else normal + _rows(self.shift, task_B)


class Heads(nn.Module):
    """Each row's own head: logits as wide as the widest, −∞ beyond a slot's own, numbers on their target's scale."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        super().__init__()
        specs = [slot.spec.head for slot in slots]
        num_outputs = torch.tensor([spec.num_outputs for spec in specs])
        widest = int(num_outputs.max())
        self.poolings = sorted({spec.pooling for spec in specs})
        self.register_buffer("pooling", torch.tensor([self.poolings.index(spec.pooling) for spec in specs]))
        self.register_buffer("num_outputs", num_outputs)
        self.register_buffer("is_own", torch.arange(widest) < num_outputs[:, None])
        for name in ("weight", "bias"):
            own = [slot.tensors[f"head.{name}"] for slot in slots]
            self.register_buffer(name, _stack(own, torch.zeros(widest, *own[0].shape[1:])))
        self.register_buffer("mean", torch.tensor([spec.target_mean for spec in specs]))
        self.register_buffer("std", torch.tensor([spec.target_std for spec in specs]))

    def forward(self, pooled_BD: Tensor, task_B: Tensor) -> Tensor:
        logits_BL = (_own(self.weight, task_B) @ pooled_BD.unsqueeze(-1)).squeeze(-1) + _own(self.bias, task_B)
        logits_BL = logits_BL * _own(self.std, task_B)[:, None] + _own(self.mean, task_B)[:, None]
        logits_BL = logits_BL.masked_fill(~_own(self.is_own, task_B), -torch.inf)
        # A gather takes −1 for the last task; its rows must not look answered.
        return logits_BL.masked_fill((task_B < 0)[:, None], torch.nan)


class TaskGraph(nn.Module):
    """Backbone, slots and heads of several tasks: `forward` is the whole way from token ids to logits."""

    def __init__(self, backbone: Backbone, slots: Sequence[Slot]) -> None:
        super().__init__()
        for slot in slots:
            _check_slot(slot)
        self._backbone = backbone
        self.model = backbone.model
        self.bank = Gathered(backbone, slots)
        self.heads = Heads(slots)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, task: Tensor, token_type_ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The logits [B, L] of each row by its own task, and how many of them are its own [B]."""
        batch = Batch(input_ids, attention_mask, token_type_ids, Route(()), ())
        with self._backbone.mount.routed(self.bank.bind(task)):
            hidden_BTD = self._backbone.hidden(batch)
        pooled_BD = self._pool(hidden_BTD, attention_mask, task)
        return self.heads(pooled_BD, task), _own(self.heads.num_outputs, task)

    def _pool(self, hidden_BTD: Tensor, mask_BT: Tensor, task_B: Tensor) -> Tensor:
        poolings = self.heads.poolings
        first, *others = (self._backbone.pool(hidden_BTD, mask_BT, pooling) for pooling in poolings)
        return _choose(first, others, _own(self.heads.pooling, task_B))


def _check_slot(slot: Slot) -> None:
    kind = slot.spec.head.kind
    if kind not in KINDS:
        raise Unsupported(
            f"`{slot.reference}` is of the kind `{kind}`, whose answer is not one row of logits",
            f"an ONNX graph mixes tasks of the kinds {', '.join(KINDS)}: leave it out",
        )


def _find_adapter(slot: Slot, key: str) -> Adapter | None:
    parts = ("down", "down_bias", "up", "up_bias")
    if f"adapter.{key}.down" not in slot.tensors:
        return None
    activation = resolve_method(slot.spec.method).activation
    return Adapter(*(slot.tensors[f"adapter.{key}.{part}"] for part in parts), activation)


def _choose(first: Tensor, others: Sequence[Tensor], choice_B: Tensor) -> Tensor:
    """Of several results for all rows, each row's own: `choice` 0 is the first, 1 the first of the others, …"""
    choice = choice_B.reshape(-1, *(1 for _ in range(first.dim() - 1)))
    for index, other in enumerate(others, start=1):
        first = torch.where(choice == index, other, first)
    return first


def _stack(own: Sequence[Tensor | None], neutral: Tensor | None) -> Tensor | None:
    """The slots' tensors over each other, in the corners of as many copies of the neutral one."""
    if neutral is None:
        return None
    stacked = torch.stack([neutral.float()] * len(own))
    for slot, tensor in enumerate(own):
        if tensor is not None:
            stacked[slot][tuple(slice(0, size) for size in tensor.shape)] = tensor.float()
    return stacked


def _own(stacked: Tensor, task_B: Tensor) -> Tensor:
    """Each row's own entry of a stack."""
    return stacked.index_select(0, task_B)  # `stacked[task_B]` is traced as a slower kind of gather


def _rows(stacked_SD: Tensor, task_B: Tensor) -> Tensor:
    """Each row's own vector, to be added to or multiplied with every token of it."""
    return _own(stacked_SD, task_B).unsqueeze(1)


def _plain(key: str) -> str:
    return key.replace(".", "_")  # torch allows no dot in a submodule's name


def _get(modules: nn.ModuleDict, key: str) -> nn.Module | None:
    return modules[_plain(key)] if _plain(key) in modules else None
