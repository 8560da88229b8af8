"""Options of the commands that start from a config, and of jobs of several processes; see options.py."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from flaxformer_mt.commands.shared_options import JsonOptions
from flaxformer_mt.config import Config
from flaxformer_mt.config.bounds import at_least


@dataclass(frozen=True)
class ExperimentOptions:
    """Options of all commands that start from a config."""

    # Run directory, or its URL (gs://, s3://): config, checkpoints, results. Without --config, the config of
    # an existing run is used.
    run: Path
    # All settings of the experiment; --config.SECTION.FIELD=VALUE changes one of them.
    config: Config = field(default_factory=Config)


@dataclass(frozen=True)
class ProcessOptions:
    """Options of all commands that several processes can run together, each started with these flags."""

    # ---- several processes ----

    # HOST:PORT of process 0, reachable by all processes of a job. None: one process, or --distributed.
    coordinator: str | None = None
    # Number of processes of a job. None: one process, or --distributed.
    processes: int | None = None
    # Index of this process in a job of several, from 0. None: one process, or --distributed.
    process: int | None = None
    # Read the number, the index and the coordinator of the processes from Slurm, GKE, a TPU pod or Open MPI
    # instead of --coordinator, --processes and --process.
    distributed: bool = False


@dataclass(frozen=True)
class WorkerOptions(ProcessOptions):
    """Options of all commands that can give blocks of lines to workers."""

    # ---- workers ----

    # Number of workers, each of which translates blocks of --window lines with a model of its own, on an
    # accelerator of its own if there are any. One that dies costs the time of its block. None: no workers;
    # with --ray, one for each accelerator of the cluster, or for each machine if there are none.
    workers: Annotated[int | None, at_least(1)] = None
    # Ray cluster whose machines the workers run on, instead of this one (needs the extra ray): HOST:PORT or
    # ray://HOST:PORT; auto is the one that this machine belongs to, local a new one on this machine. None:
    # no cluster.
    ray: str | None = None


@dataclass(frozen=True)
class TrainOptions(ProcessOptions, ExperimentOptions):
    """Trains the model that a config describes, or resumes a run from its last checkpoint."""

    # Updates to record as a profiler trace in RUN/profile, for TensorBoard and Perfetto. None: no trace.
    profile: Annotated[int | None, at_least(1)] = None
    # Start from the parameters of a trained model, RUN or RUN@CHECKPOINT; the network and the vocabulary are
    # its own, other settings only without --config. None: random parameters.
    init: str | None = None
    # With --init: make the vocabulary from the new data. Pieces that both vocabularies have keep their
    # parameters.
    new_vocab: bool = False


@dataclass(frozen=True)
class PrepareOptions(ExperimentOptions, JsonOptions):
    """Prepares the data set, the vocabulary and the token ids, and reports statistics of the data."""

    # ---- workers ----

    # Number of worker processes that check and tokenize a large training set. None: one for each core of this
    # machine; with --ray, one for each machine of the cluster.
    workers: Annotated[int | None, at_least(1)] = None
    # Ray cluster whose machines the workers run on (needs the extra ray): HOST:PORT or ray://HOST:PORT, auto
    # or local. None: no cluster.
    ray: str | None = None
    # ---- shortlist ----

    # File to write a shortlist to: the most probable target pieces of each source piece, learned from the
    # training set, for `translate --shortlist=FILE`. None: none is made.
    shortlist: Path | None = None
    # With --shortlist: maximum number of target pieces for each source piece.
    shortlist_candidates: int = 50
    # With --shortlist: number of the most frequent target pieces, which may occur in every translation.
    shortlist_common: int = 200


@dataclass(frozen=True)
class AlignOptions(ExperimentOptions):
    """Aligns the words of the training pairs (IBM model 1 and an HMM), for guided alignment."""

    # File for the alignments, one line `0-0 1-2` for each training pair. None: the file of data.alignments.
    output: str | None = None


@dataclass(frozen=True)
class ShowOptions(ExperimentOptions, JsonOptions):
    """Shows the resolved config, parameter counts, and FLOPs, memory and batch shapes of a training step."""

    # Devices to compile for, not needed here: v5e:2x2, v6e:16x16:2 (two slices), h100:8. None: not compiled.
    target: str | None = None
