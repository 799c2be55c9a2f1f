import json

import numpy as np
import pytest
from conftest import shared
from hypothesis import given
from hypothesis import strategies as st

from histocoder.formatters import BOS, EOS, PAD, SYMBOLS, Formatter, build_formatter

HISCO = build_formatter("hisco", num_blocks=5)
OCC1950 = build_formatter("occ1950", num_blocks=2)
GENERAL = build_formatter("general", num_blocks=3, block_size=6)
PSTI = build_formatter("gpf", num_blocks=2, block_size=8, use_within_block_sep=True)

hisco_code = st.sampled_from(["-1", "-2", "-3"]) | st.from_regex(r"\A[0-9]{5}\Z")
occ_code = st.from_regex(r"\A[0-9]{3}\Z")
characters = st.sampled_from([s for s in SYMBOLS if len(s) == 1])
general_code = st.lists(characters, min_size=1, max_size=6).map("".join).filter(lambda code: code != "?")
psti_code = st.lists(st.sampled_from(SYMBOLS), min_size=1, max_size=8).map(",".join).filter(lambda code: code != "?")


@pytest.mark.parametrize(
    ("formatter", "code", "tokens"),
    [
        (HISCO, "61110", [14, 9, 9, 9, 8]),
        (HISCO, "-2", [6, 6, 6, 6, 6]),
        (HISCO, "01234", [8, 9, 10, 11, 12]),
        (OCC1950, "905", [14, 5, 10]),
        (GENERAL, "A-1", [2030, 2066, 1005, EOS, EOS, EOS]),
        (PSTI, "-999,0,999", [5, 1004, 2003, EOS, EOS, EOS, EOS, EOS]),
    ],
)
def test_first_block_by_hand(formatter: Formatter, code: str, tokens: list[int]):
    target = formatter.encode([code])[0].tolist()
    unused = [PAD] * (formatter.block_size * (formatter.num_blocks - 1))
    assert target == [BOS, *tokens, *unused, EOS]


def test_token_sequences_agree_with_the_reference():
    expected = json.loads(shared("reference/occcanine/expected.json").read_text())["formatters"]
    formatters = {
        "hisco": HISCO,
        "occ1950": OCC1950,
        "general_block5": build_formatter("general", num_blocks=2),
        "general_block8_sep": PSTI,
    }
    for name, cases in expected.items():
        for code, tokens in cases.items():
            assert formatters[name].encode([code]).tolist() == [tokens], (name, code)


@pytest.mark.parametrize(
    ("formatter", "code"), [(HISCO, hisco_code), (OCC1950, occ_code), (GENERAL, general_code), (PSTI, psti_code)]
)
@given(data=st.data())
def test_codes_round_trip(formatter: Formatter, code: st.SearchStrategy[str], data: st.DataObject):
    codes = data.draw(st.lists(code, min_size=1, max_size=formatter.num_blocks))
    found = formatter.decode(formatter.encode(["&".join(codes)]))[0]
    assert [one for one in found if one is not None] == codes


@pytest.mark.parametrize("formatter", [HISCO, OCC1950, GENERAL, PSTI])
@given(tokens=st.lists(st.integers(0, 19) | st.integers(1000, 3000), min_size=27, max_size=27))
def test_decoding_takes_any_tokens(formatter: Formatter, tokens: list[int]):
    target = np.array(tokens[: formatter.target_len])[None]
    for code in formatter.decode(target)[0]:
        assert code is None or formatter.system.problem(code) is None


@pytest.mark.parametrize(
    ("formatter", "code"),
    [
        (HISCO, "6111"),
        (HISCO, "６１１１０"),  # digits, but not ASCII's
        (OCC1950, "-1"),
        (GENERAL, "1234567"),
        (GENERAL, "1,2"),
        (GENERAL, ""),
        (PSTI, "01,2"),
        (PSTI, "1,,2"),
    ],
)
def test_codes_that_do_not_fit(formatter: Formatter, code: str):
    if code:
        assert formatter.system.problem(code)
        with pytest.raises(ValueError, match="code"):
            formatter.encode([code])
    else:
        assert formatter.decode(formatter.encode([None])).tolist() == [[None] * formatter.num_blocks]


def test_too_many_codes_are_refused():
    with pytest.raises(ValueError, match="3 codes"):
        OCC1950.encode(["100&200&300"])


@pytest.mark.parametrize("formatter", [HISCO, OCC1950, GENERAL, PSTI])
def test_config_round_trip(formatter: Formatter):
    again = build_formatter(**formatter.to_config())
    assert again.to_config() == formatter.to_config() and again.target_len == formatter.target_len
