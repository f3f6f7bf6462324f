"""A version as bytes: nothing is lost, the same content gives the same bytes, and damage is never read as a default."""

from __future__ import annotations

import io
import json
import math
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from inlay.errors import BadConfig, StoreDamaged, Unsupported
from inlay.store import Manifest, Probe
from inlay.store.format import (
    check_name,
    check_object,
    decode_tensors,
    encode_object,
    is_name,
    legal_name,
    parse_reference,
    read_manifest,
)


def test_manifest_survives_json(make_manifest):
    manifest = make_manifest(extra={"note": ["ü", None, {"deep": True}]}, config={"labels": ("a", "b")})
    assert Manifest.from_json(manifest.to_json()) == manifest


@given(st.lists(st.floats(width=64), max_size=5), st.text(max_size=20), st.none() | st.text(max_size=20))
def test_probe_logits_keep_every_bit(values, text, pair):
    manifest = _bare_manifest(probes=(Probe(text, pair, tuple(values)),))
    (probe,) = Manifest.from_json(manifest.to_json()).probes
    assert (probe.text, probe.pair) == (text, pair)
    for read, written in zip(probe.logits, values, strict=True):
        assert struct.pack("d", read) == struct.pack("d", written) or (math.isnan(read) and math.isnan(written))


def test_float32_logits_come_back_bit_for_bit():
    logits = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 1e-3
    manifest = _bare_manifest(probes=(Probe("text", None, tuple(logits.tolist())),))
    (probe,) = Manifest.from_json(manifest.to_json()).probes
    assert torch.equal(torch.tensor(probe.logits, dtype=torch.float32), logits)


def test_text_that_is_not_unicode_proper_can_be_stored(make_manifest, make_tensors):
    manifest = make_manifest(probes=(Probe("half a pair: \ud83d", None, (1.0,)),), labels=("日本", "\x00"))
    content = encode_object(make_tensors(), manifest)
    assert check_object(content, "here") == manifest


def test_metric_that_is_no_number_is_kept_as_none_and_read_as_nan(make_manifest):
    manifest = make_manifest(metrics={"dev": {"pearson": math.nan, "mse": 1.5}})
    assert '"pearson":null' in manifest.to_json()
    read = Manifest.from_json(manifest.to_json()).metrics
    assert math.isnan(read["dev"]["pearson"])
    assert read["dev"]["mse"] == 1.5


def test_manifest_does_not_follow_the_dicts_it_was_made_from(make_manifest):
    method = {"name": "houlsby", "size": 8}
    manifest = make_manifest(method=method)
    method["size"] = 64
    assert manifest.method["size"] == 8


@pytest.mark.parametrize("name", [*Manifest.__annotations__])
def test_manifest_without_a_key_is_damaged(make_manifest, name):
    tree = json.loads(make_manifest().to_json())
    del tree[name]
    with pytest.raises(StoreDamaged, match=f"here: .*{name}"):
        Manifest.from_json(json.dumps(tree), "here")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("surprise", 1),
        ("labels", "ham"),
        ("labels", [1]),
        ("max_length", True),
        ("max_length", 1.5),
        ("metrics", {"dev": 0.9}),
        ("metrics", {"dev": {"accuracy": "0.9"}}),
        ("probes", [{"text": "x", "pair": None}]),
        ("probes", [{"text": "x", "pair": None, "logits": ["zz"]}]),
        ("probes", [{"text": "x", "pair": None, "logits": [0.5]}]),
        ("probes", ["x"]),
        ("labels", ["ham", "ham"]),
        ("max_length", -1),
        ("num_parameters", 10**30),
        ("metrics", {"dev": {"accuracy": math.inf}}),
        ("metrics", {"dev": {"accuracy": math.nan}}),
        ("backbone", {}),
        ("backbone", {"name": 3, "fingerprint": "f", "family": "bert", "num_parameters": 1}),
        ("backbone", {"name": "a", "fingerprint": "f", "family": "bert", "num_parameters": "1"}),
        ("method", {"size": 8}),
        ("method", {"name": ["houlsby"]}),
        ("method", {"name": "houlsby", "size": [8]}),
        ("head", {"thresholds": "0.5"}),
        ("head", {"thresholds": [0.5, 0.5, 0.5]}),
        ("head", {"thresholds": [[0.5]]}),
        ("extra", {"pairs": "no"}),
        ("extra", {"stride": 1.5}),
        ("extra", {"from": ["a@1"]}),
        ("extra", {"from": [{"reference": "a@1"}]}),
        ("extra", {"joint": {"method": "hyperformer", "tasks": "ab"}}),
        ("extra", {"folds": {"num_folds": 5}}),
        ("extra", {"origin": [1]}),
        ("format", 0),
        ("format", "1"),
    ],
)
def test_manifest_with_a_wrong_value_is_damaged(make_manifest, name, value):
    tree = {**json.loads(make_manifest().to_json()), name: value}
    with pytest.raises(StoreDamaged, match="here: "):
        Manifest.from_json(json.dumps(tree), "here")


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 100_000, b"\xff\xfe\xff"])
def test_manifest_that_is_no_json_object_is_damaged(text):
    with pytest.raises(StoreDamaged, match="here: not"):
        Manifest.from_json(text, "here")


