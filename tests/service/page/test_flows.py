"""What a person does on the pages, by forms alone: from a file to a live version, corrected, compared, rolled back."""

from __future__ import annotations

import ast
import json
import re
import shlex
from html import unescape

import pytest
from page_bench import OWN, QUICK, make_csv

from inlay.service.state import Keys, Tenants


def text_of(page: str) -> str:
    """The words of a page's main part."""
    main = re.search(r"<main.*</main>", page, re.DOTALL)
    assert main is not None
    return unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", main[0])))


def test_a_file_is_read_and_what_was_found_is_shown_with_lines(bench):
    content = make_csv(30).decode() + "a text without a label,\n"
    said = text_of(bench.get(bench.upload(content.encode())))
    assert "31 rows, 2 columns" in said
    assert re.search(r"2 labels (billing|delivery)", said)
    assert re.search(r"line 32|:32", said), said
    assert re.search(r"Takes (less than a minute|up to|\d)", said)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("empty.csv", b"", "empty"),
        ("picture.png", b"\x89PNG", "format of the file is not known"),
        ("header.csv", b"text,label\n", "no rows"),
        ("broken.xlsx", b"PK\x03\x04 not a workbook", ""),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_where_it_was_chosen(bench, name, content, said):
    response = bench.post("/new", files={"file": (name, content)})
    assert 400 <= response.status_code < 500
    assert 'role="alert"' in response.text
    assert said in response.text
    assert 'id="file"' in response.text
    assert not bench.workspace.datasets().items


def test_a_script_that_uploads_is_told_where_to_go(bench):
    response = bench.post("/new?task=mail", files={"file": ("mail.csv", make_csv())}, headers={"x-upload": "page"})
    assert response.status_code == 201
    assert re.fullmatch(r"/new/ds_\w+\?task=mail", response.headers["x-next"])


def test_other_columns_can_be_chosen(bench):
    rows = make_csv(40).decode().splitlines()[1:]
    lines = ["a,b,c", *(f"{row.rpartition(',')[0]},noise {n},{row.rpartition(',')[2]}" for n, row in enumerate(rows))]
    found = bench.upload("\n".join(lines).encode())
    page = bench.get(found)
    assert "Choose the columns first" in page
    assert re.search(r'<button class="first" disabled', page)
    response = bench.post(f"{found}/reading", {"text": "a", "label": "c", "kind": "auto", "task": "mine"})
    assert response.status_code == 200
    assert 'value="mine"' in response.text
    assert "2 labels" in response.text
    sent = bench.post(found, {"task": "mine", "text": "a", "label": "c", "kind": "auto", "publish": "always"})
    assert sent.status_code == 303
    assert bench.workspace.jobs().items[0].task == "mine"


def test_wrong_entries_are_told_at_their_fields_and_nothing_is_lost(bench):
    found = bench.upload(make_csv())
    response = bench.post(found, {"task": "My Task!", "epochs": "many", "lr": "0.1", "publish": "never"})
    assert response.status_code == 422
    page = response.text
    assert 'id="task-fault" role="alert"' in page
    assert 'id="epochs-fault" role="alert"' in page
    assert 'value="My Task!"' in page
    assert 'value="0.1"' in page
    assert re.search(r'value="never" checked', page)
    refused = bench.post(found, {"task": "mail", "epochs": "100000"})
    assert refused.status_code == 422
    assert 'id="epochs-fault" role="alert">It must be a whole number from 1 to 200' in refused.text
    assert not bench.workspace.jobs().items


def test_a_job_shows_its_place_its_curve_and_its_log_as_it_goes(bench):
    found = bench.upload(make_csv())
    first = bench.post(found, {"task": "one", **QUICK}).headers["location"]
    second = bench.post(found, {"task": "two", **QUICK}).headers["location"]
    assert "2nd in the queue" in bench.get(second)
    assert "2nd in the queue" in bench.get("/")
    page = bench.get(first)
    seen = re.search(r"seen=([^\"]+)\"", page)[1]
    assert bench.client.get(f"{first}?seen={seen}").status_code == 204
    bench.train()
    later = bench.get(f"{first}?seen={seen}")
    assert "Put into the queue" not in later  # only what is new
    assert "Round 2:" in later
    assert 'hx-trigger="every 1s"' not in later
    assert "Version 1 is live" in later
    whole = bench.get(first)
    assert whole.index("Put into the queue") < whole.index("Its turn has come") < whole.index("Round 1:")
    points = json.loads(unescape(re.search(r'data-points="([^"]*)"', whole)[1]))
    assert points["rounds"][-2:] == [1.0, 2.0]
    assert all(0 <= score <= 1 for score in points["scores"])


