"""A stand-in for a process of the service, for tests of the supervisor: `python stand_in.py MODE FOLDER`.

It writes `EVENT TIME PID` lines to FOLDER/NAME and behaves as its mode says.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from inlay.errors import Missing
from inlay.service.child import Child, run_child


def work(child: Child) -> None:
    mode, folder = sys.argv[1], Path(sys.argv[2])

    def note(event: str) -> None:
        with (folder / child.name).open("a") as file:
            file.write(f"{event} {time.monotonic()} {os.getpid()}\n")

    note("began")
    if mode == "refuses":
        raise Missing("no backbone named `nix`", "get one")
    if mode == "dies":
        os._exit(3)
    child.progress("warming up")
    child.ready({"mode": mode})
    note("ready")
    if mode == "short":
        os._exit(4)
    if mode == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(60)
    while not child.stopping.wait(0.05):
        pass
    time.sleep(0.2)
    note("drained")


if __name__ == "__main__":
    sys.exit(run_child("stand-in", work))
