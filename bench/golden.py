"""Record what a change of structure must not change, through the command line alone, and compare two records.

    python bench/golden.py record DIR --source SRC [--checkout DIR]
    python bench/golden.py compare DIR_A DIR_B
    python bench/golden.py verify-old DIR --source SRC

`record` trains every method and kind of task on tiny random backbones and writes DIR/golden.json: of every run its id,
the loss of its first 20 steps (an epoch is one step), its scores and the sha256 of its best weights; of every version
its digest; what commands said; what `inlay verify` found; and the report of the checkout's results. DIR/store is the
store. A version's digest covers the path of its backbone, so all of it happens in one fixed folder, one record at a
time. `compare` tells what differs, times left out, and fails if anything does. `verify-old` lets another source prove
the versions of an older record, bit for bit.
"""

from __future__ import annotations

import argparse
import base64
import csv
import difflib
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SCRATCH = Path("/tmp/inlay-golden")
"""where every record is made: paths are part of digests"""
KEPT = ("store", "data", "backbones", "said")
"""folders of it that stay with the record"""
STORE, DATA, BACKBONES, SAID = (SCRATCH / name for name in KEPT)
NUM_ROWS, NUM_LOSSES = 80, 20
VARYING = {"seconds", "peak_memory_bytes", "memory_bytes", "published_at", "host", "commit", "date", "environment"}
"""keys of JSON whose values tell of the moment and the machine"""
_DURATION = re.compile(r"\d[\d.,]* (?:ms|s|min|h|rows/s|tokens/s|samples/s)\b(?: \d+ (?:s|min)\b)?")
_MOST_SHOWN = 200

# One process runs all commands, as importing torch takes longer than most of them.
DRIVER = """
import contextlib, json, pathlib, sys, time
from inlay.cli import main
said, store = map(pathlib.Path, sys.argv[1:3])
def list_runs():
    return {path.parent.name for path in store.glob("**/result.json")}
outcomes = {}
for name, argv in json.loads(sys.stdin.read()).items():
    before, began, code = list_runs(), time.monotonic(), 0
    with open(said / (name + ".out"), "w") as out, open(said / (name + ".err"), "w") as err:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                main(argv)
            except SystemExit as stop:
                code = stop.code or 0
    seconds = time.monotonic() - began
    outcomes[name] = {"code": code, "runs": sorted(list_runs() - before), "seconds": seconds}
    print(f"{name}: {seconds:.1f} s" + (f", code {code}" if code else ""), file=sys.stderr, flush=True)
print(json.dumps(outcomes))
"""

METHODS = (
    "houlsby mahabadi pfeiffer parallel lora ia3 bitfit pal norms head full top pal-full".split()  # of one task
)
JOINT_METHODS = "hyperformer hyperformer++ mahabadi-multi full-multi pal-published".split()
VARIANTS: dict[str, tuple[str, ...]] = {
    "sharing-within": ("method.sharing=within-layer",),
    "sharing-every-2": ("method.sharing=every-2",),
    "sharing-all": ("method.sharing=all",),
    "inner-layer": ("method.inner_norm=layer",),
    "inner-batch": ("method.inner_norm=batch",),
    "inner-output": ("method.inner_norm=output",),
    "inner-alone": ("method.inner_norm=alone",),
    "depth-2": ("method.depth=2",),
    "multiply": ("method.combine=multiply",),
    "form-parallel": ("method.form=parallel",),
    "places-attention": ("method.places=attention",),
    "layers-upper": ("method.layers=2:",),
    "norms-encoder": ("method.norms=encoder", "method.activation=swish"),
    "norms-none": ("method.norms=none", "method.activation=relu"),
    "pfeiffer-sharing-all": ("method.name=pfeiffer", "method.sharing=all"),
    "mahabadi-within": ("method.name=mahabadi", "method.sharing=within-layer"),
    "lora-all-linears": (
        "method.name=lora",
        "method.linears=query,key,value,project,expand,contract",
        "method.alpha=16",
    ),
    "ia3-linears": ("method.name=ia3", "method.linears=query,contract"),
    "top-two": ("method.name=top", "method.layers=-2:"),
    "bert-adam": ("train.optimizer=bert-adam", "train.schedule=bert"),
    "hidden-tanh": ("train.hidden=tanh", "train.pooling=cls"),
    "features-mix": ("train.features=mix",),
    "attention-dropout": ("train.attention_dropout=0.1",),
    "balanced": ("train.class_weights=balanced",),
    "thresholds": ("train.thresholds=dev",),
    "keep-late": ("train.keep=late",),
    "head-start": ("train.head_start=probe",),
    "contrast": ("train.contrast=4", "train.head_start=probe"),
}
PRESETS = (
    "houlsby2019 houlsby2019-code uva2019 tf-adapter-bert-within-layer tf-adapter-bert-none "
    "tf-adapter-bert-every-3 adapterhub-houlsby adapterhub-pfeiffer"
).split()
FAMILIES = ("bert", "roberta", "distilbert", "deberta-v2", "modernbert", "t5")


