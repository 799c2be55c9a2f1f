import json
import math
import threading
import warnings
from dataclasses import replace

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from conftest import ROOT, cases, shared, spied, write
from models import CODES, save_tiny_model, tiny_model
from safetensors.torch import save_file
from scipy.special import expit, logit

from histocoder import Coder, load_occcanine
from histocoder.checkpoints.occcanine import save_published, with_all_positions
from histocoder.config import PredictOptions
from histocoder.data.key import Key, write_key
from histocoder.errors import Notice, UserError
from histocoder.formatters import MISSING, PAD, build_formatter
from histocoder.inference.confidence import MAX_AGREEMENT
from histocoder.inference.descriptions import Inputs, thresholds_of
from histocoder.inference.incremental import DecoderInputs
from histocoder.inference.search import CodeTrie, TrieSearch, greedy
from histocoder.model import MixerModel

TEXTS = ["farmer", "wine and spirit merchant", None, "farmer", "baker", " ", "nan"]


@pytest.fixture(scope="module")
def coder() -> Coder:
    return Coder(tiny_model(), "cpu")


@pytest.mark.parametrize("mode", ["combined", "greedy", "topk"])
def test_index_and_order_are_the_inputs(coder: Coder, mode: str):
    series = pd.Series(TEXTS, index=[10, 20, 30, 40, 50, 60, 70])
    width, k = (3, {"k": 3}) if mode == "topk" else (2, {})
    table = coder.predict(series, "en", mode=mode, **k)
    alone = [
        coder.predict([text], "en", mode=mode, **k).set_axis([row]) for row, text in series.items()
    ]
    pd.testing.assert_frame_equal(
        table, pd.concat(alone)[[*table]].astype(table.dtypes), atol=1e-5, rtol=0
    )
    assert table.loc[[30, 60]].isna().all().all()  # missing texts get missing codes
    assert table.loc[[10, 70], "conf"].notna().all()  # "nan" is a word
    assert [*table.filter(like="hisco_")] == [
        f"hisco_{i + 1}" for i in range(width)
    ] and "desc_1" in table


def test_a_language_for_each_row(coder: Coder):
    table = coder.predict(["baker", "baker", "baker"], ["en", "da", "en"], mode="full")
    assert table.iloc[0].equals(table.iloc[2]) and not table.iloc[0].equals(table.iloc[1])
    texts, langs = pa.array(["baker", None, "baker"]), pa.chunked_array([["en", "da", None]])
    expected = coder.predict(["baker", None, "baker"], ["en", "da", "unk"], mode="full")
    assert (
        coder.predict(texts, langs, mode="full").equals(expected) and expected.iloc[1].isna().all()
    )
    assert coder.predict("baker", None, mode="full").equals(
        coder.predict("baker", "unk", mode="full")
    )
    with pytest.raises(UserError, match="3 descriptions, but 1 languages"):
        coder.predict(["a", "b", "c"], ["en"])


@pytest.mark.parametrize(
    ("target_cols", "further"),
    [
        ("occ_1 occ_2", "occ_3"),
        ("HISCO", "HISCO_2 HISCO_3"),
        ("a b", "hisco_3"),
        ("", "hisco_1 hisco_2 hisco_3"),
    ],
)
def test_target_columns_keep_their_names(target_cols: str, further: str):
    model = tiny_model()
    model.config = replace(
        model.config, target_cols=tuple(target_cols.split()), descriptions={}
    )  # or does not say
    table = Coder(model, "cpu").predict("farmer", mode="topk", k=3)
    first, second, third = f"{target_cols} {further}".split()
    assert [*table] == [first, "prob_1", second, "prob_2", third, "prob_3", "conf"]


