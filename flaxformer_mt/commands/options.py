"""Options of the commands: a dataclass each, whose docstring and field comments become its `--help` text."""

import dataclasses
import typing
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from flaxformer_mt.config import Config, SearchConfig
from flaxformer_mt.config.field_values import (
    LARGEST_WEIGHT,
    SMALLEST_WEIGHT,
    above,
    at_least,
    between,
)
from flaxformer_mt.config.files import read_config
from flaxformer_mt.config.load_options import (
    CheckpointOptions,
    DtypeOptions,
    EnsembleOptions,
    LetterCaseOptions,
    LongLinesOptions,
    NonfiniteOptions,
    SearchModelOptions,
    ShortlistOptions,
)
from flaxformer_mt.text_io.pair_table import PairRules

# Marks an option whose flag takes one value each time: a comma does not separate values.
WITH_COMMAS = "with commas"


def make_flags(section: type, *names: str) -> Any:
    """Return a dataclass with the fields `names` of a section (default: all); the default values are None.

    None means the value in the run's config. `search_flags()` returns the values of the given flags.
    """
    declared = section.__dict__["__annotations__"]  # before those of its base classes
    fields = [
        (field.name, typing.Optional[field.type], dataclasses.field(default=None, kw_only=True))  # noqa: UP045
        for field in sorted(dataclasses.fields(section), key=lambda field: field.name not in declared)
        if not names or field.name in names
    ]

    def given(self: Any) -> dict[str, Any]:
        values = {name: getattr(self, name) for name, *_ in fields}
        return {name: value for name, value in values.items() if value is not None}

    unset = " None: as in the run's config."
    namespace = {"DECLARED_IN": section, "UNSET": unset, "search_flags": given}
    return dataclasses.make_dataclass(f"{section.__name__}Flags", fields, frozen=True, namespace=namespace)


@dataclass(frozen=True)
class GeneralOptions:
    """Flags that all commands have; flag_parser.py and main.py implement them."""

    # Show this help.
    help: bool = False
    # Print only warnings and errors.
    quiet: bool = False
    # Print everything, only warnings and errors, or only errors.
    log_level: Literal["info", "warning", "error"] = "info"


@dataclass(frozen=True, kw_only=True)
class LanguageOptions:
    # ---- languages ----

    # Language to translate into, for a multilingual model. None: the model's target language, or the language
    # in the tag of each line.
    target_language: str | None = None
    # Language of the sources, for a model with data.source_tags. None: the model's source language.
    source_language: str | None = None


@dataclass(frozen=True, kw_only=True)
class ScorerOptions:
    # ---- scorers ----

    # Defines a scorer as NAME=SCORER, as in --scorer="comet=python comet.py". SCORER is MODULE:FUNCTION
    # (Python), run:RUN (log-probabilities), run:RUN,run:RUN (dual cross-entropy), or the command line of a
    # program that reads JSON lines and writes numbers. spbleu:MODEL and metrics such as chrf++ take no NAME=.
    # Empty: none.
    scorer: Annotated[tuple[str, ...], WITH_COMMAS] = ()
    # Seconds to wait for an answer from a scorer's program.
    scorer_timeout: Annotated[float, above(0)] = 600.0


@dataclass(frozen=True, kw_only=True)
class EncodingOptions:
    # ---- lines and interruptions ----

    # Lines that are not valid UTF-8: refuse (error), or replace invalid bytes by U+FFFD.
    invalid_utf8: Literal["refuse", "replace"] = "refuse"


@dataclass(frozen=True, kw_only=True)
class DocumentOptions:
    # ---- input and output ----

    # Give the model the preceding lines of the document as context for each line; needs a model trained with
    # data.context. Documents end at blank lines.
    documents: bool = False
    # File with the document id of each input line, one id per line; a document also ends where the id
    # changes. None: no ids.
    document_ids: str | None = None


@dataclass(frozen=True, kw_only=True)
class JsonOptions:
    # Print JSON even on a terminal; files and pipes always get JSON.
    json: bool = False


@dataclass(frozen=True)
class ExperimentOptions:
    # Run directory, or its URL (gs://, s3://), for config, checkpoints and results. Without --config, the
    # config of an existing run is used. With --config=FOLDER/NAME.py, --run may be left out: it is
    # then runs/NAME.
    run: Path
    # All settings of the experiment; --config.SECTION.FIELD=VALUE changes one of them.
    config: Config = field(default_factory=Config)


