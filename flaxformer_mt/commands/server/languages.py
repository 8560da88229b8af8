"""The languages of a server's models: names of codes, and which model translates a request."""

from collections.abc import Iterable, Mapping
from typing import TypeVar

from flaxformer_mt.commands.server.request_fields import Refusal

Model = TypeVar("Model")

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

# A source language that the server is to find itself.
AUTO = "auto"

# Source and target language of a model.
Pair = tuple[str, str]


def name_language(code: str) -> str:
    """Return the English name of a language; of an unknown code, the code: de gives German, xx gives xx."""
    return _NAMES.get(code.replace("_", "-").partition("-")[0].lower(), code)


def list_languages(pairs: Iterable[Pair]) -> list[dict[str, object]]:
    """Return the source languages, each with its name and the languages that it is translated to."""
    targets: dict[str, list[str]] = {}
    for source, target in pairs:
        targets.setdefault(source, []).append(target)
    return [{"code": code, "name": name_language(code), "targets": found} for code, found in targets.items()]


def find_models(models: Mapping[Pair, Model], source: str, target: str) -> dict[str, Model]:
    """Return the models that may translate a request, by their source language: one, unless it is AUTO.

    Raises:
      Refusal: there is none.
    """
    found = {own: model for (own, to), model in models.items() if to == target and source in (own, AUTO)}
    if not found:
        known = ", ".join(f"{one}-{other}" for one, other in models)
        raise Refusal(
            400, f"no model translates from {source!r:.20} to {target!r:.20}; this server has {known}"
        )
    return found
