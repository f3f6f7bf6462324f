"""A bank in onnxruntime: the answers are Inlay's own, for every family, method and mix of tasks."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from inlay.data.encode import encode, encode_apart
from inlay.data.tasks import Split
from inlay.data.windows import Reading, encode_split
from inlay.errors import BadConfig, Missing, Unsupported, WrongBackbone
from inlay.exchange import onnx
from inlay.model import Bank, SlotSpec, infer, infer_canonically, load_backbone
from inlay.model.backbone.families import FAMILIES
from inlay.model.batch.route import Row, collate, make_rows
from inlay.model.heads.heads import HeadSpec
from inlay.settings.run_config import MethodConfig
from inlay.store import Manifest, Probe, Store
from inlay.training.run.publish import describe_backbone

TOLERANCE = 2e-5
"""of logits of a size about 1, against Inlay's own inference in float32"""
TEXTS = ["the movie was good", "free prize call now", "why", "a very bad film , it is awful"]


def classify(num_outputs, pooling="mean", **more):
    return HeadSpec("classify", num_outputs, pooling, **more)


NUMBER = HeadSpec("regress", 1, "mean", target_mean=100, target_std=7)
# One batch of these meets every method and setting that a bank can mix, and every two slots differ in something.
SPECS = {
    "plain": SlotSpec.of(MethodConfig("houlsby", 5), classify(3, "cls")),
    "end": SlotSpec.of(MethodConfig("pfeiffer", 9), HeadSpec("multilabel", 5, "mean")),
    "number": SlotSpec.of(MethodConfig("houlsby", 8, activation="tanh", norms="none"), NUMBER),
    "exact": SlotSpec.of(MethodConfig("pfeiffer", 2, activation="gelu-exact", norms="encoder"), classify(2)),
    "layer-norm": SlotSpec.of(MethodConfig("houlsby", 6, inner_norm="layer", scale=0.5), classify(2, hidden="tanh")),
    "batch-norm": SlotSpec.of(MethodConfig("pfeiffer", 4, inner_norm="batch"), classify(4, "cls")),
    "deep": SlotSpec.of(MethodConfig("houlsby", 3, depth=3, activation="swish"), classify(2)),
    "product": SlotSpec.of(MethodConfig("houlsby", 7, combine="multiply", sharing="all"), classify(2)),
    "beside": SlotSpec.of(MethodConfig("houlsby", 7, form="parallel", sharing="within-layer"), classify(2)),
    "parallel": SlotSpec.of(MethodConfig("parallel", 5, layers="-1:"), classify(3)),
    "lora": SlotSpec.of(MethodConfig("lora", 3, alpha=6, linears=("value", "project", "expand", "contract")), NUMBER),
    "ia3": SlotSpec.of(MethodConfig("ia3", linears=("value", "project", "expand", "contract")), classify(2)),
    "dora": SlotSpec.of(MethodConfig("dora", 3, alpha=6, linears=("value", "project", "contract")), classify(2)),
    "norms": SlotSpec.of(MethodConfig("norms"), classify(2, "cls")),
    "head": SlotSpec.of(MethodConfig("head"), classify(6, features="mix")),
}
# What not every family has.
QUERIES = ("query", "key", "value")
BERT_SPECS = SPECS | {
    "bitfit": SlotSpec.of(MethodConfig("bitfit"), classify(2, "pooler")),
    "queries": SlotSpec.of(MethodConfig("lora", 4, linears=QUERIES), classify(3, hidden="pooler")),
    "factors": SlotSpec.of(MethodConfig("ia3", linears=QUERIES), classify(3, "pooler", hidden="tanh")),
}


class Filled(NamedTuple):
    """A bank and a store that hold the same slots, in the order of SPECS."""

    bank: Bank
    store: Store
    specs: dict[str, SlotSpec]

    def rows(self, num_rows: int, longest: int, seed: int = 0) -> list[Row]:
        """Random rows of random tasks, with token types where the tokenizer makes them; two texts for towers."""
        tokenizer, generator = self.bank.backbone.tokenizer, np.random.default_rng(seed)
        has_types = "token_type_ids" in tokenizer.model_input_names
        lengths = [longest, *generator.integers(2, longest + 1, num_rows - 1)]
        slots = generator.integers(len(self.specs), size=num_rows)
        rows = [
            Row(
                generator.integers(5, len(tokenizer), length),
                int(slot),
                generator.integers(2, size=length) if has_types else None,
            )
            for length, slot in zip(lengths, slots, strict=True)
        ]
        pairs = {place for place, spec in enumerate(self.specs.values()) if spec.head.has_towers}
        seconds = (
            [generator.integers(5, len(tokenizer), generator.integers(2, longest + 1)) for _ in rows] if pairs else rows
        )
        return [
            dataclasses.replace(row, other=second) if row.slot in pairs else row
            for row, second in zip(rows, seconds, strict=True)
        ]

    def expected(self, row: Row, logits: torch.Tensor) -> np.ndarray:
        """What the graph must say where Inlay's inference gives `logits`."""
        head = self.specs[list(self.specs)[row.slot]].head
        widest = max(spec.head.num_outputs for spec in self.specs.values())
        own = logits.double().numpy() * head.target_std + head.target_mean
        return np.pad(own, (0, widest - len(own)), constant_values=-np.inf)


