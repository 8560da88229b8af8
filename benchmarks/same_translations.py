"""Translations by exported models: Hugging Face generate and CTranslate2 compared with our beam search.

    PYTHONPATH=. python benchmarks/same_translations.py --run=runs/toy_de_en --work=DIR

Exports the run to CTranslate2 (float32 and int8) and to the Hugging Face format that can represent it,
translates the run's test set with all four systems and beam size 4, and prints as JSON the BLEU of each
system and the number of its translations that differ from ours. Our model scores each differing translation:
it is less probable than ours (our search was better), more probable (the other search was better), or equally
probable. The probabilities exclude the length penalty, by which the systems may also rank hypotheses
differently.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from systems import require_packages

from flaxformer_mt.config.files import read_config
from flaxformer_mt.convert.export_run import export_run, load_weights
from flaxformer_mt.convert.parity_check import flax_outputs, make_batch
from flaxformer_mt.corpus.reader import read_pairs
from flaxformer_mt.scoring.metrics import score_translations
from flaxformer_mt.translation.translator import Translator

BEAM = 4
BATCH = 50


def translate_with_hugging_face(folder: Path, sources: list[str]) -> list[str]:
    """Translate with generate(num_beams=4); the folder's generation_config.json sets all other options."""
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSeq2SeqLM.from_pretrained(folder)
    translations = []
    for start in range(0, len(sources), BATCH):
        batch = tokenizer(sources[start : start + BATCH], return_tensors="pt", padding=True)
        ids = model.generate(**batch, num_beams=BEAM)
        translations += tokenizer.batch_decode(ids, skip_special_tokens=True)
    return translations


def translate_with_ctranslate2(folder: Path, sources: list[str]) -> list[str]:
    """Translate with translate_batch(beam_size=4); all other options have their defaults."""
    import ctranslate2
    import sentencepiece

    source, target = (
        sentencepiece.SentencePieceProcessor(model_file=str(folder / f"{side}.spm"))
        for side in ("source", "target")
    )
    translator = ctranslate2.Translator(str(folder), compute_type="default", inter_threads=1, intra_threads=2)
    results = translator.translate_batch(
        [source.encode(line, out_type=str) for line in sources], beam_size=BEAM
    )
    return [target.decode(result.hypotheses[0]) for result in results]


def explain(run: Path, sources: list[str], ours: list[str], theirs: list[str]) -> dict[str, int]:
    """Count the differing translations that our model finds less, more or equally probable as ours."""
    weights = load_weights(run, checkpoint=None, warn=print)
    vocabs, config = weights.vocabs, weights.config
    counts = {"we found the more probable": 0, "they found the more probable": 0, "equally probable": 0}
    for source, one, two in zip(sources, ours, theirs, strict=True):
        if one == two:
            continue
        ids = [vocabs.target.tokenize(text) for text in (one, two)]
        batch = make_batch([vocabs.source.tokenize(source)] * 2, ids, vocabs, config=config)
        log_probs = flax_outputs(weights, batch, quantity="log_probs")
        first, second = np.where(batch.target_mask, log_probs, 0).sum(axis=1)
        key = "equally" if abs(first - second) < 1e-4 else "we found" if first > second else "they found"
        counts[next(name for name in counts if name.startswith(key))] += 1
    return counts


def main() -> None:
    """Print the comparison as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    options = parser.parse_args()
    require_packages(["hugging_face", "ctranslate2"])
    config = read_config(options.run / "config.json")
    pairs = read_pairs(config.data, "test")
    sources = [pair.source for pair in pairs]
    references = [pair.target for pair in pairs]

    pre_norm = config.model.norm_position == "pre"
    hugging_face = "hf-pre-norm" if pre_norm else "marian"
    exports = {hugging_face: "none", "ctranslate2": "none", "ctranslate2 int8": "int8"}
    systems: dict[str, Callable[[Path, list[str]], list[str]]] = {
        hugging_face: translate_with_hugging_face,
        "ctranslate2": translate_with_ctranslate2,
        "ctranslate2 int8": translate_with_ctranslate2,
    }
    ours = [t.text for t in Translator.load(options.run).translate(sources)]
    report: dict[str, object] = {
        "run": str(options.run),
        "sentences": len(sources),
        "ours": {"bleu": round(score_translations(ours, references)["bleu"], 2)},
    }
    for name, quantization in exports.items():
        folder = options.work / name.replace(" ", "_")
        result = export_run(
            options.run,
            format_name=name.split(" ")[0],
            output=folder,
            quantization=quantization,
        )
        start = time.monotonic()
        theirs = systems[name](folder, sources)
        report[name] = {
            "bleu": round(score_translations(theirs, references)["bleu"], 2),
            "different": sum(a != b for a, b in zip(ours, theirs, strict=True)),
            "of_these": explain(options.run, sources, ours, theirs),
            "largest_logit_difference": result["largest_difference"],
            "seconds": round(time.monotonic() - start, 1),
        }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
