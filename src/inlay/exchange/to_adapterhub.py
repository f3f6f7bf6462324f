"""A version as a folder that `load_adapter` of the `adapters` library reads.

`load_adapter(DIR)` looks for `pytorch_adapter.bin`, so that is written: plain tensors, which its safe loader takes.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from inlay.errors import Unsupported
from inlay.exchange import adapterhub
from inlay.exchange.folder import Folder, Leaving, dump_json
from inlay.exchange.heads import HEAD_KINDS, fold_targets, refuse_settings
from inlay.model.methods import adapted_layers, adapted_linears, adapter_groups
from inlay.model.sites import Anatomy, find_family

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
_HINT_METHODS = "AdapterHub has houlsby, pfeiffer, parallel, lora and ia3: train one of them, or use `--format inlay`"


def write(task: Leaving, anatomy: Anatomy) -> Folder:
    """The folder's files; what AdapterHub cannot express is refused with the reason and what to do."""
    if anatomy.family not in adapterhub.MODEL_CLASSES:
        raise Unsupported(
            f"AdapterHub has no models of the family `{anatomy.family}`", "use `--format inlay`, or `--format onnx`"
        )
    if task.method.name not in _WRITERS:
        raise Unsupported(f"AdapterHub has no method like `{task.method.name}`", _HINT_METHODS)
    refuse_settings(
        task.method,
        {
            "norms": ("none", "AdapterHub keeps no trained layer norms", "train it with `--set method.norms=none`"),
            "depth": (1, "AdapterHub's adapters have one hidden layer", "train it with `--set method.depth=1`"),
            "inner_norm": ("none", "AdapterHub has no norm inside the bottleneck", "train it without `inner_norm`"),
            "combine": ("add", "AdapterHub's adapters add", "train it with `--set method.combine=add`"),
        },
    )
    name = task.name.replace(".", "-")  # names of torch modules have no dots
    config, weights, notes = _WRITERS[task.method.name](task, anatomy, name)
    if name != task.name:
        notes.append(f"the adapter is called {name}: the library's names have no dots")
    head_config, head_weights = _write_head(task, name)
    about = _describe(task, anatomy, name)
    files = {
        adapterhub.CONFIG: dump_json({**about, "config": config}),
        adapterhub.WEIGHTS[1]: _save(weights),
        adapterhub.HEAD_CONFIG: dump_json({**about, "config": head_config}),
        adapterhub.HEAD_WEIGHTS[1]: _save(head_weights),
        "README.md": _README.format(name=name, base=task.base).encode(),
    }
    return Folder(files, tuple(notes))


_README = """A task of Inlay as an adapter of the `adapters` library (written against 1.3.0).

```python
from adapters import AutoAdapterModel

model = AutoAdapterModel.from_pretrained("{base}")
model.load_adapter("THIS FOLDER", set_active=True)
```

The adapter and its prediction head are called `{name}`. Layer norms are those of the backbone.
"""


def _describe(task: Leaving, anatomy: Anatomy, name: str) -> dict[str, Any]:
    return {
        "name": name,
        "model_name": task.base,
        "model_type": anatomy.family,
        "model_class": adapterhub.MODEL_CLASSES[anatomy.family],
        "hidden_size": anatomy.hidden_size,
        "version": adapterhub.VERSION,
    }


Written = tuple[dict[str, Any], dict[str, Tensor], list[str]]


def _write_bottleneck(task: Leaving, anatomy: Anatomy, name: str) -> Written:
    method, prefix = task.method, find_family(anatomy.family).prefix
    weights = {}
    for site, group in adapter_groups(anatomy, method).items():
        path = f"{prefix}.{adapterhub.locate_bottleneck(anatomy, site)}.adapters.{name}"
        adapter = {item: task.tensors[f"adapter.{group}.{item}"] for item in ("down", "down_bias", "up", "up_bias")}
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
    shared = "adapters that are one in Inlay are copies here: AdapterHub shares none"
    return config, weights, [] if method.sharing == "none" else [shared]


