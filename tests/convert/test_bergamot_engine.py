"""The engine of browsers, in Node and in Chromium, translates our folders as we do; .ci/engines runs this."""

import functools
import http.server
import os
import re
import shutil
import subprocess
import threading
from pathlib import Path

import pytest
import sacrebleu
from browser import Browser, missing_programs

from flaxformer_mt.config.load_options import LoadOptions
from flaxformer_mt.convert.export_run import export_run
from flaxformer_mt.corpus.reader import read_pairs
from flaxformer_mt.runs.load_run import load_trained
from flaxformer_mt.translation.translator import Translator

# A folder with browser/ (recipes/browser with its packages), run/ (a student) and shortlist.txt.
ENGINES = Path(os.environ.get("FLAXFORMER_MT_ENGINES", ""))
pytestmark = pytest.mark.skipif(
    not (ENGINES / "browser" / "node_modules").is_dir(),
    reason="without the engine, which .ci/engines installs",
)
LINES = 200
KINDS = {"none": "deen.bin", "int8": "deen.intgemm.alphas.bin", "int8_dynamic": "deen.intgemm8.bin"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("exported")
    for kind, ending in KINDS.items():
        written = export_run(
            ENGINES / "run",
            format_name="bergamot",
            output=root / kind,
            quantization=kind,
            shortlist=ENGINES / "shortlist.txt",
        )
        assert f"model.{ending}" in written["files"]
    export_run(ENGINES / "run", format_name="bergamot", output=root / "all pieces", quantization="int8")
    return root


@pytest.fixture(scope="module")
def text():
    pairs = read_pairs(load_trained(ENGINES / "run").config.data, "test")
    chosen = [pairs[number] for number in range(LINES)]
    return [pair.source for pair in chosen], [pair.target for pair in chosen]


@pytest.fixture(scope="module")
def our_bleu(text):
    options = LoadOptions(quantization="int8", shortlist=ENGINES / "shortlist.txt")
    translations = Translator.load(ENGINES / "run", options).translate(text[0])
    return sacrebleu.corpus_bleu([one.text for one in translations], [text[1]]).score


def translate_in_node(folder: Path, lines: list[str]) -> list[str]:
    done = subprocess.run(
        ["node", "translate.mjs", folder],
        cwd=ENGINES / "browser",
        input="\n".join(lines) + "\n",
        capture_output=True,
        text=True,
        check=True,
    )
    print(folder.name, done.stderr.strip())
    return done.stdout.splitlines()


@pytest.mark.parametrize("kind", [*KINDS, "all pieces"])
def test_node_translates_as_we_do(kind, folders, text, our_bleu):
    found = translate_in_node(folders / kind, text[0])
    assert len(found) == LINES and all(found)
    bleu = sacrebleu.corpus_bleu(found, [text[1]]).score
    print(f"{kind}: {bleu:.2f} BLEU, ours in int8 {our_bleu:.2f}")
    assert our_bleu > 40 and abs(bleu - our_bleu) <= 0.5


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments):
        pass


@pytest.mark.skipif(bool(missing_programs()), reason=f"without a browser: {missing_programs()}")
def test_a_page_translates_while_one_types(folders, text, tmp_path):
    shutil.copytree(ENGINES / "browser", tmp_path / "page")
    shutil.copytree(folders / "int8", tmp_path / "page" / "model")
    handler = functools.partial(Quiet, directory=tmp_path / "page")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    browser = Browser()
    try:
        browser.open(f"http://127.0.0.1:{server.server_port}/")
        browser.wait("document.querySelector('#state').textContent === 'de to en'")
        for line, expected in zip(text[0][:3], translate_in_node(folders / "int8", text[0][:3]), strict=True):
            browser.run("document.querySelector('#source').value = ''")
            browser.type("#source", line)
            browser.wait(f"document.querySelector('#target').value === {expected!r}")
        # All lines at once, as the page pastes them.
        browser.run(f"document.querySelector('#source').value = {chr(10).join(text[0])!r}")
        browser.run("document.querySelector('#source').dispatchEvent(new Event('input'))")
        count = f"document.querySelector('#target').value.split('\\n').length === {LINES}"
        browser.wait(count)
        found = browser.run("document.querySelector('#target').value").split("\n")
        assert all(found)
        bleu = sacrebleu.corpus_bleu(found, [text[1]]).score
        node = translate_in_node(folders / "int8", text[0])
        assert abs(bleu - sacrebleu.corpus_bleu(node, [text[1]]).score) <= 0.5
        assert browser.messages() == []
        # The page of the model card, beside the files of the model.
        card = (tmp_path / "page" / "model" / "README.md").read_text()
        (code,) = re.findall(r"^```html\n(.*?)^```", card, re.S | re.M)
        (tmp_path / "page" / "model" / "card.html").write_text(code)
        (tmp_path / "page" / "model" / "node_modules").symlink_to(tmp_path / "page" / "node_modules")
        browser.open(f"http://127.0.0.1:{server.server_port}/model/card.html")
        (expected,) = translate_in_node(folders / "int8", ["A sentence."])
        assert browser.wait("document.body.innerText").strip() == expected
    finally:
        browser.close()
        server.shutdown()
        server.server_close()
