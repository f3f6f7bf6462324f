"""What Triton makes of our programs on Hopper GPUs, where products run on while a loop goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.triton


@pytest.fixture(scope="module")
def products():
    """By program: the products that may still be at work in the next step of their loop."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).parent / "compile_programs.py"
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_no_product_reads_registers_that_the_next_step_writes(products):
    """triton-lang/triton#9433: what stands on the left must come from memory, or the product must be waited for."""
    assert any(products.values()), "nothing runs on: the check sees no products"
    assert not [name for name, found in products.items() if any(item["left_in_registers"] for item in found)]


def test_no_product_reads_a_buffer_that_the_next_step_but_one_fills(products):
    """One step reads, one waits, one is filled: two buffers would be overwritten while they are read."""
    assert not {name: found for name, found in products.items() if any(min(item["buffers"]) < 3 for item in found)}
