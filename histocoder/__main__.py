"""The `histocoder` command."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from histocoder.cli import Parser, run_script


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of `histocoder` and `python -m histocoder`."""
    run_script(lambda: _main(argv))


def _main(argv: Sequence[str] | None) -> None:
    parser = Parser("Use a model that histocoder trained.", config=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    predict = commands.add_parser("predict", help="code descriptions", description="Code descriptions.", config=False)
    predict.add_argument("--model", required=True, metavar="DIR", help="a run's folder, or one of its checkpoints'")
    predict.add_argument("texts", nargs="+", metavar="TEXT", help="descriptions")
    predict.add_argument("--language", default="unk", metavar="LANG", help="of all of them (default: unk, unknown)")
    predict.add_argument(
        "--mode", default="greedy", choices=("greedy", "flat"), help="way of decoding (default: greedy)"
    )
    predict.add_argument("--device", metavar="NAME", help="cpu or cuda (default: a GPU if there is one)")
    args = parser.parse(argv)

    from histocoder.predict import Coder  # here, so that --help comes at once

    coder = Coder.from_pretrained(args.model, args.device)
    table = coder.predict(args.texts, args.language, mode=args.mode)
    table.insert(0, "text", args.texts)
    for column in [c for c in table.columns if c.startswith("prob_")]:
        table[column] = table[column].map(lambda p: "" if pd.isna(p) else f"{p:.2f}")
    columns = [c for c in table.columns if not table[c].replace("", None).isna().all()]
    print(table[columns].fillna("").to_string(index=False))


if __name__ == "__main__":
    main()
