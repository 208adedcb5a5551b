"""A card that is full and stays so under a flood of puts.

Owns: nothing itself. Must not know: vLLM. `python -m soak` runs it.
"""
