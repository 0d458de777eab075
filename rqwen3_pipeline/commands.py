"""The commands that a person types next, in one place: the status view and the report name the same ones."""

CORPUS_BUILD = "rqwen3 corpus build"
"""Lock, fetch, filter, deduplicate, tokenize and fold the manifest; goes on where it was stopped."""
RUN = "rqwen3 run"
"""Every stage that is not done yet: the corpus, the training, export, evaluation and the report."""
