"""What is a run's in its folder, and what is somebody else's: the latter is never replaced or
deleted.
"""

import shutil
from pathlib import Path

import pytest
from conftest import refused, run
from jobs import finetune, training

from histocoder.checkpoints.run_files import (
    FIGURES,
    RECORD_FILE,
    record_begin,
    was_restarted,
)
from histocoder.checkpoints.run_folder import RunFolder
from histocoder.checkpoints.training_state import list_checkpoints
from histocoder.data.prepared_folder import set_aside
from histocoder.errors import UserError
from histocoder.evaluation.report import _GROUPS

FIXTURES = Path(__file__).parents[1] / "fixtures"
NAMES = """config.json model.safetensors manifest.json README.md tokenizer/vocab.txt best/config.json best/own.txt
report.html report/thesis.tex report/training.png metrics.json checkpoints/step-0000001/README.md logs.csv
tensorboard/notes.txt examples.arrow data_train.csv data_val.csv data_titles.csv data_held_out.csv key.csv rejected.csv
conflicts.csv prepared.json last.bin run.json wandb_run_id""".split()
"""Names of a run's files in docs/runs.md, and of others in a run's folders."""


def content(folder: Path) -> dict[Path, bytes]:
    return {
        path: path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_folder_with_args_is_no_run(tmp_path: Path, name: str, copied: bool):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("{}" if name.endswith(".json") else "mine")
    if copied:
        shutil.copy2(FIXTURES / "run" / "args.yaml", tmp_path)
    else:
        (tmp_path / "args.yaml").write_text("dataset: table.csv\nencoder: tiny\n")
    before = content(tmp_path)
    with (
        pytest.raises(UserError, match="histocoder did not write there") as error,
        RunFolder.open(tmp_path),
    ):
        pass
    assert name.partition("/")[0] in str(error.value) and "args.yaml" in str(error.value)
    assert content(tmp_path) == before


def test_a_copied_record_makes_no_run(table: Path, tmp_path: Path):
    args = finetune(table, tmp_path / "out", "--batch-size", 8, "--max-steps", 1)
    run(*args)
    project = tmp_path / "project"
    project.mkdir()
    for name in ("run.json", "prepared.json", "args.yaml"):
        shutil.copy2(tmp_path / "out" / name, project)
    (project / "README.md").write_text("mine")
    assert "project contains README.md, which" in refused(
        *args, "--save-path", project, "--overwrite"
    )
    assert (project / "README.md").read_text() == "mine"


def test_own_files_in_a_run_stay(tmp_path: Path):
    out = tmp_path / "out"
    args = (*training(out, batch_size=8, steps=2), "--save-interval", "1")
    run(*args)
    own = [out / name for name in ("notes.md", "report/thesis.tex", "best/own.txt", ".draft.tmp")]
    own += [path / "mine.txt" for path in list_checkpoints(out)]
    for path in own:
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"mine: {path.name}")
    run(*args, "--overwrite")
    run(*training(out, batch_size=8, steps=4), "--keep-checkpoints", "1")
    assert [path.read_text() for path in own] == [f"mine: {path.name}" for path in own]
    assert [path.name for path in list_checkpoints(out)] == ["step-0000004"]


def test_runs_without_a_record_resume_and_overwrite(tmp_path: Path):
    out, moved = tmp_path / "out", tmp_path / "moved"
    run(*training(out, batch_size=8, steps=2))
    (out / RECORD_FILE).unlink()
    assert "Resuming from step 2 " in run(*training(out, batch_size=8, steps=3)).stdout
    out.rename(moved)
    assert "Resuming from step 3 " in run(*training(moved, batch_size=8, steps=4)).stdout
    (moved / RECORD_FILE).unlink()
    assert "Resuming" not in run(*training(moved, batch_size=8, steps=1), "--overwrite").stdout


def test_a_run_without_checkpoints_is_repeated_unless_it_has_ended(tmp_path: Path):
    with RunFolder.open(tmp_path) as folder:
        folder.begin({}, None)
        (tmp_path / "model.safetensors").write_text("of a run that takes no steps")
        assert folder.load_checkpoint("auto") is None
        folder.end(keep_checkpoints=False)
        with pytest.raises(UserError, match="holds the model of an earlier run"):
            folder.load_checkpoint("auto")


def test_the_best_model_of_a_killed_run_with_other_settings_stays(tmp_path: Path):
    out = tmp_path / "out"
    args = training(out, batch_size=8, steps=2)
    run(*args)
    record_begin(out)  # as a run that was killed before its first checkpoint
    shutil.rmtree(out / "checkpoints")
    before = content(out)
    other = (*args, "--learning-rate", "0.5")
    assert "best model of a run with other settings (--learning-rate)" in refused(*other)
    assert content(out / "best") == {
        path: text for path, text in before.items() if path.parent == out / "best"
    }
    run(*args)
    run(*other, "--overwrite")


@pytest.mark.parametrize("name", ["SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT"])
def test_a_launch_that_is_started_again_resumes_its_own_run_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    record_begin(tmp_path)
    assert not was_restarted(tmp_path)
    monkeypatch.setenv(name, "1")
    assert was_restarted(tmp_path)
    monkeypatch.setenv("SLURM_JOB_ID", "8")  # which has not begun yet
    assert not was_restarted(tmp_path)


@pytest.mark.parametrize("model", ["", "best", "checkpoints/step-0000001"])
def test_a_run_does_not_replace_the_model_that_it_starts_from(tmp_path: Path, model: str):
    out = tmp_path / "out"
    (out / model).mkdir(parents=True)
    args = (*training(out, batch_size=8, steps=1), "--overwrite", "--initial-checkpoint")
    assert "is in the run's own folder" in refused(*args, out / model)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--encoder misspelt", "Could not load the encoder"),
        ("--fn-word-freq nowhere.csv --augmentation-prob 0.5", "nowhere.csv"),
        ("--prepare-only", "beside which --prepare-only would leave other data"),
    ],
)
def test_a_failed_overwrite_leaves_the_earlier_run(tmp_path: Path, flags: str, message: str):
    out, table = tmp_path / "out", tmp_path / "table.csv"
    args = training(out, batch_size=8, steps=1)
    run(*args)
    table.write_text("".join(table.read_text().splitlines(keepends=True)[:-9]))
    before = content(out)
    assert message in refused(*args, "--overwrite", *flags.split())
    assert content(out) == before
    run(*args, "--overwrite")
    assert (out / "data_train.csv").read_bytes() != before[out / "data_train.csv"]


def test_a_killed_overwrite_is_undone_by_the_next(tmp_path: Path):
    out = tmp_path / "out"
    run(*training(out, batch_size=8, steps=1))
    before = content(out)
    set_aside(
        out, ("key.csv", "prepared.json", "conflicts.csv")
    )  # as does a run that is then killed
    for name in ("key.csv", "conflicts.csv"):
        (out / name).write_text("new")
    with RunFolder.open(out):
        assert content(out) == before


def test_figures_are_those_of_the_report():
    assert {*FIGURES} == {"training", "production", "calibration", *_GROUPS}
