"""Studies as they are written down: every file reads under every profile, and mistakes are refused by name."""

from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path

import pytest
import synthetic
import torch
import transformers

from inlay.errors import BadConfig, UnknownName
from inlay.model.backbone.sites import survey
from inlay.model.bank.methods import METHODS, find_method, layout, resolve_method
from inlay.settings.presets import apply_preset
from inlay.settings.run_config import RunConfig
from inlay.studies.judge.claims import JUDGES
from inlay.studies.spec.planning import load_tasks, plan_study
from inlay.studies.spec.profile_differences import list_differences
from inlay.studies.spec.report_spec import RULES
from inlay.studies.spec.study import find_study, list_studies, read_study, study_folders
from inlay.training.step.optimizer import learning_rate

PROFILES = ("paper", "device", "tiny")
STUDIES = list_studies([Path(__file__).parents[2] / "studies"])
ONE_TASK = "ablation drop extensions extra features glue init methods sharing sizes squad stream tradeoff uva".split()
SEVERAL_TASKS = ["embeddings", "fewshot", "hyper-ablation", "lowresource", "multitask"]
NAMES = sorted([*ONE_TASK, *SEVERAL_TASKS])

SMALL = """
title = "small"
tasks = ["glue/cola", "glue/rte"]
[train]
warmup = 0.2
[arms.full]
method = { name = "full" }
axes = { lr = [1e-5, 1e-4] }
[arms."adapters-{size}"]
each = { size = [8, 64] }
method = { name = "houlsby", size = "{size}" }
axes = { lr = [1e-3], epochs = [3, 20] }
[profiles.paper]
backbone = "large"
seeds = 5
[profiles.device]
backbone = "small"
seeds = 3
per_task = { "glue/rte" = { epochs = [2] } }
arms = { full = { seeds = 2, axes = { lr = [2e-5] } } }
[profiles.device.backbones.minilm.arms]
full.axes = { lr = [7e-5] }
"""


def write(tmp_path, text=SMALL):
    path = tmp_path / "small.toml"
    path.write_text(text)
    return path


def test_every_study_of_the_issue_is_there():
    assert sorted(STUDIES) == NAMES


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("name", NAMES)
def test_every_study_reads_under_every_profile_and_its_methods_exist(name, profile):
    study = read_study(STUDIES[name], profile)
    points = list(study.points())
    assert points
    for arm, task, point in points:
        assert task in study.tasks
        if arm.kind != "baseline":
            resolve_method(point.config.method)


@pytest.mark.parametrize("backbone", [None, "minilm"])
@pytest.mark.parametrize("name", ONE_TASK)
def test_a_device_profile_keeps_its_promises(name, backbone):
    """At least 3 seeds (2 of a copy of the backbone), 2 learning rates a method, 10 epochs at most, SST-2 3."""
    study = read_study(STUDIES[name], "device", backbone)
    rates: dict[str, set[float | None]] = {}
    for arm, task, point in study.points():
        if arm.kind == "baseline":
            continue
        is_copy = find_method(point.config.method.name).is_finetuned
        assert arm.seeds >= (2 if is_copy else 3), arm.name
        assert point.config.train.epochs <= (3 if task == "glue/sst2" else 10), (arm.name, task)
        rates.setdefault(arm.name, set()).add(point.config.train.lr)
    assert all(len(found) >= 2 for found in rates.values()), rates


@pytest.mark.parametrize("backbone", [None, "minilm"])
@pytest.mark.parametrize("name", ONE_TASK)
def test_what_a_device_profile_compares_may_train_for_as_many_epochs(name, backbone):
    """A copy of the backbone is not beaten by having had less time."""
    study = read_study(STUDIES[name], "device", backbone)
    most: dict[str, dict[str, int]] = {}
    for arm, task, point in study.points():
        if arm.kind in ("runs", "spans"):
            own = most.setdefault(task, {})
            own[arm.name] = max(own.get(arm.name, 0), point.config.train.epochs)
    assert all(len(set(own.values())) == 1 for own in most.values()), most


