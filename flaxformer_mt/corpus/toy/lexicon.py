"""The words of toy_de_en in both languages, and which words they combine with.

Each German word has one translation. In the tables, semicolons separate entries and spaces separate columns;
"-" is an empty column, "_" a space within a column.
"""

from collections import namedtuple
from collections.abc import Iterator

Noun = namedtuple("Noun", "kind german gender plural english")
Adjective = namedtuple("Adjective", "german english kinds")
# A participle that takes sein is written ist/... An English pronoun precedes `particle` (turn it off), other
# objects follow it (turn off the lamp), and all objects follow `link` (wait for it).
Verb = namedtuple("Verb", "prefix german third perfect english particle link past frame subjects objects")
# Forms for I (or he) and for we; `rest` follows the English verb: have to, would like to.
Modal = namedtuple("Modal", "singular plural past english english_past rest")

PEOPLE = ("person", "family")
_GROUPS = {"people": PEOPLE, "living": (*PEOPLE, "animal"), "goods": ("thing", "box", "clothes")}

# Keys: kinds. German, gender (and ending of the weak declension), plural, English (and plural, if not in -s)
_NOUNS = {
    "person": """Student m/en Studenten student; Nachbar m/n Nachbarn neighbor; Frau f Frauen woman/women;
        Kind n Kinder child/children; Lehrer m Lehrer teacher; Schüler m Schüler pupil; Gast m Gäste guest;
        Freund m Freunde friend; Bauer m/n Bauern farmer; Richter m Richter judge; Mädchen n Mädchen girl;
        Mann m Männer man/men; Maler m Maler painter; Junge m/n Jungen boy; Arzt m Ärzte doctor;
        König m Könige king""",
    "family": """Schwester f Schwestern sister; Tochter f Töchter daughter; Bruder m Brüder brother;
        Mutter f Mütter mother; Vater m Väter father; Sohn m Söhne son""",
    "animal": """Maus f Mäuse mouse/mice; Pferd n Pferde horse; Bär m/en Bären bear; Katze f Katzen cat;
        Vogel m Vögel bird; Hund m Hunde dog; Kuh f Kühe cow""",
    "text": """Geschichte f Geschichten story/stories; Zeitung f Zeitungen newspaper; Buch n Bücher book;
        Brief m Briefe letter""",
    "food": """Kartoffel f Kartoffeln potato/potatoes; Kuchen m Kuchen cake; Apfel m Äpfel apple;
        Fleisch n - meat; Käse m - cheese; Brot n - bread; Ei n Eier egg""",
    "drink": "Kaffee m - coffee; Wasser n - water; Milch f - milk; Wein m - wine; Tee m - tea",
    "thing": """Regenschirm m Regenschirme umbrella; Messer n Messer knife/knives; Bild n Bilder picture;
        Schlüssel m Schlüssel key; Blume f Blumen flower; Tisch m Tische table; Stuhl m Stühle chair;
        Uhr f Uhren clock; Ball m Bälle ball""",
    "box": "Koffer m Koffer suitcase; Tasche f Taschen bag",
    "clothes": """Kleid n Kleider dress/dresses; Jacke f Jacken jacket; Mantel m Mäntel coat;
        Hemd n Hemden shirt; Hut m Hüte hat""",
    "machine": "Computer m Computer computer; Radio n Radios radio; Lampe f Lampen lamp",
    "vehicle": """Fahrrad n Fahrräder bicycle; Bus m Busse bus/buses; Schiff n Schiffe ship;
        Auto n Autos car; Zug m Züge train""",
    "room": "Schule f Schulen school; Küche f Küchen kitchen; Zimmer n Zimmer room; Haus n Häuser house",
    "place": """Kirche f Kirchen church/churches; Stadt f Städte city/cities; Bahnhof m Bahnhöfe station;
        Garten m Gärten garden; Dorf n Dörfer village; Wald m Wälder forest; Hotel n Hotels hotel;
        Park m Parks park""",
    "opening": "Tür f Türen door; Fenster n Fenster window",
}

