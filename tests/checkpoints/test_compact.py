"""The compact form of a model's file."""

from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import run, write
from models import CODES, config_of

from histocoder import Coder
from histocoder.checkpoints.compact import (
    compact,
    dequantize,
    expand,
    pack_bits,
    quantize,
    unpack_bits,
)
from histocoder.checkpoints.model_files import (
    MODEL_FILES,
    load_model,
    load_tensors,
    read_tensors,
    save_model,
)
from histocoder.formatters import build_formatter
from histocoder.model import MixerModel
from histocoder.model.linear_expert import LinearExpert, ngram_rows
from histocoder.model.nearest import NearestExpert
from histocoder.model.ngram import NgramConfig, NgramEncoder
from histocoder.text.tokenizers import lower_characters

TRAINED = [3, 17, 40, 499]
JOBS = [("farmer", "61110"), ("baker", "77610")]
TEXTS = ["wine merchant", "farmer", "baker's man", ""]


def ngram_model() -> MixerModel:
    """A model whose table has four trained rows, with experts."""
    torch.manual_seed(1)
    encoder = NgramEncoder(NgramConfig(num_buckets=500, hidden_size=16, intermediate_size=16))
    torch.nn.init.zeros_(encoder.table)
    encoder.table.data[TRAINED] = torch.randn(len(TRAINED), 16)
    settings = {"target_cols": ("hisco_1",), "max_len": 32, "num_nearest_rows": 9}
    config = config_of(encoder, build_formatter("hisco", num_blocks=1), CODES, **settings)
    model = MixerModel(config, encoder)
    encodings, ends = torch.randn(9, 16), torch.zeros(9, 2, dtype=torch.int32)
    classes = torch.arange(9) % len(CODES)
    model.nearest_expert = NearestExpert.of(encodings, ends, classes, num_classes=len(CODES))
    return model.eval()


def linear_matrix() -> tuple[torch.Tensor, torch.Tensor]:
    """The n-grams of some texts, and a weight for each of them and each code; half are zero."""
    buckets = ngram_rows(torch.from_numpy(lower_characters(TEXTS[:2])))[1].unique()
    matrix = torch.randn(len(buckets), len(CODES), generator=torch.Generator().manual_seed(0))
    return buckets, torch.where(matrix > 0, matrix, 0.0).half()


def test_quantized_rows_are_near_and_stay_as_they_are():
    rows = torch.randn(50, 64, generator=torch.Generator().manual_seed(0))
    rows[7] = 0.0
    levels, scales = quantize(rows)
    near = dequantize(levels, scales)
    assert levels.shape == (50, 32) and scales.shape == (50, 2)
    assert levels.dtype == torch.uint8
    assert torch.all((near - rows).abs() <= 0.51 * scales.float().repeat_interleave(32, 1))
    levels_again, scales_again = quantize(near)
    assert torch.equal(levels, levels_again) and torch.equal(scales, scales_again)


