"""A backbone by its name, read by transformers in the precision and on the device that suit this process.

Names are those of `folders.py`: built in, a folder, on a hub. Invariants: files that cannot be read are an error
that names the folder, and one without a tokenizer is refused.

Which embeddings of a text-to-text backbone are one is not left to transformers, whose versions differ: some tie what a
config calls untied, and a state dict loaded into a model whose output layer is its embedding overwrites that without a
word. Here the files decide: an output layer that they have and that is not the embedding is one of its own, and one
that they should have and do not is missed, not made up.
"""

from __future__ import annotations

import json
import types
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import Tensor, nn

from inlay.errors import Missing, StoreDamaged, Unsupported
from inlay.model.backbone.backbone import Backbone
from inlay.model.backbone.families import find_family
from inlay.model.backbone.fingerprint import read_tensors, weight_files
from inlay.model.backbone.folders import find_folder, first_line
from inlay.model.kernels.attention import register as register_attention
from inlay.processes import current_process

TOKENIZER_FILES = ("tokenizer.json", "vocab.txt", "vocab.json", "*.model")
_INPUTS = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
_OUTPUT = "lm_head.weight"
_TIED_BY_DEFAULT = ("t5",)  # as the first T5 was; those after it have an output layer of their own


def load_backbone(name: str, *, device: str | torch.device | None = None, dtype: torch.dtype | None = None) -> Backbone:
    """A frozen backbone by built-in name, folder or hub name: float32 on a CPU, bf16 on a GPU unless `dtype` says."""
    device = _own_device(torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu")))
    dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    folder = find_folder(name)
    transformers = _quiet_transformers()
    try:
        config = transformers.AutoConfig.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise Unsupported(f"`{folder}` holds no backbone that transformers can read: {first_line(error)}") from None
    family = find_family(config.model_type)
    register_attention()
    try:
        weight_files(folder)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loader = getattr(transformers, family.loader)
            model = loader.from_pretrained(folder, dtype=dtype, attn_implementation=family.implementation)
            if family.decoder is not None:
                tie_embeddings(model, folder)
            tokenizer = _load_tokenizer(folder)
        return Backbone(name, folder, model.to(device), tokenizer)
    except torch.OutOfMemoryError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise StoreDamaged(
            f"the files of the backbone `{name}` in `{folder}` cannot be read: {first_line(error)}",
            "a download may have been cut short: fetch the folder again",
        ) from None


def _own_device(device: torch.device) -> torch.device:
    """Resolve a plain `cuda` to one GPU per process where several processes were started, in turn."""
    place = current_process()
    if device != torch.device("cuda") or place.size == 1:
        return device
    return torch.device("cuda", place.local_rank % torch.cuda.device_count())


def _load_tokenizer(folder: Path) -> Any:
    """The folder's tokenizer. Without its files transformers would make one that knows no word, and say nothing."""
    import transformers

    if not any(path for pattern in TOKENIZER_FILES for path in folder.glob(pattern)):
        raise Missing(f"no tokenizer in `{folder}`", f"it needs one of: {', '.join(TOKENIZER_FILES)}")
    return transformers.AutoTokenizer.from_pretrained(folder)


def _quiet_transformers() -> Any:
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


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
    """The output layer, as precise as other heads: rounded to bf16, many words of a vocabulary would score alike."""
    if x.device.type == "cuda" and x.dtype == layer.weight.dtype == torch.bfloat16:
        logits: Tensor = _WideProduct.apply(x.flatten(0, -2), layer.weight)
        return logits.unflatten(0, x.shape[:-1])
    return F.linear(x.float(), layer.weight.float())


class _WideProduct(torch.autograd.Function):
    """x·Wᵀ of bf16 numbers in float32: products of two of them are exact there, and sums are not rounded.

    The same product of widened copies goes past a GPU's matrix units. The gradient of the logits is rounded, as what
    comes of it would be in the end.
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
    """Whether a folder's settings say that the embedding is the output layer too."""
    return bool(config.get("tie_word_embeddings", config.get("model_type") in _TIED_BY_DEFAULT))


def _like(parameter: Tensor, value: Tensor) -> nn.Parameter:
    return nn.Parameter(value.to(parameter), requires_grad=parameter.requires_grad)
