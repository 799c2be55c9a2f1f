"""Rows to train on, their batches, and what each rank gets of them."""

import itertools

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from trainers import stored
from transformers import CanineTokenizer

from histocoder.data.augment import Augmenter, WordList
from histocoder.data.dataset import OccupationDataset, category_ids
from histocoder.data.examples import Examples
from histocoder.data.labelled_files import LabelledFiles
from histocoder.data.prepare import PREPARED_RULES
from histocoder.data.samplers import BatchIndices, BucketSampler, SequentialSampler
from histocoder.formatters import build_formatter
from histocoder.text.tokenizers import tokenize

TOKENIZER = CanineTokenizer()
FORMATTER = build_formatter("general", num_blocks=2)
TEXTS = [
    "wine and spirit merchant",
    "husmand og væver",
    "dräng",
    "γεωργός",
    "x" * 300,
    "shoe maker 🥿",
]
LANGS = ["en", "da", "se", "gr", "unk", "en"]
CODES = pd.DataFrame(
    {"a": "41025 61220 62105 ? -1 80110".split(), "b": [None, "75400", None, None, None, None]}
)
CLASSES = ("-1", "41025", "61220", "62105", "75400", "80110")


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Examples:
    folder = tmp_path_factory.mktemp("dataset")
    pd.DataFrame({"occ1": TEXTS, "lang": LANGS}).join(CODES).to_csv(
        folder / "rows.csv", index=False
    )
    return stored(
        folder, LabelledFiles((folder / "rows.csv",), ("a", "b"), FORMATTER, rules=PREPARED_RULES)
    )


def dataset(examples: Examples, augmenter: Augmenter | None = None, **form) -> OccupationDataset:
    form = {"formatter": FORMATTER, "classes": CLASSES, "max_len": 128, **form}
    return OccupationDataset(examples, augmenter=augmenter, **form)


def batches(data: OccupationDataset, epoch: int = 0, **kwargs) -> dict[int, list[int]]:
    """The token ids of each row, by row."""
    sampler = BucketSampler(
        data.lengths, data.num_target_blocks, batch_size=4, seed=0, rows=data.rows, **kwargs
    )
    sampler.set_position(epoch, 0)
    loaded = map(data.__getitem__, sampler)
    rows = (
        pair
        for batch in loaded
        for pair in zip(batch.rows.tolist(), batch.input_ids.tolist(), strict=True)
    )
    return {row: [i for i in ids if i] for row, ids in rows}


@given(
    st.lists(
        st.text(min_size=0, max_size=40).filter(lambda t: "\0" not in t), min_size=1, max_size=5
    )
)
def test_token_ids_are_canines(texts: list[str]):
    tokenized = tokenize(texts, max_len=24)
    for row, text in enumerate(texts):
        ids = tokenized.ids[tokenized.offsets[row] : tokenized.offsets[row + 1]].tolist()
        assert ids == [0xE000, *map(ord, text[:22]), 0xE001]
        if len(text) <= 22 and text.isascii():
            assert ids == TOKENIZER(text)["input_ids"]


@pytest.mark.parametrize(
    ("max_len", "pad_to"), [(128, None), (128, 128), (20, None), (9, 9), (4, None)]
)
def test_plain_batches_hold_their_texts_tokens(
    examples: Examples, max_len: int, pad_to: int | None
):
    data = dataset(examples, max_len=max_len, pad_to=pad_to)
    for rows in (np.arange(6), np.array([3, 1]), np.array([0])):
        batch = data[BatchIndices(rows, epoch=0, num_rows=6, num_target_blocks=2, weight=1.0)]
        tokens = tokenize(examples.inputs.texts(rows), max_len=max_len)
        expected = tokens.pad(np.arange(len(rows)), max_len=max_len, num_positions=pad_to)
        assert torch.equal(batch.input_ids, torch.from_numpy(expected))


def test_labels_of_a_batch(examples: Examples):
    data = dataset(examples)
    batch = data[BatchIndices(np.arange(6), epoch=0, num_rows=6, num_target_blocks=2, weight=1.0)]
    assert batch.class_ids.tolist() == [[1, -1], [2, 4], [3, -1], [-1, -1], [0, -1], [5, -1]]
    assert data.num_target_blocks.tolist() == [1, 2, 1, 1, 1, 1]
    assert np.array_equal(
        batch.targets, FORMATTER.encode(["41025", "61220&75400", "62105", None, "-1", "80110"])
    )


def test_codes_without_a_class_are_refused(examples: Examples):
    with pytest.raises(ValueError, match="'80110'"):
        dataset(examples, classes=CLASSES[:-1])


