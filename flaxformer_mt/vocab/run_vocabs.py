"""The vocabularies in the folder of a run: one for both languages, or one for each."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from flaxformer_mt.config import VocabConfig
from flaxformer_mt.errors import UserError
from flaxformer_mt.vocab.pretrained_vocab import METADATA_NAME, PretrainedVocab
from flaxformer_mt.vocab.sentencepiece_vocab import TextPairs, Vocab, normalize_like, train_model
from flaxformer_mt.vocab.symbols import check_symbols

_JOINT, _SOURCE, _TARGET = "joint.model", "source.model", "target.model"


@dataclass(frozen=True)
class Vocabs:
    """The source and the target vocabulary; if `joint`, both have the same subwords and ids."""

    source: Vocab
    target: Vocab
    joint: bool

    def __post_init__(self) -> None:
        """Raise UserError unless both vocabularies have the same pad id, since a batch has only one."""
        if self.source.pad_id != self.target.pad_id:
            raise UserError(
                f"the source vocabulary has pad id {self.source.pad_id}, the target vocabulary "
                f"{self.target.pad_id}; train both with the same --pad_id"
            )

    def save(self, directory: str | Path) -> None:
        """Write joint.model, or source.model and target.model, or the files of a pretrained vocabulary."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        if isinstance(self.target, PretrainedVocab):
            self.target.save_files(directory)
            return
        if self.joint and self.source.fingerprint == self.target.fingerprint:
            self.source.save(directory / _JOINT)
        else:
            self.source.save(directory / _SOURCE)
            self.target.save(directory / _TARGET)


def load_vocabs(directory: str | Path) -> Vocabs:
    directory = Path(directory)
    joint, source, target = (directory / name for name in (_JOINT, _SOURCE, _TARGET))
    separate = source.is_file() and target.is_file()
    if (directory / METADATA_NAME).is_file():
        pretrained = PretrainedVocab.load_files(directory)
        return Vocabs(pretrained, pretrained, joint=True)
    if joint.is_file() and separate:
        raise UserError(f"{directory} holds both {_JOINT} and {_SOURCE} + {_TARGET}; remove the unused files")
    if joint.is_file():
        vocab = Vocab.load(joint)
        return Vocabs(vocab, vocab, joint=True)
    if separate:
        first, other = Vocab.load(source), Vocab.load(target)
        alike = first.pieces(range(first.size)) == other.pieces(range(other.size))
        # Different models with the same subwords are a joint vocabulary whose sides segment differently.
        return Vocabs(first, other, joint=alike and first.fingerprint != other.fingerprint)
    raise UserError(f"{directory} holds no vocabulary: it needs {_JOINT}, or {_SOURCE} and {_TARGET}")


def holds_vocabs(directory: Path) -> bool:
    """Return whether a folder has all files that `Vocabs.save` writes; an interrupted save leaves fewer."""
    if any((directory / name).is_file() for name in (METADATA_NAME, _JOINT)):
        return True
    return (directory / _SOURCE).is_file() and (directory / _TARGET).is_file()


def make_vocabs(
    config: VocabConfig, pairs: TextPairs, directory: str | Path, *, target_only: bool = False
) -> Vocabs:
    """Load the vocabularies in `directory`; if there are none, load or train models and save them there.

    Models are loaded if the config names model files, and otherwise trained. Training is deterministic: the
    same pairs and config give the same bytes. The source and target models of a joint vocabulary have the
    same subwords, but may normalize text differently.
    """
    directory = Path(directory)
    if target_only:
        normalization = config.target_normalization
        config = dataclasses.replace(config, joint=True, source_size=None, normalization=normalization)
    if holds_vocabs(directory):
        vocabs = load_vocabs(directory)
        if vocabs.source is not vocabs.target and not config.joint:
            # Two separate vocabularies with the same subwords, since their texts are the same.
            vocabs = dataclasses.replace(vocabs, joint=False)
        _check_agrees(vocabs, config, directory)
        return vocabs
    if config.kind == "pretrained":
        raise UserError(
            f"vocab.kind is pretrained, but {directory} has no vocabulary of a pretrained model; import the "
            "model, and train with --init=RUN, or set vocab.kind=bpe for a vocabulary of your own"
        )
    if config.joint:
        vocabs = _load_or_train_joint(config, pairs, target_only=target_only)
    else:
        vocabs = Vocabs(
            _load_or_train(dataclasses.replace(config, size=config.size_of_source), pairs, "source"),
            _load_or_train(config, pairs, "target"),
            joint=False,
        )
    vocabs.save(directory)
    return vocabs


def _check_agrees(vocabs: Vocabs, config: VocabConfig, directory: Path) -> None:
    remedy = f"set it back, or remove {directory} or use another run directory for a new vocabulary"
    if (is_pretrained := isinstance(vocabs.target, PretrainedVocab)) != (config.kind == "pretrained"):
        holds = "the vocabulary of a pretrained model" if is_pretrained else "SentencePiece models"
        raise UserError(f"vocab.kind is {config.kind}, but {directory} holds {holds}; {remedy}")
    if vocabs.joint != config.joint:
        raise UserError(f"vocab.joint is {config.joint}, but {directory} holds {vocabs.joint}; {remedy}")
    for side, model in [("source", config.source_model), ("target", config.target_model or config.joint)]:
        size = getattr(vocabs, side).size
        wanted = config.size_of_source if side == "source" else config.size
        if not model and wanted and size != wanted:
            raise UserError(f"vocab.size is {wanted}, but {directory} holds {size} {side} subwords; {remedy}")


def _load_or_train_joint(config: VocabConfig, pairs: TextPairs, *, target_only: bool) -> Vocabs:
    if config.target_model and not config.source_model:
        raise UserError(
            f"vocab.target_model is {config.target_model}, but vocab.source_model is empty and vocab.joint "
            "is True; set vocab.source_model to the model of the same vocabulary, or vocab.joint=False"
        )
    if config.source_model:
        source = _load(config, "source")
        target = _load(config, "target") if config.target_model else source
        if source.pieces(range(source.size)) != target.pieces(range(target.size)):
            raise UserError(
                f"vocab.source_model {config.source_model} and vocab.target_model {config.target_model} have "
                "different subwords, but vocab.joint is True; give two models of one joint vocabulary, or "
                "set vocab.joint=False"
            )
        return Vocabs(source, target, joint=True)
    model = train_model(config, pairs, ("target",) if target_only else ("source", "target"))
    source, target = (Vocab(normalize_like(config, model, side)) for side in ("source", "target"))
    return Vocabs(source, source if source.fingerprint == target.fingerprint else target, joint=True)


def _load_or_train(config: VocabConfig, pairs: TextPairs, side: str) -> Vocab:
    if getattr(config, f"{side}_model"):
        return _load(config, side)
    return Vocab(normalize_like(config, train_model(config, pairs, (side,)), side))


def _load(config: VocabConfig, side: str) -> Vocab:
    path = getattr(config, f"{side}_model")
    vocab = Vocab.load(path, name=f"vocab.{side}_model")
    check_symbols(vocab, config.symbols, name=path)
    return vocab
