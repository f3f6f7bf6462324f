"""The fused bottleneck and the grouped products in Triton's interpreter, against float64. Run by `make triton`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend

from banked_formulas import (
    Case,
    composed_bottleneck,
    distance,
    dropout_mask,
    errors,
    fused_bottleneck,
    gradients,
    tiles_of,
)
from inlay.model.batch.tiles import TILE_SIZES, Tiles
from inlay.model.kernels import launch
from inlay.model.kernels.bottleneck_weights import ACTIVATIONS
from inlay.model.kernels.fused_bottleneck import Stacks, bottleneck
from inlay.model.kernels.grouped import segment_linear, slot_vectors

pytestmark = pytest.mark.triton
EXACT = 2e-6
KERNELS = {"fused": fused_bottleneck, "composed": composed_bottleneck}


@st.composite
def cases(draw):
    lengths = draw(st.lists(st.integers(0, 40), min_size=1, max_size=4).filter(any))
    width = draw(st.sampled_from([8, 33, 40, 72]))
    residual = draw(st.booleans())
    return Case(
        lengths,
        [draw(st.sampled_from([1, 3, 8, 20, 33])) for _ in lengths],
        width,
        width_out=None if residual else draw(st.sampled_from([16, 50])),
        tile=draw(st.sampled_from(TILE_SIZES)),
        activation=draw(st.sampled_from([None, *ACTIVATIONS])),
        has_biases=draw(st.booleans()),
        residual=residual,
        order=draw(st.permutations(range(len(lengths)))),
        seed=draw(st.integers(0, 99)),
    )


@settings(max_examples=12, deadline=None, database=None, derandomize=True)
@given(cases(), st.sampled_from(sorted(KERNELS)))
def test_output_and_gradients_equal_the_formula(case, kernel):
    assert max(errors(case, KERNELS[kernel]).values()) < EXACT


@pytest.mark.parametrize("size", [1, 8, 24, 64, 100, 128])
def test_bottlenecks_of_every_size_equal_the_formula(size):
    assert max(errors(Case([20, 3], [size, size])).values()) < EXACT


@pytest.mark.parametrize("size", [200, 512])
def test_wider_bottlenecks_are_composed_of_grouped_products(size):
    assert max(errors(Case([20, 3], [size, 16]), composed_bottleneck).values()) < EXACT


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_every_activation_has_its_value_and_its_slope(activation):
    """With the identity for down and up the kernel shows the activation itself, from far below zero to far above."""
    values = torch.tensor([-9.0, -3.0, -1.0, -0.26, -0.24, -1e-3, 0.0, 1e-3, 0.24, 0.26, 1.0, 3.0, 9.0, 0, 0, 0])
    h = values.repeat(16, 1).requires_grad_()
    stacks = Stacks(torch.eye(16)[None], torch.eye(16)[None], torch.ones(1))
    out = bottleneck(h, stacks, tiles_of([16], 16), activation, residual=False)
    out.sum().backward()
    x = values.double().requires_grad_()
    expected = ACTIVATIONS.get(activation or "", lambda z: z)(x)
    expected.sum().backward()
    # what is summed are sixteen numbers of which one is not zero
    torch.testing.assert_close(out[0].double(), expected, rtol=1e-5, atol=1e-9)
    torch.testing.assert_close(h.grad[0].double(), x.grad, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("kernel", KERNELS)
def test_padding_beyond_a_slots_size_is_neutral_and_gets_no_gradient(kernel):
    case = Case([20, 17, 5], [3, 40, 8], has_biases=True)
    got = gradients(KERNELS[kernel](case), case.in_kernel_types(case.make()))
    assert max(errors(case, KERNELS[kernel]).values()) < EXACT
    for slot, size in enumerate(case.sizes):
        assert not got["d_down"][slot, :, size:].any()
        assert not got["d_up"][slot, size:].any()
        assert not got["d_down_bias"][slot, size:].any()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["h", "down", "up_bias", "grad"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the interpreter meeting the poison
def test_nan_in_one_slot_reaches_no_other(kernel, poison, where):
    case = Case([19, 21, 18], [8, 8, 8])
    clean = case.in_kernel_types(case.make())
    spoilt = {name: tensor.clone() for name, tensor in clean.items()}
    _, start, stop = case.segments[1]
    spoilt[where][slice(start, stop) if where in ("h", "grad") else 1] = poison
    expected, got = gradients(KERNELS[kernel](case), clean), gradients(KERNELS[kernel](case), spoilt)
    for name in expected:
        is_token = name in ("out", "d_h")
        others = [*range(start), *range(stop, len(expected[name]))] if is_token else [0, 2]
        assert torch.equal(got[name][others], expected[name][others]), name


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_slot_without_tokens_gets_a_gradient_of_zero(kernel):
    case = Case([0, 20, 0], [8, 8, 8])
    got = gradients(KERNELS[kernel](case), case.in_kernel_types(case.make()))
    for name in ("d_down", "d_up", "d_down_bias", "d_up_bias"):
        assert not got[name][[0, 2]].any()
        assert got[name][1].any()


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_slots_tokens_split_among_programs_give_the_same_gradients(kernel, monkeypatch):
    monkeypatch.setattr(launch, "TOKENS_OF_A_SPLIT", 16)
    case = Case([90, 0, 70], [8, 8, 8])
    assert launch.splits_of(12, 160) == 10
    assert max(errors(case, KERNELS[kernel]).values()) < EXACT


@pytest.mark.parametrize("rate", [0.1, 0.5])
@pytest.mark.parametrize("width", [33, 40, 72])
def test_dropout_before_a_bottleneck_is_the_formula_with_its_mask(rate, width):
    case = Case([20, 0, 37], [8, 8, 3], width, dropout=rate, salt=5, seed=3)
    assert max(errors(case).values()) < EXACT
    assert max(errors(replace(case, width_out=50, residual=False)).values()) < EXACT


def test_dropout_is_another_for_every_seed_and_every_salt_and_keeps_the_mean():
    masks = [dropout_mask((400, 90), 0.1, seed, salt) > 0 for seed in (0, 1, 1 << 40) for salt in (0, 1)]
    for index, mask in enumerate(masks):
        spread = (0.1 * 0.9 / mask.numel()) ** 0.5
        assert abs(mask.double().mean() - 0.9) < 4 * spread
        for axis in (0, 1):  # of neighbours, below or beside one another, both are kept as often as of strangers
            both = mask.narrow(axis, 1, mask.shape[axis] - 1) & mask.narrow(axis, 0, mask.shape[axis] - 1)
            assert abs(both.double().mean() - 0.81) < 8 * spread
        for other in masks[:index]:
            assert abs((mask & other).double().mean() - 0.81) < 8 * spread


def test_views_of_a_bank_are_read_where_they_lie():
    case = Case([20, 9], [8, 8], dropout=0.2)
    inputs = case.in_kernel_types(case.make())
    weights = {name: inputs[name] for name in ("down", "up", "down_bias", "up_bias")}
    flat = torch.cat([tensor.flatten(1) for tensor in weights.values()], 1)
    parts = flat.split([tensor[0].numel() for tensor in weights.values()], 1)
    views = {name: part.view(weights[name].shape) for name, part in zip(weights, parts, strict=True)}
    assert all(launch.by_slot(view)[0] is view for view in views.values())
    leaves = {name: view.requires_grad_() for name, view in views.items()}
    out = fused_bottleneck(case)(inputs["h"], leaves["down"], leaves["up"], inputs["scale"], *list(leaves.values())[2:])
    grads = torch.autograd.grad(out, list(leaves.values()), inputs["grad"])
    expected = gradients(fused_bottleneck(case), inputs)
    assert torch.equal(out, expected["out"])
    assert all(torch.equal(grad, expected[f"d_{name}"]) for name, grad in zip(leaves, grads, strict=True))


# The interpreter multiplies the bits of bf16 as integers: half precision stands in for it here, the GPU tests have it.
def test_weights_of_float32_get_gradients_of_float32_beside_tokens_of_less():
    case = Case([20, 9], [16, 16], dtype=torch.float16)
    got = gradients(fused_bottleneck(case), case.in_kernel_types(case.make()))
    assert got["out"].dtype == got["d_h"].dtype == torch.float16
    assert {got[name].dtype for name in ("d_down", "d_up", "d_down_bias", "d_up_bias")} == {torch.float32}
    assert max(errors(case).values()) < 2e-3


def test_copies_are_read_in_the_weights_stead_and_the_gradients_are_the_weights():
    case = Case([20, 9], [16, 16], dtype=torch.float16)
    inputs = case.in_kernel_types(case.make())

    def with_copies(h, down, up, scale, down_bias, up_bias):
        copies = down.detach().half(), up.detach().half()
        return bottleneck(h, Stacks(down, up, scale, down_bias, up_bias, copies), case.tiles, case.activation)

    expected, got = gradients(fused_bottleneck(case), inputs), gradients(with_copies, inputs)
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    assert got["d_down"].dtype == torch.float32


def test_a_new_route_in_the_same_tensors_is_followed():
    before, after = Case([20, 9, 0], [8] * 3), Case([0, 5, 24], [8] * 3)
    tiles = before.tiles
    inputs = after.in_kernel_types(after.make())
    weights = Stacks(inputs["down"], inputs["up"], inputs["scale"])
    bottleneck(inputs["h"], weights, tiles, "gelu")
    tiles.buffer.copy_(after.tiles.buffer)
    assert torch.equal(
        bottleneck(inputs["h"], weights, tiles, "gelu"), bottleneck(inputs["h"], weights, after.tiles, "gelu")
    )


def test_a_compiled_step_is_one_graph_and_new_routes_compile_nothing():
    before, after = Case([20, 9, 0], [8] * 3), Case([0, 5, 24], [8] * 3)
    inputs = before.in_kernel_types(before.make())
    counter = CompileCounterWithBackend("aot_eager")

    def loss_of(h, down, up, scale, buffer):
        tiles = Tiles(buffer, len(down), 16)
        y = bottleneck(h, Stacks(down, up, scale), tiles, "gelu")
        y = segment_linear(y, down, None, tiles)
        return (y * slot_vectors(scale[:, None], tiles, len(h))).square().sum()

    compiled = torch.compile(loss_of, backend=counter, fullgraph=True)
    for case in (before, after):
        leaves = [inputs[name].clone().requires_grad_() for name in ("h", "down", "up")]
        losses = [loss(*leaves, inputs["scale"], case.tiles.buffer) for loss in (compiled, loss_of)]
        torch.testing.assert_close(*losses)
        for got, expected in zip(*(torch.autograd.grad(loss, leaves) for loss in losses), strict=True):
            torch.testing.assert_close(got, expected)
    assert counter.frame_count == 1


def test_operators_keep_torchs_promises():
    case = Case([20, 9], [8, 8])
    inputs = case.in_kernel_types(case.make())
    h, down, up = (inputs[name].requires_grad_() for name in ("h", "down", "up"))
    tiles = (case.tiles.buffer, case.tile)
    biases = inputs["down_bias"], inputs["up_bias"]
    ops = torch.ops.inlay
    torch.library.opcheck(
        ops.bottleneck,
        (h, down, up, inputs["scale"], *biases, None, None, case.drawn, *tiles, "gelu", True, 6554, 3, True),
    )
    torch.library.opcheck(ops.segment_linear, (h, down, inputs["down_bias"], *tiles))
    torch.library.opcheck(ops.slot_vectors, (inputs["up_bias"], *tiles, len(h), torch.float32))


def test_every_token_gets_its_slots_vector_and_the_vector_the_sum_of_their_gradients():
    lengths, order = [20, 0, 33, 1], [2, 0, 3, 1]
    tiles = tiles_of(lengths, 16, order=order)
    stack = torch.randn(4, 150, requires_grad=True)
    slots = torch.cat([torch.full((lengths[slot],), slot) for slot in order])
    out = slot_vectors(stack, tiles, 54)
    assert torch.equal(out, stack[slots])
    grad = torch.randn(54, 150)
    out.backward(grad)
    expected = torch.zeros(4, 150, dtype=torch.float64).index_add(0, slots, grad.double())
    assert distance(stack.grad, expected) < EXACT
    assert not stack.grad[1].any()


@pytest.mark.parametrize("frozen", ["x", "w"])
def test_frozen_inputs_get_no_gradient(frozen):
    case = Case([20, 9], [8, 8])
    inputs = case.in_kernel_types(case.make())
    h, down = (inputs[name].requires_grad_(frozen != letter) for name, letter in (("h", "x"), ("down", "w")))
    stacks = Stacks(down, inputs["up"], inputs["scale"])
    for out in (segment_linear(h, down, None, case.tiles), bottleneck(h, stacks, case.tiles)):
        out.sum().backward()
        assert (h.grad is None) == (frozen == "x")
        assert (down.grad is None) == (frozen == "w")


def test_inference_keeps_nothing_for_backward():
    case = Case([20, 9], [8, 8])
    inputs = case.in_kernel_types(case.make())
    arguments = [inputs[name] for name in ("h", "down", "up", "scale")]
    out, kept = torch.ops.inlay.bottleneck(*arguments, *[None] * 5, case.tiles.buffer, 16, "gelu", True, 0, 0, False)
    assert kept.numel() == 0
    assert torch.equal(out, fused_bottleneck(replace(case, has_biases=False))(*arguments))
