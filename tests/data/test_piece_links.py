"""Links of pieces follow the words of the text, through stores, buckets and packed rows."""

import dataclasses

import numpy as np

from flaxformer_mt.commands.show import longest_batch
from flaxformer_mt.config import Config, DataConfig, GuidedAlignmentConfig, ModelConfig, VocabConfig
from flaxformer_mt.corpus import read_pairs
from flaxformer_mt.data.batching import plan_epoch
from flaxformer_mt.data.buckets import make_training_shapes
from flaxformer_mt.data.epoch_stores import EpochStores
from flaxformer_mt.data.loader import RowShare, make_batch
from flaxformer_mt.data.piece_links import link_pieces
from flaxformer_mt.data.token_store import TokenStore
from flaxformer_mt.vocab import make_vocabs
from flaxformer_mt.vocab.words import number_pieces


def test_each_piece_is_linked_to_each_piece_of_the_aligned_word():
    words = [[np.array([0, 0, 1]), np.array([0])], [np.array([0, 1, 1]), np.array([0, 1])]]
    # The last point belongs to a word of the second pair that has no pieces.
    points, owners = link_pieces(np.array([[0, 0], [1, 1], [0, 1], [1, 0]]), np.array([0, 0, 1, 1]), words)
    assert points.tolist() == [[0, 0], [1, 0], [2, 1], [2, 2], [0, 1]]
    assert owners.tolist() == [0, 0, 0, 0, 1]
    nothing = link_pieces(np.zeros((0, 2), np.int64), np.zeros(0, np.int64), words)
    assert nothing[0].shape == (0, 2) and nothing[1].shape == (0,)


def test_links_reach_the_right_places_of_batches(tmp_path):
    generator = np.random.default_rng(2)
    words = ["hund", "katze", "haus", "½", "see", "\u00adbaum", "ich"]
    sources, targets, points = [], [], []
    for _ in range(60):
        source, target = (generator.choice(words, int(generator.integers(1, 6))).tolist() for _ in range(2))
        sources.append("  ".join(source))
        targets.append(" ".join(target))
        chosen = generator.random((len(source), len(target))) < 0.3
        points.append(" ".join(f"{i}-{j}" for i, j in np.argwhere(chosen)))
    for name, lines in (("train.xx", sources), ("train.yy", targets), ("train.align", points)):
        (tmp_path / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    config = DataConfig(
        dataset="parallel_text",
        text_dir=str(tmp_path),
        cache_dir=str(tmp_path / "cache"),
        source_language="xx",
        target_language="yy",
        alignments=("train.align",),
        max_source_length=30,
        max_target_length=30,
        batch_tokens=240,
        num_shapes=2,
    )
    pairs = read_pairs(config, "train")
    vocabs = make_vocabs(VocabConfig(size=40, byte_fallback=False), pairs, tmp_path / "vocab")
    plain = read_pairs(dataclasses.replace(config, alignments=()), "train")
    assert TokenStore.build(plain, vocabs, tmp_path / "tokens").links is None
    guided = ModelConfig(alignment=GuidedAlignmentConfig(weight=0.1))
    longest = longest_batch(Config(data=config, model=guided))
    assert longest.alignment.shape == (longest.target_in.shape[0], longest.target_in.shape[1], 4)
    stores = EpochStores(pairs, vocabs, tmp_path / "tokens", 0.3, 7)
    for store in (stores.base, stores.store(1)):
        for batching in ("bucket", "pack"):
            seen = check_batches(store, dataclasses.replace(config, batching=batching), pairs, vocabs)
            assert seen == len(pairs)


def test_a_no_break_space_is_part_of_its_word(tmp_path):
    """As for fast_align: "100 km" is two words, with a no-break space one."""
    texts = {
        "train.xx": "100 km der Hund schläft\n",
        "train.yy": "100\u00a0km the dog sleeps\n",
        "train.align": "0-0 1-0 2-1 3-2 4-3\n",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text * 2, encoding="utf-8")
    config = DataConfig(
        dataset="parallel_text",
        text_dir=str(tmp_path),
        cache_dir=str(tmp_path / "cache"),
        source_language="xx",
        target_language="yy",
        alignments=("train.align",),
    )
    pairs = read_pairs(config, "train")
    vocabs = make_vocabs(VocabConfig(size=40, byte_fallback=False), pairs, tmp_path / "vocab")
    store = TokenStore.build(pairs, vocabs, tmp_path / "tokens")
    words = []
    for ids in store[0]:
        pieces = vocabs.source.pieces(ids[:-1])
        ends = np.cumsum([piece.count("\u2581") for piece in pieces])
        words.append([" ".join(pieces).replace(" ", "").split("\u2581")[end] for end in ends])
    points = store.links.points[: store.links.offsets[1]]
    linked = {(words[0][source], words[1][target]) for source, target in points}
    assert linked == {
        ("100", "100\u00a0km"),
        ("km", "100\u00a0km"),
        ("der", "the"),
        ("Hund", "dog"),
        ("schläft", "sleeps"),
    }


def check_batches(store, config, pairs, vocabs) -> int:
    """Compares the bits of each pair in each batch with its points; returns the number of pairs seen."""
    lengths = store.source_lengths, store.target_lengths
    shapes = make_training_shapes(*lengths, config=config, headroom=True)
    plan = plan_epoch(*lengths, config=config, seed=1, epoch=0, parts=store.parts, shapes=shapes)
    alignments, seen = list(pairs.read_links()), 0
    for index in range(len(plan)):
        batch = make_batch(store, plan, index, pad_id=0, bos_id=1)
        halves = [make_batch(store, plan, index, pad_id=0, bos_id=1, share=RowShare(2, (i,))) for i in (0, 1)]
        width = batch.source.shape[1]
        bits = np.unpackbits(batch.alignment, axis=2, bitorder="little")[:, :, :width]
        together = np.concatenate([half.alignment for half in halves])
        np.testing.assert_array_equal(together[: len(batch.alignment)], batch.alignment)
        expected = np.zeros_like(bits)
        rows, starts = plan[index].rows, {}
        for example, row in zip(plan[index].examples, rows, strict=True):
            s, t = starts.get(row, (0, 0))
            source, target = store[example]
            pair = pairs[int(example)]
            of_source = number_pieces(vocabs.source, source[:-1], pair.source)
            of_target = number_pieces(vocabs.target, target[:-1], pair.target)
            for i, j in alignments[example]:
                for p in np.flatnonzero(np.array(of_source) == i):
                    expected[row, t + np.flatnonzero(np.array(of_target) == j), s + p] = 1
            starts[row] = s + len(source), t + len(target)
            seen += 1
        np.testing.assert_array_equal(bits, expected)
    return seen
