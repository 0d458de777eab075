"""The chain that runs itself: at each tick, every experiment of the run root is asked what comes next.

Off until somebody turns it on. A tick only reads, decides, and asks for at most one submission per
experiment, under a key that names submission and attempt: two ticks, or two daemons, that decide the
same launch it once. Why nothing was submitted is the tick's skip reason. Costs one `squeue` and a
few small files an experiment.
"""

import dagster as dg

from model.errors import RQwen3Error
from rqwen3_pipeline.assets.common import Pipeline, experiment, pipeline, submission_partitions
from rqwen3_pipeline.experiments.observed import ATTEMPT_TAG, EXPERIMENT_TAG, facts_now, policy_of
from rqwen3_pipeline.experiments.policy import Action, Decision, decide
from rqwen3_pipeline.slurm.client import Slurm
from rqwen3_pipeline.training import submission_key

INTERVAL_S = 30


def experiments_of(here: Pipeline) -> list[str]:
    """The profile's experiment, and those that `rqwen3 experiment new` made in this run root."""
    made = sorted(path.parent.name for path in here.root.path.glob("experiments/*/config.toml"))
    return [here.run.name, *(name for name in made if name != here.run.name)]


def decision_for(here: Pipeline, name: str, instance: dg.DagsterInstance | None, slurm: Slurm | None) -> Decision:
    """What comes next for one experiment."""
    run, _ = experiment(here, submission_key(name, 1))
    facts = facts_now(here.root, run, instance, slurm, needs_preflight=name == here.run.name)
    return decide(facts, policy_of(run))


def scheduler_of(instance: dg.DagsterInstance) -> Slurm | None:
    """SLURM, where this instance's runs are its jobs."""
    return getattr(instance.run_launcher, "slurm", None)


def request_for(name: str, decision: Decision) -> dg.RunRequest:
    """The run that a decision to submit asks for."""
    key = submission_key(name, decision.submission)
    return dg.RunRequest(
        run_key=f"{name}/{decision.submission:02d}/a{decision.attempt}",
        partition_key=key,
        tags={EXPERIMENT_TAG: name, ATTEMPT_TAG: str(decision.attempt)},
    )


@dg.sensor(
    job_name="train_submission",
    minimum_interval_seconds=INTERVAL_S,
    default_status=dg.DefaultSensorStatus.STOPPED,
    description="Submits the next slice of each experiment once the last one has ended well; says why not otherwise.",
)
def resubmission(context: dg.SensorEvaluationContext) -> dg.SensorResult:
    """One tick."""
    here, requests, reasons = pipeline(), list[dg.RunRequest](), list[str]()
    slurm = scheduler_of(context.instance)
    for name in experiments_of(here):
        try:
            decision = decision_for(here, name, context.instance, slurm)
        except RQwen3Error as error:  # of this experiment alone: the others go on
            reasons.append(f"{name}: left alone: {error}")
            context.log.error(reasons[-1])
            continue
        reasons.append(f"{name}: {decision.action}: {decision.reason}")
        context.log.info(reasons[-1])
        if decision.action is Action.SUBMIT:
            requests.append(request_for(name, decision))
    keys = [str(request.partition_key) for request in requests]
    return dg.SensorResult(
        run_requests=requests,
        dynamic_partitions_requests=[submission_partitions.build_add_request(keys)] if keys else [],
        skip_reason=None if requests else dg.SkipReason("\n".join(reasons)),
    )
