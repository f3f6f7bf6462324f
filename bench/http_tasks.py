"""The tasks and rows of `bench/over_http.py`, in the format of each server that answers them.

A task is LoRA of rank 8 on queries and values and a head on the backbone's pooler, with seeded random values large
enough that another task's answer is another answer. That is the one structure which vLLM, `adapters` and transformers
all have. Inlay's store is where they come from; the others get what Inlay's own export writes, and whole models get
the LoRA merged into their weights.

    <folder>/store            Inlay's store: `task-000` …, and tasks of other methods for what is Inlay's alone
    <folder>/peft/task-000    for vLLM
    <folder>/adapterhub/…     for `adapters`
    <folder>/merged/…         whole models
    <folder>/base             the classifier that vLLM loads, with the backbone's weights
    <folder>/expected.json    rows, and the answers of Inlay's engine in this process
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from report import say, write_whole
from workload import glue_lengths, make_workload, open_backbone

BACKBONE = "minilm"
LABELS = ("billing", "delivery", "praise", "question")
NUM_ROWS = 4096
NUM_COMPARED = 192
MOST_WHOLE = 32
"""whole models that are written: each has 90 MB"""
PROBES = ("The parcel came on Tuesday.", "Why was I charged twice?", "Thank you for your help.")
FORMS: dict[str, tuple[dict[str, Any], str, float]] = {
    "task": ({"name": "lora", "size": 8}, "pooler", 0.1),
    "houlsby": ({"name": "houlsby", "size": 64}, "cls", 0.05),
    "top": ({"name": "houlsby", "size": 64, "layers": "-2:"}, "cls", 0.05),
    "head": ({"name": "head"}, "cls", 0.0),
}
"""the first word of a task's name -> its method, what its head reads, standard deviation of its random values"""
HEAD_SPREAD = 0.3
NUM_OTHERS = 32
"""tasks of each other form"""
TENANTS = ("alpha", "beta")
NUM_OF_TENANT = 16
MOVING = "moving"
"""a task of two versions"""


def name_task(index: int, form: str = "task") -> str:
    return f"{form}-{index:03d}"


@dataclasses.dataclass(frozen=True)
class Tasks:
    """Where the tasks lie, and the rows."""

    folder: Path

    @property
    def home(self) -> Path:
        return self.folder / "store"

    def copy_home(self, name: str, prepare: Callable[[Any], None] | None = None) -> Path:
        """A home for a service to work in: a database without limits for `local`, and the store as it was made.

        `prepare` is given the database before there is a store: a tenant's name must be free in that.
        """
        from inlay.service.state import LOCAL, NO_LIMITS, Database, Tenants

        home = self.folder / "homes" / name
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir(parents=True)
        db = Database.open(home)
        Tenants(db).set_limits(LOCAL, NO_LIMITS)
        if prepare is not None:
            prepare(db)
        db.close()
        shutil.copytree(self.home, home, dirs_exist_ok=True)
        return home

    def texts(self) -> list[str]:
        work = make_workload(BACKBONE, glue_lengths(NUM_ROWS), self.folder)
        return json.loads(work.path.read_text(encoding="utf8"))["texts"]

    def expected(self) -> list[dict[str, Any]]:
        """Some rows, each with its task and the probabilities that Inlay's engine gives in its own process."""
        return json.loads((self.folder / "expected.json").read_text(encoding="utf8"))


def make_tasks(folder: Path, *, num_tasks: int) -> Tasks:
    """Make what is missing of the tasks; the same seeds give the same tasks."""
    tasks, done = Tasks(folder), folder / "tasks.json"
    wanted = {"tasks": num_tasks, "forms": list(FORMS), "labels": LABELS, "rows": NUM_ROWS, "edition": 2}
    if done.exists() and json.loads(done.read_text(encoding="utf8")) == json.loads(json.dumps(wanted)):
        return tasks
    from inlay.model import load_backbone

    folder.mkdir(parents=True, exist_ok=True)
    backbone = load_backbone(BACKBONE)
    say(f"publishing {num_tasks} tasks, and others that are Inlay's alone")
    for form in FORMS:
        count = num_tasks if form == "task" else NUM_OTHERS
        _publish(tasks, backbone, form, [(name_task(index, form), index) for index in range(count)])
    for tenant in TENANTS:
        _publish(tasks, backbone, "task", [(f"{tenant}.{name_task(index)}", index) for index in range(NUM_OF_TENANT)])
    for seed in (0, 1):
        _publish(tasks, backbone, "task", [(MOVING, seed)], again=seed == 1)
    say("exporting them")
    _export(tasks, backbone, num_tasks)
    say(f"writing {MOST_WHOLE} whole models")
    _write_base(tasks)
    for index in range(min(MOST_WHOLE, num_tasks)):
        _merge(tasks, name_task(index))
    say("answering the rows to compare")
    _write_expected(tasks, backbone, num_tasks)
    write_whole(done, json.dumps(wanted))
    return tasks


