"""Writing of a version as a folder that `load_adapter` of the `adapters` library reads.

`load_adapter(DIR)` looks for `pytorch_adapter.bin`, so that is written: plain tensors, which its safe loader accepts.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from inlay.exchange import adapterhub, foreign
from inlay.model import (
    BLOCK,
    BOTTLENECK,
    FACTORS,
    LORA,
    Anatomy,
    HeadSpec,
    ResolvedMethod,
    adapted_layers,
    adapted_linears,
    adapter_groups,
    find_family,
)
from inlay.model import head as head_part

_BOTTLENECK: dict[str, Any] = {
    "mh_adapter": False,
    "output_adapter": True,
    "original_ln_before": False,
    "original_ln_after": True,
    "ln_before": False,
    "ln_after": False,
    "residual_before_ln": True,
    "adapter_residual_before_ln": False,
    "init_weights": "bert",
    "init_weights_seed": None,
    "is_parallel": False,
    "use_gating": False,
    "dropout": 0.0,
    "inv_adapter": None,
    "inv_adapter_reduction_factor": None,
    "cross_adapter": False,
    "phm_layer": False,
}
_LINEAR: dict[str, Any] = {
    "architecture": "lora",
    "dropout": 0.0,
    "use_gating": False,
    "use_dora": False,
    "init_weights_seed": None,
    "vera_b": None,
    "vera_d": None,
    "dtype": None,
}
_NEEDS: dict[str, tuple[Any, str]] = {
    "norms": ("none", "AdapterHub keeps no trained layer norms"),
    "depth": (1, "AdapterHub's adapters have one hidden layer"),
    "inner_norm": ("none", "AdapterHub has no norm inside the bottleneck"),
    "combine": ("add", "AdapterHub's adapters add"),
}


def write(task: foreign.TaskToExport, anatomy: Anatomy) -> foreign.ExportedFiles:
    """Return the folder's files; refuse a version that AdapterHub cannot express, with the reason and what to do."""
    _refuse_obstacles(task, anatomy)
    name = task.name.replace(".", "-")  # names of torch modules have no dots
    config, weights, notes = WRITERS[task.method.name](task, anatomy, name)
    if name != task.name:
        notes.append(f"the adapter is called {name}: the library's names have no dots")
    head_config, head_weights = _write_head(task, name)
    about = {
        "name": name,
        "model_name": task.base,
        "model_type": anatomy.family,
        "model_class": adapterhub.MODEL_CLASSES[anatomy.family],
        "hidden_size": anatomy.hidden_size,
        "version": adapterhub.VERSION,
    }
    readme = _README.format(name=name, base=task.base, temperature=foreign.describe_decisions(task.head))
    files = {
        adapterhub.CONFIG: foreign.dump_json({**about, "config": config}),
        adapterhub.WEIGHTS[1]: _save(weights),
        adapterhub.HEAD_CONFIG: foreign.dump_json({**about, "config": head_config}),
        adapterhub.HEAD_WEIGHTS[1]: _save(head_weights),
        "README.md": readme.encode(),
    }
    return foreign.ExportedFiles(files, tuple(notes))


_README = """A task of Inlay as an adapter of the `adapters` library (written against 1.3.0).

```python
from adapters import AutoAdapterModel

model = AutoAdapterModel.from_pretrained("{base}")
model.load_adapter("THIS FOLDER", set_active=True)
```

The adapter and its prediction head are called `{name}`. Layer norms are those of the backbone.
{temperature}"""


def _refuse_obstacles(task: foreign.TaskToExport, anatomy: Anatomy) -> None:
    """Refuse a version that AdapterHub cannot express, with all reasons, and a preset that avoids them."""
    if anatomy.family not in adapterhub.MODEL_CLASSES:
        reason = f"AdapterHub has no models of the family `{anatomy.family}`"
        foreign.refuse([foreign.Obstacle(reason)], formats=("inlay",) if anatomy.has_decoder else ("inlay", "onnx"))
    obstacles = [*_method_obstacles(task.method), *_head_obstacles(task.head)]
    preset = "adapterhub-pfeiffer" if task.method.name == "pfeiffer" else "adapterhub-houlsby"
    needs_other = any(obstacle.options is None for obstacle in obstacles)
    foreign.refuse(
        obstacles,
        presets=(preset,) if task.head.kind in foreign.HEAD_TYPES else (),
        formats=("inlay",) if needs_other else (),
    )