def fill(backbone, folder, specs=SPECS) -> Filled:
    """Slots whose every tensor differs from its neutral value, in a bank and published in a store."""
    bank, store = Bank(backbone, len(specs)), Store(folder)
    generator = torch.Generator().manual_seed(0)
    for slot, (name, spec) in enumerate(specs.items()):
        bank.initialise(slot, spec, seed=slot)
        tensors = {
            key: value + 0.2 * torch.randn(value.shape, generator=generator) for key, value in bank.read(slot).items()
        }
        bank.put(slot, spec, tensors)
        publish(backbone, store, name, spec, tensors)
    return Filled(bank, store, dict(specs))


def publish(backbone, store, name, spec, tensors):
    """A version of the slot; the task `end` reads pairs, and so do towers."""
    head, pairs = spec.head, TEXTS[::-1] if name == "end" or spec.head.has_towers else None
    reading = Reading(head.kind, 32, pairs=head.pairs)
    encoded = encode_split(backbone.tokenizer, Split(TEXTS, pairs, None, []), reading)
    answers = infer_canonically(backbone, spec, tensors, make_rows(encoded))
    manifest = Manifest(
        kind=head.kind,
        labels=() if head.kind == "regress" else tuple(f"{name}-{index}" for index in range(head.num_outputs)),
        metric="accuracy",
        method=dataclasses.asdict(spec.method),
        head=dataclasses.asdict(head),
        max_length=32,
        metrics={"dev": {"accuracy": 0.5}},
        data_digest="data",
        dev_digest="dev",
        backbone=describe_backbone(backbone),
        run_id="run",
        num_parameters=1,
        probes=tuple(
            Probe(text, pair, tuple(logits.tolist()))
            for text, pair, logits in zip(TEXTS, pairs or [None] * len(TEXTS), answers, strict=True)
        ),
        config={},
        extra={"pairs": pairs is not None},
    )
    return store.publish(name, tensors, manifest)


@pytest.fixture(scope="module")
def short_bert(tiny_bert_folder, tmp_path_factory):
    """A tiny backbone of one block: tracing takes seconds a block."""
    return load_backbone(str(make_shallow(tiny_bert_folder, tmp_path_factory.mktemp("bert"), 1)), device="cpu")


@pytest.fixture(scope="module")
def filled(short_bert, tmp_path_factory) -> Filled:
    return fill(short_bert, tmp_path_factory.mktemp("store"), BERT_SPECS)


@pytest.fixture(scope="module")
def exported(filled, tmp_path_factory):
    """The bank of `filled` as a folder, written once."""
    return onnx.export_onnx(
        filled.store, list(filled.specs), filled.bank.backbone, tmp_path_factory.mktemp("onnx") / "tasks"
    )


def check_parity(filled: Filled, session, num_rows: int, longest: int) -> None:
    rows = filled.rows(num_rows, longest, seed=num_rows)
    answers = onnx.answer(session, rows, filled.bank.backbone.pad_id)
    wanted = [filled.expected(row, logits) for row, logits in zip(rows, infer(filled.bank, rows), strict=True)]
    np.testing.assert_allclose(answers, np.stack(wanted), atol=TOLERANCE, rtol=TOLERANCE)


def test_mixed_batch_in_onnxruntime_equals_inference_at_any_size(filled, exported):
    session = onnx.open_session(exported.folder)
    for num_rows, longest in ((3, 9), (1, 2), (80, 33), (2, 64)):  # 9 tokens were traced, 64 are all there are
        check_parity(filled, session, num_rows, longest)


