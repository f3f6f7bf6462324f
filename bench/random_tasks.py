"""Tasks with random weights in a store, for measurements: what they answer does not matter, that they answer does."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

TEXTS = (
    "the delivery came two days late and the box was open",
    "thank you , this was quick and friendly",
    "please cancel my order from yesterday and send the money back to my card",
    "where can i find the invoice for last month ?",
    "the app closes by itself whenever i open the second page , i have tried it on two phones now",
    "great value",
    "it does not turn on",
    "could you tell me whether the blue one will be in stock again before the end of the year ?",
)


def publish_tasks(store: Any, backbone: Any, names: Sequence[str], method: dict[str, Any]) -> None:
    """Publish a task with random weights under each name: a classifier of three labels by `method`."""
    from inlay.model import HeadSpec, SlotSpec, draw_tensor
    from inlay.settings import MethodConfig
    from inlay.store import Manifest
    from inlay.training.run.publish import describe_backbone

    spec = SlotSpec.of(MethodConfig(**method), HeadSpec("classify", 3, "mean"))
    for seed, name in enumerate(names):
        tensors = {
            item.name: (
                backbone.own_tensor(item.name) if item.start == "backbone" else draw_tensor(item, seed + 1, name)
            )
            for item in spec.layout(backbone.anatomy)
        }
        manifest = Manifest(
            kind="classify",
            labels=("no", "perhaps", "yes"),
            metric="accuracy",
            method=dataclasses.asdict(spec.method),
            head=dataclasses.asdict(spec.head),
            max_length=128,
            metrics={},
            data_digest="random",
            dev_digest="",
            backbone=describe_backbone(backbone),
            run_id=f"random-{seed}",
            num_parameters=spec.count_parameters(backbone.anatomy),
            probes=(),
            config={},
            extra={"pairs": False},
        )
        store.publish(name, tensors, manifest, {})
