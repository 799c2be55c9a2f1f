"""Standard input and output in place of files, which `-` names."""

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

from histocoder import distributed
from histocoder.cli.flags import PIPE, PredictFlags
from histocoder.cli.script import BROKEN_PIPE, discard_output
from histocoder.errors import Interrupted, UserError
from histocoder.inference.predict_file import RESUME
from histocoder.log import printing_to_stderr


@contextmanager
def files_for_pipes(config: PredictFlags) -> Iterator[PredictFlags]:
    """Give settings with files in place of pipes.

    Standard input is read first, and standard output written at the end, since an input is read
    twice. All that is logged meanwhile goes to standard error if the output goes to standard
    output.
    """
    if PIPE not in (config.input, config.output):
        yield config
        return
    if distributed.world_size() > 1:
        raise UserError("Several processes can't share a pipe; name files in place of -.")

    writes_to_pipe = config.output in ("", PIPE)
    with (
        printing_to_stderr() if writes_to_pipe else nullcontext(),
        tempfile.TemporaryDirectory(prefix="histocoder-") as folder,
    ):
        input_path = config.input
        if config.input == PIPE:
            source = Path(folder, "standard input")
            with source.open("wb") as file:
                shutil.copyfileobj(sys.stdin.buffer, file)
            input_path = str(source)
        output_path = config.output
        target = Path(folder, "standard output")
        if writes_to_pipe:
            output_path = str(target)
        config = replace(config, input=input_path, output=output_path)

        # what is coded so far goes with the folder, so that no run resumes from it
        try:
            yield config
        except UserError as error:
            raise UserError(as_typed(str(error).removesuffix(RESUME), config).strip()) from error
        except Interrupted as error:
            raise Interrupted("Interrupted.", error.signum) from error
        if writes_to_pipe:
            _send(target)


def as_typed(text: str, config: PredictFlags) -> str:
    """Return a text that may name the files of `files_for_pipes`, without their folder."""
    for path in map(Path, (config.input, config.output)):
        if path.name.startswith("standard ") and path.parent.name.startswith("histocoder-"):
            text = text.replace(f"{path.parent}{os.sep}", "")
    return text


def _send(path: Path) -> None:
    """Write a file to standard output; end quietly if nobody reads it, as after `| head`."""
    try:
        with path.open("rb") as file:
            shutil.copyfileobj(file, sys.stdout.buffer)
        sys.stdout.flush()
    except BrokenPipeError:
        discard_output()
        sys.exit(BROKEN_PIPE)
