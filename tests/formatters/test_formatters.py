import json

import numpy as np
import pytest
from conftest import cases, shared
from hypothesis import given
from hypothesis import strategies as st

from histocoder.formatters import BOS, EOS, PAD, SYMBOLS, Formatter, build_formatter

HISCO = build_formatter("hisco", num_blocks=5)
OCC1950 = build_formatter("occ1950", num_blocks=2)
GENERAL = build_formatter("general", num_blocks=3, block_size=6)
PSTI = build_formatter("gpf", num_blocks=2, block_size=8, use_within_block_sep=True)

characters = st.sampled_from([s for s in SYMBOLS if len(s) == 1])
CODES = {
    HISCO: st.sampled_from(["-1", "-2", "-3"]) | st.from_regex(r"\A[0-9]{5}\Z"),
    OCC1950: st.from_regex(r"\A[0-9]{3}\Z"),
    GENERAL: st.lists(characters, min_size=1, max_size=6)
    .map("".join)
    .filter(lambda code: code != "?"),
    PSTI: st.lists(st.sampled_from(SYMBOLS), min_size=1, max_size=8)
    .map(",".join)
    .filter(lambda code: code != "?"),
}


@cases(
    ("formatter", "code", "tokens"),
    (HISCO, "61110", [14, 9, 9, 9, 8]),
    (HISCO, "-2", [6, 6, 6, 6, 6]),
    (HISCO, "01234", [8, 9, 10, 11, 12]),
    (OCC1950, "905", [14, 5, 10]),
    (GENERAL, "A-1", [2030, 2066, 1005, EOS, EOS, EOS]),
    (PSTI, "-999,0,999", [5, 1004, 2003, EOS, EOS, EOS, EOS, EOS]),
)
def test_first_block_by_hand(formatter: Formatter, code: str, tokens: list[int]):
    target = formatter.encode([code])[0].tolist()
    assert target == [
        BOS,
        *tokens,
        *[PAD] * (formatter.block_size * (formatter.num_blocks - 1)),
        EOS,
    ]


def test_token_sequences_agree_with_the_reference():
    expected = json.loads(shared("reference/occcanine/expected.json").read_text())["formatters"]
    formatters = {"hisco": HISCO, "occ1950": OCC1950, "general_block8_sep": PSTI}
    formatters["general_block5"] = build_formatter("general", num_blocks=2)
    for name, sequences in expected.items():
        assert formatters[name].encode([*sequences]).tolist() == [*sequences.values()], name


@pytest.mark.parametrize("formatter", CODES)
@given(data=st.data())
def test_codes_round_trip(formatter: Formatter, data: st.DataObject):
    codes = data.draw(st.lists(CODES[formatter], min_size=1, max_size=formatter.num_blocks))
    assert [
        one for one in formatter.decode(formatter.encode(["&".join(codes)]))[0] if one is not None
    ] == codes


@pytest.mark.parametrize("formatter", CODES)
@given(tokens=st.lists(st.integers(0, 19) | st.integers(1000, 3000), min_size=27, max_size=27))
def test_decoding_takes_any_tokens(formatter: Formatter, tokens: list[int]):
    for code in formatter.decode(np.array(tokens[: formatter.target_len])[None])[0]:
        assert code is None or formatter.system.problem(code) is None


UNFIT = [
    (HISCO, "6111"),
    (HISCO, "６１１１０"),
    (OCC1950, "-1"),
]  # the second of digits that are not ASCII's
UNFIT += [(GENERAL, "1234567"), (GENERAL, "1,2"), (PSTI, "01,2"), (PSTI, "1,,2")]


@pytest.mark.parametrize(("formatter", "code"), UNFIT)
def test_codes_that_do_not_fit(formatter: Formatter, code: str):
    assert formatter.system.problem(code)
    with pytest.raises(ValueError, match="code"):
        formatter.encode([code])


def test_rows_have_some_or_all_codes():
    assert GENERAL.decode(GENERAL.encode([None])).tolist() == [[None] * 3]
    with pytest.raises(ValueError, match="3 codes"):
        OCC1950.encode(["100&200&300"])


def test_a_label_with_the_mark_of_no_code_is_no_such_code():
    codes = ["?unclear", "cook"]
    of_labels = build_formatter("general", num_blocks=2, labels=codes)
    assert of_labels.missing_token(codes) is not None  # labels are written as numbers
    of_characters = build_formatter("general", num_blocks=2, block_size=8)
    assert of_characters.missing_token(codes) is None


@pytest.mark.parametrize("formatter", CODES)
def test_config_round_trip(formatter: Formatter):
    again = build_formatter(**formatter.to_config())
    assert again.to_config() == formatter.to_config() and again.target_len == formatter.target_len
