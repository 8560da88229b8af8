"""The faults of run_scorers.sh, and how many of them are found. Its arguments are a step and its files.

corpus TATOEBA writes data/noisy, data/clean (its good pairs) and data/others; thresholds RUN REVERSE prints
what the best thresholds find in data/noisy; candidates SAMPLES writes data/candidates.jsonl with planted
answers; problems prints how many of these data/first has found; quality REFERENCES compares what was chosen.
"""

import collections
import json
import random
import sys
from pathlib import Path

from sacrebleu import corpus_bleu, corpus_chrf

from flaxformer_mt import define_scorer
from flaxformer_mt.config.directions import Direction
from flaxformer_mt.scoring.metrics import score_sentences
from flaxformer_mt.text_io.candidates import unwrap

DATA, PAIRS, DICE = Path("data"), 50_000, random.Random(1)
SHARES = {"shuffled": 0.10, "copied": 0.05, "cut": 0.05}
ANSWERS = Path("tests/commands/planted_answers.json")
KINDS = ("preambles", "afterthoughts", "refusals", "others", "held_out")


def read(path):
    return path.read_text(encoding="utf-8").split("\n")[:-1]


def write(path, lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def write_corpus(tatoeba):
    """No sentence of the noisy corpus is in the other pairs, on which the filter's models are trained."""
    groups = collections.defaultdict(list)
    for german, english in zip(read(tatoeba / "train.de"), read(tatoeba / "train.en"), strict=True):
        groups[english].append(german)
    sentences = list(groups)
    DICE.shuffle(sentences)
    pairs = [(german, english) for english in sentences for german in groups[english]]
    noisy, known = pairs[:PAIRS], {text for pair in pairs[:PAIRS] for text in pair}
    others = [pair for pair in pairs[PAIRS:] if not known & {*pair}][:PAIRS]
    order, kinds, start = DICE.sample(range(PAIRS), PAIRS), ["good"] * PAIRS, 0
    for kind, share in SHARES.items():
        rows = order[start : (start := start + round(share * PAIRS))]
        targets = [noisy[row][1] for row in rows]
        for place, row in enumerate(rows):
            german, english = noisy[row]
            words, first = english.split(), DICE.random() < 0.5
            half = len(words) // 2
            cut = " ".join(words[: -half or None] if first else words[half:])
            changed = {"shuffled": targets[place - 1], "copied": german, "cut": cut}[kind]
            noisy[row], kinds[row] = (german, changed), kind if changed != english else "good"
    good = [pair for pair, kind in zip(noisy, kinds, strict=True) if kind == "good"]
    for name, rows in {"noisy": noisy, "clean": good, "others": others}.items():
        for side, language in enumerate(("de", "en")):
            write(DATA / name / f"train.{language}", [pair[side] for pair in rows])
            held_out = read(tatoeba / f"valid.{language}")
            write(DATA / name / f"valid.{language}", held_out[:200])
            write(DATA / name / f"test.{language}", held_out[1000:])
    write(DATA / "noisy/kinds", kinds)


def find_thresholds(run, reverse):
    """The best threshold of a filter has the highest F1 of finding faults."""
    german, english, kinds = (read(DATA / "noisy" / name) for name in ("train.de", "train.en", "kinds"))
    numbers = collections.Counter(kinds)
    good, faults = numbers["good"], len(kinds) - numbers["good"]
    for definition in (f"back=run:{reverse}", f"both=run:{run},run:{reverse}"):
        name = define_scorer(definition)
        scores = score_sentences(name, german, english, None, direction=Direction("de", "en"))
        order, dropped, best = (
            sorted(range(len(kinds)), key=scores.__getitem__),
            collections.Counter(),
            (0, 0),
        )
        for rank, row in enumerate(order, start=1):
            dropped[kinds[row]] += 1
            best = max(best, (2 * (rank - dropped["good"]) / (rank + faults), rank))
        dropped = collections.Counter(kinds[row] for row in order[: best[1]])
        right = best[1] - dropped["good"]
        print(f"{name}>={scores[order[best[1]]]:.4g}: F1 {best[0]:.3f} of finding faults, ", end="")
        print(
            f"precision {right / best[1]:.1%}, recall {right / faults:.1%}; of keeping good pairs, ", end=""
        )
        print(
            f"{(good - dropped['good']) / (len(kinds) - best[1]):.1%}, {1 - dropped['good'] / good:.1%}; ",
            end="",
        )
        print({kind: f"{dropped[kind] / numbers[kind]:.1%}" for kind in SHARES}, "are found")


def write_candidates(samples):
    """A tenth of the candidates becomes a planted answer, most of them with the candidate in it."""
    answers, texts = json.loads(ANSWERS.read_text(encoding="utf-8")), collections.defaultdict(list)
    for line in read(samples):
        number, text, _ = line.split(" ||| ")
        texts[int(number)].append(text)
    rows, planted = [], []
    for number, source in enumerate(read(samples.with_suffix(".de"))):
        # The command sorts samples by probability; those of language models have no order.
        row, faults = DICE.sample(texts[number], len(texts[number])), {}
        for place, text in enumerate(row):
            if DICE.random() < 0.1:
                kind = DICE.choice(KINDS)
                answer, faults[place] = DICE.choice(answers[kind]), (kind, text)
                row[place] = answer.replace("{source}", source).replace("{target}", text)
        rows.append({"source": source, "translations": row})
        planted.append(faults)
    write(DATA / "candidates.jsonl", map(json.dumps, rows))
    write(DATA / "planted.jsonl", map(json.dumps, planted))


def count_problems():
    """A fault is found if its candidate is left out, or becomes the translation that it was made from."""
    counts, found, lost = collections.Counter(), collections.Counter(), collections.defaultdict(list)
    for row in zip(read(DATA / "first/choices.jsonl"), read(DATA / "planted.jsonl"), strict=True):
        choice, faults = map(json.loads, row)
        for place, (text, problem) in enumerate(zip(choice["texts"], choice["problems"], strict=True)):
            kind, original = faults.get(str(place), ("good", ""))
            counts[kind] += 1
            found[kind] += bool(problem) or (kind != "good" and text == unwrap(choice["source"], original))
            if problem and kind == "good":
                lost[problem].append((choice["source"], text))
    for kind, count in counts.items():
        print(f"{kind}: {found[kind]} of {count} are left out or mended, {found[kind] / count:.2%}")
    planted = sum(counts[kind] for kind in KINDS)
    print(f"all that were planted: {sum(found[kind] for kind in KINDS) / planted:.2%} of {planted}")
    print({problem: (len(examples), examples[:3]) for problem, examples in lost.items()})


def compare_choices(references):
    """BLEU and chrF of what was chosen, and of the first candidates as they are."""
    rows = [json.loads(row)["translations"] for row in read(DATA / "candidates.jsonl")]
    chosen = {"as they are": [row[0] for row in rows]}
    for choice in ("first", "scorer", "oracle"):
        rows = [json.loads(row) for row in read(DATA / choice / "choices.jsonl")]
        chosen[choice] = ["" if row["number"] is None else row["texts"][row["number"]] for row in rows]
    for choice, texts in chosen.items():
        bleu, chrf = (score(texts, [read(references)]).score for score in (corpus_bleu, corpus_chrf))
        print(f"{choice}: {bleu:.2f} BLEU, {chrf:.2f} chrF")


steps = {
    "corpus": write_corpus,
    "thresholds": find_thresholds,
    "candidates": write_candidates,
    "problems": count_problems,
    "quality": compare_choices,
}
steps[sys.argv[1]](*map(Path, sys.argv[2:]))
