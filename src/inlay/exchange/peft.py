"""Reading and writing of PEFT's folders: LoRA, DoRA, IA3 and LN tuning of `peft` 0.21, with the classifier's head.

`adapter_config.json` names the method, `adapter_model.safetensors` (or `.bin`) has the weights under the model's own
module names. The tensors show which modules are adapted, so lists, patterns and `all-linear` need no matching; of the
settings only those are read that change the maths: alpha, patterns of alpha, rsLoRA.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from inlay.data import KINDS
from inlay.errors import BadData, Unsupported, WrongBackbone
from inlay.exchange import adapterhub, foreign, to_adapterhub
from inlay.model import (
    CLASSIFIERS,
    DORA,
    FACTORS,
    LORA,
    NORMS,
    Anatomy,
    Backbone,
    HeadSpec,
    LinearSite,
    ResolvedMethod,
    adapted_linears,
    find_family,
    resolve_method,
    scales_input,
    trained_norms,
)
from inlay.model import head as head_part
from inlay.settings import MethodConfig

CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
VERSION = "0.21.2"
"""version of the library that this file is made for"""
ROOT = "base_model.model."
_MAGNITUDE = "lora_magnitude_vector"  # DoRA's
_MOST_LETTERS, _MOST_REPEATS = 200, 3
"""letters and repetitions of a pattern of module names"""

_COMMON: foreign.Neutral = {"fan_in_fan_out": ((False, None), "weights stored transposed")}
_NEUTRAL: dict[str, foreign.Neutral] = {
    "LORA": {
        **_COMMON,
        "bias": (("none", None), "trained biases of the backbone"),
        "use_qalora": ((False, None), "QALoRA's groups"),
        "lora_bias": ((False, None), "a bias in the update"),
        "layer_replication": ((None,), "layers of the backbone used several times"),
        "trainable_token_indices": ((None,), "trained token embeddings"),
        "target_parameters": ((None, []), "updates of bare parameters"),
        "alora_invocation_tokens": ((None,), "an update that begins at a token"),
        "arrow_config": ((None,), "routing between adapters"),
        "use_bdlora": ((None, False), "block-diagonal updates"),
        "kasa_config": ((None,), "KaSA's singular values"),
        "velora_config": ((None,), "VeLoRA"),
        "monteclora_config": ((None,), "Monte Carlo LoRA"),
    },
    "IA3": _COMMON,
    "LN_TUNING": {},
}


def read(folder: Path, backbone: Backbone) -> foreign.ForeignTask:
    """Read the task in a folder that `save_pretrained` of a PEFT model wrote."""
    config = foreign.read_json(folder / CONFIG)
    kind = str(config.get("peft_type"))
    if kind not in _READERS:
        raise Unsupported(f"PEFT's method `{kind}`", f"Inlay reads: {', '.join(_READERS)}")
    foreign.check_settings(config, _NEUTRAL[kind], folder / CONFIG, "train it")
    weights = foreign.read_weights(folder, WEIGHTS)
    locate = _PeftLocator(backbone.anatomy, weights)
    method, tensors = _READERS[kind](config, locate)
    head, head_tensors = _read_head(config, weights, backbone)
    weights.finish(backbone.anatomy.num_layers)
    whole, num_added = foreign.complete(backbone, method, tensors)
    note = f"{num_added} tensors are neutral: the folder adapts only some modules of its layers"
    return foreign.ForeignTask(
        method,
        head,
        {**whole, **head_tensors},
        (),
        f"peft {config.get('peft_version') or 'of an old version'}",
        str(config.get("base_model_name_or_path") or ""),
        (note,) if num_added else (),
    )


class _PeftLocator:
    """PEFT's names for the modules of one backbone."""

    def __init__(self, anatomy: Anatomy, weights: foreign.Weights) -> None:
        self.anatomy, self.weights = anatomy, weights
        family = find_family(anatomy.family)
        # Names in a bare encoder begin with its stack, or with `embeddings`; in a classifier with the family's prefix.
        starts = {f"{family.prefix}.": f"{family.prefix}.", f"{family.stack}.": "", "embeddings.": ""}
        known = [prefix for start, prefix in starts.items() for name in weights.left if name.startswith(ROOT + start)]
        if not known:
            raise WrongBackbone(
                f"{weights.path}: `{min(weights.left, default='nothing')}` is in no module of the backbone's family, "
                f"`{anatomy.family}`",
                "name the backbone it was trained on with `--backbone`",
            )
        self.prefix = known[0]

    def name(self, path: str, item: str) -> str:
        """Return the name of a tensor at a module."""
        return f"{ROOT}{self.prefix}{path}.{item}"

    def has(self, path: str, item: str) -> bool:
        return self.name(path, item) in self.weights.left

    def take(self, path: str, item: str, *shape: int | None) -> Tensor:
        return self.weights.take(self.name(path, item), *shape)

    def linears(self, item: str) -> list[LinearSite]:
        """Return the linear layers that have a tensor called `item`."""
        found = [site for site in self.anatomy.linears if self.has(site.path, item)]
        if not found:
            raise BadData(
                f"no `{item}` at any linear layer of the family `{self.anatomy.family}`",
                "name the backbone it was trained on with `--backbone`",
                path=self.weights.path,
            )
        return found


