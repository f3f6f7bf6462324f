"""Export of many tasks as one ONNX graph, with the task id as an input, and everything needed to use it.

The folder has `model.onnx` (and `model.onnx.data` if the weights do not fit into one protobuf), `tasks.json`, the
tokenizer and a README with a working example; nothing in it needs Inlay, torch or transformers. It gets its name only
when it is whole, and when onnxruntime's answers to every version's probes agree with what was published.

The graph is traced with torch's own exporter (`dynamo=True`), which refuses code that depends on the traced batch or
length; the older TorchScript exporter would silently write such values as constants.

In Inlay rows are sorted by slot and a banked operation is a product per segment. A traced graph has no segments: here
every row gathers its own slot's parameters by task id, and a banked operation is one batched product, whatever the mix
(each part has this form too). Where slots differ in kind (pooling, a layer before the head), every kind that occurs is
computed and each row selects its own. A gather also keeps slots apart: NaN in one cannot reach the rows of another.

Shape letters: S slots, B rows, T tokens of a row, D width, K layers, L labels.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from inlay.data import KINDS, Split, encode_split
from inlay.errors import BadConfig, InlayError, Missing, Unsupported
from inlay.exchange.foreign import check_target, drafted
from inlay.model import (
    Backbone,
    Bank,
    Batch,
    Gather,
    PassHooks,
    Route,
    Row,
    SlotSpec,
    build_views,
    canonical_backbone,
    collate,
    find_method,
    make_rows,
    pair_features,
)
from inlay.model import head as head_part
from inlay.serving import check_backbone, find_reading, read_slot
from inlay.store import Manifest, Store, Version

PACKAGES = ("onnx", "onnxscript", "onnxruntime")
"""The packages of the extra `[onnx]`."""
INLINE_LIMIT_BYTES = 1536 * 1024**2
"""Larger weights go into a separate file: a protobuf has at most 2 GiB, and the graph itself needs some of it."""
TOLERANCE = 1e-4
"""largest difference of a probe's answer in onnxruntime, relative to its largest logit, or to 1 if that is larger"""


@dataclass(frozen=True)
class OnnxExport:
    """The export: its folder, and the largest difference of its answers to the probes from the published ones."""

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


