"""The tensors that methods are made of: one function for each kind, from a backbone's anatomy and resolved settings.

What the settings name (layers, places, linear layers, who shares an adapter) is found here too, for whoever reads those
tensors again; so are the values that a tensor begins with.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from inlay.errors import BadConfig, UnknownName, Unsupported
from inlay.model.backbone.sites import Anatomy, LinearSite, NormSite, Site
from inlay.model.heads.heads import HeadSpec
from inlay.model.parts.hypernet import LINEAR_STD, SMALL_STD, Group, Hypernet
from inlay.settings.run_config import MethodConfig

PAL_PARTS = ("query", "key", "value")
_PAL_SHARE, _PAL_STD = 0.266, 0.02


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
    """what `plan` counts it under: adapters, norms, biases, weights or head"""
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
    """The values that a tensor of a slot begins with, if they are not the backbone's: by the seed, and the task's name.

    What tasks of a run share is drawn without a name.
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


ATTENTION_LINEARS = ("query", "key", "value", "project")


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


def sharing_step(sharing: str, num_layers: int) -> int:
    """How many layers share one adapter; 0: none do."""
    match = re.fullmatch(r"every-([1-9]\d*)", sharing)
    if match:
        return int(match[1])
    known = {"none": 0, "within-layer": 1, "all": num_layers}
    if sharing not in known:
        raise BadConfig(f"`method.sharing` is `{sharing}`", "it must be none, within-layer, every-K or all")
    return known[sharing]


def _group_of(site: Site, sharing: str, num_layers: int) -> str:
    step = sharing_step(sharing, num_layers)
    if not step:
        return site.key
    first = site.layer // step * step
    last = min(first + step, num_layers) - 1
    return str(first) if first == last else f"{first}-{last}"


def adapters(anatomy: Anatomy, config: MethodConfig, *, starts_at_zero: bool = False) -> Iterator[TensorSpec]:
    """Bottlenecks at the sites; with `starts_at_zero` their way up is zero at first, as LoRA's."""
    width, size = anatomy.hidden_size, config.size
    assert size is not None
    for group in dict.fromkeys(adapter_groups(anatomy, config).values()):
        name = f"adapter.{group}"
        if config.inner_norm in ("output", "alone"):
            yield TensorSpec(f"{name}.out_scale", (width,), *_scale_behind(anatomy))
            yield TensorSpec(f"{name}.out_shift", (width,), "zeros")
        if config.inner_norm == "alone":
            continue
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


def norms(anatomy: Anatomy, config: MethodConfig, *, with_scales: bool = True) -> Iterator[TensorSpec]:
    """The backbone's layer norms that are trained, or their shifts alone."""
    for norm in trained_norms(anatomy, config):
        if with_scales:
            yield TensorSpec(f"norm.{norm.key}.scale", (norm.width,), "backbone", part="norms")
        if norm.has_shift:
            yield TensorSpec(f"norm.{norm.key}.shift", (norm.width,), "backbone", part="norms")


def low_ranks(anatomy: Anatomy, config: MethodConfig) -> Iterator[TensorSpec]:
    """LoRA's updates of linear layers."""
    assert config.size is not None
    for linear in adapted_linears(anatomy, config):
        yield TensorSpec(f"lora.{linear.key}.down", (linear.in_width, config.size), "uniform", ranks=(1,))
        yield TensorSpec(f"lora.{linear.key}.up", (config.size, linear.out_width), "zeros", ranks=(0,))


def factors(anatomy: Anatomy, config: MethodConfig) -> Iterator[TensorSpec]:
    """(IA)³'s factors."""
    for linear in adapted_linears(anatomy, config):
        width = linear.in_width if scales_input(linear) else linear.out_width
        yield TensorSpec(f"ia3.{linear.key}", (width,), "ones")


def biases(anatomy: Anatomy, config: MethodConfig) -> Iterator[TensorSpec]:
    """The biases of linear layers."""
    layers = adapted_layers(anatomy, config)
    for linear in anatomy.linears:
        if linear.layer in layers and linear.has_bias:
            yield TensorSpec(f"bias.{linear.key}", (linear.out_width,), "backbone", part="biases")


