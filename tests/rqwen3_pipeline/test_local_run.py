import itertools

import dagster as dg
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rqwen3_pipeline import local_run
from rqwen3_pipeline.assets.common import Pipeline
from rqwen3_pipeline.experiments import control
from rqwen3_pipeline.experiments.control import StoppedByHandError
from rqwen3_pipeline.local_run import LocalRun, ranges
from rqwen3_pipeline.settings import Settings


@given(st.lists(st.booleans(), max_size=30))
def test_ranges_cover_the_wanted_keys_and_no_other(flags):
    order = [f"{index:05d}" for index in range(len(flags))]
    wanted = {key for key, flag in zip(order, flags, strict=True) if flag}
    found = ranges(order, wanted)
    covered = [key for first, last in found for key in order if first <= key <= last]
    assert covered == sorted(wanted)
    for (_, last), (first, _) in itertools.pairwise(found):
        assert order.index(first) > order.index(last) + 1


class Trained(LocalRun):
    """A run whose submissions are cut and saved at once, and which is stopped by hand during the first."""

    def execute(self, job, **_):
        self.executed.append(job)
        if job == "train_submission":
            self.sample.end(1, 0, 80, 80, "deadline", 75)
            control.stop(self.here.root, "small", "enough")


@pytest.fixture
def trained(corpus_run):
    corpus_run.begin()
    here = Pipeline(Settings(profile=str(corpus_run.config_path), home=corpus_run.root.path))
    with dg.DagsterInstance.ephemeral() as instance:
        run = Trained(here, instance)
        run.sample, run.executed = corpus_run, []
        yield run


def test_run_of_an_experiment_that_was_stopped_by_hand_is_refused_until_it_is_resumed(trained):
    control.stop(trained.here.root, "small", "lunch")
    with pytest.raises(
        StoppedByHandError, match=r"^small: stopped by hand \(.*lunch\); then: rqwen3 experiment resume"
    ):
        local_run._training(trained)
    assert trained.executed == []
    control.resume(trained.here.root, "small", (0, 0))
    with pytest.raises(StoppedByHandError):
        local_run._training(trained)
    assert "train_submission" in trained.executed


def test_run_that_is_stopped_by_hand_during_a_submission_trains_no_second_one(trained):
    with pytest.raises(StoppedByHandError, match="enough"):
        local_run._training(trained)
    assert trained.executed == ["run_preflight", "train_submission"]
