"""A backbone of a few thousand random weights, made on the spot: to try things out where nothing is installed.

It knows no language. A study's `tiny` profile runs on it, so that every study can be run anywhere within seconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

_WIDTH = 32
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789?.,"


def make_tiny_folder(folder: Path, words: Iterable[str] = (), *, num_layers: int = 4) -> Path:
    """Make a tiny random BERT as a Hugging Face folder, the same every time; words not in `words` are spelt."""
    if (folder / "config.json").is_file():
        return folder
    import transformers

    tokenizer = _make_tokenizer(words)
    config = transformers.BertConfig(
        hidden_size=_WIDTH,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        intermediate_size=2 * _WIDTH,
        vocab_size=len(tokenizer),
        max_position_embeddings=128,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModel.from_config(config)
    tokenizer.save_pretrained(folder)
    # Not the model's own `save_pretrained`, which draws a progress bar.
    save_file(model.state_dict(), folder / "model.safetensors", {"format": "pt"})
    config.architectures = ["BertModel"]
    config.save_pretrained(folder)  # last: a folder that has it is whole
    return folder


def _make_tokenizer(words: Iterable[str]) -> Any:
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    pieces = [*_SPECIAL, *words, *_LETTERS, *(f"##{letter}" for letter in _LETTERS)]
    vocabulary = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    ends = [(name, vocabulary[name]) for name in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1", special_tokens=ends
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="[UNK]",
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )
