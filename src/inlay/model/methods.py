"""The methods: which parameters a task adds to a backbone, as one table of entries.

`layout` turns a method and a backbone's anatomy into a list of tensors: what is initialised, counted, trained, stored
and loaded. It needs shapes only, so counts come from models on the meta device too. A method is a row of METHODS: the
settings it takes, what it chooses where they are left open, and the kinds of tensors it is made of. What a family
cannot do stands in UNSUPPORTED.

Houlsby et al. 2019 put an adapter after both sublayers of every block and train all layer norms; Pfeiffer et al. 2021
put one at the end of each block, reading the normalised sum, `LN(s + f(LN(s)))`, and leave the norms frozen; He et al.
2022 put a scaled one beside the feed-forward sublayer. Mahabadi et al. 2021 put two as Houlsby et al., with a layer
norm behind each, `x + LN(f(x))`: such an adapter adds noise of size one at the start, however small its weights. LoRA
(Hu et al. 2022), (IA)³ (Liu et al. 2022) and BitFit (Ben Zaken et al. 2022) change linear layers.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from inlay.config import MethodConfig
from inlay.errors import BadConfig, UnknownName, Unsupported
from inlay.model.heads import HeadSpec
from inlay.model.kernels import ACTIVATIONS
from inlay.model.sites import Anatomy, LinearSite, NormSite, Site, find_family


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a slot."""

    name: str
    shape: tuple[int, ...]
    start: str
    """initial values: "normal" (truncated at two standard deviations), "uniform" (as torch's linear layers), "zeros",
    "ones", or "backbone" (copied from it)"""
    std: float = 0.0
    part: str = "adapters"
    """what `plan` counts it under: adapters, norms, biases, weights or head"""
    ranks: tuple[int, ...] = ()
    """the axes that are as long as the slot's size, and padded to the bank's"""
    is_trained: bool = True
    """False for running statistics: stored with the slot, but no parameter"""

    @property
    def num_parameters(self) -> int:
        return math.prod(self.shape) if self.is_trained else 0

    @property
    def decays(self) -> bool:
        """Weight decay is for matrices: none on biases and layer norms."""
        return len(self.shape) > 1


@dataclass(frozen=True)
class Method:
    """One row of the table."""

    summary: str
    builders: tuple[Callable[[Anatomy, MethodConfig], Iterator[TensorSpec]], ...]
    settings: frozenset[str]
    """of `MethodConfig`, those it takes"""
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
    """the learning rate where nobody gives one: what did well on four GLUE tasks with MiniLM (docs/results.md)"""
    starts_at_zero: bool = False
    """its adapters' way up starts at zero, as LoRA's: the update is exactly none"""
    trains_norm_scales: bool = True
    """of the norms it trains, the scales too, not the shifts alone"""
    has_own_weights: bool = False
    """it trains a copy of the backbone's own weights: no other slot can share its forward pass"""


def resolve_method(config: MethodConfig) -> MethodConfig:
    """The config with everything left open replaced by the method's own choice: what is hashed, stored and shown."""
    method = find_method(config.name)
    _refuse_foreign_settings(config, method)
    size = config.size or method.size
    scale = method.scale if config.scale is None else config.scale
    if config.alpha is not None and size:
        scale = config.alpha / size
        if config.scale not in (None, scale):
            raise BadConfig(
                f"`method.alpha` is `{config.alpha:g}` and `method.scale` `{config.scale:g}`",
                "give one of them: LoRA's factor is alpha / r",
            )
    resolved = dataclasses.replace(
        config,
        size=size,
        activation=method.activation if config.activation == "auto" else config.activation,
        norms=method.norms if config.norms == "auto" else config.norms,
        places=config.places or method.places,
        layers=method.layers if config.layers == "auto" else config.layers,
        form=method.form if config.form == "auto" else config.form,
        inner_norm=method.inner_norm if config.inner_norm == "auto" else config.inner_norm,
        scale=scale,
        linears=config.linears or method.linears,
    )
    _check(resolved, method)
    return resolved


