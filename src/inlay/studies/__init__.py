"""Published tables and figures as files that can be run, judged and drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inlay.lazy_imports import import_lazily

if TYPE_CHECKING:
    from inlay.studies.glue_server import choose_entries, list_gone, train_again, write_entries
    from inlay.studies.report.report import draw_report
    from inlay.studies.run.estimate import Estimate, estimate_units
    from inlay.studies.run.records import StudyDirs, StudyRecords, count_other_poolings, results_file
    from inlay.studies.run.session import SessionResult, StudyProgress, make_agenda, run_studies
    from inlay.studies.run.units import Unit
    from inlay.studies.run.units_on_ray import run_studies_on_ray
    from inlay.studies.run.worker_processes import JobSettings, run_studies_in_jobs
    from inlay.studies.spec.planning import StudyPlan, load_tasks, plan_study
    from inlay.studies.spec.study import Study, find_study, has_profile, list_studies, read_study, study_folders
    from inlay.studies.spec.toy import WORDS

__getattr__ = import_lazily(
    __name__,
    {
        "inlay.studies.glue_server": ("choose_entries", "list_gone", "train_again", "write_entries"),
        "inlay.studies.report.report": ("draw_report",),
        "inlay.studies.run.estimate": ("Estimate", "estimate_units"),
        "inlay.studies.run.units_on_ray": ("run_studies_on_ray",),
        "inlay.studies.run.records": ("StudyDirs", "StudyRecords", "count_other_poolings", "results_file"),
        "inlay.studies.run.session": ("SessionResult", "StudyProgress", "run_studies", "make_agenda"),
        "inlay.studies.run.units": ("Unit",),
        "inlay.studies.run.worker_processes": ("JobSettings", "run_studies_in_jobs"),
        "inlay.studies.spec.planning": ("StudyPlan", "load_tasks", "plan_study"),
        "inlay.studies.spec.study": (
            "Study",
            "find_study",
            "has_profile",
            "list_studies",
            "read_study",
            "study_folders",
        ),
        "inlay.studies.spec.toy": ("WORDS",),
    },
)

__all__ = [
    "WORDS",
    "Estimate",
    "JobSettings",
    "SessionResult",
    "Study",
    "StudyDirs",
    "StudyPlan",
    "StudyProgress",
    "StudyRecords",
    "Unit",
    "choose_entries",
    "count_other_poolings",
    "draw_report",
    "estimate_units",
    "find_study",
    "has_profile",
    "list_gone",
    "list_studies",
    "load_tasks",
    "make_agenda",
    "plan_study",
    "read_study",
    "results_file",
    "run_studies",
    "run_studies_in_jobs",
    "run_studies_on_ray",
    "study_folders",
    "train_again",
    "write_entries",
]
