"""A customer of a running service who keeps a ledger of every 2xx, and checks it afterwards.

What was acknowledged must be there, once. A call whose answer was lost is sent again with the same idempotency key, as
a careful client does; what it asked for must then be there once too.
"""

from __future__ import annotations

import hashlib
import random
import threading
import time
import uuid
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx

PATIENCE_S = 120.0
"""how long one call is repeated while the service is away"""
WORDS = "parcel late refund broken thanks love slow crash invoice quick kind rude lost friendly damaged".split()
LABELS = ("praise", "complaint", "question")
DONE = ("succeeded", "failed", "cancelled")


class Stopped(Exception):
    """The attack is over while a call was being repeated."""


@dataclass
class Ledger:
    """What the service acknowledged. Every container is only added to, each by one thread."""

    datasets: dict[str, tuple[str, str]] = field(default_factory=dict)
    """idempotency key -> id and sha256"""
    deleted: set[str] = field(default_factory=set)
    jobs: dict[str, tuple[str, str]] = field(default_factory=dict)
    """idempotency key -> id and task"""
    cancelled: set[str] = field(default_factory=set)
    feedback: dict[str, str] = field(default_factory=dict)
    """a correction's text -> the task"""
    moves: list[tuple[str, int, str]] = field(default_factory=list)
    """task, version and reason of each move of `live`"""
    erased: dict[str, str] = field(default_factory=dict)
    """task -> the job that erased it"""
    gone_with_tasks: set[str] = field(default_factory=set)
    """datasets that only erased tasks were trained on: erasing may take them along"""
    labels: dict[tuple[str, str], str] = field(default_factory=dict)
    """version and text -> the label it answered first"""
    wrong: list[str] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)


