"""Tiny backbones of every family, with random weights and tokenizers that know a few words."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from toys import WORDS

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
NUM_LAYERS, WIDTH = 3, 32


def _configs() -> dict[str, Callable[[int], Any]]:
    import transformers as t

    def usual(vocab_size: int, **more: Any) -> dict[str, Any]:
        shape = {"hidden_size": WIDTH, "num_hidden_layers": NUM_LAYERS, "num_attention_heads": 4}
        return {**shape, "intermediate_size": 48, "vocab_size": vocab_size, "max_position_embeddings": 66, **more}

    shifted = {"pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3, "type_vocab_size": 1}
    deberta = {
        "relative_attention": True,
        "pos_att_type": ["p2c", "c2p"],
        "norm_rel_ebd": "layer_norm",
        "conv_kernel_size": 3,
        "conv_act": "gelu",
        "position_buckets": 8,
        "share_att_key": True,
        "type_vocab_size": 0,
        "position_biased_input": False,
    }
    text_to_text = {
        "d_model": WIDTH,
        "d_kv": 8,  # as flash attention takes it; together less than the width, which other families divide
        "d_ff": 48,
        "num_layers": NUM_LAYERS,
        "num_heads": 3,
        "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 12,
        "decoder_start_token_id": 0,
    }
    modern = {"pad_token_id": 0, "bos_token_id": 2, "cls_token_id": 2, "eos_token_id": 3, "sep_token_id": 3}
    return {
        "bert": lambda n: t.BertConfig(**usual(n)),
        "roberta": lambda n: t.RobertaConfig(**usual(n, **shifted)),
        "xlm-roberta": lambda n: t.XLMRobertaConfig(**usual(n, **shifted)),
        "camembert": lambda n: t.CamembertConfig(**usual(n, **shifted)),
        "electra": lambda n: t.ElectraConfig(**usual(n, embedding_size=16)),
        "mpnet": lambda n: t.MPNetConfig(**usual(n, pad_token_id=1, bos_token_id=2, eos_token_id=3)),
        "distilbert": lambda n: t.DistilBertConfig(
            dim=WIDTH, n_layers=NUM_LAYERS, n_heads=4, hidden_dim=48, vocab_size=n, max_position_embeddings=66
        ),
        "deberta-v2": lambda n: t.DebertaV2Config(**usual(n, **deberta)),
        "modernbert": lambda n: t.ModernBertConfig(
            **usual(n, local_attention=8, global_attn_every_n_layers=2, **modern)
        ),
        "t5": lambda n: t.T5Config(vocab_size=n, num_decoder_layers=2, feed_forward_proj="relu", **text_to_text),
        "mt5": lambda n: t.MT5Config(
            vocab_size=n, num_decoder_layers=3, feed_forward_proj="gated-gelu", **text_to_text
        ),
    }


def make_tokenizer(family: str) -> Any:
    """A WordPiece tokenizer with the special tokens, pair template and inputs of the family."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    # Families that count positions from padding_idx + 1 fix the padding id at 1.
    special = ["[UNK]", "[PAD]", "[CLS]", "[SEP]"] if family in SHIFTED else ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    if family in WRITING:
        special = ["[PAD]", "[SEP]", "[UNK]"]
    pieces = [*special, "[MASK]", *WORDS, *LETTERS, *(f"##{letter}" for letter in LETTERS)]
    vocabulary = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    has_types = family in ("bert", "electra")
    pair = "[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1" if has_types else "[CLS] $A [SEP] $B [SEP]"
    single = "[CLS] $A [SEP]"
    if family in WRITING:
        single, pair = "$A [SEP]", "$A [SEP] $B [SEP]"
    ends = [(name, vocabulary[name]) for name in ("[CLS]", "[SEP]") if name in vocabulary]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=ends)
    names = ["input_ids", *(["token_type_ids"] if has_types else []), "attention_mask"]
    others = {"cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="[UNK]",
        pad_token="[PAD]",
        model_input_names=names,
        **({"eos_token": "[SEP]"} if family in WRITING else others),
    )


WRITING = ("t5", "mt5")
SHIFTED = ("roberta", "xlm-roberta", "camembert", "mpnet")


def make_folder(family: str, folder: Path, seed: int = 0) -> Path:
    """A tiny random backbone as a Hugging Face folder; a pooler counts as trained, as its bias is not zero."""
    import torch
    import transformers

    tokenizer = make_tokenizer(family)
    config = _configs()[family](len(tokenizer))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        loader = transformers.AutoModelForSeq2SeqLM if family in WRITING else transformers.AutoModel
        model = loader.from_config(config)
        for name, parameter in model.named_parameters():  # norms away from 1 and 0, so that mixing them up shows
            if parameter.dim() == 1:
                parameter.data.add_(0.2 * torch.randn(parameter.shape))
            elif "embedding" not in name.lower() and family not in WRITING:
                parameter.data.mul_(4)  # wider than transformers' init, so that layers are far from the identity
        model.save_pretrained(folder)
        if family == "mt5":
            untie(folder)
    tokenizer.save_pretrained(folder)
    return folder


def untrain_pooler(folder: Path) -> None:
    """Make the pooler of a backbone's folder what transformers draws: weights of noise, a bias of zeros."""
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    for name, tensor in tensors.items():
        if name.endswith("pooler.dense.weight"):
            tensor.normal_(0, 0.02, generator=generator)
        elif name.endswith("pooler.dense.bias"):
            tensor.zero_()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def untie(folder: Path) -> None:
    """Give a text-to-text backbone's folder an output layer of its own, as the official files have it."""
    import json

    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = torch.randn(tensors["shared.weight"].shape)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config.pop("scale_decoder_outputs", None)
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))


def random_tensors(backbone: Any, spec: Any, seed: int = 0) -> dict[str, Any]:
    """Tensors of a slot, each moved from its neutral value by about a fifth: what gets lost on the way shows."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for item in spec.layout(backbone.anatomy):
        noise = 0.2 * torch.randn(item.shape, generator=generator)
        neutral = backbone.own_tensor(item.name) if item.start == "backbone" else float(item.start == "ones")
        tensors[item.name] = neutral + noise
    return tensors
