"""`python -m inlay.service.web`: a web process of the service, which `inlay serve` starts."""

import sys

from inlay.service.child import run_child
from inlay.service.web.server import serve

if __name__ == "__main__":
    sys.exit(run_child("web", serve))
