"""Parameters as the papers count them (docs/methods.md), from the shapes of published backbones."""

from __future__ import annotations

import pytest
import torch
import transformers

from inlay.model.backbone.sites import survey
from inlay.model.bank.methods import layout, resolve_method
from inlay.model.heads.heads import HeadSpec
from inlay.settings.run_config import MethodConfig
from inlay.training.run.counts import Totals, count_totals

BERT_LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
T5_SMALL = {"d_model": 512, "d_ff": 2048, "num_layers": 6, "num_heads": 8}
T5_BASE = {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12}


def bert(**config):
    with torch.device("meta"):
        return survey(transformers.BertModel(transformers.BertConfig(**config)))


def t5(**config):
    with torch.device("meta"):
        return survey(transformers.T5ForConditionalGeneration(transformers.T5Config(**config)))


@pytest.fixture(scope="module")
def bert_base():
    return bert()


def count(anatomy, hidden="none", **method):
    head = HeadSpec("classify", 2, "pooler" if hidden == "none" else "cls", hidden=hidden)
    return count_totals(layout(anatomy, resolve_method(MethodConfig(**method)), head), anatomy)


def count_several(anatomy, num_tasks, *method):
    """Tasks of one run, which write their answers: what they share once, what each has of its own for each."""
    specs = layout(anatomy, resolve_method(MethodConfig(*method)))
    shared, own = ([spec for spec in specs if spec.is_shared == is_shared] for is_shared in (True, False))
    return count_totals(shared + num_tasks * own, anatomy, num_tasks=num_tasks)


def test_the_student_reproductions_total_and_trainable_parameters(bert_base):
    totals = count(bert_base)
    assert totals.backbone == 109_482_240
    assert totals.adapters == 2_379_264
    assert totals.with_backbone == 109_482_240 + 2_379_264 + 1_538 == 111_863_042
    assert totals.replaced == 38_400  # 25 layer norms, which stand in for the backbone's


def test_houlsbys_trained_parameters_and_their_share(bert_base):
    totals = count(bert_base)
    assert totals.trained == 2_379_264 + 38_400 + 1_538 == 2_419_202
    assert f"{totals.share_per_task:.2%}" == "2.21%"
    large = count(bert(**BERT_LARGE))
    assert (large.trained, f"{large.share_per_task:.2%}") == (6_446_082, "1.92%")


def test_tf_adapter_berts_parameters_without_the_last_layer(bert_base):
    totals = count(bert_base, hidden="tanh", norms="encoder")
    assert totals.trained_without_last == 2_379_264 + 36_864 + 590_592 == 3_006_720
    for sharing, number in (("within-layer", 12 * 99_136), ("every-3", 4 * 99_136)):
        assert count(bert_base, norms="none", sharing=sharing).trained_without_last == number


def test_nine_tasks_as_a_multiple_of_the_backbone(bert_base):
    """Houlsby et al.: 1.2x for nine tasks of size 64 on BERT-large, 1.3x at 3.6% a task, 9x for full fine-tuning."""
    nine = count(bert(**BERT_LARGE)).repeat(9)
    assert nine.times_backbone == pytest.approx(1 + 9 * 6_446_082 / 335_141_888)
    assert (round(nine.times_backbone, 1), nine.times_full) == (1.2, 9.0)
    printed = Totals(1000, 1, trained=36, adapters=36, last_layers=0, kept=36, replaced=0).repeat(9)
    assert round(printed.times_backbone, 1) == 1.3
    assert printed.share_per_task == 0.036
    one = count(bert_base)
    assert (f"{one.times_backbone:.2f}", one.times_full) == ("1.02", 1.0)
    assert one.repeat(1) == one


@pytest.mark.parametrize(
    ("shape", "method", "trained", "per_task", "times"),
    [
        (T5_BASE, ("hyperformer++", 24), 5_211_056, "0.29%", 1.02),
        (T5_BASE, ("mahabadi-multi", 24), 14_581_248, "0.82%", 1.07),
        (T5_SMALL, ("hyperformer++", 16), 2_415_776, "0.50%", 1.04),
        (T5_SMALL, ("mahabadi-multi", 16), 3_288_064, "0.68%", 1.05),
        (T5_BASE, ("full-multi",), 222_903_552, "12.50%", 1.0),
        (T5_SMALL, ("full-multi",), 60_506_624, "12.50%", 1.0),
    ],
)
def test_eight_tasks_of_one_run_as_hyperformers_table_prints_them(shape, method, trained, per_task, times):
    totals = count_several(t5(**shape), 8, *method)
    assert totals.trained == trained
    assert f"{totals.share_per_task:.2%}" == per_task
    assert round(totals.times_backbone, 2) == times
    assert totals.times_full == 8.0


