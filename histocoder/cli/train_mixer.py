"""`train_mixer.py`, which is `histocoder train-mixer` and `python -m histocoder.cli.train_mixer`,
too.
"""

from collections.abc import Sequence

from histocoder.cli.arguments import parse
from histocoder.cli.script import importing, run_script
from histocoder.config import MixerConfig


def main(argv: Sequence[str] | None = None, *, prog: str | None = None) -> None:
    """Train on the files that the flags name."""
    config = parse(MixerConfig, argv, prog=prog)
    # here, since importing torch takes seconds, which --help saves
    with importing():
        from histocoder.training.train import train

    train(config)


if __name__ == "__main__":
    run_script(main)