@dataclass(frozen=True)
class ProcessOptions:
    """Options of commands that can run as a job of several processes, each started with these flags."""

    # ---- several processes ----

    # HOST:PORT of process 0, reachable by all processes. None: found with --distributed, else not used.
    coordinator: str | None = None
    # Number of processes. None: one process, unless --distributed is set.
    processes: int | None = None
    # Index of this process, counted from 0. None: found with --distributed, else not used.
    process: int | None = None
    # Take the values of --coordinator, --processes and --process from Slurm, GKE, a TPU pod or Open MPI.
    distributed: bool = False


@dataclass(frozen=True)
class WorkerOptions(ProcessOptions):
    # ---- workers ----

    # Number of workers. Each translates blocks of --window lines with its own copy of the model, on its own
    # accelerator if the machine has any. If a worker dies, its block is translated again. None: no workers;
    # with --ray, one per accelerator of the cluster, or one per machine if there are no accelerators.
    workers: Annotated[int | None, at_least(1)] = None
    # Ray cluster on whose machines the workers run, instead of this machine (needs flaxformer_mt[ray]):
    # HOST:PORT, ray://HOST:PORT, auto (the cluster that this machine belongs to) or local (a new cluster on
    # this machine). None: no cluster.
    ray: str | None = None


@dataclass(frozen=True)
class TrainOptions(ProcessOptions, ScorerOptions, ExperimentOptions):
    """Trains the model that a config describes, or resumes a run from its last checkpoint."""

    # Number of steps whose trace is written to RUN/profile, for TensorBoard or Perfetto. None: no trace.
    profile: Annotated[int | None, at_least(1)] = None
    # Start from the parameters of a trained model, RUN or RUN@CHECKPOINT. Architecture and vocabulary come
    # from that run; without --config, so do all other settings. None: random parameters.
    init: str | None = None
    # With --init: train a new vocabulary, in which known subwords keep their embeddings.
    new_vocab: bool = False
    # Resume even if the text of the data set has changed.
    allow_changed_data: bool = False


@dataclass(frozen=True)
class PrepareOptions(ScorerOptions, ExperimentOptions, JsonOptions):
    """Prepares the data set, the vocabulary and the token ids, and reports statistics of the data."""

    # ---- workers ----

    # Number of worker processes that check and tokenize a large training set. None: one for each core of this
    # machine; with --ray, one for each machine of the cluster.
    workers: Annotated[int | None, at_least(1)] = None
    # Ray cluster on whose machines the workers run (needs flaxformer_mt[ray]): HOST:PORT, ray://HOST:PORT,
    # auto (the cluster that this machine belongs to) or local (a new cluster on this machine). None: no
    # cluster.
    ray: str | None = None
    # ---- shortlist ----

    # File for a shortlist, which `translate --shortlist=FILE` reads. It lists the most probable target
    # subwords of each source subword, learned from the training set. None: no shortlist.
    shortlist: Path | None = None
    # With --shortlist: maximum number of target subwords for each source subword.
    shortlist_candidates: int = 50
    # With --shortlist: number of the most frequent target subwords, which every translation may contain.
    shortlist_common: int = 200


@dataclass(frozen=True)
class AlignOptions(ExperimentOptions):
    """Aligns the words of the training pairs (IBM model 1 and an HMM), for guided alignment."""

    # File for the alignments, with one line such as `0-0 1-2` per training pair. None: the file that
    # data.alignments names.
    output: str | None = None


@dataclass(frozen=True)
class ShowOptions(ExperimentOptions, JsonOptions):
    """Shows the resolved config, parameter counts, and a training step's FLOPs, memory and batch shapes."""

    # Devices to compile the training step for, such as v5e:2x2, v6e:16x16:2 (two slices) or h100:8. This
    # machine need not have such devices. None: no compilation.
    target: str | None = None


@dataclass(frozen=True, kw_only=True)
class GlossaryOptions:
    # ---- requirements on translations ----

    # File of terms, one per line: source term, tab, target term. If a source contains a source term, its
    # translation must contain the target term exactly as written (needs beam search). Further columns are
    # ignored, and lines that begin with # are comments. None: no glossary.
    glossary: str | None = None


# Flags that may be given without a value -> the value that they then have.
BARE_FLAGS = {"--alignments": "words"}

