"""The reports room: a version's answers to its dev rows as scores, pages and model cards; runs and their folders.

Names are imported when they are first used, and most of them need no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from inlay.lazy_imports import import_lazily

if TYPE_CHECKING:
    from inlay.reports.diagrams import draw_calibration
    from inlay.reports.evaluations import (
        EvaluatedRow,
        Evaluation,
        answer_again,
        check_comparable,
        choose_rows,
        collect_targets,
        decide_rows,
        describe_outputs,
        describe_version,
        digest_rows,
        evaluate_version,
        find_trained,
        has_same_rows,
        leave_out,
        list_labels,
        read_answer,
    )
    from inlay.reports.forgetting import forget_task
    from inlay.reports.run_folders import (
        DeletedRuns,
        RunEntry,
        compare_runs,
        delete_runs,
        find_runs,
        list_runs,
        list_unneeded_runs,
    )
    from inlay.reports.run_reports import (
        OF_A_CANDIDATE,
        OF_A_FOLD,
        OF_A_SHARE,
        UNCHOSEN,
        PublishedPart,
        write_brief_reports,
        write_joint_report,
        write_run_report,
    )
    from inlay.reports.snippets import write_client, write_curl
    from inlay.reports.task_report import (
        TaskReport,
        report_version,
        write_reports,
    )
    from inlay.reports.version_reports import (
        SHOWN_LABELS,
        choose_labels,
        list_errors,
        make_report,
        spell_row,
    )
    from inlay.reports.wording import (
        capitalize_first,
        duration,
        is_share,
        level,
        metric_words,
        percent,
        plural,
        show_bytes,
        show_number,
        show_score,
    )

# fmt: off
_HOMES = {
    "inlay.reports.diagrams": ("draw_calibration",),
    "inlay.reports.evaluations": (
        "EvaluatedRow", "Evaluation", "answer_again", "check_comparable", "choose_rows", "decide_rows",
        "describe_outputs", "describe_version", "digest_rows", "evaluate_version", "find_trained", "has_same_rows",
        "leave_out", "list_labels", "collect_targets", "read_answer",
    ),
    "inlay.reports.forgetting": ("forget_task",),
    "inlay.reports.run_folders": (
        "DeletedRuns", "RunEntry", "compare_runs", "delete_runs", "find_runs", "list_runs", "list_unneeded_runs",
    ),
    "inlay.reports.run_reports": (
        "OF_A_CANDIDATE", "OF_A_FOLD", "OF_A_SHARE", "UNCHOSEN", "PublishedPart", "write_brief_reports",
        "write_joint_report", "write_run_report",
    ),
    "inlay.reports.snippets": ("write_client", "write_curl"),
    "inlay.reports.task_report": ("TaskReport", "report_version", "write_reports"),
    "inlay.reports.version_reports": ("SHOWN_LABELS", "choose_labels", "list_errors", "make_report", "spell_row"),
    "inlay.reports.wording": (
        "duration", "capitalize_first", "is_share", "level", "metric_words", "percent", "plural", "show_bytes",
        "show_number", "show_score",
    ),
}
# fmt: on
__getattr__ = import_lazily(__name__, _HOMES)

__all__ = [
    "OF_A_CANDIDATE",
    "OF_A_FOLD",
    "OF_A_SHARE",
    "SHOWN_LABELS",
    "UNCHOSEN",
    "DeletedRuns",
    "EvaluatedRow",
    "Evaluation",
    "PublishedPart",
    "RunEntry",
    "TaskReport",
    "answer_again",
    "capitalize_first",
    "check_comparable",
    "choose_labels",
    "choose_rows",
    "collect_targets",
    "compare_runs",
    "decide_rows",
    "delete_runs",
    "describe_outputs",
    "describe_version",
    "digest_rows",
    "draw_calibration",
    "duration",
    "evaluate_version",
    "find_runs",
    "find_trained",
    "forget_task",
    "has_same_rows",
    "is_share",
    "leave_out",
    "level",
    "list_errors",
    "list_labels",
    "list_runs",
    "list_unneeded_runs",
    "make_report",
    "metric_words",
    "percent",
    "plural",
    "read_answer",
    "report_version",
    "show_bytes",
    "show_number",
    "show_score",
    "spell_row",
    "write_brief_reports",
    "write_client",
    "write_curl",
    "write_joint_report",
    "write_reports",
    "write_run_report",
]
