"""The rows that a version was trained on: read again from where its run's settings say, and proved by their digest."""

from __future__ import annotations

import dataclasses

from inlay.data import Task, hide_secrets, load_task
from inlay.errors import BadData, InlayError, Missing
from inlay.settings import DataConfig, read_toml
from inlay.store import Manifest, Store, Version


def find_training_rows(
    version: Version,
    manifest: Manifest,
    store: Store,
    source: str | Task | None = None,
    *,
    format: str = "auto",
    header: bool | None = None,
) -> Task:
    """Return the task a version was trained on; refuse rows that are not those.

    A version has the digest of its rows, its run's folder where they lay. `source` says where they lie now, or is the
    task itself. `format` and `header` are of that place; by default as in training.
    """
    if isinstance(source, Task):
        return _check(source, "the task that was given", version, manifest)
    path = store.run_folder(manifest.run_id) / "config.toml"
    config = read_toml(path).data if path.is_file() else DataConfig()
    if source is not None:
        config = dataclasses.replace(config, source=source)
        config = config if format == "auto" else dataclasses.replace(config, format=format)
        config = config if header is None else dataclasses.replace(config, header=header)
    elif not config.source:
        raise Missing(
            f"nothing here says where the training rows of `{version.reference}` lie: `{path}` is not there",
            "name their file with `--data FILE`",
        )
    if config.source == "-":
        said = f"the training rows of `{version.reference}` came on stdin, and are not kept"
        raise Missing(said, "name a file that has them with `--data FILE`")
    try:
        task = load_task(config, version.name)
    except InlayError as error:
        said = f"the training rows of `{version.reference}` cannot be read: {error.message}"
        if source is not None:  # what is wrong with the file that was named
            raise Missing(said, error.hint) from None
        is_signed = config.source != hide_secrets(config.source)
        why = "what followed `?` in its link is not kept; " if is_signed else ""
        raise Missing(said, f"{why}name the file where they lie now with `--data FILE`") from None
    return _check(task, f"`{hide_secrets(config.source)}`", version, manifest)


def _check(task: Task, what: str, version: Version, manifest: Manifest) -> Task:
    if task.digest != manifest.data_digest:
        raise BadData(
            f"{what} does not have the rows that `{version.reference}` was trained on",
            "it was changed, or read with other settings; name the unchanged file with `--data FILE`",
        )
    return task
