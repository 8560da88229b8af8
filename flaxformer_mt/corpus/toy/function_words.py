"""Function words of toy_de_en: pronouns, names, adverbs, prepositions, modal and auxiliary verbs.

Nouns, adjectives and full verbs are in lexicon.py.
"""

from flaxformer_mt.corpus.toy.lexicon import Adverb, Modal, Name, Preposition, Pronoun, Verb

# Object forms with two English translations (sie: her or them; es, ihm: it or him) are left out.
PRONOUNS = (
    Pronoun("ich", "mich", "mir", "I", "me", 1, False),
    Pronoun("du", "dich", "dir", "you", "you", 2, False),
    Pronoun("er", "ihn", "ihm", "he", "him", 3, False),
    Pronoun("sie", "", "ihr", "she", "her", 3, False),
    Pronoun("wir", "uns", "uns", "we", "us", 1, True),
    Pronoun("ihr", "euch", "euch", "you", "you", 2, True),
    Pronoun("sie", "", "ihnen", "they", "them", 3, True),
)
IT = Pronoun("es", "es", "", "it", "it", 3, False)

NAMES = tuple(
    Name(name, name) for name in ("Anna", "Paul", "Maria", "Lena", "Martin", "Karin", "Peter", "Julia")
)
CITIES = tuple(
    Adverb(german, english)
    for german, english in (
        ("Berlin", "Berlin"),
        ("München", "Munich"),
        ("Köln", "Cologne"),
        ("Wien", "Vienna"),
        ("Rom", "Rome"),
        ("Paris", "Paris"),
    )
)

ALWAYS = ("present", "past", "future", "modal")
TIMES = (
    Adverb("heute", "today", ALWAYS),
    Adverb("gestern", "yesterday", ("past",)),
    Adverb("letzte Woche", "last week", ("past",)),
    Adverb("morgen", "tomorrow", ("future", "modal")),
    Adverb("nächstes Jahr", "next year", ("future", "modal")),
    Adverb("bald", "soon", ("future",)),
    Adverb("jetzt", "now", ("modal",)),
    Adverb("jeden Tag", "every day", ALWAYS),
    Adverb("am Abend", "in the evening", ALWAYS),
    Adverb("am Montag", "on Monday", ALWAYS),
    Adverb("am Sonntag", "on Sunday", ALWAYS),
    Adverb("im Sommer", "in summer", ALWAYS),
    Adverb("im Winter", "in winter", ALWAYS),
)
FREQUENCIES = (
    Adverb("oft", "often"),
    Adverb("immer", "always"),
    Adverb("manchmal", "sometimes"),
    Adverb("selten", "rarely"),
    Adverb("nie", "never"),
)
MANNERS = {
    german: Adverb(german, english)
    for german, english in (
        ("schnell", "quickly"),
        ("langsam", "slowly"),
        ("leise", "quietly"),
        ("laut", "loudly"),
        ("gut", "well"),
        ("allein", "alone"),
        ("fleißig", "diligently"),
        ("früh", "early"),
        ("spät", "late"),
        ("mit dem Zug", "by train"),
        ("mit dem Schiff", "by ship"),
    )
}
AT_HOME = Adverb("zu Hause", "at home")
HOME = Adverb("nach Hause", "home")

IN = Preposition("in", "dative", "in")
INTO = Preposition("in", "accusative", "into")
TO_CITY = Preposition("nach", "dative", "to")
TO = Preposition("zu", "dative", "to")
BEFORE_PLACES = (
    Preposition("vor", "dative", "in front of"),
    Preposition("hinter", "dative", "behind"),
    Preposition("neben", "dative", "next to"),
)
COMPANIONS = (Preposition("mit", "dative", "with"), Preposition("ohne", "accusative", "without"))

# Forms for ich, du, er, wir, ihr, sie.
PRESENT = {
    "haben": ("habe", "hast", "hat", "haben", "habt", "haben"),
    "sein": ("bin", "bist", "ist", "sind", "seid", "sind"),
    "werden": ("werde", "wirst", "wird", "werden", "werdet", "werden"),
    "wissen": ("weiß", "weißt", "weiß", "wissen", "wisst", "wissen"),
}
PRETERITE = {
    "haben": ("hatte", "hattest", "hatte", "hatten", "hattet", "hatten"),
    "sein": ("war", "warst", "war", "waren", "wart", "waren"),
}
BE = Verb("sein", "", "ist", "gewesen", "sein", "be", "", "", "was", "is", (), (), ())
MODALS = (
    Modal(
        "können",
        ("kann", "kannst", "kann", "können", "könnt", "können"),
        ("konnte", "konntest", "konnte", "konnten", "konntet", "konnten"),
        "can",
        "could",
        "",
        True,
    ),
    Modal(
        "müssen",
        ("muss", "musst", "muss", "müssen", "müsst", "müssen"),
        ("musste", "musstest", "musste", "mussten", "musstet", "mussten"),
        "have",
        "had",
        "to",
        False,
    ),
    Modal(
        "wollen",
        ("will", "willst", "will", "wollen", "wollt", "wollen"),
        ("wollte", "wolltest", "wollte", "wollten", "wolltet", "wollten"),
        "want",
        "wanted",
        "to",
        False,
    ),
    Modal("sollen", ("soll", "sollst", "soll", "sollen", "sollt", "sollen"), (), "should", "", "", True),
    Modal("dürfen", ("darf", "darfst", "darf", "dürfen", "dürft", "dürfen"), (), "may", "", "", True),
    Modal(
        "mögen",
        ("möchte", "möchtest", "möchte", "möchten", "möchtet", "möchten"),
        (),
        "would",
        "",
        "like to",
        True,
    ),
)
NUMBERS = {"two": "zwei", "three": "drei", "four": "vier", "five": "fünf", "ten": "zehn"}