# German (and stem), English, kinds
_ADJECTIVES = """teuer/teur expensive thing,clothes,vehicle,machine,drink,food; freundlich friendly living;
    alt old person,animal,box,clothes,vehicle,room,place,machine; schwarz black animal,clothes,vehicle,box;
    klein small person,animal,thing,box,vehicle,room,place,food; grün green box,clothes,vehicle,opening;
    schön beautiful thing,clothes,room,place,text; groß big animal,thing,box,vehicle,room,place;
    blau blue box,clothes,vehicle,opening; neu new text,goods,vehicle,machine; kalt cold drink,food,room;
    warm warm drink,food,room,clothes; rot red goods,vehicle,opening; jung young person,animal;
    traurig sad people,text; glücklich happy people; müde/müd tired living; hungrig hungry living;
    krank sick living; reich rich people; lang long text"""

# Keys: frame (cases of objects, preposition, place, goal, clause with dass, infinitive with zu) and subjects.
# (Prefix|)infinitive, third person, participle, English(|particle|link), past, objects
_VERBS = {
    "- living": """ein|schlafen schläft ist/eingeschlafen fall|asleep fell;
        zurück|kommen kommt ist/zurückgekommen come|back came; schlafen schläft geschlafen sleep slept""",
    "- people": """auf|stehen steht ist/aufgestanden get|up got; arbeiten arbeitet gearbeitet work worked;
        weg|gehen geht ist/weggegangen go|away went; lachen lacht gelacht laugh laughed;
        tanzen tanzt getanzt dance danced; singen singt gesungen sing sang""",
    "goal people": """reisen reist ist/gereist travel traveled; fahren fährt ist/gefahren drive drove;
        kommen kommt ist/gekommen come came; laufen läuft ist/gelaufen run ran;
        gehen geht ist/gegangen go went""",
    "- people,vehicle": "an|kommen kommt ist/angekommen arrive arrived",
    "accusative people": """verkaufen verkauft verkauft sell sold food,goods,vehicle,machine,animal;
        kaufen kauft gekauft buy bought food,drink,goods,vehicle,machine,text;
        suchen sucht gesucht look||for looked thing,box,animal,person,clothes;
        weg|werfen wirft weggeworfen throw|away threw thing,clothes,food;
        waschen wäscht gewaschen wash washed clothes,vehicle,animal; lesen liest gelesen read read text;
        haben hat gehabt have had goods,vehicle,machine,animal; an|rufen ruft angerufen call called people;
        vergessen vergisst vergessen forget forgot goods,text; kennen kennt gekannt know knew people,place;
        auf|machen macht aufgemacht open opened box,opening; lieben liebt geliebt love loved living;
        aus|machen macht ausgemacht turn|off turned machine;
        zu|machen macht zugemacht close closed box,opening;
        auf|räumen räumt aufgeräumt clean|up cleaned room; schreiben schreibt geschrieben write wrote text;
        aus|ziehen zieht ausgezogen take|off took clothes; ein|laden lädt eingeladen invite invited people;
        ab|holen holt abgeholt pick|up picked people,box""",
    "accusative living": """finden findet gefunden find found thing,box,animal,food;
        sehen sieht gesehen see saw living,thing,vehicle,place; trinken trinkt getrunken drink drank drink;
        essen isst gegessen eat ate food""",
    "dative people": """zu|hören hört zugehört listen||to listened people;
        glauben glaubt geglaubt believe believed people; danken dankt gedankt thank thanked people;
        helfen hilft geholfen help helped living""",
    "dative living": "folgen folgt ist/gefolgt follow followed living,vehicle",
    "dative thing,box,vehicle,machine,room,animal": "gehören gehört gehört belong||to belonged people",
    "both people": """zeigen zeigt gezeigt show showed thing,vehicle,room,text,animal;
        bringen bringt gebracht bring brought food,drink,thing,box;
        schicken schickt geschickt send sent text,box,thing;
        geben gibt gegeben give gave thing,box,food,text""",
    "auf+accusative people": "warten wartet gewartet wait||for waited people,vehicle",
    "mit+dative people": "sprechen spricht gesprochen speak||with spoke people",
    "mit+dative living": "spielen spielt gespielt play||with played animal,person",
    "über+accusative people": "lachen lacht gelacht laugh||at laughed text,person",
    "place people": "wohnen wohnt gewohnt live lived",
    "place living": "bleiben bleibt ist/geblieben stay stayed; sitzen sitzt gesessen sit sat",
    "place people,vehicle,animal": "stehen steht gestanden stand stood",
    "place animal,thing,box": "liegen liegt gelegen lie lay",
    "dass people": """glauben glaubt geglaubt believe believed; hoffen hofft gehofft hope hoped;
        wissen weiß gewusst know knew; sagen sagt gesagt say said""",
    "zu people": """vergessen vergisst vergessen forget forgot; versuchen versucht versucht try tried;
        beginnen beginnt begonnen begin began""",
}

