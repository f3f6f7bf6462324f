"""Records of studies that were never run: the form is real, the numbers are drawn from a seeded generator."""

from __future__ import annotations

import hashlib
import math
import random
import zlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from inlay.model.bank.methods import METHODS
from inlay.settings.run_config import RunConfig, overlay
from inlay.settings.trees import read_tree
from inlay.studies.run.records import Record
from inlay.studies.spec.report_spec import read_claims, read_report
from inlay.studies.spec.study import Arm, Point, Study

GLUE = {
    "glue/cola": ("matthews", 0.58),
    "glue/sst2": ("accuracy", 0.935),
    "glue/mrpc": ("f1", 0.905),
    "glue/stsb": ("spearman", 0.893),
    "glue/mnli": ("accuracy", 0.78),
    "glue/rte": ("accuracy", 0.73),
    "glue/wnli": ("accuracy", 0.563),
}
EXTRA = {
    f"extra/{name}": ("accuracy", level)
    for name, level in {
        "newsgroups": 0.83,
        "airline": 0.83,
        "disasters": 0.84,
        "emotion": 0.38,
        "global-warming": 0.84,
        "political-audience": 0.81,
        "political-bias": 0.77,
        "political-message": 0.44,
        "primary-emotions": 0.36,
        "progressive-opinion": 0.72,
        "progressive-stance": 0.6,
        "us-economic-performance": 0.75,
        "sms-spam": 0.992,
    }.items()
}
LEVELS = {**GLUE, **EXTRA, "squad": ("token_f1", 0.86)}
MAJORITY = {"glue/mnli": 0.354, "glue/cola": 0.691}
BACKBONE = 109_486_464


STUDY_FILES = Path(__file__).parents[2] / "studies"


@dataclass(frozen=True)
class LooseArm(Arm):
    """An arm whose grid is given point by point; by itself one point, which a record with any axes is of."""

    grid: tuple[dict[str, Any], ...] = ({},)

    def points(self, per_task: Any = None) -> list[Point]:
        """The grid; a task's own settings are laid over it. What tells arms apart is their title."""
        own = [axes | {key: value for key, value in (per_task or {}).items() if key in axes} for axes in self.grid]
        return [Point(axes, self._config(axes)) for axes in own]

    def _config(self, axes: dict[str, Any]) -> RunConfig:
        tree: dict[str, dict[str, Any]] = {"method": {"scale": 1 + zlib.crc32(self.title.encode()) % 9973 / 10_000}}
        for key, value in axes.items():
            tree.setdefault("method" if key in ("size", "init_std") else "train", {})[key] = value
        return overlay(self.base(), tree)


def settings_of(arm: str) -> dict[str, dict[str, Any]]:
    """The method and training of an arm, by its name here: what rows are found by."""
    stem, _, number = arm.rpartition("-")
    has_number = number.isdigit()
    kind = stem if has_number else arm
    methods = {
        "full": "full", "full-slow": "full", "sequence": "full", "adapters": "houlsby", "top": "top",
        "hyperformer": "hyperformer", "hyperformer++": "hyperformer++", "adapters-multi": "mahabadi-multi",
        "single-adapters": "mahabadi-multi", "multi-full": "full-multi", "single-full": "full-multi",
    }  # fmt: skip
    method: dict[str, Any] = {"name": methods.get(kind, arm if arm in METHODS else "pfeiffer")}
    if kind.startswith(("head-", "features-")):
        method["name"] = "head"
    if kind == "adapters" and has_number:
        method["size"] = int(number)
    if kind == "top" and has_number:
        method["layers"] = f"-{number}:"
    return {"method": method, "train": {"hidden": "tanh"} if arm.endswith("-mlp") else {}}