def _method_of(name: str, sites: list[LinearSite], anatomy: Anatomy) -> MethodConfig:
    """Return the settings of the method `name` at these linear layers."""
    names = tuple(dict.fromkeys(site.name for site in sorted(sites, key=lambda site: site.layer)))
    layers = foreign.name_layers([site.layer for site in sites], anatomy.num_layers)
    return MethodConfig(name=name, linears=names, layers=layers)


def _read_lora(config: Mapping[str, Any], locate: _PeftLocator) -> tuple[ResolvedMethod, dict[str, Tensor]]:
    """Read LoRA or DoRA as a method and a slot's tensors."""
    parts, sites = {}, locate.linears("lora_A.weight")
    for site in sites:
        down = locate.take(site.path, "lora_A.weight", None, site.in_width)
        up = locate.take(site.path, "lora_B.weight", site.out_width, down.shape[0])
        parts[site.key] = foreign.LowRank(down.T, up.T, _find_scale(config, locate.prefix + site.path, down.shape[0]))
    name, ours = ("dora", DORA) if config.get("use_dora") else ("lora", LORA)
    size, scale, tensors = foreign.join_low_ranks(parts, ours)
    for site in sites if ours is DORA else ():
        tensors[DORA.name(site.key, "magnitude")] = locate.take(site.path, _MAGNITUDE, site.out_width)
    return resolve_method(replace(_method_of(name, sites, locate.anatomy), size=size, alpha=scale * size)), tensors


def _find_scale(config: Mapping[str, Any], path: str, rank: int) -> float:
    """Return alpha / r, or alpha / √r in rsLoRA, with the alpha of the first pattern that fits the module's name."""
    patterns = config.get("alpha_pattern") or {}
    try:
        matching = [key for key in patterns if re.match(rf"(.*\.)?({_check_pattern(key)})$", path)]
    except (re.error, TypeError, RecursionError, OverflowError):
        reason = f"`alpha_pattern` is `{str(patterns)[:80]}`, which are not patterns of names"
        raise BadData(reason, "save the adapter again") from None
    default = foreign.read_number(config, "lora_alpha", 8)
    alpha = foreign.read_number(patterns, matching[0], default) if matching else default
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _check_pattern(key: str) -> str:
    """Return a pattern of names; refuse one that could be matched for ever, since it is a stranger's."""
    # Time is exponential only where something that repeats is repeated, and it grows with each repetition.
    num_repeats = len(re.findall(r"[*+{]", key))
    if len(key) > _MOST_LETTERS or num_repeats > _MOST_REPEATS or re.search(r"\)\s*[*+{]|\\[0-9gk]|\(\?", key):
        raise BadData(
            f"`alpha_pattern` has the pattern `{key[:80]}`, which may take for ever to match",
            "name the modules in it, as in `layer.0.attention.self.query`",
        )
    return key


def _read_ia3(config: Mapping[str, Any], locate: _PeftLocator) -> tuple[ResolvedMethod, dict[str, Tensor]]:
    """Read (IA)³ as a method and a slot's tensors."""
    tensors, sites = {}, locate.linears("ia3_l")
    for site in sites:
        is_input = len(locate.weights.left[locate.name(site.path, "ia3_l")]) == 1
        if is_input != scales_input(site):
            raise Unsupported(
                f"(IA)³ on the {'input' if is_input else 'output'} of `{site.path}`: Inlay multiplies the other side",
                "train it with the output projections, and only those, among `feedforward_modules`",
            )
        shape = (1, site.in_width) if is_input else (site.out_width, 1)
        tensors[FACTORS.name(site.key)] = locate.take(site.path, "ia3_l", *shape).flatten()
    return resolve_method(_method_of("ia3", sites, locate.anatomy)), tensors


def _read_norms(config: Mapping[str, Any], locate: _PeftLocator) -> tuple[ResolvedMethod, dict[str, Tensor]]:
    """Read trained layer norms as a method and a slot's tensors."""
    tensors, item = {}, "ln_tuning_layers"
    for norm in locate.anatomy.norms:
        if locate.has(norm.path, f"{item}.weight"):
            tensors[NORMS.name(norm.key, "scale")] = locate.take(norm.path, f"{item}.weight", norm.width)
            if norm.has_shift:
                tensors[NORMS.name(norm.key, "shift")] = locate.take(norm.path, f"{item}.bias", norm.width)
    has_outer = NORMS.name("embeddings", "scale") in tensors
    return resolve_method(MethodConfig(name="norms", norms="all" if has_outer else "encoder")), tensors


