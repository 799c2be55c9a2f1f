"""Encoders that are no CANINE: trained, resumed, on two ranks, frozen, and used without the folder
they came from.
"""

import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import transformers.modeling_utils
from conftest import refused, run, slow, write_table
from jobs import assert_same_end, finetune
from pretrained import KINDS, TEXTS, model_of, save_pretrained
from safetensors.torch import load_file, save_file
from trainers import MAX_LEN, dataset
from transformers import AutoTokenizer

from histocoder import Coder
from histocoder.checkpoints.model_files import load_model, save_model
from histocoder.checkpoints.occcanine import save_occcanine
from histocoder.checkpoints.training_state import list_checkpoints
from histocoder.data.augment import Augmenter, WordList
from histocoder.data.dataset import OccupationDataset
from histocoder.data.samplers import SequentialSampler
from histocoder.errors import DamagedError, UserError
from histocoder.model import CHARACTERS, Tokenizer, load_encoder, load_tokenizer
from histocoder.model.encoder import encoder_from_config
from histocoder.text.tokenizers import tokenize


def training(table: Path, out: Path, encoder: Path, *extra: object) -> list[str]:
    """A run with noise that saves and validates."""
    sizes = ("--batch-size", 8, "--max-steps", 12, "--save-interval", 5, "--eval-interval", 6)
    noise = ("--augmentation-prob", 0.8, "--max-len", MAX_LEN, "--language", "en")
    return finetune(table, out, "--encoder", encoder, *sizes, *noise, *extra)


def dataset_of(folder: Path, tokenizer: Tokenizer) -> OccupationDataset:
    data = dataset(folder, write_table(folder / "table.csv"))
    form = {
        "formatter": data.formatter,
        "classes": data.classes,
        "max_len": MAX_LEN,
        "tokenizer": tokenizer,
    }
    return OccupationDataset(data.examples, **form)


@pytest.fixture(params=KINDS)
def encoder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return save_pretrained(request.param, tmp_path / request.param)


@pytest.mark.parametrize("encoder", ["bert", slow("xlm-r"), slow("byt5")], indirect=True)
def test_a_run_needs_no_other_folder(encoder: Path, table: Path, tmp_path: Path):
    out = tmp_path / "out"
    args = training(
        table, out, encoder, "--precision", "bf16", "--num-workers", 1, "--dropout", 0.1
    )
    result = run(*(arg for arg in args if arg != "--no-report"))
    assert "got exactly the right codes" in result.stdout and "fork" not in result.stderr
    assert not load_model(out).config.reads_language  # there is one
    newest = list_checkpoints(out)[-1]
    state = torch.load(newest / "optimizer.pt")["optimizer"]["state"]
    assert len(state) == sum(parameter.requires_grad for parameter in load_model(out).parameters())
    assert all(
        moments["exp_avg"].any() for moments in state.values()
    )  # of each weight there have been gradients
    shutil.copytree(out, parts := tmp_path / "parts")
    shutil.rmtree(list_checkpoints(parts)[-1])
    shutil.rmtree(encoder)
    assert "Resuming from step" in run(*[parts if arg == str(out) else arg for arg in args]).stdout
    assert_same_end(out, parts)
    coders = (Coder.from_pretrained(folder, "cpu") for folder in (out, newest))
    pd.testing.assert_frame_equal(*(coder.predict(TEXTS[:20], "en") for coder in coders))
    again = run(
        *training(table, tmp_path / "next", "tiny", "--initial-checkpoint", out, "--max-steps", 1)
    )
    assert "step 1/1" in again.stdout and (tmp_path / "next" / "tokenizer").is_dir()
    Coder.from_pretrained(out, "cpu").save_pretrained(tmp_path / "copy")
    shutil.rmtree(out)
    predict = (
        "-m",
        "histocoder",
        "predict",
        "--model",
        tmp_path / "copy",
        "--mode",
        "topk",
        "--language",
        "en",
    )
    assert "hisco_1" in run(*predict, "farmer").stdout
    card = (tmp_path / "copy" / "README.md").read_text()
    assert f"(`{encoder.name.replace('xlm-r', 'xlm-roberta').replace('byt5', 't5')}`)" in card
    assert f"{MAX_LEN} tokens" in card


def test_padding_changes_nothing(encoder: Path):
    model = model_of(encoder)
    texts = tokenize(
        [f"en[SEP]{text}" for text in TEXTS], max_len=MAX_LEN, tokenizer=model.tokenizer
    )
    rows = np.arange(len(texts))
    ids = torch.from_numpy(texts.pad(rows, max_len=MAX_LEN))
    assert ids.shape[1] % 2 == 0 and texts.lengths.min() < texts.lengths.max() <= ids.shape[1]
    targets = torch.full((len(rows), 6), 5)
    with torch.no_grad():
        together = model(ids, targets)
        for row in (int(texts.lengths.argmin()), int(texts.lengths.argmax()), 3):
            own = torch.from_numpy(
                texts.pad(rows[[row]], max_len=MAX_LEN, num_positions=int(texts.lengths[row]))
            )
            for one, all_rows in zip(model(own, targets[:1])[:2], together[:2], strict=True):
                torch.testing.assert_close(one[0], all_rows[row], atol=1e-5, rtol=0)
    frames = [
        Coder(model, "cpu").predict(TEXTS, "en", mode="full", batch_size=size)
        for size in (len(TEXTS), 1)
    ]
    np.testing.assert_allclose(*frames, atol=1e-5)


