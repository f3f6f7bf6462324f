"""Exports many tasks as one ONNX graph, with the task id as an input, and everything needed to use it.

The folder holds `model.onnx` (and `model.onnx.data` where the weights do not fit into one protobuf), `tasks.json`,
the tokenizer and a README with a working example; nothing in it needs Inlay, torch or transformers. It appears under
its name only when it is whole and every version's probes, answered by it in onnxruntime, agree with what was published.

Traced with torch's own exporter (`dynamo=True`): it refuses what depends on the traced batch or length, where the older
TorchScript one would write it down as a constant and say nothing.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from inlay.data import KINDS, Split, encode_split
from inlay.errors import BadConfig, InlayError, Missing, Unsupported
from inlay.exchange.traceable_bank import TaskGraph
from inlay.model import Backbone, Bank, Row, SlotSpec, canonical_backbone, collate, find_method, make_rows
from inlay.serving import check_backbone, find_reading
from inlay.store import DRAFT_PREFIX, Manifest, Store, Version, sync_directory

PACKAGES = ("onnx", "onnxscript", "onnxruntime")
"""The packages of the extra `[onnx]`."""
INLINE_LIMIT_BYTES = 1536 * 1024**2
"""Weights beyond this go into a file of their own: a protobuf ends at 2 GiB, and the graph itself takes room too."""
TOLERANCE = 1e-4
"""largest difference of a probe's answer in onnxruntime, as a share of its largest logit (of 1, if that is larger)"""


@dataclass(frozen=True)
class Exported:
    """The export: its files, and the distance of its answers to the probes from the published ones."""

    folder: Path
    versions: tuple[Version, ...]
    size_bytes: int
    opset: int
    num_probes: int
    difference: float


@dataclass(frozen=True)
class GraphTask:
    """A version to be exported; its place in the list is its task id."""

    version: Version
    manifest: Manifest
    spec: SlotSpec
    tensors: Mapping[str, Tensor]


def export_onnx(store: Store, references: Sequence[str], backbone: Backbone, folder: Path) -> Exported:
    """Write the versions as one graph into a new `folder`; their order gives the task ids, from 0.

    Raises before it writes anything if a version cannot be expressed or belongs to another backbone.
    """
    check_packages()
    check_folder(folder)
    backbone = canonical_backbone(backbone)
    tasks = _load(store, references, backbone)
    graph = TaskGraph(fill_bank(backbone, tasks)).eval()
    names = input_names(backbone, has_towers=has_towers(tasks))
    with _drafted(folder) as draft:
        opset = _write_graph(graph, backbone, names, draft / "model.onnx")
        _write_tokenizer(backbone, draft)
        about = describe(tasks, backbone, opset)
        (draft / "tasks.json").write_text(json.dumps(about, indent=1, ensure_ascii=False) + "\n", encoding="utf8")
        (draft / "README.txt").write_text(_README, encoding="utf8")
        num_probes, difference = _check_probes(tasks, backbone, draft)
    size_bytes = sum(path.stat().st_size for path in folder.iterdir())
    return Exported(folder, tuple(task.version for task in tasks), size_bytes, opset, num_probes, difference)


def check_packages() -> None:
    """Refuse to begin without the extra."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise Missing(f"`{missing[0]}` is not installed", "install Inlay's extra: `pip install 'inlay[onnx]'`")


def check_folder(folder: Path) -> None:
    """Refuse a place that is not empty, or that has no parent folder."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BadConfig(f"`{folder}` is there already and is not an empty folder", "name a new folder for the export")
    if not folder.absolute().parent.is_dir():
        raise Missing(f"no folder `{folder.parent}`", "make it first, or choose another place for the export")