def _method_obstacles(method: ResolvedMethod) -> list[foreign.Obstacle]:
    """List why a method cannot be exported."""
    if method.name not in WRITERS:
        return [foreign.Obstacle(f"AdapterHub has no method like `{method.name}`: it has {', '.join(WRITERS)}")]
    found = [
        foreign.Obstacle(f"{reason}; this task has `{name}` `{getattr(method, name)}`", f"--set method.{name}={value}")
        for name, (value, reason) in _NEEDS.items()
        if getattr(method, name) != value
    ]
    known = _LINEARS.get(method.name, method.linears)
    odd = [linear for linear in method.linears if linear not in known]
    if odd:
        others = ",".join(linear for linear in method.linears if linear in known) or known[0]
        named = ", ".join(f"`{linear}`" for linear in odd)
        reason = f"AdapterHub's {method.name} cannot change the linear layer {named} as Inlay does"
        found.append(foreign.Obstacle(reason, f"--set method.linears={others}"))
    return found


def _head_obstacles(head: HeadSpec) -> list[foreign.Obstacle]:
    """List why a head cannot be exported."""
    if head.kind not in foreign.HEAD_TYPES:
        reason = f"AdapterHub has no head of the kind `{head.kind}`: it can be {', '.join(foreign.HEAD_TYPES)}"
        return [foreign.Obstacle(reason)]
    if head.is_written:
        return [foreign.Obstacle("AdapterHub has no head that scores or writes texts")]
    found = []
    if head.pooling == "mean":
        reason = "AdapterHub's heads have no pooling `mean`: they read the first token, or the pooler"
        found.append(foreign.Obstacle(reason, "--pooling cls"))
    if head.has_towers:
        reason = "AdapterHub's heads read one text, or a pair as one; this one reads its texts apart (towers)"
        found.append(foreign.Obstacle(reason, "--set data.pairs=joined"))
    if head.features != "last":
        reason = f"AdapterHub's heads have no features `{head.features}`: they read the last layer"
        found.append(foreign.Obstacle(reason, "--set train.features=last"))
    return found


Written = tuple[dict[str, Any], dict[str, Tensor], list[str]]
"""config of the architecture, weights, notes"""


def _write_bottleneck(task: foreign.TaskToExport, anatomy: Anatomy, name: str) -> Written:
    method, prefix = task.method, find_family(anatomy.family).prefix
    weights = {}
    for site, group in adapter_groups(anatomy, method).items():
        path = f"{prefix}.{adapterhub.locate_bottleneck(anatomy, site)}.adapters.{name}"
        adapter = {item: task.tensors[BOTTLENECK.name(group, item)] for item in BLOCK}
        weights[f"{path}.adapter_down.0.weight"] = adapter["down"].T
        weights[f"{path}.adapter_down.0.bias"] = adapter["down_bias"]
        weights[f"{path}.adapter_up.weight"] = adapter["up"].T
        weights[f"{path}.adapter_up.bias"] = adapter["up_bias"]
    names = {ours: theirs for theirs, ours in reversed(adapterhub.ACTIVATIONS.items())}  # the first of several
    config = {
        **_BOTTLENECK,
        "mh_adapter": "attention" in method.places,
        "output_adapter": method.places != ("attention",),
        "original_ln_before": method.name == "pfeiffer",
        "is_parallel": method.form == "parallel",
        "non_linearity": names[method.activation],
        "reduction_factor": _find_factor(anatomy.hidden_size, int(method.size or 0)),
        "scaling": float(1.0 if method.scale is None else method.scale),
        "leave_out": _left_out(task, anatomy),
    }
    shared = "adapters that layers share in Inlay are copies here: AdapterHub cannot share them"
    return config, weights, [] if method.sharing == "none" else [shared]


