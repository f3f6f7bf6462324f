"""A peer measured: `adapters`, `peft` or plain transformers, trained or answering. Does not import Inlay.

Runs in any environment with torch, transformers and the library asked for, and speaks the lines of `protocol.py`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from protocol import answer_requests, say, versions_of
from torch import nn

CLIP_NORM = 1.0
WARM_UP_STEPS = 3  # of each shape; a CUDA graph is warmed up, recorded and replayed
MAX_SHAPES = 64
NUM_BUCKETS = 4
COMPILERS: dict[str, dict[str, Any]] = {
    "dynamic": {"dynamic": True},
    "reduce-overhead": {"dynamic": False, "mode": "reduce-overhead"},
    "replays": {"dynamic": True, "mode": "reduce-overhead"},
}
GRAPHED = ("reduce-overhead", "replays")


class Training:
    """A training loop as its library's users write it, with everything that makes it faster and changes no result."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.job = job
        self.device = torch.device(job["device"])
        with open(job["rows"], encoding="utf8") as file:
            rows = json.load(file)
        self.ids = [np.array(row, dtype=np.int64) for row in rows["ids"]]
        self.labels = np.array(rows["labels"])
        self.model = PEERS[job["library"]](job).to(self.device).train()
        self.trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=1e-4, weight_decay=0.01, fused=True)
        self.forward = compiled(self.model, job["compile"])
        self.batches = self.endless_batches()

    def endless_batches(self) -> Iterator[np.ndarray]:
        lengths = np.array([len(row) for row in self.ids])
        size, needs_whole = self.job["batch_size"], self.job["compile"] in GRAPHED
        for epoch in itertools.count():
            for batch in bucketed(lengths, size, self.job["bucket"], epoch):
                if len(batch) == size or not needs_whole:  # another shape would be compiled for a smaller one
                    yield batch

    def warm_up(self) -> None:
        """Every shape that will occur is met before anything is measured; without a compiler, shapes do not matter."""
        if self.job["compile"] in GRAPHED:
            size, widths = self.job["batch_size"], sorted({self.width([row]) for row in self.ids})
            batches = [(np.arange(size) % len(self.ids), width) for width in reversed(widths)]
        else:
            batches = [(next(self.batches), 0) for _ in range(4)]
        for number, (rows, width) in enumerate(batches, start=1):
            say(f"shape {number} of {len(batches)}")
            for _ in range(WARM_UP_STEPS):
                self.step(rows, width)

    def measure(self, steps: int) -> int:
        return sum(self.step(next(self.batches)) for _ in range(steps))

    def step(self, rows: np.ndarray, width: int = 0) -> int:
        """One step; to `width` tokens if given, otherwise to the longest row's."""
        inputs, labels = self.collate(rows, width)
        if self.job["compile"] in GRAPHED:
            torch.compiler.cudagraph_mark_step_begin()
        with self.autocast():
            logits = self.forward(**inputs).logits
            loss = F.cross_entropy(logits.float(), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(self.trained, CLIP_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return len(rows)

    def autocast(self) -> Any:
        if self.device.type == "cuda" and self.job["trained_dtype"] == "float32":
            return torch.autocast("cuda", torch.bfloat16)
        return contextlib.nullcontext()

    def width(self, rows: list[np.ndarray]) -> int:
        longest, multiple = max(len(row) for row in rows), self.job["pad_to"]
        return -(-longest // multiple) * multiple

    def collate(self, rows: np.ndarray, width: int = 0) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        chosen = [self.ids[row] for row in rows]
        width = width or self.width(chosen)
        ids = np.full((len(rows), width), self.model.config.pad_token_id or 0)
        mask = np.zeros_like(ids)
        for position, row in enumerate(chosen):
            ids[position, : len(row)], mask[position, : len(row)] = row[:width], 1
        tensors = [torch.from_numpy(array) for array in (ids, mask, self.labels[rows])]
        if self.device.type == "cuda":
            tensors = [tensor.pin_memory().to(self.device, non_blocking=True) for tensor in tensors]
        return {"input_ids": tensors[0], "attention_mask": tensors[1]}, tensors[2]

    def describe(self) -> dict[str, Any]:
        return {
            "trained_parameters": sum(parameter.numel() for parameter in self.trained),
            "dtypes": sorted({str(parameter.dtype) for parameter in self.model.parameters()}),
            "attention": self.model.config._attn_implementation,
        }


class Answering:
    """Requests for many tasks: switching the active adapter for each, or one batch split among them.

    `texts` says whether requests are texts, which are tokenised within the measured time, or token ids.
    """

    def __init__(self, job: dict[str, Any]) -> None:
        import adapters

        self.job, self.device = job, torch.device(job["device"])
        self.model = adapters.AutoAdapterModel.from_pretrained(job["folder"], dtype=frozen_dtype(job))
        for task in range(job["tasks"]):
            add_task(self.model, f"task-{task}", job["size"])
        self.model = self.model.to(self.device, frozen_dtype(job)).eval()
        self.tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_file=f"{job['folder']}/tokenizer.json", pad_token="[PAD]"
        )
        self.tokenizer.pad_token_id = self.model.config.pad_token_id
        with open(job["rows"], encoding="utf8") as file:
            rows = json.load(file)
        requests = spaced(rows["texts" if job["texts"] else "ids"][: job["requests"]], job["answered"])
        # Those of one task lie together, as a split batch wants them.
        self.requests = sorted((f"task-{index % job['tasks']}", row) for index, row in enumerate(requests))
        styles = {"switch": self.switch, "split": self.split, "split-by-length": self.split_by_length}
        self.answer = styles[job["style"]]

    def warm_up(self) -> None:
        self.measure(3)

    def measure(self, steps: int) -> int:
        for _ in range(steps):
            with torch.inference_mode():
                answers = self.answer()
            assert len(answers) == len(self.requests)
        return steps * len(self.requests)

    def switch(self) -> list[torch.Tensor]:
        answers = []
        for task, request in self.requests:
            self.model.set_active_adapters(task)
            answers.append(self.model(**self.inputs([request])).logits[0])
        return list(torch.stack(answers).float().cpu())  # one wait for the device, at the end

    def split(self) -> list[torch.Tensor]:
        return self.split_batch(self.requests)

    def split_by_length(self) -> list[torch.Tensor]:
        """Several batches of similar lengths, each split among its tasks: less padding."""
        by_length = sorted(self.requests, key=lambda request: len(request[1]))
        size = -(-len(by_length) // NUM_BUCKETS)
        batches = [sorted(by_length[start : start + size]) for start in range(0, len(by_length), size)]
        return [answer for batch in batches for answer in self.split_batch(batch)]

    def split_batch(self, requests: list[tuple[str, Any]]) -> list[torch.Tensor]:
        import adapters.composition as composition

        names = [task for task, _ in requests]
        tasks = list(dict.fromkeys(names))
        sizes = [names.count(task) for task in tasks]
        self.model.set_active_adapters(composition.BatchSplit(*tasks, batch_sizes=sizes))
        outputs = self.model(**self.inputs([request for _, request in requests])).head_outputs
        return list(torch.cat([output.logits for output in outputs]).float().cpu())

    def inputs(self, requests: list[Any]) -> dict[str, torch.Tensor]:
        encoded = {"input_ids": requests} if not self.job["texts"] else self.tokenizer(requests)
        padded = self.tokenizer.pad({"input_ids": encoded["input_ids"]}, return_tensors="pt")
        return {name: padded[name].to(self.device, non_blocking=True) for name in ("input_ids", "attention_mask")}

    def describe(self) -> dict[str, Any]:
        rows = {"rows_of_a_step": len(self.requests)}
        return rows | {"tasks": self.job["tasks"], "attention": self.model.config._attn_implementation}


def spaced(requests: list[Any], num: int) -> list[Any]:
    """So many of the requests, of evenly spaced lengths; all, as they come, if that is how many there are."""
    if num == len(requests):
        return requests
    by_length = sorted(requests, key=len)
    return [by_length[(2 * index + 1) * len(requests) // (2 * num)] for index in range(num)]


def bucketed(lengths: np.ndarray, batch_size: int, bucket: int, epoch: int) -> Iterator[np.ndarray]:
    """An epoch's batches; `bucket` batches at a time share their rows by length (1: none), in a shuffled order."""
    generator = np.random.default_rng(epoch)
    shuffled, window = generator.permutation(len(lengths)), batch_size * bucket
    batches = []
    for start in range(0, len(lengths), window):
        rows = shuffled[start : start + window]
        rows = rows[np.argsort(lengths[rows], kind="stable")]
        batches += [rows[first : first + batch_size] for first in range(0, len(rows), batch_size)]
    for index in generator.permutation(len(batches)):
        yield batches[index]


def compiled(model: nn.Module, mode: str | None) -> Any:
    if mode is None:
        return model
    torch._dynamo.config.recompile_limit = MAX_SHAPES
    torch._dynamo.config.accumulated_recompile_limit = 16 * MAX_SHAPES
    return torch.compile(model, **COMPILERS[mode])


def frozen_dtype(job: dict[str, Any]) -> torch.dtype:
    return torch.bfloat16 if job["device"] == "cuda" else torch.float32


def trained_dtype(job: dict[str, Any]) -> torch.dtype:
    return torch.float32 if job["device"] == "cpu" else getattr(torch, job["trained_dtype"])


def open_adapters(job: dict[str, Any]) -> nn.Module:
    """Houlsby's two adapters a layer and a linear head on the first token. Its layer norms stay frozen."""
    import adapters

    model = adapters.AutoAdapterModel.from_pretrained(job["folder"], dtype=frozen_dtype(job))
    add_task(model, "task", job["size"])
    model.train_adapter("task")
    return cast_trained(model, trained_dtype(job))


def add_task(model: Any, name: str, size: int) -> None:
    import adapters

    config = adapters.DoubleSeqBnConfig(reduction_factor=model.config.hidden_size / size, non_linearity="gelu")
    model.add_adapter(name, config=config)
    model.add_classification_head(name, num_labels=2, layers=1)


def open_lora(job: dict[str, Any]) -> nn.Module:
    """LoRA of rank 8 on queries and values, and the classifier."""
    import peft

    model = open_full(job | {"trained_dtype": "bfloat16"})
    config = peft.LoraConfig(task_type="SEQ_CLS", r=8, lora_alpha=16, target_modules=["query", "value"])
    return cast_trained(peft.get_peft_model(model, config), trained_dtype(job))


def open_full(job: dict[str, Any]) -> nn.Module:
    """Every weight trained."""
    dtype = trained_dtype(job)
    return transformers.AutoModelForSequenceClassification.from_pretrained(job["folder"], num_labels=2, dtype=dtype)


def cast_trained(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    return model


PEERS = {"adapters": open_adapters, "lora": open_lora, "full": open_full}
PACKAGES = {"adapters": ("adapters",), "lora": ("peft",), "full": ()}
WORK = {"train": Training, "answer": Answering}


class Session:
    """What this process was asked to prepare."""

    def prepare(self, **job: Any) -> dict[str, Any]:
        torch.set_num_threads(job["threads"])
        transformers.logging.set_verbosity_error()
        torch.manual_seed(0)
        say("loading")
        self.work = WORK[job["work"]](job)
        began = time.perf_counter()
        say(f"warming up{', which compiles' if job.get('compile') else ''}")
        self.work.warm_up()
        versions = versions_of("torch", "transformers", *PACKAGES[job["library"]])
        warm_up_s = round(time.perf_counter() - began, 1)
        return {"versions": versions, "warm_up_s": warm_up_s, **self.work.describe()}

    def measure(self, steps: int) -> dict[str, Any]:
        synchronise()
        began = time.perf_counter()
        samples = self.work.measure(steps)
        synchronise()
        return {"seconds": time.perf_counter() - began, "samples": samples}


def synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    session = Session()
    answer_requests({"prepare": session.prepare, "measure": session.measure})
