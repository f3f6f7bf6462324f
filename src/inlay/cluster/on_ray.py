"""`fit` on a Ray cluster: runs are dealt into groups, each group is a cohort on some machine, results come back here.

A group is one Ray task: it opens the backbone there, calls the same `fit`, and hands back the folders of its finished
runs. Ray places it and starts it again if its machine dies. Where all machines see the folder of the runs, it trains in
that folder, and goes on from the last resume state; elsewhere a group that is started again begins anew.

What always holds: a run has the id and the folder it would have here; a machine with another Inlay or another backbone
is refused before it trains; what a group has finished is kept, whatever happens to the others.
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
"""times that Ray starts work again whose machine has died"""
_POLL_S = 0.5
Tell = Callable[[str], None]


@dataclass(frozen=True)
class RaySettings:
    """Where to train, and what each group of runs asks of a machine."""

    address: str = AUTO
    num_cpus: float = 1
    """processors of a group; Ray lets it compute with as many threads"""
    num_gpus: float = 0
    """GPUs of a group; a fraction shares one"""
    num_groups: int | None = None
    """groups trained side by side; None fills the cluster"""

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
    """Train every run that is not finished yet on a Ray cluster; the results come in the order of `runs`.

    `tell` hears a line for every ended run. Ctrl-C ends all groups; finished runs are kept.
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
    return fit(unique, backbone, folder, settings)  # reads back what is finished; there is nothing left to train


@dataclass(frozen=True)
class _GroupOrder:
    """All that a group needs on another machine, besides its runs."""

    backbone: str
    fingerprint: str
    folder: Path
    settings: FitSettings
    mark: str
    """a file in `folder`: a machine that sees it shares the folder"""
    versions: tuple[str, ...]


@dataclass(frozen=True)
class _Done:
    """The outcome of a group: the files of its runs, where the folder is not shared, and its error."""

    files: dict[str, bytes]
    error: PackedError | None = None


def _train(ray: Any, groups: list[list[AnyRun]], order: _GroupOrder, where: RaySettings, tell: Tell) -> None:
    """Send the groups out, take back what they made, and raise the first error once all have ended."""
    train_group = ray.remote(num_cpus=where.num_cpus, num_gpus=where.num_gpus, max_retries=RETRIES)(_train_group)
    relay = start_relay(ray)
    pending, failures = {train_group.remote(group, order, relay): group for group in groups}, []
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
                    failures.append(_explain(error, group))
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
    """Train a group on the machine where Ray put it. An error of ours comes back as data: it may not be pickled."""
    try:
        check_versions(order.versions)
        backbone = open_same(order.backbone, order.fingerprint)
        is_shared = (order.folder / order.mark).is_file()
        import ray

        def emit(event: Event) -> None:
            if isinstance(event, EpochEnded | RunEnded):
                heard = relay.put.remote(_describe(event))
                if isinstance(event, RunEnded):
                    ray.get(heard)  # else the group may end before its last words have arrived

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
    """Refuse a machine of the cluster that has other versions than the one that sends the work."""
    if wanted != (own := own_versions()):
        found = f"a machine of the cluster has {', '.join(own)}, and this one {', '.join(wanted)}"
        raise Unsupported(found, "install the same on all")


def open_same(name: str, fingerprint: str, device: str | None = None) -> Backbone:
    """Load the backbone on a machine of the cluster; refuse another one under its name."""
    backbone = load_backbone(name, device=device)
    if backbone.fingerprint != fingerprint:
        raise WrongBackbone(f"`{name}` is another backbone on a machine of the cluster", "put the same folder on all")
    return backbone


def _describe(event: EpochEnded | RunEnded) -> str:
    run = event.member.run
    if isinstance(event, RunEnded):
        return f"{run.name} {run.id}: ended"
    scored = event.record.get("dev", {}).get(run.metric)
    return f"{run.name} {run.id}: epoch {event.record['epoch']}" + ("" if scored is None else f", dev {scored:.4f}")


def _deal(runs: list[AnyRun], num_groups: int) -> list[list[AnyRun]]:
    """Deal runs of one structure into groups of about equal work, the longest first; at most `num_groups` in all."""
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
    """Return how many groups the cluster trains side by side; refuse a cluster that has no place for one."""
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


def _explain(error: Exception, group: list[AnyRun]) -> InlayError:
    runs = ", ".join(run.id for run in group[:3]) + (" …" if len(group) > 3 else "")
    return LostProcess(
        f"the group of {len(group)} runs ({runs}) was lost {RETRIES + 1} times: {describe_loss(error)}",
        "the same command trains what is left; ask for more memory with `--ray-cpus`, or look at Ray's log",
    )


def describe_loss(error: Exception) -> str:
    """Return the first line of what Ray says of lost work."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:300]
