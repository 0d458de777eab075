"""The evidence report: what was made, from which files, and what is still missing.

Pure: nothing here imports Dagster or torch, and nothing is measured here. Every figure is read from
a file of the run root, or follows from such figures by arithmetic that the report spells out, and
carries the path of the file that backs it. A figure whose file is not there is named as missing,
with the command that makes it.
"""
