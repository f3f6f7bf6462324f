"""The claims of studies' files, each held against our records: confirmed, not confirmed or open, with a sentence.

What a claim compares is in `rules.py`, what makes it confirmed in `verdicts.py`, what it is sure by in `bounds.py`.
Claims are judged for each backbone and profile by itself, and those of one of them are a family of verdicts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from inlay.studies.judge.bounds import CHANCE, reach, show
from inlay.studies.judge.coverage import match_rows
from inlay.studies.judge.gaps import describe_ends, find_gaps
from inlay.studies.judge.rules import JUDGES
from inlay.studies.judge.scored import ScoredStudy
from inlay.studies.judge.verdicts import NONE, OPEN, ClaimVerdict, hold_together
from inlay.studies.spec.report_spec import Claim

LIKE = 0.5
"""points by which our and the published difference may differ and still agree, if ours is known to twice as many"""


@dataclass(frozen=True)
class JudgedClaim:
    """A claim with its verdict on one backbone."""

    claim: Claim
    verdict: ClaimVerdict
    stands: bool = False
    """whether it holds together with all others that stand: the chance that one of them is wrong is 5%"""


def judge_claims(claims: Sequence[Claim], studies: Mapping[str, ScoredStudy]) -> list[JudgedClaim]:
    """Judge claims on one backbone by its studies, given by name; a claim whose study was not run has no verdict."""
    found = [_judge(claim, studies.get(claim.study)) for claim in claims]
    return [JudgedClaim(*item) for item in zip(claims, found, hold_together(found), strict=True)]


def _judge(claim: Claim, scored: ScoredStudy | None) -> ClaimVerdict:
    """Judge a claim; it is open, with the reason, while planned runs of its rows are missing."""
    if scored is None or not scored.rows:
        return ClaimVerdict(NONE, "its study has not been run")
    found = JUDGES[claim.rule](scored, claim)
    rows = match_rows(scored.rows, found.rows)
    if found.rows != ("*",):  # not for claims on all rows: the table of settings says it
        found = replace(found, sentence="; ".join((found.sentence, *describe_ends(scored, rows, found.tasks))))
    gap = scored.coverage.find_gap(found.rows, found.tasks)
    if not gap:
        return found
    return replace(found, status=OPEN, chance=1.0, sentence=f"{found.sentence}; open while {gap.text}")


def describe_agreement(scored: ScoredStudy) -> list[str]:
    """Say of each row with a published difference to the reference whether ours agrees with it."""
    sentences = []
    for key in scored.rows:
        gaps = find_gaps(scored, key)
        if gaps is None:
            continue
        ours, theirs = gaps.ours, gaps.published
        distance = abs(ours.estimate.mean - theirs)
        bound = reach(ours.estimate, CHANCE / 2, new_rows=True)
        does = "as published" if distance <= LIKE else "not as published"
        if distance <= bound and (distance > LIKE or bound > 2 * LIKE):
            does = f"open, since our 95% bound is ± {bound:.1f}"
        does = "open, with one seed" if ours.estimate.sem is None else does
        does = "open, since the number of rows is not known" if ours.estimate.rows is None else does
        gap = scored.coverage.find_gap((key, scored.reference or ""), gaps.tasks)
        does = f"open while {gap.count}" if gap else does
        sentences.append(
            f"{scored.label(key)} less {scored.label(scored.reference or '')} ({gaps.over}): ours "
            f"{show(ours.estimate, signed=True)}, published {show(theirs, signed=True)}: {does} "
            f"({distance:.1f} points apart)"
        )
    return sentences
