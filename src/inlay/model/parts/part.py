"""The base of the parts: the class `Part`, its tensors with their initial values, and its operation at a place.

A part is one kind of task parameters, and its file has all that is known of them: names and shapes, initial values,
values of an empty slot, the arrangement of a bank's stacks, the operation on the backbone's states, and the same for
rows that gather their parameters (ONNX). Nothing outside this folder spells the name of a task's tensor.

A part acts at hooks of the backbone: `linear` (a linear layer), `output` (a sublayer's output) and `norm` (a layer
norm). An operation beside a whole block is added to the block's last output.

Shape letters: S slots, D width.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from inlay.errors import BadConfig, UnknownName, Unsupported
from inlay.model.backbone.sites import Anatomy, LinearSite
from inlay.model.kernels.bottleneck_weights import Bottleneck, BottleneckShape
from inlay.model.kernels.reference import Moments
from inlay.settings import MethodConfig

if TYPE_CHECKING:
    from inlay.model.backbone.backbone import Backbone
    from inlay.model.bank.pass_hooks import PassHooks

Stacks = Mapping[str, Tensor]
SiteShapes = Mapping[tuple[str, str], BottleneckShape]
"""The bottlenecks of one slot: (form, site) -> its shape."""


class ResolvedMethod(MethodConfig):
    """A method with every setting filled in, by `resolve_method`. Some have no size: no bottleneck and no rank."""

    def as_config(self) -> MethodConfig:
        """Return the config with every setting spelt out, for a run's identity and for display."""
        return MethodConfig(**vars(self))


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a slot."""

    name: str
    shape: tuple[int, ...]
    start: str
    """initial values: "normal" (truncated at two standard deviations), "gaussian" (not truncated), "uniform" (as
    torch's linear layers), "zeros", "ones", or "backbone" (copied from it)"""
    std: float = 0.0
    part: str = "adapters"
    """the group that `plan` counts it under: adapters, norms, biases, weights or head"""
    ranks: tuple[int, ...] = ()
    """the axes that are as long as the slot's size, and padded to the bank's"""
    is_trained: bool = True
    """False for running statistics: stored with the slot, but no parameter"""
    is_shared: bool = False
    """all tasks of a run have it in common"""

    @property
    def num_parameters(self) -> int:
        return math.prod(self.shape) if self.is_trained else 0

    @property
    def decays(self) -> bool:
        """Weight decay is for matrices: none on biases, also where several lie in one tensor, and layer norms."""
        return len(self.shape) > 1 and not self.name.endswith(".bias")


def draw_tensor(item: TensorSpec, seed: int, task: str = "") -> Tensor:
    """Draw the initial values of a tensor that does not begin as the backbone's, by the seed and the task's name.

    Tensors that tasks of a run share are drawn without a name.
    """
    if item.start in ("zeros", "ones"):
        return torch.full(item.shape, float(item.start == "ones"))
    words = f"{seed}/{item.name}/{'x'.join(map(str, item.shape))}" + (f"/{task}" if task else "")
    generator = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(words.encode()).digest()[:7], "big"))
    tensor = torch.zeros(item.shape)
    if item.start == "uniform":
        bound = 1 / math.sqrt(item.shape[0])
        return tensor.uniform_(-bound, bound, generator=generator)
    if item.start == "gaussian":
        return tensor.normal_(0.0, item.std, generator=generator)
    # A normal cut off at two standard deviations, by the inverse of its distribution: the same in every version of
    # torch, and faster than drawing again what falls outside.
    share = math.erf(math.sqrt(2.0))
    drawn = tensor.uniform_(-share, share, generator=generator).erfinv_()
    return drawn.mul_(math.sqrt(2.0) * item.std).clamp_(-2 * item.std, 2 * item.std)


_LAYER = r"-?[0-9]{1,6}"
_MOST_LETTERS = 2_000
"""letters of `method.layers`: hundreds of layers one by one"""


def adapted_layers(anatomy: Anatomy, config: ResolvedMethod) -> tuple[int, ...]:
    """Return the layers that `method.layers` names: `all`, `6:`, `-3:`, `2:5`, `0,2,5`."""
    num_layers, found = anatomy.num_layers, set()
    hint = f"layers go from 0 to {num_layers - 1}"
    if len(config.layers) > _MOST_LETTERS:  # it may come with an imported version
        raise BadConfig(f"`method.layers` has {len(config.layers):,} letters: `{config.layers:.40}…`", hint)
    for item in ("0:",) if config.layers == "all" else config.layers.split(","):
        match = re.fullmatch(rf"\s*(?:({_LAYER})|({_LAYER})?(:)({_LAYER})?)\s*", item)
        if match is None:
            raise BadConfig(f"`method.layers` is `{config.layers:.80}`", "write all, 6:, -3:, 2:5 or 0,2,5")
        single, first, colon, last = match.groups()
        if colon:
            found |= set(range(*slice(*(int(end) if end else None for end in (first, last))).indices(num_layers)))
        elif not -num_layers <= int(single) < num_layers:
            raise BadConfig(f"`method.layers` names layer {single} of {num_layers}", hint)
        else:
            found.add(int(single) % num_layers)
    if not found:
        raise BadConfig(f"`method.layers` is `{config.layers}`, which names none of {num_layers} layers", hint)
    return tuple(sorted(found))


