"""Makes the model card of an export (README.md): code, training data and scores; templates are in cards/."""

import functools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import flaxformer_mt
from flaxformer_mt.config import Config
from flaxformer_mt.config.directions import choose_tags, choose_target_tag, find_directions
from flaxformer_mt.runs.load_run import name_checkpoint
from flaxformer_mt.runs.run_directory import IMPORTED_STEP
from flaxformer_mt.vocab import PretrainedVocab, Vocabs

# Format -> template of the code that loads the model; other formats have the template state_dict.
_SNIPPETS = {
    **dict.fromkeys(("hf", "marian", "hf-pre-norm"), "transformers"),
    "ctranslate2": "ctranslate2",
    "torch": "torch",
    "marian-npz": "marian",
    "bergamot": "bergamot",
}
# Template -> library_name on the Hub; other templates have the library pytorch.
_LIBRARIES = {
    "transformers": "transformers",
    "ctranslate2": "ctranslate2",
    "marian": "marian",
    "bergamot": "marian",
}
# Maximum length of translations in the code of a card: CTranslate2's default (transformers has 20 tokens).
_LENGTH = 256


def make_card(
    config: Config,
    export: Mapping[str, Any],
    report: Mapping[str, Any] | None = None,
    vocabs: Vocabs | None = None,
) -> str:
    """Return the text of a model card; `export` has the format, checkpoint and step of `ExportResult`."""
    report, directions = report or {}, find_directions(config.data)
    test, snippet = report.get("test") or {}, _SNIPPETS.get(export["format"], "state_dict")
    translates, scores = bool(config.data.source_language), list(_list_scores(test))
    header = {
        "language": list(dict.fromkeys(code for direction in directions for code in direction if code)),
        "library_name": _LIBRARIES.get(snippet, "pytorch"),
        "pipeline_tag": "translation" if translates else "text-generation",
        "tags": ["translation" if translates else "language-model", "flaxformer_mt"],
    }
    if scores:
        header["metrics"] = ["bleu", "chrf"]
    return str(
        _open_templates()
        .get_template("card.md.jinja")
        .render(
            _describe_source(config, vocabs),
            config=config,
            directions=", ".join(direction.name for direction in directions),
            export=export,
            header=header,
            imported_step=IMPORTED_STEP,
            limit=min(config.model.longest_input or _LENGTH, _LENGTH),
            parts=((report.get("data") or {}).get("train") or {}).get("parts", []),
            scores=scores,
            snippet=snippet,
            test=test,
            tested=name_checkpoint(str(test.get("checkpoint")), test.get("step")),
            version=flaxformer_mt.__version__,
        )
    )


@functools.cache
def _open_templates() -> Any:
    import jinja2

    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "cards"),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters["json"] = json.dumps
    return templates


def _describe_source(config: Config, vocabs: Vocabs | None) -> dict[str, Any]:
    """Return an example source in the first direction of the model, and the tags that its tokenizer needs.

    If targets begin with a tag (`tag`), the tokenizer itself adds the tag of the source.
    """
    direction = find_directions(config.data)[0]
    tags, vocab = choose_tags(config.data, direction), vocabs.target if vocabs is not None else None
    text, ids = " ".join([*tags, "A sentence."]), [5, 6, 7, 2]
    if vocabs is not None:
        ids = vocabs.source.tokenize(text)
    source = {"text": text, "ids": ids if config.data.source_language else [], "tag": "", "pretrained": False}
    if not isinstance(vocab, PretrainedVocab):
        return source
    source["pretrained"] = True
    if tag := choose_target_tag(config.data, direction):
        # M2M100's class uses language codes without the underscores around tags.
        code = tags[0].strip("_") if vocab.metadata.kind == "m2m_100" else tags[0]
        source |= {"text": "A sentence.", "tag": tag, "source_code": code}
    return source


def _list_scores(test: Mapping[str, Any]) -> Iterator[str]:
    for direction, scores in (test.get("directions") or {"": test}).items():
        for metric, name in (("bleu", "BLEU"), ("chrf", "chrF"), ("ter", "TER")):
            if scores.get(metric) is not None:
                key = "signature" if metric == "bleu" else f"{metric}_signature"
                signature = scores.get(key) or test.get(key, "")
                yield f"{f'{name} {direction}'.strip()}: {scores[metric]:.2f}, `{signature}`"
