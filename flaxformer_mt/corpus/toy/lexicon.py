"""The lexicon of toy_de_en: words in both languages, their inflection, and the words they combine with.

Each German word has one English word. The grammar is in german.py, english.py and grammar.py.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Noun:
    """A noun; `plural` is "-" for uncountable nouns, `weak` the ending of masculine nouns like Student."""

    german: str
    gender: str
    plural: str
    english: str
    english_plural: str
    kind: str
    weak: str


@dataclass(frozen=True)
class Name:
    """The name of a person."""

    german: str
    english: str


@dataclass(frozen=True)
class Pronoun:
    """A personal pronoun: German and English cases, person and number; "" marks a form that is not used."""

    nominative: str
    accusative: str
    dative: str
    subject: str
    object: str
    person: int
    plural: bool


@dataclass(frozen=True)
class Adjective:
    """An adjective, the stem that takes its endings, and the kinds of noun that it combines with."""

    german: str
    stem: str
    english: str
    kinds: tuple[str, ...]


@dataclass(frozen=True)
class Verb:
    """A verb: its principal parts in German and English, and the words that it combines with.

    `frame` is its complement: "-" (none), "acc", "dat", "dat+acc", "place", "goal", a clause with "dass", an
    infinitive with "zu", or a preposition with its case, as "auf+acc". An English pronoun stands before
    `particle` (turn it off), any other object after `particle` (turn off the lamp), and every object after
    `link` (wait for it).
    """

    infinitive: str
    prefix: str
    third: str
    participle: str
    auxiliary: str
    english: str
    particle: str
    link: str
    past: str
    frame: str
    subjects: tuple[str, ...]
    objects: tuple[str, ...]
    manners: tuple[str, ...]


@dataclass(frozen=True)
class Adverb:
    """An expression of time, manner or place in both languages; `tenses` are those that it combines with."""

    german: str
    english: str
    tenses: tuple[str, ...] = ()


@dataclass(frozen=True)
class Preposition:
    """A preposition in one meaning, and the case that it governs."""

    german: str
    case: Literal["accusative", "dative"]
    english: str


@dataclass(frozen=True)
class Modal:
    """A modal verb: present and past (may be empty) for ich, du, er, wir, ihr, sie, and its English.

    The English is an auxiliary ("can", past "could"), an auxiliary followed by `rest` ("would", "like to"),
    or, where `auxiliary` is False, a verb with do-support ("have", rest "to").
    """

    infinitive: str
    present: tuple[str, ...]
    past: tuple[str, ...]
    english: str
    english_past: str
    rest: str
    auxiliary: bool


# Columns: kind, German, gender (-ending of the weak declension), plural, English, English plural
_NOUNS = """
person  Mann m Männer man men
person  Frau f Frauen woman women
person  Kind n Kinder child children
person  Mädchen n Mädchen girl girls
person  Junge m-n Jungen boy boys
person  Lehrer m Lehrer teacher teachers
person  Schüler m Schüler pupil pupils
person  Student m-en Studenten student students
person  Arzt m Ärzte doctor doctors
person  Freund m Freunde friend friends
person  Nachbar m-n Nachbarn neighbor neighbors
person  Gast m Gäste guest guests
person  König m Könige king kings
person  Bauer m-n Bauern farmer farmers
person  Maler m Maler painter painters
person  Kellner m Kellner waiter waiters
person  Richter m Richter judge judges
person  Dieb m Diebe thief thieves
person  Soldat m-en Soldaten soldier soldiers
person  Ingenieur m Ingenieure engineer engineers
family  Vater m Väter father fathers
family  Mutter f Mütter mother mothers
family  Bruder m Brüder brother brothers
family  Schwester f Schwestern sister sisters
family  Sohn m Söhne son sons
family  Tochter f Töchter daughter daughters
family  Onkel m Onkel uncle uncles
family  Tante f Tanten aunt aunts
family  Großmutter f Großmütter grandmother grandmothers
animal  Hund m Hunde dog dogs
animal  Katze f Katzen cat cats
animal  Pferd n Pferde horse horses
animal  Vogel m Vögel bird birds
animal  Kuh f Kühe cow cows
animal  Bär m-en Bären bear bears
animal  Maus f Mäuse mouse mice
animal  Esel m Esel donkey donkeys
text    Buch n Bücher book books
text    Brief m Briefe letter letters
text    Zeitung f Zeitungen newspaper newspapers
text    Gedicht n Gedichte poem poems
text    Artikel m Artikel article articles
text    Geschichte f Geschichten story stories
food    Apfel m Äpfel apple apples
food    Brot n - bread -
food    Kuchen m Kuchen cake cakes
food    Ei n Eier egg eggs
food    Suppe f Suppen soup soups
food    Käse m - cheese -
food    Fleisch n - meat -
food    Kartoffel f Kartoffeln potato potatoes
food    Birne f Birnen pear pears
drink   Wasser n - water -
drink   Milch f - milk -
drink   Kaffee m - coffee -
drink   Tee m - tea -
drink   Wein m - wine -
drink   Saft m - juice -
thing   Tisch m Tische table tables
thing   Stuhl m Stühle chair chairs
thing   Schlüssel m Schlüssel key keys
thing   Uhr f Uhren clock clocks
thing   Ball m Bälle ball balls
thing   Bild n Bilder picture pictures
thing   Messer n Messer knife knives
thing   Blume f Blumen flower flowers
thing   Geschenk n Geschenke present presents
thing   Regenschirm m Regenschirme umbrella umbrellas
box     Koffer m Koffer suitcase suitcases
box     Tasche f Taschen bag bags
box     Flasche f Flaschen bottle bottles
clothes Hut m Hüte hat hats
clothes Mantel m Mäntel coat coats
clothes Kleid n Kleider dress dresses
clothes Hemd n Hemden shirt shirts
clothes Jacke f Jacken jacket jackets
machine Lampe f Lampen lamp lamps
machine Computer m Computer computer computers
machine Radio n Radios radio radios
machine Fernseher m Fernseher television televisions
vehicle Auto n Autos car cars
vehicle Fahrrad n Fahrräder bicycle bicycles
vehicle Zug m Züge train trains
vehicle Bus m Busse bus buses
vehicle Schiff n Schiffe ship ships
room    Haus n Häuser house houses
room    Küche f Küchen kitchen kitchens
room    Zimmer n Zimmer room rooms
room    Büro n Büros office offices
room    Schule f Schulen school schools
place   Garten m Gärten garden gardens
place   Park m Parks park parks
place   Stadt f Städte city cities
place   Dorf n Dörfer village villages
place   Wald m Wälder forest forests
place   Kirche f Kirchen church churches
place   Museum n Museen museum museums
place   Hotel n Hotels hotel hotels
place   Bahnhof m Bahnhöfe station stations
opening Tür f Türen door doors
opening Fenster n Fenster window windows
"""

# Columns: German (:stem), English, kinds
_ADJECTIVES = """
alt old person,animal,box,clothes,vehicle,room,place,machine
jung young person,animal
klein small person,animal,thing,box,vehicle,room,place,food
groß big animal,thing,box,vehicle,room,place
neu new text,thing,box,clothes,vehicle,machine
schön beautiful thing,clothes,room,place,text
teuer:teur expensive thing,clothes,vehicle,machine,drink,food
billig cheap thing,clothes,vehicle,box,drink,food
rot red thing,box,clothes,vehicle,opening
blau blue box,clothes,vehicle,opening
grün green box,clothes,vehicle,opening
schwarz black animal,clothes,vehicle,box
weiß white animal,clothes,vehicle
müde tired person,family,animal
krank sick person,family,animal
glücklich happy person,family
hungrig hungry person,family,animal
freundlich friendly person,family,animal
reich rich person,family
arm poor person,family
klug clever person,family,animal
stark strong person,animal,drink
fleißig diligent person,family
traurig sad person,family,text
kalt cold drink,food,room
warm warm drink,food,room,clothes
frisch fresh food
lang long text
interessant interesting text,place
langweilig boring text
leer empty box,room
dunkel:dunkl dark room,place
"""

# Columns: infinitive (prefix|), third person, participle, h or s, English base|particle|link, past, frame,
# subjects, objects, manners
_VERBS = """
schlafen schläft geschlafen h sleep slept - person,family,animal - gut
arbeiten arbeitet gearbeitet h work worked - person,family - allein,fleißig
lachen lacht gelacht h laugh laughed - person,family - laut
weinen weint geweint h cry cried - person,family - leise,laut
tanzen tanzt getanzt h dance danced - person,family - gut,allein
singen singt gesungen h sing sang - person,family - laut,leise,gut
schwimmen schwimmt geschwommen s swim swam - person,family,animal - schnell,gut
laufen läuft gelaufen s run ran goal person,family,animal - schnell,langsam
kommen kommt gekommen s come came goal person,family - allein
auf|stehen steht aufgestanden s get|up got - person,family - früh,spät
ein|schlafen schläft eingeschlafen s fall|asleep fell - person,family,animal - schnell,spät
auf|wachen wacht aufgewacht s wake|up woke - person,family,animal - früh,spät
an|kommen kommt angekommen s arrive arrived - person,family,vehicle - früh,spät
zurück|kommen kommt zurückgekommen s come|back came - person,family,animal - früh,allein
weg|gehen geht weggegangen s go|away went - person,family - schnell,leise
ab|fahren fährt abgefahren s depart departed - vehicle - früh,spät
lesen liest gelesen h read read acc person,family text langsam,schnell
schreiben schreibt geschrieben h write wrote acc person,family text -
kaufen kauft gekauft h buy bought acc person,family food,drink,thing,box,clothes,vehicle,machine,text -
verkaufen verkauft verkauft h sell sold acc person,family food,thing,box,clothes,vehicle,machine,animal -
essen isst gegessen h eat ate acc person,family,animal food schnell,langsam
trinken trinkt getrunken h drink drank acc person,family,animal drink schnell,langsam
sehen sieht gesehen h see saw acc person,family,animal person,family,animal,thing,vehicle,place -
hören hört gehört h hear heard acc person,family,animal person,family,animal,vehicle -
finden findet gefunden h find found acc person,family,animal thing,box,animal,food -
suchen sucht gesucht h look||for looked acc person,family thing,box,animal,person,clothes -
lieben liebt geliebt h love loved acc person,family person,family,animal -
kennen kennt gekannt h know knew acc person,family person,family,place -
besuchen besucht besucht h visit visited acc person,family person,family,place -
fragen fragt gefragt h ask asked acc person,family person,family leise,laut
malen malt gemalt h paint painted acc person,family animal,person,thing,place -
tragen trägt getragen h carry carried acc person,family box,thing -
vergessen vergisst vergessen h forget forgot acc person,family thing,box,clothes,text -
verlieren verliert verloren h lose lost acc person,family thing,box,clothes -
brauchen braucht gebraucht h need needed acc person,family thing,box,clothes,vehicle,machine -
haben hat gehabt h have had acc person,family thing,box,clothes,vehicle,machine,animal -
reparieren repariert repariert h repair repaired acc person,family vehicle,machine schnell
waschen wäscht gewaschen h wash washed acc person,family clothes,vehicle,animal -
auf|machen macht aufgemacht h open opened acc person,family box,opening langsam,leise
zu|machen macht zugemacht h close closed acc person,family box,opening schnell,leise
an|rufen ruft angerufen h call called acc person,family person,family -
ein|laden lädt eingeladen h invite invited acc person,family person,family -
ab|holen holt abgeholt h pick|up picked acc person,family person,family,box -
aus|machen macht ausgemacht h turn|off turned acc person,family machine schnell
an|machen macht angemacht h turn|on turned acc person,family machine -
auf|räumen räumt aufgeräumt h clean|up cleaned acc person,family room schnell
weg|werfen wirft weggeworfen h throw|away threw acc person,family thing,clothes,food -
aus|ziehen zieht ausgezogen h take|off took acc person,family clothes schnell
helfen hilft geholfen h help helped dat person,family person,family,animal -
danken dankt gedankt h thank thanked dat person,family person,family -
antworten antwortet geantwortet h answer answered dat person,family person,family schnell,leise
folgen folgt gefolgt s follow followed dat person,family,animal person,family,animal,vehicle langsam,leise
glauben glaubt geglaubt h believe believed dat person,family person,family -
zu|hören hört zugehört h listen||to listened dat person,family person,family -
gehören gehört gehört h belong||to belonged dat thing,box,vehicle,machine,room,animal person,family -
geben gibt gegeben h give gave dat+acc person,family thing,box,food,text -
zeigen zeigt gezeigt h show showed dat+acc person,family thing,vehicle,room,text,animal -
schicken schickt geschickt h send sent dat+acc person,family text,box,thing -
bringen bringt gebracht h bring brought dat+acc person,family food,drink,thing,box -
leihen leiht geliehen h lend lent dat+acc person,family vehicle,machine,text,clothes -
warten wartet gewartet h wait||for waited auf+acc person,family person,family,vehicle -
denken denkt gedacht h think||of thought an+acc person,family person,family,animal -
sprechen spricht gesprochen h speak||with spoke mit+dat person,family person,family laut,leise
spielen spielt gespielt h play||with played mit+dat person,family,animal animal,person -
träumen träumt geträumt h dream||of dreamed von+dat person,family person,family,place -
lachen lacht gelacht h laugh||at laughed über+acc person,family text,person laut
wohnen wohnt gewohnt h live lived place person,family - allein
bleiben bleibt geblieben s stay stayed place person,family,animal - allein
sitzen sitzt gesessen h sit sat place person,family,animal - allein
stehen steht gestanden h stand stood place person,family,vehicle,animal - -
liegen liegt gelegen h lie lay place animal,thing,box - -
gehen geht gegangen s go went goal person,family - schnell,langsam,allein
fahren fährt gefahren s drive drove goal person,family - schnell,langsam
sagen sagt gesagt h say said dass person,family - -
hoffen hofft gehofft h hope hoped dass person,family - -
glauben glaubt geglaubt h believe believed dass person,family - -
wissen weiß gewusst h know knew dass person,family - -
versuchen versucht versucht h try tried zu person,family - -
vergessen vergisst vergessen h forget forgot zu person,family - -
beginnen beginnt begonnen h begin began zu person,family - -
reisen reist gereist s travel traveled goal person,family - mit_dem_Zug,mit_dem_Schiff,allein
"""


def _rows(table: str) -> list[list[str]]:
    return [line.split() for line in table.strip().split("\n")]


def _split(column: str) -> tuple[str, ...]:
    return () if column == "-" else tuple(column.replace("_", " ").split(","))


def _read_noun(kind: str, german: str, gender: str, plural: str, english: str, english_plural: str) -> Noun:
    gender, _, weak = gender.partition("-")
    return Noun(german, gender, plural, english, english_plural, kind, weak)


def _read_adjective(german: str, english: str, kinds: str) -> Adjective:
    word, _, stem = german.partition(":")
    return Adjective(word, stem or word.removesuffix("e"), english, _split(kinds))


def _read_verb(
    german: str, third: str, participle: str, auxiliary: str, english: str, past: str, frame: str, *uses: str
) -> Verb:
    prefix, _, infinitive = german.rpartition("|")
    base, particle, link = (english.split("|") + ["", ""])[:3]
    auxiliary = {"h": "haben", "s": "sein"}[auxiliary]
    subjects, objects, manners = map(_split, uses)
    return Verb(
        infinitive,
        prefix,
        third,
        participle,
        auxiliary,
        base,
        particle,
        link,
        past,
        frame,
        subjects,
        objects,
        manners,
    )


NOUNS = tuple(_read_noun(*row) for row in _rows(_NOUNS))
ADJECTIVES = tuple(_read_adjective(*row) for row in _rows(_ADJECTIVES))
VERBS = tuple(_read_verb(*row) for row in _rows(_VERBS))