def test_number_beyond_floats_is_damage(make_manifest):
    text = make_manifest().to_json().replace('"lr":0.0005', '"lr":1e999')
    with pytest.raises(StoreDamaged, match="here: "):
        Manifest.from_json(text, "here")


def test_newer_format_is_refused_with_what_to_do(make_manifest):
    text = make_manifest().to_json().replace('"format":1', '"format":2')
    with pytest.raises(Unsupported, match=r"format 2.*upgrade"):
        Manifest.from_json(text)


def test_bytes_do_not_depend_on_order(make_manifest, make_tensors):
    tensors = make_tensors()
    backwards = dict(reversed(tensors.items()))
    turned = make_manifest(method={"size": 8, "name": "houlsby"})
    assert list(backwards) != list(tensors)
    assert encode_object(tensors, make_manifest()) == encode_object(backwards, turned)


def test_bytes_depend_on_every_tensor_and_on_the_manifest(make_manifest, make_tensors):
    contents = [
        encode_object(make_tensors(), make_manifest()),
        encode_object(make_tensors(), make_manifest(metric="f1")),
    ]
    for name in make_tensors():
        tensors = make_tensors()
        tensors[name][0, 0] += 1e-6
        contents.append(encode_object(tensors, make_manifest()))
    assert len(set(contents)) == 5


def test_save_load_save_gives_equal_bytes(make_manifest, make_tensors):
    content = encode_object(make_tensors(), make_manifest())
    manifest = read_manifest(io.BytesIO(content), len(content), "here")
    assert encode_object(decode_tensors(content, "here"), manifest) == content


def test_views_of_one_bank_and_transposed_tensors_are_stored_as_themselves(make_manifest):
    bank_SDR = torch.arange(24.0).reshape(2, 3, 4)
    tensors = {"first": bank_SDR[0], "same": bank_SDR[0], "turned": bank_SDR[1].T}
    read = decode_tensors(encode_object(tensors, make_manifest()), "here")
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)


def test_half_precision_is_stored_as_float32_and_what_would_lose_bits_is_refused(make_manifest):
    half = torch.randn(5, generator=torch.Generator().manual_seed(0)).bfloat16()
    read = decode_tensors(encode_object({"weight": half}, make_manifest()), "here")["weight"]
    assert read.dtype == torch.float32
    assert torch.equal(read, half.float())
    with pytest.raises(TypeError, match=r"`weight` is torch.float64"):
        encode_object({"weight": half.double()}, make_manifest())


@given(st.text(max_size=80))
def test_every_text_has_a_legal_name_near_it(text):
    assert is_name(legal_name(text))
    if is_name(text) and text[-1] not in "._-":
        assert legal_name(text) == text


@given(st.text(alphabet="abZ09._-/\\@ \n\x00é", max_size=70))
def test_legal_name_is_one_plain_file_name(text):
    if is_name(text):
        assert set(text) <= set("abcdefghijklmnopqrstuvwxyz0123456789._-")
        assert text[0] not in "._-"
        assert len(text) <= 64
        check_name(text)
    else:
        with pytest.raises(BadConfig, match="would do"):
            check_name(text)


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "a/b", "/etc", ".draft-1", "A", "a\n", "a b", "a@1", "é", "a" * 65]
)
def test_illegal_names_are_refused(name):
    with pytest.raises(BadConfig, match="cannot name a task"):
        check_name(name)


def test_legal_name_keeps_what_it_can():
    assert legal_name("GLUE/CoLA v2") == "glue-cola-v2"
    assert legal_name("../..") == "task"


@pytest.mark.parametrize(
    ("reference", "parts"), [("sst2", ("sst2", None)), ("sst2@12", ("sst2", "12")), ("sst2@best", ("sst2", "best"))]
)
def test_reference_is_a_name_and_a_selector(reference, parts):
    assert parse_reference(reference) == parts


@pytest.mark.parametrize(
    "reference", ["", "@3", "a@", "a@0", "a@-1", "a@03", "a@1.5", "a@latest", "a@1@2", "a@٣", "a@ 1"]
)
def test_bad_reference_says_how_to_write_one(reference):
    with pytest.raises(BadConfig, match="NAME@best"):
        parse_reference(reference)


def _bare_manifest(probes: tuple[Probe, ...]) -> Manifest:
    backbone = {"name": "minilm", "fingerprint": "f", "family": "bert", "num_parameters": 1}
    return Manifest("classify", (), "accuracy", {"name": "head"}, {}, 8, {}, "", "", backbone, "", 0, probes, {})
