"""Token ids without padding, and batches that are a pure function of their arguments."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from inlay.data.encode import chunks, describe, encode, encode_apart, epoch_batches

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "b", "c", "d", "e", "f"]


def make_tokenizer(*names):
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", model_input_names=list(names)
    )


BERT_LIKE = make_tokenizer("input_ids", "token_type_ids", "attention_mask")
ROBERTA_LIKE = make_tokenizer("input_ids", "attention_mask")


def test_rows_keep_their_own_lengths():
    encoded = encode(BERT_LIKE, ["a b", "c"], None, 16)
    assert [row.tolist() for row in encoded.ids] == [[2, 4, 5, 3], [2, 6, 3]]
    assert [row.tolist() for row in encoded.segments] == [[0, 0, 0, 0], [0, 0, 0]]
    assert encoded.ids[0].dtype == np.int32
    assert encoded.lengths.tolist() == [4, 3]
    assert encoded.num_truncated == 0


def test_second_text_is_in_the_second_segment():
    encoded = encode(BERT_LIKE, ["a b"], ["c"], 16)
    assert encoded.ids[0].tolist() == [2, 4, 5, 3, 6, 3]
    assert encoded.segments[0].tolist() == [0, 0, 0, 0, 1, 1]


def test_segments_are_absent_where_the_tokenizer_has_none():
    assert encode(ROBERTA_LIKE, ["a b"], ["c"], 16).segments is None


def test_truncated_rows_are_counted_and_the_longer_of_a_pair_is_cut():
    encoded = encode(BERT_LIKE, ["a b c d e f", "a", "f"], ["a b", "b", "a b c d e f"], 8)
    assert encoded.lengths.tolist() == [8, 5, 8]
    assert encoded.num_truncated == 2
    assert encoded.ids[0].tolist()[-3:] == [4, 5, 3]  # the short second text is whole
    assert encoded.ids[2].tolist()[:3] == [2, 9, 3]  # so is the short first one
    assert encode(BERT_LIKE, ["a b c d"], None, 6).num_truncated == 0
    assert encode(BERT_LIKE, ["a b c d e"], None, 6).num_truncated == 1


def test_encoding_in_chunks_equals_encoding_at_once_and_reports_progress(monkeypatch):
    texts = ["a b", "c", "d e f", "a", "b"]
    whole, seen = encode(BERT_LIKE, texts, None, 16), []
    monkeypatch.setattr("inlay.data.encode.CHUNK_ROWS", 2)
    pieces = encode(BERT_LIKE, texts, None, 16, progress=seen.append)
    assert [row.tolist() for row in pieces.ids] == [row.tolist() for row in whole.ids]
    assert seen == [2, 4, 5]


@pytest.mark.parametrize(
    ("targets", "labels", "label"),
    [
        (np.array([1]), ("ham", "spam"), "spam"),
        (np.array([[1.0, 0.0, 1.0]], dtype=np.float32), ("x", "y", "z"), ["x", "z"]),
        (np.array([2.5]), (), 2.5),
        (None, ("ham", "spam"), None),
    ],
)
def test_example_shows_tokens_ids_segments_and_label(targets, labels, label):
    (example,) = describe(BERT_LIKE, encode(BERT_LIKE, ["a zzz"], None, 16), targets, labels)
    assert example.to_json() == {
        "tokens": ["[CLS]", "a", "[UNK]", "[SEP]"],
        "ids": [2, 4, 1, 3],
        "segments": [0, 0, 0, 0],
        "label": label,
    }


def test_examples_are_at_most_as_many_as_rows():
    assert len(describe(BERT_LIKE, encode(BERT_LIKE, ["a", "b"], None, 16), None, (), 3)) == 2
    assert describe(BERT_LIKE, encode(BERT_LIKE, [], None, 16), None, ()) == []


LENGTHS = np.random.default_rng(7).geometric(0.03, size=5003) + 2


@pytest.mark.parametrize(("num_rows", "batch_size"), [(5003, 32), (31, 32), (64, 32), (1, 1), (1601, 32)])
def test_every_row_comes_once_in_an_epoch_and_the_last_batch_is_kept(num_rows, batch_size):
    batches = epoch_batches(LENGTHS[:num_rows], batch_size, seed=1, epoch=2)
    assert sorted(np.concatenate(batches).tolist()) == list(range(num_rows))
    assert len(batches) == -(-num_rows // batch_size)
    assert sorted(map(len, batches))[1:] == [batch_size] * (len(batches) - 1)


def test_batches_are_a_pure_function_of_their_arguments():
    first, again = (epoch_batches(LENGTHS, 32, seed=3, epoch=4) for _ in range(2))
    assert all(np.array_equal(left, right) for left, right in zip(first, again, strict=True))


def test_seeds_and_epochs_change_the_members_of_every_batch():
    base = epoch_batches(LENGTHS, 32, seed=0, epoch=0)
    for other in (epoch_batches(LENGTHS, 32, seed=1, epoch=0), epoch_batches(LENGTHS, 32, seed=0, epoch=1)):
        shared = sum(set(left) == set(right) for left, right in zip(base, other, strict=True))
        assert shared == 0


def test_equally_long_rows_are_shuffled():
    same = np.full(640, 12)
    first, other = (np.concatenate(epoch_batches(same, 32, seed=seed, epoch=0)) for seed in (0, 1))
    assert not np.array_equal(first, other)
    assert not np.array_equal(first, np.arange(640))


def padding_share(batches_by_run):
    """Share of padding when the runs' batches of one step are padded to their common longest row."""
    real = padded = 0
    for step in zip(*batches_by_run, strict=True):
        longest = max(LENGTHS[rows].max() for rows in step)
        real += sum(LENGTHS[rows].sum() for rows in step)
        padded += longest * sum(len(rows) for rows in step)
    return 1 - real / padded


