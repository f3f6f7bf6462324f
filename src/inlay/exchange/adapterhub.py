"""Reading of AdapterHub's folders, as the `adapters` library (1.3.0) writes them.

`adapter_config.json` names the architecture, `pytorch_adapter.bin` or `adapter.safetensors` has its weights under the
model's own module names, `head_config.json` and `pytorch_model_head.bin` the prediction head. The place of an adapter
follows from flags: `LN(t + h + f(h))` is Houlsby's, `LN(s + f(LN(s)))` with s = t + h Pfeiffer's, and
`LN(t + h + c·f(t))` the parallel one. Any other combination of the flags is refused, and named in the error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from inlay.errors import BadData, Unsupported, WrongBackbone
from inlay.exchange import foreign
from inlay.model import (
    FACTORS,
    Anatomy,
    Backbone,
    HeadSpec,
    ResolvedMethod,
    adapted_linears,
    find_family,
    resolve_method,
)
from inlay.settings import MethodConfig

CONFIG, HEAD_CONFIG = "adapter_config.json", "head_config.json"
WEIGHTS = ("adapter.safetensors", "pytorch_adapter.bin")
HEAD_WEIGHTS = ("model_head.safetensors", "pytorch_model_head.bin")
VERSION = "adapters.1.3.0"
"""version of the library that this file is made for, as its configs write it"""

MODEL_CLASSES = {
    "bert": "BertAdapterModel",
    "roberta": "RobertaAdapterModel",
    "xlm-roberta": "XLMRobertaAdapterModel",
    "electra": "ElectraAdapterModel",
    "distilbert": "DistilBertAdapterModel",
    "deberta-v2": "DebertaV2AdapterModel",
}
"""family -> the library's model class with flexible heads; other families have none"""

ACTIVATIONS = {
    "relu": "relu",
    "tanh": "tanh",
    "swish": "swish",
    "silu": "swish",
    "gelu": "gelu-exact",
    "gelu_python": "gelu-exact",
    "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "gelu_fast": "gelu",
}
"""the library's non-linearity -> ours"""

ATTENTION_LINEARS = {"query": "q", "key": "k", "value": "v"}
"""our linear layer of attention -> the library's letter"""
WIDE_LINEARS = {"expand": "intermediate_lora", "contract": "output_lora"}
"""our linear layer of the feed-forward network -> the library's flag for it"""

_NEUTRAL: foreign.Neutral = {
    "ln_before": ((False,), "a layer norm of its own before the bottleneck"),
    "ln_after": ((False,), "a layer norm of its own after the bottleneck"),
    "original_ln_after": ((True,), "a block without its last layer norm"),
    "use_gating": ((False,), "a gate beside the update, as in UniPELT"),
    "inv_adapter": ((None,), "an invertible adapter after the embeddings"),
    "cross_adapter": ((False,), "adapters at cross attention"),
    "phm_layer": ((False,), "hypercomplex layers, as in Compacter"),
    "use_dora": ((False,), "DoRA's magnitudes"),
    "vera_d": ((None,), "VeRA's shared random matrices"),
    "vera_b": ((None,), "VeRA's shared random matrices"),
}
_KNOWN = {
    # Settings that only matter in training (initial values, dropout), and sizes, which the tensors show.
    *("architecture", "init_weights", "init_weights_seed", "dropout", "stochastic_depth", "reduction_factor", "dtype"),
    *("inv_adapter_reduction_factor", "adapter_residual_before_ln", "phm_dim", "phm_rank", "phm_bias", "phm_c_init"),
    *("phm_init_range", "factorized_phm_W", "factorized_phm_rule", "shared_W_phm", "shared_phm_rule", "learn_phm"),
    "hypercomplex_nonlinearity",
    # Settings that are read here.
    *("mh_adapter", "output_adapter", "non_linearity", "original_ln_before", "residual_before_ln", "is_parallel"),
    *("scaling", "leave_out", "selfattn_lora", "intermediate_lora", "output_lora", "attn_matrices", "r", "alpha"),
    "composition_mode",
}
# Module names in versions before 2021.
_LEGACY = re.compile(r"\b(attention|layer)_text_(task|lang)_adapters\b")


