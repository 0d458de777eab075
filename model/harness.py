"""Our model as a language model of lm-evaluation-harness, and the cloze questions as a task of it.

The harness asks for log-likelihoods; it gets them from `model.likelihood`. The task's configuration
is made here in code and its data handed over in memory, so nothing is fetched and nothing cached.
Importing this module costs some ten seconds, as the harness imports `datasets` and transformers'
relatives; the scoring itself costs what `model.likelihood` does.
"""

import logging
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import datasets
from lm_eval import utils
from lm_eval.api.model import TemplateLM
from lm_eval.api.task import ConfigurableTask
from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager
from tokenizers import Tokenizer

from model.generate import Sampling, generate
from model.likelihood import DELIMITER, ClozeItem, finished_scores, log_likelihoods
from model.rqwen3 import RQwen3

TASK = "heldout_cloze"


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
    results = simple_evaluate(
        model=wrapped,
        tasks=[cloze_task(items)],
        task_manager=TaskManager(include_defaults=False),
        log_samples=False,
    )
    measured = (results or {}).get("results", {})[TASK]
    scores: dict[str, float | None] = {}
    for name in ("acc", "acc_norm"):
        for key in (name, f"{name}_stderr"):
            value = measured.get(f"{key},none")
            scores[key] = float(value) if isinstance(value, int | float) else None
    return finished_scores(scores, items, wrapped.logs)
