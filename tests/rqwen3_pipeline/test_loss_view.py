from pathlib import Path

import pytest
from click.testing import CliRunner

from model.errors import CheckpointError
from rqwen3_pipeline.cli import main
from rqwen3_pipeline.loss_view import nearest_checkpoint
from tests.model.conftest import CONFIG, TinyRun, write_corpus


@pytest.mark.parametrize(("step", "nearest"), [(1, 4), (5, 4), (7, 4), (8, 8), (13, 12), (99, 12)])
def test_nearest_checkpoint_is_that_of_the_weights_a_step_began_with(tmp_path: Path, step: int, nearest: int) -> None:
    for saved in (4, 8, 12, 20):
        (tmp_path / f"step_{saved}.pt").touch()
        if saved != 20:  # that one was never committed
            (tmp_path / f"step_{saved}.json").touch()
    assert nearest_checkpoint(tmp_path, step).name == f"step_{nearest}.pt"


def test_nearest_checkpoint_of_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="--checkpoint FILE"):
        nearest_checkpoint(tmp_path, 3)


def test_trace_with_loss_lists_the_documents_of_the_step_by_loss(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "1")
    run = TinyRun(tmp_path)
    write_corpus(tmp_path)
    run.config_path.write_text(CONFIG)
    output, _ = run.start(1, "--until-step", "4").communicate()
    assert "until_step at step 4" in output
    monkeypatch.setenv("RQWEN3_HOME", str(tmp_path))
    called = CliRunner().invoke(main, ["--profile", str(run.config_path), "trace", "--step", "5", "--loss"])
    assert called.exit_code == 0, called.output
    assert "step_4.pt" in called.stderr
    head, *rows = called.stdout.splitlines()
    assert head.split() == ["loss", "tokens", "sequence", "source", "document"]
    losses = [float(row.split()[0]) for row in rows]
    assert losses == sorted(losses, reverse=True)
    assert sum(int(row.split()[1]) for row in rows) == 8 * 32
    assert {row.split()[3] for row in rows} <= {"wikipedia", "textbooks"}

    neither = CliRunner().invoke(main, ["--profile", str(run.config_path), "trace", "--step", "5"])
    assert neither.exit_code == 2
    assert "--loss" in neither.output
