"""Language identification by a fastText model that the user provides, such as lid.176.bin or lid.176.ftz."""

import functools
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from flaxformer_mt.atomic_folder import digest_file
from flaxformer_mt.config.tag_styles import find_codes
from flaxformer_mt.errors import UserError, first_line, importing

_LABEL = "__label__"

# The program that loads a model in a separate process, and its time limit: the largest model of fasttext.cc,
# 126 MB, takes a second.
_TRIAL = "import sys, fasttext; fasttext.load_model(sys.argv[1]).predict('a')"
_MOST_SECONDS = 60


class LanguageIdentifier:
    def __init__(self, path: str) -> None:
        self.path, file = path, Path(path).expanduser()
        with importing("languages", what="data.clean.language_model"):
            import fasttext
        if not file.is_file():
            raise UserError(
                f"there is no file {path} (data.clean.language_model); give a fastText model of language "
                "identification, such as lid.176.bin of fasttext.cc"
            )
        _read_elsewhere(path, file)
        try:
            self._model: Any = fasttext.load_model(str(file))
            labels = self._model.predict("a", k=1 << 16, threshold=-1.0)[0]
        except (ValueError, RuntimeError, MemoryError) as error:
            raise UserError(
                f"{path} is no fastText model of language identification: {first_line(error)}"
            ) from error
        self.digest = digest_file(file)
        self._labels = [label.removeprefix(_LABEL) for label in labels]

    def find_others(self, texts: Iterable[str], language: str, *, least: float) -> list[str]:
        """For each text, return its language if that differs from `language`, else "".

        A text is in another language if the model gives that language a probability of `least` or more.
        Raises UserError if the model does not know `language`.
        """
        codes = find_codes(language)
        if not codes & set(map(_find_base, self._labels)):
            raise UserError(
                f"the model {self.path} (data.clean.language_model) does not know the language {language}; "
                f"it knows {', '.join(sorted(self._labels))}"
            )
        others = []
        for text in texts:
            (label,), (probability,) = self._model.predict(text.replace("\n", " "), k=1)
            other = label.removeprefix(_LABEL)
            is_sure = min(1.0, float(probability)) >= least and _find_base(other) not in codes
            others.append(other if is_sure else "")
        return others

    def is_same(self, identified: str, language: str) -> bool:
        """Return whether `identified`, a label of the model, and `language` are the same language."""
        return _find_base(identified) in find_codes(language)


# A model is loaded once per process.
load_identifier = functools.cache(LanguageIdentifier)


def _read_elsewhere(path: str, file: Path) -> None:
    """Load a model in another process first, since a truncated file may crash or hang fastText."""
    # -P: no module of the working folder.
    command = [sys.executable, "-P", "-c", _TRIAL, str(file)]
    try:
        status = subprocess.run(command, capture_output=True, timeout=_MOST_SECONDS).returncode
    except subprocess.TimeoutExpired:
        problem = f"reading it takes more than {_MOST_SECONDS} seconds"
    else:
        if status >= 0:  # an error of fastText will be raised, with its reason, in this process as well
            return
        problem = f"reading it ends with signal {-status}"
    raise UserError(f"{path} (data.clean.language_model) is damaged: {problem}; copy or download it again")


def _find_base(language: str) -> str:
    return re.split("[_-]", language)[0]
