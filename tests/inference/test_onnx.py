"""Models as ONNX graphs."""

import copy
import importlib.util
import logging
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import mistake, run, write
from models import CODES, config_of, few_examples, save_tiny_model, tiny_model

pytest.importorskip("onnxruntime")
from histocoder import Coder
from histocoder.checkpoints.model_files import as_saved, save_config
from histocoder.errors import UserError
from histocoder.formatters import build_formatter
from histocoder.inference import onnx_export
from histocoder.inference.onnx_coder import MODES, OnnxCoder
from histocoder.model import MixerModel, load_encoder, ngram
from histocoder.model.linear_expert import LinearExpert, ngram_rows
from histocoder.model.nearest import NearestExpert
from histocoder.model.ngram import NgramConfig, NgramEncoder
from histocoder.text.tokenizers import end_characters, join_language, lower_characters

ODD = [
    "γεωργός",
    "漢字 職人",
    "بائع",
    "wæver & husmand\u2009(død)",
    "e\u0301tameur",
    "ΣΊΣΥΦΟΣ",
    "𝔟aker 😀",
    "İ",
]
ODD += ["\u017fchu\u00admacher", "\uff26armer\u200b"]
TEXTS = [*few_examples().texts, *ODD, "x" * 90, "farmer and shoemaker", "boot-maker's apprentice"]


def ngram_model() -> MixerModel:
    """Return a model with all experts, of up to three codes."""
    torch.manual_seed(2)
    encoder = NgramEncoder(
        NgramConfig(num_buckets=512, hidden_size=32, max_words=6, intermediate_size=32)
    )
    weights = {
        "decoder": 0.2,
        "flat": 0.5,
        "linear": 0.3,
        "nearest": 0.3,
        "begins": 0.2,
        "ends": 0.1,
    }
    settings = {
        **{
            "target_cols": ("hisco_1", "hisco_2", "hisco_3"),
            "languages": ("en", "unk"),
            "thresholds": {"en": 0.1},
        },
        **{
            "text_normalization": "lower2",
            "flat_loss": "softmax",
            "mode": "combined",
            "decoder_prior": True,
        },
        **{"experts": weights | {"end": 1.0, "few": -1.0, "further": 0.4}, "num_nearest_rows": 40},
        **dict.fromkeys(("num_linear_features", "num_attribute_features"), len(known_ngrams())),
        "attributes": {"status": ("21", "23"), "relation": ("11",)},
        "attribute_experts": {"status": {"flat": 0.3, "linear": 0.6}},
    }
    model = MixerModel(
        config_of(encoder, build_formatter("hisco", num_blocks=3), CODES, **settings), encoder
    )
    torch.nn.init.normal_(model.linear_decoder.weight, std=0.5)
    torch.nn.init.normal_(model.decoder.head.weight, std=0.2)
    class_ids = torch.arange(40) % (len(CODES) - 1)  # so that one has no row
    encodings = torch.randn(40, 32, generator=torch.Generator().manual_seed(0))
    ends = torch.from_numpy(end_characters(join_language((TEXTS * 3)[:40], ["en"] * 40)))
    model.nearest_expert = NearestExpert.of(encodings, ends, class_ids, num_classes=len(CODES))
    model.linear_expert, model.attribute_expert = (
        LinearExpert.of(
            known_ngrams(),
            torch.rand(len(known_ngrams())) + 1,
            torch.randn(len(known_ngrams()), num_outputs).half(),
            torch.zeros(num_outputs),
        )
        for num_outputs in (len(CODES), 5)
    )
    return model.eval()


