"""Sentences of many languages are found and none is lost; words of two languages are aligned."""

import random
import time

import numpy as np
import pytest

from flaxformer_mt.corpus.sentence_split import split_sentences
from flaxformer_mt.corpus.word_alignment import _number, align_corpus, symmetrize


@pytest.mark.parametrize(
    ("language", "sentences"),
    [
        ("de", ["Der Mann liest ein Buch. ", "Die Frau schläft."]),
        ("en", ["Dr. Smith went home. ", "He slept."]),
        ("en", ['He said: "Stop!" ', "Then he left. ", "(He had to.) ", "Fine."]),
        ("en", ["It costs 3.14 Euro. ", "See www.example.org. ", "Yes."]),
        ("en", ["Visit https://example.org/a.b?c=d. ", "It is in the U.S. today."]),
        ("en", ["J. R. R. Tolkien wrote. ", "We read."]),
        ("en", ["Wait... ", "What?! ", "No… he said."]),
        ("en", ["“Stop!” he said. ", "“No.” ", "Yes."]),
        ("en", ["hello. ", "how are you?"]),
        ("es", ["¿Qué? ", "¡No! ", "Sí."]),
        ("zh", ["你好。", "再见！", "「走吧。」", "他说：3.14。", "好"]),
        ("ja", ["犬は寝る。 ", "猫も寝る？", "はい"]),
        ("th", ["สวัสดีครับ ผมชื่อจอห์น คุณสบายดีไหม"]),
        ("hi", ["क्या हाल है? ", "मैं ठीक हूँ। ", "चलो॥ ", "अब"]),
        ("ar", ["هل أنت بخير؟ ", "نعم. ", "حسنا۔ ", "نعم"]),
        ("ru", ["Привет, г. Иванов. ", "Нет."]),
        ("", ["Foo bar. ", "Baz qux? ", "你好。", "再见！"]),
        ("tlh", ["Foo bar. ", "Baz qux?"]),
        ("de", ["no stop at the end"]),
        ("de", [" "]),
        ("de", []),
    ],
)
def test_sentences_of_many_languages(language, sentences):
    assert split_sentences("".join(sentences), language=language) == sentences


@pytest.mark.parametrize(
    ("language", "sentences"),
    [
        ("ja", ["「はい。」と言った。", "『やった！』と叫んだ。", "「走れ！」", "彼は叫んだ。"]),
        ("ja", ["彼は「うそ！？」って聞いた。", "「はい。", "そうです。」", "「えっ？」", "とても驚いた。"]),
        ("ja", ["モーニング娘。の新曲だ。", "何？と聞いた。", "（注意。）", "『猫である。』を読んだ。"]),
        ("ja", ["値は３．１４です。", "終わりだ。", "「始めよう。」は返事だ。", "次の文です。"]),
        ("zh_Hant", ["「走吧！」他說。", "『好！』老師大聲喊道。", "大家笑了。"]),
        (
            "zh",
            ["他说：“走吧。”", "然后他走了。", "“你是谁？”小明问道，没人回答。", "“好。”", "他说他累了。"],
        ),
        ("zh", ['"走吧。"他说。', '"好的。"', "（真的。）", "《你好！》是一首歌。", "“走。", "快走。”"]),
        ("zh", ["我们明天一起去看《摔跤吧！爸爸》好吗？", "好！", "圆周率是３．１４。", "“等等……”他说。"]),
        (
            "fr",
            ["« Bonjour. » ", "Puis il partit. ", "«\u00a0Viens\u00a0!\u00a0» dit-il. ", "« Où vas-tu ? » "],
        ),
        (
            "fr",
            ["« Oui. ", "Non. » ", "Il a vu ça. ", "« Bien », dit-elle. ", "— Oui ! dit-il. ", "Il part."],
        ),
        (
            "ru",
            ["«Привет.» ", "Он сказал: «Стой!» ", "«Кто там?» – спросил он. ", "— Я! — сказал я. ", "— А."],
        ),
        ("uk", ["«Так!» — сказав він. ", "„Ні.“ ", "Вона мовчала."]),
        ("pl", ["— Stop! — zawołał. ", "„Tak.” ", "Stanęli."]),
        ("de", ["„Halt!“ rief er. ", "»Nein.« ", "Er kam. ", "»Ja«, sagte sie. ", "„Wer?“, fragte er."]),
        ("da", ["»Nej!« sagde hun. ", "»Jo.« ", "Han gik."]),
        ("sv", ["”Nej!” sa pojken. ", "”Jo.” ", "Han gick."]),
        ("es", ["—¿Vienes? —preguntó. ", "No contestó. ", "«¡Hola!» dijo. ", "“¡No!” ", "Se fue."]),
        ("en", ['He said, "Go." ', '"So." ', '"Why?" asked Tom. ', "“Stop!” — she cried. ", "[No!] ", "OK."]),
        ("ko", ["“가자!” 하고 외쳤다. ", '"안녕."이라고 말했다. ', "“안녕.” ", "그는 갔다."]),
        ("ar", ["قال: «نعم!» ", "«مرحبا.» ", "ثم رحل."]),
        ("el", ["«Έλα!» είπε. ", "«Γεια.» ", "Ήρθε."]),
        ("hi", ["“नमस्ते।” ", "वह गया।"]),
    ],
)
def test_a_closing_mark_ends_its_sentence_and_who_says_it_is_part_of_it(language, sentences):
    assert split_sentences("".join(sentences), language=language) == sentences