def test_noise_is_put_on_characters(encoder: Path, tmp_path: Path):
    tokenizer = load_tokenizer(str(encoder))
    noisy, same = (
        pickle.loads(pickle.dumps(dataset_of(tmp_path, tokenizer))),
        dataset_of(tmp_path, CHARACTERS),
    )
    noise = Augmenter(
        WordList.from_texts(TEXTS), augmentation_prob=1.0, num_transformations=3, unk_lang_prob=0.5
    )
    noisy.augmenter = same.augmenter = noise
    for share in SequentialSampler(noisy.lengths(), batch_size=16):
        texts = ["".join(map(chr, row[row.ne(0)].tolist()[1:-1])) for row in same[share].input_ids]
        expected = tokenize(texts, max_len=MAX_LEN, tokenizer=tokenizer).pad(
            np.arange(len(texts)), max_len=MAX_LEN
        )
        assert noisy[share].input_ids.tolist() == expected.tolist()


READ = {
    "bert": "[CLS] en [SEP] farmer [ pad ] [SEP]",
    "xlm-r": "<s> ▁en </s> </s> ▁farmer ▁ [ <unk> ] </s>",
}
READ["byt5"] = "en</s>farmer [PAD]</s>"


@pytest.mark.parametrize("kind", KINDS)
def test_language_and_description_are_two_texts(tmp_path: Path, kind: str):
    tokenizer, theirs = (
        load_tokenizer(str(save_pretrained(kind, tmp_path))),
        AutoTokenizer.from_pretrained(tmp_path),
    )
    texts = ["en[SEP]farmer [PAD]", "en[SEP]<pad> [PAD]", "en[SEP]" + "baker " * 99]
    ids, lengths, num_cut = tokenizer.token_ids(texts, max_len=32)
    assert theirs.decode(ids[: lengths[0]].tolist()) == READ[kind]
    assert tokenizer.pad_id not in ids  # nothing in a description is special
    assert lengths[2] == 32 and num_cut == 1 and ids[-1] == ids[lengths[0] - 1]
    alone = tokenizer.without_language()
    for one in (tokenizer, alone):
        assert pickle.loads(pickle.dumps(one)).__reduce__() == one.__reduce__()
    ids, lengths, _ = alone.token_ids(["en[SEP]farmer", "nl[SEP]farmer"], max_len=32)
    assert ids[: lengths[0]].tolist() == ids[lengths[0] :].tolist()
    assert theirs.decode(ids[: lengths[0]], skip_special_tokens=True).lstrip("▁ ") == "farmer"
    with pytest.warns(UserWarning, match="longer than 64 tokens"):
        Coder(model_of(tmp_path), "cpu").predict(["farmer", "x " * 61], "en")


@pytest.mark.parametrize("kind", ["bert", "byt5", "canine"])
def test_configs_name_no_code_to_run(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = save_pretrained(kind, tmp_path / kind)
    fields = json.loads((folder / "config.json").read_text())
    fields |= {
        "attn_implementation": "somebody/kernel",
        "auto_map": {"AutoModel": "somebody/model--model.Model"},
    }
    (folder / "config.json").write_text(json.dumps(fields))
    loaded: list[object] = []
    loader = "lazy_import_flash_attention"  # earlier versions load no kernels of the hub
    monkeypatch.setattr(
        transformers.modeling_utils, loader, lambda *args, **_: loaded.append(args), raising=False
    )
    load_encoder(str(folder), max_len=MAX_LEN)
    encoder_from_config(fields)
    assert loaded == []


def test_mistakes_are_said(table: Path, tmp_path: Path):
    bert = save_pretrained("bert", tmp_path / "bert", num_positions=60)
    xlm_r = save_pretrained("xlm-r", tmp_path / "xlm-r", num_positions=62)
    for encoder in (bert, xlm_r):  # XLM-R's first position is 2
        with pytest.raises(UserError, match="has 60 positions; set --max-len"):
            load_encoder(str(encoder), max_len=64)
    said = refused(
        *training(table, tmp_path / "out", bert, "--max-len", 32, "--save-format", "occcanine")
    )
    assert (
        "--save-format occcanine: OccCANINE has no format for this model: its encoder is not"
        in said
    )
    byt5 = save_pretrained("byt5", tmp_path / "byt5")
    for missing in (bert / "vocab.txt", byt5 / "tokenizer_config.json", xlm_r / "tokenizer.json"):
        missing.unlink()
        with pytest.raises(UserError, match=r"Could not load the encoder.*its tokenizer"):
            load_tokenizer(str(missing.parent))
    weights = load_file(xlm_r / "model.safetensors")  # a head's may be missing, not these
    del weights["encoder.layer.0.output.dense.weight"]
    save_file(weights, xlm_r / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"no weights encoder\.layer\.0\.output\.dense\.weight"):
        load_encoder(str(xlm_r), max_len=32)


def test_tokenizers_are_guarded_as_weights(encoder: Path, tmp_path: Path):
    model = model_of(encoder)
    save_model(tmp_path / "model", model.config, model.state_dict(), tokenizer=model.tokenizer)
    with pytest.raises(UserError, match="--initial-checkpoint"):
        load_tokenizer(str(tmp_path / "model"))
    with pytest.raises(UserError, match="OccCANINE has no format"):
        save_occcanine(tmp_path / "model", tmp_path / "last.bin")
    (tmp_path / "model" / "tokenizer" / "tokenizer_config.json").write_text("{")
    with pytest.raises(DamagedError, match=r"tokenizer_config\.json is missing or damaged"):
        load_model(tmp_path / "model")
    (tmp_path / "model" / "manifest.json").unlink()
    with pytest.raises(DamagedError, match="tokenizer"):
        load_model(tmp_path / "model")
    shutil.rmtree(tmp_path / "model" / "tokenizer")
    with pytest.raises(UserError, match="tokenizer is missing"):
        load_model(tmp_path / "model")
