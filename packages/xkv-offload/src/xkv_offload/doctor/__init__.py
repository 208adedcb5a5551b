"""`xkv doctor` with an engine: vLLM, its environment and configuration, and what a model's chunks come to.

What needs no engine is `xkv_store.doctor`'s. Each check is a pure function over gathered facts; what gathers them
stands beside it. Must not know: vLLM's version, or how a feature is found (compat).
"""
