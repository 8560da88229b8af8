"""The probabilities of a teacher for the target tokens of a token store, and their layout in batches.

Contains the check that scores belong to these tokens. The files are those of corpus/score_files.py.
"""

from collections.abc import Sequence

import numpy as np

from flaxformer_mt.corpus.pairs import Pairs
from flaxformer_mt.corpus.score_files import ScoreFile, checksum
from flaxformer_mt.errors import UserError
from flaxformer_mt.shapes import TeacherTokens
from flaxformer_mt.vocab import Vocab

# Number of pairs whose token ids are compared; the lengths of all are.
_COMPARED = 4096


class TeacherScores:
    """The scores of all pairs of a token store; pairs whose data set has none have no probabilities.

    pairs: see `Pairs.find_scores`. tokens, offsets: the target tokens of the store, as in `Side`.
    """

    def __init__(self, pairs: Pairs, vocab: Vocab, tokens: np.ndarray, offsets: np.ndarray) -> None:
        """Find the scores of each pair.

        Raises:
          UserError: a file is of another vocabulary, or of other text; one line names file and row.
        """
        self.files: Sequence[ScoreFile | None] = pairs.scores
        present = [file for file in self.files if file is not None]
        for file in present:
            if file.vocabulary != vocab.fingerprint:
                raise UserError(
                    f"{file.path} has scores of the target vocabulary {file.vocabulary[:12]}, but this "
                    f"training has {vocab.fingerprint[:12]}; train with the vocabulary of the teacher, with "
                    "--config.vocab.source_model=RUN/vocab/source.model "
                    "--config.vocab.target_model=RUN/vocab/target.model, or both as RUN/vocab/joint.model"
                )
        self.top_k = max(file.top_k for file in present)
        self._part, rows = pairs.find_scores()
        self._starts = np.full(len(rows), -1, np.int64)  # -1: no scores
        lengths = np.diff(offsets)
        for number, scored in enumerate(self.files):
            if scored is None:
                continue
            own = np.flatnonzero(self._part == number)
            counts = np.diff(scored.offsets)[rows[own]]
            wrong = (counts != lengths[own]) & (counts > 0)
            for index in own[np.linspace(0, len(own) - 1, min(_COMPARED, len(own))).astype(int)]:
                start, end = offsets[index], offsets[index + 1]
                if scored.offsets[rows[index] + 1] > scored.offsets[rows[index]]:
                    wrong[np.searchsorted(own, index)] |= (
                        checksum(tokens[start:end]) != scored.checks[rows[index]]
                    )
            if wrong.any():
                raise UserError(
                    f"{scored.path} has scores of other targets than the text, first in row "
                    f"{rows[own[wrong]].min() + 1}; make them for this text with distil --teacher_scores"
                )
            self._starts[own[counts > 0]] = scored.offsets[rows[own[counts > 0]]]

    def lay_out(
        self,
        examples: np.ndarray,
        lengths: np.ndarray,
        places: tuple[np.ndarray, np.ndarray],
        shape: tuple[int, int],
    ) -> TeacherTokens:
        """Return the scores of a batch: ids and probabilities [B, T, K], 0 where there are none.

        Args:
          examples, lengths: index in the store and number of target tokens of each pair.
          places: row and column in the batch of each token, of all pairs in order.
          shape: B and T.
        """
        ids = np.zeros((*shape, self.top_k), np.int32)
        probs = np.zeros((*shape, self.top_k), np.float16)
        index = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        starts, parts = (np.repeat(values[examples], lengths) for values in (self._starts, self._part))
        for number, file in enumerate(self.files):
            if file is None:
                continue
            own = (parts == number) & (starts >= 0)
            at = (places[0][own], places[1][own], slice(file.top_k))
            ids[at] = file.ids[starts[own] + index[own]]
            probs[at] = file.probs[starts[own] + index[own]]
        return TeacherTokens(ids, probs)
