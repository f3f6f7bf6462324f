"""Where a task may write in each backbone family: the one table that knows transformers' module names.

A family says where its blocks are, which submodule each place of a block stands for, which layer norms work on tokens
and which linear layers a block has. `survey` reads it off a model (real or on the meta device); `mount` sets thin
wrappers there. A wrapper asks its `Mount` for the active bank at every forward pass; with none active the backbone is
exactly itself.

Adding a family: one entry in FAMILIES, and its name in the contract tests runs them all over it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from torch import Tensor, nn

from inlay.errors import Unsupported
from inlay.model.attention import IMPLEMENTATION, replace_biased
from inlay.model.route import Pack


@dataclass(frozen=True)
class Family:
    """The places of one backbone architecture, as dotted submodule names."""

    stack: str
    """the list of blocks"""
    places: Mapping[str, str]
    """place -> submodule of a block; "output" is the block's last norm where it ends in one, else the block itself"""
    norms: Mapping[str, str]
    """name -> token-wise layer norm of a block"""
    outer_norms: Mapping[str, str]
    """name -> token-wise layer norm outside the blocks"""
    linears: Mapping[str, str]
    """name -> linear layer of a block; `Wqkv:2/3` is the last third of the outputs of one that computes several"""
    shared_linears: Mapping[str, str] = field(default_factory=dict)
    """linear layer that no task may write to -> why"""
    frozen_norms: Mapping[str, str] = field(default_factory=dict)
    """norm that does not work on tokens -> why it stays frozen"""
    pooler: str | None = None
    """the pretrained pooling layer, where the family has one"""
    prefix: str = ""
    """what a checkpoint with a pretraining head puts before the backbone's tensor names"""
    first_position: int = 0
    """the position id of a row's first token: padding_idx + 1 where positions are counted from there"""
    attention: str = "attention.self"
    """self-attention of a block"""
    packing: str = "interface"
    """how rows are packed: through transformers' attention "interface"; "bias", where the family adds a position bias
    to the scores and its modules are taught to; "none": they are padded"""
    is_prenorm: bool = False
    """norms stand before the sublayers, where a task may train them, not behind"""
    num_outputs: int = 0
    """what a block gives: 0, the states alone; else a tuple of so many, the states first"""
    implementation: str = IMPLEMENTATION
    """transformers' attention implementation; "eager" where the family has no other"""


