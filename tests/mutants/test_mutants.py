"""The list of mutants: each can still be made, and has tests that are there. `make mutants` runs them."""

from __future__ import annotations

import re
import shutil

import pytest
from run import ROOT, Mutant, apply, is_part, judge, read_mutants, snapshot

MUTANTS = read_mutants()


def test_there_are_a_hundred_mutants_with_names_of_their_own():
    names = [mutant.name for mutant in MUTANTS]
    assert len(names) >= 100
    assert sorted(set(names)) == sorted(names)
    assert all(re.fullmatch(r"[a-z0-9-]+", name) for name in names)


def test_no_two_mutants_are_one_change():
    changes = {(mutant.file, mutant.old, mutant.new) for mutant in MUTANTS}
    assert len(changes) == len(MUTANTS)


def test_every_mutant_can_be_made(tmp_path):
    """Code that a mutant changes was changed itself: give the mutant the new text, or another of the same fault."""
    problems = []
    for mutant in MUTANTS:
        path = tmp_path / mutant.file
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / "src/inlay" / mutant.file, path)
        before = path.read_text()
        try:
            apply(mutant, tmp_path)
        except ValueError as error:
            problems.append(f"{mutant.name}: {error}")
        else:
            if path.read_text() == before:
                problems.append(f"{mutant.name} changes nothing")
    assert not problems


def test_the_tests_of_every_mutant_are_there():
    problems = []
    for mutant in MUTANTS:
        assert mutant.tests, mutant.name
        for test in mutant.tests:
            file, _, function = test.partition("::")
            path = ROOT / file
            if not path.is_file():
                problems.append(f"{mutant.name}: no file {file}")
            elif function and f"\ndef {function.partition('[')[0]}(" not in path.read_text():
                problems.append(f"{mutant.name}: no test {test}")
    assert not problems


def test_a_change_that_cannot_be_made_or_leaves_no_python_is_refused(tmp_path):
    (tmp_path / "code.py").write_text("a = 1\nb = 1\n")
    for old, new, reason in [
        ("1", "2", "occurs 2 times"),
        ("c", "d", "occurs 0 times"),
        ("a = 1", "a = (", "no Python"),
    ]:
        with pytest.raises(ValueError, match=reason):
            apply(Mutant("name", "code.py", old, new, ()), tmp_path)
    assert (tmp_path / "code.py").read_text() == "a = 1\nb = 1\n"


def test_a_named_test_is_it_or_its_parameters_or_those_of_its_file():
    assert is_part("tests/a.py::test_b[1]", "tests/a.py::test_b")
    assert is_part("tests/a.py::test_b[1]", "tests/a.py")
    assert not is_part("tests/a.py::test_bc", "tests/a.py::test_b")
    assert not is_part("tests/ab.py::test_b", "tests/a.py")


@pytest.mark.long
def test_a_mutant_is_killed_by_a_test_that_runs_and_fails_and_by_nothing_else():
    named = "tests/store/test_files.py::test_write_once_never_overwrites"

    def outcome(old, new, red=()):
        return judge(Mutant("name", "store/files.py", old, new, (named,)), source, red)

    with snapshot() as source:
        killed = outcome("os.link(draft, path)", "os.replace(draft, path)")
        assert (killed.outcome, killed.detail) == ("killed", named)
        assert outcome('DRAFT_PREFIX = ".draft-"', 'DRAFT_PREFIX = ".other-"').outcome == "SURVIVED"
        assert outcome("import fcntl\n", "import nothing_of_this_name\n").outcome == "error", "nothing was tested"
        red = outcome("os.link(draft, path)", "os.replace(draft, path)", [named])
        assert (red.outcome, red.detail) == ("error", f"{named} fails without the change too")
