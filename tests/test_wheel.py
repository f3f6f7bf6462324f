"""The wheel has everything that the code needs: modules, page, migrations, studies, the example."""

from __future__ import annotations

import subprocess
import zipfile

import pytest

from install_wheel import ROOT, build_wheel


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    wheel = build_wheel(tmp_path_factory.mktemp("wheel"))
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_the_wheel_has_every_file_of_the_package(names: set[str]) -> None:
    listed = subprocess.run(["git", "ls-files", "src/inlay"], cwd=ROOT, capture_output=True, text=True, check=True)
    files = {path.removeprefix("src/") for path in listed.stdout.split() if (ROOT / path).is_file()}
    assert len(files) > 300
    assert not files - names


def test_the_wheel_has_the_studies_the_example_and_the_command(names: set[str]) -> None:
    shared = {name.partition(".data/data/share/inlay/")[2] for name in names}
    assert {f"studies/{path.name}" for path in (ROOT / "studies").glob("*.toml")} <= shared
    assert {f"studies/published/{path.name}" for path in (ROOT / "studies" / "published").glob("*.toml")} <= shared
    assert "examples/sms_spam/sms_spam.tsv" in shared
    assert any(name.endswith(".dist-info/entry_points.txt") for name in names)
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
