"""Codes and names of languages, in one table for training and predicting."""

import difflib
import re
from collections.abc import Collection

from histocoder.data.cells import MISSING_MARKS
from histocoder.errors import UserError, shown

_ISO_639_1 = """
aa Afar, ab Abkhazian, ae Avestan, af Afrikaans, ak Akan, am Amharic, an Aragonese, ar Arabic, as Assamese, av Avaric,
ay Aymara, az Azerbaijani, ba Bashkir, be Belarusian, bg Bulgarian, bi Bislama, bm Bambara, bn Bengali, bo Tibetan,
br Breton, bs Bosnian, ca Catalan, ce Chechen, ch Chamorro, co Corsican, cr Cree, cs Czech, cu Church Slavonic,
cv Chuvash, cy Welsh, da Danish, de German, dv Divehi, dz Dzongkha, ee Ewe, el Greek, en English, eo Esperanto,
es Spanish, et Estonian, eu Basque, fa Persian, ff Fulah, fi Finnish, fj Fijian, fo Faroese, fr French,
fy Western Frisian, ga Irish, gd Scottish Gaelic, gl Galician, gn Guarani, gu Gujarati, gv Manx, ha Hausa, he Hebrew,
hi Hindi, ho Hiri Motu, hr Croatian, ht Haitian, hu Hungarian, hy Armenian, hz Herero, ia Interlingua, id Indonesian,
ie Interlingue, ig Igbo, ii Sichuan Yi, ik Inupiaq, io Ido, is Icelandic, it Italian, iu Inuktitut, ja Japanese,
jv Javanese, ka Georgian, kg Kongo, ki Kikuyu, kj Kuanyama, kk Kazakh, kl Greenlandic, km Khmer, kn Kannada, ko Korean,
kr Kanuri, ks Kashmiri, ku Kurdish, kv Komi, kw Cornish, ky Kyrgyz, la Latin, lb Luxembourgish, lg Ganda, li Limburgish,
ln Lingala, lo Lao, lt Lithuanian, lu Luba-Katanga, lv Latvian, mg Malagasy, mh Marshallese, mi Maori, mk Macedonian,
ml Malayalam, mn Mongolian, mr Marathi, ms Malay, mt Maltese, my Burmese, na Nauru, nb Norwegian Bokmål,
nd North Ndebele, ne Nepali, ng Ndonga, nl Dutch, nn Norwegian Nynorsk, no Norwegian, nr South Ndebele, nv Navajo,
ny Chichewa, oc Occitan, oj Ojibwa, om Oromo, or Oriya, os Ossetian, pa Punjabi, pi Pali, pl Polish, ps Pashto,
pt Portuguese, qu Quechua, rm Romansh, rn Rundi, ro Romanian, ru Russian, rw Kinyarwanda, sa Sanskrit, sc Sardinian,
sd Sindhi, sg Sango, si Sinhala, sk Slovak, sl Slovenian, sm Samoan, sn Shona, so Somali, sq Albanian, sr Serbian,
ss Swati, st Southern Sotho, su Sundanese, sv Swedish, sw Swahili, ta Tamil, te Telugu, tg Tajik, th Thai, ti Tigrinya,
tk Turkmen, tl Tagalog, tn Tswana, to Tonga, tr Turkish, ts Tsonga, tt Tatar, tw Twi, ty Tahitian, ug Uyghur,
uk Ukrainian, ur Urdu, uz Uzbek, ve Venda, vi Vietnamese, vo Volapük, wa Walloon, wo Wolof, xh Xhosa, yi Yiddish,
yo Yoruba, za Zhuang, zh Chinese, zu Zulu
"""
NAMES: dict[str, str] = dict(entry.strip().split(" ", 1) for entry in _ISO_639_1.split(","))
"""ISO 639-1 code -> English name, without Northern Sami, whose code OccCANINE uses for Swedish."""
_OCCCANINE = {"sv": "se", "de": "ge", "el": "gr"}  # ISO 639-1 -> OccCANINE's own, as published weights were trained
_ISO = {code: iso for iso, code in _OCCCANINE.items()}
_BY_NAME = {name.casefold(): code for code, name in NAMES.items()} | {"unknown": "unk"}
_SAMPLE = ("ca", "da", "en", "es", "fr", "de", "el", "is", "it", "nl", "no", "pt", "sv")  # those of OccCANINE
HELP = (
    "Languages: "
    + ", ".join(f"{c} (or {_OCCCANINE[c]}) {NAMES[c]}" if c in _OCCCANINE else f"{c} {NAMES[c]}" for c in _SAMPLE)
    + "; any other by its ISO 639-1 code; all by their English names, too; unk where it is not known."
)


