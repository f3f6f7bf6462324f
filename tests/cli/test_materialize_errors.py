"""`materialize`, and runs that start from others, on folders that are damaged, gone, or named in other ways."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from inlay.errors import StoreDamaged
from inlay.store import Store
from inlay.training.run.joint import find_run, read_method

from .conftest import SETTINGS, Ended, Inlay, write_mail


class Joint(NamedTuple):
    store: Path
    run: str
    backbone: Path
    data: Path

    @property
    def folder(self) -> Path:
        return self.store / "runs" / self.run


@pytest.fixture(scope="module")
def trained_once(tiny_bert_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Joint:
    """A run of two tasks, `mail` and `post`, both published, and a task `alone` of a run of its own."""
    from inlay.cli import main

    place = tmp_path_factory.mktemp("joint")
    backbone = Path(shutil.copytree(tiny_bert_folder, place / "backbone"))
    mail, post = write_mail(place / "mail.csv", num_rows=40), write_mail(place / "post.csv", num_rows=40, seed=1)
    same = ["--backbone", str(backbone), "--store", str(place / "store"), *SETTINGS]
    for command in (["multitask", str(mail), str(post), "--steps", "2"], ["train", str(mail), "--task", "alone"]):
        with pytest.raises(SystemExit) as stop:
            main([*command, *same])
        assert stop.value.code == 0
    (tasks,) = (place / "store" / "runs").glob("*/tasks")
    return Joint(place / "store", tasks.parent.name, backbone, mail)


@pytest.fixture
def joint(trained_once: Joint, tmp_path: Path) -> Joint:
    """The same in a store of one's own."""
    return trained_once._replace(store=Path(shutil.copytree(trained_once.store, tmp_path / "home")))


def words(ended: Ended) -> str:
    """What was said, without breaks of lines; paths are broken too, so no spaces at all."""
    return "".join(ended.err.split())


def says(ended: Ended, text: str) -> bool:
    return "".join(text.split()) in words(ended)


def is_published(joint: Joint, name: str) -> bool:
    return (joint.store / "tasks" / name).exists()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def go_on(inlay: Inlay, start: str, tmp_path: Path) -> Ended:
    new = write_mail(tmp_path / "new.csv", num_rows=30, seed=3)
    return inlay("multitask", new, "--from-run", start, "--max-length", 24, "--steps", 2, "--epochs", 1)


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        ("best.safetensors", None, "not a safetensors file"),
        ("best.safetensors", b"", "not a safetensors file"),
        ("result.json", None, "not JSON"),
        ("result.json", b"", "not JSON"),
        ("result.json", b"\xff\xfe", "not JSON"),
        ("result.json", b"[]", "not what a finished run writes"),
        ("result.json", b'{"run": "a"}', "not what a finished run writes"),
    ],
)
def test_a_damaged_file_of_a_run_is_named_and_nothing_is_published(
    inlay: Inlay, joint: Joint, tmp_path: Path, file: str, content: bytes | None, reason: str
) -> None:
    path = joint.folder / file
    cut(path) if content is None else path.write_bytes(content)
    for ended in (inlay("materialize", joint.run, "mail", "--name", "q"), go_on(inlay, joint.run, tmp_path)):
        assert ended.status == StoreDamaged.exit_status, ended.err
        assert says(ended, f"{path}: {reason}")
        assert says(ended, f"delete `{joint.folder}` and train the run again")
        assert "Traceback" not in ended.err
    assert not is_published(joint, "q")
    assert not is_published(joint, "new")


def forget_checksums(folder: Path) -> None:
    """Make a result one from before there were checksums: any weights fit it."""
    path = folder / "result.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({name: content[name] for name in content if name not in ("crc32", "weights")}))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_not_published(
    inlay: Inlay, joint: Joint, tmp_path: Path, value: float
) -> None:
    path = joint.folder / "best.safetensors"
    tensors = load_file(path)
    name = sorted(tensors)[-1]
    tensors[name].view(-1)[-1] = value
    save_file(tensors, path)
    forget_checksums(joint.folder)
    for ended in (inlay("materialize", joint.run, "mail", "--name", "q"), go_on(inlay, joint.run, tmp_path)):
        assert ended.status == StoreDamaged.exit_status, ended.err
        assert says(ended, f"{path}: tensor `{name}` has values that are not finite")
    assert not is_published(joint, "q")
    assert not is_published(joint, "new")


def test_the_command_of_a_finished_run_does_not_publish_weights_that_are_not_finite(
    inlay: Inlay, joint: Joint, tmp_path: Path
) -> None:
    """It is not trained again: its weights are read from the folder too."""
    path = joint.folder / "best.safetensors"
    save_file({name: torch.full_like(tensor, torch.nan) for name, tensor in load_file(path).items()}, path)
    forget_checksums(joint.folder)
    shutil.rmtree(joint.store / "tasks")
    post = joint.data.with_name("post.csv")
    ended = inlay("multitask", joint.data, post, "--steps", 2, "--backbone", joint.backbone, *SETTINGS)
    assert ended.status == StoreDamaged.exit_status, ended.err
    assert says(ended, f"{path}: tensor `")
    assert not is_published(joint, "mail")


