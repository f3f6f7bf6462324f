"""A study as its file defines it: `studies/NAME.toml` with its tasks, arms, axes, profiles, report and claims.

An arm is one row of a published table or one point of a figure. Its settings override the study's own, its axes make a
grid, and every point of the grid is a run for each task and seed. A profile (`paper`, `device`, `tiny`, in some studies
others) overrides all of this: a table is merged key by key, a list or a value replaces the one below. With `base`, a
profile overrides another profile. A table with `each` makes several arms (`adapters-{size}`); a table with the name of
one of them (`adapters-512`) overrides that arm. `from = "STUDY/ARM"` makes an arm start from the weights that another
study trained, under the same profile and on the same backbone. `most_samples` is the number of training rows of a task;
larger samples of it are left out. `[report]` and `[[claims]]` define how the study is shown and judged
(`report_spec.py`); they are the same under every profile.

Everything is checked on reading, so that a study that cannot be trained is refused before its first run.

Kinds of arms (ARM_KINDS): `runs` are trained in cohorts; `spans` are such runs, scored again without the adapters of
each span of layers; a `baseline` has no transformer; a `sequence` is one network fine-tuned on all tasks in turn;
`joint` is one run of all tasks; `single` is the same for each task by itself, with as many steps.
`studies/run/units.py` does the work of each kind.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inlay.errors import BadConfig, InlayError, UnknownName
from inlay.settings import DataConfig, FitSettings, RunConfig, apply_preset, from_tree, overlay, read_tree
from inlay.studies.spec.report_spec import SETTINGS, Claim, ReportSpec, read_claims, read_report

TOY = "toy"
"""the value of `rows` in a profile with generated rows"""

_STUDY_KEYS = frozenset(
    "title source report_on published figures notes tasks seeds train method joint data arms per_task backbone "
    "submission fit rows paired_rows most_rows most_samples like without report claims profiles".split()
)
_ONCE = frozenset(("report", "claims"))  # the same under every profile
_ARM_KEYS = frozenset("kind title preset method train joint axes each seeds tasks min_layers sample from".split())
_FIT_KEYS = frozenset(("token_budget", "max_cohort", "checkpointing"))
_SIDES = frozenset(("dev", "test"))

LEFT_OPEN = (None, "auto", ())
"""values of settings that the backbone or the method decides"""


@dataclass(frozen=True)
class ArmKind:
    """A kind of arm."""

    is_trained: bool
    """whether each point is a run for `fit`"""
    spans_tasks: bool = False
    """whether one run has all tasks, together or in turn"""
    is_joint: bool = False
    """whether its runs may have several tasks that share parameters; their length is a number of steps"""
    needs_backbone: bool = True
    """whether it trains on the backbone"""


ARM_KINDS = {
    "runs": ArmKind(is_trained=True),
    "spans": ArmKind(is_trained=True),
    "joint": ArmKind(is_trained=True, spans_tasks=True, is_joint=True),
    "single": ArmKind(is_trained=True, is_joint=True),
    "baseline": ArmKind(is_trained=False, needs_backbone=False),
    "sequence": ArmKind(is_trained=False, spans_tasks=True),
}


@dataclass(frozen=True)
class Point:
    """One point of an arm's grid: the values on its axes, and the whole config (seed 0)."""

    axes: dict[str, Any]
    config: RunConfig


