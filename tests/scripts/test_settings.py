"""Settings: fields of dataclasses, from which flags, files and checks come; and training from Python."""

from dataclasses import dataclass, fields, replace
from pathlib import Path

import pytest
import yaml
from conftest import write_table

from histocoder import Coder, FinetuneConfig, MixerConfig, train
from histocoder.checkpoints.run_folder import ARGS_FILE
from histocoder.checkpoints.training_state import list_checkpoints, load_checkpoint
from histocoder.cli.arguments import build_parser, parse
from histocoder.config import RECIPES, recorded, settings_of
from histocoder.config.settings import fixed
from histocoder.errors import UserError
from histocoder.training.building import fill_in

GIVEN = ["--dataset", "t.csv", "--target-cols", "hisco_1"]


@dataclass(frozen=True)
class LongerConfig(FinetuneConfig):
    """With one more field, and nothing else."""

    share_of_all: float = fixed(0.1, "share of the probability that all codes get", metavar="P", between=(0, 1))


def test_a_setting_is_one_field(tmp_path: Path):
    assert "--share-of-all P" in build_parser(LongerConfig).format_usage()
    assert settings_of(LongerConfig)[-1].help == "share of the probability that all codes get (default: 0.1)"
    assert parse(LongerConfig, [*GIVEN, "--share-of-all", "0.2"]).share_of_all == 0.2
    (tmp_path / "run.yaml").write_text("training: {share-of-all: 0.3}")
    config = parse(LongerConfig, [*GIVEN, "--config", str(tmp_path / "run.yaml")])
    assert recorded(config)["share_of_all"] == 0.3
    with pytest.raises(UserError, match="--share-of-all is 2; it must lie between 0 and 1"):
        replace(config, share_of_all=2.0)
    with pytest.raises(UserError, match="Did you mean '--share-of-all'"):
        parse(LongerConfig, [*GIVEN, "--shares-of-all", "0.2"])
    fixed_names = {one.name for one in settings_of(LongerConfig) if one.resume}
    assert fixed_names - {one.name for one in settings_of(FinetuneConfig) if one.resume} == {"share_of_all"}


def test_python_gives_what_flags_give(tmp_path: Path):
    config = FinetuneConfig(dataset=tmp_path / "t.csv", target_cols=["a", "b"], num_epochs=2)
    assert config == parse(FinetuneConfig, f"--dataset {tmp_path}/t.csv --target-cols a b --num-epochs 2".split())
    with pytest.raises(UserError, match="--precision is int8; it must be one of auto, fp32, bf16, fp16"):
        replace(config, precision="int8")


def test_a_recipe_fills_in_what_is_not_given():
    given = FinetuneConfig("t.csv", ("h",), encoder="ngram", learning_rate=1e-2)
    config = fill_in(given)
    changed = {f.name for f in fields(given) if getattr(given, f.name) != getattr(config, f.name)}
    assert "batch_size" in changed and changed - {"by_recipe"} <= {*config.by_recipe}
    assert fill_in(config) == config
    mixer = fill_in(MixerConfig(train_data="a.csv", val_data="v.csv", save_dir="out", encoder="ngram"))
    assert (mixer.batch_size, mixer.num_epochs, mixer.min_steps, mixer.table_learning_rate) == (512, 50, 0, 3e-3)


def test_args_yaml_of_another_start_leaves_recipes_open(tmp_path: Path):
    args = tmp_path / "args.yaml"

    def again(*flags: object) -> FinetuneConfig:
        return fill_in(parse(FinetuneConfig, ["--config", str(args), *map(str, flags)]))

    first = fill_in(parse(FinetuneConfig, "--dataset t.csv --target-cols h --encoder ngram --batch-size 32".split()))
    args.write_text(yaml.safe_dump(recorded(first)))
    assert again() == first and again("--seed", 1) == replace(first, seed=1)
    other = again("--encoder", "small", "--num-epochs", 3)
    rates = other.learning_rate, other.table_learning_rate, other.num_epochs, other.batch_size, other.warmup_pct
    scratch = RECIPES["scratch"]
    assert rates == (scratch["learning_rate"], None, 3, 32, scratch["warmup_pct"])
    for flags in (("--num-epochs", first.num_epochs), ("--max-steps", 10)):
        assert again(*flags).min_steps == 0
    slow = again("--learning-rate", 1e-4)
    assert (slow.table_learning_rate, slow.max_epoch_steps, slow.min_steps) == (None, 0, first.min_steps)


@pytest.mark.parametrize(("rows", "growth"), [(12_800, 1), (12_801, 2), (25_601, 4), (10**6, 4)])
def test_large_tables_get_larger_batches(rows: int, growth: int):
    config = fill_in(FinetuneConfig("t.csv", ("h",), encoder="ngram"))
    grown = config.for_rows(rows, 1)
    assert (grown.batch_size, grown.learning_rate) == (64 * growth, pytest.approx(1e-3 * growth**0.5))
    assert grown.batch_size // grown.decoder_stride == 64
    assert grown.for_rows(rows, 1) == grown
    given = fill_in(FinetuneConfig("t.csv", ("h",), encoder="ngram", batch_size=32))
    assert given.for_rows(rows, 1).batch_size == 32


def test_python_trains_resumes_and_is_told_of_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config = FinetuneConfig(
        dataset=write_table(tmp_path / "table.csv"),
        target_cols=["hisco_1"],
        save_path=tmp_path / "out",
        encoder="tiny",
        precision="fp32",
        batch_size=16,
        max_steps=2,
        no_report=True,
        no_experts=True,
        no_refit=True,
    )
    folder = train(config)
    assert folder == tmp_path / "out" and (folder / "best" / "model.safetensors").exists()
    assert len(Coder.from_pretrained(folder).predict(["farmer"], "en")) == 1
    args = yaml.safe_load((folder / ARGS_FILE).read_text())
    assert args["learning_rate"] == 1e-3 and args["target_cols"] == ["hisco_1"] and "resume" not in args
    (checkpoint,) = list_checkpoints(folder)
    kept = load_checkpoint(checkpoint).settings
    assert {one.flag for one in settings_of(FinetuneConfig) if one.resume} <= set(kept)
    capsys.readouterr()
    train(replace(config, max_steps=3))
    assert "Resuming from step 2" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"--dropout +0\.0 +0\.5"):
        train(replace(config, dropout=0.5))
