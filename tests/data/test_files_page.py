"""The page `docs/files.md`: each of its examples is read by its command as the page says."""

import re
import shlex
from pathlib import Path

import pytest

from inlay.cli import flags
from inlay.data import KINDS, load_task
from inlay.settings import RunConfig

PAGE = (Path(__file__).parents[2] / "docs" / "files.md").read_text(encoding="utf8")
EXAMPLES = dict(re.findall(r'^```\w+ title="([\w.]+)"\n(.*?)^```$', PAGE, re.MULTILINE | re.DOTALL))
READ_AS = re.findall(r"^`inlay train ([^`]+)` reads it as `(\w+)`", PAGE, re.MULTILINE)


def read_options(words):
    """The options of a command as settings, by the config key of each flag."""
    keys = {flags.option_name(key): key for key in flags.FLAGS["Data"]}
    given, words = {}, iter(words)
    for word in words:
        if word == "--no-header":
            given["data.header"] = "false"
        elif word in keys:
            given[keys[word]] = f'"{next(words)}"'
        else:
            next(words)  # an option that says nothing of data
    return [f"{key}={value}" for key, value in given.items()]


@pytest.mark.parametrize(("command", "kind"), READ_AS, ids=[command.split()[0] for command, _ in READ_AS])
def test_an_example_is_read_as_its_page_says(tmp_path, command, kind):
    name, *options = shlex.split(command)
    path = tmp_path / name
    path.write_text(EXAMPLES[name], encoding="utf8")
    config = RunConfig().override([f'data.source="{path}"', *read_options(options)]).data
    if "split" not in EXAMPLES[name].partition("\n")[0]:
        config = RunConfig(data=config).override([f'data.dev="{path}"']).data  # so few rows cannot be split
    task = load_task(config, "task")
    assert task.kind == kind
    assert len(task.train) > 1
    assert all(label in EXAMPLES[name] for label in task.labels if not label.startswith(("B-", "I-")))


def test_every_example_has_its_command_and_every_kind_an_example():
    assert sorted(EXAMPLES) == sorted(command.split()[0] for command, _ in READ_AS)
    assert {kind for _, kind in READ_AS} == set(KINDS)
