"""Kill the trainer again and again, in every phase, and have another program judge what is left.

    python -m bench.torture [--kills 204] [--folder DIR]

A life of the trainer is started, followed through its phase file into the phase whose turn it is, and
after a random part of that phase stopped (SIGSTOP), looked at, and, if it is still there, killed: by
SIGKILL, SIGTERM, SIGUSR1 or a pair of signals. When a run finishes, the next round begins a new one.
One life in eight is the real command line in a new interpreter; the others are forked from this
process, which has imported torch already, since that import is most of a life. The last line is the
verdict of `bench/torture_verdict.py`, which sees only the files. Takes some five minutes.
"""

import argparse
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from bench.torture_life import Life
from bench.torture_run import write_config, write_corpus

SAVE_PHASES = ("snapshot", "writing", "hashing", "rename", "sidecar", "prune")
PHASES = (
    *("start_up", "dry_step", "micro_batch", "optimizer_step", "evaluation", "sampling"),
    *(f"{kind}_{phase}" for kind in ("background", "synchronous") for phase in SAVE_PHASES),
)
ONCE_A_LIFE = frozenset(("start_up", "dry_step", "compile"))
SIGNALS = (
    ("SIGKILL",),
    ("SIGTERM",),
    ("SIGUSR1",),
    ("SIGUSR1", "SIGTERM"),
    ("SIGKILL",),
    ("SIGTERM", "SIGTERM"),
    ("SIGUSR1", "SIGKILL"),
)
"""Taken in turn; the second of a pair comes up to `SECOND_AFTER_S` later."""
SECOND_AFTER_S = 0.2
COMPILE_KILLS = 6
COLD_ONE_IN = 8
LIVES_PER_KILL = 40
"""Lives that may miss one phase before the campaign gives up."""
CACHE = "TORCHINDUCTOR_CACHE_DIR"
VERDICT = Path(__file__).with_name("torture_verdict.py")


@dataclass(kw_only=True)
class Campaign:
    """Where it stands."""

    folder: Path
    """Everything is written here."""
    draw: random.Random
    """All that is left to chance."""
    compiled: bool = False
    """The trainer compiles its blocks."""
    rounds: int = 0
    """Runs begun."""
    lives: int = 0
    """Trainers started."""
    kills: int = 0
    """Lives that were struck."""
    typical_s: dict[str, float] = field(default_factory=dict)
    """How long each phase takes, for the random part of it."""

    def __post_init__(self) -> None:
        self.manifest = write_corpus(self.folder / "corpus")
        command = [sys.executable, str(VERDICT), str(self.folder), "--watch"]
        self.watcher = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.new_round()

    def new_round(self) -> None:
        """Begin a run anew."""
        self.rounds += 1
        self.run = f"round-{self.rounds:02d}" + ("-compiled" if self.compiled else "")

    def life(self, run: str, config: Path, *, cold: bool) -> Life:
        """Start a trainer."""
        self.lives += 1
        arguments = [
            *("--config", str(config), "--manifest", str(self.manifest), "--run-dir", str(self.folder / run)),
            *("--submission", str(self.lives), "--attempt", "1", "--phases", str(self.folder / f"{run}.phases")),
        ]
        return Life(arguments, self.folder / f"{run}.phases", self.folder / f"{run}.log", self.typical_s, cold=cold)

    def config(self, **choices: bool | int) -> Path:
        """A configuration file with these choices."""
        return write_config(self.folder / "config.toml", compile_on_cpu=self.compiled, **choices)  # pyright: ignore

    def straight(self) -> None:
        """The undisturbed run."""
        life = self.life(
            "straight-compiled" if self.compiled else "straight", self.config(background_save=True), cold=True
        )
        if (code := life.wait_for_end(600)) != 0:
            raise SystemExit(f"the straight run failed with {code}; see {self.folder}/straight*.log")

    def strike(self, phase: str, signals: tuple[str, ...], *, cold: bool) -> None:
        """Kill one life in a phase; lives that end before count for nothing but their progress."""
        for _ in range(LIVES_PER_KILL):
            synchronous = phase.startswith("synchronous_")
            at_a_stop = synchronous and self.draw.random() < 0.5
            choices: dict[str, bool | int] = {"background_save": at_a_stop or not synchronous}
            if phase == "dry_step":  # another shape of evaluation is like other hardware: it is tried anew
                choices["eval_max_tokens"] = 601 + self.lives
            life = self.life(self.run, self.config(**choices), cold=cold)
            sent: list[str] = []
            if at_a_stop and life.reach("micro_batch", self.draw.uniform(0, 1), occurrence=self.draw.randint(2, 12)):
                sent.append(self.draw.choice(("SIGTERM", "SIGUSR1")))
                life.send(sent[-1])
            once = at_a_stop or phase in ONCE_A_LIFE
            hit = life.reach(phase, self.draw.uniform(0, 1), occurrence=1 if once else self.draw.choice((1, 1, 2)))
            if hit:
                life.send(signals[0])
                if len(signals) == 2:
                    life.let_run(self.draw.uniform(0, SECOND_AFTER_S))
                    life.send(signals[1])
            code = life.wait_for_end(300)
            if hit:
                self.record(life, phase, [*sent, *signals], code, cold=cold)
            elif code not in (0, 75):
                raise SystemExit(f"a life that nobody killed ended with {code}; see {self.folder / self.run}.log")
            if code == 0:
                self.new_round()
            if hit:
                return
        raise SystemExit(f"{LIVES_PER_KILL} lives could not be killed in phase {phase}")

    def record(self, life: Life, phase: str, signals: list[str], code: int, *, cold: bool) -> None:
        """Put a kill on record, and let the watcher look at what it left."""
        self.kills += 1
        kill = {"run": self.run, "pid": life.pid, "phase": phase, "signals": signals, "exit_code": code, "cold": cold}
        with (self.folder / "kills.jsonl").open("a") as file:
            file.write(json.dumps(kill) + "\n")
        assert self.watcher.stdin is not None
        assert self.watcher.stdout is not None
        self.watcher.stdin.write(self.run + "\n")
        self.watcher.stdin.flush()
        state = json.loads(self.watcher.stdout.readline())
        print(
            f"kill {self.kills:>3} {self.run} {phase:<22} {'+'.join(signals):<17} exit {code:>3}, "
            f"{'new' if cold else 'forked'}; newest checkpoint {state['newest']}{' WRONG ' * bool(state['wrong'])}",
            flush=True,
        )

    def finish(self) -> None:
        """Let the run that is under way come to its end."""
        if not (self.folder / self.run).exists():
            return
        code = self.life(self.run, self.config(background_save=True), cold=True).wait_for_end(600)
        if code != 0:
            raise SystemExit(f"{self.run}: the last life ended with {code}; see {self.folder / self.run}.log")

    def close(self) -> int:
        """The verdict; returns its exit code."""
        assert self.watcher.stdin is not None
        self.watcher.stdin.close()
        self.watcher.wait()
        return subprocess.run([sys.executable, str(VERDICT), str(self.folder)], check=False).returncode


