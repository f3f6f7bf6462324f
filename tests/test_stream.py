"""The stream: files become tasks, once each; whatever happens, nothing published is disturbed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import inlay.stream.watch
from inlay.errors import BadConfig, DiskFull, InlayError, Missing, StoreBusy, StoreDamaged
from inlay.settings.run_config import MethodConfig, RunConfig, TrainConfig
from inlay.store import Store
from inlay.stream import StreamEvent, StreamResult, StreamSettings, watch_folder
from inlay.threads import single_thread

CONFIG = RunConfig(method=MethodConfig(size=4), train=TrainConfig(epochs=2, max_length=16, batch_size=8, lr=1e-3))
AT_ONCE = StreamSettings(settle_s=0.0, every_s=0.02, once=True)


def write_task(path: Path, seed: int, num_rows: int = 24, *, columns: tuple[str, str] = ("text", "label")) -> Path:
    """A small two-label task; every seed is other content."""
    source = random.Random(seed)
    words = ("good", "great", "fine"), ("bad", "awful", "terrible")
    fillers = "movie film plot actor story cat dog red blue green one two three".split()
    rows = []
    for number in range(num_rows):
        filler = " ".join(source.choices(fillers, k=3))
        rows.append((f"the {filler} is {source.choice(words[number % 2])} {number}", ("yes", "no")[number % 2]))
    if path.suffix == ".jsonl":
        lines = [json.dumps(dict(zip(columns, row, strict=True))) for row in rows]
    else:
        lines = [",".join(columns), *(",".join(row) for row in rows)]
    path.write_text("\n".join(lines) + "\n")
    return path


class Process:
    """A folder, a store and the events of the streams over them."""

    def __init__(self, root: Path, backbone: Any) -> None:
        self.folder, self.store, self.backbone = root / "in", Store(root / "store"), backbone
        self.folder.mkdir(parents=True)
        self.events: list[StreamEvent] = []

    def stream(self, config: RunConfig = CONFIG, settings: StreamSettings = AT_ONCE) -> StreamResult:
        self.events = []
        return watch_folder(self.folder, self.backbone, self.store, config, settings, self.events.append)

    def of(self, kind: str) -> list[StreamEvent]:
        return [event for event in self.events if event.kind == kind]

    def digests(self) -> dict[str, list[str]]:
        return digests(self.store)

    def cohorts(self) -> list[int]:
        files = (self.store.root / "runs" / "cohorts").glob("*/cohort.json")
        return sorted(len(json.loads(file.read_text())["runs"]) for file in files)


def digests(store: Store) -> dict[str, list[str]]:
    return {task.name: [info.version.digest for info in task.versions] for task in store.ledger()}


@pytest.fixture
def place(tmp_path: Path, tiny_bert: Any) -> Iterator[Process]:
    with single_thread():  # tiny products: on a busy machine a second thread only waits
        yield Process(tmp_path, tiny_bert)


@pytest.fixture
def num_fits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of runs that each call of `fit` was given, but not those it read back as finished."""
    from inlay.training import fit
    from inlay.training.run.run_folder import read_result

    calls: list[int] = []

    def counting(runs: Any, backbone: Any, folder: Path, *more: Any) -> Any:
        calls.append(sum(read_result(folder / run.id) is None for run in runs))
        return fit(runs, backbone, folder, *more)

    monkeypatch.setattr(inlay.stream.watch, "fit", counting)
    return calls


def test_files_together_are_one_cohort_each_published_under_its_legal_name(place, num_fits):
    write_task(place.folder / "Mail Box.csv", 1)
    write_task(place.folder / "sms.jsonl", 2)
    write_task(place.folder / "third.csv", 3)
    result = place.stream()
    assert set(place.digests()) == {"mail-box", "sms", "third"}
    assert [version.reference for version in result.published] == ["mail-box@1", "sms@1", "third@1"]
    assert num_fits == [3]
    assert place.cohorts() == [3]
    assert place.of("stands")[-1].message.startswith("3 tasks answer as published (3 versions, bit for bit")


def test_one_by_one_proves_all_earlier_tasks_after_each_addition(place, num_fits):
    for seed in range(3):
        write_task(place.folder / f"task{seed}.csv", seed)
    place.stream(settings=StreamSettings(together=False, settle_s=0.0, once=True))
    assert num_fits == [1, 1, 1]
    assert place.cohorts() == [1, 1, 1]
    order = [event.kind for event in place.events if event.kind in ("published", "stands")]
    assert order == ["published", "stands"] * 3
    assert [event.details["num_tasks"] for event in place.of("stands")] == [1, 2, 3]