# Declared in SearchConfig; Any, because type checkers do not know the fields of classes made at run time.
_SearchFlags: Any = make_flags(SearchConfig, *(field.name for field in fields(SearchConfig)))
_ScoreFlags: Any = make_flags(
    SearchConfig, "length_penalty", "length_penalty_kind", "coverage_penalty", "batch_tokens"
)
_GenerateFlags: Any = make_flags(
    SearchConfig, "method", "beam_size", "temperature", "top_k", "top_p", "seed", "no_repeat_ngram"
)


@dataclass(frozen=True)
class SearchOptions(CheckpointOptions, _SearchFlags):
    # Run directory of a trained model, or its URL (gs://, s3://).
    run: Path


@dataclass(frozen=True)
class EvaluateOptions(
    ProcessOptions,
    ScorerOptions,
    SearchOptions,
    SearchModelOptions,
    ShortlistOptions,
    NonfiniteOptions,
    GlossaryOptions,
):
    """Translates a split or a file and scores the translations against references (BLEU, chrF, TER)."""

    # ---- sentences to score ----

    # Split of the run's data set to evaluate. None: test, unless --reference names a file.
    split: Literal["test", "valid"] | None = None
    # File of source sentences to evaluate, one per line; needs --reference, or a --scorer that works without
    # references. None: the sources of --split.
    source: str | None = None
    # File of reference translations, one line for each line of --source; for a language model, the text to
    # score. None: the references of --split.
    reference: str | None = None
    # For a multilingual model: evaluate only translations into this language. None: all languages; with
    # --source and --reference, the model's only target language.
    target_language: str | None = None
    # For a multilingual model: evaluate only translations from this language. None: all languages.
    source_language: str | None = None
    # ---- scores and significance tests ----

    # Whether to ignore case in the scores. None: as in the run's config.
    lowercase: bool | None = None
    # sacreBLEU's tokenizer for BLEU. auto: chosen by the target language. None: as in the run's config.
    bleu_tokenize: Literal["auto", "13a", "intl", "char", "zh", "ja-mecab", "ko-mecab", "none"] | None = None
    # Number of bootstrap samples for 95% confidence intervals and paired bootstrap tests. 0: no intervals.
    # None: 1000.
    bootstrap: int | None = None
    # Systems, separated by commas, that paired significance tests compare with the run: RUN, RUN@CHECKPOINT,
    # or a file of translations of the same sentences. Empty: no comparison.
    against: tuple[str, ...] = ()
    # Significance test for --against: paired bootstrap resampling, or approximate randomization. None:
    # bootstrap.
    paired: Literal["bootstrap", "approximate"] | None = None
    # With --paired=approximate: number of random trials. None: 10000.
    trials: int | None = None
    # Instead of evaluating, find the --rerank_weight with the best score by this metric, such as bleu or
    # chrf. Needs --rerank; use --split=valid. None: no tuning.
    tune_rerank: str | None = None


@dataclass(frozen=True, kw_only=True)
class BackendOptions:
    # ---- model ----

    # System that runs the model. jax: this package. ctranslate2: CTranslate2 (needs
    # flaxformer_mt[ctranslate2]), only for beam search, greedy search and sampling; --run is then a folder
    # that export --format=ctranslate2 wrote.
    backend: Literal["jax", "ctranslate2"] = "jax"


@dataclass(frozen=True)
class FileTranslationOptions(
    WorkerOptions,
    ScorerOptions,
    SearchOptions,
    SearchModelOptions,
    NonfiniteOptions,
    EnsembleOptions,
    EncodingOptions,
    DocumentOptions,
):
    """Options of commands that translate files."""


