"""A bank as one module with the task id as an input: the form in which it can be traced and leave Inlay.

In Inlay rows are sorted by slot and a banked operation is a product per segment. A traced graph has no segments: here
every row gathers its own slot's parameters by task id, and a banked operation is one batched product, whatever the
mix (the parts have it so). Where slots differ in kind (pooling, a layer before the head), every kind that occurs is
computed and each row keeps its own. A gather also keeps slots apart: NaN in one cannot reach the rows of another.

Shape letters: S slots, B rows, T tokens of a row, D width, K layers, L labels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from inlay.model import Bank, Batch, Gather, PassHooks, Route, build_views, pair_features
from inlay.model import head as head_part


class TaskGraph(nn.Module):
    """Backbone, slots and heads of a bank without free slots: all the way from token ids to logits."""

    def __init__(self, bank: Bank) -> None:
        super().__init__()
        specs = [spec for spec in bank.specs if spec is not None]
        assert len(specs) == bank.num_slots, "a free slot has no answer"
        self._backbone = bank.backbone
        self.model = bank.backbone.model
        self._heads = [spec.head for spec in specs]
        self._methods = [spec.method for spec in specs]
        self._names = list(bank.stacks)
        for name, stack in bank.stacks.items():
            self.register_buffer(_buffer_name(name), stack.detach())

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
        gather = Gather(task)
        batch = Batch(input_ids, attention_mask, token_type_ids, Route(()), (), ())
        has_mix = any(head.features == "mix" for head in self._heads)
        with self._backbone.mount.routed(PassHooks(views, Route(()), gather=gather)):
            layers = self._backbone.hidden_layers(batch, all_layers=has_mix)
        pooled_BD = self._pool(layers, attention_mask, stacks, gather)
        num_outputs_B = gather.own(torch.tensor([head.num_outputs for head in self._heads]))
        other_BD = None if second is None else pooled_BD.index_select(0, second)
        return self._answer(pooled_BD, other_BD, stacks, gather), num_outputs_B

    def _pool(self, layers: Sequence[Tensor], mask_BT: Tensor, stacks: Mapping[str, Tensor], gather: Gather) -> Tensor:
        """The vector each row's head reads: its own features, pooling and layer before the head."""
        features = {"last": lambda: layers[-1], "mix": lambda: _mix(layers, stacks, gather)}
        states_BTD = gather.pick([head.features for head in self._heads], lambda kind: features[kind]())
        vector_BD = gather.pick(
            [head.pooling for head in self._heads], lambda pooling: self._backbone.pool(states_BTD, mask_BT, pooling)
        )

        def before_head(has_layer: bool) -> Tensor:
            if not has_layer:
                return vector_BD
            weight_BDD, bias_BD = (
                gather.own(stacks[name]) for name in (head_part.HIDDEN_WEIGHT, head_part.HIDDEN_BIAS)
            )
            return torch.tanh((weight_BDD @ vector_BD.unsqueeze(-1)).squeeze(-1) + bias_BD)

        return gather.pick([head.hidden != "none" for head in self._heads], before_head)

    def _answer(
        self, pooled_BD: Tensor, other_BD: Tensor | None, stacks: Mapping[str, Tensor], gather: Gather
    ) -> Tensor:
        """Logits as wide as the widest head: −∞ beyond a row's own, numbers on their target's scale."""
        weight_BLD, bias_BL = (gather.own(stacks[name]) for name in (head_part.WEIGHT, head_part.BIAS))
        logits_BL = (weight_BLD @ pooled_BD.unsqueeze(-1)).squeeze(-1) + bias_BL
        if other_BD is not None:
            features_BF1 = pair_features(pooled_BD, other_BD).unsqueeze(-1)
            paired_BL = logits_BL + (gather.own(stacks[head_part.PAIR_WEIGHT]) @ features_BF1).squeeze(-1)
            plain_BL = logits_BL
            logits_BL = gather.pick(
                [head.has_towers for head in self._heads], lambda has_towers: paired_BL if has_towers else plain_BL
            )
        means, deviations = ([getattr(head, name) for head in self._heads] for name in ("target_mean", "target_std"))
        if set(means) != {0.0} or set(deviations) != {1.0}:
            logits_BL = logits_BL * gather.value(deviations, logits_BL) + gather.value(means, logits_BL)
        num_outputs_B1 = gather.value([head.num_outputs for head in self._heads], logits_BL)
        is_own_BL = torch.arange(logits_BL.shape[-1]) < num_outputs_B1
        # A gather takes −1 for the last task, and a GPU's anything: rows of no task must not look answered.
        missing_B1 = ((gather.slots_B < 0) | (gather.slots_B >= len(self._heads))).unsqueeze(-1)
        return logits_BL.masked_fill(~is_own_BL, -torch.inf).masked_fill(missing_B1, torch.nan)


def _mix(layers: Sequence[Tensor], stacks: Mapping[str, Tensor], gather: Gather) -> Tensor:
    """ELMo's mix of all layers: a factor times their mean weighted by a softmax."""
    weights_BK = gather.own(torch.softmax(stacks[head_part.MIX], -1) * stacks[head_part.MIX_SCALE])
    stacked_BTDK = torch.stack(list(layers), -1)
    return (stacked_BTDK @ weights_BK[:, None, :, None]).squeeze(-1)


def _buffer_name(name: str) -> str:
    return name.replace(".", "_").replace("-", "_to_")  # torch allows no dot in a buffer's name
