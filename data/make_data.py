"""Makes the sample data, train.csv and val.csv, from titles.csv.

Each row begins as one title, or two, and is then roughened as archives are: misspelt, misread,
abbreviated, with a note that the person was dead or retired, or with a place. About half of the
rows stay clean or nearly so. The titles of validation never occur in training. The same seed always
gives the same files.
"""

import argparse
import csv
import random
import unicodedata
from collections import Counter, defaultdict
from pathlib import Path

HERE = Path(__file__).resolve().parent
TITLES = HERE.parent / "histocoder" / "formatters" / "titles.csv"
COLUMNS = ["occ1", "lang", *(f"hisco_{i}" for i in range(1, 6))]

SHARE_VAL = 0.1  # of the titles of each code
SHARE_CLEAN = 0.5  # of the rows
SHARE_TWO = 0.12  # of the rows, with two occupations

# The most frequent codes first: farmers, day labourers, servants, sailors, shoemakers, tailors and
# so on. The n-th of them comes as often as 1 / (n + 2) says, each of the others as RARE says.
COMMON = (
    "61110 99920 54010 98135 80110 79100 95410 62105 83110 58340 41025 75400 77610 "
    "61115 64100 41030 98620 14120 71105 "
    "93120 77310 81930 39310 77120 75220 51050 62740 13020 76145 58220 79510 56010 "
    "53100 81120 80320 57030 99930 81925"
).split()
RARE = 0.005
LANGUAGES = {
    "en": 4,
    "da": 3,
    "se": 2,
    "nl": 2,
    "fr": 2,
    "ge": 2,
}  # how often each comes, others once

AND = {
    "en": ["and", "&"],
    "da": ["og", "samt"],
    "se": ["och", "samt"],
    "nl": ["en", "&"],
    "fr": ["et", "&"],
    "ge": ["und", "u."],
    "no": ["og", "samt"],
    "is": ["og"],
    "es": ["y"],
    "it": ["e"],
    "pt": ["e"],
    "ca": ["i"],
}
BEFORE = {
    "en": ["late", "former", "retired", "formerly"],
    "da": ["fhv.", "forhen", "afdøde", "forhenværende"],
    "se": ["f.d.", "avlidne", "förre", "fd"],
    "nl": ["gewezen", "wijlen", "oud", "voormalig"],
    "fr": ["feu", "ancien", "ci-devant"],
    "ge": ["weiland", "ehemaliger", "gewesener", "früher"],
    "no": ["fhv.", "forhenværende", "avdøde"],
    "is": ["fyrrverandi", "fyrrum", "fv."],
    "es": ["antiguo", "difunto", "antes"],
    "it": ["fu", "già", "ex"],
    "pt": ["antigo", "falecido", "ex"],
    "ca": ["antic", "difunt", "abans"],
}
AFTER = {
    "en": ["(deceased)", "(retired)", "decd", "unemployed"],
    "da": ["(afdød)", "afdød", "pensionist", "(død)"],
    "se": ["(avliden)", "död", "pensionär"],
    "nl": ["(overleden)", "overleden", "gepensioneerd"],
    "fr": ["(décédé)", "décédé", "en retraite"],
    "ge": ["(verstorben)", "verstorben", "a. D.", "im Ruhestand"],
    "no": ["(avdød)", "avdød", "pensjonist"],
    "is": ["(látinn)", "látinn"],
    "es": ["(difunto)", "retirado", "fallecido"],
    "it": ["(defunto)", "defunto", "in pensione"],
    "pt": ["(falecido)", "falecido", "reformado"],
    "ca": ["(difunt)", "difunt", "retirat"],
}
PLACES = {
    "en": ["of Leeds", "at Bristol", "in this parish", "in the village"],
    "da": ["i Odense", "i Ribe", "paa Fyn", "her i sognet"],
    "se": ["i Uppsala", "i Kalmar", "i staden", "i socknen"],
    "nl": ["te Utrecht", "te Delft", "alhier", "in het dorp"],
    "fr": ["à Lyon", "à Rouen", "en cette ville", "dans la paroisse"],
    "ge": ["zu Köln", "in Ulm", "in hiesiger Stadt", "im Dorfe"],
    "no": ["i Bergen", "i Molde", "i sognet", "paa stedet"],
    "is": ["á Akureyri", "í Reykjavík", "í sveitinni"],
    "es": ["en Sevilla", "de Burgos", "en esta villa", "vecino de Lugo"],
    "it": ["a Torino", "di Lucca", "nel paese", "in questa parrocchia"],
    "pt": ["em Coimbra", "de Braga", "nesta vila", "desta freguesia"],
    "ca": ["a Girona", "de Reus", "en aquesta vila", "d'aquesta parròquia"],
}
EMPLOYERS = {
    "en": ["at Messrs Hall & Son", "employed by Mr Cole"],
    "da": ["hos hr. Holm", "ved firmaet Lund & Co."],
    "se": ["hos herr Berg", "vid firman Lind & Co."],
    "nl": ["bij de heer Smit", "bij firma De Wit"],
    "fr": ["chez M. Roux", "de la maison Petit"],
    "ge": ["bei Herrn Vogt", "bei Firma Braun & Co."],
    "no": ["hos herr Dahl", "ved firma Lie & Co."],
    "is": ["hjá Jóni", "hjá Helga & Co."],
    "es": ["en casa de Ruiz", "en la casa Vidal y Cía."],
    "it": ["presso la ditta Neri", "presso il sig. Conti"],
    "pt": ["em casa de Sousa", "na firma Lopes & C.ª"],
    "ca": ["a casa Puig", "a can Serra i Cia."],
}
CRAFTS = ("7", "8", "9")  # how the codes begin of those who may have an employer named

