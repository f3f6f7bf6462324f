"""`inlay show`: shows everything the store knows about a version."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from inlay.cli import screen
from inlay.cli.cross_validation_output import describe_mean, describe_pooled
from inlay.cli.flags import JsonOption, StoreOption, TaskArgument
from inlay.cli.lazy_packages import data
from inlay.cli.screen import numbers
from inlay.errors import InlayError
from inlay.settings import MethodConfig
from inlay.store import HASHED, Manifest, Store, Version, VersionInfo

# Settings of a head that change its answers -> their usual values.
_USUAL_HEAD = {"features": "last", "hidden": "none", "pairs": "joined", "temperature": 1.0, "null_threshold": None}


def show(
    task: TaskArgument,
    store: StoreOption = None,
    json: JsonOption = False,
) -> None:
    """Show everything that is known about a version."""
    kept = Store(store)
    version = kept.resolve(task)
    manifest = kept.manifest(version)
    damaged: list[tuple[str, InlayError]] = []
    infos = kept.versions(version.name, lambda version, error: damaged.append((version.reference, error)))
    sidecar = None
    try:
        sidecar = kept.sidecar(version)
    except InlayError as error:  # the version stands without it
        damaged.append((f"the sidecar of {version.reference}", error))
    for what, reason in damaged:
        screen.log(f"{what} cannot be read: {reason}", "yellow")
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
    _print_versions(infos, manifest.metric)


def _describe_version(info: VersionInfo) -> dict[str, Any]:
    summary = info.summary
    about = {"reference": info.version.reference, "digest": info.version.digest, "published_at": info.published_at}
    scores = {"metric": summary.metric, "score": summary.score(summary.metric), "metrics": summary.metrics}
    size = {"num_parameters": summary.num_parameters, "size_bytes": info.size_bytes}
    return {**about, **scores, **size, "method": summary.method, "backbone": summary.backbone["name"]}


def _describe_thresholds(labels: Sequence[str], thresholds: Sequence[float] | None) -> str:
    """Describe the thresholds of labels; empty if they are the usual probability of one half."""
    if thresholds is None:
        return ""
    if len(thresholds) < len(labels):
        return f"{labels[1]} if its logit exceeds that of {labels[0]} by {thresholds[0]:+.3g} or more, tuned on dev"
    cuts = (f"{label} {cut:+.3g}" for label, cut in zip(labels, thresholds, strict=True))
    return f"a label is given if its logit is at least: {', '.join(cuts)}; tuned on dev"


def _describe_folds(manifest: Manifest) -> dict[str, str]:
    """Describe its cross-validation: each metric's mean over folds with its error, and the score over all rows."""
    about = manifest.extra.get("folds")
    means = manifest.metrics.get("folds", {})
    if not about:
        return {}
    names = sorted(means, key=lambda name: name != manifest.metric)
    scores = "  ".join(describe_mean(about, means, name) for name in names)
    return {f"{about['num_folds']} folds": scores, "left out": describe_pooled(about, manifest.metric)}


def _describe_manifest(version: Version, manifest: Manifest, info: VersionInfo) -> dict[str, str]:
    backbone, config, head = manifest.backbone, manifest.config, manifest.head
    shown = {"lr": "lr", "epochs": "epochs", "batch_size": "batch size", "seed": "seed", "optimizer": "optimizer"}
    scores = {
        f"{split} scores": "  ".join(f"{name} {screen.score(value)}" for name, value in values.items())
        for split, values in manifest.metrics.items()
        if split != "folds"
    }
    # the versions it started from, by reference and the first digits of the digest
    sources = [f"{item['reference']} ({item['digest'][:12]})" for item in manifest.extra.get("from", ())]
    part = screen.share(manifest.num_parameters, backbone["num_parameters"])
    origin = manifest.extra.get("origin") or {}  # of an imported version, which has no settings and no data digest
    joint, came_from = manifest.extra.get("joint"), ""  # the multi-task run it comes from, which has another method
    if joint:
        names = screen.shorten(", ".join(joint["tasks"]), 200)
        came_from = f"a run of {screen.count(len(joint['tasks']), 'task')} with {joint['method']}: {names}"
    hashed = manifest.extra.get(HASHED)
    probes = screen.count(len(manifest.probes), "row")
    if isinstance(hashed, list):
        probes = f"{screen.count(len(hashed), 'row')}, as hashes"
    described = {
        "version": version.reference,
        "made by": origin.get("library", ""),
        "kind": f"{manifest.kind}, {'pairs' if manifest.extra.get('pairs') else 'single texts'}",
        "labels": screen.shorten(", ".join(manifest.labels), 400) or data.find_kind(manifest.kind).labels_note,
        "metric": f"{manifest.metric} ({'higher' if manifest.higher_is_better else 'lower'} is better)",
        **scores,
        **_describe_folds(manifest),
        "method": screen.describe_method(manifest.method, dataclasses.asdict(MethodConfig())),
        "came from": came_from,
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
        "started from": ", ".join(sources),
        "run": manifest.run_id,
        "data": manifest.data_digest,
        "digest": version.digest,
        "size": screen.size(info.size_bytes),
        "probes": probes,
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


def _print_versions(infos: Sequence[VersionInfo], metric: str) -> None:
    rows = []
    for info in infos:
        summary = info.summary
        rows.append(
            [
                info.version.reference,
                info.published_at[:10],
                screen.score(summary.score(metric)),
                screen.name_method(summary.method.get("name"), summary.method.get("size")),
                screen.count(summary.num_parameters),
                screen.size(info.size_bytes),
                info.version.digest[:12],
            ]
        )
    score, sizes = numbers(f"dev {metric}"), numbers("parameters", "size")
    screen.emit_table(["version", "published", *score, "method", *sizes, "digest"], rows)
