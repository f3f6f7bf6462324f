"""Make an environment over Inlay's own, with packages that it cannot have itself.

`python make_env.py FOLDER PACKAGE==VERSION…` makes a virtual environment there over the one that runs it, unless it is
there. Triton is not in a CPU build of torch; MLflow wants an older pyarrow.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from pathlib import Path


def make_environment(folder: Path, packages: Sequence[str]) -> Path:
    """The environment's python, with everything installed."""
    python, done = folder / "bin" / "python", folder / ".installed"
    wanted = "\n".join(packages)
    if done.is_file() and done.read_text(encoding="utf8") == wanted:
        return python
    venv.create(folder, with_pip=True)
    subprocess.run(
        [python, "-m", "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check", *packages],
        check=True,
    )
    show = "import sysconfig; print(sysconfig.get_path('purelib'))"
    found = subprocess.run([python, "-c", show], check=True, capture_output=True, text=True).stdout.strip()
    # `addsitedir`, for Inlay itself is installed there as a link
    link = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    Path(found, "inlay-environment.pth").write_text(link, encoding="utf8")
    done.write_text(wanted, encoding="utf8")
    return python


if __name__ == "__main__":
    print(make_environment(Path(sys.argv[1]).absolute(), sys.argv[2:]))
