"""The search for settings that fit, with a made-up measure of memory."""

from flaxformer_mt.commands.targets.nearest_fit import (
    MOST_PAIRS,
    count_most_attempts,
    distance_of,
    find_settings,
    list_ladders,
    replace_fields,
)
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


LADDERS = list_ladders(CONFIG, device_count=4, loss_tokens=8192)


def tried(memory: int, measure=memory_of) -> tuple[list[tuple[dict, int, bool]], int]:
    reported = []
    found = find_settings(CONFIG, LADDERS, measure=measure, memory=memory, report=reported.append)
    assert reported == found.attempts and len(reported) <= count_most_attempts(LADDERS)
    assert all(attempt.distance == distance_of(CONFIG, attempt.changes) for attempt in reported)
    changes = [str(attempt.changes) for attempt in reported]
    assert len(set(changes)) == len(changes)  # nothing is compiled twice
    return [tuple(attempt[:3]) for attempt in found.attempts], found.pairs_left_out


def test_the_distance_grows_with_what_the_speed_depends_on():
    chunk, dots, full = LADDERS[0][0], *LADDERS[1]
    (layout,), (half, fourth, eighth) = LADDERS[2], LADDERS[3]
    ordered = [
        {},
        chunk,
        dots,
        chunk | dots,
        full,
        layout,
        chunk | layout,
        dots | layout,
        half,
        fourth,
        eighth,
    ]
    distances = [distance_of(CONFIG, changes) for changes in ordered]
    assert distances == sorted(set(distances))
    assert distance_of(CONFIG, chunk | dots | layout) == distance_of(CONFIG, half) == 9
    # From dots to full is less than from none; an accumulation that is there already is no change.
    used = replace_fields(CONFIG, {"model.remat": "dots", "optim.accumulation": 3})
    assert distance_of(used, full) == 2
    assert distance_of(used, {"data.batch_tokens": 4096, "optim.accumulation": 6}) == 9


def test_each_change_alone_is_tried_until_it_fits():
    """Then the one pair that is nearer than remat=full, which fits alone: chunks with remat=dots."""
    alone = [
        ({"train.loss_chunk_tokens": 1024}, 82, False),
        ({"model.remat": "dots"}, 90, False),
        ({"model.remat": "full"}, 70, True),
        ({"parallel.fsdp": 4, "parallel.data": 1}, 70, True),
        ({"data.batch_tokens": 4096, "optim.accumulation": 2}, 70, True),
    ]
    pair = {"train.loss_chunk_tokens": 1024, "model.remat": "dots"}
    assert tried(75) == ([*alone, (pair, 72, True)], 0)
    assert tried(71) == ([*alone, (pair, 72, False)], 0)  # all other pairs are farther than remat=full
    assert tried(90)[0][:2] == [alone[0][:2] + (True,), alone[1][:2] + (True,)]
    assert all(len(changes) <= 2 for changes, *_ in tried(90)[0])  # no pair: one change alone is nearest


def test_pairs_are_tried_before_a_far_single_change():
    """Only an eighth of the batch fits alone; the nearest of the pairs that fit is found."""

    def measure(config: Config) -> int:
        return memory_of(config) - (30 if config.data.batch_tokens == 1024 else 0)

    found, left_out = tried(42, measure)
    alone = [changes for changes, _, fits in found if fits and "data.batch_tokens" in changes]
    assert alone == [{"data.batch_tokens": 1024, "optim.accumulation": 8}]
    changes, needed, fits = found[-1]
    assert (changes, needed, fits) == (
        {"model.remat": "full", "parallel.fsdp": 4, "parallel.data": 1},
        40,
        True,
    )
    assert left_out == 0


def test_the_number_of_pairs_is_limited_and_those_left_out_are_counted():
    found, left_out = tried(3)
    assert not any(fits for *_, fits in found)
    kinds = [len({name.partition(".")[0] for name in changes}) for changes, *_ in found]
    pairs = kinds.count(2)  # data and optim together are one kind
    assert pairs + left_out >= 2 + 1 + 3 + 2 + 6 + 3 and left_out == 17 - MOST_PAIRS
    assert len(found) == count_most_attempts(LADDERS) == 7 + MOST_PAIRS + 4
    distances = [distance_of(CONFIG, changes) for changes, *_ in found[7 : 7 + MOST_PAIRS]]
    assert distances == sorted(distances)


def test_more_changes_are_combined_where_no_two_fit():
    found, _ = tried(25)
    assert [fits for *_, fits in found].count(True) == 1 and found[-1] == (
        {"train.loss_chunk_tokens": 1024, "model.remat": "full", "parallel.fsdp": 4, "parallel.data": 1},
        22,
        True,
    )
    nothing, _ = tried(3)
    assert nothing[-1][0]["data.batch_tokens"] == 1024 and len(nothing[-1][0]) == 6
    assert find_settings(CONFIG, [], measure=memory_of, memory=3) == ([], 0)


def test_fields_are_replaced_by_name():
    changed = replace_fields(CONFIG, {"model.remat": "dots", "optim.accumulation": 2})
    assert changed.model == ModelConfig(model_dim=512, remat="dots")
    assert changed.optim == OptimConfig(accumulation=2) and changed.parallel == ParallelConfig()
