"""`inlay presets`: lists the published recipes."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from inlay.cli import screen
from inlay.cli.flags import JsonOption
from inlay.cli.screen import Column
from inlay.settings import PRESETS, find_preset


def presets(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="show all settings of this preset")] = None,
    json: JsonOption = False,
) -> None:
    """List the presets and what each sets.

    `inlay train DATA --preset NAME` uses one; other options override its settings.
    """
    if json:
        chosen = PRESETS if name is None else {name: find_preset(name)}
        screen.emit_json({key: dataclasses.asdict(preset) for key, preset in chosen.items()})
    elif name is None:
        rows = [[key, preset.summary] for key, preset in PRESETS.items()]
        screen.emit_table(["preset", Column("what it is", is_flexible=True)], rows)
        screen.log()
        screen.log("`inlay presets NAME` shows what one sets, and why", "dim")
    else:
        preset = find_preset(name)
        screen.emit(preset.summary)
        screen.emit()
        values = preset.settings.items()
        screen.emit_pairs({key: f"{value:g}" if isinstance(value, float) else value for key, value in values})
        for note in preset.notes:
            screen.emit()
            screen.emit(note)
