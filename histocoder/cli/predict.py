"""`histocoder predict`: code descriptions, or a file of them."""

import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
from pyarrow.dataset import FileSystemDataset

from histocoder import distributed
from histocoder.checkpoints.model_files import CONFIG_FILE, WEIGHTS_FILE, local_folder
from histocoder.checkpoints.run_folder import run_of
from histocoder.cli.arguments import config_of
from histocoder.cli.flags import PredictFlags
from histocoder.config import PredictConfig, PredictOptions
from histocoder.data.labels import LabelRules
from histocoder.data.languages import chosen_language
from histocoder.data.output import check_output
from histocoder.data.prepare import TRAIN_FILE, held_out
from histocoder.data.table import TableFile, fingerprint, is_parquet
from histocoder.errors import Interrupted, UserError, counted
from histocoder.files import is_same_file, sha256
from histocoder.inference.coder import Coder
from histocoder.inference.descriptions import Descriptions
from histocoder.inference.join import Join
from histocoder.inference.known import Known, training_files
from histocoder.inference.predict_file import check_free, predict_file, predict_file_by
from histocoder.log import log
from histocoder.ray import code

_CONNECT_SECONDS = 10.0  # seconds in which a cluster must answer


def run(config: PredictFlags) -> None:
    """Code the descriptions; print or write their codes."""
    device = distributed.start(device=config.device if config.engine is None else "cpu")
    if config.engine is not None:
        _check_engine(config)
    if config.output not in ("", "-"):  # before the model is read, which takes a while
        check_output(Path(config.output), excel=config.excel)
        check_free(Path(config.output), overwrite=config.overwrite)
    folder = local_folder(config.model)
    known_file = _known_file(config.known, config, folder) if config.known else None
    coder = Coder.from_pretrained(
        folder, str(device), precision=config.precision, compile=config.compile, verify=not config.no_verify
    )
    chosen_language(config.language, coder.model.config.languages)  # raises an error if it is not one
    with _standard_streams(config) as (files, say):
        known = _read_known(known_file, coder, config, say) if known_file else None
        if config.input:
            _code_file(coder, folder, files, known, say)
            return
    texts, options = list(config.texts), config_of(PredictOptions, config)
    if known is None:
        _print_table(texts, coder.code(texts, config.language, options).frame(coder.model.config))
        return
    distinct = Descriptions.of(texts, config.language, languages=coder.model.config.languages)
    found = known.code(coder, distinct.texts, distinct.langs, options)
    _print_table(texts, found.reindex(distinct.rows))  # without codes where the description is blank


def _code_file(
    coder: Coder, folder: Path, config: PredictFlags, known: Known | None, say: Callable[[str], None]
) -> None:
    join = None
    if config.join:
        with _naming_sheets("--join-sheet"):
            join = Join(Path(config.join), system=coder.system, codes=coder.codes, sheet=config.join_sheet)
    how = config_of(PredictConfig, config)
    options: dict[str, Any] = {"join": join, "overwrite": config.overwrite, "say": say}
    if config.engine is not None:
        predict_file_by(partial(_code_on_ray, config, folder), coder, how, **options)
    else:
        model_id = f"{sha256(folder / WEIGHTS_FILE)} {sha256(folder / CONFIG_FILE)} {coder.precision}"
        predict_file(coder, how, model_id=model_id, known=known, **options)
    say(f"Coded {config.input} into {config.output} in mode {config.mode or coder.mode}.")


def _check_engine(config: PredictFlags) -> None:
    """Raise a UserError if Ray can't code the input."""
    if distributed.world_size() > 1:
        raise UserError("--engine ray starts its processes itself; start one process, without a launcher.")
    source = Path(config.input)
    if not (source.is_dir() or is_parquet(source)):
        raise UserError(
            f"--engine ray reads Parquet files, and {source} is not one. Save it as Parquet, or omit --engine."
        )


def _code_on_ray(flags: PredictFlags, model: Path, table: TableFile, config: PredictConfig) -> Iterator[pa.Table]:
    """Yield Parquet with its codes, an engine for `predict_file_by`; raise a UserError if Ray can't be used."""
    try:
        import ray.data
    except ImportError as error:
        raise UserError(f"Ray is not installed ({error}). Install it: pip install 'histocoder[ray]'.") from error
    try:
        host, _, port = (flags.address or "").removeprefix("ray://").rpartition(":")
        if host and port.isdigit():
            socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()  # Ray itself tries minutes
        ray.init(flags.address, logging_level="warning")
    except (OSError, RuntimeError, ValueError) as error:
        if flags.address is None:
            raise
        raise UserError(
            f"--address {flags.address}: no Ray can be reached there ({error}). Start it with ray start --head."
        ) from error
    try:
        ray.data.DataContext.get_current().execution_options.preserve_order = True
        assert isinstance(table.rows, FileSystemDataset)
        dataset = ray.data.read_parquet([str(Path(file).resolve()) for file in table.rows.files])
        num_gpus = {"cpu": 0, "cuda": 1}.get(flags.device)
        options = {**asdict(config), "output": "", "precision": flags.precision, "num_gpus": num_gpus}
        yield from code(dataset, model, **options).iter_batches(batch_size=None, batch_format="pyarrow")
    except ray.exceptions.RayTaskError as error:
        if not isinstance(error.cause, (UserError, OSError, pa.ArrowException)):
            raise
        raise UserError(f"Ray can't code the table: {str(error.cause).splitlines()[0]}") from error
    finally:
        ray.shutdown()