def test_a_job_can_be_cancelled(bench):
    job = bench.post(bench.upload(make_csv()), {"task": "mail", **QUICK}).headers["location"]
    response = bench.post(f"{job}/cancel")
    assert response.status_code == 303
    assert "It was cancelled" in bench.get(response.headers["location"])
    assert "Cancel</button>" not in bench.get(job)


def test_a_job_that_fails_says_why_and_leads_back(bench):
    found = bench.upload(b"text,label\n" + b"".join(b"word %d,label %d\n" % (n, n) for n in range(30)))
    sent = bench.post(found, {"task": "odd", "label": "label", "text": "text", **QUICK})
    if sent.status_code == 303:
        bench.train()
        page = bench.get(sent.headers["location"])
        assert 'role="alert"' in page
        assert "Change the settings and try again" in page
        assert str(bench.db.paths.home) not in page
    else:
        assert 'role="alert"' in sent.text


def test_the_cells_of_what_was_taken_for_what_open_the_rows_behind_them(trained):
    page = trained.get("/tasks/mail/versions/2")
    cells = re.findall(r'<a href="([^"]+)" hx-get.*?>([\d,]+)</a>', page)
    assert cells
    for address, count in cells:
        behind = trained.get(unescape(address))
        table = behind.partition('id="behind"')[2].partition("Label by label")[0]
        assert table.count('<td class="text">') == int(count), address


def test_words_that_moved_an_answer_are_marked(trained):
    page = trained.post("/tasks/mail/versions/2/words", {"text": "apple river cloud"}).text
    assert "% sure" in page
    moved = page.partition('id="moved"')[2]
    assert all(word in moved for word in ("apple", "river", "cloud"))
    assert "points without it" in moved
    for text in ("", "   ", "word"):
        refused = trained.post("/tasks/mail/versions/2/words", {"text": text}).text
        assert 'role="alert"' in refused.partition('id="moved"')[2]


def test_a_text_is_asked_of_all_versions_and_as_a_program_would(trained):
    text = """it's "quoted" $HOME `date` \\ und Grüße"""
    page = trained.post("/tasks/mail/try", {"text": text}).text
    assert page.count('class="answer') >= 2
    said = text_of(page)
    assert "Version 2" in said
    assert "Version 1" in said
    curl = unescape(re.search(r'<pre id="curl"[^>]*><code>(.*?)</code>', page, re.DOTALL)[1])
    words = shlex.split(curl.replace("\\\n", " "))
    assert json.loads(words[words.index("-d") + 1]) == {"task": "mail", "rows": [text]}
    answer = trained.client.post("/v1/predict", content=words[-1], headers={"content-type": "application/json"})
    assert answer.status_code == 200
    python = unescape(re.search(r'<pre id="python"[^>]*><code>(.*?)</code>', page, re.DOTALL)[1])
    call = ast.parse(python).body[-1].value.args[0]
    assert [ast.literal_eval(argument) for argument in call.args] == ["mail", [text]]
    assert trained.post("/tasks/mail/try", {"text": " "}).status_code == 422


