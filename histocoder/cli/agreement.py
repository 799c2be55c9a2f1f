"""`histocoder agreement`: compare two coders' codes, and list what they have to settle."""

from pathlib import Path

from histocoder.cli.audit import coded_rows, to_correct
from histocoder.cli.flags import AgreementFlags
from histocoder.data.example_files import CHECKED_COL
from histocoder.data.output import Form, check_output, write_frame
from histocoder.errors import UserError
from histocoder.evaluation.agreement import agreement, to_settle
from histocoder.evaluation.summary import table_of_shares
from histocoder.log import log


def run_agreement(config: AgreementFlags) -> None:
    """Print how far two coders agree, and write what they have to settle."""
    output, by = Path(config.output), ["other" if config.id_col else "key", "lang", "n"]
    check_output(output, overwrite=config.overwrite)
    tables = [coded_rows(config, path, config.id_col, "id_col") for path in config.files]
    first, second = (rows.assign(n=rows.groupby(by[:2]).cumcount()) for rows, _ in tables)
    both = first.merge(second[[*by, "codes"]], on=by, suffixes=("", "_second"))
    names = " and ".join(config.files)
    if both.empty:
        raise UserError(f"{names} have no row in common; check --input-col, --language-col and --id-col.")
    both = both.rename(columns={"codes": "first", "codes_second": "second"})
    digits = 0 if tables[0][1].labels is not None else tables[0][1].block_size - 1
    scores = agreement(both["first"], both["second"], both["text"].tolist(), digits=digits)
    unmatched = " and ".join(f"{len(rows) - len(both):,}" for rows in (first, second))
    log.info(f"{len(both):,} rows have codes in both files; {unmatched} rows of {names} have no counterpart.")
    log.info(table_of_shares([one | {"digits": one["digits"] or "all"} for one in scores]))
    differ = to_settle(both, digits=digits)
    others = {f"other_{name}": differ["second"].str.get(i) for i, name in enumerate(config.target_cols)}
    halves = differ["first"].map(lambda codes: (0.5,) * len(codes))  # one of the two coders has decided so
    found = differ.rename(columns={"first": "codes"}).assign(probs=halves, conf=0.5)
    write_frame(output, to_correct(found, config, others | {"same_digits": differ["digits"]}), Form(raw=config.raw))
    log.info(
        f"Wrote {len(differ):,} descriptions on which they differ to {output}, with the codes of {config.files[0]}; "
        f"those of {config.files[1]} are behind them. Correct the former, and write x in the column {CHECKED_COL!r} of "
        "what is settled."
    )
