"""`--config`: files of flags, in sections or flat; and the examples in `configs/`."""

import shlex
from pathlib import Path

import pytest
import yaml
from conftest import ROOT

from histocoder.cli.arguments import parse
from histocoder.config import FinetuneConfig, MixerConfig, recorded
from histocoder.errors import UserError
from histocoder.training.building import fill_in

CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
SCRIPTS = {"finetune.py": FinetuneConfig, "train_mixer.py": MixerConfig}
BASE = ("--dataset", "t.csv", "--target-cols", "hisco_1")


def parsed(path: Path, text: str, *flags: str) -> dict:
    path.write_text(text, encoding="utf-8")
    return vars(fill_in(parse(FinetuneConfig, ["--config", str(path), *BASE, *flags])))


def test_sections_are_headings(tmp_path: Path):
    flat = "language: da\nencoder: tiny\nbatch-size: 7\ndistributed: true\n"
    mixed = "data:\ndistributed:\n  distributed: true\nmodel: {encoder: tiny, language: da}\nbatch_size: 7\n"
    one, two = (parsed(tmp_path / "run.yaml", text) for text in (flat, mixed))
    assert one == two
    assert (one["language"], one["encoder"], one["batch_size"], one["distributed"]) == ("da", "tiny", 7, True)
    assert one["learning_rate"] == 1e-3  # that of a model from scratch, which the file makes it
    flags_win = parsed(tmp_path / "run.yaml", mixed + "target_cols: [a, b]\n", "--batch-size", "9")
    assert (flags_win["batch_size"], flags_win["target_cols"]) == (9, ("hisco_1",))


def test_the_example_of_the_page(tmp_path: Path):
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    args = parsed(tmp_path / "run.yaml", page.split("```yaml\n")[1].split("```")[0], "--batch-size", "32")
    assert (args["batch_size"], args["use_amp"], args["save_path"]) == (32, True, "out")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("training: {bach_size: 8}", "There is no flag --bach-size. Did you mean '--batch-size'?"),
        ("language: no", "language can't be False. Quote words such as no or yes."),
        ("target_cols: [a, no]", "target-cols can't be ['a', False]. Quote words such as no"),
        ("batch_size: many", "argument --batch-size: invalid int value: 'many'"),
        ("zero_pad_codes: yes please", "argument --zero-pad-codes: ignored explicit argument 'yes please'"),
        ("- a list", "must hold lines of the form"),
        ("a: [", "can't be read"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, message: str):
    with pytest.raises(UserError) as error:
        parsed(tmp_path / "run.yaml", text)
    assert message.lower() in str(error.value).lower() and f"--config {tmp_path}" in str(error.value)


@pytest.mark.parametrize("name", ["run", "ngram"])
def test_args_yaml_of_earlier_runs_is_read(name: str):
    args = ROOT / "tests" / "fixtures" / name / "args.yaml"
    assert "zero_optimizer: false" in args.read_text(encoding="utf-8")
    assert parse(FinetuneConfig, ["--config", str(args)]).target_cols == ("hisco_1",)


def example(path: Path) -> tuple[str, list[str]]:
    """The script that an example's comment starts, and its arguments."""
    comment = [line[1:] for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    words = shlex.split(" ".join(line.strip().removesuffix("\\") for line in comment[1:]))
    start = next(i for i, word in enumerate(words) if word in SCRIPTS)
    return words[start], words[start + 1 :]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_examples_are_read_by_their_scripts(path: Path, monkeypatch: pytest.MonkeyPatch):
    script, args = example(path)
    monkeypatch.chdir(ROOT)
    assert f"configs/{path.name}" in args
    read = yaml.safe_load(yaml.safe_dump(recorded(fill_in(parse(SCRIPTS[script], args)))))
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    flags = {name: value for section in content.values() for name, value in section.items()}
    flags["learning_rate"] = float(flags.get("learning_rate", read["learning_rate"]))  # 1e-3 is a word in YAML
    assert {name: read[name] for name in flags} == flags
    assert len(CONFIGS) == 7