def make_spec(form: str) -> Any:
    from inlay.model import HeadSpec, SlotSpec
    from inlay.settings import MethodConfig

    method, pooling, _ = FORMS[form]
    return SlotSpec.of(MethodConfig(**method), HeadSpec("classify", len(LABELS), pooling))


def draw_tensors(backbone: Any, spec: Any, spread: float, seed: int) -> dict[str, Any]:
    """A slot's values: away from neutral, so that a wrong slot gives another answer."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for item in spec.layout(backbone.anatomy):
        neutral = backbone.own_tensor(item.name) if item.start == "backbone" else float(item.start == "ones")
        width = HEAD_SPREAD if item.name.startswith("head.") else spread
        tensors[item.name] = neutral + width * torch.randn(item.shape, generator=generator)
    return tensors


def _publish(tasks: Tasks, backbone: Any, form: str, wanted: Sequence[tuple[str, int]], *, again: bool = False) -> None:
    """Publish a task for each name and seed, unless there is one; with `again`, another version of it."""
    from inlay.data import Split
    from inlay.model import canonical_backbone, infer_canonically
    from inlay.store import Manifest, Probe, Store
    from inlay.training import describe_backbone, encode_rows

    store, spec = Store(tasks.home), make_spec(form)
    plain = canonical_backbone(backbone)
    rows = encode_rows(plain, Split(list(PROBES), None, None, []), 128)
    known = {task.name for task in store.ledger()}
    for name, seed in wanted:
        if name in known and not again:
            continue
        tensors = draw_tensors(backbone, spec, FORMS[form][2], seed)
        answers = infer_canonically(plain, spec, tensors, rows)
        probes = [Probe(text, None, tuple(answers[row].tolist())) for row, text in enumerate(PROBES)]
        manifest = Manifest(
            kind=spec.head.kind,
            labels=LABELS,
            metric="accuracy",
            method=dataclasses.asdict(spec.method),
            head=spec.head.to_stored(),
            max_length=128,
            metrics={},
            data_digest="random",
            dev_digest="",
            backbone=describe_backbone(backbone),
            run_id="random",
            num_parameters=sum(tensor.numel() for tensor in tensors.values()),
            probes=tuple(probes),
            config={},
            extra={"pairs": False},
        )
        store.publish(name, tensors, manifest, {})


def _export(tasks: Tasks, backbone: Any, count: int) -> None:
    from inlay.exchange import export_folder
    from inlay.store import Store

    store = Store(tasks.home)
    for format_name in ("peft", "adapterhub"):
        (tasks.folder / format_name).mkdir(exist_ok=True)
        for index in range(count):
            target = tasks.folder / format_name / name_task(index)
            if not target.exists():
                export_folder(name_task(index), store, backbone, format_name, target)


def _source() -> Path:
    from inlay.model.backbone.loading import find_folder

    return find_folder(BACKBONE).absolute()


TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt")


def _write_base(tasks: Tasks) -> None:
    """The backbone as a classifier of transformers, with a head of zeros; and by itself, for `adapters`."""
    import torch
    from transformers import AutoModelForSequenceClassification

    if (tasks.folder / "base" / "config.json").exists():
        return
    model = AutoModelForSequenceClassification.from_pretrained(
        open_backbone(BACKBONE, tasks.folder / "backbones"), num_labels=len(LABELS)
    )
    with torch.no_grad():
        model.classifier.weight.zero_()
        model.classifier.bias.zero_()
    _save(model, tasks.folder / "base")


def _merge(tasks: Tasks, name: str) -> None:
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification

    target = tasks.folder / "merged" / name
    if (target / "config.json").exists():
        return
    model = AutoModelForSequenceClassification.from_pretrained(tasks.folder / "base")
    _save(PeftModel.from_pretrained(model, tasks.folder / "peft" / name).merge_and_unload(), target)


def _save(model: Any, target: Path) -> None:
    model.config.id2label = dict(enumerate(LABELS))
    model.config.label2id = {label: index for index, label in enumerate(LABELS)}
    model.save_pretrained(target)
    for file in TOKENIZER_FILES:
        (target / file).unlink(missing_ok=True)
        (target / file).symlink_to(_source() / file)


def _write_expected(tasks: Tasks, backbone: Any, count: int) -> None:
    """Answer rows of many lengths, each by another task, by Inlay's engine without a service."""
    from inlay import Engine
    from inlay.serving import Request
    from inlay.store import Store

    texts, generator = tasks.texts(), np.random.default_rng(1)
    engine = Engine(backbone, Store(tasks.home), num_slots=min(count, 64))
    found = []
    for text in generator.choice(texts, size=NUM_COMPARED, replace=False):
        # Numbers under 32 only: the tasks that every server holds.
        name = name_task(int(generator.integers(min(MOST_WHOLE, count))))
        (answer,) = engine.predict([Request(name, str(text))])
        assert answer.error is None, answer.error
        probabilities = answer.to_json()["probabilities"]
        found.append({"task": name, "text": str(text), "probs": [float(probabilities[label]) for label in LABELS]})
    write_whole(tasks.folder / "expected.json", json.dumps(found))
