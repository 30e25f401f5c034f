from hypothesis import settings

settings.register_profile("halve", derandomize=True, deadline=None, max_examples=40)
settings.load_profile("halve")