class Customer:
    """One client of the service: calls that are repeated, and actions chosen by chance."""

    def __init__(self, url: str, key: str | None, seed: str, ledger: Ledger, *, tasks: tuple[str, ...]) -> None:
        self.ledger, self.tasks, self.chance = ledger, tasks, random.Random(seed)
        self.stopping = threading.Event()
        self._seed = 0
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._client = httpx.Client(base_url=url, headers=headers, timeout=15.0)

    def close(self) -> None:
        self._client.close()

    def first_seed(self, seed: int) -> None:
        """Train runs of this seed and the following ones."""
        self._seed = seed

    def call(self, method: str, path: str, *, once: bool = False, **more: Any) -> httpx.Response:
        """Send a call until it gets an answer that is final; with `once`, try once. 5xx but 503 and 507 are wrong."""
        until = time.monotonic() + PATIENCE_S
        while True:
            try:
                response = self._client.request(method, path, **more)
                self.ledger.statuses[f"{response.status_code}"] += 1
                if response.status_code in (500, 502, 504):
                    self.ledger.wrong.append(f"{method} {path}: {response.status_code} {response.text[:300]}")
                in_flight = response.status_code == 409 and "request-in-flight" in response.text
                if response.status_code not in (429, 503) and not in_flight:
                    return response
            except httpx.TransportError as error:
                self.ledger.statuses[type(error).__name__] += 1
            if once:
                raise Stopped
            if time.monotonic() > until:
                self.ledger.wrong.append(f"{method} {path}: no answer in {PATIENCE_S:g} s")
                raise Stopped
            time.sleep(self.chance.uniform(0.05, 0.3))

    def run(self) -> None:
        """Act by chance until stopped; the present action is finished."""
        while not self.stopping.is_set():
            weights = {self.predict: 30, self.train: 3, self.correct: 5, self.move: 4, self.forget: 1, self.cancel: 1}
            (action,) = self.chance.choices(list(weights), list(weights.values()))
            try:
                action()
            except Stopped:
                continue
            time.sleep(0.02)

    def make_rows(self, number: int) -> str:
        """A small CSV that no other call has."""
        rows = ["text,label"]
        for index in range(number):
            label = index % len(LABELS)
            words = self.chance.choices(WORDS[label * 5 : label * 5 + 5], k=4)
            rows.append(f"{' '.join(words)} {self.chance.randrange(10**9)},{LABELS[label]}")
        return "\n".join(rows) + "\n"

    def upload(self) -> str:
        """Upload a dataset; its id."""
        content, key = self.make_rows(24).encode(), str(uuid.uuid4())
        response = self.call(
            "POST", "/v1/datasets", files={"file": ("rows.csv", content, "text/csv")}, headers={"idempotency-key": key}
        )
        self._expect(response, 201)
        found = response.json()
        digest = hashlib.sha256(content).hexdigest()
        if found["sha256"] != digest:
            self.ledger.wrong.append(f"dataset {found['id']}: sha256 {found['sha256']}, sent {digest}")
        self.ledger.datasets[key] = (found["id"], digest)
        return str(found["id"])

    def train(self, task: str | None = None) -> str:
        """Upload rows and ask for a version trained on them; the job's id."""
        dataset, key = self.upload(), str(uuid.uuid4())
        task = task or self.chance.choice(self.tasks)
        self._seed += 1
        settings = {"method": "houlsby", "size": 8, "epochs": 1, "lr": 0.003, "seed": self._seed, "max_length": 16}
        body = {"task": task, "dataset": dataset, "settings": settings, "publish": "always"}
        response = self.call("POST", "/v1/jobs", json=body, headers={"idempotency-key": key})
        self._expect(response, 202)
        self.ledger.jobs[key] = (response.json()["id"], task)
        return str(response.json()["id"])

    def predict(self) -> None:
        """Ask a few rows of several tasks; every answer names its version, which always says the same."""
        tasks = self.chance.choices(self.tasks, k=self.chance.choice((1, 1, 4)))
        rows = [{"task": task, "text": " ".join(self.chance.choices(WORDS, k=2))} for task in tasks]
        response = self.call("POST", "/v1/predict", json={"rows": rows}, once=True)
        if response.status_code != 200:
            return self._expect(response, 404)
        answers = response.json()["answers"]
        if len(answers) != len(rows):
            self.ledger.wrong.append(f"{len(rows)} rows, {len(answers)} answers")
        for row, answer in zip(rows, answers, strict=False):
            self._check_answer(row["task"], row["text"], answer)
        return None

    def _check_answer(self, task: str, text: str, answer: dict[str, Any]) -> None:
        if "version" not in answer:
            code = answer["error"]["code"]
            if code not in ("unknown-name", "engine-away", "engine-busy"):
                self.ledger.wrong.append(f"{task}: {answer}")
            return
        name, _, number = answer["version"].partition("@")
        if name != task or not number.isdigit():
            self.ledger.wrong.append(f"asked {task}, answered by {answer['version']}")
        label = self.ledger.labels.setdefault((answer["version"], text), answer["label"])
        if label != answer["label"]:
            self.ledger.wrong.append(f"{answer['version']} said {label} and then {answer['label']}")

    def correct(self) -> None:
        """Send a correction that no other call has."""
        task, key = self.chance.choice(self.tasks), str(uuid.uuid4())
        text = f"correction {key}"
        items = [{"text": text, "label": self.chance.choice(LABELS)}]
        path = f"/v1/tasks/{task}/feedback"
        response = self.call("POST", path, json={"items": items}, headers={"idempotency-key": key})
        if response.status_code != 404:
            self._expect(response, 201)
            self.ledger.feedback[text] = task

    def move(self) -> None:
        """Move `live` to any version, if nobody moved it meanwhile."""
        task = self.chance.choice(self.tasks)
        response = self.call("GET", f"/v1/tasks/{task}/versions")
        if response.status_code == 404:
            return
        versions = [each["version"] for each in response.json()["items"]]
        alias = self.call("GET", f"/v1/tasks/{task}/aliases/live")
        if alias.status_code != 200:
            return
        others = [number for number in versions if number != alias.json()["version"]]  # to where it is, is no move
        if not others:
            return
        number, reason = self.chance.choice(others), f"move {uuid.uuid4()}"
        response = self.call(
            "PUT",
            f"/v1/tasks/{task}/aliases/live",
            json={"version": number, "reason": reason},
            headers={"if-match": alias.json()["etag"]},
            once=True,
        )
        if response.status_code != 412:
            self._expect(response, 200)
            self.ledger.moves.append((task, number, reason))

    def forget(self) -> None:
        """Delete a dataset that no job needs."""
        dataset = self.upload()
        response = self.call("DELETE", f"/v1/datasets/{dataset}")
        if response.status_code != 404:  # a lost answer's second try
            self._expect(response, 204)
        self.ledger.deleted.add(dataset)

    def cancel(self) -> None:
        """Cancel a job that was just asked for."""
        job = self.train()
        self._expect(self.call("POST", f"/v1/jobs/{job}/cancel"), 202)
        self.ledger.cancelled.add(job)

    def erase(self, task: str) -> None:
        """Train a task of its own, and erase it."""
        before = {identity for identity, _ in self.ledger.datasets.values()}
        self.wait_for_job(self.train(task))
        self.ledger.gone_with_tasks |= {identity for identity, _ in self.ledger.datasets.values()} - before
        response = self.call("DELETE", f"/v1/tasks/{task}", headers={"idempotency-key": str(uuid.uuid4())})
        if response.status_code != 404:
            self._expect(response, 202)
            self.ledger.erased[task] = response.json()["id"]

    def wait_for_job(self, job: str, patience_s: float = 300.0) -> dict[str, Any]:
        """Wait until a job has ended."""
        until = time.monotonic() + patience_s
        while True:
            found = self.call("GET", f"/v1/jobs/{job}").json()
            if found["state"] in DONE:
                return dict(found)
            if time.monotonic() > until:
                self.ledger.wrong.append(f"{job} has not ended in {patience_s:g} s: {found['state']}")
                return dict(found)
            time.sleep(0.2)

    def list_all(self, path: str) -> list[dict[str, Any]]:
        """All items of a list, page by page."""
        items: list[dict[str, Any]] = []
        cursor = None
        while True:
            page = self.call("GET", path, params={"cursor": cursor} if cursor else {})
            self._expect(page, 200)
            items += page.json()["items"]
            cursor = page.json()["next_cursor"]
            if cursor is None:
                return items

    def _expect(self, response: httpx.Response, status: int) -> None:
        if response.status_code != status:
            request = response.request
            self.ledger.wrong.append(
                f"{request.method} {request.url.path}: {response.status_code}, not {status}: {response.text[:300]}"
            )
            raise Stopped