@dataclass(frozen=True)
class TranslateOptions(
    BackendOptions,
    ShortlistOptions,
    FileTranslationOptions,
    LanguageOptions,
    GlossaryOptions,
    LetterCaseOptions,
    LongLinesOptions,
):
    """Translates text line by line, and writes one line for each input line in the same order."""

    # ---- input and output ----

    # UTF-8 text file to translate. `-`: standard input.
    input: str = "-"
    # File for the translations, named FILE.partial until it is complete. `-`: standard output.
    output: str = "-"
    # Second run (or RUN@CHECKPOINT), which translates the output of --run: --run=DE_EN --then=EN_FR
    # translates from German to French. Search options apply to both runs; --checkpoint, --ensemble and
    # --shortlist apply only to --run. None: no second run.
    then: str | None = None
    # ---- requirements on translations ----

    # File with one line for each input line: the text with which the translation must begin. An empty line
    # sets no prefix. None: no prefixes.
    prefix: str | None = None
    # File with one line for each input line: phrases that the translation must contain, separated by tabs. An
    # empty line requires nothing. None: no required phrases.
    required: str | None = None
    # ---- what is written ----

    # Write the n best translations of each line as `i ||| text ||| score`, where i counts lines from 0. None:
    # only the best, as text alone.
    n_best: int | None = None
    # With --n_best: leave out translations that have the same text as a better one; fewer than n may remain.
    unique: bool = False
    # Write `score<TAB>text`; the score is the log-probability divided by the length penalty.
    scores: bool = False
    # Write `score<TAB>log-probability<TAB>log-probabilities of the tokens<TAB>text`.
    token_scores: bool = False
    # Before the text, write the alignment (by attention) of words or subwords (pieces): pairs `i-j` of source
    # and target positions, counted from 0. --alignments without a value: words. None: no alignment.
    alignments: Literal["words", "pieces"] | None = None
    # Decoder layer whose attention gives the alignment. 0: first layer; -1: last. None: the layer whose head
    # was trained on alignments (model.alignment), otherwise the second-to-last layer.
    alignment_layer: int | None = None
    # Attention head, counted from 0, that gives the alignment. None: the head that was trained on alignments,
    # otherwise the mean of all heads.
    alignment_head: int | None = None
    # Write one JSON object per line: text, score, token log-probabilities, alignment, subwords and more.
    json: bool = False
    # Take tags (<b>, <br/>) and placeholders ({0}, %s, {{name}}) out of each line, and put them back at the
    # aligned words of the translation.
    markup: bool = False
    # ---- lines and interruptions ----

    # Number of lines that are read, batched and translated at a time. If an input pipe pauses for half a
    # second, the lines read so far are translated, unless --output names a file. None: 2048, or 1 if the
    # input is a terminal.
    window: Annotated[int | None, at_least(1)] = None
    # First compile the functions for all batch sizes and store them, so that later commands start faster.
    warm_up: bool = False
    # Resume an interrupted `translate` command from its FILE.partial; repeat its other flags.
    resume: bool = False
    # Discard the FILE.partial of an interrupted command and start over. Without --resume or --overwrite, an
    # existing FILE.partial is kept, and the command ends with an error.
    overwrite: bool = False


@dataclass(frozen=True, kw_only=True)
class ScoreOptions(
    CheckpointOptions, _ScoreFlags, DtypeOptions, NonfiniteOptions, EncodingOptions, LanguageOptions
):
    """Scores existing translations line by line, with the score by which beam search ranks hypotheses."""

    # Run directory of a trained model, or its URL (gs://, s3://).
    run: Path
    # File of the translations to score, one per line; for a language model, the texts to score. `-`: standard
    # input.
    target: str
    # File of the source sentences, one line for each line of --target. `-`: standard input. None: no sources
    # (only for language models).
    source: str | None = None
    # File for the scores, named FILE.partial until it is complete. `-`: standard output.
    output: str = "-"
    # ---- what is written ----

    # Write `score<TAB>log-probability<TAB>log-probabilities of the tokens` instead of the score alone.
    tokens: bool = False
    # Write one JSON object per line: source, target, score, token log-probabilities, subwords and more.
    json: bool = False
    # ---- lines and memory ----

    # Maximum number of source and target tokens scored at a time, padding included. If the device runs out of
    # memory, this number is halved automatically. None: as in the run's config.
    batch_tokens: int | None = None
    # Lines with too many tokens for the model: refuse (error), or cut (score only the beginning).
    long_lines: Literal["refuse", "cut"] = "refuse"


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(CheckpointOptions, _GenerateFlags):
    """Generates texts with a language model (a run without data.source_language), one per line."""

    # Run directory of a trained language model.
    run: Path
    # Beginning of every text. Empty: no prompt.
    prompt: str = ""
    # Number of texts: samples, or the best results of beam search.
    n_best: int = 1
    # Maximum number of tokens per text, including prompt and end symbol. None: data.max_target_length of the
    # run's config.
    length: int | None = None
    # Random sampling, greedy search or beam search.
    method: Literal["sample", "greedy", "beam"] = "sample"


