"""Validation during training: loss and perplexity, and scores of greedy translations."""

import dataclasses
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax

from flaxformer_mt.config import Config
from flaxformer_mt.corpus.reader import read_pairs
from flaxformer_mt.data.batch_array import RowShare
from flaxformer_mt.data.loader import valid_batches
from flaxformer_mt.data.prepare import Prepared
from flaxformer_mt.evaluation.evaluation_set import Translations
from flaxformer_mt.evaluation.perplexity import make_evaluation_step, measure
from flaxformer_mt.evaluation.score_breakdowns import DirectionScorer
from flaxformer_mt.model.lora import has_factors, merge_factors
from flaxformer_mt.model.scanned_layers import unstack_layers
from flaxformer_mt.parallel import Parallel, place_parameters, replicated_shapes, split_as_trained
from flaxformer_mt.parallel.compilation import CompileClock
from flaxformer_mt.parallel.processes import decide_once, process_count
from flaxformer_mt.runs.load_run import TrainedModel
from flaxformer_mt.tracking import Sample
from flaxformer_mt.training.compile_ahead import ProgramsByShape, compiles_ahead
from flaxformer_mt.translation.translator import Translator
from flaxformer_mt.unicode_text import is_blank

# Number of sentences of an evaluation that are shown and recorded.
_SAMPLES = 3


class Validation:
    """Computes loss, perplexity, accuracy and translation scores (BLEU, chrF, ...) on the validation set.

    Translations are made by greedy search. With several directions, BLEU and chrF are the means over the
    directions, followed by the scores of each direction. A language model has no translation scores.
    """

    def __init__(
        self, config: Config, prepared: Prepared, model: Any, parallel: Parallel, *, like: Any
    ) -> None:
        """Prepare validation; nothing is compiled yet.

        If parameters with the shapes of `like` are too large for one device, search splits them over the
        devices of `parallel`.
        """
        assert prepared.valid_pairs is not None and prepared.valid is not None
        vocab = prepared.vocabs.target
        self._config = config
        self._batches = valid_batches(
            prepared.valid,
            config.data,
            pad_id=vocab.pad_id,
            bos_id=vocab.bos_id,
            share=RowShare(parallel.layout.row_parts, parallel.row_share),
        )
        self._parallel = parallel
        self._scanned = model.config.scan_layers
        step = parallel.compile(parallel.over_rows(make_evaluation_step(model, config.train), batch=1))
        self._steps = ProgramsByShape(step, batch=1)
        self._compiling: Future[None] | None = None
        self._unstack = parallel.compile(unstack_layers)
        self._merge = parallel.compile(merge_factors)
        # Some sentences of the last evaluation, the same ones each time.
        self.samples: list[Sample] = []
        self._translator = None
        if not prepared.valid_pairs.has_source:
            return
        # Without tags, which the translator adds: some models begin translations with one, too.
        self._sources = [pair.source for pair in read_pairs(config.data, "valid", tagged=False)]
        self._scorer = DirectionScorer(prepared.valid_pairs, config.train)
        self._references = [pair.target for pair in prepared.valid_pairs]
        self._documents = (prepared.valid_pairs.documents if config.data.context else None) or ()
        alone: dict[str, Any] = {"rerank": "", "rerank_weight": None}
        greedy = dataclasses.replace(config.search, method="greedy", beam_size=1, **alone)
        ignored: list[str] = []  # the same lines are cut at every evaluation: `prepare` reports them once
        # Decoding takes parameters with one subtree per layer.
        unstacked = dataclasses.replace(config.model, scan_layers=False)
        self._split = split_as_trained(parallel, sum(leaf.nbytes for leaf in jax.tree.leaves(like)))
        trained = TrainedModel(
            dataclasses.replace(config, search=greedy, model=unstacked),
            prepared.vocabs,
            params=None,
            checkpoint="",
            progress={},
            split=self._split,
            target_lengths=prepared.target_lengths,
            several_sentences=prepared.several_sentences,
        )
        self._translator = Translator(trained, warn=ignored.append)

    def compile_beside(self, params: Any, clock: CompileClock) -> None:
        """Start to compile the programs of an evaluation in a thread while training continues.

        With several processes, or if programs are not compiled ahead, this does nothing. Only shapes, dtypes
        and shardings of `params` are read; `clock` does not count the time of this thread.
        """
        if process_count() > 1 or not compiles_ahead(self._config, self._parallel.platform):
            return

        def compile_all() -> None:
            with clock.compiling_beside():
                whole = self._shapes_after(merge_factors, params) if has_factors(params) else params
                self._compile_steps(whole)
                if self._translator is not None and self._split is None:
                    unstacked = self._shapes_after(unstack_layers, whole) if self._scanned else whole
                    shapes = replicated_shapes(unstacked)
                    for lines, options in self._sets():
                        self._translator.compile(lines, shapes, **options)

        threads = ThreadPoolExecutor(1, thread_name_prefix="compile")
        self._compiling = threads.submit(compile_all)
        threads.shutdown(wait=False)

    def _shapes_after(self, function: Callable[..., Any], params: Any) -> Any:
        return self._parallel.place_shapes(jax.eval_shape(function, params))

    def __call__(self, params: Any) -> dict[str, float]:
        start = time.monotonic()
        if self._compiling is not None:
            self._compiling.result()
            self._compiling = None
        params = self._merge(params) if has_factors(params) else params
        if not len(self._steps) and compiles_ahead(self._config, self._parallel.platform):
            self._compile_steps(params)
        likelihood = measure(self._steps, params, self._batches, put=self._parallel.put)
        values = {name: getattr(likelihood, name) for name in ("loss", "perplexity", "accuracy")}
        if self._translator is None:
            return values | {"seconds": time.monotonic() - start}
        unstacked = self._unstack(params) if self._scanned else params
        start = time.monotonic()
        placed, translator = place_parameters(unstacked, self._split or True), self._translator
        found = [
            one
            for lines, options in self._sets()
            for one in translator.translate(lines, params=placed, **options)
        ]
        seconds = time.monotonic() - start
        evaluation = Translations(
            tuple(self._sources), tuple(self._references), tuple(one.text for one in found)
        )
        self.samples = choose_samples(evaluation)
        return values | decide_once(lambda: self._scorer.score(evaluation)) | {"seconds": seconds}

    def _sets(self) -> Iterator[tuple[list[str], dict[str, Any]]]:
        """Yield the source lines of each direction, and the keyword arguments to translate them."""
        for direction, rows in self._scorer.directions:
            part = slice(rows.start, rows.stop)
            several = {"source_language": direction.source, "target_language": direction.target}
            languages = several if len(self._scorer.directions) > 1 else {}
            yield self._sources[part], {"documents": self._documents[part] or False, **languages}

    def _compile_steps(self, params: Any) -> None:
        """Compile the loss for all batch shapes in parallel, instead of one after the other."""
        # As they are run: a batch has the rows of this process alone, and all rows once it is placed.
        self._steps.compile_all((params, self._parallel.put(batch)) for batch in self._batches)


def choose_samples(translations: Translations) -> list[Sample]:
    """Choose three translations of non-blank sources, evenly spread over the validation set."""
    rows = list(map(Sample, translations.sources, translations.references, translations.hypotheses))
    rows = [row for row in rows if not is_blank(row.source)]
    count = min(_SAMPLES, len(rows))
    return [rows[number * len(rows) // count] for number in range(count)]
