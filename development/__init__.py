"""What the sessions of noxfile.py are made of: places, environments and results.

Owns: nothing by itself. Must not know: what any session looks for. Run from the repository, never installed.
"""