def test_runs_of_different_seeds_meet_similar_lengths_at_the_same_step():
    runs = [epoch_batches(LENGTHS, 32, seed=seed, epoch=0, bucket=50) for seed in range(4)]
    alone = np.mean([padding_share([run]) for run in runs])
    generator = np.random.default_rng(0)
    scattered = [[run[index] for index in generator.permutation(len(run))] for run in runs]
    assert padding_share(runs) < alone + 0.1
    assert padding_share(runs) < 0.4 * padding_share(scattered)


def test_a_wider_bucket_saves_padding_and_none_is_a_plain_shuffle():
    shares = [padding_share([epoch_batches(LENGTHS, 32, seed=0, epoch=0, bucket=bucket)]) for bucket in (1, 4, 16)]
    assert shares[0] > shares[1] > shares[2]
    plain = np.concatenate(epoch_batches(LENGTHS, 32, seed=0, epoch=0, bucket=1)[:2])
    assert abs(np.corrcoef(np.arange(len(plain)), LENGTHS[plain])[0, 1]) < 0.5


def test_short_texts_do_not_all_come_first():
    means = np.array([LENGTHS[rows].mean() for rows in epoch_batches(LENGTHS, 32, seed=0, epoch=0)])
    halves = means[: len(means) // 2].mean() / means[len(means) // 2 :].mean()
    assert 0.7 < halves < 1.4


ROWS = ["a b", "c", "d e f a b c d", "", "f"]


@pytest.mark.parametrize("tokenizer", [BERT_LIKE, ROBERTA_LIKE])
@pytest.mark.parametrize("windows", [[0], [3, 1, 1, 4, 0, 2], [4, 3, 2, 1, 0], []])
def test_gathered_windows_are_the_rows_end_to_end(tokenizer, windows):
    encoded = encode(tokenizer, ROWS, ROWS[::-1], 8)
    gathered = encoded.gather(np.array(windows, dtype=np.int64))
    assert gathered.ids.tolist() == [token for window in windows for token in encoded.ids[window]]
    assert gathered.lengths.tolist() == [len(encoded.ids[window]) for window in windows]
    assert gathered.ids.dtype == np.int32
    if encoded.segments is None:
        assert gathered.segments is None
    else:
        assert gathered.segments.tolist() == [token for window in windows for token in encoded.segments[window]]


def test_gathered_tokens_may_be_changed_and_the_set_may_not():
    encoded = encode(BERT_LIKE, ROWS, None, 8)
    gathered = encoded.gather(np.array([0, 1]))
    gathered.ids[0] = 9
    assert encoded.ids[0][0] == 2
    with pytest.raises(ValueError, match="read-only"):
        encoded.ids[0][0] = 9


def test_pieces_are_a_sequence_of_views():
    encoded = encode(BERT_LIKE, ROWS, None, 8)
    assert len(encoded) == len(encoded.ids) == len(ROWS)
    assert [row.tolist() for row in encoded.ids] == [encoded.ids[row].tolist() for row in range(len(ROWS))]
    assert encoded.ids[4].tolist() == encoded.ids[np.int64(4)].tolist()
    assert np.shares_memory(encoded.ids[2], encoded.flat_ids)
    for beyond in (5, -1):
        with pytest.raises(IndexError):
            encoded.ids[beyond]


def train_tokenizer(model, trainer, pre_tokenizer, names):
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", model_input_names=names
    )


