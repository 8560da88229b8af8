"""The commands `export` and `import`."""

from flaxformer_mt.commands.options import ExportOptions, ImportOptions
from flaxformer_mt.config.files import load_config


def export(options: ExportOptions) -> object:
    from flaxformer_mt.convert.export_run import export_run

    others = {name: value for name, value in vars(options).items() if name not in ("run", "format")}
    return export_run(options.run, format_name=options.format, **others)


def import_model(options: ImportOptions) -> object:
    from flaxformer_mt.convert.huggingface.new_languages import NewVocabulary
    from flaxformer_mt.convert.import_run import import_run

    new_vocabulary = NewVocabulary(options.vocab_text or (), options.new_language or (), options.new_pieces)
    return import_run(
        options.input,
        format_name=options.format,
        run_dir=options.run,
        config=None if options.config is None else load_config(options.config),
        vocab=options.vocab,
        tolerance=options.tolerance,
        languages=options.languages,
        new_vocabulary=None if new_vocabulary == NewVocabulary() else new_vocabulary,
    )