def layout(anatomy: Anatomy, config: MethodConfig, head: HeadSpec | None = None) -> list[TensorSpec]:
    """Every tensor of a task with this method, in a fixed order; refuses what the backbone's family cannot do."""
    config = resolve_method(config)
    if reason := UNSUPPORTED.get((anatomy.family, config.name)):
        raise Unsupported(f"method `{config.name}` on the backbone family `{anatomy.family}`: {reason[0]}", reason[1])
    specs = [spec for build in find_method(config.name).builders for spec in build(anatomy, config)]
    if not find_method(config.name).has_own_weights:
        specs += _norms(anatomy, config)
    elif head is None or head.pooling != "pooler":
        poolers = {f"weight.{parameter.name}" for parameter in anatomy.parameters if parameter.is_pooler}
        specs = [spec for spec in specs if spec.name not in poolers]  # nothing reads it
    return specs if head is None else [*specs, *_head(anatomy, head)]


def find_method(name: str) -> Method:
    """The table's entry for `name`."""
    if name not in METHODS:
        raise UnknownName("method", name, METHODS)
    return METHODS[name]


def adapted_layers(anatomy: Anatomy, config: MethodConfig) -> tuple[int, ...]:
    """The layers that `method.layers` names: `all`, `6:`, `-3:`, `2:5`, `0,2,5`."""
    num_layers, found = anatomy.num_layers, set()
    for item in ("0:",) if config.layers == "all" else config.layers.split(","):
        match = re.fullmatch(r"\s*(?:(-?\d+)|(-?\d+)?(:)(-?\d+)?)\s*", item)
        if match is None:
            raise BadConfig(f"`method.layers` is `{config.layers}`", "write all, 6:, -3:, 2:5 or 0,2,5")
        single, first, colon, last = match.groups()
        if colon:
            found |= set(range(*slice(*(int(end) if end else None for end in (first, last))).indices(num_layers)))
        elif not -num_layers <= int(single) < num_layers:
            raise BadConfig(
                f"`method.layers` names layer {single} of {num_layers}", f"layers go from 0 to {num_layers - 1}"
            )
        else:
            found.add(int(single) % num_layers)
    if not found:
        raise BadConfig(
            f"`method.layers` is `{config.layers}`, which is none of {num_layers} layers",
            f"layers go from 0 to {num_layers - 1}",
        )
    return tuple(sorted(found))


def first_layer(anatomy: Anatomy, config: MethodConfig) -> int:
    """The lowest layer that anything is trained in; below it all is frozen, norms and dropout too."""
    config = resolve_method(config)
    if not (find_method(config.name).builders or config.norms != "none"):
        return anatomy.num_layers
    return min(adapted_layers(anatomy, config))


ATTENTION_LINEARS = ("query", "key", "value", "project")


def has_frozen_attention(anatomy: Anatomy, config: MethodConfig) -> bool:
    """Whether in the lowest trained layer nothing is trained up to what attention's projection gives."""
    layer = first_layer(anatomy, config)
    has_own = find_method(config.name).has_own_weights
    if layer == anatomy.num_layers or has_own or find_family(anatomy.family).is_prenorm:
        return False
    inside = tuple(f".{layer}.{name}" for name in ATTENTION_LINEARS)
    return not any(place in spec.name for spec in layout(anatomy, config) for place in inside)


def trained_norms(anatomy: Anatomy, config: MethodConfig) -> list[NormSite]:
    """The layer norms trained: by `norms` (all, encoder, none), and none below the lowest adapted layer."""
    if config.norms == "none":
        return []
    lowest = min(adapted_layers(anatomy, config))
    return [
        norm
        for norm in anatomy.norms
        if (norm.layer >= lowest or lowest == 0) and (norm.is_encoder or config.norms == "all")
    ]


