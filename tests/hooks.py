"""A listener to the events of training for tests, with a method for each kind of event it cares about."""

from __future__ import annotations

from inlay.training import events

_METHODS = {
    events.RowsEncoded: "on_encode",
    events.CompileStarted: "on_compile",
    events.CompileEnded: "on_compiled",
    events.Notice: "on_notice",
    events.CohortStarted: "on_start",
    events.StatesCached: "on_prefix",
    events.CacheFull: "on_prefix_full",
    events.StepTaken: "on_step",
    events.RowsAnswered: "on_answer",
    events.EpochEnded: "on_epoch",
    events.RunEnded: "on_end",
    events.RunEntered: "on_enter",
    events.MemoryRanOut: "on_fallback",
}


class Hooks:
    """Calls `on_step(cohort, num_rows)` and so on with an event's fields, where there is such a method."""

    def __call__(self, event: events.Event) -> None:
        hear = getattr(self, _METHODS.get(type(event), ""), None)
        if hear is not None:
            hear(*vars(event).values())
