"""A failed run is told to those outside, with its reason and the end of its log; see `rqwen3_pipeline.notices`."""

import dagster as dg

from rqwen3_pipeline.experiments.observed import PARTITION_TAG, failure_of
from rqwen3_pipeline.notices import tell
from rqwen3_pipeline.settings import Settings

LOG_CHARACTERS = 4000


def message_for(context: dg.RunFailureSensorContext) -> str:
    """What failed, why, and the last lines of its job's log where there is one."""
    run, instance = context.dagster_run, context.instance
    what = run.tags.get(PARTITION_TAG)
    title = f"{run.job_name}{f' {what}' if what else ''} failed (run {run.run_id[:8]})"
    reason = failure_of(instance, run.run_id) or context.failure_event.message or "no reason is on record"
    log = instance.run_launcher.get_run_worker_debug_info(run)
    return f"{title}: {reason}" + (f"\n{log[-LOG_CHARACTERS:]}" if log else "")


@dg.run_failure_sensor(
    name="failure_notices",
    default_status=dg.DefaultSensorStatus.RUNNING,
    description="Tells a command, a webhook or a file of each failed run; silent unless RQWEN3_NOTICE_… is set.",
)
def failure_notices(context: dg.RunFailureSensorContext) -> None:
    """One failed run."""
    settings = Settings()
    if not (settings.notice_command or settings.notice_webhook or settings.notice_file):
        return
    for problem in tell(settings, message_for(context)):
        context.log.error(problem)