def known_ngrams() -> torch.Tensor:
    """The n-grams of some of the texts."""
    return ngram_rows(torch.from_numpy(lower_characters(join_language(TEXTS[:8], ["en"] * 8))))[
        1
    ].unique()


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Coder, Path]]:
    """A model of a kind, and the folder that it was exported to."""
    logging.getLogger(
        "torch.__trace"
    ).handlers.clear()  # or pytest keeps each line, which takes minutes

    @cache
    def of(kind: str) -> tuple[Coder, Path]:
        folder = tmp_path_factory.mktemp(kind) / "onnx"
        model = {"canine": tiny_model, "ngram": ngram_model}[kind]()
        coder = Coder(as_saved(model), "cpu")
        ngram.character_kinds.cache_clear()  # as in a process of its own
        onnx_export.export(coder, folder, TEXTS, ["en", *["unk"] * (len(TEXTS) - 1)])
        return coder, folder

    return of


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["canine", "ngram"])
def test_graphs_answer_as_the_model_without_decoder(
    exported: Callable[[str], tuple[Coder, Path]], kind: str
):
    coder, folder = exported(kind)
    graphs = OnnxCoder(folder, num_threads=1)
    for how in ({}, {"threshold": 0.05}, {"min_confidence": 0.5}):
        then, now = (
            one.predict([*TEXTS, None], "en", mode="flat", **how) for one in (coder, graphs)
        )
        pd.testing.assert_frame_equal(
            then, now, atol=1e-3, rtol=0, check_dtype=False
        )  # sums in fp16
    weights = coder.model.config.experts or {"decoder": 1 / 2, "flat": 1 / 2}
    names = [
        name
        for name in ("decoder", "flat", "linear", "nearest", "begins", "ends")
        if name in weights
    ]
    scale = 1 + weights["decoder"] / sum(weights[name] for name in names[1:])
    silent, without = (
        copy.copy(coder.model),
        {"decoder": 0.0, **{name: scale * weights[name] for name in names[1:]}},
    )
    silent.config = replace(silent.config, experts=without)
    then, now = (
        one.predict(TEXTS, "en", mode="combined") for one in (Coder(silent, "cpu"), graphs)
    )
    first = [name for name in now if name != "conf"]
    pd.testing.assert_frame_equal(then[first], now[first], atol=1e-3, rtol=0, check_dtype=False)
    np.testing.assert_array_equal(now["conf"], now["prob_1"])
    assert len(graphs.predict([])) == 0
    for mode in ("greedy", "topk", "full"):
        with pytest.raises(UserError, match=f"The mode {mode} needs the decoder"):
            graphs.predict("farmer", mode=mode)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["flat", "greedy"])
def test_graphs_have_the_models_confidence(
    exported: Callable[[str], tuple[Coder, Path]], tmp_path: Path, mode: str
):
    coder, folder = exported("canine")
    folder = shutil.copytree(folder, tmp_path / "onnx")
    scales = {"da": {"slope": 0.5, "intercept": -1.0}, "*": {"slope": 1.0, "intercept": 0.5}}
    scaled = copy.copy(coder.model)
    scaled.config = replace(scaled.config, mode=mode, confidence=scales)
    save_config(folder, scaled.config)
    texts, langs = [*TEXTS, None], ["da", *["en"] * len(TEXTS)]
    original = Coder(scaled, "cpu")
    least = original.predict(texts, langs, mode="flat")["conf"].mean()
    then, now = (
        one.predict(texts, langs, mode="flat", min_confidence=least)
        for one in (original, OnnxCoder(folder, num_threads=1))
    )
    pd.testing.assert_frame_equal(then, now, atol=1e-3, rtol=0, check_dtype=False)
    assert 0 < now["hisco_1"].count() < len(TEXTS)


@pytest.mark.slow
def test_graphs_have_weights_by_language(
    exported: Callable[[str], tuple[Coder, Path]], tmp_path: Path
):
    coder, folder = exported("ngram")
    usual = coder.model.config
    of_english = dict(usual.experts) | {"flat": 9.0}
    coded = {}
    for name, config in (
        ("usual", usual),
        ("by language", replace(usual, experts_by_language={"en": of_english})),
        ("of all", replace(usual, experts=of_english)),
    ):
        changed = shutil.copytree(folder, tmp_path / name)
        save_config(changed, config)
        coded[name] = OnnxCoder(changed, num_threads=1).predict(TEXTS, "en", mode="combined")
    pd.testing.assert_frame_equal(coded["by language"], coded["of all"])
    assert not coded["by language"].equals(coded["usual"])


