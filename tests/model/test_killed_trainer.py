"""A trainer killed where it had said nothing yet, or just said it: the ledger tells the truth of each process once."""

import signal
import subprocess
import sys

import pytest

from model import checkpoint
from model.files import read_json, read_jsonl, write_json
from model.session import TrainSession
from rqwen3_pipeline.training import steps_by_submission
from tests.model.conftest import REPOSITORY
from tests.model.test_pretrain import train

KILLED = """
import os, signal, sys
from model import lock, metrics, pretrain, session, trainer
kill = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
{moment}
pretrain.main(sys.argv[1:])
"""
BEFORE_SETTLING = "trainer.settle = kill"
AFTER_SETTLING = "settle = trainer.settle; trainer.settle = lambda *_: (settle(*_), kill())"
PREPARING = "trainer.read_manifest = kill"
BEFORE_RELEASE = "lock.RunLock.release = kill"
AFTER_11 = """
step = session.TrainSession.train_step
session.TrainSession.train_step = lambda self, *_: kill() if self.step == 11 else step(self, *_)
save = trainer.Saver.save
trainer.Saver.save = lambda *_, **how: save(*_, **how | {"background": False})
"""
WITHIN_AN_EVALUATION = """
append = metrics.append_jsonl
last = lambda record: (record.get("step"), record.get("source")) == (12, "all")
metrics.append_jsonl = lambda path, record: kill() if last(record) else append(path, record)
"""


def killed(tiny, submission: int, moment: str, *more: str) -> None:
    """Run the trainer until that moment, in which it kills itself."""
    command = [sys.executable, "-c", KILLED.format(moment=moment), *tiny.arguments(submission, *more)]
    assert subprocess.run(command, cwd=REPOSITORY, capture_output=True).returncode == -signal.SIGKILL


def ledger(tiny, *names: str) -> list[tuple]:
    return [tuple(record[name] for name in names) for record in read_jsonl(tiny.run_dir / "ledger.jsonl")]


def test_trainers_killed_while_they_prepare_have_trained_and_lost_nothing_and_break_no_chain(tiny, capsys) -> None:
    assert train(tiny, "--until-step", "5") == 75
    killed(tiny, 2, PREPARING)
    killed(tiny, 3, BEFORE_SETTLING)  # before it could write the record of 2
    killed(tiny, 4, AFTER_SETTLING)  # after that, before it could say so
    assert train(tiny, submission=5) == 0
    assert ledger(tiny, "submission", "from_step", "to_step", "saved_step", "tokens", "lost_steps") == [
        (1, 0, 5, 5, 5 * 256, 0),
        *((submission, None, None, 5, 0, 0) for submission in (2, 3, 4)),
        (5, 5, 12, 12, 7 * 256, 0),
    ]
    assert steps_by_submission(read_jsonl(tiny.run_dir / "ledger.jsonl"), 12)[1] == []
    assert "submission 4" in (told := capsys.readouterr().err)
    assert "submission 3" not in told
    assert not list(tiny.run_dir.glob("*LOCK*"))


def test_trainer_killed_between_its_record_and_the_release_gets_no_second_record(tiny, capsys) -> None:
    killed(tiny, 1, BEFORE_RELEASE, "--until-step", "5")
    assert train(tiny, submission=2) == 0
    assert ledger(tiny, "submission", "stop_reason") == [(1, "until_step"), (2, "finished")]
    assert "killed" not in capsys.readouterr().err


def test_what_a_kill_between_two_logged_steps_lost_is_told_as_a_range_that_holds_the_truth(tiny, capsys) -> None:
    tiny.set(log_every_steps=6)
    killed(tiny, 1, AFTER_11)
    tiny.set(log_every_steps=1)  # the next one's is another matter
    assert train(tiny, submission=2) == 0
    assert "was killed; 0 to 4 steps after step 8 are lost" in capsys.readouterr().err
    names = ("to_step", "saved_step", "lost_steps", "lost_steps_at_most")
    assert ledger(tiny, *names) == [(8, 8, 0, 4), (12, 12, 0, 0)]  # 3 were


def test_evaluation_of_which_a_kill_left_some_lines_is_made_up(tiny) -> None:
    killed(tiny, 1, WITHIN_AN_EVALUATION)
    assert train(tiny, submission=2) == 0
    lines = [r for r in read_jsonl(tiny.run_dir / "metrics.jsonl") if r["kind"] == "heldout" and r["step"] == 12]
    assert [line["source"] for line in lines if line["submission"] == 2] == ["wikipedia", "textbooks", "all"]


def test_killed_trainer_is_recorded_in_its_own_configuration_by_one_that_is_refused_for_another(tiny) -> None:
    killed(tiny, 1, AFTER_11)
    tiny.set(accumulation=4, max_steps=11)
    assert train(tiny, submission=2) == 2
    names = ("submission", "to_step", "tokens", "lost_steps", "lost_steps_at_most")
    assert ledger(tiny, *names) == [(1, 11, 11 * 256, 3, 4), (2, None, 0, 0, 0)]


def test_record_of_a_killed_trainer_that_finds_no_room_is_left_to_the_next_one(
    tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train(tiny, "--until-step", "5") == 75
    killed(tiny, 2, PREPARING)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("model.ledger.append_jsonl", full)  # there is room for its own again
        assert train(tiny, submission=3) == 74
    write_json(tiny.run_dir / "LOCK", read_json(tiny.run_dir / "LOCK") | {"pid_start": 1})
    assert train(tiny, submission=4) == 0
    names = ("submission", "from_step", "stop_reason")
    assert ledger(tiny, *names)[1:] == [(3, None, "disk_full"), (2, None, "killed"), (4, 5, "finished")]


def test_submission_that_fails_before_it_has_loaded_a_checkpoint_does_not_say_where_it_began(tiny) -> None:
    assert train(tiny, "--until-step", "8") == 75
    (tiny.checkpoints / "step_8.pt").write_bytes(b"damaged")
    shard = tiny.root / "tokens/textbooks-00000-00.bin"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-4])
    assert train(tiny, submission=2) == 1
    shard.write_bytes(whole)
    assert ledger(tiny, "from_step", "to_step", "tokens", "lost_steps")[1] == (None, None, 0, 0)


@pytest.mark.parametrize(("bad_steps", "code"), [({3, 4}, 0), ({3, 4, 5, 6}, 65)])
def test_every_skipped_update_has_a_line_however_seldom_the_others_have(
    tiny, monkeypatch: pytest.MonkeyPatch, bad_steps: set[int], code: int
) -> None:
    tiny.set(log_every_steps=6)
    original = TrainSession._micro_batch

    def poisoned(self, tokens):
        loss = original(self, tokens)
        return loss * float("nan") if self.step + 1 in bad_steps else loss

    monkeypatch.setattr(TrainSession, "_micro_batch", poisoned)
    assert train(tiny) == code
    lines = [record for record in read_jsonl(tiny.run_dir / "metrics.jsonl") if record["kind"] == "train"]
    logged = {1, 6, 12} if code == 0 else {1}
    assert [line["step"] for line in lines] == sorted(logged | bad_steps)
    assert {line["step"] for line in lines if line.get("skipped")} == bad_steps
    assert checkpoint.steps_in(tiny.checkpoints)[0] == 4
