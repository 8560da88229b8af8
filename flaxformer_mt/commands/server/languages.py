"""The languages of a server: names of language codes, and the choice of models for a request."""

from collections.abc import Collection, Mapping
from typing import TypeVar

from starlette.exceptions import HTTPException

Model = TypeVar("Model")
# Source and target language of a model.
Pair = tuple[str, str]
# A source language that the server is to find itself.
AUTO = "auto"
# ISO 639-1 code -> English name.
_NAMES = dict(
    pair.split("=")
    for pair in """
    af=Afrikaans am=Amharic ar=Arabic az=Azerbaijani be=Belarusian bg=Bulgarian bn=Bengali bs=Bosnian
    ca=Catalan cs=Czech cy=Welsh da=Danish de=German el=Greek en=English eo=Esperanto es=Spanish
    et=Estonian eu=Basque fa=Persian fi=Finnish fr=French ga=Irish gl=Galician gu=Gujarati ha=Hausa
    he=Hebrew hi=Hindi hr=Croatian hu=Hungarian hy=Armenian id=Indonesian ig=Igbo is=Icelandic it=Italian
    ja=Japanese ka=Georgian kk=Kazakh km=Khmer kn=Kannada ko=Korean ky=Kyrgyz la=Latin lb=Luxembourgish
    lo=Lao lt=Lithuanian lv=Latvian mg=Malagasy mk=Macedonian ml=Malayalam mn=Mongolian mr=Marathi
    ms=Malay mt=Maltese my=Burmese nb=Norwegian ne=Nepali nl=Dutch nn=Nynorsk no=Norwegian oc=Occitan
    pa=Punjabi pl=Polish ps=Pashto pt=Portuguese ro=Romanian ru=Russian rw=Kinyarwanda si=Sinhala
    sk=Slovak sl=Slovenian so=Somali sq=Albanian sr=Serbian sv=Swedish sw=Swahili ta=Tamil te=Telugu
    tg=Tajik th=Thai tl=Tagalog tr=Turkish uk=Ukrainian ur=Urdu uz=Uzbek vi=Vietnamese xh=Xhosa
    yi=Yiddish yo=Yoruba zh=Chinese zu=Zulu
    """.split()
)


def name_language(code: str) -> str:
    """Return the English name of a language, or the code if it is unknown: de gives German, xx gives xx."""
    return _NAMES.get(_fold_code(code).partition("-")[0], code)


def list_languages(pairs: Collection[Pair]) -> list[dict[str, object]]:
    """List each language with its target languages; languages that can only be targets come last."""
    targets: dict[str, list[str]] = {code: [] for side in zip(*pairs, strict=True) for code in side}
    for source, target in pairs:
        targets[source].append(target)
    return [{"code": code, "name": name_language(code), "targets": codes} for code, codes in targets.items()]


def find_models(models: Mapping[Pair, Model], source: str, target: str) -> dict[str, Model]:
    """Return a dict from source languages to models: one entry, or several if `source` is AUTO."""
    matches = {
        code: model
        for (code, to), model in models.items()
        if _fold_code(to) == _fold_code(target) and _fold_code(source) in (_fold_code(code), AUTO)
    }
    if not matches:
        known = ", ".join(f"{first}-{second}" for first, second in models)
        message = f"no model translates from {source!r:.20} to {target!r:.20}; this server has {known}"
        raise HTTPException(400, message)
    return matches


def _fold_code(code: str) -> str:
    """Return the normal form of a language code; clients also send EN, zh-hans or pt_BR."""
    return code.replace("_", "-").lower()
