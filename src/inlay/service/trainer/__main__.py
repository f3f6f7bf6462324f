"""The trainer's process, as the supervisor starts it."""

from __future__ import annotations

import sys

from inlay.service.child import run_child
from inlay.service.trainer.trainer import serve

if __name__ == "__main__":
    sys.exit(run_child("trainer", serve))
