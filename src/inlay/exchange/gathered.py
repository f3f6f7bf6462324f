"""A bank as one module with the task id as an input: the form in which it can be traced and leave Inlay.

In Inlay rows are sorted by slot and a banked operation is a product per segment. A traced graph has no segments: here
every row gathers its own slot's parameters by task id, and a banked operation is one batched product, whatever the
mix. Where slots differ in kind (activation, depth, a norm inside, pooling), every kind that occurs is computed and each
row keeps its own. A gather also keeps slots apart: NaN in one cannot reach the rows of another.

Shape letters: S slots, B rows, T tokens of a row, D width, E output width, R bottleneck, L labels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inlay.model.bank.bank import Bank
from inlay.model.bank.forward import BankForward
from inlay.model.bank.methods import resolve_method
from inlay.model.bank.views import Views, build_views
from inlay.model.batch.route import Batch, Route
from inlay.model.heads.readout import pair_features
from inlay.model.kernels.reference import ACTIVATIONS, NORM_EPS, Bottleneck, Shape


class Choice:
    """Each row's own of several results: the rows' task ids, and what slots have by id."""

    def __init__(self, task_B: Tensor) -> None:
        self.task_B = task_B
        self._gathered: dict[tuple[Any, ...], Tensor] = {}

    def own(self, stacked: Tensor) -> Tensor:
        """Each row's own entry of a stack."""
        return stacked.index_select(0, self.task_B)  # `stacked[task_B]` is traced as a slower kind of gather

    def per_row(self, stacked_SD: Tensor, x: Tensor) -> Tensor:
        """Each row's own vector [B, 1, …, D], to be added to or multiplied with the rows of x."""
        return self.own(stacked_SD).reshape(-1, *[1] * (x.dim() - 2), stacked_SD.shape[-1])

    def value(self, values: Sequence[float], x: Tensor) -> Tensor:
        """Each row's own number [B, 1, …, 1], for the rows of x."""
        key = (*values, x.dim())
        if key not in self._gathered:
            stacked = torch.tensor(values, dtype=torch.float32, device=self.task_B.device)
            self._gathered[key] = self.own(stacked).reshape(-1, *[1] * (x.dim() - 1))
        return self._gathered[key]

    def pick(self, kinds: Sequence[Any], compute: Callable[[Any], Tensor]) -> Tensor:
        """What `compute` gives for each row's own kind; a slot of the kind None takes any."""
        occurring = [*dict.fromkeys(kind for kind in kinds if kind is not None)]
        result = compute(occurring[0])
        for kind in occurring[1:]:
            is_own = self.value([float(other == kind) for other in kinds], result) == 1
            result = torch.where(is_own, compute(kind), result)
        return result


class GatheredBank(BankForward):
    """What the wrappers in the backbone call, for rows that gather their parameters."""

    def __init__(self, views: Views, choice: Choice) -> None:
        super().__init__(views, Route(()))
        self._choice = choice

    def _block(self, views: Views) -> GatheredBank:
        return GatheredBank(views, self._choice)

    def adapt(self, key: str, h: Tensor, weights: Bottleneck) -> Tensor:
        """h with what its own bottleneck makes of it added."""
        return h + self.update(key, h, weights)

    def update(self, key: str, h: Tensor, weights: Bottleneck) -> Tensor:
        """scale·up(act(down(h))) by each row's own slot; zero where a slot has no bottleneck here."""
        choice, shapes = self._choice, weights.shapes
        z = _plus(h @ choice.own(weights.down_SDR), weights.down_bias_SR, choice)
        norms = [None if shape is None else shape.inner_norm for shape in shapes]
        z = choice.pick(norms, lambda norm: _INNER_NORMS[norm](z, weights, choice))
        z = self._activate(z, shapes)
        for index, (hidden_SRR, bias_SR) in enumerate(weights.hidden, start=1):
            deeper = self._activate(_plus(z @ choice.own(hidden_SRR), bias_SR, choice), shapes)
            is_deep = [None if shape is None else shape.depth > index for shape in shapes]
            z = choice.pick(is_deep, lambda deep, deeper=deeper, z=z: deeper if deep else z)  # type: ignore[misc]
        update = _plus(z @ choice.own(weights.up_SRE), weights.up_bias_SE, choice)
        behind = {"output": lambda: self._out_norm(update, weights), "alone": lambda: self._out_norm(h, weights)}
        update = choice.pick(norms, lambda norm: behind[norm]() if norm in behind else update)
        scales = [0.0 if shape is None else shape.scale for shape in shapes]
        update = update if set(scales) == {1.0} else update * choice.value(scales, update)
        multiplies = [None if shape is None else shape.multiplies for shape in shapes]
        return choice.pick(multiplies, lambda does: h * update if does else update)

    def _out_norm(self, update: Tensor, weights: Bottleneck) -> Tensor:
        assert weights.out_norm is not None
        return self.layer_norm(update, *weights.out_norm, NORM_EPS)

    def layer_norm(self, x: Tensor, scale_SD: Tensor, shift_SD: Tensor | None, eps: float) -> Tensor:
        """Layer norm with each row's own scale and shift."""
        normal = F.layer_norm(x, x.shape[-1:], eps=eps) * self._choice.per_row(scale_SD, x)
        return _plus(normal, shift_SD, self._choice)

    def per_row(self, stacked_SD: Tensor, x: Tensor) -> Tensor:
        """Each row's own vector."""
        return self._choice.per_row(stacked_SD, x)

    def _activate(self, z: Tensor, shapes: Sequence[Shape | None]) -> Tensor:
        if not any(shape.activation for shape in shapes if shape is not None):
            return z  # LoRA
        return self._choice.pick(
            [None if shape is None else shape.activation for shape in shapes], lambda name: ACTIVATIONS[name](z)
        )


