"""Code strings <-> token blocks, for HISCO, OCC1950 and other systems; descriptions as token ids."""

from collections.abc import Sequence

from histocoder.formatters.formatter import Formatter
from histocoder.formatters.systems import (
    BOS,
    CODE_SEP,
    EOS,
    HISCO,
    MISSING,
    OCC1950,
    PAD,
    CodeSystem,
    GeneralCodes,
    Labels,
)

FORMATTERS = ("hisco", "occ1950", "general")


def build_formatter(
    name: str,
    *,
    num_blocks: int,
    block_size: int | None = None,
    use_within_block_sep: bool = False,
    symbols: Sequence[str] | None = None,
    labels: Sequence[str] | None = None,
) -> Formatter:
    """Build a formatter by its name, one of `FORMATTERS` or "gpf", OccCANINE's name for "general".

    The largest number of codes of one description is `num_blocks`. The other arguments are for the general formatter;
    see `GeneralCodes`, and for `labels` `Labels`.
    """
    system: CodeSystem
    if name in ("hisco", "occ1950"):
        system = HISCO if name == "hisco" else OCC1950
    elif labels is not None:
        system = Labels(labels, block_size)
    elif name in ("general", "gpf"):
        system = GeneralCodes(block_size or 5, use_within_block_sep=use_within_block_sep, symbols=symbols)
    else:
        raise ValueError(f"no formatter {name!r}; there are {', '.join(FORMATTERS)}")
    return Formatter(system, num_blocks=num_blocks)