def read(folder: Path, backbone: Backbone) -> foreign.ForeignTask:
    """Read the task in a folder that `save_adapter` wrote; what Inlay cannot reproduce exactly is refused."""
    config, anatomy = foreign.read_json(folder / CONFIG), backbone.anatomy
    # 1. the backbone
    if anatomy.family not in MODEL_CLASSES:
        raise Unsupported(
            f"AdapterHub has no models of the family `{anatomy.family}`", f"it has: {', '.join(MODEL_CLASSES)}"
        )
    for key, ours in (("model_type", anatomy.family), ("hidden_size", anatomy.hidden_size)):
        if config.get(key) not in (None, ours):
            raise WrongBackbone(
                f"the adapter was trained on `{config.get('model_name')}` with {key} `{config[key]}`; "
                f"the backbone `{backbone.name}` has `{ours}`",
                "name the backbone it was trained on with `--backbone`",
            )
    # 2. the adapter
    weights = foreign.read_weights(folder, WEIGHTS)
    weights.left = {_LEGACY.sub("adapters", name): tensor for name, tensor in weights.left.items()}
    inner = _read_settings(config, weights, folder / CONFIG)
    locate = _AdapterHubLocator(anatomy, weights, str(config.get("name")))
    architecture = inner.get("architecture") or "bottleneck"
    if architecture == "lora" and inner.get("composition_mode", "add") == "scale":
        architecture = "ia3"
    if not isinstance(architecture, str) or architecture not in _ARCHITECTURES:
        raise Unsupported(
            f"the architecture `{architecture}` of AdapterHub",
            "Inlay reads bottleneck adapters (double_seq_bn, seq_bn, par_bn), lora and ia3",
        )
    method, tensors = _ARCHITECTURES[architecture](inner, locate)
    weights.finish(anatomy.num_layers)
    # 3. the head
    head, labels, head_tensors = _read_head(folder, backbone)
    version = str(config.get("version", "of an old version")).replace("adapters.", "adapters ")
    base = str(config.get("model_name") or "")
    return foreign.ForeignTask(method, head, {**tensors, **head_tensors}, labels, version, base)


def _read_settings(config: Mapping[str, Any], weights: foreign.Weights, path: Path) -> dict[str, Any]:
    """Return the architecture's settings; refuse those that Inlay does not have."""
    inner = config.get("config")
    if not isinstance(inner, dict):
        raise Unsupported(
            f"{path}: the architecture is given as `{inner}`, not as settings", "save it again with adapters 1.x"
        )
    inner = dict(inner)
    legacy = inner.pop("invertible_adapter", None)
    if legacy:
        inner["inv_adapter"] = legacy
    # The library ignores the invertible part that old task adapters name but do not have.
    if config.get("type") == "text_task" and not any("invertible" in name for name in weights.left):
        inner["inv_adapter"] = None
    foreign.check_settings(inner, _NEUTRAL, path, "train the adapter")
    for key in inner.keys() - _NEUTRAL.keys() - _KNOWN:
        if inner[key] not in (None, False, [], {}):
            raise Unsupported(
                f"{path}: `{key}` is a setting that Inlay does not know", "upgrade Inlay, or train it again"
            )
    if "version" not in config and inner.get("non_linearity") in ("gelu", "gelu_orig"):
        # Before version 2 of the library's predecessor, `gelu` meant the tanh form.
        inner["non_linearity"] = {"gelu": "gelu_new", "gelu_orig": "gelu"}[inner["non_linearity"]]
    # LoRA before version 1.1 was trained with the factor 1, whatever alpha says; the library corrects alpha on load.
    match = re.match(r"adapters\.(\d{1,9})\.(\d{1,9})", str(config.get("version", "")))
    if match is not None and (int(match[1]), int(match[2])) < (1, 1):
        inner["alpha"] = inner.get("r", 1)
    return inner


class _AdapterHubLocator:
    """The library's names for the modules of one backbone's blocks."""

    def __init__(self, anatomy: Anatomy, weights: foreign.Weights, name: str) -> None:
        self.anatomy, self.weights, self.name = anatomy, weights, name
        prefix = f"{find_family(anatomy.family).prefix}."
        self.prefix = prefix if any(item.startswith(prefix) for item in weights.left) else ""

    def take(self, path: str, kind: str, item: str, *shape: int | None) -> Tensor:
        """Take one tensor of an adapter or LoRA at a module."""
        return self.weights.take(f"{self.prefix}{path}.{kind}.{self.name}.{item}", *shape)