@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if family.decoder is None])
def test_the_traced_module_equals_inference_for_every_family(family, backbone_of, tmp_path):
    filled = fill(backbone_of(family), tmp_path, BERT_SPECS if family == "bert" else SPECS)
    graph = onnx.TaskGraph(filled.bank)
    rows = [row for seed in range(4) for row in filled.rows(12, 33, seed)]
    batch = collate(rows, filled.bank.backbone.pad_id)
    task = torch.tensor([rows[index].slot for index in batch.order])
    with torch.no_grad():
        logits, num_outputs = graph(batch.input_ids_BT, batch.mask_BT, task, batch.token_types_BT)
    inferred = infer(filled.bank, rows)
    wanted = np.stack([filled.expected(rows[index], inferred[index]) for index in batch.order])
    np.testing.assert_allclose(logits.numpy(), wanted, atol=TOLERANCE, rtol=TOLERANCE)
    assert num_outputs.tolist() == [len(inferred[index]) for index in batch.order]


# Families by the number of blocks that show all of them: ModernBERT's second block attends locally. The next test takes
# roberta; xlm-roberta and camembert are its code, and the test above is enough for them.
NUM_BLOCKS = {"electra": 1, "mpnet": 1, "distilbert": 1, "deberta-v2": 1, "modernbert": 2}


@pytest.mark.parametrize("family", NUM_BLOCKS)
def test_every_architecture_is_the_same_in_onnxruntime(family, backbone_folder, tmp_path):
    folder = make_shallow(backbone_folder(family), tmp_path / "backbone", NUM_BLOCKS[family])
    backbone = load_backbone(str(folder), device="cpu")
    filled = fill(backbone, tmp_path / "store", {name: SPECS[name] for name in ("plain", "lora")})
    graph = onnx.export_onnx(filled.store, list(filled.specs), backbone, tmp_path / "onnx")
    session = onnx.open_session(graph.folder)
    for num_rows, longest in ((1, 2), (6, 33), (2, 64)):
        check_parity(filled, session, num_rows, longest)