def test_the_backbone_and_earlier_versions_are_the_same_after_any_addition(place):
    before = {name: tensor.clone() for name, tensor in place.backbone.model.state_dict().items()}
    write_task(place.folder / "first.csv", 1)
    place.stream()
    first = place.digests()
    write_task(place.folder / "second.csv", 2)
    place.stream()
    assert place.digests()["first"] == first["first"]
    assert all(tensor.equal(before[name]) for name, tensor in place.backbone.model.state_dict().items())


def test_a_finished_file_is_not_trained_again_even_with_other_settings(place, num_fits):
    write_task(place.folder / "sms.csv", 1)
    place.stream()
    before = place.digests()
    (place.folder / "sms.csv").touch()
    place.stream(RunConfig(method=MethodConfig(size=8), train=CONFIG.train))
    assert place.digests() == before
    assert num_fits == [1]
    assert not place.of("training")


@pytest.mark.parametrize("second", ["second.csv", "second.jsonl"])
@pytest.mark.parametrize("is_later", [False, True])
def test_the_same_content_under_another_name_refers_to_the_same_version_untrained(place, num_fits, second, is_later):
    write_task(place.folder / "first.csv", 1)
    if is_later:
        place.stream()
    write_task(place.folder / second, 1)  # the same rows; in the same bytes if the suffix is the same
    place.stream()
    assert place.digests()["second"] == place.digests()["first"]
    assert sum(num_fits) == 1
    (event,) = place.of("known")
    assert (event.file, event.version, event.details["same_as"]) == (second, "second@1", "first@1")
    assert place.of("stands")[-1].details["num_tasks"] == 2


def test_content_that_a_run_finished_before_is_published_without_training(place, num_fits):
    write_task(place.folder / "sms.csv", 1)
    place.stream()
    before = place.digests()
    place.store.remove("sms")
    place.folder = place.folder.rename(place.folder.with_name("moved"))  # the journal knows folders by their place
    place.stream()
    assert place.digests() == before
    assert num_fits == [1, 0]
    assert place.of("published")[0].details["trained"] is False


@pytest.mark.parametrize("is_swept", [False, True])
def test_a_file_put_back_after_its_version_was_removed_is_published_again_untrained(place, num_fits, is_swept):
    write_task(place.folder / "sms.csv", 1)
    place.stream()
    before = place.digests()
    place.store.remove("sms")
    if is_swept:
        place.store.gc()
    (place.folder / "sms.csv").unlink()
    write_task(place.folder / "sms.csv", 1)
    result = place.stream()
    assert [version.reference for version in result.published] == ["sms@2"]
    assert place.digests() == before
    assert num_fits == [1, 0]
    assert not place.stream().published, "known again"
    write_task(place.folder / "second.csv", 1)
    place.stream()
    assert place.of("known")[-1].details["same_as"] == "sms@2"
    assert num_fits == [1, 0]


def test_changed_content_becomes_the_next_version(place):
    write_task(place.folder / "sms.csv", 1)
    place.stream()
    write_task(place.folder / "sms.csv", 2)
    place.stream()
    assert [version.number for version in (info.version for info in place.store.versions("sms"))] == [1, 2]
    assert place.of("stands")[-1].details["num_versions"] == 2


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("empty.csv", b"", "the file is empty"),
        ("columns.csv", b"a,b\nx,y\nz,w\n", "column"),
        ("binary.parquet", b"\x00\x01\x02 no parquet", "parquet"),
        ("one.csv", b"text,label\nhello,yes\nthere,yes\nyou,yes\n", "yes"),
    ],
)
def test_a_bad_file_is_moved_aside_with_its_error_and_stops_no_other(place, name, content, complaint):
    (place.folder / name).write_bytes(content)
    write_task(place.folder / "zebra.csv", 1)
    result = place.stream()
    assert (place.folder / "bad" / name).read_bytes() == content
    text = (place.folder / "bad" / f"{name}.error.txt").read_text()
    assert text.startswith("error: ")
    assert "\nhint: " in text
    assert complaint in text.lower()
    assert result.aside == (name,)
    assert not (place.folder / name).exists()
    assert list(place.digests()) == ["zebra"]


