"""Heads as other libraries keep them: a linear layer on a pooled vector, with a tanh layer before it or not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from inlay.data import CLASSIFICATION, KINDS, find_kind_of_head
from inlay.errors import BadData, Unsupported
from inlay.exchange.folder import TaskToExport, Weights
from inlay.model import CLASSIFIERS, Backbone, HeadSpec, find_family
from inlay.model import head as head_part

Linear = tuple[Tensor, Tensor]
"""weight [out, in] and bias [out]"""


HEAD_TYPES = tuple(dict.fromkeys(kind.head_type for kind in KINDS.values() if kind.head_type is not None))
"""AdapterHub's types of heads; a classification of one label is its regression"""


def join_head(kind: str, pooling: str, out: Linear, hidden: Linear | None) -> tuple[HeadSpec, dict[str, Tensor]]:
    """A slot's head."""
    tensors = {head_part.WEIGHT: out[0], head_part.BIAS: out[1]}
    if hidden is not None:
        tensors |= {head_part.HIDDEN_WEIGHT: hidden[0], head_part.HIDDEN_BIAS: hidden[1]}
    return HeadSpec(kind, len(out[0]), pooling, hidden="none" if hidden is None else "tanh"), tensors


def check_classifier(model_class: str, backbone: Backbone) -> None:
    """Refuse the head of a model class that Inlay's heads cannot be."""
    family = backbone.anatomy.family
    if not model_class.endswith("ForSequenceClassification"):
        raise Unsupported(f"the head of a `{model_class}`", "Inlay reads those that classify whole texts")
    if isinstance(reason := CLASSIFIERS[family], str):
        raise Unsupported(
            f"transformers' own classifier of the family `{family}` has {reason}, which Inlay's heads do not have",
            "train it in `adapters` with a flexible head (`AutoAdapterModel`), or anew in Inlay",
        )


def take_classifier(weights: Weights, backbone: Backbone, prefix: str = "") -> tuple[HeadSpec, dict[str, Tensor]]:
    """The head of transformers' own sequence classifier. One output is a number, several are classes."""
    form, width = CLASSIFIERS[backbone.anatomy.family], backbone.hidden_size
    assert not isinstance(form, str), "checked before"
    out = _take_linear(weights, f"{prefix}{form.out}", None, width)
    hidden, pooling = None, "cls"
    family = find_family(backbone.anatomy.family)
    trained_pooler = f"{prefix}{family.prefix}.{family.pooler}.dense"
    if form.hidden:
        hidden = _take_linear(weights, f"{prefix}{form.hidden}", width, width)
    elif f"{trained_pooler}.weight" in weights.names:
        hidden = _take_linear(weights, trained_pooler, width, width)
    else:
        pooling = "pooler"
        if not backbone.has_pooler:
            raise Unsupported(
                f"the head reads the pooler, which the backbone `{backbone.name}` lacks",
                "train it with the pooler among `modules_to_save`, or on a backbone that has one",
            )
    kind = find_kind_of_head(CLASSIFICATION, len(out[0]))
    assert kind is not None
    return join_head(kind, pooling, out, hidden)


def take_flexible_head(
    config: Mapping[str, Any], weights: Weights, backbone: Backbone
) -> tuple[HeadSpec, dict[str, Tensor]]:
    """The head of AdapterHub's own model classes: dropout and a linear layer, once or with an activation between."""
    inner, width = config["config"], backbone.hidden_size
    head_type = inner.get("head_type")
    if head_type not in HEAD_TYPES:
        raise Unsupported(f"a prediction head of the type `{head_type}`", f"known: {', '.join(HEAD_TYPES)}")
    num_layers, act = inner.get("layers"), inner.get("activation_function")
    if num_layers not in (1, 2) or (num_layers == 2 and act != "tanh"):
        raise Unsupported(
            f"a prediction head of {num_layers} layers with the activation `{act}`",
            "Inlay's heads have one layer, or two with tanh between: train it with layers=1",
        )
    if inner.get("use_pooler") and not backbone.has_pooler:
        raise Unsupported(f"the head reads the pooler, which the backbone `{backbone.name}` lacks", "use_pooler=False")
    prefix, last = f"heads.{config.get('name')}", 1 if num_layers == 1 else 4
    out = weights.take(f"{prefix}.{last}.weight", None, width)
    bias = weights.take(f"{prefix}.{last}.bias", out.shape[0]) if inner.get("bias", True) else out.new_zeros(len(out))
    hidden = None
    if num_layers == 2:
        hidden = weights.take(f"{prefix}.1.weight", width, width), weights.take(f"{prefix}.1.bias", width)
    pooling = "pooler" if inner.get("use_pooler") else "cls"
    kind = find_kind_of_head(head_type, len(out))
    assert kind is not None
    return join_head(kind, pooling, (out, bias), hidden)


def _take_linear(weights: Weights, name: str, num_out: int | None, num_in: int) -> Linear:
    weight = weights.take(f"{name}.weight", num_out, num_in)
    return weight, weights.take(f"{name}.bias", len(weight))


def read_labels(ids: Any, num_outputs: int) -> tuple[str, ...]:
    """The labels of a `label2id`, in order; none where it names none."""
    if not ids or num_outputs == 1:
        return ()
    if not isinstance(ids, Mapping) or sorted(ids.values()) != list(range(num_outputs)):
        raise BadData(f"`label2id` names {len(ids)} labels for {num_outputs} outputs", "name them with `--labels`")
    return tuple(sorted(ids, key=lambda label: ids[label]))


def fold_targets(task: TaskToExport) -> Linear:
    """The output layer with the target's scale folded in: other libraries expect the number, not its standard score."""
    std, mean = task.head.target_std, task.head.target_mean
    return task.tensors[head_part.WEIGHT] * std, task.tensors[head_part.BIAS] * std + mean


def describe_decisions(head: HeadSpec) -> str:
    """Describe for a README how logits become answers; "" where that is done the usual way."""
    said = ""
    if head.temperature != 1:
        divided = f"For probabilities Inlay divides the logits by its temperature, {head.temperature:.6g}"
        said += f"\n{divided}; this format has no place for it.\n"
    if head.thresholds is not None:
        cuts = ", ".join(f"{cut:.6g}" for cut in head.thresholds)
        applies = "A label applies from these logits on, label by label"
        if KINDS[head.kind].is_classifier:
            applies = "The second label is the answer if its logit exceeds the first one's by more than"
        said += f"\n{applies}: {cuts} (tuned on dev rows; this format has no place for it).\n"
    return said
