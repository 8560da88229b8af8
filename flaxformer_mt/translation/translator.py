"""From strings to strings: tokenize, batch, search, detokenize.

Row 12 of the data path. Owns that every line gives exactly one line, in order; all of them go through
`Translator._translate_window`. Knows nothing of how sentences are batched or searched, nor of scores against
references.
"""

import collections
import dataclasses
import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from flaxformer_mt.config import Config, SearchConfig
from flaxformer_mt.config.checks import check_n_best, check_search
from flaxformer_mt.config.files import read_config
from flaxformer_mt.corpus.tfds_cache import cache_dir
from flaxformer_mt.decoding.engine import Sentence, SentenceSearch
from flaxformer_mt.decoding.forced_decoding import UNBOUNDED
from flaxformer_mt.errors import UserError, warn_user
from flaxformer_mt.parallel import enable_compilation_cache, place_locally
from flaxformer_mt.runs.load_run import TrainedModel, Warn, load_named, load_trained
from flaxformer_mt.search import SearchResult
from flaxformer_mt.text_io.lines import name_lines
from flaxformer_mt.translation.annotation import NO_NOTES, Annotated, Notes, annotate
from flaxformer_mt.translation.constraints import Demands, make_symbols
from flaxformer_mt.translation.line_sharing import gather_translations, own_share
from flaxformer_mt.translation.result import EMPTY, FAILED, TranslatedPart, Translation, combine_parts
from flaxformer_mt.translation.scorer import TokenScorer
from flaxformer_mt.translation.source_lines import LongLines, SourcePart, read_sources, warn_of_long_lines
from flaxformer_mt.vocab import Vocabs

# Everything that some program takes for the end of a line. A translation is one line for all of them.
_LINE_ENDS = dict.fromkeys(map(ord, "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"), " ")