def main() -> int:
    """Do what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="write DIR/golden.json")
    recording.add_argument("--checkout", type=Path, help="whose rows, results and studies are read; default: SRC/..")
    comparing = commands.add_parser("compare", help="tell what differs between two records")
    comparing.add_argument("folders", nargs=2, type=Path, metavar="DIR")
    verifying = commands.add_parser("verify-old", help="prove a record's versions with another source")
    for each in (recording, verifying):
        each.add_argument("folder", type=Path, metavar="DIR")
        each.add_argument("--source", type=Path, required=True, metavar="SRC", help="folder that holds `inlay`")
    options = parser.parse_args()
    if options.command == "compare":
        return compare(*options.folders)
    with alone():
        if options.command == "verify-old":
            return verify_old(options.folder, options.source.resolve())
        source = options.source.resolve()
        return record(options.folder, source, (options.checkout or source.parent).resolve())


def record(folder: Path, source: Path, checkout: Path) -> int:
    """Run everything with a source and write what came of it; fails if a command does."""
    began = time.monotonic()
    make_data(checkout / "examples" / "sms_spam" / "sms_spam.tsv")
    make_backbones(source)
    for name in ("results", "studies"):
        shutil.copytree(checkout / name, SCRATCH / name, ignore=shutil.ignore_patterns("report.*", "*.jsonl"))
    inputs = hash_files(path for name in ("results", "studies") for path in (SCRATCH / name).rglob("*"))
    commands = list_commands()
    outcomes = drive(commands, source)
    golden = {
        "commands": {name: gather_command(name, commands[name], outcomes[name]) for name in commands},
        "versions": gather_versions(),
        "report": {"inputs": inputs, **gather_report()},
    }
    keep(folder, golden)
    exact, total = count_exact(golden["commands"]["verify"]["out"])
    print(
        f"{len(commands)} commands in {time.monotonic() - began:.0f} s; verified exactly: {exact} of {total} versions"
    )
    failed = [name for name, outcome in outcomes.items() if outcome["code"]]
    for name in failed:
        print(f"failed: {name}: {(folder / 'said' / (name + '.out')).read_text().strip()[-500:]}")
    return 1 if failed else 0


def verify_old(folder: Path, source: Path) -> int:
    """Prove the versions of a record with a source; fails unless each is exact, and none is missing."""
    for name in ("store", "backbones"):
        shutil.copytree(folder / name, SCRATCH / name)
    SAID.mkdir()
    outcome = drive({"verify": ["verify", "--store", str(STORE), "--json"]}, source)["verify"]
    found = parse((SAID / "verify.out").read_text())
    if outcome["code"] and not isinstance(found, dict):
        print((SAID / "verify.err").read_text())
        return 1
    exact, total = count_exact(found)
    for check in found.get("checks", ()):
        if not (check["stands"] and check["is_exact"]):
            print(f"{check['version']}: {check['problem'] or 'not compared bit for bit'}")
    expected = len(json.loads((folder / "golden.json").read_text())["versions"])
    print(f"exact: {exact} of {total} versions checked, {expected} recorded")
    return 0 if exact == total == expected else 1


def compare(first: Path, second: Path) -> int:
    """Tell every difference between two records; fails if there is one."""
    one, other = (scrub(json.loads((folder / "golden.json").read_text())) for folder in (first, second))
    for found in (one, other):
        for kept in found["report"]["records"].values():
            kept["records"].sort(key=lambda record: (record["arm"], record["task"], record["seed"], record["id"]))
    differences = list(find_differences(one, other))
    for text in differences[:_MOST_SHOWN]:
        print(text)
    if len(differences) > _MOST_SHOWN:
        print(f"… and {len(differences) - _MOST_SHOWN} more")
    paths = [folder / "report.md" for folder in (first, second)]
    pages = [path.read_text().splitlines() if path.is_file() else [] for path in paths]
    for line in list(difflib.unified_diff(*pages, "report.md", "report.md", lineterm="", n=0))[:_MOST_SHOWN]:
        print(line)
    named = {text.split(":")[0].split("/")[1] for text in differences if text.startswith("commands/")}
    runs = sum(len(command["runs"]) for command in one["commands"].values())
    what = f"{len(one['commands'])} commands, {runs} runs, {len(one['versions'])} versions, report.md"
    print(f"{len(differences)} differences ({what})" + (f"; in {', '.join(sorted(named))}" if named else ""))
    return 1 if differences else 0


def find_differences(one: Any, other: Any, where: str = "") -> Iterator[str]:
    """Walk two JSON values and tell, path by path, where they differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in [*one, *(key for key in other if key not in one)]:
            path = f"{where}/{key}" if where else key
            if key not in one or key not in other:
                yield f"{path}: only in the {'second' if key not in one else 'first'}"
            else:
                yield from find_differences(one[key], other[key], path)
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for index, (a, b) in enumerate(zip(one, other, strict=True)):
            yield from find_differences(a, b, f"{where}[{index}]")
    elif json.dumps(one) != json.dumps(other):  # so that 1 is not 1.0, and NaN is NaN
        yield f"{where}: {shorten(one)} | {shorten(other)}"


