"""The page about runs: complete in itself, readable by programs and people, with the numbers of the runs."""

import dataclasses
import html
import html.parser
import json
import re
import shutil

import numpy as np
import pytest
from browser import Browser, missing_programs
from failing_store import close_copies, move_to_machine, new_bucket
from tiny_experiment import change

import flaxformer_mt
from flaxformer_mt.commands.main import main
from flaxformer_mt.config import Config, DataConfig
from flaxformer_mt.config.files import read_config, save_config
from flaxformer_mt.evaluation.evaluation_set import Translations, load_translations, save_translations
from flaxformer_mt.evaluation.plots import Bar, Line, chart_bars, chart_lines
from flaxformer_mt.evaluation.run_report.page import make_page, report_runs
from flaxformer_mt.evaluation.run_report.sections import (
    ReportedRun,
    make_summary,
    mark_words,
    name_apart,
    read_runs,
)
from flaxformer_mt.object_store.filesystem import ObjectStore
from flaxformer_mt.scoring.metrics import score_translations
from flaxformer_mt.scoring.significance import ResamplingOptions, resample_scores

# What the made-up text has.
REPEATED = {"duplicates": {"count": 5, "action": "keep"}}

VOID = {"meta", "link", "br", "img", "input"}


class Outline(html.parser.HTMLParser):
    """The elements of a page; all of them are closed in order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.elements = [], []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, (tag, self.getpos())


@pytest.fixture(scope="module")
def two_runs(tiny_run, tmp_path_factory):
    other = tmp_path_factory.mktemp("runs") / "other"
    other.mkdir()
    for name in ("metrics.jsonl", "report.json"):
        shutil.copy(tiny_run / name, other)
    config = read_config(tiny_run / "config.json")
    save_config(change(config, model={"dropout_rate": 0.3}), other / "config.json")
    found = load_translations(tiny_run, "test")
    changed = ("<b>x & y</b>", "<script>alert('a')</script>", *found.hypotheses[2:])
    save_translations(other, "test", dataclasses.replace(found, hypotheses=changed))
    return tiny_run, other


def test_the_page_has_all_of_it_and_makes_no_request(two_runs, tmp_path, capsys):
    first, other = two_runs
    output = tmp_path / "new" / "page.html"
    assert main(["report", f"--run={first}", f"--run={other}", f"--output={output}"]) == 0
    assert '"Training"' in capsys.readouterr().out
    page = output.read_text(encoding="utf-8")
    outline = Outline(page)
    tags = [tag for tag, _ in outline.elements]
    assert not re.search(r"https?:|@import|url\(|<script", page)
    assert "default-src 'none'" in page
    ids = [attributes["id"] for _, attributes in outline.elements if "id" in attributes]
    assert len(ids) == len(set(ids)) and {"h1", "h2", "h3", "nav", "main", "caption"} <= set(tags)
    links = [a["href"] for tag, a in outline.elements if tag == "a"]
    assert {link.removeprefix("#") for link in links} <= set(ids) and len(links) == tags.count("h2") >= 6
    charts = [a for tag, a in outline.elements if tag == "svg" and a.get("class") == "chart"]
    assert len(charts) >= 4 and all(a["role"] == "img" and a["aria-label"] for a in charts)
    found = [load_translations(run, "test") for run in two_runs]
    for one in found:
        score = score_translations(one.hypotheses, one.references)
        assert re.search(rf"{score['bleu']:.2f} ± \d", page) and re.search(rf"{score['chrf']:.2f} ± \d", page)
    assert "<ins>&lt;b&gt;x &amp; y&lt;/b&gt;</ins>" in page
    assert "<ins>&lt;script&gt;alert(&#39;a&#39;)&lt;/script&gt;</ins>" in page, "text of a corpus is text"
    assert "2 of 6 translations differ" in page
    systems = {name: one.hypotheses for name, one in zip("ab", found, strict=True)}
    tested = resample_scores(systems, found[0].references, ResamplingOptions(1000))
    for metric in ("bleu", "chrf", "ter"):
        scores = [system[metric] for system in tested.systems]
        assert f"{scores[1].score - scores[0].score:+.2f} (p = {scores[1].p_value:.3f})" in page
        assert html.escape(tested.signatures[metric]) in page
    assert f"Written by flaxformer_mt {flaxformer_mt.__version__}, 20" in page
    assert "model.dropout_rate" in page and "model.model_dim" not in page
    assert "64</td>" in page  # pairs that were read


def test_training_writes_a_page_about_its_run(tiny_run, tiny_report):
    page = (tiny_run / "report.html").read_text(encoding="utf-8")
    Outline(page)
    assert "The lowest chrF" in page and "data.text_dir" in page
    rows = re.findall(r'<th scope="row">train.steps</th>(.*?)</tr>', page)
    assert [re.findall(">(.*?)</td>", row) for row in rows] == [["48", str(Config().train.steps)]]
    (part,) = tiny_report["data"]["train"]["parts"]
    assert part == {"name": "parallel_text", "read": 64, "pairs": 64, "problems": REPEATED}


def test_the_attention_of_sentences_is_shown(tiny_run, tmp_path):
    output = tmp_path / "page.html"
    report_runs([tiny_run], output, attention=[2], samples=0)
    page = output.read_text(encoding="utf-8")
    Outline(page)
    (table,) = re.findall(r'<table class="heat">.*?</table>', page, re.DOTALL)
    rows = [list(map(float, re.findall(r'title="([\d.]+)"', row))) for row in table.split("<tr>")[2:]]
    assert len(rows) > 1 and len({len(row) for row in rows}) == 1
    assert all(0 < sum(row) < 1.05 for row in rows)  # the end symbol of the source has the rest


@pytest.mark.skipif(
    bool(missing_programs()), reason=f"without a browser: {missing_programs()} (Debian: chromium-driver)"
)
def test_a_reader_with_a_phone_sees_everything_and_requests_nothing(two_runs, tmp_path):
    report_runs(two_runs, tmp_path / "page.html", samples=10)
    colors = []
    for dark in (False, True):
        browser = Browser(width=390, height=844, dark=dark)
        try:
            browser.open((tmp_path / "page.html").as_uri())
            assert browser.run("document.documentElement.scrollWidth") <= 390
            assert browser.run("performance.getEntriesByType('resource').length") == 0
            assert browser.messages() == []
            widths = (
                "[...document.querySelectorAll('svg.chart')].map(one => one.getBoundingClientRect().width)"
            )
            assert len(browser.run(widths)) > 3 and all(300 < width < 390 for width in browser.run(widths))
            wide = "[...document.querySelectorAll('.wide')].map(one => one.scrollWidth - one.clientWidth)"
            assert max(browser.run(wide)) <= 0, "no table is wider than the screen"
            texts = "[...document.querySelectorAll('caption, p, dd')]"
            assert max(browser.run(f"{texts}.map(one => one.getBoundingClientRect().right)")) <= 390
            colors.append(browser.run("getComputedStyle(document.body).backgroundColor"))
        finally:
            browser.close()
    assert colors[0] != colors[1]


def test_user_errors_are_one_line(two_runs, tmp_path, capsys):
    first, other = two_runs
    page, file = tmp_path / "page.html", tmp_path / "file"
    file.write_text("text")
    for flags, message in (
        (["--run=/nowhere"], "/nowhere is not a run directory"),
        ([f"--run={first}", f"--run={first}"], "is given twice"),
        ([f"--run={first}", f"--output={tmp_path}"], "is a folder, but the page is a file"),
        ([f"--run={first}", f"--output={file / 'page.html'}"], f"{file} is a file; give another path"),
        ([f"--run={first}", "--attention=7"], "--attention names sentence 7, but there are 6"),
        ([f"--run={first}", "--attention=1", "--name=none"], "no run has translations of none"),
    ):
        output = [] if any(flag.startswith("--output") for flag in flags) else [f"--output={page}"]
        assert main(["report", *output, *flags]) == 2
        (line,) = capsys.readouterr().err.strip().split("\n")
        assert line.startswith("error: ") and message in line, line
    assert not page.exists()


def test_differing_words_are_marked():
    assert mark_words("a b c", "a x c d") == [("", "a"), ("del", "b"), ("ins", "x"), ("", "c"), ("ins", "d")]
    assert mark_words("", "<a>") == [("ins", "<a>")] and mark_words("a", "a") == [("", "a")]


def test_sentences_of_many_thousands_of_words_are_compared_in_part(two_runs, tmp_path):
    words = [" ".join(f"{word}{n % 7}" for n in range(20_000)) for word in "ab"]
    marked = mark_words(*words)
    assert sum(len(text.split()) for _, text in marked) <= 1002 and marked[-1] == ("", "…")
    run = shutil.copytree(two_runs[0], tmp_path / "run")
    found = load_translations(run, "test")
    long = Translations(found.sources, (words[0], *found.references[1:]), (words[1], *found.hypotheses[1:]))
    save_translations(run, "test", long)
    other = shutil.copytree(run, tmp_path / "other")
    report_runs([run, other], tmp_path / "page.html", samples=2)
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<td>–</td>" in re.sub(" class=[^>]*", "", page)


def test_directions_with_translations_have_intervals(tmp_path):
    texts = ("a b c d e", "b c d e f", "c d e f a", "d e x f a b")
    data = DataConfig(dataset="parallel_text:en-de,parallel_text:en-zh")
    save_config(Config(data=data), tmp_path / "config.json")
    for name, hypotheses in (("en-de", texts[::-1]), ("en-zh", texts)):
        save_translations(tmp_path, f"test.{name}", Translations(texts, texts, hypotheses))
    report_runs([tmp_path], tmp_path / "page.html", samples=20)
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    Outline(page)
    rows = {
        name: re.search(f'<tr><th scope="row">{name}</th>.*?</tr>', page)[0] for name in ("en-de", "en-zh")
    }
    (expected,) = resample_scores({"": texts[::-1]}, texts, ResamplingOptions(20)).systems
    assert (
        f"{expected['bleu'].score:.2f} ± {expected['bleu'].ci:.2f}" in rows["en-de"]
        and "100.00 ± 0.00" in rows["en-zh"]
    )
    assert "report --name=test.en-de" in page
    # The page of one direction, with the tokenizer of its target language.
    report_runs([tmp_path], tmp_path / "page.html", name="test.en-zh", samples=0)
    assert "BLEU by source length" in (tmp_path / "page.html").read_text(encoding="utf-8")
    (facts,) = read_runs([tmp_path], "test.en-zh")
    assert facts.language == "zh" and not facts.by_direction


def test_the_name_of_a_run_may_have_a_comma(two_runs, tmp_path, capsys):
    first, other = two_runs
    named = tmp_path / "a,b"
    named.symlink_to(first)
    for runs in ([named, other], [f"--run={named}", f"--run={other}"], [f"--run={first},,{other}"]):
        assert main(["report", *map(str, runs), f"--output={tmp_path / 'page.html'}"]) == 0
        assert len(json.loads(capsys.readouterr().out)["runs"]) == 2


def test_runs_are_named_apart(tmp_path):
    assert name_apart([tmp_path / "a/x", tmp_path / "b/y"]) == ["x", "y"]
    assert name_apart([tmp_path / "a/x", tmp_path / "b/x"]) == ["a/x", "b/x"]


def test_charts_leave_out_what_is_not_finite_and_what_could_not_be_seen():
    points = [(step, 10 / (step + 1)) for step in range(5000)]
    (curve,) = chart_lines([Line(0, "a<b", [*points, (5000, float("nan"))])], title="Loss", x_name="updates")
    assert len(curve.lines[0].points) == 300 and curve.lines[0].points[-1] == points[-1]
    assert "var(--run0)" in curve.drawing and "var(--line)" in curve.drawing
    assert chart_lines([Line(0, "a", [(1, 2.0)])], title="", x_name="") == []
    groups = {"1-<5": [(0, Bar(50.0, 5.0)), (1, Bar(25.0, None))]}
    (bars,) = chart_bars(groups, title="BLEU", x_name="words")
    page = make_page("", {"Charts": [[curve], [bars]]}, [])
    Outline(page)
    assert "a&lt;b: last value 0.002" in page and "1-&lt;5" in page
    assert page.count("stroke: var(--ink)") == 1, "one whisker"
    heights = []
    for run in (0, 1):
        (path,) = re.findall(rf'd="([^"]+)" style="fill: var\(--run{run}\)', bars.drawing)
        heights.append(np.ptp([float(y) for y in re.findall(r"[ML] \S+ (\S+)", path)]))
    assert heights[0] == pytest.approx(2 * heights[1], rel=1e-3)
    assert chart_bars({}, title="", x_name="") == []


def test_a_single_sentence_has_no_interval(tmp_path):
    text = ("a b c d e", "a b c d")
    for count, scores in ((1, ["100.00", "100.00"]), (2, ["100.00 ± 0.00", "100.00 ± 0.00"])):
        found = Translations(text[:count], text[:count], text[:count])
        facts = ReportedRun(0, "x", tmp_path, Config(), {}, [], found, "de")
        table, signature = make_summary([facts], [facts], samples=50)
        assert table.rows[0][:3] == [facts, *scores]
        score = score_translations(text[:count], text[:count])
        expected = [score.signatures["bleu"], score.signatures["chrf"]]
        assert all(part in signature for one in expected for part in one.split("|"))


def test_the_page_says_of_which_checkpoint_its_scores_are_and_whether_training_went_on(two_runs, tmp_path):
    """`evaluate --checkpoint=average` replaces the translations that training has left."""

    def tell(run, scored):
        return [text for text in make_summary([run], scored, samples=0) if isinstance(text, str)]

    report = {"step": 300, "best": {"step": 250}}
    metrics = [{"step": step, "split": "train", "loss": 1.0} for step in (250, 300, 650, 699)]
    run = ReportedRun(0, "x", tmp_path, Config(), report, metrics[:2], Translations((), (), ()), "de")
    assert tell(run, []) == ["x: the best checkpoint is step 250."]
    assert tell(dataclasses.replace(run, metrics=metrics), []) == [
        "x: the best checkpoint is step 250. training went on to step 699; steps, time and best checkpoint "
        "are of step 300."
    ]
    other, text = two_runs[1], ("a b c d e",)
    for systems in ([""], ["checkpoint average (step 300) (beam search, beam 5)"]):
        save_translations(other, "odd", Translations(text, text, text), *systems)
        (run,) = read_runs([other], "odd")
        told = " ".join(tell(run, [run]))
        assert [f"The scores are of {one}." in told for one in systems] == [bool(systems[0])]


def read_colors(css):
    return {name: value for name, value in re.findall(r"--([\w-]+): (#[0-9a-f]{6})", css)}


def luminance(color):
    parts = [int(color[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_colors_have_enough_contrast(tiny_run):
    """By WCAG 2.2: 4.5 for text, 3 for lines; in the light and in the dark style."""
    page = (tiny_run / "report.html").read_text(encoding="utf-8")
    light, dark = page.split("@media (prefers-color-scheme: dark)")[:2]
    for colors in (read_colors(light), read_colors(dark)):
        pairs = [(ink, back, 4.5) for ink in ("ink", "soft", "accent") for back in ("back", "paper")]
        pairs += [("added-ink", "added", 4.5), ("gone-ink", "gone", 4.5)]
        pairs += [(f"run{number}", "paper", 3) for number in range(6)]
        for ink, back, least in pairs:
            high, low = sorted((luminance(colors[ink]), luminance(colors[back])), reverse=True)
            assert (high + 0.05) / (low + 0.05) >= least, (ink, back)


def test_a_run_in_an_object_store(tiny_run, tmp_path, monkeypatch):
    move_to_machine(monkeypatch, tmp_path / "machine")
    url = f"{new_bucket()}/run"
    files = [path for path in tiny_run.rglob("*") if path.is_file() and "checkpoints" not in path.parts]
    ObjectStore(url).upload([(path, path.relative_to(tiny_run).as_posix()) for path in files])
    assert main(["report", f"--run={url}", f"--output={tmp_path / 'page.html'}"]) == 0
    assert "The lowest chrF" in (tmp_path / "page.html").read_text(encoding="utf-8")
    close_copies()