@dataclass
class Bench:
    """Where records of one study are made up, on one backbone."""

    study: str
    backbone: str = "mpnet-base"
    profile: str = "device"
    records: list[Record] = field(default_factory=list)

    def add(self, arm: str, task: str, score: float, **more: Any) -> Record:
        """One finished run; `more` are fields of the record, `method` is put into its config."""
        metric = more.pop("metric", LEVELS.get(task, ("accuracy", 0))[0])
        axes, seed = more.pop("axes", {}), more.pop("seed", 0)
        method = more.pop("method", {}) | {key: value for key, value in axes.items() if key in ("size", "init_std")}
        train = {key: value for key, value in axes.items() if key in ("lr", "epochs")} | {"seed": seed}
        own = settings_of(arm)
        text = repr((self.study, arm, task, axes, seed, method))
        dev = {metric: score} | more.pop("dev", {"accuracy": score} if metric != "spearman" else {"pearson": score})
        if metric in ("f1", "matthews"):  # what the error of rows is computed from
            dev = {"accuracy": score, "f1": score, "matthews": score} | dev
        values: dict[str, Any] = {
            "id": hashlib.sha256(text.encode()).hexdigest()[:16],
            "study": self.study,
            "arm": arm,
            "task": task,
            "backbone": self.backbone,
            "fingerprint": "f" * 16,
            "profile": self.profile,
            "seed": seed,
            "axes": axes,
            "trained_parameters": 2_419_202,
            "backbone_parameters": BACKBONE,
            "num_train": _sample_of(arm) or 2490,
            "metric": metric,
            "dev": dev,
            "test": None,
            "majority": MAJORITY.get(task),
            "status": "finished",
            "curve": [[1, score]],
            "seconds": 60.0,
            "commit": "0" * 40,
            "hardware": "NVIDIA H200",
            "versions": {"torch": "2.11.0"},
            "date": "2026-11-15T12:00:00+00:00",
            "config": {"method": own["method"] | method, "train": own["train"] | train},
            "extra": {},
        }
        # So many rows that they have no error to speak of: what is drawn here are seeds.
        more["extra"] = {"num_dev": 10**12, "num_test": 10**12, **more.get("extra", {})}
        record = Record(**{**values, **more})
        self.records.append(record)
        return record


def adapter_parameters(size: int) -> int:
    """Houlsby's count on BERT-base, two labels: 24 adapters, 25 layer norms, the head."""
    return 24 * (2 * size * 768 + 768 + size) + 38_400 + 1_538


def top_parameters(layers: int) -> int:
    """The top layers of BERT-base and a head."""
    return 7_087_872 * layers + 1_538


def study(name: str, tasks: Any, arms: dict[str, str], **more: Any) -> Study:
    """A study whose arms all have all tasks; its report and claims are those of the study's file, if it has one."""
    path = STUDY_FILES / f"{name}.toml"
    tree = read_tree(path) if path.is_file() else {}
    made = {
        arm: LooseArm(arm, "runs", title, settings_of(arm), {}, 1, tuple(tasks), sample=_sample_of(arm))
        for arm, title in arms.items()
    }
    values: dict[str, Any] = {
        "title": "A study",
        "profile": "device",
        "source": "a paper",
        "report_on": "dev",
        "published": name,
        "notes": (),
        "backbone": "mpnet-base",
        "data": {},
        "report": read_report(tree.get("report", {}), ()),
        "claims": read_claims(name, tree.get("claims", ())),
    }
    return Study(**{"name": name, "tasks": tuple(tasks), "arms": made, **values, **more})


def _sample_of(arm: str) -> int | None:
    stem, _, number = arm.rpartition("-")
    return int(number) if stem in ("hyperformer++", "adapters-multi", "multi-full") and number.isdigit() else None


CLAIMS = tuple(
    claim for path in sorted(STUDY_FILES.glob("*.toml")) for claim in read_claims(path.stem, read_tree(path)["claims"])
)


def _fill(bench: Bench, arm: str, tasks: Any, shift: float, **more: Any) -> None:
    """Three seeds (two for fine-tuning) × two learning rates on every task, `shift` beside the task's level."""
    draw = random.Random(f"{bench.study}/{arm}/{more.get('axes')}")
    rates = (2e-5, 5e-5) if arm.startswith(("full", "top")) else (3e-4, 1e-3)
    axes = more.pop("axes", {})
    on_test = more.pop("on_test", False)
    for task in tasks:
        level = LEVELS[task][1] + shift + draw.gauss(0, 0.008)
        for number, lr in enumerate(rates):
            for seed in range(2 if arm.startswith(("full", "top")) else 3):
                score = min(level - 0.01 * number + draw.gauss(0, 0.006), 1.0)
                test = {LEVELS[task][0]: score - 0.005 + draw.gauss(0, 0.004)} if on_test else None
                bench.add(arm, task, score, axes={"lr": lr, **axes}, seed=seed, test=test, **more)


