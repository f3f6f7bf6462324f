"""Make the environment of the interop tests: `adapters` needs a transformers that Inlay's own cannot be.

`python make_env.py FOLDER` makes a virtual environment there and installs the pinned libraries, unless it has them.
"""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

PINNED = ("torch==2.13.0", "transformers==4.57.6", "adapters==1.3.0")


def make_environment(folder: Path) -> Path:
    """The environment's python, with everything installed."""
    python, done = folder / "bin" / "python", folder / ".installed"
    wanted = "\n".join(PINNED)
    if done.is_file() and done.read_text(encoding="utf8") == wanted:
        return python
    venv.create(folder, with_pip=True)
    subprocess.run(
        [python, "-m", "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check", *PINNED], check=True
    )
    done.write_text(wanted, encoding="utf8")
    return python


if __name__ == "__main__":
    print(make_environment(Path(sys.argv[1]).absolute()))
