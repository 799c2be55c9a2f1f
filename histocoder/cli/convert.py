"""`histocoder convert`: turn models from and to OccCANINE's form, or shares into one."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from histocoder.cli.model_flags import add_command
from histocoder.errors import UserError
from histocoder.training.console import say


def add(commands: argparse._SubParsersAction) -> None:
    """Add the command and its flags."""
    parser = add_command(commands, "convert", "turn models from and to OccCANINE's form, or shares into one")
    direction = parser.add_mutually_exclusive_group(required=True)
    direction.add_argument("--from-occcanine", metavar="PATH", help="last.bin, or a folder as on the hub")
    direction.add_argument("--to-occcanine", metavar="DIR", help="the folder of a model of this program's")
    direction.add_argument(
        "--from-shards", metavar="DIR", help="a checkpoint of --fsdp-state-dict sharded, to be put together"
    )
    parser.add_argument("--output", required=True, metavar="PATH", help="folder, or file (last.bin), to write")
    parser.add_argument(
        "--formatter", choices=("hisco", "occ1950", "general", "gpf"), help="kind of code it was trained on"
    )
    parser.add_argument("--key", metavar="CSV", help="its key: system_code,code, and desc if there is one")
    parser.add_argument("--target-cols", nargs="+", metavar="COL", help="general: its columns of codes")
    parser.add_argument("--block-size", type=int, metavar="N", help="general: longest code's characters (default: 5)")
    parser.add_argument("--encoder-config", metavar="JSON", help="its CanineConfig's file (default: CANINE-s's sizes)")
    parser.add_argument(
        "--text-normalization",
        default="lower_ascii",
        choices=("none", "lower_ascii"),
        help="what was done to its training texts (default: lower_ascii, as by published models)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Write the model in its other form."""
    from histocoder.files import make_folder
    from histocoder.inference.occcanine import load_occcanine, save_occcanine

    output = Path(args.output)
    if output.exists() and (output.is_file() or any(output.iterdir())):
        raise UserError(f"{output} exists already; choose another --output.")
    if args.from_shards:
        _put_together(Path(args.from_shards), output)
    elif args.to_occcanine:
        save_occcanine(args.to_occcanine, output)
    else:
        if args.formatter is None:
            raise UserError("Say with --formatter what kind of code the model gives: hisco, occ1950 or general.")
        coder = load_occcanine(
            args.from_occcanine,
            formatter=args.formatter,
            key=args.key,
            target_cols=args.target_cols,
            block_size=args.block_size,
            encoder_config=_read_json(args.encoder_config) if args.encoder_config else None,
            text_normalization=args.text_normalization,
        )
        make_folder(output)
        coder.save_pretrained(output)
    say(f"Wrote {output}.")


def _put_together(path: Path, output: Path) -> None:
    from histocoder.checkpoints.model_files import SHARDS_FOLDER
    from histocoder.checkpoints.training_state import is_checkpoint, load_checkpoint, save_whole, verify_checkpoint

    if not (path / SHARDS_FOLDER).is_dir() or not is_checkpoint(path):
        raise UserError(f"{path} is not a sharded checkpoint; name a folder checkpoints/step-….")
    verify_checkpoint(path)
    save_whole(load_checkpoint(path), output)


def _read_json(path: str) -> dict:
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"--encoder-config {path} can't be read: {error}") from error
