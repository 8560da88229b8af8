"""Formats of language tags in families of models, and whether they are before sources or targets.

| style | tag of de | before sources | before targets |
|---|---|---|---|
| opus | `>>de<<`, `<from:de>` | target language, or both | |
| madlad | `<2de>` | target language | |
| t5 | `translate English to German:` | both | |
| m2m_100 | `__de__` | source language | target language |
| nllb | `deu_Latn` | source language | target language |
| mbart_50 | `de_DE` | source language | target language |
"""

import re
from typing import Literal

from flaxformer_mt.errors import UserError

TagStyle = Literal["opus", "madlad", "t5", "m2m_100", "nllb", "mbart_50"]

# Styles with a tag before both sides of a pair.
BOTH_SIDES = ("m2m_100", "nllb", "mbart_50")

# Two-letter code (ISO 639-1) -> code of FLORES-200, of the script in which the language is usually written.
_NLLB = dict(
    pair.split("=")
    for pair in """
    af=afr_Latn am=amh_Ethi ar=arb_Arab as=asm_Beng ay=ayr_Latn az=azj_Latn ba=bak_Cyrl be=bel_Cyrl
    bg=bul_Cyrl bm=bam_Latn bn=ben_Beng bo=bod_Tibt bs=bos_Latn ca=cat_Latn cs=ces_Latn cy=cym_Latn
    da=dan_Latn de=deu_Latn dz=dzo_Tibt ee=ewe_Latn el=ell_Grek en=eng_Latn eo=epo_Latn es=spa_Latn
    et=est_Latn eu=eus_Latn fa=pes_Arab ff=fuv_Latn fi=fin_Latn fj=fij_Latn fo=fao_Latn fr=fra_Latn
    ga=gle_Latn gd=gla_Latn gl=glg_Latn gn=grn_Latn gu=guj_Gujr ha=hau_Latn he=heb_Hebr hi=hin_Deva
    hr=hrv_Latn ht=hat_Latn hu=hun_Latn hy=hye_Armn id=ind_Latn ig=ibo_Latn is=isl_Latn it=ita_Latn
    ja=jpn_Jpan jv=jav_Latn ka=kat_Geor kg=kon_Latn ki=kik_Latn kk=kaz_Cyrl km=khm_Khmr kn=kan_Knda
    ko=kor_Hang ks=kas_Arab ku=kmr_Latn ky=kir_Cyrl lb=ltz_Latn lg=lug_Latn li=lim_Latn ln=lin_Latn
    lo=lao_Laoo lt=lit_Latn lv=lvs_Latn mg=plt_Latn mi=mri_Latn mk=mkd_Cyrl ml=mal_Mlym mn=khk_Cyrl
    mr=mar_Deva ms=zsm_Latn mt=mlt_Latn my=mya_Mymr nb=nob_Latn ne=npi_Deva nl=nld_Latn nn=nno_Latn
    no=nob_Latn ny=nya_Latn oc=oci_Latn om=gaz_Latn or=ory_Orya pa=pan_Guru pl=pol_Latn ps=pbt_Arab
    pt=por_Latn qu=quy_Latn rn=run_Latn ro=ron_Latn ru=rus_Cyrl rw=kin_Latn sa=san_Deva sc=srd_Latn
    sd=snd_Arab sg=sag_Latn si=sin_Sinh sk=slk_Latn sl=slv_Latn sm=smo_Latn sn=sna_Latn so=som_Latn
    sq=als_Latn sr=srp_Cyrl ss=ssw_Latn st=sot_Latn su=sun_Latn sv=swe_Latn sw=swh_Latn ta=tam_Taml
    te=tel_Telu tg=tgk_Cyrl th=tha_Thai ti=tir_Ethi tk=tuk_Latn tl=tgl_Latn tn=tsn_Latn tr=tur_Latn
    ts=tso_Latn tt=tat_Cyrl tw=twi_Latn ug=uig_Arab uk=ukr_Cyrl ur=urd_Arab uz=uzn_Latn vi=vie_Latn
    wo=wol_Latn xh=xho_Latn yi=ydd_Hebr yo=yor_Latn zh=zho_Hans zu=zul_Latn
    """.split()
)
# The codes of mBART-50; each begins with the two-letter code.
_MBART_50 = {
    code.partition("_")[0]: code
    for code in """
    ar_AR cs_CZ de_DE en_XX es_XX et_EE fi_FI fr_XX gu_IN hi_IN it_IT ja_XX kk_KZ ko_KR lt_LT lv_LV
    my_MM ne_NP nl_XX ro_RO ru_RU si_LK tr_TR vi_VN zh_CN af_ZA az_AZ bn_IN fa_IR he_IL hr_HR id_ID
    ka_GE km_KH mk_MK ml_IN mn_MN mr_IN pl_PL ps_AF pt_XX sv_SE sw_KE ta_IN te_IN th_TH tl_XX uk_UA
    ur_PK xh_ZA gl_ES sl_SI
    """.split()
}
# The languages between which the first T5 models have learned to translate.
_T5 = {"en": "English", "de": "German", "fr": "French", "ro": "Romanian"}