def glue() -> tuple[Study, list[Record]]:
    """The main table."""
    bench = Bench("glue")
    _fill(bench, "full", GLUE, 0.0, trained_parameters=BACKBONE - 590_592)
    for size in (8, 64, 256):
        _fill(bench, "adapters", GLUE, -0.004, axes={"size": size}, trained_parameters=adapter_parameters(size))
    arms = {"full": "full fine-tuning", "adapters": "adapters (8–256)"}
    return study("glue", GLUE, arms, title="GLUE: full fine-tuning against adapters"), bench.records


def extra() -> tuple[Study, list[Record]]:
    """The additional tasks, on test."""
    bench = Bench("extra")
    for task, (_, level) in EXTRA.items():
        score = level - 0.04
        bench.add("baseline", task, score, test={"accuracy": score}, trained_parameters=29_388, config={})
    _fill(bench, "full", EXTRA, 0.0, trained_parameters=BACKBONE - 590_592, on_test=True)
    for layers in (1, 3, 6, 9):
        _fill(bench, f"top-{layers}", EXTRA, -0.01, trained_parameters=top_parameters(layers), on_test=True)
    _fill(bench, "adapters", EXTRA, -0.003, axes={"size": 64}, on_test=True)
    _fill(bench, "none", EXTRA, -0.002, trained_parameters=3_006_720, on_test=True)
    arms = {"baseline": "TF-IDF, no transformer", "full": "full fine-tuning", "adapters": "adapters",
            "none": "`none` (not shared)"}  # fmt: skip
    arms |= {f"top-{layers}": f"top {layers}" for layers in (1, 3, 6, 9)}
    made = study("extra", EXTRA, arms, report_on="test", title="Additional classification tasks")
    made.arms["baseline"] = replace(made.arms["baseline"], kind="baseline")
    return made, bench.records


def tradeoff() -> tuple[Study, list[Record]]:
    """Score against trained parameters."""
    bench, tasks = Bench("tradeoff"), [task for task in GLUE if task != "glue/wnli"]
    _fill(bench, "full", tasks, 0.0, trained_parameters=BACKBONE - 590_592)
    for power in range(10):
        shift = -0.02 * math.exp(-power / 2) - 0.002
        axes = {"size": 2**power}
        _fill(bench, f"adapters-{2**power}", tasks, shift, axes=axes, trained_parameters=adapter_parameters(2**power))
    for layers in (1, 2, 3, 5, 7, 9, 11, 12):
        _fill(bench, f"top-{layers}", tasks, -0.12 * math.exp(-layers / 4), trained_parameters=top_parameters(layers))
    _fill(bench, "norms", tasks, -0.045, trained_parameters=39_938)
    arms = {record.arm: record.arm for record in bench.records}
    return study("tradeoff", tasks, arms, title="Score against trained parameters"), bench.records


def squad() -> tuple[Study, list[Record]]:
    """F1 against parameters."""
    bench = Bench("squad")
    _fill(bench, "full", ["squad"], 0.0, trained_parameters=BACKBONE - 590_592)
    for size, shift in ((2, -0.025), (8, -0.016), (64, -0.006), (256, -0.004)):
        _fill(bench, f"adapters-{size}", ["squad"], shift, trained_parameters=adapter_parameters(size))
    arms = {record.arm: record.arm for record in bench.records}
    return study("squad", ["squad"], arms, title="SQuAD v1.1"), bench.records


def ablation(num_layers: int = 12) -> tuple[Study, list[Record]]:
    """Every span removed: the upper the layers and the more of them, the more is lost, down to the majority."""
    bench, tasks = Bench("ablation"), ["glue/mnli", "glue/cola"]
    for task in tasks:
        whole, floor = {"glue/mnli": 0.79, "glue/cola": 0.84}[task], MAJORITY[task]
        for seed in range(3):
            draw = random.Random(f"{task}/{seed}")
            spans = {"whole": whole}
            for first in range(num_layers):
                for last in range(first, num_layers):
                    weight = sum(((layer + 1) / num_layers) ** 2 for layer in range(first, last + 1))
                    lost = (whole - floor) * (1 - math.exp(-((0.6 * weight) ** 2)))
                    spans[f"{first}-{last}"] = whole - lost + draw.gauss(0, 0.001)
            bench.add("adapters-64", task, whole, seed=seed, extra={"spans": spans}, metric="accuracy")
    arms = {"adapters-64": "adapters (64)"}
    return study("ablation", tasks, arms, title="Removing trained adapters"), bench.records


