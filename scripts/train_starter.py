"""Train the model in the box, histocoder/starter, from the project's titles and tables by path.

    python scripts/train_starter.py --tables ../shared/data --save-path starter-run

`--tables` is a folder with the tables that histocoder/starter/NOTICE names; those that are not there
are left out. One part in twenty of each language's descriptions, of English one in ten, is held out:
it judges each language and fits its weights. With `--without TABLE` the model is not finished: how
its confidence holds in that table is written to starter_confidence.json, which calibrates the next
model that is finished. `--small N` keeps about N rows, to try things.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import random
from pathlib import Path

import pandas as pd
from finish_starter import SCALES, VERSION, finish, finished, measure_elsewhere
from text_unidecode import unidecode

from histocoder import MixerConfig, train
from histocoder.formatters.classifications import LEXICON
from histocoder.text.languages import Language
from histocoder.text.normalize import description_keys

ROOT = Path(__file__).parents[1]
TWO_OCCUPATIONS = ROOT / "data" / "two_occupations.csv"
_SPEC = importlib.util.spec_from_file_location("make_data", ROOT / "data" / "make_data.py")
make_data = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(make_data)
TARGETS = ["hisco_1", "hisco_2"]
TABLES = {  # file -> language, where the file has no column of it
    "english_occupations": "en",
    "swedish_titles": "se",
    "dutch_titles": "nl",
    "multilingual_titles": None,
    "swedish_spellings": "se",
}
SHARE_ROUGH = 0.35
"""Share of their titles of which a rough row is made as well."""
ALIASES = {"nn": "no"}
"""Languages that are learned as another: there are few titles in Nynorsk."""
HELD_OUT = {"en": 0.1}
"""Shares of a language's descriptions that are held out; 0.05 of others."""
REPEATS = {"english_occupations": 4}
"""How often the rows of a table are learned from in an epoch."""


def read_table(path: Path, *, source: str, lang: str | None = None) -> pd.DataFrame:
    """Read descriptions, their language and their codes; codes get their leading zeros."""
    table = pd.read_csv(path, dtype=str, keep_default_na=False)
    table = table.rename(columns={"title": "occ1", "hisco": "hisco_1"})
    rows = pd.DataFrame({"occ1": table["occ1"].str.strip()})
    rows["lang"] = lang or table["lang"].map(lambda name: ALIASES.get(name, str(Language(name))))
    for column in TARGETS:
        codes = table[column].str.strip() if column in table else pd.Series("", index=table.index)
        is_digits = codes.str.isdecimal()
        rows[column] = codes.where(~is_digits, codes.str.zfill(5))
    rows["source"] = source
    return rows[(rows["occ1"] != "") & (rows["hisco_1"] != "")]


def read_mixture(tables: Path | None) -> pd.DataFrame:
    """Return the rows of all sources, with the keys of their descriptions."""
    own = [read_table(LEXICON, source="lexicon"), read_table(TWO_OCCUPATIONS, source="two")]
    parts = list(own)
    for name, lang in TABLES.items():
        if tables and (tables / f"{name}.csv").is_file():
            parts.append(read_table(tables / f"{name}.csv", source=name, lang=lang))

    titles = pd.concat(own).drop_duplicates(["occ1", "lang"]).reset_index(drop=True)
    parts.append(rough_rows(titles.sample(frac=SHARE_ROUGH, random_state=0), seed=0))
    rows = pd.concat(parts, ignore_index=True)
    rows = pd.concat([rows, plain_rows(rows, seed=0)], ignore_index=True)
    rows["key"] = description_keys(rows["occ1"].tolist())
    return rows