# Adapted after the output dropout of each sublayer, before the residual sum, as Houlsby et al. do in BERT. DistilBERT
# has no dropout after its attention, ModernBERT none after its feed-forward layer: there it is the sublayer's output.
_BERT_LINEARS = {
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "project": "attention.output.dense",
    "expand": "intermediate.dense",
    "contract": "output.dense",
}
_BERT = Family(
    stack="encoder.layer",
    places={"attention": "attention.output.dropout", "feedforward": "output.dropout", "output": "output.LayerNorm"},
    norms={"attention": "attention.output.LayerNorm", "feedforward": "output.LayerNorm"},
    outer_norms={"embeddings": "embeddings.LayerNorm"},
    linears=_BERT_LINEARS,
    pooler="pooler",
    prefix="bert",
)
_POSITIONS = "it also projects relative positions, which the rows of a batch share"
_ROBERTA = replace(_BERT, prefix="roberta", first_position=2)
FAMILIES: dict[str, Family] = {
    "bert": _BERT,
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "camembert": _ROBERTA,
    "electra": replace(_BERT, pooler=None, prefix="electra"),
    "mpnet": Family(
        stack="encoder.layer",
        places={"attention": "attention.dropout", "feedforward": "output.dropout", "output": "output.LayerNorm"},
        norms={"attention": "attention.LayerNorm", "feedforward": "output.LayerNorm"},
        outer_norms={"embeddings": "embeddings.LayerNorm"},
        linears={
            "query": "attention.attn.q",
            "key": "attention.attn.k",
            "value": "attention.attn.v",
            "project": "attention.attn.o",
            "expand": "intermediate.dense",
            "contract": "output.dense",
        },
        pooler="pooler",
        prefix="mpnet",
        first_position=2,
        attention="attention.attn",
        packing="bias",
        num_outputs=1,
        implementation="eager",
    ),
    "distilbert": Family(
        stack="transformer.layer",
        places={"attention": "attention.out_lin", "feedforward": "ffn.dropout", "output": "output_layer_norm"},
        norms={"attention": "sa_layer_norm", "feedforward": "output_layer_norm"},
        outer_norms={"embeddings": "embeddings.LayerNorm"},
        linears={
            "query": "attention.q_lin",
            "key": "attention.k_lin",
            "value": "attention.v_lin",
            "project": "attention.out_lin",
            "expand": "ffn.lin1",
            "contract": "ffn.lin2",
        },
        prefix="distilbert",
        attention="attention",
    ),
    "deberta-v2": Family(
        stack="encoder.layer",
        places=_BERT.places,
        norms=_BERT.norms,
        outer_norms={"embeddings": "embeddings.LayerNorm", "convolution": "encoder.conv.LayerNorm"},
        linears={
            "value": "attention.self.value_proj",
            "project": "attention.output.dense",
            "expand": "intermediate.dense",
            "contract": "output.dense",
        },
        shared_linears={"query": _POSITIONS, "key": _POSITIONS},
        frozen_norms={"encoder.LayerNorm": "it normalises relative-position embeddings, not tokens"},
        prefix="deberta",
        packing="none",
        num_outputs=2,
        implementation="eager",
    ),
    "modernbert": Family(
        stack="layers",
        places={"attention": "attn.out_drop", "feedforward": "mlp", "output": ""},
        norms={"attention": "attn_norm", "feedforward": "mlp_norm"},
        outer_norms={"embeddings": "embeddings.norm", "final": "final_norm"},
        linears={
            "query": "attn.Wqkv:0/3",
            "key": "attn.Wqkv:1/3",
            "value": "attn.Wqkv:2/3",
            "project": "attn.Wo",
            "expand": "mlp.Wi",
            "contract": "mlp.Wo",
        },
        prefix="model",
        is_prenorm=True,
        attention="attn",
        packing="none",
        implementation="sdpa",
    ),
}


@dataclass(frozen=True)
class Classifier:
    """Where transformers' own sequence classifier of a family keeps its head, which other libraries save as it is."""

    out: str
    hidden: str = ""
    """the tanh layer before it, on the first token; without one, it reads the pooler"""


_TANH = Classifier("classifier.out_proj", "classifier.dense")
CLASSIFIERS: dict[str, Classifier | str] = {
    "bert": Classifier("classifier"),
    "roberta": _TANH,
    "xlm-roberta": _TANH,
    "camembert": _TANH,
    "mpnet": _TANH,
    "electra": "a gelu layer before its outputs",
    "distilbert": "a relu layer before its outputs",
    "deberta-v2": "a gelu layer before its outputs",
    "modernbert": "a layer norm before its outputs",
}
"""family -> its classifier, or what it has that no head of ours has"""


@dataclass(frozen=True)
class Site:
    """A submodule whose output a task may rewrite."""

    layer: int
    place: str
    path: str
    """dotted, as `model.get_submodule` takes it"""
    is_norm: bool = False
    """the adapter stands at a layer norm and reads what it gives (Pfeiffer's place)"""

    @property
    def key(self) -> str:
        """The site's name in stored tensors: free of transformers' module names."""
        return f"{self.layer}.{self.place}"


@dataclass(frozen=True)
class NormSite:
    """A token-wise layer norm."""

    key: str
    """stable name: "embeddings", "3.attention", …"""
    path: str
    layer: int
    """of its block; -1 before the first, the number of layers after the last"""
    width: int
    has_shift: bool

    @property
    def is_encoder(self) -> bool:
        return self.key != "embeddings"

    @property
    def is_outer(self) -> bool:
        """Whether it stands outside the blocks."""
        return "." not in self.key

    @property
    def name(self) -> str:
        """Its name within its block, or among the outer norms."""
        return self.key.rpartition(".")[2]


