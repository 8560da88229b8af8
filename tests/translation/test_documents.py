"""Documents: pairs are stored, and lines translated, with the lines before them; mistakes end in one line."""

import asyncio
import dataclasses
import gzip
from pathlib import Path

import numpy as np
import pytest
from tiny_experiment import change, small_model, text_data, write_untrained_run

from flaxformer_mt.commands.main import main
from flaxformer_mt.commands.server.model_thread import ModelThread
from flaxformer_mt.config import CleanConfig, Config, SearchConfig, VocabConfig
from flaxformer_mt.config.checks import validate
from flaxformer_mt.corpus import read_pairs
from flaxformer_mt.corpus.documents import Context, Documents
from flaxformer_mt.corpus.text_rows import TextRows
from flaxformer_mt.data.prepare import prepare
from flaxformer_mt.errors import UserError
from flaxformer_mt.text_io.resumable_output import ResumableOutput
from flaxformer_mt.translation.requests import Request, make_requests
from flaxformer_mt.translation.result import Annotations
from flaxformer_mt.translation.translator import Translator

FINGERPRINT = "ca3e0968ac83cd3552f35886b5aef6ff"
# A blank line, a repeated pair and a change of the id: three documents, of which the second is one line.
SOURCE = ["aba bab", "ba ab", "ba ab", "ab a", "", "abba", "baab ab", "ab ba aba", "a b a b"]
TARGET = ["ABA BAB", "BA AB", "BA AB", "AB A", "", "ABBA", "BAAB AB", "AB BA ABA", "A B A B"]
IDS = [*"111111", "two", "two", "two"]


def write(folder, split, **files):
    for ending, lines in files.items():
        (folder / f"{split}.{ending}").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Config:
    folder = tmp_path_factory.mktemp("documents")
    for split in ("train", "valid"):
        write(folder, split, xx=SOURCE, yy=TARGET, documents=IDS)
    lengths = {"max_source_length": 40, "max_target_length": 40, "batch_tokens": 640, "num_shapes": 1}
    return Config(
        data=text_data(folder, "xx-yy", context=2, **lengths),
        vocab=VocabConfig(size=20, byte_fallback=False, normalization="identity", symbols=("<sep>",)),
        model=small_model(1, 16, 2, 16),
        search=SearchConfig(beam_size=2, max_length_ratio=1.0, max_length_offset=6),
    )


@pytest.fixture(scope="module")
def run_dir(config, tmp_path_factory) -> Path:
    return write_untrained_run(
        tmp_path_factory.mktemp("runs") / "run", config, read_pairs(config.data, "train")
    )


@pytest.fixture(scope="module")
def translator(run_dir) -> Translator:
    return Translator.load(run_dir, use_all_devices=False, warn=pytest.fail)


def before_each(lines, size, ids=None):
    documents = Documents(lines, size, ids)
    return [documents.before for _ in documents]


def test_a_document_ends_at_a_blank_line_and_where_the_id_changes():
    assert before_each(["a", "b", "c", "d"], 2) == [(), ("a",), ("a", "b"), ("b", "c")]
    assert before_each(["a", "\u200b ", "b", "c"], 2) == [(), (), (), ("b",)]
    assert before_each(["a", "b", "c"], 1, [1, 1, 2]) == [(), ("a",), ()]
    for ids in ([1, 1], [1] * 4):
        with pytest.raises(UserError, match="ids of documents .* give one for each"):
            before_each(["a", "b", "c"], 1, ids)


def test_the_nearest_lines_that_fit_are_read():
    lines = [np.zeros(3), np.ones(3), np.ones(2)]
    for own, size, expected in ((2, 9, 3), (3, 9, 2), (5, 9, 2), (6, 9, 1), (9, 9, 0), (11, 9, 0), (2, 2, 2)):
        chosen = Context(size, 10).choose(own, lines)
        assert list(map(id, chosen)) == list(map(id, lines[3 - expected :])), (own, size)
    assert not Context(9, 10).choose(1, [])


def in_folder(config, folder, **fields):
    return dataclasses.replace(config.data, text_dir=str(folder), cache_dir=str(folder / "cache"), **fields)