def _known_file(known: str, config: PredictFlags, folder: Path) -> Path:
    """Return the file of hand-coded descriptions."""
    path = run_of(folder) / TRAIN_FILE if known == "auto" else Path(known)
    if known == "auto" and not path.is_file():
        raise UserError(f"--known auto reads the run's training data, and there is no {path}. Add --known FILE.")
    for flag, other in (("--input", config.input), ("--output", config.output)):
        if other and path.is_file() and is_same_file(path, other):
            raise UserError(f"{flag} {other} is the file of --known itself; choose another.")
    return path


def _read_known(path: Path, coder: Coder, config: PredictFlags, say: Callable[[str], None]) -> Known:
    """Read hand-coded descriptions; tell the user of contradictory ones."""
    short = config.allow_codes_shorter_than_block_size
    rules = LabelRules(zero_pad=config.zero_pad_codes, allow_short=short, drop_bad=True, is_training=False)
    with _naming_sheets("--known-sheet"):
        files, has_languages = training_files(
            path, coder, rules, input_col=config.input_col, language_col=config.language_col, sheet=config.known_sheet
        )
    if config.known == "auto":
        files = replace(files, paths=(path, *held_out(path.parent)))
    settings = {"any_language": not has_languages, "exact": config.known_exact}
    read = f"{files.input_col} {files.language_col} {rules} {settings}"
    sources = " ".join(map(fingerprint, files.paths))
    known = Known(f"{sources} {read}", languages=coder.model.config.languages, **settings)
    for examples in files.chunks(say=say):
        known.add(examples.coded())
    language = None if config.language_col or config.language != "unk" else known.only_language
    if language not in (None, "", "unk"):
        say(
            f"{path}: all rows are in one language, so descriptions are taken to be in it, too. For the model, add "
            f"--language {language}."
        )
    if number := known.num_contradictory:
        say(
            f"{path}: {counted(number, 'description has', 'descriptions have')} several sets of codes. The most "
            "frequent set is used, or in a tie the first in the file."
        )
    return known


@contextmanager
def _naming_sheets(flag: str) -> Iterator[None]:
    """Name this flag in place of --sheet in errors."""
    try:
        yield
    except UserError as error:
        raise UserError(str(error).replace("--sheet", flag)) from error


@contextmanager
def _standard_streams(config: PredictFlags) -> Iterator[tuple[PredictFlags, Callable[[str], None]]]:
    """Yield the flags with files in place of `-`, standard input or output; and the function that tells the user."""
    if "-" not in (config.input, config.output):
        yield config, log.info
        return
    if distributed.world_size() > 1:
        raise UserError("Standard input and output work with one process only; name files, or start one process.")
    with tempfile.TemporaryDirectory() as folder:
        source = f"{folder}/standard input" if config.input == "-" else config.input
        output = f"{folder}/standard output" if config.output == "-" else config.output
        if config.input == "-":
            with Path(source).open("wb") as file:
                shutil.copyfileobj(sys.stdin.buffer, file)
        try:
            yield (
                replace(config, input=source, output=output),
                lambda text: print(text.replace(f"{folder}/", ""), file=sys.stderr, flush=True),
            )
        except Interrupted as error:
            message = "Interrupted. With - as input or output nothing is kept; name files to be able to resume."
            raise Interrupted(message, error.signum) from None
        except UserError as error:
            raise UserError(str(error).replace(f"{folder}/", "")) from error
        if config.output == "-":
            with Path(output).open("rb") as file:
                shutil.copyfileobj(file, sys.stdout.buffer)


def _print_table(texts: list[str], table: pd.DataFrame) -> None:
    table = table.dropna(axis=1, how="all").copy()
    for column in table.columns:
        if pd.api.types.is_numeric_dtype(table[column]):
            table[column] = table[column].map(lambda p: "" if pd.isna(p) else f"{p:.2f}")
    table.insert(0, "text", texts)
    print(table.fillna("").to_string(index=False))
