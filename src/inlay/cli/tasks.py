"""`inlay tasks`, `show`, `remove` and `gc`: what is in the store."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inlay.cli import screen
from inlay.cli.flags import JsonOption, StoreOption, open_store
from inlay.cli.screen import Column
from inlay.settings.run_config import MethodConfig
from inlay.store import Manifest, Version

if TYPE_CHECKING:
    from inlay.caches import CompiledCache
    from inlay.data.token_cache import ArrayCache
    from inlay.store.format import VersionInfo
    from inlay.store.store import TaskInfo

# What of a head decides its answers -> the usual.
_USUAL_HEAD = {"features": "last", "hidden": "none", "pairs": "joined", "temperature": 1.0, "null_threshold": None}

ReferenceArgument = Annotated[str, typer.Argument(metavar="TASK", help="NAME, NAME@3 or NAME@best")]


def tasks(store: StoreOption = None, json: JsonOption = False) -> None:
    """List the tasks and the parameters each adds.

    The last line is the total as a multiple of the backbone, beside what full fine-tuning would need.
    """
    kept = open_store(store)
    ledger = kept.ledger()
    entries, totals = [_describe_task(task) for task in ledger], _total(ledger)
    if json:
        screen.emit_json({"store": str(kept.root), "tasks": entries, "backbones": totals})
        return
    if not ledger:
        screen.log(f"no tasks in {kept.root} yet")
        screen.log("train the first: inlay train mail.csv --task mail", "dim")
        return
    columns = [Column("task", is_flexible=True), Column("kind", is_flexible=True), Column("labels", True)]
    columns += [Column("versions", True), Column("dev score"), Column("method"), Column("adds", True)]
    columns += [Column("share", True)]
    screen.emit_table(columns, [_row(entry) for entry in entries])
    screen.emit()
    for total in totals:
        screen.emit(_phrase_total(total))


def _describe_task(task: TaskInfo) -> dict[str, Any]:
    """A task of the ledger as data: its latest version, and its best."""
    latest, best = task.latest.summary, _best(task)
    whole = latest.backbone.get("num_parameters", 0)
    return {
        "task": task.name,
        "kind": latest.kind,
        "num_labels": latest.num_labels,
        "versions": [info.version.number for info in task.versions],
        "latest": task.latest.version.reference,
        "metric": latest.metric,
        "score": latest.score(latest.metric),
        "metrics": latest.metrics,
        "best": None if best is None else best.version.reference,
        "best_score": None if best is None else best.summary.score(latest.metric),
        "method": latest.method.get("name"),
        "size": latest.method.get("size"),
        "num_parameters": latest.num_parameters,
        "backbone": latest.backbone.get("name"),
        "share": latest.num_parameters / whole if whole else None,
        "size_bytes": task.latest.size_bytes,
        "published_at": task.latest.published_at,
    }


def _best(task: TaskInfo) -> VersionInfo | None:
    """What `NAME@best` means: of the versions with the latest's dev rows, the first with the best score."""
    latest = task.latest.summary
    sign = 1 if latest.higher_is_better else -1
    scored = [
        (sign * score, -info.version.number, info)
        for info in task.versions
        if info.summary.dev_digest == latest.dev_digest and (score := info.summary.score(latest.metric)) is not None
    ]
    return max(scored, key=lambda item: item[:2])[2] if scored else None


def _row(entry: dict[str, Any]) -> list[str]:
    versions = str(len(entry["versions"]))
    if entry["best"] not in (None, entry["latest"]):
        versions += f" (best {entry['best'].partition('@')[2]})"
    return [
        entry["task"],
        entry["kind"],
        str(entry["num_labels"] or "-"),
        versions,
        f"{entry['metric']} {screen.score(entry['score'])}",
        screen.name_method(entry["method"], entry["size"]),
        screen.count(entry["num_parameters"]),
        "-" if entry["share"] is None else f"{100 * entry['share']:.2f}%",
    ]


def _total(ledger: Sequence[TaskInfo]) -> list[dict[str, Any]]:
    """For each backbone: what its tasks' latest versions add, as a multiple of it, and what full fine-tuning needs."""
    totals: dict[str, dict[str, Any]] = {}
    for task in ledger:
        backbone = task.latest.summary.backbone
        blank = {"name": backbone["name"], "fingerprint": backbone["fingerprint"], "num_tasks": 0, "added": 0}
        total = totals.setdefault(backbone["fingerprint"], {**blank, "num_parameters": backbone["num_parameters"]})
        total["num_tasks"] += 1
        total["added"] += task.latest.summary.num_parameters
    for total in totals.values():
        total["multiple"] = 1 + total["added"] / total["num_parameters"] if total["num_parameters"] else None
        total["full_multiple"] = float(total["num_tasks"])
    return list(totals.values())


def _phrase_total(total: dict[str, Any]) -> str:
    multiple = "?" if total["multiple"] is None else f"{total['multiple']:.2f}"
    many = screen.count(total["num_tasks"], "task")
    full = screen.count(total["num_tasks"])
    return f"{many} on {total['name']}: {multiple}× its parameters in all (full fine-tuning: {full}×)"


