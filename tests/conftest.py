"""Tiny random backbones of every family, built from their config and laid out as real folders."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tiny_backbones import make_folder, random_tensors
from toys import make_toy_answers, make_toy_pairs, make_toy_tags, make_toy_task, make_toy_texts

if find_spec("triton") is not None:
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_for_numpy(tensor: Any, scope: Any) -> None:
        """In the interpreter a loaded scalar is an array of one, which numpy from 2.4 on makes no loop bound of."""
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_tensor_for_numpy

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # else threads, and so last bits, follow what else runs here
os.environ["INLAY_CACHE_BYTES"] = "0"  # tests leave nothing in the user's cache
os.environ.pop("INLAY_HOME", None)
_DATA = os.environ.pop("INLAY_DATA", None)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a shell, where tests of Ctrl-C run too
    signal.signal(signal.SIGINT, signal.default_int_handler)


_LONGEST = (
    *("service/test_whole_service.py", "exchange/test_onnx.py", "studies/test_jobs.py", "training/test_parallel.py"),
    *("training/test_resume.py", "store/test_store_processes.py", "service/page/test_in_a_browser.py"),
    *("serving/test_engine_threads.py", "test_end_to_end.py", "test_notebooks.py", "cli/test_study.py"),
    *("estimators/test_estimators.py", "studies/test_session.py", "service/trainer/test_trainer_process.py"),
)
"""files whose tests take longest; with `--no-loadscope-reorder` they run first, so that no process waits for them"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first, and leave the order of all else."""
    items.sort(key=lambda item: not item.path.as_posix().endswith(_LONGEST))


@pytest.fixture(scope="module", autouse=True)
def frozen_imports() -> None:
    """What modules and fixtures have made by now is not looked through again whenever garbage is collected."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def quick_curves(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run's learning curve is drawn where it is looked at (`draws`): it takes longer than training a toy."""
    if request.node.get_closest_marker("draws") is None:
        monkeypatch.setattr("inlay.training.cohort.loop.draw_curve", _draw_nothing)


def _draw_nothing(path: Path, run: Any, progress: Any) -> None:
    from inlay.store import write_atomically

    write_atomically(path, b"\x89PNG")


@pytest.fixture(scope="session")
def backbone_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function: family -> folder of its tiny backbone, made once."""
    made: dict[str, Path] = {}

    def find(family: str) -> Path:
        if family not in made:
            made[family] = make_folder(family, tmp_path_factory.mktemp(f"{family}-") / "backbone")
        return made[family]

    return find


@pytest.fixture(scope="session")
def backbone_of(backbone_folder: Callable[[str], Path]) -> Callable[[str], Any]:
    """A function: family -> its tiny backbone, loaded once."""
    from inlay.model import load_backbone

    loaded: dict[str, Any] = {}

    def find(family: str) -> Any:
        if family not in loaded:
            loaded[family] = load_backbone(str(backbone_folder(family)), device="cpu")
        return loaded[family]

    return find


@pytest.fixture(scope="session")
def data_root() -> Path:
    """The folder of the data sets: $INLAY_DATA, or `shared/data` beside the checkout. Few machines have it."""
    root = Path(_DATA or Path(__file__).parents[2] / "shared" / "data").resolve()
    if not root.is_dir():
        pytest.skip(f"no data sets in {root}; $INLAY_DATA names their folder")
    return root


@pytest.fixture(scope="session")
def tiny_bert_folder(backbone_folder: Callable[[str], Path]) -> Path:
    return backbone_folder("bert")


@pytest.fixture(scope="session")
def tiny_bert(backbone_of: Callable[[str], Any]) -> Any:
    return backbone_of("bert")


@pytest.fixture(scope="session")
def toy_task() -> Callable[..., Any]:
    return make_toy_task


@pytest.fixture(scope="session")
def toy_tags() -> Callable[..., Any]:
    return make_toy_tags


@pytest.fixture(scope="session")
def toy_answers() -> Callable[..., Any]:
    return make_toy_answers


@pytest.fixture(scope="session")
def toy_pairs() -> Callable[..., Any]:
    return make_toy_pairs


@pytest.fixture(scope="session")
def toy_texts() -> Callable[..., Any]:
    return make_toy_texts


TEXTS = (  # of different lengths, in the words the tiny tokenizers know
    "the movie was good and the plot was fine",
    "call now to win a free prize !",
    "no",
    "we come home late , the cat sat on the mat and the dog is not so quite early",
    "why is it so bad ?",
)


def _publish_random(store: Any, name: str, backbone: Any, spec: Any, seed: int = 0) -> Any:
    """A version of `spec` with random tensors."""
    import dataclasses

    from inlay.store import Manifest
    from inlay.training.run.publish import describe_backbone

    tensors = random_tensors(backbone, spec, seed)
    labels = () if spec.head.kind == "regress" else tuple(f"label-{index}" for index in range(spec.head.num_outputs))
    labels = ("O", "B-LOC", "I-LOC", "B-PER", "I-PER") if spec.head.kind == "tag" else labels
    metrics = {"classify": "accuracy", "multilabel": "micro_f1", "regress": "rmse", "tag": "entity_f1"}
    manifest = Manifest(
        kind=spec.head.kind,
        labels=labels,
        metric=metrics[spec.head.kind],
        method=dataclasses.asdict(spec.method),
        head=dataclasses.asdict(spec.head),
        max_length=64,
        metrics={},
        data_digest="random",
        dev_digest="",
        backbone=describe_backbone(backbone),
        run_id="random",
        num_parameters=sum(tensor.numel() for tensor in tensors.values()),
        probes=(),
        config={},
        extra={"pairs": spec.head.has_towers or spec.head.kind == "span"},
    )
    return store.publish(name, tensors, manifest, {})


@pytest.fixture(scope="session")
def publish_random() -> Callable[..., Any]:
    return _publish_random


@pytest.fixture(scope="session")
def texts() -> list[str]:
    return list(TEXTS)