@dataclass(frozen=True)
class AverageOptions(NonfiniteOptions):
    """Averages the parameters of the last checkpoints and writes the average to RUN/checkpoints/average."""

    # Run directory of a trained model, or its URL (gs://, s3://).
    run: Path
    # Number of newest checkpoints to average.
    last: int


@dataclass(frozen=True)
class PlotOptions(CheckpointOptions):
    """Plots the training of a run, and the attention weights of a sentence, as PNG files."""

    # Run directory to plot.
    run: Path
    # Source sentence to translate; the attention weights of its translation are plotted, too. Empty: no
    # attention plots.
    source: str = ""
    # Folder for the PNG files. None: RUN/plots.
    output: Path | None = None


@dataclass(frozen=True)
class DoctorOptions:
    """Reports versions, devices and missing packages, with the commands that install them."""

    # Run directory of a translation model; the report then also lists the functions that `translate` and
    # `serve` compile for this model.
    run: Path | None = None


@dataclass(frozen=True, kw_only=True)
class CorpusOptions(PairRules, FileTranslationOptions):
    # ---- input and output ----

    # UTF-8 text file, one sentence per line.
    input: str
    # Folder DIR for the pairs, which are written to DIR/train.tsv; data.dataset=parallel_text@DIR reads them.
    output: Path
    # Weight of the new pairs in the training loss, written as the third column of train.tsv. None: no third
    # column.
    weight: Annotated[float | None, between(SMALLEST_WEIGHT, LARGEST_WEIGHT)] = None
    # Old name of --pair_length_ratio.
    max_length_ratio: Annotated[float | None, at_least(1)] = None
    # ---- lines and interruptions ----

    # Number of lines that are batched and translated at a time. None: 2048.
    window: Annotated[int | None, at_least(1)] = None
    # Resume an interrupted command without repeating finished work; repeat its other flags.
    resume: bool = False
    # Discard the translations in DIR and start over. Without --resume or --overwrite, existing translations
    # are kept, and the command ends with an error.
    overwrite: bool = False


@dataclass(frozen=True, kw_only=True)
class BacktranslateOptions(BackendOptions, CorpusOptions):
    """Makes training pairs from text in the target language: --run translates each line into a source."""

    # ---- back-translation ----

    # Symbol that is put before each source to mark it as back-translated. For training, vocab.symbols must
    # contain this symbol. Empty: none.
    tag: str = "<BT>"


@dataclass(frozen=True, kw_only=True)
class DistilOptions(CorpusOptions, LanguageOptions):
    """Makes training pairs for a student: sources with translations by a teacher or any other system."""

    # Run directory of the teacher, or its URL (gs://, s3://). None: none; needs --candidates.
    run: Path | None = None  # type: ignore[assignment]
    # UTF-8 text file for the teacher to translate, one sentence per line. None: none; needs --candidates.
    input: str | None = None  # type: ignore[assignment]
    # ---- distillation ----

    # File of sources with translations by any system, such as a large language model. Each line has a source
    # and its translations, separated by tabs; in FILE.jsonl, each line is {"source": TEXT, "translations":
    # [TEXT, ...]}. Texts that do not look like translations are left out. None: translations of --input by
    # --run.
    candidates: str | None = None
    # File of the reference translations, one line for each source, for --targets=nbest. None: no references.
    reference: str | None = None
    # Which translation of each source becomes the target. best: the best (first) one. The other values choose
    # among the --n_best translations or the --candidates. nbest: the closest to the reference (Kim and Rush
    # 2016); mbr: the one with minimum Bayes risk; scorer: the one with the highest score by --metric, which
    # --scorer defines.
    targets: Literal["best", "nbest", "mbr", "scorer"] = "best"
    # With --run: number of translations per source to choose from. None: all hypotheses of the search.
    n_best: int | None = None
    # Sentence-level score by which targets are chosen: bleu, chrf, chrf++, ter, or a name that --scorer
    # defines. None: bleu for nbest, chrf for mbr.
    metric: str | None = None