HOULSBY = "ablation extensions extra glue init sizes squad stream tradeoff".split()
GRID = ("lr", "epochs", "seed")


@pytest.mark.parametrize("name", HOULSBY)
def test_the_paper_profile_trains_as_houlsby_and_the_device_profile_does_not(name):
    published = dataclasses.asdict(apply_preset("houlsby2019", RunConfig()).train)
    left_open = {"dropout": None, "max_length": None} | ({"pooling": "auto"} if name == "squad" else {})
    for arm, task, point in read_study(STUDIES[name], "paper").points():
        if arm.kind == "baseline" or arm.name == "none":
            continue
        found = dataclasses.asdict(point.config.train)
        wrong = {key: found[key] for key in found if key not in GRID and found[key] != published[key]}
        assert wrong == left_open, (arm.name, task)  # 0.1 and 128 on BERT; SQuAD's windows have 384, and no pooling
    for arm, _, point in read_study(STUDIES[name], "device").points():
        train = point.config.train
        used = (train.optimizer, train.schedule, train.attention_dropout)
        assert used == ("adamw", "linear", 0.0) or arm.name == "none"


def test_not_shared_trains_as_its_own_source_has_it_beside_houlsbys_arms():
    """`none` of `extra` is TF-Adapter-BERT's, under a profile whose other arms are Houlsby's."""
    (point,) = read_study(STUDIES["extra"], "paper").arms["none"].points()
    published = apply_preset("tf-adapter-bert-none", RunConfig())
    train = dataclasses.replace(published.train, lr=1e-4, epochs=50)
    assert (point.config.method, point.config.train) == (published.method, train)


def test_the_published_sweep_of_the_additional_tasks_is_everyones():
    arms = read_study(STUDIES["extra"], "paper").arms
    for arm in (arm for arm in arms.values() if arm.name not in ("baseline", "none")):
        assert set(arm.axes["lr"]) == {1e-5, 3e-5, 1e-4, 3e-3}, arm.name
        assert set(arm.axes["epochs"]) == {20, 50, 100}, arm.name


def test_shared_adapters_train_the_additional_tasks_as_published_and_not_so_on_the_device():
    """TF-Adapter-BERT: lr 3e-4, 10 epochs for GLUE; lr 1e-4, 50 epochs for the additional tasks."""
    study = read_study(STUDIES["sharing"], "paper")
    for arm, task, point in study.points():
        if arm.name != "full":
            wanted = (3e-4, 10) if task.startswith("glue/") else (1e-4, 50)
            assert (point.config.train.lr, point.config.train.epochs) == wanted, (arm.name, task)
    device = read_study(STUDIES["sharing"], "device")
    rates = {task: {point.config.train.lr for _, other, point in device.points() if other == task} for task in
             device.tasks}  # fmt: skip
    assert rates["extra/airline"] == {3e-4, 1e-4}


@pytest.mark.parametrize("name", ["features", "methods"])
def test_a_mix_of_layers_is_not_read_through_the_last_ones_pooler(name):
    """A pooler is made for the last layer; MiniLM's was never trained at all."""
    mixed = [
        point for _, _, point in read_study(STUDIES[name], "device").points() if point.config.train.features == "mix"
    ]
    assert mixed
    assert {point.config.train.pooling for point in mixed} == {"mean"}


