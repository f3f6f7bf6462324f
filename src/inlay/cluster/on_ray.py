"""`fit` on a Ray cluster: runs are divided into groups, and each group is trained as a cohort on some machine.

A group is one Ray task: it opens the backbone on its machine, calls the same `fit`, and returns the folders of its
finished runs. Ray chooses the machine, and starts the task again if the machine dies. If the machine sees the folder of
the runs, the group trains in that folder and continues from the last resume state; otherwise it starts from the
beginning.

A run has the same id and folder as if it were trained here. A machine with another version of Inlay or another backbone
is refused before it trains. The finished runs of a group are kept, whatever happens to the others.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inlay.cluster.messages import (
    PackedError,
    marked,
    pack_error,
    read_folders,
    start_relay,
    unpack_error,
    write_files,
)
from inlay.cluster.ray_connection import AUTO, connect, living_nodes, own_versions, parse_address
from inlay.errors import BadConfig, InlayError, LostProcess, Missing, Unsupported, WrongBackbone
from inlay.model import Backbone, load_backbone
from inlay.settings import FitSettings
from inlay.training import AnyRun, EpochEnded, Event, Result, RunEnded, fit, is_finished, structure_of

RETRIES = 5
"""how often Ray starts a task again if its machine dies"""
_POLL_S = 0.5
Tell = Callable[[str], None]


@dataclass(frozen=True)
class RaySettings:
    """The cluster to train on, and the resources that each group of runs needs."""

    address: str = AUTO
    num_cpus: float = 1
    """processors of a group, and its number of threads"""
    num_gpus: float = 0
    """GPUs of a group; with a fraction, groups share one"""
    num_groups: int | None = None
    """number of groups that train at the same time; None fills the cluster"""

    @classmethod
    def parse(cls, text: str, num_cpus: float = 1, num_gpus: float = 0) -> RaySettings:
        """Return the settings of `--on ray` or `--on ray://HOST:10001`."""
        address = parse_address(text)
        if num_cpus < 0 or num_gpus < 0:
            raise BadConfig("`--ray-cpus` and `--ray-gpus` are 0 or more", "leave them out for one processor a group")
        return cls(address, num_cpus, num_gpus)


def fit_on_ray(
    runs: Sequence[AnyRun],
    backbone: Backbone,
    folder: Path,
    settings: FitSettings,
    where: RaySettings,
    tell: Tell = lambda line: None,
) -> list[Result]:
    """Train every unfinished run on a Ray cluster; the results are in the order of `runs`.

    `tell` is called with lines about the progress. Ctrl-C ends all groups; finished runs are kept.
    """
    unique = list({run.id: run for run in runs}.values())
    waiting = [run for run in unique if not is_finished(folder / run.id)]
    if waiting:
        ray = connect(where.address)
        groups = _deal(waiting, where.num_groups or count_places(ray, where))
        tell(f"{len(waiting)} runs in {len(groups)} groups on {len(living_nodes(ray))} machines")
        with marked(folder) as mark:
            about = (backbone.name, backbone.fingerprint, folder.absolute(), settings, mark, own_versions())
            _train(ray, groups, _GroupOrder(*about), where, tell)
    return fit(unique, backbone, folder, settings)  # all runs are finished now, and only read back


@dataclass(frozen=True)
class _GroupOrder:
    """Everything that a group needs on another machine, besides its runs."""

    backbone: str
    fingerprint: str
    folder: Path
    settings: FitSettings
    mark: str
    """a file in `folder`; a machine that sees it shares the folder"""
    versions: tuple[str, ...]


@dataclass(frozen=True)
class _Done:
    """The outcome of a group: its error, and the files of its runs unless the folder is shared."""

    files: dict[str, bytes]
    error: PackedError | None = None


def _train(ray: Any, groups: list[list[AnyRun]], order: _GroupOrder, where: RaySettings, tell: Tell) -> None:
    """Start a task for each group, write their results, and raise the first error once all have ended."""
    train_group = ray.remote(num_cpus=where.num_cpus, num_gpus=where.num_gpus, max_retries=RETRIES)(_train_group)
    relay = start_relay(ray)
    pending = {train_group.remote(group, order, relay): group for group in groups}
    failures: list[InlayError] = []
    try:
        while pending:
            ready, _ = ray.wait(list(pending), timeout=_POLL_S)
            for line in ray.get(relay.take.remote()):
                tell(line)
            for reference in ready:
                group = pending.pop(reference)
                try:
                    done = ray.get(reference)
                except ray.exceptions.RayError as error:
                    named = ", ".join(run.id for run in group[:3]) + (" …" if len(group) > 3 else "")
                    lost = f"the group of {len(group)} runs ({named}) was lost {RETRIES + 1} times"
                    hint = (
                        "the same command trains what is left; ask for more memory with `--ray-cpus`, or see Ray's log"
                    )
                    failures.append(LostProcess(f"{lost}: {first_error_line(error)}", hint))
                    continue
                write_files(order.folder, done.files)
                if done.error is not None:
                    failures.append(unpack_error(done.error))
    finally:
        for reference in pending:
            ray.cancel(reference, force=True)
        ray.kill(relay)
    if failures:
        raise failures[0]


def _train_group(group: list[AnyRun], order: _GroupOrder, relay: Any) -> _Done:
    """Train a group, on the machine that Ray chose. An InlayError is returned as data."""
    try:
        check_versions(order.versions)
        backbone = load_same_backbone(order.backbone, order.fingerprint)
        is_shared = (order.folder / order.mark).is_file()
        import ray

        def emit(event: Event) -> None:
            if isinstance(event, EpochEnded | RunEnded):
                heard = relay.put.remote(_describe(event))
                if isinstance(event, RunEnded):
                    ray.get(heard)  # or else the task may end before its last message has arrived

        if is_shared:
            fit(group, backbone, order.folder, order.settings, emit)
            return _Done({})
        with tempfile.TemporaryDirectory(prefix="inlay-ray-") as scratch:
            folder = Path(scratch)
            fit(group, backbone, folder, order.settings, emit)
            return _Done(read_folders(folder, [run.id for run in group]))
    except InlayError as error:
        return _Done({}, pack_error(error))


def check_versions(wanted: tuple[str, ...]) -> None:
    """Refuse to work on a machine whose versions differ from those of the machine that sent the work."""
    if wanted != (own := own_versions()):
        message = f"a machine of the cluster has {', '.join(own)}, and this one {', '.join(wanted)}"
        raise Unsupported(message, "install the same versions on all machines")


def load_same_backbone(name: str, fingerprint: str, device: str | None = None) -> Backbone:
    """Load the backbone on a machine of the cluster; refuse a different one with the same name."""
    backbone = load_backbone(name, device=device)
    if backbone.fingerprint != fingerprint:
        message = f"`{name}` is another backbone on a machine of the cluster"
        raise WrongBackbone(message, "put the same folder on all machines")
    return backbone


def _describe(event: EpochEnded | RunEnded) -> str:
    run = event.member.run
    if isinstance(event, RunEnded):
        return f"{run.name} {run.id}: ended"
    scored = event.record.get("dev", {}).get(run.metric)
    return f"{run.name} {run.id}: epoch {event.record['epoch']}" + ("" if scored is None else f", dev {scored:.4f}")


def _deal(runs: list[AnyRun], num_groups: int) -> list[list[AnyRun]]:
    """Divide runs of one structure into groups of about equal work, the longest first; about `num_groups` in all."""
    by_structure: dict[Any, list[AnyRun]] = {}
    for run in runs:
        by_structure.setdefault(structure_of(run), []).append(run)
    total = sum(map(_work, runs))
    groups = []
    for same in by_structure.values():
        share = max(1, round(num_groups * sum(map(_work, same)) / total))
        dealt: list[list[AnyRun]] = [[] for _ in range(min(share, len(same)))]
        for run in sorted(same, key=_work, reverse=True):
            min(dealt, key=lambda group: sum(map(_work, group))).append(run)
        groups += dealt
    return sorted(groups, key=lambda group: -sum(map(_work, group)))


def _work(run: AnyRun) -> float:
    return run.num_rows * run.config.train.num_epochs


def count_places(ray: Any, where: RaySettings) -> int:
    """Return how many groups the cluster can train at the same time; refuse a cluster without room for one."""
    fitting = 0
    for node in living_nodes(ray):
        has = node["Resources"]
        by_cpu = has.get("CPU", 0) // where.num_cpus if where.num_cpus else 1
        by_gpu = has.get("GPU", 0) / where.num_gpus if where.num_gpus else by_cpu
        fitting += int(min(by_cpu, by_gpu))
    if not fitting:
        raise Missing(
            f"no machine of the cluster has {where.num_cpus:g} processors and {where.num_gpus:g} GPUs",
            "ask for less with `--ray-cpus` and `--ray-gpus`",
        )
    return fitting


def first_error_line(error: Exception) -> str:
    """Return the first line of Ray's error on lost work."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:300]
