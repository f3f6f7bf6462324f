"""Two tenants side by side: all that one has is marked, so that it is seen if it shows in answers to the other."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from starlette.testclient import TestClient
from web_bench import WebBench

from inlay.reports import EvaluatedRow, Evaluation
from inlay.service.state import SUCCEEDED, Correction, JobQueue
from inlay.service.version_evaluations import write_evaluation

MARK = "zanzibar"
"""a word in every text, label and name of the first tenant"""
JSON = {"content-type": "application/json"}


@dataclass
class TwoTenants:
    """An app with a tenant that has one of everything, and another that has nothing but a task of the same name."""

    bench: WebBench
    owner: TestClient
    other: TestClient
    ids: dict[str, str]
    """what path parameters stand for in the owner's routes"""
    hidden: set[str]
    """ids that only the owner may see"""

    def check_hidden(self, answer: Any) -> None:
        """Fail if an answer to the other tenant shows anything of the owner's."""
        text = answer.text if isinstance(answer.text, str) else str(answer.text)
        shown = [word for word in (MARK, "acme", *self.hidden) if word in text]
        assert not shown, f"{answer.status_code}: {shown} in {text[:500]}"


def make_two_tenants(bench: WebBench) -> TwoTenants:
    """Fill a bench."""
    owner, other = bench.add_tenant("acme"), bench.add_tenant("globex")
    for tenant in ("acme", "globex"):
        bench.store_task(tenant, "mail")
    task = f"mail-{MARK}"
    bench.store_task("acme", task)
    content = "text,label\n" + "".join(f"{MARK} {word} {n},{MARK}-{word}\n" for n in range(20) for word in ("a", "b"))
    made = owner.post(f"/v1/datasets?name={MARK}.csv", content=content.encode(), headers={"content-type": "text/csv"})
    dataset = made.json()["id"]
    job = owner.post("/v1/jobs", json={"task": task, "dataset": dataset, "settings": {"text": "text"}}).json()["id"]
    batch = owner.post("/v1/batches", json={"task": task, "dataset": dataset}).json()["id"]
    queue = JobQueue(bench.db)
    cohort = queue.claim("tests", kinds=("batch",), company_s=0.0)
    assert cohort is not None
    path = bench.db.paths.batch("acme", batch)
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"line": 2, "label": MARK}) + "\n")
    queue.finish(cohort, batch, SUCCEEDED, result={"rows": 1})
    bench.workspace("acme").add_feedback(task, [Correction(f"{MARK} text", f"{MARK}-a")])
    key = owner.post("/v1/keys", json={"name": MARK}).json()["id"]
    _evaluate(bench, task)
    ids = {"task": task, "dataset": dataset, "job": job, "version": "1", "key": key}
    return TwoTenants(bench, owner, other, ids, {dataset, job, batch, key, task})


def _evaluate(bench: WebBench, task: str) -> None:
    rows = tuple(
        EvaluatedRow(line, f"{MARK} {line}", None, "ham", ("ham", "spam")[line % 2], 0.7, line % 2 == 0)
        for line in range(2, 30)
    )
    about = Evaluation(1, "classify", ("ham", "spam"), (), "accuracy", {"dev": {"accuracy": 0.5}}, "dev", 28, rows)
    write_evaluation(bench.db.files.evaluations("acme", task), about)