def test_a_second_bad_file_of_the_same_name_does_not_replace_the_first(place):
    for content in (b"first", b"second"):
        (place.folder / "sms.csv").write_bytes(content)
        place.stream()
    bad = place.folder / "bad"
    assert [(bad / name).read_bytes() for name in ("sms.csv", "sms.2.csv")] == [b"first", b"second"]
    assert (bad / "sms.2.csv.error.txt").is_file()


def test_a_fault_of_ours_in_one_file_goes_aside_with_its_traceback(place, monkeypatch):
    from inlay.data import load_task

    def failing(config: Any, name: str) -> Any:
        if name == "odd":
            raise ZeroDivisionError("a reader's bug")
        return load_task(config, name)

    monkeypatch.setattr(inlay.stream.watch, "load_task", failing)
    write_task(place.folder / "odd.csv", 1)
    write_task(place.folder / "sms.csv", 2)
    place.stream()
    text = (place.folder / "bad" / "odd.csv.error.txt").read_text()
    assert "ZeroDivisionError: a reader's bug" in text
    assert "Traceback" in text
    assert list(place.digests()) == ["sms"]


@pytest.mark.parametrize(
    "own",
    [
        "[train]\nclip_norm = inf\n",
        "[data]\nlabels = [1979-05-27]\n",
        f"[train]\nepochs = 0x{'f' * 4000}\n",
        f"[train]\nlr = {{a = 0x{'f' * 4000}}}\n",
        f"[method]\nlayers = '{'9' * 5000}'\n",
    ],
    ids=["infinite", "date", "huge", "huge in a table", "huge layer"],
)
def test_settings_that_no_run_can_have_cost_only_their_own_file(place, own):
    write_task(place.folder / "aa.csv", 1)
    (place.folder / "aa.toml").write_text(own)
    write_task(place.folder / "zz.csv", 2)
    place.stream()
    assert list(place.digests()) == ["zz"]
    assert "Traceback" not in (place.folder / "bad" / "aa.csv.error.txt").read_text()


def test_a_version_that_cannot_be_published_costs_only_its_own_file(place, monkeypatch):
    publish = inlay.stream.watch.publish_result

    def fail_for_the_first(prepared, result):
        if prepared.run.name == "aa":
            raise ValueError("nobody thought of this")
        return publish(prepared, result)

    monkeypatch.setattr(inlay.stream.watch, "publish_result", fail_for_the_first)
    for seed, name in enumerate(("aa.csv", "zz.csv")):
        write_task(place.folder / name, seed)
    place.stream()
    assert list(place.digests()) == ["zz"]
    assert "nobody thought of this" in (place.folder / "bad" / "aa.csv.error.txt").read_text()


def test_a_diverged_run_goes_aside_and_the_others_of_its_cohort_are_published(place):
    write_task(place.folder / "wild.csv", 1)
    (place.folder / "wild.toml").write_text("[train]\nlr = 9.9\nwarmup = 0.0\nclip_norm = 0.0\nepochs = 60\n")
    write_task(place.folder / "tame.csv", 2)
    place.stream()
    assert list(place.digests()) == ["tame"]
    text = (place.folder / "bad" / "wild.csv.error.txt").read_text()
    assert "diverged at step" in text
    assert "wild.toml" in text


@pytest.mark.parametrize("error", [DiskFull("no room"), StoreBusy("held by another")])
@pytest.mark.parametrize("where", ["fit", "load_task"])
def test_a_full_disk_or_a_busy_store_stops_the_stream_and_calls_no_file_bad(place, monkeypatch, error, where):
    write_task(place.folder / "sms.csv", 1)
    write_task(place.folder / "zebra.csv", 2)

    def failing(*given: Any) -> Any:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(inlay.stream.watch, where, failing)
        with pytest.raises(type(error)):
            place.stream()
    assert sorted(path.name for path in place.folder.iterdir()) == ["sms.csv", "zebra.csv"]
    place.stream()
    assert sorted(place.digests()) == ["sms", "zebra"]


