"""The encoder that a run chooses by itself."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import product
from pathlib import Path

import pytest
import torch
import yaml
from conftest import cases, run, write
from huggingface_hub import constants
from jobs import TINY, weights

from histocoder import FinetuneConfig, OccupationClassifier
from histocoder.checkpoints.run_files import record_begin
from histocoder.checkpoints.run_folder import ARGS_FILE
from histocoder.cli.arguments import parse
from histocoder.cli.finetune import main as finetune
from histocoder.config import PRETRAINED_ENCODER, MixerConfig
from histocoder.model.encoder import can_be_fetched
from histocoder.training import start
from histocoder.training.start import Start, choose_encoder, fill_in

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
TABLE = ["--dataset", "t.csv", "--target-cols", "hisco_1"]


@cases(
    ("flags", "device", "is_fetched", "name", "reason"),
    ("", CPU, True, "ngram", "no GPU here; --encoder google/canine-s for the pretrained one"),
    ("--device cpu", CPU, True, "ngram", "no GPU is to be used"),
    ("", GPU, True, PRETRAINED_ENCODER, "--encoder ngram for one from scratch"),
    (
        "",
        GPU,
        False,
        "ngram",
        "the hub can't be reached, and its cache here has no google/canine-s",
    ),
    ("--encoder google/canine-s", CPU, False, PRETRAINED_ENCODER, ""),
    ("--encoder small", GPU, True, "small", ""),
    ("--recipe reference", CPU, False, PRETRAINED_ENCODER, "for --recipe reference"),
    ("--freeze-encoder", CPU, False, PRETRAINED_ENCODER, "for --freeze-encoder"),
    ("--save-format occcanine", CPU, False, PRETRAINED_ENCODER, "for --save-format occcanine"),
    ("--initial-checkpoint last.bin", CPU, False, PRETRAINED_ENCODER, ""),
)
def test_the_machine_decides_on_the_encoder(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    flags: str,
    device,
    is_fetched: bool,
    name: str,
    reason: str,
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(start, "can_be_fetched", lambda _: is_fetched)
    choice = choose_encoder(parse(FinetuneConfig, [*TABLE, *flags.split()]), device)
    assert choice.name == name and reason in choice.reason and bool(choice.reason) == bool(reason)


def test_auto_is_the_default_everywhere():
    assert parse(FinetuneConfig, TABLE).encoder == OccupationClassifier().encoder == "auto"
    assert MixerConfig(train_data="a.csv", val_data="v.csv", save_dir="out").encoder == "auto"


def test_a_resumed_run_keeps_its_encoder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    other = tmp_path / "other"
    other.mkdir()
    write(
        other / ARGS_FILE,
        yaml.safe_dump({"encoder": "google/canine-s", "initial_checkpoint": None}),
    )
    monkeypatch.setattr(start, "can_be_fetched", lambda _: True)

    def chosen(*flags: object, device: torch.device = CPU) -> str:
        return choose_encoder(parse(FinetuneConfig, [*TABLE, *map(str, flags)]), device).name

    assert chosen("--save-path", other) == "google/canine-s"
    assert (
        chosen("--save-path", other, "--overwrite")
        == chosen("--save-path", other, "--resume", "never")
        == "ngram"
    )
    assert chosen("--resume", other / "checkpoints" / "step-0000004") == "google/canine-s"
    record_begin(other)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert chosen("--save-path", other, "--resume", "never") == "google/canine-s"


def test_a_run_on_a_cpu_records_its_encoder(table: Path, tmp_path: Path):
    flags = (
        "--dataset",
        table,
        "--target-cols",
        "hisco_1",
        "--save-path",
        tmp_path / "out",
        "--max-steps",
        1,
    )
    few = ("--no-report", "--no-experts", "--no-refit", "--titles", "none")
    said = run("finetune.py", *flags, *few).stdout
    assert (
        "\nencoder     ngram: no GPU here; --encoder google/canine-s for the pretrained one\n"
        in said
    )
    assert yaml.safe_load((tmp_path / "out" / ARGS_FILE).read_text())["encoder"] == "ngram"
    resumed = run("finetune.py", *flags[:-1], 2, *few).stdout
    assert (
        "\nencoder     ngram: as this run has begun\n" in resumed
        and "Resuming from step 1" in resumed
    )


def test_a_model_trained_further_keeps_its_encoder():
    path = Path(__file__).parents[1] / "fixtures" / "ngram"
    config = parse(FinetuneConfig, [*TABLE, "--initial-checkpoint", str(path)])
    assert choose_encoder(config, GPU).reason == ""
    config = parse(
        FinetuneConfig, [*TABLE, "--initial-checkpoint", str(path), "--encoder", "ngram"]
    )
    assert fill_in(config, Start.of(config)).encoder == str(path)


def test_long_descriptions_are_counted(tmp_path: Path, logged: list[str]):
    rows = [
        f"{'clerk of the ' * (i % 4)}{number} court,{code}"
        for i, (number, code) in enumerate(product(range(8), "1234567"))
    ]
    table = write(tmp_path / "t.csv", "occ1,code", *rows)
    flags = [
        "--dataset",
        str(table),
        "--target-cols",
        "code",
        "--save-path",
        str(tmp_path / "out"),
        "--max-len",
        "32",
    ]
    finetune([*flags, "--encoder", "tiny", "--prepare-only"])
    expected = sum(len(f"unk[SEP]{row[:-2]}") + 2 > 32 for row in rows)
    notice = f"Notice: {expected} rows have descriptions of more than 32 characters"
    assert 0 < expected < len(rows) and any(line.startswith(notice) for line in logged)
    logged.clear()
    few = [
        "--max-steps",
        "1",
        "--no-report",
        "--no-experts",
        "--no-refit",
        "--label-smoothing",
        "0.5",
    ]
    finetune([*flags, "--encoder", "tiny", "--flat-loss", "bce", *few])
    assert any(line.startswith(notice) for line in logged)
    assert "Notice: --label-smoothing has no effect without --flat-loss softmax." in logged


def test_a_column_of_identifiers_is_named(tmp_path: Path, logged: list[str]):
    table = write(tmp_path / "t.csv", "occ1,id", *(f"clerk no {i},{i + 1000}" for i in range(60)))
    out = str(tmp_path / "out")
    finetune(["--dataset", str(table), "--target-cols", "id", "--save-path", out, "--prepare-only"])
    assert any(
        line.startswith("Notice: the 60 codes in id are 60 different ones.") for line in logged
    )


def test_a_single_step_has_a_rate(table: Path, tmp_path: Path):
    def trained(out: Path, *flags: str) -> dict[str, torch.Tensor]:
        common = [
            "--dataset",
            str(table),
            "--target-cols",
            "hisco_1",
            "--save-path",
            str(out),
            *TINY,
        ]
        finetune([*common, "--no-refit", "--max-steps", "1", "--batch-size", "16", *flags])
        return weights(out)

    unchanged = trained(tmp_path / "none", "--learning-rate", "1e-60")
    stepped = trained(tmp_path / "one", "--warmup-pct", "1")
    assert not all(torch.equal(tensor, unchanged[name]) for name, tensor in stepped.items())


@contextmanager
def hub(status: int, *, after_seconds: float = 0) -> Iterator[str]:
    """A server that answers each request with a status."""

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            time.sleep(after_seconds)
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()


@cases(
    ("status", "delay", "answers"),
    (200, 0, True),
    (503, 0, False),
    (404, 0, False),
    (200, 30, False),
)
def test_the_hub_has_seconds_to_answer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, status: int, delay: float, answers: bool
):
    monkeypatch.setattr("histocoder.model.encoder._HUB_SECONDS", 2.0)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    started = time.monotonic()
    with hub(status, after_seconds=delay) as url:
        # the address itself, since versions of the hub's library read its parts at other times
        monkeypatch.setattr("huggingface_hub.hf_hub_url", lambda name, file: f"{url}/{name}/{file}")
        assert can_be_fetched(PRETRAINED_ENCODER) == answers
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        assert not can_be_fetched(PRETRAINED_ENCODER)
    assert time.monotonic() - started < 10


def test_what_the_cache_has_needs_no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--google--canine-s" / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    write(snapshot / "config.json", "{}")
    assert not can_be_fetched(PRETRAINED_ENCODER)
    write(snapshot / "pytorch_model.bin", "")
    assert can_be_fetched(PRETRAINED_ENCODER)
