"""The embeddings of a text-to-text backbone, as its files have them: read once, written with, tied or not.

Which of its tensors are one is not left to transformers, whose versions differ: some tie what a config calls untied,
and a state dict loaded into a model whose output layer is its embedding overwrites that without a word. Here the files
decide: an output layer that they have and that is not the embedding is one of its own, and one that they should have
and do not is missed, not made up.
"""

from __future__ import annotations

import json
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inlay.errors import StoreDamaged
from inlay.model.backbone.fingerprint import read_tensors

_INPUTS = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
_OUTPUT = "lm_head.weight"
_TIED_BY_DEFAULT = ("t5",)  # as the first T5 was; those after it have an output layer of their own


def tie_embeddings(model: Any, folder: Path) -> None:
    """Set a model's embeddings to those of its folder's files, one tensor for both stacks, and tie what they tie."""
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
    # Where output and embedding were trained as one, what is written is scaled first. Older versions read it off the
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