def test_a_cohort_that_fails_is_trained_file_by_file(place, monkeypatch):
    from inlay.training import fit

    def failing(runs: Any, *more: Any) -> Any:
        if any(run.task.name == "huge" for run in runs):
            raise RuntimeError("out of memory")
        return fit(runs, *more)

    monkeypatch.setattr(inlay.stream.watch, "fit", failing)
    write_task(place.folder / "huge.csv", 1)
    write_task(place.folder / "small.csv", 2)
    place.stream()
    assert list(place.digests()) == ["small"]
    assert "out of memory" in (place.folder / "bad" / "huge.csv.error.txt").read_text()


def test_settings_beside_a_file_hold_for_it_alone(place):
    write_task(place.folder / "plain.csv", 1)
    write_task(place.folder / "own.csv", 2, columns=("words", "verdict"))
    (place.folder / "dev").mkdir()
    write_task(place.folder / "dev" / "rows.csv", 3, columns=("words", "verdict"))
    own = 'task = "own"\n[method]\nsize = 8\n[data]\ntext = "words"\nlabel = "verdict"\ndev = "dev/rows.csv"\n'
    (place.folder / "own.toml").write_text(own)
    place.stream()
    sizes = {task.name: task.latest.summary.method["size"] for task in place.store.ledger()}
    assert sizes == {"plain": 4, "own": 8}


def test_a_bad_settings_file_is_named_in_the_error(place):
    write_task(place.folder / "sms.csv", 1)
    (place.folder / "sms.toml").write_text("[train]\nlearning_rate = 1\n")
    place.stream()
    assert "train.learning_rate" in (place.folder / "bad" / "sms.csv.error.txt").read_text()
    write_task(place.folder / "sms.csv", 1)
    (place.folder / "sms.toml").write_text('backbone = "other"\n')
    place.stream()
    assert "a stream has one backbone" in (place.folder / "bad" / "sms.2.csv.error.txt").read_text()


@pytest.mark.parametrize(
    ("own", "complaint"),
    [
        ('task = "spam"', "`task` is `spam`, but the file's name makes it `sms`"),
        ('[data]\ndev = "{outside}"', "not a file inside the watched folder"),
        ('[data]\ntest = "../outside.csv"', "not a file inside the watched folder"),
        ('[data]\ndev = "link.csv"', "not a file inside the watched folder"),
        ('[data]\ndev = "sub/outside.csv"', "not a file inside the watched folder"),
        ('[data]\ndev = "x\\u0000"', "not a file inside the watched folder"),
        (f'[data]\ndev = "{"x" * 5000}"', "not a file inside the watched folder"),
        (f"[train]\nlr = 1{'0' * 400}", "`train.lr`"),
        ('[data]\nsource = "{outside}"', "`data.source` is not allowed in a file's own settings"),
        ('[data]\nroot = "/"', "`data.root` is not allowed in a file's own settings"),
        ("[joint]\nsteps = 3", "`joint` is not allowed in a file's own settings"),
        ("a = " + "[" * 5000, "not TOML"),
        ("a = " + "9" * 5000, "not TOML"),
        ("#" * 1_000_001, "over 1,000,000 bytes"),
        ("a" + ".a" * 100_000 + " = 1", "more than 200 dots"),
        ("[train]\nepochs = 1_000_000_000", "`train.epochs` is `1000000000`"),
        ("[train]\ncontrast = 1_000_000_000", "`train.contrast`"),
    ],
    ids=[
        "task",
        "root",
        "dots",
        "link",
        "folder-link",
        "zero",
        "long-name",
        "large-number",
        "source",
        "data-root",
        "joint",
        "deep",
        "digits",
        "large",
        "dotted",
        "epochs",
        "contrast",
    ],
)
def test_a_files_own_settings_reach_nothing_but_its_own_data(place, own, complaint):
    outside = write_task(place.folder.parent / "outside.csv", 2)
    (place.folder / "link.csv.tmp").symlink_to(outside)
    (place.folder / "sub").symlink_to(place.folder.parent)
    write_task(place.folder / "sms.csv", 1)
    own = own.replace("{outside}", str(outside)).replace('"link.csv"', '"link.csv.tmp"')
    (place.folder / "sms.toml").write_text(own)
    place.stream()
    text = (place.folder / "bad" / "sms.csv.error.txt").read_text()
    assert complaint in text
    assert "Traceback" not in text
    assert not place.digests()


