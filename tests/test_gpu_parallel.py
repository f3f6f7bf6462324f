"""Two processes that share a GPU (over gloo: NCCL wants a GPU for each) come to what one comes to."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parent / "training"))
import processes

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("method", ["houlsby", "lora"])
def test_twenty_steps_of_two_processes_on_a_gpu_equal_those_of_one(tiny_bert_folder, tmp_path, method):
    arguments = (str(tiny_bert_folder), tmp_path, method, "cuda")
    assert processes.in_processes(processes.take_twenty_steps, *arguments) == [0, 0]
    processes.take_twenty_steps(*arguments)
    alone, first, second = (load_file(tmp_path / f"{name}.safetensors") for name in ("0-of-1", "0-of-2", "1-of-2"))
    assert all(torch.equal(first[name], second[name]) for name in alone)
    for name in alone:  # a GPU sums in another order from one shape to the next, and Adam enlarges what that rounds
        torch.testing.assert_close(first[name], alone[name], rtol=1e-3, atol=1e-3)
