"""The service on a Ray cluster whose nodes share no folder: versions and files in a bucket, state in Postgres.

`make ray` runs it, with moto's server and a Postgres of its own (`pg_virtualenv`).
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from running_service import RunningService, find_port, wait_until

sys.path += [str(Path(__file__).parents[1] / name) for name in ("cluster", "attack", "store", "service/state")]
from bucket_server import BUCKET, KEYS, serve_bucket
from postgres_server import IS_POSTGRES, drop_database, make_database, url_of
from service_calls import READY_S, ROWS, TASK, ask, call, check_same, find_processes, roster_of, running_on_ray, train
from service_customer import DONE, Customer, Ledger, check_ledger
from two_nodes import add_node, run_two_nodes

from inlay.service import Database, Keys
from inlay.service.engine import Caller, EngineClient, EngineRefused, TcpAddress, WireRow
from inlay.store import Store

pytest.importorskip("obstore")
pytest.importorskip("moto.server")
pytestmark = [pytest.mark.ray, pytest.mark.skipif(not IS_POSTGRES, reason="it needs Postgres: `make ray`")]

LIVE_S = 2.0
PLACE = f"s3://{BUCKET}/cluster"
NUM_TIMES = int(os.environ.get("INLAY_LIVE_TIMES", "3"))
"""how often a new version and a move are timed; docs/cluster.md has 20"""


@pytest.fixture(scope="module")
def disks(tmp_path_factory) -> Path:
    """A folder with a folder for each machine: `node-1`, `node-2`, `web-1`, `web-2`."""
    return tmp_path_factory.mktemp("disks")


@pytest.fixture(scope="module")
def nodes(disks: Path) -> Iterator[Any]:
    pytest.importorskip("ray")
    with run_two_nodes(disks) as found:
        yield found


@pytest.fixture(scope="module")
def variables(nodes) -> Iterator[dict[str, str]]:
    """What the machine with the command is told, and no node: they have it from the service."""
    name = make_database()
    with serve_bucket() as address:
        yield {**KEYS, "AWS_ENDPOINT_URL": address, "INLAY_DATABASE": url_of(name)}
    drop_database(name)


class Machines:
    """The machines that take requests, each with a disk of its own."""

    def __init__(self, disks: Path, backbone: Path, variables: dict[str, str]) -> None:
        self._disks, self._backbone, self._variables = disks, backbone, variables

    def make(self, name: str) -> RunningService:
        """A service that is not started yet."""
        disk = self._disks / name
        home = disk / "remote" / Store(PLACE).root.name
        flags = ("--store", PLACE, "--on", "ray", "--engines", "2", "--ray-cpus", "0.5")
        service = RunningService(home, self._backbone, *flags)
        service.environment = {**self._variables, "INLAY_LOCAL": str(disk)}
        return service


@pytest.fixture(scope="module")
def machines(disks, tiny_bert_folder, variables) -> Machines:
    return Machines(disks, tiny_bert_folder, variables)


@pytest.fixture(scope="module")
def service(machines: Machines) -> Iterator[RunningService]:
    with running_on_ray(machines.make("web-1")) as running:
        yield running


@pytest.fixture(scope="module")
def store(service, variables, disks) -> Iterator[Store]:
    """The bucket, as this process sees it: from a machine of its own."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**variables, "INLAY_LOCAL": str(disks / "here")}.items():
            patch.setenv(name, value)
        yield Store(PLACE)


def wait_for_version(service: RunningService, number: int) -> dict[str, Any]:
    """Return the answer of a version once it is live: another machine hears of it a moment later."""
    return wait_until(lambda: (found := ask(service))["version"] == f"{TASK}@{number}" and found, "it", LIVE_S)


def keys_below(store: Store, prefix: str) -> list[str]:
    assert store.storage is not None
    return [each.key for each in store.storage.list(prefix)]


def files_with(folder: Path, text: str) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and text.encode() in path.read_bytes()]


def test_nodes_that_share_no_folder_train_and_answer_what_one_machine_took_in(service, store, disks, tiny_bert):
    rows = [*ROWS, ("a secret of acme", "billing"), ("a secret of emca", "support")]
    job = train(service, rows)
    assert job["state"] == "succeeded", job
    assert (job["result"]["version"], job["result"]["is_live"]) == (1, True)
    first = ask(service)
    assert first["version"] == f"{TASK}@1"

    # the answer of the definition, from the bucket
    from inlay.serving import Engine, Request, describe_answer

    (known,) = Engine(tiny_bert, store).predict([Request(f"{TASK}@1", "refund charge 3")])
    assert first["probabilities"] == pytest.approx(describe_answer(known)["probabilities"], abs=1e-5)

    # nodes keep copies by digest; the upload is in the bucket alone, and no state of the training is left
    copies = {name: {path.stem for path in (disks / name).rglob("*.safetensors")} for name in ("node-1", "node-2")}
    assert set.union(*copies.values()) == {store.resolve(f"{TASK}@1").digest}, copies
    assert keys_below(store, "service/datasets/")
    wait_until(lambda: not keys_below(store, "service/runs/"), "the end of the resume states", 10.0)
    assert not [path for path in files_with(disks, "a secret of acme,") if path.suffix != ".log"]


