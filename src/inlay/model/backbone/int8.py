"""A backbone's frozen linear layers in int8, for answering on a CPU: a copy that shares everything else.

Weights are rounded per output channel, activations per token as they come, products are summed in int32 (by fbgemm,
which torch has for x86). A token's own range scales it, not its batch's, so that a layer gives a token the same to the
last bit whatever is beside it, and an outlier in one row costs no other row precision. Adapters, norms, heads and
embeddings stay as they are; the backbone handed in is untouched.

Shape letters: N tokens, D inputs, O outputs.
"""

from __future__ import annotations

import copy
import warnings

import torch
from torch import Tensor, nn

from inlay.errors import UnknownName, Unsupported
from inlay.model.backbone.backbone import Backbone
from inlay.model.bank.methods import SlotSpec

PRECISIONS = ("auto", "int8")
"""precision of the frozen linear layers while they answer; `auto` is the one the backbone was loaded in"""
_ENGINE = "fbgemm"
# Tokens at a time: their scaled copies and products stay in the caches. Twice as fast as all at once.
_BLOCK = 512
_SMALLEST = 1e-12  # a token of zeros still needs a range
_REACH = 1 + 2**-16
"""the ends of the range that tokens are scaled to, beyond what rounding adds to 1"""


def with_precision(backbone: Backbone, precision: str) -> Backbone:
    """Return the backbone that answers in a precision: itself or its int8 copy; refuse what this machine cannot do."""
    if precision not in PRECISIONS:
        raise UnknownName("precision", precision, PRECISIONS)
    return quantize(backbone) if precision == "int8" else backbone


def quantize(backbone: Backbone) -> Backbone:
    """Return a copy of a backbone whose blocks' linear layers are int8; all other tensors are shared with it."""
    check_int8(backbone.device.type)
    tensors = [*backbone.model.parameters(), *backbone.model.buffers()]
    shared = {id(item): item for item in (*tensors, backbone.tokenizer)}
    with backbone.turn():
        quantized = copy.deepcopy(backbone, shared)
    quantized.precision = "int8"
    for block in map(quantized.model.get_submodule, backbone.anatomy.blocks):
        for path, module in list(block.named_modules()):
            if isinstance(module, nn.Linear):
                block.set_submodule(path, Int8Linear(module))
    return quantized


def check_int8(device: str) -> None:
    """Refuse int8 where there is no fast path for it."""
    if device != "cpu":
        raise Unsupported(f"int8 on `{device}`", "it is for answering on a CPU: use `--device cpu`; a GPU has bf16")
    if _ENGINE not in torch.backends.quantized.supported_engines or not hasattr(torch, "quantize_per_channel"):
        raise Unsupported(
            f"int8 with torch {torch.__version__} on this processor: it lacks `{_ENGINE}`",
            "leave out `--precision int8`; int8 needs an x86 processor and a torch with quantised tensors",
        )


def check_slot(spec: SlotSpec, backbone: Backbone) -> None:
    """Refuse a slot that a backbone cannot serve, if it is an int8 one."""
    if backbone.precision == "int8":
        check_spec(spec)


def check_spec(spec: SlotSpec) -> None:
    """Refuse a slot that no int8 backbone can serve: one with its own copy of the backbone's float weights."""
    if spec.is_finetuned:
        raise Unsupported(
            f"int8 for a task of the method `{spec.method.name}`, which has its own copy of the backbone's weights",
            "leave out `--precision int8`",
        )


class Int8Linear(nn.Module):
    """A linear layer whose weights are int8. It has no gradient, and its bias is the float layer's own."""

    weight = None
    """not as a tensor: T5 asks for its type, to bring what it reads to it"""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = inner.in_features, inner.out_features
        self.bias = inner.bias
        self._packed, self._sums_O = _pack(inner.weight.detach())
        self._start_O = torch.zeros(self.out_features) if inner.bias is None else inner.bias.detach()
        # Without VNNI two products are first added in 16 bits, which 8 bits of activation would overflow.
        self._is_reduced = not torch.cpu._is_vnni_supported()

    def dequantized(self) -> Tensor:
        """Return the rounded weights [O, D] in float32."""
        return torch.ops.quantized.linear_unpack(self._packed)[0].dequantize()

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output for the last axis of x."""
        assert not x.requires_grad, "int8 layers only answer"
        x_ND = x.reshape(-1, self.in_features)
        y_NO = x_ND.new_empty(len(x_ND), self.out_features)
        blocks = zip(x_ND.split(_BLOCK), y_NO.split(_BLOCK), strict=True)
        room = _make_room(min(_BLOCK, len(x_ND)), x_ND)
        for block_ND, out_NO in blocks:
            if len(block_ND) + 1 < len(room):  # the last one
                room = _make_room(len(block_ND), x_ND)
            self._multiply(block_ND, room, out_NO)
        return y_NO.view(*x.shape[:-1], self.out_features)

    def _multiply(self, x_ND: Tensor, room: Tensor, y_NO: Tensor) -> None:
        """Compute y = W x + b for a block of tokens, each scaled to the range from -1 to 1 and back.

        With its middle m and radius r, x = r x' + m gives W x = r W x' + m W 1. It is written with their doubles, the
        span and the total, so that fewer operations are launched.
        """
        low_N1, high_N1 = x_ND.amin(1, keepdim=True), x_ND.amax(1, keepdim=True)
        span_N1, total_N1 = (high_N1 - low_N1).clamp_(min=_SMALLEST), high_N1 + low_N1
        torch.sub(x_ND, total_N1, alpha=0.5, out=room[:-1]).mul_(2 / span_N1)
        products = torch.ops.quantized.linear_dynamic(room, self._packed, self._is_reduced)
        torch.addcmul(self._start_O, products[:-1], span_N1, value=0.5, out=y_NO).addcmul_(
            total_N1, self._sums_O, value=0.5
        )


def _make_room(num_tokens: int, like: Tensor) -> Tensor:
    """Make room for so many scaled tokens and a last one that spans a little more than -1 to 1.

    fbgemm takes one range for all it is given, from the least to the largest value: that token makes it the same
    whatever the others are. The ends of theirs may be rounded to just beyond 1, and where zero lies half way between
    two steps the least difference moves it by a whole one.
    """
    room = like.new_zeros(num_tokens + 1, like.shape[1])
    room[-1, 0], room[-1, -1] = -_REACH, _REACH
    return room


def _pack(weight_OD: Tensor) -> tuple[object, Tensor]:
    """Return the weights as fbgemm wants them, and the sum of every output's rounded ones."""
    scales = (weight_OD.abs().amax(1) / 127).clamp(min=_SMALLEST).double()
    zeros = torch.zeros(len(weight_OD), dtype=torch.int64)
    engine = torch.backends.quantized.engine
    torch.backends.quantized.engine = _ENGINE
    try:
        with warnings.catch_warnings():
            # torch 2.13 says that tensors of its quantised types will go. Packing needs one for a moment; a torch
            # without them is refused by name.
            warnings.simplefilter("ignore", UserWarning)
            rounded = torch.quantize_per_channel(weight_OD, scales, zeros, 0, torch.qint8)
        return torch.ops.quantized.linear_prepack(rounded, None), rounded.dequantize().sum(1)
    finally:
        torch.backends.quantized.engine = engine