@dataclass(frozen=True)
class Arm:
    """One row of a study's table."""

    name: str
    kind: str
    title: str
    settings: Mapping[str, Any]
    """preset, method, train and joint, as the file gives them"""
    axes: Mapping[str, tuple[Any, ...]]
    """short name of a setting (`lr`, `size`) -> its values"""
    seeds: int
    tasks: tuple[str, ...]
    min_layers: int = 0
    """number of layers the backbone needs at least"""
    sample: int | None = None
    """most training rows of each task, drawn by the seed. A task that has fewer is trained on all of them in a run of
    several tasks (`joint`), and is left out of an arm of single tasks (`single`)"""
    source: str = ""
    """`STUDY/ARM` whose trained run it starts from"""

    def points(self, per_task: Mapping[str, Any] | None = None) -> list[Point]:
        """Return the grid of one task; `per_task` has the task's own values on some axes."""
        own = {key: tuple(value) if isinstance(value, list) else (value,) for key, value in (per_task or {}).items()}
        base = self.base()
        points = []
        for chosen in _list_combinations({**self.axes, **own}):
            tree: dict[str, dict[str, Any]] = {}
            for key, value in chosen.items():
                tree.setdefault(_section_of(key), {})[key] = value
            points.append(Point(chosen, overlay(base, tree)))
        return points

    def base(self) -> RunConfig:
        """Return the arm's settings before its axes: the preset, then the file's settings."""
        config = RunConfig()
        if "preset" in self.settings:
            config = apply_preset(str(self.settings["preset"]), config)
        return overlay(config, {key: self.settings[key] for key in SETTINGS if key in self.settings})


@dataclass(frozen=True)
class Study:
    """A study under one of its profiles."""

    name: str
    title: str
    profile: str
    source: str
    """the paper and the table or figure that is reproduced"""
    report_on: str
    published: str
    """name of the file in `studies/published` with the values to compare with; may be empty"""
    notes: tuple[str, ...]
    backbone: str
    tasks: tuple[str, ...]
    arms: Mapping[str, Arm]
    data: Mapping[str, Mapping[str, Any]]
    """task -> its own data settings"""
    per_task: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    submission: bool = False
    """whether the test sets' answers are written for GLUE's server"""
    fit: Mapping[str, Any] = field(default_factory=dict)
    is_toy: bool = False
    """whether rows are generated, to try a study out; such results mean nothing"""
    paired_rows: bool = False
    """whether each run answers its dev rows once more at the end, to measure the covariances of runs on the same rows
    (`judge/row_sampling.py`)"""
    most_rows: Mapping[str, int] = field(default_factory=dict)
    """most dev and test rows of a task"""
    like: Mapping[str, str] = field(default_factory=dict)
    """task -> the task of the source study whose parameters it starts with"""
    sources: Mapping[str, Study] = field(default_factory=dict)
    """the studies that arms start from, by name"""
    report: ReportSpec = field(default_factory=ReportSpec)
    """its rows, tables and figures"""
    claims: tuple[Claim, ...] = ()

    def data_config(self, task: str, root: str | None) -> DataConfig:
        """Return a task's data settings, with `{root}` in paths replaced by the folder of the data sets.

        Without `root`, paths stay as the study's file has them, equal on every machine.
        """
        given = dict(self.data.get(task, {}))
        for key in ("source", "dev", "test"):
            if key in given and root is not None:
                given[key] = str(given[key]).replace("{root}", root.rstrip("/"))
        return from_tree(DataConfig, {"source": task, "root": root, **given})

    def points(self) -> Iterator[tuple[Arm, str, Point]]:
        """Yield every arm, task and setting, in the order of the file.

        Runs of several tasks have the arm's own grid; others may have values of their task (`per_task`).
        """
        for arm in self.arms.values():
            made: dict[str, list[Point]] = {}  # most tasks have the same grid
            for task in arm.tasks:
                own = {} if ARM_KINDS[arm.kind].spans_tasks else self.per_task.get(task, {})
                if repr(own) not in made:
                    made[repr(own)] = arm.points(own)
                for point in made[repr(own)]:
                    yield arm, task, point

    @property
    def num_runs(self) -> int:
        """Number of runs: every setting with every seed, per task or once for all tasks; shared runs count once."""
        firsts = {arm.name: arm.tasks[0] for arm in self.arms.values() if ARM_KINDS[arm.kind].spans_tasks and arm.tasks}
        seeds: dict[tuple[Any, ...], int] = {}
        for arm, task, point in self.points():
            if firsts.get(arm.name, task) == task:
                kind = "runs" if arm.kind == "spans" else arm.kind
                rows = (task, arm.sample, arm.tasks if arm.name in firsts else ())
                asked = (kind, *rows, repr(point.config.method), repr(point.config.train), repr(point.config.joint))
                seeds[asked] = max(arm.seeds, seeds.get(asked, 0))
        return sum(seeds.values())