def test_a_second_machine_takes_requests_for_the_same_engines_and_goes_on_when_the_first_is_lost(machines, service):
    first = ask(service)
    with running_on_ray(machines.make("web-2")) as second:
        assert roster_of(second)["replicas"] == roster_of(service)["replicas"]
        check_same([ask(second)], first)
        assert train(second)["result"]["version"] == 2
        after = wait_for_version(second, 2)
        check_same([wait_for_version(service, 2)], after)
        service.kill("supervisor")
        check_same([ask(second) for _ in range(5)], after)
        service.start()
        service.wait_ready(READY_S)
    check_same([ask(service)], after)
    assert len(find_processes("engine")) == 2, "they stay for the machine that is left"


def test_a_node_that_dies_with_its_disk_loses_no_job_and_no_answer_is_wrong(service, nodes, disks):
    ledger = Ledger()
    customer = Customer(service.url, None, "node", ledger, tasks=("tone", "topic"))
    customer.first_seed(1)
    customer.wait_for_job(customer.train("tone"))
    jobs = [customer.train() for _ in range(3)]
    worker = next(node for node in nodes.list_all_nodes() if node is not nodes.head_node)
    nodes.remove_node(worker, allow_graceful=False)
    for _ in range(10):
        customer.predict()
        customer.correct()
    add_node(nodes, disks, 3)
    for job in jobs:
        customer.wait_for_job(job)
    assert {job["id"] for job in customer.list_all("/v1/jobs")} >= {job for job, _ in ledger.jobs.values()}
    problems = [each for each in check_ledger(customer, ledger) if "for a call that had another" not in each]
    assert [each for each in problems if "was not asked for" not in each] == []
    customer.close()
    wait_until(lambda: len(roster_of(service)["replicas"]) == 2, "both engines", READY_S)


class Watch:
    """A customer who asks all the time, and, as soon as another version answers, asks each engine for it, too."""

    def __init__(self, service: RunningService) -> None:
        self._service, self._stop = service, threading.Event()
        self._pool = ThreadPoolExecutor(1)
        self._seen: dict[str, list[float]] = {}

    def __enter__(self) -> Watch:
        self._end = self._pool.submit(self._go_on)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._end.result(30.0)

    def _go_on(self) -> None:
        last = ""
        while not self._stop.is_set():
            version = ask(self._service)["version"]
            if version != last:
                last, now = version, time.time()
                self._seen[version] = [now, *asyncio.run(ask_engines(self._service, version))]

    def wait_for(self, number: int, after: float) -> list[float]:
        """Return how long after a moment a version was answered: by the service, and by each of its engines."""
        version = f"{TASK}@{number}"

        def find() -> list[float] | None:
            if self._end.done():
                self._end.result()
            seen = self._seen.get(version)
            return seen if seen is not None and seen[0] > after else None

        found: list[float] = wait_until(find, f"{version} to answer", 30.0, 0.005)
        assert len(found) == 3
        return [each - after for each in found]


async def ask_engines(service: RunningService, version: str) -> list[float]:
    """Ask each engine by itself for a version; return when each had answered."""
    roster, found = roster_of(service), []
    for replica in roster["replicas"]:
        client = EngineClient(TcpAddress(replica["host"], replica["port"], roster["token"]))
        row = WireRow(TASK, TASK, int(version.partition("@")[2]), "refund charge 3")
        reply = await client.predict(Caller("local"), [row])
        assert getattr(reply.answers[0], "number", None) == row.number, reply.answers[0]
        found.append(time.time())
        await client.close()
    return found


def both_engines_answer(service: RunningService) -> bool:
    """Whether the roster has two engines and each answers: after a machine died it may still name one that is gone."""
    try:
        return len(asyncio.run(ask_engines(service, ask(service)["version"]))) == 2
    except EngineRefused:
        return False


def published_at(service: RunningService, job: str) -> float:
    """Return when a job's version was in the store, by the events of the job."""
    events = call(service, "GET", f"/v1/jobs/{job}/events", 200).json()["items"]
    (event,) = (event for event in events if event["kind"] == "published")
    return datetime.fromisoformat(event["at"]).timestamp()