TEXTS = ["the cat sat on the mat", "café € 5 </s> fine", "", "no", "why is it so bad ? " * 5, "😀 ok"]
SPECIAL = {"special_tokens": ["<s>", "</s>", "<unk>"], "show_progress": False}
KINDS = {
    "words": BERT_LIKE,
    "bytes": train_tokenizer(
        models.BPE(),
        trainers.BpeTrainer(vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), **SPECIAL),
        pre_tokenizers.ByteLevel(),
        ["input_ids", "attention_mask"],
    ),
    "unigram": train_tokenizer(
        models.Unigram(),
        trainers.UnigramTrainer(vocab_size=60, unk_token="<unk>", **SPECIAL),
        pre_tokenizers.Metaspace(),
        ["input_ids", "token_type_ids"],
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pairs", [None, TEXTS[::-1]])
@pytest.mark.parametrize("side", ["right", "left"])
def test_tokens_are_those_of_transformers_own_call(kind, pairs, side, monkeypatch):
    tokenizer = KINDS[kind]
    monkeypatch.setattr(tokenizer, "truncation_side", side)
    for max_length in (7, 12, 64):
        wanted = tokenizer(TEXTS, pairs, truncation="longest_first", max_length=max_length, return_offsets_mapping=True)
        for with_offsets in (False, True):
            found = encode(tokenizer, TEXTS, pairs, max_length, with_offsets=with_offsets)
            assert [row.tolist() for row in found.ids] == wanted["input_ids"]
            if "token_type_ids" in tokenizer.model_input_names:
                assert [row.tolist() for row in found.segments] == wanted["token_type_ids"]
            assert found.num_truncated == sum(bool(encoding.overflowing) for encoding in wanted.encodings)
            if with_offsets:
                assert [list(map(tuple, row.tolist())) for row in found.places] == wanted["offset_mapping"]


FORKED = """
import os, sys; sys.path.insert(0, sys.argv[1])
import conftest
from tiny_backbones import make_tokenizer
os.environ.pop("TOKENIZERS_PARALLELISM")  # set by conftest
from inlay.data.encode import encode
tokenizer, texts = make_tokenizer("bert"), ["the cat sat on the mat"] * 1000
encode(tokenizer, texts, None, 32)
child = os.fork()
if child == 0:
    encode(tokenizer, texts, None, 32)
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_child_forked_after_tokenising_in_threads_can_tokenise_too():
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root / "src"), "RAYON_NUM_THREADS": "2"}
    command = [sys.executable, "-c", FORKED, str(root / "tests")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "7", done.stderr


def test_encoded_rows_are_iterated_with_their_segments():
    ((ids, segments, other),) = encode(BERT_LIKE, ["a"], ["b"], 16)
    assert (ids.tolist(), segments.tolist()) == ([2, 4, 3, 5, 3], [0, 0, 0, 1, 1])
    assert other is None
    ((_, nothing, _),) = encode(ROBERTA_LIKE, ["a"], None, 16)
    assert nothing is None


def test_texts_that_are_read_apart_are_cut_each_by_itself():
    texts, pairs = ["a b a b a b", "b", "a"], ["b", "a b a b a b", "b a"]
    encoded = encode_apart(BERT_LIKE, texts, pairs, 5)
    alone = [encode(BERT_LIKE, side, None, 5) for side in (texts, pairs)]
    assert encoded.num_truncated == 2
    assert encoded.lengths.tolist() == (alone[0].lengths + alone[1].lengths).tolist() == [8, 8, 7]
    for window, (ids, segments, other) in enumerate(encoded):
        assert ids.tolist() == alone[0].ids[window].tolist()
        assert segments.tolist() == [0] * len(ids)
        assert other.tolist() == alone[1].ids[window].tolist()
    assert [part.tolist() for part in encoded.window(1)] == [[2, 5, 3], [0, 0, 0], [2, 4, 5, 4, 3]]
    assert len(encoded) == encoded.num_rows == 3


def test_no_pairs_to_read_apart_are_no_windows():
    assert list(encode_apart(ROBERTA_LIKE, [], [], 5)) == []
    ((_, nothing, _),) = encode_apart(ROBERTA_LIKE, ["a"], ["b"], 5)
    assert nothing is None


def test_rows_are_handed_to_the_tokenizer_by_their_letters_where_they_are_long():
    texts = ["a" * 900_000] * 5 + ["b"] * 1200
    taken = list(chunks(texts, None, None))
    assert [texts[row] for chunk in taken for row in range(*chunk.indices(len(texts)))] == texts
    assert max(sum(map(len, texts[chunk])) for chunk in taken) <= 2_000_000
    assert [len(texts[chunk]) for chunk in chunks(["b"] * 1200, ["c"] * 1200, None)] == [500, 500, 200]
