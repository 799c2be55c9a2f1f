"""Settings: fields of dataclasses, from which flags, files and checks come; `--config`; and
training from Python.
"""

import itertools
import json
import shlex
from dataclasses import dataclass, fields, replace
from pathlib import Path

import pandas as pd
import pytest
import torch
import yaml
from conftest import ROOT, cases, run, write, write_table
from jobs import finetune

from histocoder import Coder, FinetuneConfig, MixerConfig, train
from histocoder.checkpoints.model_files import read_model_config, save_config
from histocoder.checkpoints.run_files import ARGS_FILE
from histocoder.checkpoints.training_state import list_checkpoints, load_checkpoint
from histocoder.cli.arguments import build_parser, parse
from histocoder.cli.main import build_parser as command_parser
from histocoder.config import RECIPES, ModelConfig, RunConfig, recorded, settings_of, without_effect
from histocoder.config.settings import fixed
from histocoder.data.key import Key
from histocoder.data.labelled_files import LabelledFiles
from histocoder.errors import UserError
from histocoder.formatters import build_formatter
from histocoder.model import MixerModel
from histocoder.training.building import Task, build_model
from histocoder.training.start import Start, choose_encoder, fill_in, kind_of_start

GIVEN = ["--dataset", "t.csv", "--target-cols", "hisco_1"]


@dataclass(frozen=True)
class LongerConfig(FinetuneConfig):
    """With one more field, and nothing else."""

    share_of_all: float = fixed(
        0.1, "share of the probability that all codes get", metavar="P", between=(0, 1)
    )


def test_a_setting_is_one_field(tmp_path: Path):
    assert "--share-of-all P" in build_parser(LongerConfig).format_usage()
    assert (
        settings_of(LongerConfig)[-1].help
        == "share of the probability that all codes get (default: 0.1)"
    )
    assert parse(LongerConfig, [*GIVEN, "--share-of-all", "0.2"]).share_of_all == 0.2
    path = write(tmp_path / "run.yaml", "training: {share-of-all: 0.3}")
    config = parse(LongerConfig, [*GIVEN, "--config", str(path)])
    assert recorded(config)["share_of_all"] == 0.3
    with pytest.raises(UserError, match="--share-of-all is 2; it must lie between 0 and 1"):
        replace(config, share_of_all=2.0)
    fixed_names = {one.name for one in settings_of(LongerConfig) if one.resume}
    assert fixed_names - {one.name for one in settings_of(FinetuneConfig) if one.resume} == {
        "share_of_all"
    }


def filled_in(config: RunConfig) -> RunConfig:
    """The settings with the values of their recipe."""
    return fill_in(config, Start.of(config))


def test_python_gives_what_flags_give(tmp_path: Path):
    config = FinetuneConfig(dataset=tmp_path / "t.csv", target_cols=["a", "b"], num_epochs=2)
    assert config == parse(
        FinetuneConfig, f"--dataset {tmp_path}/t.csv --target-cols a b --num-epochs 2".split()
    )


def test_a_recipe_fills_in_what_is_not_given():
    given = FinetuneConfig("t.csv", ("h",), encoder="ngram", learning_rate=1e-2)
    config = filled_in(given)
    changed = {f.name for f in fields(given) if getattr(given, f.name) != getattr(config, f.name)}
    assert "batch_size" in changed and changed - {"by_recipe"} <= {*config.by_recipe}
    assert filled_in(config) == config
    mixer = filled_in(
        MixerConfig(train_data="a.csv", val_data="v.csv", save_dir="out", encoder="ngram")
    )
    assert (mixer.batch_size, mixer.num_epochs, mixer.min_steps, mixer.table_learning_rate) == (
        512,
        50,
        0,
        3e-3,
    )


