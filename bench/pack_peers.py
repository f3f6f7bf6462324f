"""Peers for a machine without a network: wheels collected here, unpacked there into a folder put first on PYTHONPATH.

    python bench/pack_peers.py                       writes .carry/peers.tgz, with a network
    python bench/pack_peers.py --unpack FOLDER       lays it out, without one

Holds `adapters` with the transformers it is pinned to, and what that transformers needs besides what any machine with a
newer transformers has (torch, numpy, safetensors, regex, pyyaml, tqdm, filelock, fsspec). For Python 3.9 or newer on
x86-64 Linux: tokenizers is the one compiled wheel, with the stable interface.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

PACK = Path(__file__).parents[1] / ".carry" / "peers.tgz"
WHEELS = (
    "adapters==1.3.0",
    "transformers==4.57.6",
    "tokenizers==0.22.2",
    "huggingface_hub==0.36.2",
    "requests==2.34.2",
    "urllib3==2.8.0",
    "idna==3.20",
    "certifi==2026.10.18",
)
CHARSETS = "charset_normalizer==3.5.2"  # its wheels are compiled for one Python; the pure one is asked for by platform
LARGEST_BYTES = 20 * 2**20


def pack(path: Path) -> int:
    """Collect the wheels' contents into one compressed file; its size in bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        wheels, tree = Path(scratch) / "wheels", Path(scratch) / "tree"
        linux = ["--platform", "manylinux2014_x86_64", "--python-version", "3.12", "--only-binary", ":all:"]
        _download(wheels, [*linux, *WHEELS])
        _download(wheels, ["--platform", "any", "--python-version", "3.12", "--only-binary", ":all:", CHARSETS])
        for wheel in sorted(wheels.glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(tree)
        with tarfile.open(path, "w:gz", compresslevel=9) as archive:
            archive.add(tree, arcname=".")
    return path.stat().st_size


def _download(into: Path, arguments: list[str]) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*command, "--dest", str(into), *arguments], check=True)


def unpack(path: Path, folder: Path) -> Path:
    """The pack laid out under `folder`, once; the folder."""
    if not (folder / "adapters").is_dir():
        draft = folder.with_name(folder.name + ".draft")
        shutil.rmtree(draft, ignore_errors=True)
        with tarfile.open(path) as archive:
            archive.extractall(draft, filter="data")
        draft.rename(folder)
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pack", type=Path, default=PACK)
    parser.add_argument("--unpack", type=Path, metavar="FOLDER")
    options = parser.parse_args()
    if options.unpack:
        print(unpack(options.pack, options.unpack))
    else:
        size = pack(options.pack)
        print(f"{options.pack}: {size / 2**20:.1f} MiB")
        assert size < LARGEST_BYTES, "too large to travel"
