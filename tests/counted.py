"""How often something is compiled, by a compiler that counts."""

from __future__ import annotations

import torch
from torch._dynamo.backends.common import aot_autograd

from inlay.model.kernels import fold_residual as rewrite
from inlay.model.kernels import launch


class Traced(BaseException):
    """A compiled block was called."""


def count_graphs(monkeypatch, module):
    """The graphs that `module` has compiled, in order; they compute what they would."""
    found = []

    def count(graph, inputs):
        rewrite.add_in_norms(graph.graph)
        graph.recompile()
        found.append(graph)
        return graph.forward

    torch._dynamo.reset()
    monkeypatch.setattr(module, "BACKEND", count)
    return found


def trace_graphs(monkeypatch, module):
    """The forward graphs that `module` has compiled; shapes are traced as for a GPU, and nothing is computed."""
    found = []

    def stop(graph, inputs):
        found.append(graph)

        def run(*args):
            raise Traced

        return run

    torch._dynamo.reset()
    monkeypatch.setattr(launch, "is_available", lambda device: True)
    monkeypatch.setattr(module, "BACKEND", aot_autograd(fw_compiler=stop, bw_compiler=lambda graph, inputs: graph))
    return found