def test_links_out_of_the_folder_are_refused_and_stop_no_other_file(place):
    outside = write_task(place.folder.parent / "outside.csv", 2)
    (place.folder.parent / "outside.toml").write_text("[train]\nepochs = 1\n")
    (place.folder / "stolen.csv").symlink_to(outside)
    (place.folder / "round.csv").symlink_to("round.csv")
    for name in ("own", "loop", "pipe", "folder"):
        write_task(place.folder / f"{name}.csv", 3)
    (place.folder / "own.toml").symlink_to(place.folder.parent / "outside.toml")
    (place.folder / "loop.toml").symlink_to("loop.toml")
    os.mkfifo(place.folder / "pipe.toml")
    (place.folder / "folder.toml").mkdir()
    write_task(place.folder / "good.csv", 4)
    (place.folder / "twin.csv").symlink_to("good.csv")  # a link inside the folder is as good as a copy
    place.stream()
    assert list(place.digests()) == ["good", "twin"]
    texts = {path.name: path.read_text() for path in (place.folder / "bad").glob("*.error.txt")}
    assert set(texts) == {f"{name}.csv.error.txt" for name in ("stolen", "own", "loop", "pipe", "folder")}
    assert not [name for name, text in texts.items() if "Traceback" in text]
    assert outside.is_file()


def test_a_name_that_is_no_text_is_refused_and_stops_no_other_file(place):
    write_task(place.folder / os.fsdecode(b"sm\xffs.csv"), 1)
    write_task(place.folder / "good.csv", 2)
    place.stream()
    assert list(place.digests()) == ["good"]
    (error,) = (place.folder / "bad").glob("*.error.txt")
    assert "not UTF-8" in error.read_text()
    assert "Traceback" not in error.read_text()


def test_nothing_is_moved_through_a_link_in_place_of_the_folder_of_bad_files(place):
    target = place.folder.parent / "elsewhere"
    target.mkdir()
    (place.folder / "bad").symlink_to(target)
    (place.folder / "sms.csv").write_text("nonsense")
    place.stream()
    assert "stays where it is" in place.of("aside")[0].message
    assert not list(target.iterdir())


def test_settings_that_fit_no_file_are_refused_before_any_file_is_called_bad(place):
    write_task(place.folder / "sms.csv", 1)
    with pytest.raises(BadConfig, match="max_length"):
        place.stream(RunConfig(train=TrainConfig(max_length=4096)))
    assert (place.folder / "sms.csv").is_file()


def test_hidden_and_unfinished_files_and_folders_are_left_alone(place):
    for name in (".hidden.csv", "half.csv.tmp", "half.csv.part"):
        (place.folder / name).write_text("nonsense")
    (place.folder / "notes.txt").write_text("read me")
    (place.folder / "sub.csv").mkdir()
    before = sorted(place.folder.iterdir())
    result = place.stream()
    assert sorted(place.folder.iterdir()) == before
    assert result == StreamResult((), (), 0)
    assert [event.file for event in place.of("ignored")] == ["notes.txt"]


def test_a_file_that_is_still_growing_is_not_touched(place):
    path = place.folder / "sms.csv"
    path.write_text("text,la")
    stop = threading.Event()

    def write_on() -> None:
        with path.open("a") as file:
            while not stop.is_set():
                file.write("x")
                file.flush()
                time.sleep(0.01)

    writer = threading.Thread(target=write_on)
    writer.start()
    try:
        place.stream(settings=StreamSettings(settle_s=0.3, once=True))
    finally:
        stop.set()
        writer.join()
    assert path.is_file()
    assert not (place.folder / "bad").exists()
    assert [event.file for event in place.of("unsettled")] == ["sms.csv"]
    write_task(path, 1)
    place.stream(settings=StreamSettings(settle_s=0.05, once=True))
    assert list(place.digests()) == ["sms"]


def test_a_file_replaced_while_it_is_read_is_tried_again_later(place, monkeypatch):
    from inlay.data import load_task

    def replacing(config: Any, name: str) -> Any:
        monkeypatch.setattr(inlay.stream.watch, "load_task", load_task)
        write_task(Path(config.source), 2, 30)
        raise ValueError("half a file")

    monkeypatch.setattr(inlay.stream.watch, "load_task", replacing)
    write_task(place.folder / "sms.csv", 1)
    place.stream()
    assert not (place.folder / "bad").exists()
    assert [event.file for event in place.of("unsettled")] == ["sms.csv"]
    place.stream()
    assert list(place.digests()) == ["sms"]