def test_corrections_are_kept_and_trained_with(bench):
    bench.train_file(make_csv(60))
    page = bench.get("/tasks/mail/label")
    assert page.count('name="label" value="billing"') == page.count('name="label" value="delivery"') > 0
    texts = re.findall(r'name="text" value="([^"]+)"', page)
    response = bench.post("/tasks/mail/label", {"text": unescape(texts[0]), "label": "delivery", "answered": "billing"})
    assert response.status_code == 303
    again = bench.get("/tasks/mail/label")
    assert "1 correction" in again
    assert texts[0] not in re.findall(r'name="text" value="([^"]+)"', again)
    partly = bench.post("/tasks/mail/label", {"text": "quite new", "label": "billing"}, headers={"hx-request": "true"})
    assert 'id="just-saved"' in partly.text
    assert "Saved as billing" in partly.text
    assert "2 corrections" in partly.text
    own = bench.post("/tasks/mail/label/own", {"texts": "first of mine\n\nsecond of mine\nfirst of mine"}).text
    assert own.count('name="text" value="first of mine"') == 1
    started = bench.post("/tasks/mail/train-again")
    assert started.status_code == 303
    bench.train()
    done = bench.workspace.job(started.headers["location"].rpartition("/")[2])
    assert done.state == "succeeded", done.error
    assert done.result["version"] == 2


def test_versions_are_compared_and_the_older_one_can_be_live_again(bench):
    bench.train_file(make_csv(60, seed=0))
    alone = bench.get("/tasks/mail/compare")
    assert "There is one version so far" in alone
    bench.train_file(make_csv(60, seed=1, wrong=0.5))
    page = bench.get("/tasks/mail/compare")
    said = text_of(page)
    assert "Rows compared" in said
    assert "1 to 2" in said
    assert page.count(">its training</a>") == 2
    bench.get(re.search(r'href="(/jobs/job_[^"]+)">its training', page)[1])
    etag = unescape(re.search(r'name="etag" value="([^"]+)"', page)[1])
    response = bench.post("/tasks/mail/live", {"version": "1", "etag": etag})
    assert response.status_code == 303
    assert bench.workspace.live("mail") == 1
    after = bench.get(response.headers["location"])
    assert "2 to 1" in text_of(after)
    assert "that version answers from now on" in after
    stale = bench.post("/tasks/mail/live", {"version": "2", "etag": etag})
    assert stale.status_code == 412
    assert "look at the page again" in stale.text
    assert bench.workspace.live("mail") == 1
    unknown = bench.post("/tasks/mail/live", {"version": "77", "etag": etag})
    assert unknown.status_code in (404, 412)


def test_what_happens_to_new_versions_is_set_and_a_task_is_deleted_only_by_its_name(bench):
    bench.train_file(make_csv(60))
    assert bench.post("/tasks/mail/settings", {"policy": "if-better"}).status_code == 303
    assert re.search(r'value="if-better" checked', bench.get("/tasks/mail/settings"))
    refused = bench.post("/tasks/mail/delete", {"sure": "nail"})
    assert refused.status_code == 422
    assert "not the task" in refused.text
    assert bench.post("/tasks/mail/delete", {"sure": "mail"}).status_code == 303
    bench.get("/tasks/mail", 404)
    bench.train()
    assert "Make your first task" in bench.get("/")


def test_with_a_key_one_signs_in_and_out(bench):
    _, secret = Keys(bench.db).make("local", name="laptop")
    asked = bench.client.get("/jobs?after=x", follow_redirects=False)
    assert asked.status_code == 303
    assert asked.headers["location"] == "/sign-in?next=%2Fjobs%3Fafter%3Dx"
    partly = bench.client.get("/jobs", headers={"hx-request": "true"}, follow_redirects=False)
    assert partly.headers["hx-redirect"] == "/sign-in"
    wrong = bench.post("/sign-in", {"key": "inl_aaaaaaaaaaaa_" + "x" * 43, "next": "/jobs"})
    assert wrong.status_code == 401
    assert "The key is not valid" in wrong.text
    assert "set-cookie" not in wrong.headers
    response = bench.post("/sign-in", {"key": f"  {secret}\n", "next": "/jobs"})
    assert response.headers["location"] == "/jobs"
    cookie = response.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "samesite=strict" in cookie.lower()
    assert secret not in cookie
    assert "laptop" in bench.get("/account")
    assert bench.client.get("/v1/tasks").status_code == 200  # the session is one for the API too
    token = bench.client.cookies["inlay_session"]
    bench.post("/sign-out")
    bench.client.cookies.set("inlay_session", token)
    assert bench.client.get("/jobs", follow_redirects=False).status_code == 303  # not only the cookie is gone


