"""What Windows lacks is not needed to answer: the command line runs with Unix's modules and functions hidden."""

from __future__ import annotations

import re
import subprocess
import sys

from .conftest import Mail

PROGRAM = """
import os, signal, sys
# Other libraries look after themselves: they are imported before it is as if this were not Unix.
import pandas, rich.progress, scipy.optimize, sklearn.linear_model, torch
from transformers import AutoModel, AutoTokenizer, BertModel, PreTrainedModel
for name in ("fcntl", "resource", "termios", "pwd", "grp"):
    sys.modules[name] = None
for name in "fork getuid geteuid setsid killpg sched_getaffinity posix_fallocate".split():
    delattr(os, name)
for name in "SIGALRM SIGKILL SIGHUP SIGCHLD setitimer alarm pthread_sigmask".split():
    delattr(signal, name)
from inlay.cli import main
store, data, backbone = sys.argv[1:]
commands = [["predict", "mail", "free win prize"], ["tasks"], ["show", "mail"], ["train", data, "--backbone", backbone]]
for command in commands:
    try:
        main([*command, "--store", store])
    except SystemExit as stop:
        print(f"STATUS {command[0]}={stop.code or 0}", flush=True)
"""


def test_answering_needs_no_module_of_unix_and_writing_is_refused_without_its_locks(trained_mail: Mail) -> None:
    given = [str(trained_mail.store), str(trained_mail.data), str(trained_mail.backbone)]
    done = subprocess.run([sys.executable, "-c", PROGRAM, *given], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    statuses = re.findall(r"^STATUS (\S+)$", done.stdout, re.MULTILINE)
    assert statuses == ["predict=0", "tasks=0", "show=0", "train=5"], done.stderr
    assert "no file locks" in done.stderr
    assert "Traceback" not in done.stderr
