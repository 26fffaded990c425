"""Languages that are spoken: their codes by ISO 639 and their English names."""

from __future__ import annotations

from typing import Final

_KNOWN = """
    af Afrikaans, sq Albanian, am Amharic, ar Arabic, hy Armenian, as Assamese, az Azerbaijani, ba Bashkir,
    eu Basque, be Belarusian, bn Bengali, bs Bosnian, br Breton, bg Bulgarian, my Burmese, yue Cantonese,
    ca Catalan, zh Chinese, hr Croatian, cs Czech, da Danish, nl Dutch, en English, et Estonian, fo Faroese,
    fil Filipino, fi Finnish, fr French, gl Galician, ka Georgian, de German, el Greek, gu Gujarati,
    ht Haitian Creole, ha Hausa, haw Hawaiian, he Hebrew, hi Hindi, hu Hungarian, is Icelandic, id Indonesian,
    ga Irish, it Italian, ja Japanese, jv Javanese, kn Kannada, kk Kazakh, km Khmer, ko Korean, lo Lao, la Latin,
    lv Latvian, ln Lingala, lt Lithuanian, lb Luxembourgish, mk Macedonian, mg Malagasy, ms Malay, ml Malayalam,
    mt Maltese, mi Maori, mr Marathi, mn Mongolian, ne Nepali, no Norwegian, nn Nynorsk, oc Occitan, ps Pashto,
    fa Persian, pl Polish, pt Portuguese, pa Punjabi, ro Romanian, ru Russian, sa Sanskrit, sr Serbian, sn Shona,
    sd Sindhi, si Sinhala, sk Slovak, sl Slovenian, so Somali, es Spanish, su Sundanese, sw Swahili, sv Swedish,
    tl Tagalog, tg Tajik, ta Tamil, tt Tatar, te Telugu, th Thai, bo Tibetan, tr Turkish, tk Turkmen, uk Ukrainian,
    ur Urdu, uz Uzbek, vi Vietnamese, cy Welsh, yi Yiddish, yo Yoruba
"""
LANGUAGES: Final = dict(each.split(maxsplit=1) for each in _KNOWN.strip().split(","))
"""English names by code: two letters, or three for languages without a code of two."""
_CODES = {name.lower(): code for code, name in LANGUAGES.items()}


def code_of(language: str) -> str | None:
    """The code of a language that is given by its code or its English name; None: it is not known.

    >>> code_of("German"), code_of("DE"), code_of("Klingon")
    ('de', 'de', None)
    """
    known = language.strip().lower()
    return known if known in LANGUAGES else _CODES.get(known)
