"""Several processes that train together, for test_parallel.py.

They are forked from a server that has torch imported, and told their places as `torchrun` would.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
FORKS = multiprocessing.get_context("forkserver")
PRELOADED = ("inlay.training", "transformers.models.bert.modeling_bert", "sklearn.metrics", "matplotlib.figure")
FORKS.set_forkserver_preload([*PRELOADED, "matplotlib.backends.backend_agg"])


def find_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def in_processes(work: Callable[..., None], *args: Any, size: int = 2, limit_s: float = 180.0) -> list[int]:
    """Call `work(*args)` in processes that are one world; their exit statuses, negative for a signal."""
    port = find_port()
    started = [FORKS.Process(target=_enter, args=(rank, size, port, work, args)) for rank in range(size)]
    for process in started:
        process.start()
    deadline = time.monotonic() + limit_s
    for process in started:
        process.join(max(0.0, deadline - time.monotonic()))
    hung = [rank for rank, process in enumerate(started) if process.is_alive()]
    for rank in hung:
        started[rank].kill()
        started[rank].join()
    assert not hung, f"processes {hung} did not end within {limit_s} s"
    return [int(process.exitcode or 0) for process in started]


def _enter(rank: int, size: int, port: int, work: Callable[..., None], args: tuple[Any, ...]) -> None:
    import torch

    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    work(*args)


def make_runs(backbone: Any, method: str = "houlsby", *, dropout: float = 0.0) -> list[Any]:
    """Runs of different tasks, sizes, rates and batch sizes; every epoch's last batch is uneven, one has one row."""
    from inlay.settings.run_config import MethodConfig, RunConfig, TrainConfig
    from inlay.training import make_run
    from toys import make_toy_tags, make_toy_task

    usual = {"dropout": dropout, "head_dropout": dropout, "max_length": 32, "epochs": 4, "pooling": "mean"}
    sizes: tuple[int | None, ...] = (8, 3, 16)
    tags = replace(make_toy_tags(num_rows=30), metric="token_accuracy")  # which needs no seqeval: GPU machines lack it
    varied = [
        (make_toy_task("two", num_rows=37), {"lr": 3e-3, "batch_size": 9}),
        (make_toy_task("five", num_labels=5, num_rows=31, seed=1), {"lr": 1e-3, "batch_size": 6, "seed": 1}),
        (tags, {"lr": 2e-3, "batch_size": 7, "clip_norm": 0.5, "pooling": "auto"}),
    ]
    if method == "full":  # it has no size, and trains alone
        varied, sizes = varied[:1], (None,)
    return [
        make_run(
            task,
            RunConfig(method=MethodConfig(method, size), train=TrainConfig(**{**usual, **settings})),
            backbone,
        )
        for (task, settings), size in zip(varied, sizes, strict=True)
    ]


def load(folder: str, device: str = "cpu") -> Any:
    import torch

    from inlay.model import load_backbone

    return load_backbone(folder, device=device, dtype=torch.float32)


def take_twenty_steps(folder: str, out: Path, method: str, device: str = "cpu") -> None:
    """Twenty steps of every run together; leaves losses, weights and dev logits, of each process."""
    from safetensors.torch import save_file

    from inlay.processes import current_process

    backbone = load(folder, device)
    runs = make_runs(backbone, method)
    save_file(
        step_together(runs, backbone, 20), out / f"{current_process().rank}-of-{current_process().size}.safetensors"
    )


def step_together(runs: list[Any], backbone: Any, num_steps: int) -> dict[str, Any]:
    import torch

    from inlay.model.batch.route import make_rows
    from inlay.training.cohort.cohort import Cohort, CohortSettings
    from inlay.training.cohort.parallel import spread_over

    with spread_over(runs, backbone.device, "rows") as (own, world):
        cohort = Cohort(own, backbone, CohortSettings(16384, 1, 100), world=world)
        with cohort.training():
            for _ in range(num_steps):
                cohort.step()
                backbone.model.eval()
                cohort.finish_epochs()
                backbone.model.train()
            backbone.model.eval()
            rows = [row for member in cohort.members for row in make_rows(member.dev, member.slot)]
            logits = torch.cat([logit.flatten() for logit in world.infer(cohort.bank, rows)])
        losses = {f"losses-{m.slot}": torch.tensor(m.progress.losses) for m in cohort.members}
        return {"weights": cohort.flat.values_SP.cpu().clone(), "logits": logits, **losses}


def train(folder: str, out: Path, settings: dict[str, Any], fate: tuple[int, int] | None = None) -> None:
    """Train three runs to their end, dropout on; the process `fate[0]` is killed at its event `fate[1]`."""
    from inlay.processes import current_process
    from inlay.training import FitSettings, fit

    backbone = load(folder)
    if fate is not None and current_process().rank == fate[0]:
        from kill_and_resume import Fate, plant

        plant(Fate(fate[1], halve=False))
    results = fit(make_runs(backbone, dropout=0.1), backbone, out, FitSettings(save_every=2, **settings))
    assert [result.status for result in results] == ["finished"] * 3


