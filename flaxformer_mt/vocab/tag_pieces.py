"""The check that language tags are single pieces of a vocabulary."""

from collections.abc import Iterable

from flaxformer_mt.errors import UserError
from flaxformer_mt.vocab.vocabulary import Vocab


def check_language_tags(vocab: Vocab, tags: Iterable[str]) -> None:
    """Check that the vocabulary has a piece for each tag, which stands before a text.

    Raises:
      UserError: a tag is several pieces, or unknown.
    """
    for tag in tags:
        if tag in vocab.tags or " " in tag:  # a tag with spaces is text, as `translate English to German:`
            continue
        if vocab.tags:
            raise UserError(
                f"the pretrained vocabulary has no language tag {tag}; it has {len(vocab.tags)}, such as "
                f"{', '.join(list(vocab.tags)[:6])}: train with languages that the model knows, or set "
                "data.target_tags=never"
            )
        ids = vocab.tokenize(tag)[:-1]
        if len(ids) != 1 or ids[0] == vocab.unk_id:
            raise UserError(
                f"the source vocabulary has no piece for the language tag {tag}, but spells it "
                f"{' '.join(vocab.pieces(ids))}: make a new vocabulary (leave out vocab.source_model; with "
                "--init, give --new_vocab), with vocab.normalization other than nmt_nfkc_cf if the tag has "
                "capital letters; or use no tags (data.target_tags, data.source_tags)"
            )
