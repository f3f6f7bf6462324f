"""The default pooling of a backbone, and the reason for it, found in its files.

`1_Pooling/config.json`, which sentence-transformers writes, comes first; then the family's default, which for BERT is
its pretrained pooler. Invariant: a pooler that was never trained is never the default. Files of masked language models
often have one all the same, with the random values that transformers drew: MiniLM's and MPNet-base's are noise.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from inlay.model.backbone.families import Family

POOLED = {"cls": "the first token", "pooler": "the pooler on the first token", "mean": "the mean over the tokens"}
"""pooling -> the states it reads, in words"""
_FILE = "1_Pooling/config.json"
# sentence-transformers' modes that we have -> what we call them; it joins the vectors of several.
_OURS = {"cls": "cls", "cls_token": "cls", "mean": "mean", "mean_tokens": "mean"}
_TOLERANCE = 5.0
"""standard errors by which a moment of independent draws may be off"""


def find_default(folder: Path, family: Family, *, has_pooler: bool, noise: str) -> tuple[str, str]:
    """Return the pooling that suits the backbone of a folder, and the reason, as a clause that follows a colon.

    It is what the files say, else the pooler if it is trained, else the mean. `noise` is the result of
    `describe_noise` for the pooler.
    """
    modes = read_modes(folder)
    ours = {_OURS[mode] for mode in modes if mode in _OURS}
    if len(modes) == 1 and modes[0] in _OURS:
        return _OURS[modes[0]], f"its `{_FILE}` says `{modes[0]}`"
    if modes:
        name = "cls" if "cls" in ours else "mean"
        said = " and ".join(f"`{mode}`" for mode in modes)
        return name, f"its `{_FILE}` says {said}, which Inlay does not have"
    if family.pooling != "pooler":
        return family.pooling, f"it has no `{_FILE}`, and nothing else in its files says how"
    if not has_pooler:
        return "mean", f"it has no `{_FILE}` and no pooler"
    if noise:
        return "mean", f"it has no `{_FILE}`, and its pooler was never trained ({noise})"
    return "pooler", f"it has no `{_FILE}`, and its pooler is a trained one"


def read_modes(folder: Path) -> list[str]:
    """Read the modes in a folder's `1_Pooling/config.json`, such as `mean_tokens`; none if there is no such file."""
    path = folder / _FILE
    if not path.is_file():
        return []
    content = json.loads(path.read_text(encoding="utf8"))
    if not isinstance(content, dict):
        raise ValueError(f"`{_FILE}` is not an object")
    prefix = "pooling_mode_"
    modes = [name.removeprefix(prefix) for name, value in content.items() if name.startswith(prefix) and value is True]
    given = content.get("pooling_mode")  # one word, or several joined by a plus, in newer versions
    return modes or (str(given).split("+") if given else [])


def describe_noise(pooler: Mapping[str, Tensor], fresh_std: float) -> str:
    """Describe why a pooler was never trained, with the numbers that show it; "" where it was trained.

    `pooler` has the `weight` [D, D] and the `bias` [D] of the file, and may lack the bias. It is untrained if its bias
    is exactly 0 and its weights are independent draws: a mean of 0, tails no heavier than a normal distribution's, no
    direction stronger than chance gives. Their size does not count: weight decay shrinks what nothing else trains
    (MiniLM's are 0.009, drawn with 0.02). `fresh_std` is the scale transformers draws with, for the message. It is also
    untrained if it is as PyTorch's own linear layer begins: weights and bias drawn evenly within 1/√D.
    """
    bias, weight_DD = pooler.get("bias"), pooler["weight"].double()
    std = float(weight_DD.std(correction=0))
    if bias is not None and bool((bias != 0).any()):
        is_fresh = _is_pytorchs(weight_DD, bias.double(), std)
        return f"its weights and bias are as PyTorch draws them, evenly, of std {std:.4f}" if is_fresh else ""
    if std > 0 and not _is_drawn(weight_DD, std):
        return ""
    return f"its bias is 0 everywhere and its weights are noise of std {std:.4f}; a fresh one has {fresh_std:g}"


def _is_pytorchs(weight_DD: Tensor, bias_D: Tensor, std: float) -> bool:
    """Tell whether a layer has the initial values of `torch.nn.Linear`: even draws within ±1/√D (kurtosis 1.8)."""
    number, edge = weight_DD.numel(), weight_DD.shape[1] ** -0.5
    largest = [float(values.abs().max()) / edge for values in (weight_DD, bias_D)]
    if min(largest) < 0.5 or max(largest) > 1.01:  # a little more than 1: half precision rounds
        return False
    kurtosis = float(((weight_DD - weight_DD.mean()) / std).pow(4).mean())
    # The fourth power of an even draw of variance 1 has the mean 1.8 and the variance 9 − 1.8².
    return abs(kurtosis - 1.8) < _TOLERANCE * ((9 - 1.8**2) / number) ** 0.5


def _is_drawn(weight_DD: Tensor, std: float) -> bool:
    """Tell whether numbers look like independent draws of one distribution, normal or with lighter tails."""
    number, width = weight_DD.numel(), max(weight_DD.shape)
    mean, kurtosis = float(weight_DD.mean()), float(((weight_DD - weight_DD.mean()) / std).pow(4).mean())
    if abs(mean) > _TOLERANCE * std / number**0.5 or kurtosis > 3 + _TOLERANCE * (24 / number) ** 0.5:
        return False
    # The largest singular value of a square matrix of such draws is close to 2 σ √D, within a few D^(-2/3) of it.
    edge = 2 * std * width**0.5
    return float(torch.linalg.matrix_norm(weight_DD, 2)) < edge * (1 + 3 * width ** (-2 / 3))
