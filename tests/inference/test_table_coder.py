"""Blocks of a cluster's table, without Ray and Spark; tests/test_ray_and_spark.py starts these."""

import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from archives import TEXTS, code, write_archive
from conftest import spied, write

from histocoder.config import PredictConfig, PredictOptions
from histocoder.data.examples import Examples
from histocoder.errors import UserError
from histocoder.inference.coder import Coder
from histocoder.inference.known import Known
from histocoder.inference.predict_file import predict_file
from histocoder.inference.table_coder import BlockCoder


def block_coder(model: Path, *header: str, **options) -> BlockCoder:
    return pickle.loads(
        pickle.dumps(BlockCoder.of(model, header, device="cpu", precision="fp32", **options))
    )


def test_blocks_are_coded_as_a_file_is(model: Path, tmp_path: Path):
    table = pa.Table.from_pandas(write_archive(tmp_path / "in.csv", 300))
    code(model, tmp_path / "in.csv", tmp_path / "one.parquet")
    coder = block_coder(model, *table.column_names, language_col="lang")
    found = pa.concat_tables(
        part for start in range(0, 300, 70) for part in coder(table.slice(start, 70))
    )
    one = pq.read_table(tmp_path / "one.parquet").to_pandas()
    pd.testing.assert_frame_equal(
        found.to_pandas().replace("", None), one.replace("", None), rtol=0, atol=1e-3
    )


def test_a_large_block_of_chunks_is_coded(model: Path, monkeypatch: pytest.MonkeyPatch):
    coded = spied(monkeypatch, Coder, "code", lambda _, given, *__, **___: given.texts)
    texts = [None, *TEXTS] * 3000
    column = pa.chunked_array([texts[:7], [], texts[7:15_001], texts[15_001:]], pa.large_string())
    langs = pa.chunked_array([pa.array(["en", "da", None] * 4000).dictionary_encode()] * 2)
    block = pa.table({"occ1": column, "lang": langs, "id": range(24_000)})
    coder = block_coder(
        model, *block.column_names, language_col="lang", mode="greedy", columns="new_"
    )
    found = pa.concat_tables(
        part for start in range(0, 24_000, 5_000) for part in coder(block.slice(start, 5_000))
    )
    assert (
        found.select(block.column_names).equals(block) and len(coded) == 3 * 6
    )  # each text in three languages, once
    rows = found.to_pandas().groupby(["occ1", "lang"], dropna=False)
    assert (rows[["new_hisco_1", "new_conf"]].nunique(dropna=False) == 1).all(axis=None)
    assert found["new_conf"].is_null().to_pylist() == [not (text or "").strip() for text in texts]
    (empty,) = coder(block.slice(0, 0))
    assert empty.schema == found.schema and len(empty) == 0


def test_a_block_is_coded_after_one_that_failed(model: Path, monkeypatch: pytest.MonkeyPatch):
    blocks = [pa.table({"occ1": texts}) for texts in (TEXTS[:2], TEXTS[2:4], TEXTS[1:6])]
    coder = block_coder(model, "occ1", language="en")
    expected = [pa.concat_tables(coder(block)) for block in blocks]
    other = block_coder(model, "occ1", language="en", batch_size=3)  # so that it is opened anew
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        assert [*other(blocks[0])]
        patch.setattr(Coder, "code", lambda *_args, **_how: (_ for _ in ()).throw(MemoryError))
        assert not [*other(blocks[1])]
    for block, codes in list(zip(blocks, expected, strict=True))[::-1]:
        names = codes.column_names[:3]
        assert pa.concat_tables(other(block)).select(names).equals(codes.select(names))


