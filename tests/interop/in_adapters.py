"""Run by the interop environment's python, which has `adapters` and not Inlay: train and answer, or load and answer.

Reads a JSON file of jobs and writes one of answers, so that a single process pays for the imports. A job with a
`config` makes an adapter, trains it for some steps and saves it into `folder`; one without loads what `folder` holds.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import adapters
import torch
import transformers

NUM_STEPS, LR = 5, 2e-3


def train(job: dict[str, Any]) -> Any:
    """A model with a trained adapter and head, saved as the library does."""
    torch.manual_seed(0)
    model = open_model(job)
    model.add_adapter(job["name"], config=adapters.AdapterConfig.load(job["config"], **job.get("changes", {})))
    if job.get("static") is None:
        labels = {
            int(index): label for index, label in job["head"].pop("id2label", {}).items()
        }  # JSON's keys are texts
        model.add_classification_head(job["name"], id2label=labels or None, **job["head"])
    model.train_adapter(job["name"])
    trained = [parameter for name, parameter in model.named_parameters() if parameter.requires_grad]
    with torch.no_grad():
        for parameter in trained:  # what starts at the identity would still be near it after a few steps
            parameter.add_(0.1 * torch.randn_like(parameter))
    optimizer = torch.optim.AdamW(trained, lr=LR)
    inputs = to_tensors(job["inputs"])
    rows = len(inputs["input_ids"])
    for _ in range(NUM_STEPS):
        logits = model(**inputs).logits
        classes = torch.arange(rows) % max(2, logits.shape[1])
        targets = torch.eye(max(2, logits.shape[1]))[classes][:, : logits.shape[1]]
        loss = torch.nn.functional.mse_loss(logits, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_adapter(job["folder"], job["name"], with_head=True, use_safetensors=job.get("safetensors", False))
    return model


def load(job: dict[str, Any]) -> Any:
    """A model with the adapter that a folder holds."""
    model, info = open_model(job), {}
    name = model.load_adapter(job["folder"], set_active=True, loading_info=info)
    assert not info.get("missing_keys"), info
    assert not info.get("unexpected_keys"), info
    assert job.get("static") is not None or model.active_head == name
    return model


def open_model(job: dict[str, Any]) -> Any:
    if job.get("static") is None:
        return adapters.AutoAdapterModel.from_pretrained(job["backbone"])
    model = transformers.AutoModelForSequenceClassification.from_pretrained(job["backbone"], **job["static"])
    adapters.init(model)
    return model


def to_tensors(inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(values) for name, values in inputs.items()}


def main(jobs_path: str, answers_path: str) -> None:
    """Do the jobs and write each one's logits."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    answers = {}
    with open(jobs_path, encoding="utf8") as file:
        jobs = json.load(file)
    for key, job in jobs.items():
        model = (train if "config" in job else load)(job).eval()
        with torch.no_grad():
            answers[key] = model(**to_tensors(job["inputs"])).logits.tolist()
    with open(answers_path, "w", encoding="utf8") as file:
        json.dump(answers, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
