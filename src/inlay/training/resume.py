"""The resume state of a cohort: everything that decides its next step, in one file written whole or not at all.

Weights, moments, random generators, data cursors, best weights so far. Only safetensors and JSON, never pickle.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as encode_tensors
from torch import Tensor

from inlay.config import digest
from inlay.errors import StoreDamaged
from inlay.store import write_atomically
from inlay.training.cohort import Cohort, CohortSettings
from inlay.training.member import Progress
from inlay.training.run import Run

_STATE = "state.safetensors"


def cohort_id(runs: list[Run]) -> str:
    """The name of the folder that holds these runs' resume state: the same runs find it again."""
    return digest([run.id for run in runs])[:16]


def write_membership(folder: Path, runs: list[Run], settings: CohortSettings) -> None:
    """Who trains in which slot, with which budget and threads: on disk before the first step."""
    content = {"runs": [run.id for run in runs], **dataclasses.asdict(settings)}
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "cohort.json", json.dumps(content, indent=1).encode())


@dataclass(frozen=True)
class Stopped:
    """A cohort that was stopped: its runs in slot order, some of them perhaps ended, and its settings."""

    runs: list[Run]
    settings: CohortSettings


def find_stopped(folder: Path, runs: list[Run], unfinished: list[Run]) -> Stopped | None:
    """The cohort under `folder` that has a state, is made of some of `runs`, and trains every unfinished one."""
    known, wanted = {run.id: run for run in runs}, {run.id for run in unfinished}
    for state in sorted(folder.glob(f"*/{_STATE}")):
        content = json.loads(state.with_name("cohort.json").read_text(encoding="utf8"))
        if wanted <= set(content["runs"]) <= known.keys():
            settings = CohortSettings(content["token_budget"], content["num_threads"], content["save_every"])
            return Stopped([known[run_id] for run_id in content["runs"]], settings)
    return None


def save_state(folder: Path, cohort: Cohort) -> None:
    """Write the resume state, replacing the last one."""
    tensors: dict[str, Tensor] = {"rng/cpu": torch.get_rng_state()}
    if cohort.backbone.device.type == "cuda":
        tensors["rng/cuda"] = torch.cuda.get_rng_state(cohort.backbone.device)
    tensors |= training_tensors(cohort)
    for member in cohort.members:
        for name, tensor in member.best_tensors.items():
            tensors[f"best/{member.slot}/{name}"] = tensor
    state = {
        "num_steps": cohort.num_steps,
        "seconds": cohort.seconds,
        "slot_steps": cohort.optimizer.num_steps,
        "members": [dataclasses.asdict(member.progress) for member in cohort.members],
    }
    write_atomically(folder / _STATE, encode_tensors(tensors, {"state": json.dumps(state)}))


def training_tensors(cohort: Cohort) -> dict[str, Tensor]:
    """The weights of all slots and their moments, as they are: no copies."""
    optimizer = cohort.optimizer
    return {"values": cohort.flat.values_SP, "first": optimizer.first_SP, "second": optimizer.second_SP}


def load_state(folder: Path, cohort: Cohort) -> None:
    """Put a fresh cohort of the same runs where the state left off, random generators included."""
    try:
        with safe_open(folder / _STATE, framework="pt", device=str(cohort.backbone.device)) as file:
            state = json.loads(file.metadata()["state"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - safe_open is no mapping
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise StoreDamaged(
            f"the resume state `{folder / _STATE}` cannot be read: {error}", "begin anew with `--restart`"
        ) from None
    with torch.no_grad():
        for name, tensor in training_tensors(cohort).items():
            tensor.copy_(tensors[name])
    cohort.num_steps, cohort.seconds = state["num_steps"], state["seconds"]
    cohort.optimizer.num_steps = state["slot_steps"]
    for member, progress in zip(cohort.members, state["members"], strict=True):
        member.progress = Progress(**progress)
        prefix = f"best/{member.slot}/"
        member.best_tensors = {
            name.removeprefix(prefix): tensor.cpu() for name, tensor in tensors.items() if name.startswith(prefix)
        }
    torch.set_rng_state(tensors["rng/cpu"].cpu())
    if "rng/cuda" in tensors:
        torch.cuda.set_rng_state(tensors["rng/cuda"].cpu(), cohort.backbone.device)


def drop_state(folder: Path) -> None:
    """Forget the state of a cohort that has ended; its membership file stays as the record of who trained together."""
    (folder / _STATE).unlink(missing_ok=True)
