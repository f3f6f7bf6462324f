"""The resume state of a cohort: everything that decides its next step, in one file written whole or not at all.

Weights, moments, random generators, data cursors, best weights so far, who is in which slot and who waits. Only
safetensors and JSON, never pickle. The state and the membership carry checksums; the state before the last stays beside
it, for the case that the last is damaged.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from inlay.errors import StoreDamaged
from inlay.settings import digest
from inlay.store import write_atomically
from inlay.training.cohort.cohort import Cohort, CohortSettings, Parked
from inlay.training.cohort.member import AnyMember, Progress
from inlay.training.run.checked_files import read_checked, read_text, seal, unseal, write_tensors
from inlay.training.run.run import AnyRun

_STATE, _PREVIOUS, _MEMBERSHIP = "state.safetensors", "previous.safetensors", "cohort.json"


def cohort_id(runs: list[AnyRun]) -> str:
    """Return the name of the folder with these runs' resume state; the same runs find it again."""
    return digest([run.id for run in runs])[:16]


def write_membership(folder: Path, runs: list[AnyRun], settings: CohortSettings, fallbacks: list[str]) -> None:
    """Write the cohort's runs and settings before the first step.

    `fallbacks` are notes on settings that were made smaller because memory ran out.
    """
    content = {"runs": [run.id for run in runs], **dataclasses.asdict(settings), "fallbacks": fallbacks}
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / _MEMBERSHIP, seal(content))


@dataclass(frozen=True)
class Stopped:
    """A cohort that was stopped: its runs in the order they get slots, some perhaps ended, and its settings."""

    runs: list[AnyRun]
    settings: CohortSettings
    fallbacks: list[str]


def find_stopped(folder: Path, runs: Sequence[AnyRun], unfinished: Sequence[AnyRun]) -> Stopped | None:
    """Find the stopped cohort under `folder` that consists of some of `runs` and has every unfinished one."""
    known, wanted = {run.id: run for run in runs}, {run.id for run in unfinished}
    for _, content in _read_memberships(folder):
        if wanted <= set(content["runs"]) <= known.keys():
            names = {field.name for field in dataclasses.fields(CohortSettings)}
            settings = CohortSettings(**{name: content[name] for name in names & content.keys()})
            return Stopped([known[run_id] for run_id in content["runs"]], settings, content.get("fallbacks", []))
    return None


def list_stopped(folder: Path) -> list[list[str]]:
    """Return the run ids of every cohort under `folder` that has a resume state."""
    return [content["runs"] for _, content in _read_memberships(folder)]


def _read_memberships(folder: Path) -> list[tuple[Path, dict[str, Any]]]:
    """Read the membership of every cohort under `folder` that has a resume state, with the cohort's own folder.

    One that cannot be read is left out: it must not stop the others.
    """
    read = [(state.parent, _read_membership(state.parent)) for state in sorted(folder.glob(f"*/{_STATE}"))]
    return [(cohort_dir, content) for cohort_dir, content in read if content is not None]


def _read_membership(cohort_dir: Path) -> dict[str, Any] | None:
    """Read a cohort's membership, from its resume state where its own file is damaged; None if neither tells."""
    readers = (
        lambda: unseal((cohort_dir / _MEMBERSHIP).read_bytes()),
        lambda: json.loads(read_text(cohort_dir / _STATE))["membership"],
    )
    for read in readers:
        with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            content = read()
            if _is_membership(content):
                return content
    return None


def _is_membership(content: Any) -> bool:
    if not isinstance(content, dict) or not isinstance(content.get("runs"), list):
        return False
    known = [content[item.name] for item in dataclasses.fields(CohortSettings) if item.name in content]
    needed = {item.name for item in dataclasses.fields(CohortSettings) if item.default is dataclasses.MISSING}
    return (
        needed <= content.keys()
        and all(isinstance(run_id, str) for run_id in content["runs"])
        and all(value is None or isinstance(value, int) for value in known)
        and all(isinstance(said, str) for said in content.get("fallbacks", []))
    )


def has_state(folder: Path) -> bool:
    """Tell whether a cohort has a resume state."""
    return (folder / _STATE).is_file()


