"""Parts: no other file spells the name of a task's tensor, and every part says what an empty slot has."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import inlay
from inlay.model.bank.bank import Bank
from inlay.model.bank.methods import JOINT_METHODS, METHODS, UNSUPPORTED, SlotSpec, layout, resolve_method
from inlay.model.batch.route import Row, collate
from inlay.model.heads.heads import HeadSpec
from inlay.model.heads.inference import infer
from inlay.model.parts import PARTS, find_part
from inlay.model.parts.part import Part
from inlay.settings.run_config import MethodConfig
from tiny_backbones import random_tensors

SOURCE = Path(inlay.__file__).parent
PREFIXES = tuple(part.prefix for part in PARTS)
OTHERS = {("exchange/adapterhub.py", "adapter.")}
"""(file, prefix) of names in formats of others that begin as ours do: there `adapter.safetensors`"""


def spelt(path: Path) -> Iterator[tuple[int, str]]:
    """The names that a file spells, in text or as the beginning of an f-string, with their lines."""
    tree = ast.parse(path.read_text(encoding="utf8"))
    texts = {id(node.body[0].value) for node in ast.walk(tree) if is_documented(node)}
    texts |= {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            texts |= {id(value) for value in node.values[1:]}
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in texts:
            yield node.lineno, node.value


def is_documented(node: ast.AST) -> bool:
    return isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None


def test_no_file_outside_the_parts_spells_the_name_of_a_tasks_tensor():
    found = []
    for path in SOURCE.rglob("*.py"):
        inside = path.relative_to(SOURCE).as_posix()
        if inside.startswith("model/parts/"):
            continue
        for line, text in spelt(path):
            prefix = next((prefix for prefix in PREFIXES if text.startswith(prefix)), None)
            if prefix is not None and " " not in text and (inside, prefix) not in OTHERS:
                found.append(f"{inside}:{line}: {text!r}")
    assert not found


def test_prefixes_tell_parts_apart():
    for part in PARTS:
        assert [other for other in PARTS if other.owns(f"{part.prefix}0.x")] == [part]


@pytest.mark.parametrize("name", [*METHODS, *JOINT_METHODS])
def test_every_tensor_of_a_method_belongs_to_one_of_its_parts(tiny_bert, name):
    if ("bert", name) in UNSUPPORTED:
        return
    method = METHODS.get(name) or JOINT_METHODS[name]
    kinds = {type(part) for part in method.parts}
    if name.startswith("hyperformer"):  # it writes adapters, and may train the norms behind them
        kinds.add(type(find_part("adapter.")))
    for item in layout(tiny_bert.anatomy, resolve_method(MethodConfig(name))):
        assert [part for part in PARTS if part.owns(item.name)] == [find_part(item.name)]
        assert type(find_part(item.name)) in kinds
        assert isinstance(find_part(item.name), Part)


@pytest.mark.parametrize("name", [name for name in METHODS if not METHODS[name].is_finetuned])
def test_a_free_slot_has_what_its_parts_call_neutral(tiny_bert, name):
    from inlay.model.bank.methods import SlotSpec
    from inlay.model.heads.heads import HeadSpec

    bank = Bank(tiny_bert, 2)
    bank.initialise(0, SlotSpec.of(MethodConfig(name), HeadSpec("classify", 2, "mean")), seed=0)
    bank.free(0)
    for stack_name, stack in bank.stacks.items():
        neutral = find_part(stack_name).neutral(stack_name, tiny_bert)
        assert torch.equal(stack[0], torch.zeros_like(stack[0]) + neutral)
        assert torch.equal(stack[1], stack[0])


@pytest.mark.parametrize("method", sorted(METHODS.keys() - {"full", "top", "pal-full"}))
def test_slots_can_change_and_train_after_a_pass_that_only_answered(method, tiny_bert):
    """What a part makes when it is bound may be made inside of an inference pass, and is changed outside of it."""
    head = HeadSpec("classify", 2, "mean")
    spec, other = SlotSpec.of(MethodConfig(method), head), SlotSpec.of(MethodConfig("houlsby", 4), head)
    row = Row(tiny_bert.tokenizer("the movie was good")["input_ids"], 0, None)
    serving = Bank(tiny_bert, 2)
    serving.put(0, spec, random_tensors(tiny_bert, spec, 0))
    (before,) = infer(serving, [row])
    serving.put(1, other, random_tensors(tiny_bert, other, 1))
    serving.free(1)
    (after,) = infer(serving, [row])
    torch.testing.assert_close(after, before)
    training = Bank(tiny_bert, 1, trainable=True)
    training.initialise(0, spec, 0)
    training.flatten()
    infer(training, [row])
    batch = collate([row], 0, "cpu")
    with training.routed(batch.route):
        sum(logits.sum() for logits in training.logits(batch)).backward()