def init() -> tuple[Study, list[Record]]:
    """Flat below 1e-2, falling above."""
    bench, tasks = Bench("init"), ["glue/mnli", "glue/cola"]
    for task, (level, drop) in {"glue/mnli": (0.79, 0.05), "glue/cola": (0.83, 0.14)}.items():
        for power in range(-7, 1):
            for seed in range(3):
                draw = random.Random(f"{task}/{power}/{seed}")
                score = level - drop * max(0, power + 2) / 2 + draw.gauss(0, 0.004)
                axes = {"init_std": 10.0**power, "lr": 3e-4}
                bench.add("adapters-64", task, score, axes=axes, seed=seed, metric="accuracy")
    made = study("init", tasks, {"adapters-64": "adapters (64)"}, title="Scale of the initial values")
    grid = tuple({"init_std": 10.0**power, "lr": 3e-4} for power in range(-7, 1))
    made.arms["adapters-64"] = replace(made.arms["adapters-64"], grid=grid)
    return made, bench.records


def sizes() -> tuple[Study, list[Record]]:
    """Stable over sizes."""
    bench, tasks = Bench("sizes"), [task for task in GLUE if task != "glue/stsb"]
    for size in (8, 64, 256):
        _fill(bench, f"adapters-{size}", tasks, 0.0, trained_parameters=adapter_parameters(size), metric="accuracy")
    arms = {f"adapters-{size}": f"adapters ({size})" for size in (8, 64, 256)}
    return study("sizes", tasks, arms, title="Adapter sizes"), bench.records


def extensions() -> tuple[Study, list[Record]]:
    """The paper's negative results."""
    bench, tasks = Bench("extensions"), ["glue/cola", "glue/mrpc", "glue/rte", "glue/mnli"]
    arms = {
        "adapters-64": "adapters (64)",
        "batch-norm": "batch norm inside",
        "layer-norm": "layer norm inside",
        "two-layers": "two layers per adapter",
        "tanh": "tanh",
        "attention-only": "attention only",
        "parallel": "in parallel",
        "multiply": "multiplicative",
    }
    for number, arm in enumerate(arms):
        _fill(bench, arm, tasks, -0.002 * number)
    return study("extensions", tasks, arms, title="Extensions of the adapter"), bench.records


def sharing() -> tuple[Study, list[Record]]:
    """Four ways of sharing, on GLUE and on the additional tasks."""
    bench = Bench("sharing")
    tasks = [task for task in GLUE if task != "glue/wnli"] + list(EXTRA)
    counts = {"none": 3_006_720, "within-layer": 1_189_632, "every-3": 396_544, "neighbours": 1_288_768}
    for arm, shift in {"none": -0.002, "within-layer": -0.006, "every-3": -0.005, "neighbours": -0.007}.items():
        _fill(bench, arm, tasks, shift, trained_parameters=counts[arm] + 1_538)
    _fill(bench, "full", tasks, 0.0, trained_parameters=BACKBONE - 590_592)
    return study("sharing", tasks, {arm: arm for arm in (*counts, "full")}, title="Shared adapters"), bench.records


def stream() -> tuple[Study, list[Record]]:
    """Adapters keep what they had; one network fine-tuned through the same sequence forgets."""
    bench = Bench("stream")
    tasks = [task for task in GLUE if task not in ("glue/wnli", "glue/mnli")]
    for arm in ("adapters-64", "sequence"):
        for seed in range(2):
            for number, task in enumerate(tasks):
                level = LEVELS[task][1]
                after = {}
                for earlier, name in enumerate(tasks[: number + 1]):
                    lost = 0.12 * (number - earlier) if arm == "sequence" else 0.0
                    after[name] = max(LEVELS[name][1] - lost + 0.004 * seed, 0.02)
                count = BACKBONE - 590_592 if arm == "sequence" else 2_419_202
                extra = {"after": after, "moved": None if arm == "sequence" else 0.0}
                bench.add(arm, task, level, seed=seed, extra=extra, trained_parameters=count)
    arms = {"adapters-64": "adapters (64)", "sequence": "one network, fine-tuned in turn"}
    return study("stream", tasks, arms, title="Tasks one after another"), bench.records


