"""The command `align`: aligns the words of the training pairs, for guided alignment."""

import sys
from pathlib import Path
from typing import Any

from flaxformer_mt.commands.options import AlignOptions
from flaxformer_mt.errors import UserError, find_url
from flaxformer_mt.text_io.lines import check_output, open_output

# Pairs that are read at a time.
_CHUNK = 4096


def align_training_pairs(options: AlignOptions) -> dict[str, Any]:
    from flaxformer_mt.corpus.pharaoh import format_points
    from flaxformer_mt.corpus.reader import find_files, open_train_set
    from flaxformer_mt.corpus.word_alignment import align_corpus
    from flaxformer_mt.unicode_text import split_words

    data = options.config.data
    if options.output is None and (url := find_url(data.text_dir)):
        raise UserError(f"data.text_dir is {url}, which is not written to; give --output=FILE or a URL")
    split = open_train_set(data)
    output: str | Path | None = options.output or find_files(data, data.alignments)[0]
    if not output:
        raise UserError("there is no file to write to; give --output=FILE, or set data.alignments")
    if not split.has_source:
        raise UserError("data.source_language is empty: there are no pairs to align; set it")
    check_output(str(output))

    def read_words() -> Any:
        for start in range(0, len(split), _CHUNK):
            for pair in split.read(range(start, min(start + _CHUNK, len(split)))):
                yield tuple(split_words(text.decode("utf-8", errors="replace")) for text in pair)

    alignments = align_corpus(read_words(), say=lambda text: print(text, file=sys.stderr, flush=True))
    with open_output(str(output)) as write:
        for points in alignments:
            write(format_points(map(tuple, points.tolist())))
    words = sum(len(target) for _, target in read_words())
    aligned = sum(len(set(points[:, 1].tolist())) for points in alignments)
    share = round(aligned / words, 4) if words else 0.0
    return {"output": str(output), "pairs": len(split), "aligned_target_words": share}
