"""Says how many runs each study's command in docs/results.md finds among the shipped records.

    python docs/found_runs.py           # each command, what is printed behind it and what it should be
    python docs/found_runs.py --write   # puts the numbers behind the commands that have some already

A command is a code span that begins with `inlay study` and names a profile and a backbone; `MPNET`, `T5` and `DATA`
stand for folders. Behind it, before the next one, come the words "finds N of M runs": M that the studies plan, N that
have a record. Neither the data nor the backbones are needed; tests/cli/test_printed_commands.py holds the numbers, and
asks `inlay study --dry-run` too where the data are.
"""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from inlay.cli.study import narrow
from inlay.studies.run.records import Record, list_files, read_records
from inlay.studies.spec.matching import BackboneFacts, Count, count_found
from inlay.studies.spec.study import find_study, read_study, study_folders

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results.md"
FACTS = {
    facts.name: facts
    for facts in (
        BackboneFacts("minilm", "1b270ee776ef549a2507f6df6dcc4adad804dd6a36dc5f2f2110833ae6840ba8", "mean", 6),
        BackboneFacts("mpnet-base", "eea7d0a402f3ead1d97b78fb468db4e19f87a732efcdc0f217734e8caa32ae93", "mean", 12),
        BackboneFacts("flan-t5-small", "851fa6075762bfeeaa57eb2a1415aec2024cd1cb55ba4046be132e3f767b73b9", "text", 16),
    )
}
FOLDERS = {"MINILM": "minilm", "MPNET": "mpnet-base", "T5": "flan-t5-small"}
"""what stands for a folder in a printed command -> the name of the backbone in it"""
_COMMAND = re.compile(r"`(inlay study [^`]+)`")
_WORDS = re.compile(r"finds ([\d,]+) of ([\d,]+) runs")


@dataclass(frozen=True)
class Printed:
    """A command of a document, with the text behind it up to the next command or the end of its line."""

    line: int
    text: str
    behind: str

    @property
    def counts(self) -> list[Count]:
        """What is said behind it, once if all is well."""
        return [Count(*(int(each.replace(",", "")) for each in found)) for found in _WORDS.findall(self.behind)]

    @property
    def arguments(self) -> list[str]:
        """What stands behind `inlay`."""
        return shlex.split(self.text)[1:]

    def option(self, name: str) -> str | None:
        """The value that it gives an option."""
        given = self.arguments
        return given[given.index(name) + 1] if name in given else None

    @property
    def backbone(self) -> str:
        """The short name of the backbone it runs on."""
        given = self.option("--backbone") or ""
        return FOLDERS.get(given, given)

    def count(self, records: list[Record]) -> Count:
        """The runs that it plans, and those of them that these records are of."""
        profile, folders = self.option("--profile") or "", study_folders()
        studies = [
            narrow(
                read_study(find_study(name, folders), profile, self.backbone),
                self.option("--arms"),
                self.option("--tasks"),
            )
            for name in self.arguments[1].split(",")
        ]
        return count_found(studies, FACTS[self.backbone], records)


def list_printed(text: str) -> list[Printed]:
    """The commands of a document that name a profile and a backbone."""
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        spans = [span for span in _COMMAND.finditer(line) if {"--profile", "--backbone"} <= set(shlex.split(span[1]))]
        for place, span in enumerate(spans):
            end = spans[place + 1].start() if span is not spans[-1] else len(line)
            found.append(Printed(number, span[1], line[span.end() : end]))
    return found


def read_shipped() -> list[Record]:
    """All records that studies look for."""
    return [record for path in list_files(ROOT / "results") for record in read_records(path)]


def main() -> None:
    """Print, or write, what every command finds."""
    text, records = RESULTS.read_text(encoding="utf8"), read_shipped()
    for printed in list_printed(text):
        count = printed.count(records)
        said = "nothing" if not printed.counts else " and ".join(each.words for each in printed.counts)
        state = "as printed" if printed.counts == [count] else f"printed: {said}"
        print(f"line {printed.line}: {printed.text}\n    {count.words} ({state})")
        if "--write" in sys.argv:
            whole = f"`{printed.text}`{printed.behind}"
            text = text.replace(whole, _WORDS.sub(count.words, whole))
    if "--write" in sys.argv:
        RESULTS.write_text(text, encoding="utf8")


if __name__ == "__main__":
    main()
