"""What tests of this package and of its users need, shipped with it.

Owns: named points in the running code (`points`, `markers`), media that fail by a plan (`faults`, `faulty_gateway`),
a card in one thread (`cards`), a gateway in a process (`processes`) and a client without manners (`peer`).
Must not know: any test.
"""