def test_a_profile_is_laid_over_the_one_it_is_based_on(tmp_path):
    longer = '[profiles.long]\nbase = "device"\ntrain = { warmup = 0.1 }\n[profiles.long.arms]\nfull.seeds = 4\n'
    path = write(tmp_path, SMALL + longer + "[profiles.long.backbones.minilm]\nseeds = 1\n")
    study, device = (read_study(path, profile) for profile in ("long", "device"))
    assert (study.profile, study.backbone) == ("long", "small")
    assert (study.arms["full"].seeds, device.arms["full"].seeds) == (4, 2)
    assert study.arms["full"].axes == device.arms["full"].axes == {"lr": (2e-5,)}
    warmups = [{point.config.train.warmup for _, _, point in each.points()} for each in (study, device)]
    assert warmups == [{0.1}, {0.2}]
    on_minilm = read_study(path, "long", "minilm")
    assert on_minilm.arms["full"].axes == {"lr": (7e-5,)}, "what the other says of a backbone"
    assert on_minilm.arms["adapters-8"].seeds == 1


@pytest.mark.parametrize("base", ["devise", "long", "longer"])
def test_a_profile_based_on_none_that_there_is_or_on_itself_is_refused(tmp_path, base):
    longer = f'[profiles.long]\nbase = "{base}"\n[profiles.longer]\nbase = "long"\n'
    with pytest.raises(UnknownName, match=f"`{'longer' if base == 'longer' else 'long'}` may be based on") as error:
        read_study(write(tmp_path, SMALL + longer), "long")
    assert base != "devise" or error.value.hint == "did you mean `device`?"


def test_every_method_of_one_task_is_an_arm_of_methods():
    for profile in PROFILES:
        found = {point.config.method.name for arm, _, point in read_study(STUDIES["methods"], profile).points() if
                 arm.kind != "baseline"}  # fmt: skip
        assert found == METHODS.keys()


STEPS = {
    "device": {"embeddings": 1500, "fewshot": 300, "hyper-ablation": 1500, "lowresource": 600, "multitask": 1500},
    "long": {"embeddings": 8000, "fewshot": 300, "hyper-ablation": 8000, "lowresource": 2000, "multitask": 8000},
}
"""of all tasks together; of few samples each of three tasks has a third"""


@pytest.mark.parametrize("profile", STEPS)
@pytest.mark.parametrize("backbone", [None, "minilm"])
@pytest.mark.parametrize("name", SEVERAL_TASKS)
def test_a_device_profile_of_several_tasks_states_its_steps(name, backbone, profile):
    """Seeds, rates and numbers of samples are the same for all arms, and so are the steps of those that share tasks."""
    study = read_study(STUDIES[name], profile, backbone)
    assert {arm.seeds for arm in study.arms.values()} == {5 if name == "fewshot" else 3}
    assert len({len(arm.axes["lr"]) for arm in study.arms.values()}) == 1
    assert len(set(samples_by_method(study).values())) == 1
    for _, _, point in study.points():
        assert point.config.train.epochs <= 4, "that often dev rows are scored"
    steps = {arm.kind: {point.config.joint.steps for point in arm.points()} for arm in study.arms.values()}
    totals = {number * (len(study.tasks) if kind == "single" else 1) for kind, own in steps.items() for number in own}
    assert max(totals) == STEPS[profile][name]
    assert name != "multitask" or max(totals) - min(totals) < len(study.tasks), totals


def test_the_longer_profile_has_three_times_the_steps_of_the_long_one_and_nothing_else():
    found = [read_study(STUDIES["multitask"], profile, "flan-t5-small") for profile in ("long", "longer")]
    long, longer = ({point.config for _, _, point in study.points()} for study in found)
    assert set(found[1].arms) == {"adapters-multi", "hyperformer", "hyperformer++"}
    assert {config.joint.steps for config in longer} == {24_000}

    def shorten(config):
        joint, train = dataclasses.replace(config.joint, steps=8000), dataclasses.replace(config.train, epochs=4)
        return dataclasses.replace(config, joint=joint, train=train)

    assert {config.train.epochs for config in longer} == {6}
    assert {shorten(config) for config in longer} <= long
    assert found[0].data == found[1].data


