"""Speed of the input pipeline, compared with the tokens that the training step consumes.

    # --tiny: a check in seconds, whose numbers are meaningless
    PYTHONPATH=. python benchmarks/data.py

Token ids are random, without text and SentencePiece, and sentence lengths are like those of translated text.
Prints one JSON object with two parts:

* `large`: writes a token store of --pairs sentence pairs (5 million) in the same way as `prepare`; then opens
  the store, plans an epoch and makes the first batch, as at the start of training. Reports the seconds of
  each stage and the peak memory of the process after it, in both modes. The store is written to --work, or to
  a temporary folder.
* `pipeline`: target tokens per second of `train_batches` in both modes, as numpy arrays and put on the
  device, compared with training the small model (width 256, FFN 1,024, 3 + 3 layers, vocabulary 8,000) on
  batches of 2,048 target tokens in the same process. `ratio` is the rate on the device divided by the rate of
  training; at least 30 is required.
"""

import argparse
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from flaxformer_mt.config import Config, DataConfig, ModelConfig, TrainConfig
from flaxformer_mt.corpus.pairs import Pair, Part
from flaxformer_mt.data.batch_array import BatchArray, make_batch
from flaxformer_mt.data.batching import plan_epoch
from flaxformer_mt.data.epoch_stores import EpochStores
from flaxformer_mt.data.loader import train_batches
from flaxformer_mt.data.token_store import TokenStore
from flaxformer_mt.data.tokenization import Drawing
from flaxformer_mt.model import init_params, make_model
from flaxformer_mt.parallel import make_parallel
from flaxformer_mt.training.optimizers import make_hyperparameters
from flaxformer_mt.training.state import init_state
from flaxformer_mt.training.update import UpdateConfig, make_train_step
from flaxformer_mt.vocab import Vocabs

REQUIRED_RATIO = 30
MODES = ("bucket", "pack")
SPECIAL = {"pad_id": 0, "bos_id": 1}
_EOS, _FIRST_WORD = 2, 4

_SMALL = ModelConfig(
    num_encoder_layers=3, num_decoder_layers=3, model_dim=256, num_heads=8, ffn_dim=1024, dropout_rate=0.1
)
_TINY = ModelConfig(num_encoder_layers=1, num_decoder_layers=1, model_dim=8, num_heads=2, ffn_dim=8)


class MadeUpVocab:
    """A substitute for a vocabulary: a text is its length, and becomes random ids that end with eos."""

    fingerprint = "made up"
    pad_id = SPECIAL["pad_id"]

    def __init__(self, size: int) -> None:
        """Store the size; all ids are below it."""
        self.size = size

    def tokenize_all(
        self, texts: Sequence[int], *, sampling: float, seed: int, threads: int
    ) -> list[np.ndarray]:
        """Draw ids for sentences of the given lengths, in a Zipf-like distribution: small ids are common."""
        ends = np.cumsum(texts)
        uniform = np.random.default_rng(seed).random(ends[-1], np.float32)
        ids = (_FIRST_WORD * (self.size / _FIRST_WORD) ** uniform).astype(np.int32)
        ids[ends - 1] = _EOS
        return np.split(ids, ends[:-1])


