"""What the servers of whole models share: N classifiers of transformers, and texts answered by one of them.

Runs in each peer's own environment; imports torch and transformers, not Inlay.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers


def load_model(folder: Path) -> Any:
    return transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()


def load_tokenizer(folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(folder)


class Classifiers:
    """Whole models by their task's name, all in memory, behind one tokenizer."""

    def __init__(self, folder: Path, num_tasks: int) -> None:
        transformers.logging.set_verbosity_error()
        names = [f"task-{index:03d}" for index in range(num_tasks)]
        self.models = {name: load_model(folder / name) for name in names}
        self.tokenizer = load_tokenizer(folder / names[0])

    def answer(self, requests: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Answer requests `{"model", "input"}`: the rows of one model go through it together, padded."""
        rows_of: dict[str, list[str]] = {}
        places = []
        for request in requests:
            rows = rows_of.setdefault(request["model"], [])
            places.append((request["model"], len(rows), len(request["input"])))
            rows += request["input"]
        answered = {name: classify(self.models[name], self.tokenizer, rows) for name, rows in rows_of.items()}
        return [{"data": [{"probs": row} for row in answered[name][at : at + size]]} for name, at, size in places]


def classify(model: Any, tokenizer: Any, texts: Sequence[str]) -> list[list[float]]:
    """Probabilities of each text's labels."""
    with torch.inference_mode():
        inputs = tokenizer(list(texts), padding=True, truncation=True, max_length=128, return_tensors="pt")
        return model(**inputs).logits.softmax(-1).tolist()
