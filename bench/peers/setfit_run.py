"""SetFit on one draw of `bench/quality.py`: trained as its documentation says, the answers to the test rows as JSON.

    python setfit_run.py --train FILE --test FILE --backbone FOLDER --out FILE

Runs in an environment of its own and does not import Inlay. Settings are the defaults of SetFit 1.2's
`TrainingArguments`: one epoch of contrastive pairs in batches of 16, body at 2e-5, as many pairs as oversampling
makes; then a logistic regression. From 1,000 rows on these pairs grow beyond reason (half a million), so that there
`num_iterations` is 20, SetFit's default before version 1.0. Two texts become one, joined by ` [SEP] `.
"""

from __future__ import annotations

import argparse
import csv
import importlib.metadata
import json
import tempfile
import time
from pathlib import Path

JOINT = " [SEP] "
MANY_ROWS, ITERATIONS = 1000, 20
LIBRARIES = ("setfit", "sentence-transformers", "transformers", "torch", "scikit-learn")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("train", "test", "backbone", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    options = parser.parse_args()
    began = time.perf_counter()
    texts, labels = read(options.train)
    tests, _ = read(options.test)
    names = sorted(set(labels))
    settings = {"num_epochs": 1, "batch_size": 16, "body_learning_rate": 2e-5, "sampling_strategy": "oversampling"}
    if len(texts) >= MANY_ROWS:
        settings["num_iterations"] = ITERATIONS
    answers = train(options.backbone, (texts, [names.index(label) for label in labels]), tests, settings)
    found = {
        "predictions": [names[int(answer)] for answer in answers],
        "settings": settings,
        "versions": {name: importlib.metadata.version(name) for name in LIBRARIES},
        "seconds": time.perf_counter() - began,
    }
    options.out.write_text(json.dumps(found), encoding="utf8")


def read(path: Path) -> tuple[list[str], list[str]]:
    """The texts and the labels of a draw's file."""
    with path.open(encoding="utf8", newline="") as file:
        rows = list(csv.DictReader(file))
    texts = [JOINT.join((row["text"], row["pair"])) if "pair" in row else row["text"] for row in rows]
    return texts, [row["label"] for row in rows]


def train(backbone: Path, rows: tuple[list[str], list[int]], tests: list[str], settings: dict) -> list[int]:
    """The number of the label that SetFit gives each test text."""
    from datasets import Dataset
    from setfit import SetFitModel, Trainer, TrainingArguments

    texts, labels = rows
    model = SetFitModel.from_pretrained(str(backbone))
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(output_dir=folder, report_to="none", save_strategy="no", **settings)
        trainer = Trainer(model=model, args=args, train_dataset=Dataset.from_dict({"text": texts, "label": labels}))
        trainer.train()
    return [int(answer) for answer in model.predict(tests)]


if __name__ == "__main__":
    main()