def test_a_version_that_no_longer_stands_stops_the_stream_until_it_is_mended(place):
    write_task(place.folder / "first.csv", 1)
    write_task(place.folder / "other.csv", 2)
    place.stream()
    (path,) = place.store.root.glob(f"objects/*/{place.store.resolve('first').digest}.safetensors")
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    write_task(place.folder / "second.csv", 3)
    with pytest.raises(StoreDamaged, match="first@1"):
        place.stream()
    assert list(place.of("fallen")[0].details["fallen"]) == ["first@1"]
    with pytest.raises(StoreDamaged, match="1 of 3 versions failed the proof"):
        place.stream()  # what was added is still not proved
    path.write_bytes(whole)
    place.stream()
    assert place.of("stands")[-1].details["num_tasks"] == 3


def test_a_second_stream_on_the_same_folder_is_refused(place):
    refused: list[InlayError] = []

    def try_another(event: StreamEvent) -> None:
        if event.kind == "training":
            with pytest.raises(InlayError, match="another stream") as caught:
                watch_folder(place.folder, place.backbone, place.store, CONFIG, AT_ONCE)
            refused.append(caught.value)

    write_task(place.folder / "sms.csv", 1)
    watch_folder(place.folder, place.backbone, place.store, CONFIG, AT_ONCE, try_another)
    assert len(refused) == 1


def test_a_missing_folder_is_an_error_that_says_so(place):
    with pytest.raises(Missing, match="no folder"):
        watch_folder(place.folder / "nowhere", place.backbone, place.store, CONFIG, AT_ONCE)


def test_watching_takes_files_as_they_come_and_ends_cleanly_at_ctrl_c(place):
    def arrive(event: StreamEvent) -> None:
        place.events.append(event)
        if event.kind == "waiting":
            number = len(place.of("waiting"))
            if number == 3:
                raise KeyboardInterrupt
            write_task(place.folder / f"task{number}.csv", number)

    settings = StreamSettings(settle_s=0.05, every_s=0.02)
    result = watch_folder(place.folder, place.backbone, place.store, CONFIG, settings, arrive)
    assert result.is_interrupted
    assert [version.reference for version in result.published] == ["task1@1", "task2@1"]
    assert [event.details["num_tasks"] for event in place.of("stands")] == [1, 2]
    assert place.events[-1].kind == "stopped"


def test_a_journal_torn_by_a_kill_is_read_and_written_on(place, num_fits):
    write_task(place.folder / "first.csv", 1)
    place.stream()
    (journal,) = place.store.root.glob("runs/streams/*/journal.jsonl")
    with journal.open("ab") as file:
        file.write(b'{"kind": "publi')
    write_task(place.folder / "second.csv", 2)
    place.stream()
    place.stream()
    assert num_fits == [1, 1]
    assert all(json.loads(line) for line in journal.read_text().splitlines())


@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_stream_stopped_in_training_goes_on_or_begins_anew_where_its_state_is_damaged(place, tmp_path, is_damaged):
    calm = Process(tmp_path / "calm", place.backbone)
    for side in (place, calm):
        write_task(side.folder / "first.csv", 1)
        write_task(side.folder / "second.csv", 2)
    calm.stream()

    def stop(event: StreamEvent) -> None:
        if event.kind == "epoch" and event.details["epoch"] == 2:
            raise KeyboardInterrupt

    result = watch_folder(place.folder, place.backbone, place.store, CONFIG, AT_ONCE, stop)
    assert result == StreamResult((), (), 0, is_interrupted=True)
    (state,) = place.store.root.glob("runs/cohorts/*/state.safetensors")
    if is_damaged:
        state.write_bytes(b"torn")
    place.stream()
    epochs = [event.details["epoch"] for event in place.of("epoch")]
    assert epochs == ([1, 1, 2, 2] if is_damaged else [2, 2])
    assert place.digests() == calm.digests()


