"""The rate of long work: what is said, and when."""

from flaxformer_mt.tracking import Rate


def test_rate_and_time_left_every_few_seconds():
    now, said = [0.0], []
    rate = Rate(10_000, "pairs", said.append, clock=lambda: now[0])
    for time, items in ((0.0, 2000), (1.0, 500), (10.0, 1500), (11.0, 100), (20.0, 1900)):
        now[0] = time
        rate.add(items)
    assert said == [
        # the first 2,000 were there before; 2,000 in 10 seconds
        "4,000/10,000 pairs | 200 pairs/s | 0:30 left",
        "6,000/10,000 pairs | 200 pairs/s | 0:20 left",
    ]
