"""Dagster's face: thin assets, each of which resolves paths, calls one pure function and reports.

Nothing here holds a rule of the corpus or of training. Modules are imported by `definitions` in the
order the data flows; bodies import the heavy parts themselves, so that loading stays quick.
"""