def shorten(value: Any) -> str:
    """Write a value in one short line."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 150 else f"{text[:150]}…"


@contextmanager
def alone() -> Iterator[None]:
    """Have the fixed folder, empty, to ourselves."""
    with SCRATCH.with_suffix(".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            sys.exit(f"{SCRATCH} is in use: another record is being made")
        shutil.rmtree(SCRATCH, ignore_errors=True)
        SCRATCH.mkdir()
        try:
            yield
        finally:
            shutil.rmtree(SCRATCH, ignore_errors=True)


def drive(commands: Mapping[str, Sequence[str]], source: Path) -> dict[str, Any]:
    """Run commands one after another in a process of a source; says how each ended, and which runs it made."""
    SAID.mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, str(SAID), str(STORE)],
        input=json.dumps(commands),
        cwd=SCRATCH,
        env=make_environment(source),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def make_environment(source: Path) -> dict[str, str]:
    """Choose what a process sees: the source, one thread, and a home and a cache of its own."""
    home = SCRATCH / "home"
    home.mkdir(exist_ok=True)
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "LD_LIBRARY_PATH") if name in os.environ}
    return {
        **kept,
        "PYTHONPATH": str(source),
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        "HOME": str(home),
        "XDG_CACHE_HOME": str(home / "cache"),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "COLUMNS": "120",
        "NO_COLOR": "1",
    }


def list_commands() -> dict[str, list[str]]:
    """List every command of a record by name, in the order they run in."""
    commands = {f"method-{method}": train(method, "--method", method) for method in METHODS}
    for name, settings in VARIANTS.items():
        commands[f"variant-{name}"] = train(name, *(part for text in settings for part in ("--set", text)))
    for name in PRESETS:  # most read the pooler, which would be refused: the tiny backbone's is noise
        pooling = () if name.startswith("adapterhub") else ("--pooling", "mean")
        rate = ("--lr", "2e-5") if name == "uva2019" else ()  # else it is the run of houlsby2019-code
        commands[f"preset-{name}"] = train(name, "--preset", name, *pooling, *rate)
    commands |= list_ways() | list_kinds() | list_joint() | list_families() | list_uses()
    commands["study-glue"] = ["study", "glue", "--profile", "tiny", "--commit", "golden"]
    commands["study-multitask"] = ["study", "multitask", "--profile", "tiny", "--commit", "golden"]
    commands["study-report"] = ["study", "report", "--out", "results"]
    commands["verify"] = ["verify"]
    storing = {name: ["--store", str(STORE)] for name in commands if name != "baseline"}
    return {name: [*argv, *storing.get(name, ()), "--json"] for name, argv in commands.items()}


def train(name: str, *more: str, data: str = "sms.tsv", backbone: str = "tiny", epochs: int = 20) -> list[str]:
    """Write a run of 20 epochs of one step each, published under a name."""
    where = [str(DATA / data), "--backbone", str(BACKBONES / backbone), "--name", name]
    return [
        "train",
        *where,
        "--lr",
        "1e-3",
        "--epochs",
        str(epochs),
        "--batch-size",
        "128",
        "--dev-share",
        "0.25",
        *more,
    ]


def list_ways() -> dict[str, list[str]]:
    """List runs that train in other ways: by the recipe, in small batches, from others, folded, as a sweep."""
    plain = [str(DATA / "sms.tsv"), "--backbone", str(BACKBONES / "tiny")]
    sweep = ["--lr", "1e-3,3e-3", "--size", "4,8", "--method", "houlsby,lora", "--epochs", "4", "--batch-size", "16"]
    return {
        "recipe": ["train", *plain, "--name", "recipe"],
        "small-batches": train("small-batches", "--batch-size", "8", "--test-share", "0.1", epochs=3),
        "buckets": train("buckets", "--batch-size", "8", "--set", "train.bucket=4", "--patience", "1", epochs=3),
        "seed-7": train("seed-7", "--seed", "7", "--split-seed", "3"),
        "checkpointing": train("checkpointing", "--checkpointing", "--seed", "8"),
        "small-budget": train("small-budget", "--token-budget", "512", "--seed", "9"),
        "no-reuse": train("no-reuse", "--no-reuse", "--set", "method.layers=2:", "--seed", "6"),
        "from-one": train("from-one", "--from", "houlsby@1"),
        "from-two": train("from-two", "--from", "houlsby@1,seed-7@1"),
        "folds": train("folds", "--folds", "2", epochs=4),
        "sweep": ["sweep", *plain, *sweep, "--seeds", "2", "--name", "sweep"],
        "sweep-in-turns": ["sweep", *plain, *sweep, "--seed", "5", "--max-cohort", "3", "--name", "sweep-in-turns"],
    }


def list_kinds() -> dict[str, list[str]]:
    """List a run of every kind of task, and of every way to read pairs."""
    pairs = {"data": "pairs.csv"}
    recipe = ["--backbone", str(BACKBONES / "tiny"), "--name"]
    return {
        "regress": train("regress", "--kind", "regress", data="words.csv"),
        "multilabel": train("multilabel", "--kind", "multilabel", data="signs.csv"),
        "tag": train("tag", data="tags.conll"),
        "span": train("span", "--max-length", "96", "--set", "train.stride=24", data="squad.json"),
        "pairs-joined": train("pairs-joined", "--set", "data.pairs=joined", **pairs),
        "pairs-towers": train("pairs-towers", "--set", "data.pairs=towers", **pairs),
        "pairs-recipe": ["train", str(DATA / "pairs.csv"), *recipe, "pairs-recipe"],
        "regress-recipe": ["train", str(DATA / "words.csv"), "--kind", "regress", *recipe, "regress-recipe"],
    }


def list_joint() -> dict[str, list[str]]:
    """List runs of several tasks as one, and what goes on from them."""

    def join(name: str, *more: str, method: str = "hyperformer++", backbone: str = "tiny") -> list[str]:
        files = {"a": "sms.tsv", "b": "sms2.tsv", "c": "pairs.csv"}
        data = [f"{name}-{letter}={DATA / file}" for letter, file in files.items()]
        size = ["--lr", "1e-3", "--epochs", "20", "--steps", "20", "--batch-size", "32", "--dev-share", "0.25"]
        return ["multitask", *data, "--backbone", str(BACKBONES / backbone), "--method", method, *size, *more]

    commands = {f"joint-{m}": join(f"joint-{m.replace('++', '-pp')}", method=m) for m in JOINT_METHODS}
    commands["joint-mixed"] = join("mixed", "--batches", "mixed", "--sampling", "uniform")
    commands["joint-annealed"] = join("annealed", "--sampling", "annealed", "--weights", "annealed-a=2")
    commands["joint-writes-norms"] = join("norms", "--set", "method.writes=norms")
    commands["joint-writes-blocks"] = join("blocks", "--set", "method.writes=blocks", "--set", "method.projector=0")
    commands["joint-seeds"] = join("seeds", "--seeds", "2", method="mahabadi-multi")
    commands["joint-t5"] = join("joint-t5", backbone="t5")
    commands["joint-t5-full"] = join("joint-t5-full", method="full-multi", backbone="t5")
    new = [f"new={DATA / 'sms2.tsv'}", "--backbone", str(BACKBONES / "tiny"), "--from-run", "joint-hyperformer-pp-a"]
    more = ["--like", "new=joint-hyperformer-pp-a", "--trained", "task", "--epochs", "20", "--batch-size", "128"]
    commands["joint-from-run"] = ["multitask", *new, *more]
    commands["materialize"] = ["materialize", "joint-hyperformer-pp-a", "joint-hyperformer-pp-a", "--name", "made"]
    return commands


def list_families() -> dict[str, list[str]]:
    """List runs on backbones of other families, one of which writes its answers."""
    commands = {f"family-{name}": train(f"family-{name}", backbone=name) for name in FAMILIES}
    reading = ("--set", "train.hidden=pooler", "--pooling", "cls")  # as PEFT's own heads do
    commands["bert-lora"] = train("bert-lora", "--method", "lora", *reading, backbone="bert")
    for method in ("mahabadi", "lora", "full"):
        commands[f"t5-{method}"] = train(f"t5-{method}", "--method", method, backbone="t5")
    commands["t5-regress"] = train("t5-regress", "--kind", "regress", data="words.csv", backbone="t5", epochs=4)
    free = ("--kind", "text", "--set", "train.max_answer=8", "--set", "train.beams=2")
    commands["t5-text"] = train("t5-text", *free, data="answers.csv", backbone="t5", epochs=4)
    commands["deberta-tag"] = train("deberta-tag", data="tags.conll", backbone="deberta-v2", epochs=4)
    return commands


def list_uses() -> dict[str, list[str]]:
    """List commands that use, judge, describe and carry away what was trained."""
    text = "Free entry! Call 09061701461 now?"
    commands = {
        f"predict-{name}": ["predict", name, text] for name in ("houlsby", "lora", "multilabel", "regress", "tag")
    }
    commands["predict-pair"] = ["predict", "pairs-towers", text, "--pair", "free entry"]
    commands["predict-span"] = ["predict", "span", "what follows free", "--pair", text]
    commands["predict-mixed"] = ["predict", "--input", str(DATA / "mixed.csv")]
    commands["predict-int8"] = ["predict", "houlsby", text, "--precision", "int8"]
    commands["evaluate"] = ["evaluate", "houlsby", str(DATA / "sms2.tsv")]
    commands["evaluate-tag"] = ["evaluate", "tag", str(DATA / "tags.conll")]
    commands["evaluate-span"] = ["evaluate", "span", str(DATA / "squad.json")]
    commands["show"] = ["show", "pairs-towers"]
    commands["tasks"] = ["tasks"]
    tiny = ["--backbone", str(BACKBONES / "tiny")]
    commands["plan"] = ["plan", str(DATA / "sms.tsv"), *tiny, "--no-measure"]
    commands["baseline"] = ["baseline", str(DATA / "sms.tsv"), *tiny, "--dev-share", "0.25"]
    commands["suggest"] = ["suggest", str(DATA / "sms2.tsv"), *tiny]
    for form, task in {"adapterhub": "adapterhub-pfeiffer", "peft": "bert-lora"}.items():
        commands[f"export-{form}"] = ["export", task, "--format", form, "-o", str(STORE / f"export-{form}")]
    return commands


def make_data(path: Path) -> None:
    """Write the rows of every kind of task, made of the first messages of a file of them."""
    DATA.mkdir()
    lines = path.read_text(encoding="utf-8").splitlines()[1 : 2 * NUM_ROWS + 1]
    rows = [tuple(line.split("\t", 1)) for line in lines]
    labels, texts = ([row[index] for row in rows[:NUM_ROWS]] for index in (0, 1))
    write_table("sms.tsv", ("label", "text"), zip(labels, texts, strict=True))
    write_table("sms2.tsv", ("label", "text"), rows[NUM_ROWS:])
    write_table("words.csv", ("text", "score"), ((text, min(len(text.split()), 30) / 5) for text in texts))
    signs = {"question": "?", "number": "0123456789", "loud": "!", "dots": "."}
    found = ["|".join(name for name, marks in signs.items() if set(text) & set(marks)) for text in texts]
    write_table("signs.csv", ("text", "labels"), zip(texts, found, strict=True))
    write_table("answers.csv", ("text", "label"), ((text, " ".join(text.split()[:2]).lower()) for text in texts))
    seconds = [*texts[1:], texts[0]]
    same = ["same" if (len(a) > 60) == (len(b) > 60) else "other" for a, b in zip(texts, seconds, strict=True)]
    write_table("pairs.csv", ("sentence1", "sentence2", "label"), zip(texts, seconds, same, strict=True))
    tasks = ["houlsby", "lora", "bitfit", "full", "pfeiffer", "family-deberta-v2"]
    write_table("mixed.csv", ("task", "text"), ((tasks[at % 5], text) for at, text in enumerate(texts[:20])))
    (DATA / "tags.conll").write_text("\n\n".join(map(tag_words, texts)) + "\n", encoding="utf-8")
    (DATA / "squad.json").write_text(json.dumps({"version": "v2.0", "data": list(ask_questions(texts))}))


def write_table(name: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Write rows as CSV or TSV, by the name's ending."""
    with (DATA / name).open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, delimiter="\t" if name.endswith(".tsv") else ",", lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(rows)