def test_ordinal_numbers_and_lists_are_no_sentences():
    sentences = ["Am 3. Mai, im 21. Jahrhundert, kam er. ", "Es gibt z. B. Hunde. ", "Im Jahr 1990. ", "Ja."]
    for code in ("de", "de_AT", "DE"):
        assert split_sentences("".join(sentences), language=code) == sentences
    assert split_sentences("Terminal 3. He left.", language="en") == ["Terminal 3. ", "He left."]
    listed = ["1. First item. ", "2. Second item. ", "- Third. ..."]
    assert split_sentences("".join(listed), language="en") == listed


@pytest.mark.parametrize(
    ("language", "sentences"),
    [
        ("de", ["Er sagte: „Ich bin müde. ", "Ich gehe heim.“ ", "Dann ging er."]),
        ("en", ['"Dr. Smith is tired. ', 'He goes home," he said.']),
        ("en", ['The 5" disk is here. ', 'The 3" disk is gone.']),
        ("en", ["Father is angry with me. ", "Tom is wearing a mask. ", "She said no. ", "Fine."]),
        ("de", ["Sie liebt mich. ", "Tom kam. ", "Das ist unglaublich! ", "14 Leute kamen."]),
        ("fr", ["M. Dupont est là. ", "A. С. Пушкин aussi."]),
        ("de", ["das ist gut. ", "und du? ", "am 3. mai kam er, z. b. mit hunden bzw. katzen."]),
        ("fr", ["Elle est l\u00e0. ", "A\u2028."]),
    ],
)
def test_what_sentencex_alone_does_not_find(language, sentences):
    import sentencex

    text = "".join(sentences)
    assert split_sentences(text, language=language) == sentences
    try:
        alone = sentencex.segment(language, text)
    except BaseException as error:  # what Rust raises is no Exception
        assert "char boundary" in str(error)
    else:
        assert alone != sentences, "sentencex has learned this: remove what does it here"


@pytest.mark.parametrize(
    ("language", "sentences"),
    [
        ("ja", ["本当（うそ。）ですか？", "はい（笑！）。", "（注意。）", "次だ。"]),
        ("en", ["It is by Ann (Prod. by Fat Boy) and Tom. ", "(He left. ", "She slept.) ", "OK."]),
        ("en", ["I write ASP.NET for Amazon.Com. ", "It works.", "They pay."]),
        ("de", ["Er (geb. am 3. Mai in Wien) schlief. ", "Gut."]),
    ],
)
def test_asides_and_names_with_a_stop_are_no_sentences(language, sentences):
    assert split_sentences("".join(sentences), language=language) == sentences


