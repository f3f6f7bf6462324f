"""A contrastive start: a slot learns from few rows which of them are alike, before a head is fitted to what it gives.

The idea is SetFit's (Tunstall et al. 2022): pairs of rows with one label are pulled together, others pushed apart, then
a linear head is fitted. There a whole copy of the backbone is trained for each task, on pairs drawn one by one. Here it
is a slot on a frozen backbone, and every batch of n rows gives all n·(n−1)/2 of its pairs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def lose_contrast(vectors_nD: Tensor, labels_n: Tensor) -> Tensor:
    """How far the cosines of each row with the others of its batch are from 1 (one label) and 0 (others), squared.

    Pairs of one label count as much together as all others, of whichever there are more. The mean over rows is the mean
    of both.
    """
    unit_nD = F.normalize(vectors_nD.float(), dim=-1)
    is_same_nn = labels_n.unsqueeze(0) == labels_n.unsqueeze(1)
    is_self_nn = torch.eye(len(labels_n), dtype=torch.bool, device=labels_n.device)
    squares_nn = (unit_nD @ unit_nD.T - is_same_nn.float()).square()
    sides = [side.float() / side.sum().clamp(min=1) for side in (is_same_nn & ~is_self_nn, ~is_same_nn)]
    return len(labels_n) * (squares_nn * (sides[0] + sides[1]) / 2).sum(1)