_MODALS = """kann können konnte can could; muss müssen musste have had to; will wollen wollte want wanted to;
    soll sollen - should; darf dürfen - may; möchte möchten - would - like_to"""

# German cases, English subject and object, person, number; forms with two translations are left out.
_PRONOUNS = """ich mich mir I me 1; du dich dir you you 2; er ihn ihm he him 3; sie - ihr she her 3;
    wir uns uns we us 1 plural; ihr euch euch you you 2 plural; sie - ihnen they them 3 plural"""

# German, English, and the possible tenses, if not all.
_TIMES = """heute today; gestern yesterday past; letzte_Woche last_week past; bald soon future;
    morgen tomorrow future,modal; nächstes_Jahr next_year future,modal; jeden_Tag every_day; jetzt now modal;
    am_Abend in_the_evening; am_Montag on_Monday; am_Sonntag on_Sunday; im_Sommer in_summer"""
_FREQUENCIES = "oft often; immer always; manchmal sometimes; selten rarely; nie never"
_CITIES = "Berlin Berlin; München Munich; Köln Cologne; Wien Vienna; Rom Rome; Paris Paris"


def _rows(table: str, width: int) -> Iterator[list[str]]:
    for entry in table.split(";"):
        columns = ["" if column == "-" else column.replace("_", " ") for column in entry.split()]
        yield columns + [""] * (width - len(columns))


def _list(column: str) -> tuple[str, ...]:
    return tuple(kind for name in filter(None, column.split(",")) for kind in _GROUPS.get(name, (name,)))


def _read_verb(use: str, german: str, third: str, perfect: str, english: str, *rest: str) -> Verb:
    frame, _, subjects = use.partition(" ")
    prefix, _, german = german.rpartition("|")
    english, particle, link = (english.split("|") + ["", ""])[:3]
    words = prefix, german, third, perfect, english, particle, link, rest[0], frame.strip("-")
    return Verb(*words, _list(subjects), _list(rest[1]))


NOUNS = [Noun(kind, *row) for kind, table in _NOUNS.items() for row in _rows(table, 4)]
ADJECTIVES = [Adjective(german, english, _list(kinds)) for german, english, kinds in _rows(_ADJECTIVES, 3)]
VERBS = [_read_verb(use, *row) for use, table in _VERBS.items() for row in _rows(table, 6)]
BE = _read_verb("be people,text,thing,vehicle,animal", "sein", "ist", "ist/gewesen", "be", "was", "")
MODALS = [Modal(*row) for row in _rows(_MODALS, 6)]
PRONOUNS = list(_rows(_PRONOUNS, 7))
NAMES = "Anna Paul Maria Lena Martin Karin Peter Julia".split()
NUMBERS = {"two": "zwei", "three": "drei", "four": "vier", "five": "fünf", "ten": "zehn"}
STEMS = dict(_rows("this dies; every jed; a ein; no kein; my mein; your dein; his sein; our unser", 2))
TIMES = [(german, english, _list(tenses)) for german, english, tenses in _rows(_TIMES, 3)]
FREQUENCIES, CITIES = (list(map(tuple, _rows(table, 2))) for table in (_FREQUENCIES, _CITIES))
