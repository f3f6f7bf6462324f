"""`POST /hf/{task}` in the shapes of Hugging Face's inference API, as `huggingface_hub.InferenceClient` asks for them.

What an answer looks like follows from the task: classifiers score labels, taggers find entities, readers a passage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import msgspec

from inlay.service.web.app_state import AppState
from inlay.service.web.asking import Asked, RowAsked, ask, check_num_rows
from inlay.service.web.identity import Identity
from inlay.service.web.json_bodies import read_json
from inlay.service.web.problems import FieldFault, bad_fields, refuse_row
from inlay.service.web.visits import Visit

Count = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]


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


_decoder = msgspec.json.Decoder(HfRequest)


async def answer_hf(state: AppState, identity: Identity, body: bytes, receive: Any, visit: Visit, task: str) -> bytes:
    """Take and give what `huggingface_hub.InferenceClient` knows, at the address `/hf/TASK`.

    `text_classification`, `token_classification` and `question_answering` work, as the task answers.
    """
    request = read_json(body, _decoder)
    inputs = request.inputs if isinstance(request.inputs, list) else [request.inputs]
    visit.num_rows = len(inputs)
    check_num_rows(identity.workspace, len(inputs), len(inputs))
    identity.workspace.resolve(task)
    rows = [_read_input(task, item, number) for number, item in enumerate(inputs)]
    answered = await ask(state, identity, Asked(rows), receive, visit.request_id)
    shaped = [_shape(answer, request.parameters, number) for number, answer in enumerate(answered.answers)]
    if isinstance(request.inputs, list):
        return msgspec.json.encode(shaped)
    # Clients take the scores of one text from a list of lists, and everything else as it is.
    is_scores = "probabilities" in answered.answers[0] or "value" in answered.answers[0]
    return msgspec.json.encode(shaped if is_scores else shaped[0])


def _read_input(task: str, item: str | HfQuestion, number: int) -> RowAsked:
    if isinstance(item, str):
        return RowAsked(task, item)
    first, second = (item.question, item.context) if item.text is None else (item.text, item.text_pair)
    if first is None or (item.text is not None and (item.question is not None or item.context is not None)):
        detail = "give `question` and `context`, or `text` and `text_pair`"
        raise bad_fields([FieldFault(f"inputs[{number}]", detail)])
    return RowAsked(task, first, second)


def _shape(answer: dict[str, Any], parameters: HfParameters, number: int) -> Any:
    if "error" in answer:
        raise refuse_row(answer["error"], f"inputs[{number}]")
    field = next(name for name in _SHAPES if name in answer)
    return _SHAPES[field](answer, parameters)


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


def _shape_text(answer: dict[str, Any], parameters: HfParameters) -> list[dict[str, Any]]:
    return [{"generated_text": answer["answer"]}]


def _shape_number(answer: dict[str, Any], parameters: HfParameters) -> list[dict[str, Any]]:
    return [{"label": "value", "score": answer["value"]}]


# A field that an answer has -> its shape; the first one that is there counts.
_SHAPES: dict[str, Callable[[dict[str, Any], HfParameters], Any]] = {
    "entities": _shape_entities,
    "nbest": _shape_passages,
    "probabilities": _shape_scores,
    "value": _shape_number,
    "answer": _shape_text,
}
