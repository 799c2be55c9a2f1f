"""Tables through pipes, and several tables at once."""

import shlex
import sys
from pathlib import Path

import pytest
from archives import read, write_archive
from conftest import mistake, program, run, write

PREDICT = ("-m", "histocoder", "predict", "--device", "cpu")


def shell(line: str, *, check: bool = True):
    return program("bash", "-o", "pipefail", "-c", line, check=check)


def test_a_table_goes_through_pipes(model: Path, tmp_path: Path):
    table = tmp_path / "in.csv"
    write_archive(table, 30)
    run(*PREDICT, "--model", model, "--input", table, "--output", tmp_path / "out.csv")
    python, path = shlex.quote(sys.executable), shlex.quote(str(table))
    command = f"{python} {' '.join(PREDICT)} --model {model} --input -"
    piped = shell(f"cat {path} | {command} --output -")
    assert piped.stdout == (tmp_path / "out.csv").read_text()
    assert "Coded standard input into standard output" in piped.stderr
    assert not list(tmp_path.glob("*standard*"))
    first = shell(f"cat {path} | {command} 2>{tmp_path}/err | head -n 1")
    assert first.stdout == piped.stdout.splitlines(keepends=True)[0]
    assert "Traceback" not in (tmp_path / "err").read_text()


def test_notices_are_said_once(model: Path, tmp_path: Path):
    lines = ['"farmer']
    lines += [f"baker {i}" for i in range(9)]
    table = write(tmp_path / "in.csv", "occ1", *lines, 'smith"', "miller")
    command = f"{shlex.quote(sys.executable)} {' '.join(PREDICT)} --model {model}"
    piped = shell(f"cat {table} | {command} --input -")
    assert piped.stderr.count("looks like rows of the table") == 1, piped.stderr
    assert "standard input, line 2: one cell holds 10 line breaks" in piped.stderr
    assert str(tmp_path) not in piped.stderr
    to_file = shell(f"{command} --input {table} --output {tmp_path / 'out.csv'}")
    said = to_file.stdout + to_file.stderr
    assert said.count("looks like rows of the table") == 1, said


@pytest.mark.slow  # it aborted once at its end, after its message, beside other tests
def test_a_fault_of_standard_input_has_its_line(model: Path):
    command = f"{shlex.quote(sys.executable)} {' '.join(PREDICT)} --model {model} --input -"
    wrong = shell(f"printf 'occ1,b\\nfarmer,1,2\\n' | {command}", check=False)
    assert wrong.returncode == 2 and not wrong.stdout
    assert "error: standard input, line 2: 3 fields where the header has 2" in wrong.stderr


def test_a_reader_that_ends_is_no_error(model: Path, tmp_path: Path):
    table = tmp_path / "in.csv"
    write_archive(table, 9000)
    command = f"{sys.executable} {' '.join(PREDICT)} --model {model} --input {table} --output -"
    ended = shell(f"{command} | head -n 1", check=False)
    assert ended.stdout.startswith("id,occ1,") and "rror" not in ended.stderr
    assert "has ended" not in ended.stderr


def test_a_piped_table_is_named_in_its_provenance(model: Path, tmp_path: Path):
    output = tmp_path / "out.csv"
    command = f"{sys.executable} {' '.join(PREDICT)} --model {model} --input - --output {output}"
    shell(f"printf 'occ1\\nfarmer\\n' | {command}")
    facts = (tmp_path / "out.histocoder.json").read_text()
    assert '"file": "standard input"' in facts and "--input - --output" in facts


def test_several_tables_are_coded_into_a_folder(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    first = write(tmp_path / "a.csv", "occ1", "farmer", "smith")
    second = write(tmp_path / "b.tsv", "occ1", "baker")
    flags = ("--model", model, "--input", first, second, "--output")
    run(*PREDICT, *flags, tmp_path / "coded")
    assert len(read(tmp_path / "coded" / "a.csv")) == 2
    assert (tmp_path / "coded" / "b.tsv").read_text().startswith("occ1\thisco_1\tprob_1")
    assert (tmp_path / "coded" / "b.histocoder.json").is_file()
    assert "names 2 tables; name a folder" in mistake(capsys, "predict", *flags, "out.csv")
    twice = (*flags[:4], first, "--output", tmp_path / "new")
    assert "Two tables of --input" in mistake(capsys, "predict", *twice)
