"""Where a task may write in each backbone family: the one table that knows transformers' module names.

A family says where its blocks are, which submodule each place of a block stands for, which layer norms work on tokens
and which linear layers a block has. `survey` reads it off a model (real or on the meta device); `mount.py` sets thin
wrappers there.

Adding a family: one entry in FAMILIES, and its name in the contract tests runs them all over it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from inlay.errors import Unsupported
from inlay.model.attention import IMPLEMENTATION


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
    activation: str = ""
    """the activation of a block's feed-forward network, where it is a module of its own"""
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
    activation="intermediate.intermediate_act_fn",
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
        activation="intermediate.intermediate_act_fn",
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
        activation="ffn.activation",
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
