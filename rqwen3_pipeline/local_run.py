"""The whole pipeline on this machine, every stage through Dagster, in this process.

Each stage first asks the files what is missing, and the instance what it has not been told; only
that runs. So a second call does nothing, and one after a kill goes on where the first was. Costs
about half a second per stage for Dagster's events.
"""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dagster as dg

from model.errors import RQwen3Error
from model.files import hold_lock, require_free_bytes, sha256_file
from rqwen3_pipeline import results, training
from rqwen3_pipeline.assets.common import Pipeline, submission_partitions
from rqwen3_pipeline.assets.sources import register_partitions
from rqwen3_pipeline.definitions import defs
from rqwen3_pipeline.experiment_files import other_manifest
from rqwen3_pipeline.experiments import control
from rqwen3_pipeline.instance import OWNER_TAG, fail_orphans, open_local_instance, owner
from rqwen3_pipeline.preflight import preflight_problem
from rqwen3_pipeline.settings import Settings

RANGE_START, RANGE_END = "dagster/asset_partition_range_start", "dagster/asset_partition_range_end"
QUIET = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}
MAX_SUBMISSIONS = 50
LEAST_FREE_BYTES = 1 << 30


class StageFailedError(RQwen3Error):
    """A stage ended red; what its partitions say is in the message."""


class InterruptedRunError(RQwen3Error):
    """Somebody pressed Ctrl-C, or sent SIGTERM."""

    exit_code = 130


@dataclass
class LocalRun:
    """One pass over all stages."""

    here: Pipeline
    instance: dg.DagsterInstance
    rows: list[tuple[str, str, float, Path]] = field(default_factory=list)
    """Stage, what was done, seconds, where the result lies: the table at the end."""
    changed: bool = False
    """Whether any stage so far made something new, so that what depends on it must run too."""

    def stage(self, title: str, where: Path, jobs: Callable[[], int]) -> None:
        """Run one stage and note its time; `jobs` returns how many pieces it made."""
        started = time.monotonic()
        print(f"{title} …", file=sys.stderr, flush=True)
        made = jobs()
        seconds = time.monotonic() - started
        did = f"{made} made" if made else "already done"
        self.rows.append((title, did, seconds, where))
        print(f"{title}: {did} in {seconds:.1f} s", file=sys.stderr, flush=True)

    def execute(
        self,
        job: str,
        *,
        tags: dict[str, str] | None = None,
        partition_key: str | None = None,
        config: dict[str, Any] | None = None,
        selection: list[list[str]] | None = None,
    ) -> None:
        """Run a job of the code location in this process.

        Raises:
            StageFailedError: a step failed, or a blocking check did.
        InterruptedRunError: it was stopped from outside; what was finished stays.
        """
        result = defs.resolve_job_def(job).execute_in_process(
            instance=self.instance,
            partition_key=partition_key,
            asset_selection=[dg.AssetKey(path) for path in selection] if selection else None,
            tags={OWNER_TAG: owner(), **(tags or {})},
            run_config={**QUIET, **(config or {})},
            raise_on_error=False,
        )
        self.changed = True
        if not result.success:
            if "DagsterExecutionInterruptedError" in _reasons(result):
                raise InterruptedRunError("stopped. The same command goes on from here.")
            raise StageFailedError(f"{job} failed. {_reasons(result)}\nMend that and run the same command again.")

    def told(self, key: Sequence[str], partition: str | None = None) -> bool:
        """Whether the instance has a materialization of the asset (or of one partition)."""
        asset = dg.AssetKey(list(key))
        if partition is not None:
            return partition in self.instance.get_materialized_partitions(asset)
        return self.instance.get_latest_materialization_event(asset) is not None

    def red(self, key: Sequence[str]) -> bool:
        """Whether a blocking check of the asset failed, or was cut off, when it last ran: it is to be made again."""
        graph, asset = defs.resolve_asset_graph(), dg.AssetKey(list(key))
        blocking = [check for check in graph.asset_check_keys if check.asset_key == asset and graph.get(check).blocking]
        seen = [self.instance.get_latest_asset_check_evaluation_record(check) for check in blocking]
        return any(record is None or record.status.value != "SUCCEEDED" for record in seen)

    def by_file(self, stage: str, asset: str) -> int:
        """A stage over all sources: the missing partitions, in as few runs as ranges allow.

        Where a blocking check is red, all of the source's are gone through again, which skips what is current.
        """
        from rqwen3_pipeline.corpus.build import pending

        made = 0
        for source in self.here.corpus.sources:
            order = [file.key for file in self.here.lock.files(source)]
            missing = set(pending(stage, self.here.root, self.here.corpus, self.here.lock, source))
            missing |= set(order) - self.instance.get_materialized_partitions(dg.AssetKey([asset, source]))
            missing = set(order) if self.red([asset, source]) else missing
            for first, last in ranges(order, missing):
                self.execute(f"{asset}_{source}", tags={RANGE_START: first, RANGE_END: last})
            made += len(missing)
        return made


