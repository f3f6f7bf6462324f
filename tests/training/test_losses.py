"""The losses of a compiled step equal those of the heads, kind by kind, and so do their gradients."""

from __future__ import annotations

import pytest
import torch

from inlay.model.heads.heads import HeadSpec, find_head
from inlay.training.step.losses import (
    KINDS,
    NO_TARGET,
    Choice,
    Mix,
    batched_row_losses,
    batched_token_losses,
    has_batched_loss,
)

LENGTHS = [5, 1, 7, 3, 4]
ROWS_N = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
STARTS = [0, *torch.tensor(LENGTHS).cumsum(0).tolist()[:-1]]


def choice(*kinds: str) -> Choice:
    codes = torch.tensor([float(KINDS.index(kind)) for kind in kinds])
    return Choice(KINDS, codes, tuple(kind for kind in KINDS if kind in kinds))


def test_rows_of_every_kind_lose_what_their_heads_say():
    kinds = ["classify", "regress", "multilabel", "classify", "multilabel", "ordinal"]
    widths = [3, 1, 2, 4, 4, 3]
    torch.manual_seed(0)
    logits = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([2.0, 3.2, 0.0, 3.0, 0.0, 2.0], dtype=torch.float64)  # 3.2 is no class
    labels = torch.tensor(
        [[0, 0, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0], [0, 1, 1, 0], [0, 0, 0, 0]], dtype=torch.float64
    )
    found = batched_row_losses(logits, targets, labels, torch.tensor(widths), choice(*kinds))
    own = [targets[0].long(), targets[1], labels[2, :2], targets[3].long(), labels[4], targets[5].long()]
    expected = torch.cat(
        [
            find_head(kind).row_losses(logits[row : row + 1, :width], own[row].unsqueeze(0))
            for row, (kind, width) in enumerate(zip(kinds, widths, strict=True))
        ]
    )
    torch.testing.assert_close(found, expected)
    pick = torch.rand(6, dtype=torch.float64)
    ours, theirs = (
        torch.autograd.grad((losses * pick).sum(), logits, retain_graph=True)[0] for losses in (found, expected)
    )
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("kinds", [["tag"] * 5, ["span"] * 5, ["tag", "span", "span", "tag", "span"]])
def test_tokens_lose_what_their_heads_say(kinds):
    """Some tokens say nothing; a row of tags may have none that says something."""
    torch.manual_seed(1)
    widths = [3 if kind == "tag" else 2 for kind in kinds]
    logits = torch.randn(sum(LENGTHS), 4, dtype=torch.float64, requires_grad=True)
    marks = torch.full((sum(LENGTHS), 2), NO_TARGET, dtype=torch.float64)
    expected = []
    for row, (kind, start, length) in enumerate(zip(kinds, STARTS, LENGTHS, strict=True)):
        own = logits[start : start + length, : widths[row]].unsqueeze(0)
        if kind == "tag":
            targets = torch.randint(0, 3, (length,))
            targets[:: 2 if row else 1] = int(NO_TARGET)  # of the first row all
            marks[start : start + length, 0] = targets.double()
        else:
            targets = torch.zeros(length, 2, dtype=torch.long)
            targets[:-1][torch.rand(length - 1) < 0.3] = int(NO_TARGET)
            targets[torch.tensor([0, length - 1]), torch.tensor([0, 1])] = 1
            marks[start : start + length] = targets.double()
        expected.append(find_head(kind).row_losses(own, targets.unsqueeze(0)))
    found = batched_token_losses(logits, marks, ROWS_N, torch.tensor(widths), choice(*kinds))
    torch.testing.assert_close(found, torch.cat(expected))
    pick = torch.rand(5, dtype=torch.float64)
    ours, theirs = (
        torch.autograd.grad((losses * pick).sum(), logits, retain_graph=True)[0]
        for losses in (found, torch.cat(expected))
    )
    torch.testing.assert_close(ours, theirs)


def test_rows_without_tokens_or_targets_bring_no_nan_into_gradients():
    logits = torch.randn(3, 2, requires_grad=True)
    marks = torch.full((3, 2), NO_TARGET)
    rows = torch.zeros(3, dtype=torch.long)  # the second row has no token
    for kinds in (("tag", "tag"), ("span", "span"), ("tag", "span")):
        losses = batched_token_losses(logits, marks, rows, torch.tensor([2, 2]), choice(*kinds))
        assert losses.isfinite().all()
        assert torch.autograd.grad(losses.sum(), logits)[0].isfinite().all()


def test_a_mix_only_grows_and_knows_which_heads_it_can_lose():
    heads = [HeadSpec("tag", 3, "cls"), HeadSpec("regress", 1, "mean"), HeadSpec("classify", 2, "cls")]
    mix = Mix().with_heads(heads[:2])
    assert (mix.kinds, mix.of_rows, mix.of_tokens, mix.poolings) == (
        ("regress", "tag"),
        ("regress",),
        ("tag",),
        ("mean",),
    )
    assert mix.with_heads(heads[2:]).kinds == ("classify", "regress", "tag")
    assert mix.with_heads(heads[2:]).poolings == ("cls", "mean")
    assert has_batched_loss(heads[0])
    assert not has_batched_loss(HeadSpec("classify", 2, "cls", features="mix"))
    deeper = HeadSpec("classify", 2, "cls", hidden="pooler")
    assert has_batched_loss(deeper)
    assert not mix.rows_have_hidden
    assert mix.with_heads([deeper]).with_heads(heads).rows_have_hidden
    assert not mix.with_heads([deeper]).tokens_have_hidden