def _load(store: Store, references: Sequence[str], backbone: Backbone) -> list[GraphTask]:
    tasks: list[GraphTask] = []
    for reference in references:
        version = store.resolve(reference)
        if any(task.version == version for task in tasks):
            raise BadConfig(f"`{version.reference}` is named twice", "name every version once: its place is its id")
        loaded = store.load(version)
        check_backbone(version, loaded.manifest, backbone)
        spec = SlotSpec.from_stored(loaded.manifest.method, loaded.manifest.head)
        check_spec(version.reference, spec)
        tasks.append(GraphTask(version, loaded.manifest, spec, loaded.tensors))
    if not tasks:
        raise BadConfig("no task to export", "name at least one; `inlay tasks` lists them")
    return tasks


def check_spec(reference: str, spec: SlotSpec) -> None:
    """Refuse a version that a graph of mixed tasks cannot hold."""
    if spec.is_finetuned:
        raise Unsupported(
            f"`{reference}` has its own copy of the backbone's weights (method `{spec.method.name}`)",
            "such a task shares no graph with others: leave it out, or train it with another method",
        )
    for part in find_method(spec.method.name).parts:
        if part.graph_obstacle is not None:
            reason, hint = part.graph_obstacle
            raise Unsupported(f"`{reference}` {reason} (method `{spec.method.name}`)", hint)
    if spec.head.is_written:
        raise Unsupported(
            f"`{reference}` stands on a backbone that writes its answers, token by token",
            "an ONNX graph has one pass: leave it out, or train the task on an encoder",
        )
    if KINDS[spec.head.kind].onnx is None:
        known = ", ".join(name for name, kind in KINDS.items() if kind.onnx is not None)
        raise Unsupported(
            f"`{reference}` is of the kind `{spec.head.kind}`, whose answer is not one row of logits",
            f"an ONNX graph mixes tasks of the kinds {known}: leave it out",
        )


def fill_bank(backbone: Backbone, tasks: Sequence[GraphTask]) -> Bank:
    """A bank in which every task has the slot of its id."""
    bank = Bank(backbone, len(tasks))
    for slot, task in enumerate(tasks):
        bank.put(slot, task.spec, task.tensors)
    return bank


def has_towers(tasks: Sequence[GraphTask]) -> bool:
    """Whether a task reads the two texts of a pair apart."""
    return any(task.spec.head.has_towers for task in tasks)


def input_names(backbone: Backbone, *, has_towers: bool = False) -> tuple[str, ...]:
    """The graph's inputs; token types are one where the tokenizer makes them and the backbone reads them."""
    has_types = backbone.takes_token_types and "token_type_ids" in backbone.tokenizer.model_input_names
    types, second = ("token_type_ids",) if has_types else (), ("second",) if has_towers else ()
    return ("input_ids", "attention_mask", *types, "task", *second)


def describe(tasks: Sequence[GraphTask], backbone: Backbone, opset: int) -> dict[str, Any]:
    """The content of `tasks.json`, by which a program asks the graph and reads its answers."""
    inputs = dict.fromkeys(input_names(backbone, has_towers=has_towers(tasks)), "[batch, tokens] int64")
    inputs["task"] = "[batch] int64: each row's task id"
    if "second" in inputs:
        inputs["second"] = (
            "[batch] int64: of a task with towers a pair is two rows; at the first text's row stands the number of the "
            "second's, from 0, and its logits are the pair's; at every other row its own number"
        )
    return {
        "format": 1,
        "opset": opset,
        "backbone": {"name": tasks[0].manifest.backbone["name"], "fingerprint": backbone.fingerprint},
        "inputs": inputs,
        "outputs": {
            "logits": "[batch, widest] float32: a row's own num_outputs first, then -inf, whose probability is 0",
            "num_outputs": "[batch] int64: how many of a row's logits are its own",
        },
        "pad_id": backbone.pad_id,
        "reading": {kind: KINDS[kind].onnx for kind in sorted({task.manifest.kind for task in tasks})},
        "ids": "an id that is no task's is refused by the runtime, or answered with nan",
        "tasks": [{"id": place, **_describe_task(task)} for place, task in enumerate(tasks)],
    }