def save_state(folder: Path, cohort: Cohort) -> None:
    """Write the resume state: runs in their slots, then those that lost theirs. The state before it is kept too."""
    tensors: dict[str, Tensor] = {"rng/cpu": torch.get_rng_state()}
    if cohort.backbone.device.type == "cuda":
        tensors["rng/cuda"] = torch.cuda.get_rng_state(cohort.backbone.device)
    parked = cohort.queue.parked
    for name, stored_SP in cohort.stored.items():
        waiting = [item.rows[name].unsqueeze(0) for item in parked]
        tensors[name] = torch.cat([stored_SP.cpu(), *waiting]) if waiting else stored_SP.cpu()
    begun: list[AnyMember | Parked] = [*cohort.members, *parked]
    for row, item in enumerate(begun):
        for name, tensor in item.best_tensors.items():
            tensors[f"best/{row}/{name}"] = tensor
    state = {
        "num_steps": cohort.num_steps,
        "seconds": cohort.seconds,
        "left_steps": cohort.left_steps,
        "num_begun": cohort.queue.num_begun,
        "num_slots": cohort.num_seats,
        "runs": [item.run.id for item in begun],
        "run_steps": [*map(cohort.counts, range(cohort.num_seats)), *(item.num_steps for item in parked)],
        "progress": [dataclasses.asdict(item.progress) for item in begun],
        "membership": {"runs": [run.id for run in cohort.queue.runs], **dataclasses.asdict(cohort.settings)},
    }
    # A second name for the last state, so that no room is needed for three of them.
    (folder / _PREVIOUS).unlink(missing_ok=True)
    with suppress(OSError):  # there is none yet, or the file system has no second names
        os.link(folder / _STATE, folder / _PREVIOUS)
    write_tensors(folder / _STATE, tensors, json.dumps(state))


def mend_state(folder: Path, run_ids: Collection[str]) -> str:
    """Put the state before the last in the place of a damaged one, or remove both if that one is damaged too.

    Return a note on what was done; "" if the state's checksum holds.
    """
    try:
        _read_state(folder / _STATE, run_ids)
        return ""
    except StoreDamaged as error:
        reason = error.message
    try:
        _read_state(folder / _PREVIOUS, run_ids)
    except StoreDamaged:
        drop_state(folder)
        return f"{reason}; its runs start again"
    os.replace(folder / _PREVIOUS, folder / _STATE)
    return f"{reason}; its runs go on from the state before it"


def _read_state(path: Path, run_ids: Collection[str]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read a resume state of some of these runs: what it says, and its tensors. Refuse one that is damaged."""
    try:
        found = read_checked(path)
        state = json.loads(found.text)
        for run_id, progress in zip(state["runs"], state["progress"], strict=True):
            progress.setdefault("top_metric", progress.get("best_metric"))  # states from before there was a top score
            Progress(**progress)
            if run_id not in run_ids:
                raise ValueError(f"`{run_id}` is not one of its runs")
        wanted = {"num_steps", "seconds", "left_steps", "num_begun", "num_slots", "run_steps"}
        if not wanted <= state.keys() or "rng/cpu" not in found.tensors:
            raise ValueError("a part of it is missing")
    except (OSError, KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise StoreDamaged(
            f"the resume state `{path}` cannot be read: {error}", "start again with `--restart`"
        ) from None
    return state, found.tensors


def load_state(folder: Path, cohort: Cohort) -> None:
    """Put a fresh cohort of the same runs where the state left off, random generators included.

    The cohort may have fewer slots than it had: runs that have not ended get them first, the others wait.
    """
    known = {run.id: run for run in cohort.queue.runs}
    state, tensors = _read_state(folder / _STATE, known.keys())
    begun = []
    for row, (run_id, progress) in enumerate(zip(state["runs"], state["progress"], strict=True)):
        rows = {name: tensor[row] for name, tensor in tensors.items() if "/" not in name}
        best = f"best/{row}/"
        kept = {name.removeprefix(best): tensor for name, tensor in tensors.items() if name.startswith(best)}
        begun.append(Parked(known[run_id], Progress(**progress), state["run_steps"][row], rows, kept))
    if cohort.num_seats != state["num_slots"]:
        begun.sort(key=lambda item: bool(item.progress.status))
    cohort.seat(begun)
    cohort.queue.num_begun = state["num_begun"]
    cohort.num_steps = state["num_steps"]
    cohort.seconds = state["seconds"]
    cohort.left_steps = state["left_steps"]
    torch.set_rng_state(tensors["rng/cpu"])
    if "rng/cuda" in tensors and cohort.backbone.device.type == "cuda":
        torch.cuda.set_rng_state(tensors["rng/cuda"], cohort.backbone.device)


def drop_rows(folder: Path, run_ids: Collection[str]) -> None:
    """Remove the resume states under `folder` of cohorts of several runs, if all are among these."""
    for cohort_dir, content in _read_memberships(folder):
        if len(content["runs"]) > 1 and set(content["runs"]) <= set(run_ids):
            drop_state(cohort_dir)


def drop_state(folder: Path) -> None:
    """Remove the states of an ended cohort; its membership file stays as a record."""
    (folder / _PREVIOUS).unlink(missing_ok=True)
    (folder / _STATE).unlink(missing_ok=True)