def adapter_groups(anatomy: Anatomy, config: MethodConfig) -> dict[str, str]:
    """Site -> the adapter it reads, by their keys: its own, or one that several sites share."""
    layers = adapted_layers(anatomy, config)
    sites = [site for site in anatomy.sites if site.layer in layers and site.place in config.places]
    return {site.key: _group_of(site, config.sharing, anatomy.num_layers) for site in sites}


def adapted_linears(anatomy: Anatomy, config: MethodConfig) -> list[LinearSite]:
    """The linear layers that LoRA or (IA)³ changes; a name that the family has not, or shares, is refused."""
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


def scales_input(linear: LinearSite) -> bool:
    """Whether (IA)³ scales what this layer reads (the wide activations) rather than what it gives (keys, values)."""
    return linear.name in ("project", "contract")


def _refuse_foreign_settings(config: MethodConfig, method: Method) -> None:
    for item in dataclasses.fields(config):
        is_foreign = item.name not in method.settings | {"name"}
        value = getattr(config, item.name)
        # A resolved config has the table's values in it; resolving it again must change nothing.
        if is_foreign and value not in (item.default, getattr(method, item.name, item.default)):
            raise BadConfig(
                f"method `{config.name}` has no setting `{item.name}`, which is `{value}`",
                f"it takes: {', '.join(sorted(method.settings))}" if method.settings else "it has no settings",
            )


def _check(config: MethodConfig, method: Method) -> None:
    if not method.builders and "norms" in method.settings and config.norms == "none":
        raise BadConfig(
            f"method `{config.name}` with `method.norms` `none` trains nothing", "use all or encoder, or method `head`"
        )
    if config.activation != "auto" and config.activation not in ACTIVATIONS:
        raise UnknownName("activation", config.activation, ACTIVATIONS)
    for place in config.places if "places" in method.settings else ():
        if place not in ("attention", "feedforward"):
            raise UnknownName("place", place, ("attention", "feedforward"))
    _sharing_step(config.sharing, 1)
    if config.combine == "multiply" and config.form == "parallel":
        raise BadConfig(
            "`method.combine` is `multiply` for a parallel adapter",
            "it multiplies what it reads: use `--set method.form=sequential`",
        )


def _sharing_step(sharing: str, num_layers: int) -> int:
    """How many layers share one adapter; 0: none do."""
    match = re.fullmatch(r"every-([1-9]\d*)", sharing)
    if match:
        return int(match[1])
    known = {"none": 0, "within-layer": 1, "all": num_layers}
    if sharing not in known:
        raise BadConfig(f"`method.sharing` is `{sharing}`", "it must be none, within-layer, every-K or all")
    return known[sharing]


def _group_of(site: Site, sharing: str, num_layers: int) -> str:
    step = _sharing_step(sharing, num_layers)
    if not step:
        return site.key
    first = site.layer // step * step
    last = min(first + step, num_layers) - 1
    return str(first) if first == last else f"{first}-{last}"


def _adapters(anatomy: Anatomy, config: MethodConfig) -> Iterator[TensorSpec]:
    width, size = anatomy.hidden_size, config.size
    assert size is not None
    starts_at_zero = find_method(config.name).starts_at_zero
    for group in dict.fromkeys(adapter_groups(anatomy, config).values()):
        name = f"adapter.{group}"
        down, up = ("uniform", "zeros") if starts_at_zero else ("normal", "normal")
        yield TensorSpec(f"{name}.down", (width, size), down, config.init_std, ranks=(1,))
        if config.inner_norm != "batch":  # which takes the mean away: a bias before it would only drift
            yield TensorSpec(f"{name}.down_bias", (size,), "zeros", ranks=(0,))
        for index in range(1, config.depth):
            yield TensorSpec(f"{name}.hidden{index}", (size, size), "uniform", ranks=(0, 1))
            yield TensorSpec(f"{name}.hidden{index}_bias", (size,), "zeros", ranks=(0,))
        if config.inner_norm in ("layer", "batch"):
            yield TensorSpec(f"{name}.norm_scale", (size,), "ones", ranks=(0,))
            yield TensorSpec(f"{name}.norm_shift", (size,), "zeros", ranks=(0,))
        if config.inner_norm == "batch":
            yield TensorSpec(f"{name}.running_mean", (size,), "zeros", ranks=(0,), is_trained=False)
            yield TensorSpec(f"{name}.running_var", (size,), "ones", ranks=(0,), is_trained=False)
        yield TensorSpec(f"{name}.up", (size, width), up, config.init_std, ranks=(0,))
        yield TensorSpec(f"{name}.up_bias", (width,), "zeros")
        if config.inner_norm == "output":
            yield TensorSpec(f"{name}.out_scale", (width,), "ones")
            yield TensorSpec(f"{name}.out_shift", (width,), "zeros")


