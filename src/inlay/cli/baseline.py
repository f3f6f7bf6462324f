"""`inlay baseline`: scores of cheap models to compare a task with: TF-IDF, and a linear model on frozen vectors."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from inlay.cli import screen
from inlay.cli.cross_validation_output import print_label_errors
from inlay.cli.flags import DeviceOption, JsonOption, RunFlags, RunOptions, command_options
from inlay.cli.lazy_packages import explore, pipeline, training
from inlay.cli.screen import numbers
from inlay.cli.train import print_metrics
from inlay.errors import Unsupported


@command_options(RunFlags(panels=("Data",), shared=("data", "task", "backbone", "config", "assignments")))
def baseline(
    run: RunOptions,
    chars: Annotated[
        bool, typer.Option("--chars", help="also count n-grams of 3 to 5 letters, not only words")
    ] = False,
    probe: Annotated[
        bool, typer.Option("--probe/--no-probe", help="also fit a linear model on the backbone's frozen vectors")
    ] = True,
    device: DeviceOption = "auto",
    json: JsonOption = False,
) -> None:
    """Score cheap models on a task: TF-IDF, and a linear model on frozen vectors.

    The first is a linear model on words and pairs of words, without a transformer; its regularisation is chosen on dev.
    The second, the linear probe, is a linear model on the backbone's frozen vectors, chosen by cross-validation on the
    training rows; for pairs of texts also their untrained cosine. The data is read as by `inlay train`, with the same
    split and metrics, so that scores can be compared. Also lists train and dev rows that may be labelled wrongly: rows
    to which the probe, fitted to other rows, confidently gives another label. Nothing is stored.
    """
    pipeline.check_device_name(device)
    config = run.resolve()
    pipeline.check_backbone_name(config.backbone)
    task = pipeline.load_task(config)
    try:
        with screen.Meter("fitting", len(explore.STRENGTHS)) as meter:
            found = explore.fit_baseline(task, chars=chars, on_fit=meter.update)
    except Unsupported as error:
        raise Unsupported(f"`inlay baseline` cannot fit a `{task.kind}` task", error.hint) from None
    if not json:
        screen.log()
        _print_baseline(found)
    probed = None
    if probe:
        frozen = pipeline.open_backbone(config.backbone, device)
        with screen.Meter("reading") as meter:
            probed = training.fit_probe(
                task,
                frozen,
                max_length=config.train.max_length,
                on_rows=lambda number: meter.advance(number, "texts"),
            )
    if json:
        more = {} if probed is None else {"probe": probed.to_json()}
        screen.emit_json({**dataclasses.asdict(found), "notes": [*task.notes, *found.notes], **more})
    elif probed is not None:
        _print_probe(probed)
        if probed.label_errors is not None:
            print_label_errors(probed.label_errors, "a linear model fitted to other rows")


def _print_probe(found: training.ProbeResult) -> None:
    screen.emit()
    screen.emit(f"a linear model on `{found.backbone}`'s frozen vectors")
    print_metrics(found.metrics, found.metric)
    if found.cosine is not None:
        screen.emit()
        screen.emit("the untrained cosine of the two texts")
        print_metrics(found.cosine, found.metric)
    screen.emit()
    pairs = {
        "strength": f"{found.strength:g}, the best of {len(next(iter(found.tried.values())))} in cross-validation",
        "features": f"{screen.count(found.num_features)}, pooling {found.pooling}",
        "trained": f"{screen.duration(found.seconds)} on {screen.count(found.num_train, 'row')}",
    }
    if found.reading != "single":
        pairs["pairs"] = f"read as {found.reading}, which is better in cross-validation"
    screen.emit_pairs(pairs)


def _print_baseline(found: explore.Baseline) -> None:
    screen.emit("TF-IDF and a linear model, no transformer")
    rows = [[strength, screen.score(value)] for strength, value in found.tried.items()]
    screen.emit_table(numbers("strength", f"dev {found.metric}"), rows)
    screen.emit()
    print_metrics(found.metrics, found.metric)
    screen.emit()
    screen.emit_pairs(
        {
            "strength": f"{found.strength:g}, the best on dev (inverse regularisation)",
            "parameters": f"{screen.count(found.num_parameters)} on {screen.count(found.num_features)} features",
            "trained": f"{screen.duration(found.seconds)} on {screen.count(found.num_train, 'row')}",
        }
    )
    for note in found.notes:
        screen.detail(note)