SWAPS = {"c": "k", "k": "c", "v": "w", "w": "v", "i": "j", "j": "i"}
MISREAD = {
    "a": "o",
    "b": "h",
    "e": "c",
    "h": "k",
    "l": "t",
    "m": "n",
    "n": "u",
    "o": "a",
    "r": "v",
    "t": "l",
    "u": "n",
}
PLAIN = {"æ": "ae", "ø": "o", "å": "aa", "ß": "ss", "ð": "d", "þ": "th", "œ": "oe"}


def read_titles(path):
    """Read titles.csv as a list of (title, lang, hisco), sorted."""
    with path.open(encoding="utf-8", newline="") as file:
        return sorted((row["title"], row["lang"], row["hisco"]) for row in csv.DictReader(file))


def split_titles(titles, rng):
    """Split titles into those of training and of validation, code by code.

    Titles that differ only in case, or in language, stay together. A code with fewer than four
    titles is for training only, so that each code of validation can be learned.
    """
    together = defaultdict(list)
    for entry in titles:
        together[entry[0].casefold()].append(entry)
    by_code = defaultdict(list)
    for name in sorted(together):
        by_code[min(code for _, _, code in together[name])].append(name)

    train, val = [], []
    for code in sorted(by_code):
        names = by_code[code]
        rng.shuffle(names)
        num_val = int(SHARE_VAL * len(names) + rng.random()) if len(names) >= 4 else 0
        for i, name in enumerate(names):
            (val if i < num_val else train).extend(together[name])
    return sorted(train), sorted(val)


def change_one(text, rng, changes):
    """Apply one of some changes of a letter at a random place; `changes` maps a letter to
    another.
    """
    places = [i for i, letter in enumerate(text) if i and letter in changes]
    if not places:
        return text
    i = rng.choice(places)
    return text[:i] + changes[text[i]] + text[i + 1 :]


def double_letter(text, rng):
    """Write a letter twice."""
    return change_one(text, rng, {letter: 2 * letter for letter in text if letter.isalpha()})


def drop_letter(text, rng):
    """Leave a letter out."""
    return change_one(text, rng, {letter: "" for letter in text if letter.isalpha()})


def swap_neighbours(text, rng):
    """Let two neighbouring letters change places."""
    places = [i for i in range(1, len(text) - 1) if text[i : i + 2].isalpha()]
    if not places:
        return text
    i = rng.choice(places)
    return text[:i] + text[i + 1] + text[i] + text[i + 2 :]


def misread(text, rng):
    """Take a letter for one that looks like it."""
    return change_one(text, rng, MISREAD)


def old_spelling(text, rng):
    """Exchange c and k, v and w, or i and j."""
    return change_one(text, rng, SWAPS)


def long_s(text, rng):
    """Read each long s, one that does not end a word, as f."""
    return "".join(
        "f" if a == "s" and b.isalpha() else a for a, b in zip(text, text[1:] + " ", strict=True)
    )


def lose_diacritics(text, rng):
    """Write plain letters."""
    text = "".join(PLAIN.get(letter, letter) for letter in text)
    return "".join(a for a in unicodedata.normalize("NFD", text) if not unicodedata.combining(a))


SPELLINGS = [
    double_letter,
    drop_letter,
    swap_neighbours,
    misread,
    misread,
    old_spelling,
    old_spelling,
    long_s,
]


def misspell(text, lang, rng):
    """Misspell or misread a text in one way; very short ones are left alone."""
    if len(text) < 5:
        return text
    if not text.isascii() and rng.random() < 0.5:
        return lose_diacritics(text, rng)
    return rng.choice(SPELLINGS)(text, rng)


def abbreviate(text, lang, rng):
    """Cut one long word short."""
    words = text.split(" ")
    long_words = [i for i, word in enumerate(words) if len(word) >= 9 and word.isalpha()]
    if long_words:
        i = rng.choice(long_words)
        words[i] = words[i][: 5 + int(rng.random() * (len(words[i]) - 6))] + "."
    return " ".join(words)


def change_case(text, lang, rng):
    """Write with a capital, as a heading, in capitals or in lower case."""
    return rng.choice([str.capitalize, str.capitalize, str.title, str.upper, str.lower])(text)


def add_blanks(text, lang, rng):
    """Put blanks where none belong."""
    return rng.choice(
        [
            f" {text}",
            f"{text} ",
            f"{text}  ",
            text.replace(" ", "  ") if " " in text else f" {text} ",
        ]
    )