def adapted_linears(anatomy: Anatomy, config: ResolvedMethod) -> list[LinearSite]:
    """Return the linear layers that LoRA or (IA)³ changes; a name that the family has not, or shares, is refused."""
    known = [*dict.fromkeys(linear.name for linear in anatomy.linears)]
    for name in config.linears:
        if name in anatomy.shared_linears:
            reason = anatomy.shared_linears[name]
            others = ",".join(name for name in config.linears if name in known) or known[0]
            raise Unsupported(
                f"linear layer `{name}` of the backbone family `{anatomy.family}`: {reason}",
                f"leave it out: `--set method.linears={others}`",
            )
        if name not in known:
            raise UnknownName("linear layer", name, known)
    layers = adapted_layers(anatomy, config)
    return [linear for linear in anatomy.linears if linear.layer in layers and linear.name in config.linears]


class Part:
    """One kind of task parameters."""

    prefix: ClassVar[str]
    """the prefix of its tensors' names"""
    is_compact: ClassVar[bool] = False
    """a serving bank may hold its matrices in bf16"""
    is_stacked: ClassVar[bool] = True
    """False for weights that a serving bank keeps slot by slot"""
    graph_obstacle: ClassVar[tuple[str, str] | None] = None
    """why no exported graph holds it, and what to do instead; None if it has a gathered form"""

    def owns(self, name: str) -> bool:
        """Tell whether a tensor belongs to this part."""
        return name.startswith(self.prefix)

    def name(self, *items: str) -> str:
        """Return the name of a tensor: of its site, linear layer or norm, and of which one it is there."""
        return self.prefix + ".".join(items)

    def tensors(self, anatomy: Anatomy, method: ResolvedMethod) -> Iterator[TensorSpec]:
        """Yield the part's tensors in a slot of this method, in a fixed order."""
        raise NotImplementedError

    def places(self, anatomy: Anatomy, method: ResolvedMethod, name: str) -> list[str]:
        """Return the stacks of a serving bank that hold a slot's tensor: one, or one for every site that shares it."""
        return [name]

    def leader(self, name: str) -> str:
        """Return the stack whose last axis gives this one's width, where programs read several together; "" if none."""
        return ""

    def neutral(self, name: str, backbone: Backbone) -> Tensor | float:
        """Return the values of an empty slot."""
        return 0.0

    def own(self, name: str, backbone: Backbone) -> Tensor:
        """Return the backbone's own value of a tensor that begins as a copy of it."""
        raise AssertionError(f"`{name}` is nothing that the backbone has")

    def shapes(self, anatomy: Anatomy, method: ResolvedMethod) -> SiteShapes:
        """Return the bottleneck of a slot at each site, for parts whose slots may differ in more than size."""
        return {}

    def bind(self, anatomy: Anatomy, stacks: Stacks, slots: Occupants) -> Iterable[Placed]:
        """Return the part's operations on a bank's stacks, and where they act."""
        return ()


@dataclass(frozen=True)
class Occupants:
    """The slots of a bank, as the parts see them."""

    methods: tuple[ResolvedMethod, ...]
    """each once"""
    shapes: Mapping[tuple[str, str], list[BottleneckShape | None]]
    """(form, site) -> each slot's bottleneck there; only sites where a slot has one"""
    are_expanded: bool
    """adapters that slots share stand at every site"""


class Operation:
    """A part's stacks at one place of the backbone, and their operations. The wrappers' pass is passed in as `at`."""

    reads_input: ClassVar[bool] = False
    """it stands beside a sublayer, and reads the sublayer's input"""
    reads_block: ClassVar[bool] = False
    """it stands beside a whole block, also one with weights of its own"""

    def on_input(self, site: LinearSite, x: Tensor, at: PassHooks) -> Tensor:
        """Change the input of a linear layer."""
        return x

    def on_linear(self, site: LinearSite, x: Tensor, y: Tensor, inner: Any, at: PassHooks) -> Tensor:
        """Change the output y of a linear layer; x is its input."""
        return y

    def on_output(self, place: str, y: Tensor, at: PassHooks) -> Tensor:
        """Change the output of a sublayer."""
        return y

    def on_norm(self, x: Tensor, inner: Any, at: PassHooks) -> Tensor:
        """Compute a layer norm of x."""
        return inner(x)

    def drop_and_add(self, place: str, rate: float, y: Tensor, at: PassHooks) -> Tensor | None:
        """Apply dropout to y and add the update, in one program; None where there is no such program."""
        return None


@dataclass(frozen=True, eq=False)
class SlotOperation(Operation):
    """An operation by bottlenecks that may differ in kind from slot to slot."""

    weights: Bottleneck
    form: ClassVar[str]

    def set_slot(self, slot: int, shape: BottleneckShape | None) -> None:
        """Make a slot of this shape, which must be of a kind that occurs; its weights are set by others."""
        self.weights.set_slot(slot, shape)

    def with_weights(self, change: Callable[[Bottleneck], Bottleneck]) -> SlotOperation:
        """Return the same on changed weights."""
        return replace(self, weights=change(self.weights))

    def settle(self, seen: Sequence[Moments]) -> None:
        """Update running statistics with those noted in a training pass, when it ends."""


Placed = tuple[str, str, Operation]
"""A hook (linear, output or norm), the key of the linear layer, site or norm, and the operation there."""
