"""Does a model learn a language sooner whose rows are copies and means? A relexified toy language tells.

    PYTHONPATH=. python benchmarks/new_language.py texts --work=W
    PYTHONPATH=. python benchmarks/new_language.py random_rows --work=W --run=W/means --parent=W/parent
    PYTHONPATH=. python benchmarks/new_language.py curves RUN ... --threshold=30

The language qaa is the German of toy_de_en with another word in the place of each (der Hund: nofe Tiwu): the
grammar is the same, and no word is. `texts` writes pairs of both with English, and a random tiny model like
NLLB whose tokenizer knows German and English. `random_rows` copies a run and draws the rows that its parent
lacks at random. `curves` tells the update at which the mean BLEU of the directions with qaa reaches a
threshold, by linear interpolation, and the last BLEU of all. experiments/new_language.sh has all commands.
"""

import argparse
import json
import random
import re
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean

import numpy as np

SIZES = {"old": {"train": 6000, "valid": 100, "test": 200}, "new": {"train": 2000, "valid": 100, "test": 200}}
NEW = "qaa_Latn"
_WIDTH, _PIECES = 64, 1200
_LETTERS = ("bdfgklmnprstvwz", "aeiouäöü")


def main() -> None:
    """Do what the first argument says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=["texts", "random_rows", "curves"])
    parser.add_argument("runs", nargs="*", type=Path)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--run", type=Path)
    parser.add_argument("--parent", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threshold", type=float, default=30.0)
    options = parser.parse_args()
    if options.action == "texts":
        write_texts(options.work)
    elif options.action == "random_rows":
        draw_rows(options.run, options.parent, options.work / f"random_rows_{options.seed}", options.seed)
    else:
        for run in options.runs:
            print(run.name, describe_curve(run, options.threshold))


def write_texts(work: Path) -> None:
    """Write WORK/old/SPLIT.de and .en, WORK/new/SPLIT.qaa_Latn and .en, and the model WORK/random."""
    from flaxformer_mt.corpus.toy.grammar import make_pairs

    sizes = [(name, split, size) for name, splits in SIZES.items() for split, size in splits.items()]
    sets = make_pairs([size for *_, size in sizes])
    words = make_words(word for pairs in sets for pair in pairs for word in split_words(pair[0]))
    for (name, split, _), pairs in zip(sizes, sets, strict=True):
        (work / name).mkdir(parents=True, exist_ok=True)
        sides = {"en": [english for _, english in pairs], "de": [german for german, _ in pairs]}
        if name == "new":
            sides[NEW] = [replace_words(line, words) for line in sides.pop("de")]
        for language, lines in sides.items():
            (work / name / f"{split}.{language}").write_text("".join(f"{line}\n" for line in lines))
    write_model(work / "random", [line for pair in sets[0] for line in pair])


def split_words(line: str) -> list[str]:
    """Words of letters, in lower case."""
    return re.findall(r"[^\W\d_]+", line.lower())


def make_words(words: Iterable[str]) -> dict[str, str]:
    """Return a made-up word for each word, as long or a little longer; none of them is a word itself."""
    dice, made = random.Random(7), dict[str, str]()
    taken = known = set(words)
    for word in sorted(known):
        new, length = word, 2 * len(word)
        while new in taken:
            new = "".join(dice.choice(_LETTERS[number % 2]) for number in range(length // 2))
            length += 1  # short words run out
        taken, made[word] = taken | {new}, new
    return made


def replace_words(line: str, words: dict[str, str]) -> str:
    """Replace each word, with its capital."""

    def replace(match: re.Match[str]) -> str:
        new = words[match[0].lower()]
        return new.capitalize() if match[0][0].isupper() else new

    return re.sub(r"[^\W\d_]+", replace, line)


def write_model(folder: Path, lines: list[str]) -> None:
    """Write a random model like NLLB, 2 + 2 layers, with a tokenizer of these lines."""
    import tokenizers
    import torch
    import transformers

    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="always")
    specials = ["<s>", "<pad>", "</s>", "<unk>"]
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=_PIECES, special_tokens=specials, show_progress=False)
    tokenizer.train_from_iterator(lines, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    pretrained = transformers.NllbTokenizer(
        vocab=model["vocab"], merges=merges, src_lang="deu_Latn", tgt_lang="eng_Latn"
    )
    pretrained.save_pretrained(folder)
    torch.manual_seed(1)
    config = transformers.M2M100Config(
        vocab_size=len(pretrained),
        d_model=_WIDTH,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=4 * _WIDTH,
        decoder_ffn_dim=4 * _WIDTH,
        max_position_embeddings=256,
    )
    transformers.M2M100ForConditionalGeneration(config).save_pretrained(folder)


def draw_rows(run: Path, parent: Path, output: Path, seed: int) -> None:
    """Copy a run, with random rows of the parent's scale for the pieces and tags that the parent lacks."""
    from flaxformer_mt.parameter_trees import flatten_tree, unflatten_like
    from flaxformer_mt.runs.load_run import load_named, write_new_run
    from flaxformer_mt.training.initial_model import map_pieces

    base, before = load_named(str(run)), load_named(str(parent))
    new = map_pieces(before.vocabs.target, base.vocabs.target) < 0
    leaves = {path: np.array(leaf) for path, leaf in flatten_tree(base.params).items()}
    for path, leaf in leaves.items():
        if path.endswith("_embedding/embedding"):
            drawn = np.random.default_rng(seed).normal(0, leaf[~new].std(), leaf.shape)
            leaves[path] = np.where(new[:, None], drawn, leaf).astype(leaf.dtype)
    output.mkdir()
    origin = {"format": "random_rows", "path": str(run)}
    write_new_run(output, base.config, base.vocabs, unflatten_like(base.params, leaves), origin=origin)
    print(f"{output}: {new.sum()} of {len(new)} rows are random")


def describe_curve(run: Path, threshold: float) -> str:
    """Return the update of the threshold, the last BLEU of new and old directions, and the curve."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    points = []
    for line in lines:
        scores = {name[5:]: value for name, value in line.items() if name.startswith("bleu_")}
        if line["split"] == "valid" and scores:
            new = fmean(value for name, value in scores.items() if NEW in name)
            old = [f"{value:.1f} {name}" for name, value in scores.items() if NEW not in name]
            points.append((line["step"], new, ", ".join(old)))
    reached = "never"
    for (step, score, _), (later, better, _) in zip(points, points[1:], strict=False):
        if score < threshold <= better:
            reached = f"{step + (later - step) * (threshold - score) / (better - score):.0f}"
            break
    curve = " ".join(f"{score:.1f}" for _, score, _ in points)
    return f"{threshold:g} at {reached}; last: new {points[-1][1]:.1f}, old {points[-1][2]}; new: {curve}"


if __name__ == "__main__":
    main()