def find_study(name: str, folders: Iterable[Path]) -> Path:
    """Find the file of a study, given its path, or its name in one of `folders`."""
    if name.endswith(".toml") and Path(name).is_file():
        return Path(name)
    known = list_studies(folders)
    if name not in known:
        raise UnknownName("study", name, [*known, "all"])
    return known[name]


def list_studies(folders: Iterable[Path]) -> dict[str, Path]:
    """List every study by name; of two with one name, the first folder's."""
    found: dict[str, Path] = {}
    for folder in folders:
        for path in sorted(folder.glob("*.toml")):
            found.setdefault(path.stem, path)
    return found


def has_profile(path: Path, profile: str) -> bool:
    """Tell whether a study's file has a profile of this name."""
    return profile in read_tree(path).get("profiles", {})


def study_folders() -> list[Path]:
    """List the folders of studies: `./studies`, then those of the checkout or the installed package."""
    installed = Path(sysconfig.get_path("data")) / "share" / "inlay" / "studies"
    return [Path("studies"), Path(__file__).parents[4] / "studies", installed]


def read_study(path: Path, profile: str, backbone: str | None = None) -> Study:
    """Read the study of a file under a profile, with every setting checked.

    `backbone` replaces the profile's backbone, and the profile's table `backbones.NAME`, if there is one, overrides the
    profile.
    """
    tree = read_tree(path)
    profiles = tree.get("profiles", {})
    if profile not in profiles:
        raise UnknownName(f"profile of study `{path.stem}`", profile, profiles)
    _check_keys(tree, _STUDY_KEYS, "")
    chosen = _find_profile(profiles, profile, path)
    merged = _merge({key: value for key, value in tree.items() if key != "profiles"}, chosen)
    others = merged.pop("backbones", {})
    if backbone is not None:
        merged = _merge({**merged, "backbone": backbone}, others.get(backbone.rstrip("/").rpartition("/")[2], {}))
    try:
        study = _make_study(path.stem, profile, merged)
        return dataclasses.replace(study, sources=_read_sources(path, study))
    except InlayError as error:
        raise BadConfig(f"{path}: {error.message}", error.hint) from None


def _find_profile(profiles: Mapping[str, Any], name: str, path: Path) -> dict[str, Any]:
    """Return the settings of a profile, merged with those of its base."""
    found: dict[str, Any] = {}
    seen = [name]
    while True:
        where = f"profiles.{seen[-1]}."
        _check_keys(profiles[seen[-1]], _STUDY_KEYS - _ONCE - {"profiles"} | {"backbones", "base"}, where)
        own = dict(profiles[seen[-1]])
        backbones = own.get("backbones", {})
        _check_keys(backbones, backbones, f"{where}backbones.")  # a table with any names
        for backbone, settings in backbones.items():
            _check_keys(settings, _STUDY_KEYS - _ONCE - {"profiles", "backbone"}, f"{where}backbones.{backbone}.")
        base = own.pop("base", None)
        found = _merge(own, found)
        if base is None:
            return found
        others = [each for each in profiles if each not in seen]
        if base not in others:
            raise UnknownName(f"profile in `{path}` that `{seen[-1]}` may be based on", str(base), others)
        seen.append(base)


def _read_sources(path: Path, study: Study) -> dict[str, Study]:
    """Read the studies that arms start from, which lie beside the file or are known by name."""
    sources: dict[str, Study] = {}
    for arm in (arm for arm in study.arms.values() if arm.source):
        name, _, wanted = arm.source.partition("/")
        if name not in sources:
            beside = path.parent / f"{name}.toml"
            found = beside if beside.is_file() else find_study(name, study_folders())
            sources[name] = read_study(found, study.profile, study.backbone)
        known = [key for key, each in sources[name].arms.items() if each.kind == "joint"]
        if wanted not in known:
            raise UnknownName(f"arm of several tasks that `{arm.name}` can start from", wanted, known)
    return sources


