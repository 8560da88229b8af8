"""CTranslate2 behind the server: the same lines, hypotheses and alignments as when it is called directly."""

import dataclasses

import numpy as np
import pytest

pytest.importorskip("ctranslate2")
from flaxformer_mt.convert.ctranslate2.live_batches import LiveBatches
from flaxformer_mt.convert.export_run import export_run
from flaxformer_mt.errors import UserError
from flaxformer_mt.translation.annotation import NO_NOTES, Notes
from flaxformer_mt.translation.translator import Translator


@pytest.fixture(scope="module")
def folder(tiny_run, tmp_path_factory):
    path = tmp_path_factory.mktemp("exported") / "ctranslate2"
    export_run(tiny_run, format_name="ctranslate2", output=path)
    return path


def translate(system, lines, *, n_best=1, notes=NO_NOTES):
    for name, line in enumerate(lines):
        system.submit(name, line, n_best=n_best, notes=notes)
    found = {}
    while len(system):
        found |= dict(system.advance())
    assert system.num_active == 0
    return [system.finish(found[name]) for name in range(len(lines))], found


def test_lines_are_translated_as_by_greedy_search_of_the_run(folder, tiny_run):
    """Beam searches of the two systems differ; see export."""
    lines = ["ba do fi", "", "gu ka", "ba do fi gu ka lo mi nu ba do fi gu ka lo", *(["lo"] * 80)]
    system = LiveBatches(folder, beam_size=1)
    assert system.most_hypotheses == 1
    translations, _ = translate(system, lines)
    greedy = dataclasses.replace(system.config.search, method="greedy", beam_size=1)
    ours = Translator.load(tiny_run, search=greedy, spread=False, warn=lambda message: None)
    assert [one.text for one in translations] == [one.text for one in ours.translate(lines)]
    assert translations[3].parts > 1


def test_hypotheses_alignments_and_attention(folder):
    system = LiveBatches(folder)
    notes = Notes(alignments="words", attention=True)
    (translation, plain), found = translate(system, ["ba do fi", "gu"], n_best=2, notes=notes)
    assert len(translation.n_best) == 2 and translation.score >= translation.alternatives[0].score
    pieces = system.target_pieces(translation)
    assert np.shape(translation.attention) == (len(pieces), len(system.source_pieces(found[0])))
    assert {target for _, target in translation.alignment} == set(range(len(translation.text.split())))
    system.submit("left", "ba", n_best=1, notes=NO_NOTES)
    system.cancel("left")
    assert not len(system) and plain.alignment is not None


def test_a_folder_that_is_no_model(tiny_run):
    with pytest.raises(UserError, match=r"no model\.bin"):
        LiveBatches(tiny_run)
