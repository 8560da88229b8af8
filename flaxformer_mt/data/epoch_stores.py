"""The token stores of the epochs: one for all, or with sampling or noise a new one for each."""

import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np

from flaxformer_mt.config import NoiseConfig
from flaxformer_mt.corpus.pairs import Pairs
from flaxformer_mt.data.text_noise import TextNoise
from flaxformer_mt.data.token_store import TokenStore, fold, remove_store
from flaxformer_mt.vocab import Vocabs
from flaxformer_mt.workers.worker_pool import NO_POOL, PoolOptions


class EpochStores:
    """Builds and removes the token store of each epoch, which is a function of (seed, epoch).

    base: the store of all pairs as in epoch 0, from which the shapes of batches are chosen; it stays on
    the disk. varies: whether the lengths of pairs differ from epoch to epoch.
    Several threads may call `store`: one builds while the others wait.
    """

    # Stores kept besides the base: the epoch in training, and the next one, which is prepared meanwhile.
    _KEPT = 2

    def __init__(
        self,
        pairs: Pairs,
        vocabs: Vocabs,
        root: str | Path,
        sampling: float,
        seed: int,
        *,
        noise: TextNoise | None = None,
        varies: bool = False,
        own_root: Path | None = None,
        unused: Collection[str] = (),
        pool: PoolOptions = NO_POOL,
        count: Callable[[int], object] = lambda pairs: None,
    ) -> None:
        """Build the base under `root`; stores of later epochs go to `own_root`, of this process alone.

        Batches lack the columns `unused`, which the text alone depends on.
        """
        self.pairs, self._vocabs, self._root = pairs, vocabs, Path(root)
        self._own_root = own_root or self._root
        self.sampling, self._seed = sampling, seed
        self._noise, self._unused = noise or TextNoise(NoiseConfig()), unused
        self.varies = varies or bool(sampling) or self._noise.rates.active
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._stores: dict[int, TokenStore] = {}
        self.base = self._build(0, self.pairs, self._noise, pool=pool, count=count)

    def store(self, epoch: int) -> TokenStore:
        """Build the store if missing; all but the base and the last two requested are removed."""
        if epoch == 0 or not (self.sampling or self._noise.rates.active):
            return self.base
        return self._keep(epoch, lambda: self._build(epoch, self.pairs, self._noise))

    def draw(self, epoch: int, drawn: np.ndarray, rates: NoiseConfig) -> tuple[TokenStore, np.ndarray]:
        """The store that has the pairs with the numbers `drawn` as they are in `epoch`, and where they are.

        With subword sampling or noise it has nothing else, and a pair drawn twice has two drawings.
        """
        noise = self._noise._replace(rates=rates)
        if not self.sampling and not rates.active and not self._noise.rates.active:
            return self.base, drawn
        pairs = self.pairs.select(np.sort(drawn))
        store = self._keep(epoch, lambda: self._build(epoch, pairs, noise, self._own_root))
        return store, np.arange(len(store))

    def _keep(self, epoch: int, build: Callable[[], TokenStore]) -> TokenStore:
        with self._lock:
            store = self._stores.pop(epoch, None)
            self._stores[epoch] = build() if store is None else store
            for old in list(self._stores)[: -self._KEPT]:
                removed = self._stores.pop(old)  # batches being built keep their mapped files
                if all(other.folder != removed.folder for other in self._stores.values()):
                    remove_store(removed)
            return self._stores[epoch]

    def close(self) -> None:
        """Stop a build in progress and remove all stores but the base; later builds stop at once."""
        self._closed.set()
        with self._lock:
            for store in {store.folder: store for store in self._stores.values()}.values():
                remove_store(store)
            self._stores.clear()

    def _build(
        self, epoch: int, pairs: Pairs, noise: TextNoise, root: Path | None = None, **more: Any
    ) -> TokenStore:
        active = noise if noise.rates.active else None
        store = TokenStore.build(
            pairs,
            self._vocabs,
            root or (self._own_root if epoch else self._root),
            sampling=self.sampling,
            seed=fold(self._seed, epoch) if self.sampling or active else 0,
            noise=active,
            stop=self._closed,
            **more,
        )
        store.columns = {name: one for name, one in store.columns.items() if name not in self._unused}
        return store