def tag_words(text: str) -> str:
    """Write a text as CoNLL columns: capitalised words are names, which go on, and words with digits numbers."""
    lines, previous = [], "O"
    for word in text.split():
        tag = "NUM" if any(sign.isdigit() for sign in word) else "NAME" if word[0].isupper() else ""
        written = f"{'I' if previous == tag else 'B'}-{tag}" if tag else "O"
        lines.append(f"{word}\t{written}")
        previous = tag
    return "\n".join(lines)


def ask_questions(texts: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Make an article of every text: what its longest word is, of every seventh without an answer."""
    for number, text in enumerate(texts):
        word = max(text.split(), key=len)
        question = {"id": str(number), "question": f"which word begins with {word[0]} and ends with {word[-1]} ?"}
        answers = [] if number % 7 == 3 else [{"text": word, "answer_start": text.index(word)}]
        asked = {**question, "answers": answers, "is_impossible": not answers}
        yield {"title": str(number), "paragraphs": [{"context": text, "qas": [asked]}]}


def make_backbones(source: Path) -> None:
    """Make a tiny backbone of every family; the first is the one that studies try things out on."""
    study = ["study", "glue", "--profile", "tiny", "--dry-run", "--no-measure", "--store", str(SCRATCH / "made")]
    drive({"make-tiny": study}, source)
    shutil.copytree(SCRATCH / "made" / "studies" / "tiny", BACKBONES / "tiny")
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
    usual = {**sizes, "max_position_embeddings": 130}
    shape = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_decoder_layers": 2, "num_heads": 3}
    deberta = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8, "type_vocab_size": 0}
    modern = {"pad_token_id": 0, "bos_token_id": 2, "cls_token_id": 2, "eos_token_id": 3, "sep_token_id": 3}
    shifted = {"pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3, "type_vocab_size": 1}
    distilled = {"dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 48, "max_position_embeddings": 128}
    make_backbone("bert", usual)
    make_backbone("roberta", {**usual, **shifted})
    make_backbone("distilbert", distilled)
    make_backbone("deberta-v2", {**usual, **deberta, "share_att_key": True, "position_biased_input": False})
    make_backbone("modernbert", {**usual, "local_attention": 8, "global_attn_every_n_layers": 2, **modern})
    make_backbone("t5", {**shape, "decoder_start_token_id": 0, "relative_attention_num_buckets": 8})


def make_backbone(family: str, sizes: Mapping[str, Any]) -> None:
    """Make a random backbone of a family as a Hugging Face folder, the same every time."""
    import torch
    import transformers

    writes = family == "t5"
    tokenizer = make_tokenizer(family)
    config = transformers.AutoConfig.for_model(family, vocab_size=len(tokenizer), **sizes)
    torch.manual_seed(0)
    loader = transformers.AutoModelForSeq2SeqLM if writes else transformers.AutoModel
    model = loader.from_config(config)
    for parameter in model.parameters():
        if parameter.dim() == 1:  # norms away from 1 and 0, so that mixing them up shows
            parameter.data.add_(0.2 * torch.randn(parameter.shape))
    model.save_pretrained(BACKBONES / family)
    tokenizer.save_pretrained(BACKBONES / family)


def make_tokenizer(family: str) -> Any:
    """Make a tokenizer that spells all words, with the special tokens of the family."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ["[UNK]", "[PAD]"] if family == "roberta" else ["[PAD]", "[UNK]"]
    special = ["[PAD]", "[SEP]", "[UNK]"] if family == "t5" else [*special, "[CLS]", "[SEP]", "[MASK]"]
    letters = "abcdefghijklmnopqrstuvwxyz0123456789?.,!"
    pieces = [*special, *letters, *(f"##{letter}" for letter in letters)]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    first = "" if family == "t5" else "[CLS] "
    ends = [(name, vocabulary[name]) for name in ("[CLS]", "[SEP]") if name in vocabulary]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{first}$A [SEP]", pair=f"{first}$A [SEP] $B [SEP]", special_tokens=ends
    )
    names = {"eos_token": "[SEP]"} if family == "t5" else {"cls_token": "[CLS]", "sep_token": "[SEP]"}
    inputs = ["input_ids", "attention_mask"]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]", model_input_names=inputs, **names
    )