def test_args_yaml_of_another_start_leaves_recipes_open(tmp_path: Path):
    args = tmp_path / "args.yaml"

    def again(*flags: object) -> FinetuneConfig:
        return filled_in(parse(FinetuneConfig, ["--config", str(args), *map(str, flags)]))

    flags = (
        "--encoder ngram --batch-size 32 --augmentation-prob 0.5 --no-report "
        "--attribute-cols status"
    )
    first = filled_in(parse(FinetuneConfig, [*GIVEN, *flags.split()]))
    args.write_text(yaml.safe_dump(recorded(first)))
    assert again() == first and again("--seed", 1) == replace(first, seed=1)
    other = again("--encoder", "small", "--num-epochs", 3)
    rates = (
        other.learning_rate,
        other.table_learning_rate,
        other.num_epochs,
        other.batch_size,
        other.warmup_pct,
    )
    scratch = RECIPES["scratch"]
    assert rates == (scratch["learning_rate"], None, 3, 32, scratch["warmup_pct"])
    for flags in (("--num-epochs", first.num_epochs), ("--max-steps", 10)):
        assert again(*flags).min_steps == 0
    slow = again("--learning-rate", 1e-4)
    assert (slow.table_learning_rate, slow.max_epoch_steps, slow.min_steps) == (
        None,
        0,
        first.min_steps,
    )


@pytest.mark.parametrize(("rows", "growth"), [(12_800, 1), (12_801, 2), (25_601, 4), (10**6, 4)])
def test_large_tables_get_larger_batches(rows: int, growth: int):
    grown = filled_in(FinetuneConfig("t.csv", ("h",), encoder="ngram")).for_rows(rows, 1)
    assert (grown.batch_size, grown.learning_rate) == (
        64 * growth,
        pytest.approx(1e-3 * growth**0.5),
    )
    assert grown.batch_size // grown.decoder_stride == 64 and grown.for_rows(rows, 1) == grown
    assert (
        filled_in(FinetuneConfig("t.csv", ("h",), encoder="ngram", batch_size=32))
        .for_rows(rows, 1)
        .batch_size
        == 32
    )


@pytest.mark.parametrize("rows", [1_000, 13_000, 30_000, 10**6])
def test_rows_of_a_step_decide_on_its_rates(rows: int):
    rates: dict[int, set[tuple[float, float, int]]] = {}
    for size, parts, processes in itertools.product(
        (None, 16, 32, 64, 128, 256), (1, 2), (1, 2, 3, 4, 8)
    ):
        given = FinetuneConfig(
            "t.csv", ("h",), encoder="ngram", batch_size=size, gradient_accumulation_steps=parts
        )
        scaled = filled_in(given).for_rows(rows, processes)
        assert size in (None, scaled.batch_size)
        of_step = rates.setdefault(scaled.step_size(processes), set())
        of_step.add((scaled.learning_rate, scaled.table_learning_rate, scaled.decoder_stride))
    assert all(len(of_step) == 1 for of_step in rates.values())


ALWAYS = set(  # settings that mean something in every run; others say what they need
    "dataset target_cols save_path language language_col block_size "
    "use_within_block_sep share_val split_by key "
    "titles corrections sheet file_encoding code_sep prepare_only input_col "
    "attribute_cols drop_bad_labels "
    "blank_means_no_occupation zero_pad_codes allow_codes_shorter_than_block_size "
    "encoder initial_checkpoint "
    "only_encoder freeze_encoder max_len text_normalization dropout "
    "decoder_dim_feedforward recipe by_recipe "
    "num_epochs min_steps max_steps batch_size max_epoch_steps "
    "gradient_accumulation_steps learning_rate "
    "flat_loss flat_head repeats warmup_pct weight_decay max_grad_norm precision "
    "max_skipped_steps seed "
    "save_interval save_each_epoch keep_checkpoints resume overwrite save_format "
    "log_interval eval_interval "
    "no_report no_experts log_tensorboard log_wandb device distributed rank_timeout "
    "local_rank world_size "
    "num_workers pin_memory deterministic gradient_checkpointing fsdp no_refit compile "
    "bf16_gradients train_data "
    "val_data save_dir formatter".split()
)