def own_weights(anatomy: Anatomy, config: MethodConfig) -> Iterator[TensorSpec]:
    """A copy of the backbone's own weights, of the top layers at least."""
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


def pals(anatomy: Anatomy, config: MethodConfig) -> Iterator[TensorSpec]:
    """Projected attention beside every block: one way down and up for all of them, attention for each."""
    width, size = anatomy.hidden_size, pal_size(anatomy)
    yield TensorSpec("pal.encode", (width, size), "normal", _PAL_STD)
    yield TensorSpec("pal.decode", (size, width), "normal", _PAL_STD)
    for layer in adapted_layers(anatomy, config):
        for name in PAL_PARTS:
            yield TensorSpec(f"pal.{layer}.{name}", (size, size), "normal", _PAL_STD)


def pal_size(anatomy: Anatomy) -> int:
    """The width of projected attention: the multiple of the head count nearest to 0.266 of the backbone's."""
    return max(1, round(_PAL_SHARE * anatomy.hidden_size / anatomy.num_heads)) * anatomy.num_heads


def make_hypernet(anatomy: Anatomy, config: MethodConfig, *, shares_heads: bool) -> Hypernet:
    """What the hypernetwork of these resolved settings is on a backbone."""
    assert config.size is not None
    assert config.task_size is not None
    assert config.projector is not None
    adapted = adapter_groups(anatomy, config)
    sites = [site for site in anatomy.sites if site.key in adapted]
    stacks = {"encoder": range(anatomy.num_readers), "decoder": range(anatomy.num_readers, anatomy.num_layers)}
    groups = []
    for name, layers in stacks.items():
        own = [site for site in sites if site.layer in layers]
        if own:
            keys, places = tuple(site.key for site in own), tuple(site.place for site in own)
            groups.append(Group(name, keys, tuple(site.layer - layers[0] for site in own), len(layers), places))
    # What HyperFormer++'s heads read is of size one, and what they write of 0.08: on T5, as published, a small part of
    # its states. An encoder's would change by their own size, layer by layer.
    is_small = shares_heads and not anatomy.has_decoder
    return Hypernet(
        tuple(groups), anatomy.hidden_size, config.size, config.task_size, config.projector, shares_heads,
        config.writes, SMALL_STD if is_small else LINEAR_STD,
    )  # fmt: skip


def _scale_behind(anatomy: Anatomy) -> tuple[str, float]:
    """How the scale of a norm behind an adapter begins.

    At one, as published, on T5, whose states are far larger than what it then adds. An encoder's are of size one, and
    drown in it: there it begins small.
    """
    return ("ones", 0.0) if anatomy.has_decoder else ("normal", 0.08)


def hypernet(anatomy: Anatomy, config: MethodConfig, *, shares_heads: bool = False) -> Iterator[TensorSpec]:
    """A hypernetwork, and what each task has of its own before it."""
    net = make_hypernet(anatomy, config, shares_heads=shares_heads)
    for item in (*net.task_tensors(), *net.tensors()):
        yield TensorSpec(item.name, item.shape, item.start, item.std)
    if config.writes == "blocks":  # the norms behind them are trained as they are
        for site in (key for group in net.groups for key in group.keys):
            yield TensorSpec(f"adapter.{site}.out_scale", (net.width,), *_scale_behind(anatomy))
            yield TensorSpec(f"adapter.{site}.out_shift", (net.width,), "zeros")


def head_layers(anatomy: Anatomy, head: HeadSpec) -> Iterator[TensorSpec]:
    """What the head has of its own."""
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
    if head.has_towers:  # what reads v, |u − v|, u · v and the cosine; `head.weight` reads u
        yield TensorSpec("head.pair_weight", (head.num_outputs, 3 * width + 1), "normal", 0.02, "head")
    yield TensorSpec("head.bias", (head.num_outputs,), "zeros", part="head")