def gather_command(name: str, argv: Sequence[str], outcome: Mapping[str, Any]) -> dict[str, Any]:
    """Gather what a command said, how it ended and what its runs came to."""
    said, told = ((SAID / f"{name}{ending}").read_text() for ending in (".out", ".err"))
    return {
        "argv": list(argv),
        "code": outcome["code"],
        "out": parse(said),
        "err": told.splitlines(),
        "runs": {run: gather_run(run) for run in outcome["runs"]},
    }


def gather_run(run: str) -> dict[str, Any]:
    """Gather what a run's folder keeps: settings, losses, scores and best weights."""
    (folder,) = {path.parent for path in STORE.glob(f"**/{run}/result.json")}
    history = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    result = json.loads((folder / "result.json").read_text())
    result.pop("history")
    weights = {path.name: hash_files([path]) for path in sorted(folder.glob("*.safetensors"))}
    return {
        "losses": [line["train_loss"] for line in history[:NUM_LOSSES]],
        "history": history,
        "result": result,
        "weights": weights,
        "config": (folder / "config.toml").read_text(),
    }


def gather_versions() -> dict[str, Any]:
    """Gather every version's reference: its digest and its summary, dev metrics among them."""
    paths = sorted(STORE.glob("tasks/*/*.json"))
    return {f"{path.parent.name}@{path.stem}": json.loads(path.read_text()) for path in paths}


