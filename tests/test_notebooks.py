"""The notebooks of the guide run from the first cell to the last, in a kernel of their own, on fewer rows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")

NOTEBOOKS = Path(__file__).parent.parent / "examples" / "notebooks"
GUIDE = Path(__file__).parent.parent / "docs" / "start.md"
MESSAGES = NOTEBOOKS.parent / "sms_spam" / "sms_spam.tsv"
FEWER = {r"\blimit=\d+": "limit=40", r"\bepochs=\d+": "epochs=1", r"\bsample\(\d+": "sample(60", r"\(0, 1\)": "(0,)"}


def test_the_guide_names_every_notebook():
    named = re.findall(r"`(\w+\.ipynb)`", GUIDE.read_text(encoding="utf8"))
    assert sorted(named) == sorted(path.name for path in NOTEBOOKS.glob("*.ipynb"))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=() if path.stem == "first_task" else pytest.mark.long)
        for path in sorted(NOTEBOOKS.glob("*.ipynb"))
    ],
)
def test_a_notebook_runs(path, tmp_path, monkeypatch):
    from nbclient import NotebookClient

    monkeypatch.setenv("INLAY_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    (tmp_path / "sms_spam").mkdir()
    (tmp_path / "notebooks").mkdir()
    lines = MESSAGES.read_text(encoding="utf8").splitlines(keepends=True)
    (tmp_path / "sms_spam" / MESSAGES.name).write_text("".join(lines[:120]), encoding="utf8")
    book = nbformat.read(path, as_version=4)
    for cell in book.cells:
        for what, instead in FEWER.items():
            cell.source = re.sub(what, instead, cell.source)
    client = NotebookClient(book, timeout=600, resources={"metadata": {"path": str(tmp_path / "notebooks")}})
    client.execute()
    assert client.code_cells_executed == sum(cell.cell_type == "code" for cell in book.cells)


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_is_kept_with_its_results_and_without_paths_of_a_machine(path):
    """Readers on a code host see the results; nobody sees where they were made."""
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert any(cell.outputs for cell in cells)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    shown = "".join(str(cell.outputs) for cell in cells)
    assert not re.search(r"/(tmp|work|root|home)/", shown)
    assert "Traceback" not in shown
