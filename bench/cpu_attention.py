"""Attention over a CPU's packed rows: ours beside a product for each row, blocks of rows, and rows padded for it.

    python bench/cpu_attention.py [--threads 2] [--repeats 21] [--out results/speed/attention-cpu.json]

Shapes are MiniLM's (12 heads of 32), lengths those of real GLUE rows. `train` is a step's 32 rows in order of length,
as batches hold them, forward and backward; `answer` 256 rows, forward alone; `long` 8 rows of 384 tokens. Every way
takes each turn on the same tensors, and the median of its time over ours is printed; all give the same numbers first.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import report
import torch
import torch.nn.functional as F
from torch import Tensor
from workload import glue_lengths

from inlay.model.batch.route import Pack
from inlay.model.kernels.attention import attend

HEADS, CHANNELS = 12, 32
SCALING = CHANNELS**-0.5
CASES = {"train": (32, None, True), "answer": (256, None, False), "long": (8, 384, True)}
"""rows, the length of each if it is one, whether there is a backward pass"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=21)
    report.add_options(parser)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    found = {name: measure(*case, options.repeats) for name, case in CASES.items()}
    for name, ways in found.items():
        print(name, "  ".join(f"{way} {ratio:.2f}" for way, ratio in ways.items()))
    report.finish(options, over_ours=found)


def measure(num_rows: int, same: int | None, is_step: bool, repeats: int) -> dict[str, float]:
    """Each way's time over ours, the median of turns."""
    lengths = [same] * num_rows if same else sorted(glue_lengths(num_rows).tolist())
    torch.manual_seed(0)
    qkv = [torch.randn(sum(lengths), HEADS, CHANNELS, requires_grad=is_step) for _ in range(3)]
    grad = torch.randn(sum(lengths), HEADS, CHANNELS)
    pack = Pack(tuple(lengths), torch.device("cpu"))
    expected = WAYS["ours"](qkv, lengths, pack).detach()
    for name, way in WAYS.items():
        torch.testing.assert_close(way(qkv, lengths, pack).detach(), expected, rtol=1e-4, atol=1e-5, msg=name)
    turns = [{name: timed(way, qkv, lengths, pack, grad if is_step else None) for name, way in WAYS.items()}
             for _ in range(repeats + 1)][1:]  # fmt: skip
    return {name: statistics.median(turn[name] / turn["ours"] for turn in turns) for name in WAYS}


def timed(way: Callable[..., Tensor], qkv: list[Tensor], lengths: list[int], pack: Pack, grad: Tensor | None) -> float:
    began = time.perf_counter()
    if grad is None:
        with torch.inference_mode():
            way(qkv, lengths, pack)
    else:
        torch.autograd.grad(way(qkv, lengths, pack), qkv, grad)
    return time.perf_counter() - began


def ours(qkv: list[Tensor], lengths: list[int], pack: Pack) -> Tensor:
    return attend(*qkv, pack, scaling=SCALING)


def each_row(qkv: list[Tensor], lengths: list[int], pack: Pack) -> Tensor:
    """torch's fused attention, a call for each row."""
    rows = zip(*(x.transpose(0, 1).split(lengths, 1) for x in qkv), strict=True)
    return torch.cat([F.scaled_dot_product_attention(q, k, v, scale=SCALING) for q, k, v in rows], 1).transpose(0, 1)


def in_blocks(num_blocks: int) -> Callable[..., Tensor]:
    """Neighbouring rows in so many blocks, each padded to its longest."""

    def attend_blocks(qkv: list[Tensor], lengths: list[int], pack: Pack) -> Tensor:
        pieces, start = [], 0
        for rows in np.array_split(np.array(lengths), num_blocks):
            stop = start + int(rows.sum())
            pieces.append(padded([x[start:stop] for x in qkv], rows.tolist()))
            start = stop
        return torch.cat(pieces)

    return attend_blocks


def padded(qkv: list[Tensor], lengths: list[int], pack: Pack | None = None) -> Tensor:
    """All rows padded to the longest, for this product alone."""
    lengths_B = torch.tensor(lengths)
    is_real_BT = torch.arange(max(lengths)) < lengths_B[:, None]
    starts_B = lengths_B.cumsum(0) - lengths_B
    places_BT = (starts_B[:, None] + torch.arange(max(lengths))).clamp(max=sum(lengths) - 1)
    q, k, v = (x[places_BT].transpose(1, 2) for x in qkv)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=is_real_BT[:, None, None], scale=SCALING)
    return out.transpose(1, 2)[is_real_BT]


WAYS: dict[str, Callable[..., Tensor]] = {
    "ours": ours,
    "each row": each_row,
    "4 blocks": in_blocks(4),
    "8 blocks": in_blocks(8),
    "padded": padded,
}


if __name__ == "__main__":
    main()
