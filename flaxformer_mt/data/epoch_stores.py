"""The token stores of the epochs: one store for all, or with subword sampling or noise one per epoch."""

import threading
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

from flaxformer_mt.atomic_folder import discard
from flaxformer_mt.config import NoiseConfig
from flaxformer_mt.corpus.pairs import Pairs
from flaxformer_mt.data.token_store import TokenStore
from flaxformer_mt.data.tokenization import Drawing, fold
from flaxformer_mt.vocab import Vocabs


class EpochStores:
    """Builds and removes the token store of each epoch, whose contents are determined by (seed, epoch).

    base: the store of all pairs as in epoch 0, from which batch shapes are chosen; it stays on disk. varies:
    whether the lengths of pairs differ from epoch to epoch.
    Several threads may call `store`; while one builds, the others wait.
    """

    # Stores kept besides the base: the epoch in training, and the next one, which is prepared meanwhile.
    _KEPT = 2

    def __init__(
        self,
        pairs: Pairs,
        vocabs: Vocabs,
        root: str | Path,
        drawing: Drawing,
        *,
        varies: bool = False,
        own_root: Path | None = None,
        unused: Collection[str] = (),
        **base_options: Any,
    ) -> None:
        """Build the base store in the folder `root`; `base_options` are arguments of `TokenStore.build`.

        Stores of later epochs are built in `own_root`, to which only this process writes; None: `root`.
        Batches leave out the columns `unused`, which only the noise of the text needs.
        """
        self.pairs, self._vocabs, self._unused = pairs, vocabs, unused
        self._own_root, self._drawing = own_root or Path(root), drawing
        self.varies = varies or drawing.active
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._stores: dict[int, TokenStore] = {}
        self.base = self._build(0, pairs, drawing, root, **base_options)

    def store(self, epoch: int) -> TokenStore:
        """Return the store of an epoch, built if missing; only the base and the last two stores are kept."""
        if epoch == 0 or not self._drawing.active:
            return self.base
        return self._keep(epoch, self.pairs, self._drawing)

    def draw(self, epoch: int, drawn: np.ndarray, rates: NoiseConfig) -> tuple[TokenStore, np.ndarray]:
        """Return a store with the drawn pairs as they are in `epoch`, and the pairs' numbers in this store.

        `drawn` has numbers of pairs in the base store. Without subword sampling and noise (the `rates` of the
        stage), the result is the base store. Otherwise it is a new store that contains only the drawn pairs;
        a pair that is drawn twice is sampled or changed by noise twice.
        """
        drawing = self._drawing._replace(noise=self._drawing.noise._replace(rates=rates))
        if not self._drawing.active and not drawing.active:
            return self.base, drawn
        store = self._keep(epoch, self.pairs.select(np.sort(drawn)), drawing)
        return store, np.arange(len(store))

    def _keep(self, epoch: int, pairs: Pairs, drawing: Drawing) -> TokenStore:
        with self._lock:
            store = self._stores.pop(epoch, None)
            if store is None:
                store = self._build(epoch, pairs, drawing, self._own_root)
            self._stores[epoch] = store
            for old in list(self._stores)[: -self._KEPT]:
                removed = self._stores.pop(old)  # batches being built keep their mapped files
                if removed.folder not in {other.folder for other in self._stores.values()}:
                    _remove(removed)
            return store

    def close(self) -> None:
        """Stop a build in progress and remove all stores except the base; later builds stop at once."""
        self._closed.set()
        with self._lock:
            for store in {store.folder: store for store in self._stores.values()}.values():
                _remove(store)
            self._stores.clear()

    def _build(
        self, epoch: int, pairs: Pairs, drawing: Drawing, root: str | Path, **options: Any
    ) -> TokenStore:
        drawing = drawing._replace(seed=fold(drawing.seed, epoch))
        store = TokenStore.build(pairs, self._vocabs, root, drawing, stop=self._closed, **options)
        store.columns = {name: one for name, one in store.columns.items() if name not in self._unused}
        return store


def _remove(store: TokenStore) -> None:
    assert store.folder is not None
    discard(store.folder)
