"""`python -m inlay.service.on_ray`: the process that looks after a service's cluster, which `inlay serve` starts."""

import sys

from inlay.service.child import run_child
from inlay.service.on_ray.cluster_process import serve

if __name__ == "__main__":
    sys.exit(run_child("cluster", serve))
