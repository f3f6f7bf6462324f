"""Layers of frozen blocks: dropout while a backbone trains on a CPU, and the quick GELU against torch's in float64."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from inlay.model.kernels.frozen_layers import Dropout, find_gelu, lean_gelu, quick_gelu

RATE = 0.1
NUM = 2**20
THRESHOLD = round(RATE * 65536)


def drop_ones(rate=RATE, shape=(NUM,), dtype=torch.float32):
    torch.manual_seed(7)
    return Dropout(rate).train()(torch.ones(shape, dtype=dtype))


@pytest.mark.parametrize("rate", [0.001, 0.1, 0.5, 0.9])
def test_the_share_that_is_dropped_is_the_rate(rate):
    share = (drop_ones(rate) == 0).double().mean()
    assert abs(share - rate) < 5 * math.sqrt(rate * (1 - rate) / NUM) + 1 / 65536


def test_every_sixteen_bits_of_a_word_drop_alike_and_apart_from_each_other():
    dropped_N4 = (drop_ones() == 0).double().view(-1, 4)
    spread = 5 * math.sqrt(RATE * (1 - RATE) / len(dropped_N4))
    torch.testing.assert_close(dropped_N4.mean(0), torch.full((4,), RATE).double(), atol=spread, rtol=0)
    together_44 = dropped_N4.T.cov()
    torch.testing.assert_close(together_44, torch.eye(4).double() * RATE * (1 - RATE), atol=spread, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_kept_is_scaled_by_exactly_the_inverse_of_its_share(dtype):
    values = drop_ones(dtype=dtype).unique()
    expected = torch.tensor([0.0, 65536 / (65536 - THRESHOLD)], dtype=dtype)
    assert torch.equal(values, expected)
    assert abs(THRESHOLD / 65536 - RATE) <= 1 / 65536


def test_gradients_go_through_what_was_kept():
    x = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    out = Dropout(0.5).train()(x)
    weights = torch.randn(5, 7, dtype=torch.float64)
    (out * weights).sum().backward()
    torch.testing.assert_close(x.grad, weights * (out != 0) * 2)


def test_the_generator_of_torch_decides():
    first, again = drop_ones(shape=(13, 3)), drop_ones(shape=(13, 3))
    assert torch.equal(first, again)
    assert not torch.equal(first, Dropout(RATE).train()(torch.ones(13, 3)))


def test_outside_of_training_and_at_the_ends_of_the_scale_it_is_torch_s():
    x = torch.randn(4, 5)
    assert torch.equal(Dropout(0.5).eval()(x), x)
    assert torch.equal(Dropout(0.0).train()(x), x)
    assert torch.equal(Dropout(1.0).train()(x), torch.zeros(4, 5))


def test_a_mounted_backbone_drops_nothing_until_it_trains(backbone_of):
    backbone = backbone_of("bert")
    found = [module for module in backbone.model.modules() if isinstance(module, torch.nn.Dropout)]
    assert found
    assert all(type(module) is Dropout and not module.training for module in found)


@pytest.mark.triton
def test_output_and_gradient_are_the_exact_ones_to_a_millionth():
    x = torch.linspace(-12, 12, 4001, requires_grad=True)
    wide = x.detach().double().requires_grad_()
    found, expected = quick_gelu(x), F.gelu(wide)
    torch.testing.assert_close(found.double(), expected, atol=2e-6, rtol=1e-6)
    found.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(x.grad.double(), wide.grad, atol=2e-6, rtol=1e-6)


@pytest.mark.triton
def test_in_half_precision_it_rounds_as_the_exact_one_nearly_everywhere():
    """float16, as Triton's interpreter does not round to bf16; that is tested on a GPU."""
    x = torch.linspace(-3, 6, 4001).half()
    found, expected = quick_gelu(x), F.gelu(x.double()).half()
    assert (found == expected).float().mean() > 0.99
    torch.testing.assert_close(found.double(), expected.double(), atol=1e-6, rtol=2**-10)


def test_the_gelu_that_transformers_writes_as_eight_operations_is_one():
    from transformers.activations import ACT2FN

    module, x = ACT2FN["gelu_new"], torch.linspace(-12, 12, 4001, dtype=torch.float64)
    assert find_gelu(module) == "tanh"
    torch.testing.assert_close(lean_gelu(x, "tanh"), module(x), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize(
    ("module", "kind"), [(torch.nn.GELU(), "none"), (torch.nn.GELU("tanh"), "tanh"), (torch.nn.ReLU(), None)]
)
def test_other_activations_stay(module, kind):
    assert find_gelu(module) == kind


def test_a_backbone_of_the_families_goes_through_one_in_each_block(backbone_of):
    from inlay.model.backbone.wrappers import ActivationWrapper

    kinds = dict.fromkeys(("bert", "mpnet", "distilbert", "roberta"), "none") | {"mt5": "tanh"}
    for family, kind in kinds.items():
        backbone, seen = backbone_of(family), []

        def note(module, args, output, seen=seen):
            seen.append(module.kind)

        found = [module for module in backbone.model.modules() if isinstance(module, ActivationWrapper)]
        handles = [module.register_forward_hook(note) for module in found]
        ids = torch.ones(1, 3, dtype=torch.long)
        backbone.model(input_ids=ids, **({"decoder_input_ids": ids} if backbone.is_seq2seq else {}))
        for handle in handles:
            handle.remove()
        assert seen == [kind] * backbone.anatomy.num_layers, family


@pytest.mark.triton
def test_operators_hold_what_torch_compile_assumes_of_them():
    x = torch.randn(3, 5, requires_grad=True)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.inlay.gelu, (x,), test_utils=checks)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.inlay.gelu_backward, (x.detach(), x.detach()), test_utils=checks)
