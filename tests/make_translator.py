"""Translators of parameters that no checkpoint has."""

import dataclasses

from flaxformer_mt.config.load_options import LoadOptions
from flaxformer_mt.runs.load_run import TrainedModel
from flaxformer_mt.translation.translator import Translator

_FACTS = {field.name for field in dataclasses.fields(TrainedModel)}


def make_translator(config, params, vocabs, *, changed_cases=(), ensemble=(), **options):
    """A translator on one device; options are fields of `TrainedModel` and `LoadOptions`, and `warn`."""
    warn = {"warn": options.pop("warn")} if "warn" in options else {}
    facts = {name: value for name, value in options.items() if name in _FACTS}
    loading = {name: value for name, value in options.items() if name not in _FACTS}
    if changed_cases:
        facts["letter_cases"] = dict.fromkeys(changed_cases, 0.0)
        loading["capitals"] = "auto"
    trained = TrainedModel(config, vocabs, params, **({"checkpoint": "", "progress": {}} | facts))
    return Translator(
        trained, LoadOptions(**({"use_all_devices": False} | loading)), ensemble=ensemble, **warn
    )
