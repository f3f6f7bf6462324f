"""The methods: which parameters a task adds to a backbone, as one table of entries; with a head, the spec of a slot.

`layout` turns a method and a backbone's anatomy into a list of tensors: what is initialised, counted, trained, stored
and loaded. It needs shapes only, so counts come from models on the meta device too. A method is a row of METHODS: the
settings it takes, what it chooses where they are left open, and the parts it is made of (model/parts/). What a family
cannot do stands in UNSUPPORTED.

Houlsby et al. 2019 put an adapter after both sublayers of every block and train all layer norms; Pfeiffer et al. 2021
put one at the end of each block, reading the normalised sum, `LN(s + f(LN(s)))`, and leave the norms frozen; He et al.
2022 put a scaled one beside the feed-forward sublayer. Mahabadi et al. 2021 put two as Houlsby et al., with a layer
norm behind each, `x + LN(f(x))`: such an adapter adds noise of size one at the start, however small its weights (on
encoders, whose states are of that size, the norm begins small). LoRA (Hu et al. 2022), DoRA (Liu et al. 2024), (IA)³
(Liu et al. 2022) and BitFit (Ben Zaken et al. 2022) change linear layers. Stickland and Murray 2019 put a small
attention layer beside every block.

Methods with `shared` tensors train several tasks as one run: HyperFormer and HyperFormer++ (Mahabadi et al. 2021), the
adapters they were compared with, multi-task fine-tuning and PALs. A trained task of theirs becomes an ordinary one.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase as fnmatch
from typing import Any

from inlay.errors import BadConfig, StoreDamaged, UnknownName, Unsupported
from inlay.model.backbone.families import find_family
from inlay.model.backbone.sites import ATTENTION_LINEARS, Anatomy
from inlay.model.heads.heads import HeadSpec
from inlay.model.heads.stored_heads import read_head
from inlay.model.kernels.bottleneck_weights import ACTIVATIONS
from inlay.model.parts.bottleneck import BOTTLENECK, BottleneckPart, sharing_step
from inlay.model.parts.head import HEAD
from inlay.model.parts.hypernet import EMBEDDED, HYPERNET, Expander, HypernetPart
from inlay.model.parts.linears import BIASES, DORA, FACTORS, LORA
from inlay.model.parts.norms import NORMS, NormPart
from inlay.model.parts.own_weights import OWN_WEIGHTS
from inlay.model.parts.pal import PALS
from inlay.model.parts.part import Part, ResolvedMethod, TensorSpec, adapted_layers
from inlay.settings import MethodConfig, from_tree


@dataclass(frozen=True)
class Method:
    """One row of the table."""

    summary: str
    parts: tuple[Part, ...]
    settings: frozenset[str]
    """the fields of `MethodConfig` that it takes"""
    size: int | None = None
    activation: str = "auto"
    norms: str = "none"
    places: tuple[str, ...] = ()
    form: str = "auto"
    inner_norm: str = "none"
    scale: float | None = None
    linears: tuple[str, ...] = ()
    layers: str = "all"
    lr: float = 5e-4
    """the default learning rate: it did well on four GLUE tasks with MiniLM (docs/results.md)"""
    lr_writing: float | None = None
    """the default learning rate on backbones that write their answers, if it differs"""
    lr_alone: float | None = None
    """the default learning rate where a task of a joint run trains only its own tensors, if it differs"""
    is_finetuned: bool = False
    """it trains a copy of the backbone's own weights: no other slot can share its forward pass"""
    shared: tuple[str, ...] = ()
    """patterns of the tensors that all tasks of a run have in common; with any, it trains several tasks as one run"""
    becomes: str = ""
    """the ordinary method that each of its tasks is of once it is trained"""
    task_size: int | None = None
    """width of a task's embedding, where a hypernetwork writes its adapters"""
    projector: int | None = None

    @property
    def is_joint(self) -> bool:
        """Whether it trains several tasks as one run."""
        return bool(self.shared)

    def find_lr(self, *, is_seq2seq: bool, is_alone: bool) -> float:
        """Return the default learning rate; `is_alone`: shared parameters are frozen."""
        usual = (self.lr_writing if is_seq2seq else None) or self.lr
        return (self.lr_alone if is_alone else None) or usual

    @property
    def trains_norms_alone(self) -> bool:
        """Whether beside the head it trains nothing but layer norms."""
        return all(isinstance(part, NormPart) for part in self.parts)

    @property
    def shares_all(self) -> bool:
        """Whether the tasks of a run have nothing of their own but their heads."""
        return self.is_joint and self.parts == (OWN_WEIGHTS,)