def add_note(text, lang, rng):
    """Say that the person is dead, retired or something like it."""
    if rng.random() < 0.5:
        return f"{rng.choice(BEFORE[lang])} {text}"
    return f"{text}{rng.choice([' ', ' ', ', '])}{rng.choice(AFTER[lang])}"


def add_place(text, lang, rng):
    """Say where the person works."""
    return f"{text}{rng.choice([' ', ' ', ', '])}{rng.choice(PLACES[lang])}"


def add_place_or_employer(text, lang, rng):
    """Say where or for whom the person works."""
    return f"{text}{rng.choice([' ', ' ', ', '])}{rng.choice(PLACES[lang] + EMPLOYERS[lang])}"


# In the order in which they are applied, each with how often it is chosen.
ROUGHENINGS = [(misspell, 0.55), (abbreviate, 0.06), (add_note, 0.22), (add_place, 0.18)]
ROUGHENINGS_CRAFTS = [*ROUGHENINGS[:-1], (add_place_or_employer, 0.18)]
ROUGHENINGS_NONE = [(misspell, 0.3)]  # of those without an occupation
FINISHES = [(change_case, 0.12), (add_blanks, 0.05)]


def roughen(text, lang, steps, rng):
    """Apply each of some steps by its own chance."""
    for step, chance in steps:
        if rng.random() < chance:
            text = step(text, lang, rng)
    return text


def make_row(entry, partners, rng):
    """Make one row: a description, its language and its codes.

    `entry` is the title it is of; `partners` are titles of the same side and language, of which a
    second may come.
    """
    title, lang, code = entry
    codes = [code]
    steps = ROUGHENINGS_CRAFTS if code.startswith(CRAFTS) else ROUGHENINGS
    if code.startswith("-"):
        steps = ROUGHENINGS_NONE
    elif rng.random() < SHARE_TWO:
        others = [entry for entry in partners if entry[2] != code and not entry[2].startswith("-")]
        second, _, second_code = rng.choices(others, weigh(others))[0]
        joint = ", " if rng.random() < 0.15 else f" {rng.choice(AND[lang])} "
        title += joint + second
        codes.append(second_code)
    if rng.random() >= SHARE_CLEAN:
        title = roughen(title, lang, steps, rng)
    title = roughen(title, lang, FINISHES, rng)
    return [title, lang, *codes, *[""] * (5 - len(codes))]


def key_of(text):
    """What two descriptions share that differ only in case and outer blanks."""
    return text.strip().casefold()


def weigh(titles):
    """How often each title comes: by its code and its language, with which the titles of both share
    alike.
    """
    alike = Counter((code, lang) for _, lang, code in titles)
    rank = {code: n for n, code in enumerate(COMMON)}
    often = {code: 1 / (rank[code] + 2) if code in rank else RARE for _, _, code in titles}
    return [LANGUAGES.get(lang, 1) * often[code] / alike[code, lang] for _, lang, code in titles]


def make_rows(titles, num_rows, taken, rng):
    """Make rows; they repeat each other as those of archives do, but none repeats a taken one.

    `taken` is a set of keys, see `key_of`.
    """
    by_lang = defaultdict(list)
    for entry in titles:
        by_lang[entry[1]].append(entry)
    rows = []
    while len(rows) < num_rows:
        for entry in rng.choices(titles, weigh(titles), k=num_rows - len(rows)):
            row = make_row(entry, by_lang[entry[1]], rng)
            if key_of(row[0]) not in taken:
                rows.append(row)
    return rows


def write_rows(path, rows):
    """Write rows as CSV."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(rows)


def parse_args(argv=None):
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Make train.csv and val.csv from titles.csv.")
    parser.add_argument(
        "--seed", type=int, default=1, help="seed of all chance (default: %(default)s)"
    )
    parser.add_argument(
        "--train-rows", type=int, default=12_000, help="rows of train.csv (default: %(default)s)"
    )
    parser.add_argument(
        "--val-rows", type=int, default=1_200, help="rows of val.csv (default: %(default)s)"
    )
    parser.add_argument(
        "--out-dir", type=Path, default=HERE, help="folder to write to (default: this script's)"
    )
    return parser.parse_args(argv)


def main(argv=None):
    """Make both files."""
    args = parse_args(argv)
    rng = random.Random(args.seed)
    train_titles, val_titles = split_titles(read_titles(TITLES), rng)
    train = make_rows(train_titles, args.train_rows, set(), rng)
    val = make_rows(val_titles, args.val_rows, {key_of(row[0]) for row in train}, rng)
    args.out_dir.mkdir(parents=True, exist_ok=True)
    write_rows(args.out_dir / "train.csv", train)
    write_rows(args.out_dir / "val.csv", val)
    print(
        f"{len(train):,} rows of {len(train_titles):,} titles to train on, in "
        f"{args.out_dir / 'train.csv'}"
    )
    print(
        f"{len(val):,} rows of {len(val_titles):,} titles to validate on, in "
        f"{args.out_dir / 'val.csv'}"
    )


if __name__ == "__main__":
    main()
