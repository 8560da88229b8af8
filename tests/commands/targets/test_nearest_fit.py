"""The search for settings that fit, with a made-up measure of memory."""

from flaxformer_mt.commands.targets.nearest_fit import find_settings, list_ladders, replace_fields
from flaxformer_mt.config import Config, DataConfig, ModelConfig, OptimConfig, ParallelConfig, TrainConfig
from flaxformer_mt.config.checks import validate

CONFIG = Config(
    data=DataConfig(batch_tokens=8192, max_source_length=64, max_target_length=64),
    model=ModelConfig(model_dim=512, remat="none"),
    train=TrainConfig(loss_chunk_tokens=0),
)


def test_the_ladders_have_what_a_config_has_not_used_up():
    ladders = list_ladders(CONFIG, device_count=4, loss_tokens=8192)
    assert ladders == [
        [{"train.loss_chunk_tokens": 1024}],
        [{"model.remat": "dots"}, {"model.remat": "full"}],
        [{"parallel.fsdp": 4, "parallel.data": 1}],
        [
            {"data.batch_tokens": 4096, "optim.accumulation": 2},
            {"data.batch_tokens": 2048, "optim.accumulation": 4},
            {"data.batch_tokens": 1024, "optim.accumulation": 8},
        ],
    ]
    for ladder in ladders:
        for changes in ladder:
            changed = replace_fields(CONFIG, changes)
            validate(changed)
            tokens = changed.data.batch_tokens * changed.optim.accumulation
            assert tokens == CONFIG.data.batch_tokens * CONFIG.optim.accumulation  # of an update
    used = replace_fields(
        CONFIG,
        {
            "train.loss_chunk_tokens": 256,
            "model.remat": "full",
            "parallel.fsdp": 4,
            "data.batch_tokens": 512,
            "optim.accumulation": 3,
        },
    )
    assert list_ladders(used, device_count=4, loss_tokens=512) == []
    pmap = replace_fields(used, {"parallel.fsdp": 1, "parallel.backend": "pmap"})
    assert list_ladders(pmap, device_count=4, loss_tokens=512) == []
    split = replace_fields(used, {"parallel.fsdp": 1, "parallel.tensor": 2})
    assert list_ladders(split, device_count=8, loss_tokens=512) == [
        [{"parallel.fsdp": 4, "parallel.data": 1}]
    ]


def memory_of(config: Config) -> int:
    """100 units: 20 of logits, 40 of activations, 40 of the state; only logits and activations shrink."""
    share = 8192 // config.data.batch_tokens
    logits = 2 if config.train.loss_chunk_tokens else 20 // share
    activations = {"none": 40, "dots": 30, "full": 10}[config.model.remat] // share
    return logits + activations + 40 // config.parallel.fsdp


def tried(memory: int) -> list[tuple[dict, int, bool]]:
    ladders = list_ladders(CONFIG, device_count=4, loss_tokens=8192)
    return [tuple(found) for found in find_settings(CONFIG, ladders, measure=memory_of, memory=memory)]


def test_each_change_alone_is_tried_until_it_fits():
    assert tried(75) == [
        ({"train.loss_chunk_tokens": 1024}, 82, False),
        ({"model.remat": "dots"}, 90, False),
        ({"model.remat": "full"}, 70, True),
        ({"parallel.fsdp": 4, "parallel.data": 1}, 70, True),
        ({"data.batch_tokens": 4096, "optim.accumulation": 2}, 70, True),
    ]


def test_changes_are_combined_where_none_alone_fits():
    found = tried(25)
    assert [fits for *_, fits in found].count(True) == 1 and found[-1] == (
        {"train.loss_chunk_tokens": 1024, "model.remat": "full", "parallel.fsdp": 4, "parallel.data": 1},
        22,
        True,
    )
    nothing = tried(3)
    assert not any(fits for *_, fits in nothing)
    assert nothing[-1][0]["data.batch_tokens"] == 1024 and len(nothing[-1][0]) == 6


def test_fields_are_replaced_by_name():
    changed = replace_fields(CONFIG, {"model.remat": "dots", "optim.accumulation": 2})
    assert changed.model == ModelConfig(model_dim=512, remat="dots")
    assert changed.optim == OptimConfig(accumulation=2) and changed.parallel == ParallelConfig()