def samples_by_method(study):
    """Method -> every task and number of samples it has; none where there are no samples."""
    found = {}
    for arm, task, point in study.points():
        found.setdefault(point.config.method.name, set()).add((task, arm.sample))
    return {method: frozenset(sizes) for method, sizes in found.items()}


SAME = [
    *((each, None) for each in (*PROFILES, "long")),
    *((each, "minilm") for each in ("device", "long")),
    *(("paper", f"google-t5/t5-{size}") for size in ("small", "base")),
]


@pytest.mark.parametrize(("profile", "backbone"), SAME)
def test_studies_of_the_same_trained_models_have_the_same_settings(profile, backbone):
    """So that nothing is trained twice: the ablation's whole and the embeddings are runs of `multitask`."""
    for name, arm in (("hyper-ablation", "hyperformer"), ("embeddings", "hyperformer++")):
        found = study_points(name, profile, arm, backbone)
        on = read_study(STUDIES[name], profile, backbone).backbone  # the ablation is published for the small model
        own = study_points("multitask", profile, arm, on)
        assert all(config in own for config in found), name
        assert read_study(STUDIES[name], profile, backbone).data == read_study(STUDIES["multitask"], profile, on).data


@pytest.mark.parametrize(
    ("backbone", "config", "counts"),
    [
        ("google-t5/t5-base", {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12},
         {"hyperformer++": 5_211_056, "hyperformer": 122_404_672, "adapters-multi": 14_581_248,
          "single-adapters": 1_928_832, "multi-full": 222_903_552}),
        ("google-t5/t5-small", {"d_model": 512, "d_ff": 2048, "num_layers": 6, "num_heads": 8},
         {"hyperformer++": 2_415_776, "hyperformer": 28_074_560, "adapters-multi": 3_288_064,
          "single-adapters": 446_848, "multi-full": 60_506_624}),
    ],
)  # fmt: skip
def test_the_paper_profile_trains_the_published_number_of_parameters(backbone, config, counts):
    """Of both published sizes: what eight tasks train together, or one by itself."""
    with torch.device("meta"):
        anatomy = survey(transformers.T5ForConditionalGeneration(transformers.T5Config(**config)))
    study = read_study(STUDIES["multitask"], "paper", backbone)
    assert len(study.tasks) == 8
    for name, total in counts.items():
        arm = study.arms[name]
        num_tasks = 8 if arm.kind == "joint" else 1
        for point in arm.points():
            specs = layout(anatomy, resolve_method(point.config.method))
            assert sum(spec.num_parameters * (1 if spec.is_shared else num_tasks) for spec in specs) == total, name


@pytest.mark.parametrize("name", SEVERAL_TASKS)
def test_sizes_of_the_small_model_are_those_of_its_rows_in_every_study(name):
    for size, model in ((16, "google-t5/t5-small"), (24, "google-t5/t5-base")):
        study = read_study(STUDIES[name], "paper", model)
        assert {point.config.method.size for _, _, point in study.points()} <= {size, None}


@pytest.mark.parametrize(("backbone", "size"), [("flan-t5-small", 16), ("minilm", 12), ("mpnet-base", 24)])
@pytest.mark.parametrize("name", SEVERAL_TASKS)
def test_sizes_on_the_device_are_a_thirty_second_of_the_width(name, backbone, size):
    study = read_study(STUDIES[name], "device", backbone)
    assert {point.config.method.size for _, _, point in study.points()} <= {size, None}


@pytest.mark.parametrize("name", ["multitask", "hyper-ablation", "embeddings"])
def test_warm_up_is_five_hundred_of_the_published_steps(name):
    for arm, _, point in read_study(STUDIES[name], "paper").points():
        train, steps = dataclasses.replace(point.config.train, lr=1.0), point.config.joint.steps
        assert steps == 2**18
        assert learning_rate(train, 499, steps) == 1.0 > learning_rate(train, 498, steps), arm.name
        assert learning_rate(train, 498, steps) == pytest.approx(499 / 500)


