"""Many ranks of one engine that load the same objects, each in its own order and time.

Owns: nothing itself. Must not know: vLLM. `python -m ranks` runs it.
"""
