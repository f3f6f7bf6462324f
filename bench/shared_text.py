"""One text for many tasks beside a request for each: how much the shared frozen layers save.

    OMP_NUM_THREADS=1 python bench/shared_text.py --tasks 32

Ways: `apart` is a request for each task, one after another; `batch` is one call that shares nothing (each request has a
scope of its own, as those of different tenants have); `shared` is `Engine.ask`. Tasks have adapters in the top third of
the layers, in the top half, or nothing but heads. All ways are measured in turns; answers are compared first. Ratios
are of the medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from random_tasks import TEXTS, publish_tasks

WORDS = " ".join(TEXTS * 4).split()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbone", default="minilm")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tasks", type=int, default=32)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--words", type=int, nargs="+", default=[6, 16, 60, 180])
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--compiled", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for line in measure(options, Path(folder)):
            print(json.dumps(line), flush=True)


def measure(options: argparse.Namespace, home: Path) -> Any:
    """Yield the times of each way, for each kind of task and length of text."""
    from inlay.model import load_backbone
    from inlay.serving import Engine
    from inlay.store import Store

    backbone = load_backbone(options.backbone, device=options.device)
    layers = backbone.anatomy.num_layers
    kinds = {
        "top third": {"name": "pfeiffer", "size": options.size, "layers": f"{layers - layers // 3}:"},
        "top half": {"name": "pfeiffer", "size": options.size, "layers": f"{layers // 2}:"},
        "heads": {"name": "head"},
    }
    store = Store(home)
    for kind, method in kinds.items():
        names = [f"{kind.replace(' ', '-')}-{index}" for index in range(options.tasks)]
        publish_tasks(store, backbone, names, method)
        engine = Engine(backbone, store, num_slots=options.tasks, is_compiled=options.compiled or None)
        for num_words in options.words:
            text = " ".join(WORDS[:num_words])
            ways = make_ways(engine, names, text)
            check_equal(ways)
            times: dict[str, list[float]] = {name: [] for name in ways}
            for _ in range(options.turns):
                for name, way in ways.items():
                    began = time.perf_counter()
                    way()
                    times[name].append(1000 * (time.perf_counter() - began))
            medians = {name: statistics.median(found) for name, found in times.items()}
            yield {
                "kind": kind,
                "tokens": len(backbone.tokenizer(text)["input_ids"]),
                "ms": {name: round(value, 2) for name, value in medians.items()},
                "beside_apart": round(medians["apart"] / medians["shared"], 1),
                "beside_batch": round(medians["batch"] / medians["shared"], 1),
            }


def make_ways(engine: Any, names: list[str], text: str) -> dict[str, Callable[[], list[Any]]]:
    """Return what is measured, by name."""
    from inlay.serving import Request

    def batch() -> list[Any]:
        checked = [engine.check(Request(name, text), {}, scope=name) for name in names]
        with engine.hot_versions.holding({item.found.version.digest: item.found for item in checked}) as states:
            return engine.answer(engine.encode(checked), states)

    return {
        "apart": lambda: [engine.predict([Request(name, text)])[0] for name in names],
        "batch": batch,
        "shared": lambda: engine.ask(names, text),
    }


def check_equal(ways: dict[str, Callable[[], list[Any]]]) -> None:
    """Compare the answers of all ways, and warm them up."""
    found = {name: way() for name, way in ways.items()}
    for answers in zip(*found.values(), strict=True):
        logits = [answer.logits for answer in answers]
        largest = max(float((other - logits[0]).abs().max()) for other in logits[1:])
        scale = max(1.0, float(logits[0].abs().max()))
        assert largest <= (1e-5 if str(logits[0].dtype) == "torch.float32" else 5e-2) * scale * 10, largest
    for way in ways.values():
        way()


if __name__ == "__main__":
    main()
