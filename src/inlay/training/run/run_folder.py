"""The folder of a run, `runs/<id>/`: its settings, metrics, weights and result, written and read back.

It has `config.toml`, `fingerprint` (of the backbone), `rows.digest` (of the data), `metrics.jsonl` (a line per epoch),
`curve.png`, `best.safetensors`, `last.safetensors`, `probe.safetensors` (the head it began with, if that is a linear
probe), and `result.json`, which is written last: a folder that has one is a finished run. For a run of several tasks,
`tasks/` has the settings of each and the digest of its rows. `report.html` and `card.md` are added to a folder that is
finished.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from torch import Tensor

from inlay.data import use_whole_paths
from inlay.errors import Missing, StoreDamaged
from inlay.settings import RunConfig, write_toml
from inlay.store import write_atomically
from inlay.training.run.checked_files import Checked, read_checked, seal, unseal
from inlay.training.run.run import AnyRun, Result

JOINT_TASKS = "tasks"
"""The folder inside a multi-task run's folder with the settings of each task."""
DIGEST = ".digest"
"""The suffix of the file beside a task's settings that holds the digest of its rows."""
WEIGHTS = "best.safetensors"
PROBE_HEAD = "probe.safetensors"
"""The file with the head that a run began with, if that was a linear probe."""
_FINGERPRINT = "fingerprint"
_ROWS = f"rows{DIGEST}"
"""The file with the digest of a run's rows; several tasks have one each in `tasks/`."""


def write_start(folder: Path, run: AnyRun) -> None:
    """Write a run's settings to its folder before its first step; for several tasks, each task's too."""
    folder.mkdir(parents=True, exist_ok=True)
    if run.parts != (run,):
        (folder / JOINT_TASKS).mkdir(exist_ok=True)
        for number, part in enumerate(run.parts):
            path = folder / JOINT_TASKS / f"{number:03}-{part.name}.toml"
            write_atomically(path, write_toml(_keep_settings(part.config)).encode())
            write_atomically(path.with_suffix(DIGEST), f"{part.task.digest}\n".encode())
    else:
        write_atomically(folder / _ROWS, f"{run.parts[0].task.digest}\n".encode())
    write_atomically(folder / "config.toml", write_toml(_keep_settings(run.config)).encode())
    # The backbone's name in the settings is a path or an alias; the fingerprint says which weights it meant.
    write_atomically(folder / _FINGERPRINT, f"{run.parts[0].fingerprint}\n".encode())


def _keep_settings(config: RunConfig) -> RunConfig:
    """Return settings as they are kept: the data is found from any folder, and no secret of a link is in them."""
    return dataclasses.replace(config, data=use_whole_paths(config.data))


def read_fingerprint(folder: Path) -> str:
    """Read the fingerprint of the backbone a run was trained on; "" in folders from before it was written."""
    path = folder / _FINGERPRINT
    return path.read_text(encoding="utf8").strip() if path.is_file() else ""


def write_history(folder: Path, history: list[dict[str, Any]]) -> None:
    """Write the metrics file, a line per epoch. It is written whole, so that a resumed run never repeats a line."""
    write_atomically(folder / "metrics.jsonl", "".join(json.dumps(line) + "\n" for line in history).encode())


def write_result(folder: Path, result: Result, weights: str = "") -> None:
    """Write the result, which marks a finished run: everything else is on disk before it, the `weights` too."""
    content = {
        "run": result.run_id,
        "status": result.status,
        "best_epoch": result.best_epoch,
        "dev_metric": result.dev_metric,
        "seconds": result.seconds,
        "peak_memory_bytes": result.peak_memory_bytes,
        "message": result.message,
        "history": result.history,
        "weights": weights,
    }
    write_atomically(folder / "result.json", seal(content))


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read the tensors in a file of a run's folder; empty if it is not there. Refuse one that changed since."""
    return _read_weights(path).tensors


def _read_weights(path: Path) -> Checked:
    try:
        return read_checked(path)
    except FileNotFoundError:  # dropped, perhaps just now by another process; or there never was one
        return Checked({}, "", "")
    except ValueError as error:
        raise damaged(path, str(error)) from None


def is_finished(folder: Path) -> bool:
    """Tell whether a run's folder has its result, which is written last."""
    return (folder / "result.json").is_file()


def read_result(folder: Path) -> Result | None:
    """Read the result of a finished run; None if it is not finished. Refuse files that changed since."""
    if not is_finished(folder):
        return None
    path, found = folder / "result.json", _read_weights(folder / WEIGHTS)
    try:
        content = unseal(path.read_bytes())
        weights = content.pop("weights", "")
        known = {name: content[name] for name in content if name != "run"}
        result = Result(run_id=content["run"], tensors=found.tensors, folder=folder, **known)
    except ValueError as error:
        raise damaged(path, str(error)) from None
    except (KeyError, TypeError):
        raise damaged(path, "not what a finished run writes") from None
    if found.tensors and weights not in ("", found.checksum):
        raise damaged(folder / WEIGHTS, f"these are not the weights that `{path.name}` is about")
    return result


def damaged(path: Path, reason: str) -> StoreDamaged:
    """Return the error for a run's file that changed since the run wrote it."""
    # A folder with a result is not trained again, so the folder has to go first.
    return StoreDamaged(
        f"{path}: {reason}", f"restore it from a copy, or delete `{path.parent}` and train the run again"
    )


def read_finished(folder: Path) -> Result:
    """Read the result of a finished run, with its weights; refuse a folder without them."""
    result = read_result(folder)
    if result is None or not result.tensors:
        raise Missing(f"no trained weights in `{folder}`", "give the folder of a run that finished (runs/<id>)")
    return result
