"""`POST /classify` in the shape of vLLM's: classifiers behind clients that were written for it."""

from __future__ import annotations

import time
from typing import Annotated, Any

import msgspec

from inlay.service.web.app_state import AppState
from inlay.service.web.asking import Asked, RowAsked, ask, check_num_rows
from inlay.service.web.identity import Identity
from inlay.service.web.json_bodies import read_json
from inlay.service.web.predicting import TaskName
from inlay.service.web.problems import FieldFault, bad_fields, refuse_row
from inlay.service.web.visits import Visit


class ClassifyRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A text or texts for a task. `user` and `priority` are taken and not used; logits are not given."""

    model: TaskName
    input: str | Annotated[list[str], msgspec.Meta(min_length=1)]
    user: str | None = None
    priority: int | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    activation: bool | None = None
    use_activation: bool | None = None


class ClassifiedText(msgspec.Struct):
    """The label of one text, and the probabilities of all labels in the task's order."""

    index: int
    label: str | None
    probs: list[float]
    num_classes: int


class PromptTokens(msgspec.Struct):
    """The tokens that the texts had."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0
    prompt_tokens_details: None = None


class ClassifyAnswer(msgspec.Struct):
    """The labels of the texts, in order."""

    id: str
    object: str
    created: int
    model: str
    data: list[ClassifiedText]
    usage: PromptTokens


_decoder = msgspec.json.Decoder(ClassifyRequest)


async def answer_vllm(state: AppState, identity: Identity, body: bytes, receive: Any, visit: Visit) -> bytes:
    """Take and give what clients of vLLM's `/classify` know: `model` is the task.

    A text that cannot be answered refuses all, as the shape has no other way.
    """
    request = read_json(body, _decoder)
    if request.activation is False or request.use_activation is False:
        raise bad_fields([FieldFault("activation", "raw logits are not given: leave it out")])
    if request.truncate_prompt_tokens is not None:
        raise bad_fields([FieldFault("truncate_prompt_tokens", "a task cuts texts as in training: leave it out")])
    texts = [request.input] if isinstance(request.input, str) else request.input
    visit.num_rows = len(texts)
    check_num_rows(identity.workspace, len(texts), len(texts))
    identity.workspace.resolve(request.model)
    asked = Asked([RowAsked(request.model, text) for text in texts])
    answered = await ask(state, identity, asked, receive, visit.request_id)
    data = [_shape(index, answer) for index, answer in enumerate(answered.answers)]
    num_tokens = answered.num_tokens
    usage = PromptTokens(prompt_tokens=num_tokens, total_tokens=num_tokens)
    name = f"classify-{visit.request_id}"
    return msgspec.json.encode(ClassifyAnswer(name, "list", int(time.time()), request.model, data, usage))


def _shape(index: int, answer: dict[str, Any]) -> ClassifiedText:
    if "error" in answer:
        raise refuse_row(answer["error"], f"input[{index}]")
    if "value" in answer:
        return ClassifiedText(index, None, [answer["value"]], 1)
    probabilities = answer.get("probabilities")
    if probabilities is None:
        raise bad_fields([FieldFault("model", "it is no classifier: `POST /v1/predict` takes every kind of task")])
    label = answer.get("label")
    if "labels" in answer:
        label = "|".join(answer["labels"] or ())
    return ClassifiedText(index, label, list(probabilities.values()), len(probabilities))
