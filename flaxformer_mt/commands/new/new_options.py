"""Options of the command `new`; see commands/options.py."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class NewOptions:
    """Writes a config for a corpus: held-out pairs, and sizes that fit the corpus and this machine."""

    # Files of the corpus, which may be written without `--files=`: two with a sentence a line, source first
    # (corpus.fr corpus.en), or one table: two columns (corpus.tsv), JSON objects (corpus.jsonl) or parquet
    # (corpus.parquet). Text may be packed, as .gz or .zst.
    files: tuple[str, ...]
    # Run directory of the training to come. The config is written beside it, as RUN.py.
    run: Path
    # Language of the sources, such as fr. None: the ending of the first file.
    source_language: str | None = None
    # Language of the targets, such as en. None: the ending of the second file.
    target_language: str | None = None
    # Folder of prepared data. None: $FLAXFORMER_MT_CACHE or ~/.cache/flaxformer_mt.
    cache_dir: Path | None = None
    # Leave out pairs that are not UTF-8 and the surplus lines of the longer file, instead of refusing them.
    drop_invalid: bool = False
    # Replace an existing config RUN.py.
    overwrite: bool = False
