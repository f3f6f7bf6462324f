"""A short run of `make kill`, of the commands whose kills no other test tries."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_commands_that_are_killed_lose_nothing_and_end_as_undisturbed():
    program = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("kill.py"))]
    done = subprocess.run([*program, "--kills", "1", "--actions", "sweep,multitask,gc,remove"], capture_output=True)
    out = done.stdout.decode()
    assert done.returncode == 0, out + done.stderr.decode()
    assert re.search(r"^all: \d+ kills, 0 failed$", out, re.MULTILINE)
