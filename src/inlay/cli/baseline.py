"""`inlay baseline`: what a linear model on words scores, to hold a task's score against."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from inlay.cli import screen
from inlay.cli.options import JsonOption, RunOptions, run_options
from inlay.cli.screen import Column
from inlay.cli.train import load_task, put_metrics
from inlay.errors import Unsupported

if TYPE_CHECKING:
    from inlay.research.baseline import Baseline


@run_options(panels=("Data",), shared=("data", "task", "config", "set_"))
def baseline(
    run: RunOptions,
    chars: Annotated[bool, typer.Option("--chars", help="count n-grams of 3 to 5 letters too, not only words")] = False,
    json: JsonOption = False,
) -> None:
    """Score TF-IDF and logistic regression on a task, with no transformer.

    Words and pairs of words in a linear model, its regularisation chosen on dev. It reads the data as `inlay train`
    does, with the same split and the same metrics, so that the scores can be compared. Nothing is stored.
    """
    task = load_task(run.resolve())
    from inlay.research.baseline import STRENGTHS, fit_baseline

    try:
        with screen.Meter("fitting", len(STRENGTHS)) as meter:
            found = fit_baseline(task, chars=chars, on_fit=meter.update)
    except Unsupported as error:
        raise Unsupported(f"`inlay baseline` cannot fit a `{task.kind}` task", error.hint) from None
    if json:
        screen.put_json({**found.to_json(), "notes": [*task.notes, *found.notes]})
    else:
        screen.say()
        _put_baseline(found)


def _put_baseline(found: Baseline) -> None:
    rows = [[strength, screen.score(value)] for strength, value in found.tried.items()]
    screen.put_table([Column("strength", True), Column(f"dev {found.metric}", True)], rows)
    screen.put()
    put_metrics(found.metrics, found.metric)
    screen.put()
    screen.put_pairs(
        {
            "strength": f"{found.strength:g}, the best on dev (inverse regularisation)",
            "parameters": f"{screen.count(found.num_parameters)} on {screen.count(found.num_features)} features",
            "trained": f"{screen.duration(found.seconds)} on {screen.count(found.num_train, 'row')}",
        }
    )
    for note in found.notes:
        screen.note(note)