def test_thresholds_of_languages():
    config = replace(
        tiny_model().config, thresholds={"en": 0.2, "unk": 0.3}
    )  # it knows Danish and English
    langs = ("en", "da", "xx", "unk")
    assert thresholds_of(config, langs).tolist() == pytest.approx([0.2, 0.5, 0.3, 0.3])
    assert thresholds_of(config, langs, 0.7).tolist() == pytest.approx([0.7] * 4)
    assert thresholds_of(replace(config, thresholds={"*": 0.4}), ["xx"]).tolist() == pytest.approx(
        [0.4]
    )
    assert thresholds_of(replace(config, languages=()), ["xx"]).tolist() == [0.5]


def class_probabilities(coder: Coder, texts: list[str], langs: list[str]) -> torch.Tensor:
    """Those of the flat head."""
    with torch.no_grad():
        return coder.model.class_probabilities(
            coder.model.classify(torch.from_numpy(coder.embed(texts, langs)))
        )


def test_flat_gives_classes_above_the_threshold(coder: Coder):
    best = class_probabilities(coder, ["farmer"], ["en"])[0].sort(descending=True)
    codes = [CODES[place] for place in best.indices.tolist()]
    for threshold, expected in (
        (0.0, codes[:2]),
        (float(best.values[1]) + 1e-3, codes[:1]),
        (0.999, codes[:1]),
    ):
        row = coder.predict("farmer", "en", mode="flat", threshold=threshold).iloc[0]
        assert row.filter(like="hisco_").dropna().tolist() == expected
        assert row["conf"] == row["prob_1"] == pytest.approx(float(best.values[0]), abs=1e-6)


def test_the_decoder_decides_on_second_codes():
    model = tiny_model()
    shares = torch.full((len(CODES),), 0.01)
    shares[:2] = torch.tensor([0.8, 0.1])
    with torch.no_grad():
        for layer in (model.decoder.head, model.linear_decoder):
            layer.weight.zero_()
            layer.bias.zero_()
        model.linear_decoder.bias.copy_(shares.logit())
        model.decoder.head.bias[PAD] = (
            math.log(model.config.vocab_size - 1) - 1
        )  # no second code: 0.27
    for more, second in (
        ({}, CODES[1]),
        ({"end": 1.0, "few": 2.0}, None),
        ({"further": 0.9}, None),
    ):
        model.config = replace(model.config, experts={"decoder": 0.1, "flat": 1.0} | more)
        found = Coder(model, "cpu").predict("farmer and baker", mode="combined").iloc[0]
        assert (found["hisco_1"], found["hisco_2"]) == (CODES[0], second)
        sure = 1 / (1 + math.exp(1 - more.get("few", 0.0)))
        expected = sure if second is None else (1 - sure) * shares[1] / shares[1:].sum()
        assert found["conf"] / found["prob_1"] == pytest.approx(float(expected), abs=1e-5)


@pytest.mark.parametrize(("codes", "is_coded"), [(("A", "B"), False), (("A", "?B"), True)])
def test_combined_may_give_no_code(codes: tuple[str, ...], is_coded: bool):
    tiny, formatter = tiny_model(), build_formatter("general", num_blocks=2, block_size=2)
    form, size = formatter.to_config(), formatter.vocab_size
    model = MixerModel(
        replace(tiny.config, formatter=form, vocab_size=size, codes=codes), tiny.encoder
    ).eval()
    torch.nn.init.zeros_(model.decoder.head.weight)
    with torch.no_grad():
        model.decoder.head.bias[formatter.system.to_block(MISSING)[0]] = 20.0
    found = Coder(model, "cpu").predict("widow of a farmer", mode="combined").iloc[0]
    assert isinstance(found["hisco_1"], str) == is_coded and pd.isna(found["prob_1"]) != is_coded
    assert is_coded or found["conf"] > 0.99


def test_constrained_codes_are_in_the_key(coder: Coder):
    table = coder.predict(
        [f"{a}{b}" for a in "abcdefghij" for b in "klmnopqrst"], "en", constrain=True
    )
    assert (
        set(table[["hisco_1", "hisco_2"]].stack()) - {None} <= set(CODES)
        and table["hisco_1"].notna().all()
    )
    assert table["conf"].between(0, 1).all()