def torture(folder: Path, kills: int, compile_kills: int, seed: int) -> int:
    """Run a campaign in an empty folder; returns the verdict's exit code."""
    for name in ("SLURM_CPUS_PER_TASK", "OMP_NUM_THREADS"):
        os.environ[name] = "1"
    os.environ[CACHE] = str(folder / "inductor")
    began, campaign = time.monotonic(), Campaign(folder=folder, draw=random.Random(seed))
    try:
        campaign.straight()
        signals = itertools.cycle(SIGNALS)
        phases = [phase for phase, _ in zip(itertools.cycle(PHASES), range(kills - compile_kills), strict=False)]
        campaign.draw.shuffle(phases)
        for number, phase in enumerate(phases):
            campaign.strike(phase, next(signals), cold=number % COLD_ONE_IN == 0)
        campaign.finish()
        if compile_kills:
            campaign.compiled = True
            campaign.new_round()
            campaign.straight()
            for number in range(compile_kills):  # the first from nothing, the others from what was compiled before
                os.environ[CACHE] = str(folder / ("inductor" if number else "inductor-empty"))
                campaign.strike("compile", next(signals), cold=number % 2 == 0)
            campaign.finish()
        print(f"{campaign.lives} lives, {campaign.rounds} runs, {time.monotonic() - began:.0f} s", flush=True)
    finally:
        code = campaign.close()
    return code


def main() -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description="Kill the trainer in every phase, and judge what is left.")
    parser.add_argument("--kills", type=int, default=204)
    parser.add_argument("--compile-kills", type=int, default=COMPILE_KILLS, help="of these, while it compiles")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="keep everything here; else it is removed after a good end")
    options = parser.parse_args()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    folder = options.folder or Path(tempfile.mkdtemp(prefix="torture-"))
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise SystemExit(f"{folder}: not empty. Name a new folder.")
    code = torture(folder, options.kills, options.compile_kills, options.seed)
    if code == 0 and options.folder is None:
        shutil.rmtree(folder)
    return code


if __name__ == "__main__":
    sys.exit(main())