JOINTS = {
    "da": ["og", "&", "samt", "tillige", "og tillige", ";", "/", ",", "-", "+"],
    "no": ["og", "&", "samt", "tillige", "og tillige", ";", "/", ","],
    "se": ["och", "o.", "&", "samt", "tillika", "jämte", ";", "/", ","],
    "en": ["and", "&", "and also", "also", ";", "/", ","],
    "nl": ["en", "&", "tevens", "en tevens", "ook", ";", "/", ","],
    "ge": ["und", "u.", "&", "und zugleich", "auch", "sowie", ";", "/", ","],
    "fr": ["et", "&", "et aussi", ";", "/", ","],
    "es": ["y", "e", "&", "y también", ";", "/", ","],
    "it": ["e", "ed", "&", "e anche", ";", "/", ","],
    "pt": ["e", "&", "e também", ";", "/", ","],
    "ca": ["i", "&", "i també", ";", "/", ","],
    "is": ["og", "&", "einnig", ";", "/", ","],
    "fi": ["ja", "&", "sekä", ";", "/", ","],
}
"""What registers write between two occupations of a person."""
AGES = {
    "da": ["{} aar", "{} år", "{} Aar gl.", "{} år gammel"],
    "no": ["{} aar", "{} år", "{} Aar", "{} år gammel"],
    "se": ["{} år", "{} åhr", "{} år gammal"],
    "en": ["aged {}", "age {}", "{} yrs", "{} years"],
    "nl": ["{} jaar", "oud {} jaar", "{} jr"],
    "ge": ["{} Jahre", "{} J.", "{} Jahre alt"],
    "fr": ["{} ans", "âgé de {} ans", "{} a."],
    "es": ["{} años", "de {} años"],
    "it": ["{} anni", "d'anni {}"],
    "pt": ["{} anos", "de {} anos"],
    "ca": ["{} anys", "de {} anys"],
    "is": ["{} ára", "{} ára gamall"],
    "fi": ["{} v.", "{} vuotta"],
}
LATIN = {
    *JOINTS,
    "et",
    "hu",
    "lt",
    "lv",
    "pl",
    "cs",
    "sk",
    "sl",
    "hr",
    "ro",
    "mt",
    "ga",
    "gl",
    "eu",
}
SHARE_PLAIN, SHARE_DIGRAPHS = 0.35, 0.3
DIGRAPHS = str.maketrans({"å": "aa", "ä": "ae", "æ": "ae", "ö": "oe", "ø": "oe", "ü": "ue"})
NO_OCCUPATION = "-"  # how the codes begin of those who have none
NUM_PAIRS = 5_000  # rows of two occupations of a language, at most
SHARE_TWO, SHARE_AGE = 0.2, 0.15


def joined(first: str, joint: str, second: str) -> str:
    """Write two occupations with what is between them, which may stand close to the first."""
    if joint in ",;":
        return f"{first}{joint} {second}"
    if joint in "/-+":
        return f"{first}{joint}{second}"
    return f"{first} {joint} {second}"


def rough_rows(titles: pd.DataFrame, *, seed: int) -> pd.DataFrame:
    """Return a row of each title of the project's own as archives might have it: misspelt, with an
    age or a place, or joined with another occupation of the language.
    """
    rng = random.Random(seed)
    titles = titles[titles["lang"].isin(JOINTS)].reset_index(drop=True)
    is_occupation = ~titles["hisco_1"].str.startswith(NO_OCCUPATION) & (titles["hisco_2"] == "")
    partners = {
        lang: list(zip(group["occ1"], group["hisco_1"], strict=True))
        for lang, group in titles[is_occupation].groupby("lang")
    }
    rows = []
    for row in titles.itertuples():
        text = row.occ1
        second_code = row.hisco_2
        steps = make_data.ROUGHENINGS_NONE
        if not row.hisco_1.startswith(NO_OCCUPATION) and row.lang in make_data.AND:
            steps = make_data.ROUGHENINGS
        if is_occupation[row.Index] and rng.random() < SHARE_TWO:
            other, other_code = rng.choice(partners[row.lang])
            if other_code != row.hisco_1:
                text = joined(text, rng.choice(JOINTS[row.lang]), other)
                second_code = other_code
        text = make_data.roughen(text, row.lang, steps, rng)
        if rng.random() < SHARE_AGE:
            age = rng.choice(AGES[row.lang]).format(rng.randrange(1, 90))
            text = f"{text}{rng.choice([' ', ', '])}{age}"
        text = make_data.roughen(text, row.lang, make_data.FINISHES, rng)
        rows.append((text.strip(), row.lang, row.hisco_1, second_code, "rough"))
    return pd.DataFrame(rows, columns=["occ1", "lang", *TARGETS, "source"])


def plain_rows(rows: pd.DataFrame, *, seed: int) -> pd.DataFrame:
    """Return a share of the rows whose letters have marks as transcribers without these letters
    write them: "lädersvarvare" as "ladersvarvare" or "laedersvarvare".
    """
    rng = random.Random(seed)
    is_marked = ~rows["occ1"].map(str.isascii) & rows["lang"].isin(LATIN)
    draws = pd.Series([rng.random() for _ in range(len(rows))], rows.index)
    is_chosen = is_marked & (draws < SHARE_PLAIN)
    texts = []
    for text in rows["occ1"][is_chosen]:
        letters = text.translate(DIGRAPHS) if rng.random() < SHARE_DIGRAPHS else text
        texts.append(unidecode(letters))
    return rows[is_chosen].assign(occ1=texts, source="plain")


def share_of(text: str) -> float:
    """Return a number from 0 to 1 that depends on a text alone."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64


def split(rows: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the rows to train on and those that are held out, by the keys of descriptions.

    Only rows of tables are held out; rows of the project's own that have their keys are left out.
    """
    draws = rows["key"].map(share_of)
    shares = rows["lang"].map(lambda lang: HELD_OUT.get(lang, 0.05))
    is_table = rows["source"].isin(TABLES)
    is_held_out = is_table & (draws < shares)
    keys = set(rows["key"][is_held_out])
    return rows[~rows["key"].isin(keys)], rows[is_held_out]