def _make_study(name: str, profile: str, tree: Mapping[str, Any]) -> Study:
    for key in ("title", "tasks", "arms", "backbone"):
        if not tree.get(key):
            raise BadConfig(f"`{key}` is missing", "see the other files in `studies/` for an example")
    report_on = tree.get("report_on", "dev")
    if report_on not in ("dev", "test"):
        raise BadConfig(f"`report_on` is `{report_on}`", "it must be dev or test")
    if tree.get("rows", TOY) != TOY:
        raise BadConfig(f"`rows` is `{tree['rows']}`", "leave it out, or write `toy` for generated rows")
    _check_keys(tree.get("fit", {}), _FIT_KEYS, "fit.")
    FitSettings(**tree.get("fit", {}))  # refuses impossible values
    _check_keys(tree.get("most_rows", {}), _SIDES, "most_rows.")
    tasks = tuple(tree["tasks"])
    for task, number in tree.get("most_samples", {}).items():
        _whole(number, f"most_samples.{task}")
    for task in tree.get("per_task", {}):
        for key in tree["per_task"][task]:
            _section_of(key)
    without = set(tree.get("without", ()))
    arms = _read_arms(tree, tasks)
    for missing in without - arms.keys():
        raise UnknownName("arm", missing, arms)
    report = read_report(tree.get("report", {}), tree.get("figures", ()))
    claims = read_claims(name, tree.get("claims", ()))
    # the rows of a claim must come from a rule of the report or an arm
    series = [rule.series for rule in report.rows]
    for claim in claims:
        for row in claim.rows:
            is_known = "*" in row or row in arms or any(row == own or row.startswith(f"{own}-") for own in series)
            if not is_known:
                raise UnknownName(f"row of claim `{claim.name}`", row, [*series, *arms])
    study = Study(
        name=name,
        title=tree["title"],
        profile=profile,
        source=tree.get("source", ""),
        report_on=report_on,
        published=tree.get("published", ""),
        notes=tuple(tree.get("notes", ())),
        backbone=tree["backbone"],
        tasks=tasks,
        arms={key: arm for key, arm in arms.items() if key not in without},
        data=tree.get("data", {}),
        per_task=tree.get("per_task", {}),
        submission=bool(tree.get("submission", False)),
        fit=tree.get("fit", {}),
        is_toy=tree.get("rows") == TOY,
        paired_rows=bool(tree.get("paired_rows", False)),
        most_rows={side: _whole(number, f"most_rows.{side}") for side, number in tree.get("most_rows", {}).items()},
        like=tree.get("like", {}),
        report=report,
        claims=claims,
    )
    list(study.points())  # refuses impossible values
    return study


def _read_arms(tree: Mapping[str, Any], tasks: tuple[str, ...]) -> dict[str, Arm]:
    """Read all arms in the order of the file. A table that overrides an arm of another table makes no arm itself."""
    generated = {
        _fill(key, values)
        for key, own in tree["arms"].items()
        if own.get("each")
        for values in _list_combinations(own["each"])
    }
    arms: dict[str, Arm] = {}
    for key, own in tree["arms"].items():
        if own.get("each") or key not in generated:
            arms |= {arm.name: arm for arm in _make_arms(key, own, tree, tasks)}
    return arms


def _list_combinations(each: Mapping[str, Any]) -> list[dict[str, Any]]:
    """List every combination of the values, one for each key; a single empty one if there are no keys."""
    return [dict(zip(each, values, strict=True)) for values in itertools.product(*each.values())]