@pytest.mark.parametrize("name", SEVERAL_TASKS)
def test_attention_drops_as_published_and_where_it_does_not_that_is_said(name):
    paper, device = (read_study(STUDIES[name], profile) for profile in ("paper", "device"))
    assert {point.config.train.attention_dropout for _, _, point in paper.points()} == {0.1}
    assert {point.config.train.attention_dropout for _, _, point in device.points()} == {0.0}
    assert any("attention" in note for note in device.notes)
    assert any("attention_dropout 0 instead of 0.1" in text for text in list_differences(device, paper))


def study_points(name, profile, arm, backbone):
    study = read_study(STUDIES[name], profile, backbone)
    return [dataclasses.replace(point.config, task="") for point in study.arms[arm].points()]


def test_one_arm_of_several_may_have_values_of_its_own(tmp_path):
    own = SMALL.replace("arms = { full", "arms = { adapters-64 = { axes = { lr = [2e-3] } }, full")
    study = read_study(write(tmp_path, own), "device")
    assert list(study.arms) == ["full", "adapters-8", "adapters-64"]
    found = {
        name: {(p.config.method.size, p.config.train.lr) for p in arm.points()} for name, arm in study.arms.items()
    }
    assert found["adapters-8"] == {(8, 1e-3)}
    assert found["adapters-64"] == {(64, 2e-3)}
    assert {p.config.train.epochs for p in study.arms["adapters-64"].points()} == {3, 20}
    with pytest.raises(BadConfig, match=r"arms.adapters-64.axis"):
        read_study(write(tmp_path, own.replace("axes = { lr = [2e-3] }", "axis = 3")), "device")


def test_what_is_laid_over_one_arm_of_several_may_stand_before_them(tmp_path):
    over = "[arms.adapters-64]\naxes = { lr = [2e-3] }\n"
    after = read_study(write(tmp_path, SMALL.replace("[profiles.paper]", f"{over}[profiles.paper]")), "device")
    before = read_study(write(tmp_path, SMALL.replace("[arms.full]", f"{over}[arms.full]")), "device")
    assert list(before.arms) == ["full", "adapters-8", "adapters-64"]
    assert before.arms == after.arms
    partial = over.replace("axes = { lr = [2e-3] }", "axes = { lr = [2e-3], layers = ['-1:'] }")
    partial = partial.replace("[arms.adapters-64]", "[arms.adapters-64]\nmethod = { activation = 'relu' }")
    study = read_study(write(tmp_path, SMALL.replace("[arms.full]", f"{partial}[arms.full]")), "device")
    assert {point.config.method.size for point in study.arms["adapters-64"].points()} == {64}


def test_an_arm_may_go_on_from_another_studys_run(tmp_path):
    (tmp_path / "first.toml").write_text(FIRST)
    path = tmp_path / "second.toml"
    path.write_text(SECOND)
    study = read_study(path, "device", "/data/some-t5")
    assert study.sources["first"].backbone == "/data/some-t5"
    assert study.arms["few-4"].sample == 4
    for old, new, reason in [
        ("first/both", "first/alone", "no arm of several tasks .* named `alone`"),
        ("first/both", "both", "write `from = "),
        ('kind = "single"', 'kind = "joint"', "write `from = "),
        ('kind = "single"', 'kind = "single"\njoint = { step = 4 }', "did you mean `joint.steps`"),
        ("sample = 4", "sample = 0", "`arms.few-4.sample` is `0`"),
        ('title = "s"', 'title = "s"\nmost_rows = { train = 3 }', "no setting named `most_rows.train`"),
        ('title = "s"', 'title = "s"\nmost_samples = { cb = "all" }', "`most_samples.cb` is `all`"),
    ]:
        path.write_text(SECOND.replace(old, new))
        with pytest.raises(BadConfig, match=re.compile(reason, re.DOTALL)):
            read_study(path, "device")


