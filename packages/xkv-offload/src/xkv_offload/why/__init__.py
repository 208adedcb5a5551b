"""`xkv why` with an engine: a prompt's tokens, and the configuration of the engine that misses it.

What needs no engine is the core's (`xkv_store.inquiry`, `xkv_store.commands_why`).
Must not know: vLLM's version, how hashes are made (compat asks the installed vLLM).
"""
