"""The parts of the model: normalisation, rotation, attention, feed-forward, and the block of them.

Shapes, as suffixes of names: B batch, T tokens, S tokens attended to (cache and new), D model width,
N query heads, K key/value heads, H head width, F inner width of the feed-forward, V vocabulary.
"""
