"""What works with which backend, as docs/translating.md says, and the same steps for both."""

import re
from pathlib import Path

import pytest
from tiny_experiment import small_model, write_untrained_run

from flaxformer_mt.config import Config, DataConfig, SearchConfig, VocabConfig
from flaxformer_mt.config.directions import Direction
from flaxformer_mt.convert.export_run import export_run
from flaxformer_mt.corpus.pairs import Pair
from flaxformer_mt.errors import UserError
from flaxformer_mt.translation.copied_text import CopiedText
from flaxformer_mt.translation.glossary import Glossary
from flaxformer_mt.translation.letter_case import LetterCase
from flaxformer_mt.translation.pivot import PivotEngines
from flaxformer_mt.translation.requests import Request
from flaxformer_mt.translation.result import Annotations
from flaxformer_mt.translation.translator import Translator

pytest.importorskip("ctranslate2")
from flaxformer_mt.convert.ctranslate2.backend import load_engine

PAGE = Path(__file__).resolve().parents[2] / "docs" / "translating.md"
# What a request asks for, by the words of the page.
ASKED = {
    "markup": {"annotations": Annotations(markup=True)},
    "language tags": {"source_language": "xx", "target_language": "yy"},
    "sentences": {},
    "text without letters": {},
    "letter case": {},
    "documents": {"context": ("aba bab", "12:30")},
    "prefix": {"prefix": "AB"},
    "required phrases": {"required": ("AB",)},
    "glossary": {"glossary": Glossary.make({"aba": "AB"})},
    "n-best": {"n_best": 2},
    "alignments": {"annotations": Annotations(alignments="words")},
    "token scores": {"annotations": Annotations(token_log_probs=True)},
}
# Two sentences and markup; text without letters; capitals.
LINES = ["<b>aba bab.</b> Ab ba!", "12:30", "BA AB"]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """An untrained model that reads documents."""
    sides = {"source_language": "xx", "target_language": "yy"}
    config = Config(
        data=DataConfig(**sides, context=2, max_source_length=40, max_target_length=40),
        vocab=VocabConfig(size=24, byte_fallback=False, normalization="identity", symbols=("<sep>",)),
        model=small_model(1, 16, 2, 16),
        search=SearchConfig(beam_size=2, max_length_ratio=1.0, max_length_offset=6),
    )
    pairs = [Pair("aba bab. Ab ba!", "ABA BAB. AB BA!"), Pair("ba 12:30 <b>", "BA")]
    return write_untrained_run(tmp_path_factory.mktemp("runs") / "run", config, pairs * 5)


@pytest.fixture(scope="module")
def engines(run_dir, tmp_path_factory):
    """Makes engines of both backends; the options are those of the search."""
    folder = tmp_path_factory.mktemp("exported") / "model"
    export_run(run_dir, format_name="ctranslate2", output=folder)
    translator = Translator.load(run_dir, use_all_devices=False, capitals="always", warn=pytest.fail)

    def make(**search):
        other = translator.with_search(**search)
        return other.engine(), load_engine(folder, capitals="always", **search)

    return make


def test_the_page_says_what_engines_refuse(engines):
    (lacks,) = re.findall(r"CTranslate2 does not support: ([^.]+)\.", PAGE.read_text(encoding="utf-8"))
    lacks = lacks.replace("\n", " ").split(", ")
    assert set(lacks) < set(ASKED)
    for engine, refused_by_it in zip(engines(), ([], lacks), strict=True):
        accepted = []  # translated together, which takes few programs
        for name, fields in ASKED.items():
            requests = [
                Request(line.replace("12:30", "aba"), seed=n, **fields) for n, line in enumerate(LINES)
            ]
            if name not in refused_by_it:
                accepted += requests
            else:
                with pytest.raises(UserError, match="CTranslate2") as refused:
                    engine.read(requests)
                assert "\n" not in str(refused.value)
        (found,) = engine.run([accepted])
        assert len(found) == len(accepted) >= 3 * 8


def test_both_backends_go_through_the_same_steps(engines):
    texts = []
    for engine in engines(method="greedy", beam_size=1):
        annotations = Annotations(markup=True, alignments="words")
        asked = {"annotations": annotations, "context": ("ba <i>ab</i>.",)}
        requests = [Request(line, seed=number, **asked) for number, line in enumerate(LINES, start=1)]
        (found,) = engine.run([requests])
        assert found[0].parts == 2 and found[0].text.count("<b>") == found[0].text.count("</b>") == 1
        texts.append([re.sub("</?b>", "", one.text) for one in found])
        assert found[1].text == "12:30" and found[1].alignment == ((0, 0),)
        assert found[2].text == found[2].text.upper()
        assert engine.counts[CopiedText.counted] == 1 and engine.counts[LetterCase.counted] >= 1
        directions = (Direction("xx", "yy"), Direction("xx", "yy"))
        ((onward,),) = PivotEngines(engine, engine, directions).run([[Request("aba. Ab!")]])
        assert onward.parts == 2
    assert texts[0] == texts[1]