def locate_bottleneck(anatomy: Anatomy, site_key: str) -> str:
    """Return the module that has the adapters of a site: the site's parent, but in DistilBERT a module of the block."""
    site = next(site for site in anatomy.sites if site.key == site_key)
    if anatomy.family == "distilbert":
        name = "attention_adapters" if site.place == "attention" else "output_adapters"
        return f"{find_family(anatomy.family).stack}.{site.layer}.{name}"
    return site.path.rpartition(".")[0]


def _read_bottleneck(inner: Mapping[str, Any], locate: _AdapterHubLocator) -> tuple[ResolvedMethod, dict[str, Tensor]]:
    """Read bottleneck adapters as a method and a slot's tensors."""
    anatomy = locate.anatomy
    name, places = _find_places(inner)
    activation = ACTIVATIONS.get(str(inner.get("non_linearity")).lower())
    if activation is None:
        raise Unsupported(
            f"the non-linearity `{inner.get('non_linearity')}`", f"Inlay has those called: {', '.join(ACTIVATIONS)}"
        )
    layers = _adapted_layers(inner, anatomy)
    learned = inner.get("scaling") in ("learned", "channel")
    keys = [site.key for site in anatomy.sites if site.layer in layers and site.place in places]
    size, tensors = foreign.join_bottlenecks({key: _take_bottleneck(locate, key, has_scaling=learned) for key in keys})
    method = MethodConfig(
        name=name,
        size=size,
        activation=activation,
        norms="none",
        places=places,
        layers=foreign.name_layers(layers, anatomy.num_layers),
        scale=1.0 if learned else foreign.read_number(inner, "scaling", 1.0),
    )
    return resolve_method(method), tensors


def _take_bottleneck(locate: _AdapterHubLocator, key: str, *, has_scaling: bool) -> dict[str, Tensor]:
    """Return a site's adapter in Inlay's form; learned factors are multiplied into the up-projection."""
    width, path = locate.anatomy.hidden_size, locate_bottleneck(locate.anatomy, key)
    down = locate.take(path, "adapters", "adapter_down.0.weight", None, width)
    size = down.shape[0]
    down_bias = locate.take(path, "adapters", "adapter_down.0.bias", size)
    up = locate.take(path, "adapters", "adapter_up.weight", width, size)
    up_bias = locate.take(path, "adapters", "adapter_up.bias", width)
    if has_scaling:
        factor = locate.take(path, "adapters", "scaling", None)
        up, up_bias = up * factor[:, None], up_bias * factor
    return {"down": down.T, "down_bias": down_bias, "up": up.T, "up_bias": up_bias}


