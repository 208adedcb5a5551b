"""Several real engines on one gateway under load, of which one is killed every few seconds.

`python -m engines --help`; `docs/reliability.md` says what it proves.
"""
