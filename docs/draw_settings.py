"""Writes docs/settings.md from the config's own fields and the table of methods: `python docs/draw_settings.py`."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from inlay.model.backbone.families import FAMILIES
from inlay.model.bank.methods import JOINT_METHODS, METHODS, Method
from inlay.settings import DataConfig, JointConfig, MethodConfig, TrainConfig

SECTIONS = {
    "method": (
        MethodConfig,
        "Which parameters a task adds. What is `auto`, empty or not set is the method's own choice.",
    ),
    "train": (TrainConfig, "How a run is trained."),
    "joint": (JointConfig, "How several tasks are trained as one run (`inlay multitask`)."),
    "data": (
        DataConfig,
        "Where rows are and how they are read. In a run of several tasks these are the settings of all tasks; "
        "`--set data.NAME.dev=dev.csv`, or `[data.NAME]` in the file, sets one task's.",
    ),
}


def main() -> None:
    Path(__file__).with_name("settings.md").write_text(render(), encoding="utf8")


def render() -> str:
    """Return the page as Markdown."""
    lines = [
        "# Settings",
        "",
        "Every setting of a run. There are three ways to give one: `--set SECTION.NAME=VALUE`, such as "
        "`--set method.sharing=every-3`; a TOML file with `--config`; or by name in Python, "
        '`make_run(task, backbone, sharing="every-3")`. This page is written by `python docs/draw_settings.py` '
        "from the code, and a test holds it true.",
        "",
    ]
    for section, (kind, about) in SECTIONS.items():
        lines += [f"## {section}", "", about, "", "| setting | default | |", "|---|---|---|"]
        for item in dataclasses.fields(kind):
            choices = item.metadata["choices"]
            text = item.metadata["help"].replace("|", "\\|")
            extra = f"; one of {', '.join(f'`{choice}`' for choice in choices)}" if choices else ""
            lines.append(f"| `{section}.{item.name}` | {show(item.default)} | {text}{extra} |")
        lines.append("")
    for title, methods in {"Methods": METHODS, "Methods that train several tasks as one run": JOINT_METHODS}.items():
        lines += [f"## {title}", "", "| method | | size | lr | takes |", "|---|---|---|---|---|"]
        for name, method in methods.items():
            takes = ", ".join(f"`{setting}`" for setting in sorted(method.settings)) or "nothing"
            lines.append(f"| `{name}` | {method.summary} | {method.size or '–'} | {show_lr(method)} | {takes} |")
        lines.append("")
    names = ", ".join(f"`{name}`" for name in FAMILIES["bert"].linears)
    lines += [
        "## Notes",
        "",
        "Some methods have another learning rate on text-to-text backbones (T5). Some have another where only what a "
        "task has of its own is trained (`joint.trained` `task`): an embedding begins with numbers of size one, and "
        "would hardly move at the rate of weights.",
        "",
        "At the start an adapter adds next to nothing. The exception is a layer norm behind it (`mahabadi`, "
        "`mahabadi-multi`, `method.inner_norm` `output`). On T5 that norm begins with a scale of one, as published. "
        "Next to T5's states that is little: flan-T5-small's scores of words change by 2%.",
        "",
        "An encoder's states are smaller, and a scale of one would drown them. There such a norm begins so that "
        "MiniLM's last states change by a tenth. So do those that `hyperformer++` writes. `hyperformer` adds hardly "
        "anything anywhere.",
        "",
        "`method.layers` is written as Python slices are: `all`, `6:` (from the seventh on), `-3:` (the last three), "
        "`2:5`, `0,2,5`. Layers are counted from 0; on T5, those of the encoder and then those of the decoder.",
        "",
        f"`method.linears` names linear layers of a block: {names}. `project` ends the attention; `expand` and "
        "`contract` are the feed-forward layers.",
        "",
        "On T5 a number (`regress`) is written in steps of 0.2, as published for STS-B. Where all targets lie within 2 "
        "the step is 0.02, and so on. In a run of several tasks `train.beams` and `train.max_answer` belong to those "
        "whose answers are free texts.",
        "",
    ]
    return "\n".join(lines)


def show_lr(method: Method) -> str:
    """Return the default learning rate, and where another one holds."""
    others = {"T5": method.lr_writing, "`trained=task`": method.lr_alone}
    given = [f"{where}: {lr:g}" for where, lr in others.items() if lr is not None]
    return f"{method.lr:g}" + (f" ({', '.join(given)})" if given else "")


def show(value: object) -> str:
    if value is None or value in ("", ()):
        return "–"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


if __name__ == "__main__":
    main()
