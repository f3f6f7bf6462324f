"""Captures share memory while any of them lives; what memory running out looks like, wherever it did."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from inlay.errors import OutOfMemory
from inlay.model.kernels.launch import GraphRecorder, is_out_of_memory


class Graph:
    """Notes the memory it is captured into, and whether the capture was ended."""

    breaks = False

    def __init__(self):
        self.pool, self.is_ended = None, False

    def capture_begin(self, pool=None):
        self.pool = pool

    def capture_end(self):
        if self.pool is not None and Graph.breaks:
            raise RuntimeError("operation failed due to a previous error during capture")
        self.is_ended = True


class Stream:
    def wait_stream(self, other):
        pass


@pytest.fixture
def cuda(monkeypatch):
    """A stand-in for torch's captures: each handle is given once."""
    handles = iter(range(100))
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(handles))


def test_memory_that_no_graph_holds_any_more_is_not_captured_into_again(cuda):
    """torch gives up a pool with its last graph, and refuses to capture into it then."""
    recorder, ran = GraphRecorder(), []
    first, second = (recorder.capture(lambda: ran.append(1)) for _ in range(2))
    assert first.pool == second.pool
    del first
    third = recorder.capture(lambda: ran.append(1))
    assert third.pool == second.pool
    del second, third
    assert recorder.capture(lambda: ran.append(1)).pool != 0
    assert len(ran) == 4


def test_a_capture_that_fails_is_ended_and_leaves_no_graph(cuda):
    recorder = GraphRecorder()

    def fail():
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        recorder.capture(fail)
    graph = recorder.capture(lambda: None)
    assert graph.is_ended
    assert graph.pool == 1, "the first one's is gone with it"


def test_a_capture_that_cannot_be_ended_says_what_failed_and_leaves_torch_free_of_it(cuda, monkeypatch):
    given_back = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda *of: given_back.append(of), raising=False)
    monkeypatch.setattr(Graph, "breaks", True)

    def fail():
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="not permitted"):
        GraphRecorder().capture(fail)
    assert given_back == [(0, 0)]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("x"), True),
        (MemoryError(), True),
        (OutOfMemory("x"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("shapes do not fit"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_what_memory_running_out_looks_like(error, expected):
    assert is_out_of_memory(error) == expected
    with pytest.raises(RuntimeError, match="could not be ended") as ended:
        cut_short(error)
    assert is_out_of_memory(ended.value) == expected


def cut_short(error):
    """As torch raises where an error cuts a capture short."""
    try:
        raise error
    finally:
        raise RuntimeError("the capture could not be ended")