def resolve_method(config: MethodConfig) -> ResolvedMethod:
    """Replace every open setting of a config by the method's own choice; the result is hashed, stored and shown."""
    method = find_method(config.name)
    for item in dataclasses.fields(config):
        is_foreign = item.name not in method.settings | {"name"}
        value = getattr(config, item.name)
        # A resolved config has the table's values in it; resolving it again must change nothing.
        if is_foreign and value not in (item.default, getattr(method, item.name, item.default)):
            raise BadConfig(
                f"method `{config.name}` has no setting `{item.name}`, which is `{value}`",
                f"it takes: {', '.join(sorted(method.settings))}" if method.settings else "it has no settings",
            )
    # The settings left open are the method's own.
    size = config.size or method.size
    scale = method.scale if config.scale is None else config.scale
    if config.alpha is not None and size:
        scale = config.alpha / size
        if config.scale not in (None, scale):
            raise BadConfig(
                f"`method.alpha` is `{config.alpha:g}` and `method.scale` `{config.scale:g}`",
                "give one of them: LoRA's factor is alpha / r",
            )
    projector = method.projector if config.projector is None else config.projector
    # Straight into the heads, wide embeddings would make them as many times larger.
    task_size = EMBEDDED if method.task_size and projector == 0 else method.task_size
    names = ("activation", "norms", "layers", "form", "inner_norm")
    chosen = {name: getattr(method, name) for name in names if getattr(config, name) == "auto"}
    resolved = replace(
        config,
        **chosen,
        size=size,
        scale=scale,
        places=config.places or method.places,
        linears=config.linears or method.linears,
        projector=projector,
        task_size=config.task_size or task_size,
    )
    _check(resolved, method)
    return ResolvedMethod(**vars(resolved))


@functools.cache
def materialized_method(method: ResolvedMethod) -> ResolvedMethod:
    """Return the ordinary method that a trained task of this method becomes; an ordinary method is its own."""
    becomes = find_method(method.name).becomes
    if not becomes:
        return method
    settings = find_method(becomes).settings & find_method(method.name).settings
    own = {name: getattr(method, name) for name in settings}
    if method.writes == "norms":
        own["inner_norm"] = "alone"
    return resolve_method(MethodConfig(becomes, **own))


def make_expander(anatomy: Anatomy, method: ResolvedMethod, slots_per_run: int) -> Expander:
    """Make the `Expander` that turns a run's shared parameters into ordinary per-slot stacks."""
    row = find_method(method.name)
    nets = [part.network(anatomy, method) for part in row.parts if isinstance(part, HypernetPart)]
    return Expander(nets[0] if nets else None, row.shared, slots_per_run)


def layout(anatomy: Anatomy, method: ResolvedMethod, head: HeadSpec | None = None) -> list[TensorSpec]:
    """List every tensor of a task with this method, in a fixed order; refuse a method that the family cannot have."""
    if reason := UNSUPPORTED.get((anatomy.family, method.name)):
        raise Unsupported(f"method `{method.name}` on the backbone family `{anatomy.family}`: {reason[0]}", reason[1])
    row = find_method(method.name)
    specs = [spec for part in row.parts for spec in part.tensors(anatomy, method)]
    if row.is_finetuned and (head is None or head.pooling != "pooler"):
        specs = OWN_WEIGHTS.without_pooler(anatomy, specs)  # nothing reads it
    specs = [replace(spec, is_shared=any(fnmatch(spec.name, pattern) for pattern in row.shared)) for spec in specs]
    return specs if head is None else [*specs, *HEAD.of(anatomy, head)]


def find_method(name: str) -> Method:
    """Return the entry for `name`, of one task or of several."""
    found = METHODS.get(name) or JOINT_METHODS.get(name)
    if found is None:
        raise UnknownName("method", name, METHODS | JOINT_METHODS)
    return found


def first_layer(anatomy: Anatomy, method: ResolvedMethod) -> int:
    """Return the lowest layer that anything is trained in; below it all is frozen, norms and dropout too."""
    if method.norms == "none" and find_method(method.name).trains_norms_alone:
        return anatomy.num_layers
    return min(adapted_layers(anatomy, method))


def has_frozen_attention(anatomy: Anatomy, method: ResolvedMethod) -> bool:
    """Tell whether the lowest trained layer trains nothing up to and including the output of attention's projection."""
    layer = first_layer(anatomy, method)
    has_own = find_method(method.name).is_finetuned
    if layer == anatomy.num_layers or has_own or find_family(anatomy.family).is_prenorm:
        return False
    inside = tuple(f".{layer}.{name}" for name in ATTENTION_LINEARS)
    return not any(place in spec.name for spec in layout(anatomy, method) for place in inside)