@pytest.mark.parametrize("backbone", ["minilm", "mpnet-base"])
def test_pals_are_a_row_of_encoders_as_published(backbone):
    """All tasks train one backbone together and draw annealed, with the steps and rate of full fine-tuning."""
    assert "pals" not in read_study(STUDIES["multitask"], "device").arms, "they stand beside an encoder's blocks"
    study = read_study(STUDIES["multitask"], "device", backbone)
    for point, full in zip(*(study.arms[name].points() for name in ("pals", "multi-full")), strict=True):
        assert resolve_method(point.config.method).name == "pal-published"
        assert point.config.joint == dataclasses.replace(full.config.joint, sampling="annealed")
        assert point.config.train == full.config.train
    assert study.arms["pals"].tasks == study.tasks


def test_few_shot_arms_ask_for_no_more_samples_than_a_task_has():
    study = read_study(STUDIES["fewshot"], "paper")
    for method in ("hyperformer++", "adapters-multi", "multi-full"):
        sizes = {task: [] for task in study.tasks}
        for arm in study.arms.values():
            if arm.name.rpartition("-")[0] == method:
                for task in arm.tasks:
                    sizes[task].append(arm.sample)
        assert sorted(sizes["scitail"]) == [4, 16, 32, 100, 500, 1000]
        assert sorted(sizes["cb"]) == [4, 16, 32, 100, 250]
        assert sorted(sizes["imdb"]) == sorted(sizes["yelp-polarity"]) == [4, 16, 32, 100, 500, 1000, 2000]
    assert any("SciTail has no run with 2,000 samples" in note for note in study.notes)


FIRST = """
title = "f"
tasks = ["glue/cola", "glue/rte"]
joint = { steps = 3 }
arms.both = { kind = "joint", method = { name = "hyperformer++" } }
arms.alone = { kind = "single", method = { name = "hyperformer++" } }
profiles.device = { backbone = "small" }
"""
SECOND = """
title = "s"
tasks = ["cb"]
[arms.few-4]
kind = "single"
from = "first/both"
sample = 4
method = { name = "hyperformer++" }
[profiles.device]
backbone = "small"
"""


@pytest.mark.parametrize("name", NAMES)
def test_a_profile_adds_no_arm_by_a_slip_in_its_name(name):
    for backbone in (None, "minilm"):
        for arm in read_study(STUDIES[name], "device", backbone).arms.values():
            assert arm.kind == "baseline" or arm.settings["method"] or "preset" in arm.settings, arm.name


def test_the_published_grid_of_glue_is_ninety_runs_a_task():
    arm = read_study(STUDIES["glue"], "paper").arms["adapters"]
    assert len(arm.points()) * arm.seeds == 90


def test_a_profile_is_laid_over_the_study_and_a_backbone_over_that(tmp_path):
    path = write(tmp_path)
    device = read_study(path, "device")
    assert list(device.arms) == ["full", "adapters-8", "adapters-64"]
    assert [point.axes for point in device.arms["full"].points()] == [{"lr": 2e-5}]
    assert device.arms["full"].seeds == 2
    assert device.arms["adapters-64"].seeds == 3
    assert [point.axes["epochs"] for point in device.arms["adapters-8"].points()] == [3, 20]
    by_task = {task for arm, task, point in device.points() if point.config.train.epochs == 2}
    assert by_task == {"glue/rte"}
    assert {point.config.method.size for point in device.arms["adapters-64"].points()} == {64}
    assert {point.config.train.warmup for _, _, point in device.points()} == {0.2}
    other = read_study(path, "device", "/data/minilm")
    assert other.backbone == "/data/minilm"
    assert [point.axes["lr"] for point in other.arms["full"].points()] == [7e-5]


