"""Full fine-tuning on one draw of `bench/quality.py`, by the Hugging Face Trainer; answers to the test rows as JSON.

    python finetune_run.py --train FILE --test FILE --backbone FOLDER --out FILE [--lr 2e-5] [--regress] [--gpu]

Does not import Inlay. Model and settings are those of transformers' `run_glue.py` example and its README: a fresh head
of `AutoModelForSequenceClassification`, 2e-5, 3 epochs, batches of 32, texts cut at 128 tokens, all rows trained on.
"""

from __future__ import annotations

import argparse
import csv
import importlib.metadata
import json
import tempfile
import time
from pathlib import Path
from typing import Any

EPOCHS, BATCH, MAX_LENGTH, SEED = 3, 32, 128, 42
LIBRARIES = ("transformers", "accelerate", "torch")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("train", "test", "backbone", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--lr", type=float, default=2e-5)
    parser.add_argument("--regress", action="store_true")
    parser.add_argument("--gpu", action="store_true", help="use a GPU, if there is one")
    options = parser.parse_args()
    began = time.perf_counter()
    train, test = read(options.train), read(options.test)
    names = [] if options.regress else sorted({row["label"] for row in train})
    settings = {"lr": options.lr, "epochs": EPOCHS, "batch_size": BATCH, "max_length": MAX_LENGTH, "seed": SEED}
    outputs = finetune(options.backbone, train, test, names, options.lr, use_cpu=not options.gpu)
    predictions = outputs[:, 0].tolist() if options.regress else [names[place] for place in outputs.argmax(-1)]
    found = {
        "predictions": predictions,
        "settings": settings,
        "versions": {name: importlib.metadata.version(name) for name in LIBRARIES},
        "seconds": time.perf_counter() - began,
    }
    options.out.write_text(json.dumps(found), encoding="utf8")


def read(path: Path) -> list[dict[str, str]]:
    """The rows of a draw's file."""
    with path.open(encoding="utf8", newline="") as file:
        return list(csv.DictReader(file))


def finetune(backbone: Path, train: list[Any], test: list[Any], names: list[str], lr: float, *, use_cpu: bool) -> Any:
    """The outputs of the trained model for the test rows [n, labels]; without names its target is a number."""
    from transformers import (
        AutoModelForSequenceClassification,
        AutoTokenizer,
        DataCollatorWithPadding,
        Trainer,
        TrainingArguments,
        set_seed,
    )

    set_seed(SEED)
    tokenizer = AutoTokenizer.from_pretrained(str(backbone))
    kind = "single_label_classification" if names else "regression"
    model = AutoModelForSequenceClassification.from_pretrained(
        str(backbone), num_labels=len(names) or 1, problem_type=kind
    )

    def encode(rows: list[Any]) -> list[dict[str, Any]]:
        texts = [[row["text"]] + ([row["pair"]] if "pair" in row else []) for row in rows]
        found = [dict(tokenizer(*text, truncation=True, max_length=MAX_LENGTH)) for text in texts]
        for one, row in zip(found, rows, strict=True):
            label = row["label"]
            # Test rows get the label 0: only the outputs are read.
            one["labels"] = (names.index(label) if label in names else 0) if names else float(label)
        return found

    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            learning_rate=lr,
            num_train_epochs=EPOCHS,
            per_device_train_batch_size=BATCH,
            per_device_eval_batch_size=BATCH,
            save_strategy="no",
            report_to="none",
            seed=SEED,
            use_cpu=use_cpu,
        )
        trainer = Trainer(
            model=model, args=args, train_dataset=encode(train), data_collator=DataCollatorWithPadding(tokenizer)
        )
        trainer.train()
        return trainer.predict(encode(test)).predictions


if __name__ == "__main__":
    main()
