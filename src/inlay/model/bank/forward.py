"""What the wrappers in a backbone call while a route is bound: the operations of one pass, on a bank's views."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inlay.model.backbone.joined_projections import Joined
from inlay.model.backbone.sites import LinearSite
from inlay.model.bank.views import LinearView, Views
from inlay.model.batch.route import Pack, Route
from inlay.model.kernels import reference as kernels
from inlay.model.kernels.attention import attend_first
from inlay.model.kernels.gelu import lean_gelu
from inlay.model.kernels.tiled import Drop
from inlay.model.parts.tensors import ATTENTION_LINEARS, scales_input

_SALTS = {"attention": 0, "feedforward": 1, "output": 2}
_MOMENTUM = 0.1  # of running statistics, as torch's batch norm; their variance is the biased one, as in training


class BankForward:
    """A bank's views with a route bound: what the wrappers in the backbone call. `at` gives that of one block.

    `update`, `adapt`, `layer_norm`, `rms_norm` and `per_row` alone compute with the slots' parameters: a subclass may
    do it otherwise.
    """

    def __init__(
        self,
        views: Views,
        route: Route,
        *,
        is_training: bool = False,
        seeds: Tensor | None = None,
        num_readers: int | None = None,
        is_finetuned: bool = False,
    ) -> None:
        """`seeds` has a random number for each block, on the device, if it trains there with fused dropout.

        Blocks beyond the first `num_readers` are a decoder's, whose tokens have a route of their own. With
        `is_finetuned` the backbone's weights are the slot's own.
        """
        self._views, self._is_training, self._seeds, self._is_solo = views, is_training, seeds, is_finetuned
        self._route, self._firsts = route.wide or route, None if route.wide is None else route
        self._num_readers = num_readers
        self._seed: Tensor | None = None
        self._moments: dict[str, list[kernels.Moments]] | None = {} if is_training else None
        self._inputs: dict[str, Tensor] = {}  # of the sublayers that a parallel adapter stands beside
        self._blocks: list[BankForward] = []
        self._layer = -1
        self._attended: Tensor | None = None  # what this block's attention gives, where it was known before
        self._entered: Tensor | None = None  # what this block reads, where something stands beside it
        self._projected: tuple[Tensor, Tensor] | None = None  # what was read, and query, key and value of it

    def at(self, layer: int, *, is_last: bool = False) -> BankForward:
        """The same for the wrappers of one block."""
        views = self._views.at(layer)
        firsts = self._firsts if is_last else None
        block = self._block(views) if firsts is None else _FirstTokens(views, firsts, is_training=self._is_training)
        block._seed = None if self._seeds is None else self._seeds[layer : layer + 1]
        block._layer = layer
        if self._num_readers is not None and layer >= self._num_readers and self._route.decoder is not None:
            block._route = self._route.decoder
        if self._route.prefix is not None and self._route.prefix.reach.layer == layer:
            attended = self._route.prefix.attended
            block._attended = None if attended is None else block._pick(attended)
        self._blocks.append(block)
        return block

    def _block(self, views: Views) -> BankForward:
        return BankForward(views, self._route, is_training=self._is_training, is_finetuned=self._is_solo)

    def _pick(self, states: Tensor) -> Tensor:
        """What this block computes of the states of all tokens."""
        return states

    @property
    def pack(self) -> Pack | None:
        """Where the rows lie, if they are packed."""
        return self._route.pack

    def enter(self, hidden: Tensor) -> Tensor | None:
        """What this block reads: `hidden`, or what was known of it before; None if the pass begins above."""
        prefix = self._route.prefix
        read: Tensor | None = hidden
        if prefix is not None and self._layer <= prefix.reach.layer:
            read = prefix.hidden if self._layer == prefix.reach.layer else None
        self._entered = read if self._views.pals else None
        return read

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """Each packed row's attention to itself."""
        if self._attended is not None:
            return q  # nothing reads it
        if self._projected is None:
            return kernels.attend(q, k, v, self._route, **options)
        projected, self._projected = self._projected[1], None
        return kernels.attend_joined(projected.view(-1, 3, *q.shape[1:]), self._route, **options)

    def rewrite(self, key: str, output: Tensor) -> Tensor:
        """A sublayer's output with what the adapters there add."""
        sequential, parallel = self._views.sequential.get(key), self._views.parallel.get(key)
        result = output if sequential is None else self.adapt(key, output, sequential)
        if parallel is not None:
            result = result + self.update(key, self._inputs.pop(key), parallel)
        if key in self._views.pals and self._entered is not None:
            result = result + self.project(self._entered, self._views.pals[key])
        return result

    def drop_and_rewrite(self, place: str, dropout: Any, output: Tensor) -> Tensor:
        """A sublayer's output through its dropout and the adapters: at once, where one program does both."""
        weights = self._views.sequential.get(place)
        is_fused = self._seed is not None and place not in self._views.parallel and kernels.drops(weights, self._route)
        if not is_fused or not dropout.p:
            return self.rewrite(place, dropout(output))
        assert weights is not None
        assert self._seed is not None
        drop = Drop(dropout.p, self._seed, _SALTS[place])
        return self._unlay(kernels.dropped_and_adapted(self._lay(output), weights, self._route, drop))

    def normalize(self, name: str, place: str | None, inner: Any, x: Tensor) -> Tensor:
        """A layer norm with each slot's scale and shift, around Pfeiffer's adapter where one stands there."""
        weights = None if place is None else self._views.sequential.get(place)
        if weights is not None and place is not None:
            x = x + self.update(place, self._norm(name, inner, x), weights)
        return self._norm(name, inner, x)

    def activate(self, kind: str, inner: Any, x: Tensor) -> Tensor:
        """A block's GELU, in one launch where programs run."""
        found = None if self._route.tiling is None else lean_gelu(x, kind)
        return inner(x) if found is None else found

    def transform(self, parts: tuple[LinearSite, ...], inner: Any, x: Tensor, joined: Joined | None = None) -> Tensor:
        """A linear layer with each slot's update, bias and factor; `joined` is what may be computed with it at once."""
        self._note(parts, x)
        if self._attended is not None and parts[0].name in ATTENTION_LINEARS:
            return self._attended if parts[0].name == "project" else x  # of the others nothing is read
        views = [self._views.linears.get(part.name) for part in parts]
        if not any(views):
            if joined is None or not self._joins(joined, parts[0].name):
                return inner(x)
            return self._project(joined, parts[0].name, x)
        for part, view in zip(parts, views, strict=True):
            if view is not None and view.factor_SD is not None and scales_input(part):
                x = (x * self.per_row(view.factor_SD, x)).to(x.dtype)
        y = inner(x)
        pieces = [
            self._change(x, y if len(parts) == 1 else y[..., part.start : part.stop], part, view, inner)
            for part, view in zip(parts, views, strict=True)
        ]
        return pieces[0] if len(parts) == 1 else torch.cat(pieces, -1)

    def _joins(self, joined: Joined, name: str) -> bool:
        """Whether query, key and value are the backbone's own, and packed attention reads them by our kernels."""
        if name not in joined.names or self._is_solo:
            return False
        is_ours = self._route.tiling is not None and self._route.pack is not None
        return is_ours and not any(other in self._views.linears for other in joined.names)

    def _project(self, joined: Joined, name: str, x: Tensor) -> Tensor:
        """One of query, key and value; the first that is asked for computes all three."""
        if self._projected is None or self._projected[0] is not x:
            self._projected = x, F.linear(x, joined.weight, joined.bias)
        return self._projected[1].chunk(3, -1)[joined.names.index(name)]

    def _note(self, parts: tuple[LinearSite, ...], x: Tensor) -> None:
        """Keep what a sublayer reads for the adapter beside it."""
        for part in parts:
            if part.reads is not None and part.reads in self._views.parallel:
                self._inputs[part.reads] = x

    def settle(self) -> None:
        """Move the running statistics by what batch norm saw since the route was bound."""
        for block in self._blocks:
            block.settle()
        for key, seen in (self._moments or {}).items():
            weights = self._views.sequential.get(key) or self._views.parallel[key]
            assert weights.running is not None
            with torch.no_grad():
                # Once for each slot: checkpointed, a block runs again in the backward pass and sees the same.
                for slot, *found in {moments.slot: moments for moments in seen}.values():
                    for running, value in zip(weights.running, found, strict=True):
                        running[slot, : len(value)].lerp_(value.to(running), _MOMENTUM)

    def update(self, key: str, h: Tensor, weights: kernels.Bottleneck) -> Tensor:
        """What each row's own bottleneck at `key` makes of h."""
        return self._unlay(kernels.bottleneck_update(self._lay(h), weights, self._route, self._noted(key, weights)))

    def adapt(self, key: str, h: Tensor, weights: kernels.Bottleneck) -> Tensor:
        """h with what its own bottleneck makes of it added."""
        return self._unlay(kernels.adapted(self._lay(h), weights, self._route, self._noted(key, weights)))

    def _noted(self, key: str, weights: kernels.Bottleneck) -> list[kernels.Moments] | None:
        """Where batch norm notes what it sees while it trains."""
        return None if self._moments is None or weights.running is None else self._moments.setdefault(key, [])

    def _norm(self, key: str, inner: Any, x: Tensor) -> Tensor:
        if key not in self._views.norms:
            return inner(x)
        scale, shift = self._views.norms[key]
        if scale is None:  # BitFit trains the shift alone
            assert shift is not None
            scale = inner.weight.to(shift.dtype).expand(len(shift), -1)
        if not isinstance(inner, nn.LayerNorm):  # T5's
            return self.rms_norm(x, scale, inner.variance_epsilon)
        return self.layer_norm(x, scale, shift, inner.eps)

    def _change(self, x: Tensor, y: Tensor, part: LinearSite, view: LinearView | None, inner: Any) -> Tensor:
        if view is None:
            return y
        if view.lora is not None:
            y = y + self.update(part.name, x, view.lora)
        if view.bias_SD is not None:
            y = (y + self.per_row(view.bias_SD - inner.bias[part.start : part.stop], y)).to(y.dtype)
        if view.factor_SD is not None and not scales_input(part):
            y = (y * self.per_row(view.factor_SD, y)).to(y.dtype)
        return y

    def layer_norm(self, x: Tensor, scale_SD: Tensor, shift_SD: Tensor | None, eps: float) -> Tensor:
        """A layer norm with each row's own scale and shift."""
        return self._unlay(kernels.layer_norm(self._lay(x), scale_SD, shift_SD, eps, self._route))

    def rms_norm(self, x: Tensor, scale_SD: Tensor, eps: float) -> Tensor:
        """T5's layer norm with each row's own scale."""
        return self._unlay(kernels.rms_norm(self._lay(x), scale_SD, eps, self._route))

    def project(self, h: Tensor, weights: kernels.Projected) -> Tensor:
        """What each row's own projected attention makes of h."""
        return self._unlay(kernels.projected_attention(self._lay(h), weights, self._route))

    def per_row(self, stacked_SD: Tensor, x: Tensor) -> Tensor:
        """Each row's own vector, to be added to or multiplied with the rows of x, as precise as it is learnt."""
        return kernels.per_row(stacked_SD, self._lay(x), self._route)

    def _lay(self, x: Tensor) -> Tensor:
        """Along the axis the segments count: rows, or the tokens of a pack, which the backbone sees as one row."""
        return x if self._route.pack is None else x.squeeze(0)

    def _unlay(self, x: Tensor) -> Tensor:
        return x if self._route.pack is None else x.unsqueeze(0)