_READERS: dict[str, Callable[[Mapping[str, Any], _PeftLocator], tuple[ResolvedMethod, dict[str, Tensor]]]] = {
    "LORA": _read_lora,
    "IA3": _read_ia3,
    "LN_TUNING": _read_norms,
}


def _read_head(
    config: Mapping[str, Any], weights: foreign.Weights, backbone: Backbone
) -> tuple[HeadSpec, dict[str, Tensor]]:
    """Read the classifier that was saved with the adapter."""
    if not any(name.startswith(f"{ROOT}classifier.") for name in weights.left):
        raise Unsupported(
            f"`{weights.path}` holds an adapter without a classifier, which cannot answer",
            "train it with task_type='SEQ_CLS', which saves the classifier too",
        )
    # The head of a token classifier has the same name and shape, and must not be read as one for whole texts.
    model_class = str((config.get("auto_mapping") or {}).get("base_model_class"))
    if config.get("task_type") != "SEQ_CLS" and not model_class.endswith("ForSequenceClassification"):
        raise Unsupported(
            f"the `task_type` `{config.get('task_type')}`, which does not say that the head classifies whole texts",
            "train it with task_type='SEQ_CLS'; if it does, set that in the folder's adapter_config.json",
        )
    foreign.check_classifier("AutoModelForSequenceClassification", backbone)
    return foreign.take_classifier(weights, backbone, ROOT)


_README = """A task of Inlay as an adapter of the `peft` library (written against 0.21.2).

```python
from peft import PeftModel
from transformers import AutoModelForSequenceClassification

base = AutoModelForSequenceClassification.from_pretrained("{base}", num_labels={num_labels})
model = PeftModel.from_pretrained(base, "THIS FOLDER")
```

Labels in order: {labels}
{temperature}"""


def write(task: foreign.TaskToExport, anatomy: Anatomy) -> foreign.ExportedFiles:
    """Return the folder's files; refuse a version that PEFT cannot express, with the reason and what to do."""
    from safetensors.torch import save

    _refuse_obstacles(task, anatomy)
    config, weights = _WRITERS[task.method.name](task, anatomy)
    modules, head = _write_head(task, anatomy)
    config |= {
        "base_model_name_or_path": task.base,
        "task_type": "SEQ_CLS",
        "inference_mode": True,
        "modules_to_save": modules,
        "peft_version": VERSION,
        "auto_mapping": None,
    }
    plain = {f"{ROOT}{name}": tensor.contiguous().clone() for name, tensor in {**weights, **head}.items()}
    readme = _README.format(
        base=task.base,
        num_labels=task.head.num_outputs,
        labels=", ".join(task.labels) or "none: it gives a number",
        temperature=foreign.describe_decisions(task.head),
    )
    content = save(plain, {"format": "pt"})
    return foreign.ExportedFiles({CONFIG: foreign.dump_json(config), WEIGHTS[0]: content, "README.md": readme.encode()})


def _refuse_obstacles(task: foreign.TaskToExport, anatomy: Anatomy) -> None:
    """Refuse a version that PEFT cannot express, with all reasons, and name AdapterHub's format if that can."""
    method = task.method
    obstacles: list[foreign.Obstacle] = []
    if method.name not in _WRITERS:
        reason = f"PEFT has no method like `{method.name}`: it has {', '.join(_WRITERS)}"
        obstacles.append(foreign.Obstacle(reason, "--method lora"))
    elif method.name != "norms" and method.norms != "none":
        reason = f"PEFT's {method.name} trains no layer norms; this task has `norms` `{method.norms}`"
        obstacles.append(foreign.Obstacle(reason, "--set method.norms=none"))
    obstacles += _head_obstacles(task.head, anatomy)
    has_model = anatomy.family in adapterhub.MODEL_CLASSES and method.name in to_adapterhub.WRITERS
    formats = ("adapterhub", "inlay") if has_model else ("inlay",)
    needs_other = method.name not in _WRITERS or any(obstacle.options is None for obstacle in obstacles)
    foreign.refuse(obstacles, formats=formats if needs_other else ())


