"""One submission of a training run: take the lock, resume, train, save, and leave a ledger record.

Order within a step: log, save, evaluate, sample, so that an evaluation that fails costs nothing that
was trained. What a stopped submission left undone (an evaluation, a sample) the next one makes up; none
is begun that would not end in time, by the longest that it took before.
"""

import math
import shlex
import time
import traceback

from model import checkpoint, dry_step, lock, metrics, phases
from model.bits_per_byte import heldout_streams
from model.checkpoint import SavedCheckpoint
from model.config import RunConfig, load_run_config
from model.console import Pace, clock, heldout_line, introduce, say
from model.distributed import Team, join, leave
from model.environment import write_environment
from model.errors import CheckpointError, LockHeldError, RQwen3Error, TrainingError
from model.files import require_free_bytes, sweep_temporaries
from model.generate import Sampling, continue_text, load_tokenizer
from model.ledger import exit_code_of, extent, failure_reason, settle
from model.memory import checkpoint_bytes
from model.metrics import RunLog
from model.mirror import open_mirror, require_package
from model.preemption import StopWatch
from model.run_config_guard import keep_config
from model.saver import Saver, SaveReport
from model.session import StepResult, TrainSession, set_threads
from model.shard_format import read_manifest
from model.submission import Submission
from model.windows import TokenWindows

EXIT_FINISHED, EXIT_CONTINUE = 0, 75
SKIPS_ALLOWED = 3
"""Non-finite losses in a row that are skipped; one more stops the run."""


def run_submission(submission: Submission, stop: StopWatch) -> int:
    """Train until the end, or until there is a reason to stop.

    Returns:
        The exit code: 0 finished, 75 saved and to be continued.

    Raises:
        LockHeldError: another trainer works in this folder; nothing was touched.
        RQwen3Error: configuration, data, checkpoint or numbers are unusable.
    """
    run = load_run_config(submission.config)
    team = join(run.training.device)
    stop.agree = team.agree
    who = {"submission": submission.attempt.submission, "attempt": submission.attempt.attempt}
    record = {**who, "from_step": None, "started": metrics.now()}
    path = submission.run_dir / "LOCK"
    held = team.first_does(lambda: lock.acquire(path, record, submission.job_alive_command))
    trainer = None
    try:
        trainer = _Trainer(submission, run, stop, held, team)
        code = trainer.run()
    finally:
        unrecorded = trainer is not None and trainer.unrecorded  # the next one makes the record, from the lock
        if team.first and not unrecorded:
            held.release()
    leave(team)
    return code


