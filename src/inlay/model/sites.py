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
class Stack:
    """Blocks of one kind and the places in them, as dotted submodule names of a block."""

    blocks: str
    """the list of blocks"""
    places: Mapping[str, str]
    norms: Mapping[str, str]
    linears: Mapping[str, str]
    closing: str = ""
    """the norm behind the last block, where it counts as that block's"""


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
    """name -> linear layer of a block; `Wqkv:2/3` is the last third of the outputs of one that computes several;
    of `wi|wi_0` the one that the model has, and none is needed where nothing stands behind the bar"""
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
    cross: str = ""
    """a decoder's attention to what was read"""
    packing: str = "interface"
    """how rows are packed: through transformers' attention "interface"; "bias" or "buckets", where the family adds a
    position bias to the scores, as mpnet or T5 does, and its modules are taught to; "none": they are padded"""
    is_prenorm: bool = False
    """norms stand before the sublayers, where a task may train them, not behind"""
    activation: str = ""
    """the activation of a block's feed-forward network, where it is a module of its own"""
    num_outputs: int = 0
    """what a block gives: 0, the states alone; else a tuple of so many, the states first"""
    implementation: str = IMPLEMENTATION
    """transformers' attention implementation; "eager" where the family has no other"""
    closing: str = ""
    """the norm behind the last block, where it counts as that block's"""
    decoder: Stack | None = None
    """the blocks that write, in a family that reads and writes; layers are counted through them after the others"""
    loader: str = "AutoModel"
    """transformers' class that loads it"""
    copies: tuple[str, ...] = ()
    """tensors of a file, of which the later may repeat the first: then they are no parameters of their own"""
    unused: tuple[str, ...] = ()
    """tensors of a file that nothing reads"""
    config_fields: tuple[str, ...] = ()
    """settings that change the function computed, besides those that other families have too"""
    max_length: int | None = None
    """the most tokens a row may have, where positions are relative and the config sets no limit"""
    reuses: bool = True
    """a pass may begin at any block: what it reads is all that the lower ones leave"""

    @property
    def stacks(self) -> tuple[Stack, ...]:
        """The blocks that read, then those that write."""
        own = Stack(self.stack, self.places, self.norms, self.linears, self.closing)
        return (own,) if self.decoder is None else (own, self.decoder)


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


def _t5_stack(stack: str, sublayers: tuple[str, ...]) -> Stack:
    """Adapted before dropout, as published; no adapter on cross-attention, but its norm is trained."""
    last = f"layer.{len(sublayers) - 1}"
    attention, feedforward = "layer.0.SelfAttention", f"{last}.DenseReluDense"
    return Stack(
        f"{stack}.block",
        # The whole sublayer with its residual is what a block gives.
        places={"attention": f"{attention}.o", "feedforward": feedforward, "output": last},
        norms={name: f"layer.{index}.layer_norm" for index, name in enumerate(sublayers)},
        linears={
            "query": f"{attention}.q",
            "key": f"{attention}.k",
            "value": f"{attention}.v",
            "project": f"{attention}.o",
            "expand": f"{feedforward}.wi|{feedforward}.wi_0",
            "gate": f"{feedforward}.wi_1|",
            "contract": f"{feedforward}.wo",
        },
        closing=f"{stack}.final_layer_norm",
    )


