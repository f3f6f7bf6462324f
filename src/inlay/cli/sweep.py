"""`inlay sweep`: trains a grid of settings as one cohort, ranks the runs, and publishes the best."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from inlay.cli import flags, screen
from inlay.cli.lazy_packages import explore, pipeline
from inlay.cli.screen import numbers
from inlay.cli.train import NameOption, PublishOption, ReportOption, ResumeOption, print_report
from inlay.settings import FitSettings
from inlay.store import Store

_AXES = ("method", "size", "lr", "epochs", "batch_size")


def _grid(flag: str, key: str) -> Any:
    return typer.Option(flag, metavar="A,B,…", rich_help_panel="Grid", help=flags.config_help(key))


@flags.command_options(flags.RunFlags(without=_AXES), fit=("max_cohort", *flags.MEMORY, "spread"))
def sweep(
    run: flags.RunOptions,
    effort: FitSettings,
    lr: Annotated[str | None, _grid("--lr", "train.lr")] = None,
    size: Annotated[str | None, _grid("--size", "method.size")] = None,
    epochs: Annotated[str | None, _grid("--epochs", "train.epochs")] = None,
    batch_size: Annotated[str | None, _grid("--batch-size", "train.batch_size")] = None,
    method: Annotated[str | None, _grid("--method", "method.name")] = None,
    seeds: Annotated[
        int,
        typer.Option(
            "--seeds",
            metavar="N",
            rich_help_panel="Grid",
            min=1,
            help="runs of each combination, with seeds counted up from --seed",
        ),
    ] = 1,
    on: flags.OnOption = None,
    ray_cpus: flags.RayCpusOption = 1,
    ray_gpus: flags.RayGpusOption = 0,
    publish: PublishOption = True,
    name: NameOption = None,
    resume: ResumeOption = True,
    report: ReportOption = True,
    log: flags.LogOption = None,
    device: flags.DeviceOption = "auto",
    store: flags.StoreOption = None,
    json: flags.JsonOption = False,
) -> None:
    """Train a grid of settings as one cohort and publish the best.

    Options that take A,B,… take one value or several; every combination is trained with every seed, all of them
    together or as many at a time as fit in memory. With `--on ray` the runs are spread over the machines of a cluster.
    """
    pipeline.check_trackers(log or (), on_cluster=on is not None)
    given = {"method.name": method, "method.size": size, "train.lr": lr, "train.epochs": epochs}
    axes = explore.parse_axes(given | {"train.batch_size": batch_size})
    opened = Store(store)
    grid = explore.make_grid(run.resolve(opened), axes, seeds)  # impossible values are refused before anything is read
    cluster = None if on is None else pipeline.parse_cluster(on, ray_cpus, ray_gpus)
    fit = dataclasses.replace(effort, restart=not resume)
    how: dict[str, Any] = {"cluster": cluster, "trackers": tuple(log or ()), "writes_report": report}
    options = pipeline.TrainOptions(name, publish, fit=fit, **how)
    found = pipeline.sweep_and_publish(axes, grid, options, lambda first: pipeline.prepare(first, opened, device, name))
    if found is None:  # the first process has the last word
        return
    if json:
        screen.emit_json(found.to_json())
    else:
        screen.log()
        _print_ranking(found.ranking)
        screen.emit()
        print_report(found.best, store)


def _print_ranking(ranking: explore.Ranking) -> None:
    """Print the runs from best to worst, and with several seeds also the settings by their mean score."""
    several = [key for key in ranking.axes if len({str(item.values[key]) for item in ranking.runs}) > 1]
    keys = several or list(ranking.axes)
    heads = numbers(*(flags.flag_name(key).replace("_", " ") for key in keys))
    if ranking.num_seeds > 1:
        rows = []
        for setting in ranking.settings:
            scores = map(screen.score, (setting.mean, setting.std, setting.best))
            rows.append([*_cells(setting.values, keys), *scores, str(setting.num_runs)])
        screen.emit_table([*heads, *numbers(f"mean dev {ranking.metric}", "deviation", "best", "runs")], rows)
        screen.emit()
    rows = []
    for run in ranking.runs:
        ends = (str(run.seed), screen.score(run.dev_metric), str(run.best_epoch), run.status)
        rows.append([*_cells(run.values, keys), *ends])
    screen.emit_table([*heads, *numbers("seed", f"dev {ranking.metric}", "epoch"), "status"], rows)


def _cells(values: Mapping[str, Any], keys: Sequence[str]) -> list[str]:
    found = [values[key] for key in keys]
    return ["-" if value is None else f"{value:g}" if isinstance(value, float) else str(value) for value in found]
