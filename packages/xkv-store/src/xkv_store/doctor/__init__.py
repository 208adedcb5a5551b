"""`xkv doctor`, the part that needs no engine: what is wrong with a machine, a gateway and a card.

Each check is a pure function over gathered facts; what gathers them stands beside it. Another package may put a
`doctor` of its own in the command's place, and begins with `examine` (`examination`). Must not know: vLLM.
"""