def _find_factor(width: int, size: int) -> float:
    """The reduction factor of which the library makes `size`: it takes the floor of width / factor."""
    if width % size == 0:
        return width // size
    factor = width / size
    while int(width // factor) < size:
        factor = math.nextafter(factor, 0)
    return factor


def _left_out(task: Leaving, anatomy: Anatomy) -> list[int]:
    return sorted(set(range(anatomy.num_layers)) - set(adapted_layers(anatomy, task.method)))


def _linear_config(task: Leaving, anatomy: Anatomy, known: Mapping[str, str]) -> dict[str, Any]:
    """The flags that say which linear layers are changed. `known` are those the library can, by its own flags."""
    linears = task.method.linears
    for linear in linears:
        if linear not in known:
            others = ",".join(name for name in linears if name in known) or next(iter(known))
            raise Unsupported(
                f"AdapterHub's {task.method.name} cannot change the linear layer `{linear}` as Inlay does",
                f"train it with `--set method.linears={others}`",
            )
    attention = [known[linear] for linear in linears if linear in adapterhub.ATTENTION_LINEARS.values()]
    return {
        **_LINEAR,
        "selfattn_lora": bool(attention),
        "attn_matrices": attention,
        "intermediate_lora": "expand" in linears,
        "output_lora": "contract" in linears,
        "leave_out": _left_out(task, anatomy),
    }


_ATTENTION = {ours: theirs for theirs, ours in adapterhub.ATTENTION_LINEARS.items()}


def _write_lora(task: Leaving, anatomy: Anatomy, name: str) -> Written:
    method, prefix = task.method, find_family(anatomy.family).prefix
    known = {**_ATTENTION, "expand": "intermediate_lora", "contract": "output_lora"}
    rank, scale = int(method.size or 0), 1.0 if method.scale is None else method.scale
    config = _linear_config(task, anatomy, known)
    config |= {"r": rank, "alpha": scale * rank, "composition_mode": "add", "init_weights": "lora"}
    weights = {}
    for site in adapted_linears(anatomy, method):
        weights[f"{prefix}.{site.path}.loras.{name}.lora_A"] = task.tensors[f"lora.{site.key}.down"].T
        weights[f"{prefix}.{site.path}.loras.{name}.lora_B"] = task.tensors[f"lora.{site.key}.up"].T
    return config, weights, []


def _write_ia3(task: Leaving, anatomy: Anatomy, name: str) -> Written:
    prefix = find_family(anatomy.family).prefix
    config = _linear_config(task, anatomy, {**_ATTENTION, "expand": "intermediate_lora"})
    config |= {"r": 1, "alpha": 1, "composition_mode": "scale", "init_weights": "ia3"}
    weights = {
        f"{prefix}.{site.path}.loras.{name}.lora_B": task.tensors[f"ia3.{site.key}"][:, None]
        for site in adapted_linears(anatomy, task.method)
    }
    return config, weights, []


_WRITERS = {
    "houlsby": _write_bottleneck,
    "pfeiffer": _write_bottleneck,
    "parallel": _write_bottleneck,
    "lora": _write_lora,
    "ia3": _write_ia3,
}


def _write_head(task: Leaving, name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    head = task.head
    types = {ours: theirs for theirs, ours in HEAD_KINDS.items()} | {"regress": "classification"}
    if head.kind not in types:
        raise Unsupported(f"a head of the kind `{head.kind}` in AdapterHub's format", f"it can be: {', '.join(types)}")
    if head.pooling == "mean" or head.features != "last":
        what = "pooling `mean`" if head.pooling == "mean" else f"features `{head.features}`"
        raise Unsupported(
            f"AdapterHub's heads have no {what}: they read the first token, or the pooler",
            "train it with `--set train.pooling=cls` and `--set train.features=last`",
        )
    out_weight, out_bias = fold_targets(task)
    weights, layers = {f"heads.{name}.1.weight": out_weight, f"heads.{name}.1.bias": out_bias}, 1
    if head.hidden != "none":
        weights = {f"heads.{name}.4.weight": out_weight, f"heads.{name}.4.bias": out_bias}
        weights |= {f"heads.{name}.1.{item}": task.tensors[f"head.hidden.{item}"] for item in ("weight", "bias")}
        layers = 2
    config = {
        "head_type": types[head.kind],
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
