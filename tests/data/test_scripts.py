"""Texts that a tokenizer does not know are told by their script; those that it knows are not."""

import time

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from inlay.data.findings import describe_unknown
from inlay.data.tasks import Split
from inlay.model.backbone.loading import find_folder

ENGLISH = "Please cancel my subscription, I was charged twice this month and nobody answers."
RUSSIAN = "Пожалуйста, отмените мою подписку, с меня дважды списали деньги в этом месяце."
BY_LETTERS = {
    "Cyrillic": RUSSIAN,
    "Greek": "Παρακαλώ ακυρώστε τη συνδρομή μου, χρεώθηκα δύο φορές αυτόν τον μήνα.",
    "Devanagari": "कृपया मेरी सदस्यता रद्द करें, इस महीने मुझसे दो बार शुल्क लिया गया।",
    "Arabic": "يرجى إلغاء اشتراكي، فقد تم تحصيل رسوم مرتين هذا الشهر.",
    "Hebrew": "אנא בטלו את המנוי שלי, חויבתי פעמיים החודש.",
}
UNKNOWN = {
    "Chinese characters": "请取消我的订阅，这个月我被收费两次，没有人回答我的问题。",
    "Hiragana": "今月二回請求されましたので、定期購読をキャンセルしてください。",
    "Korean letters": "이번 달에 두 번 청구되었으니 구독을 취소해 주세요.",
    "Thai": "กรุณายกเลิกการสมัครสมาชิกของฉัน ฉันถูกเรียกเก็บเงินสองครั้งในเดือนนี้",
}
KNOWN = [
    ENGLISH,
    "Bitte kündigen Sie mein Abonnement, ich wurde diesen Monat zweimal belastet.",
    "Proszę anulować moją subskrypcję, w tym miesiącu zostałem obciążony dwukrotnie.",
    "def f(x): return x**2 + 3*x  # A7X-9921-QQ3",
]


@pytest.fixture(scope="module")
def minilm():
    return PreTrainedTokenizerFast(tokenizer_file=str(find_folder("minilm") / "tokenizer.json"), unk_token="[UNK]")


def make_split(*texts, pairs=None):
    return Split(list(texts), pairs, None, list(range(2, len(texts) + 2)))


def describe(tokenizer, *texts):
    return describe_unknown(tokenizer, make_split(*texts), "minilm")


@pytest.mark.parametrize("script", BY_LETTERS)
def test_a_script_that_is_read_letter_by_letter_is_named(minilm, script):
    (note,) = describe(minilm, BY_LETTERS[script])
    assert note.startswith(f"many letters are {script}, of which `minilm` has hardly a word (")
    assert note.endswith(
        "such as in line 2): use a multilingual backbone, such as `--backbone FacebookAI/xlm-roberta-base`"
    )


@pytest.mark.parametrize("script", UNKNOWN)
def test_unknown_tokens_are_told_with_their_share_and_script(minilm, script):
    (note,) = describe(minilm, UNKNOWN[script])
    ids = minilm(UNKNOWN[script], add_special_tokens=False)["input_ids"]
    share = ids.count(minilm.unk_token_id) / len(ids)
    assert note.startswith(f"{share:.0%} of the tokens are unknown to `minilm`, such as `")
    assert f"(line 2); many letters are {script}: use a multilingual backbone" in note


@pytest.mark.parametrize("text", KNOWN)
def test_nothing_is_said_of_texts_in_latin_script(minilm, text):
    assert describe(minilm, text) == []


def test_a_few_foreign_texts_among_many_are_not_worth_a_word(minilm):
    assert describe(minilm, *[ENGLISH] * 19, RUSSIAN) == []
    (note,) = describe(minilm, *[ENGLISH] * 7, *[RUSSIAN] * 3)
    assert "such as in line 9" in note


def test_signs_without_a_script_are_shown_as_they_stand(minilm):
    (note,) = describe(minilm, "so good \U0001f600", "bad \U0001f621 day", "plain")
    assert note == (
        "29% of the tokens are unknown to `minilm`, such as `\U0001f600`, `\U0001f621` (lines 2, 3); "
        "it cannot tell them apart"
    )
    assert describe(minilm, "so good \U0001f600", *[ENGLISH] * 3) == []


def test_the_second_texts_of_pairs_are_looked_at_too(minilm):
    assert "Cyrillic" in describe_unknown(minilm, make_split(ENGLISH, pairs=[RUSSIAN]), "minilm")[0]


def test_a_tokenizer_that_knows_the_script_is_not_complained_of():
    inner = Tokenizer(models.BPE(unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.train_from_iterator([RUSSIAN] * 3, trainers.BpeTrainer(vocab_size=300, special_tokens=["[UNK]"]))
    assert describe(PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]"), RUSSIAN) == []


def test_a_tokenizer_of_bytes_that_has_no_word_of_the_script_is_told():
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator([ENGLISH] * 3, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner)
    (note,) = describe(tokenizer, RUSSIAN)
    assert "Cyrillic" in note
    (note,) = describe(tokenizer, UNKNOWN["Chinese characters"])
    assert "Chinese characters" in note
    assert describe(tokenizer, ENGLISH) == []


def test_of_a_large_set_a_few_hundred_rows_are_looked_at(minilm):
    began = time.process_time()
    assert describe(minilm, *[ENGLISH * 20] * 50_000) == []
    assert time.process_time() - began < 0.5