def _find_factor(width: int, size: int) -> float:
    """Return the reduction factor that gives `size` in the library, which rounds width / factor down."""
    if width % size == 0:
        return width // size
    factor = width / size
    while int(width // factor) < size:
        factor = math.nextafter(factor, 0)
    return factor


def _left_out(task: foreign.TaskToExport, anatomy: Anatomy) -> list[int]:
    return sorted(set(range(anatomy.num_layers)) - set(adapted_layers(anatomy, task.method)))


_LINEARS = {
    "lora": (*adapterhub.ATTENTION_LINEARS, *adapterhub.WIDE_LINEARS),
    "ia3": (*adapterhub.ATTENTION_LINEARS, "expand"),
}
"""method -> the linear layers that it can change in AdapterHub"""


def _linear_config(task: foreign.TaskToExport, anatomy: Anatomy) -> dict[str, Any]:
    """Return the settings of LoRA and (IA)³ that say which linear layers are changed."""
    letters, linears = adapterhub.ATTENTION_LINEARS, task.method.linears
    attention = [letters[linear] for linear in linears if linear in letters]
    return {
        **_LINEAR,
        "selfattn_lora": bool(attention),
        "attn_matrices": attention,
        **{flag: linear in linears for linear, flag in adapterhub.WIDE_LINEARS.items()},
        "leave_out": _left_out(task, anatomy),
    }


def _write_lora(task: foreign.TaskToExport, anatomy: Anatomy, name: str) -> Written:
    method, prefix = task.method, find_family(anatomy.family).prefix
    rank, scale = int(method.size or 0), 1.0 if method.scale is None else method.scale
    config = _linear_config(task, anatomy)
    config |= {"r": rank, "alpha": scale * rank, "composition_mode": "add", "init_weights": "lora"}
    weights = {}
    for site in adapted_linears(anatomy, method):
        weights[f"{prefix}.{site.path}.loras.{name}.lora_A"] = task.tensors[LORA.name(site.key, "down")].T
        weights[f"{prefix}.{site.path}.loras.{name}.lora_B"] = task.tensors[LORA.name(site.key, "up")].T
    return config, weights, []


def _write_ia3(task: foreign.TaskToExport, anatomy: Anatomy, name: str) -> Written:
    prefix = find_family(anatomy.family).prefix
    config = _linear_config(task, anatomy)
    config |= {"r": 1, "alpha": 1, "composition_mode": "scale", "init_weights": "ia3"}
    weights = {
        f"{prefix}.{site.path}.loras.{name}.lora_B": task.tensors[FACTORS.name(site.key)][:, None]
        for site in adapted_linears(anatomy, task.method)
    }
    return config, weights, []


WRITERS = {
    **dict.fromkeys(("houlsby", "pfeiffer", "parallel"), _write_bottleneck),
    "lora": _write_lora,
    "ia3": _write_ia3,
}
"""our method -> the function that writes it; AdapterHub has no others of ours"""


def _write_head(task: foreign.TaskToExport, name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the head's config and weights."""
    head = task.head
    out_weight, out_bias = foreign.fold_targets(task)
    layers, last = (1, 1) if head.hidden == "none" else (2, 4)
    weights = {f"heads.{name}.{last}.weight": out_weight, f"heads.{name}.{last}.bias": out_bias}
    if layers == 2:
        weights[f"heads.{name}.1.weight"] = task.tensors[head_part.HIDDEN_WEIGHT]
        weights[f"heads.{name}.1.bias"] = task.tensors[head_part.HIDDEN_BIAS]
    config = {
        "head_type": foreign.HEAD_TYPES[head.kind],
        "num_labels": head.num_outputs,
        "layers": layers,
        "activation_function": "tanh",
        "label2id": {label: index for index, label in enumerate(task.labels)} or None,
        "use_pooler": head.pooling == "pooler",
        "bias": True,
        "dropout_prob": None,
    }
    return config, weights


def _save(weights: Mapping[str, Tensor]) -> bytes:
    buffer = io.BytesIO()
    torch.save({name: tensor.contiguous().clone() for name, tensor in weights.items()}, buffer)
    return buffer.getvalue()