def test_flags_that_do_nothing_are_named():
    idle = {
        "freeze_encoder": True,
        "flat_loss": "bce",
        "precision": "fp32",
        "target_cols": ("hisco_1",),
    }
    idle |= {"augmentation_prob": 0.0}
    files = {"train_data": ("a.csv",), "val_data": ("v.csv",), "save_dir": "out"}
    bases = FinetuneConfig("t.csv", **idle), MixerConfig(**files, **idle)
    form = {
        "formatter": {},
        "vocab_size": 1,
        "codes": (),
        "target_cols": (),
        "decoder_learns": False,
    }
    models = [
        ModelConfig(encoder={"model_type": kind}, reads_language=False, **form)
        for kind in ("bert", "canine")
    ]
    assert not [sentence for base in bases for sentence in without_effect(base, models[1])]
    of_scripts = [(base, setting) for base in bases for setting in settings_of(type(base))]
    for config, setting in of_scripts:
        if setting.needs is None:
            assert setting.name in ALWAYS, (
                f"{setting.flag}: say what it needs, or that it needs nothing"
            )
            continue
        other = {int: 7, float: 0.25, bool: True, str: (setting.choices or ("x",))[-1]}[
            setting.type
        ]
        changes = {setting.name: other}
        if setting.name == "augmentation_prob":
            changes["num_transformations"] = 0
        given = replace(config, **changes)
        sentences = [sentence for model in models for sentence in without_effect(given, model)]
        assert any(
            sentence.startswith(f"{setting.flag} has no effect without ") for sentence in sentences
        ), setting.flag
        assert not without_effect(replace(given, by_recipe=tuple(changes)), models[1])


def test_python_trains_resumes_and_is_told_of_mistakes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    settings = {
        "save_path": tmp_path / "out",
        "encoder": "tiny",
        "precision": "fp32",
        "batch_size": 16,
        "max_steps": 2,
    }
    settings |= dict.fromkeys(("no_report", "no_experts", "no_refit"), True)
    config = FinetuneConfig(
        dataset=write_table(tmp_path / "table.csv"), target_cols=["hisco_1"], **settings
    )
    folder = train(config)
    assert folder == tmp_path / "out" and (folder / "best" / "model.safetensors").exists()
    assert len(Coder.from_pretrained(folder).predict(["farmer"], "en")) == 1
    args = yaml.safe_load((folder / ARGS_FILE).read_text())
    assert (
        args["learning_rate"] == 1e-3
        and args["target_cols"] == ["hisco_1"]
        and "resume" not in args
    )
    (checkpoint,) = list_checkpoints(folder)
    assert {one.flag for one in settings_of(FinetuneConfig) if one.resume} <= set(
        load_checkpoint(checkpoint).settings
    )
    capsys.readouterr()
    train(replace(config, max_steps=3))
    assert "Resuming from step 2" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"--dropout +0\.0 +0\.5"):
        train(replace(config, dropout=0.5))


CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
SCRIPTS = {"finetune.py": FinetuneConfig, "train_mixer.py": MixerConfig}


def on_a_cpu(config: RunConfig) -> RunConfig:
    """The settings of a run there."""
    return filled_in(replace(config, encoder=choose_encoder(config, torch.device("cpu")).name))


def parsed(path: Path, text: str, *flags: str) -> dict:
    return vars(
        on_a_cpu(parse(FinetuneConfig, ["--config", str(write(path, text)), *GIVEN, *flags]))
    )


