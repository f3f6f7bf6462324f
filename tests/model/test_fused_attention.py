"""Attention inside the rows of a pack in Triton against its formula in float64, row by row. Run by `make triton`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from inlay.model.kernels.fused_attention import segment_attention

pytestmark = pytest.mark.triton
HEADS, WIDTH, SCALING = 2, 8, 0.3
RAGGED = [3, 1, 0, 20, 33, 1, 7]


def places(lengths: list[int]) -> tuple[Tensor, Tensor]:
    """Where rows of these lengths start and stop, laid end to end."""
    stops = torch.tensor(lengths).cumsum(0)
    return (stops - torch.tensor(lengths)).int(), stops.int()


def plain(q, k, v, lengths, bias=None, kept=None):
    """The definition, row by row; `kept` has what each weight [H, i, j] of each row is multiplied with."""
    pieces, start = [], 0
    for row, length in enumerate(lengths):
        own = slice(start, start + length)
        s = torch.einsum("ihd,jhd->hij", q[own], k[own]) * SCALING
        if bias is not None:
            for i in range(length):
                for j in range(length):
                    s[:, i, j] = s[:, i, j] + bias[:, bias.shape[1] // 2 + j - i]
        p = s.softmax(-1) * (1 if kept is None else kept[row])
        pieces.append(torch.einsum("hij,jhd->ihd", p, v[own]))
        start += length
    return torch.cat(pieces)


def leaves(lengths: list[int], width: int = WIDTH, seed: int = 0) -> list[Tensor]:
    """q, k and v, and a gradient to send back."""
    noise = torch.Generator().manual_seed(seed)
    return [torch.randn(sum(lengths), HEADS, width, generator=noise) for _ in range(4)]


def check(lengths, max_length, bias=None, width=WIDTH):
    *inputs, do = leaves(lengths, width)
    own = [tensor.clone().requires_grad_() for tensor in inputs]
    exact = [tensor.double().requires_grad_() for tensor in inputs]
    o = segment_attention(*own, *places(lengths), bias, SCALING, max_length)
    o.backward(do)
    expected = plain(*exact, lengths, None if bias is None else bias.double())
    expected.backward(do.double())
    torch.testing.assert_close(o.double(), expected, atol=1e-5, rtol=1e-5)
    for a, b in zip(own, exact, strict=True):
        torch.testing.assert_close(a.grad.double(), b.grad, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("lengths", "max_length"),
    [([1], 1), ([5, 2], 16), (RAGGED, 64), ([0, 0, 40, 0], 40), ([35, 3, 40], 128), ([50], 512)],
    ids=str,
)
def test_output_and_gradients_equal_the_formula(lengths, max_length):
    check(lengths, max_length)


@pytest.mark.parametrize("width", [4, 16, 24])
def test_heads_may_have_any_width(width):
    check([5, 20], 32, width=width)


@pytest.mark.parametrize("num_distances", [79, 80, 101])
def test_bias_belongs_to_the_distance_of_key_and_query(num_distances):
    check([3, 1, 40], 40, torch.randn(HEADS, num_distances, generator=torch.Generator().manual_seed(1)))


@pytest.mark.parametrize("max_length", [40, 128, 200])
def test_a_launch_for_rows_of_each_length_equals_one_for_all(monkeypatch, max_length):
    lengths, seed = [40, 0, 33, 2, 16, 17], torch.tensor([5])
    *qkv, _ = leaves(lengths)
    at_once = segment_attention(*qkv, *places(lengths), None, SCALING, max_length, 0.3, seed)
    monkeypatch.setattr("inlay.model.kernels.fused_attention.PROGRAMS", 1)
    check(lengths, max_length)
    by_length = segment_attention(*qkv, *places(lengths), None, SCALING, max_length, 0.3, seed)
    torch.testing.assert_close(by_length, at_once)


@pytest.mark.parametrize("programs", [1, 2048])
def test_rows_of_half_precision_are_summed_in_float32(monkeypatch, programs):
    """float16, as Triton's interpreter has no products in bf16; those are tested on a GPU."""
    monkeypatch.setattr("inlay.model.kernels.fused_attention.PROGRAMS", programs)
    lengths = [70, 1, 9, 32, 33, 64, 65]
    *inputs, do = (tensor.half() for tensor in leaves(lengths, 16))
    own = [tensor.clone().requires_grad_() for tensor in inputs]
    exact = [tensor.double().requires_grad_() for tensor in inputs]
    o = segment_attention(*own, *places(lengths), None, SCALING, 128)
    o.backward(do)
    expected = plain(*exact, lengths)
    expected.backward(do.double())
    pairs = [(o, expected), *((a.grad, b.grad) for a, b in zip(own, exact, strict=True))]
    for found, target in pairs:
        assert found.dtype == torch.float16
        assert (found.double() - target).norm() < 2e-3 * target.norm()