def _layer_norm_inside(z: Tensor, weights: Bottleneck, choice: Choice) -> Tensor:
    """Over a slot's own columns; those beyond its size are zero and stay so."""
    assert weights.norm is not None
    sizes = [1 if shape is None else shape.size for shape in weights.shapes]
    size = choice.value(sizes, z)
    is_own = torch.arange(z.shape[-1], device=z.device) < size
    centred = torch.where(is_own, z - z.sum(-1, keepdim=True) / size, 0.0)
    variance = centred.square().sum(-1, keepdim=True) / size
    scale, shift = (choice.per_row(tensor, z) for tensor in weights.norm)
    return centred * torch.rsqrt(variance + NORM_EPS) * scale + shift


def _batch_norm_inside(z: Tensor, weights: Bottleneck, choice: Choice) -> Tensor:
    """By the statistics stored with the slot."""
    assert weights.norm is not None
    assert weights.running is not None
    (scale, shift), (mean, variance) = weights.norm, weights.running
    factor_SR = scale * torch.rsqrt(variance + NORM_EPS)
    return z * choice.per_row(factor_SR, z) + choice.per_row(shift - mean * factor_SR, z)


_INNER_NORMS: dict[str, Callable[[Tensor, Bottleneck, Choice], Tensor]] = {
    "none": lambda z, weights, choice: z,
    "layer": _layer_norm_inside,
    "batch": _batch_norm_inside,
    "output": lambda z, weights, choice: z,
    "alone": lambda z, weights, choice: z,
}