def export_onnx(store: Store, references: Sequence[str], backbone: Backbone, folder: Path) -> OnnxExport:
    """Write the versions as one graph into a new `folder`; their order gives the task ids, from 0.

    Raises before writing if a version cannot be exported or belongs to another backbone.
    """
    # 1. refuse without the extra, or if the folder cannot be created
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise Missing(f"`{missing[0]}` is not installed", "install Inlay's extra: `pip install 'inlay[onnx]'`")
    check_target(folder)
    # 2. a bank in which every task has the slot of its id
    backbone = canonical_backbone(backbone)
    tasks = _load(store, references, backbone)
    bank = Bank(backbone, len(tasks))
    for slot, task in enumerate(tasks):
        bank.put(slot, task.spec, task.tensors)
    # 3. the folder, which is kept only if the graph answers the probes as published
    try:
        with drafted(folder) as draft:
            about = _describe(tasks, backbone)
            with backbone.turn():
                opset = _write_graph(TaskGraph(bank).eval(), backbone, list(about["inputs"]), draft / "model.onnx")
            backbone.tokenizer.save_pretrained(draft)
            tokenizer = json.loads((draft / "tokenizer.json").read_text(encoding="utf8"))
            tokenizer |= {"truncation": None, "padding": None}  # each task has its own max_length
            (draft / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf8")
            about["opset"] = opset
            (draft / "tasks.json").write_text(json.dumps(about, indent=1, ensure_ascii=False) + "\n", encoding="utf8")
            (draft / "README.txt").write_text(_README, encoding="utf8")
            num_probes, difference = _check_probes(tasks, backbone, draft)
    except OSError as error:
        raise InlayError(f"cannot write `{folder}`: {error.strerror or error}", "choose another place") from error
    size_bytes = sum(path.stat().st_size for path in folder.iterdir())
    return OnnxExport(folder, tuple(task.version for task in tasks), size_bytes, opset, num_probes, difference)


def _load(store: Store, references: Sequence[str], backbone: Backbone) -> list[GraphTask]:
    """Load the versions; refuse those that the graph cannot have."""
    tasks: list[GraphTask] = []
    for reference in references:
        version = store.resolve(reference)
        if any(task.version == version for task in tasks):
            raise BadConfig(f"`{version.reference}` is named twice", "name every version once: its place is its id")
        loaded = store.load(version)
        check_backbone(version, loaded.manifest, backbone)
        spec = read_slot(loaded.manifest, backbone)
        check_spec(version.reference, spec)
        tasks.append(GraphTask(version, loaded.manifest, spec, loaded.tensors))
    if not tasks:
        raise BadConfig("no task to export", "name at least one; `inlay tasks` lists them")
    return tasks


def check_spec(reference: str, spec: SlotSpec) -> None:
    """Refuse a version that a graph of several tasks cannot express."""
    if spec.is_finetuned:
        raise Unsupported(
            f"`{reference}` has its own copy of the backbone's weights (method `{spec.method.name}`)",
            "such a task cannot share a graph with others: leave it out, or train it with another method",
        )
    for part in find_method(spec.method.name).parts:
        if part.graph_obstacle is not None:
            reason, hint = part.graph_obstacle
            raise Unsupported(f"`{reference}` {reason} (method `{spec.method.name}`)", hint)
    if spec.head.is_written:
        raise Unsupported(
            f"`{reference}` has a backbone that writes its answers, token by token",
            "an ONNX graph has one pass: leave it out, or train the task on an encoder",
        )
    if KINDS[spec.head.kind].onnx is None:
        known = ", ".join(name for name, kind in KINDS.items() if kind.onnx is not None)
        raise Unsupported(
            f"`{reference}` is of the kind `{spec.head.kind}`, whose answer is not one row of logits",
            f"an ONNX graph mixes tasks of the kinds {known}: leave it out",
        )


def _describe(tasks: Sequence[GraphTask], backbone: Backbone) -> dict[str, Any]:
    """Return the content of `tasks.json`, which a program needs to use the graph; the opset is added later."""
    inputs = dict.fromkeys(("input_ids", "attention_mask"), "[batch, tokens] int64")
    # Token types are an input if the tokenizer makes them and the backbone reads them.
    if backbone.takes_token_types and "token_type_ids" in backbone.tokenizer.model_input_names:
        inputs["token_type_ids"] = "[batch, tokens] int64"
    inputs["task"] = "[batch] int64: each row's task id"
    if any(task.spec.head.has_towers for task in tasks):
        inputs["second"] = (
            "[batch] int64: of a task with towers a pair is two rows; at the first text's row stands the number of the "
            "second's, from 0, and its logits are the pair's; at every other row its own number"
        )
    return {
        "format": 1,
        "opset": None,
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
    # 1. example inputs: no sizes of 0 or 1, which the exporter would take for constants; one padded row, so that the
    # mask is not constant
    rows = [Row([backbone.pad_id + 1] * length, 0, [0] * length) for length in (5, 9, 9)]
    batch = collate(rows, backbone.pad_id)
    values = {
        "input_ids": batch.input_ids_BT,
        "attention_mask": batch.mask_BT,
        "token_type_ids": batch.token_types_BT,
        "task": torch.zeros(len(rows), dtype=torch.int64),
        "second": torch.tensor([1, 1, 2]),
    }
    # 2. trace with these inputs, whose sizes may vary
    axes = {name: {0: "batch"} if name in ("task", "second") else {0: "batch", 1: "tokens"} for name in names}
    size_bytes = sum(tensor.numel() * tensor.element_size() for tensor in graph.state_dict().values())
    with _quiet(), torch.no_grad():
        try:
            program: Any = torch.onnx.export(
                graph,
                kwargs={name: values[name] for name in names},
                dynamic_shapes=axes,
                output_names=["logits", "num_outputs"],
                dynamo=True,
                verbose=False,
            )
        except torch.onnx.OnnxExporterError as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise Unsupported(
                f"torch's ONNX exporter cannot trace this backbone: {reason}",
                "another version of torch or transformers may be able to",
            ) from error
        # 3. drop the exporter's notes at every node: stack traces, with paths of this machine.
        for node in program.model.graph.all_nodes():
            node.metadata_props.clear()
            node.doc_string = None
            for value in node.outputs:
                value.metadata_props.clear()
        program.save(path, external_data=size_bytes > INLINE_LIMIT_BYTES)
    return int(program.model.opset_imports[""])


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
                "run `inlay verify`; if that finds nothing, the error is in onnxruntime or the exporter: report it",
            )
        num_probes, largest = num_probes + len(probes), max(largest, difference)
    return num_probes, largest


def open_session(folder: Path) -> Any:
    """Return an onnxruntime session on an exported folder, on the CPU."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors only
    options.intra_op_num_threads = torch.get_num_threads()
    return onnxruntime.InferenceSession(folder / "model.onnx", options, providers=["CPUExecutionProvider"])


def answer(session: Any, rows: Sequence[Row], pad_id: int) -> np.ndarray:
    """Return the logits of encoded rows, whose slots are task ids, in order."""
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


class TaskGraph(nn.Module):
    """A module from token ids and task ids to logits, made of a bank's backbone, slots and heads."""

    def __init__(self, bank: Bank) -> None:
        super().__init__()
        self._specs = [spec for spec in bank.specs if spec is not None]
        assert len(self._specs) == bank.num_slots, "a free slot has no answer"
        self._heads = [spec.head for spec in self._specs]
        self._backbone = bank.backbone
        self.model = bank.backbone.model
        # torch allows no dot in a buffer's name
        self._buffer_names = {name: name.replace(".", "_").replace("-", "_to_") for name in bank.stacks}
        for name, stack in bank.stacks.items():
            self.register_buffer(self._buffer_names[name], stack.detach())

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        task: Tensor,
        token_type_ids: Tensor | None = None,
        second: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the logits [B, L] of each row for its own task, and how many of them are its own [B].

        A pair that is read apart is two rows; `second` [B] has the second text's row at the first text's.
        """
        stacks = {name: self.get_buffer(buffer) for name, buffer in self._buffer_names.items()}
        slots = [(spec.method, frozenset[int]()) for spec in self._specs]
        views = build_views(self._backbone.anatomy, stacks, slots, is_expanded=True)
        gather = Gather(task)
        batch = Batch(input_ids, attention_mask, token_type_ids, Route(()), (), ())
        has_mix = any(head.features == "mix" for head in self._heads)
        with self._backbone.mount.routed(PassHooks(views, Route(()), gather=gather)):
            layers = self._backbone.hidden_layers(batch, all_layers=has_mix)
        pooled_BD = self._pool(layers, attention_mask, stacks, gather)
        num_outputs_B = gather.own(torch.tensor([head.num_outputs for head in self._heads]))
        other_BD = None if second is None else pooled_BD.index_select(0, second)
        return self._answer(pooled_BD, other_BD, stacks, gather), num_outputs_B

    def _pool(self, layers: Sequence[Tensor], mask_BT: Tensor, stacks: Mapping[str, Tensor], gather: Gather) -> Tensor:
        """Return the vector that each row's head reads: with its own features, pooling and hidden layer."""

        def features(kind: str) -> Tensor:
            if kind == "last":
                return layers[-1]
            # ELMo's mix of all layers: a factor times their mean weighted by a softmax
            weights_BK = gather.own(torch.softmax(stacks[head_part.MIX], -1) * stacks[head_part.MIX_SCALE])
            return (torch.stack(list(layers), -1) @ weights_BK[:, None, :, None]).squeeze(-1)

        def before_head(has_layer: bool) -> Tensor:
            if not has_layer:
                return vector_BD
            weight_BDD, bias_BD = gather.own(stacks[head_part.HIDDEN_WEIGHT]), gather.own(stacks[head_part.HIDDEN_BIAS])
            return torch.tanh((weight_BDD @ vector_BD.unsqueeze(-1)).squeeze(-1) + bias_BD)

        states_BTD = gather.pick([head.features for head in self._heads], features)
        vector_BD = gather.pick(
            [head.pooling for head in self._heads], lambda pooling: self._backbone.pool(states_BTD, mask_BT, pooling)
        )
        return gather.pick([head.hidden != "none" for head in self._heads], before_head)

    def _answer(
        self, pooled_BD: Tensor, other_BD: Tensor | None, stacks: Mapping[str, Tensor], gather: Gather
    ) -> Tensor:
        """Return logits as wide as the widest head: −∞ beyond a row's own, numbers on their targets' scale."""
        weight_BLD, bias_BL = gather.own(stacks[head_part.WEIGHT]), gather.own(stacks[head_part.BIAS])
        logits_BL = (weight_BLD @ pooled_BD.unsqueeze(-1)).squeeze(-1) + bias_BL
        if other_BD is not None:
            features_BF1 = pair_features(pooled_BD, other_BD).unsqueeze(-1)
            paired_BL = logits_BL + (gather.own(stacks[head_part.PAIR_WEIGHT]) @ features_BF1).squeeze(-1)
            by_towers = {True: paired_BL, False: logits_BL}
            logits_BL = gather.pick([head.has_towers for head in self._heads], by_towers.__getitem__)
        means = [head.target_mean for head in self._heads]
        deviations = [head.target_std for head in self._heads]
        if set(means) != {0.0} or set(deviations) != {1.0}:
            logits_BL = logits_BL * gather.value(deviations, logits_BL) + gather.value(means, logits_BL)
        num_outputs_B1 = gather.value([head.num_outputs for head in self._heads], logits_BL)
        is_own_BL = torch.arange(logits_BL.shape[-1]) < num_outputs_B1
        # A gather takes −1 for the last task, and on a GPU any id: rows with an unknown id must not look answered.
        missing_B1 = ((gather.slots_B < 0) | (gather.slots_B >= len(self._heads))).unsqueeze(-1)
        return logits_BL.masked_fill(~is_own_BL, -torch.inf).masked_fill(missing_B1, torch.nan)


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
