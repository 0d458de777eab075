"""How many bytes of text each token id stands for.

A byte-level vocabulary writes every byte as one visible character, so a token's bytes are the number
of its characters. Decoding single ids instead counts 3 bytes (the replacement character) for every id
that holds part of a character, and makes bits per byte look better than they are. Each evaluation
compares the sum over a document's tokens with the size of its text. Costs one pass over the vocabulary.
"""

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, pre_tokenizers

from model.errors import CorpusError


def token_byte_lengths(tokenizer: Tokenizer) -> npt.NDArray[np.int64]:
    """Bytes of every id, int64, shape (ids,); an added token has those of its text.

    Raises:
        CorpusError: a token has a character that stands for no byte: the vocabulary is not byte-level.
    """
    alphabet = frozenset(pre_tokenizers.ByteLevel.alphabet())
    added = {number: token.content for number, token in tokenizer.get_added_tokens_decoder().items()}
    lengths_ = np.zeros(tokenizer.get_vocab_size(with_added_tokens=True), np.int64)
    for token, number in tokenizer.get_vocab(with_added_tokens=True).items():
        if number in added:
            lengths_[number] = len(added[number].encode("utf-8"))
        elif alphabet.issuperset(token):
            lengths_[number] = len(token)
        else:
            raise CorpusError(
                f"the tokenizer's token {number} is {token!r}, not written in the byte alphabet; bits per byte need a "
                "byte-level vocabulary. Use the tokenizer.json of the run root."
            )
    return lengths_