def show(task: ReferenceArgument, store: StoreOption = None, json: JsonOption = False) -> None:
    """Show all there is to know of a version."""
    kept = open_store(store)
    version = kept.resolve(task)
    manifest, sidecar, infos = kept.manifest(version), kept.sidecar(version), kept.versions(version.name)
    info = next(item for item in infos if item.version == version)
    if json:
        about = {"reference": version.reference, "digest": version.digest, "size_bytes": info.size_bytes}
        versions = [_describe_version(item) for item in infos]
        content = {item.name: getattr(manifest, item.name) for item in dataclasses.fields(manifest)}
        content["probes"] = [dataclasses.asdict(probe) for probe in manifest.probes]
        folder = str(kept.run_folder(manifest.run_id))
        screen.emit_json({**about, "run_folder": folder, **content, "sidecar": sidecar, "versions": versions})
        return
    screen.emit_pairs(_describe_manifest(version, manifest, info) | _describe_sidecar(sidecar or {}))
    screen.emit()
    _put_versions(infos, manifest.metric)


def _describe_version(info: VersionInfo) -> dict[str, Any]:
    summary = info.summary
    about = {"reference": info.version.reference, "digest": info.version.digest, "published_at": info.published_at}
    scores = {"metric": summary.metric, "score": summary.score(summary.metric), "metrics": summary.metrics}
    size = {"num_parameters": summary.num_parameters, "size_bytes": info.size_bytes}
    return {**about, **scores, **size, "method": summary.method, "backbone": summary.backbone["name"]}


def _describe_thresholds(labels: Sequence[str], thresholds: Sequence[float] | None) -> str:
    """Where labels are cut, in words; nothing where they are cut at one half."""
    if thresholds is None:
        return ""
    if len(thresholds) < len(labels):
        return f"{labels[1]} from a logit {thresholds[0]:+.3g} above that of {labels[0]} on, tuned on dev"
    cuts = (f"{label} {cut:+.3g}" for label, cut in zip(labels, thresholds, strict=True))
    return f"logits from {', '.join(cuts)} on, tuned on dev"


def _describe_folds(manifest: Manifest) -> dict[str, str]:
    """What its cross-validation came to: the mean over folds with its error, by every metric, and all rows together."""
    about, means = manifest.extra.get("folds"), manifest.metrics.get("folds", {})
    if not about:
        return {}
    from inlay.cli.folds import describe_mean, describe_pooled

    names = sorted(means, key=lambda name: name != manifest.metric)
    scores = "  ".join(describe_mean(about, means, name) for name in names)
    return {f"{about['num_folds']} folds": scores, "left out": describe_pooled(about, manifest.metric)}


def _describe_start(manifest: Manifest) -> dict[str, str]:
    """The versions it was started from, by reference and the first digits of the digest."""
    sources = [f"{item['reference']} ({item['digest'][:12]})" for item in manifest.extra.get("from", ())]
    return {"started from": ", ".join(sources)} if sources else {}


def _describe_origin(manifest: Manifest) -> dict[str, str]:
    """The run of several tasks that it was one of; the method is what it became."""
    joint = manifest.extra.get("joint")
    if not joint:
        return {}
    many = screen.count(len(joint["tasks"]), "task")
    return {"came from": f"a run of {many} with {joint['method']}: {screen.shorten(', '.join(joint['tasks']), 200)}"}


def _describe_manifest(version: Version, manifest: Manifest, info: VersionInfo) -> dict[str, str]:
    from inlay.data.kinds import find_kind

    backbone, config, head = manifest.backbone, manifest.config, manifest.head
    shown = {"lr": "lr", "epochs": "epochs", "batch_size": "batch size", "seed": "seed", "optimizer": "optimizer"}
    scores = {
        f"{split} scores": "  ".join(f"{name} {screen.score(value)}" for name, value in values.items())
        for split, values in manifest.metrics.items()
        if split != "folds"
    }
    part = screen.share(manifest.num_parameters, backbone["num_parameters"])
    origin = manifest.extra.get("origin") or {}  # of an imported version, which has no settings and no data
    described = {
        "version": version.reference,
        "made by": origin.get("library", ""),
        "kind": f"{manifest.kind}, {'pairs' if manifest.extra.get('pairs') else 'single texts'}",
        "labels": screen.shorten(", ".join(manifest.labels), 400) or find_kind(manifest.kind).labels_note,
        "metric": f"{manifest.metric} ({'higher' if manifest.higher_is_better else 'lower'} is better)",
        **scores,
        **_describe_folds(manifest),
        "method": screen.describe_method(manifest.method, dataclasses.asdict(MethodConfig())),
        **_describe_origin(manifest),
        "parameters": f"{screen.count(manifest.num_parameters)}, {part} of the backbone",
        "backbone": f"{backbone['name']} ({backbone['family']}, {screen.count(backbone['num_parameters'])} parameters)",
        "fingerprint": backbone["fingerprint"],
        "pooling": "none: it reads every token" if head.get("pooling") == "tokens" else str(head.get("pooling")),
        "head": screen.describe_settings(
            {name: head.get(name, usual) for name, usual in _USUAL_HEAD.items()}, _USUAL_HEAD
        ),
        "thresholds": _describe_thresholds(manifest.labels, head.get("thresholds")),
        "longest row": f"{manifest.max_length} tokens",
        "settings": ", ".join(f"{title} {config[name]}" for name, title in shown.items() if name in config),
        **_describe_start(manifest),
        "run": manifest.run_id,
        "data": manifest.data_digest,
        "digest": version.digest,
        "size": screen.size(info.size_bytes),
        "probes": screen.count(len(manifest.probes), "row"),
    }
    return {title: text for title, text in described.items() if text}


