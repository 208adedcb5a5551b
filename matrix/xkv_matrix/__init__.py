"""The matrix: which vLLM releases there are, what each one's contract is, and whether our side fits it.

Owns: the rows, the wheels' sources, the extracted contracts and the checks on them. Run from the repository.
Must not know: how the product works; it reads our classes' signatures and the compat package's tables only.
"""