def language_code(text: str) -> str:
    """Return the code that models are trained with for a language given by a code or its English name.

    A text that is not a language of the table is only stripped of blanks; a missing one is "unk".

    Examples
    --------
    >>> [language_code(text) for text in ("Danish", "EN", "en-GB", "sv", "se", "NA", "plattdeutsch")]
    ['da', 'en', 'en', 'se', 'se', 'unk', 'plattdeutsch']
    """
    text = text.strip()
    if not text or text in MISSING_MARKS:
        return "unk"
    word = text.casefold()
    code = _BY_NAME.get(word) or re.split("[-_]", word)[0]
    code = _OCCCANINE.get(code, code)
    return code if is_language(code) else text


def is_language(code: str) -> bool:
    """Return whether a result of `language_code` is a language of the table, or "unk"."""
    return code == "unk" or iso_code(code) in NAMES


def chosen_language(text: str, known: Collection[str] = ()) -> str:
    """Return the code of a language that is chosen for all descriptions.

    Raises UserError if it is neither in the table nor among a model's, which are `known`.
    """
    code = language_code(text)
    if not is_language(code) and code not in map(language_code, known):
        raise UserError(not_in_table([text]))
    return code


def not_in_table(languages: Collection[str]) -> str:
    """Return a message on languages that are not in the table, with the nearest that are.

    Examples
    --------
    >>> not_in_table(["Englsh"]).partition(".")[0]
    "Languages that histocoder does not know: 'Englsh' (did you mean English, en?)"
    """
    few = ", ".join(map(with_nearest, sorted(languages)[:10]))
    return (
        f"Languages that histocoder does not know: {few}{', …' * (len(languages) > 10)}. Give an ISO 639-1 code or an "
        "English name (docs/configuration.md lists them), and unk where the language is not known."
    )


def own_languages(codes: Collection[str]) -> str:
    """Return a notice on languages of training data that are not in the table; nothing if all are."""
    strange = [code for code in codes if not is_language(code)]
    return f"{not_in_table(strange)} They are trained as languages of their own." if strange else ""


def with_nearest(language: str) -> str:
    """Return a language as messages name it; if it is not in the table, with the nearest that is."""
    near = [] if is_language(language_code(language)) else difflib.get_close_matches(language.casefold(), _BY_NAME, n=1)
    hint = "".join(f" (did you mean {name.title()}, {_BY_NAME[name]}?)" for name in near)
    return f"{shown(language)}{hint}"


def iso_code(code: str) -> str:
    """Return the ISO 639-1 code of a language that models are trained with; others as they are."""
    return _ISO.get(code, code)


def known_language(lang: str, languages: Collection[str]) -> str:
    """Return a model's own code for a language, "unk" if it is not among those that the model knows.

    A model that does not say which ones it knows is given the language's code.

    Examples
    --------
    >>> [known_language("Swedish", known) for known in (("da", "sv"), ("da", "se"), ("da",), ())]
    ['sv', 'se', 'unk', 'se']
    """
    code = language_code(lang)
    return next((own for own in languages if language_code(own) == code), "unk") if languages else code
