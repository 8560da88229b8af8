"""The search for settings that fit, with a made-up measure of memory."""

from flaxformer_mt.commands.show_target import Step, count_most_attempts, find_settings, list_ladders
from flaxformer_mt.config import Config, DataConfig, ModelConfig, TrainConfig
from flaxformer_mt.config.checks import validate

CONFIG = Config(
    data=DataConfig(batch_tokens=8192, max_source_length=64, max_target_length=64),
    model=ModelConfig(model_dim=512, remat="none"),
    train=TrainConfig(loss_chunk_tokens=0),
)
LADDERS = list_ladders(CONFIG, device_count=4, loss_tokens=8192)
CHUNKS, DOTS, FULL = LADDERS[0][0].changes, LADDERS[1][0].changes, LADDERS[1][1].changes
LAYOUT, HALF, EIGHTH = LADDERS[2][0].changes, LADDERS[3][0].changes, LADDERS[3][2].changes


def test_the_ladders_have_what_a_config_has_not_used_up():
    """The cheapest kind comes first: from dots to full costs less than from none."""
    assert LADDERS == [
        [({"train.loss_chunk_tokens": 1024}, 1)],
        [({"model.remat": "dots"}, 2), ({"model.remat": "full"}, 4)],
        [({"parallel.fsdp": 4, "parallel.data": 1}, 6)],
        [
            ({"data.batch_tokens": 4096, "optim.accumulation": 2}, 9),
            ({"data.batch_tokens": 2048, "optim.accumulation": 4}, 12),
            ({"data.batch_tokens": 1024, "optim.accumulation": 8}, 15),
        ],
    ]
    for step in (step for ladder in LADDERS for step in ladder):
        changed = CONFIG.replace(step.changes)
        validate(changed)
        tokens = changed.data.batch_tokens * changed.optim.accumulation
        assert tokens == CONFIG.data.batch_tokens * CONFIG.optim.accumulation  # of an update
    used = CONFIG.replace(
        {"train.loss_chunk_tokens": 256, "model.remat": "full", "parallel.fsdp": 4, "data.batch_tokens": 512,
         "optim.accumulation": 3},
    )  # fmt: skip
    assert list_ladders(used, device_count=4, loss_tokens=512) == []
    pmap = used.replace({"parallel.fsdp": 1, "parallel.backend": "pmap"})
    assert list_ladders(pmap, device_count=4, loss_tokens=512) == []
    split = used.replace({"parallel.fsdp": 1, "parallel.tensor": 2})
    assert list_ladders(split, device_count=8, loss_tokens=512) == [
        [Step({"parallel.fsdp": 4, "parallel.data": 1}, 6)]
    ]
    dots = used.replace({"model.remat": "dots", "data.batch_tokens": 1024})
    assert list_ladders(dots, device_count=4, loss_tokens=512) == [
        [({"model.remat": "full"}, 2)],
        [({"data.batch_tokens": 512, "optim.accumulation": 6}, 9)],
    ]


def memory_of(config: Config) -> int:
    """100 units: 20 of logits, 40 of activations, 40 of the state; only logits and activations shrink."""
    share = 8192 // config.data.batch_tokens
    logits = 2 if config.train.loss_chunk_tokens else 20 // share
    activations = {"none": 40, "dots": 30, "full": 10}[config.model.remat] // share
    return logits + activations + 40 // config.parallel.fsdp


def tried(memory: int, measure=memory_of) -> list[tuple[dict, int, bool, int]]:
    reported = []
    found = find_settings(CONFIG, LADDERS, measure=measure, memory=memory, report=reported.append)
    assert reported == found and len(found) <= count_most_attempts(LADDERS)
    changes = [str(sorted(attempt.changes.items())) for attempt in found]
    assert "[]" not in changes and len(set(changes)) == len(changes)  # nothing is compiled twice
    for attempt in found:
        assert attempt.needed == measure(CONFIG.replace(attempt.changes))
        assert attempt.fits == (attempt.needed <= memory)
    return found


def test_steps_are_added_until_the_update_fits():
    assert tried(82) == [(CHUNKS, 82, True, 1)]
    # And what was added before is taken back where it is not needed.
    assert tried(75) == [(CHUNKS, 82, False, 1), (CHUNKS | DOTS, 72, True, 3), (DOTS, 90, False, 2)]
    assert tried(40) == [
        (CHUNKS, 82, False, 1),
        (CHUNKS | DOTS, 72, False, 3),
        (CHUNKS | FULL, 52, False, 5),
        (CHUNKS | FULL | LAYOUT, 22, True, 11),
        (CHUNKS | LAYOUT, 52, False, 7),
        (CHUNKS | DOTS | LAYOUT, 42, False, 9),
        (FULL | LAYOUT, 40, True, 10),
    ]


def test_only_what_helps_is_kept():
    """One kind alone takes all the memory: the others are taken back."""

    def state(config: Config) -> int:
        return 100 // config.parallel.fsdp

    def rows(config: Config) -> int:
        return 100 * config.data.batch_tokens // 8192

    found = tried(30, state)
    assert [attempt.changes for attempt in found if attempt.fits][-1] == LAYOUT and found[-1].distance == 6
    found = tried(13, rows)
    assert found[-1] == (EIGHTH, 12, True, 15)
    found = tried(50, rows)
    assert found[-1] == (HALF, 50, True, 9)


def test_where_nothing_fits_all_steps_were_tried():
    found = tried(3)
    assert not any(attempt.fits for attempt in found) and len(found) == 7
    assert found[-1].changes == CHUNKS | FULL | LAYOUT | EIGHTH and found[-1].distance == 26
    assert find_settings(CONFIG, [], measure=memory_of, memory=3) == []


def test_the_number_of_attempts_is_limited():
    """Seven steps up, of which only all together fit, and down again from all ladders but the last."""
    assert len(tried(13)) == count_most_attempts(LADDERS) == 7 + 4
    assert count_most_attempts([]) == 0
