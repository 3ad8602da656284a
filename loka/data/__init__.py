"""Click data to try LoKA on: a synthetic stream with a known best loss, MovieLens-1M, Criteo.

``loka.data.dataset.open_dataset(name)`` opens one. Adding a data set is adding a file here that registers it.
"""
