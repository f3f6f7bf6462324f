"""The page in a real browser: the whole way of a task, no barriers, nothing refused by the policy."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from browser_bench import CHROMIUM, browsing
from page_bench import PageBench, make_csv, open_page_bench, serving

from inlay.service.state import Keys

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed here"),
]
SCREENS = (
    *("/", "/new", "/jobs", "/tasks/mail", "/tasks/mail/versions/2", "/tasks/mail/try", "/tasks/mail/label"),
    *("/tasks/mail/compare", "/tasks/mail/settings", "/account", "/operator", "/operator/tenants/local", "/sign-in"),
)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory, backbone_of: Callable[[str], Any]) -> Iterator[str]:
    """The address of a service whose task `mail` has two versions."""
    bench = open_page_bench(tmp_path_factory.mktemp("served") / "home", backbone_of("bert"))
    with bench.client:
        bench.train_file(make_csv(60, seed=0))
        bench.train_file(make_csv(80, seed=1))
    with serving(bench) as found:
        yield found
    bench.db.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", ["desk", "phone"])
def test_no_screen_has_barriers_or_is_wider_than_its_window(address, size, scheme):
    with browsing(size, scheme) as watched:
        found = {}
        for path in SCREENS:
            watched.page.goto(address + path)
            barriers = watched.find_barriers()
            if watched.overflow() > 0:
                barriers.append(f"wider than the window by {watched.overflow()}")
            if barriers:
                found[path] = barriers
        assert not found, "\n".join(f"{path}: {rule}" for path, rules in found.items() for rule in rules)


def test_from_a_file_to_a_live_version_corrected_compared_and_rolled_back(tmp_path, backbone_of):
    bench: PageBench = open_page_bench(tmp_path / "home", backbone_of("bert"))
    with serving(bench) as address, browsing() as watched:
        page = watched.page
        page.goto(address)
        page.get_by_role("link", name="Choose a file").click()
        _upload(page, tmp_path / "support mail.csv", make_csv(80, seed=0))
        _see_what_was_found(page)
        _train(page, rounds="4")
        _watch_it_learn(page)
        _ask(page)
        assert not watched.find_barriers()
        _correct_and_train_again(page)
        _worse_data_is_kept_aside(page, tmp_path)
        _compare_and_roll_back(page, address)
    bench.db.close()


def _upload(page: Any, path: Path, content: bytes) -> None:
    path.write_bytes(content)
    page.get_by_label("Drop a file here").set_input_files(path)
    page.get_by_role("heading", name="What was found").wait_for()


def _see_what_was_found(page: Any) -> None:
    assert page.get_by_label("Text", exact=True).input_value() == "text"
    assert page.get_by_label("Right answer").input_value() == "label"
    page.get_by_role("heading", name="2 labels").wait_for()
    assert page.get_by_label("Name of the task").input_value() == "support-mail"
    page.get_by_label("Right answer").focus()
    page.get_by_label("Right answer").select_option("text")  # a wrong column, and back
    page.get_by_role("heading", name="2 labels").wait_for(state="detached")
    assert page.evaluate("document.activeElement.id") == "label"  # the keyboard stays where it was
    page.get_by_label("Right answer").select_option("label")
    page.get_by_role("heading", name="2 labels").wait_for()


def _train(page: Any, rounds: str, publish: str | None = None) -> None:
    page.get_by_text("More settings").click()
    for name, value in (("Rounds", rounds), ("Learning rate", "0.005"), ("Size", "4"), ("Longest text", "16")):
        page.get_by_label(name).fill(value)
    if publish is not None:
        page.get_by_label(publish).check()
    page.get_by_role("button", name="Train", exact=True).click()
    page.wait_for_url("**/jobs/job_*")


def _watch_it_learn(page: Any) -> None:
    page.locator(".chart canvas").wait_for()  # drawn while it learns, without a reload
    page.get_by_role("heading", name="Version 1 is live").wait_for()
    page.locator("#since", has_text="rows to learn from").wait_for()
    page.get_by_text("The same as a table").click()
    assert page.locator("#curve-table tbody tr").count() >= 4
    times = page.locator("#log time").all_text_contents()
    assert times == sorted(times)
    words = page.locator("#log li").all_text_contents()
    assert len(words) == len(set(words)), words  # nothing was told twice


def _ask(page: Any) -> None:
    page.get_by_role("link", name="Try it").first.click()
    page.get_by_label("Text").fill("""apple "river" it's""")
    page.get_by_role("button", name="Ask").click()
    page.locator(".answer .says").wait_for()
    page.get_by_role("button", name="Copy curl").click()
    page.get_by_text("Copied").first.wait_for()
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied.startswith("curl http://127.0.0.1:")
    assert copied == page.locator("#curl").inner_text()