def _make_arms(name: str, tree: Mapping[str, Any], study: Mapping[str, Any], tasks: tuple[str, ...]) -> Iterator[Arm]:
    """Yield the arms of one table: several if `each` gives values for a `{word}` in its name and settings."""
    _check_keys(tree, _ARM_KEYS, f"arms.{name}.")
    for values in _list_combinations(tree.get("each", {})):
        # 1. fill in the values of `each`, and override them by the table of this one arm, if there is one
        filled = _fill({key: value for key, value in tree.items() if key != "each"}, values)
        full = _fill(name, values)
        if full != name and full in study["arms"]:
            _check_keys(study["arms"][full], _ARM_KEYS - {"each"}, f"arms.{full}.")
            filled = _merge(filled, study["arms"][full])
        # 2. the kind, and the tasks that have enough rows
        kind = filled.get("kind", "runs")
        if kind not in ARM_KINDS:
            raise UnknownName("kind of arm", kind, ARM_KINDS)
        chosen = tuple(task for task in filled.get("tasks", tasks) if task in tasks)
        if kind == "single" and "sample" in filled:
            most = study.get("most_samples", {})
            chosen = tuple(task for task in chosen if filled["sample"] <= most.get(task, filled["sample"]))
        # 3. the settings, which override the study's own, and the axes
        settings = {key: {**study.get(key, {}), **filled.get(key, {})} for key in SETTINGS}
        if not ARM_KINDS[kind].is_joint:
            del settings["joint"]
        if "preset" in filled:
            settings["preset"] = filled["preset"]
        axes = {key: tuple(value) for key, value in filled.get("axes", {}).items()}
        for key, value in axes.items():
            _section_of(key)
            if not value:
                raise BadConfig(f"the axis `{key}` of arm `{full}` has no values", "give one or more")
        source = str(filled.get("from", ""))
        if source and (source.count("/") != 1 or kind != "single"):
            raise BadConfig(
                f"`arms.{full}.from` is `{source}` in an arm of the kind `{kind}`",
                'write `from = "STUDY/ARM"` in an arm of the kind `single`',
            )
        yield Arm(
            name=full,
            kind=kind,
            title=filled.get("title", full),
            settings=settings,
            axes=axes,
            seeds=_whole(filled.get("seeds", study.get("seeds", 1)), f"arms.{full}.seeds"),
            tasks=chosen,
            min_layers=int(filled.get("min_layers", 0)),
            sample=_whole(filled["sample"], f"arms.{full}.sample") if "sample" in filled else None,
            source=source,
        )


def _fill(value: Any, words: Mapping[str, Any]) -> Any:
    """Replace every `{word}` in `value`; a text that is only a `{word}` becomes the word's value, of any type."""
    if isinstance(value, Mapping):
        return {key: _fill(item, words) for key, item in value.items()}
    if isinstance(value, list):
        return [_fill(item, words) for item in value]
    if isinstance(value, str):
        for word, item in words.items():
            if value == f"{{{word}}}":
                return item
            value = value.replace(f"{{{word}}}", str(item))
    return value


def _section_of(key: str) -> str:
    """Return the section of a run's config that has a setting of this name."""
    for section, known in SETTINGS.items():
        if key in known:
            return section
    close = difflib.get_close_matches(key, [name for known in SETTINGS.values() for name in known], n=1)
    hint = f"did you mean `{close[0]}`?" if close else "an axis is a setting of `method` or `train`, such as lr or size"
    raise BadConfig(f"no setting named `{key}` to vary", hint)


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        is_table = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = _merge(merged[key], value) if is_table else value
    return merged


def _check_keys(tree: Any, known: Iterable[str], where: str) -> None:
    if not isinstance(tree, Mapping):
        raise BadConfig(f"`{where.rstrip('.')}` is a table, not a value", "see the other files in `studies/`")
    for key in tree:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean `{where}{close[0]}`?" if close else f"known: {', '.join(sorted(known))}"
            raise BadConfig(f"no setting named `{where}{key}`", hint)


def bare_name(task: str) -> str:
    """Return a task's name in multi-task runs, where it is part of tensor names: without its set, `cola`."""
    return task.rpartition("/")[2]


def _whole(value: Any, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise BadConfig(f"`{name}` is `{value}`", "it must be a whole number of at least 1")
    return value
