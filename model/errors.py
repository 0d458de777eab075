"""One small tree of errors.

Every message says what was seen, where, and what to do next. The command line prints the message
alone, without a traceback, and exits with the class's `exit_code`.
"""

EXIT_CODES = {"non_finite": 65, "out_of_memory": 71, "disk_full": 74}
"""What the trainer ends with, by the ledger's word: who started it knows why even where no record could be written."""


class RQwen3Error(Exception):
    """Base of every error that the user can act upon."""

    exit_code = 1


class ConfigError(RQwen3Error):
    """A configuration file, a flag or an environment variable holds something unusable."""

    exit_code = 2


class SourceError(RQwen3Error):
    """A source's file is missing, damaged, or lacks a column."""


class CorpusError(RQwen3Error):
    """A piece of the built corpus (digests, shards, sidecars, manifest) is not what it claims."""


class CheckpointError(RQwen3Error):
    """A checkpoint or an export can't be written, read, or trusted."""


class TrainingError(RQwen3Error):
    """The training itself went wrong: its numbers are no longer finite."""


class OutOfMemory(RQwen3Error):
    """The device, or the machine, has less memory than the training takes."""


class DiskSpaceError(RQwen3Error):
    """A file system has less free space than the next step will write."""


class LockHeldError(RQwen3Error):
    """Another process works in the same folder."""

    exit_code = 73


class EnvironmentProblem(RQwen3Error):
    """The machine lacks something: a program, a package, a free port."""


class OtherRankError(RQwen3Error):
    """What another rank of the training failed with, which that one says itself."""

    def __init__(self, rank: int, error: BaseException) -> None:
        super().__init__(f"rank {rank}: {error if isinstance(error, RQwen3Error) else repr(error)}")
        self.exit_code = getattr(error, "exit_code", self.exit_code)
        self.__cause__ = error
