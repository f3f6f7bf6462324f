"""`inlay study NAME|all|list|report`: reproduces published tables and figures; finished runs are never repeated."""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inlay.cli import screen
from inlay.cli.flags import (
    REUSE,
    DeviceOption,
    JsonOption,
    OnOption,
    RayCpusOption,
    RayGpusOption,
    StoreOption,
    changes,
    command_options,
)
from inlay.cli.lazy_packages import pipeline
from inlay.cli.screen import Column
from inlay.cli.study_dry_run import describe, describe_others, forecast
from inlay.errors import BadConfig, Missing, UnknownName
from inlay.settings import FitSettings
from inlay.store import Store

if TYPE_CHECKING:
    from inlay.cluster import RaySettings
    from inlay.data import Task
    from inlay.model import Backbone
    from inlay.studies import SessionResult, Study, StudyDirs, StudyPlan


NamesArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="NAME…",
        help="studies (or your own files), or `all`; `list` lists them; `report` draws what was measured",
    ),
]
ProfileOption = Annotated[
    str,
    typer.Option(
        "--profile",
        metavar="paper|long|device|laptop|tiny",
        help="paper: the published grid; device: a short one for a GPU; laptop: one for two CPU cores (some studies);"
        " tiny: a trial; long: more steps (multi-task studies; `multitask` also has `longer`)",
    ),
]
BackboneOption = Annotated[
    str | None,
    typer.Option(
        "--backbone", metavar="NAME", help="use this backbone, not the profile's; with `report`: only this one"
    ),
]
ArmsOption = Annotated[
    str | None, typer.Option("--arms", metavar="A,B,…", help="only these arms; patterns such as `top-*` work")
]
TasksOption = Annotated[str | None, typer.Option("--tasks", metavar="A,B,…", help="only these tasks")]
BudgetOption = Annotated[
    str | None,
    typer.Option("--budget", metavar="10m", help="stop after this time; the most valuable runs come first"),
]
JobsOption = Annotated[
    int,
    typer.Option("--jobs", metavar="N", min=1, help="processes that share the device; for GPUs and for fine-tuning"),
]
MemoryOption = Annotated[
    float,
    typer.Option("--memory-share", metavar="0.5", help="share of a GPU's memory to use, if others use it too"),
]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="show the runs, cohorts, time and memory, and train nothing")
]
MeasureOption = Annotated[
    bool, typer.Option("--measure/--no-measure", help="with --dry-run: time a step of each kind, or only count")
]
ReportOption = Annotated[
    bool,
    typer.Option("--report/--no-report", help="at the end, draw the report and answer GLUE's test sets"),
]
RetrainOption = Annotated[
    bool,
    typer.Option(
        "--retrain",
        help="to answer GLUE's test sets, train the best runs again if their weights are gone; ignores --budget",
    ),
]
SkipOption = Annotated[bool, typer.Option("--skip-missing", help="leave out data sets that are not there")]
RootOption = Annotated[
    str | None, typer.Option("--data-root", metavar="DIR", help="folder of the data sets; default: $INLAY_DATA")
]
OutOption = Annotated[
    Path | None,
    typer.Option("--out", metavar="DIR", help="folder of results; default: ./results (for tiny, in the store)"),
]
CommitOption = Annotated[
    str | None, typer.Option("--commit", metavar="ID", help="commit to write into records, if the checkout has no .git")
]


