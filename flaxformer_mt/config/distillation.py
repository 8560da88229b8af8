"""Constraints between the fields of word-level distillation: a teacher's scores and their weight."""

from collections.abc import Iterator

from flaxformer_mt.config import Config
from flaxformer_mt.config.noise import TARGET_NOISE
from flaxformer_mt.errors import find_cloud_path


def find_distillation_problems(config: Config) -> Iterator[str]:
    """Yield one line for each problem, with both values and the remedy."""
    files, weight = config.data.teacher_scores, config.train.teacher_weight
    sets = config.data.dataset.split(",")
    if any(files) and not weight:
        yield (
            f"data.teacher_scores is {','.join(files)}, but train.teacher_weight is 0, which means no "
            "distillation; set train.teacher_weight=0.5, or leave out data.teacher_scores"
        )
    if weight and not any(files):
        yield (
            f"train.teacher_weight is {weight}, but data.teacher_scores names no file; make one with distil "
            "--teacher_scores=8 and set data.teacher_scores=train.scores, or set train.teacher_weight=0"
        )
    if len(files) not in (0, 1, len(sets)):
        yield (
            f"data.teacher_scores has {len(files)} names for {len(sets)} data sets ({config.data.dataset}); "
            "give one name for each set, empty for a set without scores, or one for all"
        )
    for problem in filter(None, map(find_cloud_path, files)):
        yield f"data.teacher_scores: {problem}"
    if any(files) and config.vocab.sampling:
        yield (
            f"vocab.sampling is {config.vocab.sampling}, which gives targets other tokens in each epoch than "
            "data.teacher_scores has scores of; set vocab.sampling=0, or leave out data.teacher_scores"
        )
    if any(files) and not config.data.source_language:
        yield (
            "data.teacher_scores needs translations, but data.source_language is empty, which means a "
            "language model; leave out data.teacher_scores"
        )
    noises = {"data.noise": config.data.noise}
    noises |= {
        f"data.stages: {stage.name}: noise": stage.noise for stage in config.data.stages if stage.noise
    }
    for where, noise in noises.items() if any(files) else ():
        for kind in TARGET_NOISE:
            if getattr(noise, kind):
                yield (
                    f"{where}.{kind} is {getattr(noise, kind)}, but it changes targets, of which "
                    "data.teacher_scores has scores; set it to 0"
                )
