"""Make the environment of the Triton tests: Inlay's own and triton, which a CPU build of torch comes without.

`python make_env.py FOLDER` makes a virtual environment there over the one that runs it, unless it is there.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

PINNED = "triton==3.6.0"


def make_environment(folder: Path) -> Path:
    """The environment's python, with everything installed."""
    python, done = folder / "bin" / "python", folder / ".installed"
    if done.is_file() and done.read_text(encoding="utf8") == PINNED:
        return python
    venv.create(folder, with_pip=True)
    subprocess.run(
        [python, "-m", "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check", PINNED], check=True
    )
    show = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = subprocess.run([python, "-c", show], check=True, capture_output=True, text=True).stdout.strip()
    # `addsitedir`, for Inlay itself is installed there as a link
    link = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    Path(packages, "inlay-environment.pth").write_text(link, encoding="utf8")
    done.write_text(PINNED, encoding="utf8")
    return python


if __name__ == "__main__":
    print(make_environment(Path(sys.argv[1]).absolute()))