@pytest.mark.parametrize("packed", [False, True])
def test_pairs_are_stored_with_the_pairs_before_them(config, tmp_path, monkeypatch, packed):
    """Whatever cleaning leaves out, in chunks of any size, and each row is read once."""
    data = in_folder(config, tmp_path, clean=CleanConfig(duplicates="drop"))
    write(tmp_path, "train", xx=SOURCE, yy=TARGET, documents=IDS)
    if packed:
        for name in ("xx", "yy"):
            file = tmp_path / f"train.{name}"
            (tmp_path / f"train.{name}.gz").write_bytes(gzip.compress(file.read_bytes()))
            file.unlink()
        for module, size in (("corpus.pairs._", 3), ("data.token_store.", 2), ("corpus.text_files.", 2)):
            name = "BLOCK" if "files" in module else "CHUNK"
            monkeypatch.setattr(f"flaxformer_mt.{module}{name}", size)
    prepared = prepare(dataclasses.replace(config, data=data), tmp_path / "run")
    vocabs, store = prepared.vocabs, prepared.train.base
    found = [
        tuple(
            vocab.detokenize(ids).replace(" <sep>", "<sep>")
            for vocab, ids in zip((vocabs.source, vocabs.target), store[number], strict=True)
        )
        for number in range(len(store))
    ]
    expected = [
        ("aba bab", "ABA BAB"),
        ("aba bab<sep> ba ab", "BA AB"),
        # The repeated pair is left out, but read; the blank line ends its document.
        ("ba ab<sep> ba ab<sep> ab a", "AB A"),
        ("abba", "ABBA"),
        ("baab ab", "BAAB AB"),  # of another document
        ("baab ab<sep> ab ba aba", "AB BA ABA"),
        ("baab ab<sep> ab ba aba<sep> a b a b", "A B A B"),
    ]
    assert found == expected
    assert prepared.report["train"]["parts"][0]["documents"] == 2
    numbers, read = [], TextRows.read
    monkeypatch.setattr(TextRows, "read", lambda self, rows: numbers.extend(rows) or read(self, rows))
    list(read_pairs(data, "train").with_lines_before())
    assert numbers == [*range(len(SOURCE))], "to go back in a packed file is to unpack it from its beginning"


def test_alignments_and_weights_stay_with_their_pairs(config, tmp_path):
    write(tmp_path, "train", xx=SOURCE, yy=TARGET, weights=[*"120111111"], documents=IDS)
    write(tmp_path, "train", align=["1-0", "0-1", "", "1-1", "", "0-0", "0-0", "2-1", "3-2"])
    plain = in_folder(config, tmp_path, alignments=("train.align",))
    stores = []
    for context in (0, 2):
        data = dataclasses.replace(plain, context=context)
        pairs = read_pairs(data, "train")
        run = change(config, model={"alignment": dataclasses.replace(config.model.alignment, weight=0.1)})
        stores.append(prepare(dataclasses.replace(run, data=data), tmp_path / f"run{len(stores)}").train.base)
        assert len(pairs) == 7
    alone, read = stores
    assert alone.columns["target_weights"].values.tolist() == read.columns["target_weights"].values.tolist()
    for number in range(len(alone)):
        (source, target), (longer, same) = alone[number], read[number]
        own, moved = (store.columns["alignment"]._links.take(np.array([number]))[0] for store in stores)
        assert (own + (len(longer) - len(source) << 16)).tolist() == moved.tolist()
        assert target.tolist() == same.tolist()
    assert len(read.source.tokens) > len(alone.source.tokens)


def test_without_a_context_nothing_changes(config, tmp_path):
    """Fingerprints that version 0.2.0 had before there were documents."""
    write(tmp_path, "train", xx=SOURCE, yy=TARGET)
    data = text_data(tmp_path, "xx-yy")
    before = read_pairs(data, "train")
    write(tmp_path, "train", documents=IDS)
    assert read_pairs(data, "train").fingerprint == before.fingerprint
    assert read_pairs(dataclasses.replace(data, context=1), "train").fingerprint != before.fingerprint
    assert before.fingerprint == FINGERPRINT


def test_a_line_is_read_as_its_pair_is_stored(config, translator, tmp_path):
    data = dataclasses.replace(config.data, cache_dir=str(tmp_path))
    prepared = prepare(dataclasses.replace(config, data=data), None)
    pairs, engine = read_pairs(data, "valid"), translator.engine()
    assert prepared.vocabs.source.fingerprint == translator.vocabs.source.fingerprint
    documents = Documents([pair.source for pair in pairs], 2, pairs.documents)
    for number, request in enumerate(make_requests(documents, {}, documents=documents)):
        assert len(request.context) == (0, 1, 2, 2, 0, 0, 0, 1, 2)[number]
        (line,) = engine.read([request])
        for part in line.parts:  # none of a blank line
            sentence = part.sentence
            assert sentence.source.tolist() == prepared.valid[number][0].tolist() and not sentence.prefix
        assert len(line.parts) == bool(SOURCE[number])


