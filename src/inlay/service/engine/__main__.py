"""`python -m inlay.service.engine`: the engine's process of the service, which `inlay serve` starts."""

import sys

from inlay.service.child import run_child
from inlay.service.engine.engine_start import serve

if __name__ == "__main__":
    sys.exit(run_child("engine", serve))