def ranges(order: Sequence[str], wanted: set[str]) -> list[tuple[str, str]]:
    """Group the wanted keys into runs of neighbours in `order`: (first, last), both included."""
    found: list[tuple[str, str]] = []
    previous = -2
    for index, key in enumerate(order):
        if key not in wanted:
            continue
        found.append((found.pop()[0], key) if index == previous + 1 else (key, key))
        previous = index
    return found


def run_all(settings: Settings) -> LocalRun:
    """Run every stage that is not done yet, from the source lock to the evidence report.

    Raises:
        DiskSpaceError: there is less than a gigabyte; preflight asks for what the checkpoints take.
        LockHeldError: another process runs in the same run root.
        StageFailedError: a stage failed; what was finished stays, and a second call goes on from it.
        StoppedByHandError: the experiment is not finished, and `rqwen3 experiment stop` is in force.
        RQwen3Error: configuration, environment or input can't be used.
    """
    here = Pipeline(settings)
    _check_configuration(here)
    require_free_bytes(here.root.path, LEAST_FREE_BYTES, "a run from the sources to the report")
    with hold_lock(here.root.path / ".run.lock", "rqwen3 run"):
        instance = open_local_instance(here.root)
        fail_orphans(instance)
        run = LocalRun(here, instance)
        _corpus(run)
        _training(run)
        _results(run)
        return run


def _check_configuration(here: Pipeline) -> None:
    """Everything that can be refused before anything is written."""
    _ = here.corpus
    training.submissions_config(here.run)
    results.evaluation_config(here.run)


def _corpus(run: LocalRun) -> None:
    root = run.here.root
    run.stage("source lock", root.lock, lambda: _lock(run))
    run.stage("raw files", root.path / "raw", lambda: run.by_file("raw", "raw_files"))
    run.stage("filtered documents", root.path / "filtered", lambda: run.by_file("filtered", "filtered_documents"))
    run.stage("digests", root.path / "digests", lambda: run.by_file("digests", "digests"))
    run.stage("survivors", root.path / "survivors", lambda: _survivors(run))
    run.stage("tokenizer", root.tokenizer, lambda: _tokenizer(run))
    run.stage("token shards", root.tokens, lambda: run.by_file("tokens", "token_shards"))
    run.stage("manifest", root.manifest, lambda: _once(run, "fold_manifest", ["manifest"], _is_folded(run.here)))


def _training(run: LocalRun) -> None:
    folder = run.here.root.experiment(run.here.run.name)
    if (problem := other_manifest(folder, sha256_file(run.here.root.manifest))) is not None:
        raise StageFailedError(problem)
    if not training.finished(run.here.root, run.here.run.name):
        control.require_go(run.here.root, run.here.run.name)
        run.stage(
            "preflight",
            folder / "preflight.json",
            lambda: _once(run, "run_preflight", ["preflight"], preflight_problem(folder) is None),
        )
    run.stage("submissions", folder, lambda: _submissions(run))


def _results(run: LocalRun) -> None:
    root, name = run.here.root, run.here.run.name
    where = root.evidence(name) / "index.html"
    run.stage(
        "export, evaluation, evidence", where, lambda: _once(run, "report_results", ["evidence_report"], where.exists())
    )