class Translator:
    """Translates lines with one set of vocabularies, search options and (unless overridden) parameters.

    Compiles once for each shape of batch; other parameters of the same shapes need no compilation.
    """

    def __init__(
        self,
        config: Config,
        params: Any,
        vocabs: Vocabs,
        *,
        checkpoint: str = "",
        ensemble: Sequence[TrainedModel] = (),
        long_lines: LongLines = "split",
        spread: bool = False,
        warn: Warn = warn_user,
    ) -> None:
        """Takes search options from `config.search`.

        Args:
          params: None if every call brings its own.
          checkpoint: the name of what the parameters come from, for reports.
          ensemble: models that have a say in every token beside this one.
          long_lines: whether lines of more than data.max_source_length tokens are translated in parts, or
            only their beginning.
          spread: every local device searches a part of each batch; a call's params are from place_locally.
          warn: is told, once a call or window, of lines that were split or cut, or that lack what they
            require; and once that batches had to be smaller than search.batch_tokens.

        Raises:
          UserError: search options that cannot be, or an ensemble with other vocabularies.
        """
        self.models = [config.model, *(member.config.model for member in ensemble)]
        for model in self.models:
            check_search(config.search, model=model)
        _check_ensemble(vocabs, ensemble)
        self.config = config
        self.vocabs = vocabs
        self.checkpoint = checkpoint
        self.warn = warn
        self._long_lines: LongLines = long_lines
        place = place_locally if spread else jax.device_put
        self._params = None if params is None else place(params)
        self._others = tuple(place(member.params) for member in ensemble)
        self.search = SentenceSearch(
            self.models,
            config.search,
            make_symbols(vocabs.target, config.search),
            sizes=(vocabs.source.size, vocabs.target.size),
            source_pad_id=vocabs.source.pad_id,
            longest_source=config.data.max_source_length,
            spread=spread,
            warn=lambda message: self.warn(message),
        )
        self.scorer = TokenScorer(
            self.models,
            config.search,
            vocabs,
            longest=(config.data.max_source_length, self.search.longest_target or UNBOUNDED),
            warn=lambda message: self.warn(message),
        )

    @classmethod
    def load(
        cls,
        run_dir: str | Path,
        *,
        checkpoint: str | None = None,
        search: SearchConfig | None = None,
        ensemble: Sequence[str] = (),
        long_lines: LongLines = "split",
        spread: bool = False,
        warn: Warn = warn_user,
    ) -> "Translator":
        """Loads what a run directory holds.

        Args:
          checkpoint: best, last, average or a step. None: train.final_checkpoint of the run's config, or,
            where there is none yet (training goes on, or was cut short), best or last, with a warning.
          search: options instead of those of the run's config.
          ensemble: further runs that translate together with this one, as RUN or RUN@CHECKPOINT.
          long_lines, spread: see `Translator`.

        Raises:
          UserError: no run directory, no such checkpoint, parameters that do not fit the config, or an
            ensemble of different vocabularies.
        """
        run_dir = Path(run_dir).expanduser()
        config = read_config(run_dir / "config.json")
        if not config.data.source_language:
            raise UserError(
                f"{run_dir} is a language model (its data.source_language is empty) and has nothing to "
                f"translate; evaluate measures its perplexity: evaluate --run={run_dir} --reference=FILE"
            )
        enable_compilation_cache(cache_dir(config.data) / "compiled")
        check_search(config.search if search is None else search, model=config.model)
        trained = load_trained(run_dir, checkpoint=checkpoint, warn=warn)
        config = trained.config if search is None else dataclasses.replace(trained.config, search=search)
        members = [load_named(name, warn=warn) for name in ensemble]
        return cls(
            config,
            trained.params,
            trained.vocabs,
            checkpoint=trained.checkpoint,
            ensemble=members,
            long_lines=long_lines,
            spread=spread,
            warn=warn,
        )

    def describe(self) -> dict[str, Any]:
        """What every translation depends on, as JSON values: the same description, the same translations."""
        digest = hashlib.blake2b(digest_size=16)
        for leaf in jax.tree.leaves((self._params, self._others)):
            digest.update(np.ascontiguousarray(leaf).tobytes())
        models = [dataclasses.asdict(model) for model in self.models]
        return {
            "checkpoint": self.checkpoint,
            "parameters": digest.hexdigest(),
            "vocabularies": [self.vocabs.source.fingerprint, self.vocabs.target.fingerprint],
            "models": models,
            "longest_source": self.config.data.max_source_length,
            "search": dataclasses.asdict(self.config.search),
        }

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """The pieces of a translation's tokens, as the target vocabulary spells them."""
        return self.vocabs.target.pieces(np.asarray(tokens, np.int32))

    def __call__(self, lines: Sequence[str], **options: Any) -> list[Translation]:
        """The same as `translate`."""
        return self.translate(lines, **options)

    def translate(
        self,
        lines: Sequence[str],
        *,
        n_best: int = 1,
        prefixes: Sequence[str] | None = None,
        required: Sequence[Sequence[str]] | None = None,
        notes: Notes = NO_NOTES,
        params: Any = None,
    ) -> list[Translation]:
        """Translates lines: one translation each, in the same order.

        Args:
          n_best: how many hypotheses each translation offers at most, itself included.
          prefixes: what each line's translation starts with; "" for nothing.
          required: the phrases that each line's translation contains (beam search only). Those of a line that
            is translated in parts are not searched for, only looked for in the result.
          notes: what to find out about the translations: log-probabilities of tokens, alignments.
          params: parameters to use instead of this translator's own.

        Raises:
          UserError: n_best is more than the search's hypotheses, `lines` is not a sequence of strings, or
            prefixes or required phrases are not one for each line.
        """
        demands = Demands(n_best, prefixes, required)
        return self._translate_window(lines, demands, notes, first_line=1, params=params)

    def translate_stream(
        self,
        lines: Iterable[str],
        *,
        n_best: int = 1,
        prefixes: Iterable[str] | None = None,
        required: Iterable[Sequence[str]] | None = None,
        notes: Notes = NO_NOTES,
        params: Any = None,
        window: int = 2048,
        first_line: int = 1,
    ) -> Iterator[Translation]:
        """Translates lines as they come, `window` of them at a time: memory is bounded and order kept.

        Sentences share batches within a window, so a wide one is faster, and a narrow one answers sooner. The
        next window is read when all of the one before was taken. Warnings count lines from `first_line`.
        """
        if window < 1:
            raise UserError(f"window is {window}; it must be at least 1")
        lines = iter(lines)
        starts = None if prefixes is None else iter(prefixes)
        phrases = None if required is None else iter(required)
        while chunk := list(itertools.islice(lines, window)):
            demands = Demands(n_best, _take(starts, len(chunk)), _take(phrases, len(chunk)))
            yield from self._translate_window(chunk, demands, notes, first_line=first_line, params=params)
            first_line += len(chunk)
        for what, rest in (("prefixes", starts), ("lists of required phrases", phrases)):
            if rest is not None and next(rest, None) is not None:
                raise UserError(
                    f"there are more {what} than the {first_line - 1} lines; give one for each line"
                )

    def _translate_window(
        self, lines: Sequence[str], demands: Demands, notes: Notes, *, first_line: int, params: Any
    ) -> list[Translation]:
        """The one way that all lines go, one translation for each."""
        self._check_call(lines, demands, first_line)
        notes.check(self.models)
        params = self._params if params is None else params
        if params is None:
            raise ValueError("this translator has no parameters of its own; call it with params=...")
        everything, longest = (params, *self._others), self.config.data.max_source_length
        parts = read_sources(lines, vocab=self.vocabs.source, longest=longest, long_lines=self._long_lines)
        for message in warn_of_long_lines(parts, first_line=first_line, longest=longest):
            self.warn(message)
        sentences = self._make_sentences(parts, demands, first_line)
        mine = own_share()
        translations = self._search(sentences[mine], demands.n_best, everything)
        if notes != NO_NOTES:
            own = zip(parts[mine], translations, strict=True)
            items = [Annotated(p.ids, p.part.text, t) for p, t in own]
            known: dict[str, Any] = {"scorer": self.scorer, "models": self.models, "vocabs": self.vocabs}
            translations = annotate(items, notes, **known, params=everything)
        translations = gather_translations(translations)
        self._tell_failed(
            [first_line + p.line for p, t in zip(parts, translations, strict=True) if not t.tokens]
        )
        results = self._join(lines, parts, translations, n_best=demands.n_best, notes=notes)
        return self._mark_lacking(results, parts, demands, first_line)

    def _make_sentences(
        self, parts: Sequence[SourcePart], demands: Demands, first_line: int
    ) -> list[Sentence]:
        """What is searched for each part: the first of a line has its prefix, the only one its phrases."""
        count = collections.Counter(part.line for part in parts)
        sentences, begun = [], -1
        for line, _, ids, _ in parts:
            if line == begun:
                sentences.append(Sentence(ids))
                continue
            asked = demands if count[line] == 1 else demands._replace(required=None)
            sentence = asked.make_sentence(ids, line, vocab=self.vocabs.target, first_line=first_line)
            self.search.check(sentence, f"line {first_line + line}")
            sentences.append(sentence)
            begun = line
        return sentences

    def _search(self, sentences: list[Sentence], n_best: int, params: tuple[Any, ...]) -> list[Translation]:
        """The translation of each sentence, `FAILED` where the model gave no numbers."""
        translations = [FAILED] * len(sentences)
        for index, found in self.search.search_all(sentences, n_best=n_best, params=params):
            hypotheses = [self._read(found, rank) for rank in range(n_best) if found.lengths[rank]]
            best, *others = hypotheses or [FAILED]
            translations[index] = dataclasses.replace(best, alternatives=tuple(others))
        return translations

    def _join(
        self,
        lines: Sequence[str],
        parts: Sequence[SourcePart],
        translations: Sequence[Translation],
        *,
        n_best: int,
        notes: Notes,
    ) -> list[Translation]:
        """One translation a line from those of its parts; a line without parts has an empty one."""
        nothing = dataclasses.replace(
            EMPTY,
            token_log_probs=() if notes.token_log_probs else None,
            alignment=None if notes.alignments is None else (),
        )
        results = [nothing] * len(lines)
        both = zip(parts, translations, strict=True)
        for line, group in itertools.groupby(both, key=lambda pair: pair[0].line):
            own = [TranslatedPart(part.part, len(part.ids) - 1, t) for part, t in group]
            results[line] = own[0].translation
            if own[0].part.text != lines[line]:
                words, eos_id = notes.alignments != "pieces", self.vocabs.target.eos_id
                results[line] = combine_parts(lines[line], own, n_best=n_best, words=words, eos_id=eos_id)
        for part in parts:
            if part.cut:
                results[part.line] = dataclasses.replace(results[part.line], truncated=True)
        return results

    def _mark_lacking(
        self, results: list[Translation], parts: Sequence[SourcePart], demands: Demands, first_line: int
    ) -> list[Translation]:
        """Says which translations lack phrases that their lines require."""
        if demands.required is None:
            return results
        count = collections.Counter(part.line for part in parts)
        lacking = []
        for index, result in enumerate(results):
            phrases = demands.phrases(index)
            found = result.satisfied if count[index] == 1 else all(p.strip() in result.text for p in phrases)
            if phrases and not found:
                results[index] = dataclasses.replace(result, satisfied=False)
                lacking.append(first_line + index)
        if lacking:
            self.warn(
                f"{name_lines(lacking)}: the translation lacks some of the required phrases; require less, "
                "or allow longer translations or a wider beam"
            )
        return results

    def _tell_failed(self, numbers: list[int]) -> None:
        if numbers:
            self.warn(
                f"{name_lines(sorted(set(numbers)))}: the model's scores are not numbers, so the translation "
                "is empty; try an earlier checkpoint"
            )

    def _check_call(self, lines: Sequence[str], demands: Demands, first_line: int) -> None:
        search = self.config.search
        check_n_best(search, demands.n_best)
        if isinstance(lines, str):
            raise UserError("translate takes a list of lines, but got one string; put it in a list")
        for number, line in enumerate(lines, start=first_line):
            if not isinstance(line, str):
                raise UserError(f"line {number} is {type(line).__name__}, not str; decode it first")
        demands.check(search, len(lines), first_line)

    def _read(self, found: SearchResult, rank: int) -> Translation:
        tokens = tuple(found.tokens[rank, : found.lengths[rank]].tolist())
        text = self.vocabs.target.detokenize(tokens).translate(_LINE_ENDS)
        return Translation(
            text,
            float(found.scores[rank]),
            float(found.log_probs[rank]),
            tokens,
            satisfied=found.satisfied is None or bool(found.satisfied[rank]),
        )


def _take(items: Iterator[Any] | None, count: int) -> list[Any] | None:
    return None if items is None else list(itertools.islice(items, count))


def _check_ensemble(vocabs: Vocabs, members: Sequence[TrainedModel]) -> None:
    for number, member in enumerate(members, start=2):
        for side in ("source", "target"):
            own, other = getattr(vocabs, side), getattr(member.vocabs, side)
            if own.fingerprint != other.fingerprint:
                raise UserError(
                    f"model {number} of the ensemble has another {side} vocabulary ({other.size} pieces, not "
                    f"the {own.size} of the first); combine models that were trained with one vocabulary"
                )