def test_sections_are_headings(tmp_path: Path):
    flat = "language: da\nencoder: tiny\nbatch-size: 7\ndistributed: true\n"
    mixed = (
        "data:\ndistributed:\n  distributed: true\nmodel: {encoder: tiny, language: "
        "da}\nbatch_size: 7\n"
    )
    one, two = (parsed(tmp_path / "run.yaml", text) for text in (flat, mixed))
    assert one == two
    assert (one["language"], one["encoder"], one["batch_size"], one["distributed"]) == (
        "da",
        "tiny",
        7,
        True,
    )
    assert one["learning_rate"] == 1e-3  # that of a model from scratch, which the file makes it
    flags_win = parsed(tmp_path / "run.yaml", mixed + "target_cols: [a, b]\n", "--batch-size", "9")
    assert (flags_win["batch_size"], flags_win["target_cols"]) == (9, ("hisco_1",))


def test_words_of_yaml_and_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    assert parsed(tmp_path / "run.yaml", "save_path: ~/runs/a\n")["save_path"] == str(
        tmp_path / "runs" / "a"
    )
    with pytest.raises(UserError, match="There is no flag"):
        parsed(tmp_path / "run.yaml", "data: {on: x}\n")  # which YAML reads as true


def test_the_example_of_the_page(tmp_path: Path):
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    args = parsed(
        tmp_path / "run.yaml", page.split("```yaml\n")[1].partition("```")[0], "--batch-size", "32"
    )
    assert (args["batch_size"], args["use_amp"], args["save_path"]) == (32, True, "out")


@cases(
    ("text", "message"),
    ("training: {bach_size: 8}", "There is no flag --bach-size. Did you mean '--batch-size'?"),
    ("language: no", "language can't be False. Quote words such as no or yes."),
    ("target_cols: [a, no]", "target-cols can't be ['a', False]. Quote words such as no"),
    ("batch_size: many", "argument --batch-size: invalid int value: 'many'"),
    (
        "zero_pad_codes: yes please",
        "argument --zero-pad-codes: ignored explicit argument 'yes please'",
    ),
    ("- a list", "must hold lines of the form"),
    ("a: [", "can't be read"),
)
def test_mistakes_are_named(tmp_path: Path, text: str, message: str):
    with pytest.raises(UserError) as error:
        parsed(tmp_path / "run.yaml", text)
    assert message.lower() in str(error.value).lower() and f"--config {tmp_path}" in str(
        error.value
    )


def example(path: Path) -> tuple[str, list[str]]:
    """The script that an example's comment starts, and its arguments."""
    comment = [
        line[1:] for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("#")
    ]
    words = shlex.split(" ".join(line.strip().removesuffix("\\") for line in comment[1:]))
    start = next(i for i, word in enumerate(words) if word in SCRIPTS)
    return words[start], words[start + 1 :]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_examples_are_read_by_their_scripts(path: Path, monkeypatch: pytest.MonkeyPatch):
    script, args = example(path)
    monkeypatch.chdir(ROOT)
    assert f"configs/{path.name}" in args
    read = yaml.safe_load(yaml.safe_dump(recorded(on_a_cpu(parse(SCRIPTS[script], args)))))
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    flags = {name: value for section in content.values() for name, value in section.items()}
    flags["learning_rate"] = float(
        flags.get("learning_rate", read["learning_rate"])
    )  # 1e-3 is a word in YAML
    assert {name: read[name] for name in flags} == flags
    assert len(CONFIGS) == 7


def test_a_continued_run_reads_as_its_model(table: Path, tmp_path: Path):
    first, second = tmp_path / "first", tmp_path / "second"
    extra = ("--max-steps", 1, "--max-len", 64, "--batch-size", 8)
    run(*finetune(table, first, *extra, "--recipe", "reference"))
    as_imported = {
        "mask_memory": False,
        "pad_to": 64,
        "text_normalization": "lower_ascii",
        "flat_loss": "bce",
    }
    save_config(first, replace(read_model_config(first), **as_imported))
    run(*finetune(table, second, *extra, "--initial-checkpoint", first))
    found = json.loads((second / "config.json").read_text(encoding="utf-8"))
    assert {name: found[name] for name in as_imported} == as_imported
    assert not found.get(
        "decoder_prior"
    )  # the first model's decoder does not start from its flat head