def _once(run: LocalRun, job: str, key: list[str], done: bool) -> int:
    """An unpartitioned stage: runs when something before it changed, it was never finished, or a check of it is red."""
    if done and run.told(key) and not run.changed and not run.red(key):
        return 0
    run.execute(job)
    return 1


def _lock(run: LocalRun) -> int:
    from rqwen3_pipeline.corpus.origin import lock_origin

    here = run.here
    before = here.root.lock.read_bytes() if here.root.lock.exists() else None
    lock = lock_origin(here.root, here.corpus, here.run.training, here.settings.sources)
    if before == here.root.lock.read_bytes() and run.told(["source_lock"]):
        register_partitions(run.instance, lock)
        return 0
    run.execute("lock_sources")
    return 1


def _survivors(run: LocalRun) -> int:
    from rqwen3_pipeline.corpus.build import pending

    here, groups = run.here, run.here.corpus.groups()
    missing = {group for group in groups if pending("survivors", here.root, here.corpus, here.lock, group)}
    missing |= {group for group in groups if not run.told(["survivors", group]) or run.red(["survivors", group])}
    if missing:
        run.execute("find_survivors", selection=[["survivors", group] for group in sorted(missing)])
    return len(missing)


def _tokenizer(run: LocalRun) -> int:
    from rqwen3_pipeline.corpus.tokenizer import current_tokenizer

    here = run.here
    done = current_tokenizer(here.root, here.corpus, here.lock) is not None
    return _once(run, "train_or_pin_tokenizer", ["tokenizer"], done)


def _is_folded(here: Pipeline) -> bool:
    """Whether the manifest is there, and holds what this configuration wants."""
    from rqwen3_pipeline.corpus.verify import made_for_less, unmet

    asked = here.root, here.corpus, here.run.training
    return here.root.manifest.exists() and not unmet(*asked) and not made_for_less(*asked)


def _submissions(run: LocalRun) -> int:
    here, made = run.here, 0
    for number in range(1, MAX_SUBMISSIONS + 1):
        key = training.submission_key(here.run.name, number)
        recorded = training.record_of(here.root, here.run.name, number) is not None
        if recorded and run.told(["submissions"], key):
            continue
        if not recorded and training.finished(here.root, here.run.name):
            break
        if not recorded:
            control.require_go(here.root, here.run.name)
        _submit(run, key, number)
        made += 1
    return made


def _submit(run: LocalRun, key: str, number: int) -> None:
    here = run.here
    limit_s = training.submissions_config(here.run).time_limit_s
    if number == 1 and not training.ledger(here.root, here.run.name):
        limit_s = training.first_time_limit_s(here.root, here.run)
    name = submission_partitions.name
    assert name is not None
    run.instance.add_dynamic_partitions(name, [key])
    options = {"ops": {"submissions": {"config": {"time_limit_s": limit_s}}}}
    run.execute("train_submission", partition_key=key, config=options)


def _reasons(result: dg.ExecuteInProcessResult) -> str:
    reasons: list[str] = []
    for event in result.all_events:
        if event.event_type_value == "STEP_FAILURE":
            error = event.step_failure_data.error
            while error is not None and error.cause is not None:
                error = error.cause
            reasons.append(error.message.strip() if error is not None else event.message or "")
        if event.event_type_value == "ASSET_CHECK_EVALUATION":
            check = event.asset_check_evaluation_data
            if not check.passed and check.severity == dg.AssetCheckSeverity.ERROR:
                reasons.append(f"{check.asset_key.to_user_string()}, {check.check_name}: {check.description}")
    return "\n".join(reasons)


def table(run: LocalRun) -> str:
    """The stages, their times, and where each result lies, as text."""
    base = Path.cwd()
    lines = [f"{'stage':<30} {'did':<14} {'seconds':>8}  result"]
    for title, did, seconds, where in run.rows:
        shown = where.relative_to(base) if where.is_relative_to(base) else where
        lines.append(f"{title:<30} {did:<14} {seconds:>8.1f}  {shown}")
    total = sum(row[2] for row in run.rows)
    lines.append(f"{'all':<30} {'':<14} {total:>8.1f}")
    return "\n".join(lines)
