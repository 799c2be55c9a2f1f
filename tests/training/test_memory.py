"""Where memory runs out, a run says what to try."""

from pathlib import Path

from conftest import refused, run
from jobs import faulty, finetune, leftovers, two_ranks

STEPS = ("--max-steps", 6, "--eval-interval", 3, "--save-interval", 3, "--dropout", 0.1)


def test_out_of_memory_says_what_to_try(table: Path, tmp_path: Path):
    said = refused(*faulty(finetune(table, tmp_path / "out", *STEPS, "--batch-size", 8), "memory:0:5"))
    assert "error: Out of memory (" in said and "1000000000000000 bytes" in said and said.count("\n") == 1
    assert "halve --batch-size and double --gradient-accumulation-steps" in said
    again = run(*finetune(table, tmp_path / "out", *STEPS, "--batch-size", 4, "--gradient-accumulation-steps", 2))
    assert "Resuming from step 3" in again.stdout


def test_out_of_memory_on_one_rank_ends_all(table: Path, tmp_path: Path):
    args = finetune(table, tmp_path / "out", *STEPS, "--batch-size", 8)
    ended = two_ranks(faulty(args, "memory:1:5"), check=False)
    assert [one.returncode for one in ended] == [2, 2] and not leftovers(tmp_path / "out")
    said = "".join(one.stderr for one in ended)
    assert said.count("Out of memory") == 1 and "Traceback" not in said