def check_ledger(customer: Customer, ledger: Ledger) -> list[str]:
    """Compare a quiet service with what it acknowledged; what is lost, or there twice."""
    problems = list(ledger.wrong)
    for job in ledger.erased.values():
        customer.wait_for_job(job)
    jobs = {each["id"]: each for each in customer.list_all("/v1/jobs")}
    for job, task in ledger.jobs.values():
        if task in ledger.erased:
            problems += [f"{job} of the erased {task} is there"] if job in jobs else []
            continue
        state = jobs.get(job, {}).get("state", "lost")
        if state not in ("succeeded", *(("cancelled",) if job in ledger.cancelled else ())):
            problems.append(f"{job} of {task}: {state} {jobs.get(job, {}).get('error')}")
    twice = Counter(job for job, _ in ledger.jobs.values())
    problems += [f"{job} answers {number} calls" for job, number in twice.items() if number > 1]
    asked = {job for job, _ in ledger.jobs.values()} | set(ledger.erased.values())
    problems += [f"{job} was made for a call that had another" for job in jobs.keys() - asked]
    problems += _check_versions(customer, ledger, jobs)
    problems += _check_rows(customer, ledger)
    return problems


def _check_versions(customer: Customer, ledger: Ledger, jobs: dict[str, dict[str, Any]]) -> list[str]:
    problems = []
    for task in customer.tasks:
        mine = [jobs[job] for job, name in ledger.jobs.values() if name == task and job in jobs]
        made = Counter(each["result"]["version"] for each in mine if each["state"] == "succeeded")
        found = [each["version"] for each in customer.list_all(f"/v1/tasks/{task}/versions")] if made else []
        problems += [f"{task}@{number} is of {count} jobs" for number, count in made.items() if count > 1]
        problems += [f"{task}@{number} is lost" for number in made.keys() - set(found)]
        unasked = set(found) - made.keys()
        late = [each for each in mine if each["state"] == "cancelled"]  # cancelled when it was published already
        if len(unasked) > len(late):
            problems.append(f"{task}: versions {sorted(unasked)} belong to no job")
        moves = customer.list_all(f"/v1/tasks/{task}/aliases/live/history") if made else []
        reasons = Counter(each["reason"] for each in moves)
        for name, number, reason in ledger.moves:
            if name == task and reasons[reason] != 1:
                problems.append(f"the move of {task} to {number} is in the history {reasons[reason]} times")
    return problems


def _check_rows(customer: Customer, ledger: Ledger) -> list[str]:
    found = {each["id"]: each for each in customer.list_all("/v1/datasets")}
    found = {identity: each for identity, each in found.items() if identity not in ledger.gone_with_tasks}
    away = ledger.deleted | ledger.gone_with_tasks
    kept = {identity: digest for identity, digest in ledger.datasets.values() if identity not in away}
    problems = [f"dataset {identity} is lost" for identity in kept.keys() - found.keys()]
    problems += [f"dataset {identity} was not asked for, or deleted" for identity in found.keys() - kept.keys()]
    problems += [f"dataset {one} changed" for one in kept.keys() & found.keys() if found[one]["sha256"] != kept[one]]
    for task in customer.tasks:
        listed = customer.call("GET", f"/v1/tasks/{task}")
        there = (
            Counter(each["text"] for each in customer.list_all(f"/v1/tasks/{task}/feedback"))
            if (listed.status_code == 200)
            else Counter()
        )
        mine = {text for text, name in ledger.feedback.items() if name == task}
        problems += [f"a correction of {task} is there {there[text]} times" for text in mine if there[text] != 1]
    for task in ledger.erased:
        if customer.call("GET", f"/v1/tasks/{task}").status_code != 404:
            problems.append(f"{task} was erased and is there")
    return problems
