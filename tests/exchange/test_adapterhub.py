"""Old folders of AdapterHub mean what the library takes them to mean."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from inlay.exchange import ImportOptions, export_folder, import_folder
from inlay.exchange.foreign import read_labels
from inlay.exchange.to_adapterhub import _find_factor
from inlay.model.bank.methods import SlotSpec
from inlay.model.heads.heads import HeadSpec
from inlay.settings.run_config import MethodConfig
from inlay.store import Store

CLS = HeadSpec("classify", 3, "cls")


@pytest.fixture
def old_folder(tiny_bert, publish_random, tmp_path):
    """A function: method, and changes to the config -> a folder with them, and the tensors it was made from."""

    def make(method: MethodConfig, **changes: Any) -> tuple[Any, dict[str, torch.Tensor]]:
        store = Store(tmp_path / "other")
        version = publish_random(store, "task", tiny_bert, SlotSpec.of(method, CLS))
        export_folder("task", store, tiny_bert, "adapterhub", tmp_path / "folder")
        path = tmp_path / "folder" / "adapter_config.json"
        tree = {**json.loads(path.read_text()), **changes}
        path.write_text(json.dumps({key: value for key, value in tree.items() if value is not None}))
        return tmp_path / "folder", store.load(version).tensors

    return make


def bring(folder: Any, backbone: Any) -> Any:
    store = Store(folder.parent / "store")
    return store.load(import_folder(folder, backbone, store, ImportOptions(name="task")).version)


def test_old_names_of_modules_are_read(old_folder, tiny_bert):
    folder, tensors = old_folder(MethodConfig("houlsby", 4, norms="none"))
    weights = torch.load(folder / "pytorch_adapter.bin", weights_only=True)
    old = {
        name.replace("attention.output.adapters", "attention.output.attention_text_task_adapters").replace(
            "output.adapters", "output.layer_text_task_adapters"
        ): value
        for name, value in weights.items()
    }
    assert not old.keys() & weights.keys()
    torch.save(old, folder / "pytorch_adapter.bin")
    for name, tensor in bring(folder, tiny_bert).tensors.items():
        assert torch.equal(tensor, tensors[name]), name


def test_gelu_of_a_config_without_a_version_is_the_tanh_form(old_folder, tiny_bert):
    method = MethodConfig("pfeiffer", 4, activation="gelu-exact")
    folder, _ = old_folder(method)
    assert bring(folder, tiny_bert).manifest.method["activation"] == "gelu-exact"
    tree = json.loads((folder / "adapter_config.json").read_text())
    del tree["version"]
    (folder / "adapter_config.json").write_text(json.dumps(tree))
    assert bring(folder, tiny_bert).manifest.method["activation"] == "gelu"


@pytest.mark.parametrize(("version", "scale"), [("adapters.1.0.1", 1.0), ("adapters.1.1.0", 3.0), ("3.2.1", 3.0)])
def test_lora_of_adapters_before_1_1_has_the_factor_one(version, scale, old_folder, tiny_bert):
    folder, _ = old_folder(MethodConfig("lora", 4, alpha=12.0), version=version)
    assert bring(folder, tiny_bert).manifest.method["scale"] == scale


def test_invertible_part_that_an_old_task_adapter_never_had_is_no_obstacle(old_folder, tiny_bert):
    folder, tensors = old_folder(MethodConfig("pfeiffer", 4), type="text_task")
    tree = json.loads((folder / "adapter_config.json").read_text())
    tree["config"]["invertible_adapter"] = {"block_type": "nice", "reduction_factor": 2}
    del tree["config"]["inv_adapter"]
    (folder / "adapter_config.json").write_text(json.dumps(tree))
    assert bring(folder, tiny_bert).tensors.keys() == tensors.keys()


def test_sizes_that_differ_by_layer_are_padded_with_zeros(old_folder, tiny_bert):
    folder, tensors = old_folder(MethodConfig("pfeiffer", 4))
    weights = torch.load(folder / "pytorch_adapter.bin", weights_only=True)
    small = {name: value for name, value in weights.items() if "layer.1." in name}
    for name, value in small.items():
        cut = {"adapter_down.0.weight": value[:3], "adapter_down.0.bias": value[:3]}
        weights[name] = next((new for end, new in cut.items() if name.endswith(end)), value)
        if name.endswith("adapter_up.weight"):
            weights[name] = value[:, :3].clone()
    torch.save(weights, folder / "pytorch_adapter.bin")
    brought = bring(folder, tiny_bert)
    assert brought.manifest.method["size"] == 4
    assert torch.equal(brought.tensors["adapter.1.output.down"][:, :3], tensors["adapter.1.output.down"][:, :3])
    assert not brought.tensors["adapter.1.output.down"][:, 3].any()
    assert not brought.tensors["adapter.1.output.up"][3].any()


@pytest.mark.parametrize("width", [32, 384, 768, 1024])
def test_reduction_factor_gives_back_every_size(width):
    for size in (*range(1, width + 1), 2 * width, 3 * width + 1):
        assert int(width // _find_factor(width, size)) == size


def test_labels_come_in_the_order_of_their_outputs():
    assert read_labels({"yes": 0, "maybe": 2, "no": 1}, 3) == ("yes", "no", "maybe")