def test_weights_that_fit_no_protobuf_lie_beside_the_graph(backbone_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(onnx, "INLINE_LIMIT_BYTES", 1000)
    backbone = load_backbone(str(make_shallow(backbone_folder("roberta"), tmp_path / "backbone", 1)), device="cpu")
    filled = fill(backbone, tmp_path / "store", {name: SPECS[name] for name in ("plain", "lora")})
    graph = onnx.export_onnx(filled.store, list(filled.specs), backbone, tmp_path / "big")
    assert (graph.folder / "model.onnx").stat().st_size < (graph.folder / "model.onnx.data").stat().st_size
    moved = graph.folder.rename(tmp_path / "elsewhere")
    for num_rows, longest in ((1, 2), (6, 33), (2, 64)):
        check_parity(filled, onnx.open_session(moved), num_rows, longest)


def make_shallow(folder, target, num_layers):
    """A copy of a tiny backbone with its first blocks only: tracing takes seconds a block."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    config.num_hidden_layers = num_layers
    if hasattr(config, "layer_types"):
        config.layer_types = config.layer_types[:num_layers]
    transformers.AutoModel.from_pretrained(folder, config=config).save_pretrained(target)
    transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(target)
    return target


def test_padded_labels_have_no_probability_and_numbers_their_own_scale(filled, exported):
    session, names = onnx.open_session(exported.folder), list(filled.specs)
    rows = [Row([2, 9, 8, 3], slot) for slot in range(len(names))]
    logits = onnx.answer(session, rows, 0)
    assert logits.shape == (len(names), 6)
    shares = np.exp(logits - logits.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    for row, name in enumerate(names):
        num_outputs = filled.specs[name].head.num_outputs
        assert np.isfinite(logits[row, :num_outputs]).all()
        assert (shares[row, num_outputs:] == 0).all()
    number = names.index("number")
    assert logits[number, 0] == pytest.approx(100 + 7 * float(infer(filled.bank, rows)[number]), abs=1e-3)


def test_a_task_id_that_is_none_is_never_answered(filled, exported):
    session, beyond = onnx.open_session(exported.folder), len(filled.specs)
    assert np.isnan(onnx.answer(session, [Row([2, 9, 3], -1)], 0)).all()
    with pytest.raises(Exception, match="out of data bounds"):
        onnx.answer(session, [Row([2, 9, 3], beyond)], 0)


def test_nan_in_one_task_leaves_the_others_as_they_were(short_bert, tmp_path):
    bank, ids = fill(short_bert, tmp_path, BERT_SPECS).bank, torch.tensor([[2, 9, 8, 3]] * len(BERT_SPECS))
    with torch.no_grad():
        before, _ = onnx.TaskGraph(bank)(ids, torch.ones_like(ids), torch.arange(len(BERT_SPECS)))
        for slot in (0, 8, 11):
            bank.put(
                slot, bank.specs[slot], {name: torch.full_like(x, torch.nan) for name, x in bank.read(slot).items()}
            )
        after, _ = onnx.TaskGraph(bank)(ids, torch.ones_like(ids), torch.arange(len(BERT_SPECS)))
    others = [slot for slot in range(len(BERT_SPECS)) if slot not in (0, 8, 11)]
    assert after[[0, 8, 11], :2].isnan().all()
    assert torch.equal(after[others], before[others])


def test_the_folder_says_all_that_is_needed(filled, exported):
    about = json.loads((exported.folder / "tasks.json").read_text())
    assert {"model.onnx", "tasks.json", "tokenizer.json", "tokenizer_config.json", "README.txt"} == {
        path.name for path in exported.folder.iterdir()
    }
    assert about["backbone"]["fingerprint"] == filled.bank.backbone.fingerprint
    assert list(about["inputs"]) == ["input_ids", "attention_mask", "token_type_ids", "task"]
    assert about["opset"] == exported.opset
    assert [task["id"] for task in about["tasks"]] == list(range(len(BERT_SPECS)))
    for task, (name, spec) in zip(about["tasks"], BERT_SPECS.items(), strict=True):
        version = filled.store.resolve(name)
        assert (task["version"], task["digest"]) == (version.reference, version.digest)
        assert (task["kind"], task["num_outputs"]) == (spec.head.kind, spec.head.num_outputs)
        assert task["labels"] == list(filled.store.manifest(version).labels)
        assert task["kind"] in about["reading"]
        assert task["pairs"] == (name == "end")
    assert str(Path(onnx.__file__).parent).encode() not in (exported.folder / "model.onnx").read_bytes()
    tokenizer = json.loads((exported.folder / "tokenizer.json").read_text())
    assert tokenizer["truncation"] is None, "the length Inlay last cut rows to is no task's"
    assert (exported.num_probes, exported.difference < TOLERANCE) == (len(TEXTS) * len(BERT_SPECS), True)


def test_the_example_in_the_readme_runs_without_torch_and_says_the_same(filled, exported):
    readme = (exported.folder / "README.txt").read_text()
    program = readme[readme.index("import json") :] + "\nimport sys\nassert 'torch' not in sys.modules\n"
    done = subprocess.run([sys.executable, "-c", program], cwd=exported.folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [line.split("\t") for line in done.stdout.splitlines()]
    encoded = encode(filled.bank.backbone.tokenizer, [text for text, _ in lines], None, 32)
    wanted = infer(filled.bank, make_rows(encoded))
    for (_, shown), logits in zip(lines, wanted, strict=True):
        answer = ast.literal_eval(shown)
        assert list(answer) == ["plain-0", "plain-1", "plain-2"]
        np.testing.assert_allclose(list(answer.values()), logits.numpy(), atol=TOLERANCE)


TOWERS = {
    "towers": SlotSpec.of(MethodConfig("houlsby", 5), classify(3, pairs="towers")),
    "plain": SPECS["plain"],
    "near": SlotSpec.of(MethodConfig("lora", 3), dataclasses.replace(NUMBER, pooling="cls", pairs="towers")),
    "end": SPECS["end"],
    "mixed": SlotSpec.of(MethodConfig("head"), classify(6, features="mix", pairs="towers")),
}


def test_towers_are_two_rows_of_a_graph_that_mixes_them_with_others(short_bert, tmp_path):
    filled = fill(short_bert, tmp_path / "store", TOWERS)
    exported = onnx.export_onnx(filled.store, list(TOWERS), short_bert, tmp_path / "onnx")
    assert (exported.num_probes, exported.difference < TOLERANCE) == (len(TEXTS) * len(TOWERS), True)
    session = onnx.open_session(exported.folder)
    for num_rows, longest in ((3, 9), (1, 2), (40, 33), (2, 64)):
        check_parity(filled, session, num_rows, longest)
    about = json.loads((exported.folder / "tasks.json").read_text())
    assert list(about["inputs"]) == ["input_ids", "attention_mask", "token_type_ids", "task", "second"]
    assert [task["towers"] for task in about["tasks"]] == [True, False, True, False, True]
    assert [task["pairs"] for task in about["tasks"]] == [True, False, True, True, True]
    # The example of the folder's README asks the first task, whose pairs are two rows.
    readme = (exported.folder / "README.txt").read_text()
    program = readme[readme.index("import json") :]
    done = subprocess.run([sys.executable, "-c", program], cwd=exported.folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [line.split("\t") for line in done.stdout.splitlines()]
    asked = [text for text, _ in lines]
    encoded = encode_apart(short_bert.tokenizer, asked, asked, 32)
    for (_, shown), logits in zip(lines, infer(filled.bank, make_rows(encoded)), strict=True):
        np.testing.assert_allclose(list(ast.literal_eval(shown).values()), logits.numpy(), atol=TOLERANCE)


def test_nan_in_towers_leaves_rows_that_point_at_them_as_they_were(short_bert, tmp_path):
    """A row of one text whose `second` is a lost row is answered all the same."""
    filled = fill(short_bert, tmp_path, TOWERS)
    tensors = filled.bank.read(0)
    tensors["head.weight"][:] = torch.nan
    tensors["norm.embeddings.scale"][:] = torch.nan
    graph = onnx.TaskGraph(filled.bank)
    batch = collate([Row([2, 9, 3], 0), Row([2, 8, 3], 1)], 0)
    places = (torch.tensor([0, 1]), None, torch.tensor([1, 0]))
    with torch.no_grad():
        before = graph(batch.input_ids_BT, batch.mask_BT, *places)[0]
        filled.bank.put(0, TOWERS["towers"], tensors)
        after = onnx.TaskGraph(filled.bank)(batch.input_ids_BT, batch.mask_BT, *places)[0]
    assert after[0, :3].isnan().all()
    assert torch.equal(after[1], before[1])


def test_what_cannot_be_exported_is_refused_and_nothing_is_written(filled, short_bert, tiny_bert, tmp_path):
    folder = tmp_path / "onnx"
    with pytest.raises(BadConfig, match="`plain@1` is named twice"):
        onnx.export_onnx(filled.store, ["plain", "plain@1"], short_bert, folder)
    with pytest.raises(BadConfig, match="no task"):
        onnx.export_onnx(filled.store, [], short_bert, folder)
    with pytest.raises(WrongBackbone, match="plain@1"):
        onnx.export_onnx(filled.store, ["plain"], tiny_bert, folder)
    with pytest.raises(Missing, match="no folder"):
        onnx.export_onnx(filled.store, ["plain"], short_bert, tmp_path / "none" / "onnx")
    assert list(tmp_path.iterdir()) == []
    folder.mkdir()
    (folder / "mine.txt").write_text("keep me")
    with pytest.raises(BadConfig, match="already exists"):
        onnx.export_onnx(filled.store, ["plain"], short_bert, folder)
    assert [path.name for path in folder.iterdir()] == ["mine.txt"]


def test_what_shares_no_graph_is_refused_by_name():
    span = SlotSpec.of(MethodConfig("houlsby"), HeadSpec("span", 2, "cls"))
    with pytest.raises(Unsupported, match="`mine@1` is of the kind `span`"):
        onnx.check_spec("mine@1", span)
    for method in ("full", "top"):
        with pytest.raises(Unsupported, match=f"`mine@1` has its own copy .* `{method}`"):
            onnx.check_spec("mine@1", SlotSpec.of(MethodConfig(method), classify(2)))


def test_a_graph_that_answers_otherwise_leaves_no_folder(filled, short_bert, tmp_path, monkeypatch):
    monkeypatch.setattr(onnx, "answer", lambda session, rows, pad_id: np.full((len(rows), 5), 99.0))
    monkeypatch.setattr(onnx, "_write_graph", lambda graph, backbone, names, path: 18)
    monkeypatch.setattr(onnx, "open_session", lambda folder: None)
    with pytest.raises(Unsupported, match="probes of `end@1` differ"):
        onnx.export_onnx(filled.store, ["end"], short_bert, tmp_path / "onnx")
    assert list(tmp_path.iterdir()) == [], "neither the folder nor its draft"


@pytest.mark.parametrize("name", onnx.PACKAGES)
def test_without_the_extra_it_is_named(name, filled, short_bert, tmp_path, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda asked: None if asked == name else found(asked))
    with pytest.raises(Missing, match=f"`{name}` is not installed") as refused:
        onnx.export_onnx(filled.store, ["plain"], short_bert, tmp_path / "onnx")
    assert "inlay[onnx]" in refused.value.hint
