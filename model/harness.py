"""Our model as a language model of lm-evaluation-harness; the cloze questions and the benchmarks as its tasks.

The harness asks for log-likelihoods; it gets them from `model.likelihood`, or from transformers where
a folder is to be scored that way. A benchmark's prompts, targets and metrics are the harness' own;
only its rows are handed over in memory, so nothing is fetched and nothing cached.
Importing this module costs some ten seconds, as the harness imports `datasets` and transformers'
relatives; the scoring itself costs what `model.likelihood` does.
"""

import logging
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import datasets
import lm_eval.tasks
from lm_eval import utils
from lm_eval.api.model import TemplateLM
from lm_eval.api.task import ConfigurableTask
from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml
from tokenizers import Tokenizer

from model.benchmarks import Benchmark, Row
from model.generate import Sampling, generate
from model.likelihood import DELIMITER, ClozeItem, finished_scores, log_likelihoods
from model.rqwen3 import RQwen3

TASK = "heldout_cloze"
DEFINITIONS = {
    "arc_easy": "arc/arc_easy.yaml",
    "arc_challenge": "arc/arc_challenge.yaml",
    "hellaswag": "hellaswag/hellaswag.yaml",
    "piqa": "piqa/piqa.yaml",
    "winogrande": "winogrande/default.yaml",
    "lambada_openai": "lambada/lambada_openai.yaml",
    "sciq": "sciq/sciq.yaml",
}
"""Where the harness defines each task; MMLU's subjects have a file each."""


class HarnessModel(TemplateLM):
    """RQwen3 as the harness sees it."""

    def __init__(self, model: RQwen3, tokenizer: Tokenizer, eos_id: int, batch: int) -> None:
        """Wrap a model.

        Args:
            model: in evaluation mode.
            tokenizer: without added tokens.
            eos_id: stands before a text that has no context.
            batch: sequences per forward pass.
        """
        super().__init__()
        self.model = model
        self.text_tokenizer = tokenizer
        self.batch = batch
        self.logs: list[float] = []
        """Every log-likelihood that was handed out."""
        self._eos_id = eos_id

    @property
    def eot_token_id(self) -> int:
        """The end-of-text id."""
        return self._eos_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Token ids of a text; special tokens are never added."""
        return self.text_tokenizer.encode(string, add_special_tokens=False).ids

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        pairs = [(context_ids, continuation_ids) for _, context_ids, continuation_ids in requests]
        results = log_likelihoods(self.model, pairs, self.batch)
        self.logs += [log for log, _ in results]
        return results

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts, each token once, with as much context as fits."""
        totals: list[float] = []
        for (text,) in (request.args for request in requests):
            windows = utils.get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.model.config.max_seq_len,
                context_len=1,
            )
            pairs = [utils.make_disjoint_window(window) for window in windows]
            totals.append(sum(log for log, _ in log_likelihoods(self.model, pairs, self.batch)))
        return totals

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """Greedy continuations, cut before the first stop text."""
        texts: list[str] = []
        for context, options in (request.args for request in requests):
            sampling = Sampling(new_tokens=int(options.get("max_gen_toks", 256)))
            ids = self.tok_encode(context)
            vocab_size = self.text_tokenizer.get_vocab_size()
            text = self.text_tokenizer.decode(generate(self.model, ids, vocab_size, self._eos_id, sampling))
            stops = options.get("until") or []
            for stop in [stops] if isinstance(stops, str) else stops:
                text = text.split(stop)[0] if stop else text
            texts.append(text)
        return texts


def cloze_task(items: Sequence[ClozeItem]) -> ConfigurableTask:
    """The questions as a multiple-choice task without examples."""
    rows = [asdict(item) | {"choices": list(item.choices)} for item in items]
    return ConfigurableTask(
        config={
            "task": TASK,
            "custom_dataset": lambda **_: datasets.DatasetDict({"test": datasets.Dataset.from_list(rows)}),
            "test_split": "test",
            "output_type": "multiple_choice",
            "doc_to_text": "context",
            "doc_to_choice": "choices",
            "doc_to_target": "gold",
            "target_delimiter": DELIMITER,
            "num_fewshot": 0,
            "metric_list": [
                {"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "acc_norm")
            ],
        }
    )


def score_cloze_with_harness(
    model: RQwen3, tokenizer: Tokenizer, items: Sequence[ClozeItem], eos_id: int, batch: int
) -> dict[str, Any]:
    """The scores of `likelihood.score_cloze`, computed by the harness."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    wrapped = HarnessModel(model, tokenizer, eos_id, batch)
    results: Any = simple_evaluate(
        model=wrapped,
        tasks=[cloze_task(items)],
        task_manager=TaskManager(include_defaults=False),
        log_samples=False,
    )
    scores = _accuracies(results["results"][TASK])
    return finished_scores(scores, [len(item.choices) for item in items], wrapped.logs)


def benchmark_task(task: Benchmark, rows: Sequence[Row]) -> ConfigurableTask:
    """The harness' own task, asked without examples over these rows; of its metrics, the accuracies."""
    definition = DEFINITIONS.get(task.name, f"mmlu/default/{task.name}.yaml")
    config = load_yaml(Path(lm_eval.tasks.__file__).parent / definition)
    for key in ("tag", "group", "fewshot_split", "fewshot_config", "training_split", "validation_split"):
        config.pop(key, None)
    data = datasets.DatasetDict({"test": datasets.Dataset.from_list(list(rows))})
    metrics = [entry for entry in config["metric_list"] if entry["metric"] in ("acc", "acc_norm")]
    return ConfigurableTask(
        config=config
        | {"custom_dataset": lambda **_: data, "test_split": "test", "num_fewshot": 0, "metric_list": metrics}
    )


def score_benchmark(model: TemplateLM, task: Benchmark, rows: Sequence[Row], limit: int | None) -> dict[str, Any]:
    """Score one benchmark.

    Args:
        model: what the harness asks.
        task: the benchmark.
        rows: its rows, all of them.
        limit: only the first so many are asked.

    Returns:
        `acc`, `acc_norm` (where the task has it), their standard errors, `n`, `chance`; null with a `reason`
        where a log-likelihood is not finite; and `task_version`, the harness' version of the task.
    """
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    results: Any = simple_evaluate(
        model=model,
        tasks=[benchmark_task(task, rows)],
        task_manager=TaskManager(include_defaults=False),
        limit=limit,
        bootstrap_iters=100,  # only says that errors are wanted: an accuracy's is computed, not resampled
        log_samples=True,
    )
    measured, samples = results["results"][task.name], results["samples"][task.name]
    logs = [float(response[0][0]) for sample in samples for response in sample["resps"]]
    scores = _accuracies(measured)
    asked = rows[: len(samples)]
    finished = finished_scores(scores, [task.choices(row) for row in asked], logs)
    return finished | {"task_version": str(results["versions"][task.name])}


def through_transformers(folder: Path, batch: int, device: str) -> TemplateLM:
    """A published folder as the harness' own backend loads it: in fp32, no token put in front."""
    from lm_eval.models import huggingface

    backend: Any = huggingface.HFLM
    return backend(pretrained=str(folder), dtype="float32", batch_size=batch, device=device, add_bos_token=False)


def _accuracies(measured: dict[str, Any]) -> dict[str, float | None]:
    """Accuracies and their errors as numbers, None where the harness has none."""
    scores: dict[str, float | None] = {}
    for name in ("acc", "acc_norm"):
        if f"{name},none" in measured:
            for key in (name, f"{name}_stderr"):
                value = measured.get(f"{key},none")
                scores[key] = float(value) if isinstance(value, int | float) else None
    return scores
