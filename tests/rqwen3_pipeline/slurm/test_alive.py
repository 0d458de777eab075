import pytest

from rqwen3_pipeline.slurm.alive import job_state_code
from rqwen3_pipeline.slurm.client import SlurmUnavailable
from rqwen3_pipeline.slurm.states import Phase, State
from tests.rqwen3_pipeline.slurm.fake import FakeSlurm, job


@pytest.mark.parametrize("state", list(State))
def test_job_is_gone_exactly_when_its_state_is_an_end(state):
    slurm = FakeSlurm()
    slurm.listed = {7: job(7, state)}
    ended = state.phase in (Phase.SUCCEEDED, Phase.FAILED)
    assert job_state_code("7", slurm) == int(ended)


def test_job_nobody_knows_is_gone():
    assert job_state_code("7", FakeSlurm()) == 1


def test_job_while_slurm_is_away_is_not_known(capsys):
    slurm = FakeSlurm()
    slurm.failing = [SlurmUnavailable("away")]
    assert job_state_code("7", slurm) == 2
    assert "away" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "x", "-1", "7 8", "7;id"])
def test_what_is_no_job_id_is_not_known(text):
    assert job_state_code(text, FakeSlurm()) == 2
