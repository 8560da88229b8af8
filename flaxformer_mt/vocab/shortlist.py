"""A vocabulary shortlist: the target subwords that may occur in the translation of a source.

A shortlist is stored as a vocabulary map of CTranslate2 (vmap.txt); data/learned_shortlist.py learns it.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from flaxformer_mt.atomic_file import write_atomically
from flaxformer_mt.config.files import read_file
from flaxformer_mt.errors import UserError
from flaxformer_mt.vocab.run_vocabs import Vocabs
from flaxformer_mt.vocab.sentencepiece_vocab import Vocab

# Maximum size of a file in bytes.
_MAX_BYTES = 1 << 30


class Shortlist:
    """Candidate target ids for each n-gram of source ids, and candidates for all sentences (`common`)."""

    def __init__(
        self, rules: dict[tuple[int, ...], np.ndarray], common: Sequence[int] | np.ndarray, vocabs: Vocabs
    ) -> None:
        """`rules`: n-gram of source ids -> target ids, best first. Eos and unk are added to `common`."""
        target = vocabs.target
        self.rules = rules
        special = [target.eos_id] + ([target.unk_id] if target.unk_id >= 0 else [])
        self.common = np.unique(np.concatenate([np.asarray(common, np.int32), special]))
        self._longest = max(map(len, rules), default=0)
        self.vocabs = vocabs
        self.fingerprint = hashlib.sha256("\n".join(self._lines()).encode()).hexdigest()

    @classmethod
    def read(cls, path: str | Path, vocabs: Vocabs) -> "Shortlist":
        """Read lines `n-gram of source subwords<TAB>target subwords`; common ids have an empty n-gram."""
        try:
            text = read_file(path, most=_MAX_BYTES).decode("utf-8")
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise UserError(
                f"the shortlist {path} cannot be read: {reason}; give a file that prepare --shortlist=FILE "
                "or CTranslate2's vmap has written"
            ) from error
        ids = [
            {piece: number for number, piece in enumerate(vocab.pieces(range(vocab.size)))}
            for vocab in (vocabs.source, vocabs.target)
        ]
        rules: dict[tuple[int, ...], np.ndarray] = {}
        for number, line in enumerate(text.split("\n"), start=1):
            if line:
                source, tab, target = line.partition("\t")
                where = f"the shortlist {path}, line {number}"
                if not tab or "\t" in target:
                    raise UserError(
                        f"{where}, has {line.count(chr(9))} tabs; it must have source subwords, one tab, and "
                        "target subwords"
                    )
                key = tuple(_find(source, ids[0], "source", where))
                rules[key] = np.array(_find(target, ids[1], "target", where), np.int32)
        common = rules.pop((), np.zeros(0, np.int32))
        return cls(rules, common, vocabs)

    def write(self, path: Path) -> None:
        text = "".join(f"{line}\n" for line in self._lines())
        write_atomically(path, text.encode())

    def find(self, source: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return the target ids for a source, without the common ids; ids may repeat.

        The first candidates of all n-grams of the source precede the second candidates, and so on.
        """
        ids = np.asarray(source).tolist()
        matches = []
        for length in range(1, self._longest + 1):
            keys = dict.fromkeys(tuple(ids[start : start + length]) for start in range(len(ids) - length + 1))
            matches += [self.rules[key] for key in keys if key in self.rules]
        if not matches:
            return np.zeros(0, np.int32)
        ranks = np.concatenate([np.arange(len(candidates)) for candidates in matches])
        return np.concatenate(matches)[np.argsort(ranks, kind="stable")]

    def _lines(self) -> list[str]:
        """Return the lines of the file, without subwords that contain a space, a tab or a line break."""
        source, target = (_spell(vocab) for vocab in (self.vocabs.source, self.vocabs.target))
        lines = []
        for key, written in [((), self.common), *sorted(self.rules.items())]:
            pieces = [target[number] for number in written.tolist() if target[number]]
            if all(source[number] for number in key) and pieces:
                lines.append(f"{' '.join(source[number] for number in key)}\t{' '.join(pieces)}")
        return lines


def _spell(vocab: Vocab) -> list[str]:
    """Return the subwords by id, with "" for subwords that a shortlist file cannot contain."""
    return ["" if set(piece) & set(" \t\n") else piece for piece in vocab.pieces(range(vocab.size))]


def _find(text: str, ids: dict[str, int], side: str, where: str) -> list[int]:
    pieces = [piece for piece in text.split(" ") if piece]
    if missing := [piece for piece in pieces if piece not in ids]:
        raise UserError(
            f"{where}, has the subword {missing[0]!r}, which the {side} vocabulary of {len(ids)} subwords "
            "lacks; give a shortlist that was made for this run"
        )
    return [ids[piece] for piece in pieces]