def test_nothing_is_lost_whatever_the_text():
    chance = random.Random(0)
    alphabet = ".!?。！…\"'“”„«»()[] \n\t\r\u2028\u00a0abABÄß12:;,-–/@\u0301\u200d\u200b\ufeff你क😀🚀"
    for _ in range(5000):
        text = "".join(chance.choices(alphabet, k=chance.randrange(30)))
        sentences = split_sentences(text, language=chance.choice(["en", "de", "zh", "hi", "", "xx", "e\x00"]))
        assert "".join(sentences) == text and all(sentences)


@pytest.mark.parametrize("language", ["en", "de", "zh"])
def test_runs_of_marks_take_linear_time(language):
    marks = [*".。(' \n\"", ". ", '."', "„a. ", "1. ", "a.b", '.") ', " .'"]
    marks += ["。」", ". »", "。”说", "a（", "(a. "]
    for unit in marks:
        start = time.process_time()
        text = unit * 20_000 + "a"
        assert "".join(split_sentences(text, language=language)) == text
        assert time.process_time() - start < 2, unit


# ---- word alignment ----
def test_words_of_a_lexicon_are_found_wherever_they_stand():
    generator = np.random.default_rng(1)
    words = [f"w{number}" for number in range(30)]
    pairs, truth = [], []
    for _ in range(400):
        chosen = generator.choice(30, int(generator.integers(2, 7)), replace=False)
        order = list(range(len(chosen)))
        if len(order) > 3:  # the last word goes to the front, as a verb does
            order = [order[-1], *order[:-1]]
        pairs.append(([words[n] for n in chosen], [f"{words[chosen[i]].upper()}x." for i in order]))
        truth.append(sorted((i, place) for place, i in enumerate(order)))
    found = [sorted(map(tuple, points.tolist())) for points in align_corpus(pairs)]
    right = sum(len(set(a) & set(b)) for a, b in zip(found, truth, strict=True))
    assert right > 0.98 * sum(map(len, truth)) and right > 0.98 * sum(map(len, found))
    # Of a word said twice, both are joined; in both directions there are fewer points, which are one to one.
    twice = [(source, [target[0], *target]) for source, target in pairs]
    joined, both = (
        [set(map(tuple, points.tolist())) for points in align_corpus(twice, intersect=only)]
        for only in (False, True)
    )
    assert all(few <= many for few, many in zip(both, joined, strict=True))
    assert all(len({p[side] for p in few}) == len(few) for few in both for side in (0, 1))
    assert 0 < sum(map(len, both)) < sum(map(len, joined))


def test_blank_sides_have_no_points_and_marks_and_case_do_not_count():
    said = []
    found = align_corpus(
        [([], ["a"]), (["Haus"], []), ([], []), (["Das", "Haus!"], ["The", "house"]), (["haus"], ["House,"])],
        say=said.append,
    )
    assert [points.shape for points in found[:3]] == [(0, 2)] * 3 and len(said) == 2
    assert found[3].tolist() == [[0, 0], [1, 1]] and found[4].tolist() == [[0, 0]]
    assert align_corpus([]) == []
    # Neither do the ways to write the same letters.
    assert _number([["Büro", "Bu\u0308ro,", "Hu\u00adnd", "\u200ehund"]]).tokens.tolist() == [1, 1, 2, 2]


def test_directions_are_joined_by_grow_diag_final_and():
    def join(forward, backward):
        return symmetrize(np.array(forward), np.array(backward), (len(backward), len(forward))).tolist()

    assert join([0, 1], [0, 1]) == [[0, 0], [1, 1]]
    # (1, 1) is a neighbor of (0, 0) with a free word; (3, 0) is none, and word 0 of the target is taken.
    assert join([0, 1], [0, -1, -1, 0]) == [[0, 0], [1, 1]]
    # Far from all others, and both words are free: the last step takes it.
    assert join([0, -1, 3], [0, -1, -1, -1]) == [[0, 0], [3, 2]]
