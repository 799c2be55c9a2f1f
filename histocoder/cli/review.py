"""`histocoder review`: choose the rows of a coded file that a person should check first."""

from __future__ import annotations

import argparse
from pathlib import Path

from histocoder.cli.model_flags import RAW_HELP, SHEET_HELP, add_command, run_of
from histocoder.training.console import say


def add(commands: argparse._SubParsersAction) -> None:
    """Add the command and its flags."""
    parser = add_command(commands, "review", "choose the rows of a coded file that a person should check first")
    parser.add_argument("--model", required=True, metavar="DIR", help="that coded it, which corrections are to improve")
    parser.add_argument("--predictions", required=True, metavar="FILE", help="what histocoder predict wrote")
    parser.add_argument("--output", default="review.csv", metavar="FILE", help="to fill in (default: review.csv)")
    parser.add_argument("--budget", type=int, default=200, metavar="N", help="descriptions to check (default: 200)")
    parser.add_argument("--input-col", default="occ1", metavar="COL", help="column of descriptions (default: occ1)")
    parser.add_argument(
        "--language-col", metavar="COL", help="column of languages (default: lang, where predict --language added it)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing --output")
    parser.add_argument("--sheet", metavar="NAME", help=f"--predictions: {SHEET_HELP}")
    parser.add_argument("--raw", action="store_true", help=RAW_HELP)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Write the rows to check, and say what to do with them."""
    import yaml

    from histocoder.checkpoints.hub import local_folder
    from histocoder.checkpoints.model_files import read_model_config
    from histocoder.checkpoints.run_folder import ARGS_FILE
    from histocoder.evaluation.review import next_step, review

    folder = local_folder(args.model)
    run = run_of(folder)
    has_run = (run / ARGS_FILE).is_file()
    settings = yaml.safe_load((run / ARGS_FILE).read_text(encoding="utf-8")) if has_run else {}
    columns = ((args.input_col, settings.get("input_col")), (args.language_col, settings.get("language_col")))
    review(
        Path(args.predictions),
        Path(args.output),
        budget=args.budget,
        input_col=args.input_col,
        language_col=args.language_col,
        target_cols=read_model_config(folder).target_cols,
        renamed={here: there for here, there in columns if here and there},
        overwrite=args.overwrite,
        sheet=args.sheet,
        raw=args.raw,
        say=say,
    )
    say(next_step(args.model, Path(args.output), run, settings))
