"""Whole runs on a pretended GPU: they end as on a CPU, with the same numbers within the
precision.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import cases, slow, write_table
from jobs import assert_same_end
from pretended_gpu import CudaTensor, Log, pretended_gpu
from pretrained import save_pretrained
from safetensors.torch import load_file
from test_attributes import with_status

from histocoder import Coder, FinetuneConfig, train
from histocoder.checkpoints.model_files import read_model_config
from histocoder.cli.main import main
from histocoder.errors import UserError
from histocoder.training.learner import Learner

pytestmark = pytest.mark.filterwarnings("ignore:.*lr_scheduler.step")  # of steps that fp16 skips
TWO = {"target_cols": ("hisco_1", "hisco_2"), "language_col": "lang"}
ATTRIBUTES = {"attribute_cols": ("status", "place")}
TOLERANCES = {"fp32": 1e-4, "bf16": 3e-2, "fp16": 1e-2}
"""Relative difference of losses from those of a CPU in fp32."""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of tables with one code, with two, and encoders."""
    folder = tmp_path_factory.mktemp("inputs")
    with_status(folder / "hisco_1.csv")
    write_table(folder / "hisco_2.csv", two_codes=True)
    for kind in ("bert", "byt5", "canine"):
        save_pretrained(kind, folder / kind)
    return folder


def settings(inputs: Path, out: Path, encoder: str, **changes: Any) -> FinetuneConfig:
    """A run of three steps, validated after two of them, without random numbers that devices draw,
    and saved once.
    """
    columns = changes.pop("target_cols", ("hisco_1",))
    sizes = {
        "batch_size": 16,
        "max_steps": 3,
        "eval_interval": 2,
        "log_interval": 1,
        "num_workers": 0,
    }
    table = str(inputs / f"{columns[-1]}.csv")
    return FinetuneConfig(
        dataset=table,
        save_path=str(out),
        target_cols=columns,
        encoder=str(inputs / encoder) if (inputs / encoder).is_dir() else encoder,
        titles="none",
        ngram_dropout=0.0,
        **{**sizes, **changes},
    )


@pytest.fixture(scope="module")
def losses_on_cpu(
    inputs: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., pd.DataFrame]:
    """The log of a run in fp32 on a CPU."""

    @cache
    def losses(encoder: str, *changes: tuple[str, Any]) -> pd.DataFrame:
        out = tmp_path_factory.mktemp("cpu")
        options = {
            "precision": "fp32",
            "no_report": True,
            "no_experts": True,
            "no_refit": True,
            "device": "cpu",
        }
        train(settings(inputs, out, encoder, **dict(changes) | options))
        return pd.read_csv(out / "logs.csv")

    return losses


FROZEN = {"freeze_encoder": True, "no_experts": True}
SHORT = {"no_report": True, "no_refit": True}


@cases(
    ("encoder", "precision", "changes"),
    ("tiny", "fp32", ATTRIBUTES),
    ("ngram", "bf16", {**TWO, **SHORT}),
    ("bert", "fp16", {**SHORT, "gradient_checkpointing": True}),
    ("tiny", "bf16", {**SHORT, **FROZEN, "gradient_accumulation_steps": 2, "batch_size": 8}),
    slow("ngram", "fp16", {**SHORT, "no_experts": True}),
    slow("tiny", "fp16", {}),
    slow("tiny", "bf16", {**TWO, "gradient_checkpointing": True}),
    slow("tiny", "fp32", {"recipe": "reference", "augmentation_prob": 0.0, "unk_lang_prob": 0.0}),
    slow("tiny", "fp32", {"deterministic": True, "decoder_stride": 2}),
    slow("ngram", "fp32", {"deterministic": True}),
    slow("ngram", "fp32", {**ATTRIBUTES, "gradient_checkpointing": True}),
    slow("bert", "bf16", {"freeze_encoder": True}),
    slow("bert", "fp32", {"deterministic": True}),
    slow("byt5", "bf16", {"gradient_checkpointing": True}),
    slow("canine", "fp32", {"save_format": "occcanine", "num_workers": 2}),
    slow("canine", "fp32", {"gradient_accumulation_steps": 2, "batch_size": 8}),
    slow("tiny", "fp16", {"gradient_accumulation_steps": 2, "batch_size": 8}),
)
def test_a_run_is_what_it_is_on_a_cpu(
    tmp_path: Path,
    inputs: Path,
    losses_on_cpu: Callable,
    encoder: str,
    precision: str,
    changes: dict[str, Any],
):
    config = settings(
        inputs, tmp_path / "out", encoder, precision=precision, device="cuda", **changes
    )
    try:
        with pretended_gpu():
            out = train(config)
    finally:
        torch.use_deterministic_algorithms(False)
    log = pd.read_csv(out / "logs.csv")
    expected = losses_on_cpu(
        encoder, *((name, value) for name, value in changes.items() if name not in SHORT)
    )
    is_alike = (
        ~log["skipped_steps"].gt(0).cummax()
    )  # until a step is skipped, as in fp16 for the scale of the loss
    assert is_alike.all() or (precision == "fp16" and is_alike.any())
    log, expected = log[is_alike], expected[is_alike]
    for column in ("train_loss", "val_loss", "val_loss_linear", "val_loss_seq2seq"):
        pd.testing.assert_series_equal(log[column], expected[column], rtol=TOLERANCES[precision])
    assert (log["gpu_memory_gb"].dropna() == 2).all() and log["gpu_memory_gb"].any()
    assert expected["gpu_memory_gb"].isna().all()
    best_weights = load_file(out / "best" / "model.safetensors")
    assert [name for name, weight in best_weights.items() if not weight.isfinite().all()] == []
    assert (out / "report.html").is_file() != config.no_report
    assert (out / "last.bin").is_file() == (config.save_format == "occcanine")
    best = read_model_config(out / "best")
    assert bool(best.experts) != config.no_experts and best.fitted_to_validation != config.no_refit
    assert set(best.attribute_experts) == set(config.attribute_cols or ())


