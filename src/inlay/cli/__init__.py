"""The command line: `inlay COMMAND`.

`--help` and the commands that only look things up answer at once: a command's module is imported when the command is
called, and the packages that import torch or numpy when one of their names is first used (`lazy_packages.py`).
"""

from inlay.cli.app import COMMANDS, app, main

__all__ = ["COMMANDS", "app", "main"]