def balanced(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows with those of small tables several times."""
    parts = [rows]
    for source, times in REPEATS.items():
        parts += [rows[rows["source"] == source]] * (times - 1)
    return pd.concat(parts, ignore_index=True)


def paired_rows(rows: pd.DataFrame, *, seed: int) -> pd.DataFrame:
    """Return rows of two occupations each, joined as registers do, and as many others twice over."""
    rng = random.Random(seed)
    is_single = (rows["hisco_2"] == "") & ~rows["hisco_1"].str.startswith(NO_OCCUPATION)
    singles = rows[is_single & rows["lang"].isin(JOINTS) & (rows["source"] != "rough")]
    pairs = []
    for lang, group in singles.groupby("lang"):
        titles = list(zip(group["occ1"], group["hisco_1"], strict=True))
        for _ in range(min(NUM_PAIRS, len(titles))):
            (first, first_code), (second, second_code) = rng.sample(titles, 2)
            if first_code != second_code:
                text = joined(first, rng.choice(JOINTS[lang]), second)
                pairs.append((text, lang, first_code, second_code, "pairs"))
    columns = ["occ1", "lang", *TARGETS, "source"]
    others = rows.sample(min(2 * len(pairs), len(rows)), random_state=seed)[columns]
    return pd.concat([pd.DataFrame(pairs, columns=columns), others], ignore_index=True)


def train_on_pairs(run: Path) -> None:
    """Train a run's model further on rows of two occupations, of which tables of titles have none."""
    folder = run / "rows"
    rows = pd.read_csv(folder / "train.csv", dtype=str, keep_default_na=False)
    paired_rows(rows, seed=0).to_csv(folder / "pairs.csv", index=False)
    config = MixerConfig(
        train_data=(str(folder / "pairs.csv"),),
        val_data=(str(folder / "val.csv"),),
        save_dir=str(run / "pairs"),
        formatter="general",
        target_cols=tuple(TARGETS),
        key=str(run / "key.csv"),
        initial_checkpoint=str(run),
        num_epochs=1,
        batch_size=64,
        seq2seq_weight=0.5,
        repeats="all",
        no_report=True,
        no_experts=True,
        eval_interval=100_000,
        save_interval=100_000,
    )
    train(config)


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tables", type=Path, help="folder of the tables")
    parser.add_argument("--save-path", type=Path, default=Path("starter-run"))
    parser.add_argument("--output", type=Path, help="folder to write the finished model to")
    parser.add_argument("--version", default=VERSION, help="of the model")
    parser.add_argument(
        "--data", nargs="*", default=[], help="files to measure on, FILE or LANG:FILE"
    )
    parser.add_argument("--leave-out", nargs="*", default=[], help="languages to leave out")
    parser.add_argument(
        "--without", nargs="*", default=[], help="tables to leave out, to calibrate by"
    )
    parser.add_argument("--small", type=int, help="number of rows to keep, about")
    parser.add_argument("--num-epochs", type=int, default=5)
    parser.add_argument("--no-repeats", action="store_true", help="read each row once")
    parser.add_argument("--prepare-only", action="store_true")
    return parser.parse_args()


def main() -> None:
    """Make the mixture, and train on it."""
    args = parse_args()
    rows = read_mixture(args.tables)
    rows = rows[~rows["lang"].isin(args.leave_out) & ~rows["source"].isin(args.without)]
    if args.small:
        is_kept = rows["key"].map(lambda key: share_of(f"small {key}")) < args.small / len(rows)
        rows = rows[is_kept | (rows["source"] == "english_occupations")]
    train_rows, val_rows = split(rows)
    if not args.no_repeats:
        train_rows = balanced(train_rows)
    folder = args.save_path / "rows"
    folder.mkdir(parents=True, exist_ok=True)
    columns = ["occ1", "lang", *TARGETS, "source"]
    train_rows[columns].to_csv(folder / "train.csv", index=False)
    val_rows[columns].to_csv(folder / "val.csv", index=False)
    print(train_rows.groupby("source").size().to_string())
    print(f"{len(train_rows):,} rows to train on, {len(val_rows):,} held out")
    if args.prepare_only:
        return
    config = MixerConfig(
        train_data=(str(folder / "train.csv"),),
        val_data=(str(folder / "val.csv"),),
        save_dir=str(args.save_path),
        formatter="general",
        target_cols=tuple(TARGETS),
        encoder="ngram",
        num_epochs=args.num_epochs,
        batch_size=64,
        max_epoch_steps=200,
        seq2seq_weight=0.1,
        repeats="all",
        no_report=True,
        save_interval=100_000,
        keep_checkpoints=1,
        eval_interval=5_000,
        seed=1,
    )
    train(config)
    train_on_pairs(args.save_path)
    if args.without:
        left_out = [f"{TABLES[name] or ''}:{args.tables / name}.csv" for name in args.without]
        measure_elsewhere(finished(args.save_path), left_out, SCALES)
    else:
        finish(args.save_path, output=args.output, data=args.data, version=args.version)


if __name__ == "__main__":
    main()