@cases(
    ("encoder", "precision"),
    ("tiny", "fp16"),
    slow("tiny", "fp32"),
    slow("ngram", "bf16"),
    slow("ngram", "fp16"),
    slow("bert", "bf16"),
)
def test_a_resumed_run_is_bit_identical(
    tmp_path: Path, inputs: Path, monkeypatch: pytest.MonkeyPatch, encoder: str, precision: str
):
    def run(name: str) -> None:
        changes: dict[str, Any] = {
            "precision": precision,
            "dropout": 0.2,
            "no_experts": True,
            "device": "cuda",
        }
        changes |= {**SHORT, "max_steps": 4, "save_interval": 2}
        config = settings(inputs, tmp_path / name, encoder, **changes)
        with pretended_gpu():
            train(config)

    def interrupted(learner: Learner, parts: Any, number: list[int] = [3]) -> Any:  # noqa: B006
        number[0] -= 1
        if number[0] < 0:
            raise KeyboardInterrupt
        return step(learner, parts)

    run("whole")
    step = Learner.train_step
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Learner, "train_step", interrupted)
        run("halves")
    run("halves")  # from step 2, where it was saved
    assert_same_end(tmp_path / "whole", tmp_path / "halves")


def test_a_step_that_overflows_is_skipped(
    tmp_path: Path, inputs: Path, monkeypatch: pytest.MonkeyPatch
):
    """In fp16, with a dense and a sparse gradient: no weight changes, and the loss scale falls."""
    states = []
    scales = [2.0**10, 2.0**40, 2.0**10]  # at the second, gradients are infinite

    def observed(learner: Learner, parts: Any) -> Any:
        scale = scales[len(states)]
        learner.scaler.scale(torch.zeros((), device=learner.device))  # which creates its tensors
        learner.scaler.update(new_scale=scale)
        before = {name: weight.clone() for name, weight in learner.model.state_dict().items()}
        result = step(learner, parts)
        after = learner.model.state_dict()
        is_same = all(torch.equal(weight, after[name]) for name, weight in before.items())
        states.append((is_same, learner.scaler.get_scale() / scale))
        return result

    step = Learner.train_step
    monkeypatch.setattr(Learner, "train_step", observed)
    config = settings(
        inputs, tmp_path / "out", "ngram", precision="fp16", device="cuda", no_experts=True, **SHORT
    )
    with pretended_gpu():
        train(config)
    assert states == [(False, 1.0), (True, 0.5), (False, 1.0)]
    assert pd.read_csv(tmp_path / "out" / "logs.csv")["skipped_steps"].dropna().tolist() == [
        0,
        1,
        0,
    ]


def test_a_gpu_without_bf16_refuses_it(tmp_path: Path, inputs: Path):
    config = settings(inputs, tmp_path / "out", "tiny", precision="bf16", device="cuda")
    message = "Pretended GPU has no bf16: .* Choose --precision auto or fp16."
    with pretended_gpu(capability=(7, 0)), pytest.raises(UserError, match=message):
        train(config)
    assert not (tmp_path / "out" / "config.json").exists()


