"""A backbone's fingerprint: equal for the same pretrained model wherever it lies and in whatever precision it is kept.

It covers a listed set of architectural config fields, the weights found in the file rounded to bf16, the vocabulary
and the token ids of a fixed list of strings. It is computed from the file's own tensor names, so it depends neither on
the transformers version nor on what transformers newly initialises.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from inlay.errors import Missing
from inlay.model.backbone.families import Family, find_family

# Only what changes the function computed. Values are read from the config object, which knows the defaults that a
# short config.json leaves out.
CONFIG_FIELDS = (
    "model_type hidden_size num_hidden_layers num_attention_heads intermediate_size hidden_act hidden_activation "
    "activation vocab_size max_position_embeddings type_vocab_size layer_norm_eps norm_eps embedding_size "
    "relative_attention relative_attention_num_buckets max_relative_positions position_buckets norm_rel_ebd "
    "share_att_key pos_att_type position_biased_input conv_kernel_size conv_act local_attention "
    "global_attn_every_n_layers sinusoidal_pos_embds"
).split()
PROBE_STRINGS = (
    "The quick brown fox jumps over the lazy dog.",
    "Don't panic: it's 3.14159 (or 22/7)!",
    "naïve café — Zürich, Ελλάδα, Россия, 東京, العربية",
    "  tabs\tand\nnew lines, UPPER and lower, under_score  ",
    "antidisestablishmentarianism 🙂 http://example.org/?a=1&b=2",
)


@dataclass(frozen=True)
class WeightsDigest:
    """Digests and counts of a backbone's weight files."""

    rounded: str
    """sha256 over the backbone's tensors as bf16: part of the fingerprint"""
    exact: str
    """sha256 of the files' bytes"""
    precision: str
    num_parameters: int
    pooler: Mapping[str, Tensor] = field(default_factory=dict, repr=False, compare=False)
    """the pooler's `weight` and `bias`, as far as the files have them"""


def fingerprint(config: Any, weights: WeightsDigest, tokenizer: Any) -> str:
    """Return the fingerprint as a hex digest."""
    own = find_family(config.model_type).config_fields
    fields = {name: _plain(getattr(config, name, None)) for name in (*CONFIG_FIELDS, *own)}
    fields["rope_thetas"] = _rope_thetas(config)
    content = {
        "config": {name: value for name, value in fields.items() if value is not None},
        "weights": weights.rounded,
        "vocabulary": _digest(sorted(tokenizer.get_vocab().items())),
        "ids": [tokenizer(text)["input_ids"] for text in PROBE_STRINGS],
    }
    return _digest(content)


def digest_weights(folder: Path, family: Family) -> WeightsDigest:
    """Read every floating-point tensor of the backbone in `folder`, without its pretraining heads."""
    files = weight_files(folder)
    rounded: dict[str, tuple[list[int], str]] = {}
    precisions = set()
    pooler: dict[str, Tensor] = {}
    pooler_prefix = f"{family.pooler}.dense." if family.pooler else None
    for name, tensor in _backbone_tensors(files, family.prefix):
        if name in family.unused:
            continue
        precisions.add(str(tensor.dtype).removeprefix("torch."))
        content = tensor.to(torch.bfloat16).contiguous().view(torch.uint8).numpy().tobytes()
        rounded[name] = list(tensor.shape), hashlib.sha256(content).hexdigest()
        if pooler_prefix and name.startswith(pooler_prefix):
            pooler[name.removeprefix(pooler_prefix)] = tensor
    found = [name for name in family.copies if name in rounded]
    for copy in found[1:]:
        if rounded[copy] == rounded[found[0]]:
            del rounded[copy]
    num_parameters = sum(math.prod(shape) for shape, _ in rounded.values())
    exact = hashlib.sha256()
    for file in files:
        exact.update(hash_file(file).encode())
    exact_digest = hash_file(files[0]) if len(files) == 1 else exact.hexdigest()
    precision = "+".join(sorted(precisions))
    return WeightsDigest(_digest(rounded), exact_digest, precision, num_parameters, pooler)


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files of a Hugging Face folder, safetensors first."""
    for index in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
        if (folder / index).is_file():
            shards = json.loads((folder / index).read_text(encoding="utf8"))["weight_map"].values()
            return [folder / name for name in sorted(set(shards))]
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (folder / name).is_file():
            return [folder / name]
    raise Missing(f"no weights in `{folder}`", "a backbone folder has config.json, model.safetensors and a tokenizer")


def hash_file(path: Path) -> str:
    """Return the sha256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_tensors(folder: Path, names: Collection[str]) -> dict[str, Tensor]:
    """Return the tensors of these names that a folder's weight files have."""
    return {name: tensor for file in weight_files(folder) for name, tensor in _file_tensors(file) if name in names}


def _backbone_tensors(files: list[Path], prefix: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the float tensors by the backbone's own names, without a pretraining checkpoint's prefix and heads."""
    marker = f"{prefix}."
    tensors = [pair for file in files for pair in _file_tensors(file)]
    is_prefixed = any(name.startswith(marker) for name, _ in tensors)
    for name, tensor in tensors:
        if tensor.is_floating_point() and (not is_prefixed or name.startswith(marker)):
            name = name.removeprefix(marker) if is_prefixed else name
            yield name.replace(".gamma", ".weight").replace(".beta", ".bias"), tensor


def _file_tensors(file: Path) -> Iterator[tuple[str, Tensor]]:
    if file.suffix == ".safetensors":
        from safetensors import safe_open

        with safe_open(file, framework="pt") as content:
            for name in content.keys():  # noqa: SIM118 - safe_open is no mapping
                yield name, content.get_tensor(name)
    else:
        yield from torch.load(file, map_location="cpu", weights_only=True).items()


def _plain(value: Any) -> Any:
    if isinstance(value, str) and "|" in value:  # DeBERTa's `pos_att_type` is a list or "p2c|c2p"
        return value.split("|")
    return list(value) if isinstance(value, tuple) else value


def _rope_thetas(config: Any) -> dict[str, float] | None:
    """Return the bases of rotary positions by kind of layer, however this version of transformers spells them."""
    parameters = getattr(config, "rope_parameters", None)
    if not isinstance(parameters, dict):
        return None
    by_kind = parameters if all(isinstance(value, dict) for value in parameters.values()) else {"all": parameters}
    return {kind: float(value["rope_theta"]) for kind, value in by_kind.items() if "rope_theta" in value}


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