def _check(config: MethodConfig, method: Method) -> None:
    if method.trains_norms_alone and "norms" in method.settings and config.norms == "none":
        raise BadConfig(
            f"method `{config.name}` with `method.norms` `none` trains nothing", "use all or encoder, or method `head`"
        )
    if config.activation != "auto" and config.activation not in ACTIVATIONS:
        raise UnknownName("activation", config.activation, ACTIVATIONS)
    for place in config.places if "places" in method.settings else ():
        if place not in ("attention", "feedforward"):
            raise UnknownName("place", place, ("attention", "feedforward"))
    sharing_step(config.sharing, 1)
    if config.combine == "multiply" and config.form == "parallel":
        raise BadConfig(
            "`method.combine` is `multiply` for a parallel adapter",
            "it multiplies what it reads: use `--set method.form=sequential`",
        )


@dataclass(frozen=True)
class SlotSpec:
    """The content of a slot: a method with all its settings, and a head."""

    method: ResolvedMethod
    head: HeadSpec

    @classmethod
    def of(cls, config: MethodConfig, head: HeadSpec) -> SlotSpec:
        """Return the spec of a method as it is asked for."""
        return cls(resolve_method(config), head)

    @classmethod
    def from_stored(cls, method: Mapping[str, Any], head: Mapping[str, Any]) -> SlotSpec:
        """Return the spec a version's manifest describes; values that no slot can have are refused."""
        unknown = method.keys() - {item.name for item in dataclasses.fields(MethodConfig)}
        if unknown:
            raise Unsupported(
                f"the version has a setting this Inlay does not know: `method.{min(unknown)}`",
                "it was made by a newer Inlay: upgrade",
            )
        try:
            return cls.of(from_tree(MethodConfig, method, "method."), read_head(head))
        except (BadConfig, UnknownName) as error:
            raise StoreDamaged(f"the version's method is not valid: {error.message}") from None

    def layout(self, anatomy: Anatomy) -> list[TensorSpec]:
        """Return the slot's tensors, in a fixed order."""
        return layout(anatomy, self.method, self.head)

    def count_parameters(self, anatomy: Anatomy) -> int:
        """Count the trained parameters, head included."""
        return sum(item.num_parameters for item in self.layout(anatomy))

    @property
    def is_joint(self) -> bool:
        """Whether it is one of several tasks of a run that share parameters."""
        return find_method(self.method.name).is_joint

    @property
    def is_finetuned(self) -> bool:
        """Whether it has its own copy of backbone weights."""
        return find_method(self.method.name).is_finetuned


