import os

# Before torch loads: threads that spin while they wait make it several times slower on busy cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
