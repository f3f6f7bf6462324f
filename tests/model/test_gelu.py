"""The quick GELU against torch's in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from inlay.model.gelu import is_exact_gelu, quick_gelu


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


@pytest.mark.parametrize(("module", "is_exact"), [(torch.nn.GELU(), True), (torch.nn.GELU("tanh"), False)])
def test_only_the_exact_gelu_is_replaced(module, is_exact):
    assert is_exact_gelu(module) is is_exact


def test_a_backbone_of_the_families_has_one_in_each_block(backbone_of):
    from inlay.model.mount import ActivationWrapper

    for family in ("bert", "mpnet", "distilbert", "roberta"):
        backbone = backbone_of(family)
        found = [module for module in backbone.model.modules() if isinstance(module, ActivationWrapper)]
        assert len(found) == backbone.anatomy.num_layers, family


@pytest.mark.triton
def test_operators_hold_what_torch_compile_assumes_of_them():
    x = torch.randn(3, 5, requires_grad=True)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.inlay.gelu, (x,), test_utils=checks)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.inlay.gelu_backward, (x.detach(), x.detach()), test_utils=checks)