_BOTTLENECK = frozenset(
    "size init_std activation norms places layers sharing depth inner_norm form combine scale".split()
)
_HYPERFORMER = Method(
    "a hypernetwork writes the adapters of all tasks, with heads of its own for every place",
    (HYPERNET, NORMS),
    frozenset("size norms places layers task_size projector writes".split()),
    size=24,
    activation="gelu",
    norms="all",
    places=("attention", "feedforward"),
    form="sequential",
    scale=1.0,
    # A head's input, 64 numbers of size one, multiplies a step: with T5's published 3e-4 MiniLM learns nothing.
    lr=1e-4,
    lr_writing=3e-4,
    # An embedding begins with numbers of size one: at the rates of weights it stays where it was. Of 1e-4 to 0.1, tried
    # for 30 to 60 steps (MiniLM on SST-2, flan-T5-small on CB and MRPC), 0.01 to 0.1 brought the training loss lowest.
    lr_alone=3e-2,
    shared=(HYPERNET.name("*"), BOTTLENECK.name("*"), NORMS.name("*")),
    becomes="mahabadi",
    task_size=512,
    projector=128,
)
_HOULSBY = Method(
    "two adapters per block, all layer norms",
    (BOTTLENECK, NORMS),
    _BOTTLENECK,
    size=64,
    activation="gelu",
    norms="all",
    places=("attention", "feedforward"),
    form="sequential",
    scale=1.0,
)
_LORA = Method(
    "low-rank updates of linear layers, query and value",
    (LORA, NORMS),
    frozenset(("size", "alpha", "scale", "linears", "norms", "layers")),
    size=8,
    scale=1.0,
    linears=("query", "value"),
    lr=1e-3,
)
_FULL = Method(
    "every weight, a copy of the backbone per task",
    (OWN_WEIGHTS,),
    frozenset(),
    norms="all",
    lr=5e-5,
    lr_writing=3e-4,  # as published for T5
    is_finetuned=True,
)
METHODS: dict[str, Method] = {
    "houlsby": _HOULSBY,
    "mahabadi": replace(
        _HOULSBY,
        summary="two adapters per block with a layer norm behind each, all layer norms",
        size=24,
        inner_norm="output",
        # MiniLM, CoLA, MRPC, RTE and STS-B as one run, 400 steps, one seed: the mean is 53.6 at 3e-4, 55.1 at 1e-3,
        # 55.4 at 3e-3; the studies of single tasks choose 1e-3 more often than 5e-4.
        lr=1e-3,
        lr_writing=3e-4,  # as published for T5
    ),
    "pfeiffer": replace(
        _HOULSBY,
        summary="one adapter per block, layer norms frozen",
        settings=_BOTTLENECK - {"places", "form", "combine"},
        activation="relu",
        norms="none",
        places=("output",),
    ),
    "parallel": replace(
        _HOULSBY,
        summary="one scaled adapter beside each feed-forward sublayer",
        parts=(BottleneckPart(starts_at_zero=True), NORMS),
        settings=_BOTTLENECK - {"init_std", "form", "combine"},
        activation="relu",
        norms="none",
        places=("feedforward",),
        form="parallel",
        scale=4.0,
    ),
    "lora": _LORA,
    "dora": replace(
        _LORA, summary="LoRA, with the length of every output's weights trained apart", parts=(DORA, NORMS)
    ),
    "ia3": Method(
        "(IA)³: factors on keys, values and the wide activations",
        (FACTORS, NORMS),
        frozenset(("linears", "norms", "layers")),
        linears=("key", "value", "contract"),
        lr=5e-3,
    ),
    "bitfit": Method(
        "all biases of blocks and norms",
        (BIASES, NormPart(with_scales=False)),
        frozenset(("layers",)),
        norms="all",
        lr=1e-3,
    ),
    "pal": Method(
        "projected attention beside every block, the backbone frozen",
        (PALS, NORMS),
        frozenset(("norms", "layers")),
    ),
    "norms": Method("layer norms only", (NORMS,), frozenset(("norms", "layers")), norms="all", lr=1e-3),
    "head": Method("nothing but the head, on frozen features", (), frozenset(), lr=3e-3),
    "full": _FULL,
    "top": replace(
        _FULL,
        summary="every weight of the top layers",
        settings=frozenset(("layers",)),
        layers="-1:",
        lr=1e-4,
        lr_writing=None,
    ),
    "pal-full": replace(
        _FULL,
        summary="projected attention beside every block, and a copy of the backbone",
        lr_writing=None,
        parts=(OWN_WEIGHTS, PALS),
    ),
}
JOINT_METHODS: dict[str, Method] = {
    "hyperformer": _HYPERFORMER,
    "hyperformer++": replace(
        _HYPERFORMER,
        summary="one hypernetwork writes the adapters of all tasks, layers and places",
        parts=(HypernetPart(shares_heads=True), NORMS),
        task_size=64,
    ),
    "mahabadi-multi": replace(
        METHODS["mahabadi"],
        summary="adapters for every task, the norms behind them and all layer norms shared by all tasks",
        shared=(BOTTLENECK.name("*", "out_*"), NORMS.name("*")),
        becomes="mahabadi",
    ),
    "full-multi": replace(
        _FULL,
        summary="every weight, one copy of the backbone for all tasks",
        lr_alone=METHODS["head"].lr,
        shared=(OWN_WEIGHTS.name("*"),),
        becomes="full",
    ),
    "pal-published": replace(
        METHODS["pal-full"],
        summary="projected attention for every task, and one copy of the backbone that all train together",
        lr_alone=METHODS["pal"].lr,
        shared=(OWN_WEIGHTS.name("*"),),
        becomes="pal-full",
    ),
}
"""The methods that train several tasks as one run."""
_NO_BIASES = ("its layers have no biases", "use `norms` or an adapter method")
_NO_HEAD = ("it writes its answers with its own frozen output layer, and has no other head", "use `norms`")
_NO_PAL = "projected attention stands beside the blocks of an encoder"
_SHARED = "its query and key layers also project relative positions, which the rows of a batch share"
UNSUPPORTED: dict[tuple[str, str], tuple[str, str]] = {
    ("deberta-v2", "bitfit"): (_SHARED, "use `norms` or an adapter method"),
    ("modernbert", "bitfit"): _NO_BIASES,
    **{(family, "bitfit"): _NO_BIASES for family in ("t5", "mt5")},
    **{(family, "head"): _NO_HEAD for family in ("t5", "mt5")},
    **{(family, method): (_NO_PAL, "use `mahabadi`") for family in ("t5", "mt5") for method in ("pal", "pal-full")},
    **{(f, "pal-published"): (_NO_PAL, "use `mahabadi-multi` or `hyperformer++`") for f in ("t5", "mt5")},
}
"""(family, method) -> why it is impossible, and a method to use instead, which the same command takes. DeBERTa's query
and key are refused as `shared_linears`."""
