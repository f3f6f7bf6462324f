"""The load generator of the service's bench: open and closed loops against a small server, and what it counts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

import pytest
from http_load import Found, Load, Plan, find_percentile, make_request, read_response, summarise
from http_report import write_report

Answer = Callable[[int], Awaitable[bytes]]
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"


async def carry_out(answer: Answer, **plan) -> tuple[Found, list[bytes]]:
    """Carry a plan out against a server that answers request number i with `await answer(i)`; None hangs up."""
    heard: list[bytes] = []

    async def serve(reader, writer):
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
                heard.append(await reader.readexactly(length))
                response = await answer(len(heard) - 1)
                if response is None:
                    break
                writer.write(response)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    requests = [make_request("/v1/predict", {"row": number}) for number in range(8)]
    found = await Load(Plan("127.0.0.1", port, requests, **plan)).run()
    server.close()
    await asyncio.sleep(0.01)
    return found, heard


async def at_once(number: int) -> bytes:
    return OK


def test_a_closed_loop_asks_as_many_at_once_as_it_has_connections():
    under_way, most = 0, 0

    async def answer(number: int) -> bytes:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.01)
        under_way -= 1
        return OK

    found, heard = asyncio.run(carry_out(answer, seconds=0.3, connections=3))
    assert most == 3
    assert len(heard) == len(found.latencies_ms) > 6
    assert min(found.latencies_ms) >= 10


def test_a_closed_loop_ends_with_its_last_request():
    found, heard = asyncio.run(carry_out(at_once, seconds=30, connections=2, most_requests=5, keep=5))
    assert len(heard) == len(found.bodies) == 5
    assert [json.loads(body)["row"] for body in sorted(heard)] == [0, 1, 2, 3, 4]


def test_an_open_loop_charges_a_stall_to_all_who_were_due_meanwhile():
    async def answer(number: int) -> bytes:
        if number == 0:  # the whole server stands still, so that nobody is answered
            loop.call_later(0, stall)
        return OK

    def stall():
        import time

        time.sleep(0.2)

    async def run():
        global loop
        loop = asyncio.get_running_loop()
        return await carry_out(answer, seconds=0.4, rate=100, connections=2)

    found, _ = asyncio.run(run())
    # 100 a second for 0.4 s: about 20 of the 40 were due while it stood still, the first for 0.2 s.
    assert len(found.latencies_ms) == 40
    assert sum(ms > 20 for ms in found.latencies_ms) >= 15
    assert max(found.latencies_ms) >= 180


def test_an_open_loop_keeps_its_rate_while_nobody_is_answered():
    async def answer(number: int) -> bytes:
        await asyncio.sleep(0.15)
        return OK

    found, heard = asyncio.run(carry_out(answer, seconds=0.2, rate=200, connections=4))
    assert len(heard) == 40  # more than four were under way: connections were opened for them
    assert found.seconds < 1


@pytest.mark.parametrize("rate", [None, 50])
def test_a_connection_that_is_hung_up_is_a_failure_and_not_an_answer(rate):
    async def answer(number: int) -> bytes | None:
        return None if number == 2 else OK

    found, _ = asyncio.run(carry_out(answer, seconds=0.3, connections=1, rate=rate))
    assert found.num_failed == 1
    assert not summarise(found)["all_answered"]
    assert len(found.latencies_ms) > 3


def test_a_response_is_read_when_all_of_it_is_there():
    whole = b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nabc"
    assert read_response(whole[:-1]) is None
    assert read_response(whole) == (200, b"abc")
    chunked = b"HTTP/1.1 503 No\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
    assert [read_response(chunked[:cut]) for cut in range(len(chunked))] == [None] * len(chunked)
    assert read_response(chunked) == (503, b"abcde")


def test_a_percentile_is_the_least_value_that_so_many_do_not_exceed():
    values = list(range(1, 101))
    assert [find_percentile(values, percent) for percent in (1, 50, 99, 100)] == [1, 50, 99, 100]
    assert find_percentile([7.0], 99) == 7
    assert find_percentile([3, 1, 2], 50) == 2


def test_an_error_inside_an_answer_is_not_a_success():
    async def answer(number: int) -> bytes:
        body = b'{"answers":[{"error":{}}]}' if number == 1 else b"{}"
        return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)

    found, _ = asyncio.run(carry_out(answer, seconds=5, connections=1, most_requests=3))
    assert found.num_errors == 1
    assert not summarise(found)["all_answered"]


@pytest.mark.parametrize("rate", [None, 200.0])
def test_refusals_are_counted_and_are_no_answers(rate):
    async def answer(number: int) -> bytes:
        refusal = b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 4\r\n\r\nlate"
        return refusal if number % 2 else OK

    found, _ = asyncio.run(carry_out(answer, seconds=0.4, connections=1, rate=rate))
    summary = summarise(found)
    assert found.statuses["429"] == summary["refused"] > 0
    assert summary["answers"] == found.statuses["200"] == len(found.latencies_ms)
    assert found.refusal == "late"
    assert not summary["all_answered"]


def test_a_report_tells_of_what_a_server_did_not_answer(tmp_path):
    head = {"what": "head", "hardware": {"processor": "x", "cores": 2}, "commit": "c", "date": "d"}
    head |= {"turns": 1, "seconds": 1.0, "load_before": 0.0, "command": "python"}
    load = {"what": "load", "server": "it", "tasks": 1, "load": "single", "turn": 0, "plan": {}, "rows_per_s": 5.0}
    load |= {"p50_ms": 1.0, "p99_ms": 2.0, "cpu_ms_row": 1.0}
    load |= {"answers": 30, "all_answered": False, "refused": 3, "failed": 1, "errors": 0}
    (tmp_path / "alone.jsonl").write_text(json.dumps(head) + "\n" + json.dumps(load))
    assert "it did not answer 4 requests beside 30 answers (single)" in write_report(tmp_path)