@command_options(fit=(*REUSE, "checkpointing", "threads"))
def study(
    effort: FitSettings,
    names: NamesArgument,
    profile: ProfileOption = "device",
    backbone: BackboneOption = None,
    arms: ArmsOption = None,
    tasks: TasksOption = None,
    budget: BudgetOption = None,
    jobs: JobsOption = 1,
    memory_share: MemoryOption = 1.0,
    on: OnOption = None,
    ray_cpus: RayCpusOption = 1,
    ray_gpus: RayGpusOption = 0,
    dry_run: DryRunOption = False,
    measure: MeasureOption = True,
    report: ReportOption = True,
    retrain: RetrainOption = False,
    skip_missing: SkipOption = False,
    data_root: RootOption = None,
    out: OutOption = None,
    commit: CommitOption = None,
    device: DeviceOption = "auto",
    store: StoreOption = None,
    json: JsonOption = False,
) -> None:
    """Reproduce published tables and figures.

    Trains the runs that have no record yet, in cohorts, and appends their records to DIR/STUDY/BACKBONE-PROFILE.jsonl.
    Several studies (`glue,extra` or `all`) are one list of work: a run that several of them need is trained once, and
    the most valuable runs of each come first.

    It can be stopped at any moment, and the same command continues. Results of other machines can be copied into the
    same folder. Started in several terminals, or on machines that share the folders, it does each run once; with `--on
    ray` the machines of a Ray cluster do the work.

    At the end it draws tables and figures, and compares them with the published claims, in report.html and report.md.
    `inlay study report` only draws them again: for all studies or those named after it, on all backbones or on that of
    `--backbone`.
    """
    from inlay.studies import find_study, list_studies, read_study, study_folders

    began = time.monotonic()
    folders = study_folders()
    known = list_studies(folders)
    names = [part.strip() for name in names for part in name.split(",") if part.strip()]
    if names == ["list"]:
        _print_list(_having(known.values(), profile), profile, as_json=json)
        return
    kept = Store(store).root / "studies"
    results = out or (
        kept / "results" if profile == "tiny" else Path("results")
    )  # results of `tiny` are not for committing
    if names[:1] == ["report"]:
        chosen = [find_study(name, folders) for name in names[1:] if name != "all"] or list(known.values())
        of_runs = {"--arms": arms, "--tasks": tasks, "--budget": budget, "--dry-run": dry_run or None, "--on": on}
        for option, value in of_runs.items():
            if value is not None:  # a report shows whole studies
                hint = "name the studies after `report`, and choose a backbone with `--backbone`"
                raise BadConfig(f"`study report` has no `{option}`", hint)
        _print_report(chosen, results, backbone, as_json=json)
        return
    # Everything is read and checked before the first run is trained.
    pipeline.check_device_name(device)
    if not 0 < memory_share <= 1:
        raise BadConfig(f"`--memory-share {memory_share:g}` is not a share", "give more than 0 and at most 1")
    cluster = None if on is None else pipeline.parse_cluster(on, ray_cpus, ray_gpus)
    if cluster is not None and (jobs, memory_share) != (1, 1.0):
        raise BadConfig(
            "`--on` does not go with `--jobs` or `--memory-share`",
            "use `--ray-cpus` and `--ray-gpus` to share a machine",
        )
    deadline = None if budget is None else began + pipeline.parse_budget(budget)
    chosen = _having(known.values(), profile) if names == ["all"] else [find_study(name, folders) for name in names]
    if cluster is not None and not dry_run:
        from inlay.cluster import connect

        connect(cluster.address)  # fails before any data is read
    paths = list({path.stem: path for path in chosen}.values())
    studies = [narrow(read_study(path, profile, backbone), arms, tasks) for path in paths]
    studies = [dataclasses.replace(item, fit={**item.fit, **changes(effort)}) for item in studies]
    from inlay.studies import StudyDirs

    command = _StudyCommand(kept, StudyDirs(results, kept / "runs"), data_root, device, skip_missing, commit, retrain)
    plans = [command.prepare(item) for item in studies]
    if dry_run:
        forecast(plans, command.dirs, measured=measure, as_json=json)
        return
    result = command.train(plans, deadline, jobs, memory_share, cluster)
    reports = [_describe_result(plan, result, command.dirs) for plan in plans]
    drawn = {}
    if report:
        for plan, described in zip(plans, reports, strict=True):
            command.answer(plan, result, described)
        drawn = {"report": str(_draw(paths, results))}
    _print_results(reports, result, drawn, as_json=json)


def _print_results(
    reports: Sequence[dict[str, Any]], result: SessionResult, drawn: dict[str, str], *, as_json: bool
) -> None:
    num_left = len({item.id for item in result.missing})
    seconds = round(result.seconds, 1)
    if as_json:
        totals = {"trained": result.total_trained, "left": num_left, "seconds": seconds}
        screen.emit_json({"studies": reports, **totals, **drawn})
        return
    for described in reports:
        _print_result(described, is_alone=len(reports) == 1)
    if len(reports) > 1:
        missing = f", {num_left} missing" if num_left else ""
        trained = f"{screen.count(result.total_trained, 'run')} trained in {screen.duration(seconds)}{missing}"
        screen.emit_pairs({"together": f"{trained}; runs of several studies are counted once"})
    if drawn:
        screen.emit_pairs(drawn)