def test_signing_in_leads_nowhere_else(bench):
    _, secret = Keys(bench.db).make("local")
    for path in ("https://evil.example/", "//evil.example", "/\\evil.example", "javascript:alert(1)", "\\\\evil"):
        response = bench.post("/sign-in", {"key": secret, "next": path})
        assert response.headers["location"] == "/", path
    assert bench.client.post("/sign-in", data={"key": secret}).status_code == 403  # without an origin


def test_a_session_needs_its_own_origin_and_ends_with_its_key(bench):
    secret = bench.sign_in(name="mine")
    without = bench.client.post("/new/example", data={"go": "train"}, follow_redirects=False)
    assert without.status_code == 403
    assert bench.post("/new/example", {"go": "look"}).status_code == 303
    Keys(bench.db).revoke(secret.split("_")[1])
    assert bench.client.get("/", follow_redirects=False).headers["location"] == "/sign-in"


def test_a_key_sees_and_may_only_what_it_should(bench, trained):
    Tenants(bench.db).add("acme")
    bench.train_file(make_csv(60))
    bench.sign_in("acme", scopes=["predict"], name="reader")
    bench.get("/tasks/mail", 404)
    assert "New task" not in bench.get("/jobs")
    for path in ("/new", "/operator"):
        page = bench.get(path, 403)
        assert "sign in with a key that allows this" in page.lower()
    assert bench.post("/new/example", {"go": "train"}).status_code == 403
    assert bench.post("/account/keys", {"name": "more"}).status_code == 403
    assert "Make a key" not in bench.get("/account")
    assert "Operator" not in bench.get("/")


def test_the_first_key_made_here_signs_this_browser_in(bench):
    page = bench.get("/account")
    assert "everybody needs one" in page
    response = bench.client.post("/account/keys", data={"name": "first"}, headers=OWN)
    assert response.status_code == 200
    secret = re.search(r"inl_[a-z0-9]{12}_[\w-]{43}", response.text)[0]
    assert Keys(bench.db).check(secret).scopes == {"predict", "train", "admin"}
    assert secret not in bench.get("/account")  # shown once
    bench.get("/operator", 403)
    other = bench.client.post("/account/keys", data={"name": "mail server", "scopes": "predict"}, headers=OWN)
    made = re.search(r"inl_([a-z0-9]{12})_[\w-]{43}", other.text)
    assert Keys(bench.db).check(made[0]).scopes == {"predict"}
    assert bench.post(f"/account/keys/{made[1]}/revoke").status_code == 303
    assert "revoked" in bench.get("/account")
    assert bench.post("/account/keys", {"name": ""}).status_code == 422


def test_the_operator_adds_tenants_limits_and_keys(bench):
    refused = bench.post("/operator/tenants", {"name": "No Good"})
    assert 400 <= refused.status_code < 500
    assert 'role="alert"' in refused.text
    added = bench.post("/operator/tenants", {"name": "acme"})
    assert added.headers["location"].startswith("/operator/tenants/acme")
    wrong = bench.post("/operator/tenants/acme/limits", {"labels": "many", "weight": "heavy"})
    assert wrong.status_code == 422
    assert 'id="labels-fault"' in wrong.text
    assert 'value="many"' in wrong.text
    right = {"labels": "12", "dataset_rows": "", "queued_jobs": "3", "weight": "2"}
    assert bench.post("/operator/tenants/acme/limits", right).status_code == 303
    limits = Tenants(bench.db).get("acme").limits
    assert (limits.labels, limits.dataset_rows, limits.queued_jobs) == (12, None, 3)
    page = bench.post("/operator/tenants/acme/keys", {"name": "theirs", "scopes": ["predict", "train"]}).text
    secret = re.search(r"inl_([a-z0-9]{12})_[\w-]{43}", page)
    assert Keys(bench.db).check(secret[0]).tenant == "acme"
    bench.sign_in("local", scopes=["operator", "predict"], name="boss")
    shown = bench.get("/operator")
    assert "acme" in shown
    assert "64 slots" in shown
    assert bench.post(f"/operator/tenants/acme/keys/{secret[1]}/revoke").status_code == 303
