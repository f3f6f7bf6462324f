"""A module that is imported when one of its names is first used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import inlay


def test_a_lazy_module_is_imported_with_the_first_of_its_names():
    program = (
        "import sys\nfrom inlay.lazy_imports import LazyModule\nroom = LazyModule('wave')\n"
        "assert 'wave' not in sys.modules\nroom.open\nassert 'wave' in sys.modules\n"
        "try: room.nothing\nexcept AttributeError: print('refused')"
    )
    environment = {"PYTHONPATH": str(Path(inlay.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert done.stdout == "refused\n", done.stderr