def begun(formatter: str, codes: tuple[str, ...], *columns: str, **settings: object) -> MixerModel:
    """The model that a run with these settings begins with."""
    config = on_a_cpu(FinetuneConfig("t.csv", columns, **settings))
    files = LabelledFiles((), columns, build_formatter(formatter, num_blocks=len(columns)))
    task = Task(files, Key(codes), languages=("en", "unk"), attributes={})
    return build_model(config, task, Start.of(config))


def test_a_continued_run_drops_ngrams_as_told():
    path = ROOT / "tests" / "fixtures" / "ngram"
    settings = {
        "initial_checkpoint": str(path),
        "max_len": 32,
        "decoder_dim_feedforward": 8,
        "ngram_dropout": 0.1,
    }
    model = begun("general", read_model_config(path).codes, "hisco_1", **settings)
    assert (
        model.encoder.config.ngram_dropout_prob == model.config.encoder["ngram_dropout_prob"] == 0.1
    )


@pytest.mark.parametrize(
    ("encoder", "columns", "learns"), [("ngram", 1, False), ("ngram", 2, True), ("tiny", 1, True)]
)
def test_a_decoder_that_adds_nothing_does_not_learn(encoder: str, columns: int, learns: bool):
    codes = ("-1", "61110", "61115", "77610")
    model = begun("hisco", codes, *("hisco_1", "hisco_2")[:columns], encoder=encoder)
    assert model.config.decoder_learns == learns
    assert all(parameter.requires_grad == learns for parameter in model.decoder.parameters())
    if not learns:  # all modes give the classifier's answer
        torch.manual_seed(0)
        torch.nn.init.normal_(model.linear_decoder.weight)
        coder, texts = Coder(model, "cpu"), ["farmer", "wine merchant", "baker"]
        flat, best = (coder.predict(texts, "en", mode=mode) for mode in ("flat", "topk"))
        pd.testing.assert_frame_equal(
            flat, best[flat.columns], rtol=0.02
        )  # a prior leaves room for other tokens
        assert (
            coder.predict(texts, "en", mode="full").idxmax(axis=1).tolist()
            == flat["hisco_1"].tolist()
        )
        assert coder.predict(texts, "en", mode="greedy")["hisco_1"].isin(codes).all()


@cases(
    ("settings", "kind"),
    ({"encoder": "ngram"}, "ngram"),
    ({"encoder": "small"}, "scratch"),
    ({"encoder": "some/bert"}, "pretrained"),
    ({"encoder": "some/bert", "freeze_encoder": True}, "frozen"),
    ({"encoder": "some/bert", "recipe": "reference"}, "reference"),
)
def test_settings_not_given_are_the_starts(settings: dict, kind: str):
    config = FinetuneConfig(dataset="t.csv", target_cols=("hisco_1",), **settings)
    assert kind_of_start(config, Start.of(config)) == kind
    assert filled_in(config).learning_rate == RECIPES[kind]["learning_rate"]
    assert filled_in(replace(config, learning_rate=0.5)).learning_rate == 0.5


@cases(
    ("command", "name"),
    ("evaluate --model m", "data"),
    ("compare m n", "data"),
    ("audit --target-cols c", "dataset"),
    ("review --model m", "predictions"),
    ("serve", "data"),
    ("export --model m --onnx o", "data"),
    ("predict --model m", "input"),
    ("classes --output o", "input"),
)
def test_every_command_takes_input(command: str, name: str):
    args = command_parser().parse([*command.split(), "--input", "my.csv"])
    assert getattr(args, name) == "my.csv"


def test_input_is_the_table_to_train_on(tmp_path: Path):
    flags = ["--input", "my.csv", "--target-cols", "hisco_1"]
    assert parse(FinetuneConfig, flags) == parse(FinetuneConfig, ["--dataset", *flags[1:]])
