"""The kinds of things that come from outside, each with seeds that the product made and what must hold afterwards.

A kind is a class of one method: `attempt(chance, folder)` damages a seed in `folder` and uses it as a user would. An
`InlayError` is a good answer. `Silent` says that something was changed and nobody noticed.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import importlib.util
import io
import json
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from file_doors import FileDoors
from mutators import (
    craft_export,
    dump_json,
    mutate_bytes,
    mutate_file,
    mutate_json,
    mutate_tensors,
    mutate_text,
    odd_value,
)
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from world import SETTINGS, TEXT, Silent, World, call, find_version, is_same

from inlay.data import load_task, stream_rows
from inlay.errors import InlayError
from inlay.exchange import ImportOptions, export_folder, import_folder, named_backbone
from inlay.serving import Engine, Request, describe_answer, verify
from inlay.settings import MethodConfig
from inlay.settings.run_config import DataConfig
from inlay.store import Store
from inlay.stream.inbox import Inbox, identify
from inlay.training import EpochEnded, FitSettings, fit, make_run, publish
from toys import make_toy_answers, make_toy_pairs, make_toy_tags, make_toy_task


class Data:
    """Data files: every format, read to train and read to predict."""

    def __init__(self, world: World) -> None:
        import pandas

        rows = [(f"the movie {word} was", ("yes", "no")[i % 2]) for i, word in enumerate("good bad fine awful".split())]
        rows = [(f"{text} {number}", label) for number in range(6) for text, label in rows]
        frame = io.BytesIO()
        pandas.DataFrame(rows, columns=["text", "label"]).to_parquet(frame)
        lines = [json.dumps({"text": text, "label": label}) for text, label in rows]
        words = [f"{word}\t{'B-LOC' if word == 'movie' else 'O'}" for text, _ in rows for word in [*text.split(), ""]]
        answers = [
            {"id": str(i), "question": "which?", "answers": [{"text": "good", "answer_start": 4}]} for i in (1, 2)
        ]
        squad = {"version": "1.1", "data": [{"paragraphs": [{"context": "the good movie was", "qas": answers}]}]}
        self.seeds: dict[str, bytes] = {
            "a.csv": "\n".join(["text,label", *(f'"{text}",{label}' for text, label in rows)]).encode(),
            "b.tsv": "\n".join(["text\tlabel", *(f"{text}\t{label}" for text, label in rows)]).encode(),
            "c.csv": "\n".join(["text,label", *(f"{text},{i / 3}" for i, (text, _) in enumerate(rows))]).encode(),
            "d.jsonl": "\n".join(lines).encode(),
            "e.parquet": frame.getvalue(),
            "f.conll": "\n".join("" if word[0] == "\t" else word for word in words).encode(),
            "g.json": json.dumps(squad).encode(),
        }
        if importlib.util.find_spec("openpyxl"):
            book = io.BytesIO()
            pandas.DataFrame(rows, columns=["text", "label"]).to_excel(book, index=False)
            self.seeds["h.xlsx"] = book.getvalue()

    def attempt(self, chance: random.Random, folder: Path) -> None:
        path = self.damage(chance, folder, chance.choice(sorted(self.seeds)))
        kind = "tag" if path.suffix == ".conll" else chance.choice(("auto", "auto", "multilabel", "ordinal"))
        encoding = chance.choice((None, None, None, "latin-1", "utf-16", "punycode", "idna", "zlib", "no-such"))
        config = DataConfig(
            source=str(path),
            kind="auto" if path.suffix == ".json" else kind,
            on_bad_row=chance.choice(("refuse", "skip")),
            encoding=encoding,
        )
        for work in (lambda: check_task(load_task(config, "task")), lambda: check_input(path, config)):
            with contextlib.suppress(InlayError):
                work()

    def damage(self, chance: random.Random, folder: Path, name: str) -> Path:
        """Write a damaged file."""
        path, content = folder / name, self.seeds[name]
        if path.suffix == ".json" and chance.random() < 0.6:
            content = dump_json(mutate_json(chance, json.loads(content))).encode()
        elif path.suffix == ".jsonl" and chance.random() < 0.6:
            lines = [json.loads(line) for line in content.splitlines()]
            content = "\n".join(map(dump_json, mutate_json(chance, lines))).encode() if lines else b""
        elif path.suffix == ".xlsx":
            path.write_bytes(content)
            mutate_file(chance, path)
            content = path.read_bytes()
        elif path.suffix != ".parquet" and chance.random() < 0.6:
            content = mutate_text(chance, content.decode()).encode("utf8", "surrogatepass")
        else:
            content = mutate_bytes(chance, content)
        path.write_bytes(content)
        return path


def check_task(task: Any) -> None:
    """What training and publishing rely on: texts that can be written, targets that can be learned."""
    for split in (task.train, task.dev):
        for text in (*split.texts, *(split.pairs or ())):
            if not isinstance(text, str):
                raise Silent(f"a text is {type(text).__name__}")
            text.encode()
        if np.asarray(split.targets).dtype.kind == "f" and not np.isfinite(split.targets).all():
            raise Silent("a target is not finite")
        if len(split.targets) != len(split.texts):
            raise Silent("targets and texts differ in number")
    for label in task.labels:
        str(label).encode()
    json.dumps(list(task.labels))


def check_input(path: Path, config: DataConfig) -> int:
    """Read a file to predict; the number of its rows."""
    rows = [row for chunk in stream_rows(path, config, isolate=True) for row in chunk]
    for row in rows:
        if row.error is None and not isinstance(row.text, str):
            raise Silent(f"a text is {type(row.text).__name__}")
    return len(rows)


class Commands:
    """Data files again, as a user answers and scores them: `inlay predict --input` and `inlay evaluate`."""

    def __init__(self, world: World) -> None:
        self.world, self.data = world, Data(world)

    def attempt(self, chance: random.Random, folder: Path) -> None:
        store, data = self.world.store, self.data
        path = data.damage(chance, folder, chance.choice([name for name in sorted(data.seeds) if name != "f.conll"]))
        if chance.random() < 0.5:
            call("evaluate", store, "victim", path, "--on-bad-row", chance.choice(("refuse", "skip")))
            return
        out = folder / chance.choice(("out.csv", "out.tsv", "out.jsonl"))
        more = ("--min-confidence", "0.9") if chance.random() < 0.2 else ()
        call("predict", store, "victim", "--input", path, "-o", out, *more)
        if out.exists():
            text = out.read_bytes().decode()
            num_rows = len(list(csv.reader(io.StringIO(text)))) - 1 if out.suffix == ".csv" else text.count("\n")
            if num_rows - (out.suffix == ".tsv") != check_input(path, DataConfig(source=str(path))):
                raise Silent("rows are gone, or came from nowhere")


class Insight:
    """Odd texts explained, and damaged files picked from and compared with the rows that a task was trained on."""

    def __init__(self, world: World) -> None:
        self.data, self.store, rows = Data(world), Store(world.folder / "insight"), world.folder / "insight.csv"
        rows.write_bytes(self.data.seeds["a.csv"])
        settings = ("--lr", "1e-3", "--epochs", "1", "--size", "4", "--backbone", world.backbone.name)
        status = call("train", self.store, rows, "--task", "known", *settings)
        assert not status, "the task is not trained"

    def attempt(self, chance: random.Random, folder: Path) -> None:
        if chance.random() < 0.4:
            text = mutate_text(chance, TEXT).lstrip(" -")
            more = ("--html", folder / "page.html") if chance.random() < 0.2 else ()
            by = chance.choice(("occlusion", "gradients"))
            call("explain", self.store, "known", text, "--by", by, "--label", chance.choice(("yes", "no")), *more)
            return
        path = self.data.damage(chance, folder, chance.choice([name for name in self.data.seeds if name != "f.conll"]))
        if chance.random() < 0.5:
            call("drift", self.store, "known", path)
            return
        out = folder / chance.choice(("out.csv", "out.tsv", "out.jsonl"))
        call("pick", self.store, path, "--task", "known", "-o", out, "--count", chance.choice((1, 5, 100)))
        if out.exists():
            out.read_bytes().decode()


class OwnSettings:
    """`NAME.toml` beside a file of a stream: what it may not reach, it does not."""

    own = '[method]\nsize = 8\n[train]\nlr = 1e-3\nepochs = 2\n[data]\ntext = "text"\ndev = "dev.csv"\nlimit = 20\n'
    reaches = (
        'task = "second"',
        'backbone = "other"',
        "[joint]\nsteps = 1",
        '[data]\nsource = "/x"',
        '[data]\nroot = "/"',
    )

    def __init__(self, world: World) -> None:
        self.world, self.rows = world, Data(world).seeds["a.csv"]

    def attempt(self, chance: random.Random, folder: Path) -> None:
        inside = folder / "in"
        inside.mkdir()
        for path in (folder / "outside.csv", inside / "sms.csv", inside / "dev.csv"):
            path.write_bytes(self.rows)
        (inside / "link.csv").symlink_to(folder / "outside.csv")
        own = self.own.replace(
            "dev.csv", chance.choice(("dev.csv", "link.csv", "../outside.csv", "/etc/passwd", "../in"))
        )
        own = f"{chance.choice(self.reaches)}\n{own}" if chance.random() < 0.1 else own
        content = mutate_text(chance, own).encode("utf8", "surrogatepass") if chance.random() < 0.8 else own.encode()
        (inside / "sms.toml").write_bytes(content)
        path = inside / "sms.csv"
        item = identify(path, Inbox(inside, 0.0).stamp(path), SETTINGS, self.world.backbone.fingerprint)
        for other in (item.config.data.dev, item.config.data.test):
            if other and not Path(other).resolve().is_relative_to(inside.resolve()):
                raise Silent(f"reads `{other}`")
        if (item.config.task, item.config.data.source) != ("sms", str(path)):
            raise Silent(f"is task `{item.config.task}` of `{item.config.data.source}`")
        make_run(load_task(item.config.data, "sms"), item.config, self.world.backbone, self.world.store)


class StoreFiles:
    """One file of a version in the store: its object, its reference or its sidecar."""

    def __init__(self, world: World) -> None:
        self.world = world
        version = world.versions["victim"]
        files = [path for path in world.store.root.rglob("*") if path.is_file() and "runs" not in path.parts]
        self.files = sorted(
            str(path.relative_to(world.store.root))
            for path in files
            if version.digest in path.name or path.parent.name == "victim"
        )
        self.info = find_version(world.store, "victim")

    def attempt(self, chance: random.Random, folder: Path) -> None:
        world, store = self.world, self.world.copy_store(folder)
        name = chance.choice(self.files)
        mutate_file(chance, store.root / name)
        world.check_bystander(store)
        call("show", store, "victim")
        info = find_version(store, "victim")
        (check,) = verify([info.version], world.backbone, store)
        if check.stands and info.summary != self.info.summary:
            raise Silent("the listing shows other scores or labels, and verify is content")
        if check.stands and info.version != self.info.version:
            raise Silent("the reference names another version, and verify is content")
        if world.ask(store, "victim") != world.answers["victim"]:
            raise Silent("it answers otherwise")


class RunFolders:
    """Files of a finished run and of a stopped one: trained on or published, they end as they would have."""

    def __init__(self, world: World) -> None:
        self.world, self.stopped = world, world.folder / "stopped"
        with contextlib.suppress(KeyboardInterrupt):
            fit([world.run("victim")], world.backbone, self.stopped, FitSettings(draw_curves=False), _stop_at_two)

    def attempt(self, chance: random.Random, folder: Path) -> None:
        world, runs = self.world, folder / "runs"
        shutil.copytree(chance.choice((self.stopped, world.runs)), runs)
        victim = world.run("victim").id
        files = [path for path in sorted(runs.rglob("*")) if path.is_file()]
        files = [path for path in files if victim in path.parts or "cohorts" in path.parts]
        weighty = [
            path for path in files if path.suffix == ".safetensors" or path.name in ("cohort.json", "result.json")
        ]
        mutate_file(chance, chance.choice(chance.choice((files, weighty))))
        self._check("second", runs)
        self._check("victim", runs)

    def _check(self, name: str, runs: Path) -> None:
        world, run = self.world, self.world.run(name)
        try:
            (result,) = fit([run], world.backbone, runs, FitSettings(draw_curves=False))
            version = publish(run, result, world.backbone, Store(runs.parent / "published"))
        except InlayError as error:
            if name == "second":
                raise Silent(f"another run cannot be trained: {error}") from error
            raise
        if version.digest != world.versions[name].digest:
            raise Silent(f"`{name}` is published with other content than it was trained to")


def _stop_at_two(event: Any) -> None:
    if isinstance(event, EpochEnded) and event.record["epoch"] == 2:
        raise KeyboardInterrupt


class InlayFiles:
    """`.inlay` files: damaged on the way, or written by somebody with their digests in order."""

    def __init__(self, world: World) -> None:
        self.world = world
        # 1. versions of every kind that an encoder has, of several methods, and whether each reads pairs
        store = world.copy_store(world.folder / "undamaged")
        tasks = {
            "tags": (make_toy_tags("tags"), MethodConfig("lora", 4)),
            "answers": (make_toy_answers("answers", longest=12), MethodConfig("bitfit")),
            "towers": (make_toy_pairs("towers"), MethodConfig("houlsby", 4)),
            "number": (make_toy_task("number", kind="regress"), MethodConfig("pfeiffer", 4)),
            "sets": (make_toy_task("sets", kind="multilabel", num_labels=3), MethodConfig("ia3")),
        }
        for name, (task, method) in tasks.items():
            world.publish(store, method, task, pairs="towers" if name == "towers" else "joined")
        self.seeds = [
            store.export(name, world.folder / f"{name}.inlay").read_bytes() for name in ("victim", "victim", *tasks)
        ]
        # 2. a seed that is refused proves nothing
        for name in ("victim", *tasks):
            status = call("import", store, str(world.folder / f"{name}.inlay"), "--name", "whole")
            assert status == 0, f"{name} is refused"

    def attempt(self, chance: random.Random, folder: Path) -> None:
        world, store = self.world, Store(folder / "store")
        shutil.copytree(world.store.root, store.root, ignore=shutil.ignore_patterns("runs", "victim"))
        path, is_crafted, content = folder / "x.inlay", chance.random() < 0.75, chance.choice(self.seeds)
        path.write_bytes(craft_export(chance, content) if is_crafted else mutate_bytes(chance, content))
        status = call("import", store, str(path), "--name", "victim")
        world.check_bystander(store)
        if status:
            raise InlayError("refused")
        version = store.resolve("victim")
        call("show", store, "victim")
        if not is_crafted and version.digest.encode() not in content:
            raise Silent("damaged bytes were imported")
        try:
            world.ask(store, "victim", TEXT if store.manifest(version).extra.get("pairs") else None)
        except InlayError as error:
            raise Silent(f"was imported, and cannot answer: {error}") from error
        verify([version], world.backbone, store)


class _ForeignFolders:
    """Folders of another library, exported by Inlay itself and then damaged."""

    library: str
    pooling: str
    methods: Sequence[MethodConfig]

    def __init__(self, world: World) -> None:
        self.world, self.seeds = world, []
        for number, method in enumerate(self.methods):
            store, target = Store(world.folder / f"{self.library}-store"), world.folder / f"{self.library}-{number}"
            reference = world.publish(store, method, pooling=self.pooling).reference
            export_folder(reference, store, world.backbone, self.library, target)
            self.seeds.append(target)

    def attempt(self, chance: random.Random, folder: Path) -> None:
        world, store = self.world, Store(folder / "store")
        source = folder / "adapter"
        shutil.copytree(chance.choice(self.seeds), source)
        path = chance.choice(sorted(source.iterdir()))
        if path.suffix == ".safetensors" and chance.random() < 0.6:
            tensors = mutate_tensors(chance, load_tensors(path.read_bytes()))
            with contextlib.suppress(UnicodeEncodeError):
                path.write_bytes(save_tensors({name: each.contiguous() for name, each in tensors.items()}))
        elif path.suffix == ".bin" and chance.random() < 0.6:
            torch.save(mutate_tensors(chance, torch.load(path, weights_only=True)), path)
        else:
            mutate_file(chance, path)
        with contextlib.suppress(InlayError):
            named_backbone(source)
        version = import_folder(source, world.backbone, store, ImportOptions(name="victim")).version
        if call("tasks", store) or call("show", store, "victim"):
            raise Silent("was imported, and cannot be listed")
        world.ask(store, "victim")
        (check,) = verify([version], world.backbone, store)
        if not check.stands:
            raise Silent(f"was imported, and does not stand: {check.problem}")


class AdapterHub(_ForeignFolders):
    library = "adapterhub"
    pooling = "cls"
    methods = (
        MethodConfig("houlsby", 4, norms="none"),
        MethodConfig("pfeiffer", 4, norms="none"),
        MethodConfig("lora", 4),
    )


class Peft(_ForeignFolders):
    library = "peft"
    pooling = "pooler"
    methods = (MethodConfig("lora", 4), MethodConfig("ia3"), MethodConfig("dora", 4), MethodConfig("norms"))


class Requests:
    """Requests with odd fields among good ones: each gets its own answer, and spoils no other."""

    def __init__(self, world: World) -> None:
        self.world, self.engine = world, Engine(world.backbone, world.store, num_slots=2)

    def attempt(self, chance: random.Random, folder: Path) -> None:
        good = {"task": "victim", "text": TEXT, "pair": None, "min_confidence": None}
        requests, odd = [], set()
        for position in range(chance.choice((1, 4, 8))):
            fields = {**good, "task": chance.choice(sorted(self.world.tasks))}
            if chance.random() < 0.5:
                odd.add(position)
                for _ in range(chance.choice((1, 1, 2))):
                    values = (odd_value(chance), b"bytes", object(), 1j, {1}, "victim@1", "victim@9", "victim@best")
                    fields[chance.choice(sorted(fields))] = chance.choice(values)
            requests.append(Request(**fields))
        try:
            answers = self.engine.predict(requests)
        except InlayError as error:
            raise Silent(f"one request ends the batch: {error}") from error
        if len(answers) != len(requests):
            raise Silent(f"{len(answers)} answers to {len(requests)} requests")
        for position, (request, answer) in enumerate(zip(requests, answers, strict=True)):
            about = describe_answer(answer)
            json.dumps({**about, "task": str(request.task)}, allow_nan=False)
            if position not in odd and not is_same(about, self.world.answers[request.task]):
                raise Silent(f"a good request is answered with {about}")


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of input, how to make its attempts, and how many of them the short run takes."""

    make: Callable[[World], Any]
    num_short: int


KINDS = {
    "data": Kind(Data, 250),
    "file-doors": Kind(FileDoors, 150),
    "commands": Kind(Commands, 12),
    "insight": Kind(Insight, 12),
    "own-settings": Kind(OwnSettings, 150),
    "store": Kind(StoreFiles, 14),
    "runs": Kind(RunFolders, 6),
    "inlay": Kind(InlayFiles, 14),
    "adapterhub": Kind(AdapterHub, 16),
    "peft": Kind(Peft, 16),
    "requests": Kind(Requests, 60),
}
