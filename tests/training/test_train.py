"""What a run says of its data before it trains."""

import pandas as pd
from models import tiny_model

from histocoder.data.examples import Examples
from histocoder.formatters import MISSING
from histocoder.training.banner import codes_not_learned, rows_without_codes


def test_codes_without_a_training_row_are_told():
    train = Examples.of(
        ["smed", "bonde"], ["da", "da"], pd.DataFrame({"hisco_1": ["83110", "61110"]})
    )
    other = Examples.of(
        ["pige", "dreng", "smed"],
        ["da"] * 3,
        pd.DataFrame({"hisco_1": ["54010", "99930", "83110"]}),
    )
    notice = codes_not_learned(train, other)
    assert "2 validation rows have a code that no training row has, of 3: 54010, 99930." in notice
    assert "its accuracy is low" in notice
    assert not codes_not_learned(train, train)


def test_rows_that_teach_nothing_are_told():
    codes = pd.DataFrame({"hisco_1": ["83110", MISSING]})
    train = Examples.of(["smed", "hustru"], ["da", "da"], codes)
    notice = rows_without_codes(train, tiny_model(num_blocks=1).config)
    assert "1 training row has no code, and nothing is learned" in notice
    assert not rows_without_codes(train, tiny_model(num_blocks=2).config)
    assert not rows_without_codes(train.coded(), tiny_model(num_blocks=1).config)


def test_one_row_with_an_unlearned_code_is_told():
    train = Examples.of(
        ["smed", "bonde"], ["da", "da"], pd.DataFrame({"hisco_1": ["83110", "61110"]})
    )
    other = Examples.of(
        ["pige", "bonde", "smed"],
        ["da"] * 3,
        pd.DataFrame({"hisco_1": ["54010", "61110", "83110"]}),
    )
    notice = codes_not_learned(train, other)
    assert "1 validation row has a code that no training row has, of 3: 54010." in notice
    assert "count as wrong" in notice