def _describe_task(task: GraphTask) -> dict[str, Any]:
    manifest, head = task.manifest, task.spec.head
    return {
        "task": task.version.name,
        "version": task.version.reference,
        "digest": task.version.digest,
        "kind": manifest.kind,
        "labels": list(manifest.labels),
        "num_outputs": head.num_outputs,
        "pairs": bool(manifest.extra.get("pairs")),
        "towers": head.has_towers,
        "max_length": manifest.max_length,
        "pooling": head.pooling,
        "temperature": head.temperature,
        **({} if head.thresholds is None else {"thresholds": list(head.thresholds)}),
    }


def _write_graph(graph: TaskGraph, backbone: Backbone, names: Sequence[str], path: Path) -> int:
    """Trace and write the graph with these inputs; return its opset."""
    # Sizes other than 0 and 1, which the exporter takes for constants; one padded row, so that the mask is no constant.
    rows = [Row([backbone.pad_id + 1] * length, 0, [0] * length) for length in (5, 9, 9)]
    batch = collate(rows, backbone.pad_id)
    values = {
        "input_ids": batch.input_ids_BT,
        "attention_mask": batch.mask_BT,
        "token_type_ids": batch.token_types_BT,
        "task": torch.zeros(len(rows), dtype=torch.int64),
        "second": torch.tensor([1, 1, 2]),
    }
    axes = {name: {0: "batch"} if name in ("task", "second") else {0: "batch", 1: "tokens"} for name in names}
    with _quiet(), torch.no_grad():
        program = _trace(graph, {name: values[name] for name in names}, axes)
        _strip(program.model)
        program.save(path, external_data=_size_bytes(graph) > INLINE_LIMIT_BYTES)
    return int(program.model.opset_imports[""])


def _trace(graph: TaskGraph, inputs: dict[str, Any], axes: dict[str, dict[int, str]]) -> Any:
    outputs = ["logits", "num_outputs"]
    try:
        return torch.onnx.export(
            graph, kwargs=inputs, dynamic_shapes=axes, output_names=outputs, dynamo=True, verbose=False
        )
    except torch.onnx.OnnxExporterError as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise Unsupported(
            f"torch's ONNX exporter cannot trace this backbone: {reason}",
            "it may be able to in another version of torch or transformers",
        ) from error


def _strip(model: Any) -> None:
    """Drop the exporter's notes at every node: stack traces, with the paths of this machine in them."""
    for node in model.graph.all_nodes():
        node.metadata_props.clear()
        node.doc_string = None
        for value in node.outputs:
            value.metadata_props.clear()


def _size_bytes(graph: torch.nn.Module) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in graph.state_dict().values())


def _write_tokenizer(backbone: Backbone, folder: Path) -> None:
    backbone.tokenizer.save_pretrained(folder)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf8"))
    content |= {"truncation": None, "padding": None}  # whatever Inlay last cut rows to; a task has its own max_length
    path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf8")


def _check_probes(tasks: Sequence[GraphTask], backbone: Backbone, folder: Path) -> tuple[int, float]:
    """Check the probes' answers in onnxruntime; return their number and the largest difference within tolerance."""
    session = open_session(folder)
    num_probes, largest = 0, 0.0
    for place, task in enumerate(tasks):
        probes, head = task.manifest.probes, task.spec.head
        if not probes:
            continue
        pairs = None if probes[0].pair is None else [probe.pair or "" for probe in probes]
        asked = Split([probe.text for probe in probes], pairs, None, [])
        encoded = encode_split(backbone.tokenizer, asked, find_reading(task.manifest))
        logits = answer(session, make_rows(encoded, place), backbone.pad_id)
        wanted = np.array([probe.logits for probe in probes]) * head.target_std + head.target_mean
        difference = float(np.abs(logits[:, : head.num_outputs] - wanted).max())
        if not difference <= TOLERANCE * max(1.0, float(np.abs(wanted).max())):
            raise Unsupported(
                f"the graph's answers to the probes of `{task.version.reference}` differ by {difference:.1e}",
                "run `inlay verify`; if the version stands, onnxruntime or the exporter is at fault: report it",
            )
        num_probes, largest = num_probes + len(probes), max(largest, difference)
    return num_probes, largest


