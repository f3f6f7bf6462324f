"""`inlay export --format onnx`: what is asked of the exporter, and what is refused before it starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from inlay.exchange import onnx

from .conftest import Inlay, Mail


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], str, Path]]:
    """What the exporter was asked, which takes it as done: tests/exchange has it do its work."""
    calls: list[tuple[list[str], str, Path]] = []

    def export_onnx(store, references, backbone, folder):
        calls.append((references, backbone.name, folder))
        versions = tuple(store.resolve(reference) for reference in references)
        return onnx.OnnxExport(folder, versions, size_bytes=2048, opset=20, num_probes=16, difference=3e-7)

    monkeypatch.setattr("inlay.exchange.export_onnx", export_onnx)
    return calls


def test_tasks_leave_as_one_graph_in_the_order_they_are_named(inlay: Inlay, mail: Mail, asked: list) -> None:
    inlay("export", "mail", "copy.inlay")
    inlay("import", "copy.inlay", "--name", "post")
    made = inlay("export", "post", "mail@1", "--format", "onnx", "--output", "graph", "--json")
    assert made.status == 0, made.err
    assert asked == [(["post", "mail@1"], str(mail.backbone), Path("graph"))]
    assert made.data["versions"] == ["post@1", "mail@1"]
    assert (made.data["folder"], made.data["size_bytes"], made.data["num_probes"]) == ("graph", 2048, 16)
    words = inlay("export", "mail", "--format", "onnx", "--output", "graph").out
    assert words.startswith("mail@1 in graph (2.0 kB); 16 probes answered in onnxruntime, within 3e-07")


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (("mail", "--format", "onnx"), 2, "--output DIR"),
        (("mail", "--format", "onxx", "--output", "graph"), 3, "did you mean `onnx`?"),
        (("mial", "--format", "onnx", "--output", "graph"), 3, "did you mean `mail`?"),
        (("mail", "mail", "mail", "--output", "graph"), 2, "--format onnx"),
    ],
)
def test_mistakes_are_refused_before_anything_is_loaded(
    inlay: Inlay, mail: Mail, asked: list, arguments: tuple[str, ...], status: int, said: str
) -> None:
    ended = inlay("export", *arguments)
    assert (ended.status, ended.out) == (status, "")
    assert said in ended.err
    assert asked == []