def test_long_texts_and_strange_languages_are_said(coder: Coder):
    with pytest.warns(UserWarning, match=r"longer than 64 characters, with the language, are"):
        cut = coder.predict("x" * 10_000, "en", mode="full")
    with pytest.warns(UserWarning, match=r"does not know the language 'fi'.* it knows da, en, unk"):
        strange = coder.predict("baker", "fi", mode="full")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        unknown = coder.predict("baker", "unk", mode="full")
    assert strange.equals(unknown) and cut.notna().all().all()


@pytest.mark.parametrize("mode", ["combined", "greedy", "flat", "topk"])
def test_two_workers_answer_as_one(mode: str, monkeypatch: pytest.MonkeyPatch):
    coder, num_threads = (
        Coder.from_pretrained(ROOT / "tests" / "fixtures" / "ngram", "cpu"),
        torch.get_num_threads(),
    )
    texts, found, told = [f"{i * 'very '}old farmer {i}" for i in range(60)], [], []

    def where(*_: object) -> list[tuple[bool, int]]:
        return [(threading.current_thread() is threading.main_thread(), torch.get_num_threads())]

    computing = spied(monkeypatch, Coder, "predict_batch", where)
    for num_workers, expected in ((1, (True, num_threads)), (2, (False, -(-num_threads // 2)))):
        coder.num_workers = num_workers
        found.append(coder.predict(texts, "en", mode=mode, batch_size=4, progress=told.append))
        assert set(computing) == {expected} and len(computing) == 15 and told == [4] * 15
        computing.clear(), told.clear()
    pd.testing.assert_frame_equal(*found, check_exact=True)
    assert torch.get_num_threads() == num_threads


def test_an_error_of_a_worker_stops_the_others():
    coder = Coder.from_pretrained(ROOT / "tests" / "fixtures" / "ngram", "cpu")
    coder.num_workers, begun, before = 2, [], threading.active_count()

    def work(_: Inputs) -> None:
        begun.append(True)
        raise MemoryError

    given = coder.distinct([f"farmer {i}" for i in range(100)], "en")
    with pytest.raises(MemoryError):
        list(coder.each_batch(work, given, PredictOptions(batch_size=1)))
    assert len(begun) < 10 and threading.active_count() == before


@pytest.mark.parametrize("mode", ["combined", "greedy", "flat"])
def test_alternatives_come_in_one_pass(mode: str, monkeypatch: pytest.MonkeyPatch):
    model = tiny_model()
    model.config = replace(model.config, mode=mode)
    coder, texts = (
        Coder(model, "cpu"),
        ["farmer", None, "baker", "farmer", "wine and spirit merchant"],
    )
    given = coder.distinct(texts, "en")
    expected, combined = (coder.code(given, PredictOptions(mode=one)) for one in (None, "combined"))
    encoded = spied(monkeypatch, MixerModel, "encode", lambda _, ids, **__: ids.tolist())
    codes, ranked = coder.predict_ranked(texts, "en")
    assert len(encoded) == 3
    for found, one in zip(codes, expected, strict=True):
        np.testing.assert_array_equal(found, one)
    assert ranked.codes[:, 0].tolist() == combined.codes[:, 0].tolist()
    np.testing.assert_allclose(ranked.probs[:, 0], combined.probs[:, 0])
    probs = np.delete(ranked.probs, 1, axis=0)
    assert (np.diff(probs) <= 0).all() and np.allclose(probs.sum(1), 1)
    assert set(ranked.codes[0]) - {None} == set(CODES)  # of eight all are candidates


def test_bf16_keeps_the_models_weights(coder: Coder):
    fast = Coder(coder.model, "cpu", precision="bf16")
    texts = [f"{a}{b}" for a in "abcdefgh" for b in "klmnopqr"]
    for how in ({"mode": "flat", "threshold": 0.0}, {"mode": "full"}):
        near, exact = (one.predict(texts, "en", **how) for one in (fast, coder))
        numbers = exact.select_dtypes("number").columns
        assert (near[numbers] - exact[numbers]).abs().to_numpy().mean() < 0.01
    assert all(p.dtype == torch.float32 for p in coder.model.parameters())


def test_bad_arguments(coder: Coder):
    for arguments, message in (
        ({"mode": "best"}, "--mode is best; it must be one of combined, greedy"),
        ({"k": 0}, "--k is 0"),
        ({"batch_size": 0}, "--batch-size is 0; it must be 1 or more"),
        ({"threshold": 1.1}, "--threshold is 1.1; it must lie between 0 and 1"),
        (
            {"mode": "greedy", "threshold": 0.5},
            "--threshold is for the mode flat, and the mode is greedy",
        ),
        ({"mode": "combined", "k": 3}, "--k is for the mode topk, and the mode is combined"),
        (
            {"mode": "flat", "constrain": True},
            "--constrain is for the mode greedy, and the mode is flat",
        ),
        ({"min_confidence": 7}, "--min-confidence is 7; it must lie between 0 and 1"),
        ({"mode": "full", "min_confidence": 0.5}, "--mode full writes none; omit one of them"),
    ):
        with pytest.raises(UserError, match=message):
            coder.predict("baker", **arguments)


@cases(
    ("changed", "message"),
    (lambda config: config | {"model_type": "bert"}, "not that of a histocoder model"),
    (lambda config: config | {"format_version": 99}, "version 99"),
    (lambda config: {"model_type": config["model_type"]}, "'encoder' is missing"),
    (lambda config: [*config], "no JSON object"),
    (
        lambda config: config | {"codes": CODES[1:]},
        "the model's weights .size mismatch for linear_decoder.weight",
    ),
    (lambda config: config | {"thresholds": {"en": "high"}}, "'thresholds' has an invalid value"),
    (lambda config: config | {"encoder": {"num_hidden_layers": "two"}}, "does not match the model"),
    (
        lambda config: config | {"formatter": {"name": "none", "num_blocks": 2}},
        "no formatter 'none'",
    ),
)
def test_configs_that_are_no_models_are_refused(tmp_path, changed, message):
    path = save_tiny_model(tmp_path) / "config.json"
    path.with_name("manifest.json").unlink()  # as who edits a file does
    write(path, json.dumps(changed(json.loads(path.read_text()))))
    with pytest.raises(UserError, match=message):
        Coder.from_pretrained(tmp_path, "cpu")
    path.unlink()
    with pytest.raises(UserError, match=r"has no config\.json"):
        Coder.from_pretrained(tmp_path, "cpu")


def published() -> tuple[dict, Coder]:
    expected = json.loads(shared("reference/occcanine/expected.json").read_text())
    path = shared("reference/occcanine/last.bin")
    coder = load_occcanine(
        path, formatter="hisco", encoder_config=expected["canine_config"], text_normalization="none"
    )
    return expected, coder


def test_a_published_model_gives_what_the_reference_gives():
    expected, coder = published()
    pairs = [text.split("[SEP]", 1) for text in expected["texts"]]
    texts, langs = [text for _, text in pairs], [lang for lang, _ in pairs]
    np.testing.assert_allclose(coder.embed(texts, langs), expected["pooled"], atol=1e-4)
    probabilities = torch.tensor(expected["flat_logits"]).sigmoid()
    torch.testing.assert_close(
        class_probabilities(coder, texts, langs), probabilities, atol=1e-4, rtol=0
    )
    searched = [coder.formatter.system.from_block(block) for block in expected["full_search_codes"]]
    ids, targets = torch.tensor(expected["input_ids"]), torch.tensor(expected["targets_seq2seq"])
    with torch.no_grad():
        memory, _, mask = coder.model.encode(ids)
        output = coder.model(ids, targets[:, :-1])
        tokens, of_tokens = greedy(
            coder.model.decoder, DecoderInputs(memory, mask), num_tokens=26, block_size=26
        )
    close = {"atol": 1e-4, "rtol": 0}
    torch.testing.assert_close(
        memory.sum(-1), torch.tensor(expected["memory_sum"]), atol=1e-3, rtol=0
    )
    forced = torch.tensor(expected["teacher_forced_logits_first3"])
    torch.testing.assert_close(output.seq2seq_logits[:3], forced, **close)
    assert torch.equal(tokens, torch.tensor(expected["greedy_tokens"]))
    torch.testing.assert_close(
        of_tokens, torch.tensor(expected["greedy_token_probs"])[:, 1:], **close
    )
    probs = TrieSearch(coder.model.decoder, CodeTrie(searched, coder.formatter)).full(
        DecoderInputs(memory, mask)
    )
    np.testing.assert_allclose(probs, expected["full_search_probs"], atol=1e-4)
    decoded = coder.formatter.decode(np.array(expected["greedy_tokens"]))
    found = coder.predict(texts, langs)[[f"hisco_{i}" for i in range(1, 6)]].to_numpy()
    np.testing.assert_array_equal(np.where(pd.isna(found), None, found), decoded)


def test_a_key_that_does_not_match_says_where(tmp_path):
    expected, coder = published()
    rows = [f"{code},{i}" for i, code in enumerate(coder.codes)]
    key = write(tmp_path / "key.csv", "system_code,code", *rows[:4], "99998,4", *rows[5:])
    options = {"formatter": "hisco", "encoder_config": expected["canine_config"]}
    with pytest.raises(UserError, match="class 4 is '99998' in the key and '06105' in the model"):
        load_occcanine(shared("reference/occcanine/last.bin"), key=key, **options)


def test_published_blank_classes_are_no_codes(tmp_path):
    tiny = tiny_model(num_blocks=5)
    config = replace(tiny.config, codes=(*CODES[:3], "", *CODES[3:]), descriptions={})
    model = MixerModel(config, tiny.encoder)
    torch.nn.init.constant_(model.linear_decoder.bias[3:4], 20)  # as if every row had one
    save_published(tmp_path / "last.bin", config, model.state_dict(), step=0)
    assert [code for code in torch.load(tmp_path / "last.bin")["key"] if pd.isna(code)]  # as there
    write_key(tmp_path / "key.csv", Key(config.codes))
    options = {"formatter": "hisco", "encoder_config": config.encoder}
    load_occcanine(tmp_path / "last.bin", key=tmp_path / "key.csv", **options)
    load_occcanine(tmp_path / "last.bin", **options).save_pretrained(tmp_path / "model")
    coder = Coder.from_pretrained(tmp_path / "model", "cpu")
    assert set(
        coder.predict(["a farmer"], "en", mode="topk", k=9).filter(regex="hisco").iloc[0]
    ) == set(CODES)
    for mode in ("flat", "combined"):
        found = coder.predict(["a farmer"], "en", mode=mode).filter(regex="hisco").iloc[0].dropna()
        assert len(found) and set(found) <= set(CODES)
    assert tuple(coder.predict(["a farmer"], "en", mode="full").columns) == CODES


def test_published_characters_and_keys_are_read(tmp_path):
    tiny, chars = tiny_model(), [*range(10), "-"]
    formatter = build_formatter(
        "general", num_blocks=2, block_size=3, symbols=list(map(str, chars))
    )
    form = {"formatter": formatter.to_config(), "vocab_size": formatter.vocab_size}
    config = replace(tiny.config, codes=("100", "-12"), **form)
    weights = MixerModel(config, tiny.encoder).state_dict().items()
    save_file(
        {name: with_all_positions(name, x, config) for name, x in weights},
        tmp_path / "model.safetensors",
    )
    (tmp_path / "key.json").write_text(json.dumps({"-12": 1, "100": 0}))
    options = {
        "formatter": "general",
        "target_cols": ["a_1", "a_2"],
        "block_size": 3,
        "encoder_config": config.encoder,
    }
    with pytest.raises(
        UserError, match=r"has 16 tokens, and the formatter 'general' 2086.*chars.json"
    ):
        load_occcanine(tmp_path, **options)
    (tmp_path / "chars.json").write_text(json.dumps(chars))
    load_occcanine(tmp_path, **options).save_pretrained(tmp_path / "model")
    coder = Coder.from_pretrained(tmp_path / "model", "cpu")
    assert coder.codes == ("100", "-12") and coder.formatter.encode(["-12"])[0, :4].tolist() == [
        2,
        15,
        6,
        7,
    ]
    assert set(coder.predict(["a farmer"], "en", mode="topk").filter(regex="a_").iloc[0]) == {
        "100",
        "-12",
    }


def test_values_that_are_not_text_are_refused():
    coder = Coder(tiny_model(), "cpu")
    table = {"occ1": ["baker"], "lang": ["en"]}
    for texts in (
        5,
        [61110],
        ["baker", 3.5],
        [["baker"]],
        table,
        pd.DataFrame(table),
        pa.table(table),
    ):
        with pytest.raises(UserError, match=r"give strings, such as df\['occ1'\]"):
            coder.predict(texts)
    assert coder.predict([None, float("nan"), " "])["conf"].isna().all()


def test_weights_of_a_language_count_for_it_alone():
    votes = {"decoder": 0.5, "flat": 0.5}
    texts, langs = ["smed"] * 2, ["da", "en"]
    usual = Coder(tiny_model(experts=votes, mode="combined"), device="cpu")
    of_danish = {"da": {**votes, "flat": 5.0}}
    own = Coder(
        tiny_model(experts=votes, experts_by_language=of_danish, mode="combined"), device="cpu"
    )
    before = usual.predict(texts, langs, progress=False)["conf"]
    after = own.predict(texts, langs, progress=False)["conf"]
    assert after[1] == pytest.approx(before[1], abs=1e-5)
    assert abs(after[0] - before[0]) > 1e-4


def test_confidence_is_that_of_other_sources():
    scales = {
        "da": {"slope": 0.5, "intercept": -1.0, "titles": 9_000.0},
        "*": {"slope": 0.0, "intercept": 0.0},
    }
    plain = Coder(tiny_model(), device="cpu").predict(["smed"], "da", progress=False)["conf"]
    coder = Coder(tiny_model(confidence=scales), device="cpu")
    texts, langs = ["smed", "smith", None], ["da", "en", "da"]
    conf = coder.predict(texts, langs, progress=False)["conf"]
    assert conf[0] == pytest.approx(MAX_AGREEMENT * expit(0.5 * logit(plain[0]) - 1))
    assert conf[1] == MAX_AGREEMENT / 2 and np.isnan(conf[2])


def test_ranked_codes_are_as_probable_as_in_other_sources():
    scales = {"da": {"slope": 0.0, "intercept": -9.0}, "*": {"slope": 1.0, "intercept": 9.0}}
    texts, langs = ["smed", "smith", None], ["da", "en", "da"]
    plain = Coder(tiny_model(), device="cpu").predict_ranked(texts, langs)
    scaled = Coder(tiny_model(confidence=scales), device="cpu").predict_ranked(texts, langs)
    shares = scaled.answer.conf[:2] / plain.answer.conf[:2]
    assert shares[0] < 1 < shares[1]
    expected = plain.ranked.probs[:2] * [[shares[0]], [1.0]]
    np.testing.assert_allclose(scaled.ranked.probs[:2], expected, rtol=1e-5)
    assert np.isnan(scaled.ranked.probs[2]).all()


def test_little_known_languages_are_said_once():
    scales = {
        "da": {"slope": 1.0, "intercept": 0.0, "titles": 200.0},
        "*": {"slope": 1.0, "intercept": 0.0},
    }
    coder = Coder(tiny_model(confidence=scales), device="cpu")
    with pytest.warns(Notice, match=r"learned little of Danish \(da\)"):
        coder.predict(["smed", "smith"], ["da", "en"], progress=False)