def _print_report(paths: Sequence[Path], results: Path, backbone: str | None, *, as_json: bool) -> None:
    """Draw the report of these studies and print its path; refuse if there are no results."""
    if not any(path.suffix in (".json", ".jsonl") for path in results.glob("*/*.json*")):
        raise Missing(f"no results in `{results}`", "run a study first, or say where its results are with `--out DIR`")
    page = _draw(paths, results, backbone)
    if as_json:
        screen.emit_json({"report": str(page), "markdown": str(page.with_suffix(".md"))})
    else:
        screen.emit_pairs({"report": page, "markdown": page.with_suffix(".md")})


def _draw(paths: Sequence[Path], results: Path, backbone: str | None = None) -> Path:
    """Draw the report of these studies, on one backbone or on all with results; return the path of its page."""
    from inlay.studies import draw_report

    with screen.working("drawing tables and figures"):
        return draw_report(paths, results, backbone)


def _having(paths: Iterable[Path], profile: str) -> list[Path]:
    """List the studies that have a profile; if none has, all of them, so that they are refused by name."""
    from inlay.studies import has_profile

    all_paths = list(paths)
    return [path for path in all_paths if has_profile(path, profile)] or all_paths


def narrow(study: Study, arms: str | None, tasks: str | None) -> Study:
    """Return a study with only some of its arms and tasks."""
    chosen, where = dict(study.arms), f"of `{study.name}` ({study.profile})"
    if arms is not None:
        chosen = {name: study.arms[name] for name in _choose(arms, list(study.arms), f"arm {where}")}
    kept = study.tasks if tasks is None else tuple(_choose(tasks, study.tasks, f"task {where}"))
    return dataclasses.replace(study, arms=chosen, tasks=kept)


def _choose(given: str, known: Sequence[str], kind: str) -> list[str]:
    patterns = [part.strip() for part in given.split(",") if part.strip()]
    for pattern in patterns:
        if not fnmatch.filter(known, pattern):
            raise UnknownName(kind, pattern, known)
    return [name for name in known if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]


@contextlib.contextmanager
def _resumable() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt("stopped and saved: the same command continues from there") from None


@dataclass
class _StudyCommand:
    """The steps of `inlay study`, with the settings that all its studies share."""

    kept: Path
    dirs: StudyDirs
    data_root: str | None
    device: str
    skip_missing: bool
    commit: str | None
    retrain: bool
    _backbones: dict[str, Backbone] = field(default_factory=dict)
    _tasks: dict[Any, Task] = field(default_factory=dict)

    def prepare(self, study: Study) -> StudyPlan:
        """Read a study's data and plan its runs; print what is left out."""
        from inlay.studies import load_tasks, plan_study

        screen.log(f"study {study.name}: {study.title}", "bold")
        with screen.working(f"reading {screen.count(len(study.tasks), 'data set')}"):
            tasks, missing = load_tasks(study, self.data_root, skip_missing=self.skip_missing, known=self._tasks)
        plan = plan_study(study, self._open(study), tasks, missing, root=self.data_root)
        for text in plan.left_out:
            screen.detail(f"left out: {text}")
        for text in describe_others(plan, self.dirs):
            screen.detail(text)
        return plan

    def _open(self, study: Study) -> Backbone:
        from inlay.model import make_tiny_folder
        from inlay.studies import WORDS

        name = study.backbone
        if name not in self._backbones:
            try:
                found = str(make_tiny_folder(self.kept / "tiny", WORDS)) if name == "tiny" else name
                self._backbones[name] = pipeline.open_backbone(found, self.device)
            except Missing as error:
                reason = f"{error.message}, which study `{study.name}` runs on"
                raise Missing(reason, f"{error.hint}; or use another with `--backbone`") from None
        return self._backbones[name]

    def train(
        self,
        plans: Sequence[StudyPlan],
        deadline: float | None,
        num_jobs: int,
        memory_share: float,
        cluster: RaySettings | None,
    ) -> SessionResult:
        """Train the missing runs, in this process, in several, or on a cluster."""
        from inlay.cli.study_progress import JobsProgress, ScreenProgress
        from inlay.studies import JobSettings, run_studies, run_studies_in_jobs, run_studies_on_ray
        from inlay.training import limit_memory_share

        for plan in plans:
            limit_memory_share(plan.backbone.device, memory_share)
        with _resumable():
            if cluster is not None:
                device = None if self.device == "auto" else self.device
                with JobsProgress() as progress:
                    return run_studies_on_ray(
                        *(plans, self.dirs, cluster),
                        device=device,
                        deadline=deadline,
                        commit=self.commit,
                        progress=progress,
                    )
            if num_jobs == 1:
                return run_studies(plans, self.dirs, deadline=deadline, commit=self.commit, progress=ScreenProgress())
            settings = JobSettings(num_jobs, self.device, self.data_root, self.skip_missing, self.commit, memory_share)
            with JobsProgress() as progress:
                return run_studies_in_jobs(plans, self.dirs, settings, deadline=deadline, progress=progress)

    def answer(self, plan: StudyPlan, result: SessionResult, report: dict[str, Any]) -> None:
        """Answer the test sets of a study that are scored by a server, and add the files to its report."""
        if not plan.study.submission or plan.study.is_toy:
            return
        from inlay.studies import choose_entries, list_gone, train_again, write_entries

        own = [record for record in result.records if record.study == plan.study.name]
        entries = choose_entries(plan, own, self.dirs, self.data_root)
        if self.retrain and (gone := list_gone(entries)):
            number = screen.count(len(gone), "run")
            screen.log(f"training again to answer the test sets: {number} without weights")
            with _resumable(), screen.Meter("training") as meter:
                train_again(plan, gone, self.dirs, pipeline.TrainingProgress(meter, num_runs=len(gone)))
        missing = [item for item in result.missing if item.study == plan.study.name]
        with screen.working("answering the test sets"):
            report["submission"] = write_entries(plan, entries, self.dirs, self.data_root, missing)