class TaskGraph(nn.Module):
    """Backbone, slots and heads of a bank without free slots: all the way from token ids to logits."""

    def __init__(self, bank: Bank) -> None:
        super().__init__()
        specs = [spec for spec in bank.specs if spec is not None]
        assert len(specs) == bank.num_slots, "a free slot has no answer"
        self._backbone = bank.backbone
        self.model = bank.backbone.model
        self._heads = [spec.head for spec in specs]
        self._methods = [resolve_method(spec.method) for spec in specs]
        self._names = list(bank.stacks)
        for name, stack in bank.stacks.items():
            self.register_buffer(_buffer_name(name), _widened(name, stack.detach(), bank.stacks))

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        task: Tensor,
        token_type_ids: Tensor | None = None,
        second: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The logits [B, L] of each row by its own task, and how many of them are its own [B].

        A pair that is read apart is two rows; `second` has the place of the second text [B] at the first one's row.
        """
        stacks = {name: self.get_buffer(_buffer_name(name)) for name in self._names}
        views = build_views(
            self._backbone.anatomy, stacks, [(method, frozenset()) for method in self._methods], is_expanded=True
        )
        choice = Choice(task)
        batch = Batch(input_ids, attention_mask, token_type_ids, Route(()), (), ())
        has_mix = any(head.features == "mix" for head in self._heads)
        with self._backbone.mount.routed(GatheredBank(views, choice)):
            layers = self._backbone.hidden_layers(batch, all_layers=has_mix)
        pooled_BD = self._pool(layers, attention_mask, stacks, choice)
        num_outputs_B = choice.own(torch.tensor([head.num_outputs for head in self._heads]))
        other_BD = None if second is None else pooled_BD.index_select(0, second)
        return self._answer(pooled_BD, other_BD, stacks, choice), num_outputs_B

    def _pool(self, layers: Sequence[Tensor], mask_BT: Tensor, stacks: Mapping[str, Tensor], choice: Choice) -> Tensor:
        """The vector each row's head reads: its own features, pooling and layer before the head."""
        features = {"last": lambda: layers[-1], "mix": lambda: _mix(layers, stacks, choice)}
        states_BTD = choice.pick([head.features for head in self._heads], lambda kind: features[kind]())
        vector_BD = choice.pick(
            [head.pooling for head in self._heads], lambda pooling: self._backbone.pool(states_BTD, mask_BT, pooling)
        )

        def before_head(has_layer: bool) -> Tensor:
            if not has_layer:
                return vector_BD
            weight_BDD, bias_BD = (choice.own(stacks[f"head.hidden.{part}"]) for part in ("weight", "bias"))
            return torch.tanh((weight_BDD @ vector_BD.unsqueeze(-1)).squeeze(-1) + bias_BD)

        return choice.pick([head.hidden != "none" for head in self._heads], before_head)

    def _answer(
        self, pooled_BD: Tensor, other_BD: Tensor | None, stacks: Mapping[str, Tensor], choice: Choice
    ) -> Tensor:
        """Logits as wide as the widest head: −∞ beyond a row's own, numbers on their target's scale."""
        weight_BLD, bias_BL = (choice.own(stacks[f"head.{part}"]) for part in ("weight", "bias"))
        logits_BL = (weight_BLD @ pooled_BD.unsqueeze(-1)).squeeze(-1) + bias_BL
        if other_BD is not None:
            features_BF1 = pair_features(pooled_BD, other_BD).unsqueeze(-1)
            paired_BL = logits_BL + (choice.own(stacks["head.pair_weight"]) @ features_BF1).squeeze(-1)
            plain_BL = logits_BL
            logits_BL = choice.pick(
                [head.has_towers for head in self._heads], lambda has_towers: paired_BL if has_towers else plain_BL
            )
        means, deviations = ([getattr(head, name) for head in self._heads] for name in ("target_mean", "target_std"))
        if set(means) != {0.0} or set(deviations) != {1.0}:
            logits_BL = logits_BL * choice.value(deviations, logits_BL) + choice.value(means, logits_BL)
        num_outputs_B1 = choice.value([head.num_outputs for head in self._heads], logits_BL)
        is_own_BL = torch.arange(logits_BL.shape[-1]) < num_outputs_B1
        # A gather takes −1 for the last task, and a GPU's anything: rows of no task must not look answered.
        missing_B1 = ((choice.task_B < 0) | (choice.task_B >= len(self._heads))).unsqueeze(-1)
        return logits_BL.masked_fill(~is_own_BL, -torch.inf).masked_fill(missing_B1, torch.nan)


_RANKS = {"down": (2,), "up": (1,), "up_bias": ()}
"""The axes of an adapter's stacks that are as long as the bottleneck; of the others all but the first."""


def _widened(name: str, stack: Tensor, stacks: Mapping[str, Tensor]) -> Tensor:
    """The stack with zeros up to the bottleneck of its site: a bank keeps each only as wide as its own slots need."""
    if not name.startswith("adapter."):
        return stack
    site, _, part = name.rpartition(".")
    size = stacks[f"{site}.down"].shape[-1]
    shape = [size if axis in _RANKS.get(part, range(1, 3)) else n for axis, n in enumerate(stack.shape)]
    wide = stack.new_zeros(shape)
    wide[tuple(slice(0, n) for n in stack.shape)] = stack
    return wide


def _mix(layers: Sequence[Tensor], stacks: Mapping[str, Tensor], choice: Choice) -> Tensor:
    """ELMo's mix of all layers: a factor times their mean weighted by a softmax."""
    weights_BK = choice.own(torch.softmax(stacks["head.mix"], -1) * stacks["head.mix_scale"])
    stacked_BTDK = torch.stack(list(layers), -1)
    return (stacked_BTDK @ weights_BK[:, None, :, None]).squeeze(-1)


def _plus(x: Tensor, bias_SD: Tensor | None, choice: Choice) -> Tensor:
    return x if bias_SD is None else x + choice.per_row(bias_SD, x)


def _buffer_name(name: str) -> str:
    return name.replace(".", "_").replace("-", "_to_")  # torch allows no dot in a buffer's name