@pytest.mark.slow
def test_graphs_take_descriptions_of_several_blocks(tmp_path: Path):
    torch.manual_seed(0)
    encoder = load_encoder("tiny", max_len=256)
    formatter = build_formatter("hisco", num_blocks=1)
    config = config_of(encoder, formatter, CODES, target_cols=("hisco_1",), max_len=256)
    model = MixerModel(config, encoder).eval()
    for layer in model.encoder.initial_char_encoder.layer:
        torch.nn.init.normal_(layer.attention["self"]["query"].weight, std=1.0)
    torch.nn.init.normal_(model.linear_decoder.weight, std=1.0)
    onnx_export.export_graphs(model, tmp_path)
    save_config(tmp_path, config)
    text = "farmer and smith " * 13
    then, now = (
        one.predict([text], "en", mode="flat", threshold=0.0)
        for one in (Coder(model, "cpu"), OnnxCoder(tmp_path, num_threads=1))
    )
    pd.testing.assert_frame_equal(then, now, atol=1e-4, rtol=0, check_dtype=False)


@pytest.mark.slow
def test_graphs_run_without_torch(exported: Callable[[str], tuple[Coder, Path]]):
    _, folder = exported("ngram")
    script = f"""
import sys
others = ("torch", "transformers", "safetensors", "pyarrow", "sklearn", "tqdm", "yaml", "onnx")
sys.modules |= dict.fromkeys(others)  # so that importing them fails
from histocoder import OnnxCoder
coder = OnnxCoder({str(folder)!r})
for mode in {MODES!r}:
    print(coder.predict({TEXTS!r}, "en", mode=mode).to_csv())
"""
    expected = "".join(
        f"{OnnxCoder(folder).predict(TEXTS, 'en', mode=mode).to_csv()}\n" for mode in MODES
    )
    assert (
        run("-c", script, fresh=True).stdout == expected
    )  # in a process that has not imported pandas with pyarrow


def test_mistakes_of_exporting_are_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    model, out = save_tiny_model(tmp_path / "model"), tmp_path / "onnx"
    data = write(tmp_path / "data.csv", "occ1,hisco_1", "farmer,61110")

    def said(*flags: object) -> str:
        line = mistake(capsys, "export", "--model", model, "--onnx", out, *flags)
        assert sorted(tmp_path.iterdir()) == before
        return line

    before = sorted(tmp_path.iterdir())
    assert "there is no" in (text := said()) and "data_val.csv. Add --data FILE." in text

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("no such operator\nand more")

    monkeypatch.setattr(torch.onnx, "export", refuse)
    assert (
        "can't write this encoder as an ONNX graph (no such operator). Nothing was written."
        in said("--data", data)
    )
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *_: None if name == "onnx" else find(name)
    )
    assert "needs onnx. Install it: pip install 'histocoder[onnx]'." in said()
    out.mkdir()
    before = sorted(tmp_path.iterdir())
    assert f"{out} already exists; choose another folder for --onnx." in said()


def test_mistakes_of_opening_are_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refused(message: str) -> None:
        with pytest.raises(UserError, match=message):
            OnnxCoder(tmp_path)

    refused(r"holds no exported model: it has no encoder.onnx. See histocoder export")
    (tmp_path / "encoder.onnx").write_bytes(b"no graph")
    refused(r"can't be read .*config.json")
    shutil.copy(save_tiny_model(tmp_path / "model") / "config.json", tmp_path)
    refused(r"can't be read .*encoder.onnx")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    refused(r"need onnxruntime. Install it: pip install 'histocoder\[onnx\]'")