@dataclass(frozen=True)
class LinearSite:
    """A linear layer of a block, or the outputs `start` to `stop` of one that computes several."""

    layer: int
    name: str
    path: str
    in_width: int
    start: int
    stop: int
    has_bias: bool

    @property
    def key(self) -> str:
        """The site's name in stored tensors."""
        return f"{self.layer}.{self.name}"

    @property
    def out_width(self) -> int:
        return self.stop - self.start

    @property
    def reads(self) -> str | None:
        """The place of its block whose sublayer it reads the input of, where it is the one that tells."""
        return {"value": "attention", "expand": "feedforward"}.get(self.name)


@dataclass(frozen=True)
class ParameterSite:
    """A parameter of the backbone itself, which full and top-k fine-tuning train a copy of."""

    name: str
    """as transformers has it"""
    shape: tuple[int, ...]
    layer: int
    """of its block; -1 before the first, the number of layers after the last"""
    is_pooler: bool


@dataclass(frozen=True)
class Anatomy:
    """All that the methods need to know of a backbone: what a task may write to, and how wide it is."""

    family: str
    num_layers: int
    hidden_size: int
    sites: tuple[Site, ...]
    norms: tuple[NormSite, ...]
    linears: tuple[LinearSite, ...]
    parameters: tuple[ParameterSite, ...]
    frozen_norms: Mapping[str, str]
    shared_linears: Mapping[str, str]


def find_family(model_type: str) -> Family:
    """The family of a transformers `model_type`, or an error that lists the families there are."""
    if model_type not in FAMILIES:
        raise Unsupported(
            f"no backbone family for the architecture `{model_type}`",
            f"supported: {', '.join(sorted(FAMILIES))}; a new one is an entry in FAMILIES in inlay/model/sites.py "
            "(CONTRIBUTING.md, 'Add a family')",
        )
    return FAMILIES[model_type]


def survey(model: nn.Module) -> Anatomy:
    """Every site and token-wise norm of an unmounted backbone, in forward order."""
    config: Any = model.config
    family = find_family(config.model_type)
    num_layers = len(model.get_submodule(family.stack))  # type: ignore[arg-type]
    norm_paths = {f"{family.stack}.{i}.{path}" for i in range(num_layers) for path in family.norms.values()}
    sites = []
    for layer in range(num_layers):
        for place, path in family.places.items():
            full = f"{family.stack}.{layer}.{path}".rstrip(".")
            model.get_submodule(full)  # fail here, not in the first forward pass, if transformers renamed it
            sites.append(Site(layer, place, full, is_norm=full in norm_paths))
    found = {name: module for name, module in model.named_modules() if isinstance(module, nn.LayerNorm)}
    norms = tuple(
        NormSite(key, path, layer, found[path].normalized_shape[0], found[path].bias is not None)
        for key, path, layer in _norm_paths(family, num_layers)
        if path in found  # ModernBERT's first block has none; DeBERTa's convolution is optional
    )
    frozen = {path: why for path, why in family.frozen_norms.items() if path in found}
    unknown = set(found) - {norm.path for norm in norms} - set(frozen)
    assert not unknown, f"layer norms that the family table does not name: {sorted(unknown)}"
    return Anatomy(
        config.model_type,
        num_layers,
        config.hidden_size,
        tuple(sites),
        norms,
        tuple(_find_linears(model, family, num_layers)),
        tuple(_find_parameters(model, family, num_layers)),
        frozen,
        family.shared_linears,
    )


# Outer norms that do not stand before the first block: DeBERTa's convolution joins in after block 0.
_OUTER_LAYERS = {"convolution": lambda num_layers: 0, "final": lambda num_layers: num_layers}