def augmenter(**changes) -> Augmenter:
    settings = {"augmentation_prob": 0.7, "num_transformations": 3, "unk_lang_prob": 0.5, **changes}
    return Augmenter(WordList.from_texts(TEXTS), **settings)


def test_noise_depends_on_seed_epoch_and_row_alone(examples: Examples):
    data = dataset(examples, augmenter())
    assert batches(data) == {
        **batches(data, num_replicas=2, rank=0),
        **batches(data, num_replicas=2, rank=1),
    }
    assert batches(data, epoch=0) != batches(data, epoch=1)
    assert batches(data) != batches(dataset(examples, augmenter(seed=1)))


def altered(noise: Augmenter, texts: list[str], epoch: int = 0) -> tuple[list[str], np.ndarray]:
    """Texts after their noise, and which of them lose their language."""
    drawn = noise.noise(np.arange(len(texts)), epoch)
    return [noise.alter(text, drawn, row) for row, text in enumerate(texts)], drawn.withheld


def test_category_ids_are_writable():
    found = category_ids(
        pa.chunked_array([["b", None, "", "a"]]), ["a", "b"]
    )  # of one chunk, which Arrow protects
    assert found.tolist() == [2, -1, 0, 1] and found.flags.writeable


@given(st.lists(st.text(max_size=30), min_size=1, max_size=20), st.integers(0, 1000))
@example([""], 28)
def test_lengths_are_known_before_a_text_is_altered(texts: list[str], epoch: int):
    noise = augmenter(augmentation_prob=1.0)
    found, _ = altered(noise, texts, epoch)
    drawn = noise.noise(np.arange(len(texts)), epoch)
    assert noise.lengths(drawn, np.array(list(map(len, texts)))).tolist() == list(map(len, found))
    assert found == altered(noise, texts, epoch)[0]


@pytest.mark.parametrize("epoch", range(5))
def test_lengths_are_those_of_batches(examples: Examples, epoch: int):
    data = dataset(examples, augmenter())
    seen = {row: len(ids) for row, ids in batches(data, epoch).items()}
    assert data.lengths(epoch).tolist() == [seen[row] for row in range(len(data))]


def sampler(
    n: int, *, batch_size: int, num_replicas: int = 1, rank: int = 0, seed: int = 7
) -> BucketSampler:
    rng = np.random.default_rng(3)
    lengths, blocks = rng.integers(5, 60, n), rng.integers(1, 4, n)
    how = {"batch_size": batch_size, "num_replicas": num_replicas, "rank": rank}
    return BucketSampler(lambda _: lengths, blocks, seed=seed, rows=np.arange(n), **how)


@given(
    n=st.integers(8, 200),
    batch_size=st.integers(1, 8),
    world=st.integers(1, 5),
    epoch=st.integers(0, 3),
)
def test_each_row_once_for_any_ranks(n: int, batch_size: int, world: int, epoch: int):
    ranks = [
        sampler(n, batch_size=batch_size, num_replicas=world, rank=rank) for rank in range(world)
    ]
    for one in ranks:
        one.set_position(epoch, 0)
    shares = [list(one) for one in ranks]
    assert {len(steps) for steps in shares} == {len(ranks[0])}  # equal step counts
    assert sorted(
        np.concatenate([share.rows for steps in shares for share in steps if share.weight])
    ) == list(range(n))
    assert all(len(share.rows) for steps in shares for share in steps)


def test_order_is_a_function_of_seed_and_epoch():
    def rows(seed: int, epoch: int) -> list[list[int]]:
        return [
            batch.tolist() for batch in sampler(50, batch_size=8, seed=seed).global_batches(epoch)
        ]

    assert rows(1, 0) == rows(1, 0)
    assert rows(1, 0) != rows(1, 1) and rows(1, 0) != rows(2, 0)


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 6)), max_size=5))
def test_each_row_once_when_ranks_change(parts: list[tuple[int, int]]):
    seen: list[int] = []
    for world, steps in [*parts, (1, 99)]:
        ranks = [sampler(50, batch_size=8, num_replicas=world, rank=rank) for rank in range(world)]
        for one in ranks:
            one.set_position(0, len(seen))
        for shares in itertools.islice(zip(*ranks, strict=True), steps):
            seen += [row for share in shares for row in share.rows.tolist() if share.weight]
    assert sorted(seen) == list(range(50))


@pytest.mark.parametrize(("n", "world"), [(7, 2), (1, 3), (20, 1), (9, 4)])
def test_validation_counts_each_row_once(n: int, world: int):
    lengths = np.random.default_rng(0).integers(5, 60, n)
    shares = [
        s
        for r in range(world)
        for s in SequentialSampler(lengths, batch_size=4, num_replicas=world, rank=r)
    ]
    assert sorted(np.concatenate([share.rows for share in shares])) == list(range(n))
