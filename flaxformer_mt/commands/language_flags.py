"""The flags that name the languages of a model of several directions."""

from flaxformer_mt.commands.options import EvaluateOptions, ScoreOptions, TranslateOptions
from flaxformer_mt.config.files import read_config


def read_languages(options: EvaluateOptions | ScoreOptions | TranslateOptions) -> dict[str, str]:
    """Return --source_language and --target_language, those that are given.

    Raises:
      UserError: the model of the run does not have a language.
    """
    from flaxformer_mt.translation.language_tags import choose_line_tags
    from flaxformer_mt.vocab.pretrained import read_tags

    names = ("source_language", "target_language")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    known = read_tags(options.run / "vocab")
    choose_line_tags(read_config(options.run / "config.json").data, **given, vocab_tags=known)
    return given