@pytest.mark.parametrize("name", ["mail", "mail@1"])
def test_a_published_task_says_which_run_it_came_from_when_that_is_gone(
    inlay: Inlay, joint: Joint, tmp_path: Path, name: str
) -> None:
    shutil.rmtree(joint.folder)
    for ended in (inlay("materialize", name), go_on(inlay, name, tmp_path)):
        assert ended.status == 9
        assert says(ended, f"task `{name}` came from run `{joint.run}`, whose folder `{joint.folder}` is gone")
        assert says(ended, "put the folder back, or train the run again: `inlay multitask` with the data of mail, post")


@pytest.mark.parametrize("by_id", [True, False])
def test_a_folder_without_its_settings_is_said_to_lack_them(inlay: Inlay, joint: Joint, by_id: bool) -> None:
    (joint.folder / "config.toml").unlink()
    ended = inlay("materialize", joint.run if by_id else "mail")
    assert ended.status == 9
    assert says(ended, f"the folder of run `{joint.run}` lacks its config.toml")
    assert "did you mean" not in ended.err
    with pytest.raises(Exception, match=r"lacks its config\.toml"):
        read_method(joint.folder)


def test_a_run_is_found_by_a_version_as_by_its_task(inlay: Inlay, joint: Joint, tmp_path: Path) -> None:
    for name in (joint.run, "mail", "mail@1", "post@best"):
        assert find_run(name, Store(joint.store)) == joint.folder
    ended = inlay("materialize", "mail@1", "post", "--name", "again", "--json")
    assert ended.status == 0, ended.err
    assert ended.data["run"] == joint.run
    assert ended.data["tasks"][0]["reference"] == "again@1"
    new = go_on(inlay, "mail@1", tmp_path)
    assert new.status == 0, new.err
    assert says(new, f"starts from what the tasks of run `{joint.run}` share")


@pytest.mark.parametrize(
    ("name", "status", "text"),
    [
        ("mail@7", 3, "no version named `mail@7`"),
        ("mial@1", 3, "no task named `mial`"),
        ("mial", 3, "no run of several tasks named `mial`"),
        ("mail@x", 2, "`mail@x` does not name a version of a task"),
        ("alone", 9, "task `alone` came from no run of several tasks"),
    ],
)
def test_what_names_no_run_of_several_tasks_is_refused(
    inlay: Inlay, joint: Joint, name: str, status: int, text: str
) -> None:
    ended = inlay("materialize", name)
    assert ended.status == status, ended.err
    assert says(ended, text)


def test_a_backbone_that_was_moved_is_read_where_it_is_now(
    inlay: Inlay, joint: Joint, backbone_folder, tmp_path: Path
) -> None:
    away = tmp_path / "away"
    for path in (joint.folder / "config.toml", *(joint.folder / "tasks").glob("*.toml")):
        path.write_text(path.read_text().replace(str(joint.backbone), str(away)))
    lost = inlay("materialize", joint.run, "mail", "--name", "again")
    assert lost.status == 9
    assert says(lost, "if it has moved, say where with `--backbone FOLDER`")
    ended = inlay("materialize", joint.run, "mail", "--name", "again", "--backbone", joint.backbone, "--json")
    assert ended.status == 0, ended.err
    assert ended.data["tasks"][0]["reference"] == "again@1"
    other = inlay("materialize", joint.run, "mail", "--name", "other", "--backbone", backbone_folder("roberta"))
    assert other.status == 6
    assert says(other, f"but on `{away}`")
    assert not is_published(joint, "other")


def test_a_bad_row_is_answered_without_an_option_that_is_not_there(inlay: Inlay, joint: Joint, tmp_path: Path) -> None:
    changed = tmp_path / "changed.csv"
    changed.write_text(joint.data.read_text() + "one more row,\n")
    ended = inlay("materialize", joint.run, f"mail={changed}", "--json")
    assert ended.status == 4, ended.err
    assert "--on-bad-row" not in ended.err + ended.out
    assert says(ended, f"task `mail`: {changed}:42")
    assert says(ended, f"`inlay materialize {joint.run} mail=DATA`")


def test_a_whole_run_is_materialised_as_before(inlay: Inlay, joint: Joint) -> None:
    recorded = json.loads((joint.folder / "result.json").read_text())
    ended = inlay("materialize", joint.run, "--json")
    assert ended.status == 0, ended.err
    assert [item["reference"] for item in ended.data["tasks"]] == ["mail@1", "post@1"]
    best = next(line for line in recorded["history"] if line["epoch"] == recorded["best_epoch"])
    assert ended.data["tasks"][0]["dev"]["accuracy"] == best["dev"]["mail/accuracy"]
