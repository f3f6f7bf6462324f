"""The quick GELU against torch's in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from inlay.model.kernels.frozen_layers import find_gelu, lean_gelu, quick_gelu


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
