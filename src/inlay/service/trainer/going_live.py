"""The way from a trained run to a live version: score, publish, prove, compare with the live version, and go live.

What always holds: a version goes live in one transaction, after it is complete in the store and loaded in the engine.
However often its trainer is killed, it is published once, because its content makes its name. A trainer that lost the
cohort's lease publishes nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from inlay.data import describe_unpredicted
from inlay.errors import InlayError
from inlay.reports import (
    Evaluation,
    answer_again,
    choose_rows,
    describe_outputs,
    evaluate_version,
    has_same_rows,
    leave_out,
)
from inlay.service.engine import EngineRefused
from inlay.service.logs import log_event
from inlay.service.state import JobNote, LiveMoved, Publication
from inlay.service.trainer.answering import TextRow
from inlay.service.trainer.job_data import PreparedJob, TrainerContext
from inlay.service.trainer.job_notes import TextCleaner, note_notes
from inlay.service.trainer.leases import FencedStore, Lease
from inlay.service.version_evaluations import NeedsAnswers, compare, find_comparison, read_evaluation, write_evaluation
from inlay.store import Manifest, Version
from inlay.training import Result, check_trained, judge_split, publish_result, report_run

_MOST_MOVES = 5  # of the alias `live`, while a version is being compared with the live one


@dataclasses.dataclass(frozen=True)
class Verdict:
    """A decision whether a version goes live, with the reason and the comparison with the live one (0: none)."""

    goes_live: bool
    reason: str
    compared_with: int | None = None
    comparison: dict[str, Any] | None = None


class GoingLive:
    """The way of one job's trained run into the store and perhaps live."""

    def __init__(self, ready: PreparedJob, context: TrainerContext, lease: Lease, words: TextCleaner) -> None:
        self._ready, self._context, self._lease, self._words = ready, context, lease, words
        self._folder = context.db.files.evaluations(ready.job.tenant, ready.job.task)

    def run(self, result: Result) -> None:
        """Judge, publish, prove and compare a trained run, and end its job."""
        ready, job = self._ready, self._ready.job
        check_trained(result)
        # 1. answer the dev rows; a run that cannot is not published
        answers, dev = self._answer_dev(result)
        # 2. publish, unless another trainer has the cohort by now
        fenced = dataclasses.replace(ready.prepared, store=FencedStore(self._context.store, self._lease))
        version = publish_result(fenced, result, name=ready.store_name)
        self._lease.check()
        manifest = self._context.store.manifest(version)
        evaluation = evaluate_version(version.number, manifest, dev, answers, ready.task.train)
        evaluation = dataclasses.replace(evaluation, num_dev=len(ready.task.dev))
        write_evaluation(self._folder, evaluation)
        report = self._report(result, version)
        self._note("published", f"version {version.number} is published", {"version": version.number} | report)
        # 3. load it into the engine, which answers its probes and compares them
        obstacle = self._prove(version)
        # 4. decide and end the job; decide again if another version went live meanwhile
        infos = self._context.store.versions(version.name)
        size_bytes = next(info.size_bytes for info in infos if info.version.number == version.number)
        for _ in range(_MOST_MOVES):
            verdict = Verdict(False, obstacle) if obstacle else self._judge(version, evaluation)
            publication = Publication(
                number=version.number,
                digest=version.digest,
                size_bytes=size_bytes,
                goes_live=verdict.goes_live,
                reason=verdict.reason,
                result={**report, "compare": verdict.comparison},
                compared_with=verdict.compared_with,
            )
            try:
                self._lease.check()
                self._context.queue.publish_live(self._lease.cohort, job.id, publication)
            except LiveMoved:
                continue
            return
        raise LiveMoved(job.task)

    def withdraw(self, before: set[int]) -> None:
        """Remove the versions that were published for a cancelled job; those in `before` stay."""
        store, name = self._context.store, self._ready.store_name
        for number in list_numbers(self._context, name) - before:
            store.remove(f"{name}@{number}")

    def _answer_dev(self, result: Result) -> tuple[list[dict[str, Any]], Any]:
        run = self._ready.prepared.run
        dev = choose_rows(run.task.dev, len(run.task.labels))
        found = judge_split(result.spec(run), result.tensors, self._context.backbone, dev, run.reading)
        return describe_outputs(found, dev, run.task.labels, run.task.name), dev

    def _report(self, result: Result, version: Version) -> dict[str, Any]:
        """Return the scores of a trained run as a job shows them, without paths and with the task's own name."""
        ready = self._ready
        known = report_run(ready.prepared, result, version)
        kept = ("kind", "metric", "metrics", "best_epoch", "probe", "still_rising", "num_parameters", "seconds")
        is_balanced = ready.prepared.run.config.train.class_weights == "balanced"
        notes = describe_unpredicted(ready.task, result.unpredicted, is_balanced=is_balanced)
        suspects = next(iter(result.history), {}).get("suspects") or None
        more = {"version": version.number, "notes": note_notes(notes, self._words), "suspects": suspects}
        return {**{name: known[name] for name in kept}, **more}

    def _prove(self, version: Version) -> str:
        """Load a version into the engine, which answers its probes; return why it must not go live, "" if it may."""
        try:
            loaded = self._context.answers.load((version.name, version.number), self._lease.check)
        except EngineRefused as refusal:
            log_event("a version was not proved", {"job": self._ready.job.id, "code": refusal.code}, level=40)
            reason = f"version {version.number} is not live: the engine refuses it: {refusal.message}"
            return self._words.clean(reason)
        if loaded is None:
            self._context.store.check(version)
            self._note("notice", "no engine is there: the version is loaded when it is first asked for")
            return ""
        data = {"version": version.number, "seconds": round(loaded.seconds, 3), "num_probes": loaded.num_probes}
        self._note("proved", f"{loaded.num_probes} probes are answered as they were", data)
        return ""

    def _judge(self, version: Version, evaluation: Evaluation) -> Verdict:
        """Decide by the job's policy whether a version goes live."""
        job = self._ready.job
        alias = self._context.workspace(job.tenant).alias(job.task)
        live = 0 if alias is None else alias.version
        if job.publish == "never":
            return Verdict(False, "not live: by its policy, versions of this task go live by hand")
        if version.number == live:
            return Verdict(False, f"the same as version {live}, which is live")
        if job.publish == "always":
            return Verdict(True, "live: by its policy, every new version of this task goes live")
        if not live:
            return Verdict(True, "live: the task's first version", 0)
        try:
            comparison = self._compare(live, evaluation)
            objection = self._find_objection(live, evaluation) if comparison["gain"] > 0 else ""
        except (InlayError, ValueError) as error:
            why = error.message if isinstance(error, InlayError) else "its answers are damaged"
            reason = f"not live: it cannot be compared with version {live}: {why}"
            return Verdict(False, self._words.clean(reason), live)
        goes_live = comparison["gain"] > 0 and not objection
        return Verdict(goes_live, objection or explain(comparison), live, comparison)

    def _compare(self, live: int, new: Evaluation) -> dict[str, Any]:
        """Compare the live version with a new one on the new one's dev rows, which the live one answers if needed."""
        store, name = self._context.store, self._ready.store_name

        def read_manifest(number: int) -> Manifest:
            return store.manifest(store.resolve(f"{name}@{number}"))

        found = find_comparison(self._folder, live, new.version, read_manifest)
        if not isinstance(found, NeedsAnswers):
            return compare(*found)
        moved = self._ask(found.owner, found.other)
        self._lease.check()
        write_evaluation(self._folder, moved)
        return compare(*((moved, found.owner) if moved.version == live else (found.owner, moved)))

    def _find_objection(self, live: int, new: Evaluation) -> str:
        """Return why a version that is better on its own dev rows must still not go live; "" if nothing speaks against.

        A bad dataset has bad dev rows too, on which the version that learned it looks good. So it must not be worse,
        beyond chance, on those of the live version's dev rows that are not in the new dataset.
        """
        old = read_evaluation(self._folder, live)
        if old is None or has_same_rows(old, new):
            return ""
        kept = leave_out(old, new)
        if not kept.rows:
            return ""
        comparison = compare(kept, self._ask(kept, new))
        return explain(comparison, "that it was judged by") if comparison["verdict"] == "worse" else ""

    def _ask(self, owner: Evaluation, other: Evaluation) -> Evaluation:
        """Have the version of `other` answer the rows of `owner`."""
        rows: list[TextRow] = list(owner.texts)
        version = (self._ready.store_name, other.version)
        answers = self._context.answers.answer(self._ready.caller, version, rows, self._lease.check)
        return answer_again(owner, other, answers)

    def _note(self, kind: str, message: str, data: Mapping[str, Any] = {}) -> None:
        note = JobNote(kind, message, data)
        self._context.queue.record(self._lease.cohort, self._ready.job.id, note)


def explain(comparison: Mapping[str, Any], which: str = "") -> str:
    """Return in words why a version goes live or not after a comparison with the live one; `which` describes the rows.

    The higher score decides, even where the difference may be chance: of two similar versions the newer one has seen
    more rows. Of two equal ones the live one stays.
    """
    metric, live, apart = comparison["metric"], comparison["a"], abs(comparison["difference"])
    rows = f"{comparison['num_rows']:,} rows" + (f" {which}" if which else "")
    scores = f"{metric} {comparison['score_b']:.4f} and {comparison['score_a']:.4f} on {rows}"
    is_chance = comparison["verdict"] == "no-difference"
    chance = f"; chance may explain it (p = {comparison['p_value']:.2g})" if is_chance else ""
    if comparison["gain"] > 0:
        return f"live: better than version {live} by {apart:.4f} ({scores}){chance}"
    if comparison["gain"] < 0:
        return f"not live: worse than version {live} by {apart:.4f} ({scores}){chance}"
    return f"not live: no better than version {live} ({scores})"


def list_numbers(context: TrainerContext, name: str) -> set[int]:
    """Return the numbers of a task's versions in the store."""
    try:
        return {info.version.number for info in context.store.versions(name)}
    except InlayError:
        return set()
