"""An FX pass that folds a residual addition into the layer norm after it.

A block adds a sublayer's output to the sublayer's input and gives the sum to a layer norm. The norm's program takes
both and adds them itself: a pass over all tokens less.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

_SHAPES = ("squeeze", "flatten")  # reshapes between the sum and the norm, done by the norm's wrapper


def inductor(module: GraphModule, inputs: Any) -> Any:
    """Compile a graph with torch's inductor after `add_in_norms`."""
    from torch._inductor.compile_fx import compile_fx

    add_in_norms(module.graph)
    module.recompile()
    return compile_fx(module, inputs)


def add_in_norms(graph: Graph) -> int:
    """Fold every sum that only a norm reads into the norm; return the number of sums."""
    norms = graph.find_nodes(op="call_function", target=torch.ops.inlay.layer_norm.default)
    return sum(_add_in(graph, norm) for norm in norms if norm.args[1] is None)


def _add_in(graph: Graph, norm: Node) -> bool:
    chain: list[Node] = []  # nodes from the norm's input down to the sum
    node = norm.args[0]
    while isinstance(node, Node) and node.op == "call_method" and node.target in _SHAPES:
        chain.append(node)
        node = node.args[0]
    if not isinstance(node, Node) or not _is_sum(node) or not _is_read_by(norm, [node, *chain]):
        return False
    left, right = node.args
    assert isinstance(left, Node)
    node.replace_all_uses_with(left)  # by the chain, and by readers of its shape
    with graph.inserting_before(norm):
        for link in reversed(chain):
            right = graph.call_method(str(link.target), (right, *link.args[1:]), link.kwargs)
    norm.update_arg(1, right)
    graph.erase_node(node)
    return True


def _is_sum(node: Node) -> bool:
    """Tell whether a node adds two tensors of one shape and type."""
    if node.op != "call_function" or node.target is not operator.add:
        return False
    left, right = (arg.meta.get("example_value") if isinstance(arg, Node) else None for arg in node.args)
    if not isinstance(left, torch.Tensor) or not isinstance(right, torch.Tensor):
        return False
    return left.shape == right.shape and left.dtype == right.dtype


def _is_read_by(norm: Node, nodes: list[Node]) -> bool:
    """Tell whether nothing but the norm reads the nodes' numbers; their shape may be read."""
    own = {norm, *nodes}
    others = [(node, user) for node in nodes for user in node.users if user not in own]
    return all(user.target == "view_as" and user.args[0] is not node for node, user in others)