def _norms(anatomy: Anatomy, config: MethodConfig) -> Iterator[TensorSpec]:
    for norm in trained_norms(anatomy, config):
        if find_method(config.name).trains_norm_scales:
            yield TensorSpec(f"norm.{norm.key}.scale", (norm.width,), "backbone", part="norms")
        if norm.has_shift:
            yield TensorSpec(f"norm.{norm.key}.shift", (norm.width,), "backbone", part="norms")


def _lora(anatomy: Anatomy, config: MethodConfig) -> Iterator[TensorSpec]:
    assert config.size is not None
    for linear in adapted_linears(anatomy, config):
        yield TensorSpec(f"lora.{linear.key}.down", (linear.in_width, config.size), "uniform", ranks=(1,))
        yield TensorSpec(f"lora.{linear.key}.up", (config.size, linear.out_width), "zeros", ranks=(0,))


def _ia3(anatomy: Anatomy, config: MethodConfig) -> Iterator[TensorSpec]:
    for linear in adapted_linears(anatomy, config):
        width = linear.in_width if scales_input(linear) else linear.out_width
        yield TensorSpec(f"ia3.{linear.key}", (width,), "ones")


def _biases(anatomy: Anatomy, config: MethodConfig) -> Iterator[TensorSpec]:
    layers = adapted_layers(anatomy, config)
    for linear in anatomy.linears:
        if linear.layer in layers and linear.has_bias:
            yield TensorSpec(f"bias.{linear.key}", (linear.out_width,), "backbone", part="biases")


def _weights(anatomy: Anatomy, config: MethodConfig) -> Iterator[TensorSpec]:
    layers = adapted_layers(anatomy, config)
    if layers != tuple(range(layers[0], anatomy.num_layers)):
        raise BadConfig(
            f"method `{config.name}` trains the top layers, but `method.layers` is `{config.layers}`",
            "write `--set method.layers=-3:` for the top three",
        )
    for parameter in anatomy.parameters:
        is_outside = not 0 <= parameter.layer < anatomy.num_layers
        # Fine-tuning every layer trains the embeddings too; what stands above the top layer is trained with it.
        reaches = len(layers) == anatomy.num_layers or parameter.layer > max(layers)
        is_trained = reaches if is_outside else parameter.layer in layers
        if is_trained:
            yield TensorSpec(f"weight.{parameter.name}", parameter.shape, "backbone", part="weights")


def _head(anatomy: Anatomy, head: HeadSpec) -> Iterator[TensorSpec]:
    width = anatomy.hidden_size
    if head.is_written:
        return
    if head.features == "mix":  # ELMo's: a softmax over the layers, embeddings first, and a factor
        yield TensorSpec("head.mix", (anatomy.num_layers + 1,), "zeros", part="head")
        yield TensorSpec("head.mix_scale", (1,), "ones", part="head")
    if head.hidden != "none":
        start = "backbone" if head.hidden == "pooler" else "normal"
        bias = "backbone" if head.hidden == "pooler" else "zeros"
        yield TensorSpec("head.hidden.weight", (width, width), start, 0.02, "head")
        yield TensorSpec("head.hidden.bias", (width,), bias, part="head")
    # SEMANTICS: the head starts from a truncated normal of 0.02, as BERT's own classifier.
    yield TensorSpec("head.weight", (head.num_outputs, width), "normal", 0.02, "head")
    yield TensorSpec("head.bias", (head.num_outputs,), "zeros", part="head")


