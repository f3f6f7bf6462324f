"""A backbone by its name, read by transformers in the precision and on the device that suit this process.

Names are those of `folders.py`: built in, a folder, on a hub. What always holds: files that cannot be read are an error
that names the folder, and one without a tokenizer is refused.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from inlay.errors import Missing, StoreDamaged, Unsupported
from inlay.model.backbone.backbone import Backbone
from inlay.model.backbone.families import find_family
from inlay.model.backbone.fingerprint import weight_files
from inlay.model.backbone.folders import find_folder, first_line
from inlay.model.backbone.tied_embeddings import tie_embeddings
from inlay.model.kernels.attention import register as register_attention
from inlay.processes import current_process

TOKENIZER_FILES = ("tokenizer.json", "vocab.txt", "vocab.json", "*.model")


def load_backbone(name: str, *, device: str | torch.device | None = None, dtype: torch.dtype | None = None) -> Backbone:
    """A frozen backbone by built-in name, folder or hub name: float32 on a CPU, bf16 on a GPU unless `dtype` says."""
    device = _own_device(torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu")))
    dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    folder = find_folder(name)
    transformers = _quiet_transformers()
    try:
        config = transformers.AutoConfig.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise Unsupported(f"`{folder}` holds no backbone that transformers can read: {first_line(error)}") from None
    family = find_family(config.model_type)
    register_attention()
    try:
        weight_files(folder)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loader = getattr(transformers, family.loader)
            model = loader.from_pretrained(folder, dtype=dtype, attn_implementation=family.implementation)
            if family.decoder is not None:
                tie_embeddings(model, folder)
            tokenizer = _load_tokenizer(folder)
        return Backbone(name, folder, model.to(device), tokenizer)
    except torch.OutOfMemoryError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise StoreDamaged(
            f"the files of the backbone `{name}` in `{folder}` cannot be read: {first_line(error)}",
            "a download may have been cut short: fetch the folder again",
        ) from None


def _own_device(device: torch.device) -> torch.device:
    """Where several processes were started, `cuda` is for each a GPU of its own, as far as they go round."""
    place = current_process()
    if device != torch.device("cuda") or place.size == 1:
        return device
    return torch.device("cuda", place.local_rank % torch.cuda.device_count())


def _load_tokenizer(folder: Path) -> Any:
    """The folder's tokenizer. Without its files transformers would make one that knows no word, and say nothing."""
    import transformers

    if not any(path for pattern in TOKENIZER_FILES for path in folder.glob(pattern)):
        raise Missing(f"no tokenizer in `{folder}`", f"it needs one of: {', '.join(TOKENIZER_FILES)}")
    return transformers.AutoTokenizer.from_pretrained(folder)


def _quiet_transformers() -> Any:
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers
