"""Four simulated devices compute what one computes; who asks for the impossible is told the remedy."""

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxformer_mt.config import Config, DataConfig, ModelConfig, OptimConfig, ParallelConfig, TrainConfig
from flaxformer_mt.errors import UserError
from flaxformer_mt.model import init_params, make_model
from flaxformer_mt.optim import make_optimizer, make_schedule
from flaxformer_mt.parallel import Parallel
from flaxformer_mt.shapes import Batch
from flaxformer_mt.state import TrainState, init_state
from flaxformer_mt.steps import make_train_step

V = 19
CONFIG = Config(
    data=DataConfig(row_multiple=4),
    model=ModelConfig(
        num_encoder_layers=1, num_decoder_layers=1, model_dim=8, num_heads=2, ffn_dim=12, dropout_rate=0.3
    ),
    # Biases of keys have no gradient but rounding, which Adam would blow up were epsilon not far above it.
    optim=OptimConfig(learning_rate=0.02, warmup_steps=2, ema_decay=0.9, epsilon=1e-3),
    # threefry numbers do not depend on how arrays are laid over devices
    train=TrainConfig(prng="threefry", loss_chunk_tokens=8),
    parallel=ParallelConfig(data=1),
)


def on(devices: int) -> Config:
    return dataclasses.replace(CONFIG, parallel=ParallelConfig(data=devices))


def make_batch(seed: int) -> Batch:
    """Four rows of 6, 1, 3 and 0 target tokens: no two devices have the same to do."""
    generator = np.random.default_rng(seed)
    source, target = (generator.integers(4, V, (4, n)).astype(np.int32) for n in (5, 6))
    source_mask = np.arange(5)[None] < np.array([5, 2, 3, 1])[:, None]
    target_mask = np.arange(6)[None] < np.array([6, 1, 3, 0])[:, None]
    return Batch(source, np.roll(target, 1, axis=1), target, source_mask, target_mask)


def train(devices: int) -> tuple[TrainState, list[Any]]:
    """Three updates on so many devices, as the trainer makes them."""
    parallel = Parallel(on(devices))
    model = make_model(CONFIG.model, source_size=V, target_size=V)
    schedule = make_schedule(CONFIG.optim, model_dim=8, total_steps=10)
    optimizer = make_optimizer(CONFIG.optim, schedule)
    state = parallel.place(init_state(init_params(model, jax.random.key(0)), optimizer, ema=True))
    train_step = parallel.compile(make_train_step(model, optimizer, CONFIG), donate=(0,))
    history = []
    for number in range(3):
        state, metrics = train_step(state, parallel.put(make_batch(number)))
        history.append(parallel.fetch(metrics))
    return parallel.fetch(state), history


def test_four_devices_are_simulated():
    assert jax.device_count() == 4


def test_four_devices_train_as_one_does():
    """With uneven padding, dropout, clipping and an average: the same up to the rounding of sums."""
    one, one_history = train(1)
    four, four_history = train(4)
    assert one.step == 3
    assert all(isinstance(leaf, np.ndarray | np.generic) for leaf in jax.tree.leaves(one))
    for left, right in zip(
        jax.tree.leaves((one, one_history)), jax.tree.leaves((four, four_history)), strict=True
    ):
        np.testing.assert_allclose(left, right, rtol=1e-4, atol=2e-5)
    assert one_history[0].weight == 10


def test_batches_are_split_by_rows_and_states_are_everywhere():
    parallel = Parallel(on(4))
    batch = make_batch(0)
    put = parallel.put(batch)
    assert put.source_segments is None
    for device, shard in enumerate(put.source.addressable_shards):
        np.testing.assert_array_equal(shard.data, batch.source[device : device + 1])
    placed = parallel.place({"kernel": np.arange(6.0).reshape(2, 3)})["kernel"]
    assert placed.is_fully_replicated
    assert len(placed.addressable_shards) == 4
    doubled = parallel.compile(lambda x: 2 * x)(put.source)
    assert doubled.is_fully_replicated
    np.testing.assert_array_equal(parallel.fetch(doubled), 2 * batch.source)


def test_donated_arguments_give_their_memory_away():
    parallel = Parallel(on(1))
    state, batch = parallel.place(jnp.arange(8.0)), parallel.place(jnp.ones(8))
    result = parallel.compile(lambda state, batch: state + batch, donate=(0,))(state, batch)
    np.testing.assert_array_equal(result, np.arange(8.0) + 1)
    assert state.is_deleted()
    assert not batch.is_deleted()


def test_devices_by_default_are_all_and_are_named():
    assert Parallel(on(0)).mesh.size == 4
    assert re.fullmatch(r".+ \(\d+ cores\)", Parallel(on(1)).describe())
    assert re.fullmatch(r".+ \(\d+ cores, 2 simulated devices\)", Parallel(on(2)).describe())


def test_more_devices_than_there_are_is_the_users_mistake():
    with pytest.raises(UserError, match=r"parallel\.data asks for 5 devices, but there are 4 \(cpu\)"):
        Parallel(dataclasses.replace(on(5), data=DataConfig(row_multiple=5)))


def test_rows_that_devices_cannot_share_are_the_users_mistake():
    with pytest.raises(UserError, match="data.row_multiple 6 rows, which 4 devices cannot share") as error:
        Parallel(dataclasses.replace(on(4), data=DataConfig(row_multiple=6)))
    assert "set data.row_multiple to 8 or parallel.data to a divisor of 6" in str(error.value)


CACHING = """
import sys, time
from pathlib import Path
import jax, jax.numpy as jnp
from flaxformer_mt.parallel import enable_compilation_cache
enable_compilation_cache(Path(sys.argv[1]))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # this program compiles in no time
events = []
jax.monitoring.register_event_listener(lambda name, **_: events.append(name))
result = jax.jit(lambda x: jnp.tanh(x @ x.T).sum(0))(jnp.ones((3, 4)))
print(float(result[0]), sum(name == "/jax/compilation_cache/cache_hits" for name in events))
"""


def run_caching(directory: Path, **environment: str) -> tuple[list[str], str]:
    variables = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    done = subprocess.run(
        [sys.executable, "-c", CACHING, str(directory)],
        env={**variables, **environment},
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split(), done.stderr


def test_compiled_programs_are_kept_and_found_again_in_silence(tmp_path):
    (first, hits), noise = run_caching(tmp_path / "compiled")
    assert (hits, noise) == ("0", "")
    assert any((tmp_path / "compiled").iterdir())
    (second, hits), noise = run_caching(tmp_path / "compiled")
    assert int(hits) >= 1
    assert noise == ""
    assert second == first


def test_a_cache_of_the_users_choice_is_left_alone(tmp_path):
    run_caching(tmp_path / "ours", JAX_COMPILATION_CACHE_DIR=str(tmp_path / "theirs"))
    assert not (tmp_path / "ours").exists()
    assert any((tmp_path / "theirs").iterdir())
