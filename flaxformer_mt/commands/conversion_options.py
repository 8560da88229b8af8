"""Options of `export` and `import`, which convert models of other systems and for them; see options.py."""

from dataclasses import dataclass
from pathlib import Path

from flaxformer_mt.commands.shared_options import CheckpointOptions


@dataclass(frozen=True)
class ExportOptions(CheckpointOptions):
    """Writes a trained model in the format of another system and checks that its outputs agree."""

    # Run directory of a trained model, or its URL (gs://, s3://).
    run: Path
    # Target format: torch, torch-nn, handbuilt, kokoyi, decoder-only, aiayn, embeddings, hf (the classes of
    # imported models, and for others marian or hf-pre-norm), marian, hf-pre-norm or ctranslate2.
    format: str
    # Folder for the exported files; it must be empty or not exist.
    output: Path
    # Data type of the weights with --format=ctranslate2: int8, int8_float16, int8_float32, int8_bfloat16,
    # int16, float16 or bfloat16. none: float32.
    quantization: str = "none"
    # Maximum absolute difference from the original model's logits or log-probabilities that is accepted; of
    # those larger than 1, in proportion.
    tolerance: float = 1e-4
    # With --format=ctranslate2: shortlist of the run, as prepare --shortlist=FILE wrote it; becomes vmap.txt.
    shortlist: Path | None = None
    # Name of a model on Hugging Face's Hub to which the files are uploaded, with a model card, as in
    # hf:OWNER/NAME. None: nothing is uploaded.
    push: str | None = None


@dataclass(frozen=True)
class ImportOptions:
    """Converts a model of another system to a run directory, to translate, score or train further."""

    # Folder of the model, or its file of weights; or the name of a model on Hugging Face's Hub, as in
    # hf:facebook/nllb-200-distilled-600M, or with a revision hf:OWNER/NAME@REVISION.
    input: Path
    # Run directory to create; it must be empty or not exist.
    run: Path
    # Format of the model: hf (of Hugging Face: BART, mBART-50, M2M100, NLLB, T5, mT5, MADLAD-400, ByT5,
    # Marian, Pegasus), torch, torch-nn, handbuilt, kokoyi, decoder-only, aiayn, marian or hf-pre-norm; or of
    # another toolkit: fairseq, opennmt-py, eole, marian-npz or joeynmt. None: found from the files.
    format: str | None = None
    # Languages to translate between, as in de,en; the first is the source language of two. More than two only
    # for models of many languages (--format=hf). None: those that the model's files name, or de,en.
    languages: tuple[str, ...] | None = None
    # With --format=hf: files of text in the languages in use. Pieces that occur in none of them are left out
    # of the vocabulary, and of the embeddings. None: all are kept.
    vocab_text: tuple[str, ...] | None = None
    # Config file, or name of a recipe, that describes the model. None: the model's files describe it.
    config: str | None = None
    # Folder with joint.model, or with source.model and target.model (SentencePiece); or with .txt files of
    # these names: a word a line, in the order of ids. Or one file for both languages. None: it is in the
    # model's folder.
    vocab: Path | None = None
    # Maximum absolute difference from the original model's logits that is accepted.
    tolerance: float = 1e-4