class MadeUpPairs:
    """A substitute for the pairs of a data set: a pair consists of its two lengths in tokens."""

    has_source, columns, target_tags, languages = True, {}, ("",), (("de", "en"),)
    context = None

    def __init__(self, number: int) -> None:
        """Draw lognormal lengths with mean 25; source and target of a pair have similar lengths."""
        random = np.random.default_rng(0)
        source = np.exp(random.normal(3.0, 0.6, number))
        self._lengths = np.stack([source, source * np.exp(random.normal(0.0, 0.2, number))], axis=1)
        self._lengths = self._lengths.astype(np.int32) + 1
        self.fingerprint = f"made up {number}"
        self.parts = (Part("made up", number, 1.0),)

    def __len__(self) -> int:
        return len(self._lengths)

    def locate(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the set and the row of each pair."""
        return np.zeros(len(numbers), np.int64), numbers

    def __iter__(self) -> Iterator[Any]:
        for start in range(0, len(self), 1 << 16):
            yield from map(Pair._make, self._lengths[start : start + (1 << 16)].tolist())


def make_stores(pairs: int, root: Path, *, vocabulary: int) -> EpochStores:
    """Make the token store of `pairs` random pairs; write it to `root` if absent there."""
    vocab: Any = MadeUpVocab(vocabulary)
    made_up: Any = MadeUpPairs(pairs)
    return EpochStores(made_up, Vocabs(vocab, vocab, joint=True), root, Drawing(0.0, 0))


def count_tokens(batch: BatchArray) -> int:
    """Count the target tokens of a batch, without padding."""
    return int(np.count_nonzero(batch.sides[1].mask))


# ---- a large corpus ----


def measure_large(pairs: int, root: Path, *, vocabulary: int) -> dict[str, Any]:
    """Measure seconds and peak memory of each stage before the first update."""
    base, found = _peak_mib(), {}

    def note(name: str, start: float, **facts: Any) -> None:
        found[name] = {"seconds": round(time.perf_counter() - start, 2), "peak_mib": _peak_mib(), **facts}

    start = time.perf_counter()
    make_stores(pairs, root, vocabulary=vocabulary)
    size = sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
    note("store_written", start, disk_mib=size >> 20)
    start = time.perf_counter()
    store = make_stores(pairs, root, vocabulary=vocabulary).base
    note("store_opened", start)
    for mode in MODES:
        start = time.perf_counter()
        plan = _plan(store, DataConfig(batching=mode))
        note(f"epoch_planned_{mode}", start, batches=len(plan), padding=round(plan.padding_share, 3))
        start = time.perf_counter()
        make_batch(store, plan[0], **SPECIAL)
        note(f"first_batch_{mode}", start)
    return {"pairs": pairs, "target_tokens": len(store.target.tokens), "peak_mib_of_imports": base, **found}


def _plan(store: TokenStore, config: DataConfig) -> Any:
    return plan_epoch(store.source_lengths, store.target_lengths, config=config, seed=1, epoch=0)


def _peak_mib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


# ---- the pipeline and the training step ----


def measure_pipeline(
    stores: EpochStores, config: DataConfig, *, batches: int, repeats: int
) -> dict[str, float]:
    """Target tokens per second of the loader, as arrays and on the device; the median of `repeats` runs.

    Excludes the first ten batches, so that the threads fill their buffer before the clock starts.
    """

    jax.block_until_ready(jax.device_put(np.zeros(1)))  # excludes the cost of the first use of a device

    def rate(put: bool) -> float:
        loader = train_batches(stores, config, seed=1, **SPECIAL)
        try:
            for _ in itertools.islice(loader, 10):
                pass
            tokens, start = 0, time.perf_counter()
            for _, batch in itertools.islice(loader, batches):
                tokens += count_tokens(batch)
                if put:
                    jax.block_until_ready(jax.device_put(batch))
            return tokens / (time.perf_counter() - start)
        finally:
            loader.close()

    return {
        name: round(statistics.median(rate(put) for _ in range(repeats)))
        for name, put in (("as_arrays", False), ("on_device", True))
    }


def measure_training(config: Config, stores: EpochStores, *, vocabulary: int, updates: int) -> float:
    """Target tokens per second of updates on the most frequent batch shape; the median over updates."""
    plan = _plan(stores.base, config.data)
    shape = plan.shapes[int(np.argmax(plan.shape_counts))]
    chosen = [number for number in range(len(plan)) if plan[number].shape == shape][:updates]
    batches = [make_batch(stores.base, plan[number], **SPECIAL) for number in chosen]
    parallel = make_parallel(config, devices=jax.devices()[:1])
    sizes = {"source_size": vocabulary, "target_size": vocabulary}
    model = make_model(config.model, **sizes, platform=parallel.platform)
    step = parallel.compile(make_train_step(model, UpdateConfig.of(config), parallel), donate=(0,))
    state = init_state(init_params(model, jax.random.key(0)), config.optim)
    numbers = make_hyperparameters(config)
    rates = []
    for batch in [batches[0], *batches]:
        start = time.perf_counter()
        state, metrics = step(state, numbers, jax.device_put(batch))
        jax.block_until_ready((state, metrics))
        rates.append(count_tokens(batch) / (time.perf_counter() - start))
    return statistics.median(rates[1:])  # without the first update, which includes compilation


def compare(root: Path, *, tiny: bool) -> dict[str, Any]:
    """Return the rates of the loader and of training, and their ratio, in both modes."""
    pairs, batches, repeats, updates = (300, 6, 2, 3) if tiny else (100_000, 400, 3, 12)
    vocabulary = 40 if tiny else 8000
    stores = make_stores(pairs, root, vocabulary=vocabulary)
    found = {}
    for mode in MODES:
        data = DataConfig(batching=mode, batch_tokens=2048)
        train = TrainConfig(loss_chunk_tokens=8 if tiny else 256)
        config = Config(data=data, model=_TINY if tiny else _SMALL, train=train)
        rates: dict[str, Any] = measure_pipeline(stores, data, batches=batches, repeats=repeats)
        trained = measure_training(config, stores, vocabulary=vocabulary, updates=updates)
        ratio = rates["on_device"] / trained
        found[mode] = {
            **{name: int(rate) for name, rate in rates.items()},
            "training": round(trained),
            "ratio": round(ratio, 1),
            "enough": ratio >= REQUIRED_RATIO,
        }
    return found


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--pairs", type=int, default=0, help="pairs in the large part; 0: 5 million, tiny 1,000"
    )
    parser.add_argument("--work", type=Path, help="folder for the token stores; default: a temporary folder")
    parser.add_argument("--part", choices=["all", "large", "pipeline"], default="all")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    pairs = options.pairs or (1000 if options.tiny else 5_000_000)
    with tempfile.TemporaryDirectory(dir=options.work) as folder:
        if options.part == "all":  # one process per part: peak memory is that of a process
            found = _run_parts(options)
        elif options.part == "large":
            found = {"large": measure_large(pairs, Path(folder), vocabulary=8000)}
        else:
            found = {"pipeline": compare(Path(folder), tiny=options.tiny)}
    print(json.dumps(found, indent=2))


def _run_parts(options: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {"device": jax.devices()[0].device_kind}
    for part in ("large", "pipeline"):
        command = [sys.executable, __file__, f"--part={part}", f"--pairs={options.pairs}"]
        command += ["--tiny"] * options.tiny + ([f"--work={options.work}"] if options.work else [])
        paths = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=paths)
        found |= json.loads(done.stdout)
    return found


if __name__ == "__main__":
    main()