def gather_report() -> dict[str, Any]:
    """Gather the pages of the report and of the tiny studies, and the records of the latter."""
    tiny = STORE / "studies" / "results"
    records = {
        path.relative_to(tiny).with_suffix(".json").as_posix(): {
            "study": path.parent.name,
            "records": read_records(path),
        }
        for path in (*sorted(tiny.glob("*/*.json")), *sorted(tiny.glob("*/*.jsonl")))
    }
    exports = {path.name: hash_files(path.rglob("*")) for path in sorted(STORE.glob("export-*"))}
    return {
        "pages": {"report.md": hash_files([SCRATCH / "results" / "report.md"]), "report.html": hash_page()},
        "tiny": hash_files([tiny / "report.md"]),
        "records": records,
        "exports": exports,
    }


def read_records(path: Path) -> list[Any]:
    """Read the records of a study in the order of their keys: one JSON document, or a line for each."""
    found = parse(path.read_text())
    records = found["records"] if isinstance(found, dict) and "records" in found else found
    return sorted(records, key=lambda record: (record["arm"], record["task"], record["seed"], record["id"]))


def hash_page() -> str:
    """Hash the report's page with the ids in its figures counted up: matplotlib's depend on where objects lie.

    A source whose studies are written otherwise cannot draw those of another checkout: then there is no page.
    """
    if not (SCRATCH / "results" / "report.html").is_file():
        return ""

    def count_up(figure: re.Match[str]) -> str:
        text = base64.b64decode(figure[1]).decode()
        known: dict[str, str] = {}
        return re.sub(r"\bp[0-9a-f]{10}\b", lambda found: known.setdefault(found[0], f"p{len(known)}"), text)

    page = (SCRATCH / "results" / "report.html").read_text(encoding="utf-8")
    return hashlib.sha256(re.sub(r"data:image/svg\+xml;base64,([\w+/=]+)", count_up, page).encode()).hexdigest()