_T5_ENCODER = _t5_stack("encoder", ("attention", "feedforward"))
_T5 = Family(
    stack=_T5_ENCODER.blocks,
    places=_T5_ENCODER.places,
    norms=_T5_ENCODER.norms,
    outer_norms={},
    linears=_T5_ENCODER.linears,
    prefix="transformer",
    attention="layer.0.SelfAttention",
    cross="layer.1.EncDecAttention",
    packing="buckets",  # what is read; what is written is short, and padded
    is_prenorm=True,
    num_outputs=3,
    implementation="eager",
    closing=_T5_ENCODER.closing,
    decoder=_t5_stack("decoder", ("attention", "cross", "feedforward")),
    loader="AutoModelForSeq2SeqLM",
    copies=("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"),
    unused=("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",),
    config_fields=(
        *("d_kv", "d_ff", "num_decoder_layers", "feed_forward_proj", "relative_attention_max_distance"),
        *("layer_norm_epsilon", "decoder_start_token_id", "scale_decoder_outputs"),
    ),
    max_length=4096,
    reuses=False,  # the first block of a stack computes the position bias of all
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
    "t5": _T5,
    "mt5": _T5,
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
    "t5": "none that scores or writes texts",
    "mt5": "none that scores or writes texts",
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
    blocks: tuple[str, ...]
    """the path of every block, the decoder's behind the encoder's"""
    num_readers: int
    """blocks that read the text; those from here on are a decoder's"""
    hidden_size: int
    sites: tuple[Site, ...]
    norms: tuple[NormSite, ...]
    linears: tuple[LinearSite, ...]
    parameters: tuple[ParameterSite, ...]
    frozen_norms: Mapping[str, str]
    shared_linears: Mapping[str, str]
    num_heads: int

    @property
    def num_layers(self) -> int:
        return len(self.blocks)

    @property
    def has_decoder(self) -> bool:
        return self.num_readers < self.num_layers


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
    blocks = _find_blocks(model, family)
    norm_paths = {f"{path}.{norm}" for path, stack in blocks for norm in stack.norms.values()}
    sites = []
    for layer, (block, stack) in enumerate(blocks):
        for place, path in stack.places.items():
            full = f"{block}.{path}".rstrip(".")
            model.get_submodule(full)  # fail here, not in the first forward pass, if transformers renamed it
            sites.append(Site(layer, place, full, is_norm=full in norm_paths))
    found: dict[str, Any] = {name: module for name, module in model.named_modules() if _is_norm(module)}
    norms = tuple(
        NormSite(key, path, layer, len(found[path].weight), getattr(found[path], "bias", None) is not None)
        for key, path, layer in _norm_paths(family, blocks)
        if path in found  # ModernBERT's first block has none; DeBERTa's convolution is optional
    )
    frozen = {path: why for path, why in family.frozen_norms.items() if path in found}
    unknown = set(found) - {norm.path for norm in norms} - set(frozen)
    assert not unknown, f"layer norms that the family table does not name: {sorted(unknown)}"
    return Anatomy(
        config.model_type,
        tuple(path for path, _ in blocks),
        sum(stack.blocks == family.stack for _, stack in blocks),
        config.hidden_size,
        tuple(sites),
        norms,
        tuple(_find_linears(model, blocks)),
        tuple(_find_parameters(model, family, blocks)),
        frozen,
        family.shared_linears,
        config.num_attention_heads,
    )


Blocks = list[tuple[str, Stack]]
"""The path of every block and what stands in it."""


def _find_blocks(model: nn.Module, family: Family) -> Blocks:
    return [
        (f"{stack.blocks}.{index}", stack)
        for stack in family.stacks
        for index in range(len(model.get_submodule(stack.blocks)))  # type: ignore[arg-type]
    ]


def _is_norm(module: nn.Module) -> bool:
    """Whether a module is a layer norm: torch's, or one of transformers' that only scales, or apex's in its place."""
    return isinstance(module, nn.LayerNorm) or type(module).__name__.endswith(("LayerNorm", "RMSNorm"))


# Outer norms that do not stand before the first block: DeBERTa's convolution joins in after block 0.
_OUTER_LAYERS = {"convolution": lambda num_layers: 0, "final": lambda num_layers: num_layers}


def _norm_paths(family: Family, blocks: Blocks) -> Iterator[tuple[str, str, int]]:
    for name, path in family.outer_norms.items():
        yield name, path, _OUTER_LAYERS.get(name, lambda num_layers: -1)(len(blocks))
    for layer, (block, stack) in enumerate(blocks):
        for name, path in stack.norms.items():
            yield f"{layer}.{name}", f"{block}.{path}", layer
        is_last = layer + 1 == len(blocks) or blocks[layer + 1][1] is not stack
        if stack.closing and is_last:
            yield f"{layer}.final", stack.closing, layer


def _find_linears(model: nn.Module, blocks: Blocks) -> Iterator[LinearSite]:
    for layer, (block, stack) in enumerate(blocks):
        for name, where in stack.linears.items():
            paths, _, part = where.partition(":")
            path = _find_path(model, block, paths.split("|"))
            if path is None:
                continue
            module: Any = model.get_submodule(path)
            index, count = map(int, part.split("/")) if part else (0, 1)
            width = module.out_features // count
            has_bias = module.bias is not None
            yield LinearSite(layer, name, path, module.in_features, index * width, (index + 1) * width, has_bias)


def _find_path(model: nn.Module, block: str, choices: list[str]) -> str | None:
    """The path that the model has; the last choice if it has none of them, so that it fails by name."""
    known = [choice for choice in choices if choice and _has_module(model.get_submodule(block), choice)]
    last = (known or choices[-1:])[0]
    return f"{block}.{last}" if last else None


def _has_module(module: nn.Module, path: str) -> bool:
    return any(name == path for name, _ in module.named_modules())


def _find_parameters(model: nn.Module, family: Family, blocks: Blocks) -> Iterator[ParameterSite]:
    above = tuple(f"{path}." for path in (family.outer_norms.get("final"), family.pooler, "lm_head") if path)
    ranges = {f"{block}.": layer for layer, (block, _) in enumerate(blocks)}
    ranges |= {f"{path}.": layer for key, path, layer in _norm_paths(family, blocks) if key.endswith(".final")}
    for name, parameter in model.named_parameters():
        is_pooler = family.pooler is not None and name.startswith(f"{family.pooler}.")
        layer = next((layer for prefix, layer in ranges.items() if name.startswith(prefix)), -1)
        if name.startswith(above):
            layer = len(blocks)
        yield ParameterSite(name, tuple(parameter.shape), layer, is_pooler)