def open_session(folder: Path) -> Any:
    """An onnxruntime session on an exported folder, on the CPU."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors only
    options.intra_op_num_threads = torch.get_num_threads()
    return onnxruntime.InferenceSession(folder / "model.onnx", options, providers=["CPUExecutionProvider"])


def answer(session: Any, rows: Sequence[Row], pad_id: int) -> np.ndarray:
    """The logits of encoded rows, whose slots are task ids, in order."""
    batch = collate(rows, pad_id)
    assert batch.mask_BT is not None
    order = np.array(batch.order)
    num_texts = np.array([len(rows[index].texts) for index in order])
    firsts = np.cumsum(num_texts) - num_texts
    second = np.arange(batch.num_texts)
    second[firsts] += num_texts - 1
    values = {
        "input_ids": batch.input_ids_BT.numpy(),
        "attention_mask": batch.mask_BT.numpy(),
        "task": np.repeat(np.array([rows[index].slot for index in order], dtype=np.int64), num_texts),
        "second": second,
    }
    types = batch.token_types_BT
    values["token_type_ids"] = np.zeros_like(values["input_ids"]) if types is None else types.numpy()
    logits = session.run(["logits"], {item.name: values[item.name] for item in session.get_inputs()})[0]
    back = np.empty_like(order)
    back[order] = firsts
    return logits[back]


@contextmanager
def _drafted(folder: Path) -> Iterator[Path]:
    """A folder to write into that gets its name at the end of the block: complete, or not at all."""
    draft = folder.absolute().parent / f"{DRAFT_PREFIX}{os.getpid()}-{os.urandom(8).hex()}"
    try:
        draft.mkdir()
        yield draft
        for path in draft.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        sync_directory(draft)
        os.replace(draft, folder)  # an empty folder may stand there
        sync_directory(draft.parent)
    except OSError as error:
        raise InlayError(f"cannot write `{folder}`: {error.strerror or error}", "choose another place") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporter's warnings, which are about its own internals."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


_README = """\
Tasks exported by Inlay as one ONNX graph. tasks.json says what the tasks, inputs and outputs are, and under `reading`
how logits become answers: where a task has `thresholds`, its labels are cut there and not at 0.
Rows of any tasks may be mixed in one batch: `task` holds the id of each row's task. The tokenizer is in tokenizer.json;
cut rows to their task's max_length, pad ids with pad_id, mask and token types with 0. A pair is one row, both texts
joined by the tokenizer; of a task with `towers` in tasks.json it is two rows, one for each text, and the input `second`
has the number of the second text's row where the first text's is. This runs in this folder:

import json
import numpy as np
import onnxruntime
from tokenizers import Tokenizer

about = json.load(open("tasks.json", encoding="utf8"))
task, texts = about["tasks"][0], ["a first text", "and another, which is a little longer"]
tokenizer = Tokenizer.from_file("tokenizer.json")
tokenizer.enable_truncation(task["max_length"])
tokenizer.enable_padding(pad_id=about["pad_id"])
asked = [(text, text) for text in texts] if task["pairs"] else texts
rows = tokenizer.encode_batch(texts + texts if task["towers"] else asked)
numbers = list(range(len(rows)))
inputs = {"input_ids": [row.ids for row in rows], "attention_mask": [row.attention_mask for row in rows]}
inputs |= {"token_type_ids": [row.type_ids for row in rows], "task": [task["id"]] * len(rows)}
inputs["second"] = 2 * numbers[len(texts):] if task["towers"] else numbers
session = onnxruntime.InferenceSession("model.onnx")
logits, num_outputs = session.run(None, {name: np.array(inputs[name], np.int64) for name in about["inputs"]})
for text, row, count in zip(texts, logits, num_outputs):
    print(text, dict(zip(task["labels"] or ["value"], row[:count].tolist())), sep="\\t")
"""
