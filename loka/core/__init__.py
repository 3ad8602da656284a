"""The words of LoKA as types. Nothing here imports torch at module level."""
