"""What it takes to score the texts of labels on a text-to-text backbone: as one tree, beside a decoder's row for each.

    python bench/label_texts.py --backbone T5 [--rows 128] [--repeats 5] [--out FILE]

STS-B's 26 numbers and MNLI's three words, over the shipped SMS messages. Each way answers the same rows in turns, the
reading of them included, and the median of the ratios is printed. Both ways must give the same scores.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import report
import torch
from torch import Tensor

from inlay.data import load_task
from inlay.model import Backbone, Bank, SlotSpec, infer, load_backbone
from inlay.model.batch.route import Route, Row, collate
from inlay.model.heads.generation import Read
from inlay.model.heads.heads import WRITTEN, HeadSpec
from inlay.settings.run_config import DataConfig, MethodConfig

LABELS = {
    "STS-B's numbers": tuple(f"{number / 5:.1f}" for number in range(26)),
    "MNLI's words": ("entailment", "neutral", "contradiction"),
}

AT_A_TIME = 16
"""rows whose texts are scored together: more would not fit a laptop's memory"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbone", required=True)
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    report.add_options(parser)
    options = parser.parse_args()
    backbone = load_backbone(options.backbone)
    source = str(report.ROOT / "examples/sms_spam/sms_spam.tsv")
    task = load_task(DataConfig(source=source, limit=options.rows), "sms")
    ids = [backbone.tokenizer(row[0])["input_ids"] for row in task.train.texts[: options.rows]]
    found = {name: compare(backbone, ids, texts, options.repeats) for name, texts in LABELS.items()}
    report.finish(options, backbone=options.backbone, rows=len(ids), a_row_for_each_text_relative_to_the_tree=found)


def compare(backbone: Backbone, ids: Sequence[list[int]], texts: tuple[str, ...], repeats: int) -> float:
    """How many times longer a decoder's row for each text takes."""
    bank = Bank(backbone, 1)
    head = HeadSpec("classify", len(texts), WRITTEN, texts=texts)
    bank.initialise(0, SlotSpec.of(MethodConfig(size=16), head), 0)
    ways: list[Callable[[], Tensor]] = [
        lambda: torch.stack(list(infer(bank, [Row(own, 0) for own in ids]))),
        lambda: score_apart(bank, ids, texts),
    ]
    rounds = []
    for _ in range(repeats + 1):
        seconds, scores = zip(*(timed(way) for way in ways), strict=True)
        torch.testing.assert_close(scores[0], scores[1], atol=1e-2, rtol=1e-3)
        rounds.append(seconds[1] / seconds[0])
    return round(statistics.median(rounds[1:]), 2)


def timed(way: Callable[[], Tensor]) -> tuple[float, Tensor]:
    """Seconds, and what came out."""
    began = time.perf_counter()
    scores = way()
    return time.perf_counter() - began, scores


@torch.no_grad()
def score_apart(bank: Bank, ids: Sequence[list[int]], texts: tuple[str, ...]) -> Tensor:
    """The scores [n, L] with a decoder's row for each row and text; what a row says is read once."""
    backbone = bank.backbone
    tokens = [backbone.tokenizer(text)["input_ids"] for text in texts]
    width = max(map(len, tokens))
    targets = torch.tensor([[*own, *[-1] * (width - len(own))] for own in tokens])
    before = torch.cat([torch.full((len(texts), 1), backbone.start_id), targets[:, :-1].clamp(min=0)], 1)
    scores = []
    for first in range(0, len(ids), AT_A_TIME):
        batch = collate([Row(own, 0) for own in ids[first : first + AT_A_TIME]], backbone.pad_id)
        with bank.routed(batch.route):
            read = backbone.read(batch, None)
        num_rows = len(read.mask_BT)
        repeated = Read(*(each.repeat_interleave(len(texts), 0) for each in (read.states_BTD, read.mask_BT)))
        inputs = before.repeat(num_rows, 1)
        with bank.routed(Route.from_slots([0] * len(inputs), torch.ones_like(inputs))):
            logits = backbone.write(repeated, inputs)[0].float().log_softmax(-1)
        wanted = targets.repeat(num_rows, 1)
        own = logits.gather(-1, wanted.clamp(min=0)[..., None])[..., 0].masked_fill(wanted < 0, 0.0)
        scores.append(own.sum(-1).view(num_rows, -1))
    return torch.cat(scores)


if __name__ == "__main__":
    main()
