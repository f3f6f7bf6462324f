"""Ratings from end to end: trained, served beside other tasks, verified, judged and exported."""

from __future__ import annotations

import csv
import json
import random
from pathlib import Path

from .conftest import Inlay, Mail

WORDS = {1: "awful terrible", 2: "bad not", 3: "quite so", 4: "good fine", 5: "great win"}
SETTINGS = ("--max-length", "24", "--batch-size", "16")


def write_ratings(path: Path, num_rows: int = 120) -> Path:
    generator = random.Random(0)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label"])
        for row in range(num_rows):
            rating = 1 + row % 5
            writer.writerow([f"{' '.join(generator.choices(WORDS[rating].split(), k=4))} {row}", rating])
    return path


def test_ratings_are_trained_served_verified_judged_and_exported(inlay: Inlay, mail: Mail, tmp_path: Path) -> None:
    data = write_ratings(tmp_path / "ratings.csv")
    about = ("--task", "ratings", "--kind", "ordinal", "--backbone", mail.backbone, "--store", mail.store)
    trained = inlay("train", data, *about, *SETTINGS, "--json")
    assert trained.status == 0, trained.err
    report = trained.data
    assert (report["kind"], report["metric"]) == ("ordinal", "quadratic_kappa")
    assert report["metrics"]["dev"]["quadratic_kappa"] > 0.5

    judged = inlay("evaluate", "ratings", data, "--errors", "wrong.csv", "--json", "--store", mail.store)
    assert judged.status == 0, judged.err
    assert judged.data["metrics"].keys() == {"quadratic_kappa", "mae"}
    wrong = list(csv.DictReader(Path("wrong.csv").read_text().splitlines()))
    assert all(row["label"] != row["predicted"] for row in wrong)

    rows = [{"task": "mail", "text": "free win prize"}, {"task": "ratings", "text": "awful terrible"}]
    Path("mixed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    answered = inlay("predict", "--input", "mixed.jsonl", "--store", mail.store, "--json")
    assert answered.status == 0, answered.err
    answer = answered.lines[1]
    assert answer["label"] in set("12345")
    assert abs(sum(answer["probabilities"].values()) - 1) < 1e-9

    assert inlay("verify", "ratings", "--store", mail.store).status == 0
    shown = inlay("show", "ratings", "--store", mail.store)
    assert "1, 2, 3, 4, 5" in shown.out
    cheap = inlay("baseline", data, "--kind", "ordinal", "--backbone", mail.backbone, "--json")
    assert cheap.status == 0, cheap.err
    suggested = inlay(
        "suggest", data, "--kind", "ordinal", "--backbone", mail.backbone, "--store", mail.store, "--json"
    )
    assert suggested.status == 0, suggested.err
    exported = inlay("export", "ratings", "mail", "--format", "onnx", "--output", "graph", "--store", mail.store)
    assert exported.status == 0, exported.err