def _describe_sidecar(sidecar: dict[str, Any]) -> dict[str, str]:
    environment = sidecar.get("environment") or {}
    found = {
        "published": sidecar.get("published_at"),
        "on": sidecar.get("host"),
        "trained in": screen.duration(sidecar["seconds"]) if "seconds" in sidecar else None,
        "commit": sidecar.get("commit"),
        "made with": ", ".join(f"{name} {value}" for name, value in environment.items()),
    }
    return {name: str(value) for name, value in found.items() if value}


def _put_versions(infos: Sequence[VersionInfo], metric: str) -> None:
    columns = [Column("version"), Column("published"), Column(f"dev {metric}", True), Column("method")]
    columns += [Column("parameters", True), Column("size", True), Column("digest")]
    rows = []
    for info in infos:
        summary = info.summary
        method = screen.name_method(summary.method.get("name"), summary.method.get("size"))
        when = info.published_at[:10]
        rows.append([info.version.reference, when, screen.score(summary.score(metric)), method])
        rows[-1] += [screen.count(summary.num_parameters), screen.size(info.size_bytes), info.version.digest[:12]]
    screen.emit_table(columns, rows)


def remove(
    reference: Annotated[str, typer.Argument(metavar="REF", help="NAME@3 for one version, NAME for all of them")],
    store: StoreOption = None,
    json: JsonOption = False,
) -> None:
    """Drop a version, or a task with all its versions.

    The bytes stay until `inlay gc`.
    """
    removed = open_store(store).remove(reference)
    if json:
        screen.emit_json({"removed": [version.reference for version in removed]})
        return
    for version in removed:
        screen.emit(f"removed {version.reference}")
    screen.log("the bytes stay until: inlay gc", "dim")


def gc(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="only tell what would be deleted")] = False,
    cache: Annotated[
        bool, typer.Option("--cache", help="empty the caches of tokenised texts and compiled programs too")
    ] = False,
    store: StoreOption = None,
    json: JsonOption = False,
) -> None:
    """Delete the bytes that no version needs.

    Tokenised texts and compiled programs lie outside the store, in caches of $INLAY_CACHE_BYTES each: that of texts
    keeps within it, that of programs is brought back to it when a process begins to compile. --cache empties them,
    except of programs used within the hour: a process may still be writing them.
    """
    from inlay.caches import open_compiled
    from inlay.data.token_cache import open_tokens

    caches: dict[str, ArrayCache | CompiledCache]
    caches = {"tokenised texts": open_tokens(), "compiled programs": open_compiled()}
    report = open_store(store).gc(dry_run=dry_run)
    before = {what: each.usage().num_files for what, each in caches.items()}
    held = {what: each.clear(dry_run=dry_run) if cache else each.usage() for what, each in caches.items()}
    spared = {what: max(0, before[what] - usage.num_files) for what, usage in held.items()}
    if json:
        cached = [
            {"folder": str(caches[what].folder), **vars(usage), "is_chosen": cache, "num_spared": spared[what]}
            for what, usage in held.items()
        ]
        paths = [str(path) for path in report.paths]
        screen.emit_json({**dataclasses.asdict(report), "paths": paths, "cache": cached[0], "compiled": cached[1]})
        return
    for path in report.paths if dry_run else ():
        screen.emit(str(path))
    verb = "would delete" if dry_run else "deleted"
    many = screen.count(report.num_objects, "object")
    rest = screen.count(report.num_sidecars + report.num_drafts, "other file")
    screen.emit(f"{verb} {many} and {rest}: {screen.size(report.freed_bytes)}")
    for what, usage in held.items():
        files = screen.count(usage.num_files, "file")
        about = f"{files} of {what} in {caches[what].folder}: {screen.size(usage.num_bytes)}"
        if cache:
            screen.emit(f"{verb} {about}")
            if spared[what]:
                many = screen.count(spared[what], "file")
                screen.log(f"spared {many} of {what} used within the hour: a process may still be writing them", "dim")
        elif usage.num_files:
            screen.log(f"kept {about}; delete them with: inlay gc --cache", "dim")