def test_what_does_not_fit_is_named(model: Path, tmp_path: Path):
    block = pa.table({"occ1": ["baker"], "lang": ["x"]})
    coder = block_coder(model, "occ1", "lang", language="Danish")
    (added,) = coder(block)
    assert (
        added.column_names[:3] == ["occ1", "lang", "pred_lang"]
        and added["pred_lang"][0].as_py() == "da"
    )
    with pytest.raises(UserError, match="no model folder"):
        next(replace(coder, model=str(tmp_path / "gone"))(block))
    with pytest.raises(UserError, match="The table has no column 'occ1'; it has: text"):
        block_coder(model, "text")
    with pytest.raises(UserError, match="The table already has a column 'hisco_1'"):
        block_coder(model, "occ1", "hisco_1")


def test_expected_values_are_those_of_the_candidates(model: Path, tmp_path: Path):
    values = {
        ("61110", ""): (8, 50),
        ("61110", "21"): (7, 60),
        ("95410", ""): (7, 53),
        ("41025", ""): (7, 58),
    }
    lines = [f"{code},{status},{one},{two}" for (code, status), (one, two) in values.items()]
    classes = write(tmp_path / "hsn.csv", "hisco,status,hisclass,hiscam", *lines)
    frame = write_archive(tmp_path / "in.csv", 210).assign(status=["", "21", "33"] * 70)
    table = pa.Table.from_pandas(frame)
    options = {"language_col": "lang", "classes": str(classes), "mode": "combined"}
    found = pa.concat_tables(block_coder(model, *table.column_names, **options)(table)).to_pandas()
    coder = Coder.from_pretrained(model, "cpu")
    given = coder.distinct(frame["occ1"], frame["lang"].tolist())
    _, ranked = coder.code_ranked(given, PredictOptions(mode="combined"))
    for row, codes, probs in zip(found.to_dict("records"), ranked.codes, ranked.probs, strict=True):
        names = ["hiscam_1_share", "hiscam_1_mean", "hiscam_1_sd", "hisclass_1_prob"]
        if not row["occ1"]:
            assert pd.isna([row[name] for name in names]).all()
            continue
        pairs = [(p, code) for p, code in zip(probs, codes, strict=True) if (code, "") in values]
        has = [(p, *(values.get((code, row["status"])) or values[code, ""])) for p, code in pairs]
        share = sum(p for p, _, _ in has)
        mean = sum(p * hiscam for p, _, hiscam in has) / share
        sd = (sum(p * (hiscam - mean) ** 2 for p, _, hiscam in has) / share) ** 0.5
        same = sum(p for p, hisclass, _ in has if str(hisclass) == row["hisclass_1"])
        expected = [share, mean, sd, same if pd.notna(row["hisclass_1"]) else np.nan]
        assert [row[name] for name in names] == pytest.approx(expected, abs=2e-3, nan_ok=True)
    assert found["hisclass_1_prob"].notna().sum() > 50 and "histocoder:candidates" not in found


@pytest.mark.parametrize(
    ("usual", "num_known", "says"), [(0.0, 0, False), (0.999, 0, True), (0.999, 100, True)]
)
def test_low_confidence_is_said_to_be_unlike(
    model: Path, tmp_path: Path, usual: float, num_known: int, says: bool
):
    coder, texts = (
        Coder.from_pretrained(model, "cpu"),
        [f"smith {i}" for i in range(60 + num_known)],
    )
    coder.model.config = replace(coder.model.config, usual_confidence=usual)
    pd.DataFrame({"occ1": texts}).to_csv(tmp_path / "in.csv", index=False)
    known = Known(any_language=True)  # whose confidence is not the model's
    known.add(
        Examples.of(
            texts[:num_known], ["unk"] * num_known, pd.DataFrame({"hisco_1": ["61110"] * num_known})
        )
    )
    config, said = (
        PredictConfig(input=str(tmp_path / "in.csv"), output=str(tmp_path / "out.csv")),
        list[str](),
    )
    predict_file(coder, config, model_id="", known=known if num_known else None, say=said.append)
    assert (
        any("is unlike the training data: 100 % of its descriptions" in one for one in said) is says
    )