_BOTTLENECK = frozenset(
    "size init_std activation norms places layers sharing depth inner_norm form combine scale".split()
)
METHODS: dict[str, Method] = {
    "houlsby": Method(
        "two adapters per block, all layer norms",
        (_adapters,),
        _BOTTLENECK,
        size=64,
        activation="gelu",
        norms="all",
        places=("attention", "feedforward"),
        form="sequential",
        scale=1.0,
    ),
    "mahabadi": Method(
        "two adapters per block with a layer norm behind each, all layer norms",
        (_adapters,),
        _BOTTLENECK,
        size=24,
        activation="gelu",
        norms="all",
        places=("attention", "feedforward"),
        form="sequential",
        inner_norm="output",
        scale=1.0,
        lr=3e-4,
    ),
    "pfeiffer": Method(
        "one adapter per block, layer norms frozen",
        (_adapters,),
        _BOTTLENECK - {"places", "form", "combine"},
        size=64,
        activation="relu",
        places=("output",),
        form="sequential",
        scale=1.0,
    ),
    "parallel": Method(
        "one scaled adapter beside each feed-forward sublayer",
        (_adapters,),
        _BOTTLENECK - {"init_std", "form", "combine"},
        size=64,
        activation="relu",
        places=("feedforward",),
        form="parallel",
        scale=4.0,
        starts_at_zero=True,
    ),
    "lora": Method(
        "low-rank updates of linear layers, query and value",
        (_lora,),
        frozenset(("size", "alpha", "scale", "linears", "norms", "layers")),
        size=8,
        scale=1.0,
        linears=("query", "value"),
        lr=1e-3,
    ),
    "ia3": Method(
        "(IA)³: factors on keys, values and the wide activations",
        (_ia3,),
        frozenset(("linears", "norms", "layers")),
        linears=("key", "value", "contract"),
        lr=5e-3,
    ),
    "bitfit": Method(
        "all biases of blocks and norms",
        (_biases,),
        frozenset(("layers",)),
        norms="all",
        lr=1e-3,
        trains_norm_scales=False,
    ),
    "norms": Method("layer norms only", (), frozenset(("norms", "layers")), norms="all", lr=1e-3),
    "head": Method("nothing but the head, on frozen features", (), frozenset(), lr=3e-3),
    "full": Method(
        "every weight, a copy of the backbone per task",
        (_weights,),
        frozenset(),
        norms="all",
        lr=5e-5,
        has_own_weights=True,
    ),
    "top": Method(
        "every weight of the top layers",
        (_weights,),
        frozenset(("layers",)),
        norms="all",
        layers="-1:",
        lr=1e-4,
        has_own_weights=True,
    ),
}
_NO_BIASES = ("its layers have no biases", "use `norms` or an adapter method")
_NO_HEAD = ("it writes its answers with its own frozen output layer, and has no other head", "use `norms`")
_SHARED = "its query and key layers also project relative positions, which the rows of a batch share"
UNSUPPORTED: dict[tuple[str, str], tuple[str, str]] = {
    ("deberta-v2", "bitfit"): (_SHARED, "use `norms` or an adapter method"),
    ("modernbert", "bitfit"): _NO_BIASES,
    **{(family, "bitfit"): _NO_BIASES for family in ("t5", "mt5")},
    **{(family, "head"): _NO_HEAD for family in ("t5", "mt5")},
}
"""(family, method) -> why it cannot be, and what to do. DeBERTa's query and key are refused as `shared_linears`."""