def test_a_version_is_live_on_all_engines_within_two_seconds(service):
    published, moved = [], []
    alias = f"/v1/tasks/{TASK}/aliases/live"
    wait_until(lambda: both_engines_answer(service), "answers of two engines", READY_S, 0.5)
    with Watch(service) as watch:
        for turn in range(NUM_TIMES):
            # 1. from a version in the store to its first answers
            job = train(service, [(f"{text} of {turn}", label) for text, label in ROWS])
            number = job["result"]["version"]
            published.append(watch.wait_for(number, published_at(service, job["id"])))
            # 2. from the order to go back to the first answers of the version before
            known_as = {"if-match": call(service, "GET", alias, 200).json()["etag"]}
            began = time.time()
            call(service, "PUT", alias, 200, json={"version": number - 1, "reason": "worse"}, headers=known_as)
            moved.append(watch.wait_for(number - 1, began))
    for name, found in (("published", published), ("moved", moved)):
        last = [max(each) for each in found]  # of the two engines
        figures = {"median_s": round(statistics.median(last), 3), "most_s": round(max(last), 3)}
        print(json.dumps({"what": name, "times": len(found), **figures}))
    assert max(max(each) for each in [*published, *moved]) < LIVE_S


def test_a_drained_service_leaves_nothing_on_the_cluster(service):
    assert service.stop(120.0) == 0, service.tail()
    wait_until(lambda: not find_processes("engine") + find_processes("trainer"), "the end of all members", 60.0)


@pytest.fixture
def application(store, disks, tiny_bert_folder, variables) -> Iterator[tuple[str, str]]:
    """The service as a Ray Serve application of two replicas, by its file; its address, and a key."""
    with closing(Database.open(PLACE)) as db:
        _, key = Keys(db).make("local", ["predict", "train"])
    options = {"store": PLACE, "backbone": str(tiny_bert_folder), "engines": "2", "ray_cpus": 0.5}
    port = find_port()
    config = {
        "http_options": {"host": "127.0.0.1", "port": port},
        "applications": [
            {
                "name": "inlay",
                "route_prefix": "/",
                "import_path": "inlay.service.on_ray.serve_app:build",
                "args": options,
                "runtime_env": {"env_vars": variables},
                "deployments": [{"name": "Gateway", "num_replicas": 2, "ray_actor_options": {"num_cpus": 0}}],
            }
        ],
    }
    (disks / "serve.yaml").write_text(yaml.safe_dump(config))
    command = [str(Path(sys.executable).with_name("serve")), "run", str(disks / "serve.yaml")]
    with (disks / "serve.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=disks)
    url = f"http://127.0.0.1:{port}"

    def is_ready() -> bool:
        assert process.poll() is None, (disks / "serve.log").read_text()[-3000:]
        try:
            return httpx.get(f"{url}/readyz", timeout=5.0).status_code == 200
        except httpx.HTTPError:
            return False

    try:
        wait_until(is_ready, "the application", READY_S, 0.5)
        yield url, key
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(READY_S)


def test_a_serve_application_answers_trains_and_takes_its_engines_along(store, application, nodes):
    url, key = application
    with httpx.Client(base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=60.0) as client:
        body = {"task": TASK, "rows": ["refund charge 3"]}
        live = max(info.version.number for info in store.versions(TASK))
        answers = [client.post("/v1/predict", json=body).raise_for_status().json()["answers"][0] for _ in range(20)]
        check_same(answers, answers[0])
        assert answers[0]["version"] in (f"{TASK}@{live}", f"{TASK}@{live - 1}")
        assert httpx.post(f"{url}/v1/predict", json=body, timeout=60.0).status_code == 401
        assert client.post("/v1/predict", json={"task": "nobody", "rows": ["x"]}).json()["code"] == "unknown-name"

        content = "text,label\n" + "".join(f"{text},{label}\n" for text, label in ROWS * 200)
        sent = client.post("/v1/datasets", files={"file": ("desk.csv", content, "text/csv")}).raise_for_status().json()
        settings = {"method": "houlsby", "size": 8, "epochs": 1, "lr": 0.003, "max_length": 16}
        job = {"task": "through-serve", "dataset": sent["id"], "settings": settings, "publish": "always"}
        path = client.post("/v1/jobs", json=job).raise_for_status().headers["location"]
        done = wait_until(lambda: (one := client.get(path).json())["state"] in DONE and one, "the job", READY_S, 0.5)
        assert done["state"] == "succeeded", done
        body = {"task": "through-serve", "rows": ["refund charge 3"]}
        wait_until(lambda: client.post("/v1/predict", json=body).status_code == 200, "its answer", LIVE_S)
        members = [name for role in ("engine", "trainer") for name in find_processes(role)]
        assert len(members) == 3


def test_after_the_application_nothing_is_left(nodes):
    wait_until(lambda: not find_processes("engine") + find_processes("trainer"), "the end of all members", 120.0)