def methods() -> tuple[Study, list[Record]]:
    """Every method."""
    bench, tasks = Bench("methods", backbone="minilm"), ["glue/cola", "glue/mrpc", "glue/rte", "glue/stsb"]
    counts = {
        "full": (22_566_146, 0.0), "top-3": (5_324_162, -0.03), "adapters-64": (605_954, -0.016),
        "pfeiffer": (298_370, -0.037), "parallel": (298_370, -0.03), "lora": (74_498, -0.039), "ia3": (14_594, -0.043),
        "bitfit": (26_498, -0.065), "norms": (10_754, -0.06), "head-mean": (770, -0.2), "head-cls": (770, -0.21),
        "head-mix": (778, -0.11), "within-layer": (308_354, -0.03), "every-3": (109_954, -0.037),
        "baseline": (29_388, -0.10), "adapters-frozen-norms": (595_970, -0.018), "all-shared": (60_354, -0.04),
        "layer-norm": (607_490, -0.02), "batch-norm": (607_490, -0.025), "two-layers": (655_874, -0.022),
        "tanh": (605_954, -0.019), "attention-only": (308_354, -0.033), "in-parallel": (605_954, -0.023),
        "multiply": (605_954, -0.03),
    }  # fmt: skip
    for arm, (count, shift) in counts.items():
        _fill(bench, arm, tasks, shift, trained_parameters=count, backbone_parameters=22_713_216)
    arms = {arm: arm for arm in counts}
    return study("methods", tasks, arms, title="Every method", published=""), bench.records


def features() -> tuple[Study, list[Record]]:
    """Frozen features against tuning."""
    bench, tasks = Bench("features"), ["glue/sst2", "glue/mnli", "glue/mrpc", "glue/stsb"]
    arms = {"features-cls": -0.2, "features-mean": -0.14, "features-mix": -0.08, "features-mix-mlp": -0.06}
    for arm, shift in arms.items():
        _fill(bench, arm, tasks, shift, trained_parameters=1_538)
    _fill(bench, "adapters-64", tasks, -0.004)
    _fill(bench, "full", tasks, 0.0, trained_parameters=BACKBONE - 590_592)
    return study("features", tasks, {arm: arm for arm in (*arms, "adapters-64", "full")}, title="Tune or not"), (
        bench.records
    )


def uva() -> tuple[Study, list[Record]]:
    """The student reproduction."""
    bench = Bench("uva")
    for task, level in {"glue/mrpc": 0.87, "glue/cola": 0.83}.items():
        for arm, shift in {"full": 0.0, "adapters-64": 0.004}.items():
            for seed in range(3):
                score = level + shift + random.Random(f"{task}/{arm}/{seed}").gauss(0, 0.005)
                count = BACKBONE - 590_592 if arm == "full" else 2_419_202
                bench.add(arm, task, score, seed=seed, metric="accuracy", trained_parameters=count)
    arms = {"full": "full fine-tuning", "adapters-64": "adapters (64)"}
    return study("uva", ["glue/mrpc", "glue/cola"], arms, title="The student reproduction"), bench.records


def _fill_joint(bench: Bench, arm: str, tasks: Any, shift: float, **more: Any) -> None:
    """Three seeds of a run of all tasks, or of one for each, with other published metrics and embeddings."""
    total, embeds = more.pop("total", 2_400_000), more.pop("embeds", False)
    for seed in range(3):
        draw = random.Random(f"{bench.study}/{arm}/{seed}")
        for number, task in enumerate(tasks):
            metric, level = LEVELS[task]
            score = level + shift + draw.gauss(0, 0.003)
            others = {"glue/mrpc": {"accuracy": score - 0.04}, "glue/stsb": {"pearson": score + 0.01}}
            kind = {"glue/mnli": 1, "glue/rte": 1, "glue/mrpc": 2, "glue/stsb": 2}.get(task, 3 + number)
            vector = [draw.gauss(0, 0.3) + (place == kind) * 3 for place in range(8)]
            joint = {"run": f"{arm}-{seed}", "tasks": list(tasks)}
            if arm.startswith("single"):
                joint = {"run": f"{arm}-{task}-{seed}", "tasks": [task]}
            extra: dict[str, Any] = {"joint": joint | {"is_copy": more.get("is_copy", False)}}
            drawn = random.Random(f"{arm}/{seed}/{task}")
            start = [drawn.gauss(0, 0.02) + (place == number) for place in range(8)]
            extra |= {"embedding": vector, "embedding_start": start} if embeds else {}
            dev = {metric: score, **others.get(task, {})}
            count = round(total / len(tasks))
            own = {key: value for key, value in more.items() if key != "is_copy"}
            bench.add(arm, task, score, seed=seed, extra=extra, dev=dev, trained_parameters=count, **own)


