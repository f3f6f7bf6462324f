"""Presets: the published recipes, as settings by name.

`--preset houlsby2019` sets everything that paper fixes; what is given besides overrides it. A preset is not stored: it
expands to settings, and those are. Where a paper and its code differ, the preset follows the paper and a variant the
code; the preset's notes say what a source leaves open and what is doubtful in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from inlay.errors import UnknownName
from inlay.settings.run_config import RunConfig, overlay


@dataclass(frozen=True)
class Preset:
    """A published recipe: one row of `PRESETS`."""

    summary: str
    settings: Mapping[str, Any]
    """config key -> value"""
    notes: tuple[str, ...] = ()


# Batches are drawn from all rows (bucket 1), and the head reads BERT's own pooler, frozen where BERT is.
_BERT = {
    "train.batch_size": 32,
    "train.max_length": 128,
    "train.bucket": 1,
    "train.pooling": "pooler",
    "train.dropout": 0.1,
    "train.attention_dropout": 0.1,
    "train.head_dropout": 0.1,
    "train.warmup": 0.1,
}
_HOULSBY = _BERT | {
    "method.name": "houlsby",
    "method.size": 64,
    "method.init_std": 1e-2,
    "method.activation": "gelu",
    "method.norms": "all",
    "train.optimizer": "bert-adam",
    "train.schedule": "bert",
    "train.weight_decay": 0.01,
    "train.clip_norm": 1.0,
    "train.lr": 3e-4,
    "train.epochs": 20,
}
_HOULSBY_NOTES = (
    "the paper swept lr, epochs and size: `inlay sweep --preset houlsby2019 --lr 3e-5,3e-4,3e-3 --epochs 3,20 "
    "--size 8,64,256 --seeds 5` is its grid for GLUE on BERT-large; the preset has the middle of it",
)
_TF_ADAPTER_BERT = _BERT | {
    "method.name": "houlsby",
    "method.size": 64,
    "method.init_std": 1e-3,
    "method.activation": "gelu",
    "train.optimizer": "adamw",
    "train.schedule": "linear",
    "train.weight_decay": 0.0,
    "train.clip_norm": 0.0,
    "train.lr": 3e-4,
    "train.epochs": 10,
}
_TF_NOTES = (
    "for the report's additional tasks: `--lr 1e-4 --epochs 50`",
    "its code has epsilon 1e-6 where `adamw` has 1e-8",
)
_ADAPTERHUB = {
    "method.norms": "none",
    "method.size": 48,
    "method.init_std": 0.02,
    "train.optimizer": "adamw",
    "train.schedule": "linear",
    "train.warmup": 0.0,
    "train.weight_decay": 0.0,
    "train.clip_norm": 1.0,
    "train.lr": 1e-4,
    "train.epochs": 10,
    "train.batch_size": 32,
    "train.max_length": 128,
    "train.pooling": "cls",
    "train.hidden": "tanh",
    "train.bucket": 1,
}
_ADAPTERHUB_NOTES = (
    "layer norms stay frozen, since AdapterHub's format cannot hold trained ones: so `inlay export` can write it",
    "size 48 is a sixteenth of BERT-base's width, the library's default; on another backbone set `--size`",
)
_MAHABADI_STEPS = 2**18
_MAHABADI = {
    "method.name": "hyperformer++",
    "method.size": 24,
    "train.optimizer": "adamw",
    "train.schedule": "linear",
    "train.warmup": 500 / _MAHABADI_STEPS,
    "train.weight_decay": 0.0,
    "train.lr": 3e-4,
    "train.epochs": 64,
    "train.batch_size": 32,
    "train.max_length": 128,
    "train.attention_dropout": 0.1,
    "joint.sampling": "temperature",
    "joint.temperature": 10.0,
    "joint.batches": "homogeneous",
    "joint.steps": _MAHABADI_STEPS,
}
_PALS = _BERT | {
    "method.name": "pal-published",
    "train.optimizer": "bert-adam",
    "train.schedule": "bert",
    "train.weight_decay": 0.01,
    "train.clip_norm": 1.0,
    "train.lr": 2e-5,
    "train.epochs": 25,
    "joint.sampling": "annealed",
    "joint.batches": "homogeneous",
    "joint.steps": 25 * 2400,
}

PRESETS: dict[str, Preset] = {
    "houlsby2019": Preset("Houlsby et al. 2019, as the paper has it (init 1e-2)", _HOULSBY, _HOULSBY_NOTES),
    "houlsby2019-code": Preset(
        "google-research/adapter-bert, as its code has it (init 1e-3)",
        _HOULSBY | {"method.init_std": 1e-3},
        _HOULSBY_NOTES,
    ),
    "uva2019": Preset(
        "the student reproduction on BERT-base: adapter-bert's code, lr 2e-5, 15 epochs",
        _HOULSBY | {"method.init_std": 1e-3, "train.lr": 2e-5, "train.epochs": 15},
        ("it prints 2,379,264 trainable parameters, which are the adapters alone; layer norms and head train too",),
    ),
    "tf-adapter-bert-within-layer": Preset(
        "TF-Adapter-BERT's 'Houlsby': the two adapters of a layer are one",
        _TF_ADAPTER_BERT | {"method.sharing": "within-layer", "method.norms": "none"},
        (
            "the report counts no layer norms (1,189,632), its code trains the encoder's: `--set method.norms=encoder`",
            *_TF_NOTES,
        ),
    ),
    "tf-adapter-bert-none": Preset(
        "TF-Adapter-BERT's 'not shared': encoder norms and a hidden tanh layer are trained too",
        _TF_ADAPTER_BERT
        | {"method.sharing": "none", "method.norms": "encoder", "train.pooling": "cls", "train.hidden": "tanh"},
        (
            "the report does not say what the hidden layer reads: here the first token, in the pooler's place; a "
            "trained pooler, `--set train.hidden=pooler`, has the same count",
            *_TF_NOTES,
        ),
    ),
    "tf-adapter-bert-every-3": Preset(
        "TF-Adapter-BERT's '3-shared': one adapter for all six places of three layers",
        _TF_ADAPTER_BERT | {"method.sharing": "every-3", "method.norms": "none"},
        _TF_NOTES,
    ),
    "adapterhub-houlsby": Preset(
        "AdapterHub's `double_seq_bn`: swish, frozen norms, a two-layer head; for `inlay export`",
        _ADAPTERHUB | {"method.name": "houlsby", "method.activation": "swish"},
        _ADAPTERHUB_NOTES,
    ),
    "adapterhub-pfeiffer": Preset(
        "AdapterHub's `seq_bn`: one relu adapter a layer, frozen norms, a two-layer head; for `inlay export`",
        _ADAPTERHUB | {"method.name": "pfeiffer", "method.activation": "relu"},
        _ADAPTERHUB_NOTES,
    ),
    "mahabadi2021": Preset(
        "Mahabadi et al. 2021: HyperFormer++ on T5, several tasks as one run; for `inlay multitask`",
        _MAHABADI,
        (
            "warm-up is 500 steps of 262,144: with other `--steps`, set `train.warmup` to 500 divided by them",
            "size 24 is a 32nd of T5-base's width; for T5-small `--size 16`, and a 16th was tried too",
            "the paper's other rows: `--method hyperformer`, `--method mahabadi-multi`; for `full-multi` add "
            "`--set method.size=none`",
            "the paper's label smoothing of 0.1 is the default on text-to-text backbones, so the preset works for "
            "encoders too; they need a smaller rate, `--lr 1e-4`",
            "the number of times dev rows are scored, 64, is our choice",
        ),
    ),
    "stickland2019": Preset(
        "Stickland & Murray 2019: PALs beside one fine-tuned BERT-base, annealed sampling; for `inlay multitask`",
        _PALS,
        (
            "60,000 steps is the code's number for GLUE's eight tasks: an epoch has 300 steps for each of them",
            "optimizer, schedule, weight decay and dropout are those of its code: BERT's own; the code clips the "
            "gradient of each tensor, Inlay that of the whole run",
            "the pooler is one for all tasks, trained with the rest of BERT",
        ),
    ),
}


def find_preset(name: str) -> Preset:
    """Return the preset of a name."""
    if name not in PRESETS:
        raise UnknownName("preset", name, PRESETS)
    return PRESETS[name]


def apply_preset(name: str, config: RunConfig) -> RunConfig:
    """Return a copy of `config` with a preset's settings laid over it."""
    tree: dict[str, dict[str, Any]] = {}
    for key, value in find_preset(name).settings.items():
        section, _, setting = key.partition(".")
        tree.setdefault(section, {})[setting] = value
    return overlay(config, tree)
