"""The published values are what the sources print, and what is known of their arithmetic holds."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from inlay.errors import BadConfig, UnknownName
from inlay.studies.judge.published import PublishedTable, read_published

FOLDER = Path(__file__).parents[2] / "studies" / "published"
FILES = sorted(path.stem for path in FOLDER.glob("*.toml"))


def table(file: str, name: str) -> PublishedTable:
    return next(item for item in read_published(FOLDER, file).tables if item.name == name)


def means(item: PublishedTable, left_out: tuple[str, ...] = ()) -> dict[str, float]:
    columns = [column for column in item.columns if column not in left_out]
    return {row.arm: item.mean(row.arm, columns) for row in item.rows}


@pytest.mark.parametrize("name", FILES)
def test_every_file_says_where_its_values_come_from(name):
    for item in read_published(FOLDER, name).tables:
        assert item.source
        assert item.title
        assert item.protocol
        assert all(len(row.cells) == len(item.columns) for row in item.rows)
        assert all(column.count(":") == 1 for column in item.columns)


def test_houlsbys_total_is_not_the_mean_of_its_columns():
    item = table("glue", "glue-test")
    assert [round(mean, 1) for mean in means(item).values()] == [82.0, 81.5, 81.1]
    once = []
    for row in item.rows:
        matched, mismatched = row.cells[5], row.cells[6]  # MNLI counted once, as the mean of its two sides
        once.append((sum(row.cells) - (matched + mismatched) / 2) / 8)
    assert [round(mean, 1) for mean in once] == [81.5, 81.1, 80.6]
    assert [row.printed["total"] for row in item.rows] == [80.4, 80.0, 79.6]


def test_hyperformers_average_is_the_mean_of_eleven_numbers_on_all_twelve_rows():
    items = read_published(FOLDER, "multitask").tables
    assert sum(len(item.rows) for item in items) == 12
    for row in (row for item in items for row in item.rows):
        assert statistics.fmean(row.cells) == pytest.approx(row.printed["avg"], abs=0.0101)


def test_hyperformers_mean_with_each_task_once_is_lower():
    lower = {}
    for item in read_published(FOLDER, "multitask").tables:
        for row in item.rows:
            by_task: dict[str, list[float]] = {}
            for column, cell in zip(item.columns, row.cells, strict=True):
                by_task.setdefault(column.partition(":")[0], []).append(cell)
            assert len(by_task) == 8
            once = statistics.fmean(map(statistics.fmean, by_task.values()))
            lower[row.label] = row.printed["avg"] - once
    assert min(lower.values()) > 1.2
    assert max(lower.values()) < 2.9
    assert 86.48 - lower["HyperFormer++-base (multi)"] == pytest.approx(85.20, abs=0.01)


@pytest.mark.parametrize(("size", "total"), [("small", 60_506_624), ("base", 222_903_552)])
def test_a_tasks_part_of_the_parameters_is_the_printed_share(size, total):
    item = table("multitask", f"glue-{size}")
    for row in item.rows:
        assert 100 * row.trained_parameters / total == pytest.approx(row.printed["trained %"], abs=0.01), row.label


def test_hyperformer_plus_is_best_in_24_of_26_few_shot_rows():
    item = table("fewshot", "few-shot")
    cells: dict[tuple[str, str], dict[str, float]] = {}
    for row in item.rows:
        method, _, number = row.arm.rpartition("-")
        assert [each is None for each in row.deviations] == [cell is None for cell in row.cells]
        for column, cell in zip(item.columns, row.cells, strict=True):
            if cell is not None:
                cells.setdefault((column, number), {})[method] = cell
    assert len(cells) == 26
    best = {key: max(values, key=values.__getitem__) for key, values in cells.items()}
    others = {key: method for key, method in best.items() if method != "hyperformer++"}
    assert others == {("cb:accuracy", "16"): "multi-full", ("yelp-polarity:accuracy", "16"): "adapters-multi"}


def test_by_its_own_columns_not_shared_is_the_best_of_the_three_adapter_rows():
    item = table("sharing", "tf-adapter-bert-glue")
    found = {arm: round(mean, 2) for arm, mean in means(item).items()}
    assert found == {"full": 79.74, "within-layer": 79.43, "none": 79.54, "every-3": 79.39}
    assert item.row("none").printed["total"] == 79.2


@pytest.mark.parametrize("file", ["extra", "sharing"])
def test_two_rows_make_the_gain_of_not_shared_on_the_additional_tasks(file):
    item = table(file, "tf-adapter-bert" if file == "extra" else "tf-adapter-bert-extra")
    assert {arm: round(mean, 2) for arm, mean in means(item).items()} == {"full": 71.42, "none": 74.98}
    doubtful = ("extra/political-message:accuracy", "extra/progressive-opinion:accuracy")
    assert {arm: round(mean, 2) for arm, mean in means(item, doubtful).items()} == {"full": 74.65, "none": 73.90}


def test_houlsbys_additional_tasks_differ_by_0_4():
    item = table("extra", "houlsby-means")
    assert item.value("full", "mean:accuracy") - item.value("adapters", "mean:accuracy") == pytest.approx(0.4)


def test_uvas_scores_are_shares_of_rows_and_its_total_their_mean():
    item = table("uva", "uva")
    right = {"full": (347 / 408, 863 / 1043), "adapters-64": (350 / 408, 853 / 1043)}
    for arm, shares in right.items():
        assert item.row(arm).cells == pytest.approx([100 * share for share in shares], abs=1e-4)
        assert item.row(arm).printed["total"] == pytest.approx(50 * sum(shares), abs=1e-4)
    assert item.row("adapters-64").trained_parameters == 24 * (2 * 64 * 768 + 768 + 64)
    assert int(8551 / 32 * 15) == 4008


def test_peters_delta_is_tuned_less_frozen_but_for_one_printed_wrongly():
    item = table("features", "peters")
    pairs = {
        "elmo-delta": ("elmo-full", "elmo-features"),
        "delta": ("full", "features-mix-mlp"),
    }
    wrong = []
    for delta, (tuned, frozen) in pairs.items():
        for column in item.columns:
            difference = item.value(tuned, column) - item.value(frozen, column)
            if round(difference, 1) != item.value(delta, column):
                wrong.append((delta, column))
    assert wrong == [("elmo-delta", "sick-e:accuracy")]


def test_peters_scores_are_in_the_metrics_that_bert_base_has_them_in_and_that_is_said_to_be_inferred():
    item = table("features", "peters")
    assert [item.value("full", column) for column in ("glue/mrpc:accuracy", "glue/stsb:pearson")] == [84.8, 87.1]
    assert any("inferred" in note for note in item.notes)


def test_published_counts_follow_from_the_method():
    counts = {row.arm: row.trained_parameters for row in table("tradeoff", "mnli-dev").rows}
    head = 3 * 768 + 3
    assert counts["adapters-64"] == 24 * (2 * 64 * 768 + 768 + 64) + 25 * 2 * 768 + head
    assert counts["norms"] == 25 * 2 * 768 + head
    assert counts["full"] == 109_482_240 + head


def test_a_mean_over_columns_that_are_not_all_printed_is_none():
    item = table("features", "peters")
    assert item.mean("skip-thoughts", ["glue/sst2:accuracy", "conll2003:entity_f1"]) is None
    assert item.mean("full", ["glue/sst2:accuracy", "glue/mnli:accuracy"]) == pytest.approx((93.5 + 84.6) / 2)
    assert item.mean("full", []) is None


def test_an_unknown_file_is_refused_with_a_suggestion():
    with pytest.raises(UnknownName, match="glu") as refusal:
        read_published(FOLDER, "gluee")
    assert "`glue`" in refusal.value.hint
    assert read_published(FOLDER, "").tables == ()


def test_a_file_that_cannot_be_is_refused_by_name(tmp_path):
    head = 'name = "t"\ntitle = "t"\nsource = "s"\nbackbone = "b"\nsplit = "dev"\nprotocol = "p"\n'
    row = 'arm = "full"\nlabel = "full"\n'
    for text, word in {
        "[[tables]\n": "not TOML",
        "title = 1\n": "`title`",
        "[[tables]]\nname = 't'\n": "has no `backbone`",
        f"[[tables]]\n{head}columns = ['a:b']\n[[tables.rows]]\n{row}cells = [1, 2]\n": "2 cells for 1 columns",
        f"[[tables]]\n{head}columns = ['a:b']\n[[tables.rows]]\n{row}cells = [1]\nscore = 2\n": "an unknown `score`",
    }.items():
        (tmp_path / "broken.toml").write_text(text, encoding="utf8")
        with pytest.raises(BadConfig, match=word):
            read_published(tmp_path, "broken")


def test_published_deviations_stand_beside_the_cells_they_are_of(tmp_path):
    (item,) = read_published(FOLDER, "fewshot").tables
    row = item.row("multi-full-250")
    assert (row.cells, row.deviations) == ((None, 85.19, None, None), (None, 4.7, None, None))
    assert all(len(row.deviations) == len(row.cells) for row in item.rows)
    text = (FOLDER / "fewshot.toml").read_text().replace("deviations = [4.7]", "deviations = [4.7, 1.0]", 1)
    (tmp_path / "fewshot.toml").write_text(text)
    with pytest.raises(BadConfig, match="row `multi-full-250` has 2 deviations for 1 printed cells"):
        read_published(tmp_path, "fewshot")
