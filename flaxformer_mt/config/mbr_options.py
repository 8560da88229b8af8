"""Options of minimum Bayes risk decoding. Part of the schema's `search`.

A field's comment is its `--help` text.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from flaxformer_mt.config.bounds import between


@dataclass(frozen=True, kw_only=True)
class MbrConfig:
    """Minimum Bayes risk: the candidate that is most like the others is chosen."""

    # ---- minimum Bayes risk ----

    # Minimum Bayes risk: candidates are random samples, or the beam_size hypotheses of beam search.
    mbr_candidates: Literal["samples", "beam"] = "samples"
    # Minimum Bayes risk: number of samples of each sentence, of which one is chosen.
    mbr_samples: Annotated[int, between(1, 4096)] = 32
    # Minimum Bayes risk: score that the chosen candidate has, on average, with all candidates as references.
    mbr_utility: Literal["chrf", "bleu"] = "chrf"