LINES = [line for line in SOURCE * 3 if line]
LINE_IDS = [n // 5 for n in range(len(LINES))]


def test_lines_are_translated_in_windows_of_any_size_and_in_any_order(translator):
    texts = [one.text for one in translator.translate(LINES, documents=LINE_IDS)]
    for window in (1, 3, 7):
        windows = translator.translate_stream(LINES, documents=LINE_IDS, window=window)
        assert [one.text for one in windows] == texts, window
    documents = Documents(LINES, 2, LINE_IDS)
    requests = [*make_requests(documents, {}, documents=documents)]
    (found,) = translator.engine().run([requests[::-1]])
    assert [one.text for one in found] == texts[::-1]
    assert [one.text for one in translator.translate(LINES)] != texts


def test_annotations_are_of_the_line_alone(translator):
    annotations = Annotations(token_log_probs=True, alignments="words", attention=True)
    found = translator.translate(LINES, documents=True, annotations=annotations, n_best=2)
    for line, one in zip(LINES, found, strict=True):
        for hypothesis in one.n_best:
            assert len(hypothesis.token_log_probs) == len(hypothesis.tokens)
            assert {len(row) for row in hypothesis.attention} <= {len(one.source_pieces)}
            words = len(line.split()), max(1, len(hypothesis.text.split()))  # a text may be a space
            assert all(i < words[0] and j < words[1] for i, j in hypothesis.alignment)
        assert "".join(one.source_pieces).replace("\u2581", " ").strip() == line


def test_sentences_of_a_line_are_lines_before_one_another(translator):
    engine = translator.with_search(method="greedy").engine()
    request = Request("ab. Ba. Ab. Ba.", context=("ab ba. Aba.",))
    (line,) = engine.read([request])
    pieces = [translator.vocabs.source.detokenize(part.sentence.source) for part in line.parts]
    assert [piece.count("<sep>") for piece in pieces] == [2, 2, 2, 2] and len(line.parts) == 4
    (alone,) = engine.read([dataclasses.replace(request, context=None)])
    assert all(part.added_pieces == 0 for part in alone.parts)


def ask(translator, text, **fields):
    from flaxformer_mt.commands.server.request_fields import TextRequest
    from flaxformer_mt.commands.server.translations import Translations, direct

    thread = ModelThread(translator.engine(arriving=True))
    try:
        server = Translations(direct(thread, translator.config.data), most_waiting=100)
        wanted = TextRequest(q=text, source="xx", target="yy", **fields)
        return asyncio.run(server.translate(wanted))["translatedText"]
    finally:
        thread.stop()


def test_the_server_reads_text_and_html_as_documents(translator):
    pytest.importorskip("starlette", reason="the server needs the extra serve")
    lines = [*LINES[:3], "", *LINES[3:6]]
    expected = [one.text for one in translator.translate(lines, documents=True)]
    assert ask(translator, "\n".join(lines)).split("\n") == expected
    alone = [one.text for one in translator.translate(lines)]
    assert ask(translator, "\n".join(lines), documents=False).split("\n") == alone != expected
    html = "".join(f"<p>{line}</p>" for line in LINES[:4])
    found = [one.text for one in translator.translate(LINES[:4], documents=True)]
    assert ask(translator, html, format="html") == "".join(f"<p>{text}</p>" for text in found)


# ---- the command ----


def test_an_interrupted_translation_resumes_with_the_same_bytes(run_dir, tmp_path, monkeypatch):
    """In the middle of a document, whose lines are read again from the input."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "in", txt=LINES, ids=LINE_IDS)
    documents = ["--documents", "--document_ids=in.ids"]
    command = ["translate", f"--run={run_dir}", "--input=in.txt", "--window=4"]
    assert main([*command, *documents, "--output=whole"]) == 0
    found = Translator.load(run_dir, use_all_devices=False).translate(LINES, documents=LINE_IDS)
    assert Path("whole").read_text().split("\n")[:-1] == [one.text for one in found]
    write_lines, written = ResumableOutput.write, []

    def write_nine(self, lines):
        if len(written) == 9:
            raise KeyboardInterrupt
        written.append(write_lines(self, lines))

    with monkeypatch.context() as patch:
        patch.setattr(ResumableOutput, "write", write_nine)
        assert main([*command, *documents, "--output=out"]) == 130
    again = [*command, "--output=out", "--resume"]
    assert main([*again, "--documents"]) == 2
    assert main([*again, *documents]) == 0
    assert Path("out").read_bytes() == Path("whole").read_bytes() and not Path("out.partial").exists()


def one_line(capfd):
    message = capfd.readouterr().err.strip()
    assert "Traceback" not in message and message.startswith("error: ") and "\n" not in message
    return message


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--document_ids=ids"], "--document_ids=ids has no effect without --documents"),
        (["--documents", "--document_ids=-"], "--document_ids=- cannot be standard input"),
        (
            ["--documents", "--document_ids=ids"],
            "ids has 2 lines, but --input=in has 3; give one",
        ),
        (["--documents", "--document_ids=out", "--output=out"], "would overwrite the input out"),
    ],
)
def test_wrong_flags(run_dir, tmp_path, monkeypatch, capfd, flags, words):
    monkeypatch.chdir(tmp_path)
    Path("in").write_text("a\nb\nc\n")
    Path("ids").write_text("1\n2\n")
    Path("out").write_text("1\n2\n2\n")
    assert main(["translate", f"--run={run_dir}", "--input=in", *flags]) == 2
    assert words in one_line(capfd)


def test_documents_for_a_model_that_reads_each_line_alone(tiny_run, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    Path("in").write_text("ba\n")
    assert main(["translate", f"--run={tiny_run}", "--input=in", "--documents"]) == 2
    assert "--documents has no effect on this model, which reads each line alone" in one_line(capfd)
    alone = Translator.load(tiny_run, use_all_devices=False)
    with pytest.raises(UserError, match="documents has no effect on this model"):
        alone.translate(["ba", "do"], documents=True)
    with pytest.raises(UserError, match="a context has no effect on this model"):
        alone.engine().submit(Request("ba", context=("do",)))
    pytest.importorskip("starlette", reason="the server needs the extra serve")
    from starlette.exceptions import HTTPException

    with pytest.raises(HTTPException, match="the field documents is true, but a model reads each line alone"):
        ask(alone, "ba", documents=True)


def test_wrong_configs_and_documents_of_the_api(config, translator):
    for data, words in (
        ({"valid_pairs": 2}, "data.context is 2, but data.valid_pairs 2 and data.test_pairs 0 hold out"),
        ({"source_language": ""}, "data.context is 2, but a language model has no sources"),
    ):
        with pytest.raises(UserError, match=words):
            validate(change(config, data=data))
    for ids in ([1, 2], [1] * 4):
        with pytest.raises(UserError, match="ids of documents"):
            translator.translate(["a", "b", "a"], documents=ids)
    with pytest.raises(UserError, match="line 2 is bytes, not str"):
        translator.translate(["a", b"b"], documents=True)


def test_wrong_files_of_documents(config, tmp_path, capfd):
    write(tmp_path, "train", xx=SOURCE, yy=TARGET, documents=IDS[1:])
    names = ("context", "max_source_length", "source_language", "target_language")
    flags = [f"--config.data.{name}={getattr(config.data, name)}" for name in names]
    flags += [f"--config.data.cache_dir={tmp_path / 'cache'}", "--config.vocab.size=20"]
    text = [f"--config.data.text_dir={tmp_path}", "--config.data.dataset=parallel_text"]
    command = ["prepare", f"--run={tmp_path / 'run'}", "--config.vocab.byte_fallback=False", *flags]
    command.append("--config.vocab.normalization=identity")
    assert main([*command, *text]) == 2
    assert f"{tmp_path / 'train.documents'} has 8 lines for 9 pairs" in one_line(capfd)
    write(tmp_path, "train", documents=IDS)
    (tmp_path / "train.documents.gz").write_bytes(gzip.compress(b"1\n"))
    assert main([*command, *text]) == 2
    assert "has both train.documents and train.documents.gz" in one_line(capfd)
    (tmp_path / "train.documents.gz").unlink()
    # A vocabulary of a model that reads each line alone has no separator.
    alone = [*command[:1], f"--run={tmp_path / 'alone'}", *command[2:], "--config.data.context=0", *text]
    assert main(alone) == 0
    model = f"--config.vocab.source_model={tmp_path / 'alone' / 'vocab' / 'joint.model'}"
    capfd.readouterr()
    assert main([*command, *text, model]) == 2
    assert "<sep>" in one_line(capfd)
    toy = [flag for flag in flags if "language" not in flag]
    assert main(["prepare", f"--run={tmp_path / 'toy'}", *toy, "--config.data.dataset=toy_de_en"]) == 2
    assert "rows of toy_de_en are in no known order" in capfd.readouterr().err.split("\nerror: ")[-1]
