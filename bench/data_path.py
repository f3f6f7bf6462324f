"""The data path: rows tokenised per second (one thread, all threads, known before), and a batch's gather.

PYTHONPATH=src python bench/data_path.py --data /work/shared/data --rows 50000
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BATCH_ROWS = 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of the GLUE sets")
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--backbone", default="minilm")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        print(json.dumps(measure(options)))
        return
    found: dict[str, Any] = {"python": platform.python_version(), "cores": os.cpu_count(), "rows": options.rows}
    with tempfile.TemporaryDirectory() as cache:
        for threads in sorted({1, os.cpu_count() or 1}):
            # The number of threads is settled when the first text is read, so each gets a process.
            environment = {**os.environ, "RAYON_NUM_THREADS": str(threads), "XDG_CACHE_HOME": f"{cache}/{threads}"}
            environment["TOKENIZERS_PARALLELISM"] = "true"
            command = [sys.executable, *sys.argv, "--inside"]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
            found[f"{threads} thread(s)"] = json.loads(done.stdout)
    print(json.dumps(found, indent=2))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Rows per second of each way to a set's tokens, and milliseconds of each way to a batch."""
    import numpy as np
    from transformers import AutoTokenizer

    from inlay.data import token_cache as once
    from inlay.data.encode import encode
    from inlay.data.tasks import Split
    from inlay.data.windows import Reading
    from inlay.model.backbone.loading import find_folder

    tokenizer = AutoTokenizer.from_pretrained(str(find_folder(options.backbone)))
    lines = (options.data / "SST-2" / "train.tsv").read_text(encoding="utf8").splitlines()[1 : options.rows + 1]
    texts = [line.rpartition("\t")[0] for line in lines]
    split, reading = Split(texts, None, None, []), Reading("classify", 128)

    def ask_anew() -> None:
        once._MEMORY = once.MemoryCache()
        once.encode_cached(tokenizer, split, reading)

    ask_anew()
    encoded = encode(tokenizer, texts, None, 128)
    listed_ids, listed_segments = list(encoded.ids), list(encoded.segments or encoded.ids)
    rows = np.random.default_rng(0).integers(len(encoded), size=BATCH_ROWS)
    rate = {
        "through transformers": lambda: through_transformers(tokenizer, texts),
        "encode": lambda: encode(tokenizer, texts, None, 128),
        "known on disk": ask_anew,
        "known in memory": lambda: once.encode_cached(tokenizer, split, reading),
    }
    batch = {
        "gather": lambda: encoded.gather(rows),
        "row by row": lambda: [
            np.concatenate([pieces[row] for row in rows]) for pieces in (listed_ids, listed_segments)
        ],
    }
    found, batches = timed(rate, options.repeats), timed(batch, 20 * options.repeats)
    return {
        "rows_per_second": {name: round(len(texts) / taken.wall_s) for name, taken in found.items()},
        "rows_per_cpu_second": {name: round(len(texts) / taken.cpu_s) for name, taken in found.items()},
        "batch_cpu_ms": {name: round(1e3 * taken.cpu_s, 3) for name, taken in batches.items()},
        "tokens": len(encoded.flat_ids),
    }


def through_transformers(tokenizer: Any, texts: list[str]) -> Any:
    """As it was done before: transformers' own call, and an array for every row."""
    import numpy as np

    rows = []
    for start in range(0, len(texts), 2000):
        batch = tokenizer(
            texts[start : start + 2000], truncation="longest_first", max_length=128, return_attention_mask=False
        )
        rows += [np.array(row, dtype=np.int32) for row in batch["input_ids"]]
        rows += [np.array(row, dtype=np.int32) for row in batch["token_type_ids"]]
        sum(bool(encoding.overflowing) for encoding in batch.encodings)
    return rows


@dataclass(frozen=True)
class Taken:
    """Seconds by the clock, and of all cores together: the clock also counts what others do on the machine."""

    wall_s: float
    cpu_s: float


def timed(ways: dict[str, Callable[[], Any]], repeats: int) -> dict[str, Taken]:
    """The medians of each way, the ways taking turns."""
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, work in ways.items():
            wall, cpu = time.perf_counter(), time.process_time()
            work()
            seconds[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    return {name: Taken(*map(statistics.median, zip(*taken, strict=True))) for name, taken in seconds.items()}


if __name__ == "__main__":
    main()