def make_joint_runs(backbone: Any, method: str) -> list[Any]:
    """Two seeds of a run of three tasks, batches mixed: some of them have rows of a task in one process only."""
    from joint_runs import make_joint
    from toys import make_toy_task

    return [make_joint(backbone, make_toy_task, method, seed, {"batches": "mixed"}, batch_size=5) for seed in range(2)]


def train_several_tasks(folder: str, out: Path, method: str) -> None:
    """Train such runs to their end, each batch cut among the processes."""
    from inlay.training import FitSettings, fit

    backbone = load(folder)
    fit(make_joint_runs(backbone, method), backbone, out, FitSettings(spread="rows"))


def train_quietly(folder: str, out: Path, spread: str) -> None:
    """Train three runs to their end; only the first process may write where all train together."""
    from inlay.processes import current_process
    from inlay.store import files
    from inlay.training import FitSettings, fit

    backbone = load(folder)
    if spread == "rows" and not current_process().is_first:
        files.make_directory = files.write_once = None  # a write would fail
    fit(make_runs(backbone), backbone, out, FitSettings(spread=spread))


def train_twice(folder: str, out: Path) -> None:
    """A process trains more than once, as a script does."""
    from inlay.training import FitSettings, fit

    backbone = load(folder)
    for number in range(2):
        (result,) = fit(make_runs(backbone)[:1], backbone, out / str(number), FitSettings(spread="rows"))
        assert result.status == "finished"


def fail_on_the_second(folder: str, out: Path, step: int) -> None:
    """The second process fails in the middle of training."""
    from inlay.processes import current_process
    from inlay.training import FitSettings, fit
    from inlay.training.cohort.cohort import Cohort

    backbone = load(folder)
    original = Cohort.step

    def fails(cohort: Any) -> int:
        if cohort.num_steps == step and not current_process().is_first:
            sys.exit(7)
        return original(cohort)

    Cohort.step = fails  # type: ignore[method-assign]
    fit(make_runs(backbone), backbone, out, FitSettings(spread="rows"))


def run_out_of_memory(folder: str, out: Path, last_call: int) -> None:
    """From its fifth forward pass to its `last_call`th the second process has no memory left."""
    import torch

    from inlay.model.bank.bank import Bank
    from inlay.processes import current_process
    from inlay.training import FitSettings, fit

    backbone, calls = load(folder), itertools.count(1)
    original = Bank.logits

    def fails(bank: Any, *args: Any, **kwargs: Any) -> Any:
        if bank.backbone.model.training and not current_process().is_first and 5 <= next(calls) <= last_call:
            raise torch.OutOfMemoryError("no memory")
        return original(bank, *args, **kwargs)

    Bank.logits = fails  # type: ignore[method-assign]
    fit(make_runs(backbone), backbone, out, FitSettings(spread="rows", token_budget=4096))


def write_hint(folder: str, out: Path, method: str) -> None:
    """Two runs of a method and no memory for their first step; leaves what the user is told to do."""
    import torch

    from inlay.errors import OutOfMemory
    from inlay.model.bank.bank import Bank
    from inlay.processes import current_process
    from inlay.training import FitSettings, fit

    def fails(bank: Any, *args: Any, **kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("no memory")

    backbone, runs = load(folder), []
    for seed in (0, 1):
        (run, *_) = make_runs(backbone, method)
        runs.append(replace(run, config=replace(run.config, train=replace(run.config.train, seed=seed))))
    Bank.logits = fails  # type: ignore[method-assign]
    try:
        fit(runs, backbone, out, FitSettings(spread="rows", token_budget=4096))
    except OutOfMemory as error:
        (out / f"hint-{current_process().rank}").write_text(error.hint or "")


def interrupt(folder: str, out: Path, rank: int, step: int) -> None:
    """One process hears Ctrl-C in the middle of training; all stop after the same step."""
    from inlay.processes import current_process
    from inlay.training import FitSettings, fit
    from inlay.training.cohort.cohort import Cohort
    from inlay.training.cohort.fit import Interrupted

    backbone, steps = load(folder), []
    original = Cohort.step

    def interrupted(cohort: Any) -> int:
        if cohort.num_steps == step - 1 and current_process().rank == rank:
            os.kill(os.getpid(), signal.SIGINT)
        steps.append(cohort.num_steps + 1)
        return original(cohort)

    Cohort.step = interrupted  # type: ignore[method-assign]
    try:
        fit(make_runs(backbone), backbone, out, FitSettings(spread="rows"))
    except Interrupted:
        (out / f"stopped-{current_process().rank}").write_text(str(steps[-1]))


def differ(folder: str, out: Path) -> None:
    """The processes are given different runs."""
    from inlay.errors import InlayError
    from inlay.processes import current_process
    from inlay.training import fit

    backbone = load(folder)
    runs = make_runs(backbone)
    try:
        fit(runs if current_process().is_first else runs[:2], backbone, out)
    except InlayError as error:
        (out / f"refused-{current_process().rank}").write_text(str(error))
