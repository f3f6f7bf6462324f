"""Two machines over one Postgres and one bucket: what one begins another goes on with. `make postgres` runs it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from inlay.store import Store
from running_service import RunningService, wait_until

sys.path += [str(Path(__file__).parent / "state"), str(Path(__file__).parents[1] / "store")]
from bucket_server import BUCKET, KEYS, serve_bucket
from postgres_server import IS_POSTGRES, drop_database, make_database, url_of

pytest.importorskip("obstore")
pytest.importorskip("moto.server")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not IS_POSTGRES, reason="`make postgres` runs it")]

PLACE = f"s3://{BUCKET}/service"
WORDS = (("refund charge", "billing"), ("crash login", "support"))
ROWS = "text,label\n" + "".join(f"{word} {index},{label}\n" for index in range(30) for word, label in WORDS)
QUICK = {"method": "houlsby", "size": 8, "epochs": 1, "lr": 0.003, "max_length": 16}
ENDED = {"succeeded", "failed", "cancelled"}


@pytest.fixture(scope="module")
def shared() -> Iterator[dict[str, str]]:
    """The variables that all machines have: one bucket, one database."""
    name = make_database()
    with serve_bucket() as address:
        yield {**KEYS, "AWS_ENDPOINT_URL": address, "INLAY_DATABASE": url_of(name)}
    drop_database(name)


def machine(name: str, shared: dict[str, str], folder: Path, backbone: Path, *flags: str) -> RunningService:
    """A machine of its own: nothing of its disk is another's."""
    local = folder / name
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("INLAY_LOCAL", str(local))
        home = Store(PLACE).root
    home.parent.mkdir(parents=True, exist_ok=True)
    service = RunningService(home, backbone, "--store", PLACE, *flags)
    service.patience_s = 300.0  # three services on one machine
    service.environment = {**shared, "INLAY_LOCAL": str(local)}
    return service


def upload(service: RunningService) -> str:
    files = {"file": ("desk.csv", ROWS, "text/csv")}
    sent = httpx.post(f"{service.url}/v1/datasets", files=files, timeout=60)
    assert sent.status_code == 201, sent.text
    return str(sent.json()["id"])


def submit(service: RunningService, dataset: str, task: str = "desk", **settings: object) -> str:
    body = {"task": task, "dataset": dataset, "settings": {**QUICK, **settings}, "publish": "always"}
    asked = httpx.post(f"{service.url}/v1/jobs", json=body, timeout=60)
    assert asked.status_code == 202, asked.text
    return str(asked.headers["location"])


def wait_for(service: RunningService, job: str) -> dict:
    def has_ended() -> dict | None:
        found = httpx.get(f"{service.url}{job}", timeout=60).json()
        return found if found["state"] in ENDED else None

    return wait_until(has_ended, f"the end of {job}", 300.0, 0.5)


def ask(service: RunningService, task: str = "desk") -> dict:
    body = {"task": task, "rows": ["refund charge 3", "crash login 4"]}
    response = httpx.post(f"{service.url}/v1/predict", json=body, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()["answers"]


def texts_under(folder: Path) -> list[Path]:
    """The files of a machine that have a customer's text."""
    return [path for path in folder.rglob("*") if path.is_file() and b"refund charge 7" in path.read_bytes()]


def test_what_one_machine_begins_another_goes_on_with(shared, tmp_path, tiny_bert_folder):
    first = machine("a", shared, tmp_path, tiny_bert_folder, "--no-train")
    second = machine("b", shared, tmp_path, tiny_bert_folder)
    with first, second:
        # 1. upload through one, train by the other, ask both
        dataset = upload(first)
        assert not texts_under(tmp_path / "a")
        job = wait_for(first, submit(first, dataset))
        assert job["state"] == "succeeded", job
        answers = ask(first)
        assert answers == ask(second)
        assert [answer["version"] for answer in answers] == ["desk@1"] * 2
        report = httpx.get(f"{first.url}/v1/tasks/desk/versions/1/report", timeout=60)
        assert report.status_code == 200, report.text
        # 2. an offline batch: its output comes from either
        body = {"task": "desk", "dataset": dataset}
        batch = httpx.post(f"{first.url}/v1/batches", json=body, timeout=60).headers["location"]
        job = wait_for(first, batch.replace("batches", "jobs"))
        assert job["state"] == "succeeded", job
        outputs = {httpx.get(f"{each.url}{job['result']['output']}", timeout=60).content for each in (first, second)}
        assert len(outputs) == 1
        lines = outputs.pop().splitlines()
        assert len(lines) == job["result"]["rows"] == 60
        # 3. a machine dies in the middle of a training; the other goes on from what it kept
        undisturbed = wait_for(first, submit(first, dataset, "calm", epochs=40))
        second_job = submit(first, dataset, "hurt", epochs=40)

        def is_kept() -> bool:
            kept = Store(PLACE).storage.list("service/runs/")
            return any(each.key.endswith("list.json") for each in kept)

        with pytest.MonkeyPatch.context() as patch:
            for name, value in shared.items():
                patch.setenv(name, value)
            wait_until(is_kept, "a resume state in the bucket", 120.0, 0.1)
        second.kill("supervisor")
        assert httpx.get(f"{first.url}{second_job}", timeout=60).json()["state"] in ("running", "queued")
        third = machine("c", shared, tmp_path, tiny_bert_folder)
        with third:
            job = wait_for(third, second_job)
            assert job["state"] == "succeeded", job
            told = httpx.get(f"{first.url}{second_job}/events", params={"limit": 200}, timeout=60).text
            assert "training goes on where it was stopped" in told
            assert job["result"]["metrics"] == undisturbed["result"]["metrics"]
            assert ask(first, "hurt") == ask(third, "hurt")
            # 4. what is erased is gone from the bucket
            gone = httpx.delete(f"{first.url}/v1/tasks/hurt", timeout=60)
            assert gone.status_code == 202, gone.text