def test_slices_of_one_tensor_are_read_where_they_lie():
    lengths = [5, 20]
    qkv = torch.cat([tensor.flatten(1) for tensor in leaves(lengths)[:3]], 1)
    do = leaves(lengths)[3].transpose(0, 1).contiguous().transpose(0, 1)
    found, expected = qkv.clone().requires_grad_(), qkv.clone().requires_grad_()
    views = [part.unflatten(1, (HEADS, WIDTH)) for part in found.chunk(3, 1)]
    assert views[1].stride() == (3 * HEADS * WIDTH, WIDTH, 1)
    segment_attention(*views, *places(lengths), None, SCALING, 32).backward(do)
    plain(*(part.unflatten(1, (HEADS, WIDTH)) for part in expected.chunk(3, 1)), lengths).backward(do)
    torch.testing.assert_close(found.grad, expected.grad, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("lengths", [[5, 20], RAGGED], ids=str)
def test_what_one_product_leaves_is_read_where_it_lies_and_its_gradients_lie_alike(lengths):
    *qkv, do = leaves(lengths)
    bias = torch.randn(HEADS, 80, generator=torch.Generator().manual_seed(1))
    found, expected = torch.stack(qkv, 1).requires_grad_(), torch.stack(qkv, 1).double().requires_grad_()
    o = segment_attention(found, None, None, *places(lengths), bias, SCALING, 40)
    o.backward(do)
    exact = plain(*expected.unbind(1), lengths, bias.double())
    exact.backward(do.double())
    torch.testing.assert_close(o.double(), exact, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.grad.double(), expected.grad, atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of the row that is NaN
def test_nan_in_one_row_stays_in_its_row():
    lengths = [17, 20, 5]
    *own, do = leaves(lengths)
    for tensor in (*own, do):
        tensor[17:37] = torch.nan
    own = [tensor.requires_grad_() for tensor in own]
    o = segment_attention(*own, *places(lengths), None, SCALING, 32)
    o.backward(do)
    for tensor in (o, *(tensor.grad for tensor in own)):
        assert tensor[17:37].isnan().all()
        assert tensor[:17].isfinite().all()
        assert tensor[37:].isfinite().all()


def drop_mask(lengths: list[int], dropout: float, seed: Tensor) -> list[Tensor]:
    """What each weight of each row [H, i, j] was multiplied with: weights of equal size, read out by v = identity."""
    length = max(lengths)
    zeros = torch.zeros(sum(lengths), HEADS, length)
    v = torch.cat([torch.eye(length)[:own] for own in lengths])[:, None].expand(-1, HEADS, -1)
    o = segment_attention(zeros, zeros, v, *places(lengths), None, SCALING, length, dropout, seed)
    return [part[..., : len(part)].permute(1, 0, 2) * len(part) for part in o.split(lengths)]


def test_dropout_keeps_the_mean_and_drops_its_share():
    kept = torch.cat([mask.flatten() for mask in drop_mask([64, 40], 0.25, torch.tensor([3]))])
    assert set(kept.mul(0.75).round(decimals=4).tolist()) == {0.0, 1.0}
    assert abs(kept.mean() - 1) < 4 * (0.25 / 0.75 / len(kept)) ** 0.5


def test_dropout_differs_between_rows_heads_and_seeds():
    masks = drop_mask([32, 32], 0.5, torch.tensor([3]))
    other = drop_mask([32, 32], 0.5, torch.tensor([4]))
    assert not torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[0][0], masks[0][1])
    assert not torch.equal(masks[0], other[0])
    again = drop_mask([32, 32], 0.5, torch.tensor([3]))
    assert all(torch.equal(a, b) for a, b in zip(masks, again, strict=True))


def test_backward_drops_what_forward_dropped():
    lengths, seed = [20, 2, 17], torch.tensor([5])
    *inputs, do = leaves(lengths)
    own = [tensor.clone().requires_grad_() for tensor in inputs]
    exact = [tensor.double().requires_grad_() for tensor in inputs]
    o = segment_attention(*own, *places(lengths), None, SCALING, 20, 0.2, seed)
    o.backward(do)
    kept = [mask.double() for mask in drop_mask(lengths, 0.2, seed)]
    expected = plain(*exact, lengths, kept=kept)
    expected.backward(do.double())
    torch.testing.assert_close(o.double(), expected, atol=1e-5, rtol=1e-5)
    for a, b in zip(own, exact, strict=True):
        torch.testing.assert_close(a.grad.double(), b.grad, atol=1e-5, rtol=1e-5)


def test_operators_hold_what_torch_compile_assumes_of_them():
    lengths = [5, 3]
    *own, do = (tensor.requires_grad_() for tensor in leaves(lengths))
    bias, seed = torch.randn(HEADS, 16), torch.tensor([1])
    given = (*own, *places(lengths), bias, seed, SCALING, 8, 0.1, False)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.inlay.segment_attention, given, test_utils=checks)
    o, lse = torch.ops.inlay.segment_attention(*given)
    tensors = [tensor.detach() for tensor in (do, *own, o, lse)]
    given = (*tensors, *given[3:])
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.inlay.segment_attention_backward, given, test_utils=checks)


def test_operators_on_one_tensor_hold_what_torch_compile_assumes_of_them():
    lengths = [5, 3]
    *own, do = leaves(lengths)
    given = (
        torch.stack(own, 1).requires_grad_(),
        None,
        None,
        *places(lengths),
        None,
        torch.tensor([1]),
        SCALING,
        8,
        0.1,
        False,
    )
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.inlay.segment_attention, given, test_utils=checks)
    o, lse = torch.ops.inlay.segment_attention(*given)
    do, qkv, o, lse = (tensor.detach() for tensor in (do, given[0], o, lse))
    checks = ("test_schema", "test_faketensor")
    inputs = (do, qkv, None, None, o, lse, *given[3:])
    torch.library.opcheck(torch.ops.inlay.segment_attention_backward, inputs, test_utils=checks)


def test_attention_compiles_whole():
    lengths = [5, 3]

    def loss(q, k, v):
        return segment_attention(q, k, v, *rows, None, SCALING, 8).square().sum()

    rows = places(lengths)
    found, expected = ([tensor.clone().requires_grad_() for tensor in leaves(lengths)[:3]] for _ in range(2))
    torch.compile(loss, fullgraph=True, backend="aot_eager")(*found).backward()
    loss(*expected).backward()
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.grad, b.grad)