@pytest.mark.parametrize(
    ("shape", "size", "trained", "per_task", "printed"),
    [(T5_BASE, 24, 122_404_672, "6.86%", 1.54), (T5_SMALL, 16, 28_074_560, "5.80%", 1.45)],
)
def test_hyperformers_printed_totals_are_a_little_below_one_and_eight_shares(shape, size, trained, per_task, printed):
    """The paper prints 1.54x and 1.45x, but 1 + 8 of its own shares are 1.549 and 1.464: counts and shares agree."""
    totals = count_several(t5(**shape), 8, "hyperformer", size)
    assert (totals.trained, f"{totals.share_per_task:.2%}") == (trained, per_task)
    assert totals.times_backbone == pytest.approx(1 + 8 * totals.share_per_task)
    assert printed < totals.times_backbone < printed + 0.015


@pytest.mark.parametrize(
    ("shape", "size", "trained", "per_task"),
    [(T5_BASE, 24, 1_928_832, "0.87%"), (T5_SMALL, 16, 446_848, "0.74%")],
)
def test_single_adapters_are_one_and_eight_hundredths(shape, size, trained, per_task):
    totals = count_several(t5(**shape), 1, "mahabadi", size)
    assert (totals.trained, f"{totals.share_per_task:.2%}") == (trained, per_task)
    assert round(totals.share_per_task, 2) == 0.01  # "1 + 8x0.01"
    assert totals.repeat(8).times_backbone == pytest.approx(1 + 8 * totals.share_per_task)


def test_pals_beside_a_network_that_all_tasks_train_are_the_published_multiple(bert_base):
    totals = count_several(bert_base, 8, "pal-published")
    assert not totals.needs_backbone
    assert round(totals.times_backbone, 2) == 1.13  # docs/methods.md


def test_fine_tuning_is_a_backbone_for_each_task_and_needs_none_beside(bert_base):
    full = count(bert_base, name="full")
    assert full.with_backbone == 109_482_240 + 1_538
    assert full.trained_without_last == 109_482_240
    assert full.repeat(9).times_backbone == pytest.approx(9 * full.trained / full.backbone)
    unread = count(bert_base, hidden="tanh", name="full")  # nothing reads the pooler, which has no copy
    assert not unread.needs_backbone
    assert count(bert_base, name="top").needs_backbone
    assert count(bert_base, name="top").repeat(2).times_backbone > 1.1


def test_a_trained_copy_of_the_pooler_stands_in_for_the_backbones(bert_base):
    totals = count(bert_base, hidden="pooler")
    assert totals.replaced == 38_400 + 590_592
    assert totals.with_backbone == 111_863_042


def test_what_tasks_share_and_do_not_train_is_kept_but_not_trained(bert_base):
    specs = layout(bert_base, resolve_method(MethodConfig("hyperformer++", 24)), HeadSpec("classify", 2, "cls"))
    totals = count_totals(specs, bert_base, is_shared_frozen=True)
    assert totals.trained == 64 + 1_538  # its embedding and its head
    assert totals.kept == sum(spec.num_parameters for spec in specs)
    assert totals.times_backbone == pytest.approx(1 + totals.kept / totals.backbone)


def test_every_count_is_data(bert_base):
    assert count(bert_base).repeat(9).to_json() == {
        "num_tasks": 9,
        "trained": 9 * 2_419_202,
        "adapters_alone": 9 * 2_379_264,
        "trained_without_last_layer": 9 * (2_419_202 - 1_538),
        "with_backbone": 109_482_240 + 9 * (2_379_264 + 1_538),
        "share_per_task": pytest.approx(2_419_202 / 109_482_240),
        "times_backbone": pytest.approx(1 + 9 * 2_419_202 / 109_482_240),
        "times_full_fine_tuning": 9.0,
    }
