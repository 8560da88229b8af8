"""flaxformer_mt trains Transformers for machine translation in JAX and Flax.

The public API. Each name is loaded at its first use, so that importing the package does not load JAX:

    from flaxformer_mt import TranslationOptions, Translator

    translator = Translator.load("runs/toy_de_en")
    translator.translate(["Der Mann liest ein Buch."])[0].text
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flaxformer_mt.config import Config
    from flaxformer_mt.config.files import load_config
    from flaxformer_mt.config.load_options import LoadOptions
    from flaxformer_mt.convert.export_run import export_run
    from flaxformer_mt.convert.import_run import import_run
    from flaxformer_mt.errors import FlaxformerWarning, TrainingInterrupted, UserError
    from flaxformer_mt.evaluation.evaluate import EvaluationOptions, evaluate_run
    from flaxformer_mt.scoring.significance import ResamplingOptions
    from flaxformer_mt.training.initial_model import start_run
    from flaxformer_mt.training.loop import fit
    from flaxformer_mt.translation.define_scorer import define_scorer
    from flaxformer_mt.translation.glossary import Glossary
    from flaxformer_mt.translation.requests import Request
    from flaxformer_mt.translation.result import Annotations
    from flaxformer_mt.translation.scorer import Scorer, generate_text
    from flaxformer_mt.translation.translator import TranslationOptions, Translator

__version__ = "0.3.0"

__all__ = [
    "Annotations",
    "Config",
    "EvaluationOptions",
    "FlaxformerWarning",
    "Glossary",
    "LoadOptions",
    "Request",
    "ResamplingOptions",
    "Scorer",
    "TrainingInterrupted",
    "TranslationOptions",
    "Translator",
    "UserError",
    "__version__",
    "define_scorer",
    "evaluate_run",
    "export_run",
    "fit",
    "generate_text",
    "import_run",
    "load_config",
    "start_run",
]

# Public name -> the module that defines it.
_HOMES = {
    "Annotations": "translation.result",
    "Config": "config",
    "EvaluationOptions": "evaluation.evaluate",
    "FlaxformerWarning": "errors",
    "Glossary": "translation.glossary",
    "LoadOptions": "config.load_options",
    "Request": "translation.requests",
    "ResamplingOptions": "scoring.significance",
    "Scorer": "translation.scorer",
    "TrainingInterrupted": "errors",
    "TranslationOptions": "translation.translator",
    "Translator": "translation.translator",
    "UserError": "errors",
    "define_scorer": "translation.define_scorer",
    "evaluate_run": "evaluation.evaluate",
    "export_run": "convert.export_run",
    "fit": "training.loop",
    "generate_text": "translation.scorer",
    "import_run": "convert.import_run",
    "load_config": "config.files",
    "start_run": "training.initial_model",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