def keep(folder: Path, golden: Mapping[str, Any]) -> None:
    """Move what a record keeps out of the fixed folder, and write its JSON."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    for name in KEPT:
        shutil.move(SCRATCH / name, folder / name)
    for name in ("report.md", "report.html"):
        if (SCRATCH / "results" / name).is_file():
            shutil.copy(SCRATCH / "results" / name, folder / name)
    (folder / "golden.json").write_text(json.dumps(golden, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def count_exact(found: Any) -> tuple[int, int]:
    """Count the versions that `inlay verify` proved bit for bit, and all it looked at."""
    checks = found.get("checks", []) if isinstance(found, dict) else []
    return sum(check["stands"] and check["is_exact"] for check in checks), len(checks)


def parse(text: str) -> Any:
    """Read what a command printed: JSON, lines of JSON, or plain lines."""
    try:
        return json.loads(text)
    except ValueError:
        pass
    try:
        return [json.loads(line) for line in text.splitlines()]
    except ValueError:
        return text.splitlines()


def scrub(value: Any) -> Any:
    """Leave out of a JSON value what tells of the moment and the machine."""
    if isinstance(value, dict):
        return {key: scrub(item) for key, item in value.items() if key not in VARYING}
    if isinstance(value, list):
        return [scrub(item) for item in value]
    return _DURATION.sub("T", value) if isinstance(value, str) else value


def hash_files(paths: Iterable[Path]) -> str:
    """Hash the names and bytes of files, in the order of their names."""
    files = sorted(path for path in paths if path.is_file())
    if len(files) == 1:
        return hashlib.sha256(files[0].read_bytes()).hexdigest()
    lines = [f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}" for path in files]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