def _head_obstacles(head: HeadSpec, anatomy: Anatomy) -> list[foreign.Obstacle]:
    """List why a head cannot be exported: it must be like that of transformers' own classifier."""
    form, keeps = CLASSIFIERS[anatomy.family], "PEFT keeps the head of transformers' own classifier"
    if isinstance(form, str):
        return [foreign.Obstacle(f"{keeps}, which in the family `{anatomy.family}` has {form}")]
    if KINDS[head.kind].head_type is None:
        return [foreign.Obstacle(f"{keeps}, which has no kind `{head.kind}`")]
    found = []
    pooling = "cls" if form.hidden or head.hidden != "none" else "pooler"
    if head.pooling != pooling:
        reads = "the first token" if pooling == "cls" else "the pooler"
        reason = f"{keeps}, which reads {reads}; this one has pooling `{head.pooling}`"
        # A pooler trained with the task will do, also if the backbone's own was never trained.
        found.append(foreign.Obstacle(reason, "--set train.hidden=pooler" if pooling == "pooler" else "--pooling cls"))
    if form.hidden and head.hidden == "none":
        reason = f"{keeps}, which in the family `{anatomy.family}` has a tanh layer; this one has none"
        found.append(foreign.Obstacle(reason, "--set train.hidden=tanh"))
    if head.has_towers:
        reason = f"{keeps}, which reads one text, or a pair as one; this one reads its texts apart (towers)"
        found.append(foreign.Obstacle(reason, "--set data.pairs=joined"))
    if head.features != "last":
        reason = f"{keeps}, which reads the last layer; this one has features `{head.features}`"
        found.append(foreign.Obstacle(reason, "--set train.features=last"))
    return found


Written = tuple[dict[str, Any], dict[str, Tensor]]
"""config and weights"""


def _write_lora(task: foreign.TaskToExport, anatomy: Anatomy) -> Written:
    """Return config and weights of LoRA or DoRA."""
    method, prefix = task.method, find_family(anatomy.family).prefix
    rank, scale = int(method.size or 0), 1.0 if method.scale is None else method.scale
    alpha, weights = scale * rank, {}
    sites = adapted_linears(anatomy, method)
    ours = DORA if method.name == "dora" else LORA
    for site in sites:
        weights[f"{prefix}.{site.path}.lora_A.weight"] = task.tensors[ours.name(site.key, "down")].T
        weights[f"{prefix}.{site.path}.lora_B.weight"] = task.tensors[ours.name(site.key, "up")].T
        if ours is DORA:
            weights[f"{prefix}.{site.path}.{_MAGNITUDE}"] = task.tensors[DORA.name(site.key, "magnitude")]
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": int(alpha) if alpha == int(alpha) else alpha}
    config |= {"target_modules": [f"{prefix}.{site.path}" for site in sites], "lora_dropout": 0.0, "bias": "none"}
    if ours is DORA:
        config["use_dora"] = True
    return config, weights


def _write_ia3(task: foreign.TaskToExport, anatomy: Anatomy) -> Written:
    prefix, sites = find_family(anatomy.family).prefix, adapted_linears(anatomy, task.method)
    weights = {}
    for site in sites:
        vector = task.tensors[FACTORS.name(site.key)]
        weights[f"{prefix}.{site.path}.ia3_l"] = vector[None] if scales_input(site) else vector[:, None]
    wide = [f"{prefix}.{site.path}" for site in sites if scales_input(site)]
    config = {"peft_type": "IA3", "target_modules": [f"{prefix}.{site.path}" for site in sites]}
    return {**config, "feedforward_modules": wide, "fan_in_fan_out": False}, weights


def _write_norms(task: foreign.TaskToExport, anatomy: Anatomy) -> Written:
    prefix, weights, targets = find_family(anatomy.family).prefix, {}, []
    for norm in trained_norms(anatomy, task.method):
        targets.append(f"{prefix}.{norm.path}")
        for ours, theirs in {"scale": "weight", **({"shift": "bias"} if norm.has_shift else {})}.items():
            weights[f"{prefix}.{norm.path}.ln_tuning_layers.{theirs}"] = task.tensors[NORMS.name(norm.key, ours)]
    return {"peft_type": "LN_TUNING", "target_modules": targets}, weights


_WRITERS = {"lora": _write_lora, "dora": _write_lora, "ia3": _write_ia3, "norms": _write_norms}


def _write_head(task: foreign.TaskToExport, anatomy: Anatomy) -> tuple[list[str], dict[str, Tensor]]:
    """Return the modules to save, and their tensors."""
    head, form, family = task.head, CLASSIFIERS[anatomy.family], find_family(anatomy.family)
    assert not isinstance(form, str), "refused before"
    hidden = form.hidden or f"{family.prefix}.{family.pooler}.dense"
    out_weight, out_bias = foreign.fold_targets(task)
    weights = {f"{form.out}.weight": out_weight, f"{form.out}.bias": out_bias}
    if head.hidden == "none":
        return ["classifier"], weights
    weights[f"{hidden}.weight"] = task.tensors[head_part.HIDDEN_WEIGHT]
    weights[f"{hidden}.bias"] = task.tensors[head_part.HIDDEN_BIAS]
    return ["classifier"] if form.hidden else ["classifier", str(family.pooler)], weights