# Style -> tag around a language, of the styles that have no codes of their own.
_AROUND = {"opus": ">>{}<<", "madlad": "<2{}>", "m2m_100": "__{}__"}
# Style -> codes by two-letter code, and an example.
_CODES = {"nllb": (_NLLB, "deu_Latn"), "mbart_50": (_MBART_50, "de_DE")}
# Style -> form of its tags, of the styles whose tags are pieces of a vocabulary.
_FORMS = {
    "nllb": r"[a-z]{3}_[A-Z][a-z]{3}",
    "mbart_50": r"[a-z]{2,3}_[A-Z]{2}",
    "m2m_100": r"__[a-z]{2,3}(_[A-Za-z]+)?__",
    "madlad": r"<2[A-Za-z_]+>",
}


def spell_tag(style: TagStyle, language: str) -> str:
    """Return the tag of a language; for de: `>>de<<` (opus), `<2de>`, `__de__`, `deu_Latn` or `de_DE`.

    `language` is a two-letter code or the model family's own code.
    """
    if style in _AROUND:
        return _AROUND[style].format(language)
    codes, example = _CODES[style]
    if looks_like_tag(style, language):
        return language
    code = codes.get(language.replace("-", "_").partition("_")[0])
    if code is None:
        raise UserError(
            f"data.tag_style {style} has no code for the language {language!r:.20}; write the code of the "
            f"family, such as {example}"
        )
    return code


def find_codes(language: str) -> frozenset[str]:
    """Return the two- and three-letter codes of a language, without script: de and deu for deu_Latn."""
    base = language.replace("-", "_").partition("_")[0]
    code = _NLLB.get(base) or next((code for code in _NLLB.values() if code.startswith(f"{base}_")), base)
    others = {two for two, three in _NLLB.items() if three == code}
    return frozenset({base, code.partition("_")[0], *others})


def looks_like_tag(style: TagStyle, piece: str) -> bool:
    return re.fullmatch(_FORMS[style], piece) is not None


def spell_task(source: str, target: str) -> str:
    """Return the prefix of sources for T5, such as `translate English to German:`."""
    for language in (source, target):
        if language not in _T5:
            raise UserError(
                f"data.tag_style t5 has no name for the language {language!r:.20}; it has {', '.join(_T5)}: "
                "set data.target_tags=never to fine-tune with other languages"
            )
    return f"translate {_T5[source]} to {_T5[target]}:"


def find_language(style: TagStyle, code: str) -> str:
    """Convert a model family's code to a two-letter code, such as deu_Latn to de, or return it unchanged."""
    codes = _CODES[style][0] if style in _CODES else {}
    return next((short for short, family_code in codes.items() if family_code == code), code)