class _Trainer:
    """The state of one submission; `run` goes through it once."""

    def __init__(self, submission: Submission, run: RunConfig, stop: StopWatch, held: lock.RunLock, team: Team) -> None:
        self.submission, self.run_config, self.config = submission, run, run.training
        self.stop, self.lock, self.team = stop, held, team
        self.folder = submission.run_dir / "checkpoints"
        self.log = RunLog(submission.run_dir, submission.attempt, team)
        self.began = time.monotonic()
        self.session: TrainSession | None = None
        self.saver = Saver(self.folder, self.config, self._saved)
        self.eval_s, self.sample_s, self.last_save = 0.0, 0.0, 0.0
        self.from_step = None if checkpoint.steps_in(self.folder) else 0  # until one of them is loaded
        self.skips = 0
        self.unrecorded = True
        self.pace = Pace()

    def run(self) -> int:
        """Everything between taking the lock and releasing it."""
        try:
            self.team.first_does(self._settle)
            session = self.session = self._prepare()
            reason = self._loop(session)
            reason = self._finish(session, reason)
        except BaseException as error:
            told = self.team.blame(dry_step.in_words(self.run_config, error, "while training"))
            self._failed(told)
            if told is error:
                raise
            raise told from told.__cause__ or error
        finally:
            self.log.close()
            if self.session is not None:
                self.session.close()
        code = EXIT_FINISHED if reason == "finished" else EXIT_CONTINUE
        self._record(reason, code, None)
        saved = self.saver.saved
        say(f"{reason} at step {session.step:,}; " + (f"saved in {saved.path}" if saved else "nothing saved"))
        return code

    def _failed(self, error: BaseException) -> None:
        """Let a save in the background end, then leave a record, as far as the disk allows."""
        try:
            why = self.saver.wait()
        except OSError as unlogged:
            why = f"{self.submission.run_dir}/metrics.jsonl: no line of the last save could be written: {unlogged}"
        if why is not None:
            checkpoint.warn(why)
        text = str(error) if isinstance(error, RQwen3Error) else traceback.format_exc(limit=-3)
        try:
            self._record(failure_reason(error), exit_code_of(error), text)
        except OSError as unwritten:
            checkpoint.warn(
                f"{self.submission.run_dir}/ledger.jsonl: no record of this end could be written: {unwritten}"
            )

    def _prepare(self) -> TrainSession:
        self.team.first_does(self._prepare_folder)
        threads = set_threads()
        manifest = read_manifest(self.submission.manifest)
        windows = TokenWindows(manifest, self.config.seq_len)
        self.team.first_does(lambda: windows.check(hash_all=self.submission.verify_data))
        self.tokenizer = load_tokenizer(manifest.root / manifest.tokenizer_path)
        self.streams, missing = heldout_streams(manifest, self.config.eval_max_tokens)
        if missing:
            checkpoint.warn(f"no held-out document of {', '.join(missing)}: no held-out loss there.")
        checked = sum(len(stream.text_bytes) for stream in self.streams)
        say(f"held-out: the tokens of all {checked:,} documents stand for exactly the bytes of their texts")
        session = TrainSession(self.run_config, windows, self.team)
        self.provenance = {**metrics.provenance(session.device), "processes": self.team.size}
        if self.config.dry_step:
            self._dry_step(session)
        with phases.within("resume"):
            self._resume(session)
        needed_bytes = 2 * checkpoint_bytes(self.run_config.model)  # beside what retention has just left
        self.team.first_does(lambda: require_free_bytes(self.folder, needed_bytes, "two checkpoints"))
        self.team.first_does(lambda: self._open_records(session))
        introduce(self.run_config, session, threads)
        return session

    def _open_records(self, session: TrainSession) -> None:
        run_dir = self.submission.run_dir
        write_environment(run_dir, self.submission.attempt, session.device)
        if self.config.mirror:
            self.log.show(open_mirror(self.config.mirror, run_dir, self.run_config.name, session.step))

    def _prepare_folder(self) -> None:
        run_dir = self.submission.run_dir
        if self.config.mirror:
            require_package(self.config.mirror)
        keep_config(self.submission.config, run_dir / "config.toml", self.run_config)
        sweep_temporaries(run_dir, writers_too=False)  # others write here: a dry run, who asks for the lock
        sweep_temporaries(self.folder)

    def _dry_step(self, session: TrainSession) -> None:
        measured = dry_step.take(session, self.streams, self.submission.run_dir, self.stop.should_stop)
        if measured is not None:
            self.stop.save_s, self.eval_s = measured["save_s"], measured["eval_s"]
            say("dry step: " + ", ".join(f"{key} {value:.4g}" for key, value in measured.items()))

    def _resume(self, session: TrainSession) -> None:
        steps, saved = self.team.first_does(
            lambda: (checkpoint.steps_in(self.folder), checkpoint.newest_good(self.folder))
        )
        self.saver.saved = saved
        if saved is None and steps:
            raise CheckpointError(
                f"{self.folder}: none of the {len(steps)} checkpoints is whole; refusing to start anew over them. "
                f"Restore one, or move the folder away to start from step 0."
            )
        if saved is None:
            say(f"no checkpoint in {self.folder}: starting from step 0")
        else:
            session.restore(saved, other_data=self.submission.accept_other_data)
            newer = [step for step in steps if step > saved.step]
            self.team.first_does(lambda: self._tidy(saved, newer))
            say(f"continuing from step {session.step:,} ({saved.path})")
        self.from_step = session.step
        begun = {"from_step": session.step, "log_every_steps": self.config.log_every_steps}
        self.team.first_does(lambda: self.lock.update(**begun))

    def _tidy(self, saved: SavedCheckpoint, damaged: list[int]) -> None:
        """Do for retention what it can't know, and what a kill may have deprived it of."""
        for step in damaged:
            checkpoint.set_aside(checkpoint.step_path(self.folder, step))
        checkpoint.prune(self.folder, self.config, saved)

    def _loop(self, session: TrainSession) -> str:
        """Train; returns `finished`, `until_step`, or the reason to stop."""
        self._make_up(session)
        self.last_save = time.monotonic()
        last_step = min(self.config.max_steps, self.submission.until_step or self.config.max_steps)
        while session.step < last_step:
            result = session.train_step(self.stop.should_stop, self.stop.noticed)
            if result is None:
                return str(self.stop.reason)
            self._log(session, result)
            self._check_finite(result)
            self._milestones(session)
        return "finished" if session.step >= self.config.max_steps else "until_step"

    def _make_up(self, session: TrainSession) -> None:
        """Evaluate and sample where the run stands, if that is due and not on record."""
        step = session.step
        if self._due(step, self.config.eval_every_steps) and not self.log.has_heldout(step):
            self._evaluate(session)
        if (step == 0 or self._due(step, self.config.sample_every_steps)) and not self.log.has_sample(step):
            self._sample(session)

    def _due(self, step: int, every_steps: int) -> bool:
        return step > 0 and (step % every_steps == 0 or step == self.config.max_steps)

    def _milestones(self, session: TrainSession) -> None:
        """Do what is due after a step, unless it is time to stop, or would be before that ended."""
        step = session.step
        if (why := self.team.first_does(self.saver.look)) is not None:
            checkpoint.warn(f"{why} Saving step {step:,} while training waits.")
            self._save(session, background=False)
        elif self._save_due(step) and not self._too_late_for(self.stop.save_s):
            self._save(session, background=self.config.background_save)
        if (step == 1 or self._due(step, self.config.eval_every_steps)) and not self._too_late_for(self.eval_s):
            self._evaluate(session)
        if self._due(step, self.config.sample_every_steps) and not self._too_late_for(self.sample_s):
            self._sample(session)

    def _save_due(self, step: int) -> bool:
        """By steps, or by the time since the last save or the start of the training, on the first rank's clock."""
        if self._due(step, self.config.save_every_steps):
            return True
        wait_s = 60 * self.config.save_every_minutes
        return wait_s > 0 and self.team.first_does(lambda: time.monotonic() - self.last_save >= wait_s)

    def _too_late_for(self, seconds: float) -> bool:
        """Whether to stop rather than begin what took so long before."""
        if not self.stop.should_stop() and not self.stop.has_time_for(seconds):
            self.stop.stop("deadline")
        return self.stop.should_stop()

    def _check_finite(self, result: StepResult) -> None:
        self.skips = self.skips + 1 if result.skipped else 0
        if self.skips > SKIPS_ALLOWED:
            config = shlex.quote(str(self.submission.run_dir / "config.toml"))
            which = "--loss" if checkpoint.steps_in(self.folder) else "--sequence 0"  # losses take weights
            raise TrainingError(
                f"step {result.step:,}: loss {result.loss}, gradient norm {result.grad_norm}: not finite, "
                f"{self.skips} times in a row; the weights were left as they were before these steps, whose documents "
                f"are told by: rqwen3 --profile {config} trace --step {result.step} {which}"
            )
        if result.skipped:
            checkpoint.warn(f"step {result.step:,}: loss {result.loss} or its gradient is not finite; update skipped.")

    def _log(self, session: TrainSession, result: StepResult) -> None:
        self.pace.add(self.config.tokens_per_step, result)
        step = result.step
        if step != 1 and not result.skipped and not self._due(step, self.config.log_every_steps):
            return
        tokens_per_s = self.pace.tokens_per_s()
        flops = self.run_config.model.flops_per_token(self.config.seq_len)
        self.log.train(
            {
                "step": step,
                "loss": result.loss,
                "learning_rate": result.learning_rate,
                "grad_norm": result.grad_norm,
                "tokens": session.data_offset,
                "tokens_per_s": tokens_per_s,
                "mfu": metrics.model_flops_utilisation(tokens_per_s / self.team.size, flops, session.device),
                "mfu_convention": metrics.MFU_CONVENTION,
                "memory_gib": metrics.peak_memory_gib(session.device),
                "data_wait_s": self.pace.data_wait_s,
                **({"logit_std": session.start_logit_std} if step == 1 else {}),
                **({"skipped": True} if result.skipped else {}),
            }
        )
        eta_s = self.pace.mean_step_s() * (self.config.max_steps - step)
        left_s = self.stop.seconds_left()
        left = f"  this submission {clock(max(0.0, left_s))} more" if math.isfinite(left_s) else ""
        say(
            f"step {step:>6,}/{self.config.max_steps:,}  loss {result.loss:.4f}  lr {result.learning_rate:.2e}  "
            f"grad {result.grad_norm:.2f}  {tokens_per_s:,.0f} tokens/s  ETA {clock(eta_s)}{left}"
        )
        self.pace.begin_interval()

    def _save(self, session: TrainSession, *, background: bool) -> None:
        """Save the state as it stands; the weights' distribution goes on record with it."""
        if not self.team.first_does(self.lock.still_held):
            raise LockHeldError(
                f"{self.lock.path}: the lock was removed or taken over; not saving beside another trainer."
            )
        began = self.last_save = time.monotonic()
        phases.enter("snapshot", session.step, synchronous=not background)
        sidecar = {
            **self.provenance,
            **session.sidecar(),
            "submission": self.submission.attempt.submission,
            "attempt": self.submission.attempt.attempt,
            "created": metrics.now(),
        }
        self.log.weights(session.step, session.model)
        state = session.state()
        self.team.first_does(lambda: self.saver.save(state, sidecar, began=began, background=background))
        phases.enter("train", session.step)

    def _saved(self, report: SaveReport) -> None:
        self.stop.save_s = max(self.stop.save_s, report.seconds)
        self.log.save(report.record())
        say(str(report))

    def _evaluate(self, session: TrainSession) -> None:
        phases.enter("evaluation", session.step)
        began = time.monotonic()
        scores = dry_step.evaluate(session, self.streams, self.stop.should_stop)
        if scores is None:
            return
        self.eval_s = max(self.eval_s, time.monotonic() - began)
        if not scores:
            return
        self.log.heldout(session.step, scores)
        total = scores["all"]
        say(heldout_line(session.step, total))

    def _sample(self, session: TrainSession) -> None:
        if self.stop.should_stop():
            return
        phases.enter("sampling", session.step)
        began, prompt = time.monotonic(), self.config.sample_prompt
        sampling = Sampling(new_tokens=self.config.sample_new_tokens)
        with session.shared.gathered():
            text = self.team.first_does(
                lambda: continue_text(session.model, self.tokenizer, prompt, sampling, self.stop.noticed)
            )
        if not self.stop.should_stop():  # else it may be cut short
            self.sample_s = max(self.sample_s, time.monotonic() - began)
            self.log.sample(session.step, prompt, text)

    def _finish(self, session: TrainSession, reason: str) -> str:
        """Save what is not saved, and name the final checkpoint once nothing is left to do."""
        if (why := self.team.first_does(self.saver.wait)) is not None:
            checkpoint.warn(f"{why} Saving step {session.step:,} anew.")
        if session.step > self.team.first_does(lambda: self.saver.saved_step):
            self._save(session, background=False)
        if reason != "finished":
            return reason
        self._make_up(session)
        evaluated = not self.streams or self.log.has_heldout(session.step)
        if not evaluated or not self.log.has_sample(session.step):
            return str(self.stop.reason)
        phases.enter("final", session.step)
        self.team.first_does(self._name_final)
        return "finished"

    def _name_final(self) -> None:
        if self.saver.saved is not None:
            self.saver.saved = checkpoint.save_final(self.saver.saved)

    def _record(self, reason: str, exit_code: int, error: str | None) -> None:
        to_step = self.session.step if self.session else self.from_step
        unverified = 0 if self.session else max(checkpoint.steps_in(self.folder), default=0)
        saved = self.saver.saved
        saved_step = saved.step if saved else unverified
        record = {
            "submission": self.submission.attempt.submission,
            "attempt": self.submission.attempt.attempt,
            "token": self.lock.record["token"],
            **extent(self.from_step, to_step, saved_step, self.config.tokens_per_step, to_step),
            "stop_reason": reason,
            "exit_code": exit_code,
            "seconds": time.monotonic() - self.began,
            **(getattr(self, "provenance", None) or metrics.bare_provenance()),
            "started": self.lock.record["started"],
            "ended": metrics.now(),
            "checkpoint": saved.summary() if saved else None,
            "error": error,
        }
        try:
            self.log.ledger(record)
        except OSError as unwritten:
            if error is None:
                reason, exit_code, error = failure_reason(unwritten), exit_code_of(unwritten), str(unwritten)
            self.lock.last_words(stop_reason=reason, exit_code=exit_code, error=error.strip().splitlines()[-1][:500])
            raise
        self.unrecorded = False

    def _settle(self) -> None:
        """Write the records that killed trainers could not write, which the lock stands for until then."""
        if self.lock.predecessors:
            kept = self.submission.run_dir / "config.toml"  # theirs: the one given may yet be refused
            config = load_run_config(kept).training if kept.exists() else self.config
            settle(self.submission.run_dir, self.lock.predecessors, config)
            self.lock.update(predecessors=[])
