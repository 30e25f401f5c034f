import os

# Tiny tensors gain nothing from threads, and threads that spin beside another busy process cost minutes. Set before
# torch is imported, and inherited by the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from hypothesis import settings

settings.register_profile("halve", derandomize=True, deadline=None, max_examples=40)
settings.load_profile("halve")
