"""Answers in the shapes of other servers: `POST /classify` as vLLM's, and `POST /hf/{task}` as Hugging Face's.

An answer's shape follows from the kind of task. Neither shape has errors for single rows: one row that cannot be
answered refuses the whole request.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import msgspec

from inlay.service.web.app_state import AppState
from inlay.service.web.identity import Identity
from inlay.service.web.predict_route import EngineQuestion, TaskName, TaskRow, ask_engine, check_num_rows
from inlay.service.web.problems import FieldFault, bad_fields, refuse_row
from inlay.service.web.request_context import RequestContext, read_json

Count = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]

# vLLM


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


_vllm_decoder = msgspec.json.Decoder(ClassifyRequest)


async def answer_vllm(state: AppState, identity: Identity, body: bytes, receive: Any, context: RequestContext) -> bytes:
    """Take and give what clients of vLLM's `/classify` know: `model` is the task.

    A text that cannot be answered refuses all, as the shape has no other way.
    """
    request = read_json(body, _vllm_decoder)
    if request.activation is False or request.use_activation is False:
        raise bad_fields([FieldFault("activation", "raw logits are not given: leave it out")])
    if request.truncate_prompt_tokens is not None:
        raise bad_fields([FieldFault("truncate_prompt_tokens", "a task cuts texts as in training: leave it out")])
    texts = [request.input] if isinstance(request.input, str) else request.input
    context.num_rows = len(texts)
    check_num_rows(identity.workspace, len(texts), len(texts))
    identity.workspace.resolve(request.model)
    question = EngineQuestion([TaskRow(request.model, text) for text in texts])
    answers, num_tokens = await ask_engine(state, identity, question, receive, context.request_id)
    data = [_shape_class(index, answer) for index, answer in enumerate(answers)]
    usage = PromptTokens(prompt_tokens=num_tokens, total_tokens=num_tokens)
    name = f"classify-{context.request_id}"
    return msgspec.json.encode(ClassifyAnswer(name, "list", int(time.time()), request.model, data, usage))


def _shape_class(index: int, answer: dict[str, Any]) -> ClassifiedText:
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


# Hugging Face


class HfQuestion(msgspec.Struct, forbid_unknown_fields=True, tag_field=None):
    """A question and where its answer is, or (`text`, `text_pair`) a pair of texts."""

    question: str | None = None
    context: str | None = None
    text: str | None = None
    text_pair: str | None = None


class HfParameters(msgspec.Struct, forbid_unknown_fields=True):
    """What clients may ask of an answer. Lengths and strides are the task's own: theirs are not used."""

    top_k: Count | None = None
    function_to_apply: Literal["sigmoid", "softmax", "none"] | None = None
    aggregation_strategy: Literal["none", "simple", "first", "average", "max"] | None = None
    ignore_labels: list[str] | None = None
    handle_impossible_answer: bool | None = None
    align_to_words: bool | None = None
    stride: Count | None = None
    doc_stride: Count | None = None
    max_answer_len: Count | None = None
    max_question_len: Count | None = None
    max_seq_len: Count | None = None


class HfRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A text, a question with its context, or a list of either. `options` are taken and not used."""

    inputs: str | HfQuestion | Annotated[list[str | HfQuestion], msgspec.Meta(min_length=1)]
    parameters: HfParameters = msgspec.field(default_factory=HfParameters)
    options: dict[str, Any] | None = None


_hf_decoder = msgspec.json.Decoder(HfRequest)


async def answer_hf(
    state: AppState, identity: Identity, body: bytes, receive: Any, context: RequestContext, *, task: str
) -> bytes:
    """Take and give what `huggingface_hub.InferenceClient` knows, at the address `/hf/TASK`.

    `text_classification`, `token_classification` and `question_answering` work, as the task answers.
    """
    request = read_json(body, _hf_decoder)
    inputs = request.inputs if isinstance(request.inputs, list) else [request.inputs]
    context.num_rows = len(inputs)
    check_num_rows(identity.workspace, len(inputs), len(inputs))
    identity.workspace.resolve(task)
    question = EngineQuestion([_read_input(task, item, number) for number, item in enumerate(inputs)])
    answers, _ = await ask_engine(state, identity, question, receive, context.request_id)
    shaped = []
    for number, answer in enumerate(answers):
        if "error" in answer:
            raise refuse_row(answer["error"], f"inputs[{number}]")
        kind = next(name for name in _HF_SHAPES if name in answer)
        shaped.append(_HF_SHAPES[kind](answer, request.parameters))
    if isinstance(request.inputs, list):
        return msgspec.json.encode(shaped)
    # Clients expect the scores of a single text in a list of lists, and everything else without a list.
    is_scores = "probabilities" in answers[0] or "value" in answers[0]
    return msgspec.json.encode(shaped if is_scores else shaped[0])


def _read_input(task: str, item: str | HfQuestion, number: int) -> TaskRow:
    if isinstance(item, str):
        return TaskRow(task, item)
    first, second = (item.question, item.context) if item.text is None else (item.text, item.text_pair)
    if first is None or (item.text is not None and (item.question is not None or item.context is not None)):
        detail = "give `question` and `context`, or `text` and `text_pair`"
        raise bad_fields([FieldFault(f"inputs[{number}]", detail)])
    return TaskRow(task, first, second)


def _shape_entities(answer: dict[str, Any], parameters: HfParameters) -> list[dict[str, Any]]:
    if parameters.aggregation_strategy == "none":
        ignored = {"O"} if parameters.ignore_labels is None else set(parameters.ignore_labels)
        return [_shape_word("entity", word["tag"], word) for word in answer["words"] if word["tag"] not in ignored]
    ignored = set(parameters.ignore_labels or ())
    return [
        _shape_word("entity_group", found["label"], found)
        for found in answer["entities"] or ()
        if found["label"] not in ignored
    ]


def _shape_word(role: str, label: str, found: dict[str, Any]) -> dict[str, Any]:
    place = {"start": found["start"], "end": found["end"]}
    return {role: label, "score": found["probability"], "word": found["text"], **place}


def _shape_passages(answer: dict[str, Any], parameters: HfParameters) -> Any:
    found: Sequence[dict[str, Any]] = answer["nbest"]
    if parameters.handle_impossible_answer is False:
        found = [passage for passage in found if passage["text"]] or found
    shaped = [
        {
            "answer": passage["text"],
            "score": passage["probability"],
            "start": passage["start"] or 0,
            "end": passage["end"] or 0,
        }
        for passage in found[: parameters.top_k or 1]
    ]
    return shaped[0] if (parameters.top_k or 1) == 1 else shaped


def _shape_scores(answer: dict[str, Any], parameters: HfParameters) -> list[dict[str, Any]]:
    usual = "sigmoid" if "labels" in answer else "softmax"
    if parameters.function_to_apply not in (None, usual):
        detail = f"this task's scores are those of `{usual}`: leave it out"
        raise bad_fields([FieldFault("parameters.function_to_apply", detail)])
    scores = sorted(answer["probabilities"].items(), key=lambda item: -item[1])
    return [{"label": label, "score": score} for label, score in scores[: parameters.top_k]]


# A field that an answer may have -> how an answer with it is shaped; the first one found counts.
_HF_SHAPES: dict[str, Callable[[dict[str, Any], HfParameters], Any]] = {
    "entities": _shape_entities,
    "nbest": _shape_passages,
    "probabilities": _shape_scores,
    "value": lambda answer, parameters: [{"label": "value", "score": answer["value"]}],
    "answer": lambda answer, parameters: [{"generated_text": answer["answer"]}],
}