def test_what_differs_from_the_paper_is_said(tmp_path):
    path = write(tmp_path)
    said = list_differences(read_study(path, "device"), read_study(path, "paper"))
    assert said == [
        "backbone: small instead of large",
        "full: 2 seeds instead of 5",
        "full: lr 2e-05 instead of 1e-05, 0.0001",
        "adapters-8, adapters-64: 3 seeds instead of 5",
        "glue/rte: epochs 2",
    ]
    assert list_differences(read_study(path, "paper"), read_study(path, "paper")) == []
    single, paper = read_study(path, "device"), read_study(path, "paper")
    single.arms["full"] = dataclasses.replace(paper.arms["full"], kind="single")
    assert "full: an arm of the kind `single` instead of `runs`" in list_differences(single, paper)
    squad = list_differences(read_study(STUDIES["squad"], "device"), read_study(STUDIES["squad"], "paper"))
    assert "squad: at most 10,000 training rows" in squad
    assert "at most 3,000 dev rows a task" in squad


def test_a_setting_that_only_the_paper_has_is_a_difference_and_an_open_one_is_what_runs_came_to(tmp_path):
    own = "seeds = 5\ntrain = { pooling = 'pooler', attention_dropout = 0.1 }"
    path = write(
        tmp_path, SMALL.replace("seeds = 5", own).replace("[arms.full]", "[arms.tfidf]\nkind = 'baseline'\n[arms.full]")
    )
    device, paper = read_study(path, "device"), read_study(path, "paper")
    said = list_differences(device, paper)
    assert "full, adapters-8, adapters-64: attention_dropout 0 instead of 0.1" in said
    assert not any("pooling" in text for text in said), "no run says what it came to"
    records = [record_of("full", "mean"), record_of("adapters-8", "pooler"), record_of("adapters-64", "auto")]
    said = list_differences(device, paper, records)
    assert [text for text in said if "pooling" in text] == [
        "full: pooling mean instead of pooler",
        "adapters-64: pooling left open instead of pooler",
    ]
    about = [text for text in said if "tfidf" in text]
    assert about == ["tfidf, adapters-8, adapters-64: 3 seeds instead of 5"], "it trains nothing"
    back = list_differences(paper, device)
    assert "tfidf, adapters-8, adapters-64: 5 seeds instead of 3" in back
    assert "full, adapters-8, adapters-64: pooling pooler" in back


def record_of(arm, pooling):
    return synthetic.Bench("small").add(arm, "glue/rte", 0.7, config={"train": {"pooling": pooling}})


def test_what_a_task_has_of_its_own_in_the_paper_is_a_difference(tmp_path):
    own = 'seeds = 5\nper_task = { "glue/rte" = { lr = [3e-4], epochs = [50] } }'
    path = write(tmp_path, SMALL.replace("seeds = 5", own))
    said = list_differences(read_study(path, "device"), read_study(path, "paper"))
    assert said[-1] == "glue/rte: epochs 2 instead of 50, lr as on other tasks instead of 0.0003"


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("axes = { lr = [1e-5", "axes = { epoch = [1e-5", "no setting named `epoch` to vary.*did you mean `epochs`"),
        ("[arms.full]", "[arms.full]\nkid = 1", "no setting named `arms.full.kid`.*did you mean `arms.full.kind`"),
        ("[arms.full]", '[arms.full]\nkind = "span"', "no kind of arm named `span`.*did you mean `spans`"),
        ("seeds = 5", "seeds = 0", "`arms.full.seeds` is `0`"),
        ("lr = [1e-5, 1e-4]", "lr = []", "the axis `lr` of arm `full` has no values"),
        ("lr = [1e-5, 1e-4]", "lr = [-1.0]", "`train.lr` is `-1.0`"),
        ('title = "small"', "", "`title` is missing"),
        ("warmup", "warmpu", "no setting named `train.warmpu`.*did you mean `train.warmup`"),
    ],
)
def test_a_mistake_in_a_study_is_refused_by_name_and_file(tmp_path, old, new, reason):
    path = write(tmp_path, SMALL.replace(old, new))
    with pytest.raises(BadConfig, match=re.compile(f"small.toml: .*{reason}|{reason}", re.DOTALL)):
        read_study(path, "paper")