def _norm_paths(family: Family, num_layers: int) -> Iterator[tuple[str, str, int]]:
    for name, path in family.outer_norms.items():
        yield name, path, _OUTER_LAYERS.get(name, lambda num_layers: -1)(num_layers)
    for layer in range(num_layers):
        for name, path in family.norms.items():
            yield f"{layer}.{name}", f"{family.stack}.{layer}.{path}", layer


def _find_linears(model: nn.Module, family: Family, num_layers: int) -> Iterator[LinearSite]:
    for layer in range(num_layers):
        for name, where in family.linears.items():
            path, _, part = where.partition(":")
            module: Any = model.get_submodule(f"{family.stack}.{layer}.{path}")
            index, count = map(int, part.split("/")) if part else (0, 1)
            width = module.out_features // count
            yield LinearSite(
                layer,
                name,
                f"{family.stack}.{layer}.{path}",
                module.in_features,
                index * width,
                (index + 1) * width,
                module.bias is not None,
            )


def _find_parameters(model: nn.Module, family: Family, num_layers: int) -> Iterator[ParameterSite]:
    last = family.outer_norms.get("final", "")
    for name, parameter in model.named_parameters():
        is_pooler = family.pooler is not None and name.startswith(f"{family.pooler}.")
        layer = -1
        if name.startswith(f"{family.stack}."):
            layer = int(name.removeprefix(f"{family.stack}.").partition(".")[0])
        elif is_pooler or (last and name.startswith(f"{last}.")):
            layer = num_layers
        yield ParameterSite(name, tuple(parameter.shape), layer, is_pooler)


class SlotOperations(Protocol):
    """What a wrapper asks of the active bank; the route is already bound, and names are those within a block."""

    def at(self, layer: int) -> SlotOperations: ...

    @property
    def pack(self) -> Pack | None: ...

    def enter(self, hidden: Tensor) -> Tensor | None: ...

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor: ...

    def rewrite(self, place: str, output: Tensor) -> Tensor: ...

    def drop_and_rewrite(self, place: str, dropout: Any, output: Tensor) -> Tensor: ...

    def normalize(self, name: str, place: str | None, inner: Any, x: Tensor) -> Tensor: ...

    def transform(self, parts: tuple[LinearSite, ...], inner: Any, x: Tensor) -> Tensor: ...


class Mount:
    """The wrappers of one backbone, or of one of its blocks, and the bank and route that are active in them.

    Blocks have mounts of their own, so that a wrapper knows its place within its block and nothing of which block it
    is: what is compiled for one block serves all.
    """

    def __init__(self, num_blocks: int = 0) -> None:
        self.active: SlotOperations | None = None
        self.blocks = [Mount() for _ in range(num_blocks)]

    @contextmanager
    def routed(self, operations: SlotOperations) -> Iterator[None]:
        """Send every forward pass inside the block through `operations`.

        Call `backward` inside the block too: activation checkpointing runs the forward
        pass again during backward and needs the route to be there.
        """
        outer = self.active, [block.active for block in self.blocks]
        self._activate(operations, [operations.at(layer) for layer in range(len(self.blocks))])
        try:
            yield
        finally:
            self._activate(*outer)

    def _activate(self, whole: SlotOperations | None, by_block: Sequence[SlotOperations | None]) -> None:
        self.active = whole
        for block, active in zip(self.blocks, by_block, strict=True):
            block.active = active


class _Wrapper(nn.Module):
    def __init__(self, inner: nn.Module, mount: Mount) -> None:
        super().__init__()
        self.inner = inner
        self._mount = mount

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:  # a block's attributes, such as ModernBERT's `attention_type`, are read from outside
            return getattr(super().__getattr__("inner"), name)