JOINT_TASKS = ("glue/cola", "glue/sst2", "glue/mrpc", "glue/stsb", "glue/rte", "glue/mnli")


def multitask() -> tuple[Study, list[Record]]:
    """Several tasks as one run."""
    bench = Bench("multitask", backbone="flan-t5-small")
    arms = {
        "single-adapters": -0.02, "adapters-multi": -0.01, "hyperformer": 0.005, "hyperformer++": 0.004,
        "multi-full": -0.002,
    }  # fmt: skip
    totals = {"hyperformer": 28_000_000, "hyperformer++": 2_400_000, "multi-full": BACKBONE}
    for arm, shift in arms.items():
        _fill_joint(bench, arm, JOINT_TASKS, shift, total=totals.get(arm, 3_000_000), is_copy=arm == "multi-full")
    return study("multitask", JOINT_TASKS, {arm: arm for arm in arms}, title="Several tasks"), bench.records


def fewshot() -> tuple[Study, list[Record]]:
    """Few samples of new tasks."""
    bench, arms = Bench("fewshot", backbone="flan-t5-small"), {}
    for method, shift in {"multi-full": 0.0, "adapters-multi": -0.01, "hyperformer++": 0.02}.items():
        for number in (4, 16, 250, 2000):
            arms[f"{method}-{number}"] = f"{method}, {number} samples"
            for task in ("cb", "imdb") if number < 250 else ("cb",) if number == 250 else ("imdb",):
                for seed in range(3):
                    draw = random.Random(f"{method}/{number}/{task}/{seed}")
                    score = 0.6 + 0.03 * math.log(number) + shift + draw.gauss(0, 0.004)
                    bench.add(f"{method}-{number}", task, score, seed=seed, test={"accuracy": score}, metric="accuracy")
    made = study("fewshot", ("cb", "imdb"), arms, report_on="test", title="Few samples")
    for arm in arms:
        held = dict.fromkeys(record.task for record in bench.records if record.arm == arm)
        made.arms[arm] = replace(made.arms[arm], tasks=tuple(held))
    return made, bench.records


def lowresource() -> tuple[Study, list[Record]]:
    """Few rows a task."""
    bench, arms = Bench("lowresource", backbone="flan-t5-small"), {}
    for method, shift in {"multi-full": 0.0, "adapters-multi": -0.01, "hyperformer++": 0.02}.items():
        for number in (100, 1000):
            arms[f"{method}-{number}"] = f"{method}, {number} samples a task"
            _fill_joint(bench, f"{method}-{number}", JOINT_TASKS, shift - 10 / number)
    return study("lowresource", JOINT_TASKS, arms, published="", title="Few rows a task"), bench.records


def hyper_ablation() -> tuple[Study, list[Record]]:
    """Parts taken out."""
    bench = Bench("hyper-ablation", backbone="flan-t5-small")
    arms = {
        "hyperformer": 0.0, "without-blocks": -0.12, "without-conditional-norm": -0.03, "without-projector": -0.02,
        "without-backbone-norms": -0.015, "without-norms": -0.04,
    }  # fmt: skip
    for arm, shift in arms.items():
        _fill_joint(bench, arm, JOINT_TASKS, shift)
    return study("hyper-ablation", JOINT_TASKS, {arm: arm for arm in arms}, title="Parts"), bench.records


def embeddings() -> tuple[Study, list[Record]]:
    """Tasks of a kind lie together."""
    bench = Bench("embeddings", backbone="flan-t5-small")
    _fill_joint(bench, "hyperformer++", JOINT_TASKS, 0.0, embeds=True)
    arms = {"hyperformer++": "HyperFormer++"}
    return study("embeddings", JOINT_TASKS, arms, published="", title="Embeddings"), bench.records


_MAKERS = (
    *(glue, extra, tradeoff, squad, ablation, init, sizes, extensions, sharing, stream, methods, features, uva),
    *(multitask, fewshot, lowresource, hyper_ablation, embeddings),
)
STUDIES = {make.__name__.replace("_", "-"): make for make in _MAKERS}