@dataclass(frozen=True)
class ExportOptions(CheckpointOptions):
    """Converts a trained model to the format of another system and checks that both models' outputs agree."""

    # Run directory of a trained model, or its URL (gs://, s3://).
    run: Path
    # Target format: torch, torch-nn, handbuilt, kokoyi, decoder-only, aiayn, embeddings, ctranslate2,
    # marian-npz (for Marian) or bergamot (for browsers); for transformers, marian, hf-pre-norm or hf (an
    # imported model's own class; for other models, the same as marian or hf-pre-norm).
    format: str
    # Folder for the exported files; it must be empty or not exist.
    output: Path
    # Data type of the weights with --format=ctranslate2: int8, int8_float16, int8_float32, int8_bfloat16,
    # int16, float16 or bfloat16. With --format=bergamot: int8 (activation scales are measured on sentences of
    # the run's data) or int8_dynamic (activation scales are computed at run time). none: float32.
    quantization: str = "none"
    # Maximum accepted absolute difference between the logits or log-probabilities of both models. If the
    # largest of their absolute values exceeds 1, the tolerance is multiplied by that value.
    tolerance: float = 1e-4
    # With --format=ctranslate2 or bergamot: the run's shortlist, which prepare --shortlist=FILE wrote. It is
    # exported as vmap.txt (ctranslate2) or lex.DEEN.s2t.bin (bergamot).
    shortlist: Path | None = None
    # Repository on the Hugging Face Hub, hf:OWNER/NAME, to which the files and a model card are uploaded.
    # None: no upload.
    push: str | None = None


@dataclass(frozen=True)
class ImportOptions:
    """Converts a model of another system to a run directory, for translation, scoring or further training."""

    # Model: its folder, its weights file, or its name on the Hugging Face Hub, such as
    # hf:facebook/nllb-200-distilled-600M; with a revision, hf:OWNER/NAME@REVISION.
    input: Path
    # Run directory to create; it must be empty or not exist.
    run: Path
    # Format: hf (Hugging Face's BART, mBART-50, M2M100, NLLB, T5, mT5, MADLAD-400, ByT5, Marian, Pegasus),
    # export's (torch, torch-nn, marian, hf-pre-norm), research code's (handbuilt, kokoyi, decoder-only,
    # aiayn) or a toolkit's (fairseq, opennmt-py, eole, marian-npz, bergamot, joeynmt). None: detected from
    # the files.
    format: str | None = None
    # Languages to translate between, as in de,en; if there are two, the first is the source language. More
    # than two are for multilingual models (--format=hf). None: the languages in the model's files, or de,en.
    languages: tuple[str, ...] | None = None
    # With --format=hf: text files in the languages to use. Subwords that do not occur in these files are
    # removed from vocabulary and embeddings. With --new_language: text files in the new language. To remove
    # subwords in this case too, add a text file in each other language to use, named after it, as in text.de.
    # None: all subwords are kept.
    vocab_text: tuple[str, ...] | None = None
    # With --vocab_text: the new ones among --languages, each with a related language of the model, whose tag
    # embedding is copied, as in tyv_Cyrl:kaz_Cyrl. For T5 models without tags: the new language alone, as in
    # tyv. None: no new languages.
    new_language: tuple[str, ...] | None = None
    # Number of subwords to learn for new languages. None: all frequent subwords of words that the old
    # vocabulary splits into subwords of fewer than 4 characters on average.
    new_pieces: int | None = None
    # Config file, or name of a recipe, that describes the model. None: the model's own files.
    config: str | None = None
    # Vocabularies: a folder of SentencePiece models (joint.model, or source.model and target.model) or of
    # word lists, with one word per line in the order of ids (joint.txt, or source.txt and target.txt); or one
    # such file for both languages. None: the vocabularies in the model's folder.
    vocab: Path | None = None
    # Maximum accepted absolute difference between the logits of the original and the imported model. If the
    # largest absolute logit exceeds 1, the tolerance is multiplied by that value.
    tolerance: float = 1e-4


