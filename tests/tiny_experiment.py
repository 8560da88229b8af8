"""The one tiny experiment that tests share: the same shapes everywhere, so that its programs compile once."""

import dataclasses
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from flaxformer_mt.config import (
    Config,
    DataConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    SearchConfig,
    TrainConfig,
    VocabConfig,
)


def make_tiny_config(text_dir: Path, cache_dir: Path) -> Config:
    """A one-layer model of width 16 on made-up text, trained for 48 updates on one device."""
    return Config(
        seed=5,
        data=DataConfig(
            dataset="parallel_text",
            text_dir=str(text_dir),
            cache_dir=str(cache_dir),
            source_language="xx",
            target_language="yy",
            max_source_length=16,
            max_target_length=16,
            batch_tokens=128,
            num_shapes=1,
        ),
        vocab=VocabConfig(kind="bpe", size=40, byte_fallback=False, normalization="identity"),
        model=ModelConfig(
            num_encoder_layers=1,
            num_decoder_layers=1,
            model_dim=16,
            num_heads=2,
            ffn_dim=16,
            dropout_rate=0.1,
        ),
        optim=OptimConfig(learning_rate=0.02, warmup_steps=4, ema_decay=0.9),
        train=TrainConfig(
            # As many updates as it takes until translations are words.
            steps=48,
            log_every=20,
            evaluate_every=32,
            checkpoint_every=16,
            keep_checkpoints=3,
            tensorboard=False,
            log_accuracy=True,
        ),
        parallel=ParallelConfig(data=1),
        search=SearchConfig(beam_size=2, max_length_offset=4),
    )


def write_config_file(path: Path, config: Config) -> Path:
    """A config file of Python, as `--config` takes it."""
    from flaxformer_mt.config.files import to_dict

    path.write_text(
        "from flaxformer_mt.config import Config\n"
        "from flaxformer_mt.config.files import from_dict\n"
        f"def get_config() -> Config:\n    return from_dict({to_dict(config)!r})\n",
        encoding="utf-8",
    )
    return path


def small_model(layers: int, width: int, heads: int, ffn: int, **fields: Any) -> ModelConfig:
    """A model of so many layers on each side, without dropout unless the fields say otherwise."""
    sizes = {"model_dim": width, "num_heads": heads, "ffn_dim": ffn, "dropout_rate": 0.0}
    sides = {"num_encoder_layers": layers, "num_decoder_layers": layers}
    return ModelConfig(**sides | sizes | fields)


def text_data(folder: Path, languages: str = "de-en", **fields: Any) -> DataConfig:
    """The config of parallel text in a folder, with its cache there; of "-en", of a language model."""
    sides = dict(zip(("source_language", "target_language"), languages.split("-"), strict=True))
    places = {"dataset": "parallel_text", "text_dir": str(folder), "cache_dir": str(folder / "cache")}
    return DataConfig(**places | sides | fields)


def mark_slow(cases: Iterable[str], *slow: str) -> list[Any]:
    """The cases of a test, of which these run before a release only: what they differ in, others show."""
    import pytest

    assert {*slow} < {*cases}
    return [pytest.param(case, marks=pytest.mark.slow) if case in slow else case for case in cases]


def change(config: Config, **sections: dict[str, Any]) -> Config:
    """The config with fields of its sections set anew: change(config, train={"steps": 3})."""
    changed = {
        name: dataclasses.replace(getattr(config, name), **fields) for name, fields in sections.items()
    }
    return dataclasses.replace(config, **changed)


def array_of(batch: Any, *, pad_id: int = 0, bos_id: int = 1, unpadded: Any = None) -> Any:
    """The one array of a batch: 2 * id, 1 more at the beginning of a sentence, -1 in padding."""
    import numpy as np

    from flaxformer_mt.data.batch_array import BatchArray

    sides = [
        np.where(mask, 2 * tokens + (np.arange(tokens.shape[1]) == 0 if at is None else at == 0), -1)
        for tokens, mask, at in (
            (batch.source, batch.source_mask, batch.source_positions),
            (batch.target_out, batch.target_mask, batch.target_positions),
        )
    ]
    columns = {name: getattr(batch, name) for name in ("target_weights", "alignment")}
    return BatchArray(
        np.concatenate(sides, axis=1).astype(np.int32),
        batch.source.shape[1],
        batch.source_positions is not None,
        pad_id,
        bos_id,
        {name: array for name, array in columns.items() if array is not None},
        unpadded,
    )


def write_untrained_run(folder: Path, config: Config, pairs: Iterable[Any], step: int = 7) -> Path:
    """A run directory with random parameters, evaluated at a step; vocabularies are made of the pairs."""
    from flaxformer_mt.config.files import save_config
    from flaxformer_mt.model import make_model
    from flaxformer_mt.runs.checkpoints import Checkpoints
    from flaxformer_mt.vocab import make_vocabs

    folder.mkdir(parents=True)
    save_config(config, folder / "config.json")
    vocabs = make_vocabs(config.vocab, pairs, folder / "vocab")
    model = make_model(config.model, source_size=vocabs.source.size, target_size=vocabs.target.size)
    checkpoints = Checkpoints(folder)
    checkpoints.save(step, {"params": random_params(model)}, {"step": step, "metrics": {"bleu": 1.0}})
    checkpoints.wait()
    return folder


def random_params(model: Any, seed: int = 0, scale: float = 0.3) -> Any:
    """Parameters of a model as numpy arrays, normal with this standard deviation, without compiling `init`.

    Norm scales are around 1, all other leaves around 0.
    """
    import jax

    from flaxformer_mt.model import init_params

    shapes = jax.eval_shape(lambda key: init_params(model, key), jax.random.key(0))
    return random_leaves(shapes, seed, scale)


def random_layer_params(layer: Any, *inputs: Any, seed: int = 0, scale: float = 0.3, **options: Any) -> Any:
    """The same for a Flax module, initialized on these inputs."""
    import jax
    from flax import linen as nn

    shapes = jax.eval_shape(lambda key: nn.unbox(layer.init(key, *inputs, **options)), jax.random.key(0))
    return random_leaves(shapes["params"], seed, scale)


def random_leaves(shapes: Any, seed: int, scale: float) -> Any:
    """A tree of random numpy arrays of the shapes in a tree."""
    import jax
    import numpy as np

    generator = np.random.default_rng(seed)

    def draw(path: Any, leaf: Any) -> np.ndarray:
        values = scale * generator.standard_normal(leaf.shape)
        return (values + (path[-1].key == "scale")).astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, shapes)


def quick_environment(devices: int = 1, **variables: str) -> dict[str, str]:
    """The environment of a subprocess that compiles as quickly as the tests do, on simulated devices."""
    kept = [
        flag for flag in os.environ.get("XLA_FLAGS", "").split() if "force_host_platform_device" not in flag
    ]
    flags = " ".join([*kept, f"--xla_force_host_platform_device_count={devices}"])
    return {**os.environ, "XLA_FLAGS": flags, **variables}