@cases(("use_amp", "dtype"), (True, "fp16"), slow(False, "fp32"))
def test_a_gpu_without_bf16_trains(
    tmp_path: Path, inputs: Path, logged: list[str], use_amp: bool, dtype: str
):
    config = settings(
        inputs, tmp_path / "out", "tiny", use_amp=use_amp, device="cuda", no_experts=True, **SHORT
    )
    with pretended_gpu(capability=(7, 0)):
        train(config)
    assert f"strategy    one process, {dtype}" in logged


@cases(("deterministic", "expected"), (False, "high"), slow(True, "highest"))
def test_products_of_fp32_are_fast_in_training(
    tmp_path: Path,
    inputs: Path,
    monkeypatch: pytest.MonkeyPatch,
    deterministic: bool,
    expected: str,
):
    seen = set()

    def observed(learner: Learner, parts: Any) -> Any:
        seen.add(torch.get_float32_matmul_precision())
        return step(learner, parts)

    step = Learner.train_step
    monkeypatch.setattr(Learner, "train_step", observed)
    changes = {
        "precision": "fp32",
        "device": "cuda",
        "deterministic": deterministic,
        "no_experts": True,
    }
    changes["max_steps"] = 1  # and one of the refit
    try:
        with pretended_gpu():
            train(settings(inputs, tmp_path / "out", "tiny", no_report=True, **changes))
    finally:
        torch.use_deterministic_algorithms(False)
    assert seen == {expected} and torch.get_float32_matmul_precision() == "highest"


@pytest.fixture(scope="module")
def model(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that a GPU has trained, with all experts and attributes."""
    out = tmp_path_factory.mktemp("model") / "out"
    config = settings(
        inputs, out, "tiny", precision="bf16", device="cuda", max_steps=8, **ATTRIBUTES, **SHORT
    )
    with pretended_gpu():
        train(config)
    return out


TEXTS = ["farmer", "weaver and dealer", "baker's apprentice", "husmand", None]


@cases("mode", "combined", "greedy", "flat", "topk", "full")
def test_prediction_is_what_it_is_on_a_cpu(model: Path, mode: str):
    expected = Coder.from_pretrained(model, "cpu").predict(TEXTS, "en", mode=mode)
    for precision, tolerance in (("fp32", 1e-4), ("bf16", 5e-2), ("fp16", 1e-2)):
        with pretended_gpu():
            coder = Coder.from_pretrained(model, precision=precision)
            assert coder.device.type == "cuda" and isinstance(
                next(coder.model.parameters()), CudaTensor
            )
            predicted = coder.predict(TEXTS, "en", mode=mode)
        columns = [*expected.select_dtypes("number")]
        np.testing.assert_allclose(predicted[columns], expected[columns], atol=tolerance)


def test_a_desk_ranks_as_on_a_cpu(model: Path):
    expected = Coder.from_pretrained(model, "cpu").predict_ranked(TEXTS, "en")
    with pretended_gpu():
        ranked = Coder.from_pretrained(model, "cuda:0").predict_ranked(TEXTS, "en")
    for one, other in zip(ranked, expected, strict=True):
        np.testing.assert_allclose(one.conf, other.conf, atol=1e-4)
        np.testing.assert_allclose(one.probs[:, 0], other.probs[:, 0], atol=1e-4)


def test_commands_compute_on_a_gpu(
    tmp_path: Path, inputs: Path, model: Path, capsys: pytest.CaptureFixture[str], gpu: Log
):
    device = ("--device", "cuda", "--precision", "bf16")
    main(["doctor"])
    assert "1 × Pretended GPU" in capsys.readouterr().out
    assert not gpu.launches
    main(["predict", "--model", str(model), *device, "farmer"])
    assert "61110" in capsys.readouterr().out and gpu.launches
    gpu.clear()
    table, report = str(inputs / "hisco_1.csv"), str(tmp_path / "report")
    main(["evaluate", "--model", str(model), "--data", table, "--output", report, *device])
    assert (tmp_path / "report" / "report.html").is_file() and gpu.launches


@pytest.mark.slow
def test_a_model_of_a_gpu_is_exported(tmp_path: Path, model: Path):
    pytest.importorskip("onnxruntime")
    from histocoder.inference.onnx_coder import OnnxCoder

    with pretended_gpu():
        main(["export", "--model", str(model), "--onnx", str(tmp_path / "onnx")])
    expected = Coder.from_pretrained(model, "cpu").predict(TEXTS, "en", mode="flat")
    exported = OnnxCoder(tmp_path / "onnx").predict(TEXTS, "en", mode="flat")
    np.testing.assert_allclose(exported["prob_1"], expected["prob_1"], atol=1e-4)