class _FirstTokens(BankForward):
    """The last block of a pass whose heads read first tokens alone: keys and values of all tokens, the rest of those.

    What keys and values are computed of is what the block reads, as in every family that is packed.
    """

    def __init__(self, views: Views, firsts: Route, *, is_training: bool) -> None:
        assert firsts.wide is not None
        assert firsts.wide.pack is not None
        super().__init__(views, replace(firsts, wide=None), is_training=is_training)
        self._whole, self._rows = BankForward(views, firsts.wide, is_training=is_training), firsts.wide.pack
        self._read: Tensor | None = None
        self._kept: dict[str, Tensor] = {}

    def enter(self, hidden: Tensor) -> Tensor | None:
        self._read = super().enter(hidden)
        return None if self._read is None else self._pick(self._read)

    def _pick(self, states: Tensor) -> Tensor:
        return states.index_select(1, self._rows.starts_B)

    def transform(self, parts: tuple[LinearSite, ...], inner: Any, x: Tensor, joined: Joined | None = None) -> Tensor:
        name = parts[0].name
        if self._attended is not None or name not in ("key", "value"):
            return super().transform(parts, inner, x)
        assert self._read is not None
        self._note(parts, x)
        self._kept[name] = self._whole.transform(parts, inner, self._read)
        return x  # as long as the attention module expects; what it makes of it is not used

    def project(self, h: Tensor, weights: kernels.Projected) -> Tensor:
        return self._pick(self._whole.project(h, weights))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        if self._attended is not None:
            return super().attend(q, k, v, **options)
        assert not options.pop("dropout", 0.0), "attention with dropout is computed whole"
        k, v = (self._kept.pop(name).view(-1, *q.shape[1:]) for name in ("key", "value"))
        return attend_first(q, k, v, self._rows, **options)
