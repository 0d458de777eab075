"""What the report compares with: figures that others published, none of them measured here.

Losses of models with other tokenizers count other tokens, so nats per token are only loosely
comparable; bits per byte would be, but were not published for these.
"""

from typing import Any

from rqwen3_pipeline.evidence.scores import judge

CAVEAT = (
    "The published losses are nats per token on other text, and except for RQwen3's own under other "
    "tokenizers, whose tokens hold more or fewer bytes: they are only loosely comparable. "
    "Ours is comparable with RQwen3's only at the production profile, with the same tokenizer."
)

MODELS: tuple[dict[str, Any], ...] = (
    {"model": "GPT-2 large 774M", "loss": 2.85, "about": True, "tokens": "WebText", "source": "RQwen3's page"},
    {"model": "Pythia-410M", "loss": 2.85, "about": True, "tokens": "300 B", "source": "RQwen3's page"},
    {"model": "Pythia-1B", "loss": 2.60, "about": True, "tokens": "300 B", "source": "RQwen3's page"},
    {"model": "Qwen3-0.6B base", "loss": 2.4, "about": True, "tokens": "“~5 T” there", "source": "RQwen3's page"},
    {"model": "RQwen3 751M (2026)", "loss": 2.5186, "about": False, "tokens": "13.1 B", "source": "its author"},
)
"""Loss in nats per token; `about` where the source itself rounds."""

KNOWN_RUN: tuple[dict[str, str], ...] = (
    {"what": "submissions", "known": "10, nine of them killed by the clock without a save"},
    {"what": "start loss", "known": "11.88 (as logged at step 10)"},
    {"what": "end loss", "known": "2.5186 (perplexity 12.41)"},
    {"what": "held-out loss", "known": "never measured"},
    {"what": "windows", "known": "a third never read, a quarter read twice or more"},
    {"what": "tokens a second", "known": "about 15,170 (5,000 steps a day)"},
    {"what": "SHA-256 of the result", "known": "pending for months"},
)

SCORES: tuple[dict[str, Any], ...] = tuple(
    {"task": task, "score": score, "stderr": stderr, "chance": 0.25, **judge(score, stderr, 0.25)}
    for task, score, stderr in (
        ("ARC-Challenge", 0.2432, 0.0125),
        ("HellaSwag", 0.3147, 0.0046),
        ("MMLU", 0.2532, 0.0037),
    )
)
"""RQwen3-751M-Base, 0-shot, lm-eval 0.4.13, bf16; four choices each."""