def _find_places(inner: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
    """Return which of Inlay's methods the placement flags describe, and its places."""
    flags = {"attention": inner.get("mh_adapter"), "feedforward": inner.get("output_adapter")}
    places = tuple(place for place, is_set in flags.items() if is_set)
    if not places:
        raise Unsupported("neither `mh_adapter` nor `output_adapter` is set: no adapter anywhere", "train it again")
    if inner.get("is_parallel"):
        return "parallel", places
    if not inner.get("original_ln_before"):
        return "houlsby", places
    if places == ("feedforward",) and inner.get("residual_before_ln", True) is True:
        return "pfeiffer", ("output",)
    raise Unsupported(
        f"`original_ln_before` with `mh_adapter` {inner.get('mh_adapter')} and `residual_before_ln` "
        f"`{inner.get('residual_before_ln')}`: Inlay reads a block's own norm before an adapter only as seq_bn does",
        "train it as double_seq_bn, seq_bn or par_bn",
    )


def _adapted_layers(inner: Mapping[str, Any], anatomy: Anatomy) -> list[int]:
    """Return the layers that `leave_out` does not name."""
    left_out = _read_list(inner, "leave_out")
    layers = [layer for layer in range(anatomy.num_layers) if layer not in left_out]
    if not layers:
        raise Unsupported("`leave_out` names every layer: no adapter anywhere", "train it again")
    return layers


def _read_list(inner: Mapping[str, Any], key: str, default: Sequence[Any] = ()) -> list[Any]:
    value = inner.get(key, default)
    if value is not None and not isinstance(value, list | tuple):
        raise BadData(f"`{key}` is `{value}`, which is not a list", "save the adapter again")
    return list(value or ())


def _read_linears(inner: Mapping[str, Any], anatomy: Anatomy, name: str) -> MethodConfig:
    """Return the settings of the method `name`, with its layers and linear layers."""
    layers = foreign.name_layers(_adapted_layers(inner, anatomy), anatomy.num_layers)
    attention = _read_list(inner, "attn_matrices", ("q", "v")) if inner.get("selfattn_lora", True) else []
    unknown = [item for item in attention if item not in ATTENTION_LINEARS.values()]
    if unknown:
        raise Unsupported(f"`attn_matrices` names `{unknown[0]}`", "Inlay knows q, k and v")
    linears = [linear for linear, letter in ATTENTION_LINEARS.items() if letter in attention]
    linears += [linear for linear, flag in WIDE_LINEARS.items() if inner.get(flag)]
    return MethodConfig(name=name, linears=tuple(linears), layers=layers)


def _read_lora(inner: Mapping[str, Any], locate: _AdapterHubLocator) -> tuple[ResolvedMethod, dict[str, Tensor]]:
    """Read LoRA as a method and a slot's tensors."""
    config, rank = _read_linears(inner, locate.anatomy, "lora"), int(foreign.read_number(inner, "r", 8))
    parts = {}
    for site in adapted_linears(locate.anatomy, resolve_method(config)):
        down = locate.take(site.path, "loras", "lora_A", rank, site.in_width)
        up = locate.take(site.path, "loras", "lora_B", site.out_width, rank)
        parts[site.key] = foreign.LowRank(down.T, up.T, foreign.read_number(inner, "alpha", 8) / rank)
    size, scale, tensors = foreign.join_low_ranks(parts)
    return resolve_method(replace(config, size=size, alpha=scale * size)), tensors


def _read_ia3(inner: Mapping[str, Any], locate: _AdapterHubLocator) -> tuple[ResolvedMethod, dict[str, Tensor]]:
    """Read (IA)³ as a method and a slot's tensors."""
    if inner.get("output_lora"):
        raise Unsupported(
            "`output_lora` with `composition_mode` `scale`: it multiplies the output of the second feed-forward layer, "
            "Inlay (and the paper) multiply its input",
            "train it with intermediate_lora=True and output_lora=False",
        )
    config = resolve_method(_read_linears(inner, locate.anatomy, "ia3"))
    factor = foreign.read_number(inner, "alpha", 1)
    tensors = {
        FACTORS.name(site.key): locate.take(site.path, "loras", "lora_B", site.out_width, 1)[:, 0] * factor
        for site in adapted_linears(locate.anatomy, config)
    }
    return config, tensors


_ARCHITECTURES = {"bottleneck": _read_bottleneck, "lora": _read_lora, "ia3": _read_ia3}


def _read_head(folder: Path, backbone: Backbone) -> tuple[HeadSpec, tuple[str, ...], dict[str, Tensor]]:
    """Read the prediction head beside the adapter: its form, labels and tensors."""
    if not (folder / HEAD_CONFIG).is_file() or not any((folder / name).is_file() for name in HEAD_WEIGHTS):
        raise Unsupported(
            f"`{folder}` holds an adapter without a prediction head, which cannot answer",
            "save both: `model.save_adapter(DIR, NAME, with_head=True)`",
        )
    weights = foreign.read_weights(folder, HEAD_WEIGHTS)
    config = foreign.read_json(folder / HEAD_CONFIG)
    if config.get("config") is None:  # the head of a model class such as BertForSequenceClassification
        foreign.check_classifier(str(config.get("model_class")), backbone)
        head, tensors = foreign.take_classifier(weights, backbone)
        ids = config.get("label2id")
    else:
        head, tensors = foreign.take_flexible_head(config, weights, backbone)
        ids = config["config"].get("label2id")
    labels = foreign.read_labels(ids, head.num_outputs)
    weights.finish(backbone.anatomy.num_layers)
    return head, labels, tensors