class OutputSite(_Wrapper):
    """A submodule whose output goes through the adapters of the active bank."""

    def __init__(self, inner: nn.Module, mount: Mount, place: str) -> None:
        super().__init__(inner, mount)
        self.place = place
        self._is_dropout = isinstance(inner, nn.Dropout)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        active = self._mount.active
        if active is not None and self._is_dropout and self.training:
            return active.drop_and_rewrite(self.place, self.inner, *args)
        output = self.inner(*args, **kwargs)
        return output if active is None else active.rewrite(self.place, output)


class NormWrapper(_Wrapper):
    """A layer norm with every slot's own scale and shift, and Pfeiffer's adapter where the norm ends a block."""

    def __init__(self, inner: nn.Module, mount: Mount, name: str, place: str | None) -> None:
        super().__init__(inner, mount)
        self.name, self.place = name, place

    def forward(self, x: Tensor) -> Tensor:
        active = self._mount.active
        return self.inner(x) if active is None else active.normalize(self.name, self.place, self.inner, x)


class LinearWrapper(_Wrapper):
    """A linear layer with every slot's own update, bias and scale."""

    def __init__(self, inner: nn.Module, mount: Mount, parts: tuple[LinearSite, ...]) -> None:
        super().__init__(inner, mount)
        self.parts = parts

    def forward(self, x: Tensor) -> Tensor:
        active = self._mount.active
        return self.inner(x) if active is None else active.transform(self.parts, self.inner, x)


class BlockWrapper(_Wrapper):
    """A block that a pass with a prefix leaves out, or begins at.

    What is replaced is what the block reads, not what the one below gives: DeBERTa's convolution joins in between.
    """

    def __init__(self, inner: nn.Module, mount: Mount, num_outputs: int) -> None:
        super().__init__(inner, mount)
        self._num_outputs = num_outputs

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        active = self._mount.active
        read = hidden_states if active is None else active.enter(hidden_states)
        if read is not None:
            return self.inner(read, *args, **kwargs)
        others = (None,) * (self._num_outputs - 1)
        return (hidden_states, *others) if self._num_outputs else hidden_states


def mount(model: nn.Module, anatomy: Anatomy) -> Mount:
    """Set wrappers at the sites, norms, linear layers and blocks of `model`; they do nothing until a bank is routed."""
    mounted = Mount(anatomy.num_layers)
    # Linear layers first: a wrapped one may lie inside a site, or be one (DistilBERT's attention).
    for path in dict.fromkeys(linear.path for linear in anatomy.linears):
        parts = tuple(linear for linear in anatomy.linears if linear.path == path)
        block = mounted.blocks[parts[0].layer]
        model.set_submodule(path, LinearWrapper(model.get_submodule(path), block, parts))
    at_norms = {site.path: site.place for site in anatomy.sites if site.is_norm}
    for norm in anatomy.norms:
        block = mounted if norm.is_outer else mounted.blocks[norm.layer]
        inner = model.get_submodule(norm.path)
        model.set_submodule(norm.path, NormWrapper(inner, block, norm.name, at_norms.get(norm.path)))
    for site in anatomy.sites:
        if not site.is_norm:
            block = mounted.blocks[site.layer]
            model.set_submodule(site.path, OutputSite(model.get_submodule(site.path), block, site.place))
    _mount_attention(model, anatomy, mounted)
    family = find_family(anatomy.family)
    for layer, block in enumerate(mounted.blocks):
        path = f"{family.stack}.{layer}"
        model.set_submodule(path, BlockWrapper(model.get_submodule(path), block, family.num_outputs))
    return mounted


def _mount_attention(model: nn.Module, anatomy: Anatomy, mounted: Mount) -> None:
    family = find_family(anatomy.family)
    if family.packing == "none":
        return
    attentions: list[Any] = [
        model.get_submodule(f"{family.stack}.{layer}.{family.attention}") for layer in range(anatomy.num_layers)
    ]
    if family.packing == "bias":
        replace_biased(model.get_submodule(family.stack.rpartition(".")[0]), attentions, mounted)
    for attention, block in zip(attentions, mounted.blocks, strict=True):
        attention.inlay = block