@pytest.mark.parametrize("num_flags", [0, 1, 8, 21])
def test_bits_are_packed_and_unpacked(num_flags: int):
    flags = torch.arange(num_flags) % 3 == 0
    bits = pack_bits(flags)
    assert len(bits) == -(-num_flags // 8)
    assert torch.equal(unpack_bits(bits, num_flags), flags)


def test_a_file_has_the_trained_rows_alone():
    model = ngram_model()
    parts = compact(model.state_dict())
    assert parts["encoder.table.levels"].shape == (len(TRAINED), 8)
    weights = expand(parts, model.config)
    assert weights["encoder.table"].any(1).nonzero()[:, 0].tolist() == TRAINED
    assert weights.keys() == model.state_dict().keys()


def test_a_model_that_is_saved_again_is_the_same_file(tmp_path: Path):
    model = ngram_model()
    save_model(tmp_path / "a", model.config, model.state_dict(), tokenizer=model.tokenizer)
    coder = Coder.from_pretrained(tmp_path / "a", "cpu")
    coder.save_pretrained(tmp_path / "b")
    first = (tmp_path / "a" / "model.safetensors").read_bytes()
    assert (tmp_path / "b" / "model.safetensors").read_bytes() == first
    assert len(first) < 12_000 + 3 * sum(p.numel() for p in model.parameters())


def test_sparse_weights_answer_as_the_matrix_does():
    buckets, matrix = linear_matrix()
    idf, bias = torch.rand(len(buckets)) + 1, torch.randn(len(CODES))
    expert = LinearExpert.of(buckets, idf, matrix, bias)
    characters = torch.from_numpy(lower_characters(TEXTS))
    text, bucket = ngram_rows(characters)
    tfidf = torch.zeros(len(TEXTS), len(buckets))
    for feature, known in enumerate(buckets):
        for row in range(len(TEXTS)):
            count = int(((text == row) & (bucket == known)).sum())
            if count:
                tfidf[row, feature] = (1 + np.log(count)) * idf[feature]
    tfidf = torch.nn.functional.normalize(tfidf, dim=1)
    torch.testing.assert_close(expert(characters), 8 * (tfidf @ matrix.float() + bias))


def test_pruned_experts_lack_small_weights():
    buckets, matrix = linear_matrix()
    expert = LinearExpert.of(buckets, torch.ones(len(buckets)), matrix, torch.zeros(len(CODES)))
    of_large = LinearExpert.of(
        buckets, expert.idf, torch.where(matrix >= 0.5, matrix, 0), expert.bias
    )
    pruned = expert.pruned(0.5)
    assert pruned.threshold == 0.5 and 0 < len(pruned.values) < len(expert.values)
    for name, values in of_large.state_dict().items():
        assert torch.equal(pruned.state_dict()[name], values), name


def flags_of_training(folder: Path, *, steps: int) -> tuple[object, ...]:
    """Flags of a run with a table of n-grams on twenty rows, whose descriptions are altered."""
    rows = [f"{text} no {i},{code}" for i in range(10) for text, code in JOBS]
    table = folder / "table.csv"
    if not table.exists():
        write(table, "occ1,hisco_1", *rows)
    flags = ("--dataset", table, "--target-cols", "hisco_1", "--language", "en", "--encoder")
    flags += ("ngram", "--titles", "none", "--share-val", 0.3, "--no-report", "--no-refit")
    flags += ("--batch-size", 4, "--save-interval", 3, "--eval-interval", 3, "--max-steps", steps)
    return ("finetune.py", *flags, "--save-path")


def test_a_table_resumes_as_if_never_stopped(tmp_path: Path):
    command = flags_of_training(tmp_path, steps=7)
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    run(*command, whole, "--no-experts", "--keep-checkpoints", 9)
    third = whole / "checkpoints" / "step-0000003"
    assert folder_size(third) < 30_000_000  # all rows and their moments are 300 MB
    run(*command, resumed, "--no-experts", "--resume", third, "--keep-checkpoints", 9)
    weights = (whole / "model.safetensors").read_bytes()
    assert (resumed / "model.safetensors").read_bytes() == weights
    states = [
        load_tensors(folder / "checkpoints" / "step-0000006" / "optimizer.pt")["optimizer"]["state"]
        for folder in (whole, resumed)
    ]
    assert states[0].keys() == states[1].keys()
    for parameter, moments in states[0].items():
        for name, values in moments.items():
            assert torch.equal(values, states[1][parameter][name]), (parameter, name)


@pytest.mark.slow
def test_a_run_that_ended_is_small_and_trains_on(tmp_path: Path):
    folder = tmp_path / "run"
    run(*flags_of_training(tmp_path, steps=6), folder)
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-0000006"]
    assert folder_size(folder) < 15_000_000
    assert (folder / "best" / "model.safetensors").samefile(folder / "model.safetensors")
    assert load_model(folder / "best").config == load_model(folder).config
    model = read_tensors(folder / "model.safetensors")

    # the same command leaves the model as it is
    run(*flags_of_training(tmp_path, steps=6), folder)
    again = read_tensors(folder / "model.safetensors")
    assert all(torch.equal(values, again[name]) for name, values in model.items())

    assert "Resuming from step 6" in run(*flags_of_training(tmp_path, steps=8), folder).stdout
    assert folder_size(folder) < 15_000_000

    # no description that it was trained on is in the model, which may be shared
    texts = [f"{text} no {i}".encode() for i in range(10) for text, _ in JOBS]
    for file in (folder / "best").rglob("*"):
        content = file.read_bytes().lower() if file.is_file() else b""
        assert not any(text in content for text in texts), file
    assert {file.name for file in (folder / "best").iterdir()} == {*MODEL_FILES}

    # without saved states, there is nothing to train on from
    no_states = tmp_path / "no-states"
    run(*flags_of_training(tmp_path, steps=4), no_states, "--keep-checkpoints", 0)
    assert (no_states / "model.safetensors").is_file()
    assert not (no_states / "checkpoints").exists()


def folder_size(folder: Path) -> int:
    """Bytes of a folder's files, a file of several names once."""
    sizes = {path.stat().st_ino: path.stat().st_size for path in folder.rglob("*")}
    return sum(sizes.values())


@pytest.mark.slow
def test_training_continues_from_a_small_model(tmp_path: Path):
    table = write(tmp_path / "table.csv", "occ1,hisco_1", *["farmer,61110", "baker,77610"] * 10)
    flags = ("--dataset", table, "--target-cols", "hisco_1", "--language", "en", "--titles", "none")
    flags += (
        "--share-val",
        0.3,
        "--no-report",
        "--no-refit",
        "--augmentation-prob",
        0,
        "--max-steps",
    )
    start, longer = tmp_path / "start", tmp_path / "longer"
    run("finetune.py", *flags, 3, "--encoder", "ngram", "--save-path", start)
    run("finetune.py", *flags, 2, "--initial-checkpoint", start, "--save-path", longer)
    members = [
        read_tensors(folder / "model.safetensors")["encoder.table.members"]
        for folder in (start, longer)
    ]
    num_rows = [int(np.unpackbits(bits.numpy()).sum()) for bits in members]
    assert 0 < num_rows[0] <= num_rows[1] < 1_000
    assert (start / "model.safetensors").stat().st_size < 5_000_000
    assert load_model(longer).encoder.table.any(1).sum() == num_rows[1]
