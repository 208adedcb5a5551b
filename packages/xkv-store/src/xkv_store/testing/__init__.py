"""What tests of this package and of its users need, shipped with it.

Owns: named points in the running code (`points`).
Must not know: any test.
"""
