"""The backbone families: the one table that knows transformers' module names.

A family says where its blocks are, which submodule each place of a block stands for, which layer norms work on tokens
and which linear layers a block has. `sites.survey` reads it off a model.

Adding a family: one entry in FAMILIES, and its name in the contract tests runs them all over it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from inlay.errors import Unsupported
from inlay.model.kernels.attention import IMPLEMENTATION


@dataclass(frozen=True)
class Stack:
    """Blocks of one kind and the places in them, as dotted submodule names of a block."""

    stack: str
    """the list of blocks"""
    places: Mapping[str, str]
    """place -> submodule of a block; "output" is the block's last norm where it ends in one, else the block itself"""
    norms: Mapping[str, str]
    """name -> token-wise layer norm of a block"""
    linears: Mapping[str, str]
    """name -> linear layer of a block; `Wqkv:2/3` is the last third of the outputs of one that computes several;
    of `wi|wi_0` the one that the model has, and none is needed where nothing stands behind the bar"""
    closing: str = ""
    """the norm after the last block, where it counts as that block's"""
    activation: str = ""
    """the activation of a block's feed-forward network, where it is a module of its own"""


@dataclass(frozen=True)
class Family(Stack):
    """One backbone architecture: the blocks that read, and what else is known of it."""

    outer_norms: Mapping[str, str] = field(default_factory=dict)
    """name -> token-wise layer norm outside the blocks"""
    shared_linears: Mapping[str, str] = field(default_factory=dict)
    """linear layer that no task may write to -> why"""
    frozen_norms: Mapping[str, str] = field(default_factory=dict)
    """norm that does not work on tokens -> why it stays frozen"""
    pooler: str | None = None
    """the pooling layer, where the family has one"""
    pooling: str = "mean"
    """the default way to read a row where a backbone's files do not say; `pooler`: by that layer, if it was trained"""
    prefix: str = ""
    """the prefix that a checkpoint with a pretraining head puts before the backbone's tensor names"""
    first_position: int = 0
    """the position id of a row's first token: padding_idx + 1 where positions are counted from there"""
    attention: str = "attention.self"
    """self-attention of a block"""
    cross: str = ""
    """a decoder's cross-attention"""
    packing: str = "interface"
    """the way rows are packed: through transformers' attention "interface"; "bias" or "buckets" where the family adds
    a position bias to the scores, as mpnet or T5 does, and we replace its modules; "none": they are padded"""
    is_prenorm: bool = False
    """norms stand before the sublayers, where a task may train them, not after"""
    num_outputs: int = 0
    """the form of a block's output: 0, the states alone; else a tuple of so many, the states first"""
    implementation: str = IMPLEMENTATION
    """transformers' attention implementation; "eager" where the family has no other"""
    decoder: Stack | None = None
    """the blocks that write, in a family that reads and writes; layers are counted through them after the others"""
    loader: str = "AutoModel"
    """transformers' class that loads it"""
    copies: tuple[str, ...] = ()
    """tensors of a file that may repeat the first of them: repeats are not counted as parameters"""
    unused: tuple[str, ...] = ()
    """tensors of a file that nothing reads"""
    config_fields: tuple[str, ...] = ()
    """config fields that change the function computed, besides those of all families"""
    max_length: int | None = None
    """the most tokens a row may have, where positions are relative and the config sets no limit"""
    reuses: bool = True
    """a pass may begin at any block: the block's input is all that it needs from the lower ones"""

    @property
    def stacks(self) -> tuple[Stack, ...]:
        """The encoder's blocks, then the decoder's."""
        return (self,) if self.decoder is None else (self, self.decoder)


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
    pooling="pooler",  # pretrained by telling whether two sentences follow each other
    prefix="bert",
    activation="intermediate.intermediate_act_fn",
)


def _t5_stack(stack: str, sublayers: tuple[str, ...]) -> Stack:
    """Return a T5 stack: adapted before dropout, as published; cross-attention has no adapter, but a trained norm."""
    last = f"layer.{len(sublayers) - 1}"
    attention, feedforward = "layer.0.SelfAttention", f"{last}.DenseReluDense"
    return Stack(
        f"{stack}.block",
        # A block's output is the whole sublayer with its residual.
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
        activation=f"{feedforward}.act",
    )


_T5 = Family(
    **vars(_t5_stack("encoder", ("attention", "feedforward"))),
    prefix="transformer",
    attention="layer.0.SelfAttention",
    cross="layer.1.EncDecAttention",
    packing="buckets",  # the encoder; answers are short, and padded
    is_prenorm=True,
    num_outputs=3,
    implementation="eager",
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
# Pretrained without a task of whole rows: a pooler in such a file was never trained, or tuned for something else.
_ROBERTA = replace(_BERT, pooling="mean", prefix="roberta", first_position=2)
FAMILIES: dict[str, Family] = {
    "bert": _BERT,
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "camembert": _ROBERTA,
    "electra": replace(_BERT, pooler=None, pooling="mean", prefix="electra"),
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
    """The place of the head in transformers' own sequence classifier of a family, as other libraries save it."""

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
"""family -> its classifier, or the part of it that no head of ours has"""


def find_family(model_type: str) -> Family:
    """Return the family of a transformers `model_type`, or an error that lists the families there are."""
    if model_type not in FAMILIES:
        raise Unsupported(
            f"no backbone family for the architecture `{model_type}`",
            f"supported: {', '.join(sorted(FAMILIES))}; a new one is an entry in FAMILIES in "
            "inlay/model/backbone/families.py (CONTRIBUTING.md, 'Add a family')",
        )
    return FAMILIES[model_type]
