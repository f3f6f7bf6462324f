"""Install a built wheel in an empty environment, and use it as a new user would: `make wheel-test`.

Nothing of the checkout is in reach: commands run in an empty folder, with the environment's own Python.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
_PARTS = ("src", "studies", "examples/sms_spam", "pyproject.toml", "README.md", "LICENSE")
_ROWS = """\
text,label
You charged my card twice,billing
The invoice shows the wrong amount,billing
When is the next payment due?,billing
I would like a refund for May,billing
How do I reset my password?,support
The app crashes when I open a file,support
I cannot log in since this morning,support
The page stays blank on my phone,support
"""


def build_wheel(folder: Path) -> Path:
    """Build a wheel from a copy of the sources: setuptools leaves its own files beside what it builds."""
    copy = folder / "sources"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for part in _PARTS:
        source, target = ROOT / part, copy / part
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=ignored)
        else:
            shutil.copy(source, target)
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, "-w", folder, copy], check=True)
    (wheel,) = folder.glob("inlay-*.whl")
    return wheel


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        wheel, environment = build_wheel(folder), folder / "environment"
        subprocess.run([sys.executable, "-m", "venv", environment], check=True)
        pip = [environment / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "-c", ROOT / "constraints.txt", wheel], check=True)
        desk = folder / "desk"
        desk.mkdir()
        (desk / "desk.csv").write_text(_ROWS)
        for line in (
            "--version",
            "backbone get minilm",
            "doctor",
            "train desk.csv --dev-share 0.25",
            "predict desk Why.was.I.billed.twice",
            "verify",
            "study list",
            "gc",
        ):
            words = [environment / "bin" / "inlay", *line.split()]
            print(f"$ inlay {line}", flush=True)
            kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "INLAY"))}
            subprocess.run(words, cwd=desk, env={**kept, "INLAY_HOME": str(folder / "home")}, check=True)
        print(f"{wheel.name} works in an empty environment")


if __name__ == "__main__":
    main()