SERVER = """
import os, sys, torch
from inlay.settings.run_config import MethodConfig, RunConfig, TrainConfig
from inlay.model import load_backbone
from inlay.store import Store
from inlay.stream import StreamSettings, watch_folder

torch.set_num_threads(1)
backbone = load_backbone(sys.argv[1], device="cpu")
train = TrainConfig(epochs=12, max_length=16, batch_size=8, lr=1e-3)
config = RunConfig(method=MethodConfig(size=4), train=train)
for root in sys.stdin:
    child = os.fork()
    if not child:
        print("pid", os.getpid(), flush=True)
        report = lambda event: print(event.kind, flush=True)
        settings = StreamSettings(settle_s=0.0, once=True)
        watch_folder(root.strip() + "/in", backbone, Store(root.strip() + "/store"), config, settings, report)
        os._exit(0)
    print("ended", os.waitpid(child, 0)[1], flush=True)
"""


class Server:
    """A process that has torch loaded and forks a stream whenever it is asked to."""

    def __init__(self, backbone: Path) -> None:
        command = [sys.executable, "-W", "ignore", "-c", SERVER, str(backbone)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def stream(self, root: Path, kill_at: str | None = None, delay_s: float = 0.0) -> int:
        """Run a stream to its end, or kill it some time after its first event of a kind. The exit status."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{root}\n")
        self.process.stdin.flush()
        pid = 0
        while line := self.process.stdout.readline().split():
            if line[0] == "ended":
                return int(line[1])
            pid = int(line[1]) if line[0] == "pid" else pid
            if line[0] == kill_at:
                time.sleep(delay_s)
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        raise AssertionError("the server died")


def test_killed_at_any_moment_and_restarted_it_ends_with_the_same_versions(tmp_path, tiny_bert_folder):
    for side in ("calm", "killed"):
        (tmp_path / side / "in").mkdir(parents=True)
        for seed in range(3):
            write_task(tmp_path / side / "in" / f"task{seed}.csv", seed)
        (tmp_path / side / "in" / "worse.csv").write_text("nonsense")
    server, source = Server(tiny_bert_folder), random.Random()
    with server.process:
        assert server.stream(tmp_path / "calm") == 0
        statuses = [server.stream(tmp_path / "killed", "read"), server.stream(tmp_path / "killed", "training", 0.1)]
        write_task(tmp_path / "killed" / "in" / "late.csv", 9)  # must not change the cohort that was begun
        for moment in ("epoch", "epoch", "published", "published", "stands"):
            statuses.append(server.stream(tmp_path / "killed", moment, source.uniform(0, 0.1)))
        assert server.stream(tmp_path / "killed") == 0
        assert server.process.stdin is not None
        server.process.stdin.close()
    assert statuses.count(signal.SIGKILL) >= 4
    calm, killed = (digests(Store(tmp_path / side / "store")) for side in ("calm", "killed"))
    assert len(killed.pop("late")) == 1
    assert killed == calm
    assert set(calm) == {"task0", "task1", "task2"}
    assert (tmp_path / "killed" / "in" / "bad" / "worse.csv").is_file()


def test_the_command_prints_an_event_a_line_and_keeps_to_its_settings(tmp_path, tiny_bert_folder):
    from inlay.cli.stream import stream

    app = typer.Typer()
    app.command()(stream)
    folder = tmp_path / "in"
    folder.mkdir()
    write_task(folder / "sms.csv", 1)
    options = ["--store", str(tmp_path / "store"), "--backbone", str(tiny_bert_folder), "--device", "cpu"]
    sizes = ["--size", "4", "--epochs", "1", "--set", "train.max_length=16"]
    result = CliRunner().invoke(app, [str(folder), "--once", "--settle", "10ms", "--json", *options, *sizes])
    assert result.exit_code == 0, result.output
    events = [json.loads(line) for line in result.stdout.splitlines()]
    told = list(dict.fromkeys(event["event"] for event in events))  # epochs are told one by one
    assert told == ["read", "training", "epoch", "published", "stands"]
    assert events[-1]["num_tasks"] == 1
    assert Store(tmp_path / "store").ledger()[0].latest.summary.method["size"] == 4


@pytest.mark.parametrize(("text", "seconds"), [("2s", 2), ("500ms", 0.5), ("1.5m", 90), ("1h", 3600), ("3", 3)])
def test_durations_are_read_with_their_units(text, seconds):
    from inlay.cli.stream import parse_duration

    assert parse_duration(text, "--every") == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "soon", "-1s", "2 days", "1e3"])
def test_what_is_no_duration_is_refused(text):
    from inlay.cli.stream import parse_duration

    with pytest.raises(BadConfig, match="is not a duration"):
        parse_duration(text, "--every")
