"""The work that every side of a comparison does: rows of GLUE-like lengths, and backbones that all libraries load.

    python bench/workload.py --data-root DIR        draws `lengths.json` anew

The committed lengths are those of 4,096 training rows of CoLA, SST-2, MRPC and RTE (932, 932, 1,116 and 1,116 of them,
drawn with seed 0, cut to 128 tokens of the BERT vocabulary): mean 38. Lengths only: the texts of a measurement are
random words of the backbone's vocabulary, one token each, and labels are random.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from report import write_whole

LENGTHS = Path(__file__).with_name("lengths.json")
SHARES = {"cola": 932, "sst2": 932, "mrpc": 1116, "rte": 1116}
SHAPES: dict[str, dict[str, int]] = {
    "base": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072},
    "tiny": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64},
    "large": {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
}
VOCABULARY = 30522
# Attention dropout is off on every side: the attention kernels that skip padding have none.
DROPOUT = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.0}


@dataclass(frozen=True)
class Workload:
    """Rows as texts (for Inlay, which tokenises) and as the same token ids (for peers), in a file each worker reads."""

    path: Path
    backbone: Path
    lengths: np.ndarray

    @property
    def num_rows(self) -> int:
        return len(self.lengths)

    def describe(self) -> dict[str, Any]:
        """What a report says of it."""
        return {
            "rows": self.num_rows,
            "mean_length": round(float(self.lengths.mean()), 1),
            "longest": int(self.lengths.max()),
            "texts": "random words, lengths as of real rows (bench/workload.py)",
            "dropout": DROPOUT,
        }


def make_workload(backbone: str, lengths: np.ndarray, folder: Path, seed: int = 0) -> Workload:
    """Rows for `backbone` (`base`, `large`, a built-in name or a folder), written under `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    place = open_backbone(backbone, folder / "backbones")
    config = json.loads((place / "config.json").read_text(encoding="utf8"))
    generator, num_rows = np.random.default_rng(seed), len(lengths)
    lengths = np.minimum(lengths, config["max_position_embeddings"] - 2)
    drawn = hashlib.sha256(f"{lengths.tolist()} {seed}".encode()).hexdigest()[:12]
    path = folder / f"rows-{place.name}-{num_rows}-{drawn}.json"
    if not path.exists():  # scripts that follow each other on one machine mostly ask for the same
        texts, ids = _write_texts(_load_tokenizer(place), lengths, generator)
        rows = {"texts": texts, "ids": ids, "labels": generator.integers(2, size=num_rows).tolist()}
        write_whole(path, json.dumps(rows))
    return Workload(path, place, lengths)


def glue_lengths(num_rows: int, seed: int = 0) -> np.ndarray:
    """So many of the committed lengths: evenly spaced quantiles, so that few rows stand for all, shuffled."""
    drawn = np.sort(json.loads(LENGTHS.read_text(encoding="utf8"))["lengths"])
    places = (np.arange(num_rows) + 0.5) * len(drawn) / num_rows
    return np.random.default_rng(seed).permutation(drawn[places.astype(int)])


def open_backbone(name: str, folder: Path) -> Path:
    """A folder with the backbone's weights and the dropout rates of all measurements; made once."""
    if name in SHAPES:
        return _make_random(name, folder / name)
    from inlay.model.backbone.loading import find_folder

    source = find_folder(name).absolute()
    place = folder / source.name
    place.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        link = place / path.name
        if path.name != "config.json" and not link.exists():
            link.symlink_to(path)
    config = json.loads((source / "config.json").read_text(encoding="utf8"))
    (place / "config.json").write_text(json.dumps(config | DROPOUT, indent=1), encoding="utf8")
    return place


def _make_random(shape: str, folder: Path) -> Path:
    """A BERT of that shape with random weights in bf16, and a tokenizer whose every word is one token."""
    if (folder / "model.safetensors").exists():
        return folder
    import torch
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(vocab_size=VOCABULARY, **SHAPES[shape], **DROPOUT)
    _make_tokenizer().save_pretrained(folder)
    BertModel(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def _make_tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = [*special, *(f"w{index}" for index in range(VOCABULARY - len(special)))]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
    )


def _load_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def _write_texts(tokenizer: Any, lengths: np.ndarray, generator: np.random.Generator) -> tuple[list[str], list[Any]]:
    """Texts of exactly these numbers of tokens, the two at the ends included, and their ids."""
    candidates = sorted(word for word in tokenizer.get_vocab() if word.isascii() and word.isalnum())
    encoded = tokenizer(candidates)["input_ids"]
    words = [word for word, ids in zip(candidates, encoded, strict=True) if len(ids) == 3]
    texts = [" ".join(generator.choice(words, size=length - 2)) for length in lengths]
    ids = tokenizer(texts)["input_ids"]
    assert [len(row) for row in ids] == lengths.tolist(), "a word is one token, alone or among others"
    return texts, ids


def draw_lengths(root: str) -> list[int]:
    """The lengths of real training rows, drawn once and committed."""
    from inlay.data import load_task
    from inlay.model.backbone.loading import find_folder
    from inlay.settings.run_config import DataConfig

    tokenizer, generator, drawn = _load_tokenizer(find_folder("minilm")), np.random.default_rng(0), []
    for name, share in SHARES.items():
        rows = load_task(DataConfig(source=f"glue/{name}", root=root), name).train
        ids = tokenizer(rows.texts, rows.pairs, truncation="longest_first", max_length=128)["input_ids"]
        drawn += generator.choice([len(row) for row in ids], size=share, replace=False).tolist()
    return [int(length) for length in generator.permutation(drawn)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", required=True)
    lengths = draw_lengths(parser.parse_args().data_root)
    LENGTHS.write_text(json.dumps({"from": SHARES, "lengths": lengths}) + "\n", encoding="utf8")
    print(len(lengths), "lengths, mean", np.mean(lengths))