@dataclass(frozen=True)
class ServeOptions(ScorerOptions, CheckpointOptions, SearchModelOptions, ShortlistOptions, LetterCaseOptions):
    """Serves models over HTTP, with LibreTranslate's API and a web page to try the models."""

    # Run directory of a trained model, or with --backend=ctranslate2 the folder of an exported model. Repeat
    # the flag to serve several language pairs: --run=A --run=B.
    run: tuple[Path, ...]
    # ---- address ----

    # Port to listen on. 0: any free port.
    port: Annotated[int, between(0, 65535)] = 5000
    # Address to listen on. 127.0.0.1: only this machine; 0.0.0.0: all networks of this machine. None: the
    # value of the environment variable FLAXFORMER_MT_HOST, or 127.0.0.1.
    host: str | None = None
    # File of API keys, one per line. Each request for a translation then needs a key. None: no keys.
    api_key_file: Path | None = None
    # Origins whose pages may send requests to this server from a browser (CORS), such as https://example.org,
    # separated by commas. *: any. Empty: only the server's own page.
    cors: tuple[str, ...] = ()
    # Names by which clients reach this server, such as translate.example.org, separated by commas; requests
    # with other Host headers are refused. Empty: any.
    allowed_hosts: tuple[str, ...] = ()
    # ---- limits ----

    # Maximum number of characters of a request; longer requests get status 413.
    max_characters: Annotated[int, at_least(1)] = 10_000
    # Maximum total number of lines in unanswered requests; further requests get status 429.
    max_waiting: Annotated[int, at_least(1)] = 1000
    # Seconds after which an unanswered request gets status 504.
    timeout: Annotated[float, at_least(0.001)] = 60.0
    # ---- model ----

    # System that runs the models: jax (this package), or ctranslate2 for folders that `export
    # --format=ctranslate2` wrote.
    backend: Literal["jax", "ctranslate2"] = "jax"
    # Beam size; a request gets at most this many hypotheses. None: as in the run's config.
    beam_size: int | None = None
    # Whether to offer further language pairs by pivoting through a third language: runs de-en and en-fr
    # together translate from de to fr.
    pivots: bool = True
    # Compile the model's functions for all batch sizes at startup. Meanwhile, a request waits only for the
    # functions that it needs.
    warm_up: bool = True


@dataclass(frozen=True, kw_only=True)
class NewOptions:
    """Writes a config whose model, batches, steps and held-out pairs fit a corpus and this machine."""

    # Files of the corpus; `--files=` may be omitted. Give two files with one sentence per line, sources first
    # (corpus.fr corpus.en), or one file of pairs: a table with two columns (corpus.tsv), JSON objects
    # (corpus.jsonl) or parquet (corpus.parquet). Text may be compressed (.gz, .zst).
    files: tuple[str, ...]
    # Run directory for the training. The config is written next to it, as RUN.py.
    run: Path
    # Where the model will run. browser: in Bergamot, the engine of Firefox. cpu: in CTranslate2. RUN.py then
    # describes a small student and RUN_teacher.py its teacher; both files list all commands from training to
    # export. None: one model, without a teacher.
    for_: Literal["browser", "cpu"] | None = None
    # Run to fine-tune, such as a run that `import --new_language` made. RUN.py then keeps the network and
    # vocabulary of that run. If the model has language tags, RUN.py trains both directions of the corpus.
    # None: a new model.
    from_: Path | None = None
    # With --from: data sets in directions that the model already translates, as in
    # parallel_text@my_text:ru-en. A share of their pairs is mixed in, so that the model forgets less. None:
    # no replay.
    replay: str | None = None
    # Language of the sources, such as fr. None: the extension of the first file.
    source_language: str | None = None
    # Language of the targets, such as en. None: the extension of the second file.
    target_language: str | None = None
    # Folder of prepared data. None: $FLAXFORMER_MT_CACHE or ~/.cache/flaxformer_mt.
    cache_dir: Path | None = None
    # Leave out pairs that are not valid UTF-8, and lines that only the longer file has. Without this flag,
    # both are errors.
    drop_invalid: bool = False
    # Replace an existing config RUN.py.
    overwrite: bool = False


def read_glossary(options: EvaluateOptions | TranslateOptions) -> Any:
    """Return the `Glossary` that --glossary names, or None without that flag."""
    from flaxformer_mt.translation.glossary import Glossary

    return None if options.glossary is None else Glossary.load(options.glossary)


def read_languages(options: EvaluateOptions | ScoreOptions | TranslateOptions) -> dict[str, str]:
    from flaxformer_mt.translation.language_tags import choose_line_tags
    from flaxformer_mt.vocab.pretrained_vocab import read_tags

    names = ("source_language", "target_language")
    languages = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    if getattr(options, "then", None) is None:  # with it, they are those of two runs
        known = read_tags(options.run / "vocab")
        choose_line_tags(read_config(options.run / "config.json").data, **languages, vocab_tags=known)
    return languages