def test_an_unknown_study_or_profile_is_refused_with_a_suggestion(tmp_path):
    with pytest.raises(UnknownName, match=r"no study named `glu`.*did you mean `glue`"):
        find_study("glu", study_folders())
    with pytest.raises(UnknownName, match=r"no profile of study `small` named `tiny`"):
        read_study(write(tmp_path), "tiny")


def test_a_file_of_ones_own_is_a_study_too(tmp_path):
    path = write(tmp_path)
    assert find_study(str(path), study_folders()) == path


def test_steps_of_the_student_reproduction_are_counted_as_theirs():
    """int(8551 / 32 × 15) = 4008 steps of CoLA; an epoch of ours has 268, so the fifteenth is cut short."""
    from inlay.training.run.run import count_steps

    for arm in read_study(STUDIES["uva"], "paper").arms.values():
        for point in arm.points():
            assert count_steps(8551, point.config.train) == int(8551 / 32 * 15) == 4008
    assert count_steps(8551, RunConfig().train) == 268 * 10


@pytest.mark.parametrize("name", ["glue", "ablation", "init", "stream"])
def test_runs_are_counted_as_they_are_planned(tiny_bert, name):
    """What several arms ask for is one run: adapters of every size have those of size 64."""
    study = read_study(STUDIES[name], "tiny")
    plan = plan_study(study, tiny_bert, *load_tasks(study, None))
    assert study.num_runs == len({item.id for item in plan.items})


# Names of studies that mean something else there: a field of records, a data set, two rules of claims.
NOT_STUDIES = {"extra", "squad", "init", "embeddings"}


def test_no_python_file_knows_the_name_of_a_study():
    root = Path(__file__).parents[2] / "src" / "inlay"
    for path in sorted([*(root / "studies").rglob("*.py"), *(root / "cli").glob("study*.py")]):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert node.value not in STUDIES.keys() - NOT_STUDIES, f"{path}:{node.lineno}"
                for name in STUDIES.keys() - NOT_STUDIES:
                    assert not node.value.startswith(f"{name}-"), f"{path}:{node.lineno}"


def test_a_claim_on_a_row_that_nothing_makes_is_refused(tmp_path):
    claim = '[[claims]]\nname = "a"\ntext = "b"\nsource = "c"\nrule = "above"\nrows = ["full", "{}"]\n'
    with pytest.raises(BadConfig, match="row of claim `a` named `adaptors-8`"):
        read_study(write(tmp_path, SMALL + claim.format("adaptors-8")), "device")
    with pytest.raises(BadConfig, match="rule of claim `a` named `abov`"):
        read_study(write(tmp_path, SMALL + claim.format("adapters-8").replace("above", "abov")), "device")
    with pytest.raises(BadConfig, match=r"claims\.bond"):
        read_study(write(tmp_path, SMALL + claim.format("adapters-8") + "bond = 3\n"), "device")
    assert read_study(write(tmp_path, SMALL + claim.format("adapters-8")), "device").claims[0].study == "small"


def test_every_rule_that_a_file_may_name_has_a_judge():
    assert RULES.keys() == JUDGES.keys()


def test_a_rule_of_rows_names_settings_that_there_are(tmp_path):
    rule = '[[report.rows]]\nkey = "a-{size}"\nlabel = "a"\neach = "size"\nwhere = { nome = "full" }\n'
    with pytest.raises(BadConfig, match="no setting named `nome`"):
        read_study(write(tmp_path, SMALL + rule), "device")
    with pytest.raises(BadConfig, match="`each` is `lr`"):
        read_study(write(tmp_path, SMALL + rule.replace("nome", "name").replace('"size"', '"lr"')), "device")
