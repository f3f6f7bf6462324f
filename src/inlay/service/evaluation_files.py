"""Files of evaluations, one for each version that the trainer published, and for each one that answered another's rows.

What always holds: a file is whole and says its own checksum; a damaged one is an error and never half read.
"""

from __future__ import annotations

import hashlib

import msgspec

from inlay.errors import StoreDamaged
from inlay.reports import Evaluation
from inlay.service.state import SharedFolder

_FORMAT = 1


class _EvaluationFile(msgspec.Struct):
    format: int
    sha256: str
    evaluation: msgspec.Raw


def write_evaluation(folder: SharedFolder, evaluation: Evaluation) -> None:
    """Write an evaluation into the folder of its task, whole or not at all."""
    content = msgspec.json.encode(evaluation)
    sealed = _EvaluationFile(_FORMAT, hashlib.sha256(content).hexdigest(), msgspec.Raw(content))
    folder.write(_find_name(evaluation.version, evaluation.rows_of), msgspec.json.encode(sealed))


def read_evaluation(folder: SharedFolder, version: int, rows_of: int | None = None) -> Evaluation | None:
    """Read a version's evaluation, on the dev rows of version `rows_of` if they are not its own; None if there is none.

    One that is damaged is a `StoreDamaged`.
    """
    try:
        content = folder.read(_find_name(version, rows_of))
    except FileNotFoundError:
        return None
    try:
        sealed = msgspec.json.decode(content, type=_EvaluationFile)
        if sealed.format != _FORMAT:
            raise ValueError(f"format {sealed.format}")
        if hashlib.sha256(sealed.evaluation).hexdigest() != sealed.sha256:
            raise ValueError("it is not what was written")
        evaluation = msgspec.json.decode(sealed.evaluation, type=Evaluation)
        if (evaluation.version, evaluation.rows_of) != (version, rows_of):
            raise ValueError("it is another version's")
    except (ValueError, msgspec.DecodeError, RecursionError) as error:
        raise StoreDamaged(
            f"the evaluation of version {version} is damaged: {error}",
            "its task answers as before; to have a report again, train it again",
        ) from None
    return evaluation


def _find_name(version: int, rows_of: int | None) -> str:
    return f"{version}.json" if rows_of is None else f"{version}-on-{rows_of}.json"
