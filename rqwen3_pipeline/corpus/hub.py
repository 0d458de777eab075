"""The Hugging Face Hub, through its own client: cached, verified by the client, offline-aware.

HF_HOME, HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE mean what they mean everywhere.
"""

from pathlib import Path

from model.errors import SourceError

TOKENIZER_REPO = "Qwen/Qwen3-0.6B"
"""Any Qwen3 model's repository carries the same tokenizer.json; this is the smallest."""


def fetch_tokenizer(repo: str = TOKENIZER_REPO) -> Path:
    """Download Qwen3's tokenizer.json, or take it from the client's cache.

    Returns:
        Its path in the cache. The caller compares its hash with the pinned one.

    Raises:
        SourceError: it is in no cache and can't be downloaded; the message says how to bring it by hand.
    """
    from huggingface_hub import hf_hub_download  # pyright: ignore[reportUnknownVariableType] tqdm has no types

    try:
        return Path(hf_hub_download(repo, "tokenizer.json"))
    except Exception as error:  # the client raises a dozen types; each means that there is no file
        reason = str(error).strip().splitlines()[0]
        raise SourceError(
            f"tokenizer.json of {repo}: not in the cache, and not to be had from the Hub "
            f"({type(error).__name__}: {reason}). Name a copy of Qwen3's tokenizer.json: "
            "make demo SAMPLES=DIR TOKENIZER=FILE, or rqwen3 run --tokenizer FILE"
        ) from error