def _describe_result(plan: StudyPlan, result: SessionResult, dirs: StudyDirs) -> dict[str, Any]:
    from inlay.studies import results_file

    study = plan.study
    missing: dict[str, list[str]] = {}
    own = [item for item in result.missing if item.study == study.name]
    for item in own:
        missing.setdefault(item.arm.name, []).append(f"{', '.join(item.all_tasks)} seed {item.seed}")
    return {
        **describe(plan),
        "trained": result.num_trained[study.name],
        "seconds": round(result.seconds, 1),
        "left": len({item.id for item in own}),
        "missing": missing,
        "failed": [
            f"{item.arm.name} on {item.task}: {message}" for item, message in result.failed if item.study == study.name
        ],
        "file": str(results_file(dirs.results, study.name, plan.backbone.name, study.profile)),
    }


def _print_result(report: dict[str, Any], *, is_alone: bool) -> None:
    trained = screen.count(report["trained"], "run")
    screen.emit_pairs(
        {
            "study": f"{report['study']} ({report['profile']}) on {report['backbone']}",
            "trained": f"{trained} in {screen.duration(report['seconds'])}" if is_alone else trained,
            "missing": screen.count(report["left"], "run") if report["left"] else "nothing",
            "results": report["file"],
        }
    )
    for arm, where in report["missing"].items():
        screen.emit(f"  {arm}: {', '.join(dict.fromkeys(where))}")
    for text in report["failed"]:
        screen.emit(f"  failed: {text}")
    for text in report.get("submission", ()):
        screen.emit(f"  submission: {text}")


def _print_list(paths: Sequence[Path], profile: str, *, as_json: bool) -> None:
    from inlay.studies import read_study

    studies = [read_study(path, profile) for path in paths]
    if as_json:
        found = [
            {
                "study": study.name,
                "title": study.title,
                "source": study.source,
                "tasks": list(study.tasks),
                "arms": list(study.arms),
                "runs": study.num_runs,
            }
            for study in studies
        ]
        screen.emit_json({"profile": profile, "studies": found})
        return
    columns = [Column("study"), Column("tasks", True), Column("arms", True), Column(f"runs ({profile})", True)]
    cells = [
        [study.name, str(len(study.tasks)), str(len(study.arms)), str(study.num_runs), study.title] for study in studies
    ]
    screen.emit_table([*columns, Column("what it shows", is_flexible=True)], cells)
