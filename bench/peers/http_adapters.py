"""`adapters` behind FastAPI, as its users write it: python http_adapters.py PORT BACKBONE FOLDER NUM_TASKS.

One model with all adapters; a request switches to its own and is answered, one at a time, since the active adapter is
the model's state.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import adapters
import torch
import transformers
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel

PORT, BACKBONE, FOLDER, NUM_TASKS = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])


class Asked(BaseModel):
    model: str
    input: list[str]


app = FastAPI()
lock = threading.Lock()
transformers.logging.set_verbosity_error()
tokenizer = transformers.AutoTokenizer.from_pretrained(BACKBONE)
model = adapters.AutoAdapterModel.from_pretrained(BACKBONE)
for index in range(NUM_TASKS):
    model.load_adapter(str(FOLDER / f"task-{index:03d}"), load_as=f"task-{index:03d}")
model.eval()


@app.post("/classify")
def classify(asked: Asked) -> dict[str, list[dict[str, list[float]]]]:
    inputs = tokenizer(asked.input, padding=True, truncation=True, max_length=128, return_tensors="pt")
    with lock, torch.inference_mode():
        model.set_active_adapters(asked.model)
        rows = model(**inputs).logits.softmax(-1).tolist()
    return {"data": [{"probs": row} for row in rows]}


if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=PORT, log_level="warning", access_log=False)