def _correct_and_train_again(page: Any) -> None:
    page.get_by_role("link", name="Label").click()
    page.get_by_role("heading", name="0 corrections").wait_for()
    for number in (1, 2):
        page.locator(".asked > li:not(.saved) .picks button:not(.guess)").first.click()
        page.get_by_role("heading", name=re.compile(f"{number} correction")).wait_for()
    page.get_by_role("button", name="Train again").click()
    page.wait_for_url("**/jobs/job_*")
    page.get_by_role("heading", name=re.compile("Version 2 is")).wait_for()


def _worse_data_is_kept_aside(page: Any, folder: Path) -> None:
    page.get_by_role("link", name="Tasks", exact=True).first.click()
    page.get_by_role("link", name="support-mail").click()
    live = page.locator(".card a.big").inner_text()
    page.get_by_role("link", name="Train a new version").click()
    _upload(page, folder / "worse.csv", make_csv(80, seed=5, wrong=0.5))
    assert page.get_by_label("Name of the task").input_value() == "support-mail"
    _train(page, "2", "it goes live if it is better")
    page.get_by_role("heading", name="Version 3 is not live").wait_for()
    page.get_by_role("link", name="Compare with the live one").click()
    page.get_by_role("heading", name=re.compile(r"is worse than|are about as good")).wait_for()
    assert f"{live} (live)" in page.get_by_label("This version").inner_text()


def _compare_and_roll_back(page: Any, address: str) -> None:
    task = "/tasks/support-mail"
    page.goto(f"{address}{task}/compare?a=1&b=3")
    page.get_by_role("button", name="Make version 3 live").click()
    page.get_by_text("that version answers from now on").wait_for()
    page.goto(f"{address}{task}")
    assert page.locator(".card a.big").inner_text() == "Version 3"
    page.goto(f"{address}{task}/compare?a=1&b=3")
    page.get_by_role("button", name="Go back to version 1").click()
    page.get_by_text("that version answers from now on").wait_for()
    assert page.locator("tbody th", has_text="3 to 1").count() == 1
    page.goto(f"{address}{task}")
    assert page.locator(".card a.big").inner_text() == "Version 1"


def test_the_rows_behind_a_cell_open_in_place_and_the_keyboard_follows(address):
    with browsing() as watched:
        page = watched.page
        page.goto(f"{address}/tasks/mail/versions/2")
        cell = page.locator(".confusion a").first
        count = int(cell.inner_text().replace(",", ""))
        cell.focus()
        page.keyboard.press("Enter")
        page.locator("#behind tbody tr").first.wait_for()
        assert page.locator("#behind tbody tr").count() == count
        assert page.evaluate("document.activeElement.id") == "behind-title"
        assert page.url == f"{address}/tasks/mail/versions/2"
        page.get_by_label("Text").fill("apple river cloud")
        page.get_by_role("button", name="Show the words").click()
        page.locator("#moved .words").first.wait_for()
        assert not watched.find_barriers()


def test_a_file_that_cannot_be_used_is_told_where_it_was_dropped(address, tmp_path):
    with browsing() as watched:
        page = watched.page
        page.goto(f"{address}/new")
        path = tmp_path / "mail.csv"
        for name, content, words in (("picture.png", b"\x89PNG", "format"), (path.name, b"text,label\n", "no rows")):
            path.with_name(name).write_bytes(content)
            page.get_by_label("Drop a file here").set_input_files(path.with_name(name))
            page.locator("#upload-fault [role=alert]", has_text=words).wait_for()
        watched.check(allowed=("status of 4",))  # the browser says so of every refused request
        path.write_bytes(make_csv(60, seed=0))  # mended, the same file can be chosen again
        page.get_by_label("Drop a file here").set_input_files(path)
        page.get_by_role("heading", name="What was found").wait_for()


def test_everything_can_be_reached_by_the_keyboard(address):
    with browsing() as watched:
        page = watched.page
        page.goto(f"{address}/tasks/mail/settings")
        reached = []
        for _ in range(30):
            page.keyboard.press("Tab")
            reached.append(page.evaluate("(document.activeElement.innerText || document.activeElement.id).trim()"))
        assert reached[0] == "Skip to the content"
        for name in ("Tasks", "Jobs", "Account", "Overview", "Label", "Compare", "Save", "Delete the task"):
            assert name in reached, (name, reached)
        page.goto(f"{address}/")
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.id") == "main"


def test_one_signs_in_with_a_key_and_out_again(tmp_path, backbone_of):
    bench = open_page_bench(tmp_path / "home", backbone_of("bert"))
    _, secret = Keys(bench.db).make("local", name="laptop")
    with serving(bench) as address, browsing() as watched:
        page = watched.page
        page.goto(f"{address}/jobs")
        page.get_by_label("Your key").fill(secret)
        page.get_by_role("button", name="Sign in").click()
        page.wait_for_url("**/jobs")
        page.get_by_role("heading", name="Jobs").wait_for()
        page.get_by_role("button", name="Sign out").click()
        page.get_by_text("You are signed out").wait_for()
        page.goto(f"{address}/jobs")
        page.get_by_label("Your key").wait_for()
    bench.db.close()
