"""Every page renders what there is, escapes it, obeys its own policy, and can be used without JavaScript."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from page_bench import BASE, QUICK, make_csv, read_tags

from inlay.service.page.rendering import FOLDER

STATIC, TEMPLATES = FOLDER / "static", FOLDER / "templates"
PAGES = (
    "/", "/new", "/jobs", "/tasks/mail", "/tasks/mail/versions/1", "/tasks/mail/versions/2", "/tasks/mail/try",
    "/tasks/mail/label", "/tasks/mail/compare", "/tasks/mail/settings", "/account", "/operator",
    "/operator/tenants/local", "/sign-in",
)  # fmt: skip
HOSTILE = '"><img src=x onerror=alert(1)><script>alert(2)</script>'


@pytest.mark.parametrize("path", PAGES)
def test_a_page_is_whole_and_keeps_to_its_policy(trained, path):
    response = trained.client.get(path)
    assert response.status_code == 200, response.text
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self'" in policy
    assert "unsafe" not in policy
    assert response.headers["referrer-policy"] == "same-origin"  # without one, forms would name no origin
    assert response.headers["cache-control"] == "no-store"
    tags = read_tags(response.text)
    names = [tag for tag, _ in tags]
    assert names.count("h1") == 1
    assert names.count("main") == 1
    assert "style" not in names
    for tag, attributes in tags:
        assert "style" not in attributes, (tag, attributes)
        assert not [name for name in attributes if name.startswith(("on", "hx-on"))], (tag, attributes)
        assert tag != "script" or attributes.get("src", "").startswith("/static/"), attributes
        if tag == "form" and attributes.get("method") == "post":
            assert attributes["action"].startswith("/"), attributes


@pytest.mark.parametrize("path", PAGES)
def test_what_can_be_filled_in_has_a_label_and_what_a_page_links_to_is_there(trained, path):
    page = trained.get(path)
    tags = read_tags(page)
    labelled = {attributes.get("for") for tag, attributes in tags if tag == "label"}
    for tag, attributes in tags:
        if tag in ("select", "textarea") or (tag == "input" and attributes.get("type") in ("text", "password", "file")):
            assert attributes.get("id") in labelled, attributes
    ids = [attributes["id"] for _, attributes in tags if "id" in attributes]
    assert len(ids) == len(set(ids)), [name for name in ids if ids.count(name) > 1]
    links = {attributes.get("href") or "" for tag, attributes in tags if tag == "a"}
    for link in sorted(link.partition("#")[0] for link in links if link.startswith("/")):
        assert trained.client.get(link).status_code == 200, link


def test_no_template_switches_escaping_off():
    for path in TEMPLATES.glob("*.html"):
        text = path.read_text(encoding="utf8")
        assert "|safe" not in text.replace(" ", ""), path.name
        assert "autoescape" not in text, path.name
        assert not re.search(r"style=|<style|<script(?! src)|\son\w+=|javascript:", text), path.name


def test_hostile_names_labels_and_texts_are_shown_as_they_are(bench):
    label = HOSTILE.replace('"', "'")
    rows = make_csv(40).decode().splitlines()
    content = "\n".join(
        [f"text,{label}", *(row.replace("billing", label) for row in rows[1:]), f"<b>{label}</b>,delivery"]
    )
    found = bench.upload(content.encode(), f"{label}.csv")
    page = bench.get(found)
    job = bench.post(f"{found}/reading", {"label": label, "text": "text", "kind": "auto", "task": "mail"})
    shown = [page, job.text]
    sent = bench.post(found, {"task": "mail", "label": label, "text": "text", "publish": "always", **QUICK})
    assert sent.status_code == 303, sent.text
    bench.train()
    shown += [bench.get(path) for path in (sent.headers["location"], "/", "/jobs", "/tasks/mail", "/tasks/mail/label")]
    shown += [bench.get("/tasks/mail/versions/1"), bench.post("/tasks/mail/try", {"text": HOSTILE}).text]
    shown += [bench.post("/tasks/mail/versions/1/words", {"text": HOSTILE + " and more words"}).text]
    shown += [bench.post("/tasks/mail/label/own", {"texts": HOSTILE}).text]
    shown += [bench.client.get("/tasks/" + "%3Cscript%3Ealert(1)").text]
    for page in shown:
        tags = read_tags(page)
        assert not [tag for tag, _ in tags if tag in ("img", "style")]
        assert all(attributes.get("src") for tag, attributes in tags if tag == "script")
        assert not [name for _, attributes in tags for name in attributes if name.startswith("on")]
    assert "&lt;img" in "".join(shown)


def test_what_others_wrote_is_whole_and_has_its_licence():
    vendor = STATIC / "vendor"
    versions = json.loads((vendor / "versions.json").read_text())
    for name, about in versions.items():
        assert hashlib.sha256((vendor / name).read_bytes()).hexdigest() == about["sha256"], name
        assert (vendor / f"{name.split('.')[0]}.LICENSE.txt").read_text()
    others = {path.name for path in vendor.iterdir()} - set(versions) - {"versions.json"}
    assert others == {f"{name.split('.')[0]}.LICENSE.txt" for name in versions}


def test_static_files_are_kept_by_browsers_and_nothing_else_is_served(trained):
    page = trained.get("/sign-in")
    addresses = [attributes.get("src") or attributes.get("href") for tag, attributes in read_tags(page)]
    for address in {address for address in addresses if address and address.startswith("/static/")}:
        response = trained.client.get(address)
        assert response.status_code == 200, address
        assert "immutable" in response.headers["cache-control"]
    for path in ("/static/../page_call.py", "/static/%2e%2e/page_call.py", "/static/vendor", "/static/nothing.js"):
        assert trained.client.get(path).status_code == 404, path


def test_the_page_imports_nothing_heavy():
    program = "import sys, inlay.service.web.app\nprint([n for n in ('torch', 'numpy', 'pandas') if n in sys.modules])"
    environment = {"PYTHONPATH": str(Path(FOLDER).parents[2])}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == "[]", done.stderr


def test_another_site_cannot_send_forms(bench):
    for headers in ({"origin": "https://evil.example"}, {"sec-fetch-site": "cross-site"}, {"origin": "null"}):
        response = bench.client.post("/new/example", data={"go": "train"}, headers=headers)
        assert response.status_code == 403, headers
        assert "another site" in response.text
    assert not bench.workspace.jobs().items
    foreign = bench.client.get("/", headers={"host": "evil.example"})
    assert foreign.status_code == 400


def test_what_is_not_there_is_a_page_that_says_so(trained):
    for path in ("/tasks/nothing", "/jobs/job_nothing", "/new/ds_nothing", "/tasks/mail/versions/99"):
        page = trained.get(path, 404)
        assert "<h1>Not found</h1>" in page
        assert "/v1/" not in page


def test_a_failure_nobody_foresaw_is_a_page_that_tells_nothing(trained, monkeypatch):
    def fail(*arguments):
        raise RuntimeError("secret words")

    monkeypatch.setattr("inlay.service.views.describe_tasks", fail)
    page = trained.get("/", 500)
    assert "secret words" not in page
    assert "Request <code>req_" in page


def test_a_part_of_a_page_that_fails_shows_the_reason_as_a_whole_page(trained):
    response = trained.client.get("/jobs/job_gone", headers={"hx-request": "true"})
    assert response.headers["hx-retarget"] == "#main"
    assert response.headers["hx-reselect"] == "#main > *"


def test_the_first_page_offers_a_file_and_the_data_that_came_along(bench):
    page = bench.get("/")
    assert "Make your first task" in page
    assert "5,574 text messages" in page
    looked = bench.post("/new/example", {"go": "look"})
    assert looked.headers["location"].startswith("/new/ds_")
    found = bench.get(looked.headers["location"])
    assert "ham" in found
    assert 'value="sms-spam"' in found
    trained = bench.post("/new/example", {"go": "train"})
    job = bench.workspace.jobs().items[0]
    assert trained.headers["location"] == f"/jobs/{job.id}"
    assert (job.task, job.state) == ("sms-spam", "queued")
    assert "Make your first task" not in bench.get("/")


def test_addresses_of_the_service_are_those_the_browser_knows(trained):
    page = trained.post("/tasks/mail/try", {"text": "where is it"}).text
    assert f"{BASE}/v1/predict" in page


def test_an_unknown_address_is_a_page_to_a_browser_and_a_problem_to_a_program(trained):
    browser = {"accept": "text/html,*/*"}
    page = trained.client.get("/tasks/mail/nothing", headers=browser)
    assert (page.status_code, page.headers["content-type"]) == (404, "text/html; charset=utf-8")
    assert 'href="/jobs"' in page.text  # the menu leads on
    for path, accept in (("/nothing", "*/*"), ("/v1/nothing", browser["accept"])):
        problem = trained.client.get(path, headers={"accept": accept})
        assert (problem.status_code, problem.json()["code"]) == (404, "no-route")
    assert trained.client.get("/v1/predict", headers=browser).status_code == 405


def test_a_correction_that_was_saved_can_be_changed(bench):
    bench.train_file(make_csv(60))
    sent = {"text": "never seen before", "label": "billing", "answered": "delivery"}
    saved = bench.post("/tasks/mail/label", sent, headers={"hx-request": "true"}).text
    assert "Saved as billing." in saved
    form = saved[saved.index('id="just-saved"') :]
    assert {"billing", "delivery"} <= {tag.get("value") for _, tag in read_tags(form)}
    bench.post("/tasks/mail/label", sent | {"label": "delivery"})
    assert bench.workspace.feedback("mail", 1).items[0].correction.label == "delivery"
