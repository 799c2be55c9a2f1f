"""`histocoder agreement`: compare two coders' codes, and list what they have to settle."""

from histocoder.cli.audit import coded_rows, new_output, to_correct, write_frame
from histocoder.cli.flags import AgreementFlags
from histocoder.data.example_files import CHECKED_COL
from histocoder.errors import UserError, counted
from histocoder.evaluation.agreement import agreement, to_settle
from histocoder.evaluation.summary import table_of_shares
from histocoder.log import log


def run_agreement(config: AgreementFlags) -> None:
    """Print how far two coders agree, and write what they have to settle."""
    output, names = new_output(config.output, overwrite=config.overwrite), config.files
    (first, system), (second, _) = (coded_rows(config, path, config.id_col, setting="id_col") for path in names)
    if config.id_col:
        for path, rows in zip(names, (first, second), strict=True):
            if len(again := rows["other"][rows["other"].duplicated()]):
                raise UserError(
                    f"{path} has {again.iloc[0]!r} in {config.id_col!r} more than once; it must number rows."
                )
    by = ["other"] if config.id_col else ["key", "lang", "number"]
    first, second = (rows.assign(number=rows.groupby(["key", "lang"]).cumcount()) for rows in (first, second))
    both = first.merge(second[[*by, "codes"]], on=by, suffixes=("", "_second"))
    if both.empty:
        raise UserError(
            f"{names[0]} and {names[1]} have no row in common; check --input-col, --language-col and --id-col."
        )
    both = both.rename(columns={"codes": "first", "codes_second": "second"})
    digits = 0 if system.labels is not None else system.block_size - 1
    scores = agreement(both["first"], both["second"], both["text"].tolist(), digits=digits)
    left_out = " and ".join(
        f"{len(rows) - len(both):,} of {path}" for path, rows in zip(names, (first, second), strict=True)
    )
    log.info(f"{len(both):,} rows have codes in both files. Left out, without a match: {left_out}.")
    log.info(table_of_shares([one | {"digits": one["digits"] or "all"} for one in scores]))
    differ = to_settle(both, digits=digits)
    probs = [(conf,) * len(codes) for conf, codes in zip(differ["conf"], differ["first"], strict=True)]
    others = {f"other_{name}": differ["second"].str.get(i) for i, name in enumerate(config.target_cols)}
    others |= {"same_digits": differ["digits"]}
    found = differ.rename(columns={"first": "codes"}).assign(probs=probs)
    write_frame(output, to_correct(found, config, others), raw=config.raw)
    log.info(
        f"Wrote {counted(len(differ), 'description', 'descriptions')} on which they differ to {output}: codes of "
        f"{names[0]}, and behind them those of {names[1]}. Correct the former, and write x in the column "
        f"{CHECKED_COL!r} of each row that is settled."
    )
