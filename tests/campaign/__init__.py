"""The fault campaign: real engines under a stream of requests, while everything beneath them fails.

`python -m campaign --help`; `docs/reliability.md` says what it proves.
"""
